"""The paper's drafter at its full size, on the meta device: shapes and counts without the memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.training.toys import SETTINGS
from vflash_analysis.model import block_attention
from vflash_analysis.model.drafter import VFlashConfig, VFlashDrafter
from vflash_analysis.model.taps import default_tap_layers
from vflash_analysis.shapes import LLAVA_ONEVISION_7B, DrafterShape
from vflash_analysis.sizes import saved_bytes as estimated_bytes
from vflash_analysis.training.step import make_optimizers, raise_to_fp32


def paper_drafter() -> VFlashDrafter:
    """The drafter of LLaVA-OneVision-7B's text stack: 28 layers, 3584 wide, 28 / 4 heads of 128."""
    config = VFlashConfig(
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=4,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        mask_token_id=151_650,
        target_layer_ids=list(default_tap_layers(28, 4)),
        target_num_layers=28,
        vocab_size=152_064,
    )
    with torch.device("meta"):
        return VFlashDrafter(config)


def test_its_parameters_by_hand() -> None:
    counts: dict[str, int] = {}
    for name, parameter in paper_drafter().named_parameters():
        part = name.split(".")[-2] if "layers" in name else name.split(".")[0]
        counts[part] = counts.get(part, 0) + parameter.numel()
    projector = 4 * 3584 * 3584
    queries = 3584 * 28 * 128
    keys = 3584 * 4 * 128
    mlp = 3584 * 18_944
    assert projector == 51_380_224
    assert counts == {
        "fc": projector,
        "context_norm": 3584,
        "norm": 3584,
        **dict.fromkeys(("q_proj", "o_proj"), 4 * queries),
        **dict.fromkeys(("k_proj", "v_proj"), 4 * keys),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 4 * mlp),
        **dict.fromkeys(("q_norm", "k_norm"), 4 * 128),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), 4 * 3584),
    }
    layer = 2 * queries + 2 * keys + 3 * mlp + 2 * 128 + 2 * 3584
    assert layer == 233_053_440
    assert sum(counts.values()) == projector + 4 * layer + 2 * 3584 == 983_601_152


def test_its_masters_gradients_and_optimizer_take_16_gb() -> None:
    """fp32: a master, a gradient and AdamW's two moments of 4 bytes each."""
    drafter = paper_drafter().to(torch.bfloat16)
    raise_to_fp32(drafter)
    (optimizer,) = make_optimizers(drafter, SETTINGS)
    for group in optimizer.param_groups:
        group["fused"] = False  # the fused kernel refuses the meta device
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    held = [*drafter.parameters(), *(p.grad for p in drafter.parameters()), *moments]
    total = sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert total == 16 * 983_601_152
    assert 15.7e9 < total < 15.8e9


CONTEXT, ANCHORS = 25_119 + 255, 64


def saved_bytes(drafter: VFlashDrafter) -> dict[int, int]:
    """Storage to bytes of what the two forwards of a step save for their backward pass."""
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes(), tensor  # kept: its address is not used again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        states = torch.empty(1, CONTEXT, 4 * 3584, dtype=torch.bfloat16)
        hidden = drafter.project(states)
        positions = torch.zeros(1, CONTEXT, dtype=torch.long)
        keys_values = drafter.context_keys_values(hidden, positions)
        visible = torch.ones(1, ANCHORS, CONTEXT, dtype=torch.bool)
        blocks = torch.zeros(1, ANCHORS, 16, dtype=torch.long)
        for _ in range(2):
            embeds = torch.empty(1, ANCHORS, 16, 3584)
            drafter.forward_blocks(embeds, keys_values, blocks, visible, max_rows=512)
    weights = {parameter.untyped_storage()._cdata for parameter in drafter.parameters()}
    return {key: size for key, (size, _) in saved.items() if key not in weights}


def test_what_a_step_of_one_clip_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is large is the states, the projected context and weights rounded to bf16: nothing
    over rows and context, of which one chunk's mask alone would be 7 x 512 x 25,374 = 91 MB. And
    activation checkpointing spares 5.9 of 8.3 GB. Tensors without memory know only their shapes,
    so the shared prefix is given."""
    monkeypatch.setattr(block_attention, "shared_prefix", lambda visible: 25_119)
    config = paper_drafter().config
    with FakeTensorMode():
        drafter = VFlashDrafter(config)
        whole = saved_bytes(drafter)
        drafter.activation_checkpointing_enable({"use_reentrant": False})
        spared = saved_bytes(drafter)
    states, projected, rounded = CONTEXT * 4 * 3584 * 2, CONTEXT * 3584 * 4, CONTEXT * 3584 * 2
    large = {size for size in (*whole.values(), *spared.values()) if size > 60e6}
    assert large == {states, projected, rounded, 18_944 * 3584 * 2}
    assert 8.2e9 < sum(whole.values()) < 8.3e9
    assert 2.3e9 < sum(spared.values()) < 2.4e9
    # the estimate's formula; with checkpointing it also counts the one layer that is made again
    shape = DrafterShape(LLAVA_ONEVISION_7B, 4, 4, 16)
    told = [estimated_bytes(shape, CONTEXT, ANCHORS, 2, keep) for keep in (True, False)]
    assert told[0] == pytest.approx(sum(whole.values()), rel=0.05)
    assert told[1] == pytest.approx(sum(spared.values()) + 0.7e9, rel=0.05)
