"""The child process: limits, crashes, interrupts, leaks, hidden readers; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clips import make_clips as make
from tests.processes import alive, gone_within
from vflash_analysis.clips.read import ClipError, FrameReader, check_clip
from vflash_analysis.errors import InputError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
linux_only = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="counts through /proc; runs on Linux"
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_clip(tmp_path_factory.mktemp("clips") / "good.mp4")


@pytest.fixture(scope="module")
def other(clip: Path) -> Path:
    """A good file that the stub readers treat badly, because of its name."""
    path = clip.with_name("bad.mp4")
    path.write_bytes(clip.read_bytes())
    return path


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the child import `stub_readers`."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def child_facts(reader: FrameReader) -> dict[str, Any]:
    """What the reader's child, started if need be, told of itself."""
    reader._child.start()
    return reader._child.environment


# ---------------------------------------------------------------- limits and crashes


@pytest.mark.parametrize("stub", ["spin", "sleep"])
@pytest.mark.usefixtures("stubs")
def test_005_006_033_a_clip_over_the_limit_times_out_and_the_next_one_is_read(
    clip: Path, other: Path, stub: str
) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    with FrameReader(3.0, f"stub_readers:{stub}") as reader:
        first = child_facts(reader)["pid"]
        rows = [check_clip(one, 4, reader) for one in (clip, other, clip)]
        assert [row["reason"] for row in rows] == [None, "timeout", None]
        assert "3 s" in rows[1]["message"]
        second = child_facts(reader)["pid"]
        assert second != first and not alive(first)
    assert not alive(second)
    left = {name for name in set(os.listdir(tempfile.gettempdir())) - before if "vflash" in name}
    assert not left


@pytest.mark.usefixtures("stubs")
def test_a_reader_that_aborts_costs_one_clip(clip: Path, other: Path) -> None:
    with FrameReader(60, "stub_readers:abort") as reader:
        rows = [check_clip(one, 4, reader) for one in (other, clip)]
    assert [row["reason"] for row in rows] == ["crashed", None]
    assert str(-signal.SIGABRT) in rows[0]["message"]
    assert "native check failed" in rows[0]["message"]


def test_a_child_killed_between_two_clips_is_replaced(clip: Path) -> None:
    with FrameReader(60) as reader:
        pid = child_facts(reader)["pid"]
        os.kill(pid, signal.SIGKILL)
        assert len(reader.read(clip, 4).frames) == 4
        assert child_facts(reader)["pid"] != pid


@pytest.mark.usefixtures("stubs")
def test_an_interrupt_leaves_no_child_and_the_reader_usable(clip: Path, other: Path) -> None:
    with FrameReader(60, "stub_readers:spin") as reader:
        pid = child_facts(reader)["pid"]
        main = threading.main_thread().ident
        assert main is not None
        # A real signal to this thread, as Jupyter's stop button sends it.
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            reader.read(other, 4)
        assert not alive(pid)
        assert reader.read(clip, 4).indices.tolist() == [3, 11, 18, 26]


def test_closing_ends_the_child_and_reading_again_starts_another(clip: Path) -> None:
    reader = FrameReader(60)
    reader.read(clip, 2)
    pid = child_facts(reader)["pid"]
    reader.close()
    assert not alive(pid)
    reader.close()  # twice is harmless
    assert len(reader.read(clip, 2).frames) == 2
    pid = child_facts(reader)["pid"]
    del reader
    assert gone_within(pid, 5)


def run_python(code: str, **kwargs: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        **kwargs,  # type: ignore[call-overload]
    )


@linux_only
def test_006_no_child_outlives_a_killed_parent(clip: Path) -> None:
    code = (
        "import sys, time\n"
        "from vflash_analysis.clips.read import FrameReader\n"
        f"reader = FrameReader(60); reader.read({str(clip)!r}, 2)\n"
        "print(reader._child.environment['pid'], flush=True); time.sleep(60)\n"
    )
    parent = run_python(code)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone_within(child, 10)


@pytest.mark.usefixtures("stubs")
def test_005_a_spinning_child_without_a_parent_is_ended_by_its_own_timer(other: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "vflash_analysis.clips.serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])},
    )
    request = (
        f'{{"path": "{other}", "backend": "stub_readers:spin", "wanted": {{"num_frames": 2}}, '
        '"num_threads": 1, "give_up_s": 0.5}\n'
    )
    out, _ = child.communicate(request.encode(), timeout=900)
    assert child.returncode == -signal.SIGALRM
    assert b"pid" in out  # it had come up


