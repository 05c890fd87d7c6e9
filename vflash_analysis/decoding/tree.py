"""Draft trees: build the most probable one, check it, mask it, walk it.

A tree is given by its nodes in an order where parents precede children: `token_ids[i]` with
`parents[i]`, -1 standing for the anchor. The target sees rows [anchor, node 0, node 1, ...], so
node i is row i + 1. A chain is the tree with `parents[i] == i - 1`; nothing here treats it apart.
Node depth d (1..slots) is the slot it was drafted from; its position is anchor + d.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vflash_analysis.errors import InputError


@dataclass(frozen=True)
class Tree:
    """Draft nodes, parents first.

    Attributes:
        token_ids: drafted token of each node.
        parents: index of each node's parent node, -1 for the anchor.
        logprobs: the drafter's log-probability of each node's own token in its slot.
    """

    token_ids: list[int]
    parents: list[int]
    logprobs: list[float]


def chain_parents(length: int) -> list[int]:
    """Parents of a chain of `length` nodes: -1, 0, 1, ..."""
    return list(range(-1, length - 1))


def rank_slots(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best tokens of every slot, best first, equal ones by lowest id.

    Args:
        logits: (S, V) floats, unnormalised or log-probabilities; -inf is never a candidate.
        k: 1 or more; at most V are returned.

    Returns:
        ids (S, k) int64 and fp32 log-probabilities (S, k), the softmax taken over all V.
    """
    scores = logits.float()
    k = min(k, scores.shape[-1])
    values, ids = scores.topk(k, dim=-1)  # (S, k)
    edge = values[:, -1:]
    if k < scores.shape[-1] and bool(((scores >= edge).sum(-1) > k).any()):
        # topk may take any of several equal candidates at its edge: take those of lowest id. Logits
        # of half precision nearly always have some, so this must not sort the whole vocabulary.
        above, equal = scores > edge, scores == edge
        chosen = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
        ids = chosen.nonzero()[:, 1].view(-1, k)  # (S, k) by id
        values, best = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, best)
    slot_logprobs = (values - scores.logsumexp(dim=-1, keepdim=True)).cpu().numpy()
    slot_ids, slot_values = ids.cpu().numpy(), values.cpu().numpy()
    if (slot_values[:, 1:] == slot_values[:, :-1]).any():
        order = np.lexsort((slot_ids, -slot_values), axis=-1)
        slot_ids = np.take_along_axis(slot_ids, order, axis=-1)
        slot_logprobs = np.take_along_axis(slot_logprobs, order, axis=-1)
    return slot_ids, slot_logprobs


def grow_tree(
    ids: np.ndarray, logprobs: np.ndarray, n_nodes: int, spine_first: bool = False
) -> Tree:
    """Best-first tree over ranked slots.

    A node's score is its parent's plus its own log-probability. Popping the best candidate makes it
    a node and offers its next sibling and its first child, neither of which can score higher, so the
    nodes are the `n_nodes` best prefixes. Equal scores leave in the order they were offered.

    Args:
        ids: (S, k) token ids, best first in each slot.
        logprobs: (S, k) their log-probabilities, non-increasing along k.
        n_nodes: nodes wanted, the anchor not counted; fewer only when finite candidates run out.
        spine_first: take the best token of every slot before anything else, so that the tree holds
            the whole chain whenever n_nodes >= S.
    """
    slot_ids: list[list[int]] = ids.tolist()
    slot_logprobs: list[list[float]] = logprobs.tolist()
    n_slots, k = len(slot_ids), len(slot_ids[0]) if slot_ids else 0
    tokens: list[int] = []
    parents: list[int] = []
    own: list[float] = []
    # Candidate: (-score, order of offering, parent node, parent's score, slot, rank).
    heap: list[tuple[float, int, int, float, int, int]] = []
    offered = 0
    push, pop, lowest = heapq.heappush, heapq.heappop, float("-inf")

    def offer(parent: int, parent_score: float, slot: int, rank: int) -> None:
        nonlocal offered
        logprob = slot_logprobs[slot][rank]
        if logprob > lowest:
            push(heap, (-(parent_score + logprob), offered, parent, parent_score, slot, rank))
            offered += 1

    def add(parent: int, slot: int, rank: int) -> None:
        tokens.append(slot_ids[slot][rank])
        parents.append(parent)
        own.append(slot_logprobs[slot][rank])

    if n_nodes > 0 and n_slots > 0 and k > 0:
        if spine_first:
            parent, score = -1, 0.0
            for slot in range(min(n_slots, n_nodes)):
                logprob = slot_logprobs[slot][0]
                if not logprob > lowest:
                    break
                if k > 1:
                    offer(parent, score, slot, 1)
                score += logprob
                add(parent, slot, 0)
                parent = slot
        else:
            offer(-1, 0.0, 0, 0)
    while heap and len(tokens) < n_nodes:
        negative_score, _, parent, parent_score, slot, rank = pop(heap)
        node = len(tokens)
        add(parent, slot, rank)
        if rank + 1 < k:
            offer(parent, parent_score, slot, rank + 1)
        if slot + 1 < n_slots:
            offer(node, -negative_score, slot + 1, 0)
    return Tree(tokens, parents, own)


