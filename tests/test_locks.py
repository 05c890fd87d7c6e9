"""Locks of run folders: one holder at a time, and none that is dead or was silent for long."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vflash_analysis import locks
from vflash_analysis.errors import InputError
from vflash_analysis.locks import LOCK_NAME, TOKEN_VARIABLE, FolderLock


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


def test_a_lock_that_is_taken_over_between_look_and_touch_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.01)
    path, other = tmp_path / LOCK_NAME, tmp_path / "other"
    other.write_text(json.dumps({"pid": 1, "host": "elsewhere", "token": "other's"}))
    os.utime(other, (1, 1))
    looked = FolderLock._owner

    def taken_over_after(lock):
        found = looked(lock)
        if other.exists():
            os.replace(other, path)
        return found

    monkeypatch.setattr(FolderLock, "_owner", taken_over_after)
    with FolderLock(tmp_path):
        for _ in range(500):
            if not other.exists():
                break
            time.sleep(0.01)
        time.sleep(0.1)
        assert json.loads(path.read_text())["token"] == "other's" and path.stat().st_mtime == 1


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
