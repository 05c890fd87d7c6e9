"""A clip, lists of clips in JSON lines, and the checks that two lists share no clip.

Training lists may come from anywhere: `read_video_list` takes any JSONL of video + prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vflash_analysis.errors import InputError
from vflash_analysis.records import sha256_of_file, write_text_atomic


@dataclass(frozen=True)
class Clip:
    """One video with the prompt asked about it.

    Attributes:
        clip_id: unique within a list; a suite's ids are also unique across its tasks.
        benchmark: the suite as it stands in the records' `benchmark` column.
        split: what the clip may be used for.
        path: video file; absolute once a list has been read. Empty for a question without a video,
            which a list in a file cannot hold.
        prompt: the question without chat template.
        reference: an expected answer, where one exists.
        facts: what a generated clip shows, for scoring; JSON types only.
    """

    clip_id: str
    benchmark: str
    split: str
    path: str
    prompt: str
    reference: str | None = None
    facts: dict[str, Any] | None = None

    def video_sha256(self) -> str | None:
        """SHA-256 of the video file; None without a video."""
        return sha256_of_file(self.path) if self.path else None


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
    for place, row in _json_lines(path):
        names = {field.name for field in dataclasses.fields(Clip)}
        required = names - {"reference", "facts"}
        if set(row) - names or required - set(row):
            raise InputError(
                f"{place}: fields are {sorted(row)}; "
                f"allowed are {sorted(names)}, needed {sorted(required)}"
            )
        for name in required:
            need_text(place, row, name)
        if not isinstance(row.get("facts"), (dict, type(None))):
            raise InputError(f"{place}: facts is {row['facts']!r}; allowed are an object or null")
        full = os.path.abspath(os.path.join(path.parent, row["path"]))
        clips.append(Clip(**{**row, "path": full}))
    _refuse_repeated_ids(str(path), clips)
    return clips


def read_video_list(path: str | os.PathLike[str]) -> list[Clip]:
    """Read any JSONL whose lines hold at least `video` and `prompt`, as training clips.

    `id` and `reference` are taken where given, other fields are left aside. Without `id` the
    video's path as written, less its extension, is the clip's id. Relative paths count from the
    list's folder.

    Raises:
        InputError: no such list, a line without `video` or `prompt`, or an id that occurs twice.
    """
    path = Path(path)
    clips = []
    for place, row in _json_lines(path):
        video, prompt = need_text(place, row, "video"), need_text(place, row, "prompt")
        clip_id = need_text(place, row, "id") if "id" in row else os.path.splitext(video)[0]
        reference = need_text(place, row, "reference") if row.get("reference") is not None else None
        full = os.path.abspath(os.path.join(path.parent, video))
        clips.append(Clip(clip_id, "custom", "training", full, prompt, reference))
    _refuse_repeated_ids(str(path), clips)
    return clips


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: the clip list cannot be read ({error.strerror})") from None
    # Not splitlines: prompts may hold line separators that JSON leaves as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise InputError(
                f"{path}, line {number}: {type(row).__name__}; allowed is one object a line"
            )
        yield f"{path}, line {number}", row


def need_text(place: str, row: dict[str, Any], name: str) -> str:
    """Return a row's text field, or raise InputError naming place and field."""
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise InputError(f"{place}: {name} is {value!r}; allowed is text that is not empty")
    return value


def _refuse_repeated_ids(place: str, clips: Sequence[Clip]) -> None:
    seen: set[tuple[str, str]] = set()
    for clip in clips:
        key = (clip.benchmark, clip.clip_id)
        if key in seen:
            raise InputError(f"{place}: clip id {clip.clip_id!r} occurs twice; ids must be unique")
        seen.add(key)


# ---------------------------------------------------------------- checks


def check_disjoint(training: Sequence[Clip], evaluation: Sequence[Clip]) -> None:
    """Raise InputError where a clip of one list is also in the other, by id or by file.

    The same video under another name is the case that ids cannot show, and it inflates acceptance.
    Only files of equal size are hashed; files that are not there cannot be compared and are left to
    the reader's own report.
    """
    evaluated = {clip.clip_id: clip for clip in evaluation}
    for clip in training:
        if clip.clip_id in evaluated:
            other = evaluated[clip.clip_id]
            raise InputError(
                f"clip id {clip.clip_id!r} is in training ({clip.benchmark} {clip.split}) and in "
                f"evaluation ({other.benchmark} {other.split}); the lists must not share a clip"
            )
    by_size: dict[int, list[Clip]] = {}
    for clip in evaluation:
        if os.path.isfile(clip.path):
            by_size.setdefault(os.path.getsize(clip.path), []).append(clip)
    digest = functools.cache(sha256_of_file)
    for clip in training:
        if not os.path.isfile(clip.path):
            continue
        for other in by_size.get(os.path.getsize(clip.path), []):
            if digest(clip.path) == digest(other.path):
                raise InputError(
                    f"training clip {clip.clip_id} ({clip.path}) and evaluation clip "
                    f"{other.clip_id} ({other.path}) are the same file; the lists must not share a clip"
                )
