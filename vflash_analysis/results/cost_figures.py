"""The cost figures from tidy frames: F9 cost over context length and speed-up over accepted length,
F10 the parts of a cycle, decoded beside the cost model's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from vflash_analysis.results.cost import LIMIT, PAGE, keyed
from vflash_analysis.results.style import (
    INK,
    QUIET,
    Drawn,
    colour,
    devices_text,
    error_bar,
    finish,
    new_figure,
    no_data,
    span_text,
    styled,
)
from vflash_analysis.results.tidy import MISSING, MODELLED, checked, label
from vflash_analysis.schemas import BLOCK_SIZE, HUGGING_FACE, OURS, VERIFY_ROWS, VFLASH_METHODS

_PANELS = (  # title, the target's forward, the draft beside it, whose colour
    ("AR step (1 row)", "ar", "", "ar"),
    (f"chain: verify ({BLOCK_SIZE} rows), draft", "verify_chain", "draft_chain", "chain"),
    (f"Tree-60: verify ({VERIFY_ROWS} rows), draft", "verify_tree60", "draft_tree60", "tree60"),
)
_HF_COLOUR = "#CC79A7"
_LIMIT = (0, (1, 1.2))
_DRAFT = (0, (4, 1.5))
UNMEASURED = "this profile's target"


# ---- F9 ---------------------------------------------------------------------------------------
def _line(axis: Axes, rows: pd.DataFrame, **look: object) -> None:
    """Values over context length, with quartiles where there are some."""
    if rows.empty:
        return
    rows = rows.assign(x=rows["context"].astype(float)).sort_values("x")
    x, value, low, high = (rows[n].to_numpy(dtype=float) for n in ("x", "value", "low", "high"))
    ends = error_bar(value, low, high)
    axis.errorbar(x, value, yerr=ends, elinewidth=0.9, **look)  # type: ignore[arg-type]


def _draw_forwards(axis: Axes, rows: pd.DataFrame, forward: str, draft: str, tone: str) -> None:
    """Ours with its draft, Hugging Face's and the limit, or what is modelled."""
    times = rows.loc[rows["quantity"] == "forward_ms"]
    own, ours = times.loc[times["forward"] == forward], times["by"].isin((OURS, LIMIT))
    face = "white" if MODELLED in set(own["status"]) else tone
    _line(axis, own.loc[ours], color=tone, marker="o", markerfacecolor=face)
    if draft:
        drafts = times.loc[(times["forward"] == draft) & ours]
        _line(axis, drafts, color=tone, marker="o", markerfacecolor=face, markersize=3,
              linestyle=_DRAFT, linewidth=1.2)  # fmt: skip
    _line(axis, own.loc[own["by"] == HUGGING_FACE], color=_HF_COLOUR, marker="s", markersize=3.5)
    limits = rows.loc[(rows["quantity"] == "limit_ms") & (rows["forward"] == forward)]
    _line(axis, limits, color=INK, linestyle=_LIMIT, linewidth=1.3)


def _draw_page(axis: Axes, rows: pd.DataFrame) -> None:
    """The page's range of autoregressive milliseconds a token, as a grey bar."""
    for _, page in rows.iterrows():
        x = float(page["context"])
        axis.plot([x, x], [page["low"], page["high"]], color=QUIET, linewidth=5, zorder=1)
        axis.annotate(
            "the page's AR, per token", (x, page["high"]), xytext=(-8, -6), ha="right",
            textcoords="offset points", fontsize=7.5, color=QUIET,
        )  # fmt: skip


def _length(value: float) -> str:
    """Tokens as a tick names them."""
    return f"{value / 1000:.2g}k" if value >= 1000 else f"{value:.0f}"


