"""A drafter's forward over a batch of blocks, and the scores of its slots.

Both the loss and the evaluation go through here, with the positions and the visibility that
decoding has: a context token at its own position, a block at anchor .. anchor + K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vflash_analysis.model.drafter import visible_context
from vflash_analysis.model.target import Target
from vflash_analysis.shapes import LOGITS_BYTES
from vflash_analysis.training.batches import FlowBatch


@dataclass(frozen=True)
class TargetPieces:
    """What a drafter borrows from its target: frozen, and never part of the drafter.

    Attributes:
        embed: token ids (...) to embeddings (..., H).
        head: hidden states (..., H) to logits (..., V).
        banned_ids: (n,) int64, ids that are never drafted, hence never written into a slot.
        vocab_size: V, rows of the embedding and of the head.
        stop_ids: ids that end a text.
        dtype: what `head` takes.
        sha256: identity of the target.
        video_token_id: placeholder of video positions in prompts.
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    banned_ids: Tensor
    vocab_size: int
    stop_ids: frozenset[int] = frozenset()
    dtype: torch.dtype = torch.float32
    sha256: str = ""
    video_token_id: int = -1


def target_pieces(target: Target) -> TargetPieces:
    """The pieces of a loaded target."""
    return TargetPieces(
        embed=target.embed,
        head=target.head,
        banned_ids=target.banned_ids,
        vocab_size=target.vocab_size,
        stop_ids=target.stop_ids,
        dtype=target.dtype,
        sha256=target.source_sha256,
        video_token_id=target.video_token_id,
    )


class SlotScores(NamedTuple):
    """Per slot: cross-entropy, greedy choice, its log-probability, a wrong sample (or None)."""

    cross_entropy: Tensor
    prediction: Tensor
    confidence: Tensor
    sample: Tensor | None


def _score_chunk(
    hidden: Tensor, labels: Tensor, uniforms: Tensor | None, target: TargetPieces
) -> tuple[Tensor, ...]:
    """Scores of some rows: hidden (M, H), labels (M,), uniforms (M,) or None."""
    logits = target.head(hidden.to(target.dtype))
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        allowed = logits.detach().index_fill(-1, target.banned_ids, -math.inf)
        best, prediction = allowed.max(-1)
        confidence = best - allowed.logsumexp(-1)
        if uniforms is None:
            return cross_entropy, prediction, confidence
        shut = allowed.scatter(-1, torch.stack([prediction, labels], -1), -math.inf)
        cumulative = shut.softmax(-1).double().cumsum(-1)
        quantile = uniforms.double()[:, None] * cumulative[:, -1:]
        sample = (cumulative <= quantile).sum(-1)
    return cross_entropy, prediction, confidence, sample


def score_slots(
    hidden: Tensor,
    labels: Tensor,
    target: TargetPieces,
    *,
    uniforms: Tensor | None = None,
) -> SlotScores:
    """Cross-entropy and greedy choice of each slot, as many rows at a time as LOGITS_BYTES hold.

    Logits of a chunk are freed after it and made again in the backward pass, so memory is bounded
    whatever the rows and the vocabulary; the chunks are of like size.

    Args:
        hidden: (..., H) the drafter's last hidden states.
        labels: (...) int64.
        target: the head and the banned ids; cross-entropy runs over the whole vocabulary, the
            choice and its confidence over the allowed ids.
        uniforms: (...) quantiles; when given, `sample` is drawn from the drafter without the
            label, the argmax and the banned ids.
    """
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    noise = None if uniforms is None else uniforms.reshape(-1)
    n_rows = rows.shape[0]
    at_once = max(1, LOGITS_BYTES // (target.vocab_size * max(4, target.dtype.itemsize)))
    n_chunks = -(-n_rows // at_once)
    if n_chunks <= 1:
        parts = _score_chunk(rows, flat, noise, target)
    else:
        chunks = []
        size = -(-n_rows // n_chunks)
        for start in range(0, n_rows, size):
            cut = slice(start, start + size)
            chunk_noise = None if noise is None else noise[cut]
            chunks.append(
                checkpoint(
                    _score_chunk, rows[cut], flat[cut], chunk_noise, target, use_reentrant=False
                )
            )
        parts = tuple(torch.cat(column) for column in zip(*chunks, strict=True))
    shaped = [part.reshape(labels.shape) for part in parts]
    return SlotScores(shaped[0], shaped[1], shaped[2], shaped[3] if len(shaped) > 3 else None)


class Context(NamedTuple):
    """A batch's context as a drafter reads it, made once per step.

    Attributes:
        keys_values: each layer's keys and values of the projected states.
        dtype: of the drafter's weights.
    """

    keys_values: Any
    dtype: torch.dtype


def visible_rows(batch: FlowBatch) -> Tensor:
    """(B, A, C) bool: a block sees the valid context strictly before its anchor."""
    return visible_context(batch.context_positions, batch.anchors, batch.context_valid)


def project_context(drafter: Any, batch: FlowBatch) -> Context:
    """Projects the tapped states (B, C, n * H) to (B, C, H) and makes each layer's keys, values."""
    dtype = next(drafter.parameters()).dtype
    # Under autocast the projection runs in half precision anyway; at 25k tokens a copy is 1.4 GB.
    autocast = torch.is_autocast_enabled(batch.states.device.type)
    states = batch.states if autocast else batch.states.to(dtype)
    seen = visible_rows(batch).any(1)
    # Without padding every row is seen, and a copy of the states without the others is spared.
    hidden = drafter.project(states, keep=None if bool(seen.all()) else seen)
    return Context(drafter.context_keys_values(hidden, batch.context_positions), dtype)


def block_hidden(
    drafter: Any, batch: FlowBatch, context: Context, tokens: Tensor, target: TargetPieces
) -> Tensor:
    """One drafter forward over all blocks.

    Args:
        drafter: has `project`, `context_keys_values`, `forward_blocks`.
        batch: B clips, A anchors.
        context: of `project_context`.
        tokens: (B, A, K) what the slots hold: mask ids, or revealed tokens.
        target: the embedding.

    Returns:
        (B, A, K, H) last hidden states of slots 1..K; slot 0, the anchor, predicts nothing.
    """
    ids = torch.cat([batch.anchor_ids[..., None], tokens], -1)  # (B, A, K + 1)
    hidden = drafter.forward_blocks(
        target.embed(ids).to(context.dtype),
        context.keys_values,
        batch.block_positions,
        visible_rows(batch),
    )
    return hidden[..., 1:, :]


def take_blocks(batch: FlowBatch, columns: Tensor) -> FlowBatch:
    """The batch with only some of its blocks: columns (B, A') indices into A."""

    def take(value: Tensor) -> Tensor:
        index = columns.reshape(*columns.shape, *[1] * (value.dim() - 2))
        return value.gather(1, index.expand(*columns.shape, *value.shape[2:]))

    return FlowBatch(
        clip_ids=batch.clip_ids,
        states=batch.states,
        context_positions=batch.context_positions,
        context_valid=batch.context_valid,
        anchors=take(batch.anchors),
        anchor_ids=take(batch.anchor_ids),
        labels=take(batch.labels),
        supervised=take(batch.supervised),
    )
