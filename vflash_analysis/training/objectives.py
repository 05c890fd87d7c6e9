"""Objectives of a block drafter: pure functions of a batch, no files and no global random state.

The masked block is the state of a discrete flow: all masks at t = 0, the target's own text at
t = 1. One training step scores two states of each block with the same labels:

    L0 = sum w_k CE(y_k) / sum w_k                  the all-mask state, the one that is deployed
    L1 = sum w_k m_k CE(y_k) / sum w_k m_k          the state after some slots were revealed
    L  = L0 + lambda L1                             w_k = exp(-(k - 1) / gamma)

Sums run over the supervised slots of the whole global batch; m_k is 1 on masked slots and
`revealed_weight` on revealed ones. Labels are always the target's text, so a right reveal is kept
and a wrong one is overwritten.

The arms share everything but the token written into the chosen slots. Which slots are chosen, and
when, always follows the drafter's own reveal rounds; afterwards `true_reveal` writes the label
there, `self_reveal` what the drafter wrote, and `wrong_reveal` the label, except where the drafter
was wrong: there it writes a sample from the drafter that is neither the label nor its argmax.
`mask_only` has no revealed state.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vflash_analysis.config import TrainSettings
from vflash_analysis.errors import InputError
from vflash_analysis.training.batches import FlowBatch, RevealDraws
from vflash_analysis.training.blocks import (
    Context,
    SlotScores,
    TargetPieces,
    block_hidden,
    project_context,
    score_slots,
    take_blocks,
)


class RevealedState(NamedTuple):
    """Slots after the reveal rounds; all (B, A, K).

    Attributes:
        revealed: bool, slots that were written.
        own: the drafter's own token at each revealed slot (0 elsewhere).
        wrong: a sample that is neither own nor label at each revealed slot, or None.
        n_forwards: int64 scalar, block forwards without gradient that the rounds took.
    """

    revealed: Tensor
    own: Tensor
    wrong: Tensor | None
    n_forwards: Tensor


class LossParts(NamedTuple):
    """A loss as sums, so that shards of a global batch add up.

    loss = sum_i weights[i] * numerators[i] / denominators[i], with numerators and denominators
    first summed over all micro-batches and processes.

    Attributes:
        numerators: (n_terms,) with gradient.
        denominators: (n_terms,) without.
        weights: (n_terms,) without.
        sums: additive facts for the log, each without gradient.
    """

    numerators: Tensor
    denominators: Tensor
    weights: Tensor
    sums: dict[str, Tensor]


def slot_weights(n_slots: int, gamma: float) -> Tensor:
    """(K,) float64 weights w_k = exp(-(k - 1) / gamma) of slots k = 1..K."""
    return torch.exp(-torch.arange(n_slots, dtype=torch.float64) / gamma)


def reveal_counts(draws: RevealDraws, supervised: Tensor) -> Tensor:
    """(B, A) int64 slots to reveal: Binomial(supervised slots, kappa(t) = t), clamped to 1..K - 1.

    A block never reveals more slots than it has supervised ones; a dead block reveals none.
    """
    hits = ((draws.slots < draws.times[..., None]) & supervised).sum(-1)
    n_slots = supervised.shape[-1]
    return torch.minimum(hits.clamp(1, max(1, n_slots - 1)), supervised.sum(-1))


def round_sizes(counts: Tensor, rounds: Tensor, max_rounds: int) -> Tensor:
    """(max_rounds, B, A) int64 slots to write in each round: ceil(n / R) until n are written."""
    per_round = torch.div(counts + rounds - 1, rounds.clamp(min=1), rounding_mode="floor")
    written = torch.zeros_like(counts)
    sizes = []
    for _ in range(max_rounds):
        size = torch.minimum(per_round, counts - written)
        sizes.append(size)
        written = written + size
    return torch.stack(sizes)


def choose_slots(scores: Tensor, candidates: Tensor, sizes: Tensor) -> Tensor:
    """(B, A, K) bool: the `sizes` candidates with the highest scores, ties to the lowest slot.

    Args:
        scores: (B, A, K) higher first.
        candidates: (B, A, K) bool, slots that still hold a mask and may be written.
        sizes: (B, A) int64, at most the number of candidates.
    """
    ranked = scores.masked_fill(~candidates, -math.inf)
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1)
    return candidates & (ranks < sizes[..., None])


def written_tokens(objective: str, labels: Tensor, own: Tensor, wrong: Tensor | None) -> Tensor:
    """(B, A, K) the token each arm writes into a revealed slot; the only place where arms differ.

    Raises:
        InputError: the objective has no revealed state.
    """
    if objective == "self_reveal":
        return own
    if objective == "true_reveal":
        return labels
    if objective == "wrong_reveal" and wrong is not None:
        return torch.where(own == labels, labels, wrong)
    raise InputError(
        f"objective: found {objective!r}, allowed: self_reveal, true_reveal, wrong_reveal"
    )


def flow_weight(settings: TrainSettings, step: int) -> float:
    """lambda at a 0-based step: 0 for `mask_only`, else ramped linearly over the first steps."""
    if settings.objective == "mask_only":
        return 0.0
    ramp_steps = settings.ramp_fraction * settings.steps
    ramp = 1.0 if ramp_steps <= 0 else min(1.0, (step + 1) / ramp_steps)
    return settings.lambda_flow * ramp


def counted_by_labels(settings: TrainSettings) -> bool:
    """Whether labels alone tell a loss's denominators: every supervised slot counts alike."""
    return settings.objective == "mask_only" or settings.revealed_weight == 1.0


