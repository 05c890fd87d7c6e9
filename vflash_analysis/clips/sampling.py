"""Which frames of a clip are used: uniform over time stamps, never over frame numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vflash_analysis.errors import InputError

ROUNDING_S = 0.1  # suites give bounds in tenths of a second, so an end may lie past the last frame


@dataclass(frozen=True)
class Wanted:
    """Which frames of a video make a clip.

    Attributes:
        num_frames: how many, spread uniformly over the clip's time; 1 or more.
        start_s, end_s: the clip's bounds, seconds from the video's first frame; None: the video's.
        frames_per_s: rate of a folder of frame images, above 0; None: the video is a file.
    """

    num_frames: int
    start_s: float | None = None
    end_s: float | None = None
    frames_per_s: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether the clip is a stretch of its video."""
        return self.start_s is not None or self.end_s is not None

    def check(self) -> None:
        """Raise InputError for bounds or a rate that fit no video."""
        rate = self.frames_per_s
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise InputError(f"frames_per_s is {rate!r}; allowed are numbers above 0")
        start_s = 0.0 if self.start_s is None else self.start_s
        end_s = self.end_s
        if not (0 <= start_s < math.inf and (end_s is None or start_s < end_s < math.inf)):
            raise InputError(
                f"start_s is {self.start_s!r} and end_s {end_s!r}; "
                "allowed are finite seconds, 0 <= start_s < end_s"
            )

    def times_s(self, duration_s: float, frame_s: float) -> np.ndarray:
        """Return (num_frames,) seconds from the video's first frame, uniform inside the bounds.

        An end past the video's by no more than a frame and `ROUNDING_S` is the video's end.

        Args:
            duration_s: length of the video stream.
            frame_s: how long its last frame lasts.

        Raises:
            InputError: bounds outside the video.
        """
        self.check()
        start_s = self.start_s or 0.0
        end_s = duration_s if self.end_s is None else self.end_s
        if start_s >= duration_s or end_s > duration_s + frame_s + ROUNDING_S:
            raise InputError(
                f"start_s {start_s:g} and end_s {end_s:g} are outside the video, "
                f"which lasts {duration_s:.2f} s"
            )
        return start_s + uniform_times(min(end_s, duration_s) - start_s, self.num_frames)


def uniform_times(duration_s: float, num_frames: int) -> np.ndarray:
    """Return the middles of equal parts of a clip: t_i = (i + 1/2) * duration / num_frames.

    Middles, because they stay half a frame away from every frame boundary: with as many parts as
    frames, each frame of a constant-rate clip is taken exactly once whatever the rounding of its
    time stamps.

    Args:
        duration_s: length of the video stream in seconds, above 0.
        num_frames: 1 or more.

    Returns:
        (num_frames,) float64 seconds from the first frame's start.

    Raises:
        InputError: a duration or a count that is not positive and finite.
    """
    if (
        isinstance(num_frames, bool)
        or not isinstance(num_frames, (int, np.integer))
        or num_frames < 1
    ):
        raise InputError(f"num_frames is {num_frames!r}; allowed are whole numbers from 1 up")
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise InputError(
            f"clip duration is {duration_s!r} s; frames can be spread only over a duration above 0"
        )
    return (np.arange(num_frames) + 0.5) * (duration_s / num_frames)


def choose_indices(
    starts_s: Sequence[float] | np.ndarray, times_s: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return the index of the frame on screen at each time: the last one that has started by then.

    Args:
        starts_s: (N,) frame starts in seconds, not falling, N >= 1.
        times_s: (T,) times in seconds on the same clock.

    Returns:
        (T,) int64 indices in [0, N - 1]; a time before the first frame gives 0.

    Raises:
        InputError: no frames, or starts that fall or are not finite.
    """
    starts = np.asarray(starts_s, dtype=np.float64)
    times = np.asarray(times_s, dtype=np.float64)
    if starts.ndim != 1 or len(starts) == 0:
        raise InputError("a clip without frames has no frame to choose")
    if not np.isfinite(starts).all() or (np.diff(starts) < 0).any():
        raise InputError(
            "frame time stamps fall or are not finite; frames are chosen along rising stamps only"
        )
    # decord gives float32 stamps; without this a time equal to a start could round to the frame
    # before.
    slack = 1e-6 + np.abs(times) * 2.0**-22
    return np.clip(np.searchsorted(starts, times + slack, side="right") - 1, 0, len(starts) - 1)


def validate_indices(indices: Any, n_frames: int) -> np.ndarray:
    """Return `indices` as (T,) int64 once checked; decord cuts floats and wraps negatives.

    Raises:
        InputError: empty, not whole numbers, or outside [0, n_frames - 1].
    """
    given = np.asarray(indices)
    if given.ndim != 1 or given.size == 0:
        raise InputError(
            f"frame indices have shape {given.shape}; allowed is a list of at least one index"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise InputError(f"frame indices are {given.dtype}; allowed are whole numbers")
    if given.min() < 0 or given.max() >= n_frames:
        raise InputError(f"frame index {given.min()}..{given.max()} is outside 0..{n_frames - 1}")
    return given.astype(np.int64)


def stream_duration(starts_s: np.ndarray, own_length_s: float) -> float:
    """Return the video stream's length in seconds: the last start plus the median gap.

    Containers disagree on how long the last frame lasts, so its own claim counts only for a clip of
    one frame; with stamps alone every backend gets the same length and so takes the same frames.
    """
    if len(starts_s) == 1:
        return max(own_length_s, 0.0)
    return float(starts_s[-1] + np.median(np.diff(starts_s)))
