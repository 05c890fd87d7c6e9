"""The figures of the target's layers from tidy frames: F7 attention and removal, F8 similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from vflash_analysis.results.layers import (
    EVEN,
    KINDS,
    MASSES,
    MAX_HEAD,
    MODALITIES,
    QUERIES,
    REMOVED,
    SIMILARITIES,
)
from vflash_analysis.results.style import (
    INK,
    QUIET,
    TEXT_WIDTH,
    Drawn,
    devices_text,
    finish,
    new_figure,
    no_data,
    span_text,
    styled,
)
from vflash_analysis.results.tidy import checked, label


class _Look(NamedTuple):
    colour: str
    marker: str
    line: tuple[float, Sequence[float]] | None = None  # on-off dashes; None: a full line


_DASHED, _DOTTED = (0, (3, 1.4)), (0, (1, 1.4))
_KIND_LOOKS = {
    "visual": _Look("#D55E00", "s"),
    "instruction": _Look("#009E73", "^"),
    "template": _Look("#0072B2", "o"),
    "text": _Look("#56B4E9", "D"),  # instruction and template
}
_KIND_WORDS = {
    "visual": "video",
    "instruction": "instruction",
    "template": "the template's tokens",
}
_REMOVED_LOOKS = {
    "static_accuracy": _Look("#5E3C99", "D"),
    "dynamic_accuracy": _Look("#CC79A7", "v"),
    "agreement": _Look(INK, "P"),
}


def _by_layer(frame: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """The rows of a quantity that are of a layer, in order."""
    rows = frame.loc[(frame["quantity"] == quantity) & (frame["setting"] != "")]
    return rows.assign(layer=rows["setting"].astype(int)).sort_values("layer")


def _line(axis: Axes, rows: pd.DataFrame, look: _Look) -> None:
    """Values over layers with the band of their intervals."""
    x, value, low, high = (
        rows[name].to_numpy(dtype=float) for name in ("layer", "value", "low", "high")
    )
    axis.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)
    axis.plot(x, value, color=look.colour, marker=look.marker, linestyle=look.line or "-")


def _of_no_layer(frame: pd.DataFrame, quantity: str) -> list[float]:
    rows = frame.loc[(frame["quantity"] == quantity) & (frame["setting"] == "")]
    return [float(value) for value in rows["value"]]


def _draw_attention(axis: Axes, frame: pd.DataFrame, query: str) -> None:
    for value in _of_no_layer(frame, f"{query}{EVEN}"):
        axis.axhline(value, color=QUIET, linewidth=1.3, linestyle=_DOTTED, zorder=1)
    rows = _by_layer(frame, f"{query}{MAX_HEAD}")
    if not rows.empty:
        colour = _KIND_LOOKS["visual"].colour
        axis.plot(rows["layer"], rows["value"].astype(float), color=colour, linewidth=1.1,
                  linestyle=_DASHED)  # fmt: skip
    for kind, name in zip(KINDS, MASSES, strict=True):
        _line(axis, _by_layer(frame, f"{query}{name}"), _KIND_LOOKS[kind])
    axis.set_xlabel("layer")


def _draw_removal(axis: Axes, frame: pd.DataFrame) -> None:
    for quantity, look in _REMOVED_LOOKS.items():
        for value in _of_no_layer(frame, quantity):
            axis.axhline(value, color=look.colour, linewidth=1.2, linestyle=_DASHED, zorder=1)
        _line(axis, _by_layer(frame, quantity), look)
    axis.set_xlabel("layer x")


def _finish_panel(axis: Axes, title: str, empty: bool) -> None:
    axis.set_title(title)
    axis.set_ylim(-0.02, 1.04)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    if empty:
        axis.set_xticks([])
        no_data(axis)


def _devices(frame: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(frame["device"])) or [""]


def _handle(look: _Look, words: str) -> Artist:
    return Line2D(
        [], [], color=look.colour, marker=look.marker, linestyle=look.line or "-", label=words
    )


def _names(quantities: Sequence[str], frame: pd.DataFrame) -> dict[str, str]:
    """Their labels; of one without data it says so."""
    found = set(frame["quantity"])
    return {q: label(q) if q in found else f"{label(q)}: no data" for q in quantities}


@styled
def attention_figure(frame: pd.DataFrame) -> Drawn:
    """F7: where the prompt's last tokens look by layer, and the text without the video.

    A row of panels per device, the last panel with plain decoding's values as dashed lines.
    """
    frame = checked(frame)
    devices = _devices(frame)
    figure, axes = new_figure(TEXT_WIDTH, 1.8 + 2.3 * len(devices), len(devices), 3, sharey=True)
    for line, device in enumerate(devices):
        rows = frame.loc[frame["device"] == device]
        for axis, (query, words) in zip(axes[line], QUERIES.items(), strict=False):
            _draw_attention(axis, rows, query)
            empty = _by_layer(rows, f"{query}{MASSES[0]}").empty
            _finish_panel(axis, f"attention of the\n{words}", empty)
        _draw_removal(axes[line, 2], rows)
        empty = all(_by_layer(rows, quantity).empty for quantity in REMOVED)
        _finish_panel(axes[line, 2], "text without the video\nfrom layer x on", empty)
        axes[line, 0].set_ylabel("share")
    names = _names(REMOVED, frame)
    handles = [_handle(_KIND_LOOKS[kind], f"on {_KIND_WORDS[kind]}") for kind in KINDS]
    thin = _KIND_LOOKS["visual"].colour
    handles += [
        _handle(_Look(thin, "", _DASHED), f"{label(MAX_HEAD)} (left only)"),
        _handle(_Look(QUIET, "", _DOTTED), label(EVEN)),
        *(_handle(look, names[quantity]) for quantity, look in _REMOVED_LOOKS.items()),
        *(
            _handle(_Look(look.colour, "", _DASHED), f"{label(quantity)}, nothing removed")
            for quantity, look in _REMOVED_LOOKS.items()
            if _of_no_layer(frame, quantity)
        ),
    ]
    caption = (
        "Left and middle: attention weights summed over positions of a kind, mean over heads; above "
        "the dotted line the video gets more than its share of positions. Right: below layer x the "
        "target sees everything, from x on text sees text alone; where a solid line meets its dashed "
        "one, later layers no longer need the video. Agreement: the target's own greedy tokens, "
        f"given one by one. n = {span_text(frame['n'])} clips; bands: 95 % bootstrap over videos. "
        f"Measured on {devices_text(frame)}."
    )
    title = "Attention to the video by layer, and what its removal costs"
    finish(figure, title, caption, handles, 3)
    return figure, frame


@styled
def similarity_figure(frame: pd.DataFrame) -> Drawn:
    """F8: how far a layer moves the states of visual and of other positions, and what stays."""
    frame = checked(frame)
    devices = _devices(frame)
    figure, axes = new_figure(TEXT_WIDTH, 1.4 + 2.2 * len(devices), len(devices), 2, sharey=True)
    present = set()
    for line, device in enumerate(devices):
        rows = frame.loc[frame["device"] == device]
        for axis, (between, words) in zip(axes[line], SIMILARITIES.items(), strict=True):
            for kind in MODALITIES:
                own = _by_layer(rows, f"{between}_{kind}")
                _line(axis, own, _KIND_LOOKS[kind])
                present |= set() if own.empty else {kind}
            _finish_panel(axis, words, rows.empty)
            lowest = float(np.nanmin([0.0, *rows["low"], *rows["value"]]))
            axis.set_ylim(lowest - 0.02, 1.04)
            axis.set_xlabel("layer")
        axes[line, 0].set_ylabel("mean cosine")
    names = {"visual": "visual positions", "text": "all other positions of the prompt"}
    handles = [
        _handle(_KIND_LOOKS[kind], name if kind in present else f"{name}: no data")
        for kind, name in names.items()
    ]
    caption = (
        "Left: near 1 a layer hardly changes a position's state. Right: how much of its embedding "
        "a position still holds. Where the two lines part, layers treat video and text unlike. "
        "Means over the positions of a clip's prompt and over clips, one prefill each. "
        f"n = {span_text(frame['n'])} clips; bands: 95 % bootstrap over videos. "
        f"Measured on {devices_text(frame)}."
    )
    finish(figure, "Similarity of states by layer and modality", caption, handles, 2)
    return figure, frame
