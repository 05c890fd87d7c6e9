"""Prompt look-up: what followed the last few tokens where they stood before is proposed again.

No drafter and no cost beyond a dictionary: the accepted length it reaches says how far a text tells
its own continuation. The video's placeholders are left out, so that none is ever proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.methods.base import Entry, Method, Prompt, Proposal, take_options
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.decoding.tree import chain_parents
from vflash_analysis.model.target import Target

LONGEST = 3  # tokens matched, the longest match first
DRAFTS = 15  # as many as a block drafts


class PromptLookup:
    """A chain copied from after the latest earlier match in the question and the text so far."""

    name = "lookup"
    tap_layer_ids: tuple[int, ...] = ()
    setting = ""
    max_draft_tokens = max_depth = DRAFTS

    def __init__(self, placeholder_ids: Sequence[int]) -> None:
        """
        Args:
            placeholder_ids: tokens of the prompt that stand for pictures.
        """
        self._placeholders = frozenset(placeholder_ids)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a match -> where what follows it stands

    def _append(self, token: int) -> None:
        """Add a token; matches that end just before it now have something that follows them."""
        here = len(self._tokens)
        for length in range(1, min(LONGEST, here) + 1):
            self._after[tuple(self._tokens[here - length :])] = here
        self._tokens.append(token)

    def start(self, prompt: Prompt, timer: Timer) -> float:
        self._tokens, self._after = [], {}
        for token in prompt.input_ids.tolist():
            if token not in self._placeholders:
                self._append(token)
        return 0.0

    def propose(self, anchor: int, position: int, timer: Timer) -> Proposal:
        self._append(anchor)
        here = len(self._tokens)
        drafts: list[int] = []
        for length in range(min(LONGEST, here), 0, -1):
            found = self._after.get(tuple(self._tokens[here - length :]))
            if found is not None:
                drafts = self._tokens[found : found + DRAFTS]
                break
        timer.lap("draft_s")
        return Proposal(drafts, chain_parents(len(drafts)))

    def commit(self, token_ids: Sequence[int], tapped: torch.Tensor | None) -> None:
        for token in token_ids[:-1]:  # the last one comes back as the next anchor
            self._append(token)


def _build(
    target: Target, network: None, settings: DecodeSettings, given: Mapping[str, str]
) -> Method:
    take_options(given, ())
    return PromptLookup([target.video_token_id, target.image_token_id])


ENTRIES = {"lookup": Entry(_build)}
