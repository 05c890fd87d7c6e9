"""The clip lists of a profile: sizes, splits, a folder that can be moved, bad clips by name."""

import dataclasses
import shutil

import pytest

from vflash_analysis import config
from vflash_analysis.clips import prepare
from vflash_analysis.clips.lists import Clip, write_clip_list
from vflash_analysis.clips.read import ClipError
from vflash_analysis.errors import InputError

SETTINGS = config.load_profile("smoke").clips


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    return folder, prepare.prepare_lists(SETTINGS, folder)


def test_lists_have_their_sizes_and_share_no_clip(prepared):
    folder, told = prepared
    assert dict(zip(told["list"], told["clips"], strict=True)) == {
        "training": 4, "validation": 2, "target_evaluation": 10, "suite-VDC-0": 2,
    }  # fmt: skip
    clips = [clip for name in told["list"] for clip in prepare.read_list(folder, name)]
    assert len({clip.clip_id for clip in clips}) == len(clips) == 18
    assert len({clip.benchmark for clip in prepare.read_list(folder, "training")}) == 4
    assert prepare.suite_list(folder, "VDC", 0, 1)[0].benchmark == "VDC"
    assert len(prepare.all_suite_clips(folder, SETTINGS, 2)) == 2
    with pytest.raises(InputError, match=r"nothing\.jsonl: no such clip list"):
        prepare.read_list(folder, "nothing")


def test_a_cut_of_all_suites_keeps_every_suite_and_seed(tmp_path):
    """Real clip ids say nothing of rank; each list's first clips come first, and no clip twice."""
    ids = {("VDC", 0): "zb", ("VDC", 1): "by", ("LVB", 0): "ac", ("LVB", 1): "b"}
    for (benchmark, seed), names in ids.items():
        clips = [Clip(i, benchmark, "test", str(tmp_path / f"{i}.mp4"), "What?") for i in names]
        write_clip_list(tmp_path / f"suite-{benchmark}-{seed}.jsonl", clips)
    settings = dataclasses.replace(SETTINGS, benchmarks=("VDC", "LVB"), sample_seeds=(0, 1))
    found = prepare.all_suite_clips(tmp_path, settings, 2)
    assert [(clip.benchmark, clip.clip_id) for clip in found] == [
        ("VDC", "z"), ("LVB", "a"), ("VDC", "b"), ("LVB", "b"), ("LVB", "c"), ("VDC", "y"),
    ]  # fmt: skip
    assert len(prepare.check_lists(settings, tmp_path)) == 6  # "b" of both suites, each read


def test_a_prepared_folder_can_be_moved_and_a_bad_clip_costs_no_other(prepared, tmp_path):
    folder, _ = prepared
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    clips = prepare.suite_list(moved, "VDC", 0, 2)
    assert all(str(moved) in clip.path for clip in clips)
    with open(clips[0].path, "wb") as file:
        file.write(b"")
    checked = prepare.check_lists(SETTINGS, moved, most=2).set_index("clip_id")
    bad = checked[checked["status"] == "bad"]
    assert bad["reason"].to_dict() == {clips[0].clip_id: "empty"}
    assert len(checked) == 8  # two of each of the four lists
    with pytest.raises(ClipError, match=clips[0].clip_id):
        prepare.check_lists(dataclasses.replace(SETTINGS, on_bad_clip="fail"), moved)


def test_the_sheet_shows_each_clip_once(prepared):
    folder, _ = prepared
    figure = prepare.contact_sheet(prepare.read_list(folder, "validation"), SETTINGS, columns=3)
    assert len(figure.axes) == 2 * 3
    assert sum(bool(axis.get_title("left")) for axis in figure.axes) == 2


def test_the_sheet_names_a_clip_that_cannot_be_used_and_shows_the_others(prepared):
    folder, _ = prepared
    clips = prepare.read_list(folder, "validation")
    other = dataclasses.replace(clips[0], sha256="0" * 64)
    absent = dataclasses.replace(clips[1], path=str(folder / "absent.mp4"))
    figure = prepare.contact_sheet([other, absent, clips[1]], SETTINGS, columns=2)
    titles = [axis.get_title("left") for axis in figure.axes if axis.get_title("left")]
    assert [title.rpartition(": ")[2] for title in titles[:2]] == ["changed", "missing"]
    assert [len(axis.images) for axis in figure.axes] == [0, 0, 0, 0, 1, 1]
