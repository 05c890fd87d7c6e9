"""The training figures from tidy frames: F5 loss and slot accuracy, and T3 against compute."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from vflash_analysis.results.curves import TRAINING_SLOTS
from vflash_analysis.results.objectives import FLOW_ARM
from vflash_analysis.results.style import (
    FAINT,
    TEXT_WIDTH,
    Drawn,
    arm_handles,
    colour,
    devices_text,
    error_bar,
    finish,
    marker,
    new_figure,
    no_data,
    span_text,
    spread,
    styled,
)
from vflash_analysis.results.tidy import (
    ARM_ORDER,
    MEASURED,
    MISSING,
    STORED,
    checked,
    in_order,
    label,
    parse_setting,
)


def _label_ends(axis: Axes, ends: dict[str, tuple[float, float]], gap: float, right: float) -> None:
    """Names lines at their right ends, moved apart where they would overlap."""
    arms = list(ends)
    heights = spread([ends[arm][1] for arm in arms], gap)
    for arm, height in zip(arms, heights, strict=True):
        x, y = ends[arm]
        axis.plot(
            [x, right], [y, height], color=colour(arm), linewidth=0.6, clip_on=False, alpha=0.6
        )
        axis.annotate(
            textwrap.fill(label(arm), 18), (right, height), xytext=(3, 0), textcoords="offset points",
            color=colour(arm), fontsize=6.8, fontweight="bold", va="center", linespacing=1.0,
            annotation_clip=False,
        )  # fmt: skip


# ---- F5 ---------------------------------------------------------------------------------------
def _with_keys(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    keys = [parse_setting(text) for text in frame["setting"]]
    return frame.assign(**{name: [key.get(name, "") for key in keys] for name in names})


@styled
def training_figure(frame: pd.DataFrame, arms: Sequence[str] | None = None) -> Drawn:
    """F5: loss at the all-mask state and accuracy of five slots by step, one line per arm.

    Args:
        frame: from `curves.training_frame`.
        arms: arms that keep a place in the legend; by default the ones there are.
    """
    frame = checked(frame)
    keyed = _with_keys(frame, "step", "slot")
    shown = in_order(frame["objective"], ARM_ORDER) if arms is None else list(arms)
    figure, axes = new_figure(TEXT_WIDTH, 4.7, 2, 3, sharex=True)
    panels = [("loss_mask", "", "loss from all masks (nats)")]
    panels += [("slot_accuracy", str(slot), f"accuracy at slot {slot}") for slot in TRAINING_SLOTS]
    limits = _share_limits(keyed.loc[keyed["quantity"] == "slot_accuracy"])
    for axis, (quantity, slot, words) in zip(axes.flat, panels, strict=True):
        rows = keyed.loc[(keyed["quantity"] == quantity) & (keyed["slot"] == slot)]
        for place, arm in enumerate(shown):
            _draw_steps(axis, rows.loc[rows["objective"] == arm], arm, place / len(shown))
        if rows.empty:
            no_data(axis)
        axis.set_title(words)
        if quantity == "slot_accuracy":
            axis.set_ylim(*limits)
    for axis in axes[-1]:
        axis.set_xlabel("training step")
    bands = "; bands: smallest and largest seed" if (frame["n"] > 1).any() else ""
    caption = (
        "An arm differs where its line leaves the others' bands. The learning rate decays to the "
        "end, so a longer schedule is another run (F_objectives). "
        f"Trained on {devices_text(frame)}. "
        f"Lines: mean over training seeds (n = {span_text(frame['n'])}){bands}. The data size and "
        "budget of the drafters that decode, all scored from the all-mask state, the one that is "
        f"deployed. The accuracies have one scale{', which does not begin at 0' * (limits[0] > 0)}."
    )
    handles = arm_handles(shown, set(frame["objective"]))
    finish(figure, "Training: loss and accuracy by slot", caption, handles, max(1, len(shown)))
    return figure, frame


def _share_limits(rows: pd.DataFrame) -> tuple[float, float]:
    """The tenths below and above all shares and their intervals; 0 and 1 without any."""
    values = rows[["value", "low", "high"]].to_numpy(dtype=float)
    if np.isnan(values).all():
        return 0.0, 1.0
    low, high = np.floor(10 * np.nanmin(values)) / 10, np.ceil(10 * np.nanmax(values)) / 10
    return float(low), float(max(high, low + 0.1))


def _draw_steps(axis: Axes, rows: pd.DataFrame, arm: str, aside: float) -> None:
    """An arm's line and band, with two or three of its marks, that begin `aside` of a gap later.

    So marks of arms whose lines lie on each other stand beside each other.
    """
    tone = colour(arm)
    rows = rows.assign(x=rows["step"].astype(int)).sort_values("x")
    x, value, low, high = (rows[n].to_numpy(dtype=float) for n in ("x", "value", "low", "high"))
    axis.fill_between(x, low, high, color=tone, alpha=0.14, linewidth=0)
    every = max(1, len(x) // 2)
    axis.plot(
        x, value, color=tone, linewidth=1.1, marker=marker(arm), markersize=4.2,
        markeredgecolor="white", markeredgewidth=0.5, markevery=(int(aside * every), every),
    )  # fmt: skip


# ---- T3's figure ------------------------------------------------------------------------------
_LENGTHS = (
    ("anchor_accepted_length", "accepted length\nfull-block anchors of fixed AR texts"),
    ("accepted_length", "accepted length τ\ndecoded chain"),
)


def _compute_of(frame: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    rows = frame.loc[frame["quantity"] == "forward_equivalents"]
    return {
        (str(r["objective"]), str(r["clips"]), str(r["steps"])): float(r["value"])
        for _, r in rows.iterrows()
    }


@styled
def objectives_figure(frame: pd.DataFrame, arms: Sequence[str] = ARM_ORDER) -> Drawn:
    """T3's figure: accepted length against training compute, a column per data size.

    A dotted line marks an arm's plateau at anchors, where the table has one.
    """
    frame = checked(frame)
    asides = ("seed", "minus", "context", "rounds", "revealed")
    keyed = _with_keys(frame, "clips", "steps", "split", *asides)
    keyed = keyed.loc[(keyed[list(asides)] == "").all(axis=1)]
    compute = _compute_of(keyed)
    mixed = set(frame["status"]) >= {MEASURED, STORED}
    wanted = [quantity for quantity, _ in _LENGTHS]
    there = keyed.loc[keyed["status"] != MISSING]
    lengths = there.loc[there["quantity"].isin(wanted)]
    levels = there.loc[there["quantity"] == "plateau"]
    lines = [
        (quantity, own, ", ".join(filter(None, (words, beside))))
        for quantity, words in _LENGTHS
        for beside, own in _apart(lengths.loc[lengths["quantity"] == quantity])
    ] or [(_LENGTHS[0][0], lengths, _LENGTHS[0][1])]
    sizes = sorted(set(lengths["clips"]), key=int) or [""]
    figure, axes = new_figure(
        TEXT_WIDTH, 1.1 + 2.0 * len(lines), len(lines), len(sizes), sharex=True, sharey="row"
    )
    for line, (quantity, row, words) in enumerate(lines):
        splits = set(row["split"])
        all_ends = []
        for axis, size in zip(axes[line], sizes, strict=True):
            own = levels.loc[(levels["clips"] == size) & levels["split"].isin(splits)]
            level = dict(zip(own["objective"], own["value"].astype(float), strict=True))
            level = level if quantity == _LENGTHS[0][0] else {}
            rows = row.loc[row["clips"] == size]
            all_ends.append(_draw_compute_lines(axis, rows, compute, level, arms, mixed))
        for axis, ends in zip(axes[line], all_ends, strict=True):
            if not ends:
                no_data(axis, _why_empty(quantity, row, sizes))
        if all_ends[-1]:
            low, high = axes[line, -1].get_ylim()
            right = 1.12 * axes[line, -1].get_xlim()[1]
            _label_ends(axes[line, -1], all_ends[-1], 0.115 * (high - low), right)
        axes[line, 0].set_ylabel(words)
    for axis, size in zip(axes[0], sizes, strict=True):
        axis.set_title(f"{size} training clips" if size else "no training data")
    for axis in axes[-1]:
        axis.set_xlabel("training compute (forward-equivalents)")
    absent = [label(arm) for arm in arms if arm not in set(lengths["objective"])]
    caption = (
        "Higher at the same compute is better. "
        f"Error bars: 95 % bootstrap over training seeds ({_seeds_text(frame, wanted)} a point) and "
        f"videos (n = {span_text(lengths['n'])} anchors or decodes). Each point is its own full "
        f"schedule; arms of equal compute stand slightly apart. Decoded on {devices_text(lengths)}."
        + (" Dotted: plateau (the last doubling gained at most 2 %)." if len(levels) else "")
        + (" Hollow: the tracked records, not this run." if mixed else "")
        + (f" No data: {'; '.join(absent)}." if absent else "")
    )
    finish(figure, "Training objectives against compute", caption)
    drawn = keyed.index[keyed["quantity"] == "forward_equivalents"]
    return figure, frame.loc[lengths.index.union(levels.index).union(drawn)]


def _why_empty(quantity: str, rows: pd.DataFrame, sizes: Sequence[str]) -> str:
    """What an empty panel says: suites are decoded with the drafters of some data sizes only."""
    others = [size for size in sizes if size in set(rows["clips"])]
    if quantity != "accepted_length" or not others:
        return "no data"
    return f"not decoded: the suites are\ndecoded with drafters of\n{' and '.join(others)} clips"


def _seeds_text(frame: pd.DataFrame, quantities: Sequence[str]) -> str:
    """How many training seeds the points have, as a caption gives n."""
    keyed = _with_keys(frame, "seed", "minus", "clips", "steps")
    own = keyed.loc[(keyed["seed"] != "") & keyed["quantity"].isin(quantities)]
    own = own.loc[own["minus"] == ""]
    point = ["quantity", "device", "status", "objective", "clips", "steps"]
    return span_text(own.groupby(point)["seed"].nunique())


def _apart(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows that may share a panel, and what tells them from the other panels' rows.

    Stored rows may be of another device than a run's; two devices of one run stand apart.
    """
    for split, own in rows.groupby("split", sort=True):
        if own.groupby("status")["device"].nunique().max() == 1:
            yield str(split), own
            continue
        for device, part in own.groupby("device", sort=True):
            yield "\n".join(filter(None, (str(split), str(device)))), part


