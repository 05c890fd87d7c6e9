"""Clips that are folders of numbered frame images, read as if the folder were a video.

MVBench's `main` revision has its TVQA source so: one folder a clip, `00001.jpg` and on, at three
images a second. Image k starts at (k - first k) / frames_per_s seconds.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from vflash_analysis.clips.backends import ReadFailure, Reading, select_frames
from vflash_analysis.clips.sampling import Wanted

FRAMES = "frames"  # this reader's name in records
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png")
_SHOWN = 5  # missing images named in one message


def frame_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return a folder's frame images in the order of their numbers, the last one in each name.

    Hidden files and files of other kinds are left aside.

    Raises:
        ReadFailure: no image, one without a number, two of one number, or a number left out.
    """
    numbered: dict[int, Path] = {}
    for file in sorted(Path(folder).iterdir()):
        if file.name.startswith(".") or file.suffix.lower() not in IMAGE_EXTENSIONS:
            continue
        digits = re.findall(r"\d+", file.stem)
        if not digits:
            raise ReadFailure("damaged", f"{file.name} has no number in its name")
        other = numbered.setdefault(int(digits[-1]), file)
        if other is not file:
            raise ReadFailure("damaged", f"{other.name} and {file.name} have the same number")
    if not numbered:
        raise ReadFailure("no_frames", f"the folder holds no {', '.join(IMAGE_EXTENSIONS)} file")
    first, last = min(numbered), max(numbered)
    if last - first + 1 != len(numbered):
        missing = (str(k) for k in range(first, last) if k not in numbered)
        lost = list(itertools.islice(missing, _SHOWN + 1))  # a number may be far beyond the others
        named = ", ".join(lost[:_SHOWN]) + (", ..." if len(lost) > _SHOWN else "")
        raise ReadFailure(
            "damaged",
            f"{last - first + 1 - len(numbered)} of the images {first} to {last} are missing: {named}",
        )
    return [numbered[number] for number in sorted(numbered)]


def read_folder(path: str, wanted: Wanted, num_threads: int) -> Reading:
    """Read the wanted images of a folder; `num_threads` is every backend's and not needed here.

    Raises:
        ReadFailure: see `frame_files`; an image that cannot be read, or images of several sizes.
    """
    image = importlib.import_module("PIL.Image")
    files = frame_files(path)
    assert wanted.frames_per_s is not None  # the parent asks for this reader only then
    starts = np.arange(len(files)) / wanted.frames_per_s  # (N,) seconds
    duration_s = len(files) / wanted.frames_per_s
    indices = select_frames(starts, duration_s, wanted)
    pictures = [_picture(files[index]) for index in np.unique(indices)]
    sizes = sorted({picture.shape[1::-1] for picture in pictures})
    if len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sizes)
        raise ReadFailure("damaged", f"the images have several sizes: {shown}")
    return Reading(
        np.stack(pictures),
        indices,
        starts[indices],
        len(files),
        duration_s,
        0,
        str(image.__version__),
    )


def _picture(file: Path) -> Any:
    """Return (H, W, 3) uint8 RGB of one image, turned as its EXIF tag says."""
    image = importlib.import_module("PIL.Image")
    transpose = importlib.import_module("PIL.ImageOps").exif_transpose
    try:
        with image.open(file) as opened:
            return np.asarray(transpose(opened).convert("RGB"))
    except Exception as error:  # Pillow raises a different class per format and fault
        said = " ".join(str(error).split())[:200]
        raise ReadFailure(
            "damaged", f"{file.name} cannot be read ({type(error).__name__}: {said})"
        ) from None
