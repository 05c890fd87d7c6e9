"""Publishing the studies: in folders of their own, beside a run's records, kept when not measured."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.results.synthetic import generation_row, write_synthetic
from vflash_analysis import paths, publish
from vflash_analysis.config import DrafterKey
from vflash_analysis.errors import InputError
from vflash_analysis.records import read_records, write_done, write_records
from vflash_analysis.results import sources
from vflash_analysis.schemas import ANCHORS, GENERATIONS


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    return write_synthetic(folder, ("self_reveal",), (1,), (100,), (100,), n_clips=1, n_anchors=16)


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """An empty tracked place; figures and claims are left alone."""
    place = tmp_path / "tracked"
    for module in (paths, sources):
        monkeypatch.setattr(module, "TRACKED_RECORDS", place)
    monkeypatch.setattr(publish, "build_results", lambda n_samples: [])
    monkeypatch.setattr(publish, "read_tidy_csv", lambda path: path)
    monkeypatch.setattr(publish, "write_claims", lambda readme, frame, gates: readme)
    monkeypatch.setattr(publish, "tracked_gates", lambda n_samples: None)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return place


def shard(folder, stage, done=True, key=None):
    """A shard of the tracked profile whose records lie in `folder`."""
    names = [path.name for path in sorted(folder.glob("*.parquet"))]
    if done:
        told = {"run_id": f"id-{stage}", "git_commit": "c", "git_dirty": False, "device": "cpu"}
        told |= {"parameters": {"profile": "pocket", "overrides": {}}}
        (folder / "manifest.json").write_text(json.dumps(told))
        write_done(folder, {}, [*names, "manifest.json"])
    return SimpleNamespace(
        name=stage, stage=stage, folder=folder, done=done, stale=False, drafter_key=key,
        outputs=tuple(names) or ("generations.parquet",),
        why_not_done=lambda: None if done else "not run", parameters={"train_seed": 1},
    )  # fmt: skip


def decoded(folder, clip, **columns):
    row = generation_row("ar", clip, new_tokens=3, verify_calls=2, decode_s=0.1, **columns)
    write_records(folder / "generations.parquet", [row], GENERATIONS)
    return folder


def test_a_study_and_its_drafters_are_not_pooled_with_the_run(synthetic, tracked, tmp_path):
    decoded(tracked / "lengths", "old")
    varied = tmp_path / "varied"
    whole = read_records(synthetic / "anchors.parquet", ANCHORS)
    changed = whole.assign(drafter_sha256="other", variant="drafter.block_size=4")
    write_records(varied / "anchors.parquet", changed, ANCHORS)
    key = DrafterKey("self_reveal", 1, 100, 100, "drafter.block_size=4")
    shards = [
        shard(synthetic, "decode"),
        shard(varied, "drafter", key=key),
        shard(decoded(tmp_path / "design", "new"), "design"),
        shard(tmp_path / "nothing", "lengths", done=False),
    ]
    found = publish.records_of(shards)
    assert "other" not in set(found.anchors["drafter_sha256"]) and len(found.anchors) == len(whole)
    assert "new" not in set(found.generations["clip_id"])
    assert found.lacking == ("lengths",)
    assert found.study("design").generations["clip_id"].tolist() == ["new"]
    assert found.study("design").status == "measured"
    # what was not measured anew is shown as it is tracked, beside a run of the tracked settings
    assert found.study("lengths").generations["clip_id"].tolist() == ["old"]
    assert found.study("lengths").status == "stored"


def test_studies_are_tracked_in_their_own_folders_and_kept_when_not_measured(
    synthetic, tracked, tmp_path, monkeypatch
):
    decoded(tracked / "lengths", "old")
    before = (tracked / "lengths" / "generations.parquet").read_bytes()
    runs = pd.DataFrame([["lengths", "id-old", "c", "False", "cpu"]])
    runs.columns = ["shard", *publish.PROVENANCE]
    runs.to_csv(tracked / publish.RUNS_NAME, index=False)
    design = shard(decoded(tmp_path / "design", "new"), "design")
    waiting = shard(tmp_path / "nothing", "lengths", done=False)
    run, compared = [shard(synthetic, "decode")], [design, waiting]
    written = publish.publish(run, compared, 20)
    assert tracked / "design" / "generations.parquet" in written
    kept = read_records(tracked / "design" / "generations.parquet", GENERATIONS)
    assert kept["clip_id"].tolist() == ["new"]
    assert not (tracked / "design" / "cycles.parquet").exists()  # the study has none
    assert (tracked / "lengths" / "generations.parquet").read_bytes() == before
    told = pd.read_csv(tracked / publish.RUNS_NAME).set_index("shard")["run_id"].to_dict()
    assert told == {"decode": "id-decode", "design": "id-design", "lengths": "id-old"}
    found = sources.load_records()
    assert set(found.studies) == {"design", "lengths"} and "new" not in set(
        found.generations["clip_id"]
    )
    # the limit holds for all that is tracked then: the run's, the study's, and the kept one's
    held = [path for kind in ("*.parquet", "*.jpg") for path in tracked.rglob(kind)]
    size = sum(path.stat().st_size for path in held)
    monkeypatch.setattr(publish, "SIZE_LIMIT", size)
    publish.publish(run, compared, 20)
    monkeypatch.setattr(publish, "SIZE_LIMIT", size - 1)
    with pytest.raises(InputError, match=f"records are {size:,} bytes, allowed: {size - 1:,}"):
        publish.publish(run, compared, 20)
    # a study that is planned must be done
    with pytest.raises(InputError, match="publish: lengths is not done"):
        publish.publish([*run, waiting], [], 20)
