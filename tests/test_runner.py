"""The runner: how it executes and judges notebooks, what it refuses, what it leaves."""

import errno
import importlib
import io
import json
import os
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

import vflash_analysis
from tests.planted import finish, shard_at, write_notebook
from vflash_analysis import config, execute, paths, records, runner, stages, summary
from vflash_analysis.errors import InputError
from vflash_analysis.execute import Ending
from vflash_analysis.locks import FolderLock
from vflash_analysis.stages import Shard
from vflash_analysis.summary import Outcome, Summary

# --------------------------------------------------------------------------- planted notebooks

FINISH = """
import pathlib
from vflash_analysis import records
out = pathlib.Path(folder)
(out / "table.csv").write_text("value\\n1\\n")
records.write_done(out, {}, ["table.csv"])
"""
PLANTED = {
    "ok": [FINISH],
    "sys exit": ["import sys\nsys.exit(0)", FINISH],
    "dead kernel": ["import os\nos._exit(1)", FINISH],
    "bad cell": ["1 / 0", FINISH],
    "bad input": [
        "from vflash_analysis.errors import InputError\nraise InputError('x: found 1, allowed: 2')"
    ],
    "swallowed": ["try:\n    open('no such config')\nexcept OSError:\n    pass"],
    "too long": ["import time\ntime.sleep(30)", FINISH],
    "disk full": ["import errno\nraise OSError(errno.ENOSPC, 'No space left on device')"],
    "chatty": ["for i in range(10_000):\n    print(i, 'x' * 100)", FINISH],
    "odd values": [
        "import json, math, pathlib\n"
        "told = [nothing is None, math.isnan(odd), math.isinf(large), text]\n"
        "pathlib.Path(folder, 'told.json').write_text(json.dumps(told))",
        FINISH,
    ],
}  # fmt: skip
LIMITS = {"too long": 3}


def planted(place: Path, name: str) -> dict:
    """A request to execute a planted notebook in its own folder."""
    folder = place / name / "run"
    folder.mkdir(parents=True)
    header = "folder = ''\nnothing = 1\nodd = 1.0\nlarge = 1.0\ntext = ''"
    values = {"nothing": None, "odd": float("nan"), "large": float("inf"), "text": 'it\'s "so"\n'}
    return {
        "notebook": str(write_notebook(place / name / "n.ipynb", PLANTED[name], header)),
        "output": str(folder / "notebook.ipynb"),
        "parameters": {"folder": str(folder), **(values if name == "odd values" else {})},
        "folder": str(folder),
        "cwd": str(paths.ROOT),
        "kernel": "python3",
        "timeout_s": LIMITS.get(name),
        "start_timeout_s": 120,
        "environment": {},
    }


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """Every planted notebook executed, three at a time: {name: (request, ending, log)}."""
    place = tmp_path_factory.mktemp("planted")

    def one(name):
        request, log = planted(place, name), io.StringIO()
        return request, execute.execute(request, log), log.getvalue()

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(PLANTED, pool.map(one, PLANTED), strict=True))


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("ok", "ok", ""),
        ("sys exit", "incomplete", "stopped in cell 2"),
        ("dead kernel", "died", "the kernel died"),
        ("bad cell", "error", "ZeroDivisionError: division by zero"),
        ("bad input", "bad input", "x: found 1, allowed: 2"),
        ("too long", "timeout", "past the limit"),
        ("disk full", "error", "disk full while writing"),
        ("chatty", "ok", ""),
        ("odd values", "ok", ""),
    ],
)
def test_each_kind_of_ending_has_its_own_status(endings, name, status, reason):
    _, ending, _ = endings[name]
    assert ending.status == status and reason in ending.reason
    assert "\n" not in ending.reason


def test_swallowing_an_error_is_no_success(endings):
    request, ending, _ = endings["swallowed"]
    assert ending.status == "ok"  # papermill and every cell are content
    shard = shard_at(Path(request["folder"]))
    assert "no DONE" in shard.why_not_done()


