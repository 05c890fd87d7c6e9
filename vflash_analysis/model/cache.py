"""One preallocated key/value cache for the target and the drafter, accepted by Hugging Face modules.

Speculative decoding appends a block, then drops or keeps some of its rows. A cache that grows by
concatenation copies every key for every token; this one writes in place and moves a length. Its
rows below `length` are never rewritten by an append, so one prefill can be rolled back to and
decoded from again by every method.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from vflash_analysis.errors import InputError


class KVCache(Cache):
    """Keys and values of all layers in two tensors (L, 1, H_kv, capacity, D).

    Implements the calls Hugging Face models and `generate` make (`update`, `get_seq_length`,
    `get_mask_sizes`, `crop(-n)`, ...) and the three that speculative decoding needs: `drop`,
    `keep`, `truncate`.

    Args:
        num_layers: decoder layers L.
        num_kv_heads: key/value heads H_kv.
        head_dim: D.
        capacity: rows that fit; an append beyond it raises `InputError`.
        dtype: of keys and values.
        device: of keys and values.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(layers=[])
        if min(num_layers, num_kv_heads, head_dim, capacity) < 1:
            raise InputError(
                f"KV cache: sizes must be positive, found {num_layers} layers, {num_kv_heads} "
                f"heads, head dim {head_dim}, capacity {capacity}"
            )
        shape = (num_layers, 1, num_kv_heads, capacity, head_dim)
        # Allocated as ordinary tensors even inside inference mode: they may be written outside it.
        with torch.inference_mode(False):
            self._k = torch.empty(shape, dtype=dtype, device=device)  # (L, 1, H_kv, capacity, D)
            self._v = torch.empty(shape, dtype=dtype, device=device)  # (L, 1, H_kv, capacity, D)
            self._k_of = list(self._k.unbind(0))
            self._v_of = list(self._v.unbind(0))
        self.capacity = capacity
        self._lengths = [0] * num_layers

    @property
    def length(self) -> int:
        """Rows held by every layer."""
        return self._lengths[-1]

    @property
    def num_layers(self) -> int:
        """Decoder layers L."""
        return len(self._lengths)

    def keys_values(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's rows: keys and values, each (1, H_kv, length, D)."""
        end = self._lengths[layer_idx]
        return self._k_of[layer_idx].narrow(2, 0, end), self._v_of[layer_idx].narrow(2, 0, end)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows (1, H_kv, q, D) to one layer and return views of all its rows.

        Raises:
            InputError: the rows do not fit.
        """
        start = self._lengths[layer_idx]
        rows = key_states.shape[2]
        end = start + rows
        if end > self.capacity:
            raise InputError(
                f"KV cache: {start} rows held, {rows} more do not fit the capacity of "
                f"{self.capacity}; allow more tokens when the cache is made"
            )
        keys, values = self._k_of[layer_idx], self._v_of[layer_idx]
        # Detached: the cache carries no gradients, whatever mode it is filled in.
        keys.narrow(2, start, rows).copy_(key_states.detach())
        values.narrow(2, start, rows).copy_(value_states.detach())
        self._lengths[layer_idx] = end
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def layers_in_place(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Every layer's whole memory, keys and values, each (1, H_kv, capacity, D)."""
        return self._k_of, self._v_of

    def advance(self, rows: int) -> None:
        """Count `rows` more rows as held, which were written in place.

        Raises:
            InputError: they do not fit.
        """
        if not 0 <= rows <= self.capacity - self.length:
            raise InputError(
                f"KV cache: {self.length} rows held, {rows} more do not fit the capacity of "
                f"{self.capacity}"
            )
        self._lengths = [self.length + rows] * len(self._lengths)

    def clear(self) -> None:
        """Drop all rows and overwrite the memory with zeros."""
        self._k.zero_()
        self._v.zero_()
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Drop all rows from `length` on.

        Raises:
            InputError: `length` is negative or above the rows held.
        """
        if not 0 <= length <= self.length:
            raise InputError(f"KV cache: cannot truncate {self.length} rows to {length}")
        self._lengths = [length] * len(self._lengths)

    def drop(self, count: int) -> None:
        """Drop the last `count` rows; 0 drops nothing.

        Raises:
            InputError: `count` is negative or above the rows held.
        """
        if not 0 <= count <= self.length:
            raise InputError(f"KV cache: cannot drop {count} of {self.length} rows")
        self.truncate(self.length - count)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep the rows `start + r` for r in `rows`, in that order, after the first `start` rows.

        Everything else from `start` on is dropped. This commits the accepted path of a tree.

        Args:
            start: rows before the block, untouched.
            rows: offsets into the block, each at most once, in [0, length - start).

        Raises:
            InputError: `start` or an offset is out of range, or an offset comes twice.
        """
        kept = [int(row) for row in rows]
        held = self.length - start
        if start < 0 or held < 0 or any(not 0 <= row < held for row in kept):
            raise InputError(
                f"KV cache: cannot keep rows {kept} after {start}, {self.length} rows are held"
            )
        if len(set(kept)) != len(kept):
            raise InputError(f"KV cache: rows to keep must differ, found {kept}")
        if kept != list(range(len(kept))):
            index = torch.tensor(kept, device=self._k.device) + start
            end = start + len(kept)
            # index_select copies first, so overlapping source and destination rows are safe.
            self._k[:, :, :, start:end] = self._k.index_select(3, index)
            self._v[:, :, :, start:end] = self._v.index_select(3, index)
        self._lengths = [start + len(kept)] * len(self._lengths)

    # What Hugging Face models and `generate` call.

    def __len__(self) -> int:
        return len(self._lengths)

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self._k.shape)
        return f"KVCache({self.length} of {self.capacity} rows, {shape} {self._k.dtype})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows held by one layer."""
        return self._lengths[layer_idx]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys after an append of `query_length` rows, and the position of the first key (0)."""
        return self._lengths[layer_idx] + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Rows that fit."""
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -`tokens_to_remove` rows, as `generate` asks; 0 removes nothing.

        Raises:
            InputError: a positive count (in Hugging Face's older meaning a final length), or one
                above the rows held.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"KV cache: crop takes minus the rows to drop, found {tokens_to_remove}"
            )
        self.drop(-tokens_to_remove)

    def reset(self) -> None:
        """Drop all rows."""
        self.truncate(0)

    def activate_past_recording(self) -> None:
        """Nothing to record: every row stays until it is dropped."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """No layer defers the removal of rows."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Dropping rows restores the earlier state exactly."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Memory is taken when the cache is made."""
        return True

    @property
    def is_compileable(self) -> bool:
        """The views returned by `update` grow, so `generate` must not compile over this cache."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets, none is recurrent, each holds rows."""
        return [False] * len(self._lengths)

    is_linear = is_dummy = is_sliding

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        """Refused: decoding here is greedy, without beams.

        Raises:
            InputError: always.
        """
        raise InputError("KV cache: beams and batches are not supported, decoding is greedy")

    batch_repeat_interleave = batch_select_indices = reorder_cache
