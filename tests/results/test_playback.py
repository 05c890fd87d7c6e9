"""Which text stood at what time, and which decodes are shown."""

import numpy as np
import pytest

from tests.results.synthetic import cycle_row, generation_row, records_of
from vflash_analysis.errors import InputError
from vflash_analysis.results.playback import finished, pick, playback


def decode(method, clip_id, steps, **columns):
    """A decode and its cycles; `steps` are (seconds, tokens) of each cycle."""
    tokens = 1 + sum(n for _, n in steps)
    row = generation_row(method, clip_id, text="abcdefghij"[:tokens], new_tokens=tokens)
    row |= {"token_ids": list(range(tokens)), "text_ends": list(range(1, tokens + 1))}
    row |= {"verify_calls": len(steps), "decode_s": sum(s for s, _ in steps)} | columns
    cycles, end = [], 0.0
    for number, (seconds, n) in enumerate(steps):
        end += seconds
        times = {"draft_s": 0.0, "verify_s": seconds, "other_s": 0.0, "end_s": end}
        counts = {"n_accepted": n - 1, "n_committed": n, "censored": False}
        cycles.append(cycle_row(row, number) | times | counts)
    return row, cycles


def both(*decodes):
    import pandas as pd

    rows = pd.DataFrame([row for row, _ in decodes])
    cycles = pd.DataFrame([one for _, own in decodes for one in own])
    return records_of(rows, cycles)


def test_the_text_fills_with_the_recorded_commits():
    found = both(decode("ar", "a", [(0.1, 1), (0.2, 3)], text_ends=[2, 2, 4, 4, 5]))
    (one,) = pick(found, "a", ("ar",))
    assert one.text == "abcde" and one.tokens.tolist() == [1, 2, 5]
    assert [one.at(s) for s in (0.0, 0.0999, 0.1, 0.299, 0.3001, 9)] == [
        "ab", "ab", "ab", "ab", "abcde", "abcde",
    ]  # fmt: skip
    assert one.decode_s == pytest.approx(0.3) and one.ms_per_token == pytest.approx(75)
    assert one.title == "Autoregressive"


def test_every_recorded_decode_ends_with_its_text(records):
    for one in pick(records, None, ("ar", "chain", "tree60")):
        assert one.at(one.decode_s) == one.text
        lengths = [len(one.at(s)) for s in np.linspace(0, one.decode_s, 21)]
        assert lengths == sorted(lengths) and lengths[0] > 0


def test_the_longest_text_is_taken_and_decodes_of_one_run():
    found = both(
        decode("ar", "a", [(0.1, 2)]),
        decode("ar", "b", [(0.1, 4)]),
        decode("tree60", "b", [(0.1, 4)], run_id="other", drafter_sha256="x"),
        decode("tree60", "b", [(0.1, 4)], drafter_sha256="m", objective="mask_only", train_seed=0),
        decode(
            "tree60", "b", [(0.1, 4)], drafter_sha256="f1", objective="self_reveal", train_seed=1
        ),
        decode(
            "tree60", "b", [(0.1, 4)], drafter_sha256="f0", objective="self_reveal", train_seed=0
        ),
        decode("tree60", "b", [(0.1, 4)], drafter_sha256="f0", setting="nodes=16"),
    )
    plain, tree = pick(found, None, ("ar", "tree60"))
    assert (plain.clip_id, tree.row["drafter_sha256"], tree.row["run_id"]) == ("b", "f0", "r1")
    assert tree.title == "VFlash-FM, Tree-60"
    (smaller,) = pick(found, "b", ("tree60:nodes=16",))
    assert smaller.title == "VFlash-FM, Tree-60 (nodes=16)"
    of_mask = found.generations.loc[found.generations["objective"] == "mask_only"].iloc[0]
    assert playback(found, of_mask).title == "Tree-60, mask-only"


def test_suites_may_hold_clips_of_one_id():
    found = both(
        decode("ar", "a", [(0.1, 2)], run_id="r/VDC"),
        decode("tree60", "a", [(0.1, 2)], run_id="r/VDC"),
        decode("ar", "a", [(0.1, 4)], run_id="r/LVB", benchmark="LVB"),
        decode("tree60", "a", [(0.1, 4)], run_id="r/LVB", benchmark="LVB"),
    )
    for benchmark, tokens in (("VDC", 3), ("LVB", 5)):
        shown = pick(found, "a", ("ar", "tree60"), benchmark)
        assert [one.tokens.tolist() for one in shown] == [[1, tokens]] * 2
    longest = pick(found, None, ("ar", "tree60"))
    assert [one.row["benchmark"] for one in longest] == ["LVB", "LVB"]
    with pytest.raises(InputError, match="clip: found 'a', allowed: a clip_id of"):
        pick(found, "a", ("ar",), "MLVU")


def test_a_text_of_one_token_cannot_be_played_and_that_is_said():
    found = both(decode("ar", "a", [], decode_s=0.002), decode("ar", "b", [(0.1, 1)]))
    with pytest.raises(InputError, match=r"^clip 'a': a text of one token stands from the start"):
        pick(found, "a", ("ar",))
    (one,) = (playback(found, row) for _, row in finished(found).iloc[:1].iterrows())
    assert one.at(0) == "a" and one.decode_s == 0.002 and one.tokens.tolist() == [1]


def test_what_is_not_there_is_named():
    found = both(decode("ar", "a", [(0.1, 2)]), decode("ar", "failed", [(0.1, 1)], status="failed"))
    for clip_id, methods, told in (
        ("b", ("ar",), "clip: found 'b'"),
        ("failed", ("ar",), "clip: found 'failed'"),
        ("a", ("ar", "medusa"), "'medusa' was not decoded on a"),
        (None, ("chain",), "found no decode of 'chain'"),
    ):
        with pytest.raises(InputError, match=told):
            pick(found, clip_id, methods)
    bare = records_of(found.generations)
    with pytest.raises(InputError, match="found no cycles to play"):
        pick(bare, "a", ("ar",))
