"""The clip lists of a profile: training, validation, target evaluation, and one per suite and seed.

Written into one folder by notebook 10 and read back by the later ones. Pocket clips are generated
there; the suites' and a training corpus's own files stay where they are.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from vflash_analysis import config, paths
from vflash_analysis.clips import pocket, suites
from vflash_analysis.clips.lists import (
    Clip,
    check_disjoint,
    read_clip_list,
    read_video_list,
    write_clip_list,
)
from vflash_analysis.clips.read import FrameReader, check_clips
from vflash_analysis.config import ClipSettings
from vflash_analysis.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIPS_PER_READER = 100
READERS_AT_ONCE = 4  # more would slow each other down to the time limit


def _suite_key(benchmark: str, sample_seed: int) -> str:
    return f"suite-{benchmark}-{sample_seed}"


def _pocket_lists(settings: ClipSettings, folder: Path) -> dict[str, list[Clip]]:
    """Generate the clips; each list is cut to its size from equally many clips of every family."""
    videos, n_families = folder / "videos", len(pocket.FAMILIES)

    def make(split: str, n_clips: int) -> list[Clip]:
        clips = pocket.make_split(split, math.ceil(n_clips / n_families), videos / split)
        # families in turn, so that a cut list holds each of them; the sort keeps their order
        return sorted(clips, key=lambda clip: clip.clip_id[-4:])[:n_clips]

    lists = {
        "training": make("drafter_training", settings.training_clips),
        "validation": make("drafter_validation", settings.validation_clips),
    }
    if settings.target_evaluation_clips:
        lists["target_evaluation"] = make("target_evaluation", settings.target_evaluation_clips)
    for seed in settings.sample_seeds:
        made = pocket.make_split("suites", settings.clips_per_suite_all, videos / "suites", seed)
        for benchmark in settings.benchmarks:
            chosen = [clip for clip in made if clip.benchmark == benchmark]
            lists[_suite_key(benchmark, seed)] = chosen
    return lists


def _suite_lists(settings: ClipSettings, data_root: Path) -> dict[str, list[Clip]]:
    """Draw the real suites' lists; training clips come from a JSONL of video + prompt."""
    if settings.training_list is None:
        raise InputError(
            'clips.training_list: found null, allowed with source "suites": a JSONL file'
        )
    corpus = read_video_list(data_root / settings.training_list)
    wanted = settings.training_clips + settings.validation_clips
    if len(corpus) < wanted:
        raise InputError(
            f"clips.training_clips: found {len(corpus)} clips in {settings.training_list}, allowed: "
            f"{wanted} or more (training and validation)"
        )
    lists = {
        "training": corpus[: settings.training_clips],
        "validation": corpus[settings.training_clips : wanted],
    }
    described = suites.load_suites(paths.DATA / "suites")
    for benchmark in settings.benchmarks:
        if benchmark not in described:
            raise InputError(f"clips.benchmarks: {benchmark} has no file in data/suites")
        for seed in settings.sample_seeds:
            lists[_suite_key(benchmark, seed)] = suites.suite_clips(
                described[benchmark], data_root, seed, settings.clips_per_suite_all
            )
    return lists


def prepare_lists(settings: ClipSettings, folder: Path) -> pd.DataFrame:
    """Make or draw every clip list and write it as `<name>.jsonl` below `folder`.

    Args:
        settings: the profile's `clips`.
        folder: where lists go, and generated videos.

    Returns:
        One row per list: list, clips, benchmarks.

    Raises:
        InputError: missing data, too few clips, or a clip that is in training and in evaluation.
    """
    if settings.source == "pocket":
        lists = _pocket_lists(settings, folder)
    else:
        lists = _suite_lists(settings, config.data_folder())
    evaluated = [
        clip for name, clips in lists.items() if name.startswith("suite-") for clip in clips
    ]
    check_disjoint([*lists["training"], *lists["validation"]], _each_once(evaluated))
    rows = []
    for name, clips in lists.items():
        write_clip_list(folder / f"{name}.jsonl", clips)
        families = ", ".join(sorted({clip.benchmark for clip in clips}))
        rows.append({"list": name, "clips": len(clips), "benchmarks": families})
    return pd.DataFrame(rows)


