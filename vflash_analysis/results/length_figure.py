"""F6 from T5's frame: what decoding does as the video gets longer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from vflash_analysis.metrics import TARGET_LIMITS
from vflash_analysis.results.lengths import (
    NO_VIDEO,
    own_setting,
    undecoded_words,
    variant_words,
)
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
from vflash_analysis.results.tidy import (
    MISSING,
    PUBLISHED_ONLY,
    TARGET_FAILS,
    checked,
    label,
    parse_setting,
)


class _Series(NamedTuple):
    """A line: its decodes, as T5 has them, and how it is drawn."""

    method: str
    own: str  # `own_setting`
    words: str
    tone: str
    line: object
    sign: str


_DASHED = (0, (4, 1.5))
_PLANNED = (
    _Series("chain", "", "chain", colour("chain"), "-", "o"),
    _Series("tree60", "", "Tree-60", colour("tree60"), "-", "s"),
    _Series("chain", NO_VIDEO, "chain, drafter without video", "#CC79A7", _DASHED, "^"),
)
_FURTHER = (  # tone and marker of other settings, in turn
    ("#E69F00", "D"), ("#009E73", "v"), ("#D55E00", "P"), ("#7570B3", "X"), ("#A6761D", "<"),
    ("#E7298A", ">"),
)  # fmt: skip
_PUBLISHED = (("Sparrow", "-"), ("ViSpec", _DASHED), ("MSD", (0, (1, 1.2))))
_GATES = (  # quantity, tone, marker
    ("static_accuracy", "#009E73", "o"),
    ("dynamic_accuracy", "#D55E00", "s"),
    ("ended_share", "#7570B3", "^"),
)
_END_TO_END = (0, (1, 1.2))
_PARTS = (("prefill", "#8C8C8C"), ("decode", "#0072B2"))


def _keyed(frame: pd.DataFrame) -> pd.DataFrame:
    keys = [parse_setting(text) for text in frame["setting"]]
    return frame.assign(
        tokens=[float(key.get("visual_tokens", "nan")) for key in keys],
        own=[own_setting(text) for text in frame["setting"]],
        variant=[key.get("variant", "") for key in keys],
    )


def _draw_line(axis: Axes, rows: pd.DataFrame, tone: str, line: object, sign: str) -> None:
    """A series with its intervals; hollow markers where the target fails."""
    rows = rows.sort_values("tokens")
    x, value, low, high = (
        rows[n].to_numpy(dtype=float) for n in ("tokens", "value", "low", "high")
    )
    axis.errorbar(
        x, value, yerr=error_bar(value, low, high), color=tone, linestyle=line, elinewidth=0.9
    )
    fails = (rows["status"] == TARGET_FAILS).to_numpy()
    for which, face in ((~fails, tone), (fails, "white")):
        axis.plot(
            x[which], value[which], sign, color=tone, markerfacecolor=face, markersize=5,
            zorder=4,
        )  # fmt: skip


def _series(ours: pd.DataFrame) -> list[_Series]:
    """The planned lines and one for every other method and setting that drafted."""
    drafted = ours.loc[ours["quantity"] == "accepted_length"]
    planned = {(one.method, one.own) for one in _PLANNED}
    pairs = dict.fromkeys(zip(drafted["method"], drafted["own"], strict=True))
    others = [pair for pair in pairs if pair not in planned]
    series = list(_PLANNED)
    for (method, own), (tone, sign) in zip(others, itertools.cycle(_FURTHER), strict=False):
        words = ", ".join(filter(None, (label(method), variant_words(own))))
        tone = tone if own else colour(method)
        series.append(_Series(method, own, words, tone, _DASHED, sign))
    return series


def _draw_methods(axis: Axes, ours: pd.DataFrame, quantity: str, series: Sequence[_Series]) -> None:
    """A line for each series that has this quantity."""
    rows = ours.loc[ours["quantity"] == quantity]
    for one in series:
        own = rows.loc[(rows["method"] == one.method) & (rows["own"] == one.own)]
        if not own.empty:
            _draw_line(axis, own, one.tone, one.line, one.sign)


def _draw_published(axis: Axes, paper: pd.DataFrame, quantity: str) -> None:
    """SPARROW's table 4 in grey, named at the right end."""
    for variant, line in _PUBLISHED:
        own = paper.loc[(paper["quantity"] == quantity) & (paper["variant"] == variant)]
        own = own.sort_values("tokens")
        if own.empty:
            continue
        x, y = own["tokens"].to_numpy(dtype=float), own["value"].to_numpy(dtype=float)
        axis.plot(x, y, color="#9a9a9a", linestyle=line, linewidth=1.2, zorder=1)
        axis.annotate(
            variant, (x[-1], y[-1]), xytext=(4, 0), textcoords="offset points", fontsize=7,
            color=QUIET, va="center", annotation_clip=False,
        )  # fmt: skip


def _draw_seconds(axis: Axes, ours: pd.DataFrame) -> None:
    """Seconds of a text by length: autoregressive beside Tree-60, prefill below decoding."""
    lengths = sorted(ours["tokens"].dropna().unique())
    for place, tokens in enumerate(lengths):
        for offset, method in ((-0.2, "ar"), (0.2, "tree60")):
            own = ours.loc[
                (ours["tokens"] == tokens) & (ours["method"] == method) & (ours["own"] == "")
            ]
            below = 0.0
            for part, tone in _PARTS:
                value = own.loc[own["quantity"] == f"{part}_s", "value"]
                if value.empty:
                    continue
                height = float(value.iloc[0])
                hatch = "" if method == "ar" else "////"
                face = tone if method == "ar" else "white"
                axis.bar(
                    place + offset, height, 0.36, bottom=below, facecolor=face, edgecolor=tone,
                    hatch=hatch, linewidth=0.8,
                )  # fmt: skip
                below += height
    axis.set_xticks(range(len(lengths)), [f"{tokens:,.0f}" for tokens in lengths])


