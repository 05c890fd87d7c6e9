"""The reveal, the arms and the loss against counts, a hand-written formula and an oracle."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.tiny import tiny_drafter, tiny_target
from tests.training.toys import Oracle, batch_of, oracle_source, random_source, settings
from vflash_analysis.errors import InputError
from vflash_analysis.training.batches import FlowBatch, RevealDraws
from vflash_analysis.training.blocks import (
    SlotScores,
    block_hidden,
    project_context,
    score_slots,
    target_pieces,
)
from vflash_analysis.training.objectives import (
    RevealedState,
    choose_slots,
    compute_loss,
    flow_weight,
    reveal,
    reveal_counts,
    round_sizes,
    slot_weights,
    written_tokens,
)
from vflash_analysis.training.step import weighted_loss

TARGET = tiny_target(0)
PIECES = target_pieces(TARGET)
NO_DEADLINE = hypothesis_settings(deadline=None, max_examples=60)
FEW = hypothesis_settings(deadline=None, max_examples=15)
ARMS = ("self_reveal", "true_reveal", "wrong_reveal")


class Spy:
    """A drafter that notes the tokens of every forward and how many blocks it ran."""

    def __init__(self, seed: int = 1) -> None:
        self.inner = tiny_drafter(TARGET, seed)
        self.config = self.inner.config
        self.forwards: list[torch.Tensor] = []
        self._rows = {tuple(row.tolist()): i for i, row in enumerate(TARGET.embedding.weight)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward_blocks(self, noise_embeds: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids = [self._rows[tuple(row.tolist())] for row in noise_embeds.flatten(0, 2)]
        self.forwards.append(torch.tensor(ids).view(noise_embeds.shape[:3]))
        return self.inner.forward_blocks(noise_embeds, *args, **kwargs)


def example(seed: int = 0, **changes: Any) -> FlowBatch:
    source = random_source(tiny_drafter(TARGET, 1), 4, new=(30, 9, 4, 2))
    return batch_of(source, 15, seed=seed, **changes)


# The reveal's counts and choices.


def test_slot_weights_by_hand() -> None:
    weights = slot_weights(15, 7.0)
    assert weights[0] == 1.0
    assert float(weights[7]) == pytest.approx(math.exp(-1.0), abs=1e-15)
    assert float(weights[14]) == pytest.approx(math.exp(-2.0), abs=1e-15)


@NO_DEADLINE
@given(
    times=st.lists(st.floats(0, 0.999), min_size=1, max_size=6),
    n_supervised=st.integers(0, 15),
    seed=st.integers(0, 999),
)
def test_reveal_counts_are_clamped_binomials(
    times: list[float], n_supervised: int, seed: int
) -> None:
    slots = torch.rand(1, len(times), 15, generator=torch.Generator().manual_seed(seed))
    zero = torch.zeros(1, len(times))
    draws = RevealDraws(torch.tensor([times]), slots, zero.long(), slots, slots)
    supervised = (torch.arange(15) < n_supervised).expand(1, len(times), 15)
    counts = reveal_counts(draws, supervised)[0]
    for a, time in enumerate(times):
        hits = int((slots[0, a, :n_supervised] < torch.tensor(time)).sum())
        assert counts[a] == min(max(hits, 1), 14, n_supervised)


@NO_DEADLINE
@given(counts=st.lists(st.integers(0, 15), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_each_round_writes_a_rounded_up_share(counts: list[int], seed: int) -> None:
    n = torch.tensor([counts])
    rounds = torch.randint(1, 4, n.shape, generator=torch.Generator().manual_seed(seed))
    sizes = round_sizes(n, rounds, 3)
    assert torch.equal(sizes.sum(0), n)
    for a, count in enumerate(counts):
        of_block = sizes[:, 0, a].tolist()
        share = -(-count // int(rounds[0, a]))
        expected, left = [], count
        for _ in range(3):
            expected.append(min(share, left))
            left -= expected[-1]
        assert of_block == expected
        assert sum(size > 0 for size in of_block) <= int(rounds[0, a])


@NO_DEADLINE
@given(seed=st.integers(0, 9999), size=st.integers(0, 15), levels=st.integers(1, 5))
def test_the_most_confident_candidates_are_chosen(seed: int, size: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (1, 1, 15), generator=generator).float()
    candidates = torch.rand(1, 1, 15, generator=generator) < 0.6
    size = min(size, int(candidates.sum()))
    chosen = choose_slots(scores, candidates, torch.tensor([[size]]))[0, 0]
    allowed = [k for k in range(15) if candidates[0, 0, k]]
    expected = sorted(allowed, key=lambda k: (-float(scores[0, 0, k]), k))[:size]
    assert chosen.nonzero().flatten().tolist() == sorted(expected)


def revealed_by(
    drafter: Any, batch: FlowBatch, order: str = "confidence"
) -> tuple[RevealedState, SlotScores]:
    with torch.no_grad():
        context = project_context(drafter, batch)
        masks = torch.full_like(batch.labels, drafter.config.mask_token_id)
        hidden = block_hidden(drafter, batch, context, masks, PIECES)
        uniforms = batch.draws.samples
        first = score_slots(hidden, batch.labels, PIECES, uniforms=uniforms)
        changed = settings(reveal_order=order)
        return reveal(drafter, batch, context, first, PIECES, changed, uniforms=uniforms), first


@FEW
@given(seed=st.integers(0, 10_000), order=st.sampled_from(["confidence", "random"]))
def test_reveal_writes_the_right_number_of_supervised_slots_once(seed: int, order: str) -> None:
    batch = example(seed)
    state, _ = revealed_by(tiny_drafter(TARGET, 1), batch, order)
    assert torch.equal(state.revealed.sum(-1), reveal_counts(batch.draws, batch.supervised))
    assert not bool((state.revealed & ~batch.supervised).any())
    written = state.own[state.revealed]
    assert not bool(torch.isin(written, TARGET.banned_ids).any())
    assert bool((state.own[~state.revealed] == 0).all())
    assert state.wrong is not None
    wrong = state.wrong[state.revealed]
    assert not bool((wrong == written).any())
    assert not bool((wrong == batch.labels[state.revealed]).any())
    assert not bool(torch.isin(wrong, TARGET.banned_ids).any())


def test_one_round_writes_the_most_confident_argmaxes() -> None:
    batch = example()
    draws = dataclasses.replace(batch.draws, rounds=torch.ones_like(batch.draws.rounds))
    batch = dataclasses.replace(batch, draws=draws)
    state, first = revealed_by(tiny_drafter(TARGET, 1), batch)
    assert int(state.n_forwards) == 0
    for b, a in (state.revealed.any(-1)).nonzero().tolist():
        inside = state.revealed[b, a]
        assert torch.equal(state.own[b, a][inside], first.prediction[b, a][inside])
        left_out = batch.supervised[b, a] & ~inside
        if bool(left_out.any()):
            least = first.confidence[b, a][inside].min()
            assert least >= first.confidence[b, a][left_out].max()


def test_random_order_follows_the_draws() -> None:
    batch = example()
    state, _ = revealed_by(tiny_drafter(TARGET, 1), batch, "random")
    order = batch.draws.order.masked_fill(~batch.supervised, -1.0)
    for b, a in batch.supervised.any(-1).nonzero().tolist():
        n = int(state.revealed[b, a].sum())
        best = order[b, a].argsort(descending=True)[:n]
        assert set(best.tolist()) == set(state.revealed[b, a].nonzero().flatten().tolist())


def test_later_rounds_see_what_earlier_rounds_wrote() -> None:
    batch = example(anchors_per_clip=1, n=1)
    draws = dataclasses.replace(
        batch.draws,
        times=torch.full_like(batch.draws.times, 0.999),
        slots=torch.zeros_like(batch.draws.slots),
        rounds=torch.full_like(batch.draws.rounds, 3),
    )
    supervised = torch.ones_like(batch.supervised)
    batch = dataclasses.replace(batch, draws=draws, supervised=supervised)
    spy = Spy()
    state, first = revealed_by(spy, batch)
    mask = spy.config.mask_token_id
    assert [int((ids[..., 1:] != mask).sum()) for ids in spy.forwards] == [0, 5, 10]
    assert int(state.n_forwards) == 2
    assert int(state.revealed.sum()) == 14
    second, third = spy.forwards[1][0, 0, 1:], spy.forwards[2][0, 0, 1:]
    early = second != mask
    assert torch.equal(second[early], first.prediction[0, 0][early])
    assert torch.equal(third[early], second[early])
    assert torch.equal(state.own[0, 0][third != mask], third[third != mask])


def test_only_blocks_with_work_run_later_rounds() -> None:
    batch = example()
    spy = Spy()
    state, _ = revealed_by(spy, batch)
    counts = reveal_counts(batch.draws, batch.supervised)
    sizes = round_sizes(counts, batch.draws.rounds, 3)
    assert int(state.n_forwards) == int((sizes[1:] > 0).sum())
    shapes = [ids.shape[1] for ids in spy.forwards[1:]]
    assert shapes == (sizes[1:] > 0).sum(-1).amax(-1).clamp(min=1).tolist()
    assert int(state.n_forwards) < 2 * int(batch.supervised.any(-1).sum())


def test_revealing_blocks_one_by_one_gives_the_same_state() -> None:
    """Running later rounds on a subset of blocks is exact."""
    drafter = tiny_drafter(TARGET, 1)
    batch = example(seed=5)
    together, _ = revealed_by(drafter, batch)
    for a in range(batch.anchors.shape[1]):
        names = ("anchors", "anchor_ids", "labels", "supervised")
        cut = {name: getattr(batch, name)[:, a : a + 1] for name in names}
        fields = {f.name for f in dataclasses.fields(RevealDraws)}
        draws = RevealDraws(**{n: getattr(batch.draws, n)[:, a : a + 1] for n in fields})
        alone, _ = revealed_by(drafter, dataclasses.replace(batch, draws=draws, **cut))
        assert torch.equal(together.revealed[:, a], alone.revealed[:, 0])
        assert torch.equal(together.own[:, a], alone.own[:, 0])


# The arms.


def test_what_each_arm_writes() -> None:
    labels = torch.tensor([[[1, 2, 3]]])
    own, wrong = torch.tensor([[[1, 9, 3]]]), torch.tensor([[[7, 8, 6]]])
    assert written_tokens("true_reveal", labels, own, wrong).tolist() == [[[1, 2, 3]]]
    assert written_tokens("self_reveal", labels, own, wrong).tolist() == [[[1, 9, 3]]]
    assert written_tokens("wrong_reveal", labels, own, wrong).tolist() == [[[1, 8, 3]]]
    with pytest.raises(InputError, match="objective"):
        written_tokens("mask_only", labels, own, wrong)


def test_arms_share_slots_counts_and_forwards() -> None:
    batch = example(seed=3)
    finals, others, sums = {}, {}, {}
    for arm in ARMS:
        spy = Spy()
        parts = compute_loss(spy, batch, PIECES, settings(objective=arm), 0)
        finals[arm], others[arm] = spy.forwards[-1][..., 1:], spy.forwards[:-1]
        sums[arm] = parts.sums
    mask = tiny_drafter(TARGET, 1).config.mask_token_id
    for arm in ARMS[1:]:
        assert torch.equal(finals[arm] == mask, finals["self_reveal"] == mask)
        assert len(others[arm]) == len(others["self_reveal"])
        assert all(map(torch.equal, others[arm], others["self_reveal"]))
        for name in ("n_blocks", "n_reveal_forwards", "n_revealed", "n_context"):
            assert torch.equal(sums[arm][name], sums["self_reveal"][name])
    revealed = finals["self_reveal"] != mask
    assert bool((finals["true_reveal"] == batch.labels)[revealed].all())
    own_right = revealed & (finals["self_reveal"] == batch.labels)
    own_wrong = revealed & ~own_right
    assert bool(own_wrong.any())
    wrong = finals["wrong_reveal"]
    assert bool((wrong == batch.labels)[own_right].all())
    assert bool(((wrong != batch.labels) & (wrong != finals["self_reveal"]))[own_wrong].all())


def test_mask_only_has_one_forward_and_no_revealed_state() -> None:
    spy = Spy()
    parts = compute_loss(spy, example(), PIECES, settings(objective="mask_only"), 0)
    assert len(spy.forwards) == 1 and parts.numerators.shape == (1,)
    assert "n_revealed" not in parts.sums


# The loss.


def loss_and_gradients(batch: FlowBatch, **changes: Any) -> tuple[float, list[torch.Tensor]]:
    drafter = tiny_drafter(TARGET, 1)
    parts = compute_loss(drafter, batch, PIECES, settings(**changes), 5)
    loss = weighted_loss(parts.numerators, parts.denominators, parts.weights)
    loss.backward()
    return float(loss.detach()), [p.grad for p in drafter.parameters()]


@pytest.mark.parametrize("revealed_weight", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("arm", ARMS)
def test_loss_equals_the_formula_written_out(arm: str, revealed_weight: float) -> None:
    batch = example(seed=4)
    changes = {"objective": arm, "revealed_weight": revealed_weight, "lambda_flow": 0.7}
    spy = Spy()
    parts = compute_loss(spy, batch, PIECES, settings(**changes), 5)
    loss = weighted_loss(parts.numerators, parts.denominators, parts.weights)
    found = float(loss.detach())
    mask = spy.config.mask_token_id
    terms = []
    for tokens, weight in ((spy.forwards[0], 1.0), (spy.forwards[-1], revealed_weight)):
        top = bottom = 0.0
        for b, item in enumerate(random_source(spy.inner, 4, new=(30, 9, 4, 2)).items):
            for a, anchor in enumerate(batch.anchors[b].tolist()):
                if not bool(batch.supervised[b, a].any()):
                    continue
                with torch.no_grad():
                    hidden = spy.inner(
                        PIECES.embed(tokens[b, a])[None],
                        item.states[None, :anchor],
                        torch.arange(anchor + 16)[None],
                    ).last_hidden_state
                    logs = PIECES.head(hidden)[0].log_softmax(-1)
                for k in range(1, 16):
                    if anchor + k >= len(item.input_ids):
                        break
                    w = math.exp(-(k - 1) / 7.0)
                    w *= 1.0 if tokens[b, a, k] == mask else weight
                    top -= w * float(logs[k, item.input_ids[anchor + k]])
                    bottom += w
        terms.append(top / bottom if bottom else 0.0)
    assert found == pytest.approx(terms[0] + 0.7 * terms[1], abs=1e-9)
    assert float(parts.denominators[0]) > float(parts.denominators[1]) or revealed_weight == 1.0


def test_lambda_ramps_over_the_first_steps() -> None:
    ramped = settings(steps=100, ramp_fraction=0.1, lambda_flow=2.0)
    assert [flow_weight(ramped, s) for s in (0, 4, 9, 10, 99)] == pytest.approx([0.2, 1, 2, 2, 2])
    assert flow_weight(settings(ramp_fraction=0.0), 0) == 1.0
    assert flow_weight(settings(objective="mask_only"), 50) == 0.0


def test_without_the_flow_term_every_arm_is_mask_only() -> None:
    batch = example()
    loss, gradients = loss_and_gradients(batch, objective="mask_only")
    for arm in ARMS:
        other, others = loss_and_gradients(batch, objective=arm, lambda_flow=0.0)
        assert other == pytest.approx(loss, abs=1e-12)
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_reveal_gradients_flow_through_both_states_only() -> None:
    """The revealed state's gradient is that of its own forward: reveals are constants."""
    batch = example()
    _, with_flow = loss_and_gradients(batch)
    _, mask_only = loss_and_gradients(batch, objective="mask_only")
    assert any(not torch.equal(a, b) for a, b in zip(with_flow, mask_only, strict=True))


