"""The block drafter in our loop, against Hugging Face's loop over the same drafter, and its settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.decoding.scripted import SETTINGS, Bench
from vflash_analysis import schemas
from vflash_analysis.decoding.huggingface import generate_outside
from vflash_analysis.decoding.methods import METHODS, build_method, parse_method
from vflash_analysis.decoding.methods.block import reveal_most_confident
from vflash_analysis.errors import InputError


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.make(seed=5)


def test_the_methods_are_those_that_settings_may_name():
    assert [*METHODS, *schemas.COMPARISON_METHODS] == list(schemas.METHOD_NAMES)
    drafting = [name for name, entry in METHODS.items() if entry.drafter_type is not None]
    assert [*drafting, schemas.HF_DFLASH] == list(schemas.WITH_DRAFTER)
    assert set(schemas.ON_FEW_CLIPS) < set(schemas.METHOD_NAMES)


def cache_at_every_draft(drafter, run) -> list[list[torch.Tensor]]:
    """Keys and values the drafter's cache holds when each drafter forward begins."""
    held: list[list[torch.Tensor]] = []

    def note(module, args, kwargs):
        cache = kwargs["cache"]
        if not cache.get_seq_length():
            held.append([])
        elif hasattr(cache, "keys_values"):
            held.append([t.clone() for i in range(len(cache)) for t in cache.keys_values(i)])
        else:
            held.append([t.clone() for layer in cache.layers for t in (layer.keys, layer.values)])

    handle = drafter.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return held


@pytest.mark.parametrize("seed", range(6))
def test_chain_equals_hugging_face_dflash(seed):
    """Same tokens, target forwards and draft caches, with the ban off as there is none there."""
    bench = Bench.make(seed, block_size=(16, 16, 8, 5, 16, 2)[seed])
    ours, outside = [], []
    held = cache_at_every_draft(bench.drafter, lambda: ours.append(bench.run("chain:unbanned", 24)))
    held_outside = cache_at_every_draft(
        bench.drafter,
        lambda: outside.append(
            generate_outside(bench.target, bench.input_ids, bench.pixel_values, 24, bench.drafter)
        ),
    )
    assert ours[0].token_ids == outside[0].token_ids
    assert ours[0].stop_reason == outside[0].stop_reason
    assert ours[0].verify_calls == outside[0].verify_calls
    assert 0 <= ours[0].draft_calls - outside[0].draft_calls <= 1
    assert len(held) == ours[0].draft_calls
    # In the first draft we have projected the prompt already, Hugging Face does it in the forward.
    assert held_outside[0] == [] and held[0] != []
    for mine, theirs in zip(held[1:], held_outside[1:], strict=False):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert len(held_outside) > 2


@pytest.mark.parametrize("seed", range(3))
def test_plain_generate_gives_our_ar(seed):
    bench = Bench.make(seed)
    outside = generate_outside(bench.target, bench.input_ids, bench.pixel_values, 12)
    ours = bench.run("ar", 12)
    assert outside.token_ids == ours.token_ids
    assert outside.verify_calls == ours.verify_calls == len(ours.token_ids) - 1
    assert outside.draft_calls == 0
    assert outside.prefill_s > 0 and outside.decode_s > 0


def test_outside_times_run_from_the_first_token_to_the_end(bench):
    ticks = iter(range(1000))
    outside = generate_outside(
        bench.target, bench.input_ids, bench.pixel_values, 6, clock=lambda: float(next(ticks))
    )
    # 0 start, 1 prompt, 2 first token, 3..7 five more, 8 end.
    assert len(outside.token_ids) == 6
    assert (outside.prefill_s, outside.decode_s) == (2.0, 6.0)
    assert bench.target.model.generation_config.eos_token_id is not None
    one = generate_outside(bench.target, bench.input_ids, bench.pixel_values, 1)
    assert len(one.token_ids) == 1 and one.verify_calls == 0


