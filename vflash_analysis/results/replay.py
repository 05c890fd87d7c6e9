"""F3: recorded decodes of some clips, plain and drafted side by side, as one HTML page.

    vflash figures            figures/pocket/F3_replay.html, and a GIF beside it (`replay_gif`)

Nothing is decoded: the panels fill with the characters that stood at each recorded commit. The page
holds its data, asks for nothing from any network, and opens from disk or in a notebook.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vflash_analysis.errors import InputError
from vflash_analysis.records import write_text_atomic
from vflash_analysis.results.playback import PLAIN, Playback, decodes, pick
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tidy import BENCHMARK_ORDER, in_order, label

F3 = "F3_replay"
N_CLIPS = 4
SPEED = 0.25  # of real time, as on the paper's page
DRAFTED = "tree60"
_TEMPLATE = Path(__file__).with_suffix(".html")


@dataclass(frozen=True)
class Film:
    """A film strip: frames of one clip side by side in a JPEG file."""

    path: Path
    frames: int
    width: int
    height: int


@dataclass(frozen=True)
class Showing:
    """One clip's decodes, plain first.

    Attributes:
        decodes: two or more of the same clip and run.
        film: its strip; None where none was kept.
    """

    decodes: tuple[Playback, ...]
    film: Film | None

    @property
    def prompt(self) -> str:
        return str(self.decodes[0].row["prompt"])

    @property
    def identical(self) -> bool:
        """Whether all decodes committed the same tokens."""
        return all(one.token_ids == self.decodes[0].token_ids for one in self.decodes)

    @property
    def speedups(self) -> list[tuple[str, float]]:
        """By method, plain decoding's time per token over its own, on this clip alone."""
        plain, *drafted = self.decodes
        return [(label(one.method), plain.ms_per_token / one.ms_per_token) for one in drafted]


def film_of(records: Records, clip_id: str) -> Film | None:
    """The strip of a clip, if one was kept; its comment says how many frames it holds."""
    path = records.strips.get(clip_id)
    if path is None:
        return None
    try:
        with Image.open(path) as strip:
            width, height = strip.size
            frames = int(strip.info.get("comment", b"0"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as a film strip: {error}") from None
    if frames < 1 or width % frames:
        raise InputError(f"{path}: found {frames} frames in {width} pixels, allowed: a divisor")
    return Film(path, frames, width // frames, height)


def showing(
    records: Records,
    clip_id: str,
    methods: Sequence[str] = (PLAIN, DRAFTED),
    benchmark: str | None = None,
) -> Showing:
    """One clip's decodes and strip; see `pick`."""
    found = pick(records, clip_id, methods, benchmark)
    return Showing(tuple(found), film_of(records, clip_id))


def chosen_clips(records: Records, drafted: str = DRAFTED) -> dict[str, str]:
    """By suite, the first N_CLIPS of them: the clip with the longest text among those with a strip.

    Where no strip was kept at all, among all that were decoded plainly and with `drafted`.
    """
    place = ["benchmark", "clip_id"]  # suites may share ids
    rows = decodes(records)
    rows = rows.loc[rows["setting"] == ""]
    other = rows.loc[rows["method"] == drafted, place].drop_duplicates()
    rows = rows.loc[rows["method"] == PLAIN].merge(other, on=place)
    with_strip = rows["clip_id"].isin(set(records.strips))
    rows = rows.loc[with_strip] if with_strip.any() else rows
    chosen = {}
    for suite in in_order(rows["benchmark"], BENCHMARK_ORDER)[:N_CLIPS]:
        own = rows.loc[rows["benchmark"] == suite]
        own = own.sort_values(["new_tokens", "clip_id"], ascending=[False, True])
        chosen[suite] = str(own["clip_id"].iloc[0])
    return chosen


def replay_of(records: Records, drafted: str = DRAFTED) -> list[Showing]:
    """What F3 shows."""
    return [
        showing(records, clip_id, (PLAIN, drafted), suite)
        for suite, clip_id in chosen_clips(records, drafted).items()
    ]


def caption(shown: Sequence[Showing]) -> str:
    """What is to be seen, on what it ran, and how the clips were chosen."""
    if not shown:
        return ""
    row = shown[0].decodes[0].row
    names = " and ".join(dict.fromkeys(one.title for each in shown for one in each.decodes))
    n = len(shown)
    # the folder of a target that the suite trains itself is called just that
    named = "" if row["target"] == "target" else f" {row['target']}"
    return (
        f"{names}: recorded commit times, one decode each (n = {n} clip{'s' * (n > 1)}, no "
        f"interval). The {row['profile']} profile's target{named}, {row['dtype']}, "
        f"on {row['device']}. Time counts from the first token, so "
        "prefill and frame reading are not in it. The panels of a clip with the badge hold the same "
        "tokens and differ only in how fast they fill."
    )


RULE = (
    "Clips: of each of the first four suites the longest text among the clips whose frames were "
    "kept. The film loops through the frames that the target read."
)


def _as_json(shown: Showing) -> dict[str, Any]:
    film = None
    if shown.film is not None:
        coded = base64.b64encode(shown.film.path.read_bytes()).decode("ascii")
        film = {
            "source": f"data:image/jpeg;base64,{coded}",
            "frames": shown.film.frames,
            "width": shown.film.width,
            "height": shown.film.height,
        }
    return {
        "suite": f"{shown.decodes[0].row['benchmark']} · {shown.decodes[0].clip_id}",
        "prompt": shown.prompt,
        "film": film,
        "identical": shown.identical,
        "speedups": [(name, round(ratio, 4)) for name, ratio in shown.speedups],
        "decodes": [
            {
                "name": one.title,
                "text": one.text,
                "ends_ms": [round(1000 * float(end), 4) for end in one.ends_s],
                "tokens": one.tokens.tolist(),
                "characters": one.characters.tolist(),
            }
            for one in shown.decodes
        ],
    }


def replay_page(shown: Sequence[Showing], told: str) -> str:
    """The page as HTML.

    Args:
        shown: clips and their decodes.
        told: the caption.
    """
    clips = [_as_json(one) for one in shown]
    ends = [end for clip in clips for one in clip["decodes"] for end in one["ends_ms"]]
    data = {
        "title": "Autoregressive decoding and VFlash-FM, side by side",
        "caption": told,
        "speed": SPEED,
        "end_ms": max(ends, default=1.0),
        "clips": clips,
    }
    # "<" would end the element that holds the data, or begin a comment
    coded = json.dumps(data, ensure_ascii=False, sort_keys=True).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", coded)


def write_page(folder: str | Path, shown: Sequence[Showing], told: str) -> Path:
    """Writes the page as F3_replay.html; equal data give equal bytes."""
    path = Path(folder) / f"{F3}.html"
    write_text_atomic(path, replay_page(shown, told))
    return path


def in_notebook(page: str, height_px: int = 900) -> str:
    """A page inside another one, as a notebook's output shows it."""
    return (
        f'<div><iframe srcdoc="{html.escape(page)}" title="{label(F3)}" allow="fullscreen" '
        f'style="width: 100%; height: {height_px}px; border: 0"></iframe></div>'
    )
