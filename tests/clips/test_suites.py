"""Suites, draws, clip lists and training corpora in the form of a suite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vflash_analysis import paths
from vflash_analysis.clips.lists import (
    Clip,
    read_clip_list,
    read_video_list,
    write_clip_list,
)
from vflash_analysis.clips.read import ClipError, FrameReader
from vflash_analysis.clips.suites import (
    DESCRIPTION_PROMPT,
    Suite,
    Task,
    by_rank,
    draw_clips,
    load_suite,
    load_suites,
    suite_clips,
    suite_videos,
)
from vflash_analysis.errors import InputError

FOLDER = paths.DATA / "suites"
SUITES = load_suites(FOLDER)


def put(path: Path, content: str | None = None) -> Path:
    """Make a file; its bytes differ by path, and no suite function decodes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if content is not None else f"video {path}")
    return path


def put_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows))


def make_vdc(root: Path) -> None:
    base = root / "lmms-lab" / "VideoDetailCaption"
    rows = [
        {"video_name": name, "question": f"What about {name}?", "answer": f"{name}."}
        for name in ("v_b", "v_a", "v_c")
    ]
    put_rows(base / "data" / "test-00000-of-00001.parquet", rows)
    put(base / "Test_Videos" / "v_a.mp4")
    put(base / "Test_Videos" / "v_b.MP4")
    put(base / "Test_Videos" / "v_c.mkv")


def make_video_mme(root: Path) -> None:
    base = root / "Video-MME"  # without the organisation, under the name both hub ids share
    rows = [
        {"videoID": video, "video_id": "001", "question": f"q{i}"}
        for video in ("xyz", "abc")
        for i in range(3)
    ]
    put_rows(base / "videomme" / "test-00000-of-00001.parquet", rows)
    put(base / "data" / "xyz.mp4")
    put(base / "data" / "abc.mp4")


def make_mvbench(root: Path) -> None:
    base = root / "OpenGVLab" / "MVBench"
    put_rows(base / "json" / "action_sequence.json", [{"video": "A.mp4"}, {"video": "B.mp4"}])
    put_rows(base / "json" / "action_prediction.json", [{"video": "B.mp4"}, {"video": "C.mp4"}])
    put_rows(base / "json" / "state_change.json", [{"video": "D.mp4"}])  # a task not in the list
    for name in "ABC":
        put(base / "star" / "Charades_segment" / f"{name}.mp4")


def make_mlvu(root: Path) -> None:
    base = root / "MLVU" / "MVLU" / "MLVU"
    put_rows(base / "json" / "1_plotQA.json", [{"video": "m1.mp4"}, {"video": "m1.mp4"}])
    put_rows(base / "json" / "2_needle.json", [{"video": "m1.mp4"}, {"video": "n1.mp4"}])
    for name in ("1_plotQA/m1.mp4", "2_needle/m1.mp4", "2_needle/n1.mp4"):
        put(base / "video" / name)


def make_lvb(root: Path) -> None:
    base = root / "longvideobench" / "LongVideoBench"
    rows = [
        {"video_id": video, "id": f"{video}_{i}", "video_path": f"{video}.mp4"}
        for video in ("7", "8")
        for i in range(2)
    ]
    put_rows(base / "lvb_val.json", rows)
    put(base / "videos" / "7.mp4")
    put(base / "videos" / "8.mp4")


MAKERS: dict[str, Callable[[Path], None]] = {
    "VDC": make_vdc,
    "Video-MME": make_video_mme,
    "MVBench": make_mvbench,
    "MLVU": make_mlvu,
    "LVB": make_lvb,
}
IDS = {
    "VDC": ["v_a", "v_b", "v_c"],
    "Video-MME": ["abc", "xyz"],
    "MVBench": [f"star/Charades_segment/{name}" for name in "ABC"],
    "MLVU": ["1_plotQA/m1", "2_needle/m1", "2_needle/n1"],
    "LVB": ["7", "8"],
}


# ---------------------------------------------------------------- descriptions and adapters


