"""What happens inside the target during one prefill, without keeping it: attention, similarity.

    seen = watched_prefill(target, input_ids, pixel_values, kinds, cache, queries)

At 25k tokens of LLaVA-OneVision-7B the attention weights of a layer would be 70 GB and the states
of all layers 5.2 GB. Here weights exist for the few query rows asked for, some heads at a time, and
of the states only sums of cosines and the rows of text stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vflash_analysis.model.attention import vflash_attention, vflash_mask
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.frozen import Prefill, Target
from vflash_analysis.model.positions import KIND_NAMES, VISUAL

WATCHED = "vflash_watched"
ROWS_AT_ONCE = 2048  # whose states are in single precision at a time: 60 MB of a 7B's

Observe = Callable[[int, Tensor, Tensor, float], None]


@dataclass(frozen=True)
class Watched:
    """What one prefill showed.

    Attributes:
        prefill: its result; the cache holds the prompt.
        masses: (L, n, heads, 3) attention of each query on the positions of each kind, summed over
            them; the kinds as in `positions`, 1 in all.
        step_cosines: (L, 2) sums over video's and over all other positions of the cosine of a
            position's state before and after the layer.
        input_cosines: (L, 2) the same of its embedding and its state after the layer.
        text_rows: (T,) the positions that are not video.
        text_states: (L, T, H) their states before each layer.
    """

    prefill: Prefill
    masses: Tensor
    step_cosines: Tensor
    input_cosines: Tensor
    text_rows: Tensor
    text_states: Tensor


def attention_masses(query: Tensor, key: Tensor, scale: float, kinds: Tensor, n: int) -> Tensor:
    """How much one query attends to each kind of position: softmax(q K^T scale), summed by kind.

    Key head by key head, in single precision at least.

    Args:
        query: (H, D) one row, rotated.
        key: (H_kv, K, D) the rows it sees, its own included.
        scale: factor on the scores.
        kinds: (K,) int64 in 0..n - 1.
        n: kinds.

    Returns:
        (H, n), each row's sum is 1.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    parts = []
    for rows, keys in zip(query.to(wide).chunk(len(key)), key, strict=True):
        weights = (rows @ keys.to(wide).T * scale).softmax(-1)  # (G, K)
        parts.append(weights.new_zeros(len(rows), n).index_add_(1, kinds, weights))
    return torch.cat(parts)


def cosines(before: Tensor, after: Tensor) -> Tensor:
    """(P,) cosine of two states (P, H) at each position, some rows at a time."""
    wide = torch.promote_types(before.dtype, torch.float32)
    return torch.cat(
        [
            functional.cosine_similarity(a.to(wide), b.to(wide), dim=-1)
            for a, b in zip(before.split(ROWS_AT_ONCE), after.split(ROWS_AT_ONCE), strict=True)
        ]
    )


@contextmanager
def watched_attention(text_model: Any, observe: Observe) -> Iterator[None]:
    """Shows every layer's rotated queries and its keys to `observe` as they are attended to.

    Whatever the target's attention, passes inside run on ours, through Hugging Face's interface.

    Args:
        text_model: the decoder.
        observe: takes a layer's number, queries (H, Q, D), keys (H_kv, K, D) and the scale.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        observe(module.layer_idx, query[0], key[0], scale)
        return vflash_attention(module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register(WATCHED, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(WATCHED, vflash_mask)
    config = text_model.config
    before = config._attn_implementation
    config._attn_implementation = WATCHED
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def watched_layers(
    text_model: Any, observe: Callable[[int, Tensor, Tensor], None]
) -> Iterator[None]:
    """Shows every layer's number, input (P, H) and output (P, H) to `observe`."""

    def hook_of(layer_id: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, options: Any, output: Any) -> None:
            before = args[0] if args else options["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            observe(layer_id, before[0], after[0])

        return hook

    handles = [
        layer.register_forward_hook(hook_of(layer_id), with_kwargs=True)
        for layer_id, layer in enumerate(text_model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def watched_prefill(
    target: Target,
    input_ids: Tensor,
    pixel_values: Tensor | None,
    kinds: Tensor,
    cache: KVCache,
    queries: Sequence[int],
) -> Watched:
    """An ordinary prefill, watched.

    Args:
        target: the target.
        input_ids: (P,) the prompt.
        pixel_values: of the clip.
        kinds: (P,) from `positions.prompt_kinds`.
        cache: empty; filled as `Target.prefill` does.
        queries: the rows whose attention is wanted, each over itself and what stands before it.
    """
    visual = kinds == VISUAL
    text_rows = (~visual).nonzero()[:, 0]
    masses: list[list[Tensor]] = []
    steps: list[Tensor] = []
    inputs: list[Tensor] = []
    states: list[Tensor] = []
    embedded: list[Tensor] = []

    def see_attention(layer_id: int, query: Tensor, key: Tensor, scale: float) -> None:
        seen = [
            attention_masses(
                query[:, row], key[:, : row + 1], scale, kinds[: row + 1], len(KIND_NAMES)
            )
            for row in queries
        ]
        masses.append(seen)

    def see_states(layer_id: int, before: Tensor, after: Tensor) -> None:
        if not embedded:
            embedded.append(before)
        states.append(before[text_rows])
        for kept, first in ((steps, before), (inputs, embedded[0])):
            cosine = cosines(first, after)
            kept.append(torch.stack([cosine[visual].sum(), cosine[~visual].sum()]))

    with (
        watched_attention(target.text_model, see_attention),
        watched_layers(target.text_model, see_states),
    ):
        prefill = target.prefill(input_ids, pixel_values, cache)
    return Watched(
        prefill,
        torch.stack([torch.stack(seen) for seen in masses]),
        torch.stack(steps),
        torch.stack(inputs),
        text_rows,
        torch.stack(states),
    )
