"""Intervals: seeded bootstraps clustered by video, a t interval over seeds, a permutation band.

Two clips of one video are not independent, nor are two tokens of one clip, so what is resampled is
the video, within its benchmark. Every function says what it gives for no value and one value; none
of them warns. Random numbers come from `seed` alone, so the order in which cells are computed cannot
change a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from vflash_analysis.errors import InputError
from vflash_analysis.metrics import Combine, macro, part_columns, ratio

LEVEL = 0.95  # coverage of every interval


@dataclass(frozen=True)
class Interval:
    """A value with its interval; `low` and `high` are nan where there is none.

    `n` counts the independent units behind it (videos, or seeds for a t interval).
    """

    value: float
    low: float
    high: float
    n: int


_NAN = float("nan")


@lru_cache(maxsize=16)
def _resample_counts(
    groups: tuple[tuple[str, ...], ...], n_samples: int, seed: int
) -> tuple[np.ndarray, ...]:
    """How often each cluster is drawn in each resample, drawn within its stratum: (B, n) a group.

    `groups` hold the stratum of every cluster; one generator draws for them in turn. Kept, since
    most metrics of a table are resampled over the same videos.
    """
    generator = np.random.default_rng(seed)
    found = []
    for group in groups:
        strata = np.array(group)
        counts = np.zeros((n_samples, len(strata)))
        for stratum in sorted(set(group)):
            members = np.flatnonzero(strata == stratum)
            equal = np.full(len(members), 1 / len(members))
            counts[:, members] = generator.multinomial(len(members), equal, size=n_samples)
        counts.flags.writeable = False
        found.append(counts)
    return tuple(found)


def _smallest_stratum(strata: np.ndarray) -> int:
    return int(np.unique(strata, return_counts=True)[1].min())


def _percentiles(draws: np.ndarray, value: float, n: int) -> Interval:
    """The interval of the draws; none where the value is undefined, or a tenth of the draws is."""
    finite = draws[np.isfinite(draws)]
    if not math.isfinite(value) or len(finite) < 0.9 * len(draws):
        return Interval(value, _NAN, _NAN, n)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(finite, [tail, 100 - tail])
    return Interval(value, float(low), float(high), n)


def cluster_totals(parts: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Sums the parts of each video: benchmarks (n,) and totals (n, k), in sorted order."""
    columns = part_columns(parts)
    sums = parts.groupby(["benchmark", "video"], sort=True, observed=True)[columns].sum()
    strata = sums.index.get_level_values(0).to_numpy(dtype=object).astype(str)
    return strata, sums.to_numpy(dtype=float)


