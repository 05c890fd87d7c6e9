"""Targets and drafters of a shape: of the right size, made in place, and good for a forward."""

import pytest
import torch

from vflash_analysis.config import DrafterSettings
from vflash_analysis.decoding.memory import PeakMemory
from vflash_analysis.errors import InputError
from vflash_analysis.model.untrained import untrained_drafter, untrained_target
from vflash_analysis.shapes import DrafterShape, TargetShape

CPU = torch.device("cpu")
SHAPE = TargetShape(5, 64, 8, 2, 8, 96, 200)
TIED = TargetShape(5, 64, 8, 2, 8, 96, 200, tied=True)


def text_parameters(target) -> int:
    """Parameters of decoder, embedding and head, a shared one once."""
    parts = [target.text_model, target.lm_head]
    return sum(p.numel() for p in {p for part in parts for p in part.parameters()})


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_it_has_the_parameters_of_its_shape(shape):
    target = untrained_target(shape, "x", torch.float32, CPU, "vflash", 300)
    assert text_parameters(target) == shape.parameters
    assert (target.max_positions, target.groups, target.head_dim) == (300, 4, 8)
    drafter = untrained_drafter(target, DrafterSettings(num_hidden_layers=3, num_tapped_layers=2))
    own = DrafterShape(shape, num_layers=3, num_tapped_layers=2, block_size=16)
    assert sum(p.numel() for p in drafter.parameters()) == own.parameters


def test_it_is_made_in_its_dtype_and_the_caller_keeps_the_default():
    wide = TargetShape(3, 256, 8, 2, 32, 512, 4000)
    torch.manual_seed(3)
    following = torch.rand(1)
    torch.manual_seed(3)
    with PeakMemory(CPU) as memory:
        made = []
        memory.measure(
            "target",
            lambda: made.append(untrained_target(wide, "x", torch.bfloat16, CPU, "vflash", 100)),
        )
    (target,) = made
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    assert target.text_model.rotary_emb.inv_freq.dtype == torch.float32
    # 2 bytes a parameter, and on a CPU one weight at a time stored anew
    assert memory.peak_bytes["target"] < 2 * 1.5 * wide.parameters
    assert torch.get_default_dtype() == torch.float32
    assert torch.rand(1) == following


def test_weights_are_the_same_whatever_was_drawn_before():
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        target = untrained_target(SHAPE, "x", torch.float32, CPU, "vflash", 100)
        drafter = untrained_drafter(target, DrafterSettings(num_tapped_layers=2))
        made.append((target.lm_head.weight, drafter.fc.weight))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_special_ids_leave_nearly_all_tokens_to_draft():
    target = untrained_target(SHAPE, "x", torch.float32, CPU, "vflash", 100)
    banned = target.banned_ids.tolist()
    assert target.mask_token_id in banned and target.video_token_id in banned
    assert len(banned) == 18


def test_too_few_rows_are_refused():
    with pytest.raises(InputError, match="x: vocab_size: found 18, allowed: more than 18"):
        untrained_target(
            TargetShape(5, 64, 8, 2, 8, 96, 18), "x", torch.float32, CPU, "vflash", 100
        )