# ---------------------------------------------------------------- the protocol


@pytest.mark.usefixtures("stubs")
def test_what_libraries_print_does_not_reach_the_protocol(clip: Path) -> None:
    with FrameReader(60, "stub_readers:chatty") as reader:
        assert reader.read(clip, 4).indices.tolist() == [3, 11, 18, 26]
        assert reader.read(clip, 2).indices.tolist() == [7, 22]


@pytest.mark.usefixtures("stubs")
def test_009_replaced_frames_are_counted_and_refused_over_the_limit(clip: Path) -> None:
    with FrameReader(60, "stub_readers:patched", max_substituted_share=0.25) as reader:
        info = reader.read(clip, 8).info  # 2 of 8: at the limit
        assert (info.n_substituted, info.n_identical) == (2, 1)
        assert info.flags == ("identical", "substituted")
        with pytest.raises(ClipError, match="2 of 7 frames") as caught:
            reader.read(clip, 7)
        assert caught.value.reason == "damaged"


@pytest.mark.parametrize("stub", ["four_channels", "too_few"])
@pytest.mark.usefixtures("stubs")
def test_025_a_reader_that_breaks_its_contract_gives_a_bad_clip(clip: Path, stub: str) -> None:
    with (
        FrameReader(60, f"stub_readers:{stub}") as reader,
        pytest.raises(ClipError, match="frames"),
    ):
        reader.read(clip, 4)


@pytest.mark.usefixtures("stubs")
def test_a_reader_of_ones_own_keeps_its_reasons(clip: Path, tmp_path: Path) -> None:
    sound = make.write_sound(tmp_path / "sound.mp4")
    with FrameReader(60, "stub_readers:chatty") as reader, pytest.raises(ClipError) as caught:
        reader.read(sound, 4)
    assert caught.value.reason == "no_video_stream"
    assert "the file has no video stream" in caught.value.detail


@pytest.mark.parametrize("backend", ["opencv", "", "Decord"])
def test_an_unknown_reader_is_refused_with_what_is_allowed(backend: str) -> None:
    with pytest.raises(InputError, match="decord, pyav"):
        FrameReader(60, backend)


@pytest.mark.parametrize("backend", ["no_such_module:read", "stub_readers:no_such_function"])
@pytest.mark.usefixtures("stubs")
def test_a_reader_of_ones_own_that_is_not_there_stops_the_run(clip: Path, backend: str) -> None:
    with FrameReader(60, backend) as reader, pytest.raises(InputError, match="no_such") as caught:
        reader.read(clip, 4)
    assert not isinstance(caught.value, ClipError)


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(InputError, match="timeout"):
        FrameReader(limit)


# ---------------------------------------------------------------- environment


def test_007_the_users_retry_limit_reaches_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECORD_EOF_RETRY_MAX", "99")
    with FrameReader(60) as reader:
        assert child_facts(reader)["decord_eof_retry_max"] == "99"


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_034_the_thread_count_is_a_setting_and_changes_no_frame(clip: Path, backend: str) -> None:
    frames = []
    for threads in (1, 4):
        with FrameReader(60, backend, fallback=False, num_threads=threads) as reader:
            frames.append(reader.read(clip, 8).frames)
    assert np.array_equal(*frames)


