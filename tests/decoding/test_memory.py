"""Peaks by hand; a long context takes little more than weights, keys, values and tapped states."""

import pytest
import torch

from tests.memory import traced
from vflash_analysis import paths
from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.loop import decode
from vflash_analysis.decoding.memory import PeakMemory
from vflash_analysis.decoding.methods import build_method
from vflash_analysis.model.drafter import drafter_cache, load_drafter
from vflash_analysis.model.target import load_target

POCKET = paths.DATA / "pocket"
CAP = 24


def test_peak_memory_is_what_a_call_held_at_one_time():
    with PeakMemory(torch.device("cpu")) as memory:
        kept = torch.zeros(1000)

        def call():
            first = torch.zeros(100_000)
            second = torch.zeros(50_000)
            del first
            third = torch.zeros(60_000)
            return second, third

        memory.measure("call", call)
        memory.measure("nothing", lambda: kept.shape)
    assert memory.peak_bytes == {"call": 600_000, "nothing": 0}
    assert memory.changes["call"][:4] == [400_000, 200_000, -400_000, 240_000]


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.slow
def test_25k_tokens_take_little_more_than_what_must_be_kept():
    """The pocket target on a clip of 1,568 frames, 25,088 video tokens; the pixels were there."""
    target = load_target(POCKET / "target", "float32", "cpu")
    drafter = load_drafter(POCKET / "drafters" / "self_reveal", target)
    target.max_positions = drafter.config.max_position_embeddings = 32_768
    frames = 25_088 // target.tokens_per_frame
    input_ids = target.build_prompt("what happens", frames)
    side = target.preprocessing.height
    pixels = target.prepare_frames(torch.zeros(frames, side, side, 3, dtype=torch.uint8))
    settings = DecodeSettings(methods=("tree60",), max_new_tokens=CAP)
    method = build_method("tree60", target, settings, drafter)

    def run():
        cache = target.new_cache(len(input_ids), CAP)
        prefill = target.prefill(input_ids, pixels, cache, method.tap_layer_ids)
        decode(target, input_ids, prefill, cache, method, CAP, stop_ids=())

    caches = (
        target.allocate_cache(len(input_ids) + CAP),
        drafter_cache(drafter, len(input_ids) + CAP),
    )
    weights = bytes_of([*target.model.parameters(), *drafter.parameters()])
    kept = weights + sum(bytes_of(memory) for c in caches for memory in c.layers_in_place())
    kept += len(input_ids) * len(method.tap_layer_ids) * target.hidden_size * 4
    del caches
    assert weights + traced(run).peak <= 1.3 * kept
