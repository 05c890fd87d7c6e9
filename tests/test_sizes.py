"""Bytes and operations by arithmetic: measured ones, the paper's printed ones, and by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from transformers import LlavaOnevisionConfig

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
from vflash_analysis.config import DrafterSettings
from vflash_analysis.model import frozen
from vflash_analysis.model.target import Target
from vflash_analysis.shapes import LLAVA_ONEVISION_7B, DrafterShape, TargetShape, read_shape
from vflash_analysis.sizes import Work

CONTEXT = 25_119  # of the page
DRAFTER_7B = DrafterShape.of(LLAVA_ONEVISION_7B, DrafterSettings())


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


def test_the_7b_s_drafter_trains_in_16_bytes_a_parameter():
    """fp32 masters, gradient and AdamW's two averages."""
    assert 4 * DRAFTER_7B.parameters + sizes.optimizer_bytes(DRAFTER_7B) == 16 * 983_601_152


def test_a_text_only_model_has_no_vision_work():
    assert sizes.vision_work(TargetShape(2, 8, 4, 2, 2, 10, 20), 8, 4) == Work(0.0, 0.0)


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
