"""Where records come from: tracked or a run's, complete runs only, nothing twice."""

import dataclasses
import json

import pandas as pd
import pytest

from tests.results.synthetic import (
    DEVICE,
    anchor_rows,
    decode_rows,
    drafter_columns,
    generation_row,
    records_of,
)
from vflash_analysis.errors import InputError
from vflash_analysis.records import typed_frame, write_records
from vflash_analysis.results import sources
from vflash_analysis.results.sources import (
    arm_names,
    count_clips,
    decode_groups,
    drafter_facts,
    final_drafters,
    load_records,
    method_rows,
    records_from_frames,
)
from vflash_analysis.schemas import ANCHORS, BENCHMARKS, GENERATIONS, VOCABULARY

SETTINGS = {"arms": ("self_reveal",), "seeds": (1,), "budgets": (100,), "sizes": (100,)}


def test_without_a_run_the_tracked_records_are_stored(place, monkeypatch):
    monkeypatch.setattr(sources, "TRACKED_RECORDS", place)
    assert load_records().status == "stored"


def test_a_runs_records_are_measured(place, records):
    assert records.status == "measured"
    assert records.source == str(place)


def test_the_records_of_several_folders_are_read_together(tmp_path):
    folders = [tmp_path / run for run in ("a", "b")]
    for folder in folders:
        row = generation_row("ar", folder.name, new_tokens=3, verify_calls=2, decode_s=0.1)
        write_records(folder / "generations.parquet", [row], GENERATIONS)
    found = load_records(folders)
    assert found.generations["clip_id"].tolist() == ["a", "b"]
    assert found.cycles.empty and found.source == "2 run folders"


def decoded(folder, benchmark, sample_seed=0, **columns):
    """A decode shard's folder with one clip."""
    took = {"new_tokens": 3, "verify_calls": 2, "decode_s": 0.1}
    clip = f"{benchmark}-{sample_seed}"
    row = generation_row("ar", clip, benchmark=benchmark, sample_seed=sample_seed, **took)
    write_records(folder / "generations.parquet", [row | columns], GENERATIONS)
    return folder


@pytest.mark.parametrize(
    ("column", "one", "other"),
    [
        ("device", "NVIDIA H100", "NVIDIA A100"),
        ("dtype", "bfloat16", "float32"),
        ("reader", "decord 0.6.0", None),
        ("template_sha256", "t1", "t2"),
        ("target", "llava", "other"),
        ("target_revision", "r1", "r2"),
    ],
)
def test_cases_113_123_159_a_run_of_several_kinds_is_refused_by_shard(tmp_path, column, one, other):
    folders = [
        decoded(tmp_path / "a", "VDC", 0, **{column: one}),
        decoded(tmp_path / "b", "Video-MME", 1, **{column: other}),
        decoded(tmp_path / "c", "MLVU", 2, **{column: one}),
    ]
    with pytest.raises(InputError) as refusal:
        load_records(folders)
    assert str(refusal.value) == (
        f"decodes of one run: found 2 values of '{column}', allowed is 1: {one} in decode-VDC-0, "
        f"decode-MLVU-2; {other or 'none'} in decode-Video-MME-1; remove {tmp_path / 'b'} and run "
        "again as the others were"
    )
    assert len(load_records([folders[0], folders[2]]).generations) == 2


def test_a_shard_that_two_devices_decoded_is_named_with_both(tmp_path):
    rows = [
        generation_row("ar", clip, device=device, new_tokens=3, verify_calls=2, decode_s=0.1)
        for clip, device in (("a", "H100"), ("b", "A100"))
    ]
    write_records(tmp_path / "generations.parquet", rows, GENERATIONS)
    with pytest.raises(InputError, match=r"A100 in decode-VDC-1; H100 in decode-VDC-1; remove "):
        load_records([tmp_path])


def test_what_gave_no_text_is_of_no_kind(tmp_path):
    folders = [
        decoded(tmp_path / "a", "VDC", reader="decord 0.6.0"),
        decoded(tmp_path / "b", "MLVU", reader=None, status="failed", reason="damaged"),
        decoded(tmp_path / "c", "LVB", reader="pyav 14.0", warmup=True, repeat=-1),
    ]
    assert len(load_records(folders).generations) == 3


