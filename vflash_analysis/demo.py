"""One clip decoded several ways, side by side: recorded cycles, or a clip of the user's own.

    vflash demo                         plays a recorded clip in the terminal; nothing is decoded
    vflash demo my.mp4 --prompt "…"     decodes it in a process of its own, writes replay and cycle

In the terminal the panels fill at the pace at which the tokens were committed, slowed down.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from vflash_analysis.asking import ask
from vflash_analysis.results.one_cycle import one_cycle_frame
from vflash_analysis.results.one_cycle_figure import one_cycle_figure
from vflash_analysis.results.playback import Playback, finished, playback
from vflash_analysis.results.replay import showing
from vflash_analysis.results.report import write_replay
from vflash_analysis.results.sources import load_records
from vflash_analysis.results.style import save_figure

POCKET_ONLY = (
    "The pocket target knows only generated shapes: on a real film its text is nonsense and the "
    "speed-up can be below 1."
)
ONE_DECODE_EACH = (
    "Times are of one decode each on this machine; other work on it at the same time voids the "
    "ratio."
)


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


def decode_own(request: Mapping[str, Any]) -> dict[str, Any]:
    """Have `own_clip` decode a clip, its progress on standard error as it comes.

    Args:
        request: the fields of `own_clip.Request`.

    Returns:
        The clip's clip_id and prompt, and the methods that decoded it.

    Raises:
        InputError: why it was not decoded.
    """
    return ask("vflash_analysis.own_clip", request, silent="demo: no message", live=True)


def show_own(
    records_folder: Path, clip_id: str, methods: Sequence[str], out: Path, told: str
) -> tuple[list[Playback], list[Path]]:
    """Write the replay and the cycle of a clip that was decoded; returns decodes and files.

    `told` ends the replay's caption.

    There are no files where a text has one token: then there is nothing to replay.
    """
    records = load_records([records_folder])
    rows = finished(records)
    if (rows["new_tokens"] < 2).any():
        by_method = {str(row["method"]): row for _, row in rows.iterrows()}
        return [playback(records, by_method[method]) for method in methods], []
    shown = showing(records, clip_id, methods)
    frame = one_cycle_frame(records)  # the records hold this clip alone: by F2's rule
    files = write_replay(out, [shown], told)
    return list(shown.decodes), [*files, *save_figure(out, "F2_cycle", *one_cycle_figure(frame))]
