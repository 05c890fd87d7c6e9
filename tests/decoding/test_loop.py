"""Where a text ends, what a cycle's record says, and what the clock measures."""

from __future__ import annotations

import pytest
import torch

from tests.decoding.scripted import Bench, Scripted, always_wrong, oracle
from vflash_analysis.decoding.loop import (
    LENGTH,
    STOP_TOKEN,
    cut_at_stop,
    decode,
    target_ranks,
)
from vflash_analysis.decoding.methods.ar import AutoRegressive
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.decoding.tree import chain_parents
from vflash_analysis.errors import InputError

BLOCK = 15


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.make(seed=3)


@pytest.fixture(scope="module")
def text(bench: Bench) -> list[int]:
    return bench.run("ar", stop_ids=()).token_ids


def test_cut_at_stop():
    assert cut_at_stop([4, 5, 9, 6, 7], 5, {9}) == ([4, 5, 9], STOP_TOKEN)
    assert cut_at_stop([4, 5, 9, 6, 7], 2, {9}) == ([4, 5], LENGTH)
    assert cut_at_stop([4, 5, 9], 3, {9}) == ([4, 5, 9], STOP_TOKEN)
    assert cut_at_stop([4, 5], 2, {9}) == ([4, 5], LENGTH)
    assert cut_at_stop([4, 5], 3, {9}) == ([4, 5], None)
    assert cut_at_stop([9], 1, {9}) == ([9], STOP_TOKEN)


def first_occurrences(text: list[int]) -> list[int]:
    """Places whose token has not appeared before: there a stop set of that token ends the text."""
    return [i for i, token in enumerate(text) if token not in text[:i]]


@pytest.mark.parametrize("slot", range(1, BLOCK + 2))
def test_case79_stop_token_in_every_slot_of_a_block(bench, text, slot):
    """A first cycle brings the anchor `slot` tokens before the stop; the oracle drafts past it.

    Slot 16 stands for the correction after 15 accepted drafts.
    """
    place = next(i for i in first_occurrences(text) if i > BLOCK + 1)
    lead = place - 1 - slot  # drafts of the first cycle, all right: the next anchor is lead + 1

    def write(anchor):
        depth = lead if anchor == 0 else BLOCK
        tokens = text[anchor + 1 : anchor + 1 + depth]
        return tokens, chain_parents(len(tokens))

    found = bench.run(Scripted(write, 40, 40), stop_ids={text[place]})
    assert found.token_ids == text[: place + 1]
    assert found.stop_reason == STOP_TOKEN
    first, last = found.cycles
    assert (first.n_committed, first.censored) == (lead + 1, False)
    assert (last.n_committed, last.n_accepted) == (slot, min(slot, BLOCK))
    assert list(last.target_token_ids) == text[lead + 2 : place + 1]
    # The target had confirmed drafts beyond the stop, unless the stop was its correction.
    assert last.censored == (slot <= BLOCK)


def test_first_token_may_be_the_last(bench, text):
    for found in (bench.run("chain", stop_ids={text[0]}), bench.run("chain", 1, stop_ids=())):
        assert found.token_ids == text[:1]
        assert found.cycles == [] and found.draft_calls == 0
        assert found.decode_s == found.context_projection_s == 0.0


def test_stop_token_as_correction_is_not_censored(bench, text):
    """A wrong draft at the stop's place: the target's own token ends the text, nothing is cut."""
    place = first_occurrences(text)[5]
    found = bench.run(always_wrong(text, bench.target.vocab_size), stop_ids={text[place]})
    assert found.token_ids == text[: place + 1]
    assert not any(c.censored for c in found.cycles)
    assert found.stop_reason == STOP_TOKEN


