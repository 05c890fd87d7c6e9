"""T9: every published number, and ours beside it where there is one, each with its status and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from vflash_analysis.results import published
from vflash_analysis.results.design import share_rows
from vflash_analysis.results.lengths import failing_lengths, length_rows
from vflash_analysis.results.objectives import FLOW_ARM
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tables import is_comparable, lossless_table, speedup_rows
from vflash_analysis.results.tidy import (
    COMPARABLE,
    MISSING,
    NOT_COMPARABLE,
    PUBLISHED_ONLY,
    TARGET_FAILS,
    Origin,
    checked,
    label,
    parse_setting,
    setting_text,
    setting_words,
    tidy,
)
from vflash_analysis.results.write import NO_VALUE, Section, Table, cell_text, places
from vflash_analysis.schemas import LENGTHS_STUDY, VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap, Interval

ITEM = "T9_beside_paper"
SAME = "the published row's"
Row = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """Which of our rows stand beside published ones: a row here for every such quantity.

    Attributes:
        theirs: keys of the published rows, as `published` gives them, and their values.
        ours: keys of our rows and their values; SAME takes the published row's value.
        near: whether our row must also be of the printed visual length, or near it (`NEAR`).
    """

    theirs: Mapping[str, str]
    ours: Mapping[str, str]
    near: bool = False

    def fits(self, row: pd.Series) -> bool:
        """Whether a published row is one of these."""
        return all(row[key] == value for key, value in self.theirs.items())


LINKS = (
    Link(
        {"source": published.PAGE, "quantity": "decode_speedup"},
        {"quantity": SAME, "method": SAME, "benchmark": SAME, "setting": ""},
    ),
    Link(
        {"source": published.PAGE, "quantity": "ar_ms_per_token", "setting": "demo clips"},
        {"quantity": SAME, "benchmark": "macro"},
    ),
    Link(
        {"source": published.PAGE, "quantity": "identical_share", "setting": "demo clips"},
        {"quantity": SAME, "method": SAME, "benchmark": "macro"},
    ),
    *(
        Link({"source": published.PAGE, "quantity": quantity}, {"quantity": SAME})
        for quantity in ("clips_per_benchmark_and_seed", "seeds")
    ),
    *(
        Link(
            {"source": f"sparrow table {number}", "quantity": "accepted_length"},
            {"quantity": SAME, "setting": SAME, "benchmark": "macro"},
        )
        for number in (1, 7)
    ),
    *(
        Link(
            {"source": source, "quantity": quantity, "method": "sparrow"},
            {"quantity": SAME, "benchmark": SAME, "method": "tree60"},
            near=True,
        )
        for source, quantities in (
            ("sparrow table 4", ("accepted_length", "decode_speedup")),
            ("sparrow table 5", published.BREAKDOWN),
        )
        for quantity in quantities
    ),
)
"""The first link that fits a published row counts; the rows of ours that it names stand beside it.