@dataclass(frozen=True)
class Bootstrap:
    """Percentile bootstraps of a metric, its videos resampled within their benchmark.

    Every method takes `parts`, rows with `benchmark`, `video` and p0, p1, ... (see `metrics`), and
    `combine`, the metric's formula on totals, (..., k) -> (...). A benchmark with one video gives
    the value without an interval.

    Attributes:
        n_samples: resamples.
        seed: of the random generator.
    """

    n_samples: int = 2000
    seed: int = 0

    def caption(self) -> str:
        return (
            f"Brackets and bands: {100 * LEVEL:g} % bootstrap over videos within their "
            f"benchmark ({self.n_samples} resamples)."
        )

    def videos(self, parts: pd.DataFrame, combine: Combine = ratio) -> Interval:
        """Interval of the metric over all videos; nan and n = 0 for no rows."""
        if parts.empty:
            return Interval(_NAN, _NAN, _NAN, 0)
        strata, totals = cluster_totals(parts)
        value = float(combine(totals.sum(axis=0)))
        if _smallest_stratum(strata) < 2:
            return Interval(value, _NAN, _NAN, len(strata))
        (counts,) = _resample_counts((tuple(strata),), self.n_samples, self.seed)
        draws = combine(np.einsum("bn,nk->bk", counts, totals))
        return _percentiles(draws, value, len(strata))

    def macro(self, parts: pd.DataFrame, combine: Combine = ratio) -> Interval:
        """Interval of `metrics.macro`: the unweighted mean over benchmarks of the metric in each.

        Raises:
            InputError: a benchmark has no value.
        """
        strata, totals = cluster_totals(parts)
        members = {name: strata == name for name in sorted(set(strata.tolist()))}
        value = macro({n: float(combine(totals[own].sum(axis=0))) for n, own in members.items()})
        if _smallest_stratum(strata) < 2:
            return Interval(value, _NAN, _NAN, len(strata))
        (counts,) = _resample_counts((tuple(strata),), self.n_samples, self.seed)
        per_benchmark = [
            combine(np.einsum("bn,nk->bk", counts[:, own], totals[own])) for own in members.values()
        ]
        return _percentiles(np.mean(per_benchmark, axis=0), value, len(strata))

    def seeds_and_videos(self, parts: pd.DataFrame, combine: Combine = ratio) -> Interval:
        """Interval over training seeds and videos at once; `parts` also has `train_seed`.

        Every training seed is evaluated on the same videos, so the two are crossed: each resample
        draws the seeds with replacement and, independently, the videos within their benchmark; a
        cell (seed, video) counts as often as its seed times its video. `n` is the number of videos.
        With one seed only the videos vary. No rows: nan and n = 0.

        Raises:
            InputError: a seed lacks a video that another has.
        """
        if parts.empty:
            return Interval(_NAN, _NAN, _NAN, 0)
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
        value = float(combine(cells.sum(axis=(0, 1))))
        if _smallest_stratum(strata) < 2:
            return Interval(value, _NAN, _NAN, len(strata))
        one_stratum = ("",) * len(seeds)
        videos, drawn = _resample_counts(
            (tuple(strata), one_stratum), self.n_samples, self.seed
        )  # (B, V), (B, S)
        draws = combine(np.einsum("bs,bv,svk->bk", drawn, videos, cells, optimize=True))
        return _percentiles(draws, value, len(strata))


DEFAULT_BOOTSTRAP = Bootstrap()


def t_interval(values: Sequence[float]) -> Interval:
    """Mean and Student t interval of independent values; missing (nan) ones are left out.

    mean +- t(1 - (1 - level) / 2, n - 1) * s / sqrt(n). No value: nan; one: no interval.
    """
    kept = np.asarray([v for v in values if not math.isnan(v)], dtype=float)
    if len(kept) < 2:
        return Interval(float(kept[0]) if len(kept) else _NAN, _NAN, _NAN, len(kept))
    mean = float(kept.mean())
    spread = float(kept.std(ddof=1)) / math.sqrt(len(kept))
    half = float(scipy_stats.t.ppf(1 - (1 - LEVEL) / 2, len(kept) - 1)) * spread
    return Interval(mean, mean - half, mean + half, len(kept))


def pairing_band(scores: np.ndarray, n_samples: int = 2000, seed: int = 0) -> Interval:
    """Band of the mean score when each text is paired with some other clip at random.

    Args:
        scores: (n, n), score of text i against the facts of clip j.
        n_samples: random pairings in which no text keeps its own clip.

    Returns:
        value: the exact mean over such pairings (the mean off the diagonal); low, high: the band
        that holds `LEVEL` of the random pairings' means. A model that does not look at its clip
        falls inside.
    """
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 2 or scores.shape[0] != scores.shape[1] or not np.isfinite(scores).all():
        raise InputError(f"pairing band: shape {scores.shape}, allowed is finite (n, n)")
    n = len(scores)
    if n < 2:
        return Interval(_NAN, _NAN, _NAN, n)
    generator = np.random.default_rng(seed)
    places, means = np.arange(n), np.empty(0)
    while len(means) < n_samples:  # a third of all orders or more move everything
        order = np.argsort(generator.random((n_samples, n)), axis=1)  # (B, n)
        order = order[(order != places).all(axis=1)]
        means = np.concatenate([means, scores[places, order].mean(axis=1)])
    value = float((scores.sum() - np.trace(scores)) / (n * (n - 1)))
    return _percentiles(means[:n_samples], value, n)
