"""The training loop of a drafter: accelerate, exact resume, checkpoints that survive a kill.

The loop knows nothing of an objective: it asks a loss for sums over each micro-batch, divides by
the sums over the whole global batch, and steps. So accumulation and several processes give the
large batch's gradient, and a baseline's drafter trains here with its own loss.

The drafter's own weights are at least fp32; with `mixed_precision` the forward runs under autocast.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from vflash_analysis.config import TrainSettings, result_settings
from vflash_analysis.environment import device_label
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_sha256
from vflash_analysis.records import blank_row, write_json_atomic, write_records
from vflash_analysis.schemas import TRAINING
from vflash_analysis.strict import read_json
from vflash_analysis.training.batches import (
    FlowBatch,
    step_visits,
    training_batch,
)
from vflash_analysis.training.blocks import TargetPieces
from vflash_analysis.training.checkpoints import (
    check_identity,
    latest_checkpoint,
    run_identity,
    save_checkpoint,
)
from vflash_analysis.training.compute import context_cost, forward_equivalents
from vflash_analysis.training.continuations import ContinuationSource
from vflash_analysis.training.objectives import LossParts, compute_loss, counted_by_labels
from vflash_analysis.training.progress import Progress, Window
from vflash_analysis.training.step import (
    Loss,
    MakeBatch,
    TrainingStep,
    gradient_step,
    learning_rate,
    make_optimizers,
    raise_to_fp32,
)

Visits = Sequence[tuple[int | str, int]]
CONTEXT_TOKENS = 32768  # of one forward, unless `micro_clips` says otherwise


def usable_items(
    data: ContinuationSource, name: str, limit: int | None, log: Callable[[str], None]
) -> list[int]:
    """Indices of the first `limit` continuations that offer an anchor; says how many were kept.

    Args:
        data: continuations.
        name: of the data, for messages.
        limit: None: all.
        log: prints one line.

    Raises:
        InputError: none does.
    """
    counts = data.anchor_counts()
    usable = [index for index, count in enumerate(counts) if count > 0]
    if len(usable) < len(counts):
        log(f"{name} data: kept {len(usable)} of {len(counts)} texts (2 or more new tokens)")
    if not usable:
        raise InputError(f"{name} data: found 0 supervised tokens in {len(counts)} continuations")
    if limit is not None and len(usable) < limit:
        log(f"training.training_clips: {limit} asked for, {len(usable)} there")
    return usable[:limit]


@dataclass
class _State:
    """What a resume needs besides weights and optimizer; JSON."""

    step: int = 0
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    window: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    forward_equivalents: float = 0.0
    seconds: float = 0.0


def train(
    drafter: Any,
    target: TargetPieces,
    data: ContinuationSource,
    settings: TrainSettings,
    out_folder: str | Path,
    *,
    loss: Loss = compute_loss,
    compute: Callable[[dict[str, Tensor]], float] | None = None,
    validation: ContinuationSource | None = None,
    micro_clips: int | None = None,
    mixed_precision: str = "no",
    variant: str = "",
    log_every: int | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Trains a drafter on the target's continuations; run again, it resumes or does nothing.

    Args:
        drafter: `VFlashDrafter` or a baseline's with `block_size`, `context` in its config;
            trained in place, at least fp32.
        target: frozen embedding and head, banned and stop ids.
        data: continuations; the first `settings.training_clips` usable ones are trained on.
        settings: see `TrainSettings`.
        out_folder: gets `checkpoints/`, `training.parquet`, and last `drafter/`.
        loss: called like `objectives.compute_loss`; with `count_only` it may get batches without
            states (see `objectives.counted_by_labels`).
        compute: forward-equivalents of a step from its log sums; None: `forward_equivalents`.
        validation: continuations for the loss every `evaluate_every` steps, on fixed anchors.
        micro_clips: clips per forward of one process; fewer than its share of the batch means
            accumulation, which does not change the gradient. None: as many as `CONTEXT_TOKENS` hold.
        mixed_precision: "no" or "bf16" (autocast).
        variant: kept in every row, see TRAINING.
        log_every: steps per logged row; by default a hundred rows per run.
        log: prints one line.

    Returns:
        The folder of the drafter, training facts in its config.

    Raises:
        InputError: no supervised tokens, `clips_per_step` not a multiple of the processes, Muon
            under FSDP, or another run's checkpoints or drafter in `out_folder`.
    """
    out = Path(out_folder)
    raise_to_fp32(drafter)
    if settings.activation_checkpointing:
        # Nothing in a drafter draws random numbers, so none need to be the same again.
        options = {"use_reentrant": False, "preserve_rng_state": False}
        drafter.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    device = next(drafter.parameters()).device
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no")
    ranks, rank = accelerator.num_processes, accelerator.process_index
    say = log if rank == 0 else _silent
    if mixed_precision not in ("no", "bf16"):
        raise InputError(f"mixed_precision: found {mixed_precision!r}, allowed: no, bf16")
    if settings.clips_per_step % ranks:
        raise InputError(
            f"training.clips_per_step: found {settings.clips_per_step}, allowed: a multiple of the "
            f"{ranks} processes"
        )
    items = usable_items(data, "training", settings.training_clips, say)
    identity = run_identity(drafter, settings, [data.clip_ids()[i] for i in items])
    if (out / "drafter").is_dir():
        return _finished(drafter, out, identity)
    make_batch = functools.partial(
        training_batch,
        seed=settings.train_seed,
        anchors_per_clip=settings.anchors_per_clip,
        n_slots=drafter.config.block_size - 1,
        max_rounds=settings.max_reveal_rounds,
        context=drafter.config.context,
        video_token_id=target.video_token_id,
        stop_ids=target.stop_ids,
    )

    longest = max(length for source in (data, validation) if source for length in source.lengths())
    share = settings.clips_per_step // ranks
    micro = micro_clips or min(share, max(1, CONTEXT_TOKENS // longest))

    def micro_batches(source: ContinuationSource, visits: Visits) -> list[MakeBatch]:
        def make(cut: Visits, with_states: bool) -> FlowBatch:
            return make_batch(source, cut, with_states=with_states).to(device)

        return [
            functools.partial(make, visits[i : i + micro]) for i in range(0, len(visits), micro)
        ]

    def own_visits(step: int) -> list[tuple[int, int]]:
        visits = step_visits(settings.train_seed, step, settings.clips_per_step, len(items))
        return [(epoch, items[place]) for epoch, place in visits[rank::ranks]]

    if settings.optimizer == "muon" and accelerator.distributed_type == DistributedType.FSDP:
        raise InputError(
            "training.optimizer: found muon, allowed under FSDP: adamw (Muon needs whole matrices)"
        )
    model, *optimizers = accelerator.prepare(
        TrainingStep(drafter, target, settings, loss, mixed_precision),
        *make_optimizers(drafter, settings),
    )
    checkpoints = out / "checkpoints"
    state = _resume(accelerator, checkpoints, identity)
    if state.step:
        say(f"resuming after step {state.step} of {settings.steps}")
    else:  # a drafter that cannot be saved is found out before the first step, not after the last
        _save_drafter(accelerator, model, out / ".drafter.check")
        if rank == 0:
            shutil.rmtree(out / ".drafter.check")
    by_labels = counted_by_labels(settings)
    window = Window(state.window)
    if compute is None:
        cost = context_cost(drafter.config)
        compute = functools.partial(forward_equivalents, cost_of_context_token=cost)
    log_every = log_every or max(1, settings.steps // 100)
    progress = Progress("step", settings.steps, state.step, say)
    started = time.perf_counter() - state.seconds

    while state.step < settings.steps:
        step = state.step
        rate = learning_rate(settings, step)
        for group in itertools.chain(*(optimizer.param_groups for optimizer in optimizers)):
            group["lr"] = rate
        mine = own_visits(step)
        coming = [*mine, *(own_visits(step + 1) if step + 1 < settings.steps else [])]
        data.expect([item for _, item in coming])
        batches = micro_batches(data, mine)
        sums = gradient_step(model, batches, step, accelerator, counted_by_labels=by_labels)
        accelerator.clip_grad_norm_(model.parameters(), settings.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        state.step += 1
        state.forward_equivalents += compute(sums)
        state.seconds = time.perf_counter() - started
        window.add(sums)
        logged = {
            "step": state.step,
            "learning_rate": rate,
            "forward_equivalents_done": state.forward_equivalents,
            "seconds": state.seconds,
        }
        finished = state.step == settings.steps
        if finished or state.step % log_every == 0:
            state.rows.append({**logged, **window.row(), "setting": ""})
            window = Window()
        if validation is not None and (finished or state.step % settings.evaluate_every == 0):
            averages = _validate(model, validation, step, accelerator, micro_batches, micro)
            state.rows.append({**logged, **averages, "setting": "validation"})
        latest = {row["setting"] or "loss": row["loss"] for row in state.rows}
        progress.update(state.step, ", ".join(f"{k} {v:.4f}" for k, v in latest.items()))
        if not finished and state.step % settings.checkpoint_every == 0:
            state.window = window.sums
            saved = {"identity": identity, **dataclasses.asdict(state)}
            save_checkpoint(checkpoints, accelerator, state.step, saved)
    names = {"target_sha256": target.sha256, "variant": variant}
    return _finish(accelerator, model, out, names, settings, state, len(items), identity)


def _silent(line: str) -> None:
    """Says nothing, on every process but the first."""


def _resume(accelerator: Any, checkpoints: Path, identity: dict[str, Any]) -> _State:
    """Loads the newest checkpoint into the prepared model and optimizers, if there is one."""
    found = latest_checkpoint(checkpoints)
    if found is None:
        return _State()
    folder, saved = found
    check_identity(folder, saved["identity"], identity)
    accelerator.load_state(str(folder))
    return _State(**{f.name: saved[f.name] for f in dataclasses.fields(_State)})


def _validate(
    model: nn.Module,
    validation: ContinuationSource,
    step: int,
    accelerator: Any,
    micro_batches: Callable[[ContinuationSource, Visits], list[MakeBatch]],
    micro: int,
) -> dict[str, Any]:
    """The loss on fixed anchors and reveal draws of every usable validation clip, each once.

    Every process runs the same number of forwards, as FSDP needs; one that has no clip left runs
    another's and drops its sums.
    """
    items = usable_items(validation, "validation", None, _silent)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    group = ranks * micro
    sums: dict[str, Tensor] = {}
    starts = range(0, len(items), group)
    owned = [items[start : start + group][rank::ranks] for start in starts]
    validation.expect([item for mine in owned for item in mine])
    for start, mine in zip(starts, owned, strict=True):
        (make,) = micro_batches(validation, [("validation", i) for i in mine or items[start:][:1]])
        with torch.no_grad():
            parts: LossParts = model(make(True), step)
        found = {"numerators": parts.numerators, "denominators": parts.denominators, **parts.sums}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value.double() * bool(mine)
    window = Window()
    window.add({name: accelerator.reduce(value, "sum") for name, value in sums.items()})
    window.add({"weights": parts.weights})
    return window.row()


def _save_drafter(accelerator: Any, model: nn.Module, folder: Path) -> None:
    """Writes the drafter's weights and config; every process calls it, the first one writes."""
    tensors = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        weights = {
            name.removeprefix("drafter."): value.detach().cpu().contiguous()
            for name, value in tensors.items()
        }
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        bars = hf_logging.is_progress_bar_enabled()
        hf_logging.disable_progress_bar()
        accelerator.unwrap_model(model).drafter.save_pretrained(folder, state_dict=weights)
        if bars:
            hf_logging.enable_progress_bar()
    accelerator.wait_for_everyone()


def _finish(
    accelerator: Any,
    model: nn.Module,
    out: Path,
    names: Mapping[str, str],
    settings: TrainSettings,
    state: _State,
    training_clips: int,
    wanted: dict[str, Any],
) -> Path:
    """Saves the drafter and its records; the drafter's folder gets its name last."""
    facts = {
        "objective": settings.objective,
        "train_seed": settings.train_seed,
        "steps": settings.steps,
        "training_clips": training_clips,
        "forward_equivalents": state.forward_equivalents,
        "revealed_weight": settings.revealed_weight,
        "anchors_per_clip": settings.anchors_per_clip,
    }
    drafter = accelerator.unwrap_model(model).drafter
    # Seconds stay out: the config is part of the drafter's identity.
    drafter.config.training = {**facts, "settings": result_settings(settings)}
    temporary = out / ".drafter.tmp"
    _save_drafter(accelerator, model, temporary)
    if accelerator.is_main_process:
        identity = {
            **facts,
            **names,
            "drafter_sha256": drafter_sha256(temporary),
            "device": device_label(next(drafter.parameters()).device),
        }
        rows = [{**blank_row(TRAINING), **identity, **row} for row in state.rows]
        write_records(out / "training.parquet", rows, TRAINING)
        result = {**identity, "seconds": state.seconds, "identity": wanted}
        write_json_atomic(out / "training.json", result)
        os.replace(temporary, out / "drafter")
        for leftover in ("checkpoints", ".drafter.check"):
            shutil.rmtree(out / leftover, ignore_errors=True)
    accelerator.wait_for_everyone()
    return out / "drafter"


def _finished(drafter: Any, out: Path, identity: dict[str, Any]) -> Path:
    """The drafter's folder of a run that is complete, its weights loaded into `drafter`."""
    check_identity(out, read_json(out / "training.json")["identity"], identity)
    trained = type(drafter).from_pretrained(out / "drafter", dtype=next(drafter.parameters()).dtype)
    drafter.load_state_dict(trained.state_dict())
    drafter.config.training = trained.config.training
    return out / "drafter"
