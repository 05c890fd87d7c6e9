"""`target.compile: true`: decode steps of the target and the drafter, compiled over fixed shapes.

At 25k tokens of context an uncompiled step spends more time launching kernels than reading weights,
in plain decoding as in every method; so all of them are compiled alike, or none. A step has a fixed
number of rows, writes their keys and values to places given as a tensor, and attends over a whole
cache of fixed size: to the prefix without a mask, to the tail behind it under one. What changes from
step to step lies in tensors, so nothing is compiled once a text has begun. On CUDA the compiled step
is recorded as one CUDA graph and replayed.

A step is compiled for its number of rows, tapped layers and cache size, before the clock starts;
a method's verify steps all have the rows of its longest proposal (look-up: 16), shorter ones padded.
Cache sizes go in steps of `SIZE_STEP` rows, so another prompt length costs at most one more
compilation of each. Prefill, the projection of the prompt, the judge of near ties and Hugging Face's
own loops run uncompiled.

Run and tested on CPUs. Not run yet: the CUDA graph, and attention as compiled for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vflash_analysis.errors import InputError
from vflash_analysis.model.attention import NAME
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.drafter import drafter_cache
from vflash_analysis.model.fixed import Fixed, FixedSize, WrittenRows
from vflash_analysis.model.frozen import Forward, Target
from vflash_analysis.model.network import VFlashDrafter

# Largest difference from the model's own forward at load, as a share of its largest value.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_TOLERANCE = 0.1


def _target_function(
    target: Target, size: FixedSize, tap_layer_ids: Sequence[int]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The target's forward with its layers run in order, states read in passing, without hooks."""
    text_model, keyword = target.text_model, target.cache_keyword
    embedding, head, groups, taps = (
        target.embedding,
        target.lm_head,
        target.groups,
        {*tap_layer_ids},
    )

    def run(
        ids: torch.Tensor,
        positions: torch.Tensor,
        block: torch.Tensor,
        start: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = len(ids)
        steps = torch.arange(rows, device=ids.device)
        # How far each tail row lies behind the first new one.
        behind = torch.arange(size.prefix, size.capacity, device=ids.device) - start  # (tail,)
        visible = block[:, behind.clamp(0, rows - 1)] & (behind < rows) | (behind < 0)
        hidden = embedding(ids)[None]  # (1, rows, H)
        mask = size.mask(visible, groups, hidden.dtype)
        rotary = text_model.rotary_emb(hidden, positions[None])
        cache = WrittenRows(keys, values, [start + steps])
        tapped = []
        for number, layer in enumerate(text_model.layers):
            output = layer(
                hidden,
                attention_mask=mask,
                position_ids=positions[None],
                position_embeddings=rotary,
                use_cache=True,
                **{keyword: cache},
            )
            hidden = output[0] if isinstance(output, tuple) else output
            if number in taps:
                tapped.append(hidden[0])
        logits = head(text_model.norm(hidden)[0])
        return logits, torch.cat(tapped, dim=-1) if tapped else None

    return run


class TargetStep:
    """`Target.forward` of up to `rows` tokens on one cache, compiled.

    Fewer tokens are padded: the rows of the padding lie behind theirs, where none of them looks,
    and are written over by the next step.

    Args:
        target: the target.
        cache: holds the prompt.
        size: of the cache.
        rows: of every forward.
        tap_layer_ids: layers whose outputs are returned, in rising order.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        size: FixedSize,
        rows: int,
        tap_layer_ids: Sequence[int],
    ) -> None:
        self._cache, self._prefix = cache, size.prefix
        with torch.inference_mode(False):
            self._ids = torch.zeros(rows, dtype=torch.long, device=target.device)
            self._positions = torch.zeros_like(self._ids)
            self._start = torch.tensor(cache.length, device=target.device)
            self._chain = torch.ones(rows, rows, dtype=torch.bool, device=target.device).tril_()
            self._block = self._chain.clone()
        inputs = (self._ids, self._positions, self._block, self._start, *cache.layers_in_place())
        function = _target_function(target, size, tap_layer_ids)
        self._run = Fixed(function, inputs, target.device)

    def __call__(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None
    ) -> Forward:
        """Token ids (q,), position ids (q,) and, for a tree, its mask (q, q); appends q rows.

        Raises:
            InputError: the rows do not fit the cache, or it does not hold the prompt.
        """
        q, rows, start = len(token_ids), len(self._ids), self._cache.length
        if q > rows or start + rows > self._cache.capacity or start < self._prefix:
            raise InputError(
                f"compiled step of {rows} rows: found {q} tokens behind {start} rows, allowed: at "
                f"most {rows} behind {self._prefix} to {self._cache.capacity - rows}"
            )
        self._ids[:q] = token_ids
        self._positions[:q] = position_ids
        self._start.fill_(start)
        self._block.copy_(self._chain)
        if mask is not None:
            self._block[:q, :q] = mask
        logits, tapped = self._run()
        self._cache.advance(q)
        assert logits is not None
        return Forward(logits[:q], None if tapped is None else tapped[:q])


class CompiledTarget:
    """A target's one cache of fixed size and the steps compiled over it.

    Raises:
        InputError: the target's attention is not "vflash", or its decoder is more than rotary
            positions, layers and a norm, run in order.
    """

    def __init__(self, target: Target) -> None:
        if target.attention != NAME:
            raise InputError(
                f"target.compile: found true with attention {target.attention!r}, allowed: {NAME}"
            )
        self._target = target
        self._cache: KVCache | None = None
        self._size = FixedSize(0, 0)
        self._steps: dict[tuple[int, tuple[int, ...]], TargetStep] = {}
        check_layers_in_order(target)

    def cache(self, prompt_tokens: int, more: int) -> KVCache:
        """The cache, emptied; a new one where the size is another.

        There is one at a time, as compiled steps are bound to its memory: whoever got it before
        finds it empty.
        """
        size = FixedSize.of(prompt_tokens, more)
        if self._cache is None or size != self._size:
            self._steps.clear()  # they hold the old cache
            self._cache = None
            self._size, self._cache = size, self._target.allocate_cache(size.capacity)
        # A hidden row has weight zero, which only turns finite numbers into nothing: neither new
        # memory nor what a clip with numbers that are not finite has left may stay.
        self._cache.clear()
        return self._cache

    def step(self, cache: KVCache, rows: int, tap_layer_ids: Sequence[int]) -> TargetStep:
        """The step of so many rows, compiled if it was not before.

        Raises:
            InputError: another cache than the last one from `cache`.
        """
        if cache is not self._cache:
            raise InputError("target.compile: the cache is not the target's own (`new_cache`)")
        key = (rows, tuple(tap_layer_ids))
        if key not in self._steps:
            self._steps[key] = TargetStep(self._target, cache, self._size, rows, tap_layer_ids)
        return self._steps[key]


def check_layers_in_order(target: Target) -> None:
    """Refuse a decoder whose forward is more than what a compiled step runs.

    Raises:
        InputError: logits or tapped states differ from the model's own forward.
    """
    ids = torch.linspace(0, len(target.tokenizer) - 1, 7, device=target.device).long()
    taps = range(target.num_layers)
    size = FixedSize.of(4, len(ids))
    with torch.inference_mode():
        cache = target.allocate_cache(size.capacity)
        cache.clear()
        target.forward(ids[:4], None, cache)
        own = target.forward(ids[4:], None, cache, tap_layer_ids=taps)
        positions = torch.arange(4, 7, device=target.device)
        chain = torch.ones(3, 3, dtype=torch.bool, device=target.device).tril_()
        start = torch.tensor(4, device=target.device)
        function = _target_function(target, size, taps)
        found = function(ids[4:], positions, chain, start, *cache.layers_in_place())
    allowed = TOLERANCES.get(target.dtype, HALF_TOLERANCE)
    for name, ours, theirs in (("logits", found[0], own.logits), ("states", found[1], own.tapped)):
        assert ours is not None and theirs is not None
        apart = float((ours - theirs).abs().max() / theirs.abs().max())
        if not apart <= allowed:
            raise InputError(
                f"{target.source}: target.compile: {name} of the layers run in order are "
                f"{apart:.2g} of the largest from the model's own, allowed: {allowed:g}"
            )


def _draft_function(
    target: Target, drafter: VFlashDrafter, size: FixedSize, banned_ids: torch.Tensor | None
) -> Callable[..., tuple[torch.Tensor]]:
    """The drafter's forward over a block, from token ids to scores."""
    embedding, head = target.embedding, target.lm_head
    groups = drafter.config.num_attention_heads // drafter.config.num_key_value_heads

    def run(
        ids: torch.Tensor,
        tapped: torch.Tensor,
        counts: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor]:
        held, new, position = counts.unbind()
        steps = torch.arange(len(ids), device=ids.device)  # (S,)
        positions = torch.cat((position - new + steps, position + steps))  # (2 * S,)
        # As many context rows as slots. Of those beyond `new` the block's own take the place.
        places = (held + steps, held + new + steps)
        rows = torch.arange(size.prefix, size.capacity, device=ids.device)
        visible = (rows < held + new + len(ids))[None]  # (1, tail)
        hidden = embedding(ids)[None]
        hidden = drafter.run_layers(
            hidden,
            drafter.project(tapped[None]),
            positions[None],
            size.mask(visible, groups, hidden.dtype),
            WrittenRows(keys, values, places),
        )
        scores = head(hidden[0, 1:]).float()  # (S - 1, V)
        if banned_ids is not None:
            scores = scores.index_fill(-1, banned_ids, float("-inf"))
        return (scores,)

    return run


class DraftStep:
    """A drafter's forward over a block, new context first, on a cache of its own, compiled.

    Args:
        target: supplies embedding and head.
        drafter: the drafter.
        context_rows: prompt rows the drafter reads.
        max_new_tokens: the cap.
        block_size: slots S.
        banned_ids: tokens that are never drafted, or None.
    """

    def __init__(
        self,
        target: Target,
        drafter: VFlashDrafter,
        context_rows: int,
        max_new_tokens: int,
        block_size: int,
        banned_ids: torch.Tensor | None,
    ) -> None:
        self._size = FixedSize.of(context_rows, max_new_tokens + block_size)
        self.cache = drafter_cache(drafter, self._size.capacity)
        self.cache.clear()  # see `CompiledTarget.cache`
        device = target.device
        width = len(drafter.config.target_layer_ids or ()) * target.hidden_size
        with torch.inference_mode(False):
            self._ids = torch.zeros(block_size, dtype=torch.long, device=device)
            self._tapped = torch.zeros(block_size, width, dtype=target.dtype, device=device)
            self._counts = torch.tensor([self._size.prefix, 0, 0], device=device)
        drafter.rotary(self._counts[None])  # its table is made outside what is compiled
        function = _draft_function(target, drafter, self._size, banned_ids)
        inputs = (self._ids, self._tapped, self._counts, *self.cache.layers_in_place())
        self._run = Fixed(function, inputs, device)

    def fits(self, context_rows: int, max_new_tokens: int) -> bool:
        """Whether a text with such a prompt and cap has this step's size."""
        return FixedSize.of(context_rows, max_new_tokens + len(self._ids)) == self._size

    def __call__(
        self, block_ids: torch.Tensor, tapped: torch.Tensor | None, position: int
    ) -> torch.Tensor:
        """Draft once; the new context's rows stay in the cache, the block's do not.

        Args:
            block_ids: (S,) the anchor and its slots.
            tapped: (m, n*H) states of new context positions, m at most S, or None.
            position: of the anchor.

        Returns:
            (S - 1, V) fp32 scores of slots 1..

        Raises:
            InputError: context and block do not fit the cache.
        """
        new = 0 if tapped is None else len(tapped)
        rows = self.cache.length + new + len(self._ids)
        if rows > self.cache.capacity:
            raise InputError(
                f"compiled draft: found {rows} rows of context and block, allowed: at most "
                f"{self.cache.capacity}"
            )
        self._ids.copy_(block_ids)
        if tapped is not None:
            self._tapped[:new] = tapped
        self._counts.copy_(torch.tensor([self.cache.length, new, position]))
        (scores,) = self._run()
        self.cache.advance(new)
        assert scores is not None
        return scores
