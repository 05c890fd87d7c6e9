"""What one forward of decoding costs: every forward of a cycle as a job that can be timed alone.

Ours run through the calls of the decode loop (`Verifier.choices`, `BlockDrafting`), on a cache that
holds random keys and values up to a context length; what counts is what a cycle's `verify_s` and
`draft_s` count, reading the choice back to the host included. The target's three forwards run once
more as Hugging Face's `generate` runs them: the whole model, SDPA with masks of Hugging Face's
making, and a `DynamicCache`. It knows no trees; Tree-60's mask is handed to it ready, in four
dimensions.

Both read the same weights. Before a forward is timed it runs once uncounted, because it finds the
processor's caches full of what ran before it, while in a cycle it follows its like.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache

from vflash_analysis import sizes
from vflash_analysis.decoding.loop import Verifier
from vflash_analysis.decoding.methods.ar import AutoRegressive
from vflash_analysis.decoding.methods.base import Method, Prompt, Proposal
from vflash_analysis.decoding.methods.block import BlockDrafting, BlockOptions
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.decoding.tree import chain_parents, grow_tree
from vflash_analysis.model.network import VFlashDrafter
from vflash_analysis.model.target import Target
from vflash_analysis.model.text_stack import cache_keyword
from vflash_analysis.schemas import HUGGING_FACE, NEW_CONTEXT, OURS
from vflash_analysis.shapes import DrafterShape
from vflash_analysis.sizes import Work

_HF_ATTENTION = {"": "sdpa", "text_config": "sdpa", "vision_config": "sdpa"}
_ANCHOR = 5  # any token


@dataclass(frozen=True)
class Job:
    """One forward at one context length.

    Attributes:
        implementation: `OURS` or `HUGGING_FACE`.
        forward: "ar", "verify_chain", "verify_tree60", "draft_chain", "draft_tree60" or
            "context_projection".
        rows: rows that enter the forward.
        work: bytes it must read and operations, by arithmetic.
        prepare: brings caches to the context length and runs it once uncounted.
        call: what is timed; laps the timer at its end.
    """

    implementation: str
    forward: str
    rows: int
    work: Work
    prepare: Callable[[], None]
    call: Callable[[Timer], object]

    def seconds(self, timer: Timer) -> float:
        """Prepares, and times the call once; host work after a draft does not count."""
        self.prepare()
        timer.start()
        self.call(timer)
        parts = timer.take()
        return parts["draft_s"] + parts["verify_s"]


def likely_tree(block_size: int, nodes: int) -> Proposal:
    """A tree of a drafter that is right about two slots of three; of no more nodes than asked for.

    Every slot's k-th token has the probability 2/3 (1/3)^k, k = 0, 1, ...
    """
    slots, wide = block_size - 1, 16
    ids = _ANCHOR + 1 + np.arange(slots * wide).reshape(slots, wide)  # (S, 16) all distinct
    logprobs = np.log(2 / 3) + np.arange(wide) * np.log(1 / 3)
    tree = grow_tree(ids, np.tile(logprobs, (slots, 1)), nodes)
    return Proposal(tree.token_ids, tree.parents, tree.logprobs)


class Forwards:
    """The jobs of a target and its drafter at any context length up to a longest one.

    Args:
        target: of any weights.
        drafter: for this target, of any weights.
        shape: both their sizes, from which work is counted.
        longest: largest context length, in tokens.
        tree_nodes: nodes of the tree, the anchor not counted.
    """

    def __init__(
        self,
        target: Target,
        drafter: VFlashDrafter,
        shape: DrafterShape,
        longest: int,
        tree_nodes: int,
    ) -> None:
        self._target, self._shape = target, shape
        self._generator = torch.Generator(target.device).manual_seed(0)
        self._cache = target.new_cache(longest, 1, max(shape.block_size, tree_nodes + 1))
        taps = shape.num_tapped_layers * target.hidden_size
        self._tapped = self._random(longest, taps)  # (K, n * H)
        self._few = self._random(NEW_CONTEXT, taps)  # (4, n * H)
        chain = BlockDrafting("chain", target, drafter, BlockOptions())
        tree = BlockDrafting("tree60", target, drafter, BlockOptions(tree_nodes=tree_nodes))
        depth = shape.block_size - 1
        self._verified: Sequence[tuple[str, Method, Proposal]] = (
            ("ar", AutoRegressive(), Proposal()),
            ("verify_chain", chain, Proposal([_ANCHOR] * depth, chain_parents(depth))),
            ("verify_tree60", tree, likely_tree(shape.block_size, tree_nodes)),
        )
        self._drafting = (chain, tree)
        # The same weights under another attention: parameters are shared, everything else copied.
        shared = {id(weight): weight for weight in target.model.parameters()}
        self._hf = copy.deepcopy(target.model, shared)
        self._hf.set_attn_implementation(_HF_ATTENTION)
        self._hf_keyword = cache_keyword(self._hf.forward)

    def _random(self, *shape: int) -> torch.Tensor:
        dtype, device = self._target.dtype, self._target.device
        return torch.randn(shape, generator=self._generator, dtype=dtype, device=device)

    def _hold(self, context: int) -> None:
        """Leaves `context` rows in the cache: drops those beyond, or adds random ones."""
        target, cache = self._target, self._cache
        missing = context - cache.length
        if missing <= 0:
            cache.truncate(context)
            return
        shape = (1, target.num_kv_heads, missing, target.head_dim)
        for layer in range(target.num_layers):
            cache.update(self._random(*shape), self._random(*shape), layer)

    def jobs(self, context: int) -> list[Job]:
        """Every forward after `context` tokens, ours before Hugging Face's.

        The jobs of an earlier call are void: all share one cache.

        Raises:
            InputError: a context longer than the longest one.
        """
        self._hold(context)
        found = [self._verify_job(*verified, context) for verified in self._verified]
        found += [self._draft_job(method, context) for method in self._drafting]
        found.append(self._projection_job(context))
        return found + [self._hf_job(*verified, context) for verified in self._verified]

    def _verifier(
        self, method: Method, proposal: Proposal, context: int
    ) -> tuple[Verifier, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        verifier = Verifier(self._target, self._cache, method)
        return verifier, verifier.inputs(_ANCHOR, proposal)

    def _decoder_work(self, rows: int, context: int) -> Work:
        return sizes.decoder_work(self._shape.target, rows, context, self._target.dtype.itemsize)

    def _verify_job(self, name: str, method: Method, proposal: Proposal, context: int) -> Job:
        verifier, inputs = self._verifier(method, proposal, context)

        def prepare() -> None:
            self._cache.truncate(context)
            verifier.choices(*inputs)
            self._cache.truncate(context)

        def call(timer: Timer) -> None:
            verifier.choices(*inputs)
            timer.lap("verify_s")

        rows = len(inputs[0])
        return Job(OURS, name, rows, self._decoder_work(rows, context), prepare, call)

    def _prompt(self, context: int) -> Prompt:
        ids = torch.full((context,), _ANCHOR, device=self._target.device)
        return Prompt(ids, self._tapped[:context], 2 * NEW_CONTEXT + 1)

    def _draft_job(self, method: BlockDrafting, context: int) -> Job:
        before = context - NEW_CONTEXT
        prompt, aside = self._prompt(before), Timer(self._target.device)

        def prepare() -> None:
            aside.start()
            method.start(prompt, aside)
            method.commit([_ANCHOR], self._few)
            method.propose(_ANCHOR, context, aside)
            method.commit([_ANCHOR], self._few)

        def call(timer: Timer) -> None:
            method.propose(_ANCHOR, context + NEW_CONTEXT, timer)

        itemsize = self._target.dtype.itemsize
        work = sizes.draft_work(self._shape, context, NEW_CONTEXT, itemsize)
        return Job(OURS, f"draft_{method.name}", self._shape.block_size, work, prepare, call)

    def _projection_job(self, context: int) -> Job:
        """The projection of a prompt, cold as in decoding, where it runs once a text."""
        prompt, method = self._prompt(context), self._drafting[0]
        work = sizes.context_work(self._shape, context, self._target.dtype.itemsize)

        def call(timer: Timer) -> None:
            method.start(prompt, timer)

        return Job(OURS, "context_projection", context, work, lambda: None, call)

    def _hf_job(self, name: str, method: Method, proposal: Proposal, context: int) -> Job:
        ids, positions, tree_mask = self._verifier(method, proposal, context)[1]
        rows = len(ids)
        seen = torch.ones(1, context + rows, dtype=torch.long, device=ids.device)
        caches: list[DynamicCache] = []  # of the call that is prepared

        @torch.no_grad()
        def forward() -> None:
            mask = seen
            if tree_mask is not None:
                mask = functional.pad(tree_mask, (context, 0), value=True)[None, None]
            output = self._hf(
                input_ids=ids[None],
                attention_mask=mask,
                position_ids=positions[None],
                use_cache=True,
                **{self._hf_keyword: caches[0]},
            )
            output.logits[0].argmax(-1).tolist()

        def prepare() -> None:
            self._cache.truncate(context)
            caches[:] = [self._hf_cache()]
            forward()
            caches[0].crop(-rows)

        def call(timer: Timer) -> None:
            forward()
            timer.lap("verify_s")
            caches.clear()

        return Job(HUGGING_FACE, name, rows, self._decoder_work(rows, context), prepare, call)

    def _hf_cache(self) -> DynamicCache:
        """Hugging Face's cache with a copy of ours."""
        cache = DynamicCache(config=self._hf.config)
        for layer in range(self._target.num_layers):
            keys, values = self._cache.keys_values(layer)
            cache.update(keys.clone(), values.clone(), layer)
        return cache