@pytest.fixture
def hide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make modules unimportable in the child."""

    def hide(*modules: str) -> None:
        for module in modules:
            (tmp_path / f"{module}.py").write_text(
                f"raise ModuleNotFoundError('hidden', name={module!r})\n"
            )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return hide


def test_035_without_decord_the_message_names_the_alternatives_and_pyav_works(
    clip: Path, hide: Callable[..., None]
) -> None:
    with FrameReader(60) as reader:
        with_decord = reader.read(clip, 8)
    hide("decord")
    with FrameReader(60, "decord", fallback=False) as reader:
        assert child_facts(reader)["decord"] is None
        with pytest.raises(InputError, match=r"eva-decord.*decord2.*av.*pyav") as caught:
            reader.read(clip, 8)
        assert not isinstance(caught.value, ClipError)  # every clip would fail: not a bad clip
    with FrameReader(60, "decord") as reader:
        got = reader.read(clip, 8)
    assert got.info.reader == "pyav"
    assert "decord cannot be imported" in got.info.warnings[0]
    assert np.abs(got.frames.astype(int) - with_decord.frames).max() <= 2


def test_035_a_broken_install_is_not_a_bad_clip(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decord.py").write_text("raise OSError('libdecord.so: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with FrameReader(60, fallback=False) as reader, pytest.raises(InputError) as caught:
        reader.read(clip, 4)
    assert not isinstance(caught.value, ClipError)
    assert "libdecord.so: cannot open" in str(caught.value)
    with FrameReader(60) as reader:
        assert reader.read(clip, 4).info.reader == "pyav"


def test_035_without_any_reader_the_run_stops(clip: Path, hide: Callable[..., None]) -> None:
    hide("decord", "av")
    with FrameReader(60) as reader, pytest.raises(InputError, match="no reader of clips"):
        reader.read(clip, 8)


def test_013_decord_alone_still_reads_and_says_what_it_cannot_tell(
    clip: Path, tmp_path: Path, hide: Callable[..., None]
) -> None:
    sound = make.write_sound(tmp_path / "sound.mp4")
    hide("av")
    with FrameReader(60) as reader:
        info = reader.read(clip, 8).info
        assert (info.n_frames, info.codec, info.declared_frames) == (30, None, None)
        with pytest.raises(ClipError, match="install av") as caught:
            reader.read(sound, 8)
    assert caught.value.reason == "no_video_stream"


def test_files_in_the_working_directory_do_not_become_the_reader(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("av.py", "decord.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('wrong module')\n")
    monkeypatch.chdir(tmp_path)
    with FrameReader(60) as reader:
        assert reader.read(clip, 4).info.reader == "decord"


# ---------------------------------------------------------------- this process and its resources


def test_030_031_this_process_never_loads_decord_and_ends_cleanly(clip: Path) -> None:
    code = (
        "import sys\n"
        "from vflash_analysis.clips import read, suites\n"
        "from vflash_analysis.clips.read import FrameReader\n"
        f"with FrameReader(60) as reader: reader.read({str(clip)!r}, 2)\n"
        "loaded = {'decord', 'av', 'torch', 'transformers'} & set(sys.modules)\n"
        "print(sorted(loaded))\n"
        "import torch\n"
        "print(torch.ones(2).sum().item())\n"
    )
    process = run_python(code)
    out, _ = process.communicate(timeout=900)  # a guard against a hang, not a measurement
    assert out.split("\n")[:2] == ["[]", "2.0"]
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_033_a_forked_worker_gets_a_child_of_its_own_and_leaves_its_parents_alone(
    clip: Path,
) -> None:
    with FrameReader(60) as reader:
        reader.read(clip, 2)
        mine = child_facts(reader)["pid"]
        worker = os.fork()
        if worker == 0:
            try:
                good = reader.read(clip, 2).indices.tolist() == [7, 22]
                theirs = child_facts(reader)["pid"]
                reader.close()
                os._exit(0 if good and theirs != mine and not alive(theirs) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0
        assert alive(mine)
        assert reader.read(clip, 2).indices.tolist() == [7, 22]
        assert child_facts(reader)["pid"] == mine


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@linux_only
def test_027_sampling_a_long_clip_decodes_nothing_in_the_background(tmp_path: Path) -> None:
    path = make.write_clip(
        tmp_path / "long.mp4",
        n_frames=1500,
        width=320,
        height=240,
        options={"preset": "ultrafast", "g": "50"},
    )
    with FrameReader(60) as reader:
        pid = child_facts(reader)["pid"]
        before = resident_kib(pid)
        assert reader.read(path, 4).info.reader == "decord"
        time.sleep(1.0)  # all frames together would be 345 MB
        assert resident_kib(pid) - before < 100_000


@linux_only
@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_029_three_hundred_opens_leave_memory_threads_and_files_as_they_were(
    clip: Path, backend: str
) -> None:
    with FrameReader(60, backend, fallback=False) as reader:
        for _ in range(20):  # caches fill
            reader.read(clip, 2)
        pid = child_facts(reader)["pid"]
        proc = Path(f"/proc/{pid}")

        def state() -> tuple[int, int, int]:
            files, threads = (
                len(list((proc / "fd").iterdir())),
                len(list((proc / "task").iterdir())),
            )
            return resident_kib(pid), files, threads

        before = state()
        for _ in range(300):
            reader.read(clip, 2)
        after = state()
        assert after[0] - before[0] < 20_000
        assert after[1:] == before[1:]
