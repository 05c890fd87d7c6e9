"""What is told of a target before anything runs, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hub_notes import note_commit
from tests.tiny import save_target, tiny_target
from vflash_analysis import config, devices, paths, preflight, runner, stages
from vflash_analysis.errors import InputError
from vflash_analysis.shapes import LLAVA_ONEVISION_7B
from vflash_analysis.summary import Outcome

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


def set_key(*keys, value):
    """Damage that sets one value of a JSON file."""

    def damage(content):
        whole = json.loads(content)
        place = whole
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return json.dumps(whole).encode()

    return damage


def with_header(change):
    """Damage to a safetensors file's header, whose entry of the embedding is given."""

    def damage(content):
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        name = next(name for name in header if name.endswith("embed_tokens.weight"))
        entry = header.pop(name)
        if change == "rename":
            header["renamed"] = entry
        else:
            header[name] = {**entry, **change}
        told = json.dumps(header).encode()
        return len(told).to_bytes(8, "little") + told + content[end:]

    return damage


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "model.safetensors",
    "chat_template.jinja",
)
WHOLE = {
    "empty": b"",
    "half": lambda content: content[: len(content) // 2],
    "binary": b"\x00\xff\xfe\x80" * 50,
    "a list": b"[]",
    "a number": b"3",
    "deep": b"[" * 100_000,
}
VALUES = [
    *[
        ("generation_config.json", ("eos_token_id",), value)
        for value in ("x", -1, 62, 2**70, [2, "x"], 1.5, True, {"a": 1}, [None], [[2]])
    ],
    ("generation_config.json", ("pad_token_id",), "x"),
    *[
        ("config.json", ("text_config", key), value)
        for key in ("num_hidden_layers", "num_key_value_heads", "vocab_size", "hidden_size")
        for value in (0, -1, "x", 1.5, None, 2**70, [1])
    ],
    *[("config.json", ("text_config",), value) for value in ("x", [], None)],
    ("config.json", ("text_config", "num_attention_heads"), 3),
    ("config.json", ("text_config", "head_dim"), "x"),
    ("config.json", ("text_config", "max_position_embeddings"), 0),
    ("config.json", ("text_config", "hidden_act"), "zzz"),
    ("config.json", ("text_config", "rms_norm_eps"), "x"),
    (
        "config.json",
        ("text_config", "rope_parameters"),
        {"rope_type": "default", "rope_theta": "x"},
    ),
    ("config.json", ("text_config", "model_type"), 3),
    ("config.json", ("model_type",), "zzz"),
    ("config.json", ("vision_config",), "x"),
    ("config.json", ("vision_config", "patch_size"), 50),
    ("config.json", ("vision_config", "num_attention_heads"), 3),
    ("config.json", ("video_token_index",), "x"),
    ("config.json", ("video_token_index",), 62),
    ("config.json", ("dtype",), "zzz"),
    *[
        ("video_preprocessor_config.json", ("size", "height"), value)
        for value in ("x", -1, 2**70, None, 1e400, 20.5)
    ],
    *[
        ("video_preprocessor_config.json", ("rescale_factor",), value)
        for value in ("x", 0, float("nan"), None, [1])
    ],
    *[
        ("video_preprocessor_config.json", (key,), [value] * 3)
        for key in ("image_mean", "image_std")
        for value in ("a", None, float("inf"))
    ],
    ("video_preprocessor_config.json", ("image_std",), [0, 0, 0]),
    ("video_preprocessor_config.json", ("resample",), [3]),
    ("tokenizer_config.json", ("eos_token",), 3),
    ("tokenizer_config.json", ("added_tokens_decoder",), "x"),
    ("tokenizer_config.json", ("model_max_length",), "x"),
    ("tokenizer.json", ("model",), "x"),
    ("tokenizer.json", ("model", "vocab"), {}),
    ("tokenizer.json", ("added_tokens",), "x"),
]
DAMAGES = [
    *[
        pytest.param(name, damage, id=f"{name}-{kind}")
        for name in FILES
        for kind, damage in WHOLE.items()
        if name != "chat_template.jinja" or kind in ("half", "binary")  # the others are templates
    ],
    *[
        pytest.param(name, set_key(*keys, value=value), id=f"{name}-{'.'.join(keys)}-{value!r:.20}")
        for name, keys, value in VALUES
    ],
    *[
        pytest.param("chat_template.jinja", text.encode(), id=text)
        for text in (
            "{% if %}",
            "{{ 1/0 }}",
            "{{ raise_exception('no\nway') }}",
            "{{ a.b.c }}",
            "x",
        )
    ],
    *[
        pytest.param("model.safetensors", with_header(change), id=f"header-{change}")
        for change in ("rename", {"dtype": "ZZ"}, {"dtype": "I32"}, {"data_offsets": [-1, 5]})
    ],
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_file_of_the_target_is_one_line_that_names_it(folder, name, damage):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(damage(content) if callable(damage) else damage)
    (row,) = preflight.target_rows(ON_CPU)
    assert not row["ok"] and row["item"] == "target files"
    named = name.partition(".")[0] if name != "model.safetensors" else str(folder)
    assert named in row["note"] and "\n" not in row["note"] and len(row["note"]) < 600


@pytest.mark.parametrize(
    "weight_map",
    [None, [], {}, {"a": 3}, {"a": None, "b": "x"}, {"a": "../x"}, {"a": ""}, {"a": "x" * 5000}],
)
def test_an_index_that_names_no_files_is_one_line(folder, weight_map):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (row,) = preflight.target_rows(ON_CPU)
    assert row["note"].startswith(f"{index}: ") and "weight_map" in row["note"]
    assert len(row["note"]) < 300


@pytest.mark.parametrize("commits", [(), ("a" * 40,), ("a" * 40, "b" * 40)])
def test_files_of_several_commits_are_no_checkpoint(folder, commits):
    for name, commit in zip(("config.json", "tokenizer.json"), commits, strict=False):
        note_commit(folder, name, commit)
    row = rows_of(ON_CPU)["target revision"]
    mixed = (
        f"{folder}: found files of 2 commits of the hub (aaaaaaa, bbbbbbb), allowed: those of one"
    )
    assert row["ok"] == (len(commits) < 2)
    assert row["note"] == ("the folder does not tell its commit", "", mixed)[len(commits)]


def test_weights_that_are_a_part_of_the_model_are_told(folder, monkeypatch):
    monkeypatch.setattr(preflight, "stored_numbers", lambda _: 10)
    row = rows_of(ON_CPU)["target weights"]
    assert not row["ok"] and "found 10 stored numbers, allowed:" in row["note"]


def test_too_small_a_device_is_refused(folder, monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 1000)
    row = rows_of(ON_CPU)["memory, decode"]
    assert not row["ok"] and row["note"].startswith("device: found 1.0 kB free, allowed: ")
    assert row["wanted"] == "at most 1.0 kB free"
    monkeypatch.setattr(preflight, "free_bytes", lambda _: None)
    row = rows_of(ON_CPU)["memory, decode"]
    assert row["ok"] and row["wanted"] == "at most unknown"


def test_the_papers_setting_does_not_fit_a_small_gpu(monkeypatch):
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 20_000_000_000)
    (row,) = [
        row
        for row in preflight._memory_rows(H100, LLAVA_ONEVISION_7B)
        if row["item"] == "memory, decode"
    ]
    assert not row["ok"] and row["note"].startswith("device: found 20.0 GB free, allowed: 30.9 GB")
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: False)
    row = preflight._memory_rows(H100, LLAVA_ONEVISION_7B)[0]
    assert not row["ok"] and row["note"].startswith("device: found no CUDA device, allowed: ")


