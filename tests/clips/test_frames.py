"""Folders of numbered frame images: order, times, bounds, gaps, unreadable images, identity."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.clips import make_clips as make
from vflash_analysis.clips.lists import Clip, video_files, video_sha256
from vflash_analysis.clips.overlap import Evaluated, check_disjoint
from vflash_analysis.clips.read import ClipError, FrameReader
from vflash_analysis.errors import InputError
from vflash_analysis.records import sha256_of_file


@pytest.fixture(scope="module")
def reader() -> Iterator[FrameReader]:
    with FrameReader(60) as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 images at 3 a second: 10 s."""
    return make.write_images(tmp_path_factory.mktemp("images") / "castle_s01")


def numbers(read: object) -> list[int]:
    return [make.frame_number(frame) for frame in read.frames]  # type: ignore[attr-defined]


def test_images_are_sampled_uniformly_over_time(reader: FrameReader, folder: Path) -> None:
    got = reader.read(folder, 5, frames_per_s=3.0)
    # the middles of five parts of 2 s: images 3, 9, 15, 21 and 27 start at 1, 3, 5, 7 and 9 s
    assert numbers(got) == got.indices.tolist() == [3, 9, 15, 21, 27]
    assert got.timestamps_s == pytest.approx([1.0, 3.0, 5.0, 7.0, 9.0])
    assert got.frames.shape == (5, 48, 64, 3) and got.frames.dtype == np.uint8
    info = got.info
    assert (info.reader, info.codec, info.n_frames, info.duration_s) == ("frames", None, 30, 10.0)
    assert info.flags == () and info.fps == 3.0


def test_bounds_hold_for_images_as_for_a_video(
    reader: FrameReader, folder: Path, tmp_path: Path
) -> None:
    video = make.write_clip(tmp_path / "same.mp4", fps=3)
    for bounds in ({"start_s": 2.0, "end_s": 6.0}, {"start_s": 7.0}, {"end_s": 10.4}, {}):
        as_images = reader.read(folder, 7, frames_per_s=3.0, **bounds)
        as_video = reader.read(video, 7, **bounds)
        assert numbers(as_images) == numbers(as_video)
        assert as_images.timestamps_s == pytest.approx(as_video.timestamps_s, abs=1e-3)
    with pytest.raises(ClipError, match=r"outside the video, which lasts 10\.00 s") as caught:
        reader.read(folder, 7, frames_per_s=3.0, start_s=2.0, end_s=11.0)
    assert caught.value.reason == "bounds"


def test_the_order_is_that_of_the_numbers(reader: FrameReader, tmp_path: Path) -> None:
    plain = make.write_images(tmp_path / "plain", n_frames=12, first=0, digits=1, suffix=".jpg")
    (plain / "._3.jpg").write_text("what some systems leave beside a file")
    (plain / "Thumbs.db").write_text("no image")
    assert numbers(reader.read(plain, 12, frames_per_s=2.0)) == list(range(12))


def test_fewer_images_than_asked_for_repeat_and_are_flagged(
    reader: FrameReader, tmp_path: Path
) -> None:
    few = make.write_images(tmp_path / "few", n_frames=2)
    got = reader.read(few, 5, frames_per_s=3.0)
    assert numbers(got) == [0, 0, 1, 1, 1] and got.info.flags == ("repeated",)


def test_an_image_comes_upright_and_in_three_channels(reader: FrameReader, tmp_path: Path) -> None:
    image = Image.fromarray(make.picture(5, 64, 48))
    turned = image.getexif()
    turned[0x0112] = 6  # the camera was turned: a quarter turn clockwise makes it upright
    image.save(tmp_path / "1.jpg", exif=turned, quality=95)
    got = reader.read(tmp_path, 1, frames_per_s=1.0)
    assert got.frames.shape == (1, 64, 48, 3)
    assert make.frame_number(np.rot90(got.frames[0])) == 5
    (tmp_path / "1.jpg").unlink()
    Image.fromarray(np.full((4, 6), 9, np.uint8)).save(tmp_path / "1.png")
    assert (reader.read(tmp_path, 1, frames_per_s=1.0).frames == 9).all()


