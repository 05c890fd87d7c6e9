"""Intervals: seeded bootstraps clustered by video, a t interval over seeds, a permutation band.

Two clips of one video are not independent, nor are two tokens of one clip, so what is resampled is
the video, within its benchmark. Every function says what it gives for no value, one value and equal
values; none of them warns or returns a silent nan. Random numbers come from `seed` alone, so the
order in which cells are computed cannot change a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from vflash_analysis.errors import InputError
from vflash_analysis.metrics import Combine, macro, part_columns, ratio

NO_DATA = "no data"
TOO_FEW = "n/a: needs two videos per benchmark"
ONE_VALUE = "n/a: one value"
ZERO_WIDTH = "equal values"
UNSTABLE = "n/a: undefined in too many resamples"


@dataclass(frozen=True)
class Interval:
    """A value with its interval; `low` and `high` are nan where `note` starts with "n/a".

    `n` counts the independent units behind it (videos, or seeds for a t interval).
    """

    value: float
    low: float
    high: float
    n: int
    note: str = ""


_NAN = float("nan")


def _check_settings(n_samples: int, level: float) -> None:
    if n_samples < 1 or not 0 < level < 1:
        raise InputError(
            f"bootstrap: n_samples {n_samples}, level {level}; allowed are >= 1 and 0 < level < 1"
        )


def _resample_counts(
    strata: np.ndarray, n_samples: int, generator: np.random.Generator
) -> np.ndarray:
    """How often each cluster is drawn in each resample, drawn within its stratum. (B, n)"""
    counts = np.zeros((n_samples, len(strata)))
    for stratum in sorted(set(strata.tolist())):
        members = np.flatnonzero(strata == stratum)
        equal = np.full(len(members), 1 / len(members))
        counts[:, members] = generator.multinomial(len(members), equal, size=n_samples)
    return counts


def _smallest_stratum(strata: np.ndarray) -> int:
    return int(np.unique(strata, return_counts=True)[1].min())


def _percentiles(draws: np.ndarray, value: float, n: int, level: float) -> Interval:
    finite = draws[np.isfinite(draws)]
    if not math.isfinite(value):
        return Interval(_NAN, _NAN, _NAN, n, NO_DATA)
    if len(finite) < 0.9 * len(draws):
        return Interval(value, _NAN, _NAN, n, UNSTABLE)
    tail = 50 * (1 - level)
    low, high = np.percentile(finite, [tail, 100 - tail])
    note = ZERO_WIDTH if high - low <= 1e-12 * max(1.0, abs(value)) else ""
    return Interval(value, float(low), float(high), n, note)


def cluster_totals(
    parts: pd.DataFrame, stratum: str = "benchmark", cluster: str = "video"
) -> tuple[np.ndarray, np.ndarray]:
    """Sums the parts of each video: strata (n,) and totals (n, k), in sorted order."""
    columns = part_columns(parts)
    sums = parts.groupby([stratum, cluster], sort=True, observed=True)[columns].sum()
    strata = sums.index.get_level_values(0).to_numpy(dtype=object).astype(str)
    return strata, sums.to_numpy(dtype=float)


def bootstrap(
    parts: pd.DataFrame,
    combine: Combine = ratio,
    n_samples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap of a metric: videos resampled within their benchmark.

    Args:
        parts: rows with `benchmark`, `video` and p0, p1, ... (see `metrics`).
        combine: the metric's formula on totals, (..., k) -> (...).
        n_samples: resamples.
        seed: of the random generator.
        level: coverage, between 0 and 1.

    Returns:
        No rows: nan, n = 0, "no data". A benchmark with one video: the value without an interval.
        Equal values: an interval of zero width, noted as such.
    """
    _check_settings(n_samples, level)
    if parts.empty:
        return Interval(_NAN, _NAN, _NAN, 0, NO_DATA)
    strata, totals = cluster_totals(parts)
    value = float(combine(totals.sum(axis=0)))
    if _smallest_stratum(strata) < 2:
        note = TOO_FEW if math.isfinite(value) else NO_DATA
        return Interval(value, _NAN, _NAN, len(strata), note)
    counts = _resample_counts(strata, n_samples, np.random.default_rng(seed))
    draws = combine(np.einsum("bn,nk->bk", counts, totals))
    return _percentiles(draws, value, len(strata), level)


def bootstrap_macro(
    parts: pd.DataFrame,
    combine: Combine = ratio,
    n_samples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
    required: Sequence[str] | None = None,
    allow_missing: bool = False,
) -> Interval:
    """Interval of `metrics.macro`: the unweighted mean over benchmarks of the metric in each.

    Raises:
        InputError: a required benchmark is missing and `allow_missing` is false.
    """
    _check_settings(n_samples, level)
    strata, totals = (
        (np.empty(0, dtype=str), np.empty((0, 2))) if parts.empty else cluster_totals(parts)
    )
    names = sorted(set(strata.tolist()))
    members = {name: strata == name for name in names}
    values = {name: float(combine(totals[members[name]].sum(axis=0))) for name in names}
    extra = {} if required is None else {"required": required}
    value = macro(values, allow_missing=allow_missing, **extra)
    if not math.isfinite(value):
        return Interval(_NAN, _NAN, _NAN, len(strata), NO_DATA)
    if _smallest_stratum(strata) < 2:
        return Interval(value, _NAN, _NAN, len(strata), TOO_FEW)
    counts = _resample_counts(strata, n_samples, np.random.default_rng(seed))
    per_benchmark = [
        combine(np.einsum("bn,nk->bk", counts[:, members[name]], totals[members[name]]))
        for name in names
        if math.isfinite(values[name])
    ]
    return _percentiles(np.mean(per_benchmark, axis=0), value, len(strata), level)


