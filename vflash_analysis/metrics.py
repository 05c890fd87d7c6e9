"""Every metric of the suite, one definition each, computed from record frames.

A metric is a function of *parts*: one row per clip (or cycle, or anchor) with its `benchmark`, its
`video` (the unit of resampling) and the sums `p0, p1, ...` that the formula needs. The value is the
formula applied to the totals of the parts, and `stats.Bootstrap` applies the same formula to
resampled totals, so a value and its interval can never follow two definitions.

A drafter's length is measured, never derived from a rate: acceptance is not independent over slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from vflash_analysis.errors import InputError
from vflash_analysis.schemas import BENCHMARKS, ROW_KEY

KIND_COLUMNS = ("target", "target_revision", "device", "dtype", "reader", "template_sha256")
"""Rows that differ in one of these are different experiments and are never pooled."""

# A target reads its clips only above these shares (its gates; see `training.gates`).
TARGET_LIMITS = {"static_accuracy": 0.90, "dynamic_accuracy": 0.75, "ended_share": 0.99}

Combine = Callable[[np.ndarray], np.ndarray]
_PART_KEYS = ("benchmark", "video", "clip_id", "sample_seed", "train_seed", "anchor_index")


# ---- formulas on totals: the last axis holds p0, p1, ... --------------------------------------
def ratio(totals: np.ndarray) -> np.ndarray:
    """p0 / p1, nan where p1 is 0. Shape (..., 2) -> (...)."""
    numerator, denominator = totals[..., 0], totals[..., 1]
    safe = np.where(denominator == 0, np.nan, denominator)
    return np.asarray(numerator / safe)


def ratio_of_ratios(totals: np.ndarray) -> np.ndarray:
    """(p0 / p1) / (p2 / p3), nan where undefined. Shape (..., 4) -> (...)."""
    below = ratio(totals[..., 2:4])
    return np.asarray(ratio(totals[..., 0:2]) / np.where(below == 0, np.nan, below))


def difference_of_ratios(totals: np.ndarray) -> np.ndarray:
    """p0 / p1 - p2 / p3. Shape (..., 4) -> (...)."""
    return np.asarray(ratio(totals[..., 0:2]) - ratio(totals[..., 2:4]))


def predicted_ratio(totals: np.ndarray) -> np.ndarray:
    """(p0 / p1) (p2 / p3) / (p4 / p5): tau times AR seconds per token over seconds per cycle."""
    cycle_s = ratio(totals[..., 4:6])
    tau_times_ar = ratio(totals[..., 0:2]) * ratio(totals[..., 2:4])
    return np.asarray(tau_times_ar / np.where(cycle_s == 0, np.nan, cycle_s))


def part_columns(parts: pd.DataFrame) -> list[str]:
    """The part columns p0, p1, ... of a parts frame in that order, however they stand in it."""
    names = [str(column) for column in parts.columns]
    found = [name for name in names if name.startswith("p") and name[1:].isdigit()]
    return sorted(found, key=lambda name: int(name[1:]))


def value_of(parts: pd.DataFrame, combine: Combine) -> float:
    """The formula on the totals of all parts; nan for no parts at all."""
    if parts.empty:
        return float("nan")
    return float(combine(parts[part_columns(parts)].to_numpy(dtype=float).sum(axis=0)))


# ---- guards -----------------------------------------------------------------------------------
def kinds(frame: pd.DataFrame, column: str) -> pd.Series:
    """What each row counts as in one of KIND_COLUMNS, "none" for a missing value.

    A row's own value; but for the reader the commonest one of its suite and sample seed, and nothing
    for folders of images: a clip that the run's reader could not open is read by the other one, and
    that costs neither its result nor the others'.
    """
    values = frame[column].astype("object")
    values = values.where(values.notna(), "none").astype(str)
    shard = [name for name in ("benchmark", "sample_seed") if name in frame.columns]
    if column != "reader" or len(shard) < 2:
        return values
    videos = frame[shard].assign(kind=values)[~values.str.startswith("frames ")]
    return videos.groupby(shard)["kind"].transform(lambda found: found.mode().iloc[0])


def refuse_mixed(frame: pd.DataFrame, columns: Sequence[str] = KIND_COLUMNS) -> None:
    """Refuses rows of different devices, dtypes, readers, templates or targets in one pool.

    Raises:
        InputError: names the column, the values found and that one is allowed.
    """
    for column in columns:
        if column not in frame.columns:
            continue
        found = sorted(set(kinds(frame, column)))
        if len(found) > 1:
            raise InputError(
                f"'{column}' has {len(found)} values in one pool {found}; allowed is 1"
            )


def refuse_infinite(frame: pd.DataFrame) -> None:
    """Refuses an infinite number anywhere, naming its row and column."""
    for column in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[column]):
            continue
        values = frame[column].to_numpy(dtype=float, na_value=np.nan)
        bad = np.flatnonzero(np.isinf(values))
        if bad.size:
            label = {
                key: str(frame[key].iloc[bad[0]])
                for key in ("clip_id", "benchmark", "method", "quantity", "setting")
                if key in frame.columns
            }
            raise InputError(f"row {frame.index[bad[0]]} {label}: '{column}' is infinite")


def grouped(
    frame: pd.DataFrame, keys: Sequence[str]
) -> Iterator[tuple[tuple[object, ...], pd.DataFrame]]:
    """Groups in sorted key order; every row is in exactly one group and no group is empty.

    Raises:
        InputError: a key is missing in some row (pandas would drop that row without a word).
    """
    for key in keys:
        absent = int(frame[key].isna().sum())
        if absent:
            raise InputError(f"'{key}' is missing in {absent} of {len(frame)} rows")
    n_rows = 0
    for values, group in frame.groupby(list(keys), sort=True, observed=True):
        n_rows += len(group)
        yield values, group
    if n_rows != len(frame):
        raise InputError(f"grouping by {list(keys)} kept {n_rows} of {len(frame)} rows")


def usable(generations: pd.DataFrame) -> pd.DataFrame:
    """The rows that count: status "ok" and not a warm-up, with the cluster column `video`.

    Raises:
        InputError: a missing method or benchmark, a row twice, an infinite number, or a row
            marked ok without tokens, calls or time.
    """
    for key in ("method", "benchmark", "status", "warmup"):
        absent = int(generations[key].isna().sum())
        if absent:
            raise InputError(f"'{key}' is missing in {absent} of {len(generations)} generations")
    twice = generations.duplicated(list(ROW_KEY))
    if twice.any():
        row = generations.loc[twice].iloc[0]
        raise InputError(f"generations: {row['method']} on clip {row['clip_id']} is there twice")
    refuse_infinite(generations)
    keep = (generations["status"] == "ok") & ~generations["warmup"].astype(bool)
    rows = generations.loc[keep].copy()
    for column in ("new_tokens", "verify_calls", "decode_s"):
        absent = int(rows[column].isna().sum())
        if absent:
            raise InputError(f"generations: '{column}' is missing in {absent} rows marked ok")
    rows["video"] = rows["video_sha256"].fillna(rows["clip_id"]).astype(str)
    return rows


def usable_cycles(cycles: pd.DataFrame, generations: pd.DataFrame) -> pd.DataFrame:
    """The cycles of the given usable generations, with `benchmark` and `video` joined on.

    A method, drafter and setting may have no cycle records at all (AR need not keep them), but
    where there are some, every generation must have all of its own.

    Raises:
        InputError: cycles are lost, or commit another number of tokens than new_tokens - 1 (the
            first token comes from prefill).
    """
    refuse_infinite(cycles)
    keys = list(ROW_KEY)
    joined = [*keys, "benchmark", "video", "sample_seed", "train_seed"]
    rows = cycles.merge(generations[joined], on=keys, how="inner", validate="many_to_one")
    counted = rows.groupby(keys, observed=True)["n_committed"].agg(["sum", "size"])
    check = generations[[*keys, "new_tokens", "verify_calls"]].merge(
        counted.reset_index(), on=keys, how="left"
    )
    unit = ["method", "drafter_sha256", "setting"]
    recorded = check.groupby(unit)["size"].transform("count") > 0
    check = check.loc[recorded].fillna({"sum": 0, "size": 0})
    wrong = (check["sum"] != check["new_tokens"] - 1) | (check["size"] != check["verify_calls"])
    if wrong.any():
        first = check.loc[wrong].iloc[0]
        raise InputError(
            f"cycles of {first['method']} on clip {first['clip_id']} commit {first['sum']:.0f} "
            f"tokens in {first['size']:.0f} calls, its generation says "
            f"{first['new_tokens'] - 1} in {first['verify_calls']}"
        )
    return rows


def _parts(frame: pd.DataFrame, *columns: pd.Series | float) -> pd.DataFrame:
    parts = frame[[column for column in _PART_KEYS if column in frame.columns]].copy()
    for number, column in enumerate(columns):
        values = column.to_numpy(dtype=float) if isinstance(column, pd.Series) else column
        parts[f"p{number}"] = values
    return parts


# ---- accepted length --------------------------------------------------------------------------
def accepted_length_parts(generations: pd.DataFrame) -> pd.DataFrame:
    """tau = sum(new_tokens - 1) / sum(verify_calls), tokens per verify call; `ratio`.

    All cycles count, prefill and its token do not; 1 when no draft is ever accepted.
    """
    refuse_mixed(generations)
    return _parts(generations, generations["new_tokens"] - 1, generations["verify_calls"])


def accepted_length_per_clip_parts(generations: pd.DataFrame) -> pd.DataFrame:
    """Mean over clips of (new_tokens - 1) / verify_calls; `ratio`. A clip without calls has none."""
    refuse_mixed(generations)
    rows = generations.loc[generations["verify_calls"] > 0]
    return _parts(rows, (rows["new_tokens"] - 1) / rows["verify_calls"], 1.0)


def accepted_length_uncensored_parts(cycles: pd.DataFrame) -> pd.DataFrame:
    """sum(n_committed) / cycles over the cycles that nothing cut; `ratio`."""
    rows = cycles.loc[~cycles["censored"].astype(bool)]
    return _parts(rows, rows["n_committed"], 1.0)


def accepted_drafts_parts(cycles: pd.DataFrame) -> pd.DataFrame:
    """sum(n_accepted) / cycles, without the target's own token; `ratio`.

    Over uncensored cycles it is the accepted length minus exactly 1.
    """
    return _parts(cycles, cycles["n_accepted"], 1.0)


def cap_share_parts(generations: pd.DataFrame) -> pd.DataFrame:
    """Share of texts that ended at max_new_tokens (stop_reason "length"); `ratio`."""
    return _parts(generations, (generations["stop_reason"] == "length").astype(float), 1.0)


# ---- acceptance by position -------------------------------------------------------------------
def _position_parts(
    frame: pd.DataFrame, n_accepted: pd.Series, n_judged: pd.Series, slot: int, survival: bool
) -> pd.DataFrame:
    """Slot `slot` counts where its outcome is known (`n_judged` >= slot).

    A row that does not count stays, as zeros, so that every seed keeps every video.
    """
    at_risk = n_judged >= slot
    if not survival:
        at_risk &= n_accepted >= slot - 1
    accepted = at_risk & (n_accepted >= slot)
    return _parts(frame, accepted.astype(float), at_risk.astype(float))


def draft_slots(cycles: pd.DataFrame) -> pd.Series:
    """Slots of each chain cycle's drafter: its longest draft that the records show.

    Slim records keep the draft ids of some clips only; where they keep none of a drafter's, the
    most it ever got accepted stands in, and later slots are not counted.
    """
    drafts = [len(ids) if hasattr(ids, "__len__") else 0 for ids in cycles["draft_token_ids"]]
    shown = cycles["n_accepted"].astype("int64").clip(lower=pd.Series(drafts, cycles.index))
    return shown.groupby(cycles["drafter_sha256"], observed=True).transform("max")


def cycle_position_parts(cycles: pd.DataFrame, slot: int, survival: bool) -> pd.DataFrame:
    """Acceptance at draft slot 1, 2, ... over decoded chain cycles; `ratio`.

    conditional = #(slots 1..k accepted) / #(slots 1..k-1 accepted and slot k judged);
    survival = #(slots 1..k accepted) / #(outcome at k known). A rejection at j settles every slot
    after j for survival; a cut cycle says nothing about the slots after its last accepted one.
    """
    censored = cycles["censored"].astype(bool)
    n_accepted = cycles["n_accepted"].astype("int64")
    n_judged = n_accepted.where(censored, draft_slots(cycles))
    return _position_parts(cycles, n_accepted, n_judged, slot, survival)


def anchor_position_parts(anchors: pd.DataFrame, slot: int, survival: bool) -> pd.DataFrame:
    """As `cycle_position_parts`, over anchors of fixed texts: slots past the text's end leave."""
    rows = _anchor_rows(anchors)
    return _position_parts(rows, rows["n_accepted"], rows["n_slots"], slot, survival)


