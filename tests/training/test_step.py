"""The global batch's gradient, fp32 masters, the schedule, and analytic compute."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.memory import traced
from tests.tiny import tiny_drafter, tiny_target
from tests.training.toys import ListSource, batch_of, random_source, settings
from vflash_analysis.errors import InputError
from vflash_analysis.training.batches import Continuation, FlowBatch, training_batch
from vflash_analysis.training.blocks import target_pieces
from vflash_analysis.training.compute import context_cost, forward_equivalents
from vflash_analysis.training.objectives import compute_loss, counted_by_labels
from vflash_analysis.training.progress import Progress, Window
from vflash_analysis.training.step import (
    MakeBatch,
    TrainingStep,
    gradient_step,
    learning_rate,
    make_optimizers,
    raise_to_fp32,
    weighted_loss,
)

TARGET = tiny_target(0)
PIECES = target_pieces(TARGET)


def made(batch: FlowBatch) -> MakeBatch:
    return lambda with_states: batch


def uneven_batches(micro_clips: int) -> list[FlowBatch]:
    """Texts of 2, 3, 4 and 11 tokens: 1, 2, 3 and 10 anchors."""
    source = random_source(tiny_drafter(TARGET, 1), 4, new=(2, 3, 4, 11))
    cuts = [source.items[i : i + micro_clips] for i in range(0, 4, micro_clips)]
    return [batch_of(ListSource(cut), 15, anchors_per_clip=10) for cut in cuts]


@pytest.mark.parametrize("micro_clips", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "mask_only"},
        {"objective": "self_reveal"},
        {"objective": "self_reveal", "revealed_weight": 0.0},
        {"objective": "wrong_reveal", "revealed_weight": 0.4},
    ],
)
def test_accumulation_equals_the_large_batch(changes: dict[str, Any], micro_clips: int) -> None:
    found = []
    for size in (4, micro_clips):
        drafter = tiny_drafter(TARGET, 1)
        model = TrainingStep(drafter, PIECES, settings(**changes), compute_loss)
        sums = gradient_step(
            model, [made(batch) for batch in uneven_batches(size)], 5, Accelerator(cpu=True)
        )
        found.append(([p.grad for p in drafter.parameters()], sums))
    (whole, whole_sums), (cut, cut_sums) = found
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert whole_sums.keys() == cut_sums.keys()
    for name, value in whole_sums.items():
        torch.testing.assert_close(value, cut_sums[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "by_labels"),
    [
        ({"objective": "self_reveal"}, True),
        ({"objective": "self_reveal", "revealed_weight": 0.0}, False),
    ],
)
def test_states_live_for_one_micro_batch(changes: dict[str, Any], by_labels: bool) -> None:
    """Counted by labels, they are made once and never two at a time; else they wait on the host."""
    chosen = settings(**changes)
    assert counted_by_labels(chosen) == by_labels
    drafter = tiny_drafter(TARGET, 1)
    source = random_source(drafter, 3)
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    seen: list[int] = []

    class Online(ListSource):
        """States that are made at every access, as the target makes them."""

        def __getitem__(self, index: int) -> Continuation:
            seen.append(sum(ref() is not None for ref in alive))
            item = super().__getitem__(index)
            states = item.states.clone()
            alive.append(weakref.ref(states.untyped_storage()))
            return dataclasses.replace(item, states=states)

    data = Online(source.items)

    def make(index: int, with_states: bool) -> FlowBatch:
        return training_batch(
            data, [(0, index)], seed=0, anchors_per_clip=4, n_slots=15, max_rounds=3,
            with_states=with_states,
        )  # fmt: skip

    model = TrainingStep(drafter, PIECES, chosen, compute_loss)
    makers = [functools.partial(make, index) for index in range(3)]
    gradient_step(model, makers, 5, Accelerator(cpu=True), counted_by_labels=by_labels)
    assert data.read == ["clip-0", "clip-1", "clip-2"]
    assert seen == ([0, 0, 0] if by_labels else [0, 1, 2])  # on a CPU the host is the device
    assert not any(ref() is not None for ref in alive)
    whole = tiny_drafter(TARGET, 1)
    batch = training_batch(
        source, [(0, i) for i in range(3)], seed=0, anchors_per_clip=4, n_slots=15, max_rounds=3
    )
    step = TrainingStep(whole, PIECES, chosen, compute_loss)
    gradient_step(step, [made(batch)], 5, Accelerator(cpu=True))
    for a, b in zip(drafter.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)


def test_a_batch_without_supervised_tokens_is_an_error() -> None:
    batch = uneven_batches(4)[0]
    empty = dataclasses.replace(batch, supervised=torch.zeros_like(batch.supervised))
    model = TrainingStep(tiny_drafter(TARGET, 1), PIECES, settings(), compute_loss)
    with pytest.raises(InputError, match=r"clip-0, clip-1.*no supervised token"):
        gradient_step(model, [made(empty)], 0, Accelerator(cpu=True))
    with pytest.raises(InputError, match="no supervised token"):
        gradient_step(model, [made(empty)] * 2, 0, Accelerator(cpu=True))


def test_a_term_without_weight_counts_nothing() -> None:
    loss = weighted_loss(
        torch.tensor([6.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.5])
    )
    assert float(loss) == 3.0


def test_masters_are_fp32_and_move_where_bf16_would_not() -> None:
    def after_200_steps(parameter: nn.Parameter) -> float:
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.0)
        for _ in range(200):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return float(parameter.detach())

    half = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    assert after_200_steps(half) == 1.0
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    raise_to_fp32(module)
    assert module.weight.dtype == torch.float32
    assert after_200_steps(module.weight) == pytest.approx(0.8, abs=1e-3)


def test_wider_parameters_stay_as_they_are() -> None:
    drafter = tiny_drafter(TARGET, 1)
    raise_to_fp32(drafter)
    assert {p.dtype for p in drafter.parameters()} == {torch.float64}


def test_learning_rate_warms_up_and_ends_near_0() -> None:
    chosen = settings(steps=100, warmup_fraction=0.1, learning_rate=1.0)
    rates = [learning_rate(chosen, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0 < rates[99] < 1e-3
    assert learning_rate(settings(steps=1, warmup_fraction=0.0), 0) == settings().learning_rate


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_matrices_decay(optimizer: str) -> None:
    drafter = tiny_drafter(TARGET, 1)
    optimizers = make_optimizers(drafter, settings(weight_decay=0.1, optimizer=optimizer))
    decayed, plain = (group for made in optimizers for group in made.param_groups)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all(p.dim() == 2 for p in decayed["params"]) and all(
        p.dim() == 1 for p in plain["params"]
    )
    count = sum(len(group["params"]) for group in (decayed, plain))
    assert count == len(list(drafter.parameters()))


def test_context_cost_by_hand() -> None:
    config = SimpleNamespace(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=16,
        num_hidden_layers=3,
        block_size=16,
        vocab_size=100,
        target_layer_ids=[0, 1],
    )
    layer = 8 * 8 + 8 * 8 + 8 * 4 + 8 * 4 + 3 * 8 * 16  # q, o, k, v, MLP
    block = 16 * 3 * layer + 15 * 8 * 100
    token = 2 * 8 * 8 + 3 * (8 * 4 + 8 * 4)
    assert context_cost(config) == token / block


def test_context_cost_counts_the_drafters_own_weights() -> None:
    drafter = tiny_drafter(TARGET, 1)
    config = drafter.config
    n_layer = sum(p.numel() for p in drafter.layers.parameters() if p.dim() == 2)
    block = 16 * n_layer + 15 * TARGET.lm_head.weight.numel()
    keys = sum(p.numel() for n, p in drafter.named_parameters() if "k_proj" in n or "v_proj" in n)
    assert context_cost(config) == (drafter.fc.weight.numel() + keys) / block


def test_forward_equivalents_by_hand() -> None:
    sums = {"n_blocks": torch.tensor(10), "n_context": torch.tensor(100)}
    assert forward_equivalents(sums, 0.01) == 3 * 10 + 3 * 100 * 0.01
    revealed = {**sums, "n_reveal_forwards": torch.tensor(7)}
    assert forward_equivalents(revealed, 0.01) == 6 * 10 + 7 + 3 * 100 * 0.01


def test_a_window_pools_its_steps() -> None:
    window = Window()
    for top, bottom, right in (([6.0, 4.0], [2.0, 1.0], 3), ([0.0, 2.0], [4.0, 2.0], 1)):
        window.add(
            {
                "numerators": torch.tensor(top),
                "denominators": torch.tensor(bottom),
                "weights": torch.tensor([1.0, 0.5]),
                "slot_correct": torch.tensor([right, 0]),
                "slot_ce": torch.tensor([1.0, 2.0]),
                "slot_n": torch.tensor([4, 0]),
                "n_wrong": torch.tensor(5),
                "n_corrected": torch.tensor(1),
                "n_right": torch.tensor(0),
                "n_kept": torch.tensor(0),
            }
        )
    row = Window(window.sums).row()
    assert (row["loss_mask"], row["loss_flow"], row["loss"]) == (1.0, 2.0, 2.0)
    assert row["slot_accuracy"] == [0.5, None] and row["slot_loss"] == [0.25, None]
    assert (row["wrong_corrected"], row["n_wrong"]) == (0.2, 10)
    assert (row["right_kept"], row["n_right"]) == (None, 0)


def test_a_window_of_mask_only_has_no_reveal_columns() -> None:
    window = Window()
    one = torch.tensor([1.0])
    window.add({"numerators": one, "denominators": one, "weights": one})
    row = window.row()
    assert row["loss"] == 1.0
    names = ("loss_flow", "n_wrong", "n_right", "wrong_corrected", "right_kept", "slot_accuracy")
    assert all(row[name] is None for name in names)


def test_progress_prints_plain_lines_and_always_the_last() -> None:
    lines: list[str] = []
    progress = Progress("step", 50, 40, lines.append, every_s=1e9)
    for done in range(41, 51):
        progress.update(done, "loss 1.0")
    assert len(lines) == 2
    assert lines[0].startswith("step 41/50 | loss 1.0 | ") and lines[0].endswith(" left")
    assert lines[1].startswith("step 50/50") and lines[1].endswith("| 0:00 left")
    assert not any("\r" in line or "\n" in line for line in lines)


@pytest.mark.parametrize("objective", ["mask_only", "wrong_reveal"])
def test_activation_checkpointing_gives_the_same_gradients_in_less_memory(objective: str) -> None:
    """Bit for bit in fp32; layers that are wide against their input keep little of what they make."""
    target = tiny_target(0, dtype=torch.float32)
    found, peaks = [], []
    for checkpointing in (False, True):
        drafter = tiny_drafter(target, 1, num_hidden_layers=6)
        if checkpointing:
            drafter.activation_checkpointing_enable({"use_reentrant": False})
        model = TrainingStep(
            drafter, target_pieces(target), settings(objective=objective), compute_loss
        )
        batch = batch_of(random_source(drafter, 2, prompt=100, new=(40,)), 15, anchors_per_clip=20)

        def step(model: nn.Module = model, batch: FlowBatch = batch) -> None:
            model.zero_grad()
            gradient_step(model, [made(batch)], 5, Accelerator(cpu=True))

        step()
        peaks.append(traced(step).peak)
        found.append([p.grad for p in drafter.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks[1] < 0.5 * peaks[0]
