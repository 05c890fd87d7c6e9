"""The stages of a run and the plan: which shards there are, in which order, from what.

A stage is one notebook's job; a shard is one stage for one benchmark and sample seed, or one
drafter. `plan` is the only planner: the runner, the notebooks and `vflash plan --json` all read it.
Each shard's folder is `runs/<profile>/<stage>/<run_id>/`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from vflash_analysis import config, environment, identity, paths, records
from vflash_analysis.config import DrafterKey, Profile
from vflash_analysis.errors import InputError
from vflash_analysis.schemas import STUDIES
from vflash_analysis.strict import Bounds, read_json


@dataclass(frozen=True)
class Stage:
    """One notebook's job.

    Attributes:
        name: folder under `runs/<profile>`.
        notebook: file in `notebooks/`.
        settings: dotted names of the settings that decide its result (a section counts whole).
        needs: stages whose results it reads.
        outputs: files that must be in its folder when it is done.
        takes: notebook parameters beyond `profile` and `overrides`.
        by_hand: parameters that only a person sets; the runner leaves them alone.
        falls_back: whether the tracked records can stand in for results that are not there.
        beside: stages whose results its page also shows where they are done; nothing that it
            writes depends on them.
    """

    name: str
    notebook: str
    settings: tuple[str, ...]
    needs: tuple[str, ...]
    outputs: tuple[str, ...]
    takes: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    falls_back: bool = False
    beside: tuple[str, ...] = ()

    def code_digest(self) -> str:
        """Of the code that its results depend on: records do not on how a page shows them."""
        records_only = all(name.endswith(".parquet") for name in self.outputs)
        leaves_out = "vflash_analysis.results" if records_only else ""
        return identity.code_digest(paths.NOTEBOOKS / self.notebook, leaves_out)


# The types of what stages take beyond `profile` and `overrides`.
_SEED = Annotated[int, Bounds(0, 2**63 - 1)]
OWN_PARAMETERS: Mapping[str, Any] = {
    "arm": str,
    "train_seed": _SEED,
    "steps": Annotated[int, Bounds(0, 10**9)],
    "training_clips": Annotated[int, Bounds(0)],
    "benchmark": str,
    "sample_seed": _SEED,
    "ablation": bool,
    "studies": bool,
    "variant": str,
}
_READING = ("clips.num_frames", "clips.reader")
_CLIP_LISTS = (
    "clips.source",
    "clips.benchmarks",
    "clips.clips_per_suite_all",
    "clips.sample_seeds",
    "clips.training_clips",
    "clips.validation_clips",
    "clips.target_evaluation_clips",
    "clips.training_list",
    "clips.frozen_lists",
    "clips.on_bad_clip",
)
_TARGET = (
    "target.revision",
    "target.dtype",
    "target.attention",
    "target.device",
    "target.compile",
)

STAGES = {
    stage.name: stage
    for stage in (
        Stage("environment", "00_check_environment.ipynb", (), (), ("environment.csv",)),
        Stage(
            "clips",
            "10_prepare_clips.ipynb",
            (*_CLIP_LISTS, *_READING),
            (),
            ("training.jsonl", "validation.jsonl", "clips.csv", "checked.csv"),
        ),
        Stage(
            "target",
            "20_prepare_target.ipynb",
            (*_TARGET, *_READING, "continuations.max_new_tokens"),
            ("clips",),
            ("target.json",),
            by_hand=("retrain",),
        ),
        Stage(
            "continuations",
            "30_collect_continuations.ipynb",
            (
                *_TARGET,
                *_READING,
                "continuations",
                "training.anchor_clips",
            ),
            ("clips", "target"),
            (
                "training/continuations.parquet",
                "validation/continuations.parquet",
                "suites/continuations.parquet",
            ),
        ),
        Stage(
            "drafter",
            "40_train_drafter.ipynb",
            (*_TARGET, "drafter", "training"),
            ("clips", "target", "continuations"),
            (
                "drafter/config.json",
                "drafter/model.safetensors",
                "training.parquet",
                "anchors.parquet",
            ),
            takes=("arm", "train_seed", "steps", "training_clips", "variant"),
        ),
        Stage(
            "decode",
            "50_decode_suite.ipynb",
            (*_TARGET, *_READING, "decode", "clips.clips_per_suite", "clips.on_bad_clip"),
            ("clips", "target", "drafter"),
            ("generations.parquet", "cycles.parquet", "vocabulary.parquet"),
            takes=("benchmark", "sample_seed"),
        ),
        Stage(
            "speedup",
            "60_compare_speedup.ipynb",
            ("bootstrap_samples",),
            ("decode", "drafter"),
            ("T1_speedup.csv", "F1_speedup.csv", "T4_lossless.csv"),
            falls_back=True,
        ),
        Stage(
            "acceptance",
            "61_compare_acceptance.ipynb",
            ("bootstrap_samples",),
            ("decode", "drafter"),
            ("T2_accepted_length.csv", "F4_acceptance_by_position.csv", "difficulty.csv"),
            falls_back=True,
        ),
        Stage(
            "ablations",
            "62_compare_objectives.ipynb",
            ("bootstrap_samples",),
            ("drafter", "decode"),
            ("T3_objectives.csv", "F_objectives.csv", "F5_training.csv"),
            takes=("ablation",),
            falls_back=True,
        ),
        Stage(
            "lengths",
            "63_compare_visual_length.ipynb",
            (
                *_TARGET,
                "clips.reader",
                "clips.on_bad_clip",
                "lengths",
                "continuations",
                "drafter",
                "training",
                "decode",
            ),
            ("clips", "target"),
            ("generations.parquet", "cycles.parquet", "measures.parquet", "training.parquet"),
            falls_back=True,
        ),
        Stage(
            "cycle",
            "64_show_cycle_and_replay.ipynb",
            (),
            ("decode",),
            ("F2_cycle.csv", "F3_replay.html", "F3_replay.gif"),
            by_hand=("clip_id", "method", "cycle", "drafter"),
            falls_back=True,
        ),
        Stage(
            "cost",
            "65_measure_cost.ipynb",
            (
                "target.dtype",
                "target.attention",
                "target.device",
                "cost",
                "drafter.num_hidden_layers",
                "drafter.block_size",
                "drafter.num_tapped_layers",
                "drafter.intermediate_size",
                "decode.tree_nodes",
            ),
            ("target",),
            ("costs.parquet",),
            falls_back=True,
            beside=("decode", "drafter"),
        ),
        Stage(
            "layers",
            "70_show_what_the_drafter_reads.ipynb",
            (*_TARGET, *_READING, "layers", "clips.on_bad_clip"),
            ("clips", "target"),
            ("measures.parquet",),
            falls_back=True,
            beside=("design",),
        ),
        Stage(
            "design",
            "71_compare_design_choices.ipynb",
            (
                *_TARGET,
                *_READING,
                "decode",
                "design.clips_per_suite",
                "design.methods",
                "clips.on_bad_clip",
            ),
            ("clips", "target", "drafter"),
            ("generations.parquet", "cycles.parquet", "anchors.parquet", "training.parquet"),
            falls_back=True,
        ),
        Stage(
            "beside_paper",
            "90_compare_paper.ipynb",
            ("bootstrap_samples",),
            ("decode", "drafter", *STUDIES),
            ("T9_beside_paper.csv",),
            takes=("studies",),
            falls_back=True,
        ),
    )
}


@dataclass(frozen=True)
class Shard:
    """One unit of work: a notebook with its parameters, and the folder its results go to."""

    name: str
    stage: str
    notebook: Path
    parameters: Mapping[str, Any]
    run_id: str
    parameters_id: str  # digest of what was asked of it and of all it needs, without code or files
    folder: Path
    dependencies: tuple[str, ...]
    outputs: tuple[str, ...]
    inputs: Mapping[str, str]
    device: str = ""  # cuda or cpu where it computes on the target's device, of which it takes one
    stale: bool = False  # reused though its code or inputs have changed (--keep-stale)

    def why_not_done(self) -> str | None:
        """One line saying why the shard does not count as complete, None when it does."""
        reason = records.why_not_done(self.folder, check_sha256=False)
        if reason:
            return reason
        declared = read_json(self.folder / records.DONE_NAME)["outputs"]
        missing = [name for name in self.outputs if name not in declared]
        if missing:
            return f"{paths.relative_to_root(self.folder)}: DONE does not declare {missing[0]}"
        return None

    @property
    def done(self) -> bool:
        return self.why_not_done() is None

    @property
    def drafter_key(self) -> DrafterKey:
        """Which drafter a drafter stage trains, the profile's numbers filled in."""
        return DrafterKey(**{name: self.parameters[name] for name in STAGES["drafter"].takes})

    def as_json(self) -> dict[str, Any]:
        """JSON types only; paths relative to the checkout."""
        row = dataclasses.asdict(self)
        row["notebook"] = paths.relative_to_root(self.notebook)
        row["folder"] = paths.relative_to_root(self.folder)
        row["outputs"] = [f"{row['folder']}/{name}" for name in self.outputs]
        return row | {"dependencies": list(self.dependencies), "done": self.done}