def test_the_five_suites_are_described_under_the_names_of_the_records() -> None:
    assert sorted(SUITES) == sorted(MAKERS)
    assert {name: suite.prompt for name, suite in SUITES.items()} == {
        name: "question" if name == "VDC" else "description" for name in MAKERS
    }
    assert all(path.stem == load_suite(path).name for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", MAKERS)
def test_an_adapter_lists_each_video_once_with_the_suites_prompt(name: str, tmp_path: Path) -> None:
    MAKERS[name](tmp_path)
    clips = suite_videos(SUITES[name], tmp_path)
    assert [clip.clip_id for clip in clips] == IDS[name]
    assert all(Path(clip.path).is_file() and Path(clip.path).is_absolute() for clip in clips)
    assert {clip.benchmark for clip in clips} == {name}
    assert {clip.split for clip in clips} == {SUITES[name].split}
    assert len({clip.path for clip in clips}) == len(clips)
    if name == "VDC":
        assert [clip.prompt for clip in clips] == [f"What about {i}?" for i in IDS[name]]
        assert [clip.reference for clip in clips] == [f"{i}." for i in IDS[name]]
    else:
        assert {clip.prompt for clip in clips} == {DESCRIPTION_PROMPT}
        assert {clip.reference for clip in clips} == {None}


def test_an_unset_or_wrong_folder_is_named_with_the_places_looked_in(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        suite_videos(SUITES["Video-MME"], tmp_path)
    for place in ("lmms-lab/Video-MME", "lmms-eval/Video-MME"):
        assert str(tmp_path / place) in str(caught.value)


def test_metadata_that_is_not_as_described_is_named(tmp_path: Path) -> None:
    make_lvb(tmp_path)
    metadata = tmp_path / "longvideobench" / "LongVideoBench" / "lvb_val.json"
    put_rows(metadata, [{"video_id": "7"}])
    with pytest.raises(InputError, match=r"lvb_val\.json, row 0: video_path"):
        suite_videos(SUITES["LVB"], tmp_path)
    metadata.write_text("{")
    with pytest.raises(InputError, match=r"lvb_val\.json"):
        suite_videos(SUITES["LVB"], tmp_path)
    metadata.write_text("[]")
    with pytest.raises(InputError, match="lists no videos"):
        suite_videos(SUITES["LVB"], tmp_path)
    make_vdc(tmp_path)
    parquet_file = next((tmp_path / "lmms-lab").rglob("*.parquet"))
    put_rows(parquet_file, [{"video_name": "v_a", "caption": "no question column"}])
    with pytest.raises(InputError, match="question"):
        suite_videos(SUITES["VDC"], tmp_path)


@pytest.mark.parametrize("file", ["../7.mp4", "a/../../7.mp4", "/7.mp4", "a\0.mp4"])
def test_a_video_outside_the_datasets_folder_is_refused(tmp_path: Path, file: str) -> None:
    make_lvb(tmp_path)
    metadata = tmp_path / "longvideobench" / "LongVideoBench" / "lvb_val.json"
    put_rows(metadata, [{"video_id": "7", "video_path": file}])
    with pytest.raises(InputError, match=r"lvb_val\.json.*video.*found text.*allowed") as caught:
        suite_videos(SUITES["LVB"], tmp_path)
    assert json.dumps(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_pattern_of_folders_that_matches_none_leaves_missing_files(tmp_path: Path) -> None:
    make_lvb(tmp_path)
    (clip, *_) = suite_videos(replace(SUITES["LVB"], videos="part_*"), tmp_path)
    assert clip.path.endswith("/part_*/7.mp4") and not Path(clip.path).exists()


def test_archives_that_were_not_unpacked_are_named(tmp_path: Path) -> None:
    make_video_mme(tmp_path)
    base = tmp_path / "Video-MME"
    (base / "data").rename(base / "elsewhere")
    listed = suite_videos(SUITES["Video-MME"], tmp_path)  # metadata alone are enough for a draw
    assert not Path(listed[0].path).exists()
    put(base / "videos_chunked_01.zip")
    put(base / "videos_chunked_02.zip")
    with pytest.raises(InputError) as caught:
        suite_videos(SUITES["Video-MME"], tmp_path)
    for part in (str(base / "data"), "videos_chunked_01.zip and 1 more", "must be unpacked"):
        assert part in str(caught.value)


def test_a_converted_file_is_found_under_its_new_extension(tmp_path: Path) -> None:
    make_lvb(tmp_path)
    base = tmp_path / "longvideobench" / "LongVideoBench"
    (base / "videos" / "7.mp4").rename(base / "videos" / "7.mkv")
    put_rows(
        base / "lvb_val.json",
        [{"video_id": "7", "video_path": "7.mp4"}, {"video_id": "8", "video_path": "8.webm"}],
    )
    found = [Path(clip.path).name for clip in suite_videos(SUITES["LVB"], tmp_path)]
    assert found == ["7.mkv", "8.mp4"]
    # a name may hold dots that begin no extension
    put_rows(base / "lvb_val.json", [{"video_id": "a.b", "video_path": "a.b"}])
    put(base / "videos" / "a.b.mp4")
    assert suite_videos(SUITES["LVB"], tmp_path)[0].path.endswith("videos/a.b.mp4")


# ---------------------------------------------------------------- MVBench's two revisions

STAR = {"video": "Z.mp4", "question": "?", "start": 1.5, "end": 4}


def make_revision(root: Path, revision: str, rows: list[dict]) -> Suite:
    """One task of MVBench on a revision, with the files of `rows`."""
    base = root / "OpenGVLab" / "MVBench"
    put_rows(base / "json" / "action_sequence.json", rows)
    folder = "star/Charades_segment" if revision == "video" else "video/star/Charades_v1_480"
    for row in rows:
        put(base / folder / row["video"])
    tasks = SUITES["MVBench"].tasks
    assert tasks is not None
    return replace(SUITES["MVBench"], revision=revision, tasks=tasks[:1])


def test_main_lists_one_clip_per_stretch(tmp_path: Path) -> None:
    rows = [STAR, STAR | {"question": "Again?"}, STAR | {"start": 0}]
    suite = make_revision(tmp_path, "main", rows)
    clips = suite_videos(suite, tmp_path)
    ids = [f"star/Charades_v1_480/Z_{bounds}" for bounds in ("0_4", "1.5_4")]
    assert [clip.clip_id for clip in clips] == ids
    assert [(clip.start_s, clip.end_s) for clip in clips] == [(0.0, 4.0), (1.5, 4.0)]
    assert {clip.path for clip in clips} == {
        str(tmp_path / "OpenGVLab/MVBench/video/star/Charades_v1_480/Z.mp4")
    }


@pytest.mark.parametrize("video", ["Z_1.5_4.mp4", "Z.mp4"])
def test_a_cut_clip_has_no_bounds_however_its_metadata_names_it(tmp_path: Path, video: str) -> None:
    suite = make_revision(tmp_path, "video", [STAR | {"video": "Z_1.5_4.mp4"}])
    metadata = tmp_path / "OpenGVLab/MVBench/json/action_sequence.json"
    put_rows(metadata, [STAR | {"video": video}])
    (clip,) = suite_videos(suite, tmp_path)
    assert clip.clip_id == "star/Charades_segment/Z_1.5_4" and Path(clip.path).is_file()
    assert clip.start_s is clip.end_s is None


@pytest.mark.parametrize(("asked", "there"), [("video", "main"), ("main", "video")])
def test_the_other_revision_is_named_with_what_is_allowed(
    tmp_path: Path, asked: str, there: str
) -> None:
    suite = replace(make_revision(tmp_path, there, [STAR]), revision=asked)
    with pytest.raises(InputError) as caught:
        suite_videos(suite, tmp_path)
    for part in ("Charades_segment", "Charades_v1_480", f"revision: {there} in MVBench.yaml"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_of_the_cut_revision_are_refused_on_main(tmp_path: Path) -> None:
    suite = make_revision(tmp_path, "main", [{"video": "Z_1.5_4.mp4", "question": "?"}])
    with pytest.raises(
        InputError, match=r"action_sequence\.json, row 0: start is None and end None"
    ):
        suite_videos(suite, tmp_path)
    metadata = tmp_path / "OpenGVLab/MVBench/json/action_sequence.json"
    put_rows(metadata, [STAR | {"end": "4"}])
    with pytest.raises(InputError, match=r"row 0: end: found text .4., allowed: a number"):
        suite_videos(suite, tmp_path)


def test_a_withdrawn_task_a_packed_source_and_an_unknown_revision_are_named(tmp_path: Path) -> None:
    suite = make_revision(tmp_path, "main", [STAR])
    base = tmp_path / "OpenGVLab" / "MVBench"
    pose = replace(suite, tasks=(Task("fine_grained_pose", "nturgbd_convert"),))
    put_rows(base / "json" / "fine_grained_pose.json", [{"video": "S001.avi", "question": "?"}])
    with pytest.raises(InputError, match=r"task fine_grained_pose: .*nturgbd.* withdrawn from"):
        suite_videos(pose, tmp_path)
    put(base / "video" / "nturgbd" / "S001.avi")  # as its owners give it
    assert suite_videos(pose, tmp_path)[0].clip_id == "nturgbd/S001"
    scene = replace(suite, tasks=(Task("scene_transition", "scene_qa/video"),))
    put(base / "video" / "scene_qa.zip")
    with pytest.raises(InputError, match=r"scene_qa\.zip must be unpacked beside it"):
        suite_videos(scene, tmp_path)
    with pytest.raises(InputError, match=r"revision is 'v2'; allowed are 'video', .* and 'main'"):
        suite_videos(replace(suite, revision="v2"), tmp_path)
    with pytest.raises(InputError, match=r"object_shuffle\.json: no such file"):
        put(base / "video" / "perception" / "videos" / "1.mp4")
        suite_videos(replace(suite, tasks=(Task("object_shuffle", "perception/videos"),)), tmp_path)


def test_all_twenty_tasks_stand_in_the_file_once() -> None:
    row = yaml.safe_load((FOLDER / "MVBench.yaml").read_text())
    names = [task["name"] for task in row["tasks"] + row["other_tasks"]]
    assert len(set(names)) == len(names) == 20
    folders = {task["folder"] for task in row["tasks"] + row["other_tasks"]}
    assert {renamed["folder"] for renamed in row["main_folders"]} <= folders
    assert set(row["withdrawn"]) <= set(names)
    assert [task["name"] for task in row["tasks"]] == ["action_sequence", "action_prediction"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"adapter": "webdataset"}, "adapter"),
        ({"prompt": "multiple_choice"}, "prompt"),
        ({"extensions": ".mp4"}, "extensions"),
        ({"licence": None, "colour": "red"}, "colour"),
        ({"hub_id": ...}, "hub_id"),
        ({"hub_id": "/org/name"}, "hub_id.*below"),
        ({"split": "a\0"}, "split.*without NUL"),
        *(
            ({key: text}, rf"VDC\.yaml\.{key}: found text .*, allowed: .* below")
            for key, texts in {
                "metadata": ("", " ", ".", "/x/*.json", "../*.json", "a**.json"),
                "videos": ("", "/videos", "x/../../videos"),
                "archives": ("/x.zip", "../x.zip"),
            }.items()
            for text in texts
        ),
    ],
)
def test_a_description_with_a_wrong_key_is_refused_by_name(
    tmp_path: Path, change: dict, named: str
) -> None:
    row = yaml.safe_load((FOLDER / "VDC.yaml").read_text())
    row = {key: value for key, value in {**row, **change}.items() if value is not ...}
    path = tmp_path / "VDC.yaml"
    path.write_text(yaml.safe_dump(row))
    with pytest.raises(InputError, match=named):
        load_suite(path)


def test_a_folder_without_descriptions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no suite"):
        load_suites(tmp_path)


# ---------------------------------------------------------------- draws and missing clips


def draw_ids(ids: Iterable[str], name: str, seed: int, n_clips: int) -> list[str]:
    """The drawn ids of clips that are a video each."""
    clips = [Clip(clip_id, name, "test", f"/videos/{clip_id}", "?") for clip_id in ids]
    return [clip.clip_id for clip in draw_clips(clips, name, seed, n_clips)]


def test_a_draw_is_the_lowest_hashes_and_nothing_else() -> None:
    ids = [f"clip{i}" for i in range(40)]
    by_hand = sorted(ids, key=lambda i: hashlib.sha256(f"VDC/2/{i}".encode()).hexdigest())
    assert draw_ids(reversed(ids), "VDC", 2, 7) == by_hand[:7]
    # Pinned: a change here changes the clips of every finished run.
    assert draw_ids(["a", "b", "c", "d", "e"], "VDC", 0, 3) == ["a", "b", "d"]


@given(
    ids=st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=30),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_draws_are_distinct_ordered_and_nested(
    ids: set[str], seed: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, len(ids)))
    drawn = draw_ids(ids, "LVB", seed, n)
    assert len(set(drawn)) == n and set(drawn) <= ids
    assert drawn == draw_ids(sorted(ids, reverse=True) * 2, "LVB", seed, n)
    assert draw_ids(ids, "LVB", seed, len(ids))[:n] == drawn


