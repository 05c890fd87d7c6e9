"""Rows of a suite's metadata files, and what an adapter makes of a row."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vflash_analysis.clips.lists import need_text
from vflash_analysis.errors import InputError
from vflash_analysis.strict import read_json, shown

VIDEO_EXTENSIONS = (".mp4", ".mkv", ".webm", ".avi")  # in any case


@dataclass(frozen=True)
class Video:
    """One clip of a suite's metadata, before its file is looked for.

    Attributes:
        clip_id, start_s, end_s, frames_per_s: as in `Clip`.
        file: relative to the suite's `videos` folder, with or without extension.
        other_file: where it may be instead.
        question, answer: the row's own.
    """

    clip_id: str
    file: str
    question: str | None = None
    answer: str | None = None
    other_file: str | None = None
    start_s: float | None = None
    end_s: float | None = None
    frames_per_s: float | None = None


def split_ending(name: str) -> tuple[str, str]:
    """Split a video's name before its extension, "" where it has none: ids may hold dots."""
    stem, extension = os.path.splitext(name)
    return (stem, extension) if extension.lower() in VIDEO_EXTENSIONS else (name, "")


def parquet_rows(folder: Path, pattern: str, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of every Parquet file of a pattern; each of `fields` is a text.

    Raises:
        InputError: a file without those columns, or a row without a text in one of them.
    """
    import pyarrow.parquet as parquet  # only the suites that come as Parquet need it

    for path in sorted(folder.glob(pattern)):
        try:
            rows = parquet.read_table(path, columns=list(fields)).to_pylist()
        except Exception as error:
            said = " ".join(str(error).split())
            raise InputError(
                f"{path}: not a Parquet file with columns {list(fields)} ({said})"
            ) from None
        yield from _complete(path, rows, fields)


def json_rows(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects of a JSON list; each of `fields` is a text.

    Raises:
        InputError: no such file, no list of objects, or one without a text in a field.
    """
    return _complete(path, read_json(path), fields)


def _complete(path: Path, rows: Any, fields: Sequence[str]) -> list[dict[str, Any]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: found {shown(rows)}, allowed: a list of objects")
    for number, row in enumerate(rows):
        for name in fields:
            need_text(f"{path}, row {number}", row, name)
    return rows