@pytest.mark.parametrize("arm", ["mask_only", *ARMS])
def test_an_oracle_has_loss_0_and_a_shifted_one_does_not(arm: str) -> None:
    source = oracle_source(3)
    texts = [item.input_ids for item in source.items]
    for shift in (0, 1):
        oracle = Oracle(texts, 30, shift=shift)
        parts = compute_loss(
            oracle, batch_of(source, 15), oracle.pieces(), settings(objective=arm), 0
        )
        loss = float(weighted_loss(parts.numerators, parts.denominators, parts.weights))
        right = parts.sums["slot_correct"].sum() / parts.sums["slot_n"].sum()
        if shift == 0:
            assert loss == 0.0 and right == 1.0
        else:
            assert loss > 10 and right < 0.5


def test_an_oracle_writes_and_keeps_only_right_tokens() -> None:
    source = oracle_source(3)
    oracle = Oracle([item.input_ids for item in source.items], 30)
    sums = compute_loss(oracle, batch_of(source, 15), oracle.pieces(), settings(), 0).sums
    assert sums["n_wrong"] == 0 and sums["n_right"] == sums["n_kept"] == sums["n_revealed"] > 0


def test_log_counts_of_wrong_and_right_reveals() -> None:
    """The drafter always says 3; labels are 3 at even positions: half of what it writes is wrong."""
    source = oracle_source(1, new=17, prompt=5)
    item = source.items[0]
    ids = torch.where(torch.arange(22) % 2 == 0, 3, 4)
    item = dataclasses.replace(item, input_ids=ids)
    always = Oracle([torch.full((22,), 3)], 30)
    batch = batch_of(type(source)([item]), 15, anchors_per_clip=6)
    state = settings(reveal_order="random")
    sums = compute_loss(always, batch, always.pieces(), state, 0).sums
    assert sums["n_wrong"] + sums["n_right"] == sums["n_revealed"]
    assert sums["n_corrected"] == 0 and sums["n_kept"] == sums["n_right"]
    written = always.seen[-1][..., 1:]
    shown = written != 29
    assert int(sums["n_wrong"]) == int((shown & (batch.labels == 4)).sum()) > 0
    assert int(sums["slot_correct"].sum()) == int(((batch.labels == 3) & batch.supervised).sum())