def test_two_stretches_of_a_video_are_not_both_drawn() -> None:
    """MVBench's main revision cuts several clips from one video; 50 clips are 50 videos."""
    clips = [
        Clip(f"{video}@{start}", "MVBench", "test", f"/videos/{video}", "?", start_s=start)
        for video in "abcd"
        for start in (0.0, 5.0, 9.0)
    ]
    drawn = draw_clips(clips, "MVBench", 0, 4)
    assert sorted(clip.path for clip in drawn) == [f"/videos/{video}" for video in "abcd"]
    ranked = by_rank(clips, "MVBench", 0)
    assert drawn[0] == ranked[0]
    assert all(next(c for c in ranked if c.path == one.path) == one for one in drawn)
    with pytest.raises(InputError, match=r"5 clips asked for; it has 4 videos, .* 1 to 4"):
        draw_clips(clips, "MVBench", 0, 5)


def test_seeds_and_suites_draw_differently() -> None:
    ids = [str(i) for i in range(500)]
    draws = {
        (name, seed): tuple(draw_ids(ids, name, seed, 50))
        for name in ("VDC", "LVB")
        for seed in range(3)
    }
    assert len(set(draws.values())) == 6


@pytest.mark.parametrize("n_clips", [0, -1, 4])
def test_a_draw_larger_than_the_suite_is_refused(n_clips: int) -> None:
    with pytest.raises(InputError, match="1 to 3"):
        draw_ids(["a", "b", "c"], "VDC", 0, n_clips)


