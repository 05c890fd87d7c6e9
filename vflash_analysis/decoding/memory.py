"""Peak memory of single calls, exact on CUDA and on a CPU.

    with PeakMemory(device) as memory:
        held = make_what_the_calls_read()
        memory.measure("name", call)
    memory.peak_bytes["name"]

On CUDA torch's allocator keeps the number. On a CPU torch's profiler reports every allocation and
release of torch, kernels' scratch space included; the process's resident size would also count what
the C library keeps back for later, and miss what it gives out again. What a BLAS library takes for
itself is seen by neither. The profiler only knows releases of what was made while it ran, so what
the calls read is made inside the block.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class PeakMemory:
    """Measures calls one by one; on a CPU the numbers are there once the block has ended.

    Args:
        device: whose memory counts.

    Attributes:
        peak_bytes: by name, the most bytes a call held at one time beyond those before it.
        changes: by name, bytes of a call's allocations and (negative) releases in order; on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None
        self._names: list[str] = []
        self.peak_bytes: dict[str, int] = {}
        self.changes: dict[str, list[int]] = {}

    def __enter__(self) -> PeakMemory:
        if self._device.type != "cuda":
            gc.collect()  # what is released inside, made before, is not known
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes two lines a session
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._profile is not None:
            self._profile.__exit__(kind, error, trace)
            if error is None:
                self._read(self._profile)

    def measure(self, name: str, call: Callable[[], object]) -> None:
        """Runs `call` and notes its peak under a name that no other call has."""
        if self._profile is None:
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            call()
            self.peak_bytes[name] = torch.cuda.max_memory_allocated(self._device) - before
            return
        self._names.append(name)
        with record_function(name):
            call()

    def _read(self, recorded: profile) -> None:
        """Adds up allocations and releases from each call's begin to its end."""
        assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
        events: list[Any] = list(recorded.profiler.kineto_results.events())
        spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in self._names}
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        changes.sort(key=lambda change: change[0])
        for name, (begin, end) in spans.items():
            own = [change for at, change in changes if begin <= at <= end]
            self.changes[name] = own
            self.peak_bytes[name] = max(itertools.accumulate(own, initial=0))
