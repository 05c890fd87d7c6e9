"""From settings to results: what notebooks 20 to 40 call, one function per step.

target = open_target(settings, stage.input("target"))
collect_lists(settings, target_folder, clips_folder, out_folder)
train_drafter(target, settings, key, ...)
score_drafter(target, settings, key, ...)
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from vflash_analysis import config, metrics
from vflash_analysis.clips import pocket
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.prepare import all_suite_clips, open_reader, read_list
from vflash_analysis.config import TINY_TARGET, DrafterKey, Profile
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import (
    drafter_config,
    drafter_sha256,
    load_drafter,
    new_drafter,
)
from vflash_analysis.model.taps import default_tap_layers
from vflash_analysis.model.target import Target, load_target
from vflash_analysis.records import read_records, write_records
from vflash_analysis.schemas import ANCHORS, CONTINUATIONS, TRAINING
from vflash_analysis.training import pocket_target
from vflash_analysis.training.blocks import target_pieces
from vflash_analysis.training.collect import collect_in_parallel
from vflash_analysis.training.continuations import (
    ContinuationSet,
    ContinuationSource,
    OnlineContinuations,
    collect_continuations,
    frame_reader,
)
from vflash_analysis.training.evaluate import (
    drafter_facts,
    evaluate_anchors,
)
from vflash_analysis.training.loop import train
from vflash_analysis.training.pocket_model import build_model, save_target, train_tokenizer
from vflash_analysis.training.read_ahead import ReadAhead
from vflash_analysis.workers import PARALLEL_FROM, usable_cpus

LISTS = ("training", "validation", "suites")


def weights_folder(settings: Profile, target_folder: Path) -> Path:
    """Where the target's weights lie: in the target stage's folder if that stage builds them."""
    if settings.target.source == TINY_TARGET:
        return target_folder / "target"
    return config.target_folder(settings.target)


def retrain_target(settings: Profile) -> None:
    """Train the pocket target anew into the profile's folder, an hour on two cores; resumes.

    Then the target of many lengths, which goes on from it, where `lengths.target` names another
    folder.

    Raises:
        InputError: the profile's target is not one that this suite trains.
    """
    if settings.clips.source != "pocket" or settings.target.source in (None, TINY_TARGET):
        raise InputError(
            f"retrain: found profile {settings.name} with target.source {settings.target.source!r} "
            f"and clips.source {settings.clips.source!r}, allowed: generated clips and a target "
            "folder of the checkout"
        )
    base = config.target_folder(settings.target)
    lengths = config.paths.ROOT / (settings.lengths.target or settings.target.source)
    if lengths == base or not pocket_target.work_folder(lengths).exists():  # else it is trained
        scenes = settings.clips.target_training_clips // len(pocket.FAMILIES)
        pocket_target.retrain(base, scenes)
    if lengths != base:
        pocket_target.retrain_lengths(base, lengths)


def build_untrained(clips: list[Clip], folder: Path, seed: int = 0) -> Path:
    """Write an untrained pocket target whose tokenizer knows the clips' texts; returns its folder."""
    texts = [text for clip in clips for text in (clip.prompt, clip.reference) if text]
    tokenizer = train_tokenizer(texts)
    model = build_model(tokenizer, seed, num_hidden_layers=4)
    save_target(model, tokenizer, folder)
    return folder


def open_target(settings: Profile, target_folder: Path) -> Target:
    """Load the target that the profile asks for.

    Args:
        settings: the profile.
        target_folder: results of the target stage.
    """
    wanted = settings.target
    return load_target(
        weights_folder(settings, target_folder),
        wanted.dtype,
        wanted.device,
        attention=wanted.attention,
        compile=wanted.compile,
        revision=wanted.revision or None,
    )


def target_facts(target: Target) -> pd.DataFrame:
    """What was loaded, one fact a row."""
    facts = target.facts()
    return pd.DataFrame({"fact": list(facts), "value": [str(value) for value in facts.values()]})


def tapped_layers(target: Target, settings: Profile) -> tuple[int, ...]:
    """Layers of the target whose states the profile's drafters read."""
    return tuple(default_tap_layers(target.num_layers, settings.drafter.num_tapped_layers))


def stored_layers(target: Target, settings: Profile) -> tuple[int, ...]:
    """Layers whose states are stored: all that one of `config.tapped_counts` reads."""
    counts = config.tapped_counts(settings)
    return tuple(sorted({i for n in counts for i in default_tap_layers(target.num_layers, n)}))


