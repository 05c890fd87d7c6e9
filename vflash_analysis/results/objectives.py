"""T3, the training arms against compute.

Arms are compared first at every anchor of the same fixed texts, paired anchor by anchor; tau of
decoded text stands beside. Intervals resample training seeds and videos together; beside the paired
differences stands a t interval over the seeds' own differences, and every seed's value is a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.errors import InputError
from vflash_analysis.metrics import difference_of_ratios, grouped
from vflash_analysis.paths import TRACKED_FIGURES
from vflash_analysis.results.sources import (
    DecodeGroup,
    Records,
    compared_drafters,
    decode_groups,
    drafter_facts,
    that_decode,
)
from vflash_analysis.results.tidy import (
    ARM_ORDER,
    MEASURED,
    MISSING,
    STORED,
    Origin,
    checked,
    in_order,
    parse_setting,
    read_tidy_csv,
    setting_text,
    setting_words,
    tidy,
)
from vflash_analysis.results.write import Section, Table, cell_text, pivot, titled
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap, t_interval

FLOW_ARM = "self_reveal"
BASE_ARM = "mask_only"
Row = dict[str, Any]
_ANCHOR_ID = ["split", "clip_id", "anchor_index"]


def anchors_with_arms(records: Records) -> pd.DataFrame:
    """The anchors of deployed drafters (setting ""), each with its `arm`.

    Raises:
        InputError: two drafters of one split were not evaluated on the same anchors.
    """
    anchors = records.anchors.loc[records.anchors["setting"] == ""]
    facts = drafter_facts(records).set_index("drafter_sha256")["arm"]
    anchors = anchors.assign(arm=anchors["drafter_sha256"].map(facts))
    for (split,), rows in grouped(anchors, ["split"]):
        n_drafters = rows["drafter_sha256"].nunique()
        counts = rows.groupby(_ANCHOR_ID, observed=True)["drafter_sha256"].agg(["nunique", "size"])
        if ((counts["nunique"] != n_drafters) | (counts["size"] != n_drafters)).any():
            raise InputError(
                f"anchors of split '{split}': {n_drafters} drafters do not share the same "
                f"{len(counts)} anchors; evaluate them on one fixed set"
            )
    return anchors


def side_by_side(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Parts of two arms side by side: p0 / p1 of the first, p2 / p3 of the second."""
    zero = {"p2": 0.0, "p3": 0.0}
    moved = second.rename(columns={"p0": "p2", "p1": "p3"}).assign(p0=0.0, p1=0.0)
    return pd.concat([first.assign(**zero), moved], ignore_index=True)


def _of_seeds(parts: pd.DataFrame, seeds: set[int]) -> pd.DataFrame:
    return parts.loc[parts["train_seed"].isin(seeds)]


def _value_rows(
    row: Callable[..., Row], quantity: str, parts: pd.DataFrame, boot: Bootstrap, setting: str
) -> list[Row]:
    """The pooled value with its crossed interval, then each training seed's own value."""
    unit = "tokens"
    rows = [row(quantity, boot.seeds_and_videos(parts), unit, len(parts), setting=setting)]
    for (seed,), own in grouped(parts, ["train_seed"]):
        value = metrics.value_of(own, metrics.ratio)
        rows.append(row(quantity, value, unit, len(own), setting=f"{setting};seed={seed}"))
    return rows


def _difference_rows(
    row: Callable[..., Row],
    flow: pd.DataFrame,
    other: pd.DataFrame,
    boot: Bootstrap,
    setting: str,
) -> list[Row]:
    """self_reveal minus another arm: crossed interval, t interval over seeds, each seed's own."""
    seeds = set(flow["train_seed"]) & set(other["train_seed"])
    if not seeds:
        return []
    parts = side_by_side(_of_seeds(flow, seeds), _of_seeds(other, seeds))
    per_seed = [
        (seed, metrics.value_of(own, difference_of_ratios))
        for (seed,), own in grouped(parts, ["train_seed"])
    ]
    value = boot.seeds_and_videos(parts, difference_of_ratios)
    n = int(parts["p1"].gt(0).sum())
    rows = [row("paired_difference", value, "tokens", n, setting=setting)]
    if len(seeds) > 1:
        by_seed = t_interval([difference for _, difference in per_seed])
        rows.append(row("paired_difference_t", by_seed, "tokens", setting=setting))
    for seed, difference in per_seed:
        rows.append(
            row("paired_difference", difference, "tokens", setting=f"{setting};seed={seed}")
        )
    return rows


