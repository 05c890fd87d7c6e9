"""The decode tables from records: T1 speed-up, T2 accepted length, T4 losslessness.

Each function takes records and returns a `Table`: the tidy frame, and the same numbers laid out for
reading. Two devices or dtypes give two groups of rows; nothing is averaged across them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.errors import InputError
from vflash_analysis.metrics import Combine, grouped, ratio, ratio_of_ratios
from vflash_analysis.results import published
from vflash_analysis.results.sources import (
    DecodeGroup,
    Records,
    count_clips,
    decode_groups,
    method_rows,
    per_clip,
)
from vflash_analysis.results.tidy import (
    ARM_ORDER,
    BENCHMARK_ORDER,
    METHOD_ORDER,
    MISSING,
    Origin,
    in_order,
    tidy,
)
from vflash_analysis.results.write import (
    Section,
    Table,
    cell_text,
    pivot,
    places,
    titled,
    value_text,
)
from vflash_analysis.schemas import (
    BENCHMARKS,
    COMPARISON_METHODS,
    COMPILED,
    HF_DFLASH,
    HF_GENERATE,
    VFLASH_METHODS,
)
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap, Interval

MAIN_ARMS = ("mask_only", "self_reveal")
_NONE = Interval(math.nan, math.nan, math.nan, 0)
Row = dict[str, Any]


def by_benchmark(
    origin: Origin,
    quantity: str,
    unit: str,
    parts: pd.DataFrame,
    combine: Combine,
    boot: Bootstrap,
    method: str,
    objective: str = "",
    setting: str = "",
) -> list[Row]:
    """One row per benchmark and the macro mean; a benchmark without data is a missing row, and
    so is then the macro mean. `n` counts clips."""
    unknown = sorted(set(parts["benchmark"]) - set(BENCHMARKS))
    if unknown:
        raise InputError(f"benchmark {unknown}, allowed are {list(BENCHMARKS)}")
    row = partial(origin.row, method=method, objective=objective, setting=setting)
    parts = per_clip(parts)
    rows: list[Row] = []
    for name in BENCHMARKS:
        own = parts.loc[parts["benchmark"] == name]
        value = boot.videos(own, combine)
        rows.append(row(quantity, value, unit, count_clips(own), benchmark=name))
    complete = all(found["status"] != MISSING for found in rows)
    value = boot.macro(parts, combine) if complete else _NONE
    rows.append(row(quantity, value, unit, count_clips(parts), benchmark="macro"))
    return rows


def planned_suites(records: Records) -> tuple[str, ...]:
    """The suites that a run chose, in order: those it tried to decode, failed clips included."""
    tried = records.generations.loc[~records.generations["warmup"].astype(bool)]
    return tuple(in_order(tried["benchmark"], BENCHMARKS))


def overall(
    parts: pd.DataFrame,
    combine: Combine,
    boot: Bootstrap,
    suites: Sequence[str],
    pooled: bool = False,
) -> tuple[str, Interval]:
    """One value over all suites of a run, and what it is of.

    "macro", `metrics.macro` over the five suites; the suite, where the run chose one alone;
    "pooled", the formula on the sums over all clips, where it chose some. Where one of the chosen
    suites has no value there is none: over other suites it would be another quantity.

    Args:
        parts: see `metrics`.
        combine: its formula.
        boot: for the interval.
        suites: `planned_suites` of the run.
        pooled: the sums over all clips also where all five were chosen.
    """
    parts = per_clip(parts)
    values = [metrics.value_of(parts.loc[parts["benchmark"] == s], combine) for s in suites]
    complete = not any(map(math.isnan, values))
    if set(suites) == set(BENCHMARKS) and not pooled:
        return "macro", boot.macro(parts, combine) if complete else _NONE
    suite = suites[0] if len(suites) == 1 else "pooled"
    return suite, boot.videos(parts, combine) if complete else _NONE


def over_words(suites: Sequence[str]) -> str:
    """What `overall` does with these suites, for a caption."""
    if not suites or set(suites) == set(BENCHMARKS):
        return "mean over suites"
    if len(suites) == 1:
        return f"{suites[0]} alone"
    return f"the clips of {', '.join(suites)} pooled, no mean over suites"


def drafted(
    group: DecodeGroup, records: Records, methods: Sequence[str], arms: Sequence[str] | None
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(method, arm, rows) at default settings; a method without a drafter has the arm ""."""
    for method in in_order(methods, METHOD_ORDER):
        present = set(method_rows(group, records, method)["arm"])
        wanted = in_order(present, ARM_ORDER) if arms is None else [a for a in arms if a in present]
        if arms is not None and "" in present:
            wanted.append("")
        for arm in wanted:
            yield method, arm, method_rows(group, records, method, arm)


