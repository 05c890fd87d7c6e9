"""What a notebook calls: `open_stage` checks, `finish` proves; by hand and under the runner alike."""

import json
import os
import re
import threading
from types import SimpleNamespace

import IPython  # noqa: F401  (as in a kernel)
import pytest

from vflash_analysis import config, notebook, paths, stages
from vflash_analysis.errors import InputError
from vflash_analysis.locks import LOCK_NAME, FolderLock
from vflash_analysis.notebook import open_stage
from vflash_analysis.schemas import STUDIES
from vflash_analysis.strict import read_json

DRAFTER = {"arm": "mask_only", "train_seed": 0, "steps": 0, "training_clips": 0, "variant": ""}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Runs of this test alone, no runner around it, and nothing left of other tests."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    for name in (notebook.RUN_ID_VARIABLE, notebook.STALE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(notebook, "_thread_failures", [])
    monkeypatch.setattr(notebook, "_open_locks", {})
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    return tmp_path


def leave(stage, names):
    for name in names:
        (stage.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (stage.folder / name).write_text(f"{name}\n1\n")


def finished(name, **own):
    stage = open_stage(name, "smoke", **own)
    leave(stage, stages.STAGES[name].outputs)
    stage.finish()
    return stage


def test_a_stage_by_hand_leaves_what_the_runner_looks_for():
    stage = open_stage("clips", "smoke")
    assert not stage.done and (stage.folder / LOCK_NAME).exists()
    assert "to do" in repr(stage) and "no earlier stage" in repr(stage)
    leave(stage, ["training.jsonl", "validation.jsonl", "clips.csv", "checked.csv"])
    leave(stage, ["suite-VDC-0.jsonl"])
    told = stage.finish(planned=10, done=9)
    assert set(told["file"]) >= {"training.jsonl", "suite-VDC-0.jsonl", "manifest.json"}
    (shard,) = [s for s in stages.plan("smoke") if s.stage == "clips"]
    assert shard.done and shard.folder == stage.folder
    assert not (stage.folder / LOCK_NAME).exists()
    manifest = read_json(stage.folder / "manifest.json")
    keys = "run_id stage profile git_commit git_dirty versions device driver threads seeds inputs"
    assert {*keys.split(), "planned", "done"} <= set(manifest)
    assert (manifest["planned"], manifest["done"], manifest["run_id"]) == (10, 9, shard.run_id)
    assert manifest["settings"] == config.to_json(config.load_profile("smoke"))


def test_a_finished_stage_is_shown_and_not_written():
    stage = finished("clips")
    before = (stage.folder / "DONE").read_bytes()
    again = open_stage("clips", "smoke")
    assert again.done and "done before" in repr(again)
    assert not (again.folder / LOCK_NAME).exists()
    shown = again.finish().set_index("file")
    assert shown.index.tolist() == sorted([*stages.STAGES["clips"].outputs, "manifest.json"])
    assert shown.loc["manifest.json", "rows"] == ""  # rows are of records only
    assert (stage.folder / "DONE").read_bytes() == before


def test_finish_refuses_a_missing_or_empty_output():
    stage = open_stage("clips", "smoke")
    leave(stage, ["training.jsonl", "validation.jsonl", "clips.csv"])
    with pytest.raises(InputError, match=r"checked\.csv: declared output is missing or empty"):
        stage.finish()
    (stage.folder / "checked.csv").touch()
    with pytest.raises(InputError, match=r"checked\.csv"):
        stage.finish()
    assert not (stage.folder / "DONE").exists()


def test_finish_refuses_after_a_failed_thread(monkeypatch):
    monkeypatch.setattr(threading, "__excepthook__", lambda args: None)
    stage = open_stage("clips", "smoke")
    leave(stage, stages.STAGES["clips"].outputs)

    def work():
        raise ValueError("boom")

    thread = threading.Thread(target=work, name="reader")
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="a thread failed: reader: ValueError: boom"):
        stage.finish()
    assert not (stage.folder / "DONE").exists()


def test_opening_again_takes_back_a_done_that_no_longer_holds():
    stage = finished("clips")
    (stage.folder / "clips.csv").unlink()
    again = open_stage("clips", "smoke")
    assert not again.done and not (again.folder / "DONE").exists()


def test_an_earlier_stage_that_has_not_run_is_named():
    with pytest.raises(InputError) as refusal:
        open_stage("target", "smoke")
    assert "target: needs clips, which has not run: notebooks/10_prepare_clips.ipynb" in str(
        refusal.value
    )
    assert "vflash run --profile smoke --only clips" in str(refusal.value)


