"""How decoding changes with the number of frames: notebook 63's calls.

One drafter is trained on clips of all lengths, since acceptance falls beyond the lengths it has
seen; then every clip is decoded at every number of frames, and what the target says of it is scored.

    study = open_study(settings, stage.input("target"), stage.input("clips"), stage.folder)
    collect(study); train_drafter(study); decode(study, stage.run_id); score(study, stage.run_id)
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from vflash_analysis import config
from vflash_analysis.clips import pocket
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.prepare import first_seed_clips, open_reader, read_list
from vflash_analysis.clips.wording import accuracy_counts
from vflash_analysis.config import Profile
from vflash_analysis.decoding.clip import ShardFacts, reason_of
from vflash_analysis.decoding.shard import NothingDecoded, decode_shard
from vflash_analysis.environment import device_label
from vflash_analysis.model.drafter import drafter_config, new_drafter
from vflash_analysis.model.target import Target
from vflash_analysis.records import blank_row, read_records, replace_atomically, write_records
from vflash_analysis.schemas import (
    CONTINUATIONS,
    CYCLES,
    GENERATIONS,
    LENGTHS_STUDY,
    MEASURES,
    NO_LAYER,
)
from vflash_analysis.training import pipeline
from vflash_analysis.training.blocks import target_pieces
from vflash_analysis.training.continuations import JoinedContinuations
from vflash_analysis.training.loop import train


@dataclass(frozen=True)
class Study:
    """What the steps share.

    Attributes:
        settings: the profile, its target the one of `lengths.target` where that is given.
        target: loaded.
        load: loads it again, in another process.
        training: clips to learn from. evaluated: clips to decode, of the first sample seed.
        folder: of results.
    """

    settings: Profile
    target: Target
    load: Any
    training: list[Clip]
    evaluated: list[Clip]
    folder: Path

    def at(self, num_frames: int) -> Path:
        """Where decodes at that many frames go."""
        return self.folder / f"frames-{num_frames}"


def open_study(settings: Profile, target_folder: Path, clips_folder: Path, folder: Path) -> Study:
    """Load the target and list the clips; generated ones are written with frames enough.

    Raises:
        InputError: a target that is not there, or clip lists that the profile has not made.
    """
    if settings.lengths.target is not None:
        chosen = dataclasses.replace(settings.target, source=settings.lengths.target)
        settings = dataclasses.replace(settings, target=chosen)
    load = functools.partial(pipeline.open_target, settings, target_folder)
    training, evaluated = _clips(settings, clips_folder, folder / "clips")
    return Study(settings, load(), load, training, evaluated, folder)


def _clips(settings: Profile, clips_folder: Path, out: Path) -> tuple[list[Clip], list[Clip]]:
    own = settings.lengths
    if settings.clips.source == "pocket":
        most = max(own.num_frames)
        learnt = -(-own.training_clips // len(pocket.FAMILIES))
        training = pocket.make_split("drafter_training", learnt, out, least_frames=most)
        drawn = pocket.make_split("suites", own.clips_per_suite, out, least_frames=most)
        suites = settings.clips.benchmarks
        return training[: own.training_clips], [c for c in drawn if c.benchmark in suites]
    training = read_list(clips_folder, "training")[: own.training_clips]
    return training, first_seed_clips(clips_folder, settings.clips, own.clips_per_suite)


def by_frames(clips: list[Clip], counts: tuple[int, ...]) -> dict[int, list[Clip]]:
    """Clips to learn from by the number of frames they are read at, each at one in turn."""
    return {count: clips[turn :: len(counts)] for turn, count in enumerate(counts)}


def collect(study: Study) -> None:
    """The target's own texts about the training clips, each at its number of frames; resumes.

    A length for which the memory is too small has none, unless a bad clip is to stop the run.
    """
    settings = study.settings
    taps = pipeline.tapped_layers(study.target, settings)
    with open_reader(settings.clips) as reader:
        for count, clips in by_frames(study.training, settings.lengths.num_frames).items():
            folder = study.folder / "texts" / str(count)
            print(f"{count} frames:", flush=True)
            try:
                pipeline.collect(
                    settings, study.load, study.target, clips, reader, folder, count, taps
                )
            except torch.OutOfMemoryError as error:
                if settings.clips.on_bad_clip == "fail":
                    raise
                print(f"{count} frames: no texts: {reason_of(error)}", flush=True)
                write_records(folder / f"{CONTINUATIONS.name}.parquet", [], CONTINUATIONS)


def train_drafter(study: Study) -> Path:
    """Train the flow drafter on the texts of all lengths; returns its folder. Resumes."""
    settings, key = study.settings, config.lengths_drafter(study.settings)
    groups = {
        study.folder / "texts" / str(count): (count, clips)
        for count, clips in by_frames(study.training, settings.lengths.num_frames).items()
    }
    with pipeline.sources(study.target, settings, groups) as sources:
        return train(
            new_drafter(
                drafter_config(study.target, settings.drafter),
                key.train_seed,
                device=study.target.device,
            ),
            target_pieces(study.target),
            JoinedContinuations(sources),
            config.arm_settings(settings.training, key),
            study.folder / "trained",
            mixed_precision=pipeline.mixed_precision(study.target),
        )


def decode(study: Study, run_id: str) -> None:
    """Decode every clip at every number of frames; resumes, and merges the tables.

    Rows of one suite and number of frames have the run id "<run_id>/frames=<n>/<suite>". A number
    of frames at which nothing could be decoded keeps its failed rows; the others are measured.

    Raises:
        NothingDecoded: nothing could be decoded at any number of frames; the tables are written.
    """
    settings = study.settings
    methods = dataclasses.replace(settings.decode, methods=settings.lengths.methods)
    drafter = {LENGTHS_STUDY: study.folder / "trained" / "drafter"}
    failed: list[str] = []
    with open_reader(settings.clips) as reader:
        for count in settings.lengths.num_frames:
            print(f"{count} frames:", flush=True)
            facts = ShardFacts.of_study(settings, f"{run_id}/frames={count}", count)
            try:
                decode_shard(
                    study.target, drafter, study.evaluated, reader, methods, study.at(count), facts
                )
            except NothingDecoded as error:
                failed.append(f"{count} frames: {error}")
                print(failed[-1], flush=True)
    for schema in (GENERATIONS, CYCLES):
        parts = [
            read_records(study.at(count) / f"{schema.name}.parquet", schema)
            for count in settings.lengths.num_frames
        ]
        write_records(study.folder / f"{schema.name}.parquet", pd.concat(parts), schema)
    training = study.folder / "trained" / "training.parquet"
    replace_atomically(study.folder / training.name, functools.partial(shutil.copyfile, training))
    if len(failed) == len(settings.lengths.num_frames):
        raise NothingDecoded(failed[0])


def score(study: Study, run_id: str) -> None:
    """What the target's own texts get right of generated clips, by number of frames.

    Writes MEASURES rows of the quantities static_accuracy and dynamic_accuracy: words right, of the
    words that tell attributes, or motion and events. Clips without a reference have none.
    """
    rows = read_records(study.folder / "generations.parquet", GENERATIONS)
    plain = rows[(rows["method"] == "ar") & ~rows["warmup"] & (rows["status"] == "ok")]
    references = {
        (clip.benchmark, clip.clip_id): clip.reference for clip in study.evaluated if clip.reference
    }
    shared = {
        "run_id": run_id,
        "target": study.target.source,
        "target_sha256": study.target.source_sha256,
        "device": device_label(study.target.device),
        "dtype": study.settings.target.dtype,
        "study": LENGTHS_STUDY,
        "layer": NO_LAYER,
    }
    found = []
    for row in plain[plain["repeat"] == 0].to_dict("records"):
        reference = references.get((row["benchmark"], row["clip_id"]))
        if reference is None:
            continue
        place = {name: row[name] for name in ("clip_id", "benchmark", "sample_seed")}
        counts = accuracy_counts(str(row["text"]), reference)
        for quantity, (right, words) in counts.items():
            found.append(
                blank_row(MEASURES)
                | shared
                | place
                | {
                    "setting": f"frames={row['frames_requested']}",
                    "quantity": quantity,
                    "total": float(right),
                    "count": float(words),
                }
            )
    write_records(study.folder / f"{MEASURES.name}.parquet", found, MEASURES)
