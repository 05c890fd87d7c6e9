"""How good Tree-60's trees are: are the right tokens in them, and are its probabilities true?

Parts of metrics (see `metrics`) over the recorded cycles of a tree; cycles whose drafts are not kept
count nowhere.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

_KEYS = ["benchmark", "video", "clip_id", "sample_seed"]


def kept(cycles: pd.DataFrame) -> pd.DataFrame:
    """The cycles whose draft tokens and ranks are recorded."""
    return cycles.loc[cycles["target_rank"].notna() & cycles["draft_logprobs"].notna()]


def recall_parts(cycles: pd.DataFrame, slot: int, k: int) -> pd.DataFrame:
    """recall@k of a slot: judged slots whose token is among the drafter's k best; `ratio`.

    A slot is judged where all slots before it were accepted and the text goes on so far; the
    token is the target's.

    Args:
        cycles: of `kept`.
        slot: 1..15.
        k: 1 or more.
    """
    rows = cycles.loc[[len(ranks) >= slot for ranks in cycles["target_rank"]]]
    hits = [float(ranks[slot - 1] < k) for ranks in rows["target_rank"]]
    return rows[_KEYS].assign(p0=np.array(hits, dtype=float), p1=1.0)


def first_choice_parts(cycles: pd.DataFrame, after_sibling: bool) -> pd.DataFrame:
    """How often the drafter's first choice is right after an accepted one; `ratio`.

    p0 / p1 = slots whose token is the drafter's first choice, of the judged slots after a first
    choice, or after a sibling of it that the target chose instead. All slots of a block come from
    one forward that did not see that choice, so the two shares tell what a branch costs.
    """
    right, judged = [], []
    for ranks in cycles["target_rank"]:
        pairs = [
            now == 0
            for before, now in itertools.pairwise(list(ranks))
            if (before > 0) == after_sibling
        ]
        right.append(float(sum(pairs)))
        judged.append(float(len(pairs)))
    return cycles[_KEYS].assign(p0=np.array(right, dtype=float), p1=np.array(judged, dtype=float))


def predicted_length(parents: list[int], logprobs: list[float]) -> float:
    """Tokens a cycle would commit on average if the drafter's probabilities were true.

    1 + the sum over nodes of the product of the probabilities along the node's path.

    Args:
        parents: of each node, an earlier node or -1.
        logprobs: of each node's own token in its slot.
    """
    paths: list[float] = []
    for parent, own in zip(parents, logprobs, strict=True):
        paths.append(own + (paths[parent] if parent >= 0 else 0.0))
    return 1.0 + float(np.exp(paths).sum())


def length_parts(cycles: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predicted and observed tokens of a cycle over the cycles that nothing cut; both `ratio`."""
    rows = cycles.loc[~cycles["censored"].astype(bool)]
    pairs = zip(rows["draft_parents"], rows["draft_logprobs"], strict=True)
    predicted = [predicted_length(list(parents), list(own)) for parents, own in pairs]
    keys = rows[_KEYS].assign(p1=1.0)
    observed = rows["n_committed"].to_numpy(dtype=float)
    return keys.assign(p0=np.array(predicted, dtype=float)), keys.assign(p0=observed)
