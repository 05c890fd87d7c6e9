"""The command for several processes calls what notebook 40 calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vflash_analysis.config import DrafterKey
from vflash_analysis.errors import InputError
from vflash_analysis.training import launch

FOLDERS = ["--target", "t", "--clips", "c", "--continuations", "k", "--out", "o"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []

    def open_target(settings: Any, folder: Path) -> str:
        if folder == Path("missing"):
            raise InputError("missing: no such folder")
        return f"target at {folder}"

    monkeypatch.setattr(launch.pipeline, "open_target", open_target)
    monkeypatch.setattr(launch.pipeline, "train_drafter", lambda *args: seen.append(args))
    return seen


def test_arguments_reach_the_training(calls: list[tuple[Any, ...]]) -> None:
    more = ["--profile", "smoke", "--arm", "mask_only", "--train-seed", "3"]
    assert launch.main([*FOLDERS, *more, "--set", "training.steps=7"]) == 0
    target, settings, key, *folders = calls[0]
    assert (target, settings.name) == ("target at t", "smoke")
    assert key == DrafterKey("mask_only", 3, 7, settings.training.training_clips)
    assert folders == [Path("c"), Path("k"), Path("o")]
    assert launch.main([*FOLDERS, *more, "--steps", "5", "--training-clips", "2"]) == 0
    assert calls[1][2] == DrafterKey("mask_only", 3, 5, 2)
    assert launch.main([*FOLDERS, *more, "--variant", "drafter.block_size=8"]) == 0
    assert calls[2][2].variant == "drafter.block_size=8"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--profile", "nosuch"], "profile"),
        (["--profile", "smoke", "--set", "training.stepz=7"], "training.stepz"),
        (["--profile", "smoke", "--target", "missing"], "missing: no such folder"),
    ],
)
def test_bad_input_is_one_line(
    calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], more: list[str], told: str
) -> None:
    assert launch.main([*FOLDERS, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error and error.count("\n") == 1
    assert not calls