def baseline(rows: pd.DataFrame, method: pd.DataFrame, name: str = "ar") -> pd.DataFrame:
    """The baseline's rows of the runs that decoded the method (same machine state, same clocks)."""
    found = rows.loc[(rows["method"] == name) & (rows["setting"] == "")]
    same_run = found.loc[found["run_id"].isin(set(method["run_id"]))]
    return found if same_run.empty else same_run


def cycles_of(group: DecodeGroup, rows: pd.DataFrame) -> pd.DataFrame:
    """The cycles of some of a group's decodes."""
    keys = rows[list(metrics.ROW_KEY)]
    return group.cycles.merge(keys, on=list(metrics.ROW_KEY), how="inner")


def _ar_rows(group: DecodeGroup, origin: Origin, boot: Bootstrap) -> list[Row]:
    ar = group.rows.loc[(group.rows["method"] == "ar") & (group.rows["setting"] == "")]
    hf = group.rows.loc[group.rows["method"] == HF_GENERATE]
    ms = metrics.ms_per_token_parts(ar)
    rows = by_benchmark(origin, "ar_ms_per_token", "ms", ms, ratio, boot, "ar")
    if not hf.empty:
        parts = metrics.decode_speedup_parts(metrics.pair_clips(hf, ar))
        rows += by_benchmark(origin, "ar_vs_generate", "x", parts, ratio_of_ratios, boot, "ar")
    for name, n_planned in group.planned.items():
        n = count_clips(ar.loc[ar["benchmark"] == name])
        rows.append(origin.row("planned_clips", n_planned, "clips", n, benchmark=name))
    return rows


def _speed_rows(
    group: DecodeGroup, origin: Origin, boot: Bootstrap, method: str, arm: str, rows: pd.DataFrame
) -> list[Row]:
    pairs = metrics.pair_clips(baseline(group.rows, rows), rows)
    cycles = cycles_of(group, rows)
    wanted: list[tuple[str, str, pd.DataFrame, Combine]] = [
        ("decode_speedup", "x", metrics.decode_speedup_parts(pairs), ratio_of_ratios),
        ("decode_speedup_per_clip", "x", metrics.decode_speedup_per_clip_parts(pairs), ratio),
        ("end_to_end_speedup", "x", metrics.end_to_end_speedup_parts(pairs), ratio_of_ratios),
        ("ms_per_token", "ms", metrics.ms_per_token_parts(rows), ratio),
    ]
    if not cycles.empty:
        predicted = metrics.predicted_speedup_parts(pairs, cycles)
        wanted += [
            ("predicted_speedup", "x", predicted, metrics.predicted_ratio),
            ("draft_ms", "ms", metrics.cycle_ms_parts(cycles, "draft_s"), ratio),
            ("verify_ms", "ms", metrics.cycle_ms_parts(cycles, "verify_s"), ratio),
            ("other_share", "share", metrics.other_share_parts(cycles), ratio),
        ]
    hf = group.rows.loc[
        (group.rows["method"] == HF_DFLASH)
        & group.rows["drafter_sha256"].isin(set(rows["drafter_sha256"]))
    ]
    if method == "chain" and not hf.empty:
        parts = metrics.decode_speedup_parts(metrics.pair_clips(hf, rows))
        wanted.append(("chain_vs_hf_dflash", "x", parts, ratio_of_ratios))
    found = []
    for quantity, unit, parts, combine in wanted:
        found += by_benchmark(origin, quantity, unit, parts, combine, boot, method, arm)
    return found


def _absent_rows(
    item: str, records: Records, quantity: str, unit: str, found: list[Row], methods: Sequence[str]
) -> list[Row]:
    """Missing rows for methods that nothing was decoded with, so that their slot stays."""
    origin = Origin(item, "", MISSING, records.source)
    present = {row["method"] for row in found}
    return [
        origin.row(quantity, math.nan, unit, benchmark=benchmark, method=method)
        for method in methods
        if method not in present
        for benchmark in BENCHMARK_ORDER
    ]


