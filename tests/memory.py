"""What one call allocates on a CPU, as the cost model measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vflash_analysis.decoding.memory import PeakMemory


@dataclass(frozen=True)
class Traced:
    """Bytes of a call: the largest single allocation, and the most that lived at one time."""

    largest: int
    peak: int


def traced(call: Callable[[], object]) -> Traced:
    """Runs `call`; what lived before it does not count."""
    with PeakMemory(torch.device("cpu")) as memory:
        memory.measure("call", call)
    return Traced(max(memory.changes["call"]), memory.peak_bytes["call"])
