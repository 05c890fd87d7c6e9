"""Trainings of the pocket targets as a whole: what is kept, gone on from, refused and written."""

import pytest
import torch
from safetensors.torch import load_file

from tests.training.test_pocket_training import drawn
from vflash_analysis.config import load_profile
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import load_target
from vflash_analysis.strict import read_json
from vflash_analysis.training import pocket_target
from vflash_analysis.training.pocket_pool import NUM_FRAMES


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def small(monkeypatch):
    """Pools of two scenes, few lengths and models of two layers; returns what was to be drawn."""
    torch.set_num_threads(1)
    asked, build = [], pocket_target.build_model

    def draw(split, scenes, num_frames=9, first=0):
        asked.append((split, scenes, num_frames, first))
        return drawn(2, num_frames)

    monkeypatch.setattr(pocket_target, "draw_pool", draw)
    monkeypatch.setattr(pocket_target, "LENGTHS", (1, 3, 10))
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
    # scenes of each family, as many frames as the longest, after the two that the base has seen
    assert small[-1] == ("target_training", 1200, 10, 2)
    record = read_json(out / "training_record.json")
    assert record["frames"] == [1, 3, 10] and record["scenes"] == 10
    assert record["learning_rate"] == 7e-4 and record["captions"][-1]["step"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "lengths"]
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    same = {name for name in before if torch.equal(before[name], after[name])}
    tower = {name for name in before if "vision_tower" in name}
    assert tower and tower <= same and len(same) < len(before)
    target = load_target(out, "float32", "cpu")
    target.check_lengths(len(target.build_prompt("what happens?", 50)), 128)  # the longest fits


def test_the_lengths_span_a_factor_of_fifty_and_hold_the_pocket_targets():
    assert max(pocket_target.LENGTHS) == 50 * min(pocket_target.LENGTHS)
    assert NUM_FRAMES in pocket_target.LENGTHS and len(pocket_target.LENGTHS) == 6
    assert load_profile("pocket").lengths.num_frames == pocket_target.LENGTHS