def _draw_speedups(axis: Axes, rows: pd.DataFrame) -> None:
    """Speed-up tau / break-even tau, after the fewest and the most tokens measured."""
    even = rows.loc[(rows["quantity"] == "breakeven_tau") & (rows["status"] != MISSING)]
    lengths = sorted(even["context"].astype(int).unique())
    told = []
    for context, line, width in ((lengths[-1], "-", 1.8), (lengths[0], _DRAFT, 1.1)):
        here = rows["context"] == str(context)
        for method in VFLASH_METHODS:
            tone = colour(method)
            for at in even.loc[here & (even["method"] == method), "value"].astype(float):
                ends = np.array([1.0, BLOCK_SIZE])
                axis.plot(ends, ends / at, color=tone, linestyle=line, linewidth=width)
                axis.plot(at, 1, "o", color="white", markeredgecolor=tone, zorder=4)
                told.append(f"{label(method)} {at:.2f} after {_length(context)}")
            decoded = rows.loc[
                here & (rows["quantity"] == "modelled_speedup") & (rows["method"] == method)
            ]
            for _, point in decoded.iterrows():
                axis.plot(float(point["tau"]), point["value"], "D", color=tone, markersize=5,
                          markeredgecolor=INK, markeredgewidth=0.8, zorder=5)  # fmt: skip
    axis.axhline(1, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
    axis.set_xlim(1, BLOCK_SIZE)
    axis.set_ylim(bottom=0)
    axis.annotate(
        "breaks even (circles) at τ\n" + "\n".join(dict.fromkeys(told)), (0.03, 0.98),
        xycoords="axes fraction", va="top", fontsize=7.5, color=QUIET,
    )  # fmt: skip


def _set_scales(axes: Sequence[Axes], lengths: Sequence[float]) -> None:
    """Logarithmic scales, the panels of a row alike, with ticks at the measured lengths."""
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.minorticks_off()
        axis.set_xticks(lengths, [_length(length) for length in lengths])


def _places(frame: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(shape, device, source) of every row of panels: what was measured, then what is modelled."""
    rows = frame.loc[(frame["quantity"] == "forward_ms") & (frame["by"] != PAGE)]
    return list(dict.fromkeys(zip(rows["shape"], rows["device"], rows["source"], strict=True)))


def _cost_handles(decoded_in: str) -> list[Artist]:
    tones = [
        Line2D([], [], color=colour(name), marker="o", label=f"{label(name)}: target forward")
        for name in ("ar", *VFLASH_METHODS)
    ]
    return [
        *tones,
        Line2D([], [], color=INK, linestyle=_DRAFT, linewidth=1.2, label="its draft"),
        Line2D([], [], color=_HF_COLOUR, marker="s", label="Hugging Face, SDPA"),
        Line2D([], [], color=INK, linestyle=_LIMIT, label="bandwidth limit"),
        Line2D([], [], color=INK, marker="D", linestyle="", label=f"at the τ of {decoded_in}"),
    ]


@styled
def cost_figure(frame: pd.DataFrame) -> Drawn:
    """F9 from T10's frame: milliseconds by context length, and speed-up by accepted length.

    A row of panels for every shape and machine; a run without measurements keeps a labelled row,
    modelled rows have hollow markers.
    """
    frame = checked(frame)
    rows = keyed(frame)
    lines = _places(rows)
    figure, axes = new_figure(14, 1.5 + 2.8 * len(lines), len(lines), 4)
    for panels, (shape, device, source) in zip(axes, lines, strict=True):
        own = rows.loc[rows["shape"] == shape]
        mine = own.loc[(own["device"] == device) & (own["source"] == source)]
        modelled = MODELLED in set(mine["status"])
        standing = "modelled" if modelled else "measured"
        panels[0].set_ylabel(f"{shape or UNMEASURED}\n{standing if shape else ''} ms a forward")
        panels[3].set_ylabel("speed-up over AR (×)")
        if not shape:
            for axis in panels:
                no_data(axis)
                axis.set_xticks([])
                axis.set_yticks([])
            continue
        for axis, (_, forward, draft, tone) in zip(panels[:3], _PANELS, strict=True):
            _draw_forwards(axis, mine, forward, draft, colour(tone))
        _draw_page(panels[0], own.loc[(own["by"] == PAGE)])
        _set_scales(panels[:3], sorted({float(length) for length in mine["context"] if length}))
        _draw_speedups(panels[3], mine)
        panels[3].set_xticks([1, 4, 8, 12, 16])
    for axis, (title, *_) in zip(axes[0], (*_PANELS, ("speed-up",)), strict=True):
        axis.set_title(title)
    for axis in axes[-1, :3]:
        axis.set_xlabel("context (tokens)")
    axes[-1, 3].set_xlabel("accepted length τ (tokens per verify call)")
    measured = rows.loc[rows["by"].isin((OURS, HUGGING_FACE))]
    told = "Nothing was measured. "
    if not measured.empty:
        told = (
            f"Measured on {devices_text(measured)}: medians of n = {span_text(measured['n'])} "
            "runs, error bars: quartiles; random weights, not compiled. "
        )
    caption = (
        f"{told}Modelled (hollow): the least time that one H100's "
        "printed bandwidth and arithmetic allow, nothing was run; the grey bar is the page's AR "
        "time on one H100. Bandwidth limit: bytes that must be read over copy bandwidth (read + "
        "written); a processor's caches can beat it. Speed-up: τ × AR / (draft + verify), solid "
        "after the most tokens, dashed after the fewest; diamonds: at the accepted length decoded "
        "with these records, an assumption for any other target."
    )
    speedups = rows.loc[rows["quantity"] == "modelled_speedup"]
    handles = _cost_handles(" and ".join(dict.fromkeys(speedups["tau_of"])) or "no run")
    finish(figure, "What a forward costs, and what follows", caption, handles, len(handles))
    return figure, frame


# ---- F10 --------------------------------------------------------------------------------------
_PARTS = (("verify_ms", "verify", "#0072B2"), ("draft_ms", "draft", "#E69F00"),
          ("other_ms", "other", "#8C8C8C"))  # fmt: skip
_WIDTH = 0.36


def _stack(axis: Axes, x: float, rows: pd.DataFrame, predicted: bool) -> float:
    """One stacked bar; returns its height."""
    below = 0.0
    for quantity, _, tone in _PARTS:
        value = rows.loc[rows["quantity"] == quantity, "value"]
        if value.empty or math.isnan(float(value.iloc[0])):
            continue
        height = float(value.iloc[0])
        look = {"facecolor": "white", "hatch": "/////"} if predicted else {"facecolor": tone}
        axis.bar(x, height, _WIDTH, bottom=below, edgecolor=tone, linewidth=0.8, **look)  # type: ignore[arg-type]
        below += height
    return below


def _draw_cycles(axis: Axes, rows: pd.DataFrame) -> None:
    bars = list(dict.fromkeys(zip(rows["method"], rows["objective"], strict=True)))
    for place, (method, arm) in enumerate(bars):
        own = rows.loc[(rows["method"] == method) & (rows["objective"] == arm)]
        decoded, model = own.loc[own["setting"] == ""], own.loc[own["setting"] != ""]
        at = place - _WIDTH / 2 - 0.02
        height = _stack(axis, at, decoded, predicted=False)
        total = decoded.loc[decoded["quantity"] == "cycle_ms"].iloc[0]
        value, low, high = (np.array([float(total[n])]) for n in ("value", "low", "high"))
        axis.errorbar(
            at, value, yerr=error_bar(value, low, high), fmt="none", ecolor=INK, elinewidth=1,
            capsize=2,
        )  # fmt: skip
        top = float(np.nanmax([height, *high]))
        axis.annotate(f"{height:.2f}", (at, top), xytext=(0, 3), textcoords="offset points",
                      ha="center", fontsize=7.5, fontweight="bold")  # fmt: skip
        other = place + _WIDTH / 2 + 0.02
        if model.empty:
            axis.annotate("not\npredicted", (other, 0), xytext=(0, 3), ha="center", fontsize=6.5,
                          textcoords="offset points", color=QUIET)  # fmt: skip
            continue
        height = _stack(axis, other, model, predicted=True)
        axis.annotate(f"{height:.2f}", (other, height), xytext=(0, 3), ha="center", fontsize=7.5,
                      textcoords="offset points")  # fmt: skip
    names = [f"{label(m)}\n{label(arm)}" if arm else label(m) for m, arm in bars]
    axis.set_xticks(range(len(bars)), names)
    axis.set_xlim(-0.6, len(bars) - 0.4)
    axis.set_ylabel("milliseconds a cycle")
    axis.margins(y=0.12)


@styled
def cycle_figure(frame: pd.DataFrame) -> Drawn:
    """F10 from `cost.cycle_frame`: parts of a decoded cycle beside the cost model's, by drafter."""
    frame = checked(frame)
    devices = list(dict.fromkeys(frame["device"])) or [""]
    figure, axes = new_figure(9.5, 1.45 + 2.9 * len(devices), len(devices))
    for axis, device in zip(axes[:, 0], devices, strict=True):
        rows = frame.loc[frame["device"] == device]
        if rows.empty:
            no_data(axis)
        else:
            _draw_cycles(axis, rows)
        if len(devices) > 1:
            axis.set_title(device, fontsize=9)
    decoded = frame.loc[frame["quantity"] == "cycle_ms"]
    caption = (
        f"Decoded on {devices_text(frame)}; n = {span_text(decoded['n'])} cycles; error bars: 95 % "
        "bootstrap over videos. Hatched: draft + verify measured with random weights on the same "
        "machine, at the cycles' mean context; the cost model knows no other time."
    )
    handles: list[Artist] = [
        Patch(facecolor=tone, edgecolor=tone, label=words) for _, words, tone in _PARTS
    ]
    handles.append(Patch(facecolor="white", edgecolor=INK, hatch="/////", label="cost model"))
    title = "Time of a cycle by part, decoded beside the cost model's"
    finish(figure, title, caption, handles, len(handles))
    return figure, frame