def _cell_rows(
    origin: Origin,
    quantity: str,
    by_arm: dict[str, pd.DataFrame],
    boot: Bootstrap,
    setting: str,
    method: str = "",
) -> list[Row]:
    """One budget and data size: every arm's value, and self_reveal against each other arm."""
    rows: list[Row] = []
    for arm in in_order(by_arm, ARM_ORDER):
        row = partial(origin.row, method=method, objective=arm)
        rows += _value_rows(row, quantity, by_arm[arm], boot, setting)
        if arm != FLOW_ARM and FLOW_ARM in by_arm:
            minus = f"{setting};minus={arm}"
            row = partial(origin.row, method=method, objective=FLOW_ARM)
            rows += _difference_rows(row, by_arm[FLOW_ARM], by_arm[arm], boot, minus)
    return rows


def _anchor_cells(
    anchors: pd.DataFrame,
) -> Iterator[tuple[str, dict[str, pd.DataFrame]]]:
    """(setting, parts by arm) for every split, data size and budget."""
    many_splits = anchors["split"].nunique() > 1
    for (split, clips, steps), rows in grouped(anchors, ["split", "training_clips", "steps"]):
        parts = {
            str(arm): metrics.anchor_accepted_length_parts(own)
            for (arm,), own in grouped(rows, ["arm"])
        }
        parts = {arm: own for arm, own in parts.items() if not own.empty}
        yield setting_text(clips=clips, steps=steps, split=split if many_splits else None), parts


def _plateau_rows(origin: Origin, lengths: list[Row]) -> list[Row]:
    """The level of each arm's curve over budgets (`metrics.plateau`); missing while it rises.

    None for an arm whose last budget is not twice the one before it.
    """
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in lengths:
        keys = parse_setting(row["setting"])
        if row["quantity"] == "anchor_accepted_length" and not {"seed", "minus"} & set(keys):
            steps = int(keys.pop("steps"))
            curves.setdefault((row["objective"], setting_text(**keys)), {})[steps] = row["value"]
    rows = []
    for (arm, setting), by_steps in curves.items():
        budgets = sorted(by_steps)
        if len(budgets) > 1 and budgets[-1] == 2 * budgets[-2]:
            level = metrics.plateau([by_steps[steps] for steps in budgets])
            value = math.nan if level is None else level
            n = len(by_steps)
            rows.append(origin.row("plateau", value, "tokens", n, objective=arm, setting=setting))
    return rows


def _decoded_cells(
    group: DecodeGroup, facts: pd.DataFrame
) -> Iterator[tuple[str, dict[str, pd.DataFrame]]]:
    """(setting, tau parts by arm) of the decoded chain for every data size and budget."""
    chain = group.rows.loc[(group.rows["method"] == "chain") & (group.rows["setting"] == "")]
    known = facts[["drafter_sha256", "training_clips", "steps"]]
    chain = chain.merge(known, on="drafter_sha256", how="inner")
    for (clips, steps), rows in grouped(chain, ["training_clips", "steps"]):
        parts = {
            str(arm): metrics.accepted_length_parts(own) for (arm,), own in grouped(rows, ["arm"])
        }
        yield setting_text(clips=clips, steps=steps), parts


