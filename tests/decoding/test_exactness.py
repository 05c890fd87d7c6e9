"""Every method gives plain greedy decoding's text, token by token, in float64."""

from __future__ import annotations

import pytest
import torch

from tests.decoding.scripted import SETTINGS, Bench, Scripted, always_wrong, oracle
from tests.tiny import tiny_drafter, tiny_target
from vflash_analysis.decoding.methods import build_method
from vflash_analysis.decoding.methods.base import Proposal
from vflash_analysis.decoding.tree import accept_walk, ancestor_mask, chain_parents, tree_depths
from vflash_analysis.errors import InputError

SPECS = ("chain", "tree60", "tree60:spine_first", "chain:rounds=3", "tree60:nodes=7,rounds=2")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.make(seed=3)


@pytest.fixture(scope="module")
def text(bench: Bench) -> list[int]:
    """40 greedy tokens, stop tokens ignored."""
    return bench.run("ar", stop_ids=()).token_ids


def greedy_without_cache(bench: Bench, max_new_tokens: int) -> list[int]:
    """Reference that shares nothing with the loop: Hugging Face's forward over the whole text."""
    ids = bench.input_ids
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = bench.target.model(
                input_ids=ids[None],
                attention_mask=torch.ones_like(ids)[None],
                pixel_values_videos=bench.pixel_values,
                use_cache=False,
            ).logits[0, -1]
        ids = torch.cat([ids, logits.argmax()[None]])
        # A random target may write a placeholder, which this forward would want pixels for.
        if int(ids[-1]) in (*bench.target.stop_ids, bench.target.video_token_id):
            break
    return ids[len(bench.input_ids) :].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_ar_equals_a_full_recomputation(seed):
    bench = Bench.make(seed)
    reference = greedy_without_cache(bench, 10)
    assert len(reference) > 2
    assert bench.run("ar", 10).token_ids[: len(reference)] == reference


@pytest.mark.parametrize("seed", range(10))
def test_case73_ar_chain_and_trees_agree_on_random_targets(seed):
    target = tiny_target(seed, num_layers=3)
    for prompt_seed in range(4):
        bench = Bench.on(target, tiny_drafter(target, 10 * seed + prompt_seed, 1), prompt_seed)
        reference = bench.run("ar", 12)
        for spec in SPECS if prompt_seed == 0 else ("chain", "tree60"):
            found = bench.run(spec, 12)
            assert found.token_ids == reference.token_ids, (spec, prompt_seed)
            assert found.stop_reason == reference.stop_reason


@pytest.mark.parametrize("block_size", range(2, 17))
def test_every_block_size(block_size):
    bench = Bench.make(seed=1, block_size=block_size)
    reference = bench.run("ar", 12).token_ids
    for spec in ("chain", "tree60", "tree60:nodes=5"):
        found = bench.run(spec, 12)
        assert found.token_ids == reference
        depths = [tree_depths(c.draft_token_ids, c.draft_parents) for c in found.cycles]
        assert max(max(d) for d in depths) <= block_size - 1
        if spec == "chain":
            assert all(len(c.draft_token_ids) == block_size - 1 for c in found.cycles)
    if block_size < 16:
        overruled = Bench.make(seed=1).run(f"chain:block={block_size}", 12)
        assert overruled.token_ids == reference
        assert {len(c.draft_token_ids) for c in overruled.cycles} == {block_size - 1}


def test_drafters_context_settings_change_drafts_not_texts(bench, text):
    seen = set()
    for spec in ("chain", "chain:context=text_only", "chain:context=0.5", "chain:context=0.25"):
        found = bench.run(spec, stop_ids=())
        assert found.token_ids == text
        seen.add(tuple(tuple(c.draft_token_ids) for c in found.cycles))
    assert len(seen) == 4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_backends_verify_trees_too(attention):
    bench = Bench.make(seed=2, attention=attention)
    assert (
        bench.run("tree60").token_ids
        == bench.run("ar").token_ids
        == Bench.make(2).run("ar").token_ids
    )


def test_verify_shaped_ar_is_ar(bench, text):
    for spec in ("ar:verify16", "ar:verify61"):
        assert bench.run(spec, stop_ids=()).token_ids == text
    with pytest.raises(InputError, match="verify16, verify61"):
        bench.run("ar:verify7")