A macro mean of ours stands beside suites that we do not have (SPARROW's tables 1 and 7 are of
images), which the row then says. Of several near visual lengths the nearest one stands beside a
printed one, of two equally near the shorter, and so for each of our machines."""
NEAR = 0.1
"""Share of a printed visual length by which ours may differ from it and stand beside it; the nearest
does, see LINKS."""
_SECTIONS = (  # title, sources of its rows
    ("speed-up on LLaVA-OneVision-7B, and the page's protocol", (published.PAGE,)),
    ("other targets", published.HEADLINE_SOURCES),
    ("SPARROW table 1: visual input in training", ("sparrow table 1",)),
    ("SPARROW table 4: visual length", ("sparrow table 4",)),
    ("SPARROW table 5: where the time goes", ("sparrow table 5",)),
    ("SPARROW table 6: its components", ("sparrow table 6",)),
    ("SPARROW table 7: visual input at inference", ("sparrow table 7",)),
    ("what a device's maker prints", (published.DEVICE_SOURCE,)),
)


def _our_rows(records: Records, boot: Bootstrap) -> list[Row]:
    """Our side: speed-ups and AR time as in T1, equality as in T4; missing kept for our methods."""
    page_methods = tuple(dict.fromkeys(published.speedups()["method"]))
    ours = [
        row
        for row in speedup_rows(ITEM, records, boot, page_methods, (FLOW_ARM,))
        if row["quantity"] in ("decode_speedup", "ar_ms_per_token")
        and (row["method"] in ("ar", *VFLASH_METHODS) or row["status"] != MISSING)
    ]
    shares = lossless_table(records, boot).frame
    kept = shares.loc[
        (shares["quantity"] == "identical_share")
        & shares["method"].isin(VFLASH_METHODS)
        & shares["objective"].isin(("", FLOW_ARM))
        & (shares["setting"] == "")
    ]
    ours += [
        {str(k): v for k, v in row.items()} for row in kept.assign(item=ITEM).to_dict("records")
    ]
    return [*ours, *_protocol_rows(records)]


def _study_rows(records: Records, boot: Bootstrap) -> list[Row]:
    """Ours for SPARROW's tables, each keyed as what it is.

    For tables 1 and 7 T6's means over the suites; for 4 and 5 Tree-60 at every length, of the one
    suite that they are of, where T5's own cells are means over the suites. A length at which the
    target fails in T5 fails here.
    """
    shares = [
        row
        for row in share_rows(ITEM, records, boot)
        if (row["quantity"], row["benchmark"]) == ("accepted_length", "macro")
    ]
    study = records.study(LENGTHS_STUDY)
    of_suite = study.generations["benchmark"] == published.LENGTHS_SUITE
    narrowed = replace(study, generations=study.generations.loc[of_suite])
    fails = failing_lengths(study)
    lengths = []
    for row in length_rows(replace(records, studies={LENGTHS_STUDY: narrowed}), boot):
        key = parse_setting(row["setting"])
        plain = set(key) == {"frames", "visual_tokens"}
        if row["method"] == "tree60" and plain and row["status"] != MISSING:
            failed = (row["device"], int(key["frames"])) in fails
            status = TARGET_FAILS if failed else study.status
            lengths.append(row | {"item": ITEM, "status": status})
    return [*shares, *lengths]


def _protocol_rows(records: Records) -> list[Row]:
    """Sample seeds, and the clips that a suite and seed have at most."""
    decoded = records.generations.loc[~records.generations["warmup"].astype(bool)]
    if decoded.empty:
        return []
    origin = Origin(ITEM, "", records.status, records.source)
    clips = decoded.groupby(["benchmark", "sample_seed"])["clip_id"].nunique().max()
    seeds = decoded["sample_seed"].nunique()
    return [
        origin.row("clips_per_benchmark_and_seed", float(clips), "clips"),
        origin.row("seeds", float(seeds), "seeds"),
    ]


def _link_of(row: pd.Series) -> Link | None:
    return next((link for link in LINKS if link.fits(row)), None)


def _beside(row: pd.Series, ours: pd.DataFrame) -> pd.Index:
    """Of our rows those that stand beside a published one: one for each of our machines, or none."""
    link = _link_of(row)
    if link is None:
        return ours.index[:0]
    found = ours.loc[ours["status"] != MISSING]
    for key, value in link.ours.items():
        found = found.loc[found[key] == (row[key] if value == SAME else value)]
    if link.near:
        found = _nearest(found, int(parse_setting(row["setting"])["visual_tokens"]))
    return found.index


def _nearest(rows: pd.DataFrame, printed: int) -> pd.DataFrame:
    """Of each machine the row of the visual length nearest to a printed one, if it is near.

    Of two that are equally near the shorter; a row without a visual length is never near.
    """
    tokens = [parse_setting(text).get("visual_tokens", "nan") for text in rows["setting"]]
    lengths = pd.Series(tokens, rows.index, dtype=float)
    rows = rows.assign(length=lengths, apart=(lengths - printed).abs())
    near = rows.loc[rows["apart"] <= NEAR * printed].sort_values(["apart", "length"], kind="stable")
    return near.loc[~near.duplicated("device")].sort_index()


def _difference(ours: pd.Series, theirs: pd.Series) -> Interval:
    """Ours minus theirs. Of a printed range, from its upper to its lower end."""
    value = float(ours["value"])
    if math.isnan(float(theirs["value"])):
        return Interval(math.nan, value - float(theirs["high"]), value - float(theirs["low"]), 0)
    low, high = (float(ours[end]) - float(theirs["value"]) for end in ("low", "high"))
    return Interval(value - float(theirs["value"]), low, high, 0)


def _difference_row(row: pd.Series, our: pd.Series) -> Row:
    """Ours minus a published number, keyed as ours; its setting says which one it is minus."""
    keys = {key: row[key] for key in ("method", "benchmark") if row[key] not in ("", our[key])}
    minus = setting_text(of=row["quantity"], minus=row["source"], **keys)
    status = TARGET_FAILS if our["status"] == TARGET_FAILS else str(row["status"])
    one = Origin(ITEM, str(our["device"]), status, str(our["source"])).row(
        "difference", _difference(our, row), row["unit"], benchmark=our["benchmark"],
        method=our["method"], objective=our["objective"],
        setting=";".join(filter(None, (minus, row["setting"]))),
    )  # fmt: skip
    return {**one, "status": status}


def _standing(row: pd.Series, beside: bool, comparable: bool) -> str:
    """The status of a published number: whether ours stands beside it, and whether they compare."""
    if not beside:
        return PUBLISHED_ONLY
    same = comparable and row["device"] == published.PAGE_DEVICE
    return COMPARABLE if same else NOT_COMPARABLE


def _why(row: pd.Series, our: pd.Series | None) -> str:
    """The sentence that says why a published number has this status, and what ours is of."""
    if math.isnan(float(row["value"])) and math.isnan(float(row["low"])):
        if row["unit"] == "":
            return "A name, not a number."
        return "Not reported there."
    if row["setting"].startswith("mean of"):
        return "Recomputed from the printed suites, to check the printed average."
    if our is not None:
        if row["status"] == COMPARABLE:
            return "The same target on the same hardware."
        own = [label(our[key]) for key in ("method", "benchmark") if our[key] != row[key]]
        if our["setting"] not in ("", row["setting"]):
            own.append(setting_words(our["setting"]))
        return f"Ours is {', '.join([*own, 'another target, machine or size of run'])}."
    link = _link_of(row)
    if link is not None:
        if link.ours.get("method") == SAME and row["method"] not in VFLASH_METHODS:
            return "Its method is not run here."
        return "Nothing of ours was decoded for it."
    if row["source"] == published.PAGE:
        return "A setting or an example of the page, not a result."
    if row["source"] == published.DEVICE_SOURCE:
        return "What the cost model (T10) is computed from."
    return "Another system's number; nothing of ours is measured in that setting."


def beside_paper_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T9, from records and the published numbers; without any records the published ones alone.

    The frame holds the published rows, ours (of the studies those that stand beside one), and for
    each pair a row `difference` (`_difference_row`).
    """
    comparable = is_comparable(records)
    own, studied = _our_rows(records, boot), _study_rows(records, boot)
    ours = tidy([*own, *studied])
    theirs = tidy(
        [
            *published.speedup_rows(ITEM, comparable),
            *published.recomputed_rows(ITEM),
            *published.protocol_rows(ITEM),
            *published.setting_rows(ITEM),
            *published.headline_rows(ITEM),
            *published.sparrow_rows(ITEM),
            *published.device_rows(ITEM),
        ]
    )
    pairs = [_beside(row, ours) for _, row in theirs.iterrows()]
    theirs["status"] = [
        _standing(row, len(found) > 0, comparable)
        for found, (_, row) in zip(pairs, theirs.iterrows(), strict=True)
    ]
    shown = {number for found in pairs for number in found}
    ours = ours.loc[(ours.index < len(own)) | ours.index.isin(shown)]
    lettered, where = places(pd.concat([ours, theirs]))
    ours, theirs = lettered.iloc[: len(ours)], lettered.iloc[len(ours) :]
    differences: list[Row] = []
    sections = []
    for title, sources in _SECTIONS:
        rows = theirs.loc[theirs["source"].isin(sources)]
        found = [ours.loc[pairs[number]] for number in rows.index]
        sections.append(_section(title, rows, found, differences))
    both = pd.concat([ours, theirs], ignore_index=True).drop(columns="where")
    frame = checked(pd.concat([both, tidy(differences)], ignore_index=True))
    fails = " † the target fails at that visual length (T5)."
    caption = (
        "Every number of data/published, and ours beside it where there is one. Difference: ours "
        "minus the published number, with our interval; a published number has none. Status: "
        "comparable, not comparable (another target or hardware), published only (nothing of ours "
        "beside it). Macro: mean over the five suites. Parentheses: n."
        f"{fails if (ours['status'] == TARGET_FAILS).any() else ''} {boot.caption()} {where}"
    )
    return Table(ITEM, "T9 Ours beside the paper", caption, frame, tuple(sections))


