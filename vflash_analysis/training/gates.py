"""Does a target read its clips? Free-running greedy texts against what the generated clips show.

Weights of a pocket target are tracked only while all gates hold: it tells static attributes and
motion, its texts end by themselves, and what it writes of another clip is no better than chance, so
that nothing can be told from the question alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from vflash_analysis.clips.read import FrameReader
from vflash_analysis.clips.suites import Clip
from vflash_analysis.clips.wording import DYNAMIC_KINDS, STATIC_KINDS, attribute_matches
from vflash_analysis.metrics import TARGET_LIMITS
from vflash_analysis.model.prompts import read_prompt
from vflash_analysis.model.target import Target
from vflash_analysis.stats import pairing_band
from vflash_analysis.training.continuations import greedy_continuation

STATIC_LIMIT, DYNAMIC_LIMIT, ENDED_LIMIT = (
    TARGET_LIMITS[name] for name in ("static_accuracy", "dynamic_accuracy", "ended_share")
)


@dataclass(frozen=True)
class TargetGates:
    """What the gates found.

    Attributes:
        gates: one row a gate: gate, value, allowed, n, passed.
        kinds: one row a benchmark and kind of attribute: accuracy, n words.
        texts: one row a clip: clip_id, benchmark, prompt, reference, text, ended.
    """

    gates: pd.DataFrame
    kinds: pd.DataFrame
    texts: pd.DataFrame


def check_target(
    target: Target, clips: list[Clip], reader: FrameReader, num_frames: int, max_new_tokens: int
) -> TargetGates:
    """Let the target write about each clip and judge the texts.

    Args:
        target: in the dtype in which it is used.
        clips: with references; questions asked of one clip only do not enter the shuffled gate.
        reader: reads the frames.
        num_frames: per clip.
        max_new_tokens: a text that reaches it did not end by itself.
    """
    rows = []
    for clip in clips:
        prompt = read_prompt(target, clip, reader, num_frames)
        out = greedy_continuation(target, prompt.input_ids, prompt.pixel_values, max_new_tokens)
        rows.append(
            {
                "clip_id": clip.clip_id,
                "benchmark": clip.benchmark,
                "prompt": clip.prompt,
                "reference": clip.reference,
                "text": target.tokenizer.decode(out.token_ids, skip_special_tokens=True),
                "ended": out.stop_reason == "eos",
            }
        )
    return judge_texts(pd.DataFrame(rows))


def judge_texts(texts: pd.DataFrame) -> TargetGates:
    """Gates and accuracies from the texts alone (columns as in `TargetGates.texts`)."""
    counts = [
        {"benchmark": row.benchmark, "kind": kind, "right": right, "words": words}
        for row in texts.itertuples()
        for kind, (right, words) in attribute_matches(str(row.text), str(row.reference)).items()
    ]
    kinds = (
        pd.DataFrame(counts)
        .groupby(["benchmark", "kind"], sort=False)[["right", "words"]]
        .sum()
        .reset_index()
    )
    kinds["accuracy"] = kinds["right"] / kinds["words"].where(kinds["words"] > 0)
    gates = []
    for name, group, limit in (
        ("static attributes", STATIC_KINDS, STATIC_LIMIT),
        ("motion and events", DYNAMIC_KINDS, DYNAMIC_LIMIT),
    ):
        sums = kinds[kinds["kind"].isin(group)][["right", "words"]].sum()
        gates.append(_gate(name, sums["right"] / sums["words"], int(sums["words"]), limit))
    shuffled, low, high = _shuffled(texts)
    gates.append(_gate("another clip's frames", shuffled, len(texts), low, high))
    ended = float(texts["ended"].mean())
    gates.append(_gate("texts that end by themselves", ended, len(texts), ENDED_LIMIT))
    return TargetGates(pd.DataFrame(gates), kinds, texts)


def _gate(name: str, value: float, n: int, low: float, high: float | None = None) -> dict[str, Any]:
    """One row of `TargetGates.gates`; without `high` there is no upper limit."""
    return {
        "gate": name,
        "value": value,
        "allowed": f">= {low:.2f}" if high is None else f"{low:.3f} to {high:.3f}",
        "n": n,
        "passed": value >= low and (high is None or value <= high),
    }


def _score(text: str, reference: str) -> float:
    pairs = attribute_matches(text, reference).values()
    return sum(right for right, _ in pairs) / max(sum(words for _, words in pairs), 1)


def _shuffled(texts: pd.DataFrame) -> tuple[float, float, float]:
    """Mean score when a question is answered with the next clip's text, and the band of chance.

    A question is the same for all clips of a group, so the text of the next clip is what the target
    writes when it is shown that clip's frames instead.
    """
    sums = np.zeros(3)  # clips, their scores, the band's mean
    low, high = 0.0, 0.0  # half-widths of independent groups add in squares
    for _, group in texts.groupby(["benchmark", "prompt"], sort=False):
        if len(group) < 2:
            continue
        scores = np.array(
            [
                [_score(str(text), str(asked)) for asked in group["reference"]]
                for text in group["text"]
            ]
        )
        band = pairing_band(scores)
        n = len(group)
        following = scores[(np.arange(n) + 1) % n, np.arange(n)].mean()
        sums += (n, n * following, n * band.value)
        low += (n * (band.value - band.low)) ** 2
        high += (n * (band.high - band.value)) ** 2
    total = max(sums[0], 1)
    value, middle = sums[1] / total, sums[2] / total
    return float(value), float(middle - low**0.5 / total), float(middle + high**0.5 / total)
