"""T6 and T7, of the study `design`: one thing changed at a time, on the same clips.

T6 is the share of visual positions that the drafter reads, T7 everything else. What only changes
decoding runs with the profile's own drafter; what changes the drafter is a drafter trained anew,
with one training seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.metrics import Combine, difference_of_ratios, ratio, ratio_of_ratios
from vflash_analysis.results import published, tree_quality
from vflash_analysis.results.sources import (
    DecodeGroup,
    Records,
    count_clips,
    decode_groups,
    drafter_facts,
    per_clip,
)
from vflash_analysis.results.tables import baseline, by_benchmark, cycles_of, overall
from vflash_analysis.results.tidy import (
    BENCHMARK_ORDER,
    MISSING,
    Origin,
    label,
    parse_setting,
    setting_text,
    tidy,
)
from vflash_analysis.results.write import Section, Table, cell_text, pivot, places, titled
from vflash_analysis.schemas import BLOCK_SIZE, TREE_NODES, VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap

STUDY = "design"
SHARES = ("1", "0.5", "0.125", "0")
RECALL_AT = (1, 2, 4, 8)
PROFILE = "profile"  # the value of the profile's own drafter
Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One decode of the study: what was changed, how it decodes, and its rows.

    Attributes:
        name: of what was changed, "" for nothing.
        value: what it was changed to.
        method: as the records have it.
        trained: whether the drafter was trained anew.
        rows: its generations.
    """

    name: str
    value: str
    method: str
    trained: bool
    rows: pd.DataFrame


def _choice_of(method: str, setting: str, variant: str) -> tuple[str, str]:
    """What a decode changes: name and value."""
    if variant:
        name, _, value = variant.partition("=")
        name = name.partition(".")[2]
        return name, {"text_only": "0"}.get(value, value)
    if not setting:
        return "", ""
    name, _, value = setting.partition("=")
    return {
        "nodes": "tree nodes",
        "spine_first": "spine first",
        "rounds": "reveal rounds",
        "block": "slots of a block",
        "context": "visual share read",
    }.get(name, name), {"": "yes", "text_only": "0"}.get(value, value)


# What the profile's own drafter and settings stand for beside each changed one.
_BASE = {
    "tree nodes": str(TREE_NODES),
    "spine first": "no",
    "reveal rounds": "1",
    "slots of a block": str(BLOCK_SIZE),
    "visual share read": "1",
    "context": "1",
}
# Which methods a change of decoding concerns.
_OF_METHOD = {
    "tree nodes": ("tree60",),
    "spine first": ("tree60",),
    "reveal rounds": ("chain",),
    "slots of a block": ("chain",),
}
_ORDER = (
    "tree nodes", "spine first", "reveal rounds", "slots of a block", "block_size",
    "num_hidden_layers", "num_tapped_layers", "gamma",
)  # fmt: skip


def choices(group: DecodeGroup, study: Records) -> list[Choice]:
    """Every decode of a group that drafts."""
    facts = drafter_facts(study)
    variants = dict(zip(facts["drafter_sha256"], facts["variant"], strict=True))
    found = []
    own = group.rows.loc[group.rows["method"].isin(VFLASH_METHODS)]
    for (method, setting, drafter), rows in own.groupby(
        ["method", "setting", "drafter_sha256"], sort=False
    ):
        variant = str(variants.get(drafter, ""))
        name, value = _choice_of(str(method), str(setting), variant)
        found.append(Choice(name, value, str(method), bool(variant), rows))
    return found


def _base_of(choice: Choice, found: Sequence[Choice]) -> Choice | None:
    """The profile's own decode by the same method."""
    return next((c for c in found if not c.name and c.method == choice.method), None)


