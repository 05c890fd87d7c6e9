"""The difficulty gates against hand-computed shares."""

import pandas as pd
import pytest

from tests.results.synthetic import drafter_columns
from vflash_analysis.records import typed_frame
from vflash_analysis.results.difficulty import difficulty_gates
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.schemas import ANCHORS
from vflash_analysis.stats import Bootstrap

FEW = Bootstrap(n_samples=200)


def _anchors(arm: str, setting: str, accepted: list[int]) -> list[dict]:
    return [
        drafter_columns(arm, 1, 100, 100)
        | {"setting": setting, "clip_id": f"clip{i}", "benchmark": "VDC", "split": "suites"}
        | {
            "anchor_index": 0,
            "n_slots": 15,
            "n_accepted": n,
            "slot_match": [k < n for k in range(15)],
        }
        for i, n in enumerate(accepted)
    ]


def _gates(*groups: list[dict]) -> pd.DataFrame:
    frame = pd.DataFrame([row for group in groups for row in group])[list(ANCHORS.columns)]
    records = records_from_frames({"anchors": typed_frame(frame, ANCHORS)}, "synthetic")
    return difficulty_gates(records, FEW).set_index("gate")


def test_gates_by_hand():
    gates = _gates(
        _anchors("mask_only", "", [0, 3, 3, 3]),
        _anchors("self_reveal", "", [5, 7, 9, 7]),
        _anchors("self_reveal", "context=zeroed", [1, 1, 1, 1]),
        _anchors("self_reveal", "context=shuffled", [2, 4, 6, 4]),
    )
    assert gates["value"].tolist() == pytest.approx([3 / 4, 2 / 8, -3.0])
    assert gates["passed"].tolist() == [True, True, True]
    assert gates["n"].tolist() == [4, 4, 4]


def test_easy_clips_fail_each_gate():
    gates = _gates(
        _anchors("mask_only", "", [3, 3, 3, 3]),
        _anchors("self_reveal", "", [5, 7, 9, 7]),
        _anchors("self_reveal", "context=zeroed", [5, 5, 5, 5]),
        _anchors("self_reveal", "context=shuffled", [7, 6, 8, 7]),
    )
    assert gates["value"].tolist() == pytest.approx([1.0, 6 / 8, 0.0])
    assert not gates["passed"].any()


def test_what_was_not_scored_is_not_judged():
    gates = _gates(_anchors("mask_only", "", [0, 3]))
    assert list(gates.index) == ["mask-only: slot 1 accepted"]
