"""One clock for every method, synchronised with the device.

A `Timer` cuts time into laps that are laid end to end, so the parts of a cycle sum to the cycle by
construction. On CUDA the device is synchronised at both ends of every lap: kernels are launched
asynchronously, and an unsynchronised clock would stop before the work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypedDict

import torch

PARTS = ("draft_s", "verify_s", "other_s")  # of a cycle
TREE = "tree_s"  # a lap of its own within "other_s"


class Parts(TypedDict):
    """What PARTS and TREE took, in seconds."""

    draft_s: float
    verify_s: float
    other_s: float
    tree_s: float | None


class Timer:
    """Laps laid end to end, in seconds.

    Args:
        device: the device whose work is timed; only CUDA needs synchronising.
        clock: monotonic seconds.
        synchronize: called before every reading of the clock; by default `torch.cuda.synchronize`
            on CUDA and nothing elsewhere.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.device = torch.device(device)
        if synchronize is None and self.device.type == "cuda":
            synchronize = lambda: torch.cuda.synchronize(self.device)  # noqa: E731
        self._clock = clock
        self._synchronize = synchronize
        self._begin = self._last = 0.0
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._tree_s: float | None = None

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def start(self) -> None:
        """Begins: everything from here to the next lap belongs to that lap."""
        self.take()
        self._begin = self._last = self._now()

    def lap(self, part: str) -> float:
        """Ends a lap, adds it to `part` (one of PARTS, or TREE) and returns its seconds."""
        now = self._now()
        seconds = now - self._last
        if part == TREE:
            self._tree_s = (self._tree_s or 0.0) + seconds
            part = "other_s"
        self._parts[part] += seconds
        self._last = now
        return seconds

    def take(self) -> Parts:
        """The parts since the last `take` or `start`, and a fresh count.

        PARTS sum to the time that passed; TREE is a part of "other_s", None without such a lap.
        """
        draft_s, verify_s, other_s = (self._parts[part] for part in PARTS)
        tree_s = self._tree_s
        self._parts, self._tree_s = dict.fromkeys(PARTS, 0.0), None
        return Parts(draft_s=draft_s, verify_s=verify_s, other_s=other_s, tree_s=tree_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds from `start` to the end of the last lap."""
        return self._last - self._begin
