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
from vflash_analysis.results.tables import (
    baseline,
    by_benchmark,
    cycles_of,
    over_words,
    overall,
    planned_suites,
)
from vflash_analysis.results.tidy import (
    BENCHMARK_ORDER,
    MISSING,
    Origin,
    in_order,
    label,
    parse_setting,
    setting_text,
    tidy,
)
from vflash_analysis.results.write import Section, Table, cell_text, pivot, places, titled
from vflash_analysis.schemas import BLOCK_SIZE, DESIGN_STUDY, TREE_NODES, VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap

SHARES = ("1", "0.5", "0.125", "0")
RECALL_AT = (1, 2, 4, 8)
PROFILE = "profile"  # the value of the profile's own drafter, where no record tells it
Row = dict[str, Any]
Options = dict[str, str]  # value by option, as `_OPTIONS` names them


@dataclass(frozen=True)
class Choice:
    """The decodes of a method that change the same thing, or nothing.

    Attributes:
        name: of what was changed, "" for nothing; " + " stands between what was changed at once.
        value: what it was changed to, in the same form.
        method: as the records have it.
        options: what the decodes' setting says of every option (`_options_of`).
        rows: their generations.
    """

    name: str
    value: str
    method: str
    options: Options
    rows: pd.DataFrame


# Options of a decode: what they are called, and what holds where a setting does not name them.
SHARE, BLOCK = "visual share read", "slots of a block"
_OPTIONS = {
    "nodes": ("tree nodes", str(TREE_NODES)),
    "spine_first": ("spine first", "no"),
    "rounds": ("reveal rounds", "1"),
    "block": (BLOCK, PROFILE),
    "context": (SHARE, PROFILE),
    "unbanned": ("unbanned", "no"),
}
_DEFAULTS: Options = dict(_OPTIONS.values())
_AND = " + "
# What T7 shows, in order; what else is changed follows under its own name.
_TITLES = {
    "tree nodes": "nodes of the tree",
    "spine first": "the whole chain first in the tree",
    "reveal rounds": "drafter forwards for a block",
    BLOCK: "block decoded by the profile's own drafter (slots, the anchor's among them)",
    "block_size": "block size, drafter trained anew",
    "num_hidden_layers": "layers of the drafter, trained anew",
    "num_tapped_layers": "tapped layers of the target, drafter trained anew",
    "gamma": "slot weights' γ, drafter trained anew",
}
# What T6 shows: the share read by the same drafter, and by drafters trained anew.
_PHASES = {SHARE: "inference", "context": "training"}


def _share(value: str) -> str:
    """A share of visual positions as a number: "all" is 1, "text_only" 0."""
    return f"{float({'all': '1', 'text_only': '0'}.get(value, value)):g}"


def _options_of(setting: str, block: str) -> Options:
    """What a decode's setting says of every option; `block`: that its drafter was trained on."""
    found = {**_DEFAULTS, BLOCK: block}
    for key, value in parse_setting(setting.replace(",", ";")).items():
        name, _ = _OPTIONS.get(key, (key, ""))
        if key == "context":
            value = _share(value)
        found[name] = "yes" if value == key else value
    return found


def _own_options(decodes: Sequence[Options], default: Options) -> Options:
    """The profile's own options among a method's decodes.

    One thing is changed at a time, and drafters trained anew decode as the profile says: so its
    own options are those that differ least from all others. Of several, the default; else the
    first.
    """

    def distance(one: Options) -> tuple[int, bool]:
        return sum(len(one.items() - other.items()) for other in decodes), one != default

    return min(decodes, key=distance)


def _choice_of(options: Options, own: Options, variant: str) -> tuple[str, str]:
    """What a decode changes: name and value.

    Args:
        options: its own.
        own: the profile's.
        variant: the setting in which its drafter differs from the profile's, "" for none.
    """
    changed: Options = {}
    if variant:
        setting, _, value = variant.partition("=")
        name = setting.partition(".")[2]
        value = _share(value) if name == "context" else value
        changed[name if name in (*_TITLES, *_PHASES) else setting] = value
    names = dict.fromkeys([*own, *options])
    values = {name: options.get(name, PROFILE) for name in names}
    changed |= {n: v for n, v in values.items() if v != own.get(n, PROFILE)}
    return _AND.join(changed), _AND.join(changed.values())


def _block_of(study: Records, drafters: set[str]) -> str:
    """Slots of the blocks that drafters were trained on, `PROFILE` where no record tells it."""
    log = study.training.loc[study.training["drafter_sha256"].isin(drafters)]
    n_slots = max((len(slots) for slots in log["slot_accuracy"].dropna()), default=0)
    return str(1 + n_slots) if n_slots else PROFILE


