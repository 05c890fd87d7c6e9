"""Attention of many blocks over one long context, for training: memory linear in the context.

The context rows before a clip's first anchor, the whole prompt, are visible to all of its blocks.
So they need no mask: they are one pass of torch's flash kernel, and only the rows from the first
anchor on and the blocks themselves, a few hundred keys, are scored under a mask. The two parts
share one softmax: forward they are joined by the log of its denominator, backward both take the
joined output and log-denominator, from which each part's gradient follows without the other's keys
(delta = sum dO O and P = exp(S - lse) are all that couples them; FlashAttention, arXiv 2205.14135,
section B.2).

A short context is cheaper under one mask: there no row is treated apart.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from vflash_analysis.model.attention import (
    additive_mask,
    block_attention_with_lse,
    flash_kernel_takes,
    fold_mask,
    grouped_attention,
    merge_by_lse,
    prefix_attention_with_lse,
)

PREFIX_FROM = 2048
"""Context rows that all blocks must share for these rows to be read without a mask."""


@dataclass(frozen=True)
class BlockView:
    """What the rows of many blocks see; made once per forward, the same in every layer.

    Attributes:
        prefix: leading context rows that every block sees and no mask covers; 0: none.
        rows: block rows R of a chunk; the last chunk may hold fewer.
        masks: of each chunk, folded for grouped heads (B, 1, G * R, C - prefix + R): bool where
            there is a prefix, else additive.
    """

    prefix: int
    rows: int
    masks: tuple[torch.Tensor, ...]


def shared_prefix(visible: torch.Tensor) -> int:
    """Leading context rows that every block of every clip sees, of visible (B, A, C) bool."""
    return int(visible.all(1).long().cumprod(-1).sum(-1).min())


def view_blocks(
    visible: torch.Tensor,
    slots: int,
    max_rows: int,
    groups: int,
    dtype: torch.dtype,
    head_dim: int,
) -> BlockView:
    """The masks of blocks that see some context and themselves, never another block.

    A mask holds R x (C - prefix + R) entries: clips of one batch should have prompts of like length.

    Args:
        visible: (B, A, C) bool, context rows that each block sees.
        slots: S rows of a block.
        max_rows: rows attended at once, at least one block.
        groups: G query heads per key/value head.
        dtype: of the queries; autocast's, where it is on, decides whether the kernel runs.
        head_dim: D.
    """
    per_chunk = max(1, max_rows // slots)
    prefix = 0
    device = visible.device
    autocast = torch.is_autocast_enabled(device.type)
    kernel_dtype = torch.get_autocast_dtype(device.type) if autocast else dtype
    if visible.shape[-1] > PREFIX_FROM and flash_kernel_takes(device, kernel_dtype, head_dim):
        shared = shared_prefix(visible)
        prefix = shared if shared >= PREFIX_FROM else 0
    masks = []
    for chunk in visible[..., prefix:].split(per_chunk, dim=1):
        batch, anchors = chunk.shape[:2]
        context = chunk.repeat_interleave(slots, dim=1)  # (B, a * S, C - prefix)
        block = torch.arange(anchors, device=device).repeat_interleave(slots)
        own = (block[:, None] == block[None, :]).expand(batch, -1, -1)  # (B, a * S, a * S)
        mask = torch.cat((context, own), dim=2)[:, None]
        masks.append(fold_mask(mask if prefix else additive_mask(mask, dtype), groups))
    return BlockView(prefix, per_chunk * slots, tuple(masks))


def attend_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    view: BlockView,
    scale: float,
) -> torch.Tensor:
    """Attention of block rows over their context and their own block.

    Args:
        queries: (B, H, N, D) of all blocks' rows.
        keys: (B, H_kv, N, D)
        values: (B, H_kv, N, D)
        context_keys: (B, H_kv, C, D)
        context_values: (B, H_kv, C, D)
        view: of `view_blocks`.
        scale: factor on the scores.

    Returns:
        (B, N, H, D)
    """
    prefix_keys = context_keys[:, :, : view.prefix]
    prefix_values = context_values[:, :, : view.prefix]
    if view.prefix:
        context_keys = context_keys[:, :, view.prefix :]
        context_values = context_values[:, :, view.prefix :]
    parts = []
    for number, mask in enumerate(view.masks):
        rows = slice(number * view.rows, (number + 1) * view.rows)
        query = queries[:, :, rows]
        key = torch.cat((context_keys, keys[:, :, rows]), dim=2)
        value = torch.cat((context_values, values[:, :, rows]), dim=2)
        if view.prefix:
            parts.append(
                _attend_with_prefix(query, prefix_keys, prefix_values, key, value, mask, scale)
            )
        else:
            parts.append(grouped_attention(query, key, value, mask, False, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_with_prefix(
    query: torch.Tensor,
    prefix_key: torch.Tensor,
    prefix_value: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention over prefix (B, H_kv, P, D) and masked tail (B, H_kv, T, D): (B, Q, H, D)."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, device = key.shape[1], query.device.type
    rows = query.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    tensors = [rows, prefix_key, prefix_value, key, value]
    if torch.is_autocast_enabled(device):  # it casts for torch's own attention, not for this one
        tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    with torch.autocast(device, enabled=False):
        out = _PrefixAndTail.apply(*tensors, mask, scale)
    return out.view(batch, heads, queries, head_dim).transpose(1, 2)


class _PrefixAndTail(torch.autograd.Function):
    """Softmax attention over prefix and tail keys, each part's scores being formed apart.

    The tail's scores (B, H_kv, R, T) are formed in fp32 or wider, forward and again backward; the
    prefix's never are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        prefix_key: torch.Tensor,
        prefix_value: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """All of `_attend_with_prefix`'s shapes, rows folded: query and result (B, H_kv, R, D)."""
        wide = torch.promote_types(query.dtype, torch.float32)
        out_a, lse_a = prefix_attention_with_lse(query, prefix_key, prefix_value, scale)
        out_b, lse_b = block_attention_with_lse(
            query.to(wide), key.to(wide), value.to(wide), mask, scale
        )
        out = merge_by_lse(out_a, lse_a, out_b, lse_b)
        lse = torch.logaddexp(lse_a, lse_b)  # finite: every row sees the prefix
        ctx.save_for_backward(query, prefix_key, prefix_value, key, value, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, prefix and tail; the flash kernel's own formula on both parts."""
        query, prefix_key, prefix_value, key, value, mask, out, lse = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        prefix = _prefix_backward(gradient, query, prefix_key, prefix_value, out, lse, ctx.scale)
        wide = lse.dtype
        rows, keys, wide_gradient = query.to(wide), key.to(wide), gradient.to(wide)
        scores = torch.matmul(rows, keys.transpose(-1, -2)).mul_(ctx.scale)  # (B, H_kv, R, T)
        weights = scores.masked_fill_(~mask, -math.inf).sub_(lse.unsqueeze(-1)).exp_()
        value_gradient = torch.matmul(weights.transpose(-1, -2), wide_gradient)
        delta = (wide_gradient * out.to(wide)).sum(-1, keepdim=True)
        slope = torch.matmul(wide_gradient, value.to(wide).transpose(-1, -2)).sub_(delta)
        slope = slope.mul_(weights).mul_(ctx.scale)
        query_gradient = prefix[0] + torch.matmul(slope, keys).to(query.dtype)
        key_gradient = torch.matmul(slope.transpose(-1, -2), rows).to(key.dtype)
        tail = (key_gradient, value_gradient.to(value.dtype))
        return query_gradient, prefix[1], prefix[2], *tail, None, None


def _prefix_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The flash kernel's backward pass with the output and log-denominator over all keys."""
    if not query.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, False, scale=scale
        )
    unused = torch.empty(0, dtype=torch.int64, device=query.device)  # random state of dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse, None, None, query.shape[2], key.shape[2],
        0.0, False, unused, unused, scale=scale,
    )  # fmt: skip