def _compute_rows(item: str, records: Records, facts: pd.DataFrame) -> list[Row]:
    """Cost of every arm, data size and budget, and what became of revealed slots at its end.

    Forward-equivalents are the mean over the seeds of `facts`. Seconds are of drafters that decode
    alone: those of an ablation may have been trained side by side.
    """
    rows: list[Row] = []
    keys = ["training_clips", "steps", "arm"]
    arms = drafter_facts(records)[["drafter_sha256", "arm"]]
    logs = records.training.loc[records.training["setting"] == ""].merge(arms, on="drafter_sha256")
    last = logs.sort_values("step").groupby("drafter_sha256", observed=True, as_index=False).last()
    for (clips, steps, arm), own in grouped(facts, keys):
        origin = Origin(item, "", records.status, records.source)
        row = partial(
            origin.row, objective=str(arm), setting=setting_text(clips=clips, steps=steps)
        )
        compute = float(own["forward_equivalents"].mean())
        rows.append(row("forward_equivalents", compute, "forwards", len(own)))
        ended = last.loc[last["drafter_sha256"].isin(set(own["drafter_sha256"]))]
        for share, count in (("wrong_corrected", "n_wrong"), ("right_kept", "n_right")):
            weights = ended[count].astype("Float64").fillna(0).to_numpy(dtype=float)
            values = ended[share].astype(float).fillna(0).to_numpy()
            if weights.sum() > 0:
                mean = float(np.average(values, weights=weights))
                rows.append(row(share, mean, "share", int(weights.sum())))
    decode = last["drafter_sha256"].isin(that_decode(records))
    for (device, clips, steps, arm), own in grouped(last.loc[decode], ["device", *keys]):
        origin = Origin(item, str(device), records.status, records.source)
        row = partial(
            origin.row, objective=str(arm), setting=setting_text(clips=clips, steps=steps)
        )
        seconds = own["seconds"].astype(float).dropna()
        if len(seconds):
            rows.append(row("train_s", float(seconds.mean()), "s", len(seconds)))
    return rows


def _variant_rows(item: str, records: Records, facts: pd.DataFrame, boot: Bootstrap) -> list[Row]:
    """Other questions asked at the same anchors: accuracy with 0, 4, 8, 12 slots revealed, length
    with another context or more reveal rounds. The question is a key of the `setting` cell."""
    arms = facts.set_index("drafter_sha256")["arm"]
    anchors = records.anchors.assign(arm=records.anchors["drafter_sha256"].map(arms))
    anchors = anchors.loc[anchors["arm"].notna()]
    many_splits = anchors["split"].nunique() > 1
    origin = Origin(item, "", records.status, records.source)
    keys = ["split", "training_clips", "steps", "setting", "arm"]
    rows: list[Row] = []
    for (split, clips, steps, question, arm), own in grouped(anchors, keys):
        asked = str(question).replace(",", ";") or "revealed=0"
        cell = setting_text(clips=clips, steps=steps, split=split if many_splits else None)
        row = partial(origin.row, objective=str(arm), setting=f"{cell};{asked}")
        if "revealed" in asked:
            own = own.loc[own["slot_match"].notna()]  # tracked slot by slot for some drafters only
            if own.empty:
                continue
            parts = metrics.masked_slot_accuracy_parts(own)
            n = int(parts["p1"].sum())
            rows.append(row("masked_slot_accuracy", boot.seeds_and_videos(parts), "share", n))
        else:
            parts = metrics.anchor_accepted_length_parts(own)
            value = boot.seeds_and_videos(parts)
            rows.append(row("anchor_accepted_length", value, "tokens", len(parts)))
    return rows


def objectives_rows(item: str, records: Records, boot: Bootstrap) -> list[Row]:
    """All rows of T3; see `objectives_table`."""
    compared = compared_drafters(records)
    rows = _compute_rows(item, records, compared)
    origin = Origin(item, "", records.status, records.source)
    if not records.anchors.empty:
        anchors = anchors_with_arms(records)
        anchors = anchors.loc[anchors["drafter_sha256"].isin(set(compared["drafter_sha256"]))]
        for setting, by_arm in _anchor_cells(anchors):
            rows += _cell_rows(origin, "anchor_accepted_length", by_arm, boot, setting)
        rows += _plateau_rows(origin, rows)
        rows += _variant_rows(item, records, compared, boot)
    facts = drafter_facts(records)
    for group in decode_groups(records):
        origin = group.origin(item, records)
        for setting, by_arm in _decoded_cells(group, facts):
            rows += _cell_rows(origin, "accepted_length", by_arm, boot, setting, "chain")
    return rows


def stored_rows(item: str, records: Records) -> pd.DataFrame:
    """The tracked table's rows, marked as stored, to stand beside those of a run of its settings."""
    drawn = TRACKED_FIGURES / f"{item}.csv"
    if not (records.as_tracked and drawn.is_file()):
        return tidy([])
    stored = read_tidy_csv(drawn)
    return stored.loc[stored["status"] != MISSING]


