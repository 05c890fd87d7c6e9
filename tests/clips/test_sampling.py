"""The pure rule that picks frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflash_analysis.clips.backends import ReadFailure, select_frames
from vflash_analysis.clips.sampling import (
    Wanted,
    choose_indices,
    stream_duration,
    uniform_times,
    validate_indices,
)
from vflash_analysis.errors import InputError


def test_uniform_times_are_the_middles_of_equal_parts() -> None:
    assert uniform_times(3.0, 4).tolist() == [0.375, 1.125, 1.875, 2.625]


@pytest.mark.parametrize("duration", [0.0, -1.0, float("nan"), float("inf")])
def test_022_a_duration_that_is_not_positive_is_refused(duration: float) -> None:
    with pytest.raises(InputError, match="duration"):
        uniform_times(duration, 4)


def test_018_the_frame_on_screen_is_chosen_by_time_stamp_not_by_average_rate() -> None:
    starts = [0.04 * i if i < 10 else 0.4 + 0.4 * (i - 10) for i in range(20)]
    assert choose_indices(starts, [2.0]).tolist() == [14]  # 2.0 s * 5.9 frames/s would be 12
    assert choose_indices(starts, [0.0, 0.039, 0.36, 0.399, 0.4, 9.0]).tolist() == [
        0,
        0,
        9,
        9,
        10,
        19,
    ]


def test_float32_stamps_choose_the_same_frames() -> None:
    starts = np.arange(36000) / 30  # twenty minutes
    times = uniform_times(1200.0, 128)
    single = choose_indices(starts.astype(np.float32), times)
    assert single.tolist() == choose_indices(starts, times).tolist()
    assert choose_indices(starts.astype(np.float32), starts).tolist() == list(range(36000))


@given(n=st.integers(1, 500), fps=st.floats(0.1, 240))
def test_as_many_parts_as_frames_take_each_frame_once(n: int, fps: float) -> None:
    starts = np.arange(n) / fps
    assert select_frames(starts, n / fps, Wanted(n)).tolist() == list(range(n))


@given(
    gaps=st.lists(st.floats(0.001, 5.0), min_size=1, max_size=60),
    num_frames=st.integers(1, 200),
)
def test_chosen_frames_rise_and_are_on_screen(gaps: list[float], num_frames: int) -> None:
    starts = np.concatenate([[0.0], np.cumsum(gaps)])
    duration = stream_duration(starts, 0.0)
    indices = select_frames(starts, duration, Wanted(num_frames))
    times = uniform_times(duration, num_frames)
    assert (np.diff(indices) >= 0).all()
    assert (starts[indices] <= times + 1e-4).all()
    ends = np.append(starts[1:], np.inf)
    assert (times <= ends[indices] + 1e-4).all()


def test_019_the_cap_spreads_over_the_whole_clip() -> None:
    indices = select_frames(np.arange(240) / 10, 24.0, Wanted(16))
    assert indices[0] <= 15 and indices[-1] >= 225


@pytest.mark.parametrize("indices", [[], [1.5], [-1], [30], [[1]], ["1"]])
def test_038_the_sampler_refuses_what_decord_would_bend(indices: list) -> None:
    with pytest.raises(InputError):
        validate_indices(indices, 30)


def test_038_good_indices_pass() -> None:
    assert validate_indices([0, 29, 3], 30).tolist() == [0, 29, 3]


def test_stamps_that_fall_or_do_not_span_time_are_refused() -> None:
    with pytest.raises(InputError, match="fall"):
        choose_indices([0.0, 2.0, 1.0], [0.5])
    with pytest.raises(InputError, match="no frame"):
        choose_indices([], [0.5])
    with pytest.raises(ReadFailure) as caught:
        select_frames(np.zeros(5), 0.0, Wanted(4))
    assert caught.value.reason == "damaged"


def test_stream_duration_is_last_start_plus_median_gap() -> None:
    assert stream_duration(np.array([0.0, 0.1, 0.2, 1.2]), 9.0) == pytest.approx(1.3)
    assert stream_duration(np.array([0.0]), 0.1) == 0.1
    assert stream_duration(np.array([0.0]), -0.1) == 0.0


def test_times_are_the_middles_of_equal_parts_of_the_stretch() -> None:
    assert Wanted(4).times_s(8.0, 0.1).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert Wanted(4, 2.0, 6.0).times_s(8.0, 0.1).tolist() == [2.5, 3.5, 4.5, 5.5]
    assert Wanted(2, 4.0).times_s(8.0, 0.1).tolist() == [5.0, 7.0]
    # an end rounded up by less than a frame and a tenth of a second is the video's own
    assert Wanted(2, 4.0, 8.15).times_s(8.0, 0.1).tolist() == [5.0, 7.0]
    with pytest.raises(InputError, match=r"end_s 8\.3 are outside the video"):
        Wanted(2, 4.0, 8.3).times_s(8.0, 0.1)
