"""The decode figures from tidy frames: F1 speed-up by suite, F4 acceptance by slot.

Each function takes a tidy frame and returns the figure and the frame it drew. Means and intervals
arrive finished; nothing is computed while drawing. A method or arm without data keeps its slot,
labelled, and colours go by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from vflash_analysis.results import published
from vflash_analysis.results.objectives import BASE_ARM, FLOW_ARM
from vflash_analysis.results.style import (
    INK,
    QUIET,
    TEXT_WIDTH,
    Drawn,
    arm_handles,
    colour,
    devices_text,
    error_bar,
    finish,
    marker,
    new_figure,
    no_data,
    span_text,
    styled,
)
from vflash_analysis.results.tidy import (
    BENCHMARK_ORDER,
    COMPARABLE,
    METHOD_ORDER,
    MISSING,
    checked,
    in_order,
    label,
)
from vflash_analysis.schemas import VFLASH_METHODS


@dataclass(frozen=True)
class _Bars:
    """One series of F1: a method, ours or as published."""

    method: str
    ours: bool
    name: str
    hatch: str = "/////"  # of a published value, told apart without colour too


_PAPER_SERIES = (
    _Bars("specvlm_ji", False, "SpecVLM"),
    _Bars("parallelvlm", False, "ParallelVLM", "\\\\\\\\\\"),
    _Bars("sparrow", False, "SPARROW", "xxxxx"),
    _Bars("chain", False, "VFlash-FM chain, paper", "-----"),
    _Bars("tree60", False, "VFlash-FM Tree-60, paper"),
)
_GROUP = 0.875  # of the place of a suite that its bars take
_GAP = 0.01


def _tint(tone: str) -> str:
    """A light, opaque tone: a transparent one would fade the hatches drawn on it."""
    red, green, blue = (1 - 0.16 * (1 - part) for part in matplotlib.colors.to_rgb(tone))
    return matplotlib.colors.to_hex((red, green, blue))


# ---- F1 ---------------------------------------------------------------------------------------
def _series(ours: pd.DataFrame) -> tuple[_Bars, ...]:
    """The paper's series, then ours: the two methods of the paper, and what else was decoded."""
    methods = in_order([*VFLASH_METHODS, *ours["method"]], METHOD_ORDER)
    return (*_PAPER_SERIES, *(_Bars(m, True, f"{label(m)}, ours") for m in methods))


def _draw_bar(axis: Axes, x: float, width: float, row: pd.Series | None, bars: _Bars) -> None:
    value = math.nan if row is None else float(row["value"])
    if row is None or math.isnan(value):
        words = "no data" if bars.ours else "not reported"
        axis.text(x, 0.06, words, rotation=90, ha="center", va="bottom", fontsize=6.5, color=QUIET)
        return
    tone = colour(bars.method)
    if bars.ours:
        axis.bar(x, value, width, color=tone, edgecolor=tone, linewidth=0.6)
    else:
        hatch = "" if row["status"] == COMPARABLE else bars.hatch
        face = _tint(tone)
        axis.bar(x, value, width, facecolor=face, edgecolor=tone, hatch=hatch, linewidth=0.6)
    top = value
    low, high = float(row["low"]), float(row["high"])
    if bars.ours and math.isfinite(low) and math.isfinite(high):
        ends = error_bar(np.array([value]), np.array([low]), np.array([high]))
        axis.errorbar(x, value, yerr=ends, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.4)
        top = max(value, high)
    axis.annotate(
        f"{value:.2f}", (x, top), xytext=(0, 2), textcoords="offset points", rotation=90,
        ha="center", va="bottom", fontsize=6.5, color=INK,
        fontweight="bold" if bars.ours else "normal",
    )  # fmt: skip


