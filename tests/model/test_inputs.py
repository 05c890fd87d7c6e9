"""Frames to pixels and a question to ids."""

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import (
    IM_END,
    IM_START,
    IMAGE,
    PREPROCESSING,
    SPECIAL,
    VIDEO,
    tiny_frames,
    tiny_target,
)
from vflash_analysis.errors import InputError
from vflash_analysis.model import inputs
from vflash_analysis.model.inputs import FramePreprocessing, pixel_values, prompt_text

CPU = torch.device("cpu")


def test_resized_pixels_agree_with_pillow():
    """Pillow's bicubic is antialiased and works in uint8; one grey level of rounding is allowed.

    Contrast is halved: Pillow also clips between its two passes, which shows on extreme noise.
    """
    frames = tiny_frames(0, 3) // 2 + 64
    pixels = pixel_values(frames, PREPROCESSING, torch.float32, CPU)
    assert pixels.shape == (1, 3, 3, 20, 20)
    levels = (pixels[0] * 0.5 + 0.5) * 255
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)  # rounded to uint8
    for frame, level in zip(frames, levels, strict=True):
        image = Image.fromarray(frame.numpy()).resize((20, 20), Image.Resampling.BICUBIC)
        expected = torch.as_tensor(np.array(image)).permute(2, 0, 1).float()
        assert (level - expected).abs().max() <= 1.001


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_pixels_agree_with_the_official_processor():
    from transformers import LlavaOnevisionVideoProcessor

    processor = LlavaOnevisionVideoProcessor(
        size={"height": 20, "width": 20}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    frames = tiny_frames(1, 4)
    official = processor(frames.permute(0, 3, 1, 2), return_tensors="pt")["pixel_values_videos"]
    ours = pixel_values(frames, PREPROCESSING, torch.float32, CPU)
    assert (ours - official).abs().max() <= 2 / 255 + 1e-5


def test_frames_of_the_right_size_are_only_scaled():
    settings = FramePreprocessing(2, 2, "bicubic", 1 / 255, (0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    frames = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    frames[0, 0, 1] = torch.tensor([255, 51, 102])
    pixels = pixel_values(frames, settings, torch.float64, CPU)
    torch.testing.assert_close(
        pixels[0, 0, :, 0, 1],
        torch.tensor([1.0, (0.2 - 0.25) / 0.25, 0.4], dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )
    assert pixels[0, 0, :, 1, 1].tolist() == [-1.0, -1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_do_not_depend_on_the_frames_prepared_together(monkeypatch, dtype):
    frames = tiny_frames(2, 2 * inputs.FRAMES_AT_ONCE + 1)
    pixels = pixel_values(frames, PREPROCESSING, dtype, CPU)
    monkeypatch.setattr(inputs, "FRAMES_AT_ONCE", len(frames))
    assert torch.equal(pixels, pixel_values(frames, PREPROCESSING, dtype, CPU))


def test_arrays_are_taken_and_overshoot_is_clamped():
    frames = np.zeros((1, 40, 40, 3), dtype=np.uint8)
    frames[:, :, 20:] = 255  # bicubic overshoots at the edge
    pixels = pixel_values(frames, PREPROCESSING, torch.float32, CPU)
    assert pixels.min() == -1 and pixels.max() == 1


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(1, 4, 4, 3),
        torch.zeros(4, 4, 3, dtype=torch.uint8),
        torch.zeros(1, 4, 4, 4, dtype=torch.uint8),
        torch.zeros(0, 4, 4, 3, dtype=torch.uint8),
    ],
)
def test_other_frames_are_refused(frames):
    with pytest.raises(InputError, match="frames: found"):
        pixel_values(frames, PREPROCESSING, torch.float32, CPU)


@pytest.mark.parametrize("num_frames", [1, 2, 8])
def test_the_placeholder_is_expanded_to_the_frames_and_a_newline(num_frames):
    target = tiny_target(0)
    ids = target.build_prompt("what happens", num_frames).tolist()
    assert ids.count(VIDEO) == num_frames * 9 + 1
    first = ids.index(VIDEO)
    assert ids[first : first + num_frames * 9 + 1] == [VIDEO] * (num_frames * 9 + 1)
    assert ids[0] == IM_START and IM_END in ids
    words = target.tokenizer.convert_ids_to_tokens(ids[first + num_frames * 9 + 1 :])
    assert words == ["what", "happens", "<|im_end|>", "<|im_start|>", "assistant"]


# The two forms that circulate for LLaVA-OneVision: a space or a newline after the role, nothing or
# a newline after a turn. Neither adds a system prompt.
ROLE_AND_TURN = {
    (" ", ""): "<|im_start|>user <video>\nWhat happens?<|im_end|><|im_start|>assistant\n",
    ("\n", "\n"): "<|im_start|>user\n<video>\nWhat happens?<|im_end|>\n<|im_start|>assistant\n",
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the special ones: whatever a template writes can be read back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<image>", "<video>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=special
    )


@pytest.mark.parametrize("form", ROLE_AND_TURN)
def test_both_circulating_chat_templates_give_their_prompt(form):
    role, turn = form
    target = tiny_target(0)
    target.tokenizer = byte_tokenizer()
    target.template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + " + repr(role) + " }}"
        "{% for part in message['content'] if part['type'] == 'video' %}{{ '<video>' }}{% endfor %}"
        "{% for part in message['content'] if part['type'] == 'text' %}"
        "{{ '\n' + part['text'] }}{% endfor %}{{ '<|im_end|>' + " + repr(turn) + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    expected = ROLE_AND_TURN[form]
    assert prompt_text(target, "What happens?") == expected
    ids = target.build_prompt("What happens?", 4).tolist()
    assert target.tokenizer.decode(ids) == expected.replace("<video>", "<video>" * 37)


def test_a_question_must_not_spell_a_placeholder():
    target = tiny_target(0)
    with pytest.raises(InputError, match="gives 2 video and 0 image placeholders"):
        target.build_prompt("what is <video> then", 2)
    with pytest.raises(InputError, match="1 image"):
        target.build_prompt("what is <image> then", 2)
    assert IMAGE not in target.build_prompt("what happens", 2).tolist()


def test_a_template_without_a_placeholder_is_named():
    target = tiny_target(0)
    target.template = target.template.replace("<video>", "")
    target.template_file = "folder/chat_template.jinja"
    with pytest.raises(InputError, match=r"folder/chat_template\.jinja: .* 0 video"):
        target.build_prompt("what happens", 2)


def test_no_frames_are_refused():
    with pytest.raises(InputError, match="num_frames: found 0"):
        tiny_target(0).build_prompt("what happens", 0)
