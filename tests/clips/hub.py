"""Small suites and a training corpus below a folder, laid out as the hub lays them out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from vflash_analysis import config, paths
from vflash_analysis.config import ClipSettings

VDC, LVB, CORPUS = (
    "lmms-lab/VideoDetailCaption",
    "longvideobench/LongVideoBench",
    "lmms-lab/LLaVA-Video-178K",
)
SUBSETS = ("30_60_s_youtube_v0_1", "1_2_m_youtube_v0_1")
SETTINGS: ClipSettings = replace(
    config.load_profile("smoke").clips,
    source="suites",
    benchmarks=("VDC", "LVB"),
    clips_per_suite=3,
    clips_per_suite_all=4,
    sample_seeds=(0, 1),
    training_clips=5,
    validation_clips=2,
    training_list="LLaVA-Video-178K",
    frozen_lists="data/suites/lists",
)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# What may stand where a video should be, and how it is told.
STUBS = [
    (lambda path: path.unlink(), "missing: no such file"),
    (lambda path: path.write_bytes(b""), "empty: the file has 0 bytes"),
    (
        lambda path: path.write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
        ),
        "not_video: a git-lfs pointer",
    ),
    (_to_folder, "not_video: a folder"),
]


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def make_suites(root: Path, n_videos: int = 8, video: bytes | None = None) -> None:
    """VideoDetailCaption (videos v_desc00000…) and LongVideoBench (Long_vid-0…) with their files.

    Args:
        n_videos: of each. video: bytes of every file, followed by the file's name; without it the
            files are no videos, which is enough where nothing is read.
    """
    names = [f"v_Desc000000{i}" for i in range(n_videos)]
    rows = [{"video_name": n, "question": f"What of {n}?", "answer": f"{n}."} for n in names]
    metadata = root / VDC / "data" / "test-00000-of-00001.parquet"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), metadata)
    for name in names:
        put(root / VDC / "Test_Videos" / f"{name}.mp4", (video or b"") + name.encode())
    long = [f"Long_vid-0{i}" for i in range(n_videos)]
    questions = [{"video_id": n, "video_path": f"{n}.mp4", "id": q} for n in long for q in "ab"]
    put(root / LVB / "lvb_val.json", json.dumps(questions).encode())
    for name in long:
        put(root / LVB / "videos" / f"{name}.mp4", (video or b"") + name.encode())


def make_corpus(root: Path, names: list[str], reverse: bool = False) -> None:
    """LLaVA-Video-178K: the names in turn in both subsets, each with a file of its own."""
    for number, subset in enumerate(SUBSETS):
        rows = []
        for name in names[number :: len(SUBSETS)]:
            file = f"liwei_youtube_videos/videos/youtube_video_2024/{name}.mp4"
            turns = [("human", f"<image>\nTell me of {name}."), ("gpt", f"It is {name}.")]
            said = [{"from": who, "value": text} for who, text in turns]
            rows.append({"id": name, "video": file, "conversations": said})
            put(root / CORPUS / subset / file, f"training {name}".encode())
        rows = rows[::-1] if reverse else rows
        put(root / CORPUS / subset / f"{subset}_cap_processed.json", json.dumps(rows).encode())


def copy_descriptions(folder: Path) -> Path:
    """A `data` folder of a test's own with what the project's describes."""
    for name in ("suites", "training", "published"):
        shutil.copytree(paths.DATA / name, folder / name)
    return folder
