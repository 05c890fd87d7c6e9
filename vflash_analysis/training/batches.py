"""Batches of anchors: which clips a step sees, which anchors it draws, what they may look at.

Every random number comes from a generator seeded by (seed, epoch, clip id). A clip is visited once
per epoch, so that key names one visit: neither the order of clips, nor the size of a batch, nor a
resume can change what is drawn, and all objectives see the same anchors and reveal draws.

Positions: `input_ids[p]` is the token at position p and `states[p]` the target's tapped states
after reading it, so both share one index and nothing is ever shifted. The block of an anchor at
position a holds the anchor in slot 0 and predicts `input_ids[a + k]` in slot k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import context_rows

if TYPE_CHECKING:
    from vflash_analysis.training.continuations import ContinuationSource


@dataclass(frozen=True)
class Continuation:
    """The target's greedy text for one clip, with the states a drafter reads.

    Attributes:
        clip_id: identity of the clip.
        benchmark: suite name.
        split: split name.
        input_ids: (P + N,) int64, prompt and continuation.
        prompt_tokens: P.
        states: (P + N - 1, n * H), row p is the tapped states after reading token p; or no row.
    """

    clip_id: str
    benchmark: str
    split: str
    input_ids: Tensor
    prompt_tokens: int
    states: Tensor

    @property
    def new_tokens(self) -> int:
        """N, the tokens of the continuation."""
        return int(self.input_ids.shape[0]) - self.prompt_tokens


@dataclass(frozen=True)
class RevealDraws:
    """The random numbers of one visit (or, with a leading B, of a batch), K = block size - 1.

    Attributes:
        times: (A,) flow time t of each block, uniform on [0, 1).
        slots: (A, K) uniform, slot k counts as revealed when below t: a Binomial(K, t) count.
        rounds: (A,) int64, reveal rounds R, uniform on 1..max_reveal_rounds.
        order: (A, K) uniform, the order of reveals when it is random.
        samples: (A, K) uniform, quantiles of the wrong tokens of `wrong_reveal`.
    """

    times: Tensor
    slots: Tensor
    rounds: Tensor
    order: Tensor
    samples: Tensor


@dataclass(frozen=True)
class FlowBatch:
    """B clips with A anchors each and K = block size - 1 slots to predict per anchor.

    Attributes:
        clip_ids: B ids.
        states: (B, C, n * H) tapped states of the context, zero where not valid.
        context_positions: (B, C) int64 position of each context row.
        context_valid: (B, C) bool, false on padding.
        anchors: (B, A) int64 position of each anchor.
        anchor_ids: (B, A) int64 token at the anchor.
        labels: (B, A, K) int64, slot k - 1 holds the token at anchor + k (0 where unsupervised).
        supervised: (B, A, K) bool, false after the stop token, past the end and on padding.
        draws: reveal draws with a leading B, or None for evaluation.
    """

    clip_ids: tuple[str, ...]
    states: Tensor
    context_positions: Tensor
    context_valid: Tensor
    anchors: Tensor
    anchor_ids: Tensor
    labels: Tensor
    supervised: Tensor
    draws: RevealDraws | None = None

    @property
    def block_positions(self) -> Tensor:
        """(B, A, K + 1) positions anchor .. anchor + K, as in decoding."""
        n_slots = self.labels.shape[-1]
        offsets = torch.arange(n_slots + 1, device=self.anchors.device)
        return self.anchors[..., None] + offsets

    def to(self, device: torch.device | str) -> FlowBatch:
        """The batch on another device."""
        draws = self.draws
        if draws is not None:
            draws = RevealDraws(
                **{f.name: getattr(draws, f.name).to(device) for f in fields(draws)}
            )
        moved: dict[str, Any] = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, draws=draws, **moved)


def visit_generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by SHA-256 of the key's parts."""
    text = "\x1f".join(str(part) for part in key)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    return torch.Generator().manual_seed(seed)


def epoch_order(seed: int, epoch: int, n_items: int) -> list[int]:
    """The order in which an epoch visits items 0..n-1: a permutation given by (seed, epoch)."""
    generator = visit_generator("epoch", seed, epoch)
    return torch.randperm(n_items, generator=generator).tolist()


