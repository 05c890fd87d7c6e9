"""What a decoding method is: it proposes draft tokens; the loop does everything else.

A method never decides what is committed, so no method can change the text: the loop verifies every
draft token with the target. A new method is one file here that implements `Method` and lists its
factories, and one row in `methods/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import Target


@dataclass(frozen=True)
class Prompt:
    """What a method may know when decoding starts.

    Attributes:
        input_ids: (P,) the prompt, video placeholders included, on the target's device.
        tapped: (P, n * H) states of the method's tapped layers, or None if it taps none.
        max_new_tokens: the cap, for sizing caches.
    """

    input_ids: torch.Tensor
    tapped: torch.Tensor | None
    max_new_tokens: int


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one cycle, parents first (see `decoding/tree.py`).

    Attributes:
        token_ids: n draft tokens; empty means a plain step of the target.
        parents: n parent nodes, -1 for the anchor.
        logprobs: n log-probabilities of the drafts in their slots; empty if the method has none.
        slot_scores: (S, V) the drafter's scores of slots 1..S, from which the rank of the target's
            token is recorded; None if the method has none.
        draft_calls: forwards of the drafter this took.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    slot_scores: torch.Tensor | None = field(default=None, compare=False)
    draft_calls: int = 0


class Method(Protocol):
    """One way of proposing draft tokens.

    Attributes:
        name: value of the records' `method` column.
        setting: value of the records' `setting` column, "" for the method's default.
        tap_layer_ids: target layers whose output the method reads; empty means no hooks.
        max_draft_tokens: most draft tokens it ever proposes (rows after the anchor).
        max_depth: deepest draft, i.e. how far beyond the anchor a position may lie.
    """

    name: str
    setting: str
    tap_layer_ids: tuple[int, ...]
    max_draft_tokens: int
    max_depth: int

    def start(self, prompt: Prompt, timer: Timer) -> float:
        """Begin a text; returns `context_projection_s`, lapped into "draft_s" (0.0 if none)."""

    def propose(self, anchor: int, position: int, timer: Timer) -> Proposal:
        """Drafts for the positions after `position`, where `anchor` stands.

        Device work is lapped into "draft_s" before host work begins, which falls into "other_s";
        building a tree is lapped into "tree_s" within it.
        """

    def commit(self, token_ids: Sequence[int], tapped: torch.Tensor | None) -> None:
        """Learn what was committed.

        Args:
            token_ids: m >= 1 committed tokens; the last one is the next anchor.
            tapped: (m, n * H) target states of the previous anchor and the m - 1 accepted drafts,
                in order; None if the method taps no layers.
        """


@dataclass(frozen=True)
class Entry:
    """How a method is made from its name.

    Attributes:
        build: (target, network, settings, options) -> method; `options` are the words after the
            colon of "name:option,option=value".
        drafter_type: `model_type` of the drafter folders it runs with; None if it needs none.
        load: (folder, target) -> network, checked against the target.
    """

    build: Callable[[Target, Any, DecodeSettings, Mapping[str, str]], Method]
    drafter_type: str | None = None
    load: Callable[[Path, Target], Any] | None = None


def take_options(given: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """The options, if all are known to the method.

    Raises:
        InputError: naming the unknown ones and those allowed.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        allowed = ", ".join(known) if known else "none"
        raise InputError(f"decode.methods: unknown options {unknown}, allowed: {allowed}")
    return dict(given)
