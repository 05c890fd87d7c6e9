"""Every metric against a value worked out by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from tests.results.synthetic import generation_row
from vflash_analysis import metrics
from vflash_analysis.errors import InputError
from vflash_analysis.metrics import (
    anchor_accepted_length_parts,
    anchor_position_parts,
    cycle_position_parts,
    grouped,
    macro,
    pair_clips,
    plateau,
    predicted_ratio,
    ratio,
    ratio_of_ratios,
    refuse_infinite,
    refuse_mixed,
    usable,
    usable_cycles,
    value_of,
)
from vflash_analysis.records import blank_row, typed_frame
from vflash_analysis.schemas import BENCHMARKS, CYCLES, GENERATIONS


def decode(method: str, clip: str, tokens: int, calls: int, seconds: float, **changes):
    row = generation_row(method, clip)
    row |= {"new_tokens": tokens, "verify_calls": calls, "decode_s": seconds, "draft_calls": calls}
    return row | changes


def generations(*rows) -> pd.DataFrame:
    return typed_frame(rows, GENERATIONS)


def cycle(
    accepted: int, committed: int | None = None, censored=False, clip="a", number=0, **changes
):
    row = blank_row(CYCLES)
    row |= {
        "run_id": "r1",
        "clip_id": clip,
        "method": "chain",
        "drafter_sha256": "",
        "setting": "",
        "repeat": 0,
        "cycle": number,
        "start_position": 0,
        "n_accepted": accepted,
        "n_committed": accepted + 1 if committed is None else committed,
        "censored": censored,
        "draft_s": 0.002,
        "verify_s": 0.010,
        "other_s": 0.001,
        "end_s": 0.013,
    }
    return row | changes


def cycles(*rows) -> pd.DataFrame:
    frame = typed_frame(rows, CYCLES)
    return frame.assign(benchmark="VDC", video=frame["clip_id"], sample_seed=1)


# ---- accepted length --------------------------------------------------------------------------
def test_case_115_both_definitions_stand_side_by_side():
    frame = cycles(cycle(0), cycle(1), cycle(3))
    assert value_of(metrics.accepted_drafts_parts(frame), ratio) == pytest.approx(4 / 3)
    tau = value_of(metrics.accepted_length_uncensored_parts(frame), ratio)
    assert tau == pytest.approx(7 / 3)


def test_tau_pools_tokens_and_calls_without_the_prefill_token():
    rows = usable(generations(decode("chain", "a", 9, 2, 1.0), decode("chain", "b", 5, 4, 1.0)))
    # (8 + 4) / (2 + 4)
    assert value_of(metrics.accepted_length_parts(rows), ratio) == pytest.approx(2.0)
    # (8 / 2 + 4 / 4) / 2
    per_clip = metrics.accepted_length_per_clip_parts(rows)
    assert value_of(per_clip, ratio) == pytest.approx(2.5)


def test_tau_is_one_when_nothing_is_ever_accepted():
    rows = usable(generations(decode("chain", "a", 8, 7, 1.0)))
    assert value_of(metrics.accepted_length_parts(rows), ratio) == 1.0


def test_a_text_of_one_token_has_no_length_of_its_own():
    rows = usable(generations(decode("chain", "a", 1, 0, 0.0), decode("chain", "b", 7, 2, 1.0)))
    assert value_of(metrics.accepted_length_parts(rows), ratio) == 3.0
    assert len(metrics.accepted_length_per_clip_parts(rows)) == 1


def test_a_cut_cycle_counts_in_tau_and_not_in_the_uncensored_one():
    frame = cycles(cycle(4), cycle(2, committed=2, censored=True))
    assert value_of(metrics.accepted_length_uncensored_parts(frame), ratio) == 5
    assert value_of(metrics.accepted_drafts_parts(frame), ratio) == 3


def test_the_share_of_texts_at_the_cap():
    ends = ["eos", "length", "length", "eos", "eos"]
    rows = [
        decode("chain", c, 5, 2, 1.0, stop_reason=e) for c, e in zip("abcde", ends, strict=True)
    ]
    assert value_of(metrics.cap_share_parts(usable(generations(*rows))), ratio) == 0.4


# ---- acceptance by position -------------------------------------------------------------------
def positions(parts_of, frame, survival, slots):
    return [value_of(parts_of(frame, k, survival), ratio) for k in slots]


def test_acceptance_by_position_by_hand():
    # accepted 0, 1, 3, 3 of 3 slots: one cycle fails at slot 1, one at slot 2, two take all
    frame = cycles(cycle(0), cycle(1), cycle(3), cycle(3))
    conditional = positions(cycle_position_parts, frame, False, (1, 2, 3))
    assert conditional == pytest.approx([3 / 4, 2 / 3, 2 / 2])
    survival = positions(cycle_position_parts, frame, True, (1, 2, 3))
    assert survival == pytest.approx([3 / 4, 2 / 4, 2 / 4])


def test_case_119_a_cut_block_leaves_the_denominator():
    whole = [cycle(0), cycle(3)]
    cut = cycle(1, committed=1, censored=True)
    conditional = positions(cycle_position_parts, cycles(*whole, cut), False, (1, 2, 3))
    # slot 1: 2 of 3 (the cut cycle was judged there); slot 2: only the full cycle was judged
    assert conditional == pytest.approx([2 / 3, 1, 1])
    survival = positions(cycle_position_parts, cycles(*whole, cut), True, (1, 2, 3))
    assert survival == pytest.approx([2 / 3, 1 / 2, 1 / 2])


def test_slots_that_nobody_reached_have_no_value():
    frame = cycles(cycle(0, draft_token_ids=[5, 6, 7]), cycle(0))
    assert math.isnan(value_of(cycle_position_parts(frame, 2, False), ratio))
    assert value_of(cycle_position_parts(frame, 2, True), ratio) == 0


def test_the_number_of_slots_is_the_drafters_own():
    """Block 8 drafts 7 slots, block 4 drafts 3: each is judged on its own, cut cycles or not."""
    eight = cycle(2, drafter_sha256="eight", draft_token_ids=list(range(7)))
    slim = cycle(7, drafter_sha256="eight", clip="b")  # its draft ids were not kept
    four = cycle(1, drafter_sha256="four", draft_token_ids=[5, 6, 7])
    frame = cycles(eight, slim, four)
    assert metrics.draft_slots(frame).tolist() == [7, 7, 3]
    # slots 2, 3 (all three cycles), 4 and 7 (the two of block 8), 8 (nobody's)
    survival = positions(cycle_position_parts, frame, True, (2, 3, 4, 7))
    assert survival == pytest.approx([2 / 3, 1 / 3, 1 / 2, 1 / 2])
    assert math.isnan(value_of(cycle_position_parts(frame, 8, True), ratio))


def anchors(*rows, drafter="d") -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "target_sha256": "t",
                "drafter_sha256": drafter,
                "clip_id": clip,
                "benchmark": "VDC",
                "train_seed": 1,
                "anchor_index": i,
                "n_slots": slots,
                "n_accepted": accepted,
            }
            for i, (clip, slots, accepted) in enumerate(rows)
        ]
    )


def test_anchor_positions_leave_out_slots_past_the_end():
    frame = anchors(("a", 15, 2), ("a", 2, 2), ("b", 15, 0))
    assert positions(anchor_position_parts, frame, False, (1, 2, 3)) == pytest.approx([2 / 3, 1, 0])
    assert positions(anchor_position_parts, frame, True, (1, 2, 3)) == pytest.approx(
        [2 / 3, 2 / 3, 0]
    )


def test_anchor_accepted_length_uses_full_blocks_only():
    frame = anchors(("a", 15, 2), ("a", 14, 14), ("b", 15, 5))
    assert value_of(anchor_accepted_length_parts(frame), ratio) == (3 + 6) / 2
    assert len(anchor_accepted_length_parts(frame)) == 2


def test_a_full_block_of_eight_has_seven_slots():
    frame = pd.concat(
        [
            anchors(("a", 7, 2), ("a", 6, 6), ("b", 7, 7), drafter="eight"),
            anchors(("a", 15, 3), ("a", 14, 14), drafter="sixteen"),
        ],
        ignore_index=True,
    )
    assert value_of(anchor_accepted_length_parts(frame), ratio) == (3 + 8 + 4) / 3
    matches = [[True] * slots for slots in frame["n_slots"]]
    parts = metrics.masked_slot_accuracy_parts(frame.assign(slot_match=matches))
    assert parts["p1"].tolist() == [7, 7, 15]


def test_case_118_acceptance_recovers_after_a_tie():
    # online verification: one rejected cycle (the planted tie), then full blocks again
    frame = cycles(cycle(15), cycle(0), cycle(15), cycle(15))
    assert value_of(cycle_position_parts(frame, 1, False), ratio) == 3 / 4
    assert value_of(metrics.accepted_drafts_parts(frame), ratio) == 45 / 4


# ---- time -------------------------------------------------------------------------------------
def timed_pairs():
    ar = [decode("ar", "a", 11, 10, 1.0), decode("ar", "b", 5, 4, 0.8)]
    fast = [decode("chain", "a", 11, 3, 0.4), decode("chain", "b", 5, 2, 0.1)]
    rows = usable(generations(*ar, *fast))
    return pair_clips(rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"])


def test_decode_speedup_is_a_ratio_of_pooled_seconds_per_token():
    pairs = timed_pairs()
    # (1.8 / 14) / (0.5 / 14)
    assert value_of(metrics.decode_speedup_parts(pairs), ratio_of_ratios) == pytest.approx(3.6)
    # mean of 2.5 and 8
    assert value_of(metrics.decode_speedup_per_clip_parts(pairs), ratio) == pytest.approx(5.25)


def test_end_to_end_adds_reading_vision_and_prefill():
    # 0.05 + 0.08 + 0.12 = 0.25 s a clip: (1.8 + 0.5) / (0.5 + 0.5)
    found = value_of(metrics.end_to_end_speedup_parts(timed_pairs()), ratio_of_ratios)
    assert found == pytest.approx(2.3)


def test_a_clip_without_a_reading_time_is_in_no_end_to_end_speedup():
    ar = [decode("ar", c, 11, 10, 1.0) for c in "ab"]
    chain = [decode("chain", c, 11, 3, 0.5) for c in "ab"]
    ar[1]["frame_read_s"] = None
    rows = usable(generations(*ar, *chain))
    pairs = pair_clips(rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"])
    assert metrics.end_to_end_speedup_parts(pairs)["clip_id"].tolist() == ["a"]
    assert len(metrics.decode_speedup_parts(pairs)) == 2


def test_a_clip_that_one_side_lacks_is_in_no_speedup():
    ar = [decode("ar", "a", 11, 10, 1.0), decode("ar", "b", 11, 10, 9.0)]
    chain = [
        decode("chain", "a", 11, 3, 0.5),
        generation_row("chain", "b", status="failed", reason="out of memory"),
    ]
    rows = usable(generations(*ar, *chain))
    pairs = pair_clips(rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"])
    assert pairs["clip_id"].tolist() == ["a"]
    assert value_of(metrics.decode_speedup_parts(pairs), ratio_of_ratios) == pytest.approx(2)


def test_repeats_and_training_seeds_are_summed_per_clip():
    ar = [decode("ar", "a", 11, 10, 1.0)]
    chain = [
        decode("chain", "a", 11, 3, 0.4, drafter_sha256="d1", train_seed=1),
        decode("chain", "a", 11, 3, 0.6, drafter_sha256="d2", train_seed=2),
    ]
    rows = usable(generations(*ar, *chain))
    pairs = pair_clips(rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"])
    assert len(pairs) == 1
    # 0.1 s a token against (0.4 + 0.6) / 20
    assert value_of(metrics.decode_speedup_parts(pairs), ratio_of_ratios) == pytest.approx(2)


def test_ms_per_token():
    rows = usable(generations(decode("ar", "a", 11, 10, 0.1), decode("ar", "b", 31, 30, 0.7)))
    assert value_of(metrics.ms_per_token_parts(rows), ratio) == pytest.approx(20)


def test_break_even_and_the_speed_up_at_an_accepted_length():
    # AR 5 ms, a cycle of 3 + 10 ms: 13 / 5 tokens break even, 8 tokens are 40 / 13 times as fast
    assert metrics.breakeven_tau(0.005, 0.013) == pytest.approx(2.6)
    assert metrics.speedup_at_tau(8, 0.005, 0.013) == pytest.approx(40 / 13)
    even = metrics.breakeven_tau(0.005, 0.013)
    assert metrics.speedup_at_tau(even, 0.005, 0.013) == pytest.approx(1)


def test_the_predicted_speedup_and_the_share_of_other_time():
    rows = usable(generations(decode("ar", "a", 11, 10, 0.09), decode("chain", "a", 11, 2, 0.026)))
    pairs = pair_clips(rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"])
    frame = cycles(cycle(3), cycle(5, number=1)).assign(video="sha-a")
    # tau (4 + 6) / 2 = 5, AR 9 ms, draft 2 ms + verify 10 ms
    found = value_of(metrics.predicted_speedup_parts(pairs, frame), predicted_ratio)
    assert found == pytest.approx(5 * 9 / 12)
    assert value_of(metrics.other_share_parts(frame), ratio) == pytest.approx(1 / 13)
    assert value_of(metrics.cycle_ms_parts(frame, "draft_s"), ratio) == pytest.approx(2)
    assert value_of(metrics.cycle_ms_parts(frame, "verify_s"), ratio) == pytest.approx(10)


def test_a_missing_time_of_one_repeat_is_missing_in_the_sum():
    chain = [decode("chain", "a", 5, 2, 0.1, repeat=r) for r in range(2)]
    chain[1]["vision_s"] = None
    rows = usable(generations(decode("ar", "a", 5, 4, 0.1), *chain))
    pairs = pair_clips(rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"])
    assert pairs["decode_s_b"].tolist() == pytest.approx([0.2])
    assert pairs["total_s_a"].notna().all() and pairs["total_s_b"].isna().all()


def test_tokens_in_no_time_are_refused():
    rows = usable(generations(decode("ar", "a", 5, 4, 0.1), decode("chain", "a", 5, 2, 0.0)))
    with pytest.raises(InputError, match="clip a: tokens were decoded in 0 seconds"):
        pair_clips(rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"])


# ---- identity, macro, plateau -----------------------------------------------------------------
def test_identical_share_ignores_what_was_not_compared():
    marks = [True, True, False, None]
    rows = [
        decode("chain", c, 5, 2, 1.0, identical_to_ar=m) for c, m in zip("abcd", marks, strict=True)
    ]
    parts = metrics.identical_share_parts(usable(generations(*rows)))
    assert value_of(parts, ratio) == pytest.approx(2 / 3)
    assert len(parts) == 3


def test_macro_is_unweighted_and_refuses_a_missing_benchmark():
    values = dict(zip(BENCHMARKS, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    assert macro(values) == 3
    del values["MLVU"]
    with pytest.raises(InputError, match=r"no value for \['MLVU'\]"):
        macro(values)
    with pytest.raises(InputError, match=r"no value for \['MLVU'\]"):
        macro(values | {"MLVU": float("nan")})
    with pytest.raises(InputError, match=r"unknown benchmarks \['MVLU'\]"):
        macro(values | {"MVLU": 1.0})


def test_a_plateau_is_a_last_doubling_without_gain():
    assert plateau([2.0, 3.0, 3.03]) == pytest.approx(3.015)
    assert plateau([2.0, 3.0, 2.9]) == pytest.approx(2.95)
    assert plateau([2.0, 3.0, 3.2]) is None
    assert plateau([3.0]) is None
    assert plateau([3.0, float("nan")]) is None


def test_formulas_have_no_value_over_zero():
    assert math.isnan(float(ratio(np.array([1.0, 0.0]))))
    assert math.isnan(float(ratio_of_ratios(np.array([1.0, 1.0, 0.0, 1.0]))))
    assert float(metrics.difference_of_ratios(np.array([3.0, 2.0, 1.0, 2.0]))) == 1.0
    assert math.isnan(value_of(pd.DataFrame(columns=["benchmark", "video", "p0", "p1"]), ratio))


# ---- guards -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("device", "NVIDIA H200"),
        ("dtype", "bfloat16"),
        ("reader", "pyav 14.0"),
        ("template_sha256", "t2"),
        ("target", "another target"),
        ("target_revision", "2"),
    ],
)
def test_cases_113_123_159_different_experiments_are_not_pooled(column, other):
    changed = {column: other, "sample_seed": 2}  # one shard may mix readers, two may not
    rows = usable(
        generations(
            decode("ar", "a", 5, 4, 1.0),
            decode("ar", "b", 5, 4, 1.0, **changed),
            decode("chain", "a", 5, 2, 0.5),
            decode("chain", "b", 5, 2, 0.5, **changed),
        )
    )
    ar, chain = rows.loc[rows["method"] == "ar"], rows.loc[rows["method"] == "chain"]
    for attempt in (
        lambda: metrics.ms_per_token_parts(ar),
        lambda: metrics.accepted_length_parts(chain),
        lambda: metrics.accepted_length_per_clip_parts(chain),
        lambda: pair_clips(ar, chain),
    ):
        with pytest.raises(InputError, match=f"'{column}' has 2 values in one pool"):
            attempt()


def test_a_clip_that_the_other_reader_had_to_open_stays_in_the_pool():
    """And so does a folder of images; but a shard that another reader read does not."""
    readers = ["decord 0.6.0", "decord 0.6.0", "pyav 14.0", "frames 12.0"]
    frame = pd.DataFrame({"reader": readers, "benchmark": "VDC", "sample_seed": 0})
    assert metrics.kinds(frame, "reader").tolist() == ["decord 0.6.0"] * 3
    refuse_mixed(frame)
    other = pd.concat([frame, frame.iloc[[2]].assign(sample_seed=1)])
    with pytest.raises(InputError, match=r"'reader' has 2 values .*'decord 0.6.0', 'pyav 14.0'"):
        refuse_mixed(other)


def test_anchors_of_two_targets_are_not_pooled():
    frame = anchors(("a", 15, 2), ("b", 15, 5))
    frame["target_sha256"] = ["t", "u"]
    with pytest.raises(InputError, match="'target_sha256' has 2 values"):
        anchor_accepted_length_parts(frame)


def test_a_missing_kind_is_a_kind_of_its_own():
    with pytest.raises(InputError, match=r"\['decord 0.6.0', 'none'\]"):
        refuse_mixed(pd.DataFrame({"reader": ["decord 0.6.0", None]}))


def test_case_126_a_missing_key_fails_loudly_and_no_phantom_group_appears():
    frame = pd.DataFrame({"method": ["chain", None, "tree60"], "x": [1, 2, 3]})
    with pytest.raises(InputError, match="'method' is missing in 1 of 3 rows"):
        list(grouped(frame, ["method"]))
    levels = pd.Categorical(["chain", "tree60"], categories=["chain", "lookup", "tree60"])
    groups = list(grouped(pd.DataFrame({"method": levels, "x": [1, 2]}), ["method"]))
    assert [key for (key,), _ in groups] == ["chain", "tree60"]
    assert sum(len(rows) for _, rows in groups) == 2


def test_case_126_rows_in_are_rows_counted():
    frame = generations(decode("chain", "a", 5, 2, 1.0)).assign(method=[None])
    with pytest.raises(InputError, match="'method' is missing in 1 of 1 generations"):
        usable(frame)


def test_case_122_a_warm_up_is_kept_in_the_rows_and_counts_nowhere():
    frame = generations(
        decode("ar", "a", 11, 10, 5.0, warmup=True, repeat=-1), decode("ar", "a", 11, 10, 0.1)
    )
    assert frame["decode_s"].tolist() == [5.0, 0.1]
    assert value_of(metrics.ms_per_token_parts(usable(frame)), ratio) == pytest.approx(10)


def test_case_133_an_infinite_number_is_named():
    frame = generations(decode("chain", "a", 5, 2, 1.0)).assign(decode_s=[float("inf")])
    with pytest.raises(InputError, match=r"'clip_id': 'a'.*'decode_s' is infinite"):
        usable(frame)
    refuse_infinite(pd.DataFrame({"clip_id": ["a"], "value": [float("nan")]}))


def test_a_decode_that_is_there_twice_is_refused():
    row = decode("chain", "a", 5, 2, 1.0)
    with pytest.raises(InputError, match="chain on clip a is there twice"):
        usable(generations(row, row))
    assert len(usable(generations(row, row | {"repeat": 1}))) == 2


def test_an_ok_row_without_numbers_is_refused():
    with pytest.raises(InputError, match="'decode_s' is missing in 1 rows marked ok"):
        usable(generations(decode("chain", "a", 5, 2, 1.0, decode_s=None)))


def test_failed_clips_are_not_zeros():
    frame = generations(
        decode("chain", "a", 9, 2, 1.0), generation_row("chain", "b", status="failed", reason="x")
    )
    rows = usable(frame)
    assert value_of(metrics.accepted_length_parts(rows), ratio) == 4
    assert len(rows) == 1


def test_the_cluster_is_the_video_and_else_the_clip():
    rows = usable(
        generations(
            decode("chain", "a", 5, 2, 1.0), decode("chain", "b", 5, 2, 1.0, video_sha256=None)
        )
    )
    assert rows["video"].tolist() == ["sha-a", "b"]


# ---- cycles and generations agree -------------------------------------------------------------
def raw_cycles(*rows):
    return typed_frame(rows, CYCLES)


def test_cycles_get_their_generations_keys():
    rows = usable(generations(decode("chain", "a", 6, 2, 1.0)))
    joined = usable_cycles(raw_cycles(cycle(1), cycle(2, number=1)), rows)
    assert joined["video"].tolist() == ["sha-a", "sha-a"]
    assert joined["n_committed"].sum() == 5


def test_warm_up_cycles_leave_with_their_generation():
    rows = usable(
        generations(
            decode("chain", "a", 3, 1, 1.0), decode("chain", "a", 3, 1, 9.0, warmup=True, repeat=-1)
        )
    )
    assert len(usable_cycles(raw_cycles(cycle(1), cycle(1, repeat=-1)), rows)) == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([cycle(1), cycle(1, number=1)], "commit 4 tokens in 2 calls"),
        ([cycle(4)], "commit 5 tokens in 1 calls"),
    ],
)
def test_cycles_that_do_not_add_up_are_refused(rows, words):
    with pytest.raises(InputError, match=f"{words}, its generation says 5 in 2"):
        usable_cycles(raw_cycles(*rows), usable(generations(decode("chain", "a", 6, 2, 1.0))))


def test_lost_cycles_are_noticed_and_absent_ones_allowed():
    rows = usable(generations(decode("chain", "a", 3, 1, 1.0), decode("chain", "b", 3, 1, 1.0)))
    with pytest.raises(InputError, match="chain on clip b commit 0 tokens in 0 calls"):
        usable_cycles(raw_cycles(cycle(1)), rows)
    assert usable_cycles(raw_cycles(), rows).empty