def hierarchical_bootstrap(
    parts: pd.DataFrame,
    combine: Combine = ratio,
    n_samples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Bootstrap over training seeds and videos at once.

    Every training seed is evaluated on the same videos, so the two are crossed: each resample
    draws the seeds with replacement and, independently, the videos within their benchmark; a cell
    (seed, video) counts as often as its seed times its video. `n` is the number of videos. With
    one seed only the videos vary, and the note says so.

    Args:
        parts: rows with `train_seed`, `benchmark`, `video` and p0, p1, ...

    Raises:
        InputError: a seed lacks a video that another has.
    """
    _check_settings(n_samples, level)
    if parts.empty:
        return Interval(_NAN, _NAN, _NAN, 0, NO_DATA)
    columns = part_columns(parts)
    seeds = sorted(set(parts["train_seed"].astype(int)))
    per_seed = [cluster_totals(parts.loc[parts["train_seed"] == s]) for s in seeds]
    by_video = parts.groupby(["benchmark", "video"], observed=True)["train_seed"].nunique()
    if (by_video != len(seeds)).any():
        raise InputError(
            f"training seeds {seeds}: {int((by_video != len(seeds)).sum())} of {len(by_video)} "
            "videos are not there for every seed"
        )
    strata = per_seed[0][0]
    cells = np.stack([totals for _, totals in per_seed])  # (S, V, k)
    value = float(combine(cells.reshape(-1, len(columns)).sum(axis=0)))
    if _smallest_stratum(strata) < 2:
        return Interval(value, _NAN, _NAN, len(strata), TOO_FEW)
    generator = np.random.default_rng(seed)
    videos = _resample_counts(strata, n_samples, generator)  # (B, V)
    drawn = _resample_counts(np.zeros(len(seeds), dtype=int), n_samples, generator)  # (B, S)
    draws = combine(np.einsum("bs,bv,svk->bk", drawn, videos, cells, optimize=True))
    found = _percentiles(draws, value, len(strata), level)
    if len(seeds) == 1 and not found.note:
        return Interval(found.value, found.low, found.high, found.n, "one training seed")
    return found


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean and Student t interval of independent values; missing (nan) ones are left out.

    mean +- t(1 - (1 - level) / 2, n - 1) * s / sqrt(n). No value: "no data"; one: no interval;
    equal values: zero width.
    """
    _check_settings(1, level)
    kept = np.asarray([v for v in values if not math.isnan(v)], dtype=float)
    if len(kept) == 0:
        return Interval(_NAN, _NAN, _NAN, 0, NO_DATA)
    mean = float(kept.mean())
    if len(kept) == 1:
        return Interval(mean, _NAN, _NAN, 1, ONE_VALUE)
    if np.ptp(kept) == 0:
        return Interval(mean, mean, mean, len(kept), ZERO_WIDTH)
    spread = float(kept.std(ddof=1)) / math.sqrt(len(kept))
    half = float(scipy_stats.t.ppf(1 - (1 - level) / 2, len(kept) - 1)) * spread
    return Interval(mean, mean - half, mean + half, len(kept))


def pairing_band(
    scores: np.ndarray, n_samples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Band of the mean score when each text is paired with some other clip at random.

    Args:
        scores: (n, n), score of text i against the facts of clip j.
        n_samples: random pairings in which no text keeps its own clip.

    Returns:
        value: the exact mean over such pairings (the mean off the diagonal); low, high: the band
        that holds `level` of the random pairings' means. A model that does not look at its clip
        falls inside.
    """
    _check_settings(n_samples, level)
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 2 or scores.shape[0] != scores.shape[1] or not np.isfinite(scores).all():
        raise InputError(f"pairing band: shape {scores.shape}, allowed is finite (n, n)")
    n = len(scores)
    if n == 0:
        return Interval(_NAN, _NAN, _NAN, 0, NO_DATA)
    if n == 1:
        return Interval(_NAN, _NAN, _NAN, 1, ONE_VALUE)
    generator = np.random.default_rng(seed)
    places, means = np.arange(n), np.empty(0)
    while len(means) < n_samples:  # a third of all orders or more move everything
        order = np.argsort(generator.random((n_samples, n)), axis=1)  # (B, n)
        order = order[(order != places).all(axis=1)]
        means = np.concatenate([means, scores[places, order].mean(axis=1)])
    value = float((scores.sum() - np.trace(scores)) / (n * (n - 1)))
    return _percentiles(means[:n_samples], value, n, level)
