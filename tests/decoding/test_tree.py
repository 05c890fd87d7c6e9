"""The draft tree and the accept walk against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vflash_analysis.decoding.tree import (
    Tree,
    accept_walk,
    ancestor_mask,
    chain_parents,
    grow_tree,
    is_chain,
    rank_slots,
    tree_depths,
)
from vflash_analysis.errors import InputError

quick = settings(max_examples=60, deadline=None, derandomize=True)


def best_first_tree(logits: torch.Tensor, n_nodes: int, spine_first: bool = False) -> Tree:
    """As a drafter's forward becomes a tree in `methods/block.py`."""
    return grow_tree(*rank_slots(logits, n_nodes), n_nodes, spine_first)


def paths_of(tree) -> list[tuple[int, ...]]:
    """Every node as the tuple of tokens that leads to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((() if parent < 0 else paths[parent]) + (token,))
    return paths


def path_score(logprobs: np.ndarray, path: tuple[int, ...]) -> float:
    """Cumulative log-probability, summed from the anchor down as the tree does."""
    total = 0.0
    for slot, token in enumerate(path):
        total += float(logprobs[slot, token])
    return total


def all_paths(n_slots: int, vocab: int):
    for length in range(1, n_slots + 1):
        yield from itertools.product(range(vocab), repeat=length)


@st.composite
def slot_logits(draw):
    """(S, V) logits: smooth, tied (few levels) or with banned entries."""
    n_slots, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 10_000))
    kind = draw(st.sampled_from(["smooth", "tied", "banned"]))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n_slots, vocab, generator=generator) * draw(st.sampled_from([0.3, 3.0]))
    if kind == "tied":
        logits = logits.round()
    if kind == "banned":
        logits[torch.rand(n_slots, vocab, generator=generator) < 0.3] = float("-inf")
    return logits


@quick
@given(st.integers(0, 10_000), st.integers(1, 70), st.floats(0.01, 4), st.floats(0, 0.9))
def test_equal_candidates_rank_by_lowest_id_as_in_a_stable_sort(seed, k, scale, banned):
    """Logits of half precision, many of them equal, some or most of them banned."""
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(5, 60, generator=generator)).to(torch.bfloat16).float()
    logits[torch.rand(5, 60, generator=generator) < banned] = float("-inf")
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    found, logprobs = rank_slots(logits, k)
    k = min(k, 60)
    assert found.tolist() == ids[:, :k].tolist()
    expected = (values - logits.logsumexp(-1, keepdim=True))[:, :k].numpy()
    np.testing.assert_array_equal(logprobs, expected)


@quick
@given(slot_logits(), st.integers(1, 90))
def test_nodes_are_the_most_probable_prefixes(logits, n_nodes):
    """Reference: score every path of the whole token tree and take the best."""
    n_slots, vocab = logits.shape
    logprobs = logits.double().log_softmax(-1).float().numpy()
    logprobs = np.where(np.isnan(logprobs), -np.inf, logprobs)
    tree = best_first_tree(torch.from_numpy(logprobs), n_nodes)
    finite = [p for p in all_paths(n_slots, vocab) if path_score(logprobs, p) > -np.inf]
    assert len(tree.token_ids) == min(n_nodes, len(finite))
    found = paths_of(tree)
    assert len(set(found)) == len(found)
    expected = sorted((path_score(logprobs, p) for p in finite), reverse=True)[: len(found)]
    scores = [path_score(logprobs, p) for p in found]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    # Best first, and prefix-closed by construction of the parents.
    assert all(a >= b - 1e-5 for a, b in itertools.pairwise(scores))
    depths = tree_depths(tree.token_ids, tree.parents, n_slots)
    for token, depth, logprob in zip(tree.token_ids, depths, tree.logprobs, strict=True):
        assert logprob == pytest.approx(float(logprobs[depth - 1, token]), abs=1e-5)


@quick
@given(slot_logits(), st.integers(1, 40))
def test_spine_first_holds_the_whole_chain_and_then_the_best_of_the_rest(logits, n_nodes):
    n_slots, vocab = logits.shape
    tree = best_first_tree(logits, n_nodes, spine_first=True)
    logprobs = logits.log_softmax(-1).numpy()
    spine = []
    for slot in range(n_slots):
        if not torch.isfinite(logits[slot]).any():
            break
        spine.append(int(logits[slot].argmax()))
    spine = spine[: min(len(spine), n_nodes)]
    found = paths_of(tree)
    assert found[: len(spine)] == [tuple(spine[: i + 1]) for i in range(len(spine))]
    assert len(set(found)) == len(found)
    tree_depths(tree.token_ids, tree.parents, n_slots)
    # Whatever follows the spine is as good as the best paths outside it.
    rest = [p for p in all_paths(n_slots, vocab) if p not in set(found[: len(spine)])]
    scores = sorted((s for p in rest if (s := path_score(logprobs, p)) > -np.inf), reverse=True)
    tail = [path_score(logprobs, p) for p in found[len(spine) :]]
    assert len(tail) == min(n_nodes - len(spine), len(scores))
    np.testing.assert_allclose(tail, scores[: len(tail)], atol=1e-5)


def test_tree_of_sixty_over_fifteen_slots_needs_no_rank_beyond_its_size():
    """Cutting each slot to n_nodes ranks changes nothing (checked against the full vocabulary)."""
    logits = torch.randn(15, 300, generator=torch.Generator().manual_seed(1))
    tree = best_first_tree(logits, 60)
    full = best_first_tree(torch.cat([logits, torch.full((15, 5), -60.0)], 1), 60)
    assert len(tree.token_ids) == 60
    assert paths_of(tree) == paths_of(full)


def test_equal_scores_leave_by_lowest_id_and_insertion_order():
    """Four equal tokens in two slots: siblings by id, then children as offered."""
    tree = best_first_tree(torch.zeros(2, 4), 6)
    assert paths_of(tree) == [(0,), (1,), (2,), (3,), (0, 0), (1, 0)]
    # More equal candidates than ranks kept: topk alone may return any of them.
    ids, _ = rank_slots(torch.zeros(3, 500), 7)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6]] * 3
    half_tied = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    assert rank_slots(half_tied, 4)[0].tolist() == [[1, 3, 2, 4]]


def test_banned_and_impossible_tokens_never_become_nodes():
    logits = torch.full((2, 5), float("-inf"))
    logits[0, 3] = logits[0, 1] = logits[1, 4] = 0.0
    tree = best_first_tree(logits, 60)
    assert sorted(paths_of(tree)) == [(1,), (1, 4), (3,), (3, 4)]
    assert best_first_tree(torch.full((2, 5), float("-inf")), 60).token_ids == []


def test_hand_made_scores_decide_between_depth_and_breadth():
    """0.6*0.9 = 0.54 beats the sibling's 0.4; 0.54*0.7 = 0.378 does not."""
    probabilities = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]])
    tree = best_first_tree(probabilities.log(), 4)
    assert paths_of(tree) == [(0,), (0, 0), (1,), (0, 0, 0)]
    assert tree.parents == [-1, 0, -1, 1]
    assert tree_depths(tree.token_ids, tree.parents) == [1, 2, 1, 3]


