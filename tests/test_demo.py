"""`vflash demo CLIP`: what is refused in one line, and a clip decoded, replayed and drawn."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from vflash_analysis import asking, cli, demo, own_clip
from vflash_analysis.clips import pocket
from vflash_analysis.clips.suites import DESCRIPTION_PROMPT
from vflash_analysis.errors import InputError
from vflash_analysis.own_clip import Request, decode_own_clip, default_prompt
from vflash_analysis.records import read_records
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


def test_the_failing_process_leaves_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(asking.sys, "executable", "/bin/false")
    with pytest.raises(InputError, match="demo: no message"):
        demo.decode_own(vars(request(tmp_path)))


@pytest.mark.slow
def test_a_clip_of_ones_own_is_decoded_replayed_and_drawn(tmp_path):
    clip = tmp_path / "mine.mp4"
    scene = next(iter(pocket.scenes("suites", "VDC", 0)))
    pocket.write_mp4(clip, scene, np.random.default_rng(0))
    words = ["demo", str(clip), "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told) == list(own_clip.METHODS) == list(demo.OWN_METHODS)
    assert len({one["text"] for one in told.values()}) == 1 and told["ar"]["text"]
    assert "prompt: Describe the clip in detail." in done.stdout
    rows = read_records(tmp_path / "out" / "records" / "generations.parquet", GENERATIONS)
    assert set(rows["clip_id"]) == {"mine"} and set(rows["status"]) == {"ok"}
    written = {path.name for path in (tmp_path / "out").glob("F*")}
    assert {"F2_cycle.svg", "F2_cycle.csv", "F3_replay.html", "F3_replay.gif"} <= written