def _draw_suites(
    axis: Axes, rows: pd.DataFrame, series: Sequence[_Bars], ar_ms: dict[str, float]
) -> None:
    n_groups = len(BENCHMARK_ORDER)
    step = _GROUP / len(series)
    offsets = (np.arange(len(series)) - (len(series) - 1) / 2) * step
    axis.axvspan(n_groups - 1.5, n_groups - 0.5, color="#f5f5f5", zorder=0)
    is_ours = rows["source"] != published.PAGE
    for bars, offset in zip(series, offsets, strict=True):
        own = rows.loc[(rows["method"] == bars.method) & (is_ours == bars.ours)]
        by_suite = {str(row["benchmark"]): row for _, row in own.iterrows()}
        for group, name in enumerate(BENCHMARK_ORDER):
            _draw_bar(axis, group + float(offset), step - _GAP, by_suite.get(name), bars)
    axis.axhline(1, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.annotate(
        "AR = 1×", (n_groups - 0.5, 1), xytext=(3, 0), textcoords="offset points", fontsize=7,
        color=QUIET, va="center", annotation_clip=False,
    )  # fmt: skip
    names = []
    for name in BENCHMARK_ORDER:
        ms = ar_ms.get(name, math.nan)
        words = "macro average" if name == "macro" else name
        names.append(f"{words}\nAR {ms:.2f} ms/token" if math.isfinite(ms) else words)
    axis.set_xticks(range(n_groups), names)
    axis.set_xlim(-0.52, n_groups - 0.5)
    axis.set_ylabel("decoding speed-up over AR (×)")


def _bar_handles(series: Sequence[_Bars], paper: pd.DataFrame) -> list[Artist]:
    handles: list[Artist] = []
    for bars in series:
        tone = colour(bars.method)
        if bars.ours:
            handles.append(Patch(facecolor=tone, edgecolor=tone, label=bars.name))
            continue
        statuses = set(paper.loc[paper["method"] == bars.method, "status"])
        hatch = "" if statuses == {COMPARABLE} else bars.hatch
        handles.append(Patch(facecolor=_tint(tone), edgecolor=tone, hatch=hatch, label=bars.name))
    return handles


@styled
def speedup_figure(frame: pd.DataFrame) -> Drawn:
    """F1 from T1's frame: speed-up by suite, ours solid, published tinted; a panel per device."""
    frame = checked(frame)
    speed = frame.loc[
        (frame["quantity"] == "decode_speedup") & frame["objective"].isin(("", FLOW_ARM))
    ]
    from_paper = speed["source"] == published.PAGE
    ours, paper = speed.loc[~from_paper], speed.loc[from_paper]
    times = frame.loc[frame["quantity"] == "ar_ms_per_token"]
    series = _series(ours)
    devices = [d for d in dict.fromkeys(ours["device"]) if d] or [""]
    figure, axes = new_figure(TEXT_WIDTH, 1.0 + 2.5 * len(devices), len(devices))
    highest = float(np.nanmax([1.5, *speed["value"], *speed["high"]]))
    for axis, device in zip(axes[:, 0], devices, strict=True):
        own = ours.loc[ours["device"].isin((device, ""))]
        ms = times.loc[times["device"] == device]
        _draw_suites(
            axis,
            pd.concat([own, paper]),
            series,
            {str(row["benchmark"]): float(row["value"]) for _, row in ms.iterrows()},
        )
        axis.set_ylim(0, highest * 1.15)
        if len(devices) > 1:
            axis.set_title(f"ours: {device}", fontsize=7.5)
    suites = ours.loc[(ours["benchmark"] != "macro") & (ours["status"] != MISSING), "n"]
    caption = (
        f"Ours (solid), {label(FLOW_ARM)}: {devices_text(ours)}; n = {span_text(suites)} clips "
        "per suite; error bars: 95 % bootstrap over videos. Hatched: published values on other targets or hardware, not "
        "comparable with ours; the paper's VFlash-FM rows are LLaVA-OneVision-7B on one H100, 50 "
        "clips × 3 seeds per suite. AR time per token is ours."
    )
    title = "Decoding speed-up by suite, ours beside the published values"
    finish(figure, title, caption, _bar_handles(series, paper), len(series))
    return figure, checked(pd.concat([speed, times]))


# ---- F4 ---------------------------------------------------------------------------------------
_PANELS = (
    ("conditional_acceptance", "conditional:\nslot accepted, given all before it"),
    ("survival", "survival:\nall slots up to here accepted"),
)


def _draw_slots(axis: Axes, rows: pd.DataFrame, arm: str) -> None:
    """Line and band where there is an interval; open markers alone where there is none."""
    rows = rows.assign(slot=rows["setting"].astype(int)).sort_values("slot")
    x = rows["slot"].to_numpy(dtype=float)
    value, low, high = (rows[name].to_numpy(dtype=float) for name in ("value", "low", "high"))
    sure = np.isfinite(low) & np.isfinite(high)
    tone, sign = colour(arm), marker(arm)
    axis.fill_between(x, low, high, where=sure.tolist(), color=tone, alpha=0.16, linewidth=0)
    axis.plot(x[sure], value[sure], color=tone, marker=sign, zorder=4)
    axis.plot(
        x[~sure], value[~sure], sign, color="white", markeredgecolor=tone, alpha=0.7, zorder=3
    )


def _tell_counts(axis: Axes, rows: pd.DataFrame) -> None:
    """How many blocks were judged at the first and at the last slot, in the panel's free corner."""
    slots = rows["setting"].astype(int)
    told = [
        f"n {span_text(rows.loc[slots == slot, 'n'])} at slot {slot}"
        for slot in dict.fromkeys((slots.min(), slots.max()))
    ]
    axis.annotate(
        "\n".join(told), (0.02, 0.03), xycoords="axes fraction", va="bottom", fontsize=6.5,
        color=QUIET,
    )  # fmt: skip


@styled
def acceptance_figure(frame: pd.DataFrame) -> Drawn:
    """F4: conditional acceptance and survival by slot, flow against mask-only training.

    A row of panels for the anchors of fixed texts and one for each device that decoded a chain.
    """
    frame = checked(frame)
    lines = sorted(set(zip(frame["method"], frame["device"], strict=True))) or [("", "")]
    figure, axes = new_figure(TEXT_WIDTH, 1.2 + 1.85 * len(lines), len(lines), 2)
    arms = (BASE_ARM, FLOW_ARM)
    n_slots = max((int(slot) for slot in frame["setting"]), default=1)
    for line, (method, device) in enumerate(lines):
        here = frame.loc[(frame["method"] == method) & (frame["device"] == device)]
        for axis, (quantity, words) in zip(axes[line], _PANELS, strict=True):
            rows = here.loc[(here["quantity"] == quantity) & (here["status"] != MISSING)]
            for arm in arms:
                _draw_slots(axis, rows.loc[rows["objective"] == arm], arm)
            if rows.empty:
                no_data(axis)
            else:
                _tell_counts(axis, rows)
            axis.set_ylim(0, 1.02)
            axis.set_xlim(0.6, n_slots + 0.4)
            axis.set_xticks(range(1, n_slots + 1))
            if line == 0:
                axis.set_title(words)
            if line == len(lines) - 1:
                axis.set_xlabel("slot in the block")
        where = "anchors of fixed AR texts" if method == "" else "decoded cycles, chain"
        axes[line, 0].set_ylabel(f"share accepted\n{where}")
    there = frame.loc[frame["status"] != MISSING]
    unsure = there[["low", "high"]].isna().any(axis=None)
    opened = "; open markers: too few for one" if unsure else ""
    caption = (
        "Where the two lines lie inside each other's bands, the trainings are not told apart. "
        "Conditional: of the blocks whose slots 1 to k - 1 were accepted, the share whose slot k "
        "was too. Survival: of the blocks whose outcome at slot k is known, the share accepted up "
        "to it. n in the panels: blocks judged, of each training; slots past the end of a text are "
        f"not counted. Bands: 95 % bootstrap over training seeds and videos{opened}. Anchors: "
        "every position of fixed texts as the block's start, drafters of the decoded ones' data "
        "size and budget, of all training seeds. "
        f"Decoded on {devices_text(frame)}."
    )
    title = "Acceptance by slot, flow training against mask-only"
    finish(figure, title, caption, arm_handles(arms, set(frame["objective"])), len(arms))
    return figure, frame