def choices(group: DecodeGroup, study: Records) -> list[Choice]:
    """Every decode of a group that drafts; what two settings say alike is one choice."""
    facts = drafter_facts(study)
    variants = dict(zip(facts["drafter_sha256"], facts["variant"], strict=True))
    drafting = group.rows.loc[group.rows["method"].isin(VFLASH_METHODS)]
    own_drafters = {d for d in set(drafting["drafter_sha256"]) if not variants.get(d, "")}
    block = _block_of(study, own_drafters)
    keys = ["method", "setting", "drafter_sha256"]
    decodes = [
        (str(method), _options_of(str(setting), block), str(variants.get(drafter, "")), rows)
        for (method, setting, drafter), rows in drafting.groupby(keys, sort=False)
    ]
    by_method: dict[str, list[Options]] = {}
    for method, options, _, _ in decodes:
        by_method.setdefault(method, []).append(options)
    default = _options_of("", block)
    own = {method: _own_options(of_it, default) for method, of_it in by_method.items()}
    found: dict[tuple[str, str, str], Choice] = {}
    for method, options, variant, rows in decodes:
        name, value = _choice_of(options, own[method], variant)
        before = found.get((name, value, method))
        both = rows if before is None else pd.concat([before.rows, rows])
        found[name, value, method] = Choice(name, value, method, options, both)
    return list(found.values())


def _base_of(choice: Choice, found: Sequence[Choice]) -> Choice | None:
    """The profile's own decode by the same method."""
    return next((c for c in found if not c.name and c.method == choice.method), None)


def _as_base(name: str, own: Choice) -> Choice:
    """The profile's own decode where `name` is changed, with the value that it has there."""
    values = [own.options.get(part, PROFILE) for part in name.split(_AND)]
    return replace(own, name=name, value=_AND.join(values))


