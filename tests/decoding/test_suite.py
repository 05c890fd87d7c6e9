"""Notebook 71's decodes: the profile's drafter in every way that is asked for, each other in two."""

import dataclasses
from contextlib import nullcontext

import pytest

from tests.decoding.test_shard import Reader
from tests.results.synthetic import anchor_rows, training_rows
from tests.tiny import tiny_drafter, tiny_target
from vflash_analysis import config
from vflash_analysis.clips.lists import Clip, write_clip_list
from vflash_analysis.decoding import suite
from vflash_analysis.metrics import usable, usable_cycles
from vflash_analysis.records import read_records, write_records
from vflash_analysis.results.playback import pick
from vflash_analysis.results.sources import load_records
from vflash_analysis.schemas import ANCHORS, CYCLES, GENERATIONS, TRAINING

VARIANT = "drafter.num_hidden_layers=1"
SETTINGS = config.load_profile(
    "smoke",
    {
        "design.methods": ["ar", "chain", "tree60", "tree60:nodes=16"],
        "design.variants": [VARIANT],
        "clips.benchmarks": ["VDC", "LVB"],
        "decode.max_new_tokens": 6,
    },
)


def write_list(folder, benchmark, numbers):
    """A suite's clips: the number of each one's frames by its id."""
    clips = []
    for clip_id, number in numbers.items():
        path = folder / f"c{number}.mp4"
        path.write_bytes(bytes([number]) * 8)
        clips.append(Clip(clip_id, benchmark, "suites", str(path), "describe the clip"))
    write_clip_list(folder / f"suite-{benchmark}-0.jsonl", clips)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two suites' lists, two drafters of one tiny target and their records."""
    target = tiny_target(3)
    monkeypatch.setattr(suite, "open_target", lambda *_: target)
    monkeypatch.setattr(suite, "open_reader", lambda settings: nullcontext(Reader()))
    for benchmark, numbers in (("VDC", (0, 1)), ("LVB", (2, 3))):
        write_list(tmp_path, benchmark, {f"c{number}": number for number in numbers})
    for seed, (name, variant) in enumerate((("own", ""), ("other", VARIANT))):
        folder = tmp_path / name
        tiny_drafter(target, seed, 2 - seed).save_pretrained(folder / "drafter")
        for schema, rows in ((ANCHORS, anchor_rows), (TRAINING, training_rows)):
            told = rows(("self_reveal",), (seed,), (4,), (4,)).assign(variant=variant)
            write_records(folder / f"{schema.name}.parquet", told, schema)
    return tmp_path


def decoded(place, *names, **changes):
    drafters = {name: place / name for name in names}
    settings = dataclasses.replace(SETTINGS, design=dataclasses.replace(SETTINGS.design, **changes))
    suite.decode_design(settings, "run", place, place, drafters, place / "out")
    rows = read_records(place / "out" / "generations.parquet", GENERATIONS)
    return rows[~rows["warmup"]]


def test_each_drafter_decodes_as_the_study_says_and_its_records_come_along(place):
    rows = decoded(place, "own", "other")
    assert (rows["run_id"] == "run/" + rows["benchmark"]).all()
    assert set(rows["status"]) == {"ok"}
    ways = {
        "": [("ar", "")],
        "own": [("chain", ""), ("tree60", ""), ("tree60", "nodes=16")],
        "other": [("chain", ""), ("tree60", "")],
    }
    columns = ["clip_id", "benchmark", "drafter", "method", "setting"]
    assert sorted(rows[columns].fillna("").itertuples(index=False, name=None)) == sorted(
        (*clip, drafter, *way)
        for clip in (("c0", "VDC"), ("c2", "LVB"))  # the first of each suite
        for drafter, own in ways.items()
        for way in own
    )
    for schema in (ANCHORS, TRAINING):
        copied = read_records(place / "out" / f"{schema.name}.parquet", schema)
        parts = [
            read_records(place / n / f"{schema.name}.parquet", schema) for n in ("own", "other")
        ]
        assert len(copied) == sum(map(len, parts))
        by_variant = copied.groupby("variant")["drafter_sha256"].unique().map(list).to_dict()
        assert by_variant == {"": ["self_reveal-0-4-4"], VARIANT: ["self_reveal-1-4-4"]}


def test_without_variants_the_profiles_drafter_decodes_alone(place):
    rows = decoded(place, "own")
    assert set(rows["drafter"].dropna()) == {"own"} and len(rows) == 2 * 4


def test_two_suites_may_hold_clips_of_one_id(place, monkeypatch):
    reader = Reader()
    monkeypatch.setattr(suite, "open_reader", lambda settings: nullcontext(reader))
    write_list(place, "LVB", {"c0": 2, "c3": 3})  # c0 is the first of VDC too, another video
    rows = decoded(place, "own")
    assert sorted(zip(rows["benchmark"], rows["clip_id"], rows["method"], strict=True)) == sorted(
        (benchmark, "c0", method)
        for benchmark in ("VDC", "LVB")
        for method in ("ar", "chain", "tree60", "tree60")
    )
    assert rows.groupby("benchmark")["video_sha256"].nunique().to_dict() == {"LVB": 1, "VDC": 1}
    assert rows["video_sha256"].nunique() == 2
    counted = usable(rows)
    cycles = usable_cycles(read_records(place / "out" / "cycles.parquet", CYCLES), counted)
    assert len(counted) == 8 and set(cycles["benchmark"]) == {"VDC", "LVB"}
    texts = counted.loc[counted["method"] == "ar"].set_index("benchmark")["text"]
    records = load_records([place / "out"])
    for benchmark in ("VDC", "LVB"):
        shown = pick(records, "c0", ("ar", "chain", "tree60"), benchmark)
        assert [one.text for one in shown] == [texts[benchmark]] * 3
        assert {one.row["benchmark"] for one in shown} == {benchmark}
    assert reader.names == ["c0", "c2"]
    decoded(place, "own")  # each is known as finished
    assert reader.names == ["c0", "c2"]


def test_what_is_only_compared_with_runs_on_the_first_clips_of_each_suite(place):
    rows = decoded(place, "own", methods=("ar", "lookup"), clips_per_suite=2)
    by_clip = rows.groupby(["benchmark", "clip_id"])["method"].agg(sorted).to_dict()
    assert SETTINGS.decode.comparison_clips == 1 and by_clip == {
        ("VDC", "c0"): ["ar", "lookup"],
        ("VDC", "c1"): ["ar"],
        ("LVB", "c2"): ["ar", "lookup"],
        ("LVB", "c3"): ["ar"],
    }
