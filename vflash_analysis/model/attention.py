"""Attention of the text stack: grouped heads without copies of keys, exact masks, long prefixes.

Setting "vflash". Registered with Hugging Face, function and mask function together: a name without
a mask function would silently lose its masks. Three traps are avoided here. `is_causal` of torch's
SDPA is aligned to the top left, wrong for 16 queries on a long cache. With a mask of several rows
Hugging Face repeats the key/value heads. And a mask over 25k keys for a block of 16 is built for
15 columns that matter: a mask may here be narrower than the keys, it then covers the last ones.

Shapes: B batch, H query heads, H_kv key/value heads, G = H / H_kv, Q queries, K keys, D head size.
"""

import math
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vflash_analysis.errors import InputError

NAME = "vflash"  # the setting
# Hugging Face takes every name that contains "flash" for a FlashAttention package it must import.
HF_NAME = "vf_grouped"


def chain_mask(queries: int, keys: int, device: torch.device | str) -> torch.Tensor:
    """Causal mask aligned to the bottom right, True = visible: query i sees keys <= K - Q + i.

    Returns:
        (1, 1, Q, K) bool
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return mask.tril_(keys - queries)[None, None]


def fold_mask(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat the rows of a mask (B, 1, Q, K) for the G query heads folded into rows.

    Returns:
        (B, 1, G * Q, K), row g * Q + i being row i of `mask`
    """
    return mask if groups == 1 else mask.repeat(1, 1, groups, 1)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask as one added to the scores: 0 where visible, -inf elsewhere.

    SDPA makes this from a bool mask in every layer; made once it saves a fifth of a verify's
    attention on a CPU, and backward passes share it.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def merge_by_lse(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """Join attention over two disjoint sets of keys into attention over their union.

    out = (out_a exp(lse_a) + out_b exp(lse_b)) / (exp(lse_a) + exp(lse_b)), in a stable form.

    Args:
        out_a: (..., R, D) attention output over the first set.
        lse_a: (..., R) log of its softmax denominator; -inf where no key was visible.
        out_b: (..., R, D)
        lse_b: (..., R)

    Returns:
        (..., R, D) in the dtype of `out_a`; zero where neither set had a visible key.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    empty = torch.isneginf(lse)
    safe = lse.masked_fill(empty, 0.0)
    weight_a = torch.exp(lse_a - safe).unsqueeze(-1)
    weight_b = torch.exp(lse_b - safe).unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype)


def block_attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention over a few keys, with the log of the softmax denominator.

    Args:
        query: (B, H_kv, R, D)
        key: (B, H_kv, K, D)
        value: (B, H_kv, K, D)
        mask: broadcastable to (B, H_kv, R, K), bool, True = visible.
        scale: factor on the scores.

    Returns:
        output (B, H_kv, R, D) and lse (B, H_kv, R), both at least fp32; a row without a visible
        key gives 0 and -inf.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(-1, -2)).to(wide) * scale  # (B, H_kv, R, K)
    scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)  # (B, H_kv, R)
    safe = lse.masked_fill(torch.isneginf(lse), 0.0)
    weights = torch.exp(scores - safe.unsqueeze(-1))
    return torch.matmul(weights, value.to(wide)), lse


def prefix_attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unmasked attention over a long prefix by torch's flash kernel, with its lse.

    Args:
        query: (B, H_kv, R, D)
        key: (B, H_kv, K, D), K >= 1
        value: (B, H_kv, K, D)
        scale: factor on the scores.

    Returns:
        output (B, H_kv, R, D) and lse (B, H_kv, R)
    """
    if query.is_cuda:
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p=0.0, is_causal=False, scale=scale
        )
    else:
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p=0.0, is_causal=False, scale=scale
        )
    return result[0], result[1]