def _section(
    title: str, theirs: pd.DataFrame, pairs: list[pd.DataFrame], differences: list[Row]
) -> Section:
    """A grid of a source's rows, without columns that it leaves empty.

    Where all rows have one status for one reason, the title tells them. Each difference shown is
    added to `differences`.

    Args:
        title: of the section.
        theirs: published rows.
        pairs: for each of them, ours beside it.
        differences: gets tidy rows.
    """
    names: tuple[str, ...] = ("method", "quantity", "suite", "setting", "published", "ours", "difference", "where",
             "status", "why")  # fmt: skip
    body: list[tuple[str, ...]] = []
    for beside, (_, row) in zip(pairs, theirs.iterrows(), strict=True):
        ours_or_none: list[pd.Series | None] = [one for _, one in beside.iterrows()]
        for our in ours_or_none or [None]:
            gap = NO_VALUE
            if our is not None and row["value":"high"].notna().any():
                one = _difference_row(row, our)
                differences.append(one)
                gap = _marked(pd.Series({**one, "n": pd.NA}), cell_text)
            spots = [row["where"]] if our is None else [our["where"], row["where"]]
            body.append(
                (
                    label(row["method"]), _quantity(row), label(row["benchmark"]),
                    setting_words(row["setting"]), _printed(row),
                    NO_VALUE if our is None else _marked(our, _printed), gap,
                    ", ".join(spot for spot in spots if spot), row["status"], _why(row, our),
                )
            )  # fmt: skip
    if len(body) > 1 and len({cells[-2:] for cells in body}) == 1:
        title = f"{title} ({body[0][-2]}). {body[0][-1]}"
        names, body = names[:-2], [cells[:-2] for cells in body]
    kept = [i for i, _ in enumerate(names) if any(cells[i] not in ("", NO_VALUE) for cells in body)]
    return Section(
        title,
        tuple(names[i] for i in kept),
        tuple(tuple(cells[i] for i in kept) for cells in body),
        sum(i < names.index("published") for i in kept),
    )


def _quantity(row: pd.Series) -> str:
    """Its words, with a unit that the number does not carry."""
    unit = str(row["unit"])
    shown = unit in ("", "x", "share", "%") or unit == row["quantity"]
    return label(row["quantity"]) + ("" if shown else f" ({unit})")


def _marked(row: pd.Series, cell: Callable[[pd.Series], str]) -> str:
    """A cell of ours, with the mark of lengths at which the target fails."""
    return cell(row) + (" †" if row["status"] == TARGET_FAILS else "")


def _printed(row: pd.Series) -> str:
    """A number, as precise as it was printed where that is finer than our cells."""
    value = float(row["value"])
    if math.isnan(value) or not math.isnan(float(row["low"])):
        return cell_text(row)
    if row["quantity"] == "decode_speedup" and round(value, 2) != round(value, 4):
        return f"{value:.4g}×"
    if float(value).is_integer() and row["unit"] not in ("x", "share", "%"):
        return f"{value:,.0f}"
    return cell_text(row)