def _anchor_rows(anchors: pd.DataFrame) -> pd.DataFrame:
    refuse_mixed(anchors, ("target_sha256",))
    return anchors.assign(
        video=anchors["clip_id"].astype(str),
        n_accepted=anchors["n_accepted"].astype("int64"),
        n_slots=anchors["n_slots"].astype("int64"),
    )


def _full_blocks(anchors: pd.DataFrame) -> pd.DataFrame:
    """Anchors with a full block of their drafter, which is the longest one its anchors show."""
    rows = _anchor_rows(anchors)
    full = rows.groupby("drafter_sha256", observed=True)["n_slots"].transform("max")
    return rows.loc[rows["n_slots"] == full]


def anchor_accepted_length_parts(anchors: pd.DataFrame) -> pd.DataFrame:
    """Mean of n_accepted + 1 over the anchors of fixed AR texts with a full block; `ratio`.

    Anchors closer than a block to the end are left out: which ones does not depend on the
    drafter's weights, so two drafters of one block size stay paired anchor by anchor.
    """
    rows = _full_blocks(anchors)
    return _parts(rows, rows["n_accepted"] + 1, 1.0)


def masked_slot_accuracy_parts(anchors: pd.DataFrame) -> pd.DataFrame:
    """Right choices / masked slots over anchors with a full block, whatever came before; `ratio`.

    A slot that was shown its true token (None in `slot_match`) is not masked and counts nowhere.
    """
    rows = _full_blocks(anchors)
    masked = [[bool(match) for match in slots if match is not None] for slots in rows["slot_match"]]
    right = pd.Series([float(sum(slots)) for slots in masked], dtype=float)
    return _parts(rows, right, pd.Series([float(len(slots)) for slots in masked], dtype=float))


