"""The pocket target's own training: labels, examples, a few steps, and the gates' judgement."""

import numpy as np
import pandas as pd
import pytest
import torch

from vflash_analysis.clips.wording import QUESTIONS
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import load_target
from vflash_analysis.strict import read_json
from vflash_analysis.training import pocket_target
from vflash_analysis.training.gates import judge_texts


@pytest.fixture(scope="module")
def pool():
    parts = [pocket_target._draw(("target_evaluation", family, 4, 0, 1)) for family in QUESTIONS]
    return pocket_target.join_parts(parts)


def test_patch_labels_of_a_square_between_two_patches():
    under = np.zeros((1, 64, 64), np.uint8)
    under[0, 8:16, 12:20] = 5  # covers half of patches (row 1, columns 1 and 2)
    codes, offsets = pocket_target._patch_labels(under)
    assert np.flatnonzero(codes[0]).tolist() == [9, 10]
    assert offsets[0, 9].tolist() == [0.5, 0.0]
    assert offsets[0, 10].tolist() == [-0.5, 0.0]


def test_dense_labels_of_a_circle_that_moves_and_turns():
    codes = torch.zeros(1, 2, 16, dtype=torch.long)
    codes[0, 0, 5] = (
        1 + 2 + 6 * (0 + 4 * 1)
    )  # a large blue circle in the second cell of the second row
    codes[0, 1, 6] = 1 + 3 + 6 * (0 + 4 * 1)  # a cell to the right, yellow
    codes[0, 1, 3] = 49  # the star
    labels = pocket_target.dense_labels(codes, torch.zeros(1, 2, 16, 2), torch.tensor([2]))
    assert labels["colour"][0, 0, 5] == 2 and labels["colour"][0, 1, 6] == 3
    assert labels["colour"][0, 0, 0] == 6 + 2 and labels["colour"][0, 1, 3] == 6 + 4
    assert (
        labels["shape"][0, 1, 6] == 1
        and labels["shape"][0, 1, 3] == 5
        and labels["shape"][0, 0, 0] == 0
    )
    assert labels["size"][0, 1, 6] == 2 and labels["size"][0, 1, 3] == 0
    assert labels["step"][0, 1, 6].tolist() == [2.0, 0.0]  # cells are two patches wide
    assert labels["first_colour"][0, 1, 6] == 2 and labels["first_size"][0, 1, 6] == 1
    assert labels["followed"][0, 1, 6] and not labels["followed"][0, 0, 5]


def test_cells_take_the_patch_nearest_to_the_centre():
    codes, offsets = torch.zeros(1, 1, 64, dtype=torch.long), torch.zeros(1, 1, 64, 2)
    codes[0, 0, [0, 9]] = torch.tensor([7, 8])  # both in the first cell
    offsets[0, 0, 0], offsets[0, 0, 9] = torch.tensor([1.0, 1.0]), torch.tensor([0.25, 0.0])
    code, offset = pocket_target.cells(codes, offsets)
    assert code[0, 0, 0] == 8 and code.sum() == 8
    assert offset[0, 0, 0].tolist() == [0.75, 0.5]  # patch 9 is the lower right one