def test_oracle_accepts_everything(bench, text):
    """39 tokens after the first: 16 + 16 + 7, the last cycle cut by the cap."""
    found = bench.run(oracle(text), stop_ids=())
    assert found.token_ids == text
    assert [c.n_committed for c in found.cycles] == [16, 16, 7]
    assert [c.n_accepted for c in found.cycles] == [15, 15, 7]
    assert [c.censored for c in found.cycles] == [False, False, True]


def test_case78_always_wrong_drafter_accepts_nothing(bench, text):
    found = bench.run(always_wrong(text, bench.target.vocab_size), stop_ids=())
    assert found.token_ids == text
    assert all(c.n_accepted == 0 and c.n_committed == 1 and not c.censored for c in found.cycles)
    assert found.verify_calls == len(text) - 1  # tau = 1


@pytest.mark.parametrize("right", [1, 2, 7, 14])
def test_drafts_right_up_to_a_slot_are_accepted_up_to_it(bench, text, right):
    """tau is right + 1: neither the slot after nor one fewer."""

    def write(anchor):
        tokens = list(text[anchor + 1 : anchor + 16])
        tokens += [0] * (15 - len(tokens))
        tokens[right] = (tokens[right] + 1) % bench.target.vocab_size
        return tokens, chain_parents(15)

    found = bench.run(Scripted(write, 15), stop_ids=())
    assert found.token_ids == text
    assert all(c.n_accepted == right and c.n_committed == right + 1 for c in found.cycles[:-1])


def second_child_tree(bench: Bench, text: list[int]) -> Scripted:
    """The target's token is always the second child, on two levels, under wrong first children."""
    vocab = bench.target.vocab_size

    def write(anchor):
        right = [*text[anchor + 1 : anchor + 3], 0, 0][:2]
        wrong = [(token + 1) % vocab for token in right]
        # anchor -> (wrong0, right0); wrong0 -> right1; right0 -> (wrong1, right1)
        return [wrong[0], right[0], right[1], wrong[1], right[1]], [-1, -1, 0, 1, 1]

    return Scripted(write, 5, 2)


def test_case85_second_child_is_taken_when_it_is_the_targets(bench, text):
    found = bench.run(second_child_tree(bench, text), stop_ids=())
    assert found.token_ids == text
    assert all(c.n_accepted == 2 for c in found.cycles[:-1])


@pytest.mark.parametrize("spec", ["chain", "tree60", "tree60:spine_first", "second child"])
def test_case89_cache_equals_a_fresh_prefill(bench, text, spec):
    """After every committed path, contents (not lengths) are those of prompt + text alone."""
    reference = bench.target.new_cache(len(bench.input_ids), 60)
    bench.target.prefill(bench.input_ids, bench.pixel_values, reference)
    bench.target.forward(torch.tensor(text[:-1]), None, reference)
    for length in (2, 9, 23, 40):
        method = second_child_tree(bench, text) if spec == "second child" else spec
        bench.run(method, length, stop_ids=())
        rows = len(bench.input_ids) + length - 1
        assert bench.cache.length == rows
        for layer in range(bench.target.num_layers):
            for ours, fresh in zip(
                bench.cache.keys_values(layer), reference.keys_values(layer), strict=True
            ):
                torch.testing.assert_close(ours, fresh[:, :, :rows], rtol=0, atol=1e-9)


def test_case87_each_node_is_scored_as_its_own_path(bench):
    """A branching tree through the loop's verifier: logits of every node, against that path alone."""
    parents = [-1, -1, 0, 0, 1, 3, 3, 4, -1, 7]
    tokens = [7, 8, 9, 10, 9, 11, 12, 7, 13, 14]
    anchor, start = 20, len(bench.input_ids)
    bench.cache.truncate(start)
    depths = torch.tensor([0, *tree_depths(tokens, parents)])
    forward = bench.target.forward(
        torch.tensor([anchor, *tokens]), depths + start, bench.cache, ancestor_mask(parents)
    )
    for node in range(len(tokens)):
        path, cursor = [], node
        while cursor >= 0:
            path.insert(0, tokens[cursor])
            cursor = parents[cursor]
        bench.cache.truncate(start)
        alone = bench.target.forward(torch.tensor([anchor, *path]), None, bench.cache).logits[-1]
        torch.testing.assert_close(forward.logits[node + 1], alone, rtol=0, atol=1e-10)