def _draw_compute_lines(
    axis: Axes,
    rows: pd.DataFrame,
    compute: dict[tuple[str, str, str], float],
    level: dict[str, float],
    arms: Sequence[str],
    mixed: bool,
) -> dict[str, tuple[float, float]]:
    """Draws one line per arm, to its plateau where `level` has one, and returns where each ends.

    With `mixed`, stored points are hollow.
    """
    ends: dict[str, tuple[float, float]] = {}
    edge = 1.6 * max(compute.values(), default=1.0)
    keys = zip(rows["objective"], rows["clips"], rows["steps"], strict=True)
    rows = rows.assign(x=[compute.get(key, math.nan) for key in keys]).dropna(subset=["x"])
    for arm in arms:
        ours = rows.loc[rows["objective"] == arm]
        if ours.empty:
            continue
        beside = set(rows.loc[rows["x"].isin(ours["x"]), "objective"])  # equal compute, itself too
        place = [one for one in arms if one in beside].index(arm)
        aside = 2 ** (0.05 * (place - (len(beside) - 1) / 2))
        tone, front = colour(arm), 4 if arm == FLOW_ARM else 3
        for status in (STORED, MEASURED):  # never one line of both
            own = ours.loc[ours["status"] == status].sort_values("x")
            if own.empty:
                continue
            at = own["x"].to_numpy(dtype=float) * aside
            value, low, high = (
                own[name].to_numpy(dtype=float) for name in ("value", "low", "high")
            )
            axis.errorbar(
                at, value, yerr=error_bar(value, low, high), color=tone, elinewidth=0.9,
                linewidth=1.6, zorder=front, marker=marker(arm),
                markerfacecolor="white" if mixed and status == STORED else tone,
            )  # fmt: skip
            if arm not in ends or at[-1] >= ends[arm][0]:
                ends[arm] = (float(at[-1]), float(value[-1]))
        if arm in level:
            start = float(ours["x"].sort_values().iloc[max(0, len(ours) - 2)]) * aside
            ends[arm] = (edge, level[arm])
            axis.plot(
                [start, edge], [level[arm]] * 2, color=tone, linestyle=(0, (2, 1.5)), linewidth=1
            )
    axis.set_xscale("log", base=2)
    if compute:
        first, last = min(compute.values()), max(compute.values())
        ticks = first * 2.0 ** np.arange(math.floor(math.log2(last / first) + 1e-9) + 1)
        if len(ticks) < 2:
            ticks = np.unique(list(compute.values()))
        axis.set_xticks(ticks, [_short(tick) for tick in ticks])
        axis.set_xlim(first / 1.25, edge)
    axis.minorticks_off()
    axis.grid(True, axis="x", color=FAINT, linewidth=0.5)
    return ends


def _short(value: float) -> str:
    for unit, words in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{words}"
    return f"{value:.3g}"
