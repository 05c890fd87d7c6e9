"""Does a target read its clips? Free-running greedy texts against what the generated clips show.

A pocket target is used only while all gates hold: it tells static attributes and motion, its texts end by themselves, and
with other clips' frames it knows no more than chance, so that nothing can be told from the text alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from vflash_analysis.clips.read import FrameReader
from vflash_analysis.clips.suites import Clip
from vflash_analysis.clips.wording import DYNAMIC_KINDS, STATIC_KINDS, attribute_matches
from vflash_analysis.model.target import Target
from vflash_analysis.stats import permutation_band
from vflash_analysis.training.continuations import greedy_continuation

STATIC_LIMIT, DYNAMIC_LIMIT, ENDED_LIMIT = 0.90, 0.75, 0.99


@dataclass(frozen=True)
class TargetGates:
    """What the gates found.

    Attributes:
        gates: one row a gate: gate, value, allowed, n, passed.
        kinds: one row a benchmark and kind of attribute: accuracy, n words.
        texts: one row a clip: benchmark, reference, text, text_of_other_clip, ended.
    """

    gates: pd.DataFrame
    kinds: pd.DataFrame
    texts: pd.DataFrame

    @property
    def passed(self) -> bool:
        """Whether every gate holds."""
        return bool(self.gates["passed"].all())


def check_target(
    target: Target, clips: list[Clip], reader: FrameReader, num_frames: int, max_new_tokens: int
) -> TargetGates:
    """Let the target write about each clip, and about the next clip's frames of the same benchmark under the same question.

    Args:
        target: in the dtype in which it is used.
        clips: with references; at least two of each question.
        reader: reads the frames.
        num_frames: per clip.
        max_new_tokens: a text that reaches it did not end by itself.
    """
    rows = []
    for clip, other in _paired(clips):
        texts, ended = [], []
        for source in (clip, other):
            frames = torch.from_numpy(reader.read(source.path, num_frames).frames)
            prompt = target.build_prompt(clip.prompt, num_frames)
            out = greedy_continuation(
                target, prompt, target.prepare_frames(frames), max_new_tokens, (0,)
            )
            texts.append(target.tokenizer.decode(out.token_ids, skip_special_tokens=True))
            ended.append(out.stop_reason == "eos")
        rows.append(
            {
                "clip_id": clip.clip_id,
                "benchmark": clip.benchmark,
                "prompt": clip.prompt,
                "reference": clip.reference,
                "text": texts[0],
                "text_of_other_clip": texts[1],
                "ended": ended[0],
            }
        )
    return judge_texts(pd.DataFrame(rows))


def judge_texts(texts: pd.DataFrame) -> TargetGates:
    """Gates and accuracies from the texts alone (columns as in ``TargetGates.texts``)."""
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
        value = sums["right"] / sums["words"]
        gates.append(
            {
                "gate": name,
                "value": value,
                "allowed": f">= {limit:.2f}",
                "n": int(sums["words"]),
                "passed": value >= limit,
            }
        )
    shuffled, low, high = _shuffled(texts)
    gates.append(
        {
            "gate": "another clip's frames",
            "value": shuffled,
            "allowed": f"{low:.3f} to {high:.3f}",
            "n": len(texts),
            "passed": low <= shuffled <= high,
        }
    )
    ended = float(texts["ended"].mean())
    gates.append(
        {
            "gate": "texts that end by themselves",
            "value": ended,
            "allowed": f">= {ENDED_LIMIT:.2f}",
            "n": len(texts),
            "passed": ended >= ENDED_LIMIT,
        }
    )
    return TargetGates(pd.DataFrame(gates), kinds, texts)


def _paired(clips: list[Clip]) -> list[tuple[Clip, Clip]]:
    """Each clip with the next one of the same question (the last with the first)."""
    groups: dict[tuple[str, str], list[Clip]] = {}
    for clip in clips:
        groups.setdefault((clip.benchmark, clip.prompt), []).append(clip)
    return [
        (clip, group[(i + 1) % len(group)])
        for group in groups.values()
        if len(group) > 1
        for i, clip in enumerate(group)
    ]


def _score(text: str, reference: str) -> float:
    pairs = attribute_matches(text, reference).values()
    return sum(right for right, _ in pairs) / max(sum(words for _, words in pairs), 1)


def _shuffled(texts: pd.DataFrame) -> tuple[float, float, float]:
    """Mean score of the texts written from other clips' frames, and the band of random pairings within a question."""
    total = len(texts)
    value = float(
        np.mean([_score(row.text_of_other_clip, row.reference) for row in texts.itertuples()])
    )
    means, lows, highs = 0.0, 0.0, 0.0
    for _, group in texts.groupby(["benchmark", "prompt"], sort=False):
        matrix = np.array(
            [
                [_score(text, reference) for reference in group["reference"]]
                for text in group["text"]
            ]
        )
        band = permutation_band(matrix)
        share = len(group) / total
        means += share * band.value
        lows += (share * (band.value - band.low)) ** 2
        highs += (share * (band.high - band.value)) ** 2
    return (
        value,
        means - lows**0.5,
        means + highs**0.5,
    )  # independent groups: half-widths add in squares
