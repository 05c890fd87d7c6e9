"""Decoding without the video from a layer on, against a full masked pass without a cache."""

import pytest
import torch

from tests.tiny import tiny_prompt, tiny_target
from vflash_analysis.decoding.loop import decode
from vflash_analysis.decoding.methods.ar import AutoRegressive
from vflash_analysis.decoding.removal import WithoutVideo
from vflash_analysis.errors import InputError
from vflash_analysis.model.positions import VISUAL
from vflash_analysis.model.watch import watched_prefill

CAP = 12
LAYERS = 4


def kinds_of(target, input_ids):
    return torch.where(input_ids == target.video_token_id, VISUAL, 0)


def opened(target, seed, num_frames=2):
    """The decoder of one clip, its prompt, pixels and cache."""
    input_ids, pixels = tiny_prompt(target, seed, num_frames)
    cache = target.allocate_cache(len(input_ids) + CAP)
    kinds = kinds_of(target, input_ids)
    seen = watched_prefill(target, input_ids, pixels, kinds, cache, [len(input_ids) - 1])
    return WithoutVideo(target, seen, cache, CAP), seen, cache, input_ids, pixels


def masked_logits(target, input_ids, pixels, new_ids, from_layer):
    """(P + N, V) in one pass over everything: from a layer on, text rows miss the video's columns.

    Hugging Face's decoder on SDPA without a cache, its masks changed by hooks.
    """
    ids = torch.cat([input_ids, torch.tensor(new_ids, dtype=torch.long)])
    visual = torch.zeros(len(ids), dtype=torch.bool)  # a new token may be a placeholder too
    visual[: len(input_ids)] = input_ids == target.video_token_id
    embeds = target.embed(ids).clone()
    embeds[visual] = target.encode_video(pixels)
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    blind = visible & ~(~visual[:, None] & visual[None, :])
    seen, unseen = (torch.zeros(len(ids), len(ids), dtype=embeds.dtype) for _ in range(2))
    lowest = torch.finfo(embeds.dtype).min
    seen.masked_fill_(~visible, lowest)
    unseen.masked_fill_(~blind, lowest)

    def blinded(module, args, options):
        return args, {**options, "attention_mask": unseen[None, None]}

    layers = target.text_model.layers
    hooks = [
        layer.register_forward_pre_hook(blinded, with_kwargs=True) for layer in layers[from_layer:]
    ]
    try:
        with torch.inference_mode():
            out = target.text_model(
                inputs_embeds=embeds[None],
                attention_mask={"full_attention": seen[None, None]},
                use_cache=False,
            ).last_hidden_state[0]
            return target.head(out)
    finally:
        for hook in hooks:
            hook.remove()


# Hugging Face's eager attention rounds its weights to single precision.
@pytest.mark.parametrize(
    ("attention", "tolerance"), [("vflash", 1e-10), ("sdpa", 1e-10), ("eager", 1e-4)]
)
@pytest.mark.parametrize("from_layer", range(LAYERS + 1))
def test_texts_and_logits_are_those_of_a_masked_pass(attention, tolerance, from_layer):
    target = tiny_target(3, LAYERS, attention=attention)
    naive = tiny_target(3, LAYERS, attention="sdpa")
    decoder, _, _, input_ids, pixels = opened(target, seed=5)
    found = decoder.greedy(from_layer)
    wanted = []
    while len(wanted) < CAP and not (wanted and wanted[-1] in naive.stop_ids):
        logits = masked_logits(naive, input_ids, pixels, wanted, from_layer)
        wanted.append(int(logits[-1].argmax()))
    assert found == wanted
    logits = masked_logits(naive, input_ids, pixels, wanted, from_layer)[len(input_ids) - 1 : -1]
    given = decoder.logits(from_layer, found)
    torch.testing.assert_close(given, logits, rtol=tolerance, atol=tolerance)


def test_with_nothing_removed_it_is_plain_greedy_decoding():
    target = tiny_target(0, LAYERS, dtype=torch.float32)
    for seed in range(4):
        decoder, seen, cache, input_ids, _ = opened(target, seed, num_frames=3)
        plain = decode(target, input_ids, seen.prefill, cache, AutoRegressive(), CAP)
        assert decoder.greedy(LAYERS) == plain.token_ids


def test_what_is_removed_from_the_first_layer_on_changes_nothing():
    """x = 0: another video of the same length gives the same logits; x = 1 tells them apart."""
    target = tiny_target(1, LAYERS)
    input_ids, pixels = tiny_prompt(target, 2)
    others = tiny_prompt(target, 7)[1]
    kinds, tokens = kinds_of(target, input_ids), [9, 10, 11]
    found = {}
    for name, shown in (("own", pixels), ("other", others)):
        cache = target.allocate_cache(len(input_ids) + CAP)
        seen = watched_prefill(target, input_ids, shown, kinds, cache, [0])
        decoder = WithoutVideo(target, seen, cache, CAP)
        found[name] = [decoder.logits(x, tokens) for x in (0, 1)]
    assert torch.equal(found["own"][0], found["other"][0])
    assert (found["own"][1] - found["other"][1]).abs().max() > 1e-3


def test_the_order_of_calls_does_not_matter():
    target = tiny_target(2, LAYERS)
    decoder = opened(target, 4)[0]
    first = {x: decoder.greedy(x) for x in (0, 2, LAYERS)}
    decoder.logits(1, [8, 9])
    assert {x: decoder.greedy(x) for x in (LAYERS, 2, 0)} == first


def test_the_layers_that_see_no_video_hold_text_alone():
    target = tiny_target(2, LAYERS)
    decoder, seen, cache, input_ids, _ = opened(target, 4)
    n = len(decoder.greedy(1))
    text = len(seen.text_rows)
    assert cache.get_seq_length(0) == len(input_ids) + n - 1
    assert [decoder._text_cache.get_seq_length(i) for i in range(LAYERS)] == [0] + 3 * [
        text + n - 1
    ]
    assert text == len(input_ids) - 2 * target.tokens_per_frame - 1


@pytest.mark.parametrize("layer", [-1, LAYERS + 1])
def test_a_layer_that_is_not_there_is_refused(layer):
    decoder = opened(tiny_target(2, LAYERS), 4)[0]
    with pytest.raises(InputError, match=rf"layer: found {layer}, allowed: 0..4"):
        decoder.greedy(layer)