def speedup_rows(
    item: str,
    records: Records,
    boot: Bootstrap,
    methods: Sequence[str],
    arms: Sequence[str] | None = None,
) -> list[Row]:
    """Our speed rows of the methods, with AR's milliseconds per token beside them."""
    rows: list[Row] = []
    for group in decode_groups(records):
        origin = group.origin(item, records)
        rows += _ar_rows(group, origin, boot)
        for method, arm, own in drafted(group, records, methods, arms):
            rows += _speed_rows(group, origin, boot, method, arm, own)
    return rows + _absent_rows(item, records, "decode_speedup", "x", rows, methods)


def is_comparable(records: Records) -> bool:
    """Whether all our decodes ran the page's target on the page's hardware.

    The published rows stand beside every group of ours, so one on other hardware is enough for no.
    """
    pairs = records.generations[["target", "device"]].drop_duplicates()
    same = [published.same_setup(*pair) for pair in pairs.itertuples(index=False)]
    return bool(same) and all(same)


def _planned(frame: pd.DataFrame) -> dict[tuple[str, str], float]:
    rows = frame.loc[frame["quantity"] == "planned_clips"]
    found = {(r["device"], r["benchmark"]): float(r["value"]) for _, r in rows.iterrows()}
    for device in set(rows["device"]):
        found[(device, "macro")] = float(rows.loc[rows["device"] == device, "value"].sum())
    return found


def benchmark_grids(frame: pd.DataFrame, quantities: Sequence[str]) -> tuple[Section, ...]:
    """One section per quantity: methods down, benchmarks across; `frame` as `places` gives it."""
    planned = _planned(frame)

    def cell(row: pd.Series) -> str:
        return cell_text(row, planned.get((row["device"], row["benchmark"])))

    rows = [("method", "method"), ("objective", "objective"), ("setting", "setting")]
    rows = [pair for pair in rows if (frame[pair[0]] != "").any()]
    rows += [("where", "where")]
    sections = []
    for quantity in quantities:
        own = frame.loc[frame["quantity"] == quantity]
        if not own.empty:
            sections.append(pivot(own, titled(own), rows, "benchmark", BENCHMARK_ORDER, cell))
    return tuple(sections)


def _uncompiled(records: Records) -> str:
    """What a ratio to Hugging Face's loops compares, where ours are compiled."""
    rows = records.generations
    beside = rows["device"].str.endswith(COMPILED) & rows["method"].isin(COMPARISON_METHODS)
    return "HF's loops ran uncompiled, also beside compiled decodes. " if beside.any() else ""


def speedup_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T1: every decoded method by suite, chain and Tree-60 first, beside the published rows."""
    decoded = set(records.generations["method"]) - {"ar", *COMPARISON_METHODS}
    methods = [*VFLASH_METHODS, *sorted(decoded - set(VFLASH_METHODS))]
    rows = speedup_rows("T1_speedup", records, boot, methods, MAIN_ARMS)
    rows += published.speedup_rows("T1_speedup", is_comparable(records))
    frame = tidy(rows)
    lettered, where = places(frame)
    caption = (
        "Speed-up of decoding over autoregressive decoding on the same clips; macro is the "
        "unweighted mean over the five suites. Parentheses: clips measured, of those any method tried. "
        f"{boot.caption()} Published rows are other targets or hardware unless marked comparable "
        "in the CSV; AR time per token stands beside every speed-up. "
        f"{_uncompiled(records)}{where}"
    )
    quantities = (
        "decode_speedup", "ar_ms_per_token", "ms_per_token", "ar_vs_generate",
        "chain_vs_hf_dflash", "end_to_end_speedup", "predicted_speedup",
        "decode_speedup_per_clip", "draft_ms", "verify_ms", "other_share",
    )  # fmt: skip
    title = "T1 Decoding speed-up over autoregressive decoding"
    return Table("T1_speedup", title, caption, frame, benchmark_grids(lettered, quantities))


def accepted_length_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T2: tau by suite, over all cycles, over uncut cycles and as a mean of clips."""
    item = "T2_accepted_length"
    rows: list[Row] = []
    for group in decode_groups(records):
        origin = group.origin(item, records)
        drafting = set(group.rows["method"]) - {"ar", *COMPARISON_METHODS}
        for method, arm, own in drafted(group, records, sorted(drafting), None):
            cycles = cycles_of(group, own)
            wanted = [
                ("accepted_length", "tokens", metrics.accepted_length_parts(own)),
                ("accepted_length_per_clip", "tokens", metrics.accepted_length_per_clip_parts(own)),
                ("cap_share", "share", metrics.cap_share_parts(own)),
            ]
            if not cycles.empty:
                uncut = metrics.accepted_length_uncensored_parts(cycles)
                wanted += [
                    ("accepted_length_uncensored", "tokens", uncut),
                    ("accepted_drafts", "tokens", metrics.accepted_drafts_parts(cycles)),
                ]
            for quantity, unit, parts in wanted:
                rows += by_benchmark(origin, quantity, unit, parts, ratio, boot, method, arm)
        for name, n_planned in group.planned.items():
            rows.append(origin.row("planned_clips", n_planned, "clips", benchmark=name))
    rows += _absent_rows(item, records, "accepted_length", "tokens", rows, VFLASH_METHODS)
    frame = tidy(rows)
    lettered, where = places(frame)
    caption = (
        "Tokens committed per verify call, the target's own token included (accepted drafts: "
        "without it); macro is the unweighted mean over the five suites. Parentheses: clips measured, of those any method tried; training seeds pooled. "
        f"{boot.caption()} {where}"
    )
    quantities = (
        "accepted_length", "accepted_length_uncensored", "accepted_length_per_clip",
        "accepted_drafts", "cap_share",
    )  # fmt: skip
    return Table(item, "T2 Accepted length", caption, frame, benchmark_grids(lettered, quantities))


