"""Faults that public ports of block drafters had, planted one at a time: the suite must notice each.

A mutant is a copy of the package with one expression changed. The tests named with it run on the
copy in a process of their own and have to fail there; on the package itself they pass.
"""

import os
import shutil
import subprocess
import sys

import pytest

from vflash_analysis import paths

MUTANTS = {  # name: (module, expression, fault, tests that must notice)
    "the first draft token is taken unchecked": (
        "decoding/tree.py",
        "if parent + 1 == rows[-1] and token == wanted:",
        "if parent + 1 == rows[-1] and (node == 0 or token == wanted):",
        "tests/decoding/test_exactness.py",
    ),
    "tree nodes stand one after the other instead of at their depth": (
        "decoding/loop.py",
        "positions = torch.tensor([0, *depths], device=device) + start",
        "positions = torch.arange(len(depths) + 1, device=device) + start",
        "tests/decoding/test_exactness.py",
    ),
    "the first rows stay in the cache instead of the accepted path's": (
        "decoding/loop.py",
        "cache.keep(start, rows)",
        "cache.keep(start, list(range(len(rows))))",
        "tests/decoding/test_exactness.py",
    ),
    "a block reads the target's state of its own anchor": (
        "model/drafter.py",
        "visible = context_positions[:, None, :] < anchors[:, :, None]",
        "visible = context_positions[:, None, :] <= anchors[:, :, None]",
        "tests/training/test_blocks.py",
    ),
    "labels are shifted by one slot": (
        "training/batches.py",
        "positions = anchors[:, None] + torch.arange(1, n_slots + 1)",
        "positions = anchors[:, None] + torch.arange(n_slots)",
        "tests/training/test_batches.py",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_fails_the_tests(name, tmp_path):
    module, expression, fault, tests = MUTANTS[name]
    for folder in ("vflash_analysis", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(paths.ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(paths.ROOT / "pyproject.toml", tmp_path)
    for folder in ("data", "notebooks"):
        (tmp_path / folder).symlink_to(paths.ROOT / folder)
    source = tmp_path / "vflash_analysis" / module
    text = source.read_text()
    assert text.count(expression) == 1, f"{module} no longer holds the expression: {expression}"
    source.write_text(text.replace(expression, fault))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "VFLASH_ROOT": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "1 failed" in ended.stdout, ended.stdout[-2000:]
