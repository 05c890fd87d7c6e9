"""The data of F10: what a decoded cycle took, part by part, beside what the cost model predicts; and
what a clip took from its file to its last token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.metrics import ratio
from vflash_analysis.results.cost import CostGroup, own_groups, seconds_at
from vflash_analysis.results.sources import DecodeGroup, Records, count_clips, decode_groups
from vflash_analysis.results.tables import baseline, by_benchmark, drafted
from vflash_analysis.results.tidy import ARM_ORDER, METHOD_ORDER, Origin, in_order, tidy
from vflash_analysis.schemas import ROW_KEY, VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap

F10 = "F10_cycle_time"
PREDICTED = "cost model"  # `setting` of what is not decoded
Row = dict[str, Any]
_CLIP_PARTS = ("frame_read", "vision", "prefill", "decode")


def cycle_frame(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> pd.DataFrame:
    """F10's data: mean milliseconds of a decoded cycle by part, beside the cost model's.

    Rows of setting "" are decoded, with `cycle_ms` their sum; rows of setting "cost model" are the
    forwards of costs measured on the same machine in the same dtype, at the cycles' mean context;
    the cost model knows no other time. `draft_ms` is without the drafter's projection of the prompt:
    once a text, within its first draft, it is `context_projection_ms`, spread over the text's
    cycles. Time outside draft and verify is `bookkeeping_ms`, and `tree_ms` where trees were built.
    Then mean milliseconds of a clip by part, with `end_to_end_ms`
    their sum, of autoregressive decoding, chain and Tree-60, and these two's macro speed-ups.
    """
    rows: list[Row] = []
    groups = own_groups(records)
    for decoded in decode_groups(records):
        origin = decoded.origin(F10, records)
        own = [g for g in groups if (g.device, g.dtype) == (decoded.device, decoded.dtype)]
        cycles = decoded.cycles.loc[decoded.cycles["setting"] == ""]
        arms = decoded.rows[["drafter_sha256", "arm"]].drop_duplicates()
        cycles = _split(cycles.merge(arms, on="drafter_sha256", how="left"), decoded.rows)
        for method in in_order(cycles["method"], METHOD_ORDER):
            of_method = cycles.loc[cycles["method"] == method]
            for arm in in_order(of_method["arm"], ARM_ORDER):
                taken = of_method.loc[of_method["arm"] == arm]
                rows += _cycle_rows(origin, method, arm, taken, boot)
                rows += _predicted_cycle_rows(origin, method, arm, own, taken)
        rows += _clip_rows(origin, decoded, records, boot)
    return tidy(rows)


def _split(cycles: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The cycles with seconds of every part; a text's first holds the projection of its prompt.

    Adds `total_s`, `context_projection_s` (0 but in first cycles), `bookkeeping_s` and
    `prompt_tokens`; takes the projection out of `draft_s` and fills `tree_s` with 0.
    """
    facts = rows[[*ROW_KEY, "prompt_tokens", "context_projection_s"]]
    cycles = cycles.merge(facts, on=list(ROW_KEY), how="left")
    total_s = cycles["draft_s"] + cycles["verify_s"] + cycles["other_s"]
    projection_s = cycles["context_projection_s"].fillna(0.0).where(cycles["cycle"] == 0, 0.0)
    tree_s = cycles["tree_s"].fillna(0.0)
    return cycles.assign(
        total_s=total_s,
        context_projection_s=projection_s,
        draft_s=cycles["draft_s"] - projection_s,
        tree_s=tree_s,
        bookkeeping_s=cycles["other_s"] - tree_s,
    )


def _cycle_rows(
    origin: Origin, method: str, arm: str, cycles: pd.DataFrame, boot: Bootstrap
) -> list[Row]:
    rows = []
    there = [name for name in ("context_projection", "tree") if cycles[f"{name}_s"].any()]
    for part in ("draft", "verify", *there, "bookkeeping", "total"):
        quantity = "cycle_ms" if part == "total" else f"{part}_ms"
        value = boot.videos(metrics.cycle_ms_parts(cycles, f"{part}_s"), ratio)
        rows.append(origin.row(quantity, value, "ms", len(cycles), method=method, objective=arm))
    return rows


def _clip_rows(
    origin: Origin, decoded: DecodeGroup, records: Records, boot: Bootstrap
) -> list[Row]:
    """A clip's time by part and the speed-ups, over the clips whose every part was timed."""
    rows: list[Row] = []
    for method, arm, own in drafted(decoded, records, ("ar", *VFLASH_METHODS), None):
        timed = own.loc[metrics.end_to_end_s(own).notna()]
        if timed.empty:
            continue
        row = partial(origin.row, method=method, objective=arm)
        sums = timed.assign(end_to_end_s=metrics.end_to_end_s(timed))
        for part in (*_CLIP_PARTS, "end_to_end"):
            value = boot.videos(metrics.clip_ms_parts(sums, f"{part}_s"), ratio)
            rows.append(row(f"{part}_ms", value, "ms", count_clips(timed)))
        if method == "ar":
            continue
        pairs = metrics.pair_clips(baseline(decoded.rows, own), own)
        for quantity, parts in (
            ("decode_speedup", metrics.decode_speedup_parts(pairs)),
            ("end_to_end_speedup", metrics.end_to_end_speedup_parts(pairs)),
        ):
            found = by_benchmark(
                origin, quantity, "x", parts, metrics.ratio_of_ratios, boot, method, arm
            )
            rows += [one for one in found if one["benchmark"] == "macro"]
    return rows


def _predicted_cycle_rows(
    origin: Origin, method: str, arm: str, groups: list[CostGroup], cycles: pd.DataFrame
) -> list[Row]:
    """Forwards of a method measured on this machine: draft and verify at the cycles' mean context,
    the projection at their mean prompt, for the share of them that are first."""
    if len(groups) != 1 or method not in ("ar", *VFLASH_METHODS):
        return []
    context, prompt = (float(cycles[name].mean()) for name in ("start_position", "prompt_tokens"))
    wanted = {"verify": ("ar", context, 1.0)}
    if method != "ar":
        first = float((cycles["cycle"] == 0).mean())
        wanted = {
            "draft": (f"draft_{method}", context, 1.0),
            "verify": (f"verify_{method}", context, 1.0),
            "context_projection": ("context_projection", prompt, first),
        }
    rows = []
    for part, (forward, length, share) in wanted.items():
        taken = 1000 * share * seconds_at(groups[0], forward, length)
        rows.append(
            origin.row(f"{part}_ms", taken, "ms", method=method, objective=arm, setting=PREDICTED)
        )
    return rows
