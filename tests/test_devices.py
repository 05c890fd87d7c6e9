"""Device locks: one shard at a time on each, whoever asks, until its process is gone."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from vflash_analysis import devices, execute, paths, records
from vflash_analysis.devices import VISIBLE_GPUS, one_device, visible_gpus
from vflash_analysis.errors import InputError
from vflash_analysis.execute import Ending

TWO = [{"index": "0", "uuid": "GPU-aa-1"}, {"index": "1", "uuid": "GPU-ab-2"}]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "LOCKS", tmp_path)
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    return tmp_path


@pytest.fixture
def two_gpus(place, monkeypatch):
    monkeypatch.setattr(devices, "nvidia_smi", lambda *fields: TWO)
    return place


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ["GPU-aa-1", "GPU-ab-2"]),
        ("1", ["GPU-ab-2"]),
        (" 1, 0", ["GPU-ab-2", "GPU-aa-1"]),
        ("GPU-ab", ["GPU-ab-2"]),
        ("GPU-a", []),  # it could be either
        ("0,0", []),  # to CUDA a GPU that is named twice hides all
        ("1,0,GPU-ab", []),
        ("abc", []),
        ("1,-1,0", ["GPU-ab-2"]),
        ("1,7,0", ["GPU-ab-2"]),  # what follows an unknown one is not visible to CUDA either
        ("MIG-c", ["MIG-c"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_gpus_that_are_visible(two_gpus, monkeypatch, asked, found):
    if asked is not None:
        monkeypatch.setenv(VISIBLE_GPUS, asked)
    assert visible_gpus() == found


@pytest.mark.parametrize(
    ("asked", "found"), [(None, []), ("0,GPU-x", ["0", "GPU-x"]), ("-1", []), ("", [])]
)
def test_without_nvidia_smi_the_entries_stand_as_they_are(place, monkeypatch, asked, found):
    monkeypatch.setattr(devices, "nvidia_smi", lambda *fields: [])
    if asked is not None:
        monkeypatch.setenv(VISIBLE_GPUS, asked)
    assert visible_gpus() == found


def test_two_shards_get_two_gpus_and_a_third_waits_for_the_first_that_is_free(
    two_gpus, monkeypatch
):
    lines: list[str] = []
    with ExitStack() as first, one_device("cuda", "decode-b", lines.append) as other:
        one = first.enter_context(one_device("cuda", "decode-a", lines.append))
        assert [one, other] == [{VISIBLE_GPUS: "GPU-ab-2"}, {VISIBLE_GPUS: "GPU-aa-1"}]
        assert lines == []
        turns = iter([None, None, first.close])
        monkeypatch.setattr(devices.time, "sleep", lambda _: (next(turns) or (lambda: None))())
        with one_device("cuda", "decode-c", lines.append) as third:
            assert third == one
    (line,) = lines  # said once, as the holders stayed the same
    me = f"process {os.getpid()} since "
    assert line.startswith(f"decode-c waits: GPU-aa-1 is used by decode-b, {me}")
    assert f"; GPU-ab-2 is used by decode-a, {me}" in line


def test_the_cpu_is_one_device_and_gpus_that_cannot_be_told_apart_are_one(place, monkeypatch):
    monkeypatch.setattr(devices, "nvidia_smi", lambda *fields: [])

    def stop(_):
        raise TimeoutError

    monkeypatch.setattr(devices.time, "sleep", stop)
    for kind in ("cpu", "cuda"):
        with one_device(kind, "a") as environment:
            assert environment == {}
            with pytest.raises(TimeoutError), one_device(kind, "b"):
                pass
    with one_device("", "a"), one_device("", "b"):  # these need none
        pass
    assert {path.name for path in place.iterdir()} == {
        "vflash-device-cpu.lock",
        "vflash-device-cuda.lock",
    }


def test_a_lock_ends_with_its_process_however_that_ends(place):
    code = (
        "import pathlib, sys, time\n"
        "from vflash_analysis import devices\n"
        "devices.LOCKS = pathlib.Path(sys.argv[1])\n"
        "with devices.one_device('cpu', 'decode-x'):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        lines: list[str] = []

        def say(line):
            lines.append(line)
            holder.kill()

        with one_device("cpu", "decode-y", say):
            pass
    assert f"cpu is used by decode-x, process {holder.pid} since" in lines[0]


def test_a_lock_file_that_was_removed_is_not_a_lock(place, monkeypatch):
    really = devices.fcntl.flock

    def removed_first(file, flags):
        if not calls:
            (place / "vflash-device-cpu.lock").unlink()
        calls.append(flags)
        really(file, flags)

    calls: list[int] = []
    monkeypatch.setattr(devices.fcntl, "flock", removed_first)
    monkeypatch.setattr(devices, "POLL_S", 0.0)
    with one_device("cpu", "a", lambda line: None):
        assert len(calls) == 2 and (place / "vflash-device-cpu.lock").is_file()


@pytest.mark.parametrize(
    "put",
    [
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/null"),
        lambda path: path.symlink_to("nowhere"),
    ],
    ids=["folder", "pipe", "link", "broken link"],
)
def test_what_is_no_lock_file_is_refused_in_one_line(place, put):
    path = place / "vflash-device-cpu.lock"
    put(path)
    message = rf"^{path}: .*, allowed: a lock file; remove it$"
    with pytest.raises(InputError, match=message), one_device("cpu", "a"):
        pass


def test_other_users_may_lock_it_too(place):
    with one_device("cpu", "a"):
        pass
    assert (place / "vflash-device-cpu.lock").stat().st_mode & 0o777 == 0o666


def test_the_kernel_runs_on_the_gpu_that_was_taken(two_gpus, tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE_GPUS, "1")
    monkeypatch.setattr(execute, "end_with", lambda runner, end: None)
    monkeypatch.setenv(execute.TOKEN_VARIABLE, "")
    monkeypatch.setitem(sys.modules, "rfc3987_syntax", None)  # all three are put back afterwards
    seen = []

    def run(request):
        seen.append(os.environ[VISIBLE_GPUS])
        return Ending("ok")

    monkeypatch.setattr(execute, "execute", run)
    request = {
        "shard": "decode-a", "device": "cuda", "folder": str(tmp_path / "run"),
        "environment": {}, "runner": os.getppid(), "cwd": str(paths.ROOT),
    }  # fmt: skip
    records.write_json_atomic(tmp_path / "request.json", request)
    execute.main(str(tmp_path / "request.json"))
    assert seen == ["GPU-ab-2"]
