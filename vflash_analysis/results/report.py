"""Builds every table and figure of a place from its records: `vflash figures`.

The tracked pocket records are drawn into `figures/pocket`, with rows marked "stored"; a run's
records go to `figures/latest`. Notebooks call `make_table` and `make_figure` for one item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from vflash_analysis.errors import InputError
from vflash_analysis.paths import FIGURES, TRACKED_FIGURES
from vflash_analysis.results.beside import beside_paper_table
from vflash_analysis.results.cost import cost_table
from vflash_analysis.results.cost_figures import cost_figure
from vflash_analysis.results.curves import acceptance_frame, training_frame
from vflash_analysis.results.cycle_figure import cycle_figure
from vflash_analysis.results.cycle_time import cycle_frame
from vflash_analysis.results.design import design_table, share_table
from vflash_analysis.results.figures import acceptance_figure, speedup_figure
from vflash_analysis.results.layer_figures import attention_figure, similarity_figure
from vflash_analysis.results.layers import attention_frame, similarity_frame
from vflash_analysis.results.length_figure import length_figure
from vflash_analysis.results.lengths import length_table
from vflash_analysis.results.objectives import objectives_table
from vflash_analysis.results.one_cycle import one_cycle_frame
from vflash_analysis.results.one_cycle_figure import one_cycle_figure
from vflash_analysis.results.replay import RULE, Showing, caption, replay_of, write_page
from vflash_analysis.results.replay_gif import write_gif
from vflash_analysis.results.sources import Records, load_records, some_names
from vflash_analysis.results.style import save_figure
from vflash_analysis.results.tables import accepted_length_table, lossless_table, speedup_table
from vflash_analysis.results.tidy import STORED
from vflash_analysis.results.training_figures import objectives_figure, training_figure
from vflash_analysis.results.write import Table, write_table
from vflash_analysis.stats import Bootstrap

MakeTable = Callable[[Records, Bootstrap], Table]
MakeFrame = Callable[[Records, Bootstrap], pd.DataFrame]
MakeFigure = Callable[[pd.DataFrame], tuple[Figure, pd.DataFrame]]

TABLES: dict[str, MakeTable] = {
    "T1_speedup": speedup_table,
    "T2_accepted_length": accepted_length_table,
    "T3_objectives": objectives_table,
    "T4_lossless": lossless_table,
    "T5_visual_length": length_table,
    "T6_visual_share": share_table,
    "T7_design_choices": design_table,
    "T9_beside_paper": beside_paper_table,
    "T10_cost_model": cost_table,
}
# A figure draws the frame of a table, or one of its own.
FIGURE_OF_TABLE: dict[str, tuple[str, MakeFigure]] = {
    "F1_speedup": ("T1_speedup", speedup_figure),
    "F6_visual_length": ("T5_visual_length", length_figure),
    "F_objectives": ("T3_objectives", objectives_figure),
    "F9_cost_model": ("T10_cost_model", cost_figure),
}
FIGURE_OF_FRAME: dict[str, tuple[MakeFrame, MakeFigure]] = {
    "F2_cycle": (lambda records, boot: one_cycle_frame(records), one_cycle_figure),
    "F4_acceptance_by_position": (acceptance_frame, acceptance_figure),
    "F5_training": (lambda records, boot: training_frame(records), training_figure),
    "F7_visual_attention": (attention_frame, attention_figure),
    "F8_layer_similarity": (similarity_frame, similarity_figure),
    "F10_cycle_time": (cycle_frame, cycle_figure),
}


def make_table(stem: str, records: Records, boot: Bootstrap) -> Table:
    """One table; its caption names what a run lacks and what it reused."""
    if stem not in TABLES:
        raise InputError(f"table '{stem}', allowed are {list(TABLES)}")
    table = TABLES[stem](records, boot)
    told = table.caption
    if records.lacking:
        told += f" Not in it, as not done: {some_names(records.lacking)}."
    if records.stale:
        told += f" Reused though their code or inputs have changed: {some_names(records.stale)}."
    return replace(table, caption=told)


def make_figure(
    stem: str, records: Records, boot: Bootstrap, table: Table | None = None
) -> tuple[Figure, pd.DataFrame]:
    """One figure and the frame it drew; `table` spares making the figure's table again."""
    if stem in FIGURE_OF_TABLE:
        of, draw = FIGURE_OF_TABLE[stem]
        return draw((table or make_table(of, records, boot)).frame)
    if stem in FIGURE_OF_FRAME:
        frame_of, draw = FIGURE_OF_FRAME[stem]
        return draw(frame_of(records, boot))
    raise InputError(f"figure '{stem}', allowed are {[*FIGURE_OF_TABLE, *FIGURE_OF_FRAME]}")


def write_replay(folder: str | Path, shown: Sequence[Showing], told: str) -> list[Path]:
    """F3 as a page and as an animation; returns their paths.

    Args:
        folder: gets both.
        shown: clips and their decodes.
        told: how the clips were chosen, which ends the caption.
    """
    words = f"{caption(shown)} {told}" if shown else ""
    return [write_page(folder, shown, words), write_gif(folder, shown, words)]


def build_results(records: Records | None = None, *, n_samples: int) -> list[Path]:
    """Builds every table and figure of a place and returns the files written.

    Args:
        records: a run's, drawn into `figures/latest`; None for the tracked pocket records, drawn
            into `figures/pocket`.
        n_samples: bootstrap resamples.

    Raises:
        InputError: records that must not be pooled.
    """
    records = records or load_records()
    boot = Bootstrap(n_samples=n_samples)
    folder = TRACKED_FIGURES if records.status == STORED else FIGURES / "latest"
    tables = {stem: make_table(stem, records, boot) for stem in TABLES}
    paths = [path for table in tables.values() for path in write_table(folder, table)]
    for stem in (*FIGURE_OF_TABLE, *FIGURE_OF_FRAME):
        table = tables[FIGURE_OF_TABLE[stem][0]] if stem in FIGURE_OF_TABLE else None
        paths += save_figure(folder, stem, *make_figure(stem, records, boot, table))
    return [*paths, *write_replay(folder, replay_of(records), RULE)]
