"""F10 from its tidy frame: the parts of a cycle and of a clip, and what is left of the speed-up end to end."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from vflash_analysis.results.style import (
    INK,
    QUIET,
    TEXT_WIDTH,
    Drawn,
    devices_text,
    error_bar,
    finish,
    no_data,
    span_text,
    styled,
)
from vflash_analysis.results.tidy import checked, label

# Quantity, words and colour, from the bottom up.
_CYCLE = (
    ("verify_ms", "verify", "#0072B2"),
    ("draft_ms", "draft", "#E69F00"),
    ("context_projection_ms", "prompt projection", "#CC79A7"),
    ("tree_ms", "tree building", "#009E73"),
    ("bookkeeping_ms", "bookkeeping", "#8C8C8C"),
)
_CLIP = (
    ("frame_read_ms", "frame reading", "#E3E3E3"),
    ("vision_ms", "vision", "#BDBDBD"),
    ("prefill_ms", "prefill", "#8C8C8C"),
    ("decode_ms", "decode", "#0072B2"),
)
_SPEEDUPS = (("decode_speedup", "decode only", INK), ("end_to_end_speedup", "end to end", "white"))
_WIDTH = 0.36
Bar = tuple[str, str]  # method, arm


def _bars(rows: pd.DataFrame) -> list[Bar]:
    return list(dict.fromkeys(zip(rows["method"], rows["objective"], strict=True)))


def _of(rows: pd.DataFrame, bar: Bar) -> pd.DataFrame:
    return rows.loc[(rows["method"] == bar[0]) & (rows["objective"] == bar[1])]


def _name(bar: Bar, width: int = 40) -> str:
    """Method and arm below each other, in lines of at most so many characters."""
    return "\n".join(textwrap.fill(label(part), width) for part in bar if part)


def _values(rows: pd.DataFrame, quantity: str) -> tuple[float, float, float]:
    """Value and interval of a quantity's one row; nan without it."""
    own = rows.loc[rows["quantity"] == quantity]
    if own.empty:
        return math.nan, math.nan, math.nan
    return tuple(float(own[name].iloc[0]) for name in ("value", "low", "high"))  # type: ignore[return-value]


# ---- a cycle ----------------------------------------------------------------------------------
def _stack(axis: Axes, x: float, rows: pd.DataFrame, predicted: bool) -> float:
    """One stacked bar; returns its height."""
    below = 0.0
    for quantity, _, tone in _CYCLE:
        height, _, _ = _values(rows, quantity)
        if math.isnan(height):
            continue
        look = {"facecolor": tone, "edgecolor": "white"}
        if predicted:
            look = {"facecolor": "white", "edgecolor": tone, "hatch": "/////"}
        axis.bar(x, height, _WIDTH, bottom=below, linewidth=0.6, **look)  # type: ignore[arg-type]
        below += height
    return below


