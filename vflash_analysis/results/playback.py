"""A recorded decode as a reader would have watched it: which text stood at what time.

    shown = pick(records, None, ("ar", "tree60"))
    shown[1].at(0.05)      the text 50 ms after decoding began

Decoding begins when the first token is known, so that one stands from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from vflash_analysis.errors import InputError
from vflash_analysis.results.objectives import FLOW_ARM
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tidy import label
from vflash_analysis.schemas import ROW_KEY, VFLASH_METHODS

PLAIN = "ar"


@dataclass(frozen=True)
class Playback:
    """One recorded decode.

    Attributes:
        row: its row of generations.
        ends_s: (C,) seconds since decode start at which each cycle ended.
        tokens: (C + 1,) tokens of the text that stood before the first cycle (1) and after each,
            counted from its start: rising, the last is its length.
        characters: (C + 1,) characters of the text that stood then, counted in the same way.
    """

    row: pd.Series
    ends_s: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray

    @property
    def clip_id(self) -> str:
        return str(self.row["clip_id"])

    @property
    def method(self) -> str:
        return str(self.row["method"])

    @property
    def title(self) -> str:
        """The method as a reader sees it, with its setting and, unless it is flow's, its arm."""
        told = label(self.method)
        if self.method in VFLASH_METHODS:
            arm = self.row["objective"]
            flow = pd.isna(arm) or arm == FLOW_ARM
            told = f"VFlash-FM, {told}" if flow else f"{told}, {label(str(arm))}"
        setting = str(self.row["setting"])
        return told + (f" ({setting})" if setting else "")

    @property
    def text(self) -> str:
        return str(self.row["text"])

    @property
    def token_ids(self) -> list[int]:
        return [int(one) for one in self.row["token_ids"]]

    @property
    def decode_s(self) -> float:
        return float(self.ends_s[-1] if len(self.ends_s) else self.row["decode_s"])

    @property
    def ms_per_token(self) -> float:
        """Decode time per token after the first."""
        return 1000 * self.decode_s / (len(self.token_ids) - 1)

    def after(self, seconds: float) -> int:
        """How many cycles had ended after so many seconds of decoding."""
        return int(np.searchsorted(self.ends_s, seconds, side="right"))

    def at(self, seconds: float) -> str:
        """The text that stood there then."""
        return self.text[: int(self.characters[self.after(seconds)])]


ONE_TOKEN = "a text of one token stands from the start: there is nothing to play"


def finished(records: Records) -> pd.DataFrame:
    """The decodes that gave a text: first repeat, no warm-up."""
    rows = records.generations
    good = (rows["status"] == "ok") & ~rows["warmup"].astype(bool) & (rows["repeat"] == 0)
    return rows.loc[good]


def decodes(records: Records) -> pd.DataFrame:
    """The decodes that can be played: finished, of two tokens or more.

    Those of the flow arm, of the lowest training seed, come first.
    """
    rows = finished(records)
    rows = rows.loc[rows["new_tokens"] > 1]
    rows = rows.assign(other_arm=rows["objective"].fillna(FLOW_ARM) != FLOW_ARM)
    return rows.sort_values(["other_arm", "train_seed", "drafter_sha256"], kind="stable")


def own_cycles(records: Records, row: pd.Series) -> pd.DataFrame:
    """The recorded cycles of one decode, in order."""
    cycles = records.cycles
    same = np.logical_and.reduce([cycles[key] == row[key] for key in ROW_KEY])
    return cycles.loc[same].sort_values("cycle", ignore_index=True)


def playback(records: Records, row: pd.Series) -> Playback:
    """The recorded cycles of one decode; a text of one token has none.

    Raises:
        InputError: they are not in the records.
    """
    cycles = own_cycles(records, row)
    if cycles.empty and row["new_tokens"] > 1:
        raise InputError(f"{row['method']} on clip {row['clip_id']}: found no cycles to play")
    tokens = np.array([1, *(1 + cycles["n_committed"].astype(int).cumsum())])
    ends = cycles["end_s"].to_numpy(dtype=float)
    return Playback(row, ends, tokens, np.asarray(row["text_ends"])[tokens - 1])


def pick(
    records: Records, clip_id: str | None, methods: Sequence[str], benchmark: str | None = None
) -> list[Playback]:
    """The decodes to show side by side, all of one run.

    Args:
        records: the records.
        clip_id: the clip; None takes the longest text.
        methods: method, or method and setting with a colon between them; the first sets the run.
        benchmark: the clip's suite; None takes the first that holds a clip of that id.

    Raises:
        InputError: no such clip, its text has one token, or a method was not decoded on it.
    """
    rows = decodes(records)
    names = rows["method"] + np.where(rows["setting"] == "", "", ":" + rows["setting"])
    if clip_id is None:
        first = rows.loc[names == methods[0]]
        if first.empty:
            raise InputError(f"{records.source}: found no decode of {methods[0]!r}")
        longest = first.sort_values(["new_tokens", "clip_id"], ascending=[False, True]).iloc[0]
        clip_id, benchmark = str(longest["clip_id"]), str(longest["benchmark"])

    def of_clip(frame: pd.DataFrame) -> pd.DataFrame:
        same = frame["clip_id"] == clip_id
        return frame.loc[same if benchmark is None else same & (frame["benchmark"] == benchmark)]

    own = of_clip(rows)
    if own.empty and not of_clip(finished(records)).empty:
        raise InputError(f"clip {clip_id!r}: {ONE_TOKEN}")
    if own.empty:
        raise InputError(f"clip: found {clip_id!r}, allowed: a clip_id of {records.source}")
    shown: list[Playback] = []
    for method in methods:
        found = own.loc[names.loc[own.index] == method]
        if shown:
            found = found.loc[found["run_id"] == shown[0].row["run_id"]]
        if found.empty:
            raise InputError(f"{method!r} was not decoded on {clip_id} in {records.source}")
        shown.append(playback(records, found.iloc[0]))
    return shown