def spoil(folder: Path, fault: str) -> None:
    """Plant one fault in a folder of images 1 to 8."""
    if fault == "gap":
        (folder / "00003.png").unlink()
        (folder / "00006.png").unlink()
    elif fault.isdigit():
        Image.new("RGB", (64, 48)).save(folder / f"{fault}.png")
    elif fault == "unreadable":
        (folder / "00004.png").write_bytes(b"no image")
    elif fault == "cut":
        data = (folder / "00004.png").read_bytes()
        (folder / "00004.png").write_bytes(data[: len(data) // 2])
    elif fault == "sizes":
        Image.new("RGB", (32, 32)).save(folder / "00004.png")
    elif fault == "no number":
        Image.new("RGB", (64, 48)).save(folder / "cover.png")
    elif fault == "twice":
        Image.new("RGB", (64, 48)).save(folder / "4.jpg")
    elif fault == "none":
        for file in folder.iterdir():
            file.rename(file.with_suffix(".bmp"))


@pytest.mark.parametrize(
    ("fault", "reason", "said"),
    [
        ("gap", "damaged", "2 of the images 1 to 8 are missing: 3, 6"),
        (
            "10" + "0" * 11,
            "damaged",
            "999999999991 of the images 1 to 1000000000000 are missing: 9,",
        ),
        ("1" + "0" * 99, "damaged", "are missing: 9, 10, 11, 12, 13, ..."),
        ("unreadable", "damaged", "00004.png cannot be read"),
        ("cut", "damaged", "00004.png cannot be read"),
        ("sizes", "damaged", "the images have several sizes: 32 x 32, 64 x 48"),
        ("no number", "damaged", "cover.png has no number in its name"),
        ("twice", "damaged", "00004.png and 4.jpg have the same number"),
        ("none", "no_frames", "the folder holds no .jpg, .jpeg, .png file"),
    ],
)
def test_a_spoilt_folder_is_one_line_that_names_the_image(
    reader: FrameReader, tmp_path: Path, fault: str, reason: str, said: str
) -> None:
    folder = make.write_images(tmp_path / "clip", n_frames=8)
    spoil(folder, fault)
    with pytest.raises(ClipError) as caught:
        reader.read(folder, 8, frames_per_s=3.0)
    assert caught.value.reason == reason
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_unreadable_image_that_is_not_used_costs_nothing(
    reader: FrameReader, tmp_path: Path
) -> None:
    folder = make.write_images(tmp_path / "clip", n_frames=8)
    spoil(folder, "unreadable")  # image 4, index 3; the middles of four parts are 1, 3, 5, 7
    assert reader.read(folder, 8, frames_per_s=3.0, start_s=2.0).info.flags == ("repeated",)


def test_a_rate_and_a_folder_belong_together(reader: FrameReader, folder: Path) -> None:
    for path, rate, said in (
        (folder, None, "a folder; allowed are a video file, or frame images and their rate"),
        (folder / "00001.png", 3.0, "a file; frames_per_s belongs to a folder of images"),
        (folder / "none", 3.0, "no such file"),
        (folder, 0.0, "frames_per_s is 0.0; allowed are numbers above 0"),
        (folder, float("nan"), "frames_per_s is nan"),
    ):
        with pytest.raises(ClipError, match=said):
            reader.read(path, 2, frames_per_s=rate)


# ---------------------------------------------------------------- identity


def test_the_digest_of_a_folder_is_that_of_its_names_and_files(tmp_path: Path) -> None:
    folder = make.write_images(tmp_path / "clip", n_frames=3)
    (folder / ".hidden").write_text("left out")
    lines = "".join(f"{sha256_of_file(folder / f'0000{k}.png')}  0000{k}.png\n" for k in (1, 2, 3))
    assert video_sha256(folder) == hashlib.sha256(lines.encode()).hexdigest()
    shell = subprocess.run(
        "LC_ALL=C sha256sum * | sha256sum", shell=True, cwd=folder, capture_output=True, text=True
    )
    assert shell.stdout.split()[0] == video_sha256(folder)
    assert video_sha256(folder / "00001.png") == sha256_of_file(folder / "00001.png")
    assert video_files(tmp_path / "absent") == []
    before = video_sha256(folder)
    (folder / "00002.png").rename(folder / "00004.png")
    assert video_sha256(folder) != before


def test_114_the_same_images_in_training_and_evaluation_are_refused(tmp_path: Path) -> None:
    folders = [make.write_images(tmp_path / name, n_frames=3) for name in "ab"]
    training, evaluation = (
        [Clip(f"{folder.name}1", "x", "y", str(folder), "?", frames_per_s=3.0)]
        for folder in folders
    )
    with pytest.raises(InputError, match=r"'a1'.* 'b1'.* the same file"):
        check_disjoint(training, Evaluated(evaluation, by_source=False))
    (folders[0] / "00002.png").write_bytes((folders[0] / "00001.png").read_bytes())
    check_disjoint(training, Evaluated(evaluation, by_source=False))
