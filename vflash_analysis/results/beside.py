"""T9: every published number, and ours beside it where there is one, each with its status and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from vflash_analysis.results import published
from vflash_analysis.results.design import share_rows
from vflash_analysis.results.lengths import length_rows
from vflash_analysis.results.objectives import FLOW_ARM
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tables import is_comparable, lossless_table, speedup_rows
from vflash_analysis.results.tidy import (
    COMPARABLE,
    MISSING,
    NOT_COMPARABLE,
    PUBLISHED_ONLY,
    Origin,
    checked,
    label,
    parse_setting,
    setting_words,
    tidy,
)
from vflash_analysis.results.write import NO_VALUE, Section, Table, cell_text, places
from vflash_analysis.schemas import VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap, Interval

ITEM = "T9_beside_paper"
SAME = "the published row's"
Row = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """Which of our rows stand beside published ones: a row here for every such quantity.

    Attributes:
        source, quantity, setting: of the published rows, as `published` gives them; any setting
            without one.
        ours: keys of our rows and their values; SAME takes the published row's value.
    """

    source: str
    quantity: str
    ours: dict[str, str]
    setting: str | None = None

    def fits(self, row: pd.Series) -> bool:
        """Whether a published row is one of these."""
        same = (self.source, self.quantity) == (row["source"], row["quantity"])
        return same and self.setting in (None, row["setting"])


LINKS = (
    Link(
        published.PAGE,
        "decode_speedup",
        {"quantity": "decode_speedup", "method": SAME, "benchmark": SAME},
    ),
    Link(
        published.PAGE,
        "ar_ms_per_token",
        {"quantity": "ar_ms_per_token", "benchmark": "macro"},
        "demo clips",
    ),
    Link(
        published.PAGE,
        "identical_share",
        {"quantity": "identical_share", "method": SAME, "benchmark": "macro"},
        "demo clips",
    ),
    Link(published.PAGE, "clips_per_benchmark_and_seed", {"quantity": SAME}),
    Link(published.PAGE, "seeds", {"quantity": SAME}),
    *(
        Link(f"sparrow table {number}", "accepted_length", {"quantity": SAME, "setting": SAME})
        for number in (1, 7)
    ),
    *(
        Link("sparrow table 4", quantity, {"quantity": SAME, "setting": SAME})
        for quantity in ("accepted_length", "decode_speedup")
    ),
    *(
        Link("sparrow table 5", quantity, {"quantity": SAME, "setting": SAME})
        for quantity in published.BREAKDOWN
    ),
)
NEAR = 0.1  # share by which our visual tokens may differ from printed ones and stand beside them
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
    return [*ours, *_protocol_rows(records), *_sparrows_rows(records, boot)]


def _sparrows_rows(records: Records, boot: Bootstrap) -> list[Row]:
    """Ours beside SPARROW's tables, under the settings of these: T6's means, T5's near lengths."""
    shares = [
        row
        for row in share_rows(ITEM, records, boot)
        if (row["quantity"], row["benchmark"]) == ("accepted_length", "macro")
    ]
    printed = published.length_rows(ITEM)
    found: dict[tuple[str, str], Row] = {}
    for row in length_rows(records, boot):
        key = parse_setting(row["setting"])
        if row["method"] != "tree60" or "visual_tokens" not in key or "context" in key:
            continue
        for other in printed:
            theirs = parse_setting(other["setting"])
            if theirs.get("variant", "Sparrow") != "Sparrow":
                continue  # the best of SPARROW's table 4
            apart = int(key["visual_tokens"]) / int(theirs["visual_tokens"]) - 1
            if row["quantity"] == other["quantity"] and abs(apart) <= NEAR:
                found[row["quantity"], other["setting"]] = row | {
                    "item": ITEM, "setting": other["setting"],
                }  # fmt: skip
    return [*shares, *found.values()]


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


def _beside(row: pd.Series, ours: pd.DataFrame) -> pd.DataFrame:
    """Our rows that stand beside a published one: one for each of our machines, or none."""
    for link in LINKS:
        if link.fits(row):
            found = ours.loc[ours["status"] != MISSING]
            for key, value in link.ours.items():
                found = found.loc[found[key] == (row[key] if value == SAME else value)]
            return found
    return ours.iloc[:0]


def _difference(ours: pd.Series, theirs: pd.Series) -> Interval:
    """Ours minus theirs. Of a printed range, from its upper to its lower end."""
    value = float(ours["value"])
    if math.isnan(float(theirs["value"])):
        return Interval(math.nan, value - float(theirs["high"]), value - float(theirs["low"]), 0)
    low, high = (float(ours[end]) - float(theirs["value"]) for end in ("low", "high"))
    return Interval(value - float(theirs["value"]), low, high, 0)


