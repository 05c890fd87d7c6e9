"""Prompt look-up: proposals worked out by hand, and the text that must not change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding.scripted import SETTINGS, Bench
from tests.tiny import tiny_drafter, tiny_target
from vflash_analysis.decoding.methods import build_method
from vflash_analysis.decoding.methods.base import Prompt
from vflash_analysis.decoding.methods.lookup import DRAFTS, PromptLookup
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.errors import InputError

CPU = torch.device("cpu")
VIDEO = 99


def proposals(prompt, cycles):
    """Drafts of each cycle; `cycles` are the committed tokens, the first one the prefill's."""
    method, timer = PromptLookup([VIDEO]), Timer(CPU)
    timer.start()
    method.start(Prompt(torch.tensor(prompt), None, 50), timer)
    (anchor,), *rest = cycles
    found = [list(method.propose(anchor, 0, timer).token_ids)]
    for committed in rest:
        method.commit(committed, None)
        found.append(list(method.propose(committed[-1], 0, timer).token_ids))
    return found


def test_what_followed_the_longest_and_latest_match_is_copied():
    prompt = [1, 2, 3, 4, VIDEO, VIDEO, 9, 2, 3, 5]
    assert proposals(prompt, [[2], [3], [4, 9]]) == [
        [3, 5, 2],  # after the latest 2; the copy ends where the text does
        [5, 2, 3],  # 2 3 stood last before 5
        [2, 3, 5, 2, 3, 4, 9],  # 4 9, with the placeholders left out, stood before 2
    ]
    assert proposals([1, 2, 3], [[7]]) == [[]]  # nothing matches: a plain step of the target
    assert proposals([5] * 40, [[5]])[0] == [5]  # the latest match ends just before the anchor
    assert len(proposals([5, 6, *range(10, 40)], [[5]])[0]) == DRAFTS


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 3))
def test_drafts_follow_the_latest_earlier_match(prompt, anchor):
    (found,) = proposals(prompt, [[anchor]])
    text = [*prompt, anchor]
    for length in (3, 2, 1):
        ends = [i for i in range(length, len(text)) if text[i - length : i] == text[-length:]]
        if ends and length <= len(text):
            assert found == text[ends[-1] : ends[-1] + DRAFTS]
            return
    assert found == []


@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_plain_greedy_decodings(seed):
    target = tiny_target(seed, num_layers=3)
    bench = Bench.on(target, tiny_drafter(target, seed, 1), seed)
    reference = bench.run("ar", 40, stop_ids=())
    assert bench.run("lookup", 40, stop_ids=()).token_ids == reference.token_ids


def test_options_are_refused():
    target = tiny_target(0, num_layers=2)
    assert build_method("lookup", target, SETTINGS).setting == ""
    with pytest.raises(InputError, match="allowed: none"):
        build_method("lookup:k=1", target, SETTINGS)
