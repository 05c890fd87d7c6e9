"""What a reader can look at beside the numbers: how far a text stood, tokens in words, clips.

All of it is made outside every timed part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.read import ClipFrames
from vflash_analysis.records import replace_atomically, strip_path

STRIP_FRAMES = 32
STRIP_HEIGHT_PX = 160
REPLACEMENT = "\ufffd"  # what decoders put for bytes that are not yet, or never, a character


def text_ends(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[int]:
    """How many characters of a text stand after each of its tokens.

    A token may end inside a character; it is shown when the token that completes it is there.
    Skipped special tokens show nothing. Pieces of a text are decoded alone as long as they add up to
    it, so the work grows with the length; a tokenizer whose pieces do not add up (one that strips
    spaces at the beginning) is asked for every prefix.

    Args:
        tokenizer: with `decode(ids, skip_special_tokens)`.
        token_ids: N of them.
        text: what they decode to without special tokens.

    Returns:
        N rising counts; the last is len(text).
    """

    def shown(start: int, stop: int, begin: int) -> tuple[str, int]:
        """A piece's text, and how many of its characters `text` has from `begin` on."""
        piece = tokenizer.decode(list(token_ids[start:stop]), skip_special_tokens=True)
        rest = text[begin : begin + len(piece)]
        same = [one == other for one, other in zip(piece, rest, strict=False)]
        return piece, same.index(False) if False in same else len(same)

    ends: list[int] = []
    start = settled = 0  # the first token, and the first character, of the open piece
    for stop in range(1, len(token_ids) + 1):
        piece, length = shown(start, stop, settled)
        ends.append(settled + length)
        if piece and length == len(piece) and not piece.endswith(REPLACEMENT):
            start, settled = stop, settled + length
    if ends and ends[-1] != len(text):
        whole = [shown(0, stop, 0)[1] for stop in range(1, len(token_ids) + 1)]
        ends = [*np.maximum.accumulate(whole[:-1]).tolist(), len(text)]
    return ends


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str]:
    """Each distinct token alone in words, by rising id."""
    return {int(one): tokenizer.decode([int(one)]) for one in sorted(set(token_ids))}


def write_strip(path: Path, frames: np.ndarray) -> None:
    """Frames side by side as one JPEG, whose comment is their number.

    Args:
        path: the file.
        frames: (T, H, W, 3) uint8; at most STRIP_FRAMES of them are taken, evenly, and shrunk to
            STRIP_HEIGHT_PX where they are higher.
    """
    count, height, width, _ = frames.shape
    taken = np.linspace(0, count - 1, min(count, STRIP_FRAMES)).round().astype(int)
    shrink = min(1.0, STRIP_HEIGHT_PX / height)
    size = (max(1, round(width * shrink)), max(1, round(height * shrink)))
    strip = Image.new("RGB", (size[0] * len(taken), size[1]))
    for place, number in enumerate(taken):
        frame = Image.fromarray(frames[number])
        strip.paste(frame.resize(size, Image.Resampling.LANCZOS), (place * size[0], 0))
    count_told = str(len(taken))
    replace_atomically(
        path, lambda draft: strip.save(draft, format="JPEG", quality=85, comment=count_told)
    )


class StripWriter:
    """A reader of frames that also leaves a strip of some clips.

    Args:
        reader: a `FrameReader`.
        folder: gets the strips.
        clips: whose strips are wanted.
    """

    def __init__(self, reader: Any, folder: Path, clips: Sequence[Clip]) -> None:
        self._reader, self._folder = reader, folder
        self._wanted = {(clip.benchmark, clip.clip_id) for clip in clips}

    def read_clip(self, clip: Clip, num_frames: int) -> ClipFrames:
        """As the reader's own."""
        read: ClipFrames = self._reader.read_clip(clip, num_frames)
        if (clip.benchmark, clip.clip_id) in self._wanted:
            write_strip(strip_path(self._folder, clip.clip_id), read.frames)
        return read
