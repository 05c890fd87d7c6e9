"""Known checkpoints: the facts that published numbers rest on, held against a folder's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vflash_analysis.errors import InputError
from vflash_analysis.model.inputs import FramePreprocessing
from vflash_analysis.model.source import rope_theta, rope_type
from vflash_analysis.schemas import PAPER_TARGET
from vflash_analysis.shapes import LLAVA_ONEVISION_05B, LLAVA_ONEVISION_7B, TargetShape

# Checkpoints on the hub whose facts are known; the chat variant is another target of equal shape.
KNOWN_SHAPES: Mapping[str, TargetShape] = {
    PAPER_TARGET: LLAVA_ONEVISION_7B,
    "llava-onevision-qwen2-7b-ov-chat-hf": LLAVA_ONEVISION_7B,
    "llava-onevision-qwen2-0.5b-ov-hf": LLAVA_ONEVISION_05B,
}
# Their facts beside sizes, by section of config.json: what transformers'
# `models/llava_onevision/convert_llava_onevision_weights_to_hf.py` passes or leaves at the defaults of
# LlavaOnevisionConfig and SiglipVisionConfig, on the public text configs of Qwen2-7B-Instruct and
# Qwen2-0.5B-Instruct, whose tokenizer `<image>` and `<video>` are added to.
_FACTS: Mapping[str, Mapping[str, Any]] = {
    "text_config.": {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    },
    "vision_config.": {
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "": {
        "image_token_index": 151646,
        "video_token_index": 151647,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}


def known_shape(config: Any, name: str = "") -> TargetShape | None:
    """The shape that a target claims to have, by its name or else by its text width; None: unknown."""
    if name in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]
    width = config.get_text_config(decoder=True).hidden_size
    if config.model_type != "llava_onevision":
        return None
    return next((s for s in KNOWN_SHAPES.values() if s.hidden_size == width), None)


def check_known(
    folder: Path, config: Any, shape: TargetShape, preprocessing: FramePreprocessing
) -> None:
    """Assert the facts that published numbers rest on.

    Args:
        folder: for messages.
        config: the target's.
        shape: of `known_shape`.
        preprocessing: the checkpoint's frame settings.

    Raises:
        InputError: lists every fact that differs: its file and key, what was found, what is allowed.
    """
    text, vision = config.get_text_config(decoder=True), config.vision_config
    seen = shape.vision
    assert seen is not None
    sizes: dict[str, Mapping[str, Any]] = {
        "text_config.": shape.config,
        "vision_config.": seen.config,
    }
    sections = {"text_config.": text, "vision_config.": vision, "": config}
    facts: list[tuple[str, object, object]] = [
        (f"config.json: {section}{key}", getattr(sections[section], key, None), allowed)
        for table in (sizes, _FACTS)
        for section, keys in table.items()
        for key, allowed in keys.items()
    ]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tied = any(getattr(part, "tie_word_embeddings", False) for part in (text, config))
    frames = Path(preprocessing.file).name
    facts += [
        ("config.json: tie_word_embeddings", tied, shape.tied),  # in whichever section it stands
        ("config.json: text_config.head_dim", head_dim, shape.head_dim),
        ("config.json: text_config.rope_theta", rope_theta(text), 1e6),
        ("config.json: text_config.rope_type", rope_type(text), "default"),
        (f"{frames}: image_mean", tuple(preprocessing.mean), (0.5, 0.5, 0.5)),
        (f"{frames}: image_std", tuple(preprocessing.std), (0.5, 0.5, 0.5)),
    ]
    wrong = [
        f"{name}: found {is_}, allowed: {allowed}" for name, is_, allowed in facts if is_ != allowed
    ]
    if wrong:
        raise InputError(f"{folder} is no such LLaVA-OneVision: {'; '.join(wrong)}")