def test_the_failed_notebook_is_kept_with_its_error(endings):
    request, _, _ = endings["bad cell"]
    kept = nbformat.read(request["output"], as_version=4)
    told = [o.ename for c in kept.cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert told == ["ZeroDivisionError"]


def test_no_kernel_outlives_its_notebook(endings):
    request, _, _ = endings["too long"]
    running = [p for p in Path("/proc").glob("[0-9]*/environ") if _names(p, request["folder"])]
    assert running == []


def _names(environ: Path, folder: str) -> bool:
    try:
        return folder.encode() in environ.read_bytes()
    except OSError:
        return False


def test_a_chatty_cell_loses_no_result(endings):
    request, _, log = endings["chatty"]
    assert records.why_not_done(request["folder"]) is None
    assert log.count("\n") == 10_000


def test_none_nan_and_inf_arrive_as_they_are(endings):
    request, _, _ = endings["odd values"]
    told = json.loads((Path(request["folder"]) / "told.json").read_text())
    assert told == [True, True, True, 'it\'s "so"\n']


def test_an_unknown_parameter_is_refused_before_a_kernel_starts(tmp_path):
    request = planted(tmp_path, "ok")
    request["parameters"]["stpes"] = 3
    ending = execute.execute(request)
    assert ending.status == "bad input"
    assert ending.reason.startswith("n.ipynb: unknown parameter stpes, allowed: folder, nothing")
    assert not Path(request["output"]).exists()


def test_only_a_kernel_that_did_not_start_is_started_again(tmp_path, monkeypatch):
    import papermill

    request, calls = planted(tmp_path, "ok"), []
    really = papermill.execute_notebook

    def flaky(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("Kernel didn't respond in 60 seconds")
        return really(*args, **kwargs)

    monkeypatch.setattr(papermill, "execute_notebook", flaky)
    log = io.StringIO()
    assert execute.execute(request, log).status == "ok"
    assert len(calls) == 2 and "starting once more" in log.getvalue()

    def broken(*args, **kwargs):
        calls.append(args)
        raise RuntimeError("Kernel didn't respond in 60 seconds")

    calls.clear()
    monkeypatch.setattr(papermill, "execute_notebook", broken)
    assert "Kernel didn't respond" in execute.execute(request, log).reason
    assert len(calls) == execute.STARTS

    def started_then_failed(notebook, output, **kwargs):
        calls.append(output)
        state = {"papermill": {"start_time": "2026-01-01T00:00:00", "status": "running"}}
        cell = {"cell_type": "code", "metadata": state, "source": "", "outputs": []}
        Path(output).write_text(json.dumps({"cells": [cell]}))
        raise RuntimeError("lost the kernel")

    calls.clear()
    monkeypatch.setattr(papermill, "execute_notebook", started_then_failed)
    assert execute.execute(request, log).reason == "RuntimeError: lost the kernel"
    assert len(calls) == 1


def test_every_kind_of_bad_input_is_known_by_name():
    for module in pkgutil.walk_packages(vflash_analysis.__path__, "vflash_analysis."):
        importlib.import_module(module.name)

    def below(kind):
        return {kind.__name__}.union(*(below(child) for child in kind.__subclasses__()))

    assert {n for n in below(InputError) if not n.startswith("_")} <= set(execute.BAD_INPUT_NAMES)


# --------------------------------------------------------------------------- one shard, judged


def test_run_shard_in_its_own_process(tmp_path):
    request = planted(tmp_path, "ok")
    folder = Path(request["folder"])
    shard = shard_at(folder, notebook=Path(request["notebook"]), parameters=request["parameters"])
    lines: list[str] = []
    outcome = runner.run_shard(shard, show=lines.append)
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert shard.done
    left = sorted(p.name for p in folder.iterdir())
    assert left == ["DONE", "log.txt", "notebook.ipynb", "stderr.txt", "table.csv"]


def fake_execution(monkeypatch, effect):
    """Let run_shard's child be a plain script with the request's path as its argument."""
    really = subprocess.Popen

    def popen(command, **kwargs):
        return really([sys.executable, "-c", effect, command[-1]], **kwargs)

    monkeypatch.setattr(runner.subprocess, "Popen", popen)


ANSWER = (
    "import json, sys, pathlib\n"
    "request = pathlib.Path(sys.argv[1]); told = json.loads(request.read_text())\n"
    "answer = lambda status: request.with_suffix('.answer')"
    ".write_text(json.dumps({'status': status, 'reason': 'said so', 'held': True}))\n"
    "folder = pathlib.Path(told['folder'])\n"
)


def test_the_notebooks_word_is_not_enough(tmp_path, monkeypatch):
    fake_execution(monkeypatch, ANSWER + "answer('ok')")
    outcome = runner.run_shard(shard_at(tmp_path / "a"))
    assert outcome.status == "incomplete" and "no DONE" in outcome.reason


def test_a_folder_in_use_is_refused_and_left_as_it_is(tmp_path):
    request = planted(tmp_path, "ok")
    folder = Path(request["folder"])
    (folder / "log.txt").write_text("the other run's\n")
    shard = shard_at(folder, notebook=Path(request["notebook"]), parameters=request["parameters"])
    with FolderLock(folder):
        outcome = runner.run_shard(shard)
    assert outcome.status == "bad input" and f"in use by process {os.getpid()}" in outcome.reason
    assert [p.name for p in folder.iterdir()] == ["log.txt"]
    assert (folder / "log.txt").read_text() == "the other run's\n"


def test_a_process_that_vanishes_has_died(tmp_path, monkeypatch):
    fake_execution(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    outcome = runner.run_shard(shard_at(tmp_path / "a"))
    assert outcome.status == "died" and "without an answer" in outcome.reason


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records, "write_json_atomic", full)
    outcome = runner.run_shard(shard_at(tmp_path / "a"))
    assert outcome.status == "error"
    assert outcome.reason.endswith("a: No space left on device")


def test_the_log_is_cut_but_the_last_line_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LOG_LIMIT", 1000)
    fake_execution(
        monkeypatch, ANSWER + "print('x' * 99 + '\\n' * 1, end='')\n" * 50 + "answer('error')"
    )
    lines: list[str] = []
    outcome = runner.run_shard(shard_at(tmp_path / "a"), show=lines.append)
    assert outcome.reason == "said so" and len(lines) == 50
    log = (tmp_path / "a" / "log.txt").read_text()
    assert len(log) < 1200 and log.endswith("… (cut)\n")


@pytest.mark.parametrize(
    ("cell", "ending"),
    [
        ({"metadata": {"papermill": {"status": "completed"}}}, Ending("ok")),
        ({"metadata": {"papermill": {"status": "completed", "exception": True}}}, None),
        ({"metadata": {"papermill": {"status": "pending"}}}, None),
        ({"metadata": {}}, None),
        ({"metadata": {}, "source": " \n"}, Ending("ok")),
        ({"cell_type": "markdown", "metadata": {}}, Ending("ok")),
    ],
)
def test_judge_cells(cell, ending):
    cell = {"cell_type": "code", "source": "x", "outputs": []} | cell
    judged = execute.judge_cells([cell])
    assert judged == ending if ending else judged.status == "incomplete"


# --------------------------------------------------------------------------- a run of the plan


def chain_of(place: Path) -> list[Shard]:
    first = shard_at(place / "a" / "1", "a")
    second = shard_at(place / "b" / "1", "b", dependencies=("a",))
    third = shard_at(place / "c" / "1", "c", dependencies=("b",))
    return [first, second, third, shard_at(place / "d" / "1", "d")]


def fake_runs(monkeypatch, failing=()):
    """Replace the notebook by one that finishes at once, or fails when its name is in `failing`."""
    ran = []

    def run_shard(shard, limits, show, keep_stale):
        ran.append(shard.name)
        show("step 1/2")
        if shard.name in failing:
            return Outcome(shard.name, "error", 1.0, "boom", "notebook.ipynb")
        finish(shard.folder)
        return Outcome(shard.name, "ok", 1.0, "", "notebook.ipynb")

    monkeypatch.setattr(runner, "run_shard", run_shard)
    return ran


def test_a_second_run_does_nothing_and_says_so(runs, monkeypatch):
    ran = fake_runs(monkeypatch)
    shards = chain_of(runs)
    stream = io.StringIO()
    outcomes = runner.run_plan(shards, "p", stream=stream)
    assert ran == ["a", "b", "c", "d"] and [o.status for o in outcomes] == ["ok"] * 4
    assert "[1/4] a" in stream.getvalue() and "[4/4] d ok in 0:01" in stream.getvalue()
    ran.clear()
    again = runner.run_plan(shards, "p", stream=io.StringIO())
    assert ran == []
    assert summary.summary_lines(again, 0.2) == ["nothing to do: all 4 shards are done"]
    assert summary.summary_json(again, 0.2)["ok"] is True


def test_missing_results_are_named_and_tried_again_when_asked(runs, monkeypatch):
    ran = fake_runs(monkeypatch)
    shards = chain_of(runs)  # c needs b, b needs a
    for shard in shards:
        finish(shard.folder, planned=12, done=11 if shard.name == "b" else 12)
    outcomes = runner.run_plan(shards, "p", stream=io.StringIO())
    assert summary.summary_lines(outcomes, 0.2) == [
        "nothing to do: all 4 shards are done",
        "  b: 11 of 12 units; --retry-failed tries the others again",
    ]
    assert runner.reopen_lacking(shards) == ["b", "c"]
    runner.run_plan(shards, "p", stream=io.StringIO())
    assert ran == ["b", "c"]
    assert runner.reopen_lacking(shards) == []


def test_what_needs_a_failed_shard_is_left_out_and_named(runs, monkeypatch):
    ran = fake_runs(monkeypatch, failing=["b"])
    outcomes = runner.run_plan(chain_of(runs), "p", stream=io.StringIO())
    assert ran == ["a", "b", "d"]
    assert {o.shard: o.status for o in outcomes} == {
        "a": "ok", "b": "error", "c": "blocked", "d": "ok",
    }  # fmt: skip
    lines = summary.summary_lines(outcomes, 3)
    assert lines[0] == "2 ok, 1 error, 1 blocked in 0:03"
    assert lines[1:] == ["  b: error: boom (notebook.ipynb)", "  c: blocked: needs b"]
    assert summary.summary_json(outcomes, 3)["failed"] == {"b": "boom", "c": "needs b"}
    told = Summary("p").read()
    assert told["status"].tolist() == ["ok", "error", "blocked", "ok"]
    assert told["reason"].tolist() == ["", "boom", "needs b", ""]
    # the failure mended, only what is missing runs
    ran = fake_runs(monkeypatch)
    runner.run_plan(chain_of(runs), "p", stream=io.StringIO())
    assert ran == ["b", "c"]
    told = Summary("p").read()  # of each shard how it ended when it last ran
    assert told["shard"].tolist() == ["a", "d", "b", "c"] and set(told["status"]) == {"ok"}
    runner.run_plan(chain_of(runs), "p", stream=io.StringIO())
    assert Summary("p").read().equals(told)


def test_only_selects_stages_or_shards(runs, monkeypatch):
    ran = fake_runs(monkeypatch)
    runner.run_plan(chain_of(runs), "p", only=["a", "d"], stream=io.StringIO())
    assert ran == ["a", "d"]
    with pytest.raises(InputError, match="--only: found 'x', allowed: a, b, c, d"):
        runner.run_plan(chain_of(runs), "p", only=["x"])


def test_a_shard_that_another_run_finished_meanwhile_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    first, second, *_ = stages.plan("smoke")

    def run_shard(shard, *rest):
        for one in (first, second):  # the other run is quicker
            for name in one.outputs:
                records.write_text_atomic(one.folder / name, "x\n")
            records.write_done(one.folder, {}, one.outputs)
        return Outcome(shard.name, "ok", 1.0)

    monkeypatch.setattr(runner, "run_shard", run_shard)
    outcomes = runner.run_plan([first, second], "smoke", stream=io.StringIO())
    assert [one.status for one in outcomes] == ["ok", "skipped"]
    assert outcomes[1].reason == "done by another run meanwhile"


def test_a_missing_folder_stops_the_run_not_the_plan(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path / "nowhere"))
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path / "nowhere"))
    shards = stages.plan("h100")
    told = f"target: target.source or VFLASH_TARGET: found nothing at {tmp_path / 'nowhere'}"
    assert told in stages.missing_inputs(shards)
    with pytest.raises(InputError, match="found nothing at"):
        runner.run_plan(shards, "h100", stream=io.StringIO())
    monkeypatch.setattr(config, "local_paths", dict)  # nor does this machine name any
    unset = stages.plan("h100", {"clips.training_list": "mine.jsonl"})
    assert {shard.name for shard in unset} == {shard.name for shard in shards}
    lists, target = stages.missing_inputs(unset)
    assert lists.startswith("clips: clips.training_list: found no folder; set VFLASH_DATA")
    assert target.startswith("target: target.source or VFLASH_TARGET: found none; set VFLASH_TARG")
    with pytest.raises(InputError, match=r"^target: .* set VFLASH_TARGET or `target:` in local"):
        runner.run_plan(stages.plan("h100"), "h100", only=["target"], stream=io.StringIO())


