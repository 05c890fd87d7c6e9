"""Frames from video files: one child process, a wall limit per clip, one reason per bad clip.

    with FrameReader(timeout_s=60) as reader:
        read = reader.read_clip(clip, num_frames=8)     # a Clip of a list, with its bounds
        read = reader.read("clip.mp4", num_frames=8)    # read.frames (8, H, W, 3) uint8

The child imports decord or PyAV; this process never does, so a reader that spins, aborts or leaks
costs one clip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vflash_analysis.clips.backends import BACKENDS, DEPTH_OF_INTEREST, ReadFailure
from vflash_analysis.clips.child import Child
from vflash_analysis.clips.frames import FRAMES, frame_files
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.sampling import Wanted, uniform_times, validate_indices
from vflash_analysis.environment import READER_THREADS
from vflash_analysis.errors import InputError

REASONS = (
    "missing",  # no file at that path
    "empty",  # 0 bytes
    "not_video",  # another kind of file, a folder, or git-lfs's pointer to the file
    "no_video_stream",  # a media file with sound only
    "no_frames",  # a video stream that holds no frames
    "unsupported_codec",  # sound file, no decoder for it in this build
    "damaged",  # cut off, corrupt, frame images left out, or more frames replaced than allowed
    "bounds",  # start, end or rate that are no numbers in order, or lie outside the video
    "timeout",  # over the wall limit
    "crashed",  # the native reader ended its process
    "changed",  # another file than the one a frozen list names
)
FLAGS = (
    "short",
    "repeated",
    "identical",
    "substituted",
    "damaged",
)  # a usable clip, but not a normal one
NOTES = ("bit_depth", "fallback")  # worth a line, nothing wrong with the clip
# git-lfs, docs/spec.md: a pointer begins with its version and is shorter than 1024 bytes.
_LFS_POINTER, _LFS_MOST_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_INSTALL_HINT = (
    "install decord, or eva-decord or decord2 (both import as decord), "
    "or av and set the reader to 'pyav'"
)


class ClipError(InputError):
    """One clip that cannot be used; the others are not touched.

    Attributes:
        path: the clip's file.
        reason: one of `REASONS`.
    """

    def __init__(self, path: str, reason: str, message: str):
        super().__init__(f"{path}: {reason}: {message}")
        self.path = path
        self.reason = reason
        self.detail = message


@dataclass(frozen=True)
class ClipInfo:
    """Facts about a clip as it was read; None where neither reader nor container says.

    Where the clip is a stretch of its video, frames and duration are the whole video's.

    Attributes:
        width, height: of the upright frames, pixels.
        fps: n_frames / duration_s; an average where the rate varies.
        n_frames: frames the reader found. declared_frames: frames the container announces.
        duration_s: the video stream's length; a longer sound track does not count.
        n_repeated: requested frames that show a frame already taken (clip shorter than the
            request).
        n_identical: neighbouring frames with different indices and the same pixels.
        n_substituted: frames the decoder patched or replaced.
        warnings: "flag: counts" lines; the word before the colon is one of `FLAGS` or `NOTES`.
    """

    width: int
    height: int
    fps: float | None
    n_frames: int
    duration_s: float
    codec: str | None
    bit_depth: int | None
    reader: str
    reader_version: str
    declared_frames: int | None = None
    n_repeated: int = 0
    n_identical: int = 0
    n_substituted: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the words of `FLAGS` that hold for this clip, in that order."""
        words = {warning.split(":")[0] for warning in self.warnings}
        return tuple(flag for flag in FLAGS if flag in words)


@dataclass(frozen=True)
class ClipFrames:
    """The frames of one clip.

    Attributes:
        frames: (T, H, W, 3) uint8 RGB, upright.
        timestamps_s: (T,) starts of the frames, seconds from the video's first frame.
        indices: (T,) numbers of the frames in the video, in display order.
        seconds: wall time of the read, the child's start left out.
    """

    frames: np.ndarray
    timestamps_s: np.ndarray
    indices: np.ndarray
    info: ClipInfo
    seconds: float


