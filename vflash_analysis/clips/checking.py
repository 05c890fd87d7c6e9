"""Reading the very frames a run would use, for many clips: in parallel, once, and told as it goes.

    vflash clips check --profile h100       every clip of a run's lists
    vflash clips check some/*.mp4           files

Damaged clips often open cleanly and fail only while the wanted frames are read, so nothing less
finds them. What was read is kept by path, size, modification time, frames and reader, a line per
clip: an interrupted check goes on where it was, and a second one reads only what has changed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd

from vflash_analysis.clips.frozen import bounds_of, verified_sha256
from vflash_analysis.clips.lists import Clip, video_files
from vflash_analysis.clips.read import ClipError, FrameReader, check_clip
from vflash_analysis.config import ClipSettings
from vflash_analysis.environment import READERS
from vflash_analysis.errors import InputError
from vflash_analysis.progress import CountLine
from vflash_analysis.records import package_versions
from vflash_analysis.strict import is_text

CLIPS_PER_READER = 50  # fewer are read before another reader has started
READERS_AT_ONCE = 4  # more would slow each other down to the time limit
NOT_KEPT = ("missing", "timeout", "crashed")  # a busy or broken machine's reasons, not the file's

Row = dict[str, Any]


@functools.cache
def _reader_versions() -> dict[str, str | None]:
    return package_versions(READERS)


class CheckStore:
    """Rows of clips that were read, on disk, a JSON line each.

    Args:
        path: the file; made when the first row is kept. A line cut by a crash is passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                try:
                    key, row = json.loads(line)
                    self._rows[key] = dict(row)
                except (ValueError, TypeError, RecursionError):
                    continue

    @staticmethod
    def key(clip: Clip, settings: ClipSettings) -> str | None:
        """What must be unchanged for a row to hold; None for a clip without a file."""
        files = video_files(clip.path)
        if not files:
            return None
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        asked = [settings.num_frames, settings.reader, bounds_of(clip), clip.sha256]
        return json.dumps([os.path.abspath(clip.path), stats, *asked, _reader_versions()])

    def get(self, key: str | None) -> Row | None:
        """The row kept under a key."""
        return None if key is None else self._rows.get(key)

    def keep(self, key: str | None, row: Row) -> None:
        """Keep a row, unless its reason may pass."""
        if key is None or row["reason"] in NOT_KEPT:
            return
        self._rows[key] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, row]) + "\n")


def check_clip_files(
    clips: Sequence[Clip],
    settings: ClipSettings,
    store: CheckStore,
    stream: Any,
    on_bad_clip: str = "skip",
) -> pd.DataFrame:
    """Read the frames of every clip that the store does not know.

    Args:
        clips: the clips. settings: number of frames, reader and time limit.
        store: what was read before; gets every new row at once.
        stream: where the line of progress goes.
        on_bad_clip: "fail" raises for a bad clip.

    Returns:
        One row per clip, in order: clip_id, benchmark and the columns of `clips.read.check_clip`.

    Raises:
        ClipError: a bad clip under "fail".
    """
    keys = [store.key(clip, settings) for clip in clips]
    rows = [store.get(key) for key in keys]
    for row in rows:
        _refuse(row, on_bad_clip)
    waiting = [place for place, row in enumerate(rows) if row is None]
    line = CountLine("clips read", len(waiting), stream)
    n_readers = min(READERS_AT_ONCE, math.ceil(len(waiting) / CLIPS_PER_READER))
    stop, own, readers = threading.Event(), threading.local(), list[FrameReader]()

    def start() -> None:
        own.reader = FrameReader(timeout_s=settings.read_timeout_s, backend=settings.reader)
        readers.append(own.reader)

    def check(place: int) -> Row | None:
        return None if stop.is_set() else _check(clips[place], settings.num_frames, own.reader)

    with ThreadPoolExecutor(max(1, n_readers), initializer=start) as pool:
        futures = {pool.submit(check, place): place for place in waiting}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                row, place = future.result(), futures[future]
                assert row is not None  # only a stopped check gives none
                rows[place] = row
                store.keep(keys[place], row)
                line.update(done, _count_bad(rows))
                _refuse(row, on_bad_clip)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            for reader in readers:
                reader.close()
    columns = {"clip_id": [c.clip_id for c in clips], "benchmark": [c.benchmark for c in clips]}
    return pd.concat([pd.DataFrame(columns), pd.DataFrame(rows)], axis=1)


def _check(clip: Clip, num_frames: int, reader: FrameReader) -> Row:
    row = check_clip(clip, num_frames, reader)
    if row["status"] == "bad" or clip.sha256 is None:
        return row
    try:
        verified_sha256(clip)
    except ClipError as error:
        return {**row, "status": "bad", "reason": error.reason, "message": error.detail}
    return row


def _refuse(row: Row | None, on_bad_clip: str) -> None:
    if row is not None and row["status"] == "bad" and on_bad_clip == "fail":
        raise ClipError(row["path"], row["reason"], row["message"])


def _count_bad(rows: Sequence[Row | None]) -> str:
    n_bad = sum(row is not None and row["status"] == "bad" for row in rows)
    return f"{n_bad} bad" if n_bad else ""


def given_files(files: Sequence[Path]) -> list[Clip]:
    """Files named by hand as clips, to be read like any other.

    Raises:
        InputError: a name that is not UTF-8, which no report can hold.
    """
    for path in files:
        if not is_text(str(path)):
            raise InputError(f"{str(path)!r}: found a name that is not UTF-8, allowed: UTF-8")
    return [Clip(str(path), "given", "given", str(path), "?") for path in files]


def summary(checked: pd.DataFrame) -> str:
    """One line: clips read, bad by reason and flagged by flag, most frequent first."""
    bad = checked[checked["status"] == "bad"]
    flagged = checked[checked["status"] == "flagged"]
    reasons, flags = Counter(bad["reason"]), Counter(" ".join(flagged["flags"]).split())
    told = [f"{len(checked)} clips read"]
    for what, count, words in (("bad", len(bad), reasons), ("flagged", len(flagged), flags)):
        by_word = ", ".join(f"{n} {word}" for word, n in words.most_common())
        told.append(f"{count} {what}" + (f" ({by_word})" if by_word else ""))
    return f"{told[0]}: {told[1]}, {told[2]}"