def _why(row: pd.Series, ours: pd.DataFrame) -> str:
    """The sentence that says why a published number has this status."""
    if math.isnan(float(row["value"])) and math.isnan(float(row["low"])):
        if row["unit"] == "":
            return "A name, not a number."
        return "Not reported there."
    if row["setting"].startswith("mean of"):
        return "Recomputed from the printed suites, to check the printed average."
    if len(ours):
        if row["status"] == COMPARABLE:
            return "The same target on the same hardware."
        return "Ours is another target, machine or size of run."
    if any(link.fits(row) for link in LINKS):
        if row["method"] in ("", "ar", *VFLASH_METHODS):
            return "Nothing of ours was decoded for it."
        return "Its method is not run here."
    if row["source"] == published.PAGE:
        return "A setting or an example of the page, not a result."
    if row["source"] == published.DEVICE_SOURCE:
        return "What the cost model (T10) is computed from."
    return "Another system's number; nothing of ours is measured in that setting."


def beside_paper_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T9, from records and the published numbers; without any records the published ones alone.

    The frame holds the published rows, ours, and for each pair a row `difference`, whose setting
    names the quantity and the published source.
    """
    comparable = is_comparable(records)
    ours = tidy(_our_rows(records, boot))
    measured = set(ours.loc[ours["status"] != MISSING, "method"])
    theirs = tidy(
        [
            *published.speedup_rows(ITEM, comparable, measured),
            *published.recomputed_rows(ITEM),
            *published.protocol_rows(ITEM, COMPARABLE if comparable else NOT_COMPARABLE),
            *published.setting_rows(ITEM),
            *published.headline_rows(ITEM),
            *published.sparrow_rows(ITEM),
            *published.device_rows(ITEM),
        ]
    )
    lettered, where = places(pd.concat([ours, theirs], ignore_index=True))
    ours, theirs = lettered.iloc[: len(ours)], lettered.iloc[len(ours) :]
    differences: list[Row] = []
    sections = [
        _section(title, theirs.loc[theirs["source"].isin(sources)], ours, differences)
        for title, sources in _SECTIONS
    ]
    both = pd.concat([ours, theirs], ignore_index=True).drop(columns="where")
    frame = checked(pd.concat([both, tidy(differences)], ignore_index=True))
    caption = (
        "Every number of data/published, and ours beside it where there is one. Difference: ours "
        "minus the published number, with our interval; a published number has none. Status: "
        "comparable, not comparable (another target or hardware), published only (nothing of ours "
        "beside it). Parentheses: n. "
        f"{boot.caption()} {where}"
    )
    return Table(ITEM, "T9 Ours beside the paper", caption, frame, tuple(sections))


def _section(
    title: str, theirs: pd.DataFrame, ours: pd.DataFrame, differences: list[Row]
) -> Section:
    """A grid of a source's rows, without columns that it leaves empty.

    Where all rows have one status for one reason, the title tells them. Each difference shown is
    added to `differences`.
    """
    names: tuple[str, ...] = ("method", "quantity", "suite", "setting", "published", "ours", "difference", "where",
             "status", "why")  # fmt: skip
    body: list[tuple[str, ...]] = []
    for _, row in theirs.iterrows():
        beside = _beside(row, ours)
        status = row["status"]
        if len(beside) and status == PUBLISHED_ONLY:
            status = NOT_COMPARABLE
        ours_or_none: list[pd.Series | None] = [one for _, one in beside.iterrows()]
        for our in ours_or_none or [None]:
            gap = NO_VALUE
            if our is not None and row["value":"high"].notna().any():
                found = _difference(our, row)
                of = f"of={row['quantity']};minus={row['source']}"
                setting = ";".join(filter(None, (of, row["setting"])))
                place = Origin(ITEM, str(our["device"]), status, str(our["source"]))
                one = place.row(
                    "difference", found, row["unit"], benchmark=row["benchmark"],
                    method=row["method"], objective=our["objective"], setting=setting,
                )  # fmt: skip
                differences.append({**one, "status": status})
                gap = cell_text(pd.Series({**one, "n": pd.NA}))
            spots = [row["where"]] if our is None else [our["where"], row["where"]]
            body.append(
                (
                    label(row["method"]), _quantity(row), label(row["benchmark"]),
                    setting_words(row["setting"]), _printed(row),
                    NO_VALUE if our is None else _printed(our), gap,
                    ", ".join(spot for spot in spots if spot), status, _why(row, beside),
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
    )


def _quantity(row: pd.Series) -> str:
    """Its words, with a unit that the number does not carry."""
    unit = str(row["unit"])
    shown = unit in ("", "x", "share", "%") or unit == row["quantity"]
    return label(row["quantity"]) + ("" if shown else f" ({unit})")


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
