"""Publishing the studies: in folders of their own, beside a run's records, kept when not measured."""

import json
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.results.studies import design_study, lengths_study
from tests.results.synthetic import generation_row, measure_rows, write_synthetic
from vflash_analysis import identity, paths, publish
from vflash_analysis.config import DrafterKey
from vflash_analysis.errors import InputError
from vflash_analysis.records import read_records, write_done, write_records
from vflash_analysis.results import sources
from vflash_analysis.results.report import make_table
from vflash_analysis.schemas import ANCHORS, CYCLES, GENERATIONS, MEASURES, TRAINING
from vflash_analysis.stats import Bootstrap


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


def of_target(source, folder, target):
    """A copy of a place whose drafters and measures are of another target."""
    shutil.copytree(source, folder)
    for schema in (ANCHORS, TRAINING, MEASURES):
        path = folder / f"{schema.name}.parquet"
        write_records(path, read_records(path, schema).assign(target_sha256=target), schema)
    return folder


def test_tracked_studies_stay_beside_a_run_of_their_target_only(synthetic, tracked, tmp_path):
    """The lengths' own target is never the run's, and no reason to leave them out."""
    own = measure_rows(benchmarks=("VDC",), n_clips=1).assign(study="lengths", target_sha256="own")
    write_records(decoded(tmp_path / "lengths", "l") / "measures.parquet", own, MEASURES)
    measured = [
        shard(tmp_path / "lengths", "lengths"),
        shard(decoded(tmp_path / "design", "d"), "design"),
    ]
    publish.publish([shard(synthetic, "decode")], measured, 20)
    same = publish.records_of([shard(synthetic, "decode")])
    assert set(same.studies) == {"lengths", "design"} and same.as_tracked
    other = shard(of_target(synthetic, tmp_path / "other", "b" * 64), "decode")
    found = publish.records_of([other])
    assert not found.studies and not found.as_tracked  # nor tracked rows of T3
    caption = make_table("T6_visual_share", found, Bootstrap(n_samples=20)).caption
    assert caption.startswith("Nothing of ours here: ") and "vflash run --all" in caption
    before = {path: path.read_bytes() for path in tracked.rglob("*") if path.is_file()}
    for compared, lost in (([], "lengths"), (measured[:1], "design")):
        words = f"publish: found another target than that of the tracked study {lost}; vflash run "
        with pytest.raises(
            InputError, match=f"{words}.*--all measures it anew, or remove .*{lost}"
        ):
            publish.publish([other], compared, 20)
    assert before == {path: path.read_bytes() for path in tracked.rglob("*") if path.is_file()}
    publish.publish([other], measured, 20)
    assert set(sources.load_records().anchors["target_sha256"]) == {"b" * 64}


def test_notebook_90_shows_what_vflash_figures_draws(synthetic, tracked, tmp_path, monkeypatch):
    upstream = [shard(synthetic, "decode")]
    for name, study in (("lengths", lengths_study({9: 480})), ("design", design_study())):
        for schema in (GENERATIONS, CYCLES):
            path = tmp_path / name / f"{schema.name}.parquet"
            write_records(path, getattr(study, schema.name), schema)
        upstream.append(shard(tmp_path / name, name))
    stage = SimpleNamespace(
        tracked=False, upstream=tuple(upstream), done=True, finish=lambda **told: None,
        settings=SimpleNamespace(bootstrap_samples=20),
        record_folders=[one.folder for one in upstream],
    )  # fmt: skip
    monkeypatch.setattr("vflash_analysis.notebook.open_stage", lambda *given, **own: stage)
    page: dict = {}
    for cell in identity.code_cells(paths.NOTEBOOKS / "90_compare_paper.ipynb"):
        exec(cell["text"], page)
    drawn = make_table("T9_beside_paper", publish.records_of(upstream), Bootstrap(n_samples=20))
    pd.testing.assert_frame_equal(page["table"].frame, drawn.frame)
    for number in (4, 7):
        own = drawn.frame.loc[drawn.frame["source"] == f"sparrow table {number}"]
        assert "not comparable" in set(own["status"])
