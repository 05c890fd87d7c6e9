"""The pocket target's trainings: examples, a few steps, clips of several lengths, a stop."""

import functools

import pytest
import torch

from vflash_analysis.clips.wording import QUESTIONS
from vflash_analysis.model.target import load_target
from vflash_analysis.training import pocket_model, pocket_pool, pocket_training


@functools.cache
def drawn(scenes, num_frames):
    """A pool of that many scenes of each family."""
    parts = [
        pocket_pool._draw(("target_evaluation", family, range(scenes), num_frames))
        for family in QUESTIONS
    ]
    return pocket_pool.join_parts(parts)


@pytest.fixture(scope="module")
def pool():
    return drawn(4, pocket_pool.NUM_FRAMES)


def test_a_few_steps_lower_the_losses_and_the_saved_folder_is_a_target(pool, tmp_path):
    torch.set_num_threads(1)
    tokenizer = pocket_model.train_tokenizer(pool.answers + pool.questions)
    text = pool.answers[0]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    examples = pocket_model.encode_examples(tokenizer, pool, pocket_pool.NUM_FRAMES)
    tokens, begin = examples[0]
    assert tokenizer.decode(tokens[begin:]) == text + "<|im_end|>"
    model = pocket_model.build_model(tokenizer, 0)
    tower_start = pocket_training.train_tower(model, pool, 1, batch=16)[0]["loss"]
    tower = pocket_training.train_tower(model, pool, 30, batch=16)
    assert tower[-1]["loss"] < tower_start
    before = model.model.vision_tower.state_dict()["encoder.layers.0.mlp.fc1.weight"].clone()
    rows = pocket_training.train_captions(model, tokenizer, pool, 6, batch=4, warmup=2)
    assert rows[-1]["loss"] < 6.6
    assert torch.equal(
        before, model.model.vision_tower.state_dict()["encoder.layers.0.mlp.fc1.weight"]
    )
    pocket_model.save_target(model, tokenizer, tmp_path)
    target = load_target(tmp_path, "float32", "cpu")
    prompt = target.build_prompt(pool.questions[0], pocket_pool.NUM_FRAMES)
    assert prompt.tolist() == tokens[:begin]
    pixels = target.prepare_frames(torch.from_numpy(pool.frames[0]))
    assert torch.allclose(pixels[0], pocket_model.normalise(pool.frames[0]), atol=1e-6)


def test_a_stopped_caption_training_ends_like_one_in_a_go(pool, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    tokenizer = pocket_model.train_tokenizer(pool.answers + pool.questions)
    monkeypatch.setattr(pocket_training, "CHECKPOINT_EVERY", 2)

    def run(steps, checkpoint):
        model = pocket_model.build_model(tokenizer, 0, 2)
        pocket_training.train_captions(
            model, tokenizer, pool, steps, batch=4, checkpoint=checkpoint
        )
        return model.state_dict()

    whole = run(4, None)
    checkpoint = tmp_path / "captions.pt"

    def stop_after_save(path, write):
        write(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(pocket_training, "replace_atomically", stop_after_save)
        run(4, checkpoint)
    resumed = run(4, checkpoint)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_steps_take_turns_among_lengths(pool, monkeypatch):
    """Each length goes through all clips; a step of longer clips takes fewer of them."""
    torch.set_num_threads(1)
    tokenizer = pocket_model.train_tokenizer(pool.answers + pool.questions)
    model = pocket_model.build_model(tokenizer, 0, 2)
    long, asked, shapes = drawn(1, 20), [], []
    picked = pocket_training._picked

    def note(step, batch, n_examples, seed):
        asked.append((step, batch, n_examples))
        return picked(step, batch, n_examples, seed)

    monkeypatch.setattr(pocket_training, "_picked", note)
    hook = model.model.multi_modal_projector.register_forward_pre_hook(
        lambda module, args: shapes.append(args[0].shape[0])
    )
    pocket_training.train_captions(model, tokenizer, long, 5, lengths=(2, 20), batch=4)
    hook.remove()
    assert asked == [
        (0, 4, 5),
        (0, 1, 5),
        (1, 4, 5),
        (1, 1, 5),
        (2, 4, 5),
    ]  # 4 * 9 frames: one of 20
    assert shapes == [8, 20, 8, 20, 8]  # frames read


@pytest.mark.parametrize(
    ("count", "frames", "expected"),
    [(1, 9, [4]), (3, 9, [1, 4, 7]), (9, 9, list(range(9))), (2, 50, [12, 37])],
)
def test_frames_are_taken_evenly(count, frames, expected):
    assert pocket_training.evenly(count, frames).tolist() == expected
