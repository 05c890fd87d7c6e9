"""Sizes by arithmetic against models that are built, and against the paper's printed numbers."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from tests.memory import traced
from tests.tiny import (
    IMAGE,
    PREPROCESSING,
    VIDEO,
    tiny_config,
    tiny_drafter,
    tiny_frames,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)
from vflash_analysis import sizes
from vflash_analysis.errors import InputError
from vflash_analysis.model import frozen
from vflash_analysis.model.target import Target
from vflash_analysis.sizes import (
    LLAVA_ONEVISION_05B,
    LLAVA_ONEVISION_7B,
    DrafterShape,
    TargetShape,
    VisionShape,
    Work,
    read_shape,
)

CONTEXT = 25_119  # of the page
DRAFTER_7B = DrafterShape(LLAVA_ONEVISION_7B, num_layers=4, num_tapped_layers=4, block_size=16)


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
    assert DRAFTER_7B.parameters == 983_601_152
    # gradient and AdamW's two averages beside the fp32 masters
    assert 4 * DRAFTER_7B.parameters + sizes.optimizer_bytes(DRAFTER_7B) == 16 * 983_601_152


def test_bytes_of_the_papers_context():
    """57,344 B of keys and values and 28,672 B of tapped states a token, 14.1 GB a step."""
    assert sizes.kv_bytes(LLAVA_ONEVISION_7B, 1, 2) == 57_344
    assert sizes.tap_bytes(DRAFTER_7B, 1, 2) == 28_672
    assert LLAVA_ONEVISION_7B.vision is not None
    assert 128 * LLAVA_ONEVISION_7B.vision.tokens_per_frame + 1 == 25_089
    step = sizes.decoder_work(LLAVA_ONEVISION_7B, 1, CONTEXT, 2)
    assert step.bytes == pytest.approx(14.1417e9 + 1.4404e9, rel=1e-4)
    assert step.seconds(3.35e12, 989e12) == pytest.approx(4.65e-3, rel=1e-3)
    assert step.seconds(4.8e12, 989e12) == pytest.approx(3.25e-3, rel=2e-3)


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
    assert sizes.vision_work(shape, 8, 4) == Work(0.0, 0.0)


def test_sizes_of_what_is_held_in_memory(tmp_path):
    target = tiny_target(0)
    target.config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path / "config.json")
    itemsize = target.dtype.itemsize
    cache = target.new_cache(30, 20)
    held = sum(t.untyped_storage().nbytes() for t in (cache._k, cache._v))
    assert sizes.kv_bytes(shape, 30 + 20 + 61, itemsize) == held
    assert sum(p.numel() for p in target.model.parameters()) == shape.parameters
    drafter = tiny_drafter(target, seed=0)
    own = DrafterShape(
        shape,
        drafter.config.num_hidden_layers,
        len(drafter.config.target_layer_ids),
        drafter.config.block_size,
        drafter.config.intermediate_size,
    )
    assert own.parameters == sum(p.numel() for p in drafter.parameters())
    context = [
        drafter.fc,
        *(m for layer in drafter.layers for m in (layer.self_attn.k_proj, layer.self_attn.v_proj)),
    ]
    assert own.context_parameters == sum(m.weight.numel() for m in context)
    optimizer = torch.optim.AdamW(drafter.parameters())
    sum((p**2).sum() for p in drafter.parameters()).backward()
    optimizer.step()
    moments = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    kept = [*moments, *(p.grad for p in drafter.parameters())]
    counted = [t for t in kept if t is not None]
    assert sum(t.numel() * 4 for t in counted) == sizes.optimizer_bytes(own)


@pytest.mark.parametrize(("frames", "wide"), [(8, 269), (40, 269), (40, 500)])
def test_peaks_of_vision_and_prefill_as_measured(frames, wide, tmp_path, monkeypatch):
    """Proportions of the 7B at small widths; what is left out, logits and masks, is small there."""
    config = tiny_config(q_heads=14, head_dim=16, max_positions=4096).to_dict()
    config["text_config"]["intermediate_size"] = 1184
    config["vision_config"] |= {"hidden_size": 72, "intermediate_size": wide, "image_size": 96}
    config["vision_config"]["patch_size"] = 8
    made = LlavaOnevisionConfig(
        text_config=config["text_config"],
        vision_config=config["vision_config"],
        image_token_index=IMAGE,
        video_token_index=VIDEO,
    )
    settings = replace(PREPROCESSING, height=96, width=96)
    model = tiny_model(0, made, torch.float32)
    target = Target(model, tiny_tokenizer(), settings)
    made.save_pretrained(tmp_path)
    shape = read_shape(tmp_path / "config.json")
    pixels = target.prepare_frames(tiny_frames(0, frames))
    assert sizes.pixel_bytes(shape, frames, 4) == pixels.nbytes
    vision = traced(lambda: target.encode_video(pixels))
    assert vision.peak == pytest.approx(sizes.vision_bytes(shape, frames, 4), rel=0.05)
    target.encode_video = lambda _: features  # type: ignore[method-assign]
    features = torch.zeros(frames * 36 + 1, target.hidden_size)
    prompt = target.build_prompt("what happens", frames)
    for rows in (4096, 512, 64):  # the whole MLP at once, parts of it, so few that attention counts
        monkeypatch.setattr(frozen, "LONG_PROMPT", rows)
        monkeypatch.setattr(sizes, "LONG_PROMPT", rows)
        cache = target.new_cache(len(prompt), 8)
        prefill = traced(functools.partial(target.prefill, prompt, pixels, cache, (1,)))
        tapped = len(prompt) * target.hidden_size * 4
        expected = sizes.prefill_bytes(shape, len(prompt), 4) + tapped
        assert prefill.peak == pytest.approx(expected, rel=0.05)


def test_a_roofline_takes_the_slower_of_reading_and_computing():
    work = Work(bytes=100.0, flops=600.0) + Work(bytes=20.0, flops=0.0)
    assert work.seconds(bytes_per_s=10.0, flops_per_s=100.0) == 12.0
    assert work.seconds(bytes_per_s=60.0, flops_per_s=100.0) == 6.0


def test_operations_of_a_forward_by_hand():
    shape = TargetShape(2, 8, 4, 2, 2, 10, 20, qkv_bias=False)
    # a layer: 2 x 8 x 8 + 2 x 8 x 4 + 3 x 8 x 10 weights and 16 of its norms
    assert shape.layer_parameters == 128 + 64 + 240 + 16
    assert shape.step_parameters == 2 * 448 + 8 + 160
    # 3 rows after 5 cached ones see 6 + 7 + 8 keys
    work = sizes.decoder_work(shape, 3, 5, 4)
    assert work.flops == 2 * 1064 * 3 + 4 * 2 * 4 * 2 * 21
    assert work.bytes == 4 * 1064 + 2 * 2 * 2 * 2 * 5 * 4


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
        (("text_config", "num_hidden_layers"), 1001, "allowed: a whole number from 1 to 1000"),
        (("text_config", "vocab_size"), 10**30, "allowed: a whole number from 1 to 10000000"),
        (("vision_config", "patch_size"), 21, "allowed: a whole number from 1 to 20"),
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