def _shard_parameters(
    profile: Profile, ablation: bool, studies: bool, more_drafters: Sequence[DrafterKey]
) -> list[tuple[str, dict[str, Any]]]:
    """(stage, own parameters) of every shard, in the order in which they run."""
    shards: list[tuple[str, dict[str, Any]]] = [
        (name, {}) for name in ("environment", "clips", "target", "continuations")
    ]
    drafters = config.main_drafters(profile)
    compared = config.ablation_drafters(profile) if ablation else []
    varied = config.design_drafters(profile) if studies else []
    for key in dict.fromkeys([*drafters, *compared, *varied, *more_drafters]):
        changed = config.with_variant(profile, key.variant)
        config.arm_settings(changed.training, key)  # refuses an unknown arm
        shards.append(("drafter", dataclasses.asdict(key)))
    for sample_seed in profile.clips.sample_seeds:
        for benchmark in profile.clips.benchmarks:
            shards.append(("decode", {"benchmark": benchmark, "sample_seed": sample_seed}))
    shards += [(name, {}) for name in STUDIES if studies]
    shards += [
        ("cost", {}),
        ("layers", {}),
        ("speedup", {}),
        ("acceptance", {}),
        ("ablations", {"ablation": ablation}),
        ("cycle", {}),
    ]
    return [*shards, ("beside_paper", {"studies": studies})]


