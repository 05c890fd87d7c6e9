"""What data is there: counts, commits, what stops a run, and the commands that bring the rest."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.clips import hub
from tests.clips.hub import STUBS
from tests.hub_notes import note_commit
from vflash_analysis import paths
from vflash_analysis.clips import frozen, inventory
from vflash_analysis.clips.inventory import Card, Download
from vflash_analysis.clips.suites import draw_clips, load_suite, suite_videos

SETTINGS = hub.SETTINGS
COMMIT = "7b18ca2" + 33 * "0"
NAMES = [f"ytb_Training{i:03d}" for i in range(9)]


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "DATA", hub.copy_descriptions(tmp_path / "data"))
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path / "videos"))
    hub.make_suites(tmp_path / "videos")
    hub.make_corpus(tmp_path / "videos", NAMES)
    return tmp_path / "videos"


def stock(data: Path, **changes) -> dict[str, inventory.Holding]:
    settings = dataclasses.replace(SETTINGS, **changes)
    return {holding.name: holding for holding in inventory.take_stock(settings, data)}


def counts(holding: inventory.Holding) -> tuple[int, int, int, int]:
    return holding.listed, holding.found, holding.drawn, holding.drawn_found


# ---------------------------------------------------------------- what is there


def test_all_that_is_there_is_counted_and_nothing_is_at_fault(data):
    found = stock(data)
    assert list(found) == ["VDC", "LVB", "LLaVA-Video-178K"]
    assert not any(holding.faults for holding in found.values())
    assert counts(found["LLaVA-Video-178K"]) == (9, 9, 7, 7)
    listed, there, drawn, drawn_there = counts(found["LVB"])
    assert (listed, there) == (8, 8) and drawn == drawn_there
    assert 4 <= drawn <= 8  # two seeds of four clips, which may share some
    assert found["LVB"].complete and not found["VDC"].complete  # 499 videos are expected


def test_missing_drawn_videos_are_a_gap_under_skip_and_a_fault_under_fail_or_when_all_lack(data):
    videos = suite_videos(load_suite(paths.DATA / "suites" / "LVB.yaml"), data)
    name = draw_clips(videos, "LVB", 0, 4)[0].clip_id
    file = data / hub.LVB / "videos" / f"{name}.mp4"
    file.unlink()
    skip, fail = stock(data)["LVB"], stock(data, on_bad_clip="fail")["LVB"]
    told = f"{skip.drawn - 1} of {skip.drawn} drawn videos are there, first not: {file}: missing: no such file"
    assert skip.gaps == (f"LVB: {told}",) and skip.faults == ()
    assert fail.faults == (f"LVB: {told}",) and fail.gaps == ()
    for video in (data / hub.LVB / "videos").iterdir():
        video.unlink()
    assert f"0 of {skip.drawn} drawn videos" in stock(data)["LVB"].faults[0]


def test_drawn_clips_are_those_of_a_frozen_list(data):
    settings = dataclasses.replace(
        SETTINGS, sample_seeds=(0,), clips_per_suite=1, clips_per_suite_all=1
    )
    path = frozen.list_path(settings, "LVB", 0)
    videos = suite_videos(load_suite(paths.DATA / "suites" / "LVB.yaml"), data)
    last = draw_clips(videos, "LVB", 0, len(videos))[-1]  # which no draw of one clip would take
    prompt = frozen.prompt_sha256(last.prompt)
    file = f"videos/{Path(last.path).name}"
    one = frozen.FrozenClip(last.clip_id, file, 1, "0" * 64, prompt)
    hub.put(path, one.line().encode())
    Path(last.path).unlink()
    (holding,) = [h for h in inventory.take_stock(settings, data) if h.name == "LVB"]
    assert (holding.drawn, holding.drawn_found) == (1, 0)
    wrong = dataclasses.replace(one, prompt_sha256="0" * 64)
    hub.put(path, wrong.line().encode())
    (holding,) = [h for h in inventory.take_stock(settings, data) if h.name == "LVB"]
    assert len(holding.faults) == 1 and "prompt_sha256: found" in holding.faults[0]


def test_absent_and_gated_datasets_are_named_where_they_were_sought(data):
    (data / hub.LVB / "lvb_val.json").unlink()
    fault = stock(data)["LVB"].faults[0]
    assert str(data / "LongVideoBench") in fault and "form has been accepted" in fault
    assert stock(data)["VDC"].faults == () and "\n" not in fault


@pytest.mark.parametrize("damage", [b"\xff", b"[", b"[1]", b"[]", b"[" * 100_000])
def test_a_damaged_file_of_a_gated_dataset_has_nothing_to_do_with_its_form(data, damage):
    (data / hub.LVB / "lvb_val.json").write_bytes(damage)
    found = stock(data)["LVB"]
    assert len(found.faults) == 1 and "\n" not in found.faults[0]
    assert "lvb_val.json" in found.faults[0] and "form" not in found.faults[0]
    assert found.folder == data / hub.LVB


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("", "VFLASH_DATA: found '{data}', allowed: a folder that is there"),
        ("videos", "LVB: 0 of 8 drawn videos are there, first not: {data}/{lvb}/videos/"),
        (
            "videos/Long_vid-00.mp4",
            "LVB: 7 of 8 drawn videos are there, first not: {data}/{lvb}/videos/Long_vid-00.mp4: "
            "missing: no such file",
        ),
        ("lvb_val.json", "LVB: lvb_val.json of {lvb} was not found; looked for {data}/{lvb}/"),
    ],
)
def test_links_that_lead_to_themselves_are_a_line(data, place, told):
    path = (data / hub.LVB / place) if place else data
    path.rename(path.with_name("moved"))
    path.symlink_to(path.name)
    settings = replace(
        SETTINGS,
        benchmarks=("LVB",),
        on_bad_clip="fail",
        clips_per_suite=8,  # all that there are
        clips_per_suite_all=8,
    )
    (line,) = inventory.refusals(settings)
    assert line.startswith(told.format(data=data, lvb=hub.LVB)) and "\n" not in line
    assert inventory.free_gb(data) > 0


@pytest.mark.parametrize("spoil", [stub for stub, _ in STUBS])
def test_a_stub_is_not_counted_as_a_video(data, spoil):
    file = data / hub.LVB / "videos" / "Long_vid-00.mp4"
    spoil(file)
    settings = {"clips_per_suite": 8, "clips_per_suite_all": 8, "on_bad_clip": "fail"}
    found = stock(data, **settings)["LVB"]
    assert counts(found) == (8, 7, 8, 7) and str(file) in found.faults[0]


def test_a_folder_that_is_not_there_is_one_line(data, monkeypatch):
    monkeypatch.setenv("VFLASH_DATA", str(data / "none"))
    told = [f"VFLASH_DATA: found '{data / 'none'}', allowed: a folder that is there"]
    assert inventory.refusals(SETTINGS) == told
    faults = {
        fault for one in inventory.take_stock(SETTINGS, data / "none") for fault in one.faults
    }
    assert faults == set(told)


def test_too_few_clips_for_a_draw_are_a_fault(data):
    found = stock(data, clips_per_suite_all=9, training_clips=8)
    assert "9 clips asked for; it has 8" in found["VDC"].faults[0]
    assert "found 9 clips in LLaVA-Video-178K" in found["LLaVA-Video-178K"].faults[0]


# ---------------------------------------------------------------- revisions


def test_files_of_another_commit_than_the_described_one_are_a_fault(data):
    description = paths.DATA / "suites" / "LVB.yaml"
    text = description.read_text()
    description.write_text(text.replace("revision: null", "revision: 7b18ca2"))
    assert stock(data)["LVB"].faults == ()  # nothing tells
    note_commit(data / hub.LVB, "lvb_val.json", COMMIT)
    found = stock(data)["LVB"]
    assert found.faults == () and found.commits == (COMMIT,)
    note_commit(data / hub.LVB, "videos.tar.part.aa", 40 * "a")
    assert stock(data)["LVB"].faults == ()  # not there any more: nothing hangs on it
    hub.put(data / hub.LVB / "videos.tar.part.aa", b"x")
    assert stock(data)["LVB"].faults == (
        f"LVB: files below {data / hub.LVB} are of commit {40 * 'a'}, allowed: 7b18ca2",
    )
    description.write_text(text)
    assert "of 2 commits of the hub" in stock(data)["LVB"].gaps[0]


# ---------------------------------------------------------------- lists of one's own


def test_a_list_made_by_hand_is_counted_or_named(data):
    rows = [f'{{"video": "own/Mine{i:04d}.mp4", "prompt": "?"}}' for i in range(8)]
    hub.put(data / "mine.jsonl", "\n".join(rows).encode())
    hub.put(data / "own" / "Mine0003.mp4", b"x")
    found = stock(data, training_list="mine.jsonl")["mine.jsonl"]
    assert (found.listed, found.found, found.drawn) == (8, 1, 7)
    assert "no such file" in stock(data, training_list="no.jsonl")["no.jsonl"].faults[0]
    assert "found null" in stock(data, training_list=None)["training"].faults[0]


# ---------------------------------------------------------------- commands


def test_commands_download_the_revision_asked_for_to_where_the_adapter_looks():
    download = Download(("data/*", "a b.zip"), ("unzip -n 'a b.zip'", "rm x"))
    card = Card("X", "org/name", "video", "none", True, None, None, download)
    form, fetch, first, second = inventory.commands(card, Path("/videos of/mine"))
    assert form.startswith("# ") and "https://huggingface.co/datasets/org/name" in form
    assert shlex.split(fetch) == [
        "hf", "download", "org/name", "--repo-type", "dataset", "--revision", "video",
        "--include", "data/*", "--include", "a b.zip", "--local-dir", "/videos of/mine/org/name",
    ]  # fmt: skip
    assert first == "(cd '/videos of/mine/org/name' && unzip -n 'a b.zip')"
    assert second.endswith("&& rm x)")
    open_card = dataclasses.replace(card, gated=False, revision=None, download=Download(None, None))
    assert inventory.commands(open_card, None) == [
        'hf download org/name --repo-type dataset --local-dir "$VFLASH_DATA"/org/name'
    ]


@pytest.mark.parametrize("name", ["a b", "a$HOME", 'a"b', "a'b", "a`id`", "a;b", "a\\b"])
def test_a_shell_reads_a_folder_of_any_name(name):
    download = Download(None, ("true",))
    card = Card("X", "org/name", None, "none", False, None, None, download)
    fetch, unpack = inventory.commands(card, Path("/x") / name)
    assert shlex.split(fetch)[-1] == f"/x/{name}/org/name"
    assert shlex.split(unpack)[1] == f"/x/{name}/org/name"


def test_commands_fit_the_packing_and_the_folder_that_are_there(data):
    folder = data / "MLVU_dev"  # as whoever left out the organisation has it
    (folder / "mlvu").mkdir(parents=True)
    settings = replace(SETTINGS, benchmarks=("MLVU",))
    rows = [{"video_name": f"{i}.mp4"} for i in range(4)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "mlvu" / "test-00000-of-00001.parquet")
    archive = hub.put(folder / "video_part_1.zip", b"packed")
    holding = inventory.take_stock(settings, data)[0]
    assert "video_part_1.zip must be unpacked" in holding.faults[0] and len(holding.faults) == 1
    assert "form" not in holding.faults[0]
    fetch, unpack = inventory.as_row(holding, data)["commands"]
    assert shlex.split(fetch)[:3] == ["hf", "download", "sy1998/MLVU_dev"]
    assert f"--local-dir {folder}" in fetch and "video_part_*.zip" in fetch
    assert unpack.startswith(f"(cd {folder} && ") and "unzip" in unpack
    archive.unlink()
    for packed in folder.glob("mlvu/*"):
        packed.unlink()
    holding = inventory.take_stock(settings, data)[0]
    lines = inventory.as_row(holding, data)["commands"]  # nothing is there: the suite's own
    assert "MLVU/MVLU" in lines[0] and "form has been accepted" in holding.faults[0]


@pytest.mark.parametrize("folder", ["suites", "training"])
def test_every_description_has_a_card_whose_commands_a_shell_reads(folder):
    files = sorted((paths.DATA / folder).glob("*.yaml"))
    assert files
    for path in files:
        card = inventory.load_card(path)
        assert card.name == path.stem and card.licence
        for line in inventory.commands(card, None):
            subprocess.run(["bash", "-n", "-c", line], check=True, timeout=20)


def test_archives_unpack_to_where_the_corpus_is_read(tmp_path):
    """The unpack command of the corpus, run on small archives with a space in the folder's name."""
    root = tmp_path / "my videos"
    hub.make_corpus(root, NAMES[:4])
    for subset in hub.SUBSETS:
        folder = root / hub.CORPUS / subset
        archive = f"{subset}_videos_1.tar.gz"
        subprocess.run(["tar", "-czf", archive, "liwei_youtube_videos"], cwd=folder, check=True)
        subprocess.run(["rm", "-r", "liwei_youtube_videos"], cwd=folder, check=True)
    card = inventory.load_card(paths.DATA / "training" / "LLaVA-Video-178K.yaml")
    settings = dataclasses.replace(SETTINGS, training_clips=2, validation_clips=2)
    assert inventory.take_stock(settings, root)[-1].found == 0
    subprocess.run(["bash", "-e", "-c", inventory.commands(card, root)[-1]], check=True, timeout=20)
    assert counts(inventory.take_stock(settings, root)[-1]) == (4, 4, 4, 4)


def test_the_disk_line_adds_up_what_is_missing(tmp_path):
    def holding(name: str, size: int | None, faults: tuple[str, ...]) -> inventory.Holding:
        card = Card(name, "org/x", None, "none", False, size, None, Download(None, None))
        return inventory.Holding(name, card, faults=faults)

    some = [holding("A", 10**10, ("gone",)), holding("B", 5, ()), holding("C", None, ("gone",))]
    line = inventory.disk_line(some, tmp_path / "not" / "there" / "yet")
    assert line.startswith("to download 10 GB, and C of unknown size; ") and "; free " in line


def test_looking_loads_no_torch():
    code = (
        "import sys; from vflash_analysis.clips import inventory; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'av', 'decord')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