def test_the_loop_gives_tree_nodes_their_depths_as_positions_and_paths_as_mask(
    bench, text, monkeypatch
):
    """What reaches the target in a tree cycle: ids, positions start + depth, the ancestor mask."""
    calls = []
    forward = type(bench.target).forward

    def spy(self, token_ids, position_ids, cache, mask=None, tap_layer_ids=()):
        calls.append((token_ids.tolist(), position_ids.tolist(), mask, cache.length))
        return forward(self, token_ids, position_ids, cache, mask, tap_layer_ids)

    monkeypatch.setattr(type(bench.target), "forward", spy)
    bench.run(second_child_tree(bench, text), 4, stop_ids=())
    ids, positions, mask, start = calls[0]
    assert ids[0] == text[0] and len(ids) == 6
    assert positions == [start, start + 1, start + 1, start + 2, start + 2, start + 2]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    calls.clear()
    bench.run(oracle(text), 20, stop_ids=())
    assert all(mask is None for _, _, mask, _ in calls), "a chain needs no mask"
    assert [positions for _, positions, _, _ in calls] == [
        list(range(start, start + 16)) for _, _, _, start in calls
    ]


def test_case91_rows_per_cycle_do_not_grow(bench, monkeypatch):
    rows: list[int] = []
    forward = type(bench.target).forward

    def spy(self, token_ids, *args, **kwargs):
        rows.append(len(token_ids))
        return forward(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(type(bench.target), "forward", spy)
    for spec, most in (("ar", 1), ("chain", 16), ("tree60", 61)):
        rows.clear()
        found = bench.run(spec, stop_ids=())
        assert len(rows) == found.verify_calls
        assert set(rows) == {most}


def test_case67_a_stored_prefill_serves_twice(bench):
    prompt = len(bench.input_ids)
    bench.cache.truncate(prompt)
    before = [t.clone() for layer in range(4) for t in bench.cache.keys_values(layer)]
    first, second = bench.run("chain"), bench.run("chain")
    tree = bench.run("tree60")
    third = bench.run("chain")
    assert first.token_ids == second.token_ids == third.token_ids == tree.token_ids
    drafts = [[c.draft_token_ids for c in g.cycles] for g in (first, second, third)]
    assert drafts[0] == drafts[1] == drafts[2]
    bench.cache.truncate(prompt)
    after = [t for layer in range(4) for t in bench.cache.keys_values(layer)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_spine_first_tree_accepts_at_least_the_chain_at_every_anchor():
    """Both draft at every anchor of the same greedy text; acceptance is judged against that text."""
    strictly_more = 0
    for seed in range(3):
        bench = Bench.make(seed)
        text = bench.run("ar", 24, stop_ids=()).token_ids
        accepted = {}
        for spec in ("chain", "tree60:spine_first"):
            method = build_method(spec, bench.target, SETTINGS, bench.drafter)
            watcher = _Watcher(method, text)
            assert bench.run(watcher, 24, stop_ids=()).token_ids == text
            accepted[spec] = watcher.accepted
        assert len(accepted["chain"]) == len(text) - 1
        pairs = list(zip(accepted["tree60:spine_first"], accepted["chain"], strict=True))
        assert all(tree >= chain for tree, chain in pairs)
        strictly_more += sum(tree > chain for tree, chain in pairs)
    assert strictly_more > 0


class _Watcher:
    """Lets a method draft at every anchor of a text while the loop itself goes one token a cycle."""

    def __init__(self, method, text):
        self.name, self.setting = method.name, method.setting
        self.tap_layer_ids = method.tap_layer_ids
        self.max_draft_tokens, self.max_depth = method.max_draft_tokens, method.max_depth
        self._method, self._text, self.accepted = method, text, []

    def start(self, prompt, timer):
        self._prompt_tokens = len(prompt.input_ids)
        return self._method.start(prompt, timer)

    def propose(self, anchor, position, timer):
        drafts = self._method.propose(anchor, position, timer)
        here = position - self._prompt_tokens
        # The target's choice after a node of depth d on the text is text[here + d + 1].
        ahead = [*self._text[here + 1 :], *[-1] * 20]
        choices = [ahead[d] for d in (0, *tree_depths(drafts.token_ids, drafts.parents))]
        rows = accept_walk(drafts.token_ids, drafts.parents, choices)
        self.accepted.append(len(rows) - 1)
        return Proposal()

    def commit(self, token_ids, tapped):
        self._method.commit(token_ids, tapped)
