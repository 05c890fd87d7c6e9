"""The runner: what it plans, how it names runs, how it judges notebooks, what it leaves."""

import errno
import importlib
import inspect
import io
import json
import os
import pkgutil
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest

import vflash_analysis
from vflash_analysis import (
    config,
    execute,
    identity,
    locks,
    paths,
    records,
    runner,
    stages,
    summary,
)
from vflash_analysis.errors import InputError
from vflash_analysis.execute import Ending
from vflash_analysis.locks import LOCK_NAME, TOKEN_VARIABLE, FolderLock
from vflash_analysis.progress import CountLine, ProgressLine, clock
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


def write_notebook(path: Path, cells: list[str], parameters: str) -> Path:
    """A notebook as a careless user saves it: a private kernel, an old error output."""
    old = nbformat.v4.new_output("error", ename="OldError", evalue="from last year", traceback=[])
    first = nbformat.v4.new_code_cell(parameters, outputs=[old], execution_count=7)
    first.metadata["tags"] = ["parameters"]
    book = nbformat.v4.new_notebook(
        cells=[first, *(nbformat.v4.new_code_cell(cell) for cell in cells)],
        metadata={"kernelspec": {"name": "my_env", "display_name": "mine", "language": "python"}},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)
    return path


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


def shard_at(folder: Path, name: str = "one", **changes) -> Shard:
    values = {
        "name": name, "stage": name, "notebook": folder / "n.ipynb", "parameters": {},
        "run_id": folder.name, "parameters_id": "p", "folder": folder, "dependencies": (),
        "outputs": ("table.csv",), "inputs": {},
    }  # fmt: skip
    return Shard(**(values | changes))


def finish(folder: Path, outputs=("table.csv",), **payload) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in outputs:
        (folder / name).write_text("value\n1\n")
    records.write_done(folder, payload, list(outputs))


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


def test_done_must_declare_every_output(tmp_path):
    finish(tmp_path, ["other.csv"])
    shard = shard_at(tmp_path)
    assert "does not declare table.csv" in shard.why_not_done()
    finish(tmp_path, ["table.csv"])
    assert shard.done
    (tmp_path / "table.csv").write_text(
        "value\n1\n2\n"
    )  # rows that were not there when it was done
    assert "9 bytes" not in shard.why_not_done() and "bytes" in shard.why_not_done()
    (tmp_path / "table.csv").unlink()
    assert "missing" in shard.why_not_done()


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


# --------------------------------------------------------------------------- locks


def test_two_runs_in_one_folder_refuse(tmp_path):
    with FolderLock(tmp_path):
        with pytest.raises(InputError, match=f"in use by process {os.getpid()}") as refusal:
            FolderLock(tmp_path)
        assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []
    with FolderLock(tmp_path):
        pass


def test_a_dead_process_holds_nothing(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    owner = {"pid": child.pid, "started": "1", "host": socket.gethostname(), "token": "t"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(owner))
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, so runs on Linux")
def test_a_number_given_again_is_another_process(tmp_path):
    owner = {"pid": os.getpid(), "started": "1", "host": socket.gethostname(), "token": "t"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(owner))
    with FolderLock(tmp_path):
        pass


def test_another_machine_is_believed(tmp_path):
    owner = {"pid": 1, "started": "1", "host": "elsewhere", "token": "t", "since": "noon"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(owner))
    with pytest.raises(InputError, match="in use by process 1 on elsewhere since noon") as refusal:
        FolderLock(tmp_path)
    assert str(refusal.value).endswith("is gone (after 5 minutes it counts as gone)")


@pytest.mark.parametrize(("silent_s", "taken"), [(locks.SILENT_S - 30, False), (400.0, True)])
def test_another_machine_that_was_silent_for_long_is_taken_over(tmp_path, silent_s, taken):
    owner = {"pid": os.getpid(), "started": "1", "host": "elsewhere", "token": "t"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(owner))
    seen = time.time() - silent_s
    os.utime(tmp_path / LOCK_NAME, (seen, seen))
    if not taken:
        with pytest.raises(InputError, match="on elsewhere"):
            FolderLock(tmp_path)
        return
    with FolderLock(tmp_path) as lock:
        assert json.loads((tmp_path / LOCK_NAME).read_text())["token"] == lock.token
    assert list(tmp_path.iterdir()) == []


def test_a_holder_shows_that_it_lives_and_leaves_a_lock_that_was_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.01)
    path = tmp_path / LOCK_NAME
    with FolderLock(tmp_path):
        os.utime(path, (1, 1))
        for _ in range(500):
            if path.stat().st_mtime > 1:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime == pytest.approx(time.time(), abs=60)
        other = tmp_path / "other"
        other.write_text(json.dumps({"pid": 1, "host": "elsewhere", "token": "other's"}))
        os.utime(other, (1, 1))
        os.replace(other, path)
        time.sleep(0.1)
        assert path.stat().st_mtime == 1
    assert json.loads(path.read_text())["token"] == "other's"


