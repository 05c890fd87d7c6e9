"""Block drafting with a VFlash drafter: `chain` and `tree60` are one drafter in two shapes.

A cycle costs one drafter forward over a block of 16 slots: the anchor and 15 masks. Before it, the
target states of what the last cycle committed (previous anchor and accepted drafts, never the new
anchor) join the drafter's cache; after it, the block's own rows leave again. The chain takes the
best token of every slot, the tree the most probable prefixes of all slots together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.methods.base import Entry, Method, Prompt, Proposal, take_options
from vflash_analysis.decoding.timing import TREE, Timer
from vflash_analysis.decoding.tree import chain_parents, grow_tree, rank_slots
from vflash_analysis.errors import InputError
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.compiled import DraftStep
from vflash_analysis.model.drafter import (
    VFlashConfig,
    VFlashDrafter,
    context_rows,
    drafter_cache,
    load_drafter,
)
from vflash_analysis.model.target import Target
from vflash_analysis.schemas import BLOCK_SIZE, TREE_NODES


@dataclass(frozen=True)
class BlockOptions:
    """How a block becomes draft tokens.

    Attributes:
        tree_nodes: nodes of the tree, the anchor not counted; 0 drafts a chain.
        spine_first: the tree takes the whole chain first, so it accepts at least the chain.
        draft_rounds: R drafter forwards per block; after forward r < R the most confident slots are
            revealed until ceil((block_size - 1) r / R) are, and stay; the last forward drafts.
        context: prompt positions the drafter reads (see `context_rows`); None: as it was trained.
        block_size: slots, 2..16; None: as it was trained.
        ban_special_ids: placeholders, the mask and rows beyond the tokenizer are never drafted.
    """

    tree_nodes: int = 0
    spine_first: bool = False
    draft_rounds: int = 1
    context: str | float | None = None
    block_size: int | None = None
    ban_special_ids: bool = True

    @property
    def label(self) -> str:
        """The `setting` column: what differs from the method's default, "" for nothing."""
        parts = [f"nodes={self.tree_nodes}"] if self.tree_nodes not in (0, TREE_NODES) else []
        parts += ["spine_first"] if self.spine_first and self.tree_nodes else []
        parts += [f"rounds={self.draft_rounds}"] if self.draft_rounds != 1 else []
        parts += [f"context={self.context}"] if self.context is not None else []
        parts += [f"block={self.block_size}"] if self.block_size is not None else []
        parts += ["unbanned"] if not self.ban_special_ids else []
        return ",".join(parts)


