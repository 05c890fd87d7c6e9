"""Train the pocket target: a LLaVA-OneVision architecture of under 3 M parameters.

Three steps: a pool of scenes drawn as frames; the vision tower and projector on dense labels (what
is at each place and where its centre is); the text stack on questions and answers. The tower comes
first because a captioning loss alone teaches it little of shape and place. A second target goes on
from the first with clips of many lengths. Run by notebook 20 with `retrain = True`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from vflash_analysis.clips.pocket import FAMILIES
from vflash_analysis.errors import InputError
from vflash_analysis.records import replace_atomically, sha256_of_file, write_json_atomic
from vflash_analysis.strict import read_json
from vflash_analysis.training.pocket_model import build_model, save_target, train_tokenizer
from vflash_analysis.training.pocket_pool import NUM_FRAMES, Pool, draw_pool
from vflash_analysis.training.pocket_training import CAPTION_RATE, train_captions, train_tower

# Frames of the clips that the target of many lengths learns from: 17 to 801 video tokens.
LENGTHS = (1, 3, 9, 18, 30, 50)


def work_folder(out_folder: Path) -> Path:
    """Where a training keeps what it has done until the target is written."""
    return out_folder.with_name(out_folder.name + "-work")


def _open_work(out_folder: Path, settings: Mapping[str, Any]) -> Path:
    """The work folder of a training with these settings, from which one that stopped goes on.

    Raises:
        InputError: it holds a run with other settings.
    """
    work = work_folder(out_folder)
    work.mkdir(parents=True, exist_ok=True)
    settings_file = work / "settings.json"
    if settings_file.is_file() and read_json(settings_file) != settings:
        raise InputError(
            f"{work}: holds a run with other settings; remove the folder to start anew"
        )
    write_json_atomic(settings_file, settings)
    return work


def _train_texts(
    work: Path,
    out_folder: Path,
    model: LlavaOnevisionForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pool: Pool,
    record: Mapping[str, Any],
    lengths: Sequence[int] = (NUM_FRAMES,),
    learning_rate: float = CAPTION_RATE,
) -> None:
    """The last step of a training: questions and answers; then the target and its record replace
    those in `out_folder`, and the work folder goes.

    Args:
        work: of `_open_work`.
        out_folder: of the target.
        model, tokenizer: what is trained and saved.
        pool, lengths, learning_rate: as for `train_captions`.
        record: what to keep beside the weights; its `caption_steps` are taken.
    """
    captions = train_captions(
        model,
        tokenizer,
        pool,
        record["caption_steps"],
        lengths,
        learning_rate=learning_rate,
        checkpoint=work / "captions.pt",
    )
    save_target(model, tokenizer, work / "target")
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    whole = {**record, **facts, "captions": captions}
    write_json_atomic(work / "target" / "training_record.json", whole)
    if out_folder.exists():
        out_folder.rename(work / "before")
    (work / "target").rename(out_folder)
    shutil.rmtree(work)


def _texts_sha256(pool: Pool) -> str:
    return hashlib.sha256("\n".join(pool.questions + pool.answers).encode()).hexdigest()


def retrain(
    out_folder: Path, scenes_per_family: int, tower_steps: int = 1500, caption_steps: int = 3000
) -> None:
    """Train the pocket target from nothing and write it, with its training record, to `out_folder`.

    What is done is kept in `work_folder` until the target is written; a run that was stopped goes on
    from there.

    Raises:
        InputError: that folder holds a run with other settings.
    """
    pool = draw_pool("target_training", scenes_per_family)
    print(f"pool: {len(pool.answers)} scenes", flush=True)
    tokenizer = train_tokenizer(pool.answers + pool.questions)
    model = build_model(tokenizer, seed=0)
    settings = {
        "scenes": len(pool.answers),
        "texts_sha256": _texts_sha256(pool),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tower_steps": tower_steps,
        "caption_steps": caption_steps,
    }
    work = _open_work(out_folder, settings)
    tower_file = work / "tower.pt"
    if tower_file.is_file():
        state = torch.load(tower_file, weights_only=True)
        model.load_state_dict(state["model"])
        tower = state["rows"]
    else:
        tower = train_tower(model, pool, tower_steps)
        state = {"model": model.state_dict(), "rows": tower}
        replace_atomically(tower_file, partial(torch.save, state))
    _train_texts(work, out_folder, model, tokenizer, pool, settings | {"tower": tower})


def retrain_lengths(
    base_folder: Path,
    out_folder: Path,
    scenes_per_family: int = 1200,
    caption_steps: int = 3000,
    learning_rate: float = 7e-4,
) -> None:
    """Go on training a pocket target on clips of LENGTHS frames, and write it to `out_folder`.

    Its vision tower and tokenizer stay. The scenes are others than those it has learnt from, of
    which it knows the texts by heart. What is done is kept as `retrain` keeps it.

    Raises:
        InputError: the work folder holds a run with other settings.
    """
    work_folder(out_folder).mkdir(parents=True, exist_ok=True)  # says that the base is trained
    seen = read_json(base_folder / "training_record.json")["scenes"] // len(FAMILIES)
    pool = draw_pool("target_training", scenes_per_family, max(LENGTHS), first=seen)
    settings = {
        "base_sha256": sha256_of_file(base_folder / "model.safetensors"),
        "scenes": len(pool.answers),
        "frames": list(LENGTHS),
        "texts_sha256": _texts_sha256(pool),
        "caption_steps": caption_steps,
        "learning_rate": learning_rate,
    }
    work = _open_work(out_folder, settings)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base_folder)
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(base_folder, dtype=torch.float32)
    _train_texts(work, out_folder, model, tokenizer, pool, settings, LENGTHS, learning_rate)
