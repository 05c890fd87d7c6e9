"""Plain greedy decoding: the loop with an empty proposal, and its verify-shaped control.

The control (`ar` with setting `verify16` or `verify61`) commits one token a cycle like plain
decoding, but through target forwards of 16 or 61 rows. In half precision it shows how often the
row count alone changes a text, with no drafter involved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.methods.base import Entry, Method, Prompt, Proposal, take_options
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.decoding.tree import chain_parents
from vflash_analysis.model.target import Target

_NOTHING = Proposal()


class AutoRegressive:
    """No drafts, no hooks: one token per target forward."""

    name = "ar"
    tap_layer_ids: tuple[int, ...] = ()

    def __init__(self, rows: int = 1, filler_id: int = 0) -> None:
        """
        Args:
            rows: rows of every target forward; those after the first hold `filler_id`.
            filler_id: a token the target never chooses (else it is accepted, as any right draft is,
                and the text still does not change).
        """
        self.setting = "" if rows == 1 else f"verify{rows}"
        self.max_draft_tokens = self.max_depth = rows - 1
        fillers = Proposal(token_ids=[filler_id] * (rows - 1), parents=chain_parents(rows - 1))
        self._proposal = _NOTHING if rows == 1 else fillers

    def start(self, prompt: Prompt, timer: Timer) -> float:
        return 0.0

    def propose(self, anchor: int, position: int, timer: Timer) -> Proposal:
        return self._proposal

    def commit(self, token_ids: Sequence[int], tapped: torch.Tensor | None) -> None:
        return None


def _build(
    target: Target, network: None, settings: DecodeSettings, given: Mapping[str, str]
) -> Method:
    options = take_options(given, ("verify16", "verify61"))
    rows = max((int(name.removeprefix("verify")) for name in options), default=1)
    return AutoRegressive(rows, target.mask_token_id)


ENTRIES = {"ar": Entry(_build)}
