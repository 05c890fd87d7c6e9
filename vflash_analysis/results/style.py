"""How figures look and how they are saved: one style, one palette by name, reproducible bytes.

A figure is as wide as a page's text, so the sizes below are those on paper and nothing is printed
smaller than `SMALLEST`; a README shows the same picture at some 830 pixels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from PIL import Image

from vflash_analysis.errors import InputError
from vflash_analysis.records import replace_atomically
from vflash_analysis.results.tidy import NAMES, label, write_tidy_csv

P = ParamSpec("P")
R = TypeVar("R")
Drawn = tuple[Figure, pd.DataFrame]

INK, QUIET, FAINT = "#222222", "#6b6b6b", "#d9d9d9"
TEXT_WIDTH = 6.9  # inches
SMALLEST = 6.5  # points

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "text.color": INK,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 7.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#8c8c8c",
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": "#4d4d4d",
    "ytick.color": "#4d4d4d",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.4,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "hatch.linewidth": 0.6,
    "figure.dpi": 144,
    "savefig.dpi": 240,
    "figure.facecolor": "white",
    "svg.hashsalt": "vflash",
    "svg.fonttype": "path",
    "pdf.fonttype": 3,
    "path.simplify": False,
}
# Whatever the caller's settings are (a notebook's, a matplotlibrc's), figures start from
# matplotlib's own; what names the screen or the clock stays as it is.
_KEPT = ("backend", "interactive", "toolbar", "webagg", "tk.", "timezone", "date.epoch")
SAVED: dict[Any, Any] = {
    **{k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(_KEPT)},
    **STYLE,
}
METADATA: Mapping[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def colour(name: str) -> str:
    """The colour of a method or arm; the same in every panel and figure."""
    if name not in NAMES:
        raise InputError(f"no colour for '{name}', known are {list(NAMES)}")
    return NAMES[name].colour


def marker(arm: str) -> str:
    """The marker of an arm; a circle for what has none of its own."""
    return NAMES[arm].marker or "o"


def new_figure(
    width: float, height: float, n_rows: int = 1, n_columns: int = 1, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure of that many inches; axes as a (n_rows, n_columns) array. Use inside `styled`."""
    return plt.subplots(n_rows, n_columns, figsize=(width, height), squeeze=False, **options)


def _columns(labels: Sequence[str], most: int, width: float) -> int:
    """How many columns of a legend fit into so many inches, filled from above as matplotlib does."""
    font = FontProperties(size=STYLE["legend.fontsize"])
    widths = [
        text_to_path.get_text_width_height_descent(one, font, ismath=False)[0] / 72
        for one in labels
    ]
    for columns in range(min(most, len(labels)), 1, -1):
        longest = [max(part) for part in np.array_split(widths, columns)]
        if sum(longest) + 0.36 * columns <= width - 0.1:
            return columns
    return 1


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words: joined by spaces they are the text again, "LLaVA-OneVision" too."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def finish(
    figure: Figure,
    title: str,
    caption: str,
    legend: Sequence[Artist] = (),
    legend_columns: int = 1,
) -> None:
    """Puts title and legend above the panels and the caption below, then fixes the layout.

    Closes the figure: it can be saved and shown, but a notebook does not show it once more.

    Args:
        figure: with all that it draws.
        title: a line.
        caption: wrapped to the figure's width.
        legend: entries; fewer columns than asked for where these would not fit.
        legend_columns: at most so many entries beside each other.
    """
    width, height = (float(inches) for inches in figure.get_size_inches())
    kept = caption.replace(" %", "\xa0%").replace("n = ", "n\xa0=\xa0")  # never parted
    lines = [line.replace("\xa0", " ") for line in _wrapped(kept, int(20 * width))]
    below = (0.132 * len(lines) + 0.13) / height
    columns = _columns([str(entry.get_label()) for entry in legend], legend_columns, width)
    legend_rows = -(-len(legend) // columns)
    above = (0.30 + 0.155 * legend_rows) / height
    margin = 0.08 / width
    figure.text(
        margin, 1 - 0.07 / height, title,
        ha="left", va="top", fontsize=9.5, fontweight="bold", color=INK,
    )  # fmt: skip
    if legend:
        figure.legend(
            handles=list(legend), loc="upper left", bbox_to_anchor=(0.01 / width, 1 - 0.23 / height),
            ncols=columns, handlelength=1.6, columnspacing=1.3, labelspacing=0.35,
        ).set_in_layout(False)  # fmt: skip
    figure.text(
        margin, 0.07 / height, "\n".join(lines),
        ha="left", va="bottom", fontsize=6.7, color=QUIET, linespacing=1.35,
    )  # fmt: skip
    for axis in figure.axes:
        sns.despine(ax=axis)
    space = (0, below, 1, 1 - below - above)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=space, h_pad=0.05, w_pad=0.05))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axis in figure.axes:  # the solver's last bits differ from process to process
        axis.set_position(tuple(round(edge, 6) for edge in axis.get_position().bounds))
    plt.close(figure)


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Draws with the house style in force, whatever the caller's settings are."""

    @wraps(draw)
    def wrapped(*arguments: P.args, **keywords: P.kwargs) -> R:
        with matplotlib.rc_context(SAVED):
            return draw(*arguments, **keywords)

    return wrapped