def _divergence_rows(row: Callable[..., Row], own: pd.DataFrame) -> list[Row]:
    compared = own.loc[own["identical_to_ar"].notna()]
    different = compared.loc[~compared["identical_to_ar"].astype(bool)]
    kinds = different["divergence_kind"].fillna("unexplained")
    n = len(compared)
    rows = [row("texts_compared", n, "texts", n)]
    rows += [
        row(kind, int((kinds == kind).sum()), "texts", n)
        for kind in ("near_tie", "logic_error", "unexplained")
    ]
    gaps = different["divergence_gap"].dropna().astype(float)
    if len(gaps):
        span = Interval(float(gaps.max()), float(gaps.min()), float(gaps.max()), len(gaps))
        rows.append(row("divergence_gap", span, "logits"))
    first = different["first_divergence"].dropna().astype(float)
    if len(first):
        span = Interval(float(first.median()), float(first.min()), float(first.max()), len(first))
        rows.append(row("first_divergence", span, "tokens"))
    return rows


def lossless_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T4: share of texts identical to AR per dtype, method and setting, and what differs."""
    item = "T4_lossless"
    rows: list[Row] = []
    for group in decode_groups(records):
        control = (group.rows["method"] == "ar") & (group.rows["setting"] == "")
        others = group.rows.loc[~control]
        for names, own in grouped(others, ["method", "arm", "setting"]):
            method, arm, setting = (str(name) for name in names)
            origin = group.origin(item, records, method)
            parts = metrics.identical_share_parts(own)
            if parts.empty:
                continue
            rows += by_benchmark(
                origin, "identical_share", "share", parts, ratio, boot, method, arm, setting
            )
            row = partial(origin.row, method=method, objective=arm, setting=setting)
            rows += _divergence_rows(row, own)
    rows += _absent_rows(item, records, "identical_share", "share", rows, VFLASH_METHODS)
    frame = tidy(rows)
    lettered, where = places(frame)
    caption = (
        "Share of texts whose token ids equal plain greedy decoding's. A text that differs is a "
        "near tie (its logit gap is within the change between 1-row and block-row passes) or a "
        "logic error. Gap: largest [smallest, largest]; first token that differs: median [range]. "
        f"Parentheses: n clips, of differing texts n texts. {boot.caption()} {where}"
    )
    share = benchmark_grids(
        lettered.loc[lettered["quantity"] == "identical_share"], ["identical_share"]
    )
    counts = lettered.loc[lettered["quantity"] != "identical_share"]
    what = pivot(
        counts,
        "what differs",
        [("method", "method"), ("objective", "objective"), ("setting", "setting"),
         ("where", "where")],
        "quantity",
        ("texts_compared", "near_tie", "logic_error", "unexplained", "divergence_gap",
         "first_divergence"),
        lambda row: value_text(row["value"], "texts") if row["unit"] == "texts" else cell_text(row),
    )  # fmt: skip
    return Table(item, "T4 Losslessness", caption, frame, (*share, what))