def test_prompts_give_no_loss() -> None:
    """No prompt token, not even the first token of the text, is a label."""
    batch = example(anchors_per_clip=40)
    source = random_source(tiny_drafter(TARGET, 1), 4, new=(30, 9, 4, 2))
    for b, item in enumerate(source.items):
        at = batch.anchors[b][:, None] + torch.arange(1, 16)
        labelled = at[batch.supervised[b]]
        assert int(labelled.min()) == item.prompt_tokens + 1
        assert int(labelled.max()) == len(item.input_ids) - 1


@pytest.mark.parametrize("revealed_weight", [1.0, 0.5])
@pytest.mark.parametrize("arm", ["mask_only", "self_reveal"])
def test_denominators_are_counted_as_the_loss_has_them(arm: str, revealed_weight: float) -> None:
    batch = example()
    chosen = settings(objective=arm, revealed_weight=revealed_weight)
    spy = Spy()
    counted = compute_loss(spy, batch, PIECES, chosen, 0, count_only=True)
    assert (len(spy.forwards) == 0) == (arm == "mask_only" or revealed_weight == 1.0)
    full = compute_loss(Spy(), batch, PIECES, chosen, 0)
    torch.testing.assert_close(counted.denominators, full.denominators, rtol=0, atol=1e-12)