# ---- time -------------------------------------------------------------------------------------
_PAIR_KEYS = ["benchmark", "video", "clip_id", "sample_seed"]


def end_to_end_s(generations: pd.DataFrame) -> pd.Series:
    """Frame reading + vision encoding + prefill + decode, seconds per row; nan if one is missing."""
    steps = ["frame_read_s", "vision_s", "prefill_s", "decode_s"]
    return generations[steps].astype(float).sum(axis=1, skipna=False)


def pair_clips(baseline: pd.DataFrame, method: pd.DataFrame) -> pd.DataFrame:
    """One row per clip and sample seed that both sides decoded, repeats and training seeds summed.

    Columns: benchmark, video, clip_id, sample_seed and, with suffixes _a (baseline) and _b
    (method), decode_s, total_s (end to end), tokens (new_tokens - 1, summed); nan where one of the
    summed values is missing.

    Raises:
        InputError: the two sides differ in device, dtype, reader, template or target.
    """
    refuse_mixed(pd.concat([baseline, method], ignore_index=True))
    sides = []
    for rows, suffix in ((baseline, "_a"), (method, "_b")):
        sums = rows[_PAIR_KEYS].assign(
            decode_s=rows["decode_s"].astype(float),
            total_s=end_to_end_s(rows),
            tokens=rows["new_tokens"].astype(float) - 1,
        )
        clips = sums.groupby(_PAIR_KEYS, observed=True, dropna=False)
        whole = clips.count().eq(clips.size(), axis=0)  # one missing repeat: the sum is missing
        sides.append(clips.sum().where(whole).add_suffix(suffix))
    pairs = sides[0].join(sides[1], how="inner").reset_index()
    untimed = pairs.loc[(pairs["tokens_b"] > 0) & (pairs["decode_s_b"] <= 0)]
    if not untimed.empty:
        raise InputError(f"clip {untimed['clip_id'].iloc[0]}: tokens were decoded in 0 seconds")
    return pairs


