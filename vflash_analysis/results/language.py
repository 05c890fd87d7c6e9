"""How far drafts reach in a language model's texts: a drafter beside look-up and a bigram chain.

The bigram chain proposes after every token the one that most often followed it in the training
texts, 15 times in a row. Its cycles follow from a finished text alone: decoding is lossless, so what
a verify call would accept is what the text says. Read from records, without the model.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.errors import InputError
from vflash_analysis.metrics import ratio, value_of
from vflash_analysis.records import read_records
from vflash_analysis.results.objectives import side_by_side
from vflash_analysis.schemas import BLOCK_SIZE, CONTINUATIONS, CYCLES, GENERATIONS, VFLASH_METHODS
from vflash_analysis.stats import Bootstrap, Interval

BIGRAM_DRAFTS = BLOCK_SIZE - 1  # as many as a block drafts
BIGRAM = "bigram"
CHAIN = VFLASH_METHODS[0]
BASELINES = ("lookup", BIGRAM)


def successors(texts: Iterable[Sequence[int]]) -> dict[int, int]:
    """The token that most often follows each token within the texts; ties go to the lowest id."""
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for token, following in itertools.pairwise(text):
            counts[token][following] += 1
    return {
        token: min(found, key=lambda following: (-found[following], following))
        for token, found in counts.items()
    }


def chain_cycles(text: Sequence[int], after: Mapping[int, int]) -> list[dict[str, Any]]:
    """The cycles of decoding a text with the chain token -> after[token] -> ...

    Args:
        text: new tokens, the first one the prefill's.
        after: see `successors`; a chain ends at a token that has none.

    Returns:
        n_accepted, n_committed and censored of each cycle, as the decode loop counts them: a chain
        that is right up to the text's end is cut there, one token of the target uncommitted.
    """
    cycles = []
    anchor = 0
    while anchor < len(text) - 1:
        room = len(text) - 1 - anchor
        accepted, draft = 0, after.get(text[anchor])
        while (
            accepted < min(room, BIGRAM_DRAFTS)
            and draft is not None
            and text[anchor + 1 + accepted] == draft
        ):
            accepted, draft = accepted + 1, after.get(draft)
        committed = min(accepted + 1, room)
        cycles.append(
            {"n_accepted": accepted, "n_committed": committed, "censored": accepted == room}
        )
        anchor += committed
    return cycles


def _read(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Usable generations and cycles of a decode, the bigram chain's among them.

    The bigram chain was never run, so it has no time and no text of its own to compare.
    """
    rows = read_records(folder / "decode" / "generations.parquet", GENERATIONS)
    generations = metrics.usable(rows)
    cycles = read_records(folder / "decode" / "cycles.parquet", CYCLES)
    training = read_records(folder / "training" / "continuations.parquet", CONTINUATIONS)
    kept = training[training["status"] == "ok"]
    after = successors(
        ids[prompt:].tolist()
        for ids, prompt in zip(kept["input_ids"], kept["prompt_tokens"], strict=True)
    )
    plain = generations[generations["method"] == "ar"]
    if plain.empty:
        raise InputError(f"{folder}: found no text of method ar")
    keys = ["benchmark", "video", "clip_id", "sample_seed"]
    found = [chain_cycles(ids.tolist(), after) for ids in plain["token_ids"]]
    replayed = [
        {**row, "method": BIGRAM, **cycle}
        for row, own in zip(plain[keys].to_dict("records"), found, strict=True)
        for cycle in own
    ]
    bigram = plain.assign(
        method=BIGRAM,
        verify_calls=[len(own) for own in found],
        decode_s=float("nan"),
        identical_to_ar=pd.array([pd.NA] * len(plain), dtype="boolean"),
    )
    decoded = metrics.usable_cycles(cycles, generations)
    columns = [*replayed[0]]
    return (
        pd.concat([generations, bigram], ignore_index=True),
        pd.concat([decoded[columns], pd.DataFrame(replayed)], ignore_index=True),
    )


def _told(interval: Interval, digits: int = 2) -> str:
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def acceptance(folder: Path, boot: Bootstrap) -> pd.DataFrame:
    """One row per method: texts, share identical to plain decoding, lengths with intervals, time.

    Columns: texts; identical, accepted_drafts, accepted_length and ms_per_token as `metrics` defines
    them, the lengths of methods whose cycles are recorded.
    """
    generations, cycles = _read(folder)
    rows = []
    for method in dict.fromkeys(generations["method"]):
        own, steps = (frame[frame["method"] == method] for frame in (generations, cycles))
        lengths = {"accepted_drafts": "", "accepted_length": ""}
        if len(steps):
            accepted = boot.videos(metrics.accepted_drafts_parts(steps))
            length = boot.videos(metrics.accepted_length_parts(own))
            lengths = {"accepted_drafts": _told(accepted), "accepted_length": _told(length)}
        rows.append(
            {
                "method": method,
                "texts": own["clip_id"].nunique(),
                "identical": value_of(metrics.identical_share_parts(own), ratio),
                **lengths,
                "ms_per_token": value_of(metrics.ms_per_token_parts(own), ratio),
            }
        )
    return pd.DataFrame(rows).round(2)


def gains(folder: Path, boot: Bootstrap) -> pd.DataFrame:
    """Accepted drafts of the chain minus a baseline's, paired over texts; one row per baseline.

    Columns: method, baseline; value, low, high of the difference; texts; shown, whether the
    interval excludes 0.
    """
    _, cycles = _read(folder)
    parts = {
        name: metrics.accepted_drafts_parts(cycles[cycles["method"] == name])
        for name in (CHAIN, *BASELINES)
    }
    rows = []
    for baseline in BASELINES:
        both = side_by_side(parts[CHAIN], parts[baseline])
        found = boot.videos(both, metrics.difference_of_ratios)
        shown = found.low > 0 or found.high < 0
        told = {"value": found.value, "low": found.low, "high": found.high, "texts": found.n}
        rows.append({"method": CHAIN, "baseline": baseline, **told, "shown": shown})
    return pd.DataFrame(rows).round(3)
