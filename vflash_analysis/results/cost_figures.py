"""F9 from T10's frame: cost over context length, and speed-up over accepted length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from vflash_analysis.results.cost import LIMIT, PAGE, keyed
from vflash_analysis.results.style import (
    INK,
    QUIET,
    TEXT_WIDTH,
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

_PANELS = (  # title, the target's forward, the draft beside it, whose look
    ("AR step (1 row)", "ar", "", "ar"),
    (f"chain: verify ({BLOCK_SIZE} rows)", "verify_chain", "draft_chain", "chain"),
    (f"Tree-60: verify ({VERIFY_ROWS} rows)", "verify_tree60", "draft_tree60", "tree60"),
)
_ALIKE = 0.02  # lines whose break-even differs by less lie on each other: one is drawn
_HF_COLOUR, _HF_MARKER = "#CC79A7", "v"
_MARKERS = {"ar": "D", "chain": "o", "tree60": "s"}  # of chain and Tree-60 as in F6
_DECODED: Any = {"markersize": 4.6, "markeredgecolor": INK, "markeredgewidth": 0.7}
_LIMIT = (0, (1, 1.2))
_BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # no grid behind a text
_DRAFT = (0, (4, 1.5))
UNMEASURED = "this profile's target"


def _line(axis: Axes, rows: pd.DataFrame, **look: object) -> None:
    """Values over context length, with quartiles where there are some."""
    if rows.empty:
        return
    rows = rows.assign(x=rows["context"].astype(float)).sort_values("x")
    x, value, low, high = (rows[n].to_numpy(dtype=float) for n in ("x", "value", "low", "high"))
    ends = error_bar(value, low, high)
    axis.errorbar(x, value, yerr=ends, elinewidth=0.7, **look)  # type: ignore[arg-type]


def _draw_forwards(axis: Axes, rows: pd.DataFrame, forward: str, draft: str, method: str) -> None:
    """Ours with its draft, Hugging Face's and the limit, or what is modelled."""
    times = rows.loc[rows["quantity"] == "forward_ms"]
    own, ours = times.loc[times["forward"] == forward], times["by"].isin((OURS, LIMIT))
    tone, sign = colour(method), _MARKERS[method]
    face = "white" if MODELLED in set(own["status"]) else tone
    _line(axis, own.loc[ours], color=tone, marker=sign, markerfacecolor=face)
    if draft:
        drafts = times.loc[(times["forward"] == draft) & ours]
        _line(axis, drafts, color=tone, marker=sign, markerfacecolor=face, markersize=2.4,
              linestyle=_DRAFT, linewidth=1)  # fmt: skip
    theirs = own.loc[own["by"] == HUGGING_FACE]
    _line(axis, theirs, color=_HF_COLOUR, marker=_HF_MARKER, markersize=3)
    limits = rows.loc[(rows["quantity"] == "limit_ms") & (rows["forward"] == forward)]
    _line(axis, limits, color=INK, linestyle=_LIMIT, linewidth=1.1)


def _draw_page(axis: Axes, rows: pd.DataFrame) -> None:
    """The page's range of autoregressive milliseconds a token, as a grey bar."""
    for _, page in rows.iterrows():
        x = float(page["context"])
        axis.plot([x, x], [page["low"], page["high"]], color=QUIET, linewidth=4, zorder=1)
        axis.annotate(
            "the page's AR, per token", (x, page["high"]), xytext=(-5, -5), ha="right",
            textcoords="offset points", fontsize=6.5, color=QUIET, bbox=_BLANK, zorder=1,
        )  # fmt: skip


def _length(value: float) -> str:
    """Tokens as a tick names them."""
    return f"{value / 1000:.2g}k" if value >= 1000 else f"{value:.0f}"


