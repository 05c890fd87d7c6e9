"""What is told of a target before anything runs, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import save_target, tiny_target
from vflash_analysis import config, paths, preflight, runner, stages
from vflash_analysis.errors import InputError
from vflash_analysis.shapes import LLAVA_ONEVISION_7B

H100 = config.load_profile("h100")
ON_CPU = dataclasses.replace(
    H100,
    target=dataclasses.replace(H100.target, device="cpu", dtype="float32"),
    clips=dataclasses.replace(H100.clips, num_frames=4),
    drafter=dataclasses.replace(H100.drafter, num_tapped_layers=1),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    target = tiny_target(0, dtype=torch.float32)
    saved = save_target(target, tmp_path / "target")
    monkeypatch.setattr(config, "local_paths", lambda: {"target": saved})
    return saved


def rows_of(profile):
    return {row["item"]: row for row in preflight.target_rows(profile)}


def test_what_a_reader_should_know_of_a_target(folder):
    target, rows = tiny_target(0, dtype=torch.float32), rows_of(ON_CPU)
    assert all(row["ok"] for row in rows.values())
    assert rows["template"]["found"] == target.template_sha256[:16]
    assert rows["stop tokens"]["found"] == "<|im_end|> (2)"
    assert rows["mask row"]["found"] == str(target.mask_token_id)
    assert rows["tapped layers"]["found"] == "2"
    assert rows["prompt form"]["found"].startswith("<|im_start|>user <video>")
    described = "Please provide a detailed description of the video"
    prompt = target.build_prompt(described, 4)
    assert int(rows["prompt tokens, MVBench"]["found"]) > len(prompt)
    assert rows["memory, decode"]["note"].startswith("drafters' KV caches")


def test_the_papers_prompt_length_is_held_against_the_page(folder):
    same = dataclasses.replace(ON_CPU.clips, num_frames=128)
    target = tiny_target(0, dtype=torch.float32, max_positions=4096)
    save_target(target, folder)
    row = rows_of(dataclasses.replace(ON_CPU, clips=same))["prompt tokens, VDC"]
    assert row["wanted"] == "25,119" and row["note"].startswith("differs: another template")
    assert rows_of(ON_CPU)["prompt tokens, VDC"]["wanted"] == "any"  # of another number of frames


def test_too_long_a_prompt_is_told(folder):
    many = dataclasses.replace(ON_CPU.clips, num_frames=128)  # 1,153 video tokens of 512 positions
    row = rows_of(dataclasses.replace(ON_CPU, clips=many))["target files"]
    assert not row["ok"] and "max_position_embeddings 512" in row["note"]


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    row = rows_of(ON_CPU)["target files"]
    assert not row["ok"] and row["note"] == f"{folder}/model-2.safetensors: file not found"


def test_weights_that_are_a_part_of_the_model_are_told(folder, monkeypatch):
    monkeypatch.setattr(preflight, "stored_numbers", lambda _: 10)
    row = rows_of(ON_CPU)["target weights"]
    assert not row["ok"] and "found 10 stored numbers, allowed:" in row["note"]


def test_too_small_a_device_is_refused(folder, monkeypatch):
    monkeypatch.setattr(preflight, "_device_bytes", lambda _: 1000)
    row = rows_of(ON_CPU)["memory, decode"]
    assert not row["ok"] and row["note"].startswith("device: found 1.0 kB, allowed: ")


def test_the_papers_setting_does_not_fit_a_small_gpu(monkeypatch):
    monkeypatch.setattr(preflight, "_device_bytes", lambda _: 20_000_000_000)
    (row,) = [
        row
        for row in preflight._memory_rows(H100, LLAVA_ONEVISION_7B)
        if row["item"] == "memory, decode"
    ]
    assert not row["ok"] and row["note"].startswith("device: found 20.0 GB, allowed: 30.9 GB")


def test_a_target_that_a_stage_builds_has_nothing_to_tell():
    assert preflight.target_rows(config.load_profile("smoke")) == []


def test_the_light_commands_ask_a_process_of_its_own():
    rows = runner.ask_preflight("pocket", {"clips.num_frames": 3})
    assert {row["item"] for row in rows} >= {"template", "mask row", "memory, decode"}
    with pytest.raises(InputError, match=r"the target cannot be looked at: .*clips\.num_frames"):
        runner.ask_preflight("pocket", {"clips.num_frames": -1})


@pytest.mark.parametrize(
    ("wanted", "only", "refused"),
    [
        ({"target.device": "cuda"}, (), True),
        ({"target.device": "cuda"}, ("environment",), False),
        ({}, (), False),  # a tracked target on the CPU is not looked at
    ],
)
def test_a_run_is_refused_before_its_first_shard(
    wanted, only, refused, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    asked, ran = [], []
    unfit = {"item": "memory, decode", "ok": False, "note": "device: found no CUDA device"}

    def ask(profile, overrides):
        asked.append((profile, overrides))
        return [{"item": "template", "ok": True, "note": ""}, unfit]

    def run_shard(shard, *_):
        ran.append(shard.name)
        return runner.Outcome(shard.name, "error", 0.0, "stopped here")

    monkeypatch.setattr(runner, "ask_preflight", ask)
    monkeypatch.setattr(runner, "run_shard", run_shard)
    shards = stages.plan("pocket", wanted)
    if refused:
        with pytest.raises(InputError, match=r"^memory, decode: device: found no CUDA device$"):
            runner.run_plan(shards, "pocket", only)
        assert asked == [("pocket", wanted)] and not ran
    else:
        runner.run_plan(shards, "pocket", only)
        assert not asked and ran


def test_one_json_line_answers_a_request():
    done = subprocess.run(
        [sys.executable, "-m", "vflash_analysis.preflight"],
        input='{"profile": "smoke", "overrides": {}}',
        capture_output=True,
        text=True,
        cwd=paths.ROOT,
    )
    assert done.returncode == 0 and json.loads(done.stdout) == {"rows": []}