def test_special_ids_are_never_drafted_unless_asked(bench):
    banned = set(bench.target.banned_ids.tolist())

    def drafted(spec: str) -> set[int]:
        found = bench.run(spec, stop_ids=())
        return {token for c in found.cycles for token in c.draft_token_ids}

    assert not drafted("chain") & banned
    assert not drafted("tree60") & banned
    assert drafted("tree60:unbanned") & banned


def test_recorded_logprobs_are_the_drafters_after_the_ban(bench):
    """exp of a slot's log-probabilities over all drafts under the anchor never exceeds 1."""
    for cycle in bench.run("tree60", stop_ids=()).cycles:
        assert len(cycle.draft_logprobs) == len(cycle.draft_token_ids) == 60
        roots = [
            math.exp(lp)
            for lp, parent in zip(cycle.draft_logprobs, cycle.draft_parents, strict=True)
            if parent == -1
        ]
        assert 0 < sum(roots) <= 1 + 1e-5
    chain = bench.run("chain", stop_ids=()).cycles
    tree = bench.run("tree60:spine_first", stop_ids=()).cycles
    assert list(chain[0].draft_token_ids) == list(tree[0].draft_token_ids[:15])
    assert chain[0].draft_logprobs == pytest.approx(tree[0].draft_logprobs[:15], abs=1e-6)


def test_reveal_most_confident():
    probabilities = torch.tensor(
        [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2], [0.2, 0.2, 0.6]]
    )
    nothing = torch.zeros(4, dtype=torch.bool)
    slots, tokens = reveal_most_confident(probabilities.log(), nothing, 2)
    assert slots.tolist() == [1, 2] and tokens.tolist() == [1, 0]  # 0.8, then the earlier 0.6
    slots, tokens = reveal_most_confident(
        probabilities.log(), torch.tensor([False, True, True, False]), 3
    )
    assert slots.tolist() == [3] and tokens.tolist() == [2]
    assert len(reveal_most_confident(probabilities.log(), ~nothing, 4)[0]) == 0


@pytest.mark.parametrize(("rounds", "counts"), [(2, [0, 8]), (3, [0, 5, 10]), (4, [0, 4, 8, 12])])
def test_draft_rounds_reveal_ceil_15_r_over_R_and_keep_them(bench, rounds, counts, monkeypatch):
    blocks, lengths = [], []
    embed = type(bench.target).embed

    def spy(self, ids):
        blocks.append(ids.tolist())
        return embed(self, ids)

    def note(module, args, kwargs):
        new = kwargs["context_hidden_states"]
        held = kwargs["cache"].get_seq_length()
        lengths.append((held, 0 if new is None else new.shape[1]))

    monkeypatch.setattr(type(bench.target), "embed", spy)
    handle = bench.drafter.register_forward_pre_hook(note, with_kwargs=True)
    try:
        found = bench.run(f"chain:rounds={rounds}", 8, stop_ids=())
    finally:
        handle.remove()
    assert found.draft_calls == rounds * found.verify_calls == len(blocks)
    mask = bench.drafter.config.mask_token_id
    for begin in range(0, len(blocks), rounds):
        states = blocks[begin : begin + rounds]
        assert [sum(t != mask for t in state[1:]) for state in states] == counts
        assert len({state[0] for state in states}) == 1
        for earlier, later in itertools.pairwise(states):
            assert all(a in (mask, b) for a, b in zip(earlier, later, strict=True))
        # New context enters once, in the first round; block rows leave after each.
        held = lengths[begin : begin + rounds]
        assert all(new == 0 for _, new in held[1:])
        assert {h for h, _ in held[1:]} == {sum(held[0])}


def test_the_last_round_drafts_every_slot_anew(bench, monkeypatch):
    """The draft is the last forward's argmax, revealed slots included."""
    heads = []
    head = type(bench.target).head

    def spy(self, hidden):
        heads.append(head(self, hidden).clone())
        return heads[-1]

    monkeypatch.setattr(type(bench.target), "head", spy)
    cycle = bench.run("chain:rounds=2", 4, stop_ids=()).cycles[0]
    last = heads[1].float().index_fill(-1, bench.target.banned_ids, float("-inf")).argmax(-1)
    first = heads[0].float().index_fill(-1, bench.target.banned_ids, float("-inf")).argmax(-1)
    assert list(cycle.draft_token_ids) == last.tolist()
    assert last.tolist() != first.tolist()