@torch.no_grad()
def reveal(
    drafter: Any,
    batch: FlowBatch,
    context: Context,
    first: SlotScores,
    target: TargetPieces,
    settings: TrainSettings,
    *,
    uniforms: Tensor | None = None,
) -> RevealedState:
    """The drafter's own reveal rounds: each writes its current argmax into ceil(n / R) mask slots.

    Round 1 uses the scores of the all-mask forward; a later round runs a forward without gradient
    over the blocks that still have slots to write. Only supervised slots are written, and a slot
    is written once.

    Args:
        drafter: see `block_hidden`.
        batch: with draws.
        context: of `project_context`.
        first: scores of the all-mask state, with `sample` if `uniforms` is given.
        target: embedding, head, banned ids.
        settings: reveal order and maximum rounds.
        uniforms: (B, A, K) quantiles of wrong samples, taken when a slot is written.
    """
    assert batch.draws is not None
    counts = reveal_counts(batch.draws, batch.supervised)
    sizes = round_sizes(counts, batch.draws.rounds, settings.max_reveal_rounds)
    mask_id = drafter.config.mask_token_id
    revealed = torch.zeros_like(batch.supervised)
    own = torch.zeros_like(batch.labels)
    wrong = None if uniforms is None else torch.zeros_like(batch.labels)
    prediction, confidence, sample = first.prediction, first.confidence, first.sample
    n_forwards = counts.new_zeros(())
    for number, size in enumerate(sizes):
        if number > 0:
            busy = size > 0
            # At least one column, so that every process runs the same number of forwards.
            n_busy = max(1, int(busy.sum(-1).max()))
            n_forwards = n_forwards + busy.sum()
            # Blocks with work first; the rest of a clip's columns are padding and are not written.
            columns = busy.long().argsort(dim=-1, descending=True, stable=True)[:, :n_busy]
            part = take_blocks(batch, columns)
            index = columns[..., None].expand(*columns.shape, own.shape[-1])
            tokens = own.masked_fill(~revealed, mask_id).gather(1, index)
            noise = None if uniforms is None else uniforms.gather(1, index)
            hidden = block_hidden(drafter, part, context, tokens, target)
            scores = score_slots(hidden, part.labels, target, uniforms=noise)
            prediction = prediction.scatter(1, index, scores.prediction)
            confidence = confidence.scatter(1, index, scores.confidence)
            if sample is not None and scores.sample is not None:
                sample = sample.scatter(1, index, scores.sample)
        by = batch.draws.order if settings.reveal_order == "random" else confidence
        chosen = choose_slots(by, batch.supervised & ~revealed, size)
        own = torch.where(chosen, prediction, own)
        if wrong is not None and sample is not None:
            wrong = torch.where(chosen, sample, wrong)
        revealed = revealed | chosen
    return RevealedState(revealed, own, wrong, n_forwards)