def test_a_damaged_file_of_a_run_says_how_to_make_it_anew(tmp_path):
    file = tmp_path / "generations.parquet"
    write_records(file, [generation_row("ar", "a")], GENERATIONS)
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(InputError) as refusal:
        load_records([tmp_path])
    assert "generations.parquet" in str(refusal.value) and "anew" not in str(refusal.value)
    (tmp_path / "DONE").touch()  # a shard's folder
    with pytest.raises(InputError, match=r"; remove .* and run again to make it anew"):
        load_records([tmp_path])


@pytest.mark.parametrize(
    ("profile", "overrides", "expected"),
    [
        ("pocket", {}, True),
        ("pocket", {"clips.clips_per_suite": 20}, True),
        ("pocket", {"training.steps": 300}, False),
        ("smoke", {}, False),
    ],
)
def test_tracked_rows_may_stand_beside_a_run_of_the_tracked_settings_only(
    tmp_path, monkeypatch, profile, overrides, expected
):
    write_records(tmp_path / "generations.parquet", [generation_row("ar", "a")], GENERATIONS)
    assert not load_records([tmp_path]).as_tracked
    told = {"parameters": {"profile": profile, "overrides": overrides}}
    (tmp_path / "manifest.json").write_text(json.dumps(told))
    assert load_records([tmp_path]).as_tracked is expected
    monkeypatch.setattr(sources, "TRACKED_RECORDS", tmp_path)
    assert not load_records().as_tracked


@pytest.mark.parametrize("column", ["target", "target_revision", "reader", "template_sha256"])
def test_two_targets_readers_or_templates_are_not_one_group(column):
    took = {"new_tokens": 3, "verify_calls": 2, "decode_s": 0.1}
    rows = [
        generation_row("ar", kind, **{column: kind, "sample_seed": seed}, **took)
        for seed, kind in enumerate(("t", "other"))
    ]
    with pytest.raises(InputError, match=rf"'{column}' has 2 values .*\['other', 't'\]"):
        list(decode_groups(records_of(pd.DataFrame(rows))))


def test_folders_without_records_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="no record files"):
            load_records([folder])
    with pytest.raises(InputError, match=r"unknown tables \['anchor'\]"):
        records_from_frames({"anchor": pd.DataFrame()}, "x")


def test_studies_stand_beside_the_records_and_are_never_pooled_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "TRACKED_RECORDS", tmp_path)
    decoded(tmp_path, "VDC")
    decoded(tmp_path / "design", "MLVU", device="another")
    found = load_records()
    assert found.generations["benchmark"].tolist() == ["VDC"] and set(found.studies) == {"design"}
    study = found.study("design")
    assert study.generations["benchmark"].tolist() == ["MLVU"] and study.status == "stored"
    assert study.source.endswith("design")
    absent = found.study("lengths")
    assert all(getattr(absent, schema.name).empty for schema in sources.TABLES)
    assert (absent.status, absent.source) == ("stored", found.source)


def test_a_studys_notebook_shows_its_own_records_or_the_tracked_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "TRACKED_RECORDS", tmp_path / "tracked")
    decoded(tmp_path / "tracked", "VDC")
    for name in ("design", "lengths"):
        decoded(tmp_path / "tracked" / name, "MLVU")
    shown = sources.study_records("design", None)
    assert set(shown.studies) == {"design"} and shown.study("design").status == "stored"
    own = sources.study_records("design", decoded(tmp_path / "own", "LVB"))
    assert own.generations.empty and own.study("lengths").generations.empty
    assert own.study("design").generations["benchmark"].tolist() == ["LVB"]
    assert own.study("design").status == "measured"


def test_a_decode_in_two_runs_is_refused_and_ar_may_repeat():
    chain = generation_row("chain", "a", drafter_sha256="d")
    ar = generation_row("ar", "a")
    again = [row | {"run_id": "r2"} for row in (chain, ar)]
    with pytest.raises(InputError, match=r"chain on clip a is in several runs \['r1', 'r2'\]"):
        records_of(pd.DataFrame([chain, ar, *again]))
    assert len(records_of(pd.DataFrame([chain, ar, again[1]])).generations) == 3


def facts_frame(*rows) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["objective", "revealed_weight", "anchors_per_clip"])