def decode_speedup_parts(pairs: pd.DataFrame) -> pd.DataFrame:
    """AR seconds per token / the method's, each sum(decode_s) / sum(new_tokens - 1).

    Combine with `ratio_of_ratios`; pairs come from `pair_clips(ar, method)`.
    """
    return _parts(pairs, *(pairs[c] for c in ("decode_s_a", "tokens_a", "decode_s_b", "tokens_b")))


def end_to_end_speedup_parts(pairs: pd.DataFrame) -> pd.DataFrame:
    """As `decode_speedup_parts` with frame reading, vision encoding and prefill in the seconds."""
    rows = pairs.dropna(subset=["total_s_a", "total_s_b"])
    return _parts(rows, *(rows[c] for c in ("total_s_a", "tokens_a", "total_s_b", "tokens_b")))


def decode_speedup_per_clip_parts(pairs: pd.DataFrame) -> pd.DataFrame:
    """Mean over clips of the clip's own speed-up; `ratio`. Clips of one token have none."""
    rows = pairs.loc[(pairs["tokens_a"] > 0) & (pairs["tokens_b"] > 0)]
    clip = (rows["decode_s_a"] / rows["tokens_a"]) / (rows["decode_s_b"] / rows["tokens_b"])
    return _parts(rows, clip, 1.0)


