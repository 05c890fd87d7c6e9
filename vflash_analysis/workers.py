"""Processes that share work: how many there may be, and that they end with the one that asked."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def usable_cpus() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_pool(start: Callable[..., None] | None = None, *args: Any) -> ProcessPoolExecutor:
    """A pool of one fresh process per usable processor; `start(*args)` is called in each first."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(usable_cpus(), context, _begin, (os.getpid(), start, args))


def _begin(parent: int, start: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if start is not None:
        start(*args)


def _end_with(parent: int) -> None:
    """End this process, and with it what it started, when the one that asked for it has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
