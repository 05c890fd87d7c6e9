"""The data of F4, acceptance by slot, and F5, training by step, as tidy frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.metrics import grouped
from vflash_analysis.results.objectives import BASE_ARM, FLOW_ARM, anchors_with_arms
from vflash_analysis.results.sources import Records, decode_groups, final_drafters
from vflash_analysis.results.tidy import ARM_ORDER, Origin, in_order, setting_text, tidy
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap, Interval

TRAINING_SLOTS = (1, 2, 4, 8, 15)
VALIDATION = "validation"
Row = dict[str, Any]


def _slot_rows(
    row: Callable[..., Row],
    parts_of: Callable[[int, bool], pd.DataFrame],
    n_slots: int,
    boot: Bootstrap,
) -> list[Row]:
    rows: list[Row] = []
    for quantity, survival in (("conditional_acceptance", False), ("survival", True)):
        for slot in range(1, n_slots + 1):
            parts = parts_of(slot, survival)
            n = int(parts["p1"].sum())
            value = boot.seeds_and_videos(parts)
            rows.append(row(quantity, value, "share", n, setting=str(slot)))
    return rows


def acceptance_frame(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> pd.DataFrame:
    """F4's data: acceptance by slot of the final flow and mask-only drafters.

    Rows without a method are over all anchors of the fixed texts, rows of method `chain` over the
    decoded cycles. `setting` is the slot, `n` the slots judged.
    """
    item = "F4_acceptance_by_position"
    final = final_drafters(records)
    chosen = final.loc[final["arm"].isin((BASE_ARM, FLOW_ARM)), ["drafter_sha256", "arm"]]
    rows: list[Row] = []
    if not records.anchors.empty:
        anchors = anchors_with_arms(records)
        anchors = anchors.loc[anchors["drafter_sha256"].isin(set(chosen["drafter_sha256"]))]
        origin = Origin(item, "", records.status, records.source)
        for arm in in_order(anchors["arm"], ARM_ORDER):
            own = anchors.loc[anchors["arm"] == arm]
            row = partial(origin.row, objective=arm)
            parts_of = partial(metrics.anchor_position_parts, own)
            rows += _slot_rows(row, parts_of, int(own["n_slots"].max()), boot)
    for group in decode_groups(records):
        origin = group.origin(item, records)
        cycles = group.cycles.loc[
            (group.cycles["method"] == "chain") & (group.cycles["setting"] == "")
        ].merge(chosen, on="drafter_sha256", how="inner")
        for arm in in_order(cycles["arm"], ARM_ORDER):
            own = cycles.loc[cycles["arm"] == arm]
            row = partial(origin.row, method="chain", objective=arm)
            parts_of = partial(metrics.cycle_position_parts, own)
            rows += _slot_rows(row, parts_of, int(metrics.draft_slots(own).max()), boot)
    return tidy(rows)


def training_frame(records: Records) -> pd.DataFrame:
    """F5's data: loss at the all-mask state and accuracy of slots 1, 2, 4, 8, 15 by step.

    Of each arm's final drafters, on validation clips where they were logged
    (setting "validation"), else on the training batches. The value is the mean over training
    seeds, low and high are the smallest and largest seed, `n` the seeds; the device cell names all
    that trained.
    """
    item = "F5_training"
    facts = final_drafters(records)
    held_out = records.training.loc[records.training["setting"] == VALIDATION]
    logs = records.training.loc[records.training["setting"] == ""] if held_out.empty else held_out
    logs = logs.merge(facts[["drafter_sha256", "arm"]], on="drafter_sha256", how="inner")
    rows: list[Row] = []
    devices = "; ".join(sorted(set(logs["device"])))
    origin = Origin(item, devices, records.status, records.source)
    for (arm, step), own in grouped(logs, ["arm", "step"]):
        row = partial(origin.row, objective=str(arm))
        for quantity in ("loss_mask", "loss_flow"):
            rows += _seed_span(row, quantity, "nats", own[quantity], setting_text(step=step))
        slots = [values for values in own["slot_accuracy"] if values is not None]
        for slot in TRAINING_SLOTS:
            accuracy = pd.Series([v[slot - 1] for v in slots if len(v) >= slot], dtype=float)
            setting = setting_text(step=step, slot=slot)
            rows += _seed_span(row, "slot_accuracy", "share", accuracy, setting)
    return tidy(rows)


def _seed_span(
    row: Callable[..., Row], quantity: str, unit: str, values: pd.Series, setting: str
) -> list[Row]:
    values = values.astype(float).dropna()
    if values.empty:
        return []
    span = Interval(float(values.mean()), float(values.min()), float(values.max()), len(values))
    return [row(quantity, span, unit, setting=setting)]