def ms_per_token_parts(generations: pd.DataFrame) -> pd.DataFrame:
    """1000 sum(decode_s) / sum(new_tokens - 1), milliseconds; `ratio`."""
    refuse_mixed(generations)
    return _parts(generations, generations["decode_s"] * 1000, generations["new_tokens"] - 1)


def cycle_ms_parts(cycles: pd.DataFrame, column: str) -> pd.DataFrame:
    """Mean milliseconds per cycle of `column` (draft_s, verify_s or other_s); `ratio`."""
    return _parts(cycles, cycles[column] * 1000, 1.0)


def clip_ms_parts(generations: pd.DataFrame, column: str) -> pd.DataFrame:
    """Mean milliseconds per decode of `column` (a `*_s` of its row); `ratio`."""
    return _parts(generations, generations[column].astype(float) * 1000, 1.0)


def other_share_parts(cycles: pd.DataFrame) -> pd.DataFrame:
    """sum(other_s) / sum(draft_s + verify_s + other_s); `ratio`."""
    return _parts(
        cycles, cycles["other_s"], cycles["draft_s"] + cycles["verify_s"] + cycles["other_s"]
    )


def predicted_speedup_parts(pairs: pd.DataFrame, cycles: pd.DataFrame) -> pd.DataFrame:
    """tau AR_ms / (draft_ms + verify_ms): the speed-up if nothing else took time.

    tau = sum(n_committed) / cycles, AR_ms per token, draft_ms and verify_ms per cycle, over the
    paired clips. Combine with `predicted_ratio`.
    """
    sums = cycles.assign(busy_s=cycles["draft_s"] + cycles["verify_s"], n_cycles=1.0)
    per_clip = sums.groupby(_PAIR_KEYS, observed=True)[["n_committed", "busy_s", "n_cycles"]].sum()
    baseline = pairs.set_index(_PAIR_KEYS)[["decode_s_a", "tokens_a"]]
    rows = baseline.join(per_clip.astype(float), how="inner").reset_index()
    columns = ("n_committed", "n_cycles", "decode_s_a", "tokens_a", "busy_s", "n_cycles")
    return _parts(rows, *(rows[c] for c in columns))


