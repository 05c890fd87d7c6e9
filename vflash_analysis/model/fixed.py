"""What compiled steps stand on: caches of fixed size, rows written in place, one graph per step.

`compiled.py` says why and builds the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from vflash_analysis.model.attention import additive_mask, fold_mask

BACKEND = "inductor"
SIZE_STEP = 64  # rows; prompts between the same multiples of it share what is compiled
MOST_SIZES = 1024  # compilations a process may come to need; torch's own limit is 8


@dataclass(frozen=True)
class FixedSize:
    """Rows of a cache that is attended to as a whole.

    Attributes:
        prefix: rows that are always filled, a multiple of `SIZE_STEP`.
        tail: rows behind them, filled in part.
    """

    prefix: int
    tail: int

    @classmethod
    def of(cls, filled: int, more: int) -> FixedSize:
        """The size for a prompt of `filled` rows and `more` rows after it."""
        return cls(filled // SIZE_STEP * SIZE_STEP, SIZE_STEP + more)

    @property
    def capacity(self) -> int:
        """Rows in all."""
        return self.prefix + self.tail

    def mask(self, visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask that `grouped_attention` takes, made once for all layers.

        Args:
            visible: (rows or 1, tail) bool over the tail; the prefix is visible to all.
            groups: G query heads per key/value head.
            dtype: of the scores.

        Returns:
            on CUDA (1, 1, G * rows, tail) bool, else (1, 1, G * rows, capacity) additive; a single
            row stands for all
        """
        groups = groups if len(visible) > 1 else 1
        if _narrow_masks(visible.device):
            return fold_mask(visible[None, None], groups)
        whole = functional.pad(visible, (self.prefix, 0), value=True)
        return fold_mask(additive_mask(whole[None, None], dtype), groups)


def _narrow_masks(device: torch.device) -> bool:
    """On CUDA the prefix is an unmasked pass of its own (see `attention.prefix_and_block`)."""
    return device.type == "cuda"


class WrittenRows:
    """A cache as the layers of a step see it: new rows go to given places, all rows come back.

    Args:
        keys, values: per layer, (1, H_kv, capacity, D).
        places: where the new rows go, part by part, each (rows,) long; later parts win.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
    ) -> None:
        self._keys, self._values, self._places = keys, values, places

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._keys[layer_idx], self._values[layer_idx]
        for whole, new in zip(held, (keys, values), strict=True):
            begin = 0
            for places in self._places:
                whole.index_copy_(2, places, new[:, :, begin : begin + len(places)])
                begin += len(places)
        return held


class Fixed:
    """A function compiled over tensors that stay in place; a call runs it on what they hold.

    Args:
        function: takes `inputs`, returns tensors or None.
        inputs: tensors, or lists of tensors.
        device: of all of them.
    """

    def __init__(
        self,
        function: Callable[..., tuple[torch.Tensor | None, ...]],
        inputs: Sequence[Any],
        device: torch.device,
    ) -> None:
        self._function = torch.compile(function, backend=BACKEND, dynamic=False, fullgraph=True)
        self._inputs = inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        limits = {"recompile_limit": MOST_SIZES, "accumulated_recompile_limit": MOST_SIZES}
        with torch.inference_mode(), torch._dynamo.config.patch(limits):
            self._function(*inputs)
            if device.type == "cuda":
                self._record()

    def _record(self) -> None:
        """Record a call as a CUDA graph, after one on another stream as recording asks for."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._function(*self._inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._function(*self._inputs)

    def __call__(self) -> tuple[torch.Tensor | None, ...]:
        with torch.inference_mode():
            if self._graph is None:
                return self._function(*self._inputs)
            self._graph.replay()
            # The next replay writes to the same memory: what is handed out must not change.
            return tuple(None if out is None else out.clone() for out in self._outputs)
