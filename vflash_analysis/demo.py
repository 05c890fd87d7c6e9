"""One clip decoded twice, side by side in the terminal, from recorded cycles.

    vflash demo

Both panels fill at the pace at which the tokens were committed, slowed down; nothing is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from vflash_analysis.results.playback import Playback


def frame_at(shown: Sequence[Playback], seconds: float) -> Columns:
    """Both panels as they stood after `seconds` of decoding."""
    panels = []
    for one in shown:
        passed = min(seconds, one.decode_s)
        done = " done" if seconds >= one.decode_s else ""
        title = f"{one.title} {passed:.2f} s{done}"
        panels.append(Panel(Text(one.at(seconds)), title=title, width=48, height=14))
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
