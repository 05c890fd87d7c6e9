"""Continuations from several processes of one thread each: what a CPU does twice as fast that way.

Every process loads the target and works on its share of the clips; the files it leaves are those
that `collect_continuations` finds done. Which process took a clip does not change its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch

from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.prepare import open_reader
from vflash_analysis.config import ClipSettings
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import Target
from vflash_analysis.training.continuations import collect_continuations
from vflash_analysis.training.progress import Progress
from vflash_analysis.workers import worker_pool

CLIPS_AT_ONCE = 8  # of one process, between two reports
_own: dict[str, Any] = {}  # a process's target and reader


def _start(load: Callable[[], Target], settings: ClipSettings) -> None:
    torch.set_num_threads(1)
    _own["target"] = load()
    _own["reader"] = open_reader(settings).__enter__()


def _collect(clips: list[Clip], folder: Path, options: dict[str, Any]) -> tuple[int, str]:
    """Clips worked on, and why they could not be ("" if they could); errors travel as text."""
    try:
        collect_continuations(
            _own["target"], clips, _own["reader"], out_folder=folder, log=_silent, **options
        )
    except InputError as error:
        return len(clips), str(error)
    return len(clips), ""


def _silent(line: str) -> None:
    """Reports come from the process that waits."""


def collect_in_parallel(
    load: Callable[[], Target],
    clips: Sequence[Clip],
    settings: ClipSettings,
    folder: Path,
    options: dict[str, Any],
) -> None:
    """Leave every clip's text and states in `folder`, for `collect_continuations` to merge.

    Args:
        load: gives the target in a new process; must pickle.
        clips: the clips.
        settings: how frames are read.
        folder: of the list's continuations.
        options: of `collect_continuations`: num_frames, max_new_tokens, tap_layer_ids, ...

    Raises:
        InputError: what a process met, where `on_bad_clip` is "fail".
    """
    shares = [list(clips[i : i + CLIPS_AT_ONCE]) for i in range(0, len(clips), CLIPS_AT_ONCE)]
    progress, done = Progress("clip", len(clips)), 0
    with worker_pool(_start, load, settings) as pool:
        waiting = [pool.submit(_collect, share, folder, options) for share in shares]
        for future in as_completed(waiting):
            count, problem = future.result()
            if problem:
                raise InputError(problem)
            done += count
            progress.update(done)