def step_visits(seed: int, step: int, clips_per_step: int, n_items: int) -> list[tuple[int, int]]:
    """(epoch, item) of each clip in a step; consecutive steps walk through the epochs' orders.

    Args:
        seed: training seed.
        step: 0-based step.
        clips_per_step: clips of the global batch.
        n_items: number of items, each visited once per epoch.
    """
    visits = []
    orders: dict[int, list[int]] = {}
    for number in range(step * clips_per_step, (step + 1) * clips_per_step):
        epoch, place = divmod(number, n_items)
        if epoch not in orders:
            orders[epoch] = epoch_order(seed, epoch, n_items)
        visits.append((epoch, orders[epoch][place]))
    return visits


def draw_anchors(n_candidates: int, n_anchors: int, generator: torch.Generator) -> Tensor:
    """Indices of anchors within the continuation: uniform, without replacement, rising.

    All candidates when there are no more than `n_anchors`. For one generator state, fewer anchors
    are a subset of more.
    """
    chosen = torch.randperm(n_candidates, generator=generator)[:n_anchors]
    return chosen.sort().values


def draw_reveals(
    n_anchors: int, n_slots: int, max_rounds: int, generator: torch.Generator
) -> RevealDraws:
    """The reveal draws of one visit (see `RevealDraws`)."""
    return RevealDraws(
        times=torch.rand(n_anchors, generator=generator),
        slots=torch.rand(n_anchors, n_slots, generator=generator),
        rounds=torch.randint(1, max_rounds + 1, (n_anchors,), generator=generator),
        order=torch.rand(n_anchors, n_slots, generator=generator),
        samples=torch.rand(n_anchors, n_slots, generator=generator),
    )


def block_labels(
    input_ids: Tensor, anchors: Tensor, n_slots: int, stop_ids: Collection[int] = ()
) -> tuple[Tensor, Tensor]:
    """Labels and supervision of blocks.

    Args:
        input_ids: (L,) tokens of prompt and continuation.
        anchors: (A,) positions.
        n_slots: K.
        stop_ids: tokens that end the text; the first one is supervised, what follows is not.

    Returns:
        labels (A, K): the token at anchor + k, no shift; 0 where not supervised.
        supervised (A, K) bool.
    """
    length = input_ids.shape[0]
    positions = anchors[:, None] + torch.arange(1, n_slots + 1)  # (A, K)
    supervised = positions < length
    labels = input_ids[positions.clamp(max=length - 1)]
    if stop_ids:
        stops = torch.isin(labels, torch.tensor(sorted(stop_ids))) & supervised
        anchor_stops = torch.isin(input_ids[anchors], torch.tensor(sorted(stop_ids)))
        stopped_before = stops.cumsum(-1) - stops.long() + anchor_stops[:, None].long()
        supervised &= stopped_before == 0
    return labels.masked_fill(~supervised, 0), supervised


def readable_context(
    item: Continuation, context: str | float, video_token_id: int
) -> Tensor | None:
    """(P + N - 1,) bool, the positions a drafter may read; None where it may read all.

    The setting thins video positions of the prompt (`model.drafter.context_rows`).
    """
    if context == "all":
        return None
    is_video = item.input_ids[: item.prompt_tokens] == video_token_id
    keep = torch.ones(item.states.shape[0], dtype=torch.bool)
    keep[: item.prompt_tokens] = False
    keep[context_rows(is_video, context)] = True
    return keep


