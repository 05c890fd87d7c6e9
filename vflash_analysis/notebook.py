"""What a notebook calls: its settings, its folder, the results of earlier stages, and `finish`.

    stage = open_stage("decode", profile, overrides, benchmark="VDC", sample_seed=0)
    stage.settings            the checked profile
    stage.folder              where its results go; the same folder by hand, by the runner, in a lab
    stage.input("target")     folder of an earlier stage's results
    stage.finish()            writes the manifest and, last of all, DONE

A finished stage opened again says so (`stage.done`) and shows its results without writing.
"""

import ast
import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from vflash_analysis import config, environment, identity, paths, records, stages
from vflash_analysis.config import DrafterKey, Profile
from vflash_analysis.errors import InputError
from vflash_analysis.locks import FolderLock
from vflash_analysis.schemas import STUDIES
from vflash_analysis.stages import STAGES, Shard
from vflash_analysis.strict import convert, read_json

STALE_VARIABLE = "VFLASH_KEEP_STALE"
INJECTED = "# Parameters\n"  # how papermill begins the cell that holds what it was given
RUN_ID_VARIABLE = "VFLASH_RUN_ID"  # set by the runner: the run it planned

_thread_failures: list[str] = []
_open_locks: dict[Path, FolderLock] = {}


@dataclass(frozen=True)
class OpenStage:
    """A stage as its notebook sees it.

    Attributes:
        shard: its place in the plan.
        settings: the checked profile.
        upstream: the shards whose results it reads.
        absent: why it reads the tracked records instead of this run's results; empty if it does not.
        done: whether it was complete when it was opened.
        beside: finished shards of other stages, which its page shows but no result depends on.
    """

    shard: Shard
    settings: Profile
    upstream: tuple[Shard, ...]
    absent: str
    done: bool
    beside: tuple[Shard, ...] = ()
    started: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        return self.shard.folder

    @property
    def run_id(self) -> str:
        return self.shard.run_id

    def __repr__(self) -> str:
        name = f"{self.shard.name} ({self.settings.name})"
        folder = f"  results in {paths.relative_to_root(self.folder)}"
        if self.tracked:
            return f"{name}: shows the tracked records; of this run {self.absent}\n{folder}"
        state = "done before: shown, not computed again" if self.done else "to do"
        origin = ", ".join(s.name for s in self.upstream) or "no earlier stage"
        return f"{name}: {state}\n{folder}\n  reads {origin}"

    @property
    def tracked(self) -> bool:
        """Whether it reads the tracked records, as results of this run are missing."""
        return bool(self.absent)

    @property
    def drafter_key(self) -> DrafterKey:
        """Which drafter a drafter stage trains, the profile's numbers filled in."""
        return self.shard.drafter_key

    def inputs(self, stage: str) -> dict[str, Path]:
        """The folders of an earlier stage's results, by shard name."""
        return {shard.name: shard.folder for shard in self.upstream if shard.stage == stage}

    def input(self, stage: str) -> Path:
        """The folder of an earlier stage that has one shard."""
        found = self.inputs(stage)
        if len(found) != 1:
            raise InputError(
                f"{self.shard.name}: reads {len(found)} shards of {stage}, one is allowed"
            )
        return next(iter(found.values()))

    @property
    def record_folders(self) -> list[Path] | None:
        """Folders whose records this stage reads; None stands for the tracked records."""
        return None if self.tracked else [shard.folder for shard in self.upstream]

    @property
    def shown_folders(self) -> list[Path] | None:
        """Its own folder and those of `beside`: what the page of a stage with own records shows.

        None stands for the tracked records.
        """
        return None if self.tracked else [self.folder, *(shard.folder for shard in self.beside)]

    def beside_folder(self, stage: str) -> Path | None:
        """The folder of a stage of `beside` that has one shard; None where it is not done."""
        found = [shard.folder for shard in self.beside if shard.stage == stage]
        return found[0] if found else None

    def finish(self, planned: int = 1, done: int = 1, **facts: Any) -> pd.DataFrame:
        """Write the manifest, then `DONE`; and show what the stage left.

        Args:
            planned: units of work there were (clips, steps, files).
            done: units that gave a result.
            facts: more JSON facts to keep in the manifest.

        Returns:
            One row per output: file, rows, bytes.

        Raises:
            RuntimeError: a thread failed in this notebook, so its results are not to be trusted.
            InputError: a declared output is missing or empty.
        """
        if _thread_failures and not self.done:
            raise RuntimeError(f"a thread failed: {_thread_failures[0]}")
        if not self.done:
            seconds = round(time.monotonic() - self.started, 3)
            written = sorted({*self.shard.outputs, *_files_of(self.folder)})
            _write_manifest(self, planned, done, facts)
            payload = {
                "stage": self.shard.stage,
                "parameters_id": self.shard.parameters_id,
                "planned": planned,
                "done": done,
                "seconds": seconds,
            }
            records.write_done(self.folder, payload, [*written, records.MANIFEST_NAME])
        lock = _open_locks.pop(self.folder, None)
        if lock:
            lock.release()
        return outputs_of(self.folder)


