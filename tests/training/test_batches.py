"""Anchors, labels, order and padding: what a step sees, whatever the batch and the resume."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.tiny import tiny_target, tiny_tokenizer
from tests.training.toys import ListSource, continuation
from vflash_analysis.errors import InputError
from vflash_analysis.training.batches import (
    Continuation,
    block_labels,
    draw_anchors,
    draw_reveals,
    make_batch,
    readable_context,
    step_visits,
    training_batch,
    visit_generator,
)

NO_DEADLINE = hypothesis_settings(deadline=None, max_examples=60)


def make(source: ListSource, visits: list[tuple[int, int]], **changes: object) -> object:
    keywords = {"seed": 3, "anchors_per_clip": 4, "n_slots": 15, "max_rounds": 3, **changes}
    return training_batch(source, visits, **keywords)


def source(*sizes: tuple[int, int]) -> ListSource:
    return ListSource(
        [continuation(i, p, n, 6, 50, torch.float64) for i, (p, n) in enumerate(sizes)]
    )


def test_labels_are_the_tokens_after_the_anchor_without_a_shift() -> None:
    ids = torch.tensor([70, 71, 10, 11, 12, 13, 14])  # prompt 70 71, text 10..14
    labels, supervised = block_labels(ids, torch.tensor([2, 5]), n_slots=3)
    assert labels.tolist() == [[11, 12, 13], [14, 0, 0]]
    assert supervised.tolist() == [[True, True, True], [True, False, False]]


def test_slots_after_the_stop_token_are_not_supervised() -> None:
    ids = torch.tensor([70, 10, 11, 9, 12, 13])  # 9 ends the text; what follows is no text
    labels, supervised = block_labels(ids, torch.tensor([1, 2, 3]), 4, stop_ids={9})
    assert supervised.tolist() == [
        [True, True, False, False],
        [True, False, False, False],
        [False, False, False, False],
    ]
    assert labels[0].tolist() == [11, 9, 0, 0]


@pytest.mark.parametrize("longer_first", [False, True])
def test_supervised_text_is_the_answer_and_never_the_prompt(longer_first: bool) -> None:
    tokenizer = tiny_tokenizer()
    prompt, answer = ["describe", "clip"], ["red", "circle", "<|im_end|>"]
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(prompt + answer))
    short = Continuation("a", "VDC", "training", ids, 2, torch.zeros(4, 6))
    longer = continuation(7, 30, 20, 6, 40, torch.float32)
    items = [longer, short] if longer_first else [short, longer]
    batch = make_batch(items, [torch.tensor([0])] * 2, 15, stop_ids={ids[-1].item()})
    row = items.index(short)
    told = [batch.anchor_ids[row, 0], *batch.labels[row, 0][batch.supervised[row, 0]]]
    assert tokenizer.convert_ids_to_tokens([int(i) for i in told]) == answer


def test_block_positions_are_those_of_decoding() -> None:
    batch = make_batch(source((5, 20)).items, [torch.tensor([0, 3])], 15)
    assert batch.block_positions[0].tolist() == [list(range(5, 21)), list(range(8, 24))]


@NO_DEADLINE
@given(n=st.integers(1, 60), k=st.integers(1, 40), more=st.integers(0, 30), seed=st.integers(0, 99))
def test_anchors_are_distinct_rising_in_range_and_nested(
    n: int, k: int, more: int, seed: int
) -> None:
    few = draw_anchors(n, k, visit_generator(seed)).tolist()
    many = draw_anchors(n, k + more, visit_generator(seed)).tolist()
    assert few == sorted(set(few)) and len(few) == min(n, k)
    assert few[0] >= 0 and few[-1] < n
    assert set(few) <= set(many)


def test_anchors_are_uniform() -> None:
    counts = torch.zeros(10)
    for seed in range(2000):
        counts[draw_anchors(10, 3, visit_generator("uniform", seed))] += 1
    # 2000 draws of 3 in 10: 600 expected each, standard deviation 20.5.
    assert (counts - 600).abs().max() < 90


def test_every_anchor_has_a_supervised_successor() -> None:
    data = source((4, 2), (4, 3), (6, 18), (3, 40))
    for epoch in range(30):
        batch = make(data, [(epoch, i) for i in range(4)], anchors_per_clip=5)
        alive = batch.supervised.any(-1)
        assert alive.sum(-1).tolist() == [1, 2, 5, 5]
        assert bool(batch.supervised[alive][:, 0].all())
        assert bool((batch.anchors >= torch.tensor([[4], [4], [6], [3]])).all())


@NO_DEADLINE
@given(
    n_items=st.integers(1, 30),
    per_step=st.integers(1, 12),
    seed=st.integers(0, 9),
    epochs=st.just(3),
)
def test_each_clip_is_seen_once_per_epoch(
    n_items: int, per_step: int, seed: int, epochs: int
) -> None:
    visits: list[tuple[int, int]] = []
    step = 0
    while len(visits) < epochs * n_items:
        visits += step_visits(seed, step, per_step, n_items)
        step += 1
    for epoch in range(epochs):
        seen = [item for where, item in visits if where == epoch]
        assert sorted(seen) == list(range(n_items))
    assert visits[0][0] == 0


def test_epochs_and_seeds_differ_in_order() -> None:
    first = step_visits(0, 0, 50, 50)
    assert [i for _, i in first] != list(range(50))
    assert [i for _, i in first] != [i for _, i in step_visits(0, 1, 50, 50)]
    assert first != step_visits(1, 0, 50, 50)


def test_draws_do_not_depend_on_the_batch() -> None:
    data = source((5, 30), (9, 30), (7, 30))
    together = make(data, [(2, 0), (2, 1), (2, 2)])
    alone = make(data, [(2, 1)])
    assert torch.equal(together.anchors[1], alone.anchors[0])
    for name in ("times", "slots", "rounds", "order", "samples"):
        assert torch.equal(getattr(together.draws, name)[1], getattr(alone.draws, name)[0])
    assert not torch.equal(together.draws.times[0], together.draws.times[1])  # each clip its own
    assert not torch.equal(together.anchors[0] - 5, together.anchors[2] - 7)
    other_epoch = make(data, [(3, 1)])
    assert not torch.equal(other_epoch.draws.times, alone.draws.times)


def test_reveal_draws_are_in_range() -> None:
    draws = draw_reveals(500, 15, 3, visit_generator("range"))
    assert set(draws.rounds.tolist()) == {1, 2, 3}
    for name in ("times", "slots", "order", "samples"):
        values = getattr(draws, name)
        assert values.min() >= 0 and values.max() < 1
    assert draw_reveals(50, 15, 1, visit_generator("one")).rounds.unique().tolist() == [1]


def test_a_clip_alone_is_not_copied() -> None:
    data = source((20, 40))
    batch = make(data, [(0, 0)])
    assert batch.states.untyped_storage().data_ptr() == data[0].states.untyped_storage().data_ptr()


def test_without_states_everything_but_the_context_is_the_same() -> None:
    data = source((5, 12), (20, 40))
    whole, bare = (make(data, [(0, 0), (0, 1)], with_states=flag) for flag in (True, False))
    assert data.read == ["clip-0", "clip-1"]
    assert (
        bare.states.shape[:2] == bare.context_positions.shape == bare.context_valid.shape == (2, 0)
    )
    for name in ("anchors", "anchor_ids", "labels", "supervised"):
        assert torch.equal(getattr(whole, name), getattr(bare, name))
    assert torch.equal(whole.draws.times, bare.draws.times)


def test_padding_changes_nothing() -> None:
    data = source((5, 12), (20, 40))
    together, alone = make(data, [(0, 0), (0, 1)]), make(data, [(0, 0)])
    n = alone.states.shape[1]
    assert torch.equal(together.states[0, :n], alone.states[0])
    assert together.context_valid[0].tolist() == [True] * n + [False] * (
        together.states.shape[1] - n
    )
    assert torch.equal(together.context_positions[0, :n], alone.context_positions[0])
    assert bool((together.states[0, n:] == 0).all())


def test_a_clip_with_few_anchors_gets_dead_blocks() -> None:
    batch = make(source((5, 3), (5, 30)), [(0, 0), (0, 1)], anchors_per_clip=6)
    assert batch.anchors.shape == (2, 6)
    assert batch.supervised.any(-1)[0].tolist() == [True, True, False, False, False, False]
    assert batch.draws.rounds[0, 2:].tolist() == [0, 0, 0, 0]


def test_the_context_ends_before_the_last_anchor() -> None:
    batch = make_batch(source((5, 20)).items, [torch.tensor([1, 4])], 15)
    assert batch.context_positions[0].tolist() == list(range(9))  # last anchor at 5 + 4


def test_thinned_context_keeps_its_positions() -> None:
    target = tiny_target(0)
    video = target.video_token_id
    ids = torch.tensor([8, video, video, video, video, 9, 10, 11, 12])
    item = Continuation("a", "VDC", "training", ids, 6, torch.arange(8.0)[:, None])
    half = readable_context(item, 0.5, video)
    text = readable_context(item, "text_only", video)
    assert readable_context(item, "all", video) is None
    assert half is not None and text is not None
    assert half.nonzero().flatten().tolist() == [0, 2, 4, 5, 6, 7]
    assert text.nonzero().flatten().tolist() == [0, 5, 6, 7]
    batch = make_batch([item], [torch.tensor([1])], 15, kept=[half])
    assert batch.context_positions[0].tolist() == [0, 2, 4, 5, 6]
    assert batch.states[0, :, 0].tolist() == [0, 2, 4, 5, 6]


def test_a_text_of_one_token_is_refused_by_name() -> None:
    item = continuation(0, 5, 2, 6, 50, torch.float64)
    one = dataclasses.replace(item, input_ids=item.input_ids[:6], states=item.states[:5])
    with pytest.raises(InputError, match="clip-0: found 1 new tokens"):
        make(ListSource([one]), [(0, 0)])
