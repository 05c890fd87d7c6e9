"""Is a suite of generated clips hard enough for a drafter comparison to mean something?

Easy text would be accepted whatever the drafter knows of the clip. Three gates, over every anchor of
the fixed texts: the mask-only drafter's first slot is neither hopeless nor trivial, a drafter whose
context is zeroed loses most of its accepted length, and one that reads another clip's states is
clearly below itself.
"""

from __future__ import annotations

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.metrics import difference_of_ratios, ratio_of_ratios
from vflash_analysis.results.objectives import BASE_ARM, FLOW_ARM, side_by_side
from vflash_analysis.results.sources import Records, final_drafters
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap, Interval

FIRST_SLOT_RANGE = (0.65, 0.90)
ZEROED_LIMIT = 0.60  # of the drafter's own accepted length


def difficulty_gates(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> pd.DataFrame:
    """The gates that the anchors allow to be judged.

    Returns:
        One row a gate: gate, value, low, high (the interval), allowed, n anchors or slots, passed.
    """
    facts = final_drafters(records)
    anchors = records.anchors.merge(facts[["drafter_sha256", "arm"]], on="drafter_sha256")

    def of(arm: str, setting: str = "") -> pd.DataFrame:
        return anchors[(anchors["arm"] == arm) & (anchors["setting"] == setting)]

    rows = []
    base = metrics.anchor_position_parts(of(BASE_ARM), 1, survival=False)
    if not base.empty:
        first = boot.seeds_and_videos(base)
        low, high = FIRST_SLOT_RANGE
        passed = low <= first.value <= high
        allowed = f"{low:.2f} to {high:.2f}"
        rows.append(
            _row("mask-only: slot 1 accepted", first, allowed, int(base["p1"].sum()), passed)
        )
    own = metrics.anchor_accepted_length_parts(of(FLOW_ARM))
    for context, name in (("zeroed", "no context"), ("shuffled", "another clip's context")):
        other = metrics.anchor_accepted_length_parts(of(FLOW_ARM, f"context={context}"))
        if other.empty or own.empty:
            continue
        both = side_by_side(other, own)
        n = int(other["p1"].sum())
        if context == "zeroed":
            share = boot.seeds_and_videos(both, ratio_of_ratios)
            passed, allowed = share.value <= ZEROED_LIMIT, f"at most {ZEROED_LIMIT:.2f}"
            rows.append(_row(f"{name}: share of accepted length", share, allowed, n, passed))
        else:
            loss = boot.seeds_and_videos(both, difference_of_ratios)
            gate = f"{name}: change of accepted length"
            rows.append(_row(gate, loss, "interval below 0", n, loss.high < 0))
    return pd.DataFrame(rows, columns=["gate", "value", "low", "high", "allowed", "n", "passed"])


def _row(gate: str, value: Interval, allowed: str, n: int, passed: bool) -> dict[str, object]:
    return {
        "gate": gate,
        "value": value.value,
        "low": value.low,
        "high": value.high,
        "allowed": allowed,
        "n": n,
        "passed": bool(passed),
    }
