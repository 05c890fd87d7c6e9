"""A long context without a mask: values, gradients and memory beside the masked path."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.memory import Traced, traced
from tests.tiny import tiny_drafter, tiny_target
from tests.training.toys import batch_of, random_source, settings
from vflash_analysis.model import block_attention
from vflash_analysis.model.attention import prefix_attention_with_lse
from vflash_analysis.model.block_attention import (
    _prefix_backward,
    _PrefixAndTail,
    attend_blocks,
    shared_prefix,
    view_blocks,
)
from vflash_analysis.training.batches import FlowBatch
from vflash_analysis.training.blocks import target_pieces
from vflash_analysis.training.objectives import compute_loss

TARGET = tiny_target(0, q_heads=6, kv_heads=2, max_positions=20_000)
PIECES = target_pieces(TARGET)


@pytest.fixture
def prefix_from(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets from how many shared rows on the prefix is read without a mask."""
    return lambda rows: monkeypatch.setattr(block_attention, "PREFIX_FROM", rows)


def random_blocks(seed: int, dtype: torch.dtype, **sizes: int) -> tuple[torch.Tensor, ...]:
    """queries, keys, values, context keys, context values, each with gradient; 7 heads a group."""
    clips, heads, rows, context = 2, 14, 5 * 4, sizes.get("context", 30)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shapes = [(heads, rows), (2, rows), (2, rows), (2, context), (2, context)]
    return tuple(random(clips, *shape, 8).requires_grad_() for shape in shapes)


def ragged(context: int) -> torch.Tensor:
    """(2, 5, context) visibility: blocks of rising anchors; the second clip's prompt is shorter."""
    first = torch.tensor([[12, 13, 17, 20, context], [9, 9, 11, 25, 26]])
    return torch.arange(context) < first[..., None]


def plain(tensors: tuple[torch.Tensor, ...], visible: torch.Tensor) -> torch.Tensor:
    """The softmax formula, every head with its own copy of the keys."""
    query, key, value, context_key, context_value = tensors
    own = torch.arange(5).repeat_interleave(4)
    own = (own[:, None] == own).expand(2, -1, -1)
    mask = torch.cat([visible.repeat_interleave(4, 1), own], -1)[:, None]
    keys = torch.cat([context_key, key], 2).repeat_interleave(7, 1)
    values = torch.cat([context_value, value], 2).repeat_interleave(7, 1)
    scores = query @ keys.transpose(-1, -2) * 0.3
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values).transpose(1, 2)


@pytest.mark.parametrize("max_rows", [4, 8, 99])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_both_paths_equal_the_formula_in_value_and_gradient(
    prefix_from: Any, max_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    visible = ragged(30)
    exact = random_blocks(0, torch.float64)
    if dtype == torch.bfloat16:  # what the rounded inputs give exactly
        exact = tuple(t.detach().to(dtype).double().requires_grad_() for t in exact)
    expected = plain(exact, visible)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    for rows, prefix in ((1, 9), (10, 0)):
        prefix_from(rows)
        tensors = tuple(t.detach().to(dtype).requires_grad_() for t in exact)
        view = view_blocks(visible, 4, max_rows, 7, dtype, 8)
        assert view.prefix == prefix and len(view.masks) == {4: 5, 8: 3, 99: 1}[max_rows]
        found = attend_blocks(*tensors, view, 0.3)
        assert found.dtype == dtype
        gradients = torch.autograd.grad((found * weight.to(dtype)).sum(), tensors)
        scale = [1.0, *(float(g.abs().max()) for g in wanted)]
        for a, b, size in zip(
            (found, *gradients), (expected.detach(), *wanted), scale, strict=True
        ):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * max(1.0, size))


def test_gradients_of_the_joined_softmax_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = [(6, 4), (9, 4), (9, 4), (5, 4), (5, 4)]
    tensors = [torch.randn(1, 2, *s, generator=generator).double().requires_grad_() for s in shapes]
    mask = torch.rand(1, 1, 6, 5, generator=generator) < 0.5
    mask[..., 0, :] = False  # a row that sees the prefix alone
    assert torch.autograd.gradcheck(lambda *t: _PrefixAndTail.apply(*t, mask, 0.4), tensors)


def test_shared_prefix_ends_at_the_first_row_that_some_block_misses() -> None:
    assert shared_prefix(ragged(30)) == 9
    visible = torch.ones(1, 3, 10, dtype=torch.bool)
    assert shared_prefix(visible) == 10
    visible[0, 1, 4] = False  # a row kept from one block, more seen after it
    assert shared_prefix(visible) == 4
    visible[0, 2, 0] = False
    assert shared_prefix(visible) == 0


