"""Training against evaluation: names of source videos, what counts as shared, what is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.overlap import (
    REASONS,
    Evaluated,
    check_disjoint,
    source_id,
    video_id,
    without_overlaps,
)
from vflash_analysis.errors import InputError


def listed(folder: Path, split: str, files: dict[str, str]) -> list[Clip]:
    folder.mkdir(parents=True, exist_ok=True)
    clips = []
    for clip_id, content in files.items():
        path = folder / f"{clip_id}.mp4"
        path.write_text(content)
        clips.append(Clip(clip_id, "VDC", split, str(path), "?"))
    return clips


# ---------------------------------------------------------------- names of source videos


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (("JspVuT6rsLA.mp4", "v_JspVuT6rsLA.mkv", "a/ytb_JspVuT6rsLA.MP4"), "jspvut6rsla"),
        (("JspVuT6rsLA_10_20.webm", "JspVuT6rsLA-3.avi", "JspVuT6rsLA"), "jspvut6rsla"),
        (("v_a1b2c3d4e5f.mp4",), "a1b2c3d4e5f"),  # no capitals, so only the prefix tells
        (("EDXBD.mp4", "EDXBD_1.1_8.7.mp4", "star/EDXBD_11_22.mp4", "EDXBD_1.1_8.7"), "edxbd"),
        (("video_10142.mp4",), "video_10142"),  # 11 characters, but a word and a number
        (("movie101_66.mp4", "Movie101_66.MP4"), "movie101_66"),
        (("camera_view_12.mp4",), "camera_view_12"),  # not the id "camera_view" and a cut
        (("1053841541.mp4",), "1053841541"),
    ],
)
def test_names_of_one_source_video_are_one(names: tuple[str, ...], source: str) -> None:
    assert {source_id(name) for name in names} == {source}


@pytest.mark.parametrize("name", ["1.mp4", "000123.mp4", "clip.mp4", "a"])
def test_a_name_that_says_nothing_is_no_source(name: str) -> None:
    assert source_id(name) is None


YOUTUBE = st.text(st.sampled_from("abcXYZ019_-"), min_size=11, max_size=11).filter(
    lambda name: name != name.lower() and name != name.upper()
)


@given(
    name=YOUTUBE,
    prefix=st.sampled_from(["v_", "ytb_", "yt_", "youtube_"]),
    cut=st.sampled_from(["", "_3", "_1.5_20", "-7", ".12"]),
    extension=st.sampled_from([".mp4", ".MP4", ".webm", ".mkv", ""]),
)
def test_a_youtube_id_is_found_behind_any_prefix_and_before_any_cut(
    name: str, prefix: str, cut: str, extension: str
) -> None:
    assert source_id(f"some/folder/{prefix}{name}{cut}{extension}") == name.lower()


# ---------------------------------------------------------------- lists made by hand


def test_114_disjoint_lists_pass_and_a_shared_id_source_or_file_is_named(tmp_path: Path) -> None:
    evaluation = listed(tmp_path / "eval", "test", {"e1": "one", "v_JspVuT6rsLA": "two", "e3": "x"})
    evaluated = Evaluated(evaluation)
    training = listed(tmp_path / "train", "training", {"t1": "uno", "t2": "three"})
    check_disjoint(training, evaluated)  # equal sizes, different bytes
    for files, named in (
        ({"e1": "something else"}, r"'e1' .*VDC clip 'e1' .*have one id"),
        ({"JspVuT6rsLA_1_2": "anew"}, r"'v_JspVuT6rsLA' .*one source video \(jspvut6rsla\)"),
        ({"t9": "two"}, r"'t9' .*'v_JspVuT6rsLA' .*the same file"),
    ):
        other = listed(tmp_path / "other", "training", files)
        with pytest.raises(InputError, match=named) as caught:
            check_disjoint([*training, *other], evaluated)
        assert "\n" not in str(caught.value)


def test_114_files_that_are_not_there_are_compared_by_name_only(tmp_path: Path) -> None:
    evaluation = listed(tmp_path / "eval", "test", {"e1": "one"})
    absent = Clip("t1", "mine", "training", str(tmp_path / "absent.mp4"), "?")
    check_disjoint([absent], Evaluated(evaluation))
    check_disjoint(listed(tmp_path / "t", "training", {"t2": "one"}), Evaluated([absent]))
    with pytest.raises(InputError, match="e1"):
        check_disjoint([replace(absent, clip_id="e1")], Evaluated(evaluation))
    named = replace(absent, path=str(tmp_path / "v_JspVuT6rsLA.mp4"))
    with pytest.raises(InputError, match="one source video"):
        check_disjoint([replace(named, clip_id="t2")], Evaluated([named]))


def test_a_list_made_by_hand_may_call_its_video_as_a_suite_does(tmp_path: Path) -> None:
    """video_10009 of one's own is not CLEVRER's; a corpus, which may hold that one, loses it."""
    evaluation = listed(tmp_path / "eval", "test", {"video_10009": "one"})
    mine = listed(tmp_path / "mine", "training", {"video_10009": "two"})[0]
    mine = replace(mine, clip_id="mine")
    check_disjoint([mine], Evaluated(evaluation))
    taken, left_out = without_overlaps([mine], Evaluated(evaluation), 1)
    assert not taken and [one.reason for one in left_out] == ["same_source"]
    assert video_id("a/EDXBD_0.0_3.0.mp4") == "edxbd" and video_id("a/video_10009.mp4") is None


def test_generated_clips_are_not_compared_by_the_name_of_a_source(tmp_path: Path) -> None:
    evaluation = listed(tmp_path / "eval", "test", {"v_JspVuT6rsLA": "one"})
    same_name = replace(
        listed(tmp_path / "train", "training", {"v_JspVuT6rsLA": "two"})[0], clip_id="other"
    )
    check_disjoint([same_name], Evaluated(evaluation, by_source=False))
    with pytest.raises(InputError, match="one source video"):
        check_disjoint([same_name], Evaluated(evaluation))


# ---------------------------------------------------------------- a corpus


def test_a_corpus_loses_its_overlaps_and_tells_each_with_its_reason(tmp_path: Path) -> None:
    evaluation = listed(
        tmp_path / "eval", "test", {"e1": "one", "EDXBD": "two", "surveil_8": "three"}
    )
    corpus = listed(
        tmp_path / "train",
        "training",
        {"a": "aaaa", "e1": "bb", "EDXBD_0.5_9.0": "cut", "b": "three", "c": "c", "d": "one"},
    )
    taken, left_out = without_overlaps(corpus, Evaluated(evaluation), 2)
    assert [clip.clip_id for clip in taken] == ["a", "c"]
    assert {(one.training.clip_id, one.evaluation.clip_id, one.reason) for one in left_out} == {
        ("e1", "e1", "same_id"),
        ("EDXBD_0.5_9.0", "EDXBD", "same_source"),
        ("b", "surveil_8", "same_file"),
    }  # "d" is the same file as e1 but was never wanted
    assert {one.reason for one in left_out} == set(REASONS)
    taken, left_out = without_overlaps(corpus, Evaluated(evaluation), 9)
    assert [clip.clip_id for clip in taken] == ["a", "c"] and len(left_out) == 4


def test_what_is_left_out_hangs_on_all_videos_of_a_suite_not_on_their_order(tmp_path: Path) -> None:
    evaluation = listed(tmp_path / "eval", "test", {f"video{i}": f"content {i}" for i in range(9)})
    corpus = listed(tmp_path / "train", "training", {f"clip{i}": f"content {i}" for i in range(12)})
    for order in (evaluation, evaluation[::-1]):
        taken, left_out = without_overlaps(corpus, Evaluated(order), 12)
        assert [clip.clip_id for clip in taken] == ["clip9", "clip10", "clip11"]
        assert [one.evaluation.clip_id for one in left_out] == [f"video{i}" for i in range(9)]