def paired_parts(own: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """tau of two decodes of the same clips, for `difference_of_ratios`: own minus base."""
    keys = ["benchmark", "video", "clip_id", "sample_seed"]
    left, right = (per_clip(metrics.accepted_length_parts(rows)) for rows in (own, base))
    return left.merge(
        right.rename(columns={"p0": "p2", "p1": "p3"}), on=keys, how="inner", validate="1:1"
    )


# ---- T6 ---------------------------------------------------------------------------------------
def _in_t6(choice: Choice) -> bool:
    """Whether T6 has a choice: of the share read alone, by its chain (trained anew: for both)."""
    return choice.name == "context" or (choice.name, choice.method) == (SHARE, "chain")


def _own_share(base: Choice, found: Sequence[Choice]) -> str | None:
    """Share that the profile's own chain reads, None where it is not known.

    No record tells what its drafter was trained on: all positions, which is the default, unless
    reading all of them is itself one of the changes.
    """
    if base.options[SHARE] != PROFILE:
        return base.options[SHARE]
    return None if any(c.name in _PHASES and c.value == "1" for c in found) else "1"


def share_rows(item: str, records: Records, boot: Bootstrap) -> list[Row]:
    """T6's rows: accepted length of the chain by share of visual positions read.

    accepted_length: tau = sum(new_tokens - 1) / sum(verify_calls), tokens per verify call, by suite
    and macro. paired_difference: that tau minus the profile's own chain's over the clips that both
    decoded, see `overall`; n counts these clips. `setting` is the phase in which the share was
    changed and the share, 0 to 1, which is left out where it is not known.

    Args:
        item: the table's.
        records: the run's, with its studies.
        boot: for intervals.

    Returns:
        Missing rows for SHARES where the study was not measured.

    Raises:
        InputError: an unknown suite, or decodes that must not be pooled (`decode_groups`).
    """
    study = records.study(DESIGN_STUDY)
    suites = planned_suites(study)
    rows: list[Row] = []
    for group in decode_groups(study):
        origin = group.origin(item, study)
        found = [c for c in choices(group, study) if c.method == "chain"]
        base = next((c for c in found if not c.name), None)
        for name, phase in _PHASES.items():
            changed = [c for c in found if c.name == name]
            told: list[tuple[str | None, Choice]] = [(c.value, c) for c in changed]
            if base is not None and changed:
                told.insert(0, (_own_share(base, found), base))
            for share, choice in told:
                setting = setting_text(phase=phase, share=share)
                parts = metrics.accepted_length_parts(choice.rows)
                rows += by_benchmark(
                    origin, "accepted_length", "tokens", parts, ratio, boot, "chain", "", setting
                )
                if base is not None and choice is not base:
                    parts = paired_parts(choice.rows, base.rows)
                    suite, value = overall(parts, difference_of_ratios, boot, suites)
                    n = count_clips(parts)
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


def _share_words(key: dict[str, str]) -> str:
    return f"{100 * float(key['share']):g} %" if "share" in key else "the profile's own"


def share_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T6: accepted length by the share of visual positions that the drafter reads."""
    item = "T6_visual_share"
    frame = tidy([*share_rows(item, records, boot), *published.share_rows(item)])
    lettered, where = places(frame)
    keys = [parse_setting(text) for text in lettered["setting"]]
    lettered = lettered.assign(
        phase=[key["phase"] for key in keys], share=[_share_words(key) for key in keys]
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
        title = "accepted length, minus that of the profile's own drafter, paired by clip (tokens)"
        sections.append(pivot(paired, title, names, "benchmark", columns))
    over = over_words(planned_suites(records.study(DESIGN_STUDY)))
    caption = (
        f"{records.not_measured(DESIGN_STUDY)} Accepted length of the chain when the drafter reads "
        "the target's states at only a share of the visual positions, evenly spaced, beside all "
        "text positions. In training: a drafter trained and decoded so, one training seed each. In "
        "inference: the profile's own drafter, trained on the share that drafter.context sets (all "
        "by default). The target reads everything always. Parentheses: clips. Paired differences: "
        f"{over}. Published: SPARROW's tables 1 and 7, other targets. {boot.caption()} {where}"
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
    if base is not None:
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
    """The trees of the profile's own drafter, all clips pooled, by `tree_quality`'s formulas."""
    own = next((c for c in found if not c.name and c.method == "tree60"), None)
    if own is None:
        return []
    cycles = tree_quality.kept(cycles_of(group, own.rows))
    if cycles.empty:
        return []
    predicted, observed = tree_quality.length_parts(cycles)
    block = own.options[BLOCK]
    wanted = [
        ("recall", f"slot={slot};k={k}", tree_quality.recall_parts(cycles, slot, k), "share")
        for slot in range(1, BLOCK_SIZE if block == PROFILE else int(block))
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
    """T7's rows: every choice with what it is compared with, and the trees' quality.

    Over all suites, see `overall`, by choice and value: accepted_length, tau =
    sum(new_tokens - 1) / sum(verify_calls); paired_difference, that minus the profile's own over the clips that both
    decoded; decode_speedup, AR seconds per token / the method's; draft_ms and verify_ms, means over
    cycles. Of each drafter: train_s and forward_equivalents. Of the trees, pooled: see
    `tree_quality`. n counts clips, of a tree's quality judged slots or cycles.

    Args:
        item: the table's.
        records: the run's, with its studies.
        boot: for intervals.

    Returns:
        A missing row for each known choice where the study was not measured.

    Raises:
        InputError: decodes that must not be pooled (`decode_groups`, `metrics.pair_clips`).
    """
    study = records.study(DESIGN_STUDY)
    suites = planned_suites(study)
    rows: list[Row] = []
    for group in decode_groups(study):
        origin = group.origin(item, study)
        found = [c for c in choices(group, study) if not _in_t6(c)]
        for name in in_order({c.name for c in found if c.name}, tuple(_TITLES)):
            for choice in _with_base(name, found):
                base = _base_of(choice, found)
                setting = setting_text(choice=name, value=choice.value)
                same = base is not None and base.rows is choice.rows
                for quantity, unit, parts, combine in _measured(
                    group, choice, None if same else base
                ):
                    suite, value = overall(parts, combine, boot, suites)
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
                method="tree60" if name in ("tree nodes", "spine first") else "chain",
                setting=setting_text(choice=name, value=_DEFAULTS.get(name, PROFILE)),
            )
            for name in _TITLES
        ]  # fmt: skip
    return rows


def _with_base(name: str, found: list[Choice]) -> list[Choice]:
    """The decodes that change one thing, those of the profile's own by the same methods first."""
    changed = [c for c in found if c.name == name]
    methods = {c.method for c in changed}
    own = [c for c in found if not c.name]
    bases = [_as_base(name, c) for c in own if c.method in methods]
    if name == "tree nodes":  # a chain is the tree with one node a slot
        bases += [replace(c, name=name, value="chain") for c in own if c.method == "chain"]
    return [*bases, *changed]


def _title(name: str) -> str:
    """The words for what was changed; a setting of a drafter is named as in a profile."""
    return _TITLES.get(name, f"{name}, drafter trained anew" if "." in name else name)


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
    if not frame["device"].any():  # nothing was decoded: one grid that says what there would be
        empty = tuple((_title(row["choice"]), cell_text(row)) for _, row in frame.iterrows())
        return (Section(titled(frame), ("choice", "all"), empty),)
    sections = []
    for name in filter(None, dict.fromkeys(frame["choice"])):
        own = frame.loc[frame["choice"] == name]
        shown = [c for c in columns if c in set(own["quantity"])]
        names = [("value_of", "value"), ("method", "method")]
        sections.append(pivot(own, _title(name), names, "quantity", shown))
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
    over = over_words(planned_suites(records.study(DESIGN_STUDY)))
    caption = (
        f"{records.not_measured(DESIGN_STUDY)} One thing changed at a time, the same clips for all "
        f"(parentheses: clips), {over}. Drafters trained anew have one training seed, so a "
        f"difference between two of them also holds the seed's; {PROFILE}: the profile's own "
        "drafter. Paired difference: accepted length minus the profile's own, by clip. Training time is of whatever else the machine did; "
        "compute is counted in forwards of the drafter. Recall and first choices: judged slots of "
        f"the cycles whose drafts are kept (parentheses). {boot.caption()} {where}"
    )
    return Table(item, "T7 Design choices", caption.strip(), frame, _sections(frame))