def test_case86_tree_is_validated():
    assert tree_depths([5, 6, 7, 8], [-1, 0, 0, 1]) == [1, 2, 2, 3]
    bad = {
        "own parent": ([5, 6], [0, 0]),
        "cycle": ([5, 6], [1, 0]),
        "parent after child": ([5, 6, 7], [-1, 2, 0]),
        "below -1": ([5], [-2]),
        "duplicate siblings": ([5, 6, 6], [-1, 0, 0]),
        "lengths": ([5, 6], [-1]),
    }
    for name, (tokens, parents) in bad.items():
        with pytest.raises(InputError, match="draft tree"):
            tree_depths(tokens, parents)
            pytest.fail(name)
    with pytest.raises(InputError, match="depth 3 of 2"):
        tree_depths([5, 6, 7], [-1, 0, 1], max_depth=2)


def test_a_chain_is_a_tree():
    assert chain_parents(4) == [-1, 0, 1, 2]
    assert tree_depths([9, 9, 9, 9], chain_parents(4)) == [1, 2, 3, 4]
    assert (
        is_chain([])
        and is_chain([-1, 0, 1])
        and not is_chain([-1, 0, 0])
        and not is_chain([-1, -1])
    )
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(ancestor_mask(chain_parents(4)), causal)


@st.composite
def random_parents(draw):
    n = draw(st.integers(0, 12))
    return [draw(st.integers(-1, node - 1)) for node in range(n)]


@quick
@given(random_parents())
def test_mask_is_ancestors_or_self(parents):
    mask = ancestor_mask(parents)
    assert mask.shape == (len(parents) + 1, len(parents) + 1)
    for row in range(len(parents) + 1):
        allowed, cursor = {0, row}, row
        while cursor > 0:
            allowed.add(cursor)
            cursor = parents[cursor - 1] + 1
        assert set(torch.where(mask[row])[0].tolist()) == allowed


@st.composite
def walks(draw):
    """A random tree without duplicate siblings over few tokens, and the target's choices."""
    parents = draw(random_parents())
    tokens: list[int] = []
    used: dict[int, set[int]] = {}
    for parent in parents:
        free = sorted(set(range(14)) - used.setdefault(parent, set()))
        token = draw(st.sampled_from(free[:3]))
        used[parent].add(token)
        tokens.append(token)
    return (
        tokens,
        parents,
        draw(st.lists(st.integers(0, 3), min_size=len(parents) + 1, max_size=len(parents) + 1)),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(walks())
def test_accept_walk_equals_step_by_step_search(case):
    tokens, parents, target = case
    children = {
        (parent + 1, token): node + 1
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))
    }
    row, expected = 0, [0]
    while (row, target[row]) in children:
        row = children[(row, target[row])]
        expected.append(row)
    assert accept_walk(tokens, parents, target) == expected


def test_accept_walk_checks_the_first_draft_and_takes_the_second_child():
    chain = chain_parents(3)
    assert accept_walk([7, 8, 9], chain, [1, 8, 9, 4]) == [0]
    assert accept_walk([7, 8, 9], chain, [7, 1, 9, 4]) == [0, 1]
    assert accept_walk([7, 8, 9], chain, [7, 8, 9, 4]) == [0, 1, 2, 3]
    # anchor -> (5, 6); 5 -> 7; 6 -> 8: the second child and its child are the target's choice.
    assert accept_walk([5, 6, 7, 8], [-1, -1, 0, 1], [6, 7, 8, 0, 3]) == [0, 2, 4]
    # Token 0 is an ordinary token.
    assert accept_walk([0], [-1], [0, 0]) == [0, 1]
    assert accept_walk([], [], [3]) == [0]
    with pytest.raises(InputError, match="3 are needed"):
        accept_walk([1, 2], [-1, 0], [1, 2])