def clips_of(settings: Profile, clips_folder: Path, name: str) -> list[Clip]:
    """The clips of one of LISTS; "suites" are those at whose anchors drafters are scored."""
    if name != "suites":
        return read_list(clips_folder, name)
    clips = all_suite_clips(clips_folder, settings.clips, settings.clips.clips_per_suite_all)
    by_id: dict[str, Clip] = {}
    for clip in clips:  # two suites may hold one video: texts and states are kept by clip id
        by_id.setdefault(clip.clip_id, clip)
    return list(by_id.values())[: settings.training.anchor_clips]


def collect_lists(
    settings: Profile, target_folder: Path, clips_folder: Path, out_folder: Path
) -> None:
    """The target's greedy text for every clip of LISTS, each list in its own folder; resumes.

    A profile that gives its drafters trains none: its training and validation lists stay empty.
    """
    trains = settings.drafter.source is None
    load = functools.partial(open_target, settings, target_folder)
    target = load()
    frames, taps = settings.clips.num_frames, stored_layers(target, settings)
    with open_reader(settings.clips) as reader:
        for name in LISTS:
            folder = out_folder / name
            if not trains and name != "suites":
                write_records(folder / "continuations.parquet", [], CONTINUATIONS)
                continue
            print(f"{name}:", flush=True)
            clips = clips_of(settings, clips_folder, name)
            collect(settings, load, target, clips, reader, folder, frames, taps)


def collect(
    settings: Profile,
    load: Callable[[], Target],
    target: Target,
    clips: list[Clip],
    reader: Any,
    folder: Path,
    num_frames: int,
    tap_layer_ids: Sequence[int],
) -> None:
    """The target's texts about some clips into a folder, on a CPU by several processes; resumes.

    Args:
        settings: the profile.
        load: loads the target, in another process.
        target: the same, loaded.
        clips: to write about.
        reader: a `FrameReader`.
        folder: gets records and states.
        num_frames: of every clip.
        tap_layer_ids: layers whose states are kept.
    """
    options: dict[str, Any] = {
        "num_frames": num_frames,
        "max_new_tokens": settings.continuations.max_new_tokens,
        "tap_layer_ids": tap_layer_ids,
        "on_bad_clip": settings.clips.on_bad_clip,
        "store_states": settings.continuations.states == "stored",
    }
    shared = target.device.type == "cpu" and usable_cpus() > 1
    if shared and len(clips) >= PARALLEL_FROM:
        collect_in_parallel(load, clips, settings.clips, folder, options)
    collect_continuations(target, clips, reader, out_folder=folder, **options)


def continuations_summary(folder: Path) -> pd.DataFrame:
    """One row per list: clips, texts, mean new tokens, share that ended by themselves."""
    rows = []
    for name in LISTS:
        frame = read_records(folder / name / "continuations.parquet", CONTINUATIONS)
        good = frame[frame["status"] == "ok"]
        ended = (good["stop_reason"] == "eos").mean()
        mean = good["new_tokens"].astype(float).mean()
        rows.append(
            {
                "list": name,
                "clips": len(frame),
                "texts": len(good),
                "mean_new_tokens": mean,
                "ended_by_themselves": ended,
            }
        )
    return pd.DataFrame(rows).round(3)


def sample_texts(folder: Path, name: str, n: int) -> pd.DataFrame:
    """The first texts of a list, by clip."""
    frame = read_records(folder / name / "continuations.parquet", CONTINUATIONS)
    return frame[["clip_id", "new_tokens", "text", "reason"]].head(n)


def show_gates(folder: Path) -> pd.DataFrame:
    """The gates that the target stage wrote; empty where the profile evaluates no clips."""
    path = folder / "gates.csv"
    return pd.read_csv(path).round(3) if path.is_file() else pd.DataFrame()


@contextlib.contextmanager
def sources(
    target: Target, settings: Profile, groups: Mapping[Path, tuple[int, list[Clip]]]
) -> Iterator[list[ContinuationSource]]:
    """Texts with their states: from disk, or recomputed by the target.

    Args:
        target: that wrote them.
        settings: the profile.
        groups: folder of texts -> frames they are about, and their clips.
    """
    taps = tapped_layers(target, settings)
    if settings.continuations.states == "stored":
        yield [ContinuationSet(folder, taps) for folder in groups]
        return
    with contextlib.ExitStack() as opened:
        reader = opened.enter_context(open_reader(settings.clips))
        found: list[ContinuationSource] = []
        for folder, (num_frames, clips) in groups.items():
            ahead = ReadAhead(frame_reader(clips, reader, num_frames))
            frames = opened.enter_context(contextlib.closing(ahead))
            found.append(OnlineContinuations(folder, target, frames, taps))
        yield found


