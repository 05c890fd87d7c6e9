"""Small video files for the reader's tests, written with PyAV; every frame carries its own number.

The lower half of a frame is eight upright bars, white for a set bit of the frame's number (lowest
bit left), so `frame_number` reads it back from the pixels of a lossy clip. The upper left quarter
is red and the rest of the upper half is blue, so a turned frame shows.
"""

from __future__ import annotations

import random
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

BITS = 8
CLEAN = {
    "crf": "10",
    "bf": "0",
    "threads": "1",
}  # x264: bars stay readable, packets in display order


def picture(number: int, width: int, height: int) -> np.ndarray:
    """Return (height, width, 3) uint8 RGB with `number` (0..255) written into it."""
    rgb = np.zeros((height, width, 3), np.uint8)
    rgb[: height // 2] = (0, 0, 200)
    rgb[: height // 2, : width // 2] = (200, 0, 0)
    edges = np.linspace(0, width, BITS + 1).round().astype(int)
    for bit in range(BITS):
        rgb[height // 2 :, edges[bit] : edges[bit + 1]] = 235 if number >> bit & 1 else 20
    return rgb


def frame_number(rgb: np.ndarray) -> int:
    """Read the number back from (H, W, 3) pixels."""
    height, width = rgb.shape[:2]
    row = rgb[height // 2 + height // 4, :, :].mean(axis=-1)  # (W,)
    centres = (np.arange(BITS) + 0.5) * width / BITS
    return sum(1 << bit for bit, x in enumerate(centres.astype(int)) if row[x] > 128)


def write_clip(
    path: Path,
    n_frames: int = 30,
    width: int = 64,
    height: int = 48,
    fps: int = 10,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    starts_ms: list[int] | None = None,
    numbers: list[int] | None = None,
    audio_s: float = 0.0,
    noise_seed: int | None = None,
) -> Path:
    """Write a clip whose frame i shows `numbers[i]` (i itself by default) and starts at
    `starts_ms[i]`."""
    if options is None:
        options = CLEAN if codec == "libx264" else {}
    rng = np.random.default_rng(noise_seed)
    with av.open(str(path), "w", options=container or {}) as out:
        video = out.add_stream(codec, rate=fps, options=options)
        video.width, video.height, video.pix_fmt = width, height, pix_fmt
        sound = out.add_stream("aac", rate=16000) if audio_s else None
        if starts_ms is not None:
            video.codec_context.time_base = Fraction(1, 1000)
        for i in range(n_frames):
            rgb = picture((numbers[i] if numbers else i) % 256, width, height)
            if noise_seed is not None:
                rgb[: height // 2] = rng.integers(0, 256, (height // 2, width, 3))
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            if starts_ms is not None:
                frame.pts, frame.time_base = starts_ms[i], Fraction(1, 1000)
            out.mux(video.encode(frame))
        out.mux(video.encode())
        if sound is not None:
            _write_silence(out, sound, audio_s)
    return path


def write_images(
    folder: Path, n_frames: int = 30, first: int = 1, digits: int = 5, suffix: str = ".png"
) -> Path:
    """Write a folder of frame images; image k shows k - first."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n_frames):
        image = Image.fromarray(picture(number % 256, 64, 48))
        image.save(folder / f"{number + first:0{digits}d}{suffix}")
    return folder


def write_sound(path: Path, seconds: float = 1.0) -> Path:
    """Write a file that has a sound track and no video."""
    with av.open(str(path), "w") as out:
        _write_silence(out, out.add_stream("aac", rate=16000), seconds)
    return path


def _write_silence(
    out: av.container.OutputContainer, stream: av.AudioStream, seconds: float
) -> None:
    for i in range(int(seconds * 16000) // 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts = 16000, i * 1024
        out.mux(stream.encode(frame))
    out.mux(stream.encode())


def write_without_frames(path: Path) -> Path:
    """Write an MP4 whose video stream was announced but never given a frame."""
    with av.open(str(path), "w", options={"movflags": "frag_keyframe+empty_moov"}) as out:
        stream = out.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.start_encoding()
    return path


def packets(path: Path) -> list[tuple[int, int]]:
    """Return (offset, bytes) of every video packet, in file order."""
    with av.open(str(path)) as source:
        return [(p.pos, p.size) for p in source.demux(video=0) if p.size]


def cut_after_packet(source: Path, target: Path, keep: int) -> Path:
    """Keep the first `keep` packets of a file whose index stands at its front: it opens cleanly and
    is short."""
    offset, size = packets(source)[keep - 1]
    target.write_bytes(source.read_bytes()[: offset + size])
    return target


def cut_share(source: Path, target: Path, share: float) -> Path:
    """Keep a share of the media data of a file whose index stands at its front."""
    data = source.read_bytes()
    start = data.index(b"mdat")
    target.write_bytes(data[: start + int(share * (len(data) - start))])
    return target


def spoil(source: Path, target: Path, offset: int, n_bytes: int, seed: int = 0) -> Path:
    """Replace `n_bytes` from `offset` on by random ones."""
    data = bytearray(source.read_bytes())
    data[offset : offset + n_bytes] = random.Random(seed).randbytes(n_bytes)
    target.write_bytes(data)
    return target


def turn(source: Path, target: Path) -> Path:
    """Write the display matrix of a quarter turn clockwise into an MP4's track header (version
    0)."""
    data = bytearray(source.read_bytes())
    box = data.index(b"tkhd")
    assert data[box + 4] == 0
    # type 4, version and flags 4, times and ids 20, reserved 8, layer to reserved 8, then nine
    # 32-bit numbers
    struct.pack_into(">9i", data, box + 44, 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    target.write_bytes(data)
    return target
