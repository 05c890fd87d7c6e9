"""A drafter at every anchor of the target's fixed greedy texts: the paired comparison of drafters.

For each anchor the drafter fills one block, teacher-forced, and each slot is compared with the
text. No decoding is run, so two drafters are scored at exactly the same anchors, and a whole text
is one batch. Variants ask other questions of the same anchors: some slots revealed with their true
token, several drafter forwards per block, or a context that is zeroed or another clip's.

    rows = evaluate_anchors(drafter, target_pieces(target), continuations, facts)
    write_records("anchors.parquet", rows, ANCHORS)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vflash_analysis.errors import InputError
from vflash_analysis.records import blank_row
from vflash_analysis.schemas import ANCHORS
from vflash_analysis.training.batches import (
    Continuation,
    FlowBatch,
    make_batch,
    readable_context,
    visit_generator,
)
from vflash_analysis.training.blocks import (
    Context,
    TargetPieces,
    block_hidden,
    project_context,
    score_slots,
)
from vflash_analysis.training.continuations import ContinuationSource
from vflash_analysis.training.objectives import choose_slots
from vflash_analysis.training.progress import Progress

TRAINING_FACTS = (
    "objective",
    "train_seed",
    "steps",
    "training_clips",
    "forward_equivalents",
    "revealed_weight",
    "anchors_per_clip",
)


@dataclass(frozen=True)
class AnchorSetting:
    """One way of drafting at an anchor.

    Attributes:
        revealed: slots that hold their true token, drawn per anchor; only full blocks are scored.
            The slots of a smaller number are among those of a larger one.
        rounds: drafter forwards R; after forward r the most confident slots are written until
            ceil(K r / R) are, and the last forward's greedy choice is the draft.
        context: "own" states; "zeroed"; "shuffled", those of another clip at the same positions.
    """

    revealed: int = 0
    rounds: int = 1
    context: Literal["own", "zeroed", "shuffled"] = "own"

    @property
    def name(self) -> str:
        """The `setting` column: "" for one forward from masks over the own context."""
        parts = [
            f"revealed={self.revealed}" if self.revealed else "",
            f"rounds={self.rounds}" if self.rounds > 1 else "",
            f"context={self.context}" if self.context != "own" else "",
        ]
        return ",".join(part for part in parts if part)


SETTINGS = (
    AnchorSetting(),  # as deployed
    *(AnchorSetting(revealed=n) for n in (4, 8, 12)),
    AnchorSetting(rounds=2),
    AnchorSetting(context="zeroed"),
    AnchorSetting(context="shuffled"),
)


def drafter_facts(drafter: Any, drafter_sha256: str, variant: str = "") -> dict[str, Any]:
    """Identity columns of a trained drafter, from the training facts in its config.

    Args:
        drafter: a loaded drafter.
        drafter_sha256: of its folder.
        variant: the one setting in which it differs from its profile's, see ANCHORS.

    Raises:
        InputError: the config holds no training facts.
    """
    training = drafter.config.training or {}
    missing = [name for name in TRAINING_FACTS if name not in training]
    if missing:
        raise InputError(f"drafter config.training: found no {', '.join(missing)}")
    return {
        "target_sha256": drafter.config.target_sha256,
        "drafter_sha256": drafter_sha256,
        **{name: training[name] for name in TRAINING_FACTS},
        "variant": variant,
    }


def other_clips(n_clips: int, seed: int) -> list[int]:
    """For each clip another one: a random cycle through all clips, given by the seed.

    Raises:
        InputError: fewer than two clips.
    """
    if n_clips < 2:
        raise InputError(f"shuffled context: found {n_clips} clips, allowed: 2 or more")
    order = torch.randperm(n_clips, generator=visit_generator("shuffle", seed)).tolist()
    partner = [0] * n_clips
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        partner[here] = there
    return partner


def with_context_of(item: Continuation, other: Continuation) -> tuple[Continuation, Tensor]:
    """`item` over another clip's states at the same positions, and the positions they cover.

    Returns:
        The continuation and a bool mask (P + N - 1,), false where the other text is too short.
    """
    covered = torch.arange(item.states.shape[0]) < other.states.shape[0]
    states = torch.zeros_like(item.states)
    states[covered] = other.states[: item.states.shape[0]]
    return dataclasses.replace(item, states=states), covered


def revealed_slots(batch: FlowBatch, n_revealed: int, seed: int) -> Tensor:
    """(B, A, K) bool: random slots that show their true token, by (seed, clip); full blocks only."""
    n_anchors, n_slots = batch.labels.shape[1:]
    ranks = torch.stack(
        [
            torch.rand(n_anchors, n_slots, generator=visit_generator("revealed", seed, clip))
            .argsort(-1)
            .argsort(-1)
            for clip in batch.clip_ids
        ]
    ).to(batch.labels.device)
    return (ranks < n_revealed) & batch.supervised.all(-1, keepdim=True)


@torch.no_grad()
def draft_blocks(
    drafter: Any,
    batch: FlowBatch,
    context: Context,
    target: TargetPieces,
    *,
    rounds: int = 1,
    shown: Tensor | None = None,
) -> Tensor:
    """The drafter's tokens for every slot.

    Args:
        drafter: see `blocks.block_hidden`.
        batch: B clips, A anchors.
        context: of `project_context`.
        target: embedding, head, banned ids.
        rounds: drafter forwards; between them all K slots may be written, since decoding does not
            know where a text ends.
        shown: (B, A, K) bool, slots that hold their label from the start.

    Returns:
        (B, A, K) int64, greedy choice of the last forward.
    """
    n_slots = batch.labels.shape[-1]
    filled = torch.zeros_like(batch.supervised) if shown is None else shown
    tokens = batch.labels.masked_fill(~filled, drafter.config.mask_token_id)
    prediction = tokens
    for number in range(1, rounds + 1):
        hidden = block_hidden(drafter, batch, context, tokens, target)
        scores = score_slots(hidden, batch.labels, target)
        prediction = scores.prediction
        if number < rounds:
            goal = -(-n_slots * number // rounds)  # ceil
            sizes = (goal - filled.sum(-1)).clamp(min=0)
            chosen = choose_slots(scores.confidence, ~filled, sizes)
            tokens = torch.where(chosen, prediction, tokens)
            filled = filled | chosen
    return prediction


def _batch(
    items: Sequence[Continuation],
    others: Sequence[Continuation],
    mode: str,
    drafter: Any,
    target: TargetPieces,
) -> FlowBatch:
    """All anchors of some clips over one kind of context."""
    kept = [readable_context(i, drafter.config.context, target.video_token_id) for i in items]
    if mode == "zeroed":
        items = [dataclasses.replace(i, states=torch.zeros_like(i.states)) for i in items]
    elif mode == "shuffled":
        swapped = [with_context_of(i, o) for i, o in zip(items, others, strict=True)]
        items = [item for item, _ in swapped]
        kept = [c if k is None else c & k for k, (_, c) in zip(kept, swapped, strict=True)]
    anchors = [torch.arange(item.new_tokens - 1) for item in items]
    n_slots = drafter.config.block_size - 1
    return make_batch(items, anchors, n_slots, kept=kept, stop_ids=target.stop_ids)


@torch.no_grad()
def evaluate_anchors(
    drafter: Any,
    target: TargetPieces,
    data: ContinuationSource,
    facts: Mapping[str, Any],
    *,
    settings: Sequence[AnchorSetting] = SETTINGS,
    clips_per_batch: int = 4,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Scores a drafter at every anchor of the given texts.

    Args:
        drafter: a trained drafter.
        target: embedding, head, banned and stop ids.
        data: continuations; texts of one token have no anchor.
        facts: identity columns, see `drafter_facts`.
        settings: variants, each scored at the same anchors.
        clips_per_batch: clips per forward; does not change results.
        seed: of revealed slots and of the other clips.
        log: prints one line.

    Returns:
        ANCHORS rows by clip, setting and anchor. `slot_match` says for each of the `n_slots` slots
        before the text ends whether the drafter's choice is the text's token, None for a revealed
        slot; `n_accepted` counts the leading slots that match, a revealed one counting as matched.
    """
    device = next(drafter.parameters()).device
    chosen = [i for i, count in enumerate(data.anchor_counts()) if count > 0]
    if len(chosen) < 2 and any(setting.context == "shuffled" for setting in settings):
        log(f"another clip's context: skipped, found {len(chosen)} clips with a text, 2 are needed")
        settings = [setting for setting in settings if setting.context != "shuffled"]
    modes = sorted({setting.context for setting in settings})
    partner = other_clips(len(chosen), seed) if "shuffled" in modes else list(range(len(chosen)))
    progress = Progress("clip", len(chosen), log=log)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(chosen), clips_per_batch):
        places = range(start, min(start + clips_per_batch, len(chosen)))
        items = [data[chosen[place]] for place in places]
        needs_others = "shuffled" in modes
        others = [data[chosen[partner[place]]] for place in places] if needs_others else items
        found: list[list[dict[str, Any]]] = [[] for _ in items]
        for mode in modes:
            batch = _batch(items, others, mode, drafter, target).to(device)
            context = project_context(drafter, batch)
            for setting in settings:
                if setting.context != mode:
                    continue
                shown = revealed_slots(batch, setting.revealed, seed)
                tokens = draft_blocks(
                    drafter, batch, context, target, rounds=setting.rounds, shown=shown
                )
                for b, item in enumerate(items):
                    found[b] += _rows(item, batch, b, tokens, shown, setting, facts)
        for clip_rows in found:
            rows += clip_rows
        progress.update(places[-1] + 1)
    return rows


def _rows(
    item: Continuation,
    batch: FlowBatch,
    b: int,
    tokens: Tensor,
    shown: Tensor,
    setting: AnchorSetting,
    facts: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """ANCHORS rows of clip b of a batch."""
    match = ((tokens[b] == batch.labels[b]) | shown[b]) & batch.supervised[b]  # (A, K)
    n_accepted = match.long().cumprod(-1).sum(-1).tolist()
    n_slots = batch.supervised[b].sum(-1).tolist()
    matches, hidden = match.tolist(), shown[b].tolist()
    rows = []
    for index in range(item.new_tokens - 1):
        count = n_slots[index]
        partial_block = setting.revealed > 0 and count < match.shape[-1]
        if count == 0 or partial_block:
            continue
        rows.append(
            {
                **blank_row(ANCHORS),
                **facts,
                "setting": setting.name,
                "clip_id": item.clip_id,
                "benchmark": item.benchmark,
                "split": item.split,
                "anchor_index": index,
                "n_slots": count,
                "n_accepted": n_accepted[index],
                "slot_match": [
                    None if hidden[index][k] else matches[index][k] for k in range(count)
                ],
            }
        )
    return rows
