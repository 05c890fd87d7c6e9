"""The one decode loop: propose, verify, accept, roll back, stop.

Every method runs through it, plain greedy decoding too (an empty proposal). It starts from a
prefilled cache and commits only tokens that are the target's own greedy choice, so the text does
not depend on the method: `tests/decoding/test_exactness.py` checks that token by token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from vflash_analysis.decoding.methods.base import Method, Prompt, Proposal
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.decoding.tree import accept_walk, ancestor_mask, is_chain, tree_depths
from vflash_analysis.errors import InputError
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.target import Prefill, Target

STOP_TOKEN = "eos"
LENGTH = "length"


@dataclass(frozen=True)
class Cycle:
    """One draft and one verify; a row of the cycles table.

    Attributes:
        start_position: position of the anchor.
        draft_token_ids, draft_parents, draft_logprobs: the proposal.
        target_token_ids: the target's choice at every row walked, as far as it was committed; so
            equal to the committed tokens.
        target_rank: rank (0 = first choice) the drafter gave each of them in its slot; shorter
            where the block has no such slot, empty if the method has no scores.
        n_accepted: committed tokens that were drafts.
        n_committed: committed tokens, 1 or more.
        censored: whether the stop token or the cap cut off tokens the target had confirmed.
        draft_s, verify_s, other_s: the parts of the cycle, which sum to it.
        tree_s: of other_s, what building the tree took; None where none was built.
        end_s: seconds from the start of decoding to the end of this cycle.
    """

    start_position: int
    draft_token_ids: Sequence[int]
    draft_parents: Sequence[int]
    draft_logprobs: Sequence[float]
    target_token_ids: Sequence[int]
    target_rank: Sequence[int]
    n_accepted: int
    n_committed: int
    censored: bool
    draft_s: float
    verify_s: float
    other_s: float
    tree_s: float | None
    end_s: float


@dataclass(frozen=True)
class Generation:
    """A decoded text.

    Attributes:
        token_ids: new tokens, a stop token included; the first one comes from the prefill.
        stop_reason: "eos" (a stop token) or "length" (the cap), whichever came first.
        decode_s: seconds from the first token known to the last, drafting and the projection of
            the prompt included; 0.0 if the first token is the only one.
        context_projection_s: the drafter's projection of the prompt alone.
        draft_calls: forwards of the drafter.
        verify_calls: target forwards after the prefill; in our loop one per cycle.
        prefill_s: seconds to the first token, vision included, of a loop with a prefill of its own.
    """

    token_ids: list[int]
    stop_reason: str
    cycles: list[Cycle] = field(default_factory=list)
    decode_s: float = 0.0
    context_projection_s: float = 0.0
    draft_calls: int = 0
    verify_calls: int = 0
    prefill_s: float | None = None


def cut_at_stop(
    walked: Sequence[int], room: int, stop_ids: Collection[int]
) -> tuple[list[int], str | None]:
    """The tokens that may be committed and why the text ends with them, if it does.

    The earliest of the first stop token and the `room`-th token (1 or more) ends the text; a stop
    token in the last place counts as a stop token.
    """
    for index, token in enumerate(walked[:room]):
        if token in stop_ids:
            return list(walked[: index + 1]), STOP_TOKEN
    return list(walked[:room]), LENGTH if len(walked) >= room else None


def target_ranks(slot_scores: torch.Tensor, token_ids: Sequence[int]) -> list[int]:
    """Rank of `token_ids[k]` in slot k + 1: how many tokens the drafter put before it.

    Args:
        slot_scores: (S, V); equal scores rank by lowest id.
        token_ids: any number; those beyond S have no slot and no rank.
    """
    n = min(len(token_ids), slot_scores.shape[0])
    scores = slot_scores[:n]  # (n, V)
    wanted = torch.tensor(token_ids[:n], device=scores.device).unsqueeze(-1)  # (n, 1)
    own = scores.gather(-1, wanted)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    before = (scores > own) | ((scores == own) & (ids < wanted))
    return before.sum(-1).tolist()


class Verifier:
    """Runs the target over anchor + drafts and reads its greedy choice after every row.

    A chain needs ids and positions only (causal is what an absent mask means); a tree adds a mask
    over its own rows and one position per depth. On a compiled target every forward of a method has
    the rows of its longest proposal; making a verifier compiles it, so make it before the clock runs.
    """

    def __init__(self, target: Target, cache: KVCache, method: Method) -> None:
        self._target, self._cache, self._taps = target, cache, method.tap_layer_ids
        self._max_depth = method.max_depth
        self._step = None
        if target.compiled is not None:
            rows = method.max_draft_tokens + 1
            self._step = target.compiled.step(cache, rows, method.tap_layer_ids)
        # (capacity + depth + 1,) every position a chain can reach; a slice costs nothing.
        self._positions = torch.arange(cache.capacity + method.max_depth + 1, device=target.device)

    def inputs(
        self, anchor: int, proposal: Proposal
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Token ids (n + 1,), position ids (n + 1,) and, for a tree, its mask (n + 1, n + 1).

        Raises:
            InputError: the tree is not well-formed (see `tree_depths`).
        """
        start, device = self._cache.length, self._target.device
        parents = proposal.parents
        ids = torch.tensor([anchor, *proposal.token_ids], device=device)
        if is_chain(parents):
            return ids, self._positions[start : start + len(parents) + 1], None
        depths = tree_depths(proposal.token_ids, parents, self._max_depth)
        positions = torch.tensor([0, *depths], device=device) + start
        return ids, positions, ancestor_mask(parents).to(device)

    def choices(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[list[int], torch.Tensor | None]:
        """The target's greedy token after every row, and its tapped states; appends the rows.

        Returns:
            n + 1 tokens, equal logits going to the lowest id, and (n + 1, taps * H) or None.
        """
        if self._step is None:
            forward = self._target.forward(ids, positions, self._cache, mask, self._taps)
        else:
            forward = self._step(ids, positions, mask)
        return forward.logits.argmax(-1).tolist(), forward.tapped


def decode(
    target: Target,
    input_ids: torch.Tensor,
    prefill: Prefill,
    cache: KVCache,
    method: Method,
    max_new_tokens: int,
    timer: Timer | None = None,
    stop_ids: Collection[int] | None = None,
) -> Generation:
    """Decode one text greedily after a prefill.

    The cache must hold the prompt and nothing else; it is left holding the prompt and all new
    tokens but the last, so `cache.truncate(len(input_ids))` makes it ready for the next method.

    Args:
        target: the target.
        input_ids: (P,) the prompt.
        prefill: its logits (V,) after the prompt; its states of exactly the method's tapped layers.
        cache: P rows, with room for `max_new_tokens - 1` tokens and one proposal.
        method: proposes the drafts.
        max_new_tokens: 1 or more tokens, the one from the prefill included.
        timer: the clock; by default the wall clock on the target's device.
        stop_ids: tokens that end the text; by default the target's.

    Raises:
        InputError: the cache does not hold just the prompt, or is too small for the text.
    """
    prompt_tokens = int(input_ids.shape[0])
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens: found {max_new_tokens}, allowed is 1 or more")
    if cache.length != prompt_tokens:
        raise InputError(f"cache: holds {cache.length} rows, the prompt has {prompt_tokens}")
    stop_ids = target.stop_ids if stop_ids is None else stop_ids
    timer = Timer(target.device) if timer is None else timer

    token_ids, stop_reason = cut_at_stop([int(prefill.logits.argmax())], max_new_tokens, stop_ids)
    cycles: list[Cycle] = []
    draft_calls, projection_s = 0, 0.0
    with torch.inference_mode():
        verifier = Verifier(target, cache, method)
        timer.start()
        if stop_reason is None:
            tapped = prefill.tapped if method.tap_layer_ids else None
            projection_s = method.start(Prompt(input_ids, tapped, max_new_tokens), timer)
        while stop_reason is None:
            start = cache.length
            proposal = method.propose(token_ids[-1], start, timer)
            inputs = verifier.inputs(token_ids[-1], proposal)
            timer.lap("other_s")
            chosen, tapped = verifier.choices(*inputs)
            timer.lap("verify_s")
            rows = accept_walk(proposal.token_ids, proposal.parents, chosen)
            walked = [chosen[row] for row in rows]
            new, stop_reason = cut_at_stop(walked, max_new_tokens - len(token_ids), stop_ids)
            # The last committed token is the next anchor and has no row yet: one row per token.
            rows = rows[: len(new)]
            if len(proposal.token_ids) > 0:
                cache.keep(start, rows)
            token_ids += new
            ranks: list[int] = []
            if proposal.slot_scores is not None:
                ranks = target_ranks(proposal.slot_scores, new)
            if stop_reason is None:
                if tapped is not None:
                    tapped = tapped[rows] if rows[-1] != len(rows) - 1 else tapped[: len(rows)]
                method.commit(new, tapped)
            draft_calls += proposal.draft_calls
            timer.lap("other_s")
            parts = timer.take()
            cycles.append(
                Cycle(
                    start_position=start,
                    draft_token_ids=proposal.token_ids,
                    draft_parents=proposal.parents,
                    draft_logprobs=proposal.logprobs,
                    target_token_ids=new,
                    target_rank=ranks,
                    n_accepted=min(len(new), len(walked) - 1),
                    n_committed=len(new),
                    censored=len(new) < len(walked),
                    end_s=timer.elapsed_s,
                    **parts,
                )
            )
    decode_s = timer.elapsed_s
    assert stop_reason is not None
    return Generation(
        token_ids, stop_reason, cycles, decode_s, projection_s, draft_calls, len(cycles)
    )
