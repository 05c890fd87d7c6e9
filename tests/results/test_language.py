"""The bigram chain replayed on finished texts, against hand-worked cycles and the decode loop."""

import pytest

from tests.decoding.scripted import Bench, Scripted
from tests.tiny import tiny_drafter, tiny_language_target
from vflash_analysis.decoding.tree import chain_parents
from vflash_analysis.results.language import BIGRAM_DRAFTS, chain_cycles, successors


def test_the_most_frequent_successor_within_texts_wins_and_the_lowest_id_breaks_ties():
    texts = [[1, 2, 1, 3, 1, 2], [2, 9], [4, 7, 4, 6], [5]]
    assert successors(texts) == {1: 2, 2: 1, 3: 1, 4: 6, 7: 4}
    assert successors([]) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 1 -> 2 -> 3 is right twice, then the target writes 8; 8 has no successor; 9 -> 1 is wrong
        ([1, 2, 3, 8, 9, 5, 1], [(2, 3, False), (0, 1, False), (0, 1, False), (0, 1, False)]),
        # right up to the end: the target's own next token would have followed
        ([8, 1, 2, 3], [(0, 1, False), (2, 2, True)]),
        # the last token is the target's correction: nothing is cut
        ([1, 2, 8], [(1, 2, False)]),
        ([1], []),
    ],
)
def test_cycles_by_hand(text, expected):
    cycles = chain_cycles(text, {1: 2, 2: 3, 3: 4, 9: 1})
    found = [(c["n_accepted"], c["n_committed"], c["censored"]) for c in cycles]
    assert found == expected


def test_a_chain_is_no_longer_than_a_blocks_drafts():
    (first, second) = chain_cycles([5] * 19, {5: 5})
    assert (first["n_accepted"], first["n_committed"]) == (BIGRAM_DRAFTS, BIGRAM_DRAFTS + 1)
    assert (second["n_accepted"], second["n_committed"], second["censored"]) == (2, 2, True)


@pytest.mark.parametrize("seed", range(4))
def test_the_decode_loop_counts_the_same_cycles(seed):
    """The chain run by the loop on a target, and replayed on the text that came out of it."""
    target = tiny_language_target(seed, num_layers=3)
    ids = target.build_prompt("describe a red circle", 0)
    drafter = tiny_drafter(target, seed, 1)
    cache = target.new_cache(len(ids), 60)
    prefill = target.prefill(ids, None, cache, tuple(drafter.config.target_layer_ids))
    bench = Bench(target, drafter, ids, None, cache, prefill)
    text = bench.run("ar", 50, stop_ids=()).token_ids
    after = successors([text[:30]])

    def write(anchor):
        drafts, token = [], after.get(text[anchor])
        while token is not None and len(drafts) < BIGRAM_DRAFTS:
            drafts.append(token)
            token = after.get(token)
        return drafts, chain_parents(len(drafts))

    decoded = bench.run(Scripted(write, BIGRAM_DRAFTS, BIGRAM_DRAFTS), 50, stop_ids=())
    assert decoded.token_ids == text
    expected = [(c.n_accepted, c.n_committed, c.censored) for c in decoded.cycles]
    found = [(c["n_accepted"], c["n_committed"], c["censored"]) for c in chain_cycles(text, after)]
    assert found == expected
    assert sum(accepted for accepted, _, _ in found) > 0
