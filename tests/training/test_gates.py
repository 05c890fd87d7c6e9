"""The gates' judgement of a target's texts."""

import pandas as pd
import pytest

from vflash_analysis.training.gates import judge_texts


def test_gates_judge_by_hand_computed_shares():
    references = [
        "a red circle stays still",
        "a blue square stays still",
        "a green cross rolls upwards",
    ]
    written = [
        "a red circle stays still",
        "a blue circle stays still",
        "a green cross rolls downwards",
    ]
    texts = pd.DataFrame(
        {
            "benchmark": "VDC",
            "prompt": "q",
            "reference": references,
            "text": written,
            "ended": [True, True, False],
        }
    )
    gates = judge_texts(texts).gates.set_index("gate")
    assert gates.loc["static attributes", "value"] == pytest.approx(5 / 6)
    assert not gates.loc["static attributes", "passed"]
    assert gates.loc["motion and events", "value"] == pytest.approx(2 / 3)
    assert gates.loc["texts that end by themselves", "value"] == pytest.approx(2 / 3)
    # text 1 with reference 0: shape and direction of three words; texts 2 and 0 with 1 and 2
    assert gates.loc["another clip's frames", "value"] == pytest.approx((2 / 3 + 0 + 0) / 3)
    assert gates.loc["another clip's frames", "passed"]
