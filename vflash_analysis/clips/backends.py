"""Frame readers: a backend is a function `(path, wanted, num_threads) -> Reading`.

decord and PyAV are native code that can spin, abort or leak on a damaged file, so nothing here is
called from a notebook or a training process: `clips.serve` runs it in a child process. Both are
imported where they are used.
"""

from __future__ import annotations

import bisect
import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vflash_analysis.clips.sampling import Wanted, choose_indices, stream_duration
from vflash_analysis.errors import InputError

BACKENDS = ("decord", "pyav")
DEPTH_OF_INTEREST = 8  # bits per channel above which a clip is noted
MAX_STAMP_S = 1e8  # three years; larger stamps stand for "none"
# decord reads "0.x" as a share of the clip and ignores 0, so this stands for "no replaced frame at
# all".
_NO_REPLACED_FRAME = "0.0000001"
_SIGNATURES = (
    b"\x1aE\xdf\xa3",
    b"RIFF",
    b"GIF8",
    b"FLV",
    b"OggS",
    b"\x00\x00\x01\xba",
    b"0&\xb2u",
    b"G@",
)


class ReadFailure(Exception):
    """A clip one backend could not read; `reason` is one of `clips.read.REASONS`."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class Reading:
    """What a backend found: distinct frames, and for each requested frame its place in the clip.

    Attributes:
        frames: (U, H, W, 3) uint8 RGB, upright, one per distinct index in rising order.
        indices: (T,) index of each requested frame in the clip, in display order.
        timestamps_s: (T,) start of each requested frame, seconds from the video's first frame.
        n_frames: frames the reader found in the video, also where the clip is a stretch of it.
        duration_s: length of the video stream, from the first frame's start to the last frame's
            end.
        n_substituted: distinct frames the decoder could not read cleanly and replaced or patched.
    """

    frames: np.ndarray
    indices: np.ndarray
    timestamps_s: np.ndarray
    n_frames: int
    duration_s: float
    n_substituted: int
    reader_version: str


def select_frames(starts_s: np.ndarray, duration_s: float, wanted: Wanted) -> np.ndarray:
    """Return (num_frames,) indices spread uniformly over the clip's time; `starts_s` begins at 0.

    Raises:
        ReadFailure: time stamps of several frames that do not span any time, or bounds outside the
            video.
    """
    if len(starts_s) == 1 and not wanted.bounded:
        return np.zeros(wanted.num_frames, dtype=np.int64)
    if len(starts_s) > 1 and not (
        math.isfinite(duration_s) and duration_s > 0 and starts_s[-1] > 0
    ):
        raise ReadFailure(
            "damaged", f"the time stamps of {len(starts_s)} frames span {duration_s:g} s"
        )
    try:
        times = wanted.times_s(duration_s, float(duration_s - starts_s[-1]))
    except InputError as error:
        raise ReadFailure("bounds", str(error)) from None
    return choose_indices(starts_s, times)


# ---------------------------------------------------------------- decord


def read_decord(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Read with decord at the clip's own size; a frame it would replace silently is an error."""
    decord = importlib.import_module("decord")
    reader = decord.VideoReader(
        path, ctx=decord.cpu(0), num_threads=num_threads, fault_tol=_NO_REPLACED_FRAME
    )
    starts, duration_s = _decord_starts(reader)
    indices = select_frames(starts, duration_s, wanted)
    frames = reader.get_batch(np.unique(indices).tolist()).asnumpy()  # (U, H, W, 3)
    # Left open, decord's threads go on reading into memory.
    del reader
    return Reading(
        frames, indices, starts[indices], len(starts), duration_s, 0, str(decord.__version__)
    )