def reveal_most_confident(
    scores: torch.Tensor, revealed: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose slots to reveal until `count` are: the most confident ones still masked.

    Args:
        scores: (S, V) the drafter's scores; confidence is the probability of the best token, equal
            ones going to the earliest slot.
        revealed: (S,) bool, slots already revealed.
        count: slots revealed in all afterwards.

    Returns:
        the slots to reveal now (n,), in no particular order, and their best tokens (n,).
    """
    confidence = scores.max(-1).values - scores.logsumexp(-1)  # (S,)
    confidence = confidence.masked_fill(revealed, float("-inf"))
    wanted = max(count - int(revealed.sum()), 0)
    slots = confidence.sort(descending=True, stable=True).indices[:wanted]
    return slots, scores[slots].argmax(-1)


class BlockDrafting:
    """One drafter forward per cycle, verified as a chain or as a tree."""

    def __init__(
        self, name: str, target: Target, drafter: VFlashDrafter, options: BlockOptions
    ) -> None:
        """
        Args:
            name: the `method` column.
            target: supplies embedding, head and the ids that are never drafted.
            drafter: trained for this target.
            options: shape and settings.

        Raises:
            InputError: block size outside 2..16, or more rounds than slots.
        """
        self.name, self.setting = name, options.label
        self._target, self._drafter, self._options = target, drafter, options
        config = drafter.config
        self._block_size: int = options.block_size or config.block_size
        if not 2 <= self._block_size <= BLOCK_SIZE:
            raise InputError(f"block: found {self._block_size}, allowed is 2 to {BLOCK_SIZE}")
        self.max_depth = self._block_size - 1
        if not 1 <= options.draft_rounds <= self.max_depth:
            raise InputError(
                f"draft_rounds: found {options.draft_rounds}, allowed is 1 to {self.max_depth}"
            )
        self.max_draft_tokens = options.tree_nodes or self.max_depth
        self.tap_layer_ids = tuple(config.target_layer_ids)
        self._context = config.context if options.context is None else options.context
        self._blank = torch.full((self._block_size,), config.mask_token_id, device=target.device)
        self._cache: KVCache | None = None
        self._pending: torch.Tensor | None = None  # (m, n * H) committed, not yet in the cache
        self._step: DraftStep | None = None  # of a compiled target

    def start(self, prompt: Prompt, timer: Timer) -> float:
        """Projects the prompt's tapped states into a fresh drafter cache."""
        if prompt.tapped is None:
            raise InputError(f"{self.name}: the prefill kept no tapped states")
        tapped = prompt.tapped
        positions = torch.arange(len(prompt.input_ids), device=self._target.device)
        if self._context != "all":
            positions = context_rows(prompt.input_ids == self._target.video_token_id, self._context)
            tapped = tapped[positions]
        if self._target.compiled is not None:
            cache = self._compiled_cache(len(positions), prompt.max_new_tokens)
            timer.start()  # compiling is no part of decoding
        else:
            capacity = len(positions) + prompt.max_new_tokens + self._block_size
            self._cache = None  # frees the last text's first
            cache = drafter_cache(self._drafter, capacity)
        self._cache, self._pending = cache, None
        self._drafter.append_context(tapped[None], positions[None], cache)
        return timer.lap("draft_s")

    def _compiled_cache(self, context_rows: int, max_new_tokens: int) -> KVCache:
        """The empty cache of the compiled step, which is made anew for a text of another size."""
        if self._step is None or not self._step.fits(context_rows, max_new_tokens):
            self._step = self._cache = None  # frees the memory first
            self._step = DraftStep(
                self._target,
                self._drafter,
                context_rows,
                max_new_tokens,
                self._block_size,
                self._target.banned_ids if self._options.ban_special_ids else None,
            )
        self._step.cache.clear()  # hidden rows have weight 0, but 0 x NaN is NaN
        return self._step.cache

    def _forward(self, block_ids: torch.Tensor, position: int) -> torch.Tensor:
        """One drafter forward: block ids (B,) to fp32 scores (B - 1, V) of slots 1.. ."""
        assert self._cache is not None
        if self._step is not None:
            scores = self._step(block_ids, self._pending, position)
            self._pending = None
            return scores
        new = 0 if self._pending is None else len(self._pending)
        positions = torch.arange(
            position - new, position + self._block_size, device=self._target.device
        )
        output = self._drafter(
            noise_embeds=self._target.embed(block_ids)[None],  # (1, B, H)
            context_hidden_states=None if self._pending is None else self._pending[None],
            position_ids=positions[None],
            cache=self._cache,
        )
        self._pending = None
        self._cache.drop(self._block_size)
        scores = self._target.head(output.last_hidden_state[0, 1:]).float()  # (B - 1, V)
        if self._options.ban_special_ids:
            scores.index_fill_(-1, self._target.banned_ids, float("-inf"))
        return scores

    def _draft(self, anchor: int, position: int) -> torch.Tensor:
        """Scores (B - 1, V) of the last of R forwards."""
        rounds = self._options.draft_rounds
        block_ids = self._blank.clone()  # (B,)
        block_ids[0] = anchor
        scores = self._forward(block_ids, position)
        revealed = torch.zeros(self.max_depth, dtype=torch.bool, device=block_ids.device)
        for done in range(1, rounds):
            count = math.ceil(self.max_depth * done / rounds)
            slots, tokens = reveal_most_confident(scores, revealed, count)
            revealed[slots] = True
            block_ids[slots + 1] = tokens
            scores = self._forward(block_ids, position)
        return scores

    def propose(self, anchor: int, position: int, timer: Timer) -> Proposal:
        scores = self._draft(anchor, position)
        options = self._options
        if options.tree_nodes:
            ids, logprobs = rank_slots(scores, options.tree_nodes)
            timer.lap("draft_s")
            tree = grow_tree(ids, logprobs, options.tree_nodes, options.spine_first)
            tokens, parents, own = tree.token_ids, tree.parents, tree.logprobs
            timer.lap(TREE)
        else:
            best = scores.argmax(-1, keepdim=True)  # (B - 1, 1), equal scores to the lowest id
            best_logprobs = scores.gather(-1, best) - scores.logsumexp(-1, keepdim=True)
            tokens, own = best[:, 0].tolist(), best_logprobs[:, 0].tolist()
            parents = chain_parents(len(tokens))
            timer.lap("draft_s")
        return Proposal(tokens, parents, own, scores, options.draft_rounds)

    def commit(self, token_ids: Sequence[int], tapped: torch.Tensor | None) -> None:
        self._pending = tapped


def _options(settings: DecodeSettings, given: Mapping[str, str], tree: bool) -> BlockOptions:
    """Profile settings, overruled by what the method's own setting says."""
    known = ("rounds", "context", "block", "unbanned") + (("nodes", "spine_first") if tree else ())
    values = take_options(given, known)
    context: str | float | None = values.get("context")
    if context is not None and context not in ("all", "text_only"):
        try:
            context = float(context)
        except ValueError:
            raise InputError(
                f"context: found {context!r}, allowed: all, text_only, or 0 to 1"
            ) from None
    try:
        return BlockOptions(
            tree_nodes=int(values.get("nodes", settings.tree_nodes)) if tree else 0,
            spine_first=tree and (settings.spine_first or "spine_first" in values),
            draft_rounds=int(values.get("rounds", settings.draft_rounds)),
            context=context,
            block_size=int(values["block"]) if "block" in values else None,
            ban_special_ids=settings.ban_special_ids and "unbanned" not in values,
        )
    except ValueError as error:
        raise InputError(f"decode.methods: {dict(given)}: {error}") from None


def _chain(
    target: Target, drafter: VFlashDrafter, settings: DecodeSettings, given: Mapping[str, str]
) -> Method:
    return BlockDrafting("chain", target, drafter, _options(settings, given, tree=False))


def _tree(
    target: Target, drafter: VFlashDrafter, settings: DecodeSettings, given: Mapping[str, str]
) -> Method:
    return BlockDrafting("tree60", target, drafter, _options(settings, given, tree=True))


ENTRIES = {
    "chain": Entry(_chain, VFlashConfig.model_type, load_drafter),
    "tree60": Entry(_tree, VFlashConfig.model_type, load_drafter),
}