def test_results_of_earlier_stages():
    clips = finished("clips")
    target = open_stage("target", "smoke")
    assert target.input("clips") == clips.folder
    assert target.inputs("clips") == {"clips": clips.folder}
    with pytest.raises(InputError, match="target: reads 0 shards of decode, one is allowed"):
        target.input("decode")


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("clip", {}, "stage: found 'clip', allowed: environment, clips"),
        ("clips", {"seed": 1}, r"clips: found parameters \['seed'\], allowed: \[\]"),
        ("decode", {"benchmark": "VDC"}, "decode: found parameters"),
        (
            "decode",
            {"benchmark": "X", "sample_seed": 0},
            "decode: found decode-X-0, allowed: decode-",
        ),
        (
            "drafter",
            {"arm": "x", "train_seed": 0, "steps": 0, "training_clips": 0, "variant": ""},
            "arm: found 'x', allowed: self_reveal",
        ),
    ],
)
def test_wrong_parameters_are_refused_by_name(name, own, message):
    with pytest.raises(InputError, match=message):
        open_stage(name, "smoke", **own)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("drafter", {"steps": "abc"}, 'steps: found text "abc", allowed: a whole number'),
        ("drafter", {"steps": -5}, "steps: found whole number -5, allowed: 0 to 1000000000"),
        ("drafter", {"steps": 1.5}, "steps: found number 1.5, allowed: a whole number"),
        ("drafter", {"steps": True}, "steps: found true/false true, allowed: a whole number"),
        ("drafter", {"arm": ["a"]}, 'arm: found list ["a"], allowed: text'),
        ("drafter", {"train_seed": 2**70}, "train_seed: found whole number"),
        ("drafter", {"variant": None}, "variant: found null, allowed: text"),
        ("drafter", {"variant": "gamma=3"}, 'variant: found text "gamma=3", allowed: one setting'),
        ("drafter", {"training_clips": 10**6}, "training_clips: found 1000000, allowed: at most"),
        ("ablations", {"ablation": "false"}, 'ablation: found text "false", allowed: true or'),
        ("beside_paper", {"studies": 1}, "studies: found whole number 1, allowed: true or"),
        ("decode", {"sample_seed": None}, "sample_seed: found null, allowed: a whole number"),
    ],
)
def test_mistyped_parameters_are_refused_before_a_folder_is_made(place, name, changed, message):
    own = {
        "drafter": DRAFTER,
        "ablations": {"ablation": False},
        "beside_paper": {"studies": False},
        "decode": {"benchmark": "VDC", "sample_seed": 0},
    }[name]
    with pytest.raises(InputError, match=re.escape(message)):
        open_stage(name, "smoke", **(own | changed))
    assert not (place / "runs" / "smoke").exists()


def test_a_parameter_that_papermill_was_given_and_no_notebook_takes_is_refused(monkeypatch):
    cells = [
        "profile = 'pocket'",
        "x = 1",
        '# Parameters\nprofile = "smoke"\nprofil = float("nan")',
    ]
    shell = SimpleNamespace(user_ns={"In": cells})
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    with pytest.raises(InputError) as refusal:
        open_stage("clips", "smoke")
    assert str(refusal.value) == (
        "10_prepare_clips.ipynb: unknown parameter profil, allowed: profile, overrides"
    )
    cells.append(cells[-1].replace("profil =", "overrides ="))  # mended and run again
    assert open_stage("clips", "smoke").shard.name == "clips"


def test_a_drafter_beside_the_plan_can_be_trained_by_hand():
    own = DRAFTER | {"arm": "wrong_reveal", "train_seed": 7}
    with pytest.raises(InputError, match="drafter-wrong_reveal-7-4-4: needs clips"):
        open_stage("drafter", "smoke", **own)  # the arm is known; only what comes before is missing
    own["variant"] = "training.gamma=3"
    with pytest.raises(InputError, match=r"drafter-wrong_reveal-7-4-4-training\.gamma=3: needs"):
        open_stage("drafter", "smoke", **own)


def test_two_notebooks_in_one_folder_refuse():
    (shard,) = [s for s in stages.plan("smoke") if s.stage == "clips"]
    with FolderLock(shard.folder), pytest.raises(InputError, match="in use by process"):
        open_stage("clips", "smoke")


def test_code_that_changed_under_a_run_is_noticed_at_once(monkeypatch):
    monkeypatch.setenv(notebook.RUN_ID_VARIABLE, "another")
    with pytest.raises(
        InputError, match="clips: code or inputs changed while the run was under way"
    ):
        open_stage("clips", "smoke")


def test_later_notebooks_fall_back_on_the_tracked_records(place, monkeypatch):
    monkeypatch.setattr(paths, "TRACKED_RECORDS", place / "tracked")
    with pytest.raises(InputError, match="speedup: needs "):
        open_stage("speedup", "smoke")
    (place / "tracked").mkdir()
    (place / "tracked" / "generations.parquet").write_text("one\n")
    stage = open_stage("speedup", "smoke")
    assert stage.tracked and stage.record_folders is None
    told = "shows the tracked records; of this run 3 of 3 shards are not done, first "
    assert told + "drafter-self_reveal-0-4-4" in repr(stage).splitlines()[0]
    cost = open_stage("cost", "smoke")  # the target is not there: nothing of its own to show
    assert cost.tracked and cost.shown_folders is None
    for name in STUDIES:
        study = open_stage(name, "smoke")
        assert study.tracked and study.shown_folders is None and study.settings.name == "smoke"
    for studies, count in ((False, 3), (True, 5)):
        beside = open_stage("beside_paper", "smoke", studies=studies)
        assert beside.tracked and beside.absent.startswith(f"{count} of {count} shards")
    (place / "tracked" / "generations.parquet").write_text("other\n")
    os.utime(place / "tracked" / "generations.parquet", ns=(1, 1))
    assert open_stage("speedup", "smoke").run_id != stage.run_id


def test_the_manifest_is_json_of_this_machine():
    stage = finished("clips")
    manifest = json.loads((stage.folder / "manifest.json").read_text())
    assert manifest["versions"]["numpy"] and manifest["threads"] >= 1
    assert manifest["profile"] == "smoke" and manifest["stage"] == "clips"
