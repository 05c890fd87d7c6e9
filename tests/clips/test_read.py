"""FrameReader on ordinary and awkward clips; numbers in names are cases from the public
trackers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest

from tests.clips import make_clips as make
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.read import (
    ClipError,
    ClipFrames,
    FrameReader,
    check_clip,
)
from vflash_analysis.errors import InputError


@pytest.fixture(scope="module")
def readers() -> Iterator[dict[str, FrameReader]]:
    """One reader per backend, without fallback, shared by the module's tests."""
    with (
        FrameReader(60, "decord", fallback=False) as decord,
        FrameReader(60, "pyav", fallback=False) as pyav,
        FrameReader(60, "decord") as both,
    ):
        yield {"decord": decord, "pyav": pyav, "both": both}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary clip: 30 frames at 10 per second, index at the front."""
    return make.write_clip(
        tmp_path_factory.mktemp("clips") / "good.mp4", container={"movflags": "faststart"}
    )


def numbers(clip: ClipFrames) -> list[int]:
    return [make.frame_number(frame) for frame in clip.frames]


def centres(n_frames: int, num_frames: int) -> list[int]:
    """Frames on screen at the middles of equal parts of a constant-rate clip, worked out in whole
    numbers."""
    return [(2 * i + 1) * n_frames // (2 * num_frames) for i in range(num_frames)]


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_frames_are_uniform_over_time_and_only_uint8_rgb_comes_back(
    readers: dict[str, FrameReader], clip: Path, backend: str
) -> None:
    got = readers[backend].read(clip, 8)
    assert got.frames.shape == (8, 48, 64, 3) and got.frames.dtype == np.uint8
    assert numbers(got) == got.indices.tolist() == centres(30, 8)
    assert got.timestamps_s == pytest.approx([i / 10 for i in centres(30, 8)], abs=1e-5)
    info = got.info
    assert (info.width, info.height, info.n_frames, info.declared_frames) == (64, 48, 30, 30)
    assert info.duration_s == pytest.approx(3.0, abs=1e-5)
    assert info.fps == pytest.approx(10.0, abs=1e-3)
    assert (info.codec, info.bit_depth, info.reader) == ("h264", 8, backend)
    assert info.warnings == () and info.flags == ()
    assert got.seconds > 0


CONTAINERS = {
    "b_frames.mp4": {"n_frames": 60, "options": {"crf": "10", "bf": "4", "g": "30"}},
    "long_gop.mp4": {"n_frames": 120, "options": {"crf": "10", "g": "300", "bf": "3"}},
    "short_gop.mp4": {"n_frames": 240, "options": {"crf": "10", "g": "8", "bf": "2"}},
    "fragmented.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}},
    "plain.mkv": {},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"crf": "10", "b": "0", "cpu-used": "8"}},
    "mjpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "h264.avi": {"n_frames": 40, "options": {"crf": "10", "bf": "2"}},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none:crf=10"}},
    "odd_size.mp4": {"width": 63, "height": 47, "pix_fmt": "yuv444p"},
    "日本 é space.mp4": {},
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_015_017_frames_equal_sequential_order_in_every_container(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str, name: str
) -> None:
    plan = CONTAINERS[name]
    path = make.write_clip(tmp_path / name, **plan)
    n = plan.get("n_frames", 30)
    every = readers[backend].read(path, n)
    assert numbers(every) == list(range(n))
    assert every.timestamps_s == pytest.approx(np.arange(n) / 10, abs=2e-3)
    assert (np.diff(every.timestamps_s) > 0).all()
    some = readers[backend].read(path, 7)  # leaves gaps, so seeking is used
    assert numbers(some) == some.indices.tolist() == centres(n, 7)


def test_015_035_both_readers_give_the_same_pixels(
    readers: dict[str, FrameReader], clip: Path
) -> None:
    one, two = readers["decord"].read(clip, 8), readers["pyav"].read(clip, 8)
    assert one.indices.tolist() == two.indices.tolist()
    assert np.abs(one.frames.astype(int) - two.frames).max() <= 2


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_018_variable_rate_is_sampled_by_time_stamp(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str
) -> None:
    starts = [40 * i if i < 10 else 400 + 400 * (i - 10) for i in range(20)]
    path = make.write_clip(tmp_path / "variable.mp4", n_frames=20, starts_ms=starts)
    got = readers[backend].read(path, 8)
    # 20 frames last 4.0 s + the median gap of 0.04 s: the middles of 8 parts lie 0.505 s apart.
    expected = [max(i for i, s in enumerate(starts) if s <= 252.5 + 505 * k) for k in range(8)]
    assert numbers(got) == got.indices.tolist() == expected
    assert got.timestamps_s == pytest.approx([starts[i] / 1000 for i in expected], abs=1e-3)


@pytest.mark.parametrize("backend", ["decord", "pyav"])
@pytest.mark.parametrize("name", ["long_sound.mkv", "long_sound.mp4"])
def test_010_011_a_longer_sound_track_changes_neither_length_nor_last_frame(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str, name: str
) -> None:
    path = make.write_clip(tmp_path / name, audio_s=6.0)
    got = readers[backend].read(path, 30)
    assert numbers(got) == list(range(30))
    assert got.info.duration_s == pytest.approx(3.0, abs=0.01)
    assert got.info.flags == ()


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_019_a_capped_count_covers_the_whole_clip(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str
) -> None:
    path = make.write_clip(tmp_path / "long.mp4", n_frames=240)
    seen = numbers(readers[backend].read(path, 16))
    assert seen[0] <= 15 and seen[-1] >= 225


@pytest.mark.parametrize("n_frames", [1, 2, 5])
@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_a_clip_shorter_than_the_request_repeats_frames_and_is_flagged(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str, n_frames: int
) -> None:
    path = make.write_clip(tmp_path / "few.mp4", n_frames=n_frames)
    got = readers[backend].read(path, 8)
    assert numbers(got) == got.indices.tolist() == centres(n_frames, 8)
    assert sorted(set(numbers(got))) == list(range(n_frames))
    assert got.info.n_repeated == 8 - n_frames
    assert got.info.flags == ("repeated",)
    assert f"{8 - n_frames} of 8" in got.info.warnings[0]


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_023_turned_clips_come_upright(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str
) -> None:
    flat = make.write_clip(tmp_path / "flat.mp4", width=128, height=64)
    got = readers[backend].read(make.turn(flat, tmp_path / "turned.mp4"), 4)
    assert got.frames.shape == (4, 128, 64, 3)
    # A quarter turn clockwise takes the red upper left quarter to the upper right.
    corner = got.frames[0, 8:56, 40:60].reshape(-1, 3).mean(0)
    assert corner[0] > 150 and corner[2] < 60
    back = np.rot90(got.frames[2])  # anticlockwise again
    assert make.frame_number(back) == got.indices[2]


def test_023_a_turned_clip_decord_cannot_read_falls_back_to_the_same_frames(
    readers: dict[str, FrameReader], tmp_path: Path
) -> None:
    path = make.turn(
        make.write_clip(tmp_path / "flat.mp4"), tmp_path / "turned.mp4"
    )  # 48 wide then
    got = readers["both"].read(path, 4)
    assert got.frames.shape == (4, 64, 48, 3) and got.info.reader == "pyav"
    assert [make.frame_number(np.rot90(frame)) for frame in got.frames] == centres(30, 4)


@pytest.mark.parametrize("width", [16, 32, 48, 72])
def test_narrow_frames_come_at_their_own_size_with_decords_reason_kept(
    readers: dict[str, FrameReader], tmp_path: Path, width: int
) -> None:
    path = make.write_clip(tmp_path / "narrow.mp4", width=width, height=32)
    got = readers["both"].read(path, 8)
    assert got.frames.shape == (8, 32, width, 3)
    assert numbers(got) == centres(30, 8)
    noted = [w for w in got.info.warnings if w.startswith("fallback: decord")]
    assert len(noted) == (got.info.reader == "pyav")
    assert got.info.flags == ()


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_025_always_three_channels(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str
) -> None:
    grey = make.write_clip(tmp_path / "grey.mp4", pix_fmt="gray")
    frames = readers[backend].read(grey, 4).frames
    assert frames.shape[-1] == 3
    assert np.ptp(frames.astype(int), axis=-1).max() <= 1
    alpha = make.write_clip(tmp_path / "alpha.mov", codec="png", pix_fmt="rgba")
    got = readers[backend].read(alpha, 4)
    assert got.frames.shape == (4, 48, 64, 3) and numbers(got) == centres(30, 4)


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_026_ten_bit_reads_as_eight_and_is_noted(
    readers: dict[str, FrameReader], tmp_path: Path, clip: Path, backend: str
) -> None:
    path = make.write_clip(tmp_path / "ten.mp4", pix_fmt="yuv420p10le")
    got = readers[backend].read(path, 8)
    assert got.frames.dtype == np.uint8
    assert abs(got.frames.mean() - readers[backend].read(clip, 8).frames.mean()) < 2
    assert got.info.bit_depth == 10
    assert [w for w in got.info.warnings if w.startswith("bit_depth: 10")]
    assert got.info.flags == ()  # a note, not a fault


# ---------------------------------------------------------------- faulty clips


def test_001_one_damaged_clip_among_three_good_ones(
    readers: dict[str, FrameReader], tmp_path: Path, clip: Path
) -> None:
    bad = make.cut_share(clip, tmp_path / "cut.mp4", 0.6)
    paths = [clip, bad, make.write_clip(tmp_path / "b.mp4"), make.write_clip(tmp_path / "c.mp4")]
    rows = [check_clip(path, 8, readers["both"]) for path in paths]
    assert [row["status"] for row in rows] == ["ok", "bad", "ok", "ok"]
    assert rows[1]["path"] == str(bad) and rows[1]["reason"] == "damaged"
    assert rows[1]["n_frames"] is None  # missing, not zero
    with pytest.raises(ClipError, match=r"cut\.mp4") as caught:
        readers["both"].read(bad, 8)
    assert caught.value.reason == "damaged"


def test_002_damage_in_the_middle_is_found_by_decoding_not_by_headers(
    readers: dict[str, FrameReader], tmp_path: Path
) -> None:
    good = make.write_clip(tmp_path / "gop.mp4", n_frames=120, options={"crf": "10", "g": "300"})
    middle = make.packets(good)[40][0]
    bad = make.spoil(good, tmp_path / "spoiled.mp4", middle, 400)
    with av.open(str(bad)) as container:
        assert container.streams.video[0].frames == 120  # the header knows nothing of it
    row = check_clip(bad, 8, readers["both"])
    assert (row["status"], row["reason"]) == ("bad", "damaged")


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_003_a_clip_that_opens_cleanly_but_is_cut_is_flagged_short(
    readers: dict[str, FrameReader], tmp_path: Path, clip: Path, backend: str
) -> None:
    path = make.cut_after_packet(clip, tmp_path / "cut.mp4", keep=24)
    got = readers[backend].read(path, 8)
    assert (got.info.n_frames, got.info.declared_frames) == (24, 30)
    assert got.info.flags == ("short",)
    assert "24 of 30" in got.info.warnings[0]
    assert numbers(got) == centres(24, 8)  # spread over what is there
    row = check_clip(path, 8, readers[backend])
    assert (row["status"], row["flags"]) == ("flagged", "short")


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_003_a_cut_matroska_file_is_flagged_by_the_length_of_its_video_stream(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str
) -> None:
    whole = make.write_clip(tmp_path / "whole.mkv", n_frames=60, audio_s=9.0)
    offset, size = make.packets(whole)[25]
    (tmp_path / "cut.mkv").write_bytes(whole.read_bytes()[: offset + size + 20])
    assert readers[backend].read(whole, 4).info.flags == ()
    got = readers[backend].read(tmp_path / "cut.mkv", 4)
    assert "short" in got.info.flags and got.info.declared_frames is None
    assert "2.60 of 6.00 s" in got.info.warnings[0]  # 26 frames; the sound alone would claim 9 s
    assert numbers(got) == centres(26, 4)


def test_009_neighbouring_frames_with_equal_pixels_are_counted(
    readers: dict[str, FrameReader], tmp_path: Path
) -> None:
    shown = [0, 1, 2, 3, 3, 3, 6, 7]
    path = make.write_clip(
        tmp_path / "still.mov", n_frames=8, numbers=shown, codec="png", pix_fmt="rgb24"
    )
    got = readers["both"].read(path, 8)
    assert numbers(got) == shown
    assert got.info.n_identical == 2 and got.info.flags == ("identical",)


def _concealed(tmp_path: Path) -> tuple[Path, Path]:
    """Return a clip, and a copy of it that decodes with one patched frame and no exception."""
    good = make.write_clip(
        tmp_path / "noise.mp4",
        n_frames=40,
        width=128,
        height=96,
        options={"crf": "20", "bf": "0", "g": "10", "threads": "1"},
        noise_seed=0,
    )
    offset, size = make.packets(good)[15]
    for seed in range(20):
        bad = make.spoil(good, tmp_path / "patched.mp4", offset + size // 3, 40, seed)
        try:
            with av.open(str(bad)) as container:
                container.streams.video[0].codec_context.thread_count = 1
                if sum(frame.is_corrupt for frame in container.decode(video=0)) == 1:
                    return good, bad
        except av.error.FFmpegError:
            continue
    raise AssertionError("no seed gave a patched frame")


def test_009_patched_frames_are_counted_and_over_a_limit_the_clip_is_bad(tmp_path: Path) -> None:
    good, bad = _concealed(tmp_path)
    with FrameReader(60, "pyav", fallback=False) as reader:
        assert reader.read(good, 40).info.flags == ()
        got = reader.read(bad, 40)
        assert got.info.n_substituted == 1
        assert got.info.flags == ("substituted", "damaged")
    with FrameReader(60, "pyav", fallback=False, max_substituted_share=0.02) as strict:
        with pytest.raises(ClipError, match="1 of 40 frames") as caught:
            strict.read(bad, 40)
        assert caught.value.reason == "damaged"
    with FrameReader(60, "decord", fallback=False) as reader:
        # decord says nothing in Python; the decoder's own messages still give it away.
        assert "damaged" in reader.read(bad, 40).info.flags
        assert reader.read(good, 40).info.flags == ()


def test_013_three_reasons_where_decord_has_one_text(
    readers: dict[str, FrameReader], tmp_path: Path
) -> None:
    sound = make.write_sound(tmp_path / "sound.mp4")
    nothing = make.write_without_frames(tmp_path / "nothing.mp4")
    assert check_clip(sound, 4, readers["decord"])["reason"] == "no_video_stream"
    assert check_clip(nothing, 4, readers["decord"])["reason"] == "no_frames"
    assert check_clip(sound, 4, readers["pyav"])["reason"] == "no_video_stream"
    assert check_clip(nothing, 4, readers["pyav"])["reason"] == "no_frames"
    if "libsvtav1" not in av.codecs_available:
        pytest.skip("this build of FFmpeg has no AV1 encoder; runs where av has libsvtav1")
    modern = make.write_clip(
        tmp_path / "av1.mp4", codec="libsvtav1", options={"crf": "10", "svtav1-params": "lp=1"}
    )
    assert check_clip(modern, 4, readers["decord"])["reason"] == "unsupported_codec"
    got = readers["both"].read(modern, 4)
    assert numbers(got) == centres(30, 4) and got.info.reader == "pyav"
    assert "no decoder for av1" in got.info.warnings[0]


def test_014_text_empty_folder_and_missing(
    readers: dict[str, FrameReader], tmp_path: Path, clip: Path
) -> None:
    (tmp_path / "text.mp4").write_text("not a video\n" * 20)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "folder.mp4").mkdir()
    names = ["text.mp4", "empty.mp4", "folder.mp4", "absent.mp4"]
    rows = [check_clip(p, 4, readers["both"]) for p in (*(tmp_path / n for n in names), clip)]
    reasons = [row["reason"] for row in rows]
    assert reasons == ["not_video", "empty", "not_video", "missing", None]
    assert rows[-1]["status"] == "ok"
    assert all("\n" not in row["message"] for row in rows)


def test_014_an_mp4_that_lost_its_index_is_damaged_not_another_kind_of_file(
    readers: dict[str, FrameReader], tmp_path: Path
) -> None:
    whole = make.write_clip(tmp_path / "late_index.mp4")
    data = whole.read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) * 4 // 10])
    assert check_clip(tmp_path / "cut.mp4", 4, readers["both"])["reason"] == "damaged"


def test_037_both_backends_reasons_are_kept(
    readers: dict[str, FrameReader], tmp_path: Path, clip: Path
) -> None:
    bad = make.cut_share(clip, tmp_path / "cut.mp4", 0.6)
    with pytest.raises(ClipError) as caught:
        readers["both"].read(bad, 8)
    assert "decord: " in str(caught.value) and "pyav: " in str(caught.value)
    assert str(bad) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_a_bad_count_is_refused_by_name(
    readers: dict[str, FrameReader], clip: Path, count: object
) -> None:
    with pytest.raises(InputError, match="num_frames") as caught:
        readers["both"].read(clip, count)  # type: ignore[arg-type]
    assert not isinstance(caught.value, ClipError)  # a wrong setting is not a bad clip


def test_check_row_names_what_was_found(readers: dict[str, FrameReader], clip: Path) -> None:
    row = check_clip(clip, 40, readers["both"])
    assert (row["status"], row["reason"], row["flags"]) == ("flagged", None, "repeated")
    assert (row["frames_requested"], row["frames_distinct"], row["n_repeated"]) == (40, 30, 10)
    assert (row["width"], row["height"], row["codec"]) == (64, 48, "h264")
    assert row["duration_s"] == pytest.approx(3.0, abs=1e-5)
    bad = check_clip(clip.parent / "absent.mp4", 40, readers["both"])
    assert list(bad) == list(row)  # one table


def test_relative_paths_count_from_the_current_folder(
    readers: dict[str, FrameReader], clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clip.parent)
    assert numbers(readers["both"].read(os.path.basename(clip), 3)) == centres(30, 3)


# ---------------------------------------------------------------- stretches of a video

CONTAINERS_OF_SUITES = {  # names as the suites have them
    "h264.MP4": {"n_frames": 120, "options": {"crf": "10", "g": "300", "bf": "3"}},
    "vp9.webm": {"codec": "libvpx-vp9", "n_frames": 120},
    "mjpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p", "n_frames": 120},
    "h264.mkv": {"n_frames": 120},
}


@pytest.mark.parametrize("name", CONTAINERS_OF_SUITES)
@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_frames_come_from_inside_the_bounds_uniform_over_them(
    readers: dict[str, FrameReader], tmp_path: Path, backend: str, name: str
) -> None:
    path = make.write_clip(tmp_path / name, **CONTAINERS_OF_SUITES[name])  # 12 s at 10 a second
    got = readers[backend].read(path, 4, start_s=5.0, end_s=9.0)
    # the middles of four parts of 1 s: 5.5, 6.5, 7.5 and 8.5 s
    assert numbers(got) == got.indices.tolist() == [55, 65, 75, 85]
    assert got.timestamps_s == pytest.approx([5.5, 6.5, 7.5, 8.5], abs=2e-3)
    assert got.info.n_frames == 120 and got.info.duration_s == pytest.approx(12.0, abs=0.01)
    assert numbers(readers[backend].read(path, 2, end_s=4.0)) == [10, 30]
    assert numbers(readers[backend].read(path, 2, start_s=8.0)) == [90, 110]


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_a_stretch_with_fewer_frames_than_asked_for_repeats_its_own_only(
    readers: dict[str, FrameReader], clip: Path, backend: str
) -> None:
    got = readers[backend].read(clip, 6, start_s=1.0, end_s=1.3)
    assert numbers(got) == [10, 10, 11, 11, 12, 12]
    assert got.info.flags == ("repeated",) and got.info.n_repeated == 3


def test_variable_rate_is_cut_by_time_stamp(
    readers: dict[str, FrameReader], tmp_path: Path
) -> None:
    starts = [40 * i if i < 10 else 400 + 400 * (i - 10) for i in range(20)]  # 4.04 s
    path = make.write_clip(tmp_path / "variable.mp4", n_frames=20, starts_ms=starts)
    for backend in ("decord", "pyav"):
        # 0.3, 0.5 and 0.7 s: the eighth frame starts at 0.28 s, the eleventh at 0.4 s
        got = readers[backend].read(path, 3, start_s=0.2, end_s=0.8)
        assert numbers(got) == [7, 10, 10]


@pytest.mark.parametrize("backend", ["decord", "pyav", "both"])
@pytest.mark.parametrize(
    ("start_s", "end_s", "said"),
    [
        (2.0, 2.0, "allowed are finite seconds"),
        (2.0, 1.0, "allowed are finite seconds"),
        (-0.5, 1.0, "allowed are finite seconds"),
        (float("nan"), 1.0, "allowed are finite seconds"),
        (0.0, float("inf"), "allowed are finite seconds"),
        (3.1, None, "outside the video, which lasts 3.00 s"),
        (1.0, 3.3, "outside the video, which lasts 3.00 s"),
    ],
)
def test_bounds_that_do_not_fit_are_refused_in_one_line(
    readers: dict[str, FrameReader],
    clip: Path,
    backend: str,
    start_s: float,
    end_s: float | None,
    said: str,
) -> None:
    with pytest.raises(ClipError, match=said) as caught:
        readers[backend].read(clip, 4, start_s=start_s, end_s=end_s)
    assert caught.value.reason == "bounds"
    assert str(caught.value).startswith(f"{clip}: bounds: ") and "\n" not in str(caught.value)


def test_an_end_rounded_past_the_last_frame_is_the_videos_end(
    readers: dict[str, FrameReader], clip: Path
) -> None:
    within = readers["both"].read(clip, 3, end_s=3.0)
    assert readers["both"].read(clip, 3, end_s=3.15).indices.tolist() == within.indices.tolist()


def test_a_clip_of_a_list_is_read_inside_its_bounds(
    readers: dict[str, FrameReader], clip: Path
) -> None:
    listed = Clip("c", "MVBench", "train", str(clip), "?", start_s=1.0, end_s=2.0)
    assert numbers(readers["both"].read_clip(listed, 2)) == [12, 17]
    row = check_clip(listed, 2, readers["both"])
    assert (row["status"], row["path"], row["frames_distinct"]) == ("ok", str(clip), 2)
    late = Clip("d", "MVBench", "train", str(clip), "?", start_s=8.0, end_s=9.0)
    assert [check_clip(c, 2, readers["both"])["reason"] for c in (listed, late)] == [
        None,
        "bounds",
    ]
