"""A target and a drafter of any shape with random weights, made in place: for measuring cost.

What a forward costs depends on shapes alone, so the cost model needs no checkpoint. Weights are
drawn in their final dtype on their final device: 7B parameters in bfloat16 never exist in fp32 or
on the host. The vision tower is a stub, as no forward of decoding passes it, and there is no
tokenizer, as no text is read or written.

The decoder is Qwen2's whatever family a shape is of: the matrices are the same, and its biases of
queries, keys and values, which others lack, are under a thousandth of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from vflash_analysis.config import DrafterSettings
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_config
from vflash_analysis.model.frozen import Target
from vflash_analysis.model.inputs import FramePreprocessing
from vflash_analysis.model.network import VFlashDrafter
from vflash_analysis.model.text_stack import store_input_major
from vflash_analysis.shapes import TargetShape

STOP_ID, IMAGE_ID, VIDEO_ID = 0, 1, 2
SPARE_ROWS = 16  # embedding rows beyond the tokenizer, from which the mask is taken
_STUB_SIDE = 4  # pixels


class NoTokenizer:
    """What a target asks of a tokenizer where no text is read or written.

    Args:
        tokens: how many there are.
    """

    chat_template = "none"
    eos_token_id = STOP_ID
    pad_token_id = bos_token_id = unk_token_id = None

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.added_tokens_decoder: dict[int, str] = {}

    def __len__(self) -> int:
        return self._tokens


@contextmanager
def _made_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """New weights are of this dtype, on this device, and always the same."""
    before = torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _config(shape: TargetShape, positions: int) -> LlavaOnevisionConfig:
    text: dict[str, Any] = {
        "model_type": "qwen2",
        **shape.config,
        "head_dim": shape.head_dim,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": STOP_ID,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "image_size": _STUB_SIDE,
        "patch_size": _STUB_SIDE // 2,
        "vision_use_head": False,
    }
    return LlavaOnevisionConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE_ID,
        video_token_index=VIDEO_ID,
        tie_word_embeddings=shape.tied,
    )


def untrained_target(
    shape: TargetShape,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    positions: int,
) -> Target:
    """A target of a shape with random weights; its text stack is stored as a loaded one's is.

    Args:
        shape: its decoder and head; the vision part is left out.
        name: stands for the checkpoint's.
        dtype, device: of its weights.
        attention: "vflash", "sdpa" or "eager".
        positions: most positions it is used with, prompt, text and block together.

    Raises:
        InputError: fewer embedding rows than a target needs.
    """
    tokens = shape.vocab_size - SPARE_ROWS
    if tokens <= VIDEO_ID:
        raise InputError(
            f"{name}: vocab_size: found {shape.vocab_size}, allowed: more than "
            f"{SPARE_ROWS + VIDEO_ID}"
        )
    with _made_in(dtype, device):
        model = LlavaOnevisionForConditionalGeneration(_config(shape, positions))
    sides = (0.5, 0.5, 0.5)
    preprocessing = FramePreprocessing(_STUB_SIDE, _STUB_SIDE, "bicubic", 1 / 255, sides, sides)
    target = Target(model, NoTokenizer(tokens), preprocessing, attention, source=name)
    store_input_major(target.text_model)
    return target


def untrained_drafter(target: Target, settings: DrafterSettings) -> VFlashDrafter:
    """A drafter for a target with random weights, stored as a loaded one is.

    Raises:
        InputError: more tapped layers than the target has (see `drafter_config`).
    """
    config = drafter_config(target, settings)
    with _made_in(target.dtype, target.device):
        drafter = VFlashDrafter(config)
    drafter.eval().requires_grad_(False)
    store_input_major(drafter)
    return drafter
