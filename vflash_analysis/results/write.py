"""A table as files: tidy CSV for machines, Markdown and LaTeX for readers; equal data, equal bytes."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vflash_analysis.errors import InputError
from vflash_analysis.records import write_text_atomic
from vflash_analysis.results.tidy import SOURCE_NAMES, label, write_tidy_csv

NO_VALUE = "–"
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "×": r"$\times$", "τ": r"$\tau$", "−": r"$-$", "–": "--", "≥": r"$\geq$", "≤": r"$\leq$",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """One grid of a table: a header and rows of ready cells, the first `n_names` of which name a row."""

    title: str
    header: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]
    n_names: int = 1


@dataclass(frozen=True)
class Table:
    """A finished table: `stem` names its files, `frame` is tidy, `sections` are for reading."""

    stem: str
    title: str
    caption: str
    frame: pd.DataFrame
    sections: tuple[Section, ...]


def value_text(value: float, unit: str) -> str:
    """A number as a reader sees it: factors and lengths with two decimals, shares in percent."""
    if math.isnan(value):
        return NO_VALUE
    if unit == "x":
        return f"{value:.2f}×"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit in ("clips", "texts"):
        return f"{value:.0f}"
    if unit == "forwards":
        return f"{value:,.0f}"
    if unit == "B":
        return f"{value / 1e6:,.1f} MB"
    if unit == "%":
        return f"{value:.0f} %"
    if unit == "logits":
        return f"{value:.2g}"
    return f"{value:.2f}"


def cell_text(row: pd.Series, planned: float | None = None) -> str:
    """Value, interval and n (with the number planned, where known) of one tidy row."""
    unit = str(row["unit"])
    text = value_text(float(row["value"]), unit)
    ends = [value_text(float(row[end]), unit).rstrip("× %") for end in ("low", "high")]
    if NO_VALUE not in ends:
        span = f"[{ends[0]}, {ends[1]}]"
        last = value_text(float(row["high"]), unit)
        text = f"{text} {span}" if text != NO_VALUE else f"{ends[0]} to {last}"
    if text == NO_VALUE or pd.isna(row["n"]):
        return text
    n = f"n {int(row['n'])}" if planned is None else f"{int(row['n'])}/{planned:.0f}"
    return f"{text} ({n})"


def places(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """A letter for each device and source, so that a grid stays narrow.

    Returns:
        The frame with the column `where`, "" for rows without a device, and the sentence for the
        caption that says what the letters stand for.
    """
    pairs = list(zip(frame["device"], frame["source"], strict=True))
    found = list(dict.fromkeys(pair for pair in pairs if pair[0]))
    letters = dict(zip(found, string.ascii_uppercase[: len(found)], strict=True))
    names = "; ".join(
        f"{letter}: {device}, {SOURCE_NAMES.get(source, source)}"
        for (device, source), letter in letters.items()
    )
    told = f"Where: {names}." if names else ""
    return frame.assign(where=[letters.get(pair, "") for pair in pairs]), told


def titled(rows: pd.DataFrame) -> str:
    """A section's title: the words for its rows' quantity, and the unit that no cell shows."""
    quantity, unit = str(rows["quantity"].iloc[0]), str(rows["unit"].iloc[0])
    return label(quantity) + (f" ({unit})" if unit in ("ms", "s", "tokens") else "")


def pivot(
    frame: pd.DataFrame,
    title: str,
    rows: Sequence[tuple[str, str]],
    column: str,
    column_order: Sequence[str],
    cell: Callable[[pd.Series], str] = cell_text,
) -> Section:
    """Spreads tidy rows over the values of one key.

    Args:
        frame: tidy rows; a (row keys, column) pair must be unique.
        title: of the section.
        rows: (tidy column, heading) pairs that name a row, which keep the frame's order.
        column: the tidy column spread over the grid's columns.
        column_order: its values, in order; all are shown, with a dash where there is no row.
        cell: text of one tidy row.
    """
    keys = [key for key, _ in rows]
    grid: dict[tuple[str, ...], dict[str, str]] = {}
    for _, row in frame.iterrows():
        name, where = tuple(str(row[key]) for key in keys), str(row[column])
        if where in grid.setdefault(name, {}):
            raise InputError(f"{title}: two values for {name}, {where}")
        grid[name][where] = cell(row)
    header = [heading for _, heading in rows] + [label(c) or "all" for c in column_order]
    body = [
        tuple(label(part) for part in name) + tuple(cells.get(c, NO_VALUE) for c in column_order)
        for name, cells in grid.items()
    ]
    return Section(title, tuple(header), tuple(body), len(rows))


def markdown(table: Table, level: int = 1) -> str:
    """The table as Markdown: title, caption, one grid per section; `level` is the title's heading.

    Args:
        table: to show.
        level: 1 for a file of its own; 3 below a section of a notebook.
    """
    mark = "#" * level
    lines = [f"{mark} {table.title}", "", table.caption, ""]
    for section in table.sections:
        lines += [f"{mark}# {section.title}", ""]
        lines.append("| " + " | ".join(_in_grid(c) for c in section.header) + " |")
        lines.append("|" + " --- |" * len(section.header))
        lines += ["| " + " | ".join(_in_grid(c) for c in row) + " |" for row in section.body]
        lines.append("")
    return "\n".join(lines)


def _in_grid(cell: str) -> str:
    return cell.replace("|", "\\|")


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters and our symbols escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def latex(table: Table) -> str:
    """The table as LaTeX (booktabs): one tabular per section, the caption with the first."""
    lines = ["% needs \\usepackage{booktabs}", r"\begin{table*}", r"\centering", r"\small"]
    lines += [rf"\caption{{{latex_text(table.title + '. ' + table.caption)}}}"]
    lines += [rf"\label{{tab:{table.stem}}}"]
    for section in table.sections:
        lines += [r"\medskip", "", rf"\textbf{{{latex_text(section.title)}}}", ""]
        lines += [rf"\begin{{tabular}}{{{'l' * len(section.header)}}}", r"\toprule"]
        lines += [" & ".join(latex_text(c) for c in section.header) + r" \\", r"\midrule"]
        lines += [" & ".join(latex_text(c) for c in row) + r" \\" for row in section.body]
        lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, r"\end{table*}", ""])


def write_table(folder: str | Path, table: Table) -> list[Path]:
    """Writes `<stem>.csv`, `.md` and `.tex`; returns their paths."""
    paths = [Path(folder) / f"{table.stem}.{ending}" for ending in ("csv", "md", "tex")]
    write_tidy_csv(paths[0], table.frame)
    write_text_atomic(paths[1], markdown(table))
    write_text_atomic(paths[2], latex(table))
    return paths