def test_what_computes_on_the_targets_device_takes_one(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path))
    taking = {"target", "continuations", "drafter", "decode", "cost", "layers"}
    for profile, device in (("smoke", "cpu"), ("h100", "cuda")):
        for shard in stages.plan(profile):
            expected = device if shard.stage in taking else ""
            assert shard.device == shard.as_json()["device"] == expected, shard.name
            request = runner._request(shard, runner.Limits(), keep_stale=False)
            assert (request["device"], request["shard"]) == (expected, shard.name)


def test_a_cell_has_no_limit_unless_one_is_given(tmp_path):
    request = runner._request(shard_at(tmp_path), runner.Limits(), keep_stale=False)
    assert request["timeout_s"] is None
    assert runner._request(shard_at(tmp_path), runner.Limits(5), False)["timeout_s"] == 5


@pytest.mark.parametrize("name", ["summary.csv", ".summary.lock"])
def test_a_summary_that_cannot_be_written_is_a_line_and_stops_nothing(runs, monkeypatch, name):
    ran = fake_runs(monkeypatch)
    (runs / "p" / name).mkdir(parents=True)
    told = io.StringIO()
    outcomes = runner.run_plan(chain_of(runs), "p", stream=told)
    assert ran == ["a", "b", "c", "d"] and {o.status for o in outcomes} == {"ok"}
    last = told.getvalue().splitlines()[-1]
    assert last.endswith("summary.csv: cannot be written (Is a directory)") and ".tmp" not in last
