"""Frozen clip lists: written whole or not at all, the same bytes each time, replayed to the byte."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from tests.clips import hub
from tests.clips.hub import STUBS
from vflash_analysis import identity, paths
from vflash_analysis.clips import frozen, prepare
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.read import ClipError, file_fault
from vflash_analysis.clips.suites import draw_clips, load_suite, suite_videos
from vflash_analysis.errors import InputError
from vflash_analysis.records import sha256_of_file

SETTINGS = hub.SETTINGS
NAMES = ("VDC-0", "VDC-1", "LVB-0", "LVB-1")


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """The videos' folder; descriptions, lists and digests are the test's own."""
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "DATA", hub.copy_descriptions(tmp_path / "data"))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path / "videos"))
    hub.make_suites(tmp_path / "videos")
    hub.make_corpus(tmp_path / "videos", [f"ytb_Training{i:03d}" for i in range(9)])
    return tmp_path / "videos"


def freeze(data: Path) -> pd.DataFrame:
    return frozen.freeze(SETTINGS, data, io.StringIO()).set_index("list")


def lists() -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (paths.DATA / "suites/lists").glob("*")}


def test_a_list_names_each_drawn_clip_by_file_bytes_digest_and_prompt(data):
    told = freeze(data)
    assert set(told["state"]) == {"written"} and set(told["clips"]) == {4}
    assert set(lists()) == set(NAMES)
    rows = [json.loads(line) for line in lists()["VDC-1"].decode().splitlines()]
    videos = suite_videos(load_suite(paths.DATA / "suites" / "VDC.yaml"), data)
    drawn = [clip.clip_id for clip in draw_clips(videos, "VDC", 1, 4)]
    assert [row["clip_id"] for row in rows] == drawn
    name = rows[0]["clip_id"]
    assert rows[0] == {
        "clip_id": name,
        "file": f"Test_Videos/{name}.mp4",
        "bytes": len(name),
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
        "prompt_sha256": hashlib.sha256(f"What of {name}?".encode()).hexdigest(),
    }
    assert len({row["clip_id"] for row in rows}) == 4  # distinct videos


def test_without_a_folder_for_lists_nothing_is_frozen(data):
    settings = dataclasses.replace(SETTINGS, frozen_lists=None)
    with pytest.raises(InputError, match=r"clips\.frozen_lists: found null, allowed with freeze"):
        frozen.freeze(settings, data, io.StringIO())


def test_a_file_in_the_place_of_the_lists_is_refused_before_anything_is_hashed(data, monkeypatch):
    monkeypatch.setattr(frozen, "hash_videos", lambda *_: pytest.fail("hashed"))
    settings = dataclasses.replace(SETTINGS, frozen_lists="/dev/null")
    with pytest.raises(
        InputError, match=r"^clips\.frozen_lists: found /dev/null, which is no fold"
    ):
        frozen.freeze(settings, data, io.StringIO())


def test_freezing_again_reads_nothing_and_gives_the_same_bytes(data, monkeypatch):
    freeze(data)
    before = lists()
    monkeypatch.setattr(identity, "sha256_of_file", lambda name: pytest.fail(f"{name} read again"))
    assert set(freeze(data)["state"]) == {"unchanged"} and lists() == before


def test_another_file_replaces_only_the_lists_that_hold_it(data):
    freeze(data)
    before = lists()
    hub.put(data / hub.LVB / "videos" / "Long_vid-00.mp4", b"another video")
    told = freeze(data)
    holds = [f"LVB-{seed}" for seed in (0, 1) if b"Long_vid-00" in before[f"LVB-{seed}"]]
    assert holds
    assert [name for name in NAMES if lists()[name] != before[name]] == holds
    assert sorted(told["state"]) == ["replaced"] * len(holds) + ["unchanged"] * (4 - len(holds))


def test_an_interrupt_costs_no_hash_that_was_done_and_writes_no_list(data, monkeypatch):
    hashed: list[str] = []

    def slow(name):
        if len(hashed) == 5:
            raise KeyboardInterrupt
        hashed.append(name)
        return sha256_of_file(name)

    monkeypatch.setattr(frozen, "FILES_AT_ONCE", 1)
    monkeypatch.setattr(identity, "sha256_of_file", slow)
    with pytest.raises(KeyboardInterrupt):
        freeze(data)
    assert lists() == {} and len(hashed) == 5
    again: list[str] = []
    monkeypatch.setattr(
        identity, "sha256_of_file", lambda name: again.append(name) or sha256_of_file(name)
    )
    freeze(data)
    assert len(lists()) == 4 and not set(again) & set(hashed)


@pytest.mark.parametrize(("spoil", "said"), STUBS)
def test_a_stub_is_named_and_no_list_is_written(data, monkeypatch, spoil, said):
    spoil(data / hub.LVB / "videos" / "Long_vid-03.mp4")
    monkeypatch.setattr(identity, "sha256_of_file", lambda name: pytest.fail("hashed for nothing"))
    settings = dataclasses.replace(SETTINGS, clips_per_suite_all=8)
    told = r"1 of 16 files cannot be used, first \S+Long_vid-03\.mp4: " + said
    with pytest.raises(InputError, match=told) as caught:
        frozen.freeze(settings, data, io.StringIO())
    assert lists() == {} and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "2.jpg").write_bytes(b""), r"2\.jpg: empty"),
        (lambda folder: (folder / "2.jpg").unlink(), "damaged: 1 of the images 1 to 3"),
        (lambda folder: [file.unlink() for file in folder.iterdir()], "no_frames"),
    ],
)
def test_images_of_a_folder_are_looked_at_each(tmp_path, spoil, said):
    folder = tmp_path / "clip"
    for number in (1, 2, 3):
        hub.put(folder / f"{number}.jpg", b"no picture, but no stub either")
    clip = Clip("a", "MVBench", "train", str(folder), "?", frames_per_s=3.0)
    assert file_fault(clip) is None
    spoil(folder)
    assert re.search(said, str(file_fault(clip)))


def test_a_file_that_changes_while_it_is_hashed_is_refused_and_hashed_again(data, monkeypatch):
    def slow(path):
        digest = sha256_of_file(path)
        path.write_bytes(path.read_bytes() + b" and more")
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(identity, "sha256_of_file", slow)
        with pytest.raises(InputError, match="changed while it was read"):
            freeze(data)
    assert lists() == {}
    freeze(data)
    rows = [json.loads(line) for line in lists()["VDC-0"].decode().splitlines()]
    assert all(row["sha256"] == sha256_of_file(data / hub.VDC / row["file"]) for row in rows)


@pytest.mark.parametrize("found", ["a folder", "a link that leads to no file"])
def test_what_is_no_list_does_not_pass_for_none(data, tmp_path, monkeypatch, found):
    path = frozen.list_path(SETTINGS, "VDC", 1)
    path.parent.mkdir(parents=True)
    path.mkdir() if found == "a folder" else path.symlink_to(tmp_path / "gone")
    monkeypatch.setattr(identity, "sha256_of_file", lambda name: pytest.fail("hashed for nothing"))
    for use in (freeze, lambda _: prepare.prepare_lists(SETTINGS, tmp_path / "out")):
        with pytest.raises(InputError, match=rf"VDC-1\.jsonl: found {found}, allowed: a frozen"):
            use(data)


def test_a_suite_without_a_description_is_named(data, tmp_path):
    (paths.DATA / "suites" / "LVB.yaml").unlink()
    for use in (freeze, lambda _: prepare.prepare_lists(SETTINGS, tmp_path / "out")):
        with pytest.raises(InputError, match=r"data/suites/LVB\.yaml: no such file"):
            use(data)


def test_generated_clips_are_not_frozen(data):
    with pytest.raises(InputError, match=r'clips\.source: found "pocket"'):
        frozen.freeze(dataclasses.replace(SETTINGS, source="pocket"), data, io.StringIO())


# ---------------------------------------------------------------- replaying


def test_a_tracked_list_is_replayed_though_the_rule_would_draw_others(data, tmp_path, capsys):
    freeze(data)
    path = frozen.list_path(SETTINGS, "VDC", 0)
    lines = path.read_text().splitlines(keepends=True)
    drawn = [json.loads(line)["clip_id"] for line in lines]
    other = next(i for i in (f"v_Desc000000{i}" for i in range(8)) if i not in drawn)
    swapped = lines[0].replace(drawn[0], other)
    swapped = swapped.replace(_sha(drawn[0]), _sha(other))
    swapped = swapped.replace(_sha(f"What of {drawn[0]}?"), _sha(f"What of {other}?"))
    path.write_text("".join([swapped, *lines[1:]]))
    out = tmp_path / "out"
    prepare.prepare_lists(SETTINGS, out)
    clips = prepare.suite_list(out, "VDC", 0, 9)
    assert [clip.clip_id for clip in clips] == [other, *drawn[1:]]
    assert clips[0].sha256 == _sha(other) and clips[0].prompt == f"What of {other}?"
    assert "VDC, seed 0: replays " in capsys.readouterr().out
    assert (out / "frozen-VDC-0.jsonl").read_bytes() == path.read_bytes()  # travels with results
    assert set(pd.read_csv(out / "frozen.csv")["status"]) == {"ok"}


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("spoil", "status", "said"),
    [
        (lambda path: path.write_bytes(b"another"), "changed", "changed: sha256 {found}"),
        *((spoil, said.partition(":")[0], said) for spoil, said in STUBS),
    ],
)
def test_a_file_that_is_not_the_listed_one_is_named_and_never_used(
    data, tmp_path, capsys, spoil, status, said
):
    freeze(data)
    name = json.loads(lists()["LVB-0"].splitlines()[0])["clip_id"]
    file = data / hub.LVB / "videos" / f"{name}.mp4"
    spoil(file)
    out, told = tmp_path / "out", said.format(found=_sha("another"))
    with pytest.raises(ClipError, match=told) as caught:
        prepare.prepare_lists(dataclasses.replace(SETTINGS, on_bad_clip="fail"), out)
    assert caught.value.reason == status and _sha(name) in str(caught.value)
    capsys.readouterr()
    prepare.prepare_lists(SETTINGS, out)  # skip: it stays in the list, by name and with its reason
    printed = capsys.readouterr().out
    assert told in printed and _sha(name) in printed
    table = pd.read_csv(out / "frozen.csv").set_index("clip_id")
    assert table.loc[name, "status"] == status and (table["status"] == "ok").sum() == len(table) - 1
    clip = prepare.suite_list(out, "LVB", 0, 1)[0]
    assert clip.clip_id == name and clip.sha256 == _sha(name)
    if status == "changed":
        with pytest.raises(ClipError, match=told):
            frozen.verified_sha256(clip)


def test_only_clips_of_a_frozen_list_must_be_one_file(data):
    file = data / hub.LVB / "videos" / "Long_vid-00.mp4"
    clip = Clip("Long_vid-00", "LVB", "validation", str(file), "?")
    assert frozen.verified_sha256(clip) == _sha("Long_vid-00")
    assert frozen.verify([clip], io.StringIO()).empty


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_sha256": "0" * 64}, r"clip '{}': prompt_sha256: found \w+ in the metadata"),
        ({"clip_id": "v_Gone0000001"}, r"clip 'v_Gone0000001' is not in the metadata below"),
        ({"start_s": 1.5}, r"clip '{}': bounds: found {{}} in .* allowed: {{'start_s': 1.5}}"),
        ({"bytes": "many"}, r"line 1\.bytes: found text"),
        ({"bytes": 0}, r"line 1\.bytes: found whole number 0, allowed: 1 or more"),
        ({"sha256": "f" * 63}, r"line 1\.sha256: found text .* allowed: 64 hex digits"),
        ({"sha256": "F" * 64}, r"line 1\.sha256: found text .* allowed: 64 hex digits"),
        ({"prompt_sha256": ""}, r"line 1\.prompt_sha256: found text .* allowed: 64 hex digits"),
        ({"file": "../v.mp4"}, r"line 1\.file: found text .* allowed: a path below"),
        ({"file": "/v.mp4"}, r"line 1\.file: found text .* allowed: a path below"),
        ({"file": "a\0.mp4"}, r"line 1\.file: found text"),
        ({"colour": "red"}, r"line 1\.colour: unknown"),
    ],
)
def test_a_list_of_another_revision_or_form_is_refused_by_name(data, tmp_path, change, named):
    freeze(data)
    path = frozen.list_path(SETTINGS, "VDC", 0)
    first, *rest = path.read_text().splitlines()
    row = json.loads(first)
    path.write_text("\n".join([json.dumps(row | change), *rest]) + "\n")
    with pytest.raises(
        InputError, match=r"VDC-0\.jsonl.*" + named.format(row["clip_id"])
    ) as caught:
        prepare.prepare_lists(SETTINGS, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_list_shorter_than_asked_for_and_an_id_twice_are_refused(data, tmp_path):
    freeze(data)
    more = dataclasses.replace(SETTINGS, clips_per_suite_all=5)
    with pytest.raises(InputError, match=r"clips_per_suite_all: found 5, allowed: at most the 4"):
        prepare.prepare_lists(more, tmp_path / "out")
    fewer = dataclasses.replace(SETTINGS, clips_per_suite_all=3)
    prepare.prepare_lists(fewer, tmp_path / "out")
    assert len(prepare.suite_list(tmp_path / "out", "VDC", 0, 9)) == 3
    path = frozen.list_path(SETTINGS, "VDC", 0)
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(InputError, match="twice"):
        prepare.prepare_lists(SETTINGS, tmp_path / "out")


def test_bounds_of_a_clip_are_in_its_line_and_the_line_is_read_back(tmp_path):
    one = frozen.FrozenClip("a", "v/a.mp4", 3, "1" * 64, "2" * 64, start_s=1.5, end_s=9.0)
    path = hub.put(tmp_path / "list.jsonl", one.line().encode())
    assert set(json.loads(one.line())) == {
        "clip_id", "file", "bytes", "sha256", "prompt_sha256", "start_s", "end_s",
    }  # fmt: skip
    assert frozen.read_frozen(path) == [one]
    hub.put(path, b"\n")
    with pytest.raises(InputError, match="found no clips"):
        frozen.read_frozen(path)