def _term(scores: SlotScores, weights: Tensor, batch: FlowBatch) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies (with gradient) and the sum of weights."""
    losses = scores.cross_entropy.masked_fill(~batch.supervised, 0.0)
    weights = weights.to(losses.dtype)
    return (losses * weights).sum(), weights.sum().double()


def compute_loss(
    drafter: Any,
    batch: FlowBatch,
    target: TargetPieces,
    settings: TrainSettings,
    step: int,
    *,
    count_only: bool = False,
) -> LossParts:
    """The flow loss of one (micro-)batch as sums; see the module's formula.

    Args:
        drafter: has `config.mask_token_id`, `project`, `context_keys_values`, `forward_blocks`.
        batch: with reveal draws.
        target: embedding, head and banned ids; frozen.
        settings: objective and weights.
        step: 0-based, for the ramp of lambda.
        count_only: return the denominators alone, as cheaply as they can be known: from the labels,
            so that the batch needs no states, where `counted_by_labels`; else by the reveal
            rounds without gradient.
    """
    n_slots = batch.labels.shape[-1]
    supervised = batch.supervised
    slot_weight = slot_weights(n_slots, settings.gamma).to(batch.anchors.device)
    weights = slot_weight * supervised  # (B, A, K)
    lambda_now = flow_weight(settings, step)
    has_flow = settings.objective != "mask_only"
    term_weights = weights.new_tensor([1.0, lambda_now] if has_flow else [1.0])
    if count_only and counted_by_labels(settings):
        total = weights.sum()
        denominators = torch.stack([total, total]) if has_flow else total[None]
        return LossParts(torch.zeros_like(denominators), denominators, term_weights, {})

    context = project_context(drafter, batch)
    masks = torch.full_like(batch.labels, drafter.config.mask_token_id)
    needs_sample = settings.objective == "wrong_reveal"
    uniforms = batch.draws.samples if needs_sample and batch.draws is not None else None
    first = score_slots(
        block_hidden(drafter, batch, context, masks, target),
        batch.labels,
        target,
        uniforms=uniforms,
    )
    numerator, denominator = _term(first, weights, batch)
    live = supervised.any(-1).sum()
    sums = {
        "n_blocks": live,
        "n_context": batch.context_valid.sum(),
        "slot_n": supervised.sum((0, 1)),
        "slot_correct": ((first.prediction == batch.labels) & supervised).sum((0, 1)),
        "slot_ce": first.cross_entropy.detach().double().mul(supervised).sum((0, 1)),
    }
    if not has_flow:
        return LossParts(numerator[None], denominator[None], term_weights, sums)

    state = reveal(drafter, batch, context, first, target, settings, uniforms=uniforms)
    flow_weights = torch.where(state.revealed, weights * settings.revealed_weight, weights)
    if count_only:
        denominators = torch.stack([weights.sum(), flow_weights.sum()])
        return LossParts(torch.zeros_like(denominators), denominators, term_weights, {})
    written = written_tokens(settings.objective, batch.labels, state.own, state.wrong)
    tokens = torch.where(state.revealed, written, masks)
    second = score_slots(
        block_hidden(drafter, batch, context, tokens, target),
        batch.labels,
        target,
    )
    flow_numerator, flow_denominator = _term(second, flow_weights, batch)
    right = state.revealed & (tokens == batch.labels)
    wrong = state.revealed & ~right
    correct = second.prediction == batch.labels
    sums |= {
        "n_reveal_forwards": state.n_forwards,
        "n_revealed": state.revealed.sum(),
        "n_wrong": wrong.sum(),
        "n_right": right.sum(),
        "n_corrected": (wrong & correct).sum(),
        "n_kept": (right & correct).sum(),
    }
    return LossParts(
        torch.stack([numerator, flow_numerator]),
        torch.stack([denominator, flow_denominator]),
        term_weights,
        sums,
    )
