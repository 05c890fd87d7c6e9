"""Telling rounding from bugs: planted ties and planted bugs in every precision."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from tests.decoding.scripted import Bench, Scripted, always_wrong
from vflash_analysis.decoding import loop
from vflash_analysis.decoding.lossless import (
    FP32_GAP,
    LOGIC_ERROR,
    NEAR_TIE,
    ExactLogits,
    LosslessError,
    check_lossless,
    choice_gap,
    first_divergence,
    judge,
    logits_after,
)
from vflash_analysis.records import blank_row, to_table
from vflash_analysis.schemas import GENERATIONS


def test_first_divergence_sees_a_shorter_text():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 9, 3], [1, 2, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([1, 2, 3, 4], [1, 2, 3]) == 3
    assert first_divergence([], []) is None


def test_choice_gap_is_the_top_two_gap_and_more_for_a_stranger():
    logits = torch.tensor([1.0, 5.0, 4.75, 3.0])
    assert choice_gap(logits, 1, 2) == choice_gap(logits, 2, 1) == 0.25
    assert choice_gap(logits, 1, 3) == choice_gap(logits, 2, 3) == 2.0


@pytest.mark.parametrize("rows", [1, 2, 16, 61])
def test_logits_after_do_not_depend_on_the_row_count_in_float64(rows):
    bench = Bench.make(2)
    text = bench.run("ar", 24, stop_ids=()).token_ids
    for length in (1, 15, 16, 17, 23):
        found = logits_after(bench.target, bench.cache, len(bench.input_ids), text[:length], rows)
        assert int(found.argmax()) == text[length]
        assert bench.cache.length == len(bench.input_ids)


def plant_twins(bench: Bench, token: int) -> int:
    """Give another id the same row in the LM head: the two tie at every position."""
    twin = next(
        i for i in range(10, 40) if i != token and i not in bench.target.banned_ids.tolist()
    )
    with torch.no_grad():
        bench.target.lm_head.weight[twin] = bench.target.lm_head.weight[token]
    return twin


def swapped(bench: Bench, text: list[int], place: int, other: int) -> list[int]:
    """The text another kernel could have written: the tie broken the other way, then greedy on."""
    changed = [*text[:place], other]
    bench.cache.truncate(len(bench.input_ids))
    logits = bench.target.forward(torch.tensor(changed), None, bench.cache).logits[-1]
    return [*changed, int(logits.argmax())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_case74_planted_tie_and_planted_bug(dtype, monkeypatch):
    bench = Bench.make(4, dtype=dtype)
    first = bench.run("ar", 12, stop_ids=()).token_ids
    token = first[6]
    twin = plant_twins(bench, token)
    bench = Bench.on(bench.target, bench.drafter, 4)
    text = bench.run("ar", 12, stop_ids=()).token_ids
    pair = {token, twin}
    place = next(i for i, t in enumerate(text) if i > 0 and t in pair)
    assert text[place] == min(pair), "an exact tie goes to the lowest id"
    other = swapped(bench, text, place, max(pair))
    exact = ExactLogits(bench.target)

    def explain(found):
        return judge(
            bench.target,
            bench.cache,
            len(bench.input_ids),
            found,
            text,
            lambda prefix: exact.after(bench.input_ids, bench.pixel_values, prefix),
        )

    assert explain(list(text)) is None
    tie = explain(other)
    assert (tie.position, tie.gap) == (place, 0.0)
    # In float64 even a tie may not be broken differently.
    assert tie.kind == (LOGIC_ERROR if dtype == torch.float64 else NEAR_TIE)

    # The planted bug: the first draft is accepted unchecked. Every draft is wrong here.
    walk = loop.accept_walk

    def unchecked(token_ids, parents, target_argmax):
        return walk(token_ids, parents, [token_ids[0], *target_argmax[1:]])

    monkeypatch.setattr(loop, "accept_walk", unchecked)
    vocab = bench.target.vocab_size
    buggy = bench.run(always_wrong([*text, *[0] * 20], vocab), 12, stop_ids=())
    bug = explain(buggy.token_ids)
    assert bug is not None and bug.kind == LOGIC_ERROR
    assert bug.gap is None or bug.gap > bug.allowed


def test_float32_near_tie_needs_the_float64_gap_below_the_limit():
    """A runner-up that is merely second is a logic error, whatever float32 thinks of it."""
    bench = Bench.make(1, dtype=torch.float32)
    text = bench.run("ar", 6, stop_ids=()).token_ids
    exact = ExactLogits(bench.target)

    def exact_logits(prefix):
        return exact.after(bench.input_ids, bench.pixel_values, prefix)

    top = exact_logits(text[:3]).topk(2)
    assert top.indices[0] == text[3]
    second = [*text[:3], int(top.indices[1])]
    found = judge(bench.target, bench.cache, len(bench.input_ids), second, text, exact_logits)
    assert found.gap == pytest.approx(float(top.values[0] - top.values[1]))
    assert found.gap > FP32_GAP and found.kind == LOGIC_ERROR and found.allowed == FP32_GAP

    def nearly_tied(prefix):
        logits = torch.zeros(bench.target.vocab_size, dtype=torch.float64)
        logits[text[3]] = 1.0
        logits[second[3]] = 1.0 - 0.9 * FP32_GAP
        return logits

    found = judge(bench.target, bench.cache, len(bench.input_ids), second, text, nearly_tied)
    assert found.kind == NEAR_TIE
    # Without float64 logits nothing can be excused.
    assert judge(bench.target, bench.cache, len(bench.input_ids), second, text).kind == LOGIC_ERROR


def test_exact_logits_are_the_float64_targets():
    single = Bench.make(6, dtype=torch.float32)
    prefix = single.run("ar", 8, stop_ids=()).token_ids
    found = ExactLogits(single.target).after(single.input_ids, single.pixel_values, prefix)
    assert found.dtype == torch.float64 and single.target.dtype == torch.float32
    close = logits_after(single.target, single.cache, len(single.input_ids), prefix, 1)
    torch.testing.assert_close(found, close, rtol=0, atol=1e-3)


def test_a_text_that_ends_early_is_never_a_near_tie():
    bench = Bench.make(1, dtype=torch.bfloat16)
    text = bench.run("ar", 6, stop_ids=()).token_ids
    for wrong in (text[:4], [*text, 7]):
        found = judge(bench.target, bench.cache, len(bench.input_ids), wrong, text)
        assert (found.position, found.gap, found.kind) == (min(len(wrong), 6), None, LOGIC_ERROR)
    # Nothing rounds differently before the first token either: it comes from the shared prefill.
    found = judge(bench.target, bench.cache, len(bench.input_ids), [text[0] + 1], text)
    assert (found.position, found.kind) == (0, LOGIC_ERROR)


def generation_rows(kinds: list[str | None]) -> pd.DataFrame:
    rows = []
    for number, kind in enumerate(kinds):
        row = blank_row(GENERATIONS) | {
            "run_id": "r", "clip_id": f"c{number}", "method": "chain", "drafter_sha256": "",
            "setting": "", "repeat": 0, "profile": "p", "target": "t", "target_revision": "",
            "benchmark": "VDC", "sample_seed": 0, "dtype": "float32", "attention": "vflash",
            "device": "cpu", "status": "ok", "warmup": False,
        }  # fmt: skip
        row |= {"divergence_kind": kind, "first_divergence": None if kind is None else 4}
        rows.append(row | {"divergence_gap": None if kind is None else 0.5})
    return to_table(rows, GENERATIONS).to_pandas()


def test_check_lossless_fails_exact_precisions_only():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_lossless(dtype, generation_rows([None, None]))
        check_lossless(dtype, generation_rows([None, NEAR_TIE]))
    bad = generation_rows([None, NEAR_TIE, LOGIC_ERROR])
    for dtype in (torch.float64, torch.float32):
        with pytest.raises(LosslessError, match=r"1 of 3 texts .* chain  on clip c2, token 4"):
            check_lossless(dtype, bad)
    check_lossless(torch.bfloat16, bad)


def test_a_wrong_path_in_the_loop_shows_up_as_a_logic_error(monkeypatch):
    """Rows of the wrong branch kept in the cache: text drifts, and the judge does not excuse it."""
    bench = Bench.make(3, dtype=torch.float32)
    text = bench.run("ar", 20, stop_ids=()).token_ids
    vocab = bench.target.vocab_size

    def write(anchor):
        right = [*text, *[0] * 20][anchor + 1]
        return [(right + 1) % vocab, right], [-1, -1]

    keep = type(bench.cache).keep
    monkeypatch.setattr(
        type(bench.cache), "keep", lambda self, start, rows: keep(self, start, range(len(rows)))
    )
    found = bench.run(Scripted(write, 2, 1), 20, stop_ids=())
    assert found.token_ids != text
    exact = ExactLogits(bench.target)
    told = judge(
        bench.target,
        bench.cache,
        len(bench.input_ids),
        found.token_ids,
        text,
        lambda prefix: exact.after(bench.input_ids, bench.pixel_values, prefix),
    )
    assert told.kind == LOGIC_ERROR