def test_a_few_steps_lower_the_losses_and_the_saved_folder_is_a_target(pool, tmp_path):
    torch.set_num_threads(1)
    tokenizer = pocket_target.train_tokenizer(pool.answers + pool.questions)
    text = pool.answers[0]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    examples = pocket_target.encode_examples(tokenizer, pool.questions, pool.answers)
    tokens, begin = examples[0]
    assert tokenizer.decode(tokens[begin:]) == text + "<|im_end|>"
    model = pocket_target.build_model(tokenizer, 0)
    tower_start = pocket_target.train_tower(model, pool, 1, batch=16)[0]["loss"]
    tower = pocket_target.train_tower(model, pool, 30, batch=16)
    assert tower[-1]["loss"] < tower_start
    before = model.model.vision_tower.state_dict()["encoder.layers.0.mlp.fc1.weight"].clone()
    rows = pocket_target.train_captions(model, tokenizer, pool, 6, batch=4, warmup=2)
    assert rows[-1]["loss"] < 6.6
    assert torch.equal(
        before, model.model.vision_tower.state_dict()["encoder.layers.0.mlp.fc1.weight"]
    )
    pocket_target.save_target(model, tokenizer, tmp_path)
    target = load_target(tmp_path, "float32", "cpu")
    prompt = target.build_prompt(pool.questions[0], pocket_target.NUM_FRAMES)
    assert prompt.tolist() == tokens[:begin]
    pixels = target.prepare_frames(torch.from_numpy(pool.frames[0]))
    assert torch.allclose(pixels[0], pocket_target.normalise(pool.frames[0]), atol=1e-6)


def test_retrain_goes_on_where_it_stopped_and_refuses_other_settings(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    parts = [pocket_target._draw(("target_evaluation", f, 2, 0, 1)) for f in QUESTIONS]
    monkeypatch.setattr(pocket_target, "draw_pool", lambda *_: pocket_target.join_parts(parts))
    whole = pocket_target.build_model
    monkeypatch.setattr(pocket_target, "build_model", lambda t, seed: whole(t, seed, 2))

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(pocket_target, "train_captions", stop)
        pocket_target.retrain(tmp_path / "target", 2, tower_steps=1, caption_steps=1)
    with pytest.raises(InputError, match=r"target-work: holds a run with other settings"):
        pocket_target.retrain(tmp_path / "target", 2, tower_steps=2, caption_steps=1)
    monkeypatch.setattr(pocket_target, "train_tower", stop)  # must not be needed again
    pocket_target.retrain(tmp_path / "target", 2, tower_steps=1, caption_steps=1)
    record = read_json(tmp_path / "target" / "training_record.json")
    assert record["scenes"] == 10 and [row["step"] for row in record["captions"]] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert load_target(tmp_path / "target", "float32", "cpu").num_layers == 2


def test_a_stopped_caption_training_ends_like_one_in_a_go(pool, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    tokenizer = pocket_target.train_tokenizer(pool.answers + pool.questions)
    monkeypatch.setattr(pocket_target, "CHECKPOINT_EVERY", 2)

    def run(steps, checkpoint):
        model = pocket_target.build_model(tokenizer, 0, 2)
        pocket_target.train_captions(model, tokenizer, pool, steps, batch=4, checkpoint=checkpoint)
        return model.state_dict()

    whole = run(4, None)
    checkpoint = tmp_path / "captions.pt"

    def stop_after_save(path, write):
        write(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(pocket_target, "replace_atomically", stop_after_save)
        run(4, checkpoint)
    resumed = run(4, checkpoint)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_gates_judge_by_hand_computed_shares():
    references = [
        "a red circle stays still",
        "a blue square stays still",
        "a green cross rolls upwards",
    ]
    written = [
        "a red circle stays still",
        "a blue circle stays still",
        "a green cross rolls downwards",
    ]
    texts = pd.DataFrame(
        {
            "benchmark": "VDC",
            "prompt": "q",
            "reference": references,
            "text": written,
            "ended": [True, True, False],
        }
    )
    gates = judge_texts(texts).gates.set_index("gate")
    assert gates.loc["static attributes", "value"] == pytest.approx(5 / 6)
    assert not gates.loc["static attributes", "passed"]
    assert gates.loc["motion and events", "value"] == pytest.approx(2 / 3)
    assert gates.loc["texts that end by themselves", "value"] == pytest.approx(2 / 3)
    # text 1 with reference 0: shape and direction of three words; texts 2 and 0 with 1 and 2
    assert gates.loc["another clip's frames", "value"] == pytest.approx((2 / 3 + 0 + 0) / 3)
    assert gates.loc["another clip's frames", "passed"]
