"""Intervals: defined for no, one and equal values; clustered, stratified, seeded."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from vflash_analysis.errors import InputError
from vflash_analysis.metrics import difference_of_ratios
from vflash_analysis.schemas import BENCHMARKS
from vflash_analysis.stats import (
    Bootstrap,
    Interval,
    cluster_totals,
    pairing_band,
    t_interval,
)

BOOT = Bootstrap()
bootstrap, hierarchical_bootstrap = BOOT.videos, BOOT.seeds_and_videos


def parts(values, benchmark="VDC", weights=None, videos=None, **more) -> pd.DataFrame:
    n = len(values)
    return pd.DataFrame(
        {
            "benchmark": [benchmark] * n,
            "video": [f"v{i}" for i in range(n)] if videos is None else videos,
            "p0": np.asarray(values, dtype=float),
            "p1": np.ones(n) if weights is None else np.asarray(weights, dtype=float),
            **more,
        }
    )


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def no_interval(found: Interval) -> bool:
    return math.isnan(found.low) and math.isnan(found.high)


def test_case_125_every_small_sample_has_a_defined_cell():
    equal = bootstrap(parts([2, 2, 2]))
    assert (equal.value, equal.low, equal.high, equal.n) == (2, 2, 2, 3)
    one = bootstrap(parts([2]))
    assert (one.value, one.n) == (2, 1) and no_interval(one)
    none = bootstrap(parts([]))
    assert none.n == 0 and math.isnan(none.value) and no_interval(none)
    nothing_judged = bootstrap(parts([0, 0], weights=[0, 0]))
    assert math.isnan(nothing_judged.value) and no_interval(nothing_judged)


def test_case_125_for_the_t_interval():
    mean = t_interval([2, float("nan")])
    assert (mean.value, mean.n) == (2, 1) and no_interval(mean)
    equal = t_interval([2, 2, 2])
    assert (equal.low, equal.high) == (2, 2)
    assert math.isnan(t_interval([]).value) and t_interval([]).n == 0


def test_the_t_interval_is_scipys():
    values = [1.0, 2.0, 4.0]
    expected = scipy_stats.t.interval(0.95, 2, np.mean(values), scipy_stats.sem(values))
    found = t_interval(values)
    assert found.value == pytest.approx(7 / 3)
    assert (found.low, found.high) == pytest.approx(expected)


def test_one_video_in_a_benchmark_gives_no_interval():
    both = pd.concat([parts([1, 2, 3]), parts([4], "MLVU")])
    assert no_interval(bootstrap(both))
    five = pd.concat([parts([1, 2, 3], name) for name in BENCHMARKS[1:]] + [parts([4])])
    found = BOOT.macro(five)
    assert found.value == pytest.approx(2.4) and no_interval(found)


def test_the_clips_of_a_video_are_one_unit():
    frame = parts([1, 3, 5, 5], videos=["a", "a", "b", "b"])
    strata, totals = cluster_totals(frame)
    assert strata.tolist() == ["VDC", "VDC"]
    assert totals.tolist() == [[4, 2], [10, 2]]
    found = bootstrap(frame)
    # two videos: the resamples are (a,a), (a,b), (b,a), (b,b) with means 2, 3.5, 3.5, 5
    assert (found.value, found.low, found.high, found.n) == (3.5, 2, 5, 2)


def test_resampling_stays_inside_the_benchmark():
    # inside each benchmark all videos agree, so nothing can vary although the benchmarks differ
    frame = pd.concat([parts([1, 1, 1]), parts([9, 9, 9], "MLVU")])
    found = bootstrap(frame)
    assert (found.value, found.low, found.high) == (5, 5, 5)


def test_the_value_is_a_ratio_of_sums_and_not_a_mean_of_ratios():
    frame = parts([10, 1], weights=[10, 2])
    assert bootstrap(frame).value == pytest.approx(11 / 12)


def test_the_macro_mean_does_not_weigh_benchmarks_by_size():
    frame = pd.concat([parts([1] * 8)] + [parts([3, 3], name) for name in BENCHMARKS[1:]])
    found = BOOT.macro(frame)
    assert (found.value, found.low, found.high) == pytest.approx((2.6, 2.6, 2.6))
    assert bootstrap(frame).value == 2


def test_the_macro_interval_refuses_a_missing_benchmark():
    for frame in (parts([1, 2]), parts([])):
        with pytest.raises(InputError, match="no value for"):
            BOOT.macro(frame)


def test_the_seed_fixes_the_interval_and_row_order_does_not_matter():
    values = np.random.default_rng(0).normal(size=30)
    frame = parts(values)
    first = Bootstrap(seed=5).videos(frame)
    assert first == Bootstrap(seed=5).videos(frame.sample(frac=1, random_state=1))
    assert first != Bootstrap(seed=6).videos(frame)


def test_the_interval_agrees_with_theory():
    values = np.random.default_rng(1).normal(size=200)
    found = Bootstrap(n_samples=4000).videos(parts(values))
    half = 1.96 * values.std() / math.sqrt(200)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.08)
    assert found.value == pytest.approx(values.mean())


def test_a_statistic_that_often_has_no_denominator_gets_no_interval():
    # the only judged slots are in one of two videos: a quarter of the resamples miss it
    found = bootstrap(parts([1, 0], weights=[2, 0]))
    assert found.value == 0.5 and no_interval(found)


def test_the_crossed_bootstrap_sees_seeds_and_videos():
    videos_vary = pd.concat([parts([1, 3], train_seed=s) for s in (1, 2)])
    found = hierarchical_bootstrap(videos_vary)
    assert (found.value, found.low, found.high, found.n) == (2, 1, 3, 2)
    seeds_vary = pd.concat([parts([v, v], train_seed=s) for s, v in ((1, 1.0), (2, 3.0))])
    found = hierarchical_bootstrap(seeds_vary)
    assert (found.value, found.low, found.high) == (2, 1, 3)


def test_the_crossed_bootstrap_keeps_pairs_together():
    # the second arm is exactly 1 below the first in every cell: no spread in the difference
    rng = np.random.default_rng(2)
    frames = []
    for seed in (1, 2, 3):
        first = rng.normal(size=6)
        more = {"p2": first - 1, "p3": np.ones(6), "train_seed": seed}
        frames.append(parts(first, **more))
    found = hierarchical_bootstrap(pd.concat(frames), difference_of_ratios)
    assert found.value == pytest.approx(1)
    assert found.high - found.low == pytest.approx(0)


def test_the_crossed_bootstrap_of_one_seed_varies_its_videos():
    frame = parts([1, 2, 3], train_seed=1)
    found = hierarchical_bootstrap(frame)
    assert (found.value, found.n) == (2, 3) and found.low < 2 < found.high
    assert hierarchical_bootstrap(parts([], train_seed=1)).n == 0


def test_the_crossed_bootstrap_refuses_uneven_seeds():
    frame = pd.concat([parts([1, 2], train_seed=1), parts([1], train_seed=2)])
    with pytest.raises(InputError, match="not there for every seed"):
        hierarchical_bootstrap(frame)


def test_a_model_that_ignores_its_clip_is_inside_the_band():
    scores = np.random.default_rng(3).random((12, 12)) < 0.3
    band = pairing_band(scores)
    assert band.value == pytest.approx(scores[~np.eye(12, dtype=bool)].mean())
    assert band.low < band.value < band.high
    seeing = scores.astype(float)
    np.fill_diagonal(seeing, 1.0)
    assert np.diag(seeing).mean() > pairing_band(seeing).high


def test_the_band_holds_only_pairings_with_other_clips():
    two = pairing_band(np.array([[1.0, 0.2], [0.4, 1.0]]))
    assert (two.value, two.low, two.high, two.n) == pytest.approx((0.3, 0.3, 0.3, 2))
    circle = np.array([[9.0, 0.0, 1.0], [1.0, 9.0, 0.0], [0.0, 1.0, 9.0]])  # two pairings: 0s or 1s
    three = pairing_band(circle)
    assert (three.value, three.low, three.high) == (0.5, 0, 1)
    for n in (0, 1):
        found = pairing_band(np.ones((n, n)))
        assert found.n == n and no_interval(found)


@pytest.mark.parametrize("scores", [np.zeros((2, 3)), np.array([[np.nan]]), np.zeros(3)])
def test_a_band_needs_a_finite_square(scores):
    with pytest.raises(InputError, match="allowed is finite"):
        pairing_band(scores)