def test_a_lock_whose_making_was_not_confirmed_is_ones_own(tmp_path, monkeypatch):
    really = os.link

    def answered_twice(source, target):  # as a file server does whose first answer was lost
        really(source, target)
        raise FileExistsError

    monkeypatch.setattr(locks.os, "link", answered_twice)
    with FolderLock(tmp_path) as lock:
        assert json.loads((tmp_path / LOCK_NAME).read_text())["token"] == lock.token
    assert list(tmp_path.iterdir()) == []


def test_the_runners_lock_serves_its_kernel(tmp_path, monkeypatch):
    held = FolderLock(tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, held.token)
    FolderLock(tmp_path).release()
    assert (tmp_path / LOCK_NAME).exists()  # the kernel does not give away the runner's lock
    held.release()
    assert not (tmp_path / LOCK_NAME).exists()


# --------------------------------------------------------------------------- identity


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two modules, one reached by a late import, and a notebook that uses them."""
    home = tmp_path / "vflash_analysis"
    (home / "parts").mkdir(parents=True)
    (home / "__init__.py").write_text('"""Head."""\n')
    (home / "parts" / "__init__.py").write_text("")
    (home / "config.py").write_text("x = 1\n")
    (home / "parts" / "one.py").write_text(
        '"""Head."""\ndef f():\n    """Doc."""\n    from vflash_analysis.parts import two\n'
        "    return two.g()\n"
    )
    (home / "parts" / "two.py").write_text("def g():\n    return 1\n")
    (home / "parts" / "three.py").write_text("def h():\n    return 1\n")
    cells = ["from vflash_analysis.parts.one import f\nfrom vflash_analysis.config import x", "f()"]
    book = write_notebook(tmp_path / "n.ipynb", cells, "steps = 3")
    monkeypatch.setattr(paths, "PACKAGE", home)
    return home, book


def test_an_estimate_is_code_of_the_cost_model_alone():
    """Edited, it changes no clip, text, drafter or decode; shapes, of which targets are built, do."""
    parts = {
        name: set(identity.code_parts(paths.NOTEBOOKS / stage.notebook))
        for name, stage in stages.STAGES.items()
    }
    estimated = {name for name, found in parts.items() if "vflash_analysis.sizes" in found}
    assert estimated >= {"cost"}
    assert not estimated & {"environment", "clips", "target", "continuations", "drafter", "decode"}
    shaped = {name for name, found in parts.items() if "vflash_analysis.shapes" in found}
    assert shaped >= {"target", "continuations", "drafter", "decode", "cost"}


def test_code_digest_sees_code_and_nothing_else(package):
    home, book = package
    before = identity.code_digest(book)

    def rewrite(name, text):
        file = home / name
        file.write_text(text)
        os.utime(file, ns=(time.time_ns(), time.time_ns() + hash(text) % 10**9))
        return identity.code_digest(book)

    assert (
        rewrite("parts/one.py", (home / "parts/one.py").read_text() + "\n# a comment\n") == before
    )
    told = (home / "parts/one.py").read_text()
    assert (
        rewrite("parts/one.py", told.replace("Doc.", "Other words.").replace("Head", "H")) == before
    )
    assert rewrite("config.py", "x = 2\n") == before  # orchestration
    assert rewrite("parts/three.py", "def h():\n    return 2\n") == before  # not reached
    write_notebook(book, ["from vflash_analysis.parts.one import f", "f()"], "steps = 3")
    assert identity.code_digest(book) != before  # a cell changed
    cells = ["from vflash_analysis.parts.one import f\nfrom vflash_analysis.config import x", "f()"]
    write_notebook(book, cells, "steps = 400")
    assert identity.code_digest(book) == before  # the parameters cell counts by value only
    assert rewrite("parts/two.py", "def g():\n    return 2\n") != before  # reached by a late import


def test_code_that_does_not_parse_is_named(package):
    home, book = package
    (home / "parts" / "two.py").write_text("def g(:\n")
    with pytest.raises(InputError, match=r"two\.py: line 1:"):
        identity.code_digest(book)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "garbage",
        "[1]",
        "null",
        "[" * 100_000,
        *[
            json.dumps({"pid": pid, "host": socket.gethostname()})
            for pid in ("abc", None, True, 1.5, 0, -1, 2**22, 2**70)
        ],
        *[
            json.dumps({"pid": 1, "host": "h", "since": "now"} | {name: value})
            for name in ("host", "since", "token")
            for value in (3, ["x"], "two\nlines")
        ],
    ],
)
def test_a_lock_that_says_nothing_is_respected(tmp_path, content):
    (tmp_path / LOCK_NAME).write_text(content)
    with pytest.raises(InputError, match=r"in use by process \?.* remove LOCK there"):
        FolderLock(tmp_path)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_a_lock_that_says_nothing(tmp_path, put):
    put(tmp_path / LOCK_NAME)
    with pytest.raises(InputError, match=r"in use by process \?.* remove LOCK there"):
        FolderLock(tmp_path)


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


def test_file_digests_read_a_file_once(tmp_path, monkeypatch):
    reads = []
    really = identity.sha256_of_file
    monkeypatch.setattr(identity, "sha256_of_file", lambda p: reads.append(p) or really(p))
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"1")
    store = tmp_path / "digests.json"
    first = identity.FileDigests(store)
    digest = first.of(folder)
    first.save()
    assert identity.FileDigests(store).of(folder) == digest and len(reads) == 1
    (folder / "a.bin").write_bytes(b"2")
    os.utime(folder / "a.bin", ns=(1, 1))
    assert identity.FileDigests(store).of(folder) != digest and len(reads) == 2
    for damaged in ("{ damaged", json.dumps({str((folder / "a.bin").resolve()): [1]})):
        store.write_text(damaged)
        assert identity.FileDigests(store).of_file(tmp_path / "nothing") == identity.ABSENT
        assert identity.FileDigests(store).of(folder) != digest
    (tmp_path / "file").touch()
    unwritable = identity.FileDigests(tmp_path / "file" / "store.json")
    unwritable.of(folder)
    unwritable.save()  # a cache that cannot be kept costs time, nothing else


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path, monkeypatch):
    file, really = tmp_path / "a.bin", identity.sha256_of_file
    file.write_bytes(b"1")
    digests = identity.FileDigests(tmp_path / "store.json")

    def slow(path):
        digest = really(path)
        path.write_bytes(b"22")
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(identity, "sha256_of_file", slow)
        with pytest.raises(InputError, match=r"a\.bin: found a file that changed while"):
            digests.of_file(file)
    assert digests.known(file) is None and digests.of_file(file) == really(file)


def test_a_folders_digest_knows_names_not_places(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "a.bin").write_bytes(b"1")
        (tmp_path / place / ".hidden").write_bytes(place.encode())
    digests = identity.FileDigests(tmp_path / "store.json")
    assert digests.of(tmp_path / "here") == digests.of(tmp_path / "there")
    (tmp_path / "there" / "sub" / "a.bin").rename(tmp_path / "there" / "sub" / "b.bin")
    assert digests.of(tmp_path / "here") != digests.of(tmp_path / "there")


# --------------------------------------------------------------------------- the plan


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def ids(shards):
    return {shard.name: shard.run_id for shard in shards}


def test_every_shard_comes_after_what_it_needs(runs):
    for profile, ablation in (("smoke", False), ("smoke", True), ("pocket", True)):
        shards = stages.plan(profile, ablation=ablation)
        seen: set[str] = set()
        for shard in shards:
            assert set(shard.dependencies) <= seen and shard.name not in seen
            assert shard.folder == runs / profile / shard.stage / shard.run_id
            assert shard.notebook.is_file()
            seen.add(shard.name)
        assert {shard.stage for shard in shards} == set(stages.STAGES)


def test_shards_of_the_pocket_profile(runs):
    profile = config.load_profile("pocket")
    steps, seeds = profile.training.steps, profile.train_seeds
    clips = profile.training.training_clips
    shards = stages.plan("pocket")
    count = pd.Series([shard.stage for shard in shards]).value_counts()
    assert count["decode"] == 5 * len(profile.clips.sample_seeds)
    assert count["drafter"] == len(seeds) * len(profile.objectives)
    decode = next(shard for shard in shards if shard.name == "decode-MLVU-1")
    assert [name for name in decode.dependencies if name.startswith("drafter")] == [
        f"drafter-{arm}-{seed}-{steps}-{clips}" for seed in seeds for arm in profile.objectives
    ]
    more = stages.plan("pocket", ablation=True)
    main = {(arm, seed, steps, clips) for arm in profile.objectives for seed in seeds}
    swept = {
        (arm, seed, budget, size)
        for group in profile.ablation
        for arm in group.arms
        for seed in group.train_seeds
        for budget in group.budgets
        for size in group.training_clips
    }
    assert sum(shard.stage == "drafter" for shard in more) == len(main | swept)
    acceptance = next(shard for shard in more if shard.stage == "acceptance")
    assert sum(name.startswith("drafter") for name in acceptance.dependencies) == len(main)


def test_every_training_seed_decodes_every_clip(runs):
    """Resampling over training seeds needs each of them on the same videos."""
    shards = stages.plan("smoke", {"train_seeds": [0, 1], "clips.sample_seeds": [0, 1]})
    arms = config.load_profile("smoke").objectives
    for shard in (s for s in shards if s.stage == "decode"):
        drafters = {name for name in shard.dependencies if name.startswith("drafter")}
        assert drafters == {f"drafter-{arm}-{seed}-4-4" for arm in arms for seed in (0, 1)}


def test_an_arm_defined_anew_is_another_run(runs, monkeypatch):
    before = ids(stages.plan("smoke"))
    changed = {**config.ARMS, "mask_only": {"objective": "mask_only", "lambda_flow": 0.5}}
    monkeypatch.setattr(config, "ARMS", changed)
    after = ids(stages.plan("smoke"))
    drafters = {
        name for name in before if name.startswith("drafter") and before[name] != after[name]
    }
    assert drafters == {"drafter-mask_only-0-4-4"}
    assert before["decode-VDC-0"] != after["decode-VDC-0"]


def test_an_override_changes_what_depends_on_it_and_nothing_before(runs):
    before = ids(stages.plan("smoke"))
    after = ids(stages.plan("smoke", {"decode.tree_nodes": 30}))
    changed = {name.split("-")[0] for name in before if before[name] != after[name]}
    later = {"speedup", "acceptance", "ablations", "beside_paper"}
    assert changed == {"decode", "cost", *later}
    after = ids(stages.plan("smoke", {"training.learning_rate": 0.5}))
    assert before["continuations"] == after["continuations"]
    assert before["drafter-self_reveal-0-4-4"] != after["drafter-self_reveal-0-4-4"]
    after = ids(stages.plan("smoke", {"bootstrap_samples": 7}))
    assert before["decode-VDC-0"] == after["decode-VDC-0"] and before["speedup"] != after["speedup"]
    after = ids(stages.plan("smoke", {"decode.max_new_tokens": 7}))
    assert before["target"] == after["target"] and before["decode-VDC-0"] != after["decode-VDC-0"]


def test_all_clips_decodes_more_and_trains_nothing_again(runs):
    few, all_ = stages.plan("pocket"), stages.plan("pocket", all_clips=True)
    same = {"environment", "clips", "target", "continuations", "drafter", "cost"}
    for one, other in zip(few, all_, strict=True):
        assert (one.run_id == other.run_id) == (one.stage in same), one.name
    decode = next(shard for shard in all_ if shard.stage == "decode")
    most = config.load_profile("pocket").clips.clips_per_suite_all
    assert decode.parameters["overrides"] == {"clips.clips_per_suite": most}


def test_machine_paths_never_enter_a_run_id(runs, tmp_path, monkeypatch):
    told = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text("{}")
        (tmp_path / place / "training.jsonl").write_text("{}")
        monkeypatch.setenv("VFLASH_TARGET", str(tmp_path / place))
        monkeypatch.setenv("VFLASH_DATA", str(tmp_path / place))
        told.append(ids(stages.plan("h100")))
    assert told[0] == told[1]
    (tmp_path / "two" / "config.json").write_text('{"other": "weights"}')
    assert ids(stages.plan("h100"))["target"] != told[0]["target"]


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


def test_clips_hang_on_the_description_of_their_corpus_and_on_a_list_of_ones_own(
    runs, tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    monkeypatch.delenv("VFLASH_DATA", raising=False)  # a plan needs no videos
    inputs = next(s for s in stages.plan("h100") if s.stage == "clips").inputs
    assert identity.ABSENT not in inputs.values()
    before = next(s for s in stages.plan("h100") if s.stage == "clips").run_id
    described = tmp_path / "data"
    for folder in ("suites", "training"):
        shutil.copytree(paths.DATA / folder, described / folder)
    monkeypatch.setattr(paths, "DATA", described)
    for name, changed, same in (
        ("suites/VDC.yaml", ("title: VideoDetailCaption", "title: other words"), True),
        ("suites/MLVU.yaml", ("download_bytes: 285_064_098_709", "download_bytes: 1"), True),
        ("suites/VDC.yaml", ("prompt: question", "prompt: description"), False),
    ):
        file = described / name
        assert changed[0] in file.read_text()
        file.write_text(file.read_text().replace(*changed))
        clips = next(s for s in stages.plan("h100") if s.stage == "clips")
        assert (clips.run_id == before) == same, changed
    corpus = described / "training" / "LLaVA-Video-178K.yaml"
    other = next(s for s in stages.plan("h100") if s.stage == "clips").run_id
    corpus.write_text(corpus.read_text().replace("split: caption", "split: other"))
    assert next(s for s in stages.plan("h100") if s.stage == "clips").run_id != other
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path))
    shards = stages.plan("h100", {"clips.training_list": "mine.jsonl"})
    told = f"clips: clips.training_list: found nothing at {tmp_path / 'mine.jsonl'}"
    assert told in stages.missing_inputs(shards)


def test_the_plan_is_json(runs):
    rows = [shard.as_json() for shard in stages.plan("smoke")]
    assert json.loads(json.dumps(rows)) == rows
    assert all(output.startswith(row["folder"]) for row in rows for output in row["outputs"])


def test_stale_results_are_reused_only_when_asked_and_marked(runs, monkeypatch):
    old = next(s for s in stages.plan("smoke") if s.stage == "clips")
    finish(old.folder, old.outputs, parameters_id=old.parameters_id)
    really = identity.code_digest
    monkeypatch.setattr(identity, "code_digest", lambda notebook: "changed" + really(notebook))
    fresh = next(s for s in stages.plan("smoke") if s.stage == "clips")
    assert fresh.run_id != old.run_id and not fresh.done and not fresh.stale
    kept = stages.plan("smoke", keep_stale=True)
    clips, target = kept[1], kept[2]
    assert (clips.run_id, clips.stale, clips.done) == (old.run_id, True, True)
    assert target.inputs["clips"] == old.run_id
    other = stages.plan("smoke", {"clips.num_frames": 5}, keep_stale=True)[1]
    assert not other.stale  # other parameters are never reused


def test_stale_results_of_other_parameters_upstream_are_not_reused(runs, monkeypatch):
    first = next(s for s in stages.plan("smoke") if s.stage == "speedup")
    finish(first.folder, first.outputs, parameters_id=first.parameters_id)

    def speedup(**overrides):
        shards = stages.plan("smoke", overrides, keep_stale=True)
        return next(s for s in shards if s.stage == "speedup")

    really = identity.code_digest
    monkeypatch.setattr(identity, "code_digest", lambda notebook: "changed" + really(notebook))
    assert speedup().stale  # only code has changed
    assert not speedup(**{"decode.tree_nodes": 30}).stale  # decoded otherwise
    assert not speedup(**{"training.learning_rate": 0.5}).stale  # two stages up


def test_what_computes_on_the_targets_device_takes_one(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path))
    taking = {"target", "continuations", "drafter", "decode", "cost"}
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


def test_time_left_comes_from_what_stages_took_before(runs):
    told = Summary("p")
    assert told.expected(["a"]) == (0, False)
    for outcome in (Outcome("a-0", "ok", 99), Outcome("a-1", "ok", 10), Outcome("a-2", "died", 1)):
        told.note("a", outcome)
    told.note("b", Outcome("b", "ok", 30))
    assert Summary("p").expected(["a", "b", "a"]) == (10 + 30 + 10, True)
    assert told.expected(["a", "unknown"]) == (10, False)


@pytest.mark.parametrize("damaged", ["", "[]", "shard,stage\na,b\n", "\x00\xff", '"'])
def test_a_damaged_summary_costs_an_estimate_and_nothing_else(runs, damaged):
    told = Summary("p")
    told.note("a", Outcome("a", "ok", 10))
    told.file.write_text(damaged)
    assert told.expected(["a"]) == (0, False)
    told.note("a", Outcome("a", "ok", 20))
    assert told.expected(["a"]) == (20, True)


def test_runs_beside_each_other_share_the_summary(runs):
    def note(number):
        Summary("p").note("a", Outcome(f"a-{number}", "ok", number, "what, and why"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(40)))
    told = Summary("p").read()
    assert sorted(told["seconds"]) == list(range(40)) and set(told["reason"]) == {"what, and why"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_count_is_one_live_line_on_a_terminal_and_few_lines_elsewhere(monkeypatch):
    now = [0.0]
    clock_of_its_own = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("vflash_analysis.progress.time", clock_of_its_own)

    class Screen(io.StringIO):
        def isatty(self):
            return True

    screen, plain = Screen(), io.StringIO()
    for stream in (screen, plain):
        now[0] = 0.0
        line = CountLine("clips read", 100, stream)
        for done in range(1, 101):
            now[0] += 1.0
            line.update(done, "2 bad" if done >= 50 else "")
    redrawn = screen.getvalue().split("\r\x1b[K")
    assert redrawn[1] == "1/100 clips read, about 1:39 left" and len(redrawn) == 101
    assert screen.getvalue().count("\n") == 1
    assert plain.getvalue().splitlines() == [
        "30/100 clips read, about 1:10 left",
        "60/100 clips read, 2 bad, about 0:40 left",
        "90/100 clips read, 2 bad, about 0:10 left",
        "100/100 clips read, 2 bad, in 1:40",
    ]


def test_progress_is_one_live_line_on_a_terminal_and_plain_lines_elsewhere(monkeypatch):
    monkeypatch.setattr("vflash_analysis.progress.TICK_S", 0.01)
    screen = Terminal()
    line = ProgressLine(2, screen)
    line.start("decode-VDC-0", 65.0)
    line.show("clip 3/12")
    for _ in range(500):
        time.sleep(0.01)
        if "clip 3/12" in screen.getvalue():
            break
    line.end("ok", 5.0)
    line.close()
    assert "[1/2] decode-VDC-0 0:0" in screen.getvalue() and "about 1:0" in screen.getvalue()
    assert screen.getvalue().count("\n") == 1  # redrawn in place; only the end stays
    plain = io.StringIO()
    line = ProgressLine(2, plain)
    line.start("clips", 0.0, all_known=False)
    line.end("error", 61.0, "boom")
    line.start("decode", 90.0, all_known=False)
    line.close()
    assert plain.getvalue().splitlines() == [
        "[1/2] clips …",
        "[1/2] clips error in 1:01: boom",
        "[2/2] decode …, about 1:30 and more left",
    ]


def test_clock():
    assert [clock(s) for s in (0, 59.6, 61, 3600, 7322)] == [
        "0:00", "1:00", "1:01", "1:00:00", "2:02:02",
    ]  # fmt: skip


def test_statuses_are_distinct_and_documented():
    assert len(set(summary.STATUSES)) == len(summary.STATUSES)
    documented = inspect.getsource(execute.Ending).split("status: str  # ")[1].splitlines()[0]
    assert set(documented.split(", ")) <= set(summary.STATUSES)


@pytest.mark.parametrize("name", ["summary.csv", ".summary.lock"])
def test_a_summary_that_cannot_be_written_is_a_line_and_stops_nothing(runs, monkeypatch, name):
    ran = fake_runs(monkeypatch)
    (runs / "p" / name).mkdir(parents=True)
    told = io.StringIO()
    outcomes = runner.run_plan(chain_of(runs), "p", stream=told)
    assert ran == ["a", "b", "c", "d"] and {o.status for o in outcomes} == {"ok"}
    last = told.getvalue().splitlines()[-1]
    assert last.endswith("summary.csv: cannot be written (Is a directory)") and ".tmp" not in last


@pytest.mark.parametrize("cell", ["inf", "nan", "-1", "soon", "9" * 400, ""])
def test_a_damaged_cell_of_the_summary_costs_its_own_estimate(runs, cell):
    told = Summary("p")
    told.note("a", Outcome("a", "ok", 10.5))
    told.note("b", Outcome("b", "ok", 20))
    told.file.write_text(told.file.read_text().replace("10.5", cell))
    assert told.expected(["a", "b"]) == (20, False)
    told.note("c", Outcome("c", "ok", 30))
    assert told.read()["shard"].tolist() == ["a", "b", "c"]
