"""One clip decoded twice, side by side in the terminal, from recorded cycles.

    vflash demo

Both panels fill at the pace at which the tokens were committed, slowed down; nothing is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from vflash_analysis.errors import InputError
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tidy import label
from vflash_analysis.schemas import ROW_KEY


@dataclass(frozen=True)
class Playback:
    """One recorded decode.

    Attributes:
        clip_id, method: as in the records.
        text: the whole text.
        ends_s: (C,) seconds since decode start at which each cycle ended.
        shares: (C,) share of the text's tokens committed by then, the prefill's token included.
    """

    clip_id: str
    method: str
    text: str
    ends_s: np.ndarray
    shares: np.ndarray

    def at(self, seconds: float) -> str:
        """The text that stood there after `seconds`, cut by its share of tokens."""
        done = int(np.searchsorted(self.ends_s, seconds, side="right"))
        return self.text[: round(len(self.text) * (self.shares[done - 1] if done else 0.0))]

    @property
    def decode_s(self) -> float:
        return float(self.ends_s[-1])


def playback(records: Records, row: pd.Series) -> Playback:
    """The recorded cycles of one generation.

    Raises:
        InputError: a text of fewer than two tokens, which has no decode time.
    """
    cycles = records.cycles
    for key in ROW_KEY:
        cycles = cycles[cycles[key] == row[key]]
    if cycles.empty:
        raise InputError(f"demo: {row['clip_id']}: found 1 token, allowed: 2 or more")
    cycles = cycles.sort_values("cycle")
    tokens = 1 + np.cumsum(cycles["n_committed"].to_numpy(dtype=float))
    ends = cycles["end_s"].to_numpy(dtype=float)
    clip_id, method, text = (str(row[name]) for name in ("clip_id", "method", "text"))
    return Playback(clip_id, method, text, ends, tokens / tokens[-1])


def pick(records: Records, clip_id: str | None, methods: Sequence[str]) -> list[Playback]:
    """The decodes to show: of the clip asked for, else of the longest text.

    Raises:
        InputError: no such clip, or a method was not decoded on it.
    """
    rows = records.generations
    rows = rows[(rows["status"] == "ok") & ~rows["warmup"] & (rows["setting"] == "")]
    if clip_id is None:
        baseline = rows[rows["method"] == methods[0]]
        if baseline.empty:
            raise InputError(f"demo: {records.source} holds no decode of {methods[0]!r}")
        clip_id = str(baseline.sort_values("new_tokens")["clip_id"].iloc[-1])
    own = rows[rows["clip_id"] == clip_id].sort_values(["objective", "train_seed"], ascending=False)
    if own.empty:
        raise InputError(f"demo: found clip {clip_id!r}, allowed: a clip_id of {records.source}")
    shown = []
    for method in methods:
        found = own[own["method"] == method]
        if found.empty:
            raise InputError(f"demo: {method!r} was not decoded on {clip_id} in {records.source}")
        shown.append(playback(records, found.iloc[0]))
    return shown


def frame_at(shown: Sequence[Playback], seconds: float) -> Columns:
    """Both panels as they stood after `seconds` of decoding."""
    panels = []
    for one in shown:
        passed = min(seconds, one.decode_s)
        done = " done" if seconds >= one.decode_s else ""
        title = f"{label(one.method)} {passed:.2f} s{done}"
        panels.append(Panel(one.at(seconds), title=title, width=48, height=14))
    return Columns(panels)


def play(shown: Sequence[Playback], slower: float, console: Console) -> None:
    """Fill the panels, `slower` times slower than they were recorded; at once if not a terminal."""
    longest = max(one.decode_s for one in shown)
    if not console.is_terminal:
        console.print(frame_at(shown, longest))
        return
    started = time.monotonic()
    with Live(console=console, refresh_per_second=20) as live:
        while (seconds := (time.monotonic() - started) / slower) < longest:
            live.update(frame_at(shown, seconds))
            time.sleep(0.05)
        live.update(frame_at(shown, longest))
