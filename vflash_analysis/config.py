"""Settings: one frozen dataclass per stage, read strictly from `data/profiles/<name>.yaml`.

A profile sets every size. Any value can be overridden by its dotted name (`--set training.steps=300`
or `overrides = {"training.steps": 300}` in a notebook). Unknown, missing, mistyped and out-of-range
values are refused by name before anything starts. Values are JSON types only. Paths of a machine
come from `VFLASH_TARGET`, `VFLASH_DATA` or an ignored `local.yaml` and are never part of a profile.

Defaults serve code that builds settings by hand; a profile file states every value.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vflash_analysis import paths
from vflash_analysis.errors import InputError
from vflash_analysis.schemas import BLOCK_SIZE, COMPARISON_METHODS, METHOD_NAMES, TREE_NODES
from vflash_analysis.strict import (
    Bounds,
    apply_overrides,
    build,
    fits_a_path,
    parse_override,
    read_yaml,
    shown,
)

TINY_TARGET = "tiny"  # `target.source` of a target that the target stage builds untrained
TRACKED_PROFILE = "pocket"  # whose records, drafters and figures are tracked

Objective = Literal["self_reveal", "mask_only", "true_reveal", "wrong_reveal"]


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The frozen video language model."""

    source: str | None  # folder relative to the checkout, "tiny", or null: VFLASH_TARGET decides
    revision: str = ""
    dtype: Literal["float32", "bfloat16", "float64"]
    attention: Literal["vflash", "sdpa", "eager"] = "vflash"
    device: Literal["cpu", "cuda"]
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class ClipSettings:
    """Which clips are made or listed, and how their frames are read."""

    source: Literal["pocket", "suites"]
    benchmarks: tuple[Literal["VDC", "Video-MME", "MVBench", "MLVU", "LVB"], ...]
    num_frames: Annotated[int, Bounds(1, 4096)]
    reader: Literal["decord", "pyav"] = "decord"
    read_timeout_s: Annotated[float, Bounds(0.1, 3600)] = 60.0
    on_bad_clip: Literal["skip", "fail"] = "skip"
    clips_per_suite: Annotated[int, Bounds(1)]  # per benchmark and sample seed
    clips_per_suite_all: Annotated[int, Bounds(1)]  # the same under --all; so many are prepared
    sample_seeds: tuple[int, ...]
    training_clips: Annotated[int, Bounds(1)]
    validation_clips: Annotated[int, Bounds(1)]
    target_training_clips: Annotated[int, Bounds(0)]
    target_evaluation_clips: Annotated[int, Bounds(0)]
    # a corpus of data/training, or a .jsonl of video + prompt under VFLASH_DATA; null: generated
    training_list: str | None = None
    # folder of frozen lists, from the checkout, which a run on suites replays; null: draw anew
    frozen_lists: str | None = None

    @property
    def training_corpus(self) -> str | None:
        """The corpus of `data/training` that `training_list` names; None where it is a file."""
        by_hand = self.training_list is None or self.training_list.endswith(".jsonl")
        return None if by_hand else self.training_list


@dataclass(frozen=True, kw_only=True)
class ContinuationSettings:
    """The target's own greedy texts, which the drafter learns from."""

    max_new_tokens: Annotated[int, Bounds(1, 8192)]
    states: Literal["stored", "recomputed"] = "stored"  # 0.7 GB a clip at 25k context: recompute