def _pad_rows(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Stacks tensors that differ in their first size, padded by zeros to `length`.

    One tensor alone is not copied: at 25k tokens the states of a clip are 0.7 GB.
    """
    if len(tensors) == 1 and tensors[0].shape[0] == length:
        return tensors[0][None]
    out = tensors[0].new_zeros((len(tensors), length, *tensors[0].shape[1:]))
    for row, tensor in zip(out, tensors, strict=True):
        row[: tensor.shape[0]] = tensor
    return out


def make_batch(
    items: Sequence[Continuation],
    anchors: Sequence[Tensor],
    n_slots: int,
    *,
    draws: Sequence[RevealDraws] | None = None,
    kept: Sequence[Tensor | None] | None = None,
    stop_ids: Collection[int] = (),
) -> FlowBatch:
    """Pads clips into one batch.

    Args:
        items: B continuations; one without states has no context.
        anchors: per clip, (A_b,) indices within the continuation (0 is its first token).
        n_slots: K.
        draws: per clip, reveal draws of its A_b anchors.
        kept: per clip, (P + N - 1,) bool, the context positions a drafter may read, or None for
            all; kept rows keep their own positions.
        stop_ids: see `block_labels`.

    Clips with fewer anchors are padded by dead blocks: copies of their first anchor without
    supervision.
    """
    n_anchors = max(int(a.shape[0]) for a in anchors)
    states, positions, anchor_rows, id_rows, label_rows, supervised_rows = [], [], [], [], [], []
    for b, (item, indices) in enumerate(zip(items, anchors, strict=True)):
        at = indices + item.prompt_tokens
        end = int(at.max()) if len(item.states) else 0  # no block of this clip sees more
        if end > len(item.states) and len(item.states):
            raise InputError(
                f"clip {item.clip_id}: found {len(item.states)} rows of states, allowed: {end} or "
                "more, one for every position before its last anchor"
            )
        context = torch.arange(end)
        keep = None if kept is None else kept[b]
        if keep is not None:
            context = context[keep[:end]]
        states.append(item.states[:end] if keep is None else item.states[context])
        positions.append(context)
        labels, supervised = block_labels(item.input_ids, at, n_slots, stop_ids)
        n_dead = n_anchors - at.shape[0]
        at = torch.cat([at, at[:1].expand(n_dead)])
        anchor_rows.append(at)
        id_rows.append(item.input_ids[at])
        label_rows.append(labels)
        supervised_rows.append(supervised)
    longest = max(p.shape[0] for p in positions)
    valid = [torch.ones(p.shape[0], dtype=torch.bool) for p in positions]
    return FlowBatch(
        clip_ids=tuple(item.clip_id for item in items),
        states=_pad_rows(states, longest),
        context_positions=_pad_rows(positions, longest),
        context_valid=_pad_rows(valid, longest),
        anchors=torch.stack(anchor_rows),
        anchor_ids=torch.stack(id_rows),
        labels=_pad_rows(label_rows, n_anchors),
        supervised=_pad_rows(supervised_rows, n_anchors),
        draws=None if draws is None else _stack_draws(draws, n_anchors),
    )


def _stack_draws(draws: Sequence[RevealDraws], n_anchors: int) -> RevealDraws:
    stacked = {
        f.name: _pad_rows([getattr(d, f.name) for d in draws], n_anchors)
        for f in fields(RevealDraws)
    }
    return RevealDraws(**stacked)


def training_batch(
    source: ContinuationSource,
    visits: Sequence[tuple[int | str, int]],
    *,
    seed: int,
    anchors_per_clip: int,
    n_slots: int,
    max_rounds: int,
    context: str | float = "all",
    video_token_id: int = -1,
    stop_ids: Collection[int] = (),
    with_states: bool = True,
) -> FlowBatch:
    """The batch of some visits: (epoch, item) pairs as `step_visits` gives them.

    Args:
        source: continuations.
        visits: any label of an epoch, and an index into the source.
        seed: training seed.
        anchors_per_clip: A.
        n_slots: K.
        max_rounds: largest number of reveal rounds.
        context: what the drafter reads, see `readable_context`.
        video_token_id: the target's.
        stop_ids: see `block_labels`.
        with_states: False leaves the context empty: what is supervised is known from the texts.

    Raises:
        InputError: an item offers no anchor.
    """
    items, anchors, draws = [], [], []
    for epoch, index in visits:
        item = source[index] if with_states else source.text(index)
        if item.new_tokens < 2:
            raise InputError(
                f"clip {item.clip_id}: found {item.new_tokens} new tokens, allowed: 2 or more"
            )
        generator = visit_generator("visit", seed, epoch, item.clip_id)
        chosen = draw_anchors(item.new_tokens - 1, anchors_per_clip, generator)
        draws.append(draw_reveals(chosen.shape[0], n_slots, max_rounds, generator))
        items.append(item)
        anchors.append(chosen)
    kept = None
    if with_states:
        kept = [readable_context(item, context, video_token_id) for item in items]
    return make_batch(items, anchors, n_slots, draws=draws, kept=kept, stop_ids=stop_ids)
