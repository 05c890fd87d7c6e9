"""Decoding by number of frames: every clip at every length, resumed, and scored by hand."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.decoding import test_shard
from tests.results.synthetic import generation_row
from tests.tiny import tiny_target
from vflash_analysis import config
from vflash_analysis.clips import pocket
from vflash_analysis.clips.lists import Clip, write_clip_list
from vflash_analysis.decoding import lengths
from vflash_analysis.decoding.shard import NothingDecoded
from vflash_analysis.model.target import Target
from vflash_analysis.records import read_records, write_records
from vflash_analysis.schemas import CYCLES, GENERATIONS, MEASURES, TRAINING
from vflash_analysis.training import pipeline

SETTINGS = config.load_profile(
    "smoke",
    {
        "lengths.num_frames": [2, 3],
        "lengths.methods": ["ar", "chain"],
        "lengths.steps": 1,
        "continuations.max_new_tokens": 6,
        "decode.max_new_tokens": 6,
    },
)


class Reader(test_shard.Reader):
    """Knows at how many frames each clip was read; can be cut off at one reading, or have too
    little memory for some numbers of frames."""

    def __init__(self, stop: tuple[str, int] | None = None, too_many: tuple[int, ...] = ()):
        super().__init__()
        self.stop, self.too_many, self.read = stop, too_many, []

    def read_clip(self, clip, num_frames):
        if (clip.clip_id, num_frames) == self.stop:
            raise KeyboardInterrupt
        if num_frames in self.too_many:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        self.read.append((clip.clip_id, num_frames))
        return super().read_clip(clip, num_frames)


def clips_in(folder: Path, n: int, split: str) -> list[Clip]:
    made = []
    for number in range(n):
        path = folder / f"c{number}.mp4"
        path.write_bytes(bytes([number]) * 8)
        made.append(Clip(f"c{number}", "VDC", split, str(path), "describe the clip"))
    return made


@pytest.fixture
def study(tmp_path):
    training, evaluated = clips_in(tmp_path, 4, "training"), clips_in(tmp_path, 2, "suites")
    target = tiny_target(3)
    return lengths.Study(SETTINGS, target, None, training, evaluated, tmp_path / "study")


@pytest.fixture
def reading(monkeypatch):
    def reading(*given):
        reader = Reader(*given)
        for module in (lengths, pipeline):
            monkeypatch.setattr(module, "open_reader", lambda settings: nullcontext(reader))
        return reader

    return reading


def test_a_study_from_its_texts_to_its_tables_and_a_kill_within_a_length(study, reading):
    reader = reading()
    lengths.collect(study)
    assert reader.read == [("c0", 2), ("c2", 2), ("c1", 3), ("c3", 3)]
    reader = reading()
    lengths.collect(study)
    assert reader.read == []
    folder = lengths.train_drafter(study)
    assert folder == study.folder / "trained" / "drafter"
    log = read_records(study.folder / "trained" / "training.parquet", TRAINING)
    assert set(log["training_clips"]) == {4} and set(log["steps"]) == {1}
    reader = reading(("c1", 3))
    with pytest.raises(KeyboardInterrupt):
        lengths.decode(study, "run")
    assert reader.read == [("c0", 2), ("c1", 2), ("c0", 3)]
    assert not (study.folder / "generations.parquet").exists()
    reader = reading()
    lengths.decode(study, "run")
    assert reader.read == [("c1", 3)]
    rows = read_records(study.folder / "generations.parquet", GENERATIONS)
    measured = rows[~rows["warmup"]]
    keys = ["clip_id", "frames_requested", "method", "drafter", "run_id", "setting"]
    told = measured[keys].fillna("").itertuples(index=False, name=None)
    assert sorted(told) == sorted(
        (clip, count, method, drafter, f"run/frames={count}/VDC", "")
        for clip in ("c0", "c1")
        for count in (2, 3)
        for method, drafter in (("ar", ""), ("chain", "lengths"))
    )
    assert set(measured["status"]) == {"ok"} and set(measured["sample_seed"]) == {0}
    tokens = measured["frames_requested"] * study.target.tokens_per_frame + 1
    assert (measured["video_tokens"] == tokens).all()
    assert measured.loc[measured["method"] == "chain", "identical_to_ar"].all()
    cycles = read_records(study.folder / "cycles.parquet", CYCLES)
    assert set(cycles["run_id"]) == {"run/frames=2/VDC", "run/frames=3/VDC"}
    kept = read_records(study.folder / "training.parquet", TRAINING)
    assert kept.equals(log)
    lengths.score(study, "run")  # clips without a reference have no scores
    assert read_records(study.folder / "measures.parquet", MEASURES).empty


def test_scores_are_words_right_of_words_told(study):
    told = "A small red circle rolls upwards."
    references = {"c0": "A small blue circle and a large red square roll.", "c1": told}
    evaluated = [
        dataclasses.replace(clip, reference=references[clip.clip_id]) for clip in study.evaluated
    ]
    # another suite's clip of the same id, of which nothing was decoded
    evaluated.append(dataclasses.replace(evaluated[0], benchmark="LVB", reference=told))
    evaluated.append(Clip("c2", "VDC", "suites", "", "describe the clip"))  # nothing is known of it
    study = dataclasses.replace(study, evaluated=evaluated)
    common = {"new_tokens": 3, "text": told, "sample_seed": 0}
    rows = [
        generation_row("ar", clip, frames_requested=frames, **common)
        for clip, frames in (("c0", 2), ("c0", 3), ("c1", 2), ("c2", 2))
    ]
    rows += [
        generation_row("chain", "c0", frames_requested=2, **common),
        generation_row("ar", "c0", frames_requested=2, repeat=-1, warmup=True, **common),
        generation_row("ar", "c0", frames_requested=2, repeat=1, **common),
        generation_row("ar", "c1", frames_requested=3, status="failed", reason="bad"),
    ]
    write_records(study.folder / "generations.parquet", rows, GENERATIONS)
    lengths.score(study, "run")
    found = read_records(study.folder / "measures.parquet", MEASURES)
    columns = ["clip_id", "setting", "quantity", "total", "count"]
    assert sorted(found[columns].itertuples(index=False, name=None)) == [
        # of c0's words a size and a shape are right, of two sizes, colours and shapes each; of c1 all
        ("c0", "frames=2", "dynamic_accuracy", 0.0, 1.0),
        ("c0", "frames=2", "static_accuracy", 2.0, 6.0),
        ("c0", "frames=3", "dynamic_accuracy", 0.0, 1.0),
        ("c0", "frames=3", "static_accuracy", 2.0, 6.0),
        ("c1", "frames=2", "dynamic_accuracy", 1.0, 1.0),
        ("c1", "frames=2", "static_accuracy", 3.0, 3.0),
    ]
    assert set(found["run_id"]) == {"run"} and set(found["study"]) == {"lengths"}
    assert set(found["target"]) == {study.target.source} and set(found["benchmark"]) == {"VDC"}


def test_a_length_that_fails_keeps_its_failed_rows_and_the_others_theirs(study, reading, capsys):
    reading(None, (3,))
    lengths.collect(study)
    assert "3 frames: no texts: out_of_memory: CUDA out of memory." in capsys.readouterr().out
    lengths.train_drafter(study)
    log = read_records(study.folder / "trained" / "training.parquet", TRAINING)
    assert set(log["training_clips"]) == {2}  # those read at two frames
    lengths.decode(study, "run")
    assert "3 frames: VDC: none of 2 clips could be decoded" in capsys.readouterr().out
    rows = read_records(study.folder / "generations.parquet", GENERATIONS)
    rows = rows[~rows["warmup"]]
    by_length = rows.groupby("frames_requested")
    assert by_length["status"].unique().map(list).to_dict() == {2: ["ok"], 3: ["failed"]}
    failed = by_length.get_group(3)
    assert len(failed) == 4 and failed["decode_s"].isna().all() and failed["text"].isna().all()
    assert set(failed["reason"]) == {"out_of_memory: CUDA out of memory."}
    cycles = read_records(study.folder / "cycles.parquet", CYCLES)
    assert set(cycles["run_id"]) == {"run/frames=2/VDC"}
    lengths.score(study, "run")
    # read again with memory enough, only what failed is decoded
    reader = reading()
    lengths.decode(study, "run")
    assert reader.read == [("c0", 3), ("c1", 3)]
    again = read_records(study.folder / "generations.parquet", GENERATIONS)
    assert set(again["status"]) == {"ok"}


def test_a_study_of_which_every_length_fails_is_refused_after_its_tables_are_written(
    study, reading
):
    reading()
    lengths.collect(study)
    lengths.train_drafter(study)
    reading(None, (2, 3))
    with pytest.raises(NothingDecoded, match=r"^2 frames: VDC: none of 2 clips could be decoded"):
        lengths.decode(study, "run")
    rows = read_records(study.folder / "generations.parquet", GENERATIONS)
    assert set(rows["frames_requested"]) == {2, 3} and set(rows["status"]) == {"failed"}
    clips = dataclasses.replace(SETTINGS.clips, on_bad_clip="fail")
    strict = dataclasses.replace(
        study, settings=dataclasses.replace(SETTINGS, clips=clips), folder=study.folder / "strict"
    )
    with pytest.raises(torch.OutOfMemoryError):
        lengths.collect(strict)


def test_each_clip_to_learn_from_is_read_at_one_of_the_lengths():
    clips = [Clip(f"c{n}", "VDC", "training", "", "") for n in range(5)]
    assert lengths.by_frames(clips, (2, 9)) == {2: clips[0::2], 9: clips[1::2]}


def opened(settings, tmp_path, monkeypatch) -> tuple[lengths.Study, list[str | None]]:
    """A study of these settings, and the sources of the targets that it opened."""
    sources = []

    def open_target(given: config.Profile, folder: Path) -> Target:
        assert folder == tmp_path / "target"
        sources.append(given.target.source)
        return tiny_target(0)

    monkeypatch.setattr(pipeline, "open_target", open_target)
    return lengths.open_study(settings, tmp_path / "target", tmp_path, tmp_path / "out"), sources


def test_generated_clips_are_written_with_frames_enough(tmp_path, monkeypatch):
    asked = []

    def make_split(split, per_family, folder, least_frames):
        asked.append((split, per_family, folder, least_frames))
        names = [(family, n) for n in range(per_family) for family in pocket.FAMILIES]
        return [Clip(f"{family}-{n}", family, split, "", "") for family, n in names]

    monkeypatch.setattr(pocket, "make_split", make_split)
    own = dataclasses.replace(SETTINGS.lengths, target="folder", num_frames=(2, 40, 7))
    study, sources = opened(dataclasses.replace(SETTINGS, lengths=own), tmp_path, monkeypatch)
    folder = tmp_path / "out" / "clips"
    assert asked == [("drafter_training", 1, folder, 40), ("suites", 1, folder, 40)]
    assert len(study.training) == SETTINGS.lengths.training_clips == 4
    assert [clip.clip_id for clip in study.evaluated] == ["VDC-0"]  # the profile's suites alone
    assert sources == ["folder"] == [study.settings.target.source]
    assert study.at(40) == tmp_path / "out" / "frames-40"


def test_clips_of_real_suites_are_the_first_of_the_profiles_lists(tmp_path, monkeypatch):
    for name, n in (("training", 6), ("suite-VDC-0", 3), ("suite-MLVU-0", 3)):
        clips = [Clip(f"{name}-{i}", "VDC", name, str(tmp_path / "x"), "What?") for i in range(n)]
        write_clip_list(tmp_path / f"{name}.jsonl", clips)
    real = dataclasses.replace(SETTINGS.clips, source="suites", benchmarks=("VDC", "MLVU"))
    study, sources = opened(dataclasses.replace(SETTINGS, clips=real), tmp_path, monkeypatch)
    assert [clip.clip_id for clip in study.training] == [f"training-{i}" for i in range(4)]
    assert [clip.clip_id for clip in study.evaluated] == ["suite-VDC-0-0", "suite-MLVU-0-0"]
    assert sources == ["tiny"]  # the profile's own target