def _draw_cycles(axis: Axes, rows: pd.DataFrame) -> None:
    bars = _bars(rows)
    for place, bar in enumerate(bars):
        own = _of(rows, bar)
        decoded, model = own.loc[own["setting"] == ""], own.loc[own["setting"] != ""]
        at = place - _WIDTH / 2 - 0.02
        height = _stack(axis, at, decoded, predicted=False)
        value, low, high = (np.array([number]) for number in _values(decoded, "cycle_ms"))
        axis.errorbar(
            at, value, yerr=error_bar(value, low, high), fmt="none", ecolor=INK, elinewidth=0.8,
            capsize=1.6,
        )  # fmt: skip
        top = float(np.nanmax([height, *high]))
        axis.annotate(f"{height:.2f}", (at, top), xytext=(0, 2), textcoords="offset points",
                      ha="center", fontsize=6.8, fontweight="bold")  # fmt: skip
        other = place + _WIDTH / 2 + 0.02
        if model.empty:
            axis.annotate("not predicted", (other, 0), xytext=(0, 2), ha="center", fontsize=6.5,
                          rotation=90, textcoords="offset points", color=QUIET)  # fmt: skip
            continue
        height = _stack(axis, other, model, predicted=True)
        axis.annotate(f"{height:.2f}", (other, height), xytext=(0, 2), ha="center", fontsize=6.8,
                      textcoords="offset points")  # fmt: skip
    axis.set_xticks(range(len(bars)), [_name(bar, max(8, 96 // len(bars))) for bar in bars])
    axis.set_xlim(-0.6, len(bars) - 0.4)
    axis.set_ylabel("milliseconds a cycle")
    axis.margins(y=0.12)


# ---- a clip -----------------------------------------------------------------------------------
def _draw_clips(axis: Axes, rows: pd.DataFrame, bars: Sequence[Bar]) -> None:
    """What a clip takes from its file to its last token, a bar for each method."""
    longest = float(np.nanmax([0, *rows.loc[rows["quantity"] == "end_to_end_ms", "value"]]))
    for place, bar in enumerate(bars):
        own, left = _of(rows, bar), 0.0
        for quantity, _, tone in _CLIP:
            width, _, _ = _values(own, quantity)
            if not math.isnan(width):
                axis.barh(place, width, 0.62, left=left, facecolor=tone, edgecolor="white",
                          linewidth=0.6)  # fmt: skip
                left += width
        axis.annotate(f"{left:.0f}", (left, place), xytext=(2, 0), textcoords="offset points",
                      va="center", fontsize=6.8, fontweight="bold")  # fmt: skip
    axis.set_yticks(range(len(bars)), [_name(bar) for bar in bars])
    axis.set_xlim(0, 1.13 * longest or 1)
    axis.set_xlabel("milliseconds a clip")
    axis.legend(
        handles=[Patch(facecolor=tone, label=words) for _, words, tone in _CLIP],
        loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=4, fontsize=6.5, handlelength=0.9,
        columnspacing=0.8, handletextpad=0.4,
    )  # fmt: skip


def _draw_speedups(axis: Axes, rows: pd.DataFrame, bars: Sequence[Bar]) -> None:
    """Decode-only and end-to-end speed-up of each method, with their intervals."""
    if not rows.loc[rows["quantity"] == "decode_speedup", "value"].notna().any():
        no_data(axis, "no mean: not all suites decoded")
        return
    for place, bar in enumerate(bars):
        for (quantity, _, face), aside in zip(_SPEEDUPS, (-0.17, 0.17), strict=True):
            value, low, high = (np.array([n]) for n in _values(_of(rows, bar), quantity))
            if np.isnan(value).any():
                continue
            axis.errorbar(
                value, place + aside, xerr=error_bar(value, low, high), fmt="o", color=INK,
                markerfacecolor=face, markersize=4, elinewidth=0.8, capsize=1.6,
            )  # fmt: skip
            right = float(np.nanmax([*value, *high]))
            axis.annotate(f"{value[0]:.2f}×", (right, place + aside), xytext=(3, 0), fontsize=6.8,
                          textcoords="offset points", va="center")  # fmt: skip
    axis.axvline(1, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.set_yticks(range(len(bars)), [""] * len(bars))
    axis.set_xlabel("speed-up over AR (×), mean of the suites")
    axis.set_xlim(0, 1.18 * max(1, axis.get_xlim()[1]))
    axis.legend(
        handles=[
            Line2D([], [], color=INK, marker="o", markersize=4, markerfacecolor=face, label=words)
            for _, words, face in _SPEEDUPS
        ],
        loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=2, fontsize=6.5, handlelength=1.4,
    )  # fmt: skip


def _draw_end_to_end(left: Axes, right: Axes, rows: pd.DataFrame) -> None:
    """The two panels below, in one order from the top."""
    bars = _bars(rows.loc[rows["quantity"] == "end_to_end_ms"])
    if not bars:
        no_data(left, "times of the other parts not recorded")
        no_data(right)
        return
    _draw_clips(left, rows, bars)
    _draw_speedups(right, rows, bars)
    for axis in (left, right):
        axis.grid(True, axis="x")
        axis.grid(False, axis="y")
        axis.set_ylim(len(bars) - 0.5, -0.5)


@styled
def cycle_figure(frame: pd.DataFrame) -> Drawn:
    """F10 from `cycle_time.cycle_frame`: a cycle by part beside the cost model's; below, a clip by
    part and what the decode speed-up leaves end to end. A pair of rows for every device."""
    frame = checked(frame)
    devices = list(dict.fromkeys(frame["device"])) or [""]
    n_bars = len(_bars(frame.loc[frame["quantity"] == "end_to_end_ms"]))
    heights = [2.0, max(2.0, 0.4 + 0.3 * n_bars)] * len(devices)  # inches
    figure = plt.figure(figsize=(TEXT_WIDTH, 1.35 + sum(heights)))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for line, device in enumerate(devices):
        rows = frame.loc[frame["device"] == device]
        cycles = rows.loc[rows["quantity"].isin(["cycle_ms", *(part for part, *_ in _CYCLE)])]
        axis = figure.add_subplot(grid[2 * line, :])
        if cycles.empty:
            no_data(axis)
        else:
            _draw_cycles(axis, cycles)
        if len(devices) > 1:
            axis.set_title(device, fontsize=7.5)
        below = [figure.add_subplot(grid[2 * line + 1, column]) for column in (0, 1)]
        _draw_end_to_end(below[0], below[1], rows)
    told, clips = (
        frame.loc[frame["quantity"] == name, "n"] for name in ("cycle_ms", "end_to_end_ms")
    )
    caption = (
        "Above: where a cycle's time goes, beside the time of its forwards alone. Below: "
        "reading, vision and prefill are the same for every method, so the end-to-end speed-up is "
        f"the smaller one. Decoded on {devices_text(frame)}; n = {span_text(told)} cycles, "
        f"{span_text(clips)} clips; error bars: 95 % bootstrap over videos. Hatched: the same "
        "forwards measured alone, with random weights, at the cycles' mean context: without the "
        "loop around them, and with other caches and at another time, so they can take more or "
        "less. A cycle: mean over all cycles, where T1's AR time per token is the mean of the "
        "suites. Prompt projection: once a text, spread over its cycles. Bookkeeping: masks, cache "
        "moves, recording."
    )
    handles: list[Artist] = [
        Patch(facecolor=tone, edgecolor=tone, label=words)
        for quantity, words, tone in _CYCLE
        if (frame["quantity"] == quantity).any()
    ]
    handles.append(Patch(facecolor="white", edgecolor=INK, hatch="/////", label="cost model"))
    title = "Time of a cycle and of a clip by part"
    finish(figure, title, caption, handles, len(handles))
    return figure, frame