def prefix_and_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention where all keys but the last N are visible to all rows, without a mask over them.

    Args:
        query: (B, H_kv, R, D) folded rows.
        key: (B, H_kv, K, D)
        value: (B, H_kv, K, D)
        mask: (B or 1, 1, R, N) bool over the last N < K keys.
        scale: factor on the scores.

    Returns:
        (B, H_kv, R, D)
    """
    prefix = key.shape[2] - mask.shape[-1]
    out_a, lse_a = prefix_attention_with_lse(query, key[:, :, :prefix], value[:, :, :prefix], scale)
    out_b, lse_b = block_attention_with_lse(
        query, key[:, :, prefix:], value[:, :, prefix:], mask, scale
    )
    return merge_by_lse(out_a, lse_a, out_b, lse_b)


@torch.compiler.assume_constant_result
def _is_ampere(device: torch.device) -> bool:
    """Asked when a step is compiled, not by what is compiled."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def flash_kernel_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `prefix_attention_with_lse` runs: anything on a CPU; on CUDA half precision, head
    sizes in eights, Ampere or newer."""
    return device.type == "cpu" or (
        device.type == "cuda"
        and _is_ampere(device)
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 256
    )


def _flash_prefix_possible(query: torch.Tensor) -> bool:
    """The flash kernel over a prefix, where it is the fast one and no gradient is asked for."""
    return (
        query.is_cuda
        and not query.requires_grad
        and flash_kernel_takes(query.device, query.dtype, query.shape[-1])
    )


def _causal_square(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention with as many queries as keys, where SDPA's alignment is right."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or not query.is_cuda or query.dtype in (torch.float16, torch.bfloat16):
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=groups > 1
        )
    # CUDA has no grouped kernel in single precision and would form all scores: go head by head
    # through each group instead, every pass reading the keys as they are.
    parts = [
        scaled_dot_product_attention(query[:, g::groups], key, value, is_causal=True, scale=scale)
        for g in range(groups)
    ]
    return torch.stack(parts, dim=2).flatten(1, 2)


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention with native grouped heads: the G query heads of a group become rows.

    Args:
        query: (B, H, Q, D)
        key: (B, H_kv, K, D)
        value: (B, H_kv, K, D)
        mask: None, or bool (True = visible) or additive float, shape (B or 1, 1, Q or 1, N), or
            (B or 1, 1, G * Q, N) already folded by `fold_mask`. N = K; or N < K with a bool mask,
            which then covers the last N keys, every earlier key being visible.
        causal: with `mask` None: causal, aligned to the bottom right. Otherwise unused.
        scale: factor on the scores.

    Returns:
        (B, Q, H, D); a row with no visible key is zero.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    if queries == 1 and (mask is None or mask.shape[-1] == keys):
        # The hot path of autoregressive steps: nothing but views around one kernel.
        rows = query.reshape(batch, kv_heads, groups, head_dim)
        out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, 1, heads, head_dim)
    if mask is None and causal and queries == keys:
        return _causal_square(query, key, value, scale).transpose(1, 2)
    if mask is None and causal:
        mask = chain_mask(queries, queries, query.device)
    rows = query.reshape(batch, kv_heads, groups * queries, head_dim)
    if mask is not None and mask.shape[2] not in (1, groups * queries):
        mask = fold_mask(mask, groups)
    if mask is not None and mask.shape[-1] < keys:
        if _flash_prefix_possible(query):
            out = prefix_and_block(rows, key, value, mask, scale)
            return out.view(batch, heads, queries, head_dim).transpose(1, 2)
        mask = functional.pad(mask, (keys - mask.shape[-1], 0), value=True)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, queries, head_dim).transpose(1, 2)


def vflash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`grouped_attention` under the signature of Hugging Face's attention interface.

    Returns:
        (B, Q, H, D) and None (attention weights are never formed).

    Raises:
        ValueError: a feature that would change the result is asked for and not implemented.
    """
    for feature in ("softcap", "sliding_window", "position_bias", "s_aux"):
        if kwargs.get(feature) is not None:
            raise ValueError(f"attention '{NAME}' does not implement {feature}; use 'eager'")
    if dropout:
        raise ValueError(f"attention '{NAME}' is for frozen models, found dropout {dropout}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return grouped_attention(query, key, value, attention_mask, causal, scale), None


def vflash_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask builder registered beside `vflash_attention`: bool (B, 1, Q, K), True = visible.

    No mask only where `vflash_attention` needs none: one query or a square causal pass without
    padding. Hugging Face's own rule also skips it for a preallocated cache whose tail is empty,
    which would read the empty keys here.
    """
    allow_is_causal_skip = allow_is_causal_skip and (q_length == 1 or q_length == kv_length)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def backend_mask(
    attention: str,
    queries: int,
    keys: int,
    mask: torch.Tensor | None,
    groups: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """The mask of one decoder pass in the form its attention backend takes; None = none needed.

    Args:
        attention: "vflash", "sdpa" or "eager".
        queries: Q new rows.
        keys: K rows in the cache after the pass.
        mask: None for a causal chain; else bool, True = visible, (Q, Q) over the new rows with
            every cached row visible, or (Q, K) over all rows.
        groups: G query heads per key/value head.
        dtype: of the scores.
        device: of the result.

    Returns:
        4-D mask or None

    Raises:
        InputError: a mask of another shape.
    """
    if mask is not None and mask.shape not in ((queries, queries), (queries, keys)):
        raise InputError(
            f"mask: found shape {tuple(mask.shape)}, allowed: ({queries}, {queries}) or "
            f"({queries}, {keys})"
        )
    if mask is None and (queries == 1 or (queries == keys and attention != "eager")):
        return None
    if attention == NAME and device.type == "cuda":
        # Stays narrow: the cached rows are one unmasked flash pass (see `prefix_and_block`).
        block = chain_mask(queries, queries, device) if mask is None else mask[None, None]
        return fold_mask(block, groups)
    if mask is None:
        full = chain_mask(queries, keys, device)
    else:
        full = functional.pad(mask, (keys - mask.shape[1], 0), value=True)[None, None]
    if attention == NAME:
        return fold_mask(additive_mask(full, dtype), groups)
    if attention == "eager":
        # Eager attention adds its mask to the scores: a bool one would be silently wrong.
        zeros = torch.zeros(full.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(~full, torch.finfo(dtype).min)
    return full


def register_attention() -> None:
    """Register `HF_NAME` with Hugging Face, attention and mask function together (repeatable)."""
    ALL_ATTENTION_FUNCTIONS.register(HF_NAME, vflash_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(HF_NAME, vflash_mask)
