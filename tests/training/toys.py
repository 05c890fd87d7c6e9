"""Shared pieces of the training tests: continuations in memory, settings, and fake drafters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vflash_analysis.config import TrainSettings
from vflash_analysis.training.batches import Continuation, FlowBatch, training_batch
from vflash_analysis.training.blocks import TargetPieces

SETTINGS = TrainSettings(
    objective="self_reveal",
    train_seed=1,
    steps=20,
    clips_per_step=4,
    anchors_per_clip=3,
    gamma=7.0,
    lambda_flow=1.0,
    ramp_fraction=0.0,
    revealed_weight=1.0,
    reveal_order="confidence",
    max_reveal_rounds=3,
    learning_rate=1e-2,
    warmup_fraction=0.1,
    weight_decay=0.01,
    grad_clip=1.0,
    checkpoint_every=10,
    evaluate_every=10,
    training_clips=1000,
)


def settings(**changes: Any) -> TrainSettings:
    return dataclasses.replace(SETTINGS, **changes)


class ListSource:
    """Continuations in memory that remember which were read."""

    def __init__(self, items: Sequence[Continuation]) -> None:
        self.items = list(items)
        self.read: list[str] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Continuation:
        self.read.append(self.items[index].clip_id)
        return self.items[index]

    def expect(self, indices: Sequence[int]) -> None:
        """Nothing is read ahead."""

    def text(self, index: int) -> Continuation:
        return dataclasses.replace(self.items[index], states=torch.empty(0, 0))

    def anchor_counts(self) -> list[int]:
        return [item.new_tokens - 1 for item in self.items]

    def clip_ids(self) -> list[str]:
        return [item.clip_id for item in self.items]

    def lengths(self) -> list[int]:
        return [len(item.input_ids) for item in self.items]


def continuation(
    number: int, prompt: int, new: int, width: int, vocabulary: int, dtype: torch.dtype
) -> Continuation:
    """Random tokens 6..`vocabulary` - 1, none of them special in the tiny tokenizer, and states."""
    generator = torch.Generator().manual_seed(1000 + number)
    return Continuation(
        clip_id=f"clip-{number}",
        benchmark="VDC",
        split="training",
        input_ids=torch.randint(6, vocabulary, (prompt + new,), generator=generator),
        prompt_tokens=prompt,
        states=torch.randn(prompt + new - 1, width, generator=generator, dtype=dtype),
    )


def random_source(
    drafter: Any, n_clips: int, *, prompt: int = 9, new: Sequence[int] = (20, 12, 27)
) -> ListSource:
    """Continuations that fit a drafter; their tokens are words of the tiny tokenizer."""
    config = drafter.config
    width = len(config.target_layer_ids) * config.hidden_size
    dtype = next(drafter.parameters()).dtype
    return ListSource(
        [
            continuation(i, prompt + i % 3, new[i % len(new)], width, 40, dtype)
            for i in range(n_clips)
        ]
    )


def batch_of(
    source: ListSource, n_slots: int, *, anchors_per_clip: int = 4, seed: int = 0, n: int = 99
) -> FlowBatch:
    visits = [(0, index) for index in range(min(n, len(source)))]
    return training_batch(
        source,
        visits,
        seed=seed,
        anchors_per_clip=anchors_per_clip,
        n_slots=n_slots,
        max_rounds=3,
    )


class Oracle(nn.Module):
    """A drafter that knows the texts: the hidden state at position p is the token id p holds.

    The clip is told by its states, whose first feature is the clip's number.

    Args:
        texts: token ids of each clip.
        vocabulary: V.
        block_size: slots of a block.
        shift: 0 for the truth; 1 predicts the token after the right one.
    """

    def __init__(
        self, texts: Sequence[Tensor], vocabulary: int, block_size: int = 16, shift: int = 0
    ) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.texts, self.vocabulary, self.shift = list(texts), vocabulary, shift
        self.config = SimpleNamespace(
            mask_token_id=vocabulary - 1, block_size=block_size, context="all"
        )
        self.seen: list[Tensor] = []

    def project(self, states: Tensor, keep: Tensor | None = None) -> Tensor:
        return states[..., :1]

    def context_keys_values(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def forward_blocks(
        self,
        noise_embeds: Tensor,
        context_hidden: Tensor,
        block_positions: Tensor,
        visible: Tensor,
    ) -> Tensor:
        self.seen.append(noise_embeds[..., 0].long())
        out = torch.zeros(*block_positions.shape, self.vocabulary, dtype=torch.float64)
        for b, hidden in enumerate(context_hidden):
            text = self.texts[int(hidden[0, 0])]
            at = (block_positions[b] + self.shift).clamp(max=len(text) - 1)
            out[b].scatter_(-1, text[at][..., None], 1000.0)
        return out

    def pieces(self) -> TargetPieces:
        """An embedding that hands the ids through and an identity as head."""
        return TargetPieces(
            embed=lambda ids: ids[..., None].double(),
            head=lambda hidden: hidden,
            banned_ids=torch.tensor([self.vocabulary - 1]),
            vocab_size=self.vocabulary,
            dtype=torch.float64,
        )


def oracle_source(n_clips: int, new: int = 25, prompt: int = 5, vocabulary: int = 30) -> ListSource:
    """Texts whose first state feature is the clip's number, as `Oracle` needs it."""
    items = []
    for number in range(n_clips):
        item = continuation(number, prompt + number, new, 2, vocabulary - 2, torch.float64)
        states = item.states.clone()
        states[:, 0] = number
        items.append(dataclasses.replace(item, states=states))
    return ListSource(items)
