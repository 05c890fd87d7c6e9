"""Reading checks of many clips: what is kept, what is read again, what a person is told."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.clips.make_clips import write_clip
from vflash_analysis import config
from vflash_analysis.clips import checking
from vflash_analysis.clips.checking import CheckStore, check_clip_files, given_files, summary
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.read import ClipError
from vflash_analysis.errors import InputError
from vflash_analysis.records import sha256_of_file

SETTINGS = replace(config.load_profile("smoke").clips, reader="pyav")


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """Six good clips of one content, one that repeats frames and one that is no video."""
    folder = tmp_path_factory.mktemp("videos")
    write_clip(folder / "0.mp4", n_frames=8)
    for i in range(1, 6):
        shutil.copy(folder / "0.mp4", folder / f"{i}.mp4")
    write_clip(folder / "two_frames.mp4", n_frames=2)
    (folder / "words.mp4").write_text("no video\n")
    return folder


def clips_of(folder: Path) -> list[Clip]:
    return given_files(sorted(folder.glob("*.mp4")))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names of the files that are really read, in order."""
    names: list[str] = []
    really = checking.check_clip

    def check_clip(clip, *arguments):
        names.append(Path(clip.path).name)
        return really(clip, *arguments)

    monkeypatch.setattr(checking, "check_clip", check_clip)
    return names


def check(clips, store: Path, **options) -> pd.DataFrame:
    settings = options.pop("settings", SETTINGS)
    return check_clip_files(clips, settings, CheckStore(store), io.StringIO(), **options)


def test_several_readers_give_the_rows_of_one_in_order(videos, tmp_path, monkeypatch):
    one = check(clips_of(videos), tmp_path / "one.jsonl").drop(columns="seconds")
    monkeypatch.setattr(checking, "CLIPS_PER_READER", 2)
    several = check(clips_of(videos), tmp_path / "several.jsonl").drop(columns="seconds")
    pd.testing.assert_frame_equal(one, several)
    assert [Path(path).name for path in one["path"]] == [
        Path(c.path).name for c in clips_of(videos)
    ]
    assert one["status"].tolist() == ["ok"] * 6 + ["flagged", "bad"]


def test_what_was_read_is_not_read_again_and_gives_the_same_rows(videos, tmp_path, read):
    store, clips = tmp_path / "store.jsonl", clips_of(videos)
    first = check(clips, store)
    assert len(read) == len(clips)
    pd.testing.assert_frame_equal(check(clips, store), first)
    assert len(read) == len(clips)
    check(clips, store, settings=replace(SETTINGS, num_frames=SETTINGS.num_frames + 1))
    assert len(read) == 2 * len(clips)  # other frames are another question


def test_a_file_that_changed_and_a_reason_that_may_pass_are_read_again(videos, tmp_path, read):
    folder = tmp_path / "videos"
    shutil.copytree(videos, folder)
    clips = [*clips_of(folder), *given_files([folder / "absent.mp4"])]
    store = tmp_path / "store.jsonl"
    assert check(clips, store)["reason"].dropna().tolist() == ["not_video", "missing"]
    read.clear()
    os.utime(folder / "3.mp4", ns=(1, 1))
    shutil.copy(folder / "0.mp4", folder / "absent.mp4")
    assert check(clips, store)["reason"].dropna().tolist() == ["not_video"]
    assert sorted(read) == ["3.mp4", "absent.mp4"]


def test_an_interrupted_check_goes_on_where_it_was(videos, tmp_path, read, monkeypatch):
    store, clips, really = tmp_path / "store.jsonl", clips_of(videos), CheckStore.keep

    def keep(self, key, row):
        really(self, key, row)
        if len(self._rows) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(CheckStore, "keep", keep)
    with pytest.raises(KeyboardInterrupt):
        check(clips, store)
    monkeypatch.setattr(CheckStore, "keep", really)
    with store.open("a", encoding="utf-8") as file:
        file.write('["half a li')  # the process was killed while it wrote
    read.clear()
    assert len(check(clips, store)) == len(clips)
    assert len(read) == len(clips) - 3


def test_under_fail_a_bad_clip_stops_the_rest_also_when_it_was_read_before(videos, tmp_path, read):
    clips = [clips_of(videos)[-1], *clips_of(videos)[:-1]]
    for _ in range(2):
        with pytest.raises(ClipError, match=r"words\.mp4: not_video"):
            check(clips, tmp_path / "store.jsonl", on_bad_clip="fail")
    assert len(read) < len(clips)


def test_a_file_that_is_not_the_one_its_list_names_is_bad_with_both_digests(videos, tmp_path):
    good = given_files([videos / "0.mp4"])[0]
    digest = sha256_of_file(good.path)
    named = [replace(good, sha256=digest), replace(good, clip_id="other", sha256="0" * 64)]
    rows = check(named, tmp_path / "store.jsonl").set_index("clip_id")
    assert rows["status"].tolist() == ["ok", "bad"]
    assert rows.loc["other", "reason"] == "changed"
    assert digest in rows.loc["other", "message"] and "0" * 64 in rows.loc["other", "message"]


def test_the_summary_counts_by_reason_and_flag():
    rows = [("bad", "damaged", ""), ("bad", "missing", ""), ("bad", "damaged", "")]
    rows += [("flagged", None, "short repeated"), ("flagged", None, "repeated"), ("ok", None, "")]
    frame = pd.DataFrame(rows, columns=["status", "reason", "flags"])
    assert summary(frame) == (
        "6 clips read: 3 bad (2 damaged, 1 missing), 2 flagged (2 repeated, 1 short)"
    )
    assert summary(frame[frame["status"] == "ok"]) == "1 clips read: 0 bad, 0 flagged"


def test_a_name_that_is_no_utf8_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError, match=r"udcff\.mp4': found a name that is not UTF-8"):
        given_files([tmp_path / "\udcff.mp4"])


def test_a_damaged_store_costs_its_rows_and_nothing_else(videos, tmp_path, read):
    store = tmp_path / "store.jsonl"
    store.write_bytes(b"\xff\n" + b"[" * 100_000 + b"\n" + b"9" * 5000 + b"\n")
    clips = given_files([videos / "0.mp4"])
    assert (
        check(clips, store)["status"].tolist() == check(clips, store)["status"].tolist() == ["ok"]
    )
    assert len(read) == 1


def test_nothing_to_read_is_no_row(tmp_path):
    assert check([], tmp_path / "store.jsonl").empty