def tree_depths(
    token_ids: Sequence[int], parents: Sequence[int], max_depth: int | None = None
) -> list[int]:
    """Depth of every node, 1 for the anchor's children, of a well-formed tree.

    Raises:
        InputError: unequal lengths; a parent that is not -1 or an earlier node (so also a cycle); a
            node deeper than `max_depth`; two children of one parent with the same token.
    """
    if len(token_ids) != len(parents):
        raise InputError(
            f"draft tree: {len(token_ids)} tokens, {len(parents)} parents; one of each per node "
            "is needed"
        )
    depths: list[int] = []
    children: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if not -1 <= parent < node:
            raise InputError(
                f"draft tree: node {node} has parent {parent}; allowed is -1 (anchor) to {node - 1}"
            )
        depth = 1 if parent < 0 else depths[parent] + 1
        if max_depth is not None and depth > max_depth:
            raise InputError(f"draft tree: node {node} is at depth {depth} of {max_depth}")
        if (parent, token) in children:
            raise InputError(f"draft tree: node {node} repeats token {token} under parent {parent}")
        depths.append(depth)
        children.add((parent, token))
    return depths


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node hangs on the one before it; then a causal mask is the tree mask."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """(n + 1, n + 1) bool on the CPU: row i may see row j; the anchor is row 0.

    True where j is i itself, an ancestor of i, or the anchor.
    """
    rows = len(parents) + 1
    mask = np.zeros((rows, rows), dtype=bool)
    mask[0, 0] = True
    for row, parent in enumerate(parents, 1):
        mask[row] = mask[parent + 1]
        mask[row, row] = True
    return torch.from_numpy(mask)


def accept_walk(
    token_ids: Sequence[int], parents: Sequence[int], target_argmax: Sequence[int]
) -> list[int]:
    """Follow the target's own greedy choices down the tree.

    Args:
        token_ids: n draft tokens.
        parents: n parents, -1 for the anchor.
        target_argmax: n + 1 tokens, the target's choice after row 0 (anchor) and each node.

    Returns:
        The rows walked, [0] (the anchor) then one row per accepted draft, in order. The target's
        choice after the last of them is the correction.

    Raises:
        InputError: `target_argmax` does not have n + 1 entries.
    """
    if len(target_argmax) != len(token_ids) + 1:
        raise InputError(
            f"accept walk: {len(target_argmax)} target tokens for {len(token_ids)} drafts; "
            f"{len(token_ids) + 1} are needed"
        )
    rows = [0]
    wanted = target_argmax[0]
    # Parents precede children, so one pass finds every node of the path in order.
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if parent + 1 == rows[-1] and token == wanted:
            rows.append(node + 1)
            wanted = target_argmax[node + 1]
    return rows
