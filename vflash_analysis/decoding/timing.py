"""One clock for every method, synchronised with the device, and the facts of the machine.

A `Timer` cuts time into laps that are laid end to end, so the parts of a cycle sum to the cycle by
construction. On CUDA the device is synchronised at both ends of every lap: kernels are launched
asynchronously, and an unsynchronised clock would stop before the work is done.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vflash_analysis.records import package_versions

PARTS = ("draft_s", "verify_s", "other_s")


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
        device = torch.device(device)
        if synchronize is None and device.type == "cuda":
            synchronize = lambda: torch.cuda.synchronize(device)  # noqa: E731
        self._clock = clock
        self._synchronize = synchronize
        self._begin = self._last = 0.0
        self._parts = dict.fromkeys(PARTS, 0.0)

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def start(self) -> None:
        """Begins: everything from here to the next lap belongs to that lap."""
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._begin = self._last = self._now()

    def lap(self, part: str) -> float:
        """Ends a lap, adds it to `part` (one of PARTS) and returns its seconds."""
        now = self._now()
        seconds = now - self._last
        self._parts[part] += seconds
        self._last = now
        return seconds

    def take(self) -> dict[str, float]:
        """The parts since the last `take` or `start`, and a fresh count."""
        parts = self._parts
        self._parts = dict.fromkeys(PARTS, 0.0)
        return parts

    @property
    def elapsed_s(self) -> float:
        """Seconds from `start` to the end of the last lap."""
        return self._last - self._begin


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _nvidia_smi(*fields: str) -> dict[str, str | None]:
    """The first GPU's fields as nvidia-smi prints them; None where it cannot be asked."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(fields)
    values = answer.stdout.splitlines()[0].split(",") if answer.stdout.strip() else []
    if len(values) != len(fields):
        return dict.fromkeys(fields)
    return {field: value.strip() for field, value in zip(fields, values, strict=True)}


def device_label(device: torch.device | str) -> str:
    """The records' `device`: the GPU's name, or the CPU's model and the threads in use."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({_cpu_model()}, {torch.get_num_threads()} threads)"


def machine_facts(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a timing depends on: device, driver, clocks, CPU, threads and versions (JSON types)."""
    device = torch.device(device)
    facts: dict[str, Any] = {
        "device": device.type,
        "device_name": device_label(device),
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "driver": None,
        "clocks": None,
        "versions": package_versions(("torch", "transformers", "decord", "av", "numpy")),
    }
    if device.type == "cuda":
        smi = _nvidia_smi("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm")
        facts["driver"] = smi.pop("driver_version")
        facts["clocks"] = smi
        facts["versions"]["cuda"] = torch.version.cuda
    return facts