@pytest.mark.parametrize("cap", [1, 2, 3, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 3])
def test_case81_caps_are_exact(bench, text, cap):
    for method in ("ar", "chain", "tree60", oracle(text)):
        found = bench.run(method, cap, stop_ids=())
        assert found.token_ids == text[:cap]
        assert found.stop_reason == LENGTH
        assert sum(c.n_committed for c in found.cycles) == cap - 1
    # A cycle of the oracle confirms 16 tokens; the last one is cut unless the cap falls on its end.
    assert found.verify_calls == -(-(cap - 1) // (BLOCK + 1))
    if cap > 1:
        last = found.cycles[-1]
        assert last.censored == ((cap - 1) % (BLOCK + 1) != 0)
        assert last.n_accepted == min(last.n_committed, BLOCK)
        assert not any(c.censored for c in found.cycles[:-1])


def test_case82_the_earliest_of_stop_and_cap_wins(bench, text):
    place = next(i for i in first_occurrences(text) if 3 <= i <= 12)
    for cap, length, reason in (
        (place + 3, place + 1, STOP_TOKEN),
        (place + 1, place + 1, STOP_TOKEN),
        (place, place, LENGTH),
    ):
        found = bench.run(oracle(text), cap, stop_ids={text[place]})
        assert (len(found.token_ids), found.stop_reason) == (length, reason)


def test_targets_own_stop_set_is_the_default(bench, text):
    stop = next(iter(bench.target.stop_ids))
    found = bench.run("chain", 40)
    expected = text[: text.index(stop) + 1] if stop in text else text
    assert found.token_ids == expected


def test_cycle_record_of_a_tree(bench, text):
    """anchor -> (wrong, right); right -> (right, wrong): two accepted, then the correction."""
    vocab = bench.target.vocab_size

    def write(anchor):
        one, two = ([*text, 0, 0])[anchor + 1 : anchor + 3]
        return [(one + 1) % vocab, one, two, (two + 1) % vocab], [-1, -1, 1, 1]

    method = Scripted(write, 4, 2, tap_layer_ids=(0, 2))
    found = bench.run(method, 11, stop_ids=())
    assert found.token_ids == text[:11]
    first = found.cycles[0]
    assert first.start_position == len(bench.input_ids)
    assert list(first.draft_parents) == [-1, -1, 1, 1]
    assert first.draft_token_ids[1:3] == text[1:3]
    assert list(first.target_token_ids) == text[1:4]
    assert (first.n_accepted, first.n_committed, first.censored) == (2, 3, False)
    assert list(first.target_rank) == []
    starts = [c.start_position - len(bench.input_ids) for c in found.cycles]
    assert starts == [0, 3, 6, 9]
    last = found.cycles[-1]
    assert (last.n_accepted, last.n_committed, last.censored) == (1, 1, True)
    assert list(last.target_token_ids) == text[10:11]
    # The method was told every committed token of every cycle but the last, with its states.
    assert [t for tokens in method.committed for t in tokens] == text[1:10]
    assert [states.shape for states in method.tapped] == [(3, 2 * bench.target.hidden_size)] * 3


def test_committed_states_are_those_of_anchor_and_accepted_drafts(bench, text):
    """Tapped rows handed to a method equal the states of a plain pass over the text."""
    vocab = bench.target.vocab_size

    def write(anchor):
        one, two = ([*text, 0, 0])[anchor + 1 : anchor + 3]
        return [(one + 1) % vocab, one, two], [-1, -1, 1]

    method = Scripted(write, 3, 2, tap_layer_ids=(0, 2))
    bench.run(method, 11, stop_ids=())
    bench.cache.truncate(len(bench.input_ids))
    plain = bench.target.forward(torch.tensor(text[:9]), None, bench.cache, None, (0, 2)).tapped
    torch.testing.assert_close(torch.cat(method.tapped), plain, rtol=0, atol=1e-9)


def test_target_ranks():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.5], [3.0, 1.0, float("-inf"), 2.0]])
    assert target_ranks(scores, [1, 0]) == [0, 0]
    assert target_ranks(scores, [2, 3]) == [1, 1]
    assert target_ranks(scores, [3, 2]) == [2, 3]  # equal scores by lowest id; banned comes last
    assert target_ranks(scores, [0]) == [3]
    assert target_ranks(scores, [1, 0, 2]) == [0, 0]  # the third token has no slot


def test_rank_zero_is_the_first_choice_and_survives_in_the_record(bench):
    found = bench.run("chain", stop_ids=())
    for cycle in found.cycles:
        for slot, (token, rank) in enumerate(
            zip(cycle.target_token_ids, cycle.target_rank, strict=True)
        ):
            assert (rank == 0) == (cycle.draft_token_ids[slot] == token)
    assert any(rank > 0 for c in found.cycles for rank in c.target_rank)