def error_bar(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Lengths of the two halves of error bars, (2, n); 0 where there is no interval.

    A percentile interval of a skewed sample may leave the value outside; that half has length 0.
    """
    return np.clip(np.nan_to_num(np.stack([value - low, high - value])), 0, None)


def devices_text(frame: pd.DataFrame) -> str:
    """The devices of a frame, as a caption names them."""
    found = [str(device) for device in dict.fromkeys(frame["device"]) if device]
    return " and ".join(found) if found else "no device recorded"


def span_text(numbers: pd.Series) -> str:
    """The smallest and largest of some counts, as a caption gives n."""
    values = sorted({int(n) for n in numbers.dropna()})
    if not values:
        return "0"
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def arm_handles(arms: Sequence[str], present: set[str]) -> list[Artist]:
    """Legend entries of arms in order; one without data says so."""
    return [
        Line2D(
            [],
            [],
            color=colour(arm),
            marker=marker(arm),
            label=label(arm) if arm in present else f"{label(arm)}: no data",
        )
        for arm in arms
    ]


def spread(positions: list[float], gap: float) -> list[float]:
    """Moves label positions apart until neighbours are at least `gap` apart, order kept."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = [positions[i] for i in order]
    for _ in range(200):
        shifted = False
        for i in range(1, len(moved)):
            short = gap - (moved[i] - moved[i - 1])
            if short > 1e-9:
                moved[i - 1] -= short / 2
                moved[i] += short / 2
                shifted = True
        if not shifted:
            break
    result = [0.0] * len(positions)
    for rank, i in enumerate(order):
        result[i] = moved[rank]
    return result


def no_data(axis: Axes, text: str = "no data") -> None:
    """Marks a panel that has nothing to draw."""
    axis.text(
        0.5, 0.5, text, transform=axis.transAxes,
        ha="center", va="center", color=QUIET, fontsize=8,
    )  # fmt: skip


def _save_png(draw: Callable[[BytesIO], None], path: Path) -> None:
    """A picture of few tones in 256 colours, a third of the bytes."""
    whole = BytesIO()
    draw(whole)
    with Image.open(whole) as picture:
        flat = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        flat.save(path, format="PNG", optimize=True, dpi=picture.info["dpi"])


def save_figure(folder: str | Path, stem: str, figure: Figure, frame: pd.DataFrame) -> list[Path]:
    """Writes `<stem>.svg`, `.pdf`, `.png` and the `.csv` drawn.

    Nothing that changes from run to run (dates, versions, random ids) enters the files.
    """
    folder = Path(folder)
    paths = []
    with matplotlib.rc_context(SAVED):
        for ending, marks in METADATA.items():
            path = folder / f"{stem}.{ending}"
            draw = partial(figure.savefig, format=ending, metadata=marks)
            replace_atomically(path, partial(_save_png, draw) if ending == "png" else draw)
            paths.append(path)
    write_tidy_csv(folder / f"{stem}.csv", frame)
    return [*paths, folder / f"{stem}.csv"]
