"""Shapes by arithmetic against models that are built, and what a config.json may leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from tests.tiny import tiny_config
from vflash_analysis.config import DrafterSettings
from vflash_analysis.errors import InputError
from vflash_analysis.shapes import (
    LLAVA_ONEVISION_05B,
    LLAVA_ONEVISION_7B,
    DrafterShape,
    TargetShape,
    VisionShape,
    read_shape,
)


def config_of(shape: TargetShape) -> LlavaOnevisionConfig:
    assert shape.vision is not None
    return LlavaOnevisionConfig(
        text_config={
            "model_type": "qwen2",
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "tie_word_embeddings": shape.tied,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "num_hidden_layers": shape.vision.num_layers,
            "hidden_size": shape.vision.hidden_size,
            "intermediate_size": shape.vision.intermediate_size,
            "num_attention_heads": 16,
            "image_size": shape.vision.image_size,
            "patch_size": shape.vision.patch_size,
            "vision_use_head": False,
        },
        tie_word_embeddings=shape.tied,
    )


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [(LLAVA_ONEVISION_7B, 8_030_807_584), (LLAVA_ONEVISION_05B, 893_675_552)],
)
def test_a_checkpoint_s_parameters_are_counted_as_it_is_built(shape, parameters, tmp_path):
    config = config_of(shape)
    with torch.device("meta"):
        model = LlavaOnevisionForConditionalGeneration(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) == parameters
    decoder = model.model.language_model
    step = sum(p.numel() for p in [*decoder.layers.parameters(), *decoder.norm.parameters()])
    assert shape.step_parameters == step + model.lm_head.weight.numel()
    config.save_pretrained(tmp_path)
    assert read_shape(tmp_path / "config.json") == shape


def test_the_drafter_of_the_7b_has_098_billion_parameters():
    """As `model/test_paper_size.py` counts them in the drafter itself."""
    shape = DrafterShape.of(LLAVA_ONEVISION_7B, DrafterSettings())
    assert shape == DrafterShape(LLAVA_ONEVISION_7B, 4, 4, 16)
    assert shape.parameters == 983_601_152


def test_a_drafter_of_settings_has_their_width():
    settings = DrafterSettings(
        num_hidden_layers=2, num_tapped_layers=3, block_size=8, intermediate_size=10
    )
    shape = DrafterShape.of(LLAVA_ONEVISION_05B, settings)
    assert shape == DrafterShape(LLAVA_ONEVISION_05B, 2, 3, 8, 10)
    # 896 x (896 + 896) of queries and output, 896 x (128 + 128) of keys and values, 3 x 896 x 10
    assert shape.layer_parameters == 1_605_632 + 229_376 + 26_880 + 2 * 896 + 2 * 64


def test_a_text_only_model_is_counted(tmp_path):
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=36,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=50,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path / "config.json")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.vision is None and shape.head_dim == 4


@pytest.mark.parametrize("found", [None, 0, "28", 2.5, True])
def test_a_config_that_leaves_a_number_out_is_named(tmp_path: Path, found):
    values = json.loads(tiny_config().to_json_string(use_diff=False))
    values["text_config"]["num_hidden_layers"] = found
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"config\.json: text_config\.num_hidden_layers: found"):
        read_shape(path)


@pytest.mark.parametrize(
    ("keys", "found", "told"),
    [
        (("text_config",), None, "text_config: found a JSON NoneType, allowed: an object"),
        (("text_config",), "qwen2", "text_config: found a JSON str"),
        (("vision_config",), [], "vision_config: found a JSON list"),
        (("text_config", "head_dim"), "64", 'text_config.head_dim: found text "64"'),
        (("text_config", "head_dim"), 0, "text_config.head_dim: found whole number 0"),
        (("text_config", "num_attention_heads"), 5, "5, allowed: a divisor of hidden_size (32)"),
        (("text_config", "num_key_value_heads"), 3, "3, allowed: a divisor of num_attention_heads"),
        (("text_config", "num_hidden_layers"), 1001, "allowed: 1 to 1000"),
        (("text_config", "vocab_size"), 10**30, "allowed: 1 to 10000000"),
        (("vision_config", "patch_size"), 21, "allowed: 1 to 20"),
    ],
)
def test_a_config_of_no_possible_model_is_one_line(tmp_path: Path, keys, found, told):
    values = json.loads(tiny_config().to_json_string(use_diff=False))
    place = values
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = found
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InputError) as error:
        read_shape(path)
    assert told in str(error.value) and str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_odd_patches_are_pooled_with_their_last_row():
    assert VisionShape(1, 8, 8, 20, 4).tokens_per_frame == 9  # 5 x 5