def _handles(series: Sequence[_Series], paper: bool, whole: bool) -> list[Artist]:
    found: list[Artist] = [
        Line2D([], [], color=one.tone, ls=one.line, marker=one.sign, label=one.words)
        for one in series
    ]
    if whole:
        found.append(
            Line2D([], [], color=INK, ls=_END_TO_END, marker="s", label="Tree-60, end to end")
        )
    if paper:
        found.append(Line2D([], [], color="#9a9a9a", label="SPARROW's table 4"))
    found.append(
        Line2D([], [], color=INK, marker="o", markerfacecolor="white", linestyle="",
               label="the target fails its gates")
    )  # fmt: skip
    return found


def _counts(ours: pd.DataFrame) -> str:
    """Clips behind the accepted lengths, by length where they differ."""
    rows = ours.loc[ours["quantity"] == "accepted_length"]
    lengths = sorted(rows["tokens"].unique())
    found = {tokens: span_text(rows.loc[rows["tokens"] == tokens, "n"]) for tokens in lengths}
    if len(set(found.values())) < 2:
        return f"n = {next(iter(found.values()), '0')} clips at every length"
    told = ", ".join(f"{n} at {tokens:,.0f}" for tokens, n in found.items())
    return f"n = {told} visual tokens (clips)"


@styled
def length_figure(frame: pd.DataFrame) -> Drawn:
    """F6 from T5's frame: accepted length, speed-ups, seconds and the target's gates by length."""
    frame = checked(frame)
    rows = _keyed(frame)
    paper = rows.loc[rows["status"] == PUBLISHED_ONLY]
    ours = rows.loc[(rows["status"] != PUBLISHED_ONLY) & (rows["status"] != MISSING)]
    figure, axes = new_figure(TEXT_WIDTH, 6.6, 2, 2)
    length, speed, seconds, gates = axes.flatten()
    series = _series(ours)
    for axis, quantity, words in (
        (length, "accepted_length", "accepted length τ (tokens)"),
        (speed, "decode_speedup", "speed-up over AR (×)"),
    ):
        _draw_methods(axis, ours, quantity, series)
        _draw_published(axis, paper, quantity)
        axis.set_ylabel(words)
        axis.set_ylim(bottom=0)
    trees = ours.loc[(ours["method"] == "tree60") & (ours["own"] == "")]
    whole = trees.loc[trees["quantity"] == "end_to_end_speedup"]
    if not whole.empty:
        _draw_line(speed, whole, INK, _END_TO_END, "s")
    speed.axhline(1, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
    _draw_seconds(seconds, ours)
    seconds.set_ylabel("seconds of a text")
    seconds.legend(
        handles=[
            Patch(facecolor=tone, edgecolor=tone, label=words)
            for (_, tone), words in zip(_PARTS, ("before decoding", "decoding"), strict=True)
        ]
        + [Patch(facecolor="white", edgecolor=INK, hatch="////", label="Tree-60 (solid: AR)")],
        loc="upper left",
    )  # fmt: skip
    for quantity, tone, sign in _GATES:
        own = ours.loc[ours["quantity"] == quantity]
        limit = TARGET_LIMITS[quantity]
        if not own.empty:  # hollow where this gate fails, not another of that length
            own = own.assign(status=own["status"].where(own["value"] < limit, ""))
            _draw_line(gates, own, tone, "-", sign)
            gates.axhline(limit, color=tone, linewidth=0.8, linestyle=_DASHED, zorder=1)
    gates.legend(
        handles=[
            Line2D([], [], color=tone, marker=sign, label=label(quantity))
            for quantity, tone, sign in _GATES
        ],
        loc="lower right",
    )
    gates.set_ylim(0, 1.04)
    gates.set_ylabel("share")
    lengths = sorted(ours["tokens"].dropna().unique())
    for axis in (length, speed, gates):
        axis.set_xscale("log")
        axis.minorticks_off()
        axis.set_xlabel("visual tokens of the prompt")
    gates.set_xticks(lengths or [1], [f"{tokens:,.0f}" for tokens in lengths] or [""])
    ticks = (20, 100, 500, 2_000, 10_000, 25_000)
    for axis in (length, speed):
        axis.set_xticks(
            ticks, [f"{tick / 1000:g}k" if tick >= 1000 else str(tick) for tick in ticks]
        )
    seconds.set_xlabel("visual tokens of the prompt")
    if ours.empty:
        for axis in (seconds, gates):
            no_data(axis)
    for axis, title in zip(
        axes.flatten(),
        ("accepted length", "speed-up", "where the time goes", "what the target still tells"),
        strict=True,
    ):
        axis.set_title(title)
    told = "Nothing of ours was decoded at these lengths: vflash run --all does it. "
    if not ours.empty:
        told = (
            f"Ours on {devices_text(ours)}; {_counts(ours)}; "
            "error bars: 95 % bootstrap over videos. The drafter was trained on texts about clips of "
            "all these lengths. Look at whether the accepted length holds as the prompt grows, and "
            "what becomes of the speed-up once a verify of many rows and the prefill cost more. "
            "Dashed at the lower right: each gate's limit, which a hollow mark there lies below. "
        )
    caption = told + undecoded_words(frame) + "Grey: SPARROW's table 4, Qwen2.5-VL-7B on an A800."
    handles = _handles(series, not paper.empty, not whole.empty)
    finish(figure, "Decoding by visual length", caption, handles, 3)
    return figure, frame