@dataclass(frozen=True, kw_only=True)
class DrafterSettings:
    """Shape of the drafter; hidden sizes are copied from the target's text config."""

    source: str | None = None  # a folder with a trained drafter per arm, used instead of training
    num_hidden_layers: Annotated[int, Bounds(1, 64)] = 4
    block_size: Annotated[int, Bounds(2, BLOCK_SIZE)] = BLOCK_SIZE
    num_tapped_layers: Annotated[int, Bounds(1, 64)] = 4
    intermediate_size: Annotated[int, Bounds(1)] | None = None  # null: the target's
    context: Literal["all", "text_only"] | float = (
        "all"  # a number keeps that fraction of video positions
    )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run of a drafter (the method's equations are in `training/objectives.py`)."""

    objective: Objective = "self_reveal"
    train_seed: Annotated[int, Bounds(0)] = 0
    steps: Annotated[int, Bounds(1)]
    clips_per_step: Annotated[int, Bounds(1)]
    anchors_per_clip: Annotated[int, Bounds(1)]
    gamma: Annotated[float, Bounds(1e-3)] = 7.0  # slot weights exp(-(k-1)/gamma)
    lambda_flow: Annotated[float, Bounds(0)] = 1.0
    ramp_fraction: Annotated[float, Bounds(0, 1)] = 0.1
    revealed_weight: Annotated[float, Bounds(0)] = 1.0  # lambda_rev
    reveal_order: Literal["confidence", "random"] = "confidence"
    max_reveal_rounds: Annotated[int, Bounds(1, 15)] = 3
    optimizer: Literal["adamw", "muon"] = "adamw"  # see `training.step.make_optimizers`
    learning_rate: Annotated[float, Bounds(1e-9, 1)]
    warmup_fraction: Annotated[float, Bounds(0, 1)] = 0.04
    weight_decay: Annotated[float, Bounds(0, 1)] = 0.0
    grad_clip: Annotated[float, Bounds(1e-6)] = 1.0
    activation_checkpointing: bool = False  # less memory, one more forward; no other result
    checkpoint_every: Annotated[int, Bounds(1)]
    evaluate_every: Annotated[int, Bounds(1)]
    training_clips: Annotated[int, Bounds(1)]  # how many continuations are used: the data-size axis
    anchor_clips: Annotated[int, Bounds(1)] = 60  # suite clips at whose every anchor it is scored


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How the methods decode."""

    methods: tuple[str, ...]
    max_new_tokens: Annotated[int, Bounds(1, 8192)]
    tree_nodes: Annotated[int, Bounds(1, 512)] = TREE_NODES
    spine_first: bool = False
    draft_rounds: Annotated[int, Bounds(1, 15)] = 1
    warmup_clips: Annotated[int, Bounds(0)] = 1
    ban_special_ids: bool = True
    repeats: Annotated[int, Bounds(1)] = 1
    # hf_generate, hf_dflash and lookup decode so many clips of each suite and seed; null: all
    comparison_clips: Annotated[int, Bounds(0)] | None = None


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """Which forwards the cost model times."""

    # the last is the page's demo clip
    context_tokens: tuple[Annotated[int, Bounds(16, 1_000_000)], ...] = (
        512, 2048, 8192, 16384, 25119,
    )  # fmt: skip
    repeats: Annotated[int, Bounds(1, 1000)] = 7  # timed runs of each forward at each length


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What is looked at inside the target, and on how many clips."""

    clips_per_suite: Annotated[int, Bounds(1)]  # of the first sample seed
    max_new_tokens: Annotated[int, Bounds(1, 8192)]  # of every text without the video
    # the video is removed from layers 0, n, 2n, ... on, and from none
    removal_every: Annotated[int, Bounds(1, 1000)] = 1


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """How decoding changes with the number of frames (notebook 63, measured by `--all`)."""

    target: str | None  # folder relative to the checkout; null: the profile's target
    num_frames: tuple[Annotated[int, Bounds(1, 4096)], ...]  # trained on and decoded at
    clips_per_suite: Annotated[int, Bounds(1)]  # each decoded at every number of frames
    training_clips: Annotated[int, Bounds(1)]  # each read at one of them in turn
    steps: Annotated[int, Bounds(1)]  # of the drafter, trained on these clips
    methods: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DesignSettings:
    """One thing changed at a time (notebook 71, measured by `--all`), on the first sample seed."""

    clips_per_suite: Annotated[int, Bounds(1)]
    methods: tuple[str, ...]  # of the profile's own drafter
    # settings of `drafter` or `training` as in "drafter.block_size=8", each a drafter trained anew,
    # which decodes as a chain and as Tree-60
    variants: tuple[str, ...]


Arm = Literal[
    "self_reveal", "mask_only", "true_reveal", "wrong_reveal", "self_reveal_rev0", "mask_only_2x"
]


@dataclass(frozen=True, kw_only=True)
class AblationGroup:
    """One question of the objective comparison: each arm at each budget, data size and seed."""

    arms: tuple[Arm, ...]
    budgets: tuple[int, ...]  # training steps, each with its own full schedule
    training_clips: tuple[int, ...]  # continuations used: few mean many epochs
    train_seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Every setting of a run."""

    name: str
    target: TargetSettings
    clips: ClipSettings
    continuations: ContinuationSettings
    drafter: DrafterSettings
    training: TrainSettings
    decode: DecodeSettings
    cost: CostSettings
    layers: LayerSettings
    lengths: LengthSettings
    design: DesignSettings
    ablation: tuple[AblationGroup, ...]
    train_seeds: tuple[int, ...]
    objectives: tuple[Objective, ...]
    bootstrap_samples: Annotated[int, Bounds(1, 1_000_000)]


# What an arm changes in the training settings; "_2x" spends mask_only's spare compute on blocks.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "self_reveal": {"objective": "self_reveal"},
    "mask_only": {"objective": "mask_only"},
    "true_reveal": {"objective": "true_reveal"},
    "wrong_reveal": {"objective": "wrong_reveal"},
    "self_reveal_rev0": {"objective": "self_reveal", "revealed_weight": 0.0},
    "mask_only_2x": {"objective": "mask_only", "anchors_factor": 2},
}


@dataclass(frozen=True, order=True)
class DrafterKey:
    """What tells one drafter of a run from another: the drafter stage's own parameters."""

    arm: str
    train_seed: int
    steps: int
    training_clips: int
    variant: str = ""  # the one setting in which it differs from the profile's, "" for none


def with_variant(profile: Profile, variant: str) -> Profile:
    """The profile with the one setting changed in which a drafter differs.

    Raises:
        InputError: names a setting that is none of a drafter, or a value that it cannot have.
    """
    if not variant:
        return profile
    name, equals, _ = variant.partition("=")
    section, _, field = name.partition(".")
    own = ("source", "steps", "training_clips")
    if not equals or section not in ("drafter", "training") or field in own:
        raise InputError(
            f"variant: found {shown(variant)}, allowed: one setting of `drafter` or `training` that "
            'no other parameter sets, as in "drafter.block_size=8"'
        )
    _refuse_per_drafter([field] if section == "training" else [])
    values = to_json(profile)
    for per_drafter in PER_DRAFTER:
        del values["training"][per_drafter]
    return build_profile(apply_overrides(values, dict([parse_override(variant)])))


def tapped_counts(profile: Profile) -> list[int]:
    """How many layers the drafters of a run may read: the profile's number, and its variants'."""
    varied = (with_variant(profile, variant) for variant in profile.design.variants)
    counts = {one.drafter.num_tapped_layers for one in (profile, *varied)}
    return sorted(counts)


def design_drafters(profile: Profile) -> list[DrafterKey]:
    """The drafters that differ from the profile's first one in one setting.

    None where the profile gives its drafters instead of training them.
    """
    if profile.drafter.source is not None:
        return []
    base = main_drafters(profile)[0]
    return [dataclasses.replace(base, variant=variant) for variant in profile.design.variants]


def lengths_drafter(profile: Profile) -> DrafterKey:
    """The drafter of the study of lengths, which that study trains on texts of its own."""
    own = profile.lengths
    return DrafterKey("self_reveal", profile.train_seeds[0], own.steps, own.training_clips)


def main_drafters(profile: Profile) -> list[DrafterKey]:
    """The drafters that decode: every objective and training seed, on every clip of every seed."""
    training = profile.training
    return [
        DrafterKey(arm, seed, training.steps, training.training_clips)
        for seed in profile.train_seeds
        for arm in profile.objectives
    ]


def ablation_drafters(profile: Profile) -> list[DrafterKey]:
    """The drafters that are only compared, cheapest first, so that a stopped run has whole rows."""
    keys = {
        DrafterKey(arm, seed, steps, clips)
        for group in profile.ablation
        for arm in group.arms
        for seed in group.train_seeds
        for steps in group.budgets
        for clips in group.training_clips
    }
    return sorted(keys, key=lambda key: (key.steps, key.training_clips, key.train_seed, key.arm))


def arm_settings(base: TrainSettings, key: DrafterKey) -> TrainSettings:
    """Training settings of one drafter.

    Raises:
        InputError: `key.arm` is none of `ARMS`.
    """
    if key.arm not in ARMS:
        raise InputError(f"arm: found {key.arm!r}, allowed: {', '.join(ARMS)}")
    changes = dict(ARMS[key.arm])
    factor = changes.pop("anchors_factor", 1)
    return dataclasses.replace(
        base,
        steps=key.steps,
        train_seed=key.train_seed,
        training_clips=key.training_clips,
        anchors_per_clip=base.anchors_per_clip * factor,
        **changes,
    )


# Training settings that each drafter's shard sets for itself, and where a profile chooses them.
PER_DRAFTER = {
    "objective": "`objectives` and `ablation`",
    "train_seed": "`train_seeds` and `ablation`",
}


def _refuse_per_drafter(names: Iterable[Any]) -> None:
    """Refuse a training setting that every shard would overwrite."""
    for name, place in PER_DRAFTER.items():
        if name in names:
            raise InputError(
                f"training.{name}: set by each drafter's own shard, allowed: {place} of the profile"
            )


def profile_names() -> tuple[str, ...]:
    """Names of the profiles in `data/profiles`, sorted."""
    return tuple(sorted(path.stem for path in paths.PROFILES.glob("*.yaml")))


def corpus_names() -> tuple[str, ...]:
    """Names of the training corpora in `data/training`, sorted."""
    return tuple(sorted(path.stem for path in (paths.DATA / "training").glob("*.yaml")))


def load_profile(name: str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """Read a profile and apply overrides.

    Args:
        name: stem of a file in `data/profiles`.
        overrides: dotted name to value.

    Raises:
        InputError: one line that names the setting, what was found and what is allowed.
    """
    if name not in profile_names():
        raise InputError(f"profile: found {name!r}, allowed: {', '.join(profile_names())}")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise InputError(
            f"overrides: found {shown(overrides)}, allowed: a mapping such as "
            '{"training.steps": 300}'
        )
    _refuse_per_drafter([str(key).removeprefix("training.") for key in overrides or {}])
    path = paths.PROFILES / f"{name}.yaml"
    profile = build_profile(apply_overrides(read_yaml(path), overrides or {}))
    if profile.name != name:
        raise InputError(f"name: found {profile.name!r} in {name}.yaml, allowed: {name!r}")
    for variant in profile.design.variants:
        with_variant(profile, variant)
    return profile


def _check_methods(label: str, methods: tuple[str, ...]) -> None:
    if "ar" not in methods:
        raise InputError(
            f'{label}: found {shown(methods)}, allowed: a list with "ar", the baseline of every '
            "speed-up"
        )
    for method in methods:
        name, colon, _ = method.partition(":")
        if name not in METHOD_NAMES or (colon and name in COMPARISON_METHODS):
            raise InputError(
                f"{label}: found {method!r}, allowed: {', '.join(METHOD_NAMES)}; options after a "
                "colon where a method has some"
            )


def build_profile(values: Mapping[str, Any]) -> Profile:
    """Build a profile from nested values and check what no single field can show.

    `training` comes without PER_DRAFTER; `arm_settings` fills those in.

    Raises:
        InputError: one line that names the setting, what was found and what is allowed.
    """
    training_values = values.get("training")
    if isinstance(training_values, Mapping):
        _refuse_per_drafter(training_values)
        unset = {f.name: f.default for f in dataclasses.fields(TrainSettings)}
        unset = {name: unset[name] for name in PER_DRAFTER}
        values = {**values, "training": {**training_values, **unset}}
    profile: Profile = build(Profile, values)
    clips, training, drafter = profile.clips, profile.training, profile.drafter
    for label, methods in (
        ("decode.methods", profile.decode.methods),
        ("lengths.methods", profile.lengths.methods),
        ("design.methods", profile.design.methods),
    ):
        _check_methods(label, methods)
    if clips.clips_per_suite > clips.clips_per_suite_all:
        raise InputError(
            f"clips.clips_per_suite: found {clips.clips_per_suite}, allowed: at most "
            f"clips.clips_per_suite_all ({clips.clips_per_suite_all})"
        )
    if profile.layers.clips_per_suite > clips.clips_per_suite_all:
        raise InputError(
            f"layers.clips_per_suite: found {profile.layers.clips_per_suite}, allowed: at most "
            f"clips.clips_per_suite_all ({clips.clips_per_suite_all})"
        )
    if clips.training_corpus is not None and clips.training_corpus not in corpus_names():
        raise InputError(
            f"clips.training_list: found {shown(clips.training_list)}, allowed: "
            f"{', '.join(corpus_names())}, a file that ends in .jsonl, or null"
        )
    used = [
        ("training.training_clips", training.training_clips),
        ("lengths.training_clips", profile.lengths.training_clips),
    ]
    for i, group in enumerate(profile.ablation):
        used.append((f"ablation[{i}].training_clips", max(group.training_clips)))
    for label, number in used:
        if number > clips.training_clips:
            raise InputError(
                f"{label}: found {number}, allowed: at most clips.training_clips "
                f"({clips.training_clips})"
            )
    for label, number in (
        ("lengths.clips_per_suite", profile.lengths.clips_per_suite),
        ("design.clips_per_suite", profile.design.clips_per_suite),
    ):
        if number > clips.clips_per_suite_all:
            raise InputError(
                f"{label}: found {number}, allowed: at most clips.clips_per_suite_all "
                f"({clips.clips_per_suite_all})"
            )
    for label, source in (
        ("target.source", profile.target.source),
        ("lengths.target", profile.lengths.target),
        ("drafter.source", drafter.source),
        ("clips.frozen_lists", clips.frozen_lists),
    ):
        if source is not None and not source.strip():
            raise InputError(f"{label}: found {shown(source)}, allowed: null or a folder")
    if drafter.source is not None and len(profile.train_seeds) > 1:
        raise InputError(
            f"train_seeds: found {shown(profile.train_seeds)}, allowed with drafter.source: one, as "
            "it holds one drafter per arm"
        )
    if isinstance(drafter.context, float) and not 0 <= drafter.context <= 1:
        raise InputError(f"drafter.context: found {drafter.context}, allowed: 0 to 1")
    for label, numbers, low in (
        ("clips.sample_seeds", clips.sample_seeds, 0),
        ("train_seeds", profile.train_seeds, 0),
        *(
            (f"ablation[{i}].{name}", getattr(group, name), low)
            for i, group in enumerate(profile.ablation)
            for name, low in (("train_seeds", 0), ("budgets", 1), ("training_clips", 1))
        ),
    ):
        if min(numbers) < low:
            raise InputError(f"{label}: found {shown(numbers)}, allowed: items from {low} up")
    return profile


def to_json(settings: Any) -> Any:
    """A dataclass of settings as plain JSON types (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def result_settings(settings: TrainSettings) -> dict[str, Any]:
    """What of the settings a drafter's weights hang on: all but what trades memory for time."""
    values: dict[str, Any] = to_json(settings)
    del values["activation_checkpointing"]
    return values


_VARIABLES = {"target": "VFLASH_TARGET", "data": "VFLASH_DATA"}


def local_environment() -> dict[str, str]:
    """The environment's folders of this machine, absolute: what a process that runs elsewhere needs.

    Raises:
        InputError: one can be no path, or is not UTF-8, which records and requests could not tell.
    """
    found = {name: text for name in _VARIABLES.values() if (text := os.environ.get(name))}
    return {name: os.path.abspath(_folder(text, name)) for name, text in found.items()}


def _folder(text: Any, place: str) -> Path:
    if not isinstance(text, str) or not fits_a_path(text):
        raise InputError(f"{place}: found {shown(text)}, allowed: a path in UTF-8")
    return paths.expanded(text)


def local_paths() -> dict[str, Path]:
    """Folders of this machine: `target` and `data`, from the environment, else `local.yaml`.

    All are absolute: a relative one is meant from the working directory where an environment
    variable gives it, from the checkout where `local.yaml` does.

    Raises:
        InputError: `local.yaml` is no file or has another key, or a value is no path.
    """
    found: dict[str, Path] = {}
    file = paths.ROOT / "local.yaml"
    if os.path.lexists(file) and not file.is_file():
        raise InputError("local.yaml: found a folder, a pipe or a broken link, allowed: a file")
    if file.is_file():
        for key, value in read_yaml(file, may_be_empty=True).items():
            if key not in _VARIABLES:
                raise InputError(f"local.yaml: {key}: unknown setting, allowed: target, data")
            found[key] = paths.ROOT / _folder(value, f"local.yaml: {key}")
    given = local_environment()
    return found | {k: Path(given[name]) for k, name in _VARIABLES.items() if name in given}


def target_folder(settings: TargetSettings) -> Path:
    """The folder that holds the target's weights.

    Raises:
        InputError: the profile leaves the folder to this machine, which names none; or the target is
            one that the target stage builds.
    """
    if settings.source == TINY_TARGET:
        raise InputError(
            'target.source: "tiny" is built by the target stage and has no fixed folder'
        )
    if settings.source is not None:
        return paths.ROOT / settings.source
    folder = local_paths().get("target")
    if folder is None:
        raise InputError(
            "target.source: null leaves the folder to this machine; set VFLASH_TARGET or `target:` in "
            "local.yaml to the checkpoint's folder"
        )
    return folder


def data_folder() -> Path:
    """The folder that holds the real suites' videos (`VFLASH_DATA` or `data:` in `local.yaml`).

    Raises:
        InputError: see `need_data`.
    """
    return need_data(local_paths().get("data"))


def need_data(folder: Path | None) -> Path:
    """Return the videos' folder.

    Raises:
        InputError: this machine names none, or one that is not there.
    """
    if folder is None:
        raise InputError(
            "VFLASH_DATA: not set; set it or `data:` in local.yaml to the videos' folder"
        )
    if not folder.is_dir():
        raise InputError(f"VFLASH_DATA: found {str(folder)!r}, allowed: a folder that is there")
    return folder