def _each_once(clips: list[Clip]) -> list[Clip]:
    """Clips of several sample seeds, which may share some, each once, in order of first sight."""
    return list({(clip.benchmark, clip.clip_id): clip for clip in clips}.values())


def read_list(folder: Path, name: str) -> list[Clip]:
    """A list written by `prepare_lists`: training, validation, target_evaluation.

    Raises:
        InputError: the profile made no such list.
    """
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise InputError(f"{paths.relative_to_root(path)}: no such clip list")
    return read_clip_list(path)


def suite_list(folder: Path, benchmark: str, sample_seed: int, n_clips: int) -> list[Clip]:
    """The first `n_clips` clips of a suite and sample seed."""
    return read_list(folder, _suite_key(benchmark, sample_seed))[:n_clips]


def all_suite_clips(folder: Path, settings: ClipSettings, n_clips: int) -> list[Clip]:
    """The first `n_clips` clips of every suite and sample seed, each clip once.

    In order of rank within its list, suites and seeds in turn, so that a cut keeps all of them.
    """
    lists = [
        suite_list(folder, benchmark, seed, n_clips)
        for seed in settings.sample_seeds
        for benchmark in settings.benchmarks
    ]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*lists))
    return _each_once([clip for clip in in_turn if clip is not None])


def open_reader(settings: ClipSettings) -> FrameReader:
    """The frame reader that the profile asks for."""
    return FrameReader(timeout_s=settings.read_timeout_s, backend=settings.reader)


def check_lists(settings: ClipSettings, folder: Path, most: int = 10**9) -> pd.DataFrame:
    """Read the very frames a run will use; one row per clip.

    Args:
        settings: the profile's `clips`.
        folder: of `prepare_lists`.
        most: clips of each list that are read, from its start.

    Raises:
        ClipError: a bad clip where `on_bad_clip` is "fail".
    """
    names = sorted(path.stem for path in folder.glob("*.jsonl"))
    clips = _each_once([clip for name in names for clip in read_list(folder, name)[:most]])
    n = CLIPS_PER_READER
    shares = [clips[start : start + n] for start in range(0, len(clips), n)]
    stop = threading.Event()

    def check(share: list[Clip]) -> list[dict[str, Any]]:
        with open_reader(settings) as reader:
            left = (clip for clip in share if not stop.is_set())
            return check_clips(left, settings.num_frames, reader, settings.on_bad_clip)

    with ThreadPoolExecutor(READERS_AT_ONCE) as pool:  # a thread waits for its reader's process
        try:
            rows = [row for found in pool.map(check, shares) for row in found]
        except BaseException:
            stop.set()
            raise
    frame = pd.DataFrame(rows)
    frame.insert(0, "clip_id", [clip.clip_id for clip in clips])
    frame.insert(1, "benchmark", [clip.benchmark for clip in clips])
    return frame


def contact_sheet(clips: Sequence[Clip], settings: ClipSettings, columns: int = 6) -> Figure:
    """Some of the frames that the target sees, one clip a row, under the clip's question."""
    import matplotlib.pyplot as plt  # not for every notebook that reads a clip list

    figure, axes = plt.subplots(
        len(clips), columns, figsize=(1.5 * columns, 1.6 * len(clips)), squeeze=False
    )
    with open_reader(settings) as reader:
        for row, clip in zip(axes, clips, strict=True):
            frames = reader.read_clip(clip, settings.num_frames).frames
            shown = np.linspace(0, len(frames) - 1, columns).round().astype(int)
            for place, index in zip(row, shown, strict=True):
                place.imshow(frames[index])
                place.set_axis_off()
            row[0].set_title(f"{clip.benchmark}: {clip.prompt[:90]}", loc="left", fontsize=8)
    plt.close(figure)
    return figure
