"""Builds every table and figure of a place from its records: `vflash figures`.

The tracked pocket records are drawn into `figures/pocket`, with rows marked "stored"; a run's
records go to `figures/latest`. Notebooks call `make_table` and `make_figure` for one item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from vflash_analysis.errors import InputError
from vflash_analysis.paths import FIGURES
from vflash_analysis.results.beside import beside_paper_table
from vflash_analysis.results.curves import acceptance_frame, training_frame
from vflash_analysis.results.figures import acceptance_figure, speedup_figure
from vflash_analysis.results.objectives import objectives_table
from vflash_analysis.results.sources import DEFAULT_BOOTSTRAP, Bootstrap, Records, load_records
from vflash_analysis.results.style import save_figure
from vflash_analysis.results.tables import accepted_length_table, lossless_table, speedup_table
from vflash_analysis.results.tidy import STORED
from vflash_analysis.results.training_figures import objectives_figure, training_figure
from vflash_analysis.results.write import Table, write_table

MakeTable = Callable[[Records, Bootstrap], Table]
MakeFrame = Callable[[Records, Bootstrap], pd.DataFrame]
MakeFigure = Callable[[pd.DataFrame], tuple[Figure, pd.DataFrame]]

TABLES: dict[str, MakeTable] = {
    "T1_speedup": speedup_table,
    "T2_accepted_length": accepted_length_table,
    "T3_objectives": objectives_table,
    "T4_lossless": lossless_table,
    "T9_beside_paper": beside_paper_table,
}
# A figure draws the frame of a table, or one of its own.
FIGURE_OF_TABLE: dict[str, tuple[str, MakeFigure]] = {
    "F1_speedup": ("T1_speedup", speedup_figure),
    "F_objectives": ("T3_objectives", objectives_figure),
}
FIGURE_OF_FRAME: dict[str, tuple[MakeFrame, MakeFigure]] = {
    "F4_acceptance_by_position": (acceptance_frame, acceptance_figure),
    "F5_training": (lambda records, boot: training_frame(records), training_figure),
}
ITEMS = (*TABLES, *FIGURE_OF_TABLE, *FIGURE_OF_FRAME)


def make_table(
    stem: str, records: Records | None = None, boot: Bootstrap = DEFAULT_BOOTSTRAP
) -> Table:
    """One table, from the tracked records where none are given."""
    if stem not in TABLES:
        raise InputError(f"table '{stem}', allowed are {list(TABLES)}")
    return TABLES[stem](records or load_records(), boot)


def make_figure(
    stem: str,
    records: Records | None = None,
    boot: Bootstrap = DEFAULT_BOOTSTRAP,
    table: Table | None = None,
) -> tuple[Figure, pd.DataFrame]:
    """One figure and the frame it drew; `table` spares making the figure's table again."""
    if stem in FIGURE_OF_TABLE:
        of, draw = FIGURE_OF_TABLE[stem]
        made = table or make_table(of, records, boot)
        return draw(made.frame)
    if stem in FIGURE_OF_FRAME:
        frame_of, draw = FIGURE_OF_FRAME[stem]
        return draw(frame_of(records or load_records(), boot))
    raise InputError(f"figure '{stem}', allowed are {[*FIGURE_OF_TABLE, *FIGURE_OF_FRAME]}")


def default_place(records: Records) -> Path:
    """`figures/pocket` for the tracked records, `figures/latest` for a run's."""
    return FIGURES / ("pocket" if records.status == STORED else "latest")


def build_results(
    records: Records | str | Path | Sequence[str | Path] | None = None,
    figures_folder: str | Path | None = None,
    items: Sequence[str] = ITEMS,
    n_samples: int = DEFAULT_BOOTSTRAP.n_samples,
) -> list[Path]:
    """Builds the tables and figures of a place and returns the files written.

    Args:
        records: record frames, or the folders that hold them (see `load_records`); None for the
            tracked pocket records.
        figures_folder: where the files go; None for the place that fits the records.
        items: which of `ITEMS`.
        n_samples: bootstrap resamples.

    Raises:
        InputError: an unknown item, or records that must not be pooled.
    """
    unknown = [item for item in items if item not in ITEMS]
    if unknown:
        raise InputError(f"items {unknown}, allowed are {list(ITEMS)}")
    if not isinstance(records, Records):
        records = load_records(records)
    boot = Bootstrap(n_samples=n_samples)
    folder = default_place(records) if figures_folder is None else Path(figures_folder)
    needed = {FIGURE_OF_TABLE[item][0] for item in items if item in FIGURE_OF_TABLE}
    tables = {stem: make_table(stem, records, boot) for stem in TABLES if stem in {*items, *needed}}
    paths: list[Path] = []
    for stem in items:
        if stem in TABLES:
            paths += write_table(folder, tables[stem])
        else:
            of = FIGURE_OF_TABLE.get(stem, ("",))[0]
            paths += save_figure(folder, stem, *make_figure(stem, records, boot, tables.get(of)))
    return paths
