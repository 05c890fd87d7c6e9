"""Tree quality by hand."""

import math

import pandas as pd
import pytest

from vflash_analysis import metrics
from vflash_analysis.results import tree_quality


def cycles() -> pd.DataFrame:
    keys = {"benchmark": "VDC", "video": "v", "clip_id": "c", "sample_seed": 0}
    rows = [
        # the first choice, a sibling, the first choice, then a token the tree had not
        ([0, 2, 0, 9], 4, False),
        ([0, 0], 2, False),
        ([1], 1, True),
        (None, 1, False),  # not kept
    ]
    half = math.log(0.5)
    return pd.DataFrame(
        [
            keys
            | {
                "target_rank": ranks,
                "draft_parents": None if ranks is None else [-1, 0, 0, 1],
                "draft_logprobs": None if ranks is None else [half] * 4,
                "n_committed": committed,
                "censored": cut,
            }
            for ranks, committed, cut in rows
        ]
    )


def totals(parts: pd.DataFrame) -> tuple[float, float]:
    return float(parts["p0"].sum()), float(parts["p1"].sum())


@pytest.mark.parametrize(
    ("slot", "k", "expected"),
    [
        (1, 1, (2, 3)), (1, 2, (3, 3)), (2, 1, (1, 2)), (2, 2, (1, 2)), (2, 3, (2, 2)),
        (4, 8, (0, 1)), (4, 10, (1, 1)), (5, 1, (0, 0)),
    ],
)  # fmt: skip
def test_recall_counts_judged_slots(slot, k, expected):
    kept = tree_quality.kept(cycles())
    assert len(kept) == 3
    assert totals(tree_quality.recall_parts(kept, slot, k)) == expected


def test_first_choices_are_told_apart_by_what_stands_before_them():
    kept = tree_quality.kept(cycles())
    assert totals(tree_quality.first_choice_parts(kept, after_sibling=False)) == (1, 3)
    assert totals(tree_quality.first_choice_parts(kept, after_sibling=True)) == (1, 1)


def test_the_predicted_length_sums_paths():
    half = math.log(0.5)
    # 1 + 0.5 + two of 0.25 + one of 0.125
    assert tree_quality.predicted_length([-1, 0, 0, 1], [half] * 4) == pytest.approx(2.125)
    assert tree_quality.predicted_length([], []) == 1.0
    # a chain of certain tokens commits all of them and the target's own
    assert tree_quality.predicted_length([-1, 0, 1], [0.0] * 3) == 4.0


def test_lengths_leave_cut_cycles_out():
    predicted, observed = tree_quality.length_parts(tree_quality.kept(cycles()))
    assert metrics.value_of(predicted, metrics.ratio) == pytest.approx(2.125)
    assert metrics.value_of(observed, metrics.ratio) == 3.0
