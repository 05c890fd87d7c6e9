"""Readers that misbehave, for `FrameReader("stub_readers:NAME")`; they run in the child process
only."""

from __future__ import annotations

import os
import time

import numpy as np

from vflash_analysis.clips.backends import Reading, read_pyav
from vflash_analysis.clips.sampling import Wanted


def spin(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Never come back, holding the interpreter all the time."""
    if "good" in path:
        return read_pyav(path, wanted, num_threads)
    while True:
        pass


def sleep(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Come back long after anybody waits."""
    if "good" not in path:
        time.sleep(60)
    return read_pyav(path, wanted, num_threads)


def abort(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """End the process the way a failed native check does."""
    if "good" not in path:
        os.write(2, b"native check failed\n")
        os.abort()
    return read_pyav(path, wanted, num_threads)


def chatty(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Print where the protocol runs, as some libraries do."""
    print("a line on stdout")
    os.write(1, b"\x00" * 5000)
    return read_pyav(path, wanted, num_threads)


def patched(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Report two frames as replaced, one of them by its neighbour."""
    reading = read_pyav(path, wanted, num_threads)
    reading.frames[3] = reading.frames[2]
    reading.n_substituted = 2
    return reading


def four_channels(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Return RGBA."""
    reading = read_pyav(path, wanted, num_threads)
    reading.frames = np.concatenate([reading.frames, reading.frames[..., :1]], axis=-1)
    return reading


def too_few(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Lose a frame."""
    reading = read_pyav(path, wanted, num_threads)
    reading.frames = reading.frames[1:]
    return reading
