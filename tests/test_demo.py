"""`vflash demo CLIP`: what is refused in one line, and a clip decoded, replayed and drawn."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.processes import gone_within
from tests.results.synthetic import generation_row
from vflash_analysis import asking, cli, demo, own_clip, paths
from vflash_analysis.clips import pocket
from vflash_analysis.clips.suites import DESCRIPTION_PROMPT
from vflash_analysis.decoding.lossless import LosslessError
from vflash_analysis.errors import InputError
from vflash_analysis.own_clip import Request, decode_own_clip, default_prompt
from vflash_analysis.records import read_records, write_records
from vflash_analysis.results.playback import ONE_TOKEN
from vflash_analysis.schemas import GENERATIONS


def request(tmp_path, **changes):
    values = {"clip": str(tmp_path / "a.mp4"), "prompt": "", "out": str(tmp_path / "out")}
    values |= {"profile": "pocket", "overrides": {}, "target": "", "drafter": ""}
    return Request(**values | changes)


def test_a_clip_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"clip: found no file .*a\.mp4, allowed: a video file"):
        decode_own_clip(request(tmp_path))


def test_another_target_needs_a_drafter_of_its_own(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"x")
    with pytest.raises(InputError, match="drafter: found none, allowed: --drafter DIR"):
        decode_own_clip(request(tmp_path, target=str(tmp_path)))


def test_a_file_that_is_no_video_and_a_folder_without_drafter_are_named(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(InputError, match="clip a: "):
        decode_own_clip(request(tmp_path))
    with pytest.raises(InputError, match=str(tmp_path)):
        decode_own_clip(request(tmp_path, drafter=str(tmp_path)))


def test_the_question_asked_where_none_is_given():
    assert default_prompt(True) == "Describe the clip in detail."
    assert default_prompt(False) == DESCRIPTION_PROMPT


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", "What?"], "--prompt, --target, --drafter, --out: allowed with CLIP only"),
        (["a.mp4", "--clip", "x"], "--clip, --all, --keep-stale: allowed without CLIP only"),
    ],
)
def test_options_of_the_other_form_are_refused(words, told):
    found = CliRunner().invoke(cli.app, ["demo", *words])
    assert isinstance(found.exception, InputError) and told in str(found.exception)


def test_help_says_what_needs_a_clip_and_what_the_pocket_target_knows():
    told = CliRunner().invoke(cli.app, ["demo", "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("--prompt", "--target", "--drafter", "--out"):
        (line,) = [line for line in told.splitlines() if f" {option} " in line and "│" in line]
        assert "with CLIP: " in line
    assert "knows only generated shapes" in " ".join(told.split())


def test_the_failing_process_leaves_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(asking.sys, "executable", "/bin/false")
    with pytest.raises(InputError, match="demo: no message"):
        demo.decode_own(vars(request(tmp_path)))


class Terminal(io.StringIO):
    """A standard error on which a line was seen."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def write(self, text):
        self._note.write_text(text)
        return super().write(text)


ANSWERS = """
import pathlib, sys, time
from vflash_analysis.asking import answer
from vflash_analysis.errors import InputError

def respond(asked):
    print("loads 1/9\\rloads 9/9\\nclip 1/3", file=sys.stderr)
    print("loads", "x" * 100_000)  # more than a pipe holds
    note, end = pathlib.Path(asked["note"]), time.monotonic() + 60
    while not note.exists() and time.monotonic() < end:
        time.sleep(0.01)
    if asked["way"] == "refuse":
        raise InputError("clip: found 3, allowed: 4")
    if asked["way"] == "fail":
        raise RuntimeError("out of luck")
    return {"seen": note.exists()}

sys.exit(answer(respond))
"""


def test_what_a_process_says_is_seen_while_it_runs(tmp_path, monkeypatch):
    (tmp_path / "answers.py").write_text(ANSWERS)
    note, place = tmp_path / "note", {"PYTHONPATH": f"{tmp_path}:{paths.ROOT}"}

    def ask(way, live=True):
        terminal = Terminal(note)
        monkeypatch.setattr(asking.sys, "stderr", terminal)
        asked = {"note": str(note), "way": way}
        try:
            return asking.ask("answers", asked, place, live=live), terminal.getvalue()
        except InputError as error:
            return str(error), terminal.getvalue()

    said = "loads 1/9\rloads 9/9\nclip 1/3\n"
    assert ask("answer") == ({"seen": True}, said)
    assert ask("answer", live=False) == ({"seen": True}, "")
    # the reason is told once, by whoever asked
    assert ask("refuse") == ("clip: found 3, allowed: 4", said)
    reason, seen = ask("fail")
    assert reason == "RuntimeError: out of luck" and seen.startswith(f"{said}Traceback")