class FrameReader:
    """Reads clips in one child process, replaced after a time-out or a crash.

    Args:
        timeout_s: wall limit per clip and backend, seconds.
        backend: "decord", "pyav", or "module:function" for a reader with the signature of
            `clips.backends`.
        fallback: let the other built-in backend try a clip the first cannot read; both reasons are
            kept.
        num_threads: of the backend; a few are enough, many make small clips slower.
        max_substituted_share: a clip with more replaced frames than this share of its distinct
            frames is damaged.
    """

    def __init__(
        self,
        timeout_s: float = 60.0,
        backend: str = "decord",
        *,
        fallback: bool = True,
        num_threads: int = READER_THREADS,
        max_substituted_share: float = 0.1,
    ):
        if backend not in BACKENDS and ":" not in backend:
            raise InputError(
                f"clip reader is {backend!r}; "
                f"allowed are {', '.join(BACKENDS)} or 'module:function'"
            )
        if not timeout_s > 0:
            raise InputError(f"read timeout is {timeout_s!r} s; allowed are numbers above 0")
        self.timeout_s = timeout_s
        self.backends = [backend]
        if fallback and backend in BACKENDS:
            self.backends += [name for name in BACKENDS if name != backend]
        self.num_threads = num_threads
        self.max_substituted_share = max_substituted_share
        self._child = Child()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A reader half made, or one that goes while the interpreter shuts down.
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """End the child; the reader can be used again and starts a new one."""
        self._child.close()

    def read_clip(self, clip: Clip, num_frames: int) -> ClipFrames:
        """Return the frames of a clip of a list, inside its bounds; see `read`."""
        return self.read(
            clip.path,
            num_frames,
            start_s=clip.start_s,
            end_s=clip.end_s,
            frames_per_s=clip.frames_per_s,
        )

    def read(
        self,
        path: str | os.PathLike[str],
        num_frames: int,
        *,
        start_s: float | None = None,
        end_s: float | None = None,
        frames_per_s: float | None = None,
    ) -> ClipFrames:
        """Return exactly `num_frames` frames spread uniformly over the clip's time.

        A clip with fewer frames repeats some and is flagged "repeated". Flags stand in
        `info.warnings` with counts.

        Args:
            path: a video file, or with `frames_per_s` a folder of frame images.
            num_frames: 1 or more.
            start_s: where the clip begins, seconds from the video's first frame; None: there.
            end_s: where it ends; None: with the video.
            frames_per_s: images per second of a folder.

        Raises:
            ClipError: the clip cannot be used; its `reason` is one of `REASONS`.
            InputError: a wrong `num_frames`, or no reader that can be imported.
        """
        uniform_times(1.0, num_frames)  # refuses a bad count before any work
        path = os.path.abspath(path)
        wanted = Wanted(int(num_frames), start_s, end_s, frames_per_s)
        _check_file(path, wanted)
        failures: list[tuple[str, str, str]] = []  # backend, reason, message
        with self._lock:
            for backend in self.backends if frames_per_s is None else [FRAMES]:
                self._child.start()  # outside the clip's time
                begun = time.perf_counter()
                request = {
                    "path": path,
                    "wanted": dataclasses.asdict(wanted),
                    "backend": backend,
                    "num_threads": self.num_threads,
                    "give_up_s": 1.5 * self.timeout_s + 5.0,
                }
                header, frames, errors = self._child.request(request, self.timeout_s)
                if frames is not None:
                    info = _clip_info(backend, header, frames, errors, failures)
                    limit = self.max_substituted_share * len(frames)
                    if info.n_substituted <= limit:
                        return _clip_frames(header, frames, info, begun)
                    said = f"{info.n_substituted} of {len(frames)} frames could not be read cleanly"
                    header = {"reason": "damaged", "message": said}
                failures.append((backend, header["reason"], header["message"]))
                if header["reason"] in ("timeout", "bounds"):
                    break  # a second backend would double the wait, or find the same length
        said = "; ".join(f"{backend}: {message}" for backend, _, message in failures)
        reasons = [reason for _, reason, _ in failures if reason != "no_reader"]
        if not reasons:
            hint = _INSTALL_HINT if frames_per_s is None else "install pillow"
            raise InputError(f"no reader of clips: {said}; {hint}")
        raise ClipError(path, reasons[-1], said)  # the last one that ran decides


def _clip_frames(
    header: dict[str, Any], distinct: np.ndarray, info: ClipInfo, begun: float
) -> ClipFrames:
    indices = validate_indices(header["indices"], info.n_frames)  # (T,)
    _, place = np.unique(indices, return_inverse=True)
    frames = distinct[place] if info.n_repeated else distinct  # (T, H, W, 3)
    return ClipFrames(
        frames, np.asarray(header["timestamps_s"]), indices, info, time.perf_counter() - begun
    )


def _clip_info(
    backend: str,
    header: dict[str, Any],
    distinct: np.ndarray,
    errors: list[str],
    failures: list[tuple[str, str, str]],
) -> ClipInfo:
    n_frames, duration_s = header["n_frames"], header["duration_s"]
    height, width = distinct.shape[1:3]
    info = ClipInfo(
        width=width,
        height=height,
        fps=n_frames / duration_s if duration_s > 0 else None,
        n_frames=n_frames,
        duration_s=duration_s,
        codec=header.get("codec"),
        bit_depth=header.get("bit_depth"),
        reader=backend,
        reader_version=header["reader_version"],
        declared_frames=header.get("declared_frames"),
        n_repeated=len(header["indices"]) - len(distinct),
        n_identical=sum(np.array_equal(a, b) for a, b in itertools.pairwise(distinct)),
        n_substituted=header["n_substituted"],
    )
    declared_s = header.get("declared_duration_s")
    warnings = _warnings(info, declared_s, len(header["indices"]), len(distinct), errors, failures)
    return dataclasses.replace(info, warnings=warnings)