def _files_of(folder: Path) -> list[str]:
    """Results directly in the folder and film strips; working files are not declared."""
    kinds = (
        ".csv", ".json", ".jsonl", ".parquet", ".md", ".tex", ".svg", ".pdf", ".png", ".html",
        ".gif", ".jpg",
    )  # fmt: skip
    return [
        path.relative_to(folder).as_posix()
        for path in (*folder.glob("*"), *records.find_strips(folder).values())
        if path.suffix in kinds and not path.name.startswith(".") and path.stat().st_size
    ]


def outputs_of(folder: Path) -> pd.DataFrame:
    """What a finished folder declares: file, rows ("" where it is not records), bytes."""
    declared = read_json(folder / records.DONE_NAME)["outputs"]
    rows = [
        {
            "file": name,
            "rows": "" if facts["rows"] is None else facts["rows"],
            "bytes": facts["bytes"],
        }
        for name, facts in declared.items()
    ]
    return pd.DataFrame(rows)


def _write_manifest(stage: OpenStage, planned: int, done: int, facts: Mapping[str, Any]) -> None:
    profile = stage.settings
    seeds = {
        "sample_seeds": list(profile.clips.sample_seeds),
        "train_seeds": list(profile.train_seeds),
    }
    records.write_json_atomic(
        stage.folder / records.MANIFEST_NAME,
        {
            **environment.machine(),
            "run_id": stage.run_id,
            "stage": stage.shard.stage,
            "profile": profile.name,
            "parameters": dict(stage.shard.parameters),
            "settings": config.to_json(profile),
            "seeds": seeds,
            "inputs": dict(stage.shard.inputs),
            "tracked_records": stage.tracked,
            "stale_inputs": [shard.name for shard in stage.upstream if shard.stale],
            "planned": planned,
            "done": done,
            **facts,
        },
    )


def _note_thread_failure(args: threading.ExceptHookArgs) -> None:
    """Remember a thread's exception, so that `finish` refuses, and print it as usual."""
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread else "unknown"
    _thread_failures.append(f"{name}: {args.exc_type.__name__}: {args.exc_value}")
    threading.__excepthook__(args)


def _release_all() -> None:
    for lock in _open_locks.values():
        lock.release()


atexit.register(_release_all)


def _on_tracked_records(shard: Shard) -> Shard:
    """The same shard reading the tracked records instead of this run's results."""
    digests = identity.FileDigests(paths.RUNS / ".digests.json")
    kept = {name: value for name, value in shard.inputs.items() if name == "published"}
    inputs = kept | {"tracked": digests.of(paths.TRACKED_RECORDS)}
    digests.save()
    code = STAGES[shard.stage].code_digest()
    own_id = identity.run_id(shard.stage, {"asked": shard.parameters_id}, code, inputs)
    values = {"run_id": own_id, "folder": shard.folder.parent / own_id, "inputs": inputs}
    return Shard(**{**shard.__dict__, **values})


