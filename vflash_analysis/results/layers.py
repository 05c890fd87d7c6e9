"""The data of F7, attention to the video and what its removal costs, and F8, similarity by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.metrics import grouped
from vflash_analysis.results.sources import Records, count_clips
from vflash_analysis.results.tidy import Origin, label, tidy
from vflash_analysis.schemas import LAYERS_STUDY, NO_LAYER
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap

F7, F8 = "F7_visual_attention", "F8_layer_similarity"
KINDS = ("visual", "instruction", "template")
QUERIES: Mapping[str, str] = {  # the row that attends: what its quantities begin with, its name
    "": "last instruction token",
    "end_": "last prompt token",
}
# Of KINDS, as recorded: here "text" is the template alone, in SIMILARITIES all that is not visual.
MASSES = ("attention_visual", "attention_instruction", "attention_text")
MAX_HEAD, EVEN = "attention_visual_max_head", "visual_positions"
REMOVED = ("static_accuracy", "dynamic_accuracy", "agreement")
SIMILARITIES: Mapping[str, str] = {
    "step_similarity": "state before the layer and after it",
    "input_similarity": "embedding and state after the layer",
}
MODALITIES = ("visual", "text")


def attention_frame(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> pd.DataFrame:
    """F7's data: attention by kind of position, and the text without the video, by layer.

    `setting` is the layer: whose attention it is, or from which one on no text sees the video, the
    number of layers meaning that nothing is removed. Rows without one are of no layer: the share of
    visual positions, and the accuracies of plain decoding. `n` counts clips.
    """
    by_query = [f"{query}{name}" for query in QUERIES for name in (*MASSES, EVEN)]
    return _frame(F7, records, (*by_query, MAX_HEAD, *REMOVED), boot)


def similarity_frame(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> pd.DataFrame:
    """F8's data: mean cosines of a position's states, visual positions and all others apart.

    `setting` is the layer after which the state is taken; `n` counts clips.
    """
    names = [f"{between}_{kind}" for between in SIMILARITIES for kind in MODALITIES]
    return _frame(F8, records, names, boot)


def removal_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> pd.DataFrame:
    """F7's right panel as a page shows it: a row a layer, "value [low, high]" by quantity."""
    frame = attention_frame(records, boot)
    frame = frame.loc[frame["quantity"].isin(REMOVED)]
    several = frame["device"].nunique() > 1
    cells: dict[str, dict[str, str]] = {}
    for row in frame.to_dict("records"):
        place = row["setting"] or "plain decoding"
        place = f"{row['device']}: {place}" if several else place
        cells.setdefault(place, {})[label(row["quantity"])] = _cell(row)
    return pd.DataFrame.from_dict(cells, orient="index").rename_axis("layer x").fillna("")


def _cell(row: Mapping[Any, Any]) -> str:
    value = f"{row['value']:.2f}"
    return value if math.isnan(row["low"]) else f"{value} [{row['low']:.2f}, {row['high']:.2f}]"


def measured_clips(measures: pd.DataFrame) -> pd.DataFrame:
    """One row per suite: clips, those measured, and why the others were not."""
    rows = []
    for (benchmark,), own in grouped(measures, ["benchmark"]):
        planned, done = clip_counts(own)
        reasons = "; ".join(sorted(set(own["reason"].dropna())))
        rows.append({"suite": benchmark, "clips": planned, "measured": done, "reasons": reasons})
    return pd.DataFrame(rows, columns=["suite", "clips", "measured", "reasons"])


def clip_counts(measures: pd.DataFrame) -> tuple[int, int]:
    """(clips planned, clips measured)."""
    return count_clips(measures), count_clips(measures.loc[measures["reason"].isna()])


def _frame(item: str, records: Records, quantities: Sequence[str], boot: Bootstrap) -> pd.DataFrame:
    """Sums over clips, by device, quantity and layer, with intervals over videos."""
    measures = records.measures
    measures = metrics.usable_measures(measures.loc[measures["study"] == LAYERS_STUDY])
    rows: list[dict[str, Any]] = []
    for (device, dtype), of_device in grouped(measures, ["device", "dtype"]):
        origin = Origin(item, f"{device}, {dtype}", records.status, records.source)
        for quantity in quantities:
            of_quantity = of_device.loc[of_device["quantity"] == quantity]
            for (layer,), own in grouped(of_quantity, ["layer"]):
                value = boot.videos(metrics.measure_parts(own))
                setting = "" if layer == NO_LAYER else str(layer)
                clips = count_clips(own)
                rows.append(origin.row(quantity, value, "share", clips, setting=setting))
    for row in rows:
        if "similarity" in row["quantity"]:
            row["unit"] = "cosine"
    return tidy(rows)
