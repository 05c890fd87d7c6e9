"""Notebook 71's decodes: the profile's drafter in every way that is asked for, each other in two."""

from contextlib import nullcontext

import pytest

from tests.decoding.test_shard import Reader
from tests.results.synthetic import anchor_rows, training_rows
from tests.tiny import tiny_drafter, tiny_target
from vflash_analysis import config
from vflash_analysis.clips.lists import Clip, write_clip_list
from vflash_analysis.decoding import suite
from vflash_analysis.records import read_records, write_records
from vflash_analysis.schemas import ANCHORS, GENERATIONS, TRAINING

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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two suites' lists, two drafters of one tiny target and their records."""
    target = tiny_target(3)
    monkeypatch.setattr(suite, "open_target", lambda *_: target)
    monkeypatch.setattr(suite, "open_reader", lambda settings: nullcontext(Reader()))
    for benchmark, numbers in (("VDC", (0, 1)), ("LVB", (2, 3))):
        clips = []
        for number in numbers:
            path = tmp_path / f"c{number}.mp4"
            path.write_bytes(bytes([number]) * 8)
            clips.append(Clip(f"c{number}", benchmark, "suites", str(path), "describe the clip"))
        write_clip_list(tmp_path / f"suite-{benchmark}-0.jsonl", clips)
    for seed, (name, variant) in enumerate((("own", ""), ("other", VARIANT))):
        folder = tmp_path / name
        tiny_drafter(target, seed, 2 - seed).save_pretrained(folder / "drafter")
        for schema, rows in ((ANCHORS, anchor_rows), (TRAINING, training_rows)):
            told = rows(("self_reveal",), (seed,), (4,), (4,)).assign(variant=variant)
            write_records(folder / f"{schema.name}.parquet", told, schema)
    return tmp_path


def decoded(place, *names):
    drafters = {name: place / name for name in names}
    suite.decode_design(SETTINGS, "run", place, place, drafters, place / "out")
    rows = read_records(place / "out" / "generations.parquet", GENERATIONS)
    return rows[~rows["warmup"]]


def test_each_drafter_decodes_as_the_study_says_and_its_records_come_along(place):
    rows = decoded(place, "own", "other")
    assert set(rows["run_id"]) == {"run"} and set(rows["status"]) == {"ok"}
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