def test_a_target_that_a_stage_builds_has_nothing_to_tell():
    assert preflight.target_rows(config.load_profile("smoke")) == []


def test_the_light_commands_ask_a_process_of_its_own():
    rows = runner.ask_preflight("pocket", {"clips.num_frames": 3})
    assert {row["item"] for row in rows} >= {"template", "mask row", "memory, decode"}
    (row,) = runner.ask_preflight("pocket", {"clips.num_frames": -1})
    assert not row["ok"] and row["item"] == "target files"
    assert row["note"].startswith("cannot be looked at: clips.num_frames: found whole number -1")


def test_a_relative_folder_is_found_by_processes_that_run_in_the_checkout(tmp_path, monkeypatch):
    save_target(tiny_target(0, dtype=torch.float32), tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VFLASH_TARGET", "weights")
    monkeypatch.setenv("VFLASH_DATA", "videos")
    (shard, *_) = stages.plan("pocket")
    given = runner._request(shard, runner.Limits(), keep_stale=False)["environment"]
    assert given["VFLASH_TARGET"] == str(tmp_path / "weights")
    assert given["VFLASH_DATA"] == str(tmp_path / "videos")
    few = {"clips.num_frames": 4, "drafter.num_tapped_layers": 1}
    told = {row["item"]: row for row in runner.ask_preflight("h100", few)}
    assert told["target name"]["found"] == "weights"


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
    monkeypatch.setattr(devices, "LOCKS", tmp_path)
    monkeypatch.setattr(devices, "nvidia_smi", lambda *fields: [])
    monkeypatch.delenv(devices.VISIBLE_GPUS, raising=False)

    def stop(_):
        raise TimeoutError

    monkeypatch.setattr(devices.time, "sleep", stop)
    asked, ran = [], []
    unfit = {"item": "memory, decode", "ok": False, "note": "device: found no CUDA device"}

    def ask(profile, overrides, gpu):
        asked.append((profile, overrides))
        with pytest.raises(TimeoutError), devices.one_device("cuda", "b"):
            pass  # it is held meanwhile, so that nothing else computes there
        return [{"item": "template", "ok": True, "note": ""}, unfit]

    def run_shard(shard, *_):
        ran.append(shard.name)
        return Outcome(shard.name, "error", 0.0, "stopped here")

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
