"""Worker processes: they work, they end with the one that asked, they drop what has not begun."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import alive, gone_within
from vflash_analysis import workers

ASKS = """
import os, time
from vflash_analysis.workers import worker_pool
if __name__ == "__main__":
    with worker_pool() as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_workers_end_when_the_one_that_asked_is_killed(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        worker = int(asking.stdout.readline())
        assert alive(worker)
        asking.send_signal(signal.SIGKILL)
    assert gone_within(worker, 20)


def test_an_error_drops_what_has_not_begun(monkeypatch):
    monkeypatch.setattr(workers, "usable_cpus", lambda: 1)
    with pytest.raises(KeyboardInterrupt), workers.worker_pool() as pool:
        pool.submit(os.getpid).result()
        waiting = [pool.submit(time.sleep, 0.2) for _ in range(50)]
        raise KeyboardInterrupt
    assert all(future.done() for future in waiting)
    assert sum(future.cancelled() for future in waiting) > 40


def test_a_process_bound_to_two_processors_uses_two(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert workers.usable_cpus() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # where a system cannot bind
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers.usable_cpus() == 1
