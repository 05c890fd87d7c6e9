"""One optimizer step: the loss as a module, its gradient over a global batch, rate and optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vflash_analysis.config import TrainSettings
from vflash_analysis.errors import InputError
from vflash_analysis.training.batches import FlowBatch
from vflash_analysis.training.blocks import TargetPieces
from vflash_analysis.training.objectives import LossParts

Loss = Callable[..., LossParts]
MakeBatch = Callable[[bool], FlowBatch]  # with states, or without any context


class TrainingStep(nn.Module):
    """Loss of a drafter as one module forward, so that DDP and FSDP see every use of a weight.

    The target's pieces are not registered: they get no gradient, optimizer state or checkpoint.
    """

    def __init__(
        self,
        drafter: nn.Module,
        target: TargetPieces,
        settings: TrainSettings,
        loss: Loss,
        mixed_precision: str = "no",
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self._target, self._settings, self._loss = target, settings, loss
        # Here and not in accelerate, whose choice holds for the rest of the process.
        self._autocast = mixed_precision == "bf16"

    def forward(self, batch: FlowBatch, step: int, count_only: bool = False) -> LossParts:
        """See `objectives.compute_loss`."""
        device = batch.states.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._autocast):
            return self._loss(
                self.drafter, batch, self._target, self._settings, step, count_only=count_only
            )


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up over the first steps, then a cosine down to 0 after the last one.

    Args:
        settings: peak rate, warm-up fraction, steps.
        step: 0-based.
    """
    warmup = math.ceil(settings.warmup_fraction * settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def raise_to_fp32(module: nn.Module) -> None:
    """Turns half-precision parameters into fp32 masters in place: in bf16 small updates vanish."""
    for parameter in module.parameters():
        if parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()


def make_optimizers(module: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW over the trainable parameters, or Muon for the matrices and AdamW for the rest.

    Only matrices decay, norms and biases do not. Muon (arXiv 2502.16982) takes AdamW's rate and
    decay: its orthogonal update is scaled to the size of AdamW's. It is computed in bfloat16, so
    its last bits are those of one kind of processor.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    rate, decay = settings.learning_rate, settings.weight_decay
    groups = [{"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        optimizers.append(
            torch.optim.Muon(matrices, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    else:
        groups.insert(0, {"params": matrices, "weight_decay": decay})
    groups = [group for group in groups if group["params"]]
    return [*optimizers, torch.optim.AdamW(groups, lr=rate, fused=True)] if groups else optimizers


def weighted_loss(numerators: Tensor, denominators: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i * numerators_i / denominators_i; a term without any weight counts 0."""
    return (weights * numerators / torch.where(denominators > 0, denominators, 1.0)).sum()


def gradient_step(
    model: nn.Module,
    batches: Sequence[MakeBatch],
    step: int,
    accelerator: Any,
    *,
    counted_by_labels: bool = False,
) -> dict[str, Tensor]:
    """Adds the gradient of the global batch's loss, whatever its cut into micro-batches and ranks.

    With one micro-batch the denominators come from its own forward. With more they are counted
    first: from batches without states where labels alone decide; else by extra forwards, and the
    states wait in host memory. So the device holds the states of one micro-batch at a time.

    Args:
        model: a `TrainingStep`, prepared by accelerate.
        batches: make the micro-batches, on the model's device; asked in order, one at a time.
        step: 0-based.
        accelerator: accelerate's.
        counted_by_labels: see `objectives.counted_by_labels`.

    Returns:
        The log sums of the global batch, with its numerators, denominators and weights.

    Raises:
        InputError: no slot of the global batch is supervised.
    """
    denominators = None
    if len(batches) > 1:
        counts: list[Tensor] = []
        clips: list[str] = []
        makers: list[MakeBatch] = []
        for make in batches:
            batch = make(not counted_by_labels)
            with torch.no_grad():
                counts.append(model(batch, step, count_only=True).denominators)
            clips += batch.clip_ids
            makers.append(make if counted_by_labels else _kept_on_host(batch))
            del batch
        batches = makers
        denominators = _global_count(accelerator, torch.stack(counts).sum(0), clips)
    sums: dict[str, Tensor] = {}
    for number, make in enumerate(batches):
        last = number == len(batches) - 1
        batch = make(True)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            parts: LossParts = model(batch, step)
            if denominators is None:
                denominators = _global_count(accelerator, parts.denominators, batch.clip_ids)
            loss = weighted_loss(parts.numerators, denominators, parts.weights)
            # DDP and FSDP average gradients over the processes, the loss is a sum over them.
            accelerator.backward(loss * accelerator.num_processes)
        for name, value in {**parts.sums, "numerators": parts.numerators.detach()}.items():
            sums[name] = sums.get(name, 0.0) + value.double()
        weights = parts.weights
        del batch, parts, loss  # with its states, before the next batch makes its own
    sums = {name: accelerator.reduce(value, "sum") for name, value in sums.items()}
    assert denominators is not None
    return {**sums, "denominators": denominators, "weights": weights}


def _kept_on_host(batch: FlowBatch) -> MakeBatch:
    """Gives the batch again, on the device it was on."""
    device, kept = batch.states.device, batch.to("cpu")
    return lambda with_states: kept.to(device)


def _global_count(accelerator: Any, counts: Tensor, clips: Sequence[str]) -> Tensor:
    total = accelerator.reduce(counts, "sum")
    if float(total[0]) <= 0:
        raise InputError(f"training batch of clips {', '.join(clips)}: found no supervised token")
    return total
