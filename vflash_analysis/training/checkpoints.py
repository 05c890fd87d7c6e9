"""Checkpoints that survive a kill: a folder is written under a temporary name and renamed.

`<run>/checkpoints/step_00000120/` holds what `accelerate` saves (weights, optimizers, random states,
in its own form for one process, DDP or FSDP) and `state.json` with the trainer's own state and the
size of every other file. The previous checkpoint is removed only after the new one has its name,
so at any moment one complete checkpoint exists once the first was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vflash_analysis.config import TrainSettings, result_settings
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import NOT_IDENTITY
from vflash_analysis.records import write_json_atomic
from vflash_analysis.strict import read_json

_STATE = "state.json"
_PREFIX = "step_"


def _folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [p for p in root.glob(f"{_PREFIX}*") if p.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(root: str | Path, accelerator: Any, step: int, state: dict[str, Any]) -> Path:
    """Saves the checkpoint of `step` steps done; every process calls it, the first one renames.

    Args:
        root: the folder of checkpoints.
        accelerator: has prepared the model and its optimizers.
        step: steps done; no checkpoint of this step exists.
        state: JSON state of the trainer.

    Returns:
        The checkpoint's folder.
    """
    root = Path(root)
    final = root / f"{_PREFIX}{step:08d}"
    temporary = root / f".{final.name}.tmp"
    if accelerator.is_main_process:
        for leftover in root.glob(f".{_PREFIX}*.tmp"):  # of a killed run
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in files}
        for path in files:
            _sync(path)
        write_json_atomic(temporary / _STATE, {**state, "step": step, "files": sizes})
        older = _folders(root)
        os.replace(temporary, final)
        _sync(root)
        for path in older:
            shutil.rmtree(path)
    accelerator.wait_for_everyone()
    return final


def latest_checkpoint(root: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint and its state, None if there is none.

    Raises:
        InputError: a file of it is missing or has another size than when it was saved.
    """
    folders = _folders(Path(root))
    if not folders:
        return None
    folder = folders[-1]
    state = read_json(folder / _STATE)
    for name, size in state["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            shown = "no such file" if found is None else f"{found} bytes"
            raise InputError(
                f"{path}: found {shown}, saved with {size} bytes; remove {folder} to go back"
            )
    return folder, state


def run_identity(drafter: Any, settings: TrainSettings, clip_ids: Sequence[str]) -> dict[str, Any]:
    """What must be equal for a checkpoint to be resumed or a result to be returned."""
    config = json.loads(json.dumps(drafter.config.to_dict(), default=str))
    # Set by place, saving or training, not by the one who asks for the training.
    for name in (*NOT_IDENTITY, "architectures", "dtype", "training"):
        config.pop(name, None)
    clips = hashlib.sha256("\n".join(clip_ids).encode()).hexdigest()
    return {"settings": result_settings(settings), "drafter": config, "clips": clips}


def check_identity(place: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses a saved run with other settings, another drafter or other clips.

    Raises:
        InputError: names the place, and what differs.
    """
    for part, now in wanted.items():
        before = saved[part]
        if before == now:
            continue
        where = part
        if isinstance(now, dict):
            key = next(k for k in {**before, **now} if before.get(k) != now.get(k))
            where, before, now = f"{part}.{key}", before.get(key), now.get(key)
        raise InputError(
            f"{place}: saved with {where} = {before}, found {now}; allowed: the same run, or "
            "another folder"
        )