def _decord_starts(reader: Any) -> tuple[np.ndarray, float]:
    """Return (N,) frame starts from 0 and the stream's length, both in seconds."""
    n_frames = len(reader)
    spans = np.asarray(reader.get_frame_timestamp(list(range(n_frames))), dtype=np.float64)
    # A container without display stamps gives the lowest integer for each: count frames at the
    # average rate.
    if not (np.abs(spans) < MAX_STAMP_S).all():
        rate = float(reader.get_avg_fps())
        if not (math.isfinite(rate) and rate > 0):
            raise ReadFailure("damaged", "the clip has neither time stamps nor a frame rate")
        return np.arange(n_frames) / rate, n_frames / rate
    starts = np.sort(spans[:, 0]) - spans[:, 0].min()
    return starts, stream_duration(starts, float(spans[0, 1] - spans[0, 0]))


# ---------------------------------------------------------------- PyAV


def read_pyav(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Read with PyAV: index the packets, then read only the stretches that hold wanted frames."""
    av = importlib.import_module("av")
    stamps, keys, first_ticks, time_base = _index_packets(av, path)
    ticks = np.asarray(stamps, dtype=np.int64) - stamps[0]
    starts = ticks * time_base  # (N,) seconds
    duration_s = stream_duration(starts, first_ticks * time_base)
    indices = select_frames(starts, duration_s, wanted)
    chosen = [stamps[i] for i in np.unique(indices)]
    try:
        frames, bad = _read_stamps(av, path, chosen, keys, num_threads)
        if bad:  # seeking may be off: read from the start before calling a frame replaced
            frames, bad = _read_stamps(av, path, chosen, keys[:1], num_threads)
    except _StampsFallError:
        frames, bad = _read_stamps(av, path, chosen, keys[:1], num_threads, stamps)
    return Reading(
        np.stack(frames),
        indices,
        starts[indices],
        len(starts),
        duration_s,
        bad,
        str(av.__version__),
    )


def _index_packets(av: Any, path: str) -> tuple[list[int], list[int], int, float]:
    """Return frame stamps and key-frame stamps (ticks, sorted), first length, seconds per tick."""
    with av.open(path) as container:
        stream = _video_stream(container)
        stamps, keys, lengths, corrupt = [], [], {}, 0
        for packet in container.demux(stream):
            stamp = packet.pts if packet.pts is not None else packet.dts
            if not packet.size or stamp is None or packet.is_discard:
                continue
            stamps.append(stamp)
            lengths[stamp] = packet.duration or 0
            corrupt += bool(packet.is_corrupt)
            if packet.is_keyframe:
                keys.append(stamp)
        time_base = float(stream.time_base)
    if not stamps:
        raise ReadFailure("no_frames", "the video stream holds no frames")
    if corrupt:
        raise ReadFailure("damaged", f"{corrupt} of {len(stamps)} packets are cut off or corrupt")
    stamps.sort()
    return stamps, sorted(keys) or stamps[:1], lengths[stamps[0]], time_base


class _StampsFallError(Exception):
    """Decoded frames come in display order but their stamps do not rise (AVI with B-frames)."""


def _read_stamps(
    av: Any,
    path: str,
    wanted: list[int],
    keys: list[int],
    num_threads: int,
    order: list[int] | None = None,
) -> tuple[list[np.ndarray], int]:
    """Decode the frames with the wanted stamps; return them and how many were not clean.

    Args:
        keys: stamps that may be sought; with the first alone everything is read.
        order: stamps of all frames, given to them by counting; None takes each frame's own.
    """
    taken, bad = [], 0
    with av.open(path) as container:
        stream = _video_stream(container)
        stream.codec_context.thread_count = num_threads
        coming = _stamped(container.decode(stream), order)
        before = current = None  # (stamp, frame)
        for stamp in wanted:
            group = bisect.bisect_right(keys, stamp) - 1
            # Decoding on into the next group of pictures is cheaper than seeking to its start.
            if current is not None and bisect.bisect_right(keys, current[0]) - 1 < group - 1:
                container.seek(keys[group], stream=stream)
                coming, before, current = _stamped(container.decode(stream), order), None, None
            while current is None or current[0] < stamp:
                following = next(coming, None)
                if following is None:
                    break
                before, current = current, following
            hit = current is not None and current[0] == stamp
            used = current if hit or before is None else before
            if used is None:
                raise ReadFailure("damaged", "no frame could be read")
            bad += (not hit) or bool(used[1].is_corrupt)
            taken.append(_upright(used[1]))
    return taken, bad


def _stamped(frames: Iterator[Any], order: list[int] | None) -> Iterator[tuple[int, Any]]:
    if order is not None:
        yield from zip(order, frames, strict=False)
        return
    last = None
    for frame in frames:
        stamp = frame.pts if frame.pts is not None else frame.dts
        if stamp is None or (last is not None and stamp < last):
            raise _StampsFallError
        last = stamp
        yield stamp, frame


def _upright(frame: Any) -> np.ndarray:
    """Return (H, W, 3) uint8 RGB, turned upright; FFmpeg's angle is anticlockwise, as `rot90`'s."""
    rgb = frame.to_ndarray(format="rgb24")
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(rgb, turns)) if turns else rgb


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise ReadFailure("no_video_stream", "the file has no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise ReadFailure("unsupported_codec", "this build has no decoder for the clip's codec")
    return stream


# ---------------------------------------------------------------- facts and reasons


def probe(path: str) -> dict[str, Any]:
    """Return what the container declares, reading no frame; {} where PyAV cannot be imported.

    Raises:
        ReadFailure: no video stream, or no decoder for it.
    """
    try:
        av = importlib.import_module("av")
    except Exception:  # a broken install is as good as none
        return {}
    with av.open(path) as container:
        stream = _video_stream(container)
        context = stream.codec_context
        depth = (
            max((part.bits for part in context.format.components), default=None)
            if context.format
            else None
        )
        seconds = (
            float(stream.duration * stream.time_base)
            if stream.duration
            else _tagged_seconds(stream)
        )
        if seconds is None and len(container.streams) == 1 and container.duration:
            seconds = container.duration / av.time_base
        return {
            "codec": getattr(context.codec, "canonical_name", context.name),
            "bit_depth": depth,
            "declared_frames": stream.frames or None,
            "declared_duration_s": seconds,
        }


def _tagged_seconds(stream: Any) -> float | None:
    """Return the stream's own length from Matroska's DURATION tag, such as "00:00:03.000"."""
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) if match else None


def explain(path: str, error: BaseException) -> tuple[str, str]:
    """Return (reason, one line) for an exception; decord words very different faults alike."""
    message = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", " ".join(str(error).split()))
    for marker in ("Check failed: ", "Error: "):
        message = message.rsplit(marker, 1)[-1]
    message = f"{type(error).__name__}: {message[:300]}"
    if isinstance(error, ReadFailure):
        return error.reason, str(error)
    no_stream = "cannot find video stream" in message
    try:
        facts = probe(path)
    except ReadFailure as failure:
        return failure.reason, str(failure)
    except Exception:
        return ("damaged" if _looks_like_video(path) else "not_video"), message
    if no_stream and facts:
        return "unsupported_codec", f"this build of decord has no decoder for {facts['codec']}"
    if no_stream:
        return (
            "no_video_stream",
            "no video stream, or a codec decord lacks (install av to tell them apart)",
        )
    if facts and _holds_no_frames(path):
        return "no_frames", "the video stream holds no frames"
    return "damaged", message


def _holds_no_frames(path: str) -> bool:
    try:
        _index_packets(importlib.import_module("av"), path)
    except ReadFailure as failure:
        return failure.reason == "no_frames"
    except Exception:
        return False
    return False


def _looks_like_video(path: str) -> bool:
    """Tell a damaged video from another kind of file by the container's first bytes."""
    with open(path, "rb") as file:
        head = file.read(16)
    return head[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide") or head.startswith(
        _SIGNATURES
    )