def _refuse_unknown_parameters(stage: stages.Stage) -> None:
    """Refuse names in the cell of parameters that papermill wrote: it only warns of unknown ones."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    cells = shell.user_ns.get("In", []) if shell else []
    written = [cell for cell in cells if cell.startswith(INJECTED)]
    given = ast.parse(written[-1]).body if written else []  # the last one run counts
    allowed = ["profile", "overrides", *stage.takes, *stage.by_hand]
    for name in [ast.unparse(one.targets[0]) for one in given if isinstance(one, ast.Assign)]:
        if name not in allowed:
            raise InputError(
                f"{stage.notebook}: unknown parameter {name}, allowed: {', '.join(allowed)}"
            )


def open_stage(
    name: str, profile: str, overrides: Mapping[str, Any] | None = None, **own: Any
) -> OpenStage:
    """Check a notebook's parameters and open its folder.

    Args:
        name: a stage of `stages.STAGES`.
        profile: a profile in `data/profiles`.
        overrides: dotted setting to value.
        own: the stage's own parameters; `steps` and `training_clips` of 0 mean the profile's.

    Raises:
        InputError: a bad setting or parameter (also one that papermill was given and the notebook
            does not take), an earlier stage that has not run, or a folder in which another process
            works.
    """
    if name not in STAGES:
        raise InputError(f"stage: found {name!r}, allowed: {', '.join(STAGES)}")
    stage = STAGES[name]
    _refuse_unknown_parameters(stage)
    settings = config.load_profile(profile, overrides)
    if sorted(own) != sorted(stage.takes):
        raise InputError(f"{name}: found parameters {sorted(own)}, allowed: {sorted(stage.takes)}")
    own = {key: convert(value, stages.OWN_PARAMETERS[key], key) for key, value in own.items()}
    for key in ("steps", "training_clips"):
        if own.get(key) == 0:
            own[key] = getattr(settings.training, key)
    if own.get("training_clips", 0) > settings.clips.training_clips:
        raise InputError(
            f"training_clips: found {own['training_clips']}, allowed: at most clips.training_clips "
            f"({settings.clips.training_clips})"
        )
    shards = stages.plan(
        profile,
        overrides,
        ablation=own.get("ablation", False),
        keep_stale=os.environ.get(STALE_VARIABLE) == "1",
        more_drafters=[DrafterKey(**own)] if name == "drafter" else [],
        studies=own.get("studies", False) or bool({name, *stage.beside} & set(STUDIES)),
    )
    wanted = stages.shard_name(name, {key: own[key] for key in stage.takes})
    by_name = {shard.name: shard for shard in shards}
    if wanted not in by_name:
        known = [s.name for s in shards if s.stage == name]
        raise InputError(f"{name}: found {wanted}, allowed: {', '.join(known)}")
    shard = by_name[wanted]
    planned = os.environ.get(RUN_ID_VARIABLE, shard.run_id)
    if planned != shard.run_id:
        raise InputError(
            f"{wanted}: code or inputs changed while the run was under way (planned {planned}, now "
            f"{shard.run_id}); run again"
        )
    upstream = tuple(by_name[needed] for needed in shard.dependencies)
    waiting = [item for item in upstream if not item.done]
    absent = ""
    if waiting and stage.falls_back and paths.TRACKED_RECORDS.is_dir():
        absent = f"{len(waiting)} of {len(upstream)} shards are not done, first {waiting[0].name}"
        shard = _on_tracked_records(shard)
    elif waiting:
        first = waiting[0]
        raise InputError(
            f"{wanted}: needs {first.name}, which has not run: notebooks/{first.notebook.name} or "
            f"`vflash run --profile {profile} --only {first.stage}`"
        )
    done = shard.done
    if not done and shard.folder not in _open_locks:
        _open_locks[shard.folder] = FolderLock(shard.folder)
        (shard.folder / records.DONE_NAME).unlink(missing_ok=True)
    threading.excepthook = _note_thread_failure
    sys.stdout.flush()
    beside = tuple(item for item in shards if item.stage in stage.beside and item.done)
    return OpenStage(shard, settings, upstream, absent, done, beside)