def _check_file(path: str, wanted: Wanted) -> None:
    """Raise ClipError for what needs no reader to refuse."""
    if not os.path.exists(path):
        folder = os.path.dirname(path)
        absent = "" if os.path.isdir(folder) else f", nor its folder {folder}"
        raise ClipError(path, "missing", f"no such file{absent}")
    try:
        wanted.check()
    except InputError as error:
        raise ClipError(path, "bounds", str(error)) from None
    if os.path.isdir(path):
        if wanted.frames_per_s is None:
            said = "a folder; allowed are a video file, or frame images and their rate"
            raise ClipError(path, "not_video", said)
        return
    if wanted.frames_per_s is not None:
        raise ClipError(path, "not_video", "a file; frames_per_s belongs to a folder of images")
    _refuse_stub(path)


def _refuse_stub(path: str | os.PathLike[str]) -> None:
    """Raise ClipError for a file that only stands where one should be."""
    size = os.path.getsize(path)
    if size == 0:
        raise ClipError(os.fspath(path), "empty", "the file has 0 bytes")
    if size < _LFS_MOST_BYTES:
        with open(path, "rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                said = "a git-lfs pointer; allowed is the file, which `git lfs pull` brings"
                raise ClipError(os.fspath(path), "not_video", said)


def file_fault(clip: Clip) -> ClipError | None:
    """What is wrong with a clip's file, or any image of its folder, that shows without a reader."""
    try:
        _check_file(clip.path, Wanted(1, clip.start_s, clip.end_s, clip.frames_per_s))
        if clip.frames_per_s is not None:
            for image in frame_files(clip.path):
                _refuse_stub(image)
    except ReadFailure as failure:
        return ClipError(clip.path, failure.reason, str(failure))
    except ClipError as error:
        return error
    return None


def _warnings(
    info: ClipInfo,
    declared_duration_s: float | None,
    requested: int,
    distinct: int,
    errors: list[str],
    failures: list[tuple[str, str, str]],
) -> tuple[str, ...]:
    """Return one line per flag or note; each begins with its word of `FLAGS` or `NOTES`."""
    lines = []
    frame_s = info.duration_s / info.n_frames
    if info.declared_frames is not None and info.n_frames < 0.99 * info.declared_frames:
        lines.append(f"short: {info.n_frames} of {info.declared_frames} frames found")
    elif (
        declared_duration_s is not None
        and info.duration_s < 0.99 * declared_duration_s - 1.5 * frame_s
    ):
        lines.append(f"short: {info.duration_s:.2f} of {declared_duration_s:.2f} s found")
    if info.n_repeated:
        lines.append(
            f"repeated: {info.n_repeated} of {requested} frames repeat one of the {distinct} taken"
        )
    if info.n_identical:
        lines.append(
            f"identical: {info.n_identical} of {distinct - 1} neighbouring frames are the same"
        )
    if info.n_substituted:
        lines.append(
            f"substituted: {info.n_substituted} of {distinct} frames were patched or replaced"
        )
    if errors:
        lines.append(
            f"damaged: the decoder reported {len(errors)} errors, first: {errors[0][:200]}"
        )
    if info.bit_depth is not None and info.bit_depth > DEPTH_OF_INTEREST:
        lines.append(f"bit_depth: {info.bit_depth} bits per channel read as {DEPTH_OF_INTEREST}")
    lines += [
        f"fallback: {backend} could not read it ({message})" for backend, _, message in failures
    ]
    return tuple(lines)


def check_clip(
    clip: Clip | str | os.PathLike[str], num_frames: int, reader: FrameReader
) -> dict[str, Any]:
    """Read the very frames a run would use; return one row of the clip table, None for missing.

    Takes a clip of a list, or the path of a video that is used from end to end.

    Header checks are not enough: damaged clips open cleanly and fail, or come back short, only
    while frames are read.

    Returns:
        path, status ("ok", "flagged" or "bad"), reason (of `REASONS`, for a bad clip), flags,
        message (the warnings or the error), frames_requested, frames_distinct, n_frames,
        declared_frames, n_repeated, n_identical, n_substituted, duration_s, fps, width, height,
        codec, bit_depth, reader, reader_version, seconds.
    """
    row: dict[str, Any] = {
        "path": clip.path if isinstance(clip, Clip) else os.fspath(clip),
        "status": "bad",
        "reason": None,
        "flags": "",
        "message": "",
    }
    row.update(frames_requested=num_frames, frames_distinct=None)
    shown = [field.name for field in dataclasses.fields(ClipInfo) if field.name != "warnings"]
    row.update(dict.fromkeys(shown), seconds=None)
    try:
        if isinstance(clip, Clip):
            read = reader.read_clip(clip, num_frames)
        else:
            read = reader.read(clip, num_frames)
    except ClipError as error:
        return {**row, "reason": error.reason, "message": error.detail}
    row.update({name: getattr(read.info, name) for name in shown}, seconds=read.seconds)
    row.update(
        frames_distinct=num_frames - read.info.n_repeated, message="; ".join(read.info.warnings)
    )
    return {
        **row,
        "status": "flagged" if read.info.flags else "ok",
        "flags": " ".join(read.info.flags),
    }