def shard_name(stage: str, own: Mapping[str, Any]) -> str:
    """A shard's name: its stage and own parameters, as in `decode-VDC-0`."""
    words = (str(value) for value in own.values() if not isinstance(value, bool) and value != "")
    return "-".join([stage, *words])


def _needed(profile: Profile, stage: Stage, shards: list[Shard]) -> list[Shard]:
    """The shards whose results this one reads."""
    needed = [shard for shard in shards if shard.stage in stage.needs]
    keys = {shard.drafter_key for shard in needed if shard.stage == "drafter"}
    main = config.main_drafters(profile)
    if stage.name == "ablations":
        keys = {key for key in keys if not key.variant}
    elif stage.name == "design":
        keys = {main[0], *config.design_drafters(profile)}
    else:  # the drafters that decode, not those that are only compared
        keys = set(main)
    wanted = {shard_name("drafter", dataclasses.asdict(key)) for key in keys}
    return [s for s in needed if s.stage != "drafter" or s.name in wanted]


def _chosen_settings(profile: Profile, stage: Stage, own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the shard's result; paths of weights are left out.

    A drafter's training settings are those its arm makes of the profile's, so that an arm defined
    anew is another run.
    """
    everything = config.to_json(config.with_variant(profile, own.get("variant", "")))
    chosen: dict[str, Any] = {}
    for name in stage.settings:
        value: Any = everything
        for part in name.split("."):
            value = value[part]
        chosen[name] = value
    if stage.name == "clips" and profile.clips.source == "suites":
        chosen["descriptions"] = _descriptions(profile)
    if stage.name == "continuations":
        chosen["trains"] = profile.drafter.source is None
        chosen["tapped"] = config.tapped_counts(profile)
    if stage.name == "drafter":
        chosen["drafter"].pop("source")
        changed = config.with_variant(profile, own["variant"])
        trained = config.arm_settings(changed.training, DrafterKey(**own))
        chosen["training"] = config.to_json(trained)
    if stage.name == "lengths":
        chosen["lengths"].pop("target")
        chosen["drafter"].pop("source")
        trained = config.arm_settings(profile.training, config.lengths_drafter(profile))
        chosen["training"] = config.to_json(trained)
    return chosen


def _descriptions(profile: Profile) -> dict[str, Any]:
    """What decides clips in the files that describe the profile's suites and training corpus."""
    from vflash_analysis.clips.suites import read_description

    places: list[tuple[str, str]] = [("suites", name) for name in profile.clips.benchmarks]
    if profile.clips.training_corpus:
        places.append(("training", profile.clips.training_corpus))
    described = {}
    for folder, name in places:
        path = paths.DATA / folder / f"{name}.yaml"
        if path.is_file():  # the stage itself refuses a suite without one
            described[f"{folder}/{name}"] = read_description(path)
    return described


def _checkpoint(folder: Path) -> Path:
    """A folder of weights; of another, which may be a whole disk, the config.json it has not."""
    config_file = folder / "config.json"
    return config_file if folder.exists() and not config_file.is_file() else folder


def input_files(profile: Profile, stage: Stage) -> list[tuple[str, Path | None]]:
    """Files from outside the run that the stage reads, by name; None: this machine names no folder."""
    files: list[tuple[str, Path | None]] = []
    if stage.name == "target" and profile.target.source is None:
        folder = config.local_paths().get("target")
        files.append(("target", folder and _checkpoint(folder)))
    elif stage.name == "target" and profile.target.source != config.TINY_TARGET:
        files.append(("target", _checkpoint(config.target_folder(profile.target))))
    if stage.name == "lengths" and profile.lengths.target is not None:
        files.append(("lengths_target", _checkpoint(paths.ROOT / profile.lengths.target)))
    if stage.name == "clips" and profile.clips.source == "suites":
        lists = paths.ROOT / (profile.clips.frozen_lists or "")
        if profile.clips.frozen_lists and lists.is_dir():
            files.append(("frozen_lists", lists))
        if profile.clips.training_list and not profile.clips.training_corpus:
            folder = config.local_paths().get("data")
            files.append(("training_list", folder and folder / profile.clips.training_list))
    if stage.name == "drafter" and profile.drafter.source:
        files.append(("drafter", _checkpoint(paths.ROOT / profile.drafter.source)))
    if stage.name == "ablations" and profile.name == config.TRACKED_PROFILE:
        table = paths.TRACKED_FIGURES / "T3_objectives.csv"  # cells that the run does not compute
        files += [("tracked", table)] if table.is_file() else []
    if stage.name in ("speedup", "beside_paper"):
        files.append(("published", paths.DATA / "published"))
    if stage.name == "beside_paper" and profile.name == config.TRACKED_PROFILE:
        # A study that the run measures takes the place of the tracked one, which has its name.
        places = {name: paths.TRACKED_RECORDS / name for name in STUDIES}
        files += [(name, place) for name, place in places.items() if place.is_dir()]
    return files


def _find_stale(folder: Path, parameters_id: str) -> str | None:
    """run_id of the newest finished run of the same parameters beside `folder`."""
    found = []
    for done in folder.parent.glob(f"*/{records.DONE_NAME}"):
        try:
            payload = read_json(done)["payload"]
        except (InputError, KeyError):
            continue
        same = payload.get("parameters_id") == parameters_id
        if same and records.why_not_done(done.parent, check_sha256=False) is None:
            found.append((done.stat().st_mtime_ns, done.parent.name))
    return max(found)[1] if found else None


def plan(
    profile_name: str,
    overrides: Mapping[str, Any] | None = None,
    ablation: bool = False,
    all_clips: bool = False,
    keep_stale: bool = False,
    more_drafters: Sequence[DrafterKey] = (),
    studies: bool = False,
) -> list[Shard]:
    """Every shard of a run, in an order in which each comes after what it needs.

    Args:
        profile_name: a file in `data/profiles`.
        overrides: dotted setting to value.
        ablation: also train every arm at every budget.
        all_clips: decode `clips_per_suite_all` clips per suite and seed, and measure the studies.
        keep_stale: reuse (and mark) finished shards though their code or inputs have changed.
        more_drafters: drafters to train beyond those of the profile.
        studies: measure STUDIES without decoding more clips.

    Raises:
        InputError: a bad setting, or code that does not parse. Files that are not there are
            `missing_inputs`'s to tell.
    """
    overrides = dict(overrides or {})
    profile = config.load_profile(profile_name, overrides)
    if all_clips:
        overrides["clips.clips_per_suite"] = profile.clips.clips_per_suite_all
        profile = config.load_profile(profile_name, overrides)
    digests = identity.FileDigests(paths.RUNS / ".digests.json")
    shards: list[Shard] = []
    codes: dict[str, str] = {}
    own_parameters = _shard_parameters(profile, ablation, studies or all_clips, more_drafters)
    for stage_name, own in own_parameters:
        stage = STAGES[stage_name]
        notebook = paths.NOTEBOOKS / stage.notebook
        if stage_name not in codes:
            codes[stage_name] = stage.code_digest()
        needed = _needed(profile, stage, shards)
        inputs = identity.digests_of(input_files(profile, stage), digests)
        inputs |= {shard.name: shard.run_id for shard in needed}
        if stage_name == "environment":
            inputs["packages"] = identity.sha256_of_json(environment.installed())
        asked = {"settings": _chosen_settings(profile, stage, own), "own": own}
        asked_of_needed = {item.name: item.parameters_id for item in needed}
        own_id = identity.run_id(stage_name, asked, codes[stage_name], inputs)
        folder = paths.RUNS / profile_name / stage_name / own_id
        shard = Shard(
            name=shard_name(stage_name, own),
            stage=stage_name,
            notebook=notebook,
            parameters={"profile": profile_name, "overrides": overrides, **own},
            run_id=own_id,
            parameters_id=identity.sha256_of_json([asked, asked_of_needed])[:12],
            folder=folder,
            dependencies=tuple(item.name for item in needed),
            outputs=stage.outputs,
            inputs=inputs,
            device=profile.target.device if "target.device" in stage.settings else "",
        )
        if keep_stale and not shard.done:
            kept = _find_stale(folder, shard.parameters_id)
            if kept:
                shard = dataclasses.replace(
                    shard, run_id=kept, folder=folder.parent / kept, stale=True
                )
        shards.append(shard)
    digests.save()
    return shards


# What decides where an input from outside the run lies.
_DECIDED_BY = {
    "target": "target.source or VFLASH_TARGET",
    "drafter": "drafter.source",
    "lengths_target": "lengths.target",
    "training_list": "clips.training_list",
}


_NO_FOLDER = {
    "target": "none; set VFLASH_TARGET or `target:` in local.yaml to the checkpoint's folder",
    "training_list": "no folder; set VFLASH_DATA or `data:` in local.yaml to the videos'",
}


def missing_inputs(shards: list[Shard]) -> list[str]:
    """One line per input file that is not there: the shard, what decides it, where it was sought."""
    lines = []
    for shard in shards:
        absent = [name for name, digest in shard.inputs.items() if digest == identity.ABSENT]
        if absent:
            profile = config.load_profile(
                shard.parameters["profile"], shard.parameters["overrides"]
            )
            places = dict(input_files(profile, STAGES[shard.stage]))
            for name in absent:
                place = places[name]
                found = f"nothing at {paths.relative_to_root(place)}" if place else _NO_FOLDER[name]
                lines.append(f"{shard.name}: {_DECIDED_BY.get(name, name)}: found {found}")
    return lines