def mixed_precision(target: Target) -> str:
    """How a drafter of this target is trained: `train`'s argument."""
    return "bf16" if target.dtype == torch.bfloat16 else "no"


@contextlib.contextmanager
def continuations(
    target: Target, settings: Profile, clips_folder: Path, folder: Path, name: str
) -> Iterator[ContinuationSource]:
    """The texts of one of LISTS with their states."""
    clips = clips_of(settings, clips_folder, name)
    groups = {folder / name: (settings.clips.num_frames, clips)}
    with sources(target, settings, groups) as found:
        yield found[0]


def train_drafter(
    target: Target,
    settings: Profile,
    key: DrafterKey,
    clips_folder: Path,
    continuations_folder: Path,
    out_folder: Path,
) -> Path:
    """Train one drafter into `<out_folder>/drafter`, or take the arm's one from `drafter.source`; resumes.

    Args:
        target: the frozen target.
        settings: the profile.
        key: arm, seed (of initial weights, clip order and anchors), steps (with their own full
            schedule), number of training clips, and the one setting that differs, if any.
        clips_folder: results of the clips stage.
        continuations_folder: results of the continuations stage.
        out_folder: this stage's folder.

    Returns:
        The drafter's folder.
    """
    settings = config.with_variant(settings, key.variant)
    if settings.drafter.source:
        if key.variant:
            raise InputError(
                f"variant: found {key.variant!r}, allowed with drafter.source: none, as that drafter "
                "is trained"
            )
        given = config.paths.ROOT / settings.drafter.source / key.arm
        load_drafter(given, target)  # refuses another target's drafter before it is copied
        shutil.copytree(given, out_folder / "drafter", dirs_exist_ok=True)
        write_records(out_folder / "training.parquet", [], TRAINING)
        return out_folder / "drafter"
    shape = drafter_config(target, settings.drafter)
    with (
        continuations(target, settings, clips_folder, continuations_folder, "training") as data,
        continuations(target, settings, clips_folder, continuations_folder, "validation") as held,
    ):
        return train(
            new_drafter(shape, seed=key.train_seed, device=target.device),
            target_pieces(target),
            data,
            config.arm_settings(settings.training, key),
            out_folder,
            validation=held,
            variant=key.variant,
            mixed_precision=mixed_precision(target),
        )


def score_drafter(
    target: Target,
    settings: Profile,
    key: DrafterKey,
    clips_folder: Path,
    continuations_folder: Path,
    out_folder: Path,
) -> Path:
    """Score the stage's drafter at every anchor of the suites' texts; writes anchors.parquet."""
    folder = out_folder / "drafter"
    drafter = load_drafter(folder, target)
    settings = config.with_variant(settings, key.variant)
    facts = drafter_facts(drafter, drafter_sha256(folder), key.variant)
    with continuations(target, settings, clips_folder, continuations_folder, "suites") as data:
        rows = evaluate_anchors(drafter, target_pieces(target), data, facts)
    write_records(out_folder / "anchors.parquet", rows, ANCHORS)
    return out_folder / "anchors.parquet"


def training_curve(out_folder: Path) -> pd.DataFrame:
    """The loss from all masks by step: one column of training batches, one of validation clips."""
    frame = read_records(out_folder / "training.parquet", TRAINING)
    curve = frame.pivot(index="step", columns="setting", values="loss_mask").astype(float)
    return curve.rename(columns={"": "training"})


def acceptance_at_anchors(out_folder: Path) -> pd.DataFrame:
    """Accepted length at every anchor with a full block, by setting ("" from masks) and suite."""
    frame = read_records(out_folder / "anchors.parquet", ANCHORS)
    told = {}
    for setting, own in frame.groupby("setting", sort=False):
        parts = metrics.anchor_accepted_length_parts(own).groupby("benchmark")[["p0", "p1"]].sum()
        told[setting] = parts["p0"] / parts["p1"]
    return pd.DataFrame(told).T.round(2)