def test_arms_are_named_by_what_sets_them_apart():
    facts = facts_frame(
        ("self_reveal", 1.0, 12),
        ("self_reveal", 0.0, 12),
        ("mask_only", 1.0, 12),
        ("mask_only", 1.0, 24),
        ("wrong_reveal", 1.0, 12),
    )
    assert arm_names(facts) == [
        "self_reveal",
        "self_reveal_rev0",
        "mask_only",
        "mask_only_2x",
        "wrong_reveal",
    ]
    assert arm_names(facts_frame(("mask_only", 1.0, 24))) == ["mask_only"]


def test_the_final_drafters_are_of_the_largest_data_and_budget(records):
    final = final_drafters(records)
    assert set(final["steps"]) == {200}
    assert len(final) == 12


def test_what_decoded_says_which_size_is_final(records):
    rows = records.generations.iloc[:1].assign(drafter_sha256="self_reveal-1-100-100")
    final = final_drafters(dataclasses.replace(records, generations=rows))
    assert set(final["steps"]) == {100} and len(final) == 12  # every arm and seed of that size
    larger = records.anchors["steps"] == 200
    other = records.anchors["objective"] != "self_reveal"
    kept = dataclasses.replace(
        records,
        generations=rows,
        anchors=records.anchors[larger | ~other],
        training=records.training[records.training["objective"] == "none"],
    )
    final = final_drafters(kept).set_index("arm")["steps"]
    assert set(final.loc[["self_reveal"]]) == {100}
    assert set(final.loc[["mask_only"]]) == {200}  # it has no drafter of that size


def test_facts_that_contradict_are_refused():
    rows = anchor_rows(n_clips=1, n_anchors=2, **SETTINGS)
    other = rows.copy()
    other["steps"] = 101
    both = typed_frame(pd.concat([rows, other]), ANCHORS)
    with pytest.raises(InputError, match="tell different facts"):
        drafter_facts(records_from_frames({"anchors": both}, "x"))


def test_case_123_two_devices_are_two_groups():
    here, here_cycles = decode_rows(n_clips=1, **SETTINGS)
    there, there_cycles = decode_rows(n_clips=1, device="NVIDIA H200", **SETTINGS)
    there["run_id"] = there_cycles["run_id"] = "r2"
    both = records_of(pd.concat([here, there]), pd.concat([here_cycles, there_cycles]))
    groups = {group.device: group for group in decode_groups(both)}
    assert list(groups) == [DEVICE, "NVIDIA H200"]
    assert all(len(group.rows) == len(here) for group in groups.values())
    assert sum(len(g.cycles) for g in groups.values()) == 2 * len(here_cycles)


def test_planned_counts_failed_clips():
    rows = [
        generation_row("ar", "a", new_tokens=3, verify_calls=2, decode_s=0.1),
        generation_row("ar", "b", status="failed", reason="damaged"),
        generation_row("ar", "w", warmup=True, repeat=-1),
    ]
    (group,) = decode_groups(records_of(pd.DataFrame(rows)))
    assert group.planned == {"VDC": 2}
    assert count_clips(group.rows) == 1


def test_a_method_is_read_at_its_default_setting_and_final_drafters(records):
    (group,) = decode_groups(records)
    rows = method_rows(group, records, "chain", "mask_only")
    assert set(rows["drafter_sha256"]) == {
        drafter_columns("mask_only", seed, 200, 100)["drafter_sha256"] for seed in (1, 2)
    }
    assert len(method_rows(group, records, "chain")) > len(rows)


def test_the_words_of_several_folders_are_merged_and_must_agree(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    texts = ({3: " red", 1: "a"}, {3: " red", 2: ","})
    for folder, words in zip(folders, texts, strict=True):
        decoded(folder, folder.name)
        rows = [{"target": "t", "token_id": i, "text": text} for i, text in words.items()]
        write_records(folder / "vocabulary.parquet", rows, VOCABULARY)
    words = load_records(folders).vocabulary
    assert words[["token_id", "text"]].values.tolist() == [[1, "a"], [2, ","], [3, " red"]]
    other = [{"target": "t", "token_id": 3, "text": " blue"}]
    write_records(folders[1] / "vocabulary.parquet", other, VOCABULARY)
    with pytest.raises(InputError, match=r"token 3 of t has the texts .' red', ' blue'."):
        load_records(folders)


def test_strips_of_all_folders_are_found(place, records):
    assert sorted(records.strips) == sorted(f"{name}-00" for name in BENCHMARKS)
    assert all(path.is_file() and place in path.parents for path in records.strips.values())
