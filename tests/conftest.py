"""Shared by all tests: the network stays closed to model hubs, GPU tests are skipped without one."""

import importlib.util
import os
import signal

import pytest
from hypothesis import settings

from vflash_analysis import paths

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# a job started in the background inherits an ignored Ctrl-C; tests of it need the usual one
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("suite", deadline=None)  # no test is judged by its time
settings.load_profile("suite")


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config, items):
    """Skip tests marked `gpu` where there is no CUDA device; they run on a machine that has one."""
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not _has_cuda():
        skip = pytest.mark.skip(reason="no CUDA device here; runs where torch.cuda.is_available()")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of runs, in the test's own folder."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"
