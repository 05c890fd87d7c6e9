"""Memory of a long context: little more than weights, keys, values and tapped states."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vflash_analysis import paths
from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.loop import decode
from vflash_analysis.decoding.methods import build_method
from vflash_analysis.model.drafter import drafter_cache, load_drafter
from vflash_analysis.model.target import load_target

POCKET = paths.DATA / "pocket"
CAP = 24


def peak_bytes(run) -> int:
    """Most memory that torch held at once of what `run` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak


def test_the_peak_counts_what_is_held_together():
    def run():
        first = torch.zeros(100_000, dtype=torch.uint8)
        del first
        second, third = (torch.zeros(size, dtype=torch.uint8) for size in (50_000, 70_000))
        del second, third

    assert peak_bytes(run) == 120_000


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
    assert weights + peak_bytes(run) <= 1.3 * kept
