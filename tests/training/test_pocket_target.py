"""Trainings of the pocket targets as a whole: what is kept, gone on from, refused and written."""

import pytest
import torch
from safetensors.torch import load_file

from tests.training.test_pocket_training import drawn
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import load_target
from vflash_analysis.strict import read_json
from vflash_analysis.training import pocket_target


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def small(monkeypatch):
    """Pools of two scenes and models of two layers; returns what was asked of the drawing."""
    torch.set_num_threads(1)
    asked, build = [], pocket_target.build_model

    def draw(split, scenes, num_frames=4, first=0):
        asked.append((split, scenes, num_frames, first))
        return drawn(2, min(num_frames, 4))

    monkeypatch.setattr(pocket_target, "draw_pool", draw)
    monkeypatch.setattr(pocket_target, "build_model", lambda t, seed: build(t, seed, 2))
    return asked


def test_retrain_goes_on_where_it_stopped_and_refuses_other_settings(small, tmp_path, monkeypatch):
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(pocket_target, "train_captions", stop)
        pocket_target.retrain(tmp_path / "target", 2, tower_steps=1, caption_steps=1)
    with pytest.raises(InputError, match=r"target-work: holds a run with other settings"):
        pocket_target.retrain(tmp_path / "target", 2, tower_steps=2, caption_steps=1)
    monkeypatch.setattr(pocket_target, "train_tower", stop)  # must not be needed again
    pocket_target.retrain(tmp_path / "target", 2, tower_steps=1, caption_steps=1)
    record = read_json(tmp_path / "target" / "training_record.json")
    assert record["scenes"] == 10 and [row["step"] for row in record["captions"]] == [1]
    assert [row["step"] for row in record["tower"]] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert load_target(tmp_path / "target", "float32", "cpu").num_layers == 2


def test_the_target_of_many_lengths_goes_on_from_the_other(small, tmp_path, monkeypatch):
    base, out = tmp_path / "base", tmp_path / "lengths"
    pocket_target.retrain(base, 2, tower_steps=1, caption_steps=1)
    small.clear()
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(pocket_target, "train_captions", stop)
        pocket_target.retrain_lengths(base, out, caption_steps=6)
    assert not out.exists()
    refused = pytest.raises(InputError, match=r"lengths-work: holds a run with other settings")
    with refused:
        pocket_target.retrain_lengths(base, out, caption_steps=7)
    with monkeypatch.context() as other, refused:
        other.setattr(pocket_target, "sha256_of_file", lambda path: f"another {path.name}")
        pocket_target.retrain_lengths(base, out, caption_steps=6)
    pocket_target.retrain_lengths(base, out, caption_steps=6)
    # scenes of each family at each length, and the first of them: those before have the earlier ones
    assert small[-6:] == [
        ("target_training", 800, 2, 0),
        ("target_training", 800, 4, 800),
        ("target_training", 800, 9, 1600),
        ("target_training", 400, 20, 2400),
        ("target_training", 177, 45, 2800),
        ("target_training", 80, 100, 2977),
    ]
    record = read_json(out / "training_record.json")
    assert record["frames"] == [2, 4, 9, 20, 45, 100] and record["scenes"] == [10] * 6
    assert record["learning_rate"] == 6e-4 and record["captions"][-1]["step"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "lengths"]
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    same = {name for name in before if torch.equal(before[name], after[name])}
    tower = {name for name in before if "vision_tower" in name}
    assert tower and tower <= same and len(same) < len(before)
    target = load_target(out, "float32", "cpu")
    prompt = target.build_prompt("what happens?", 100)
    assert 1601 < len(prompt) < target.model.config.text_config.max_position_embeddings == 2048
    assert load_target(base, "float32", "cpu").tokenizer.model_max_length == 1024
    assert target.tokenizer.model_max_length == 2048