def test_case93_kept_rows_keep_their_positions(bench, monkeypatch):
    seen = []
    append = type(bench.drafter).append_context

    def spy(self, states, positions, cache):
        seen.append((states, positions))
        append(self, states, positions, cache)

    monkeypatch.setattr(type(bench.drafter), "append_context", spy)
    is_video = bench.input_ids == bench.target.video_token_id
    text = (~is_video).nonzero().flatten().tolist()
    video = is_video.nonzero().flatten().tolist()
    bench.run("chain:context=text_only", 3, stop_ids=())
    bench.run("chain:context=0.5", 3, stop_ids=())
    bench.run("chain", 3, stop_ids=())
    (_, only_text), (states, half), (_, everything) = seen
    assert only_text[0].tolist() == text
    kept = [p for p in half[0].tolist() if p in video]
    assert set(text) <= set(half[0].tolist()) and kept == video[1::2]
    assert torch.equal(states[0], bench.prefill.tapped[half[0]])
    assert everything[0].tolist() == list(range(len(bench.input_ids)))


def test_new_context_is_positioned_after_the_prompt_even_when_rows_are_missing(bench):
    positions = []

    def note(module, args, kwargs):
        new = kwargs["context_hidden_states"]
        positions.append((0 if new is None else new.shape[1], kwargs["position_ids"][0].tolist()))

    handle = bench.drafter.register_forward_pre_hook(note, with_kwargs=True)
    try:
        found = bench.run("tree60:context=text_only", 10, stop_ids=())
    finally:
        handle.remove()
    for cycle, (new, ids) in zip(found.cycles, positions, strict=True):
        assert ids == list(range(cycle.start_position - new, cycle.start_position + 16))
    # Each cycle feeds the previous anchor and its accepted drafts.
    assert [new for new, _ in positions] == [0, *[c.n_committed for c in found.cycles[:-1]]]


def test_settings_are_named_in_the_record_and_checked(bench):
    def setting(spec: str, **changes) -> str:
        return build_method(spec, bench.target, replace(SETTINGS, **changes), bench.drafter).setting

    assert setting("chain") == setting("tree60") == setting("ar") == ""
    assert setting("tree60:spine_first") == setting("tree60", spine_first=True) == "spine_first"
    assert setting("chain", spine_first=True) == ""
    assert setting("chain", draft_rounds=2) == setting("chain:rounds=2") == "rounds=2"
    assert setting("tree60", tree_nodes=30) == "nodes=30"
    assert setting("tree60", tree_nodes=30, draft_rounds=2, ban_special_ids=False) == (
        "nodes=30,rounds=2,unbanned"
    )
    assert setting("chain:context=text_only,block=8") == "context=text_only,block=8"
    assert setting("ar:verify16") == "verify16"
    assert parse_method("tree60:spine_first,rounds=2") == (
        "tree60",
        {"spine_first": "", "rounds": "2"},
    )
    assert set(METHODS) >= {"ar", "chain", "tree60"}
    for spec, message in {
        "chian": "allowed: ar, chain, tree60",
        "chain:nodes=3": "unknown options",
        "chain:rounds=x": "invalid literal",
        "chain:rounds=16": "draft_rounds: found 16",
        "chain:rounds=2,rounds=3": "given twice",
        "chain:block=17": "allowed is 2 to 16",
        "chain:context=most": "context: found 'most'",
    }.items():
        with pytest.raises(InputError, match=message):
            build_method(spec, bench.target, SETTINGS, bench.drafter)
    with pytest.raises(InputError, match="needs a drafter"):
        build_method("chain", bench.target, SETTINGS)
