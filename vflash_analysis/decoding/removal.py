"""Greedy decoding when no text position sees the video from layer x on (SPARROW, figures 3 and 5).

Layers below x see everything. From layer x on the video's rows are as good as gone: every other row
of the prompt is computed anew from its state before layer x, over such rows alone, and so is every
new token; positions stay what they were. x = L removes nothing, x = 0 all that the video said.

One ordinary prefill serves every x: what changes are the rows of text, some thirty beside 25k, so
the layers from x on keep keys and values of text alone, in a small cache of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vflash_analysis.errors import InputError
from vflash_analysis.model.attention import backend_mask
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.frozen import Target
from vflash_analysis.model.text_stack import cache_keyword
from vflash_analysis.model.watch import Watched


class WithoutVideo:
    """Decodes one clip with the video removed from any layer on.

    Args:
        target: the target.
        seen: the clip's watched prefill.
        cache: it filled, with room for `max_new_tokens`; rows after the prompt come and go.
        max_new_tokens: the longest text.
    """

    def __init__(self, target: Target, seen: Watched, cache: KVCache, max_new_tokens: int) -> None:
        self._target, self._seen, self._cache = target, seen, cache
        self._prompt_tokens = cache.length
        self._text_cache = target.allocate_cache(len(seen.text_rows) + max_new_tokens)
        self._max_new_tokens = max_new_tokens
        self._new_rows = 0

    @torch.inference_mode()
    def greedy(self, from_layer: int) -> list[int]:
        """The greedy text, a stop token included, at most `max_new_tokens`.

        Args:
            from_layer: x, 0..L.

        Raises:
            InputError: no such layer.
        """
        tokens = [int(self._begin(from_layer).argmax())]
        while tokens[-1] not in self._target.stop_ids and len(tokens) < self._max_new_tokens:
            tokens.append(int(self._append(from_layer, tokens[-1:])[-1].argmax()))
        return tokens

    @torch.inference_mode()
    def logits(self, from_layer: int, token_ids: Sequence[int]) -> Tensor:
        """Logits before each of the tokens when they are given: (n, V).

        Args:
            from_layer: x, 0..L.
            token_ids: 1 to `max_new_tokens` tokens.

        Raises:
            InputError: no such layer.
        """
        parts = [self._begin(from_layer)[None]]
        if len(token_ids) > 1:
            parts.append(self._append(from_layer, token_ids[:-1]))
        return torch.cat(parts)

    def _begin(self, from_layer: int) -> Tensor:
        """Logits (V,) after the prompt; the text's rows from layer x on are cached."""
        layers = self._target.num_layers
        if not 0 <= from_layer <= layers:
            raise InputError(f"layer: found {from_layer}, allowed: 0..{layers}")
        self._cache.truncate(self._prompt_tokens)
        self._text_cache.truncate(0)
        self._new_rows = 0
        if from_layer == layers:
            return self._seen.prefill.logits
        states = self._seen.text_states[from_layer]
        return self._run(from_layer, states, self._seen.text_rows, from_layer)[-1]

    def _append(self, from_layer: int, token_ids: Sequence[int]) -> Tensor:
        """Logits (q, V) after each of q more tokens."""
        target = self._target
        ids = torch.tensor(list(token_ids), device=target.device)
        start = self._prompt_tokens + self._new_rows
        self._new_rows += len(ids)
        positions = torch.arange(start, start + len(ids), device=target.device)
        return self._run(0, target.embed(ids), positions, from_layer)

    def _run(self, first: int, hidden: Tensor, positions: Tensor, from_layer: int) -> Tensor:
        """Layers `first`..L - 1 over rows (q, H) at (q,) positions, appended; logits (q, V)."""
        target, stack = self._target, self._target.text_model
        hidden, positions = hidden[None], positions[None]
        rotary = stack.rotary_emb(hidden, positions)
        for number in range(first, target.num_layers):
            layer = stack.layers[number]
            cache = self._cache if number < from_layer else self._text_cache
            rows = hidden.shape[1]
            keys = cache.get_seq_length(number) + rows
            mask = backend_mask(
                target.attention, rows, keys, None, target.groups, target.dtype, target.device
            )
            options = {cache_keyword(layer.forward): cache}
            out = layer(
                hidden,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=rotary,
                use_cache=True,
                **options,
            )
            hidden = out[0] if isinstance(out, tuple) else out
        return target.head(stack.norm(hidden)[0])