def breakeven_tau(ar_s: float, cycle_s: float) -> float:
    """Tokens a cycle must commit to be as fast as AR: cycle_s / ar_s.

    Args:
        ar_s: seconds of an autoregressive step.
        cycle_s: seconds of a cycle, draft + verify (+ other, where it is known).
    """
    return cycle_s / ar_s


def speedup_at_tau(tau: float, ar_s: float, cycle_s: float) -> float:
    """Speed-up over AR of cycles that commit `tau` tokens each: tau ar_s / cycle_s."""
    return tau * ar_s / cycle_s


# ---- measures ---------------------------------------------------------------------------------
def usable_measures(measures: pd.DataFrame) -> pd.DataFrame:
    """The rows of clips that did not fail, with the cluster column `video`.

    Raises:
        InputError: measures of several targets, which are never pooled, or an infinite number.
    """
    rows = measures.loc[measures["reason"].isna()].copy()
    refuse_mixed(rows, ("target_sha256",))
    refuse_infinite(rows)
    rows["video"] = rows["video_sha256"].fillna(rows["clip_id"]).astype(str)
    return rows


def measure_parts(measures: pd.DataFrame) -> pd.DataFrame:
    """sum(total) / sum(count) over the rows of one quantity; `ratio`."""
    return _parts(measures, measures["total"], measures["count"])


# ---- losslessness and macro -------------------------------------------------------------------
def identical_share_parts(generations: pd.DataFrame) -> pd.DataFrame:
    """Share of texts whose token ids equal plain greedy decoding's; `ratio`.

    Rows that were not compared (`identical_to_ar` missing) leave the denominator.
    """
    rows = generations.loc[generations["identical_to_ar"].notna()]
    return _parts(rows, rows["identical_to_ar"].astype(float), 1.0)


def macro(values: Mapping[str, float]) -> float:
    """Unweighted mean over the benchmarks.

    Args:
        values: value by benchmark; nan or absent means missing.

    Raises:
        InputError: a benchmark is missing, or is not a known one.
    """
    unknown = sorted(set(values) - set(BENCHMARKS))
    if unknown:
        raise InputError(f"macro: unknown benchmarks {unknown}, allowed {list(BENCHMARKS)}")
    missing = [name for name in BENCHMARKS if np.isnan(values.get(name, np.nan))]
    if missing:
        raise InputError(f"macro: no value for {missing}, needed are {list(BENCHMARKS)}")
    return float(np.mean([values[name] for name in BENCHMARKS]))


def plateau(values: Sequence[float], tolerance: float = 0.02) -> float | None:
    """Mean of the last two values if the last doubling gained at most `tolerance` of the first.

    None while the curve still rises (or has fewer than two points).
    """
    if len(values) < 2 or not np.isfinite(values[-2:]).all():
        return None
    before, last = values[-2], values[-1]
    return (before + last) / 2 if last - before <= tolerance * before else None