@pytest.mark.parametrize(("context", "prefix"), [(2048, 0), (2100, 0), (2200, 2100)])
def test_short_contexts_stay_under_one_mask(context: int, prefix: int) -> None:
    """Pocket's contexts of some 200 rows never leave the masked path."""
    visible = torch.ones(1, 2, context, dtype=torch.bool)
    visible[..., min(2100, context - 100) :] = False
    view = view_blocks(visible, 4, 128, 7, torch.float32, 8)
    assert view.prefix == prefix
    assert view.masks[0].dtype == (torch.bool if prefix else torch.float32)
    assert view.masks[0].shape == (1, 1, 7 * 8, context - prefix + 8)


def step_of(context: int, anchors: int, clips: int = 1) -> FlowBatch:
    source = random_source(tiny_drafter(TARGET, 1), clips, prompt=context, new=(40,))
    return batch_of(source, 15, anchors_per_clip=anchors)


def loss_and_gradients(batch: FlowBatch, drafter: Any, **changes: Any) -> list[torch.Tensor]:
    drafter.zero_grad()
    parts = compute_loss(drafter, batch, PIECES, settings(**changes), 5)
    parts.numerators.sum().backward()
    return [parts.numerators.detach(), *(p.grad for p in drafter.parameters())]


def test_a_training_step_is_the_same_with_and_without_a_prefix(prefix_from: Any) -> None:
    batch = step_of(60, 8, clips=2)
    found = []
    for rows in (1, 1000):
        prefix_from(rows)
        found.append(loss_and_gradients(batch, tiny_drafter(TARGET, 1), objective="wrong_reveal"))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert not all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # two paths were run


def test_autocast_reaches_the_prefix(prefix_from: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix_from(1)
    seen: list[torch.dtype] = []
    real = block_attention.prefix_attention_with_lse

    def spy(query: torch.Tensor, *rest: Any) -> Any:
        seen.append(query.dtype)
        return real(query, *rest)

    monkeypatch.setattr(block_attention, "prefix_attention_with_lse", spy)
    tensors = random_blocks(3, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        view = view_blocks(ragged(30), 4, 99, 7, torch.float32, 8)
        out = attend_blocks(*tensors, view, 0.3)
    out.float().sum().backward()
    assert seen == [torch.bfloat16] and out.dtype == torch.bfloat16
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in tensors)


def trace_step(context: int, anchors: int) -> Traced:
    batch = step_of(context, anchors)
    drafter = tiny_drafter(TARGET, 1, num_hidden_layers=1)
    run = functools.partial(loss_and_gradients, batch, drafter, objective="mask_only")
    run()  # its rotary table is made once
    return traced(run)


def test_memory_of_a_step_grows_with_the_context_and_not_with_rows_times_context(
    prefix_from: Any,
) -> None:
    """Nothing is larger than the context's states, and what a block adds to the cost of a context
    row is the byte or two that say whether it sees it, not its 16 slots of masks or scores."""
    sizes = [(c, a) for c in (500, 1500) for a in (24, 39)]

    def cost_per_row(traces: list[Traced]) -> tuple[float, float]:
        few, many, few_longer, many_longer = (trace.peak for trace in traces)
        return (few_longer - few) / 1000, (many_longer - many - few_longer + few) / 1000 / 15

    prefix_from(256)
    traces = [trace_step(*size) for size in sizes]
    states = 96 * 8  # bytes of a context row
    assert traces[-1].largest <= 1540 * states
    per_row, per_block = cost_per_row(traces)
    assert per_row <= 6 * states and per_block <= 4
    prefix_from(10_000)
    traces = [trace_step(*size) for size in sizes]
    assert cost_per_row(traces)[1] >= 16 * 3 * 8  # the same under one mask: G fp64 rows a slot


@torch.no_grad()
def test_the_cuda_kernels_take_what_they_are_given() -> None:
    """Shapes and dtypes of both passes, by torch's own shape functions; no CUDA device is needed."""
    shapes = [(7 * 1024, 128), (25_000, 128), (25_000, 128)]
    with FakeTensorMode():
        tensors = [torch.empty(1, 4, *s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        out, lse = prefix_attention_with_lse(*tensors, 128**-0.5)
        assert out.shape == tensors[0].shape and out.dtype == torch.bfloat16
        assert lse.shape == out.shape[:-1] and lse.dtype == torch.float32
        gradients = _prefix_backward(torch.empty_like(out), *tensors, out, lse, 128**-0.5)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            assert gradient.device.type == "cuda"
            assert gradient.shape == tensor.shape and gradient.dtype == torch.bfloat16
