"""Times every forward of decoding at growing context lengths, on random weights.

Peak memory is taken in a pass of its own; in the timed one contexts and forwards take turns, so
that a machine that slows down slows all of them alike. `cost.py` runs it for a profile or from the
command line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vflash_analysis import environment, sizes
from vflash_analysis.config import CostSettings, DrafterSettings
from vflash_analysis.decoding.clip import in_turn, reason_of
from vflash_analysis.decoding.forwards import Forwards, Job
from vflash_analysis.decoding.memory import PeakMemory
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import DTYPES
from vflash_analysis.model.untrained import untrained_drafter, untrained_target
from vflash_analysis.records import blank_row
from vflash_analysis.schemas import COPY, COSTS
from vflash_analysis.shapes import DrafterShape, TargetShape
from vflash_analysis.training.progress import Progress

COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}  # copied at once, beyond any cache of the device
_GB = 1e9
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is measured, and where.

    Attributes:
        name: of the shape, as records and figures call it.
        shape: of the target.
        drafter: settings of its drafter.
        tree_nodes: nodes of Tree-60's tree.
        dtype, device, attention: as in a profile's `target`.
        run_id: of the run, kept in every row.
    """

    name: str
    shape: TargetShape
    drafter: DrafterSettings
    tree_nodes: int
    dtype: str
    device: str
    attention: str
    run_id: str

    @property
    def drafter_shape(self) -> DrafterShape:
        return DrafterShape.of(self.shape, self.drafter)

    @property
    def verify_rows(self) -> int:
        """Most rows of a verify."""
        return max(self.drafter.block_size, self.tree_nodes + 1)


def check_device(subject: Subject, longest: int) -> None:
    """Refuse a device that is not there or too small, before anything is built.

    Raises:
        InputError: names the device, and bytes needed and free.
    """
    device = torch.device(subject.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device: found 'cuda', but torch sees no CUDA device, allowed: cpu")
    itemsize = DTYPES[subject.dtype].itemsize
    needed = sizes.measuring_bytes(subject.drafter_shape, longest, subject.verify_rows, itemsize)
    free = environment.free_bytes(device)
    if free is not None and needed > free:
        raise InputError(
            f"{subject.name} in {subject.dtype} after {longest:,} tokens: needs "
            f"{needed / _GB:.1f} GB, found {free / _GB:.1f} GB free on {device}, allowed: a larger "
            "device, a smaller dtype or shorter contexts"
        )


def copy_row(device: torch.device, repeats: int) -> Row:
    """How fast the device copies a large tensor: the unit of the bandwidth limit.

    `read_bytes` counts what is read and what is written, so a copy at the memory's full rate moves
    the rate its maker prints.
    """
    size = COPY_BYTES[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copied, timer = torch.empty_like(source), Timer(device)
    times = []
    for _ in range(repeats + 1):
        timer.start()
        copied.copy_(source)
        times.append(timer.lap("other_s"))
    row = {"implementation": "torch", "forward": COPY, "context_tokens": 0, "rows": 0}
    return row | {"read_bytes": 2.0 * size, "flops": 0.0} | _spread(times[1:])


def _spread(seconds: Sequence[float]) -> Row:
    """Median and quartiles, as columns of a row."""
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    found = {"seconds": middle, "seconds_low": low, "seconds_high": high}
    return {name: float(value) for name, value in found.items()} | {"repeats": len(seconds)}


def measure(
    subject: Subject, settings: CostSettings, log: Callable[[str], None] = print
) -> list[Row]:
    """COSTS rows of every forward at every context length, and of a copy on the device.

    Args:
        subject: what is measured.
        settings: context lengths and timed repeats.
        log: prints one line.

    Raises:
        InputError: the device is not there or too small.
    """
    longest = max(settings.context_tokens)
    check_device(subject, longest)
    device = torch.device(subject.device)
    log(f"{subject.name}: {environment.device_label(device)}, {subject.dtype}")
    copied = copy_row(device, settings.repeats)
    log(f"copy: {copied['read_bytes'] / copied['seconds'] / _GB:.1f} GB/s, read and written")
    target = untrained_target(
        subject.shape,
        subject.name,
        DTYPES[subject.dtype],
        device,
        subject.attention,
        positions=longest + 2 * subject.verify_rows,
    )
    drafter = untrained_drafter(target, subject.drafter)
    log(f"{sum(p.numel() for p in target.model.parameters()):,} parameters built, drafter beside")
    with PeakMemory(device) as memory:
        shape = subject.drafter_shape
        forwards = Forwards(target, drafter, shape, longest, subject.tree_nodes)
        reasons = _take_peaks(forwards, settings, memory, Timer(device))
    log("peak memory taken")
    rows = _times(forwards, settings, reasons, Timer(device), log)
    for row in rows:
        name = _name(row["context_tokens"], row["implementation"], row["forward"])
        row["peak_bytes"] = memory.peak_bytes.get(name)
    rows.sort(key=lambda row: row["context_tokens"])
    shared = {
        "run_id": subject.run_id,
        "shape": subject.name,
        "device": environment.device_label(device),
        "dtype": subject.dtype,
    }
    return [blank_row(COSTS) | shared | row for row in [copied, *rows]]


def _name(context: int, implementation: str, forward: str) -> str:
    return f"{implementation} {forward} after {context}"


def _take_peaks(
    forwards: Forwards, settings: CostSettings, memory: PeakMemory, timer: Timer
) -> Mapping[str, str]:
    """Notes every forward's peak; returns why those that do not fit the device do not, by name."""
    reasons = {}
    for context in settings.context_tokens:
        for job in forwards.jobs(context):
            name = _name(context, job.implementation, job.forward)
            try:
                job.prepare()
                timer.start()
                memory.measure(name, lambda job=job: job.call(timer))  # type: ignore[misc]
            except torch.OutOfMemoryError as error:
                reasons[name] = reason_of(error)
    return reasons


def _times(
    forwards: Forwards,
    settings: CostSettings,
    reasons: Mapping[str, str],
    timer: Timer,
    log: Callable[[str], None],
) -> list[Row]:
    """Rows with times. Contexts take turns as their forwards do."""
    lengths, done = settings.context_tokens, 0
    progress = Progress("turn", settings.repeats * len(lengths), log=log, every_s=5.0)
    rows: dict[str, Row] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(settings.repeats):
        for context in in_turn(lengths, turn):
            jobs = forwards.jobs(context)
            named = [(_name(context, job.implementation, job.forward), job) for job in jobs]
            rows |= {name: _job_row(job, context) for name, job in named}
            for name, job in in_turn(named, turn):
                if name not in reasons:
                    seconds[name].append(job.seconds(timer))
            done += 1
            progress.update(done, f"after {context:,} tokens")
    failed = {name: {"repeats": 0, "reason": reason} for name, reason in reasons.items()}
    spreads = {name: _spread(found) for name, found in seconds.items()}
    return [row | (failed | spreads)[name] for name, row in rows.items()]


def _job_row(job: Job, context: int) -> Row:
    return {
        "implementation": job.implementation,
        "forward": job.forward,
        "context_tokens": context,
        "rows": job.rows,
        "read_bytes": float(job.work.bytes),
        "flops": float(job.work.flops),
    }