SLEEPS = """
import os, pathlib, sys, time
from vflash_analysis.asking import answer

def respond(asked):
    pathlib.Path(asked["note"]).write_text(f"{os.getpid()}\\n")
    time.sleep(120)
    return {}

sys.exit(answer(respond))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_the_one_that_asked(tmp_path, how):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    note = tmp_path / "note"
    code = f"from vflash_analysis.asking import ask; ask('sleeps', {{'note': {str(note)!r}}})"
    place = {**os.environ, "PYTHONPATH": f"{tmp_path}:{paths.ROOT}"}
    with subprocess.Popen([sys.executable, "-c", code], env=place, cwd=tmp_path) as asker:
        end = time.monotonic() + 60
        while not (note.exists() and note.read_text().endswith("\n")):
            assert time.monotonic() < end
            time.sleep(0.05)
        child = int(note.read_text())
        asker.send_signal(how)
    try:
        assert gone_within(child, 10)
    finally:
        if not gone_within(child, 0.1):
            os.kill(child, signal.SIGKILL)


def test_a_lossy_text_is_told_in_one_line(monkeypatch, capsys):
    def lossy(asked):
        raise LosslessError("1 of 6 texts differ from greedy decoding in float32")

    monkeypatch.setattr(own_clip, "decode_own_clip", lossy)
    words = dict.fromkeys(("clip", "prompt", "out", "profile", "target", "drafter"), "")
    asked = json.dumps(words | {"overrides": {}})
    monkeypatch.setattr(asking.sys, "stdin", io.StringIO(asked))
    assert own_clip.main() == asking.BAD_INPUT
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "refused": "1 of 6 texts differ from greedy decoding in float32"
    }
    assert said.err == ""


def test_a_text_of_one_token_is_told_with_its_time(tmp_path, monkeypatch):
    def decode_own(asked):
        rows = [
            generation_row(
                method, "mine", new_tokens=1, text="Yes", token_ids=[7], text_ends=[3],
                verify_calls=0, decode_s=0.001,
            )
            for method in own_clip.METHODS
        ]  # fmt: skip
        write_records(Path(asked["out"]) / "generations.parquet", rows, GENERATIONS)
        return {
            "clip_id": "mine",
            "prompt": "Is it red?",
            "methods": list(own_clip.METHODS),
            "pocket": True,
        }

    monkeypatch.setattr(demo, "decode_own", decode_own)
    words = ["demo", "mine.mp4", "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1]) == {
        method: {"decode_s": 0.001, "text": "Yes"} for method in own_clip.METHODS
    }
    assert "prompt: Is it red?" in done.stdout and done.stdout.count("│ Yes") == 3
    assert ONE_TOKEN in done.stdout and "ratio" not in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["records"]


@pytest.mark.slow
def test_a_clip_of_ones_own_is_decoded_replayed_and_drawn(tmp_path):
    clip = tmp_path / "mine.mp4"
    scene = next(iter(pocket.scenes("suites", "VDC", 0)))
    pocket.write_mp4(clip, scene, np.random.default_rng(0))
    words = ["demo", str(clip), "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told) == list(own_clip.METHODS)
    assert len({one["text"] for one in told.values()}) == 1 and told["ar"]["text"]
    assert "prompt: Describe the clip in detail." in done.stdout
    assert "decoding mine.mp4 at 9 frames: ar, chain, tree60" in done.stderr
    assert "warming up: 16 tokens with each method" in done.stderr
    assert demo.POCKET_ONLY in done.stdout and demo.ONE_DECODE_EACH in done.stdout
    assert demo.POCKET_ONLY in (tmp_path / "out" / "F3_replay.html").read_text()
    assert "by hand" not in (tmp_path / "out" / "F2_cycle.svg").read_text()
    rows = read_records(tmp_path / "out" / "records" / "generations.parquet", GENERATIONS)
    assert set(rows["clip_id"]) == {"mine"} and not rows["warmup"].any()
    assert set(rows["status"]) == {"ok"}
    written = {path.name for path in (tmp_path / "out").glob("F*")}
    assert {"F2_cycle.svg", "F2_cycle.csv", "F3_replay.html", "F3_replay.gif"} <= written
