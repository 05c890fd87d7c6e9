"""Processes that share work, and that end when the one that asked for them does (POSIX)."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

PARALLEL_FROM = 40  # clips: fewer are done before a second process has started


def usable_cpus() -> int:
    """Processors that this process may run on; a container's share of their time is not seen."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def worker_pool(start: Callable[..., None] | None = None, *args: Any) -> Iterator[Any]:
    """A pool of one fresh process per usable processor, each of which calls `start(*args)` first.

    On an error or an interrupt inside, what has not begun is dropped.
    """
    context = multiprocessing.get_context("spawn")
    first = (os.getpid(), start, args)
    with ProcessPoolExecutor(usable_cpus(), context, _begin, first) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin(parent: int, start: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    end_with(parent, lambda: os._exit(1))
    if start is not None:
        start(*args)


def end_with(parent: int, end: Callable[[], None]) -> None:
    """Have `end` called, in a thread of its own, once the process `parent` is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end()

    threading.Thread(target=watch, daemon=True).start()