def objectives_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T3: all arms against compute: accepted length at anchors and decoded, paired differences.

    A run's own rows come first, then those of the tracked table, of other training seeds.
    """
    item = "T3_objectives"
    own = tidy(objectives_rows(item, records, boot))
    stored = stored_rows(item, records)
    frame = checked(pd.concat([own, stored], ignore_index=True)) if len(stored) else own
    decoded = ""
    if (frame["quantity"] == "accepted_length").any():
        decoded = (
            ", and tau of the decoded chain, its suites pooled where T2's macro is their mean "
            "(n: decodes), on the device named in its row"
        )
    caption = (
        "Accepted length of every training arm by data size and budget, at every full-block anchor "
        f"of fixed AR texts (n: anchors over all training seeds){decoded}. Differences are self "
        "reveal minus the named arm on the same anchors, "
        f"seeds and texts. {boot.caption()} Training seeds are resampled with the videos; t: over "
        "seed-paired means (n: seeds). Drafters that decode, on whose seed the settings were "
        "chosen, are left out of a cell that has other seeds. Plateau: mean of the last two "
        "budgets, where that doubling gained at most 2 %, else missing (n: budgets). Compute: mean "
        "over seeds (n: seeds). Wrong corrected, right kept: in the last training batches logged "
        "(n: slots). Anchor values do not depend on a device; training time is of the drafters "
        "that decode."
        + (" Rows marked stored: the tracked records, not this run." if len(stored) else "")
    )
    return Table(item, "T3 Training objectives against compute", caption, frame, _sections(frame))


def _sections(frame: pd.DataFrame) -> tuple[Section, ...]:
    keys = [parse_setting(text) for text in frame["setting"]]
    pooled = frame.loc[["seed" not in key for key in keys]]
    pooled = pooled.assign(minus=[parse_setting(t).get("minus", "") for t in pooled["setting"]])
    pooled["cell"] = [t.split(";minus=")[0] for t in pooled["setting"]]
    places = [_place(cell) for cell in pooled["cell"]]
    pooled = pooled.iloc[sorted(range(len(places)), key=places.__getitem__)]
    pooled["cell"] = [setting_words(cell) for cell in pooled["cell"]]
    if set(pooled["status"]) >= {MEASURED, STORED}:
        kept = pooled["status"] == STORED
        marked = pooled.loc[kept].assign(cell=pooled.loc[kept, "cell"] + " (stored)")
        pooled = pd.concat([pooled.loc[~kept], marked])
    sections = []
    quantities = ("anchor_accepted_length", "plateau", "accepted_length", "masked_slot_accuracy",
                  "wrong_corrected", "right_kept", "forward_equivalents", "train_s")  # fmt: skip
    for quantity in quantities:
        own = pooled.loc[pooled["quantity"] == quantity]
        if own.empty:
            continue
        arms = in_order(own["objective"], ARM_ORDER)
        sections.append(_section(own, titled(own), "objective", arms))
    for quantity in ("paired_difference", "paired_difference_t"):
        own = pooled.loc[pooled["quantity"] == quantity]
        if own.empty:
            continue
        arms = in_order(own["minus"], ARM_ORDER)
        sections.append(_section(own, f"{titled(own)}: self reveal minus", "minus", arms))
    return tuple(sections)


def _place(cell: str) -> tuple[list[str], list[int]]:
    """Where a setting stands: by what is asked beside it, then by data size, budget and number."""
    keys = parse_setting(cell)
    numbers = [int(keys.pop(key, 0)) for key in ("clips", "steps")]
    numbers += [int(value) for value in keys.values() if value.isdigit()]
    return [key if value.isdigit() else f"{key}={value}" for key, value in keys.items()], numbers


def _section(own: pd.DataFrame, title: str, column: str, arms: list[str]) -> Section:
    """Settings down, arms across; method and device only where some row has one."""
    names = [("cell", "setting")]
    names += [(key, key) for key in ("method", "device") if (own[key] != "").any()]
    return pivot(own, title, names, column, arms, cell_text)
