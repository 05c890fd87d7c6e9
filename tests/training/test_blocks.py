"""What a block sees, that training and decoding agree, and the scores of slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.memory import traced
from tests.tiny import tiny_drafter, tiny_target
from tests.training.toys import ListSource, batch_of, random_source, settings
from vflash_analysis.model.drafter import VFlashDrafter, drafter_cache
from vflash_analysis.training import blocks
from vflash_analysis.training.batches import FlowBatch, make_batch
from vflash_analysis.training.blocks import (
    TargetPieces,
    block_hidden,
    project_context,
    score_slots,
    target_pieces,
    visible_rows,
)
from vflash_analysis.training.objectives import compute_loss

TARGET = tiny_target(0)
PIECES = target_pieces(TARGET)
DRAFTER = tiny_drafter(TARGET, 1)


def masked(batch: FlowBatch, drafter: VFlashDrafter = DRAFTER) -> torch.Tensor:
    return torch.full_like(batch.labels, drafter.config.mask_token_id)


def run(batch: FlowBatch, tokens: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        context = project_context(DRAFTER, batch)
        return block_hidden(
            DRAFTER, batch, context, masked(batch) if tokens is None else tokens, PIECES
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_block_reads_nothing_at_or_after_its_anchor(seed: int) -> None:
    """200 anchors, neighbours included: states from a cut on reach later anchors only."""
    item = random_source(DRAFTER, 1, new=(41,))[0]
    anchors = torch.arange(40)
    before = run(make_batch([item], [anchors], 15))
    cut = item.prompt_tokens + 3 + 7 * seed
    noise = 1e3 * torch.randn(
        item.states[cut:].shape, generator=torch.Generator().manual_seed(seed)
    )
    states = torch.cat([item.states[:cut], noise.double()])
    after = run(make_batch([dataclasses.replace(item, states=states)], [anchors], 15))
    unchanged = (before == after).flatten(2).all(-1)[0]
    assert unchanged.tolist() == [item.prompt_tokens + a <= cut for a in range(40)]


@pytest.mark.parametrize("anchor", [0, 1, 13])
def test_nan_from_the_anchor_on_reaches_neither_loss_nor_gradient(anchor: int) -> None:
    source = random_source(DRAFTER, 1)
    item = source[0]
    states = item.states.clone()
    states[item.prompt_tokens + anchor :] = float("nan")
    found = []
    for one in (item, dataclasses.replace(item, states=states)):
        drafter = tiny_drafter(TARGET, 1)
        batch = batch_of(ListSource([one]), 15)
        batch = dataclasses.replace(
            make_batch([one], [torch.tensor([anchor])], 15),
            draws=dataclasses.replace(
                batch.draws,
                **{
                    f.name: getattr(batch.draws, f.name)[:, :1]
                    for f in dataclasses.fields(batch.draws)
                },
            ),
        )
        parts = compute_loss(drafter, batch, PIECES, settings(), 5)
        parts.numerators.sum().backward()
        found.append([parts.numerators.detach(), *(p.grad for p in drafter.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_rows_that_padding_adds_are_never_read() -> None:
    source = random_source(DRAFTER, 3)
    batch = batch_of(source, 15)
    states = batch.states.clone()
    states[~batch.context_valid] = float("nan")
    assert torch.equal(run(batch), run(dataclasses.replace(batch, states=states)))
    assert not bool((visible_rows(batch) & ~batch.context_valid[:, None]).any())


def test_blocks_are_bidirectional_inside_and_blind_to_each_other() -> None:
    batch = batch_of(random_source(DRAFTER, 2), 15)
    before = run(batch)
    tokens = masked(batch)
    tokens[0, 1, 4] = 10  # slot 5 of one block
    changed = (run(batch, tokens) != before).any(-1)
    assert bool(changed[0, 1].all())
    changed[0, 1] = False
    assert not bool(changed.any())


def test_the_anchor_token_enters_its_block() -> None:
    batch = batch_of(random_source(DRAFTER, 2), 15)
    other = dataclasses.replace(batch, anchor_ids=(batch.anchor_ids + 1) % 40)
    assert bool((run(batch) != run(other)).any(-1).all())


@pytest.mark.parametrize("keep_every", [1, 2])
def test_training_forward_equals_the_decoding_forward(keep_every: int) -> None:
    """Same states, positions and tokens through the cache path that decoding uses."""
    source = random_source(DRAFTER, 3)
    items = [source[i] for i in range(3)]
    kept = [torch.arange(item.states.shape[0]) % keep_every == 0 for item in items]
    anchors = [torch.tensor([0, 1, 7]), torch.tensor([2, 3, 10]), torch.tensor([5])]
    trained = run(make_batch(items, anchors, 15, kept=kept))
    for b, item in enumerate(items):
        for a, index in enumerate(anchors[b].tolist()):
            at = item.prompt_tokens + index
            rows = torch.arange(at)[kept[b][:at]]
            cache = drafter_cache(DRAFTER, len(rows) + 16)
            ids = torch.cat([item.input_ids[at : at + 1], masked_ids()])
            with torch.no_grad():
                output = DRAFTER(
                    PIECES.embed(ids)[None],
                    item.states[rows][None],
                    torch.cat([rows, torch.arange(at, at + 16)])[None],
                    cache=cache,
                )
            torch.testing.assert_close(
                trained[b, a], output.last_hidden_state[0, 1:], rtol=0, atol=1e-12
            )


def masked_ids() -> torch.Tensor:
    return torch.full((15,), DRAFTER.config.mask_token_id)


def random_head(vocabulary: int = 20, width: int = 6, **changes: Any) -> TargetPieces:
    weight = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(5)).double()
    pieces = TargetPieces(
        embed=lambda ids: ids,
        head=lambda hidden: hidden @ weight.T,
        banned_ids=torch.tensor([0, 19]),
        vocab_size=vocabulary,
        dtype=torch.float64,
    )
    return dataclasses.replace(pieces, **changes)


def test_scores_by_hand() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    pieces = TargetPieces(
        lambda ids: ids, lambda hidden: hidden, torch.tensor([0]), 4, dtype=torch.float64
    )
    scores = score_slots(logits, torch.tensor([1]), pieces)
    whole = torch.tensor([3.0, 1.0, 2.0, 0.0], dtype=torch.float64).exp().sum().log()
    allowed = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64).exp().sum().log()
    assert scores.prediction.tolist() == [2]  # 0 is banned
    assert float(scores.cross_entropy) == pytest.approx(float(whole - 1.0), abs=1e-12)
    assert float(scores.confidence) == pytest.approx(float(2.0 - allowed), abs=1e-12)
    assert scores.sample is None


def test_ties_go_to_the_lowest_id() -> None:
    pieces = TargetPieces(
        lambda ids: ids, lambda hidden: hidden, torch.tensor([0]), 8, dtype=torch.float64
    )
    scores = score_slots(torch.zeros(3, 8, dtype=torch.float64), torch.zeros(3).long(), pieces)
    assert scores.prediction.tolist() == [1, 1, 1]


def rows_at_once(monkeypatch: pytest.MonkeyPatch, rows: int, vocabulary: int = 20) -> None:
    """So many rows of fp64 logits fit the bound."""
    monkeypatch.setattr(blocks, "LOGITS_BYTES", rows * vocabulary * 8 + 7)


@pytest.mark.parametrize(("at_once", "heads"), [(1, 24), (7, 4), (23, 2), (24, 1), (8192, 1)])
def test_chunks_change_neither_scores_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, at_once: int, heads: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 4, 3, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 20, (2, 4, 3), generator=generator)
    uniforms = torch.rand(2, 4, 3, generator=generator)
    found, sizes = [], []
    pieces = random_head()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[0])
        return pieces.head(hidden)

    for rows in (24, at_once):
        rows_at_once(monkeypatch, rows)
        leaf = hidden.clone().requires_grad_()
        sizes.clear()
        scores = score_slots(
            leaf, labels, dataclasses.replace(pieces, head=head), uniforms=uniforms
        )
        forward = list(sizes)
        scores.cross_entropy.sum().backward()
        found.append([*(part.detach() for part in scores), leaf.grad])
    assert sum(forward) == 24 and len(forward) == heads and max(forward) - min(forward) <= 3
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(whole, cut, rtol=0, atol=1e-12)


@pytest.mark.parametrize("samples", [False, True])
def test_memory_of_a_wide_vocabulary_is_bounded_by_bytes(
    monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    """Logits of all rows would be 12 MB; at any time some copies of a chunk's 0.5 MB live."""
    width, vocabulary, rows = 8, 30_000, 100
    weight = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(4))
    head = dataclasses.replace(
        random_head(), head=lambda h: h @ weight.T, vocab_size=vocabulary, dtype=torch.float32
    )
    labels = torch.arange(rows)
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(5)) if samples else None

    def score() -> None:
        hidden = torch.ones(rows, width, requires_grad=True)
        scores = score_slots(hidden, labels, head, uniforms=uniforms)
        scores.cross_entropy.sum().backward()

    bound = 500_000
    monkeypatch.setattr(blocks, "LOGITS_BYTES", bound)
    found = traced(score)
    double = 2 if samples else 1  # samples need sums in fp64
    assert found.largest <= double * bound and found.peak <= (8 if samples else 5) * bound
    monkeypatch.setattr(blocks, "LOGITS_BYTES", 2**28)
    assert traced(score).peak > 3 * 4 * rows * vocabulary  # the test would see whole logits


def test_wrong_samples_follow_the_drafter_without_label_argmax_and_banned_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows_at_once(monkeypatch, 3000)
    hidden = torch.randn(6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    n = 20_000
    uniforms = (torch.arange(n) + 0.5) / n
    label = torch.tensor(7)
    scores = score_slots(hidden.expand(n, 6), label.expand(n), random_head(), uniforms=uniforms)
    assert scores.sample is not None
    best = int(scores.prediction[0])
    assert best != 7
    probabilities = random_head().head(hidden).softmax(-1)
    probabilities[[0, 19, 7, best]] = 0
    expected = probabilities / probabilities.sum()
    shares = torch.bincount(scores.sample, minlength=20) / n
    torch.testing.assert_close(shares.double(), expected, rtol=0, atol=2 / n)


def test_half_precision_logits_are_scored_in_fp32() -> None:
    head = random_head(head=lambda hidden: hidden.repeat(1, 4)[:, :20], dtype=torch.bfloat16)
    scores = score_slots(torch.randn(3, 6), torch.tensor([1, 2, 3]), head)
    assert scores.cross_entropy.dtype == torch.float32
