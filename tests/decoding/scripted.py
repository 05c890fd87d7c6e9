"""Methods whose drafts a test writes down, and decode helpers shared by the tests here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.tiny import tiny_drafter, tiny_prompt, tiny_target
from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.loop import Generation, decode
from vflash_analysis.decoding.methods import build_method
from vflash_analysis.decoding.methods.base import Prompt, Proposal
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.decoding.tree import chain_parents
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.target import Prefill, Target

SETTINGS = DecodeSettings(methods=("ar", "chain", "tree60"), max_new_tokens=40)


class Scripted:
    """Drafts are a function of the anchor's place in the text."""

    name, setting = "scripted", ""

    def __init__(
        self,
        write: Callable[[int], tuple[list[int], list[int]]],
        max_draft_tokens: int = 60,
        max_depth: int = 15,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> None:
        """`write(i)` gives tokens and parents for anchor = i-th new token (0-based)."""
        self._write = write
        self.max_draft_tokens, self.max_depth = max_draft_tokens, max_depth
        self.tap_layer_ids = tap_layer_ids
        self.committed: list[list[int]] = []
        self.tapped: list[torch.Tensor | None] = []

    def start(self, prompt: Prompt, timer: Timer) -> float:
        self._prompt_tokens = len(prompt.input_ids)
        return 0.0

    def propose(self, anchor: int, position: int, timer: Timer) -> Proposal:
        return Proposal(*self._write(position - self._prompt_tokens))

    def commit(self, token_ids: Sequence[int], tapped: torch.Tensor | None) -> None:
        self.committed.append(list(token_ids))
        self.tapped.append(tapped)


def oracle(text: Sequence[int], depth: int = 15, filler: int = 0) -> Scripted:
    """Drafts the known text itself; beyond its end, `filler`."""

    def write(anchor: int) -> tuple[list[int], list[int]]:
        tokens = list(text[anchor + 1 : anchor + 1 + depth])
        return tokens + [filler] * (depth - len(tokens)), chain_parents(depth)

    return Scripted(write, depth, depth)


def always_wrong(text: Sequence[int], vocab: int, depth: int = 15) -> Scripted:
    """Drafts that are off by one id in every slot."""

    def write(anchor: int) -> tuple[list[int], list[int]]:
        tokens = [(token + 1) % vocab for token in text[anchor + 1 : anchor + 1 + depth]]
        return tokens, chain_parents(len(tokens))

    return Scripted(write, depth, depth)


@dataclass
class Bench:
    """A target, a drafter, one prompt and its prefill; every decode starts from the same cache."""

    target: Target
    drafter: Any
    input_ids: torch.Tensor
    pixel_values: torch.Tensor
    cache: KVCache
    prefill: Prefill

    @classmethod
    def make(
        cls,
        seed: int = 0,
        prompt_seed: int | None = None,
        max_new_tokens: int = 60,
        dtype: torch.dtype = torch.float64,
        block_size: int = 16,
        num_layers: int = 4,
        attention: str = "vflash",
    ) -> Bench:
        target = tiny_target(seed, num_layers, dtype, attention=attention)
        drafter = tiny_drafter(target, seed + 100, block_size=block_size)
        return cls.on(target, drafter, seed if prompt_seed is None else prompt_seed, max_new_tokens)

    @classmethod
    def on(cls, target: Target, drafter: Any, prompt_seed: int, max_new_tokens: int = 60) -> Bench:
        input_ids, pixels = tiny_prompt(target, prompt_seed, words=3 + prompt_seed % 5)
        cache = target.new_cache(len(input_ids), max_new_tokens)
        prefill = target.prefill(input_ids, pixels, cache, tuple(drafter.config.target_layer_ids))
        return cls(target, drafter, input_ids, pixels, cache, prefill)

    def run(
        self,
        method: Any,
        max_new_tokens: int = 40,
        stop_ids: Collection[int] | None = None,
        timer: Timer | None = None,
        settings: DecodeSettings = SETTINGS,
    ) -> Generation:
        """Decode with a method or a method's name."""
        if isinstance(method, str):
            method = build_method(method, self.target, settings, self.drafter)
        self.cache.truncate(len(self.input_ids))
        return decode(
            self.target,
            self.input_ids,
            self.prefill,
            self.cache,
            method,
            max_new_tokens,
            timer,
            stop_ids,
        )