def paired_parts(own: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """tau of two decodes of the same clips, for `difference_of_ratios`: own minus base."""
    keys = ["benchmark", "video", "clip_id", "sample_seed"]
    left, right = (per_clip(metrics.accepted_length_parts(rows)) for rows in (own, base))
    return left.merge(
        right.rename(columns={"p0": "p2", "p1": "p3"}), on=keys, how="inner", validate="1:1"
    )


# ---- T6 ---------------------------------------------------------------------------------------
_PHASES = {"visual share read": "inference", "context": "training"}


def share_rows(item: str, records: Records, boot: Bootstrap) -> list[Row]:
    """Accepted length of the chain by share of visual positions read, in training and decoding."""
    study = records.study(STUDY)
    rows: list[Row] = []
    for group in decode_groups(study):
        origin = group.origin(item, study)
        found = [c for c in choices(group, study) if c.method == "chain"]
        base = next((c for c in found if not c.name), None)
        for name, phase in _PHASES.items():
            of_phase = [c for c in found if c.name == name]
            if base is not None and of_phase:
                of_phase.insert(0, replace(base, name=name, value="1"))
            for choice in of_phase:
                setting = setting_text(phase=phase, share=choice.value)
                rows += by_benchmark(
                    origin,
                    "accepted_length",
                    "tokens",
                    metrics.accepted_length_parts(choice.rows),
                    ratio,
                    boot,
                    "chain",
                    setting=setting,
                )
                if base is not None and choice.value != "1":
                    suite, value = overall(
                        paired_parts(choice.rows, base.rows), difference_of_ratios, boot
                    )
                    n = count_clips(choice.rows)
                    rows.append(
                        origin.row(
                            "paired_difference", value, "tokens", n, suite, "chain", "", setting
                        )
                    )
    if not rows:
        origin = Origin(item, "", MISSING, study.source)
        rows = [
            origin.row(
                "accepted_length", math.nan, "tokens", benchmark="macro", method="chain",
                setting=setting_text(phase=phase, share=share),
            )
            for phase in ("training", "inference")
            for share in SHARES
        ]  # fmt: skip
    return rows


def share_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T6: accepted length by the share of visual positions that the drafter reads."""
    item = "T6_visual_share"
    frame = tidy([*share_rows(item, records, boot), *published.share_rows(item)])
    lettered, where = places(frame)
    keys = [parse_setting(text) for text in lettered["setting"]]
    lettered = lettered.assign(
        phase=[key["phase"] for key in keys],
        share=[f"{100 * float(key['share']):g} %" for key in keys],
    )
    names = [
        ("method", "method"), ("phase", "changed in"), ("share", "visual read"), ("where", "where"),
    ]  # fmt: skip
    sections = []
    for title, ours in (("", True), (" (published)", False)):
        mine = lettered["source"].str.startswith("sparrow") != ours
        own = lettered.loc[mine & (lettered["quantity"] == "accepted_length")]
        if not own.empty:
            columns = BENCHMARK_ORDER if ours else tuple(dict.fromkeys(own["benchmark"]))
            sections.append(pivot(own, titled(own) + title, names, "benchmark", columns))
    paired = lettered.loc[lettered["quantity"] == "paired_difference"]
    if not paired.empty:
        columns = tuple(dict.fromkeys(paired["benchmark"]))
        title = "accepted length, minus that with all visual positions, paired by clip (tokens)"
        sections.append(pivot(paired, title, names, "benchmark", columns))
    caption = (
        f"{records.not_measured(STUDY)} Accepted length of the chain when the drafter reads the "
        "target's states at only a share of the visual positions, evenly spaced, beside all text "
        "positions. In training: a drafter trained and decoded so, one training seed each. In "
        "inference: the drafter that was trained on all of them. The target reads everything always. Parentheses: clips. Published: "
        f"SPARROW's tables 1 and 7, other targets. {boot.caption()} {where}"
    )
    title = "T6 Share of visual positions that the drafter reads"
    return Table(item, title, caption.strip(), frame, tuple(sections))


# ---- T7 ---------------------------------------------------------------------------------------
def _measured(
    group: DecodeGroup, choice: Choice, base: Choice | None
) -> list[tuple[str, str, pd.DataFrame, Combine]]:
    pairs = metrics.pair_clips(baseline(group.rows, choice.rows), choice.rows)
    cycles = cycles_of(group, choice.rows)
    found: list[tuple[str, str, pd.DataFrame, Combine]] = [
        ("accepted_length", "tokens", metrics.accepted_length_parts(choice.rows), ratio),
        ("decode_speedup", "x", metrics.decode_speedup_parts(pairs), ratio_of_ratios),
        ("draft_ms", "ms", metrics.cycle_ms_parts(cycles, "draft_s"), ratio),
        ("verify_ms", "ms", metrics.cycle_ms_parts(cycles, "verify_s"), ratio),
    ]
    if base is not None and base is not choice:
        parts = paired_parts(choice.rows, base.rows)
        found.append(("paired_difference", "tokens", parts, difference_of_ratios))
    return found


def _training_rows(origin: Origin, study: Records, choice: Choice, setting: str) -> list[Row]:
    """What a drafter's training took."""
    log = study.training.loc[
        study.training["drafter_sha256"].isin(set(choice.rows["drafter_sha256"]))
    ]
    if log.empty:
        return []
    seconds = float(log["seconds"].max())
    compute = float(log["forward_equivalents"].iloc[0])
    trained = replace(origin, device=str(log["device"].iloc[0]))
    row = {"benchmark": "", "method": choice.method, "objective": "", "setting": setting}
    return [
        trained.row("train_s", seconds, "s", 1, **row),
        origin.row("forward_equivalents", compute, "forwards", 1, **row),
    ]


def _quality_rows(
    origin: Origin, group: DecodeGroup, found: list[Choice], boot: Bootstrap
) -> list[Row]:
    """The trees of the profile's own drafter."""
    own = next((c for c in found if not c.name and c.method == "tree60"), None)
    cycles = None if own is None else tree_quality.kept(cycles_of(group, own.rows))
    if cycles is None or cycles.empty:
        return []
    predicted, observed = tree_quality.length_parts(cycles)
    wanted = [
        ("recall", f"slot={slot};k={k}", tree_quality.recall_parts(cycles, slot, k), "share")
        for slot in range(1, BLOCK_SIZE)
        for k in RECALL_AT
    ]
    wanted += [
        (
            "first_choice_right",
            f"after={word}",
            tree_quality.first_choice_parts(cycles, sibling),
            "share",
        )
        for word, sibling in (("first choice", False), ("sibling", True))
    ]
    wanted += [
        ("predicted_length", "over=kept cycles", predicted, "tokens"),
        ("accepted_length_uncensored", "over=kept cycles", observed, "tokens"),
    ]
    rows = []
    for quantity, setting, parts, unit in wanted:
        value = boot.videos(per_clip(parts), ratio)
        n = int(parts["p1"].sum()) if len(parts) else 0
        rows.append(
            origin.row(quantity, value, unit, n, "pooled", "tree60", setting=f"quality;{setting}")
        )
    return rows


def design_rows(item: str, records: Records, boot: Bootstrap) -> list[Row]:
    """T7's rows: every choice with what it is compared with, and the trees' quality."""
    study = records.study(STUDY)
    rows: list[Row] = []
    for group in decode_groups(study):
        origin = group.origin(item, study)
        found = choices(group, study)
        for name in _ORDER:
            for choice in _with_base(name, found):
                base = _base_of(choice, found)
                setting = setting_text(choice=name, value=choice.value)
                same = base is not None and base.rows is choice.rows
                for quantity, unit, parts, combine in _measured(
                    group, choice, None if same else base
                ):
                    suite, value = overall(parts, combine, boot)
                    n = count_clips(parts)
                    rows.append(
                        origin.row(quantity, value, unit, n, suite, choice.method, "", setting)
                    )
                rows += _training_rows(origin, study, choice, setting)
        rows += _quality_rows(origin, group, found, boot)
    if not rows:
        origin = Origin(item, "", MISSING, study.source)
        rows = [
            origin.row(
                "accepted_length", math.nan, "tokens", benchmark="macro",
                method=_OF_METHOD.get(name, ("chain",))[0],
                setting=setting_text(choice=name, value=_BASE.get(name, PROFILE)),
            )
            for name in _ORDER
        ]  # fmt: skip
    return rows


def _with_base(name: str, found: list[Choice]) -> list[Choice]:
    """The decodes that change one thing, the profile's own first; none where nothing changes it."""
    changed = [c for c in found if c.name == name]
    methods = dict.fromkeys(c.method for c in changed)
    of = _OF_METHOD.get(name, VFLASH_METHODS)
    value = _BASE.get(name, PROFILE)
    bases = [
        replace(c, name=name, value=value) for c in found if not c.name and c.method in methods
    ]
    if name == "tree nodes" and changed:  # a chain is the tree with one node a slot
        chains = [c for c in found if not c.name and c.method == "chain"]
        bases += [replace(c, name=name, value="chain") for c in chains]
        of = VFLASH_METHODS
    return [c for c in [*bases, *changed] if c.method in of]


_TITLES = {
    "tree nodes": "nodes of the tree",
    "spine first": "the whole chain first in the tree",
    "reveal rounds": "drafter forwards for a block",
    "slots of a block": "slots drafted by the drafter of a block of 16",
    "block_size": "block size, drafter trained anew",
    "num_hidden_layers": "layers of the drafter, trained anew",
    "num_tapped_layers": "tapped layers of the target, drafter trained anew",
    "gamma": "slot weights' γ, drafter trained anew",
}


def _sections(frame: pd.DataFrame) -> tuple[Section, ...]:
    keys = [parse_setting(text) for text in frame["setting"]]
    frame = frame.assign(
        choice=[key.get("choice", "") for key in keys],
        value_of=[key.get("value", "") for key in keys],
        slot=[key.get("slot", "") for key in keys],
        k=[f"recall@{key['k']}" if "k" in key else "" for key in keys],
    )
    columns = (
        "accepted_length", "paired_difference", "decode_speedup", "draft_ms", "verify_ms",
        "train_s", "forward_equivalents",
    )  # fmt: skip
    if set(frame["status"]) == {MISSING}:  # one grid that says what there would be
        empty = tuple((_TITLES[row["choice"]], cell_text(row)) for _, row in frame.iterrows())
        return (Section(titled(frame), ("choice", "all"), empty),)
    sections = []
    for name in _ORDER:
        own = frame.loc[frame["choice"] == name]
        if own.empty:
            continue
        shown = [c for c in columns if c in set(own["quantity"])]
        names = [("value_of", "value"), ("method", "method")]
        sections.append(pivot(own, _TITLES[name], names, "quantity", shown))
    recall = frame.loc[frame["quantity"] == "recall"]
    if not recall.empty:
        at = [f"recall@{k}" for k in RECALL_AT]
        title = "Tree-60: the target's token among the drafter's k best, by slot"
        sections.append(pivot(recall, title, [("slot", "slot")], "k", at))
    rest = frame.loc[(frame["choice"] == "") & (frame["slot"] == "")]
    if not rest.empty:
        body = tuple((_told(row), cell_text(row)) for _, row in rest.iterrows())
        sections.append(Section("Tree-60: are its branches right", ("", "pooled"), body))
    return tuple(sections)


def _told(row: pd.Series) -> str:
    key = parse_setting(str(row["setting"]))
    return " ".join(filter(None, (label(str(row["quantity"])), key.get("after", ""))))


def design_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T7: one design choice changed at a time, and the quality of the trees."""
    item = "T7_design_choices"
    frame = tidy(design_rows(item, records, boot))
    _, where = places(frame)
    caption = (
        f"{records.not_measured(STUDY)} One thing changed at a time, the same clips for all "
        "(parentheses: clips), mean over suites. Drafters trained anew have one training seed, so a "
        f"difference between two of them also holds the seed's; {PROFILE}: the profile's own drafter. Paired difference: accepted length "
        "minus the profile's own, by clip. Training time is of whatever else the machine did; "
        "compute is counted in forwards of the drafter. Recall and first choices: judged slots of "
        f"the cycles whose drafts are kept (parentheses). {boot.caption()} {where}"
    )
    return Table(item, "T7 Design choices", caption.strip(), frame, _sections(frame))
