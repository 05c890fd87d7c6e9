"""Frozen clip lists: which videos a suite and sample seed stand for, down to their bytes.

    vflash clips freeze --profile h100      writes data/suites/lists/<suite>-<seed>.jsonl

A draw is fixed by its rule and the suite's metadata, but not the files behind the ids, and the hub's
metadata change. A frozen list holds a line per clip: id, file below the dataset's folder, bytes,
SHA-256, bounds where the clip has some, and the SHA-256 of its prompt. It is small and names no
machine, so it is tracked and published with the results. Where one is tracked a run replays it and
draws nothing; a file that is not the one it names is reported with both digests, and no text is
decoded from it. Removing the list draws anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd

from vflash_analysis import paths
from vflash_analysis.clips.lists import Clip, json_lines, video_bytes, video_sha256
from vflash_analysis.clips.read import ClipError, file_fault
from vflash_analysis.clips.suites import (
    Suite,
    chosen_suites,
    draw_clips,
    find_dataset,
    suite_clips,
)
from vflash_analysis.config import ClipSettings
from vflash_analysis.errors import InputError
from vflash_analysis.identity import FileDigests
from vflash_analysis.progress import CountLine
from vflash_analysis.records import write_text_atomic
from vflash_analysis.strict import BELOW, HEX_SHA256, Bounds, build, shown

FILES_AT_ONCE = 4  # hashed by threads; more would wait for one disk
KEEP_EVERY_S = 10.0  # how much hashing an interrupt or a crash may cost
BOUNDS = ("start_s", "end_s", "frames_per_s")  # fields of a clip that is a part of its file
_UNBOUNDED: dict[str, float | None] = dict.fromkeys(BOUNDS)
VERIFIED_COLUMNS = (
    "benchmark", "clip_id", "status", "sha256", "found_sha256", "path", "message",
)  # fmt: skip


@dataclass(frozen=True)
class FrozenClip:
    """One line of a frozen list.

    Attributes:
        clip_id: as the suite's adapter gives it.
        file: the video below the dataset's folder, with `/`.
        bytes, sha256: of the video file.
        prompt_sha256: of the prompt in UTF-8, without chat template.
        start_s, end_s, frames_per_s: the clip's own; None where it has none.
    """

    clip_id: str
    file: Annotated[str, BELOW]
    bytes: Annotated[int, Bounds(1)]
    sha256: Annotated[str, HEX_SHA256]
    prompt_sha256: Annotated[str, HEX_SHA256]
    start_s: float | None = None
    end_s: float | None = None
    frames_per_s: float | None = None

    def line(self) -> str:
        """The clip as one JSON line; what it does not have is left out."""
        row = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n"


def list_path(settings: ClipSettings, benchmark: str, sample_seed: int) -> Path | None:
    """Where the frozen list of a suite and sample seed lies; None where every run draws anew.

    Raises:
        InputError: something is there that is no file, and would pass for no list.
    """
    if settings.frozen_lists is None:
        return None
    folder = paths.ROOT / settings.frozen_lists
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(
            f"clips.frozen_lists: found {folder}, which is no folder, allowed: a folder"
        )
    path = folder / f"{benchmark}-{sample_seed}.jsonl"
    if os.path.lexists(path) and not path.is_file():
        found = "a folder" if path.is_dir() else "a link that leads to no file"
        raise InputError(f"{path}: found {found}, allowed: a frozen list or nothing")
    return path


def read_frozen(path: Path) -> list[FrozenClip]:
    """Read a frozen list.

    Raises:
        InputError: a line with a missing, unknown or mistyped field, or an id twice.
    """
    clips: dict[str, FrozenClip] = {}
    for place, row in json_lines(path):
        clip = build(FrozenClip, {**_UNBOUNDED, **row}, place)
        if clip.clip_id in clips:
            raise InputError(f"{place}: clip_id: found {shown(clip.clip_id)} twice, allowed: once")
        clips[clip.clip_id] = clip
    if not clips:
        raise InputError(f"{paths.relative_to_root(path)}: found no clips, allowed: one or more")
    return list(clips.values())


def prompt_sha256(prompt: str) -> str:
    """SHA-256, in hex, of a prompt in UTF-8."""
    return hashlib.sha256(prompt.encode()).hexdigest()


# ---------------------------------------------------------------- digests of many files


def hash_videos(videos: Iterable[str], stream: Any) -> Mapping[str, str]:
    """SHA-256 of videos that are there, by path; in parallel, with a line of progress.

    What was hashed is kept by path, size and modification time, so a call that was interrupted goes
    on where it was and a second one reads nothing.

    Raises:
        InputError: a file that changed while it was read.
    """
    digests = FileDigests(paths.RUNS / ".clip_digests.json")
    found: dict[str, str] = {}
    waiting = []
    for name in dict.fromkeys(videos):
        known = None if os.path.isdir(name) else digests.known(Path(name))
        if known:
            found[name] = known
        else:
            waiting.append(name)
    line, kept = CountLine("files hashed", len(waiting), stream), time.monotonic()
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        futures = {pool.submit(video_sha256, name, digests.of_file): name for name in waiting}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                found[futures[future]] = future.result()
                line.update(done)
                if time.monotonic() - kept > KEEP_EVERY_S:
                    digests.save()
                    kept = time.monotonic()
        finally:
            pool.shutdown(cancel_futures=True)
            digests.save()
    return found


# ---------------------------------------------------------------- freezing


def freeze(settings: ClipSettings, data_root: Path, stream: Any) -> pd.DataFrame:
    """Draw the profile's clips anew, hash their files and write one list per suite and seed.

    Equal files give equal bytes. Nothing is written before every file has been read.

    Args:
        settings: the profile's `clips`.
        data_root: `VFLASH_DATA`.
        stream: where progress goes.

    Returns:
        One row per list: list, clips, bytes, state ("written", "unchanged" or "replaced").

    Raises:
        InputError: generated clips, a suite that is not there, or a file that is not, that holds
            nothing or that stands for another.
    """
    if settings.source != "suites":
        raise InputError(
            f'clips.source: found "{settings.source}", allowed with freeze: "suites"; generated '
            "clips are the same bytes on every machine"
        )
    if settings.frozen_lists is None:
        raise InputError("clips.frozen_lists: found null, allowed with freeze: a folder")
    keys = [(name, seed) for name in settings.benchmarks for seed in settings.sample_seeds]
    listed = {key: path for key in keys if (path := list_path(settings, *key))}
    drawn: dict[tuple[str, int], list[Clip]] = {}
    folders: dict[str, Path] = {}
    for name, suite in chosen_suites(settings.benchmarks).items():
        folders[name] = find_dataset(suite, data_root)[1]
        for seed in settings.sample_seeds:
            drawn[name, seed] = suite_clips(suite, data_root, seed, settings.clips_per_suite_all)
    every = {clip.path: clip for clips in drawn.values() for clip in clips}
    faults = [fault for clip in every.values() if (fault := file_fault(clip))]
    if faults:
        raise InputError(
            f"freeze: {len(faults)} of {len(every)} files cannot be used, first {faults[0]}; a list "
            "is written when all can"
        )
    sha256 = hash_videos(every, stream)
    frozen = {
        key: [_frozen(clip, folders[key[0]], sha256[clip.path]) for clip in clips]
        for key, clips in drawn.items()
    }
    rows = []
    for key, path in listed.items():
        text = "".join(one.line() for one in frozen[key])
        before = path.read_text(encoding="utf-8") if path.is_file() else None
        state = "written" if before is None else "unchanged" if before == text else "replaced"
        write_text_atomic(path, text)
        size = sum(one.bytes for one in frozen[key])
        shown_path = paths.relative_to_root(path)
        rows.append({"list": shown_path, "clips": len(frozen[key]), "bytes": size, "state": state})
    return pd.DataFrame(rows)


def _frozen(clip: Clip, folder: Path, sha256: str) -> FrozenClip:
    row = {
        "clip_id": clip.clip_id,
        "file": Path(os.path.relpath(clip.path, os.path.abspath(folder))).as_posix(),
        "bytes": video_bytes(clip.path) or 0,
        "sha256": sha256,
        "prompt_sha256": prompt_sha256(clip.prompt),
    }
    return build(FrozenClip, {**_UNBOUNDED, **row, **bounds_of(clip)}, clip.path)


def bounds_of(clip: Clip) -> dict[str, float]:
    """The fields of `BOUNDS` that a clip has."""
    return {name: value for name in BOUNDS if (value := getattr(clip, name)) is not None}


# ---------------------------------------------------------------- replaying


def chosen_clips(
    settings: ClipSettings, suite: Suite, sample_seed: int, videos: Sequence[Clip], folder: Path
) -> tuple[list[Clip], Path | None]:
    """The clips of a suite and sample seed: those of its frozen list, else drawn.

    Args:
        settings: the profile's `clips`.
        suite: its description.
        sample_seed: which draw.
        videos: every clip of the suite.
        folder: the dataset's.

    Returns:
        The clips, and the list that was replayed, None where they were drawn.

    Raises:
        InputError: too few clips, or a list that does not belong to these metadata.
    """
    wanted, path = settings.clips_per_suite_all, list_path(settings, suite.name, sample_seed)
    if path is None or not path.is_file():
        return draw_clips(videos, suite.name, sample_seed, wanted), None
    listed = read_frozen(path)
    if len(listed) < wanted:
        raise InputError(
            f"clips.clips_per_suite_all: found {wanted}, allowed: at most the {len(listed)} of "
            f"{paths.relative_to_root(path)}"
        )
    by_id = {clip.clip_id: clip for clip in videos}
    return replayed(listed[:wanted], path, by_id, folder), path


def replayed(
    frozen: Sequence[FrozenClip], path: Path, videos: Mapping[str, Clip], folder: Path
) -> list[Clip]:
    """The clips of a frozen list, each with the digest that its file must have.

    Args:
        frozen: the list, or its beginning. path: of the list, for messages.
        videos: every clip of the suite by id, for prompts and references.
        folder: the dataset's.

    Raises:
        InputError: the metadata here lack a clip of the list, or ask it something else.
    """
    where = paths.relative_to_root(path)
    clips = []
    for one in frozen:
        clip = videos.get(one.clip_id)
        if clip is None:
            raise InputError(
                f"{where}: clip {one.clip_id!r} is not in the metadata below {folder}, allowed: the "
                "revision the list was frozen from; removing the list draws anew"
            )
        bounds = {name: getattr(one, name) for name in BOUNDS if getattr(one, name) is not None}
        for what, ours, theirs in (
            ("prompt_sha256", prompt_sha256(clip.prompt), one.prompt_sha256),
            ("bounds", bounds_of(clip), bounds),
        ):
            if ours != theirs:
                raise InputError(
                    f"{where}: clip {one.clip_id!r}: {what}: found {ours} in the metadata below "
                    f"{folder}, allowed: {theirs}, as frozen; removing the list draws anew"
                )
        file = os.path.abspath(folder / one.file)
        clips.append(dataclasses.replace(clip, path=file, sha256=one.sha256))
    return clips


def verify(clips: Sequence[Clip], stream: Any) -> pd.DataFrame:
    """Compare files with the digests that their clips name; clips without one are left aside.

    Returns:
        VERIFIED_COLUMNS, one row per clip: status is "ok" or a reason of `clips.read.REASONS`, with
        its message; found_sha256 is empty for a file that cannot be used.
    """
    named = [clip for clip in clips if clip.sha256 is not None]
    faults = [file_fault(clip) for clip in named]
    usable = [clip.path for clip, fault in zip(named, faults, strict=True) if fault is None]
    found = hash_videos(usable, stream)
    rows = []
    for clip, fault in zip(named, faults, strict=True):
        digest, status, message = found.get(clip.path, ""), "ok", ""
        if fault is not None:
            status, message = fault.reason, f"{fault.detail}; its list names sha256 {clip.sha256}"
        elif digest != clip.sha256:
            status, message = "changed", f"sha256 {digest}, its list names {clip.sha256}"
        rows.append((clip.benchmark, clip.clip_id, status, clip.sha256, digest, clip.path, message))
    return pd.DataFrame(rows, columns=list(VERIFIED_COLUMNS))


def verified_sha256(clip: Clip) -> str | None:
    """SHA-256 of a clip's video, which is there; None for a question without one.

    Raises:
        ClipError: it is not the file that the clip's frozen list names.
    """
    if not clip.path:
        return None
    digest = video_sha256(clip.path)
    if clip.sha256 is not None and digest != clip.sha256:
        said = f"sha256 {digest}, its list names {clip.sha256}"
        raise ClipError(clip.path, "changed", said)
    return digest