def test_a_missing_clip_keeps_its_place_and_is_reported_by_name(tmp_path: Path) -> None:
    make_vdc(tmp_path)
    whole = suite_clips(SUITES["VDC"], tmp_path, sample_seed=1, n_clips=2)
    Path(whole[0].path).unlink()
    clips = suite_clips(SUITES["VDC"], tmp_path, sample_seed=1, n_clips=2)
    assert [clip.clip_id for clip in clips] == [clip.clip_id for clip in whole]
    with FrameReader(20) as reader, pytest.raises(ClipError) as caught:
        reader.read(clips[0].path, 4)
    assert caught.value.reason == "missing"


# ---------------------------------------------------------------- clip lists


def example(tmp_path: Path) -> list[Clip]:
    return [
        Clip("007", "VDC", "test", str(tmp_path / "videos" / "é 7.mp4"), "Line one\u2028two?"),
        Clip(
            "NA",
            "VDC",
            "test",
            "/elsewhere/none.mp4",
            'A "quoted" prompt',
            "An answer.",
            {"n": [1, 2]},
        ),
        Clip("1e3", "LVB", "validation", str(tmp_path / "x.mp4"), "?", None, None),
        Clip("cut", "MVBench", "train", str(tmp_path / "y.mp4"), "?", start_s=1.5, end_s=2.5),
        Clip("images", "MVBench", "train", str(tmp_path / "f"), "?", frames_per_s=3.0),
    ]


