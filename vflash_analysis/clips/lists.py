"""A clip, and lists of clips in JSON lines.

Training lists may come from anywhere: `read_video_list` takes any JSONL of video + prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vflash_analysis.errors import InputError
from vflash_analysis.records import sha256_of_file, write_text_atomic
from vflash_analysis.strict import TEXT, convert, is_text, parse_json, read_text, shown


@dataclass(frozen=True)
class Clip:
    """One video with the prompt asked about it.

    Attributes:
        clip_id: unique within a list; a suite's ids are also unique across its tasks.
        benchmark: the suite as it stands in the records' `benchmark` column.
        split: what the clip may be used for.
        path: video file, or with `frames_per_s` a folder of numbered frame images; absolute once a
            list has been read. Empty for a question without a video, which no list in a file holds.
        prompt: the question without chat template.
        reference: an expected answer, where one exists.
        facts: what a generated clip shows, for scoring; JSON types only.
        start_s, end_s: the clip's bounds in seconds of its video; None: the video's own.
        frames_per_s: images per second of a folder; None: `path` is a file.
        sha256: of the file that the clip is, from a frozen list; None where any will do.
    """

    clip_id: str
    benchmark: str
    split: str
    path: str
    prompt: str
    reference: str | None = None
    facts: dict[str, Any] | None = None
    start_s: float | None = None
    end_s: float | None = None
    frames_per_s: float | None = None
    sha256: str | None = None


_NUMBERS = ("start_s", "end_s", "frames_per_s")


# ---------------------------------------------------------------- lists in files


def write_clip_list(path: str | os.PathLike[str], clips: Iterable[Clip]) -> Path:
    """Write clips as JSON lines; files below the list's folder by relative path.

    Raises:
        InputError: an id that occurs twice; nothing is written then.
    """
    path = Path(path)
    clips = list(clips)
    _refuse_repeated_ids(str(path), clips)
    folder = os.path.abspath(path.parent)
    lines = []
    for clip in clips:
        row = dataclasses.asdict(clip)
        full = os.path.abspath(clip.path)
        row["path"] = os.path.relpath(full, folder) if full.startswith(folder + os.sep) else full
        lines.append(json.dumps(row, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n")
    write_text_atomic(path, "".join(lines))
    return path


def read_clip_list(path: str | os.PathLike[str]) -> list[Clip]:
    """Read what `write_clip_list` wrote; relative paths count from the list's folder.

    Raises:
        InputError: no such list, or a line with a missing, unknown or mistyped field or an id
        already seen.
    """
    path = Path(path)
    clips = []
    for place, row in json_lines(path):
        fields = dataclasses.fields(Clip)
        names = {field.name for field in fields}
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        if set(row) - names or required - set(row):
            raise InputError(
                f"{place}: fields are {sorted(row)}; "
                f"allowed are {sorted(names)}, needed {sorted(required)}"
            )
        for name in required:
            need_text(place, row, name)
        if not isinstance(row.get("facts"), (dict, type(None))):
            raise InputError(
                f"{place}: facts: found {shown(row['facts'])}, allowed: an object or null"
            )
        row.update({name: may_have_number(place, row, name) for name in _NUMBERS})
        full = os.path.abspath(os.path.join(path.parent, row["path"]))
        clips.append(Clip(**{**row, "path": full}))
    _refuse_repeated_ids(str(path), clips)
    return clips


def read_video_list(path: str | os.PathLike[str]) -> list[Clip]:
    """Read any JSONL whose lines hold at least `video` and `prompt`, as training clips.

    `id`, `reference`, and a stretch's `start_s`, `end_s` or a frame folder's `frames_per_s` are
    taken where given, other fields are left aside. Without `id` the video's path as written, less
    its extension, is the clip's id. Relative paths count from the list's folder.

    Raises:
        InputError: no such list, a line without `video` or `prompt`, a bound or rate that is no
            number, or an id that occurs twice.
    """
    path = Path(path)
    clips = []
    for place, row in json_lines(path):
        video, prompt = need_text(place, row, "video"), need_text(place, row, "prompt")
        clip_id = need_text(place, row, "id") if "id" in row else os.path.splitext(video)[0]
        reference = need_text(place, row, "reference") if row.get("reference") is not None else None
        full = os.path.abspath(os.path.join(path.parent, video))
        clip = Clip(clip_id, "custom", "training", full, prompt, reference)
        numbers: dict[str, Any] = {name: may_have_number(place, row, name) for name in _NUMBERS}
        clips.append(dataclasses.replace(clip, **numbers))
    _refuse_repeated_ids(str(path), clips)
    return clips


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place for messages, row) of every line of a JSON-lines file that is not empty.

    Raises:
        InputError: unreadable, or a line that is no JSON object.
    """
    # Not splitlines: prompts may hold line separators that JSON leaves as they are.
    for number, line in enumerate(read_text(path, str(path)).split("\n"), 1):
        if not line.strip():
            continue
        row, place = parse_json(line, str(path), number), f"{path}, line {number}"
        if not isinstance(row, dict):
            raise InputError(f"{place}: found {shown(row)}, allowed: one object a line")
        yield place, row


def need_text(place: str, row: dict[str, Any], name: str) -> str:
    """Return a row's text field, or raise InputError naming place and field."""
    value = row.get(name)
    if not isinstance(value, str) or not value or not is_text(value):
        allowed = f"text that is not empty, {TEXT}"
        raise InputError(f"{place}: {name}: found {shown(value)}, allowed: {allowed}")
    return value


def may_have_number(place: str, row: dict[str, Any], name: str) -> float | None:
    """Return a row's number, None where it has none, or raise InputError naming place and field."""
    if row.get(name) is None:
        return None
    number: float = convert(row[name], float, f"{place}: {name}")
    return number


def _refuse_repeated_ids(place: str, clips: Sequence[Clip]) -> None:
    seen: set[tuple[str, str]] = set()
    for clip in clips:
        key = (clip.benchmark, clip.clip_id)
        if key in seen:
            raise InputError(f"{place}: clip id {clip.clip_id!r} occurs twice; ids must be unique")
        seen.add(key)


# ---------------------------------------------------------------- identity


def video_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return a video's file, or the files of a frame folder by name, hidden ones left out; [] where
    there is nothing."""
    video = Path(path)
    if not video.is_dir():
        return [video] if video.is_file() else []
    return sorted(file for file in video.glob("[!.]*") if file.is_file())


def video_sha256(
    path: str | os.PathLike[str], of_file: Callable[[Path], str] = sha256_of_file
) -> str:
    """Return the SHA-256 of a video file; of a frame folder, that of its files' digests and names.

    For a folder it is what `LC_ALL=C sha256sum * | sha256sum` prints there. Bounds take no part.
    `of_file` may remember the digests of files.
    """
    if not os.path.isdir(path):
        return of_file(Path(path))
    listed = "".join(f"{of_file(file)}  {file.name}\n" for file in video_files(path))
    return hashlib.sha256(listed.encode()).hexdigest()


def video_bytes(path: str | os.PathLike[str]) -> int | None:
    """Size of a video file or of a frame folder's files, None where there is nothing."""
    files = video_files(path)
    return sum(file.stat().st_size for file in files) if files else None