def _draw_speedups(axis: Axes, rows: pd.DataFrame) -> None:
    """Speed-up tau / break-even tau, after the fewest and the most tokens measured.

    Where all these lines lie on each other, one is drawn and says so.
    """
    even = rows.loc[(rows["quantity"] == "breakeven_tau") & (rows["status"] != MISSING)]
    lengths = sorted(even["context"].astype(int).unique())
    shown = even.loc[even["context"].astype(int).isin((lengths[0], lengths[-1]))]
    least, most = (float(end) for end in (shown["value"].min(), shown["value"].max()))
    alike = len(shown) > 1 and most < (1 + _ALIKE) * least
    told: dict[str, list[str]] = {}
    for context, line, width in ((lengths[-1], "-", 1.3), (lengths[0], _DRAFT, 0.9)):
        here = rows["context"] == str(context)
        for method in VFLASH_METHODS:
            tone, sign = colour(method), _MARKERS[method]
            for at in shown.loc[here & (shown["method"] == method), "value"].astype(float):
                if not alike:
                    _draw_speedup(axis, at, tone, sign, linestyle=line, linewidth=width)
                told.setdefault(f"after {_length(context)}", []).append(f"{at:.2f}")
            decoded = rows.loc[
                here & (rows["quantity"] == "modelled_speedup") & (rows["method"] == method)
            ]
            for _, point in decoded.iterrows():
                axis.plot(
                    float(point["tau"]), point["value"], sign, color=tone, zorder=5, **_DECODED
                )
    if alike:
        _draw_speedup(axis, least, QUIET, _MARKERS["ar"], linestyle="-", linewidth=1.3)
        told = {"after any length, one line": [f"\n{least:.2f} to {most:.2f}"]}
    words = [f"{name}: {' and '.join(values)}" for name, values in told.items()]
    axis.axhline(1, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.set_xlim(1, BLOCK_SIZE)
    axis.set_ylim(0, 1.4 * axis.get_ylim()[1])
    names = " and ".join(label(method) for method in VFLASH_METHODS)
    axis.annotate(
        "\n".join(["breaks even (hollow) at τ,", names, *words]), (0.03, 0.98),
        xycoords="axes fraction", va="top", fontsize=6.5, color=QUIET, zorder=1,
        bbox=_BLANK,
    )  # fmt: skip


def _draw_speedup(axis: Axes, even: float, tone: str, sign: str, **look: object) -> None:
    """The line tau / `even`, with a hollow marker where it breaks even."""
    ends = np.array([1.0, BLOCK_SIZE])
    axis.plot(ends, ends / even, color=tone, **look)  # type: ignore[arg-type]
    axis.plot(even, 1, sign, color="white", markeredgecolor=tone, markersize=3.4, zorder=4)


def _apart(lengths: Sequence[float]) -> list[float]:
    """The lengths whose tick labels do not run into the next one's on a logarithmic axis."""
    gap = (lengths[-1] / lengths[0]) ** 0.17
    kept: list[float] = []
    for length in reversed(lengths):
        if not kept or kept[-1] / length >= gap:
            kept.append(length)
    return kept[::-1]


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
        ticks = _apart(lengths)
        axis.set_xticks(ticks, [_length(length) for length in ticks])


def _places(frame: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(shape, device, source) of every row of panels: what was measured, then what is modelled."""
    rows = frame.loc[(frame["quantity"] == "forward_ms") & (frame["by"] != PAGE)]
    return list(dict.fromkeys(zip(rows["shape"], rows["device"], rows["source"], strict=True)))


def _cost_handles(decoded: pd.DataFrame) -> list[Artist]:
    """Legend entries; `decoded`: the rows of speed-ups at the accepted length of a method."""
    taus = decoded.drop_duplicates("method").sort_values("method")
    tones = [
        Line2D([], [], color=colour(name), marker=_MARKERS[name], label=f"{label(name)}: forward")
        for name in ("ar", *VFLASH_METHODS)
    ]
    return [
        *tones,
        *(
            Line2D([], [], color=colour(name), marker=_MARKERS[name], markersize=2.4,
                   linestyle=_DRAFT, linewidth=1, label=f"{label(name)}: draft")
            for name in VFLASH_METHODS
        ),
        Line2D([], [], color=_HF_COLOUR, marker=_HF_MARKER, label="Hugging Face, SDPA"),
        Line2D([], [], color=INK, linestyle=_LIMIT, label="bandwidth limit"),
        *(
            Line2D([], [], color=colour(name), marker=_MARKERS[name], linestyle="",
                   label=f"{label(name)}: at the τ of {tau_of}", **_DECODED)
            for name, tau_of in zip(taus["method"], taus["tau_of"], strict=True)
        ),
    ]  # fmt: skip


@styled
def cost_figure(frame: pd.DataFrame) -> Drawn:
    """F9 from T10's frame: milliseconds by context length, and speed-up by accepted length.

    A row of three panels for every shape and machine, and below a panel of each one's speed-up; a
    run without measurements keeps a labelled place, modelled rows have hollow markers.
    """
    frame = checked(frame)
    rows = keyed(frame)
    lines = _places(rows)
    n_rows = len(lines) + -(-len(lines) // 3)
    figure, axes = new_figure(TEXT_WIDTH, 1.5 + 1.6 * n_rows, n_rows, 3)
    speedups = axes[len(lines) :].ravel()
    for axis in speedups[len(lines) :]:
        axis.set_axis_off()
    for panels, last, (shape, device, source) in zip(axes, speedups, lines, strict=False):
        own = rows.loc[rows["shape"] == shape]
        mine = own.loc[(own["device"] == device) & (own["source"] == source)]
        modelled = MODELLED in set(mine["status"])
        standing = "modelled" if modelled else "measured"
        panels[0].set_ylabel(f"{shape or UNMEASURED}\n{standing if shape else ''} ms a forward")
        last.set_title(shape or UNMEASURED)
        last.set_xlabel("accepted length τ")
        if not shape:
            for axis in (*panels, last):
                no_data(axis, "not measured")
                axis.set_xticks([])
                axis.set_yticks([])
            continue
        for axis, (_, forward, draft, method) in zip(panels, _PANELS, strict=True):
            _draw_forwards(axis, mine, forward, draft, method)
        _draw_page(panels[0], own.loc[(own["by"] == PAGE)])
        _set_scales(panels, sorted({float(length) for length in mine["context"] if length}))
        _draw_speedups(last, mine)
        last.set_xticks([1, 4, 8, 12, 16])
    for axis, (title, *_) in zip(axes[0], _PANELS, strict=True):
        axis.set_title(title)
    for axis in axes[len(lines) - 1]:
        axis.set_xlabel("context (tokens)")
    for axis in speedups[: len(lines) : 3]:
        axis.set_ylabel("speed-up over AR (×)")
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
        "written); a processor's caches can beat it. Speed-up over the accepted length τ, tokens "
        "per verify call: τ × AR / (draft + verify), solid after the most tokens, dashed after the "
        "fewest; edged in black: at the accepted length decoded with these records, an assumption "
        "for any other target."
    )
    handles = _cost_handles(rows.loc[rows["quantity"] == "modelled_speedup"])
    finish(figure, "What a forward costs, and what follows", caption, handles, 3)
    return figure, frame