def test_a_clip_list_comes_back_as_it_was(tmp_path: Path) -> None:
    clips = example(tmp_path)
    path = write_clip_list(tmp_path / "list.jsonl", clips)
    assert read_clip_list(path) == clips
    assert [p.name for p in tmp_path.iterdir()] == ["list.jsonl"]  # no temporary file


def test_a_list_moves_with_its_videos(tmp_path: Path) -> None:
    write_clip_list(
        tmp_path / "a" / "list.jsonl", [Clip("1", "VDC", "t", str(tmp_path / "a/v/1.mp4"), "?")]
    )
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_clip_list(tmp_path / "b" / "list.jsonl")[0].path == str(tmp_path / "b/v/1.mp4")


LINE = '{"clip_id":"x","benchmark":"V","split":"t","path":"p","prompt":"q"}'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: not readable as JSON"),
        ("[" * 100_000, "line 2: not readable as JSON"),
        ("9" * 5000, "line 2: not readable as JSON"),
        (LINE.replace('"q"', r'"\ud800"'), "line 2: not readable as JSON.*surrogates"),
        (LINE.replace('"q"', r'"\ud83d\ude00\ude00"'), "line 2: not readable as JSON.*surrogates"),
        (LINE.replace('"p"', r'"a\u0000"'), r"line 2: path: found text .* without NUL"),
        (LINE.replace("}", ',"start_s":1e999}'), "line 2: start_s: .* a finite number"),
        (LINE.replace("}", f',"end_s":{"9" * 400}}}'), "line 2: end_s: .* a finite number"),
        (LINE.replace("}", ',"end_s":true}'), "line 2: end_s: found true/false true"),
        ("[1]", r"line 2: found list \[1\], allowed: one object a line"),
        ('{"clip_id": "x"}', "needed"),
        (
            '{"clip_id":"x","benchmark":"V","split":"t","path":"p","prompt":"q","colour":1}',
            "colour",
        ),
        (
            '{"clip_id":7,"benchmark":"V","split":"t","path":"p","prompt":"q"}',
            "clip_id: found whole number 7",
        ),
        (
            '{"clip_id":"x","benchmark":"V","split":"t","path":"p","prompt":""}',
            r"prompt: found text \"\", allowed: text that is not empty",
        ),
        ('{"clip_id":"x","benchmark":"V","split":"t","path":"p","prompt":"q","facts":[]}', "facts"),
        (
            '{"clip_id":"x","benchmark":"V","split":"t","path":"p","prompt":"q","start_s":"1"}',
            r"start_s: found text \"1\", allowed: a number",
        ),
        (
            '{"clip_id":"x","benchmark":"V","split":"t","path":"p","prompt":"q","end_s":NaN}',
            "end_s: found nan, allowed: a finite number",
        ),
        (
            '{"clip_id":"007","benchmark":"VDC","split":"t","path":"p","prompt":"q"}',
            "'007' occurs twice",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = write_clip_list(tmp_path / "list.jsonl", example(tmp_path)[:1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match=named) as caught:
        read_clip_list(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_whole_pairs_are_read_and_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = put(tmp_path / "list.jsonl", LINE.replace('"q"', r'"\ud83d\ude00"') + "\n")
    assert read_clip_list(path)[0].prompt == "\U0001f600"
    path.write_bytes(path.read_bytes() + b"\n\xff\n")
    with pytest.raises(InputError, match=r"list\.jsonl, line 3: found byte 0xff, allowed: UTF-8"):
        read_clip_list(path)


def test_a_list_with_one_id_twice_is_not_written(tmp_path: Path) -> None:
    clips = example(tmp_path)
    with pytest.raises(InputError, match="'007' occurs twice"):
        write_clip_list(tmp_path / "list.jsonl", [*clips, clips[0]])
    assert not (tmp_path / "list.jsonl").exists()


def test_any_jsonl_of_video_and_prompt_is_read(tmp_path: Path) -> None:
    rows = [
        {"video": "sub/one.mp4", "prompt": "Describe.", "source": "ignored"},
        {"video": "/abs/two.mkv", "prompt": "And then?", "id": "second", "reference": "Yes."},
        {"video": "v.mp4", "prompt": "?", "id": "cut", "start_s": 2, "end_s": 3.5},
        {"video": "images", "prompt": "?", "frames_per_s": 3},
    ]
    path = put(tmp_path / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows) + "\n")
    clips = read_video_list(path)
    assert clips == [
        Clip("sub/one", "custom", "training", str(tmp_path / "sub/one.mp4"), "Describe."),
        Clip("second", "custom", "training", "/abs/two.mkv", "And then?", "Yes."),
        Clip("cut", "custom", "training", str(tmp_path / "v.mp4"), "?", start_s=2.0, end_s=3.5),
        Clip("images", "custom", "training", str(tmp_path / "images"), "?", frames_per_s=3.0),
    ]
    put(path, '{"video": "a.mp4"}\n')
    with pytest.raises(InputError, match=r"line 1: prompt: found null"):
        read_video_list(path)
    put(path, '{"video": "a.mp4", "prompt": "?", "start_s": "soon"}\n')
    with pytest.raises(InputError, match=r"line 1: start_s: found text .soon., allowed: a number"):
        read_video_list(path)
    put(path, '{"video": "a.mp4", "prompt": "?"}\n{"video": "a.mkv", "prompt": "?"}\n')
    with pytest.raises(InputError, match="'a' occurs twice"):
        read_video_list(path)
    with pytest.raises(InputError, match="no such file"):
        read_video_list(tmp_path / "absent.jsonl")


# ---------------------------------------------------------------- other layouts


def test_a_suite_is_one_row_and_one_function(tmp_path: Path) -> None:
    """The description alone moves a suite to another folder layout."""
    suite: Suite = replace(
        SUITES["LVB"], metadata="meta/val.json", videos="clips", prompt="description"
    )
    base = tmp_path / "longvideobench" / "LongVideoBench"
    put_rows(base / "meta" / "val.json", [{"video_id": "7", "video_path": "7"}])
    put(base / "clips" / "7.mkv")
    assert suite_videos(suite, tmp_path)[0].path == str(base / "clips" / "7.mkv")


def test_a_conversation_corpus_gives_its_first_request_per_video(tmp_path: Path) -> None:
    corpus = load_suite(paths.DATA / "training" / "LLaVA-Video-178K.yaml")
    base = tmp_path / "lmms-lab" / "LLaVA-Video-178K"

    def row(video: str, asked: str) -> dict:
        said = [("human", asked), ("gpt", f"{video} is shown."), ("human", "More?"), ("gpt", "No.")]
        turns = [{"from": who, "value": text} for who, text in said]
        return {"id": video, "data_source": "x", "video": video, "conversations": turns}

    folder = "liwei_youtube_videos/videos/youtube_video_2024"
    rows = [
        row(f"{folder}/ytb_a.mp4", "<image>\nTell me."),
        row(f"{folder}/ytb_b.mkv", "Describe."),
    ]
    first = base / "30_60_s_youtube_v0_1" / "30_60_s_youtube_v0_1_cap_processed.json"
    put_rows(first, rows)
    put_rows(base / "30_60_s_youtube_v0_1" / "30_60_s_youtube_oe_v0_1_qa_processed.json", rows)
    with pytest.raises(InputError, match=r"1_2_m_youtube_v0_1/\*cap\*\.json was not found"):
        suite_videos(corpus, tmp_path)
    second = base / "1_2_m_youtube_v0_1" / "1_2_m_youtube_v0_1_cap_processed.json"
    put_rows(second, [row(f"{folder}/ytb_c.mp4", "<video>\nWhat happens?")] * 2)
    put(base / "30_60_s_youtube_v0_1" / folder / "ytb_a.mp4")
    clips = suite_videos(corpus, tmp_path)
    assert [(clip.clip_id, clip.prompt, clip.reference) for clip in clips] == [
        (f"1_2_m_youtube_v0_1/{folder}/ytb_c", "What happens?", f"{folder}/ytb_c.mp4 is shown."),
        (f"30_60_s_youtube_v0_1/{folder}/ytb_a", "Tell me.", f"{folder}/ytb_a.mp4 is shown."),
        (f"30_60_s_youtube_v0_1/{folder}/ytb_b", "Describe.", f"{folder}/ytb_b.mkv is shown."),
    ]
    assert [Path(clip.path).is_file() for clip in clips] == [False, True, False]
    put_rows(second, [{"video": "x.mp4", "conversations": [{"from": "human", "value": "?"}]}])
    with pytest.raises(InputError, match=r"processed\.json, row 0: conversations"):
        suite_videos(corpus, tmp_path)
