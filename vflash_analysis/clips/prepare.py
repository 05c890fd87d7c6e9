"""The clip lists of a profile: training, validation, target evaluation, and one per suite and seed.

Written into one folder by notebook 10 and read back by the later ones. Pocket clips are generated
there; the suites' and a training corpus's own files stay where they are.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from vflash_analysis import config, paths
from vflash_analysis.clips import corpora, frozen, pocket, suites
from vflash_analysis.clips.checking import CheckStore, check_clip_files
from vflash_analysis.clips.lists import Clip, read_clip_list, write_clip_list
from vflash_analysis.clips.overlap import REASONS as OVERLAP_REASONS
from vflash_analysis.clips.overlap import Evaluated, Overlap, check_disjoint
from vflash_analysis.clips.read import ClipError, FrameReader
from vflash_analysis.config import ClipSettings
from vflash_analysis.errors import InputError
from vflash_analysis.records import write_text_atomic
from vflash_analysis.strict import read_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LISTS = ("training", "validation", "target_evaluation")  # beside one per suite and seed


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


def _suite_lists(settings: ClipSettings, data_root: Path, folder: Path) -> dict[str, list[Clip]]:
    """The real suites' clips, drawn or as a frozen list names them, and the training clips.

    Writes `frozen-*.jsonl`, the frozen lists as they were replayed; `frozen.csv`, whether each of
    their files is the one named; and `left_out.csv`, training clips that are videos of a suite.
    """
    described = suites.chosen_suites(settings.benchmarks)
    videos = {name: suites.suite_videos(suite, data_root) for name, suite in described.items()}
    drawn: dict[str, list[Clip]] = {}
    for benchmark, seed in itertools.product(settings.benchmarks, settings.sample_seeds):
        suite, every = described[benchmark], videos[benchmark]
        place = suites.find_dataset(suite, data_root)[1]
        clips, path = frozen.chosen_clips(settings, suite, seed, every, place)
        if path is not None:
            write_text_atomic(folder / f"frozen-{path.name}", read_text(path, str(path)))
            print(f"{benchmark}, seed {seed}: replays {paths.relative_to_root(path)}")
        drawn[_suite_key(benchmark, seed)] = clips
    _verify(_each_once([clip for clips in drawn.values() for clip in clips]), settings, folder)
    every_video = [clip for of_suite in videos.values() for clip in of_suite]
    learnt = corpora.training_clips(settings, data_root, Evaluated(every_video))
    _report_left_out(learnt.left_out, folder / "left_out.csv")
    return {"training": learnt.training, "validation": learnt.validation, **drawn}


def _verify(clips: list[Clip], settings: ClipSettings, folder: Path) -> None:
    """Name every file that is not the one its frozen list names; the first raises under "fail"."""
    verified = frozen.verify(clips, sys.stdout)
    if verified.empty:
        return
    write_text_atomic(folder / "frozen.csv", verified.to_csv(index=False, lineterminator="\n"))
    for row in verified[verified["status"] != "ok"].to_dict("records"):
        error = ClipError(row["path"], row["status"], row["message"])
        if settings.on_bad_clip == "fail":
            raise error
        print(f"{row['benchmark']} {row['clip_id']}: {error}")


def _report_left_out(left_out: Sequence[Overlap], path: Path) -> None:
    """Write which corpus clips are videos of a suite, and print how many by reason."""
    columns = ["clip_id", "reason", "benchmark", "suite_clip_id", "path"]
    rows = [
        (one.training.clip_id, one.reason, one.evaluation.benchmark, one.evaluation.clip_id,
         one.training.path)
        for one in left_out
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=columns)
    write_text_atomic(path, frame.to_csv(index=False, lineterminator="\n"))
    counts = frame["reason"].value_counts()
    told = ", ".join(f"{counts[reason]} {reason}" for reason in OVERLAP_REASONS if reason in counts)
    if told:
        print(f"training clips left out as videos of a suite: {told}; named in {path.name}")


def prepare_lists(settings: ClipSettings, folder: Path) -> pd.DataFrame:
    """Make or draw every clip list and write it as `<name>.jsonl` below `folder`.

    Args:
        settings: the profile's `clips`.
        folder: where lists go, and generated videos.

    Returns:
        One row per list: list, clips, benchmarks.

    Raises:
        InputError: missing data, too few clips, or a generated or listed training clip that is in
            the evaluation; a corpus of `data/training` loses such clips instead.
        ClipError: a file that is not its frozen list's, where `on_bad_clip` is "fail".
    """
    if settings.source == "pocket":
        lists = _pocket_lists(settings, folder)
        evaluated = [c for name, clips in lists.items() if name.startswith("suite-") for c in clips]
        learnt = [*lists["training"], *lists["validation"]]
        check_disjoint(learnt, Evaluated(_each_once(evaluated), by_source=False))
    else:
        lists = _suite_lists(settings, config.data_folder(), folder)
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


def first_seed_clips(folder: Path, settings: ClipSettings, n_clips: int) -> list[Clip]:
    """The first `n_clips` clips of every suite's first sample seed, suite by suite."""
    seed = settings.sample_seeds[0]
    lists = (suite_list(folder, name, seed, n_clips) for name in settings.benchmarks)
    return list(itertools.chain.from_iterable(lists))


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


def check_lists(
    settings: ClipSettings, folder: Path, most: int = 10**9, stream: Any = None
) -> pd.DataFrame:
    """Read the very frames a run will use; one row per clip. Goes on where it was interrupted.

    Args:
        settings: the profile's `clips`.
        folder: of `prepare_lists`.
        most: clips of each list that are read, from its start.
        stream: where the line of progress goes; standard output when None.

    Raises:
        ClipError: a bad clip where `on_bad_clip` is "fail".
    """
    names = sorted(path.stem for path in folder.glob("*.jsonl") if _holds_clips(path.stem))
    clips = _each_once([clip for name in names for clip in read_list(folder, name)[:most]])
    store = CheckStore(folder / ".checked.jsonl")
    return check_clip_files(clips, settings, store, stream or sys.stdout, settings.on_bad_clip)


def _holds_clips(name: str) -> bool:
    return name in LISTS or name.startswith("suite-")


def contact_sheet(clips: Sequence[Clip], settings: ClipSettings, columns: int = 6) -> Figure:
    """Some of the frames that the target sees, one clip a row, under the clip's question."""
    import matplotlib.pyplot as plt  # not for every notebook that reads a clip list

    figure, axes = plt.subplots(
        len(clips), columns, figsize=(1.5 * columns, 1.6 * len(clips)), squeeze=False
    )
    with open_reader(settings) as reader:
        for row, clip in zip(axes, clips, strict=True):
            for place in row:
                place.set_axis_off()
            said = clip.prompt[:90]
            try:
                frames = reader.read_clip(clip, settings.num_frames).frames
                frozen.verified_sha256(clip)
            except ClipError as error:  # the reading check reports it; the other clips are shown
                said = f"{clip.clip_id} cannot be used: {error.reason}"
            else:
                shown = np.linspace(0, len(frames) - 1, columns).round().astype(int)
                for place, index in zip(row, shown, strict=True):
                    place.imshow(frames[index])
            row[0].set_title(f"{clip.benchmark}: {said}", loc="left", fontsize=8)
    plt.close(figure)
    return figure