class FakeClock:
    """Seconds that pass only when told, and a count of synchronisations."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self.step, self.syncs = 0.0, step, 0

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def synchronize(self) -> None:
        self.syncs += 1


def test_case121_every_lap_is_synchronised_at_both_ends():
    clock = FakeClock()
    timer = Timer("cpu", clock, clock.synchronize)
    timer.start()
    assert clock.syncs == 1
    assert timer.lap("draft_s") == 1.0
    assert clock.syncs == 2
    timer.lap("other_s")
    timer.lap("draft_s")
    assert timer.take() == {"draft_s": 2.0, "verify_s": 0.0, "other_s": 1.0, "tree_s": None}
    timer.lap("tree_s")
    timer.lap("other_s")
    timer.lap("tree_s")
    assert timer.take() == {"draft_s": 0.0, "verify_s": 0.0, "other_s": 3.0, "tree_s": 2.0}
    assert timer.take() == {"draft_s": 0.0, "verify_s": 0.0, "other_s": 0.0, "tree_s": None}
    assert timer.elapsed_s == 6.0
    plain = Timer("cpu")
    assert plain._synchronize is None, "the CPU needs no synchronisation"


def test_parts_sum_to_the_cycle_and_cycles_to_the_text(bench, text):
    for spec in ("ar", "chain", "tree60"):
        clock = FakeClock(0.25)
        timer = Timer("cpu", clock, clock.synchronize)
        found = bench.run(spec, 20, stop_ids=(), timer=timer)
        end = 0.0
        for cycle in found.cycles:
            end += cycle.draft_s + cycle.verify_s + cycle.other_s
            assert cycle.end_s == pytest.approx(end)
            assert cycle.verify_s == 0.25
            assert cycle.tree_s == (0.25 if spec == "tree60" else None)
            assert cycle.other_s == (0.75 if spec == "tree60" else 0.5)
        assert found.decode_s == pytest.approx(end)
        if spec == "ar":
            assert found.context_projection_s == 0.0
            assert all(c.draft_s == 0.0 for c in found.cycles)
        else:
            # The projection of the prompt is one lap of the first cycle's drafting.
            assert found.context_projection_s == 0.25
            assert found.cycles[0].draft_s == 0.5
            assert all(c.draft_s == 0.25 for c in found.cycles[1:])


def test_ar_uses_no_hooks_and_no_mask(bench, monkeypatch):
    seen = []
    forward = type(bench.target).forward

    def spy(self, token_ids, position_ids, cache, mask=None, tap_layer_ids=()):
        seen.append((len(token_ids), mask, tuple(tap_layer_ids)))
        return forward(self, token_ids, position_ids, cache, mask, tap_layer_ids)

    monkeypatch.setattr(type(bench.target), "forward", spy)
    bench.run("ar", 6, stop_ids=())
    assert seen == [(1, None, ())] * 5


def test_case69_no_room_is_our_error(bench):
    method = AutoRegressive()
    small = bench.target.new_cache(8, 1)
    with pytest.raises(InputError, match="cache: holds 0 rows, the prompt has"):
        decode(bench.target, bench.input_ids, bench.prefill, small, method, 4)
    small = bench.target.new_cache(len(bench.input_ids), 4, verify_rows=1)
    bench.target.prefill(bench.input_ids, bench.pixel_values, small)
    tree = Scripted(lambda _: ([5] * 60, chain_parents(60)), 60, 60)
    with pytest.raises(InputError, match=f"do not fit the capacity of {small.capacity}"):
        decode(bench.target, bench.input_ids, bench.prefill, small, tree, 4, stop_ids=())
    with pytest.raises(InputError, match="max_new_tokens: found 0"):
        bench.run("ar", 0)


def test_a_full_cache_is_enough_for_the_longest_text(bench):
    """Capacity as the target makes it: the cap reached with whole trees, no overflow."""
    cap = bench.cache.capacity - len(bench.input_ids) - 61
    wide = Scripted(lambda _: ([i % 50 for i in range(60)], chain_parents(60)), 60, 60)
    found = bench.run(wide, cap, stop_ids=())
    assert len(found.token_ids) == cap


def test_case86_an_invalid_tree_is_refused_before_the_target_sees_it(bench):
    for tokens, parents in (([5, 6], [0, 0]), ([5, 5], [-1, -1]), ([5, 6, 7], [-1, -1])):
        with pytest.raises(InputError, match="draft tree: "):
            bench.run(Scripted(lambda _, t=tokens, p=parents: (t, p), 60, 60), 8, stop_ids=())
    deep = Scripted(lambda _: ([5, 6, 7], [-1, -1, 1]), 60, 1)
    with pytest.raises(InputError, match="draft tree: node 2 is at depth 2 of 1"):
        bench.run(deep, 8, stop_ids=())
