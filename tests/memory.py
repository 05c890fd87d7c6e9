"""What a call allocates, seen by torch's own CPU allocator, kernels' scratch space included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Traced:
    """Bytes of a call: the largest single allocation, and the most that lived at one time."""

    largest: int
    peak: int


def traced(call: Callable[[], object]) -> Traced:
    """Runs `call` under the profiler; what lived before it does not count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    events.sort(key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events]
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return Traced(max(sizes), peak)
