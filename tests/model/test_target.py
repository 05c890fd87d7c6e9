"""The target's forward passes: against `generate`, against full passes, on every backend."""

from types import SimpleNamespace

import pytest
import torch

from tests.tiny import (
    FRAME_SIDE,
    IM_END,
    IMAGE,
    PREPROCESSING,
    VIDEO,
    tiny_config,
    tiny_frames,
    tiny_model,
    tiny_prompt,
    tiny_target,
    tiny_tokenizer,
)
from vflash_analysis.errors import InputError
from vflash_analysis.model import frozen
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.taps import check_tap_layers, default_tap_layers
from vflash_analysis.model.target import Target
from vflash_analysis.model.text_stack import cache_keyword, find_text_model

BACKENDS = ("vflash", "sdpa", "eager")


def greedy(target, input_ids, pixels, new_tokens):
    """Plain greedy decoding with our forward passes."""
    cache = target.new_cache(len(input_ids), new_tokens)
    token = target.prefill(input_ids, pixels, cache).logits.argmax()[None]
    tokens = [int(token)]
    while len(tokens) < new_tokens:
        token = target.forward(token, None, cache).logits.argmax(-1)
        tokens.append(int(token))
    return tokens


def generated(target, input_ids, pixels, new_tokens):
    out = target.model.generate(
        input_ids=input_ids[None],
        attention_mask=torch.ones_like(input_ids)[None],
        pixel_values_videos=pixels,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, len(input_ids) :].tolist()


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_equals_generate_on_every_backend(seed, attention):
    target = tiny_target(seed, dtype=torch.float32, q_heads=6, attention=attention)
    reference = tiny_target(seed, dtype=torch.float32, q_heads=6, attention="sdpa")
    input_ids, pixels = tiny_prompt(target, seed, num_frames=1 + seed)
    assert greedy(target, input_ids, pixels, 32) == generated(reference, input_ids, pixels, 32)


def test_hugging_face_generate_runs_on_our_attention():
    target = tiny_target(4)
    input_ids, pixels = tiny_prompt(target, 4)
    assert generated(target, input_ids, pixels, 24) == greedy(target, input_ids, pixels, 24)


def tree_on(target, input_ids, pixels, form):
    """Logits of the tree r -> (a, b), a -> c after a prompt, in one pass."""
    cache = target.new_cache(len(input_ids), 10)
    target.prefill(input_ids, pixels, cache)
    held = cache.length
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    if form == "all rows":
        mask = torch.cat((torch.ones(4, held, dtype=torch.bool), mask), dim=1)
    positions = held + torch.tensor([0, 1, 1, 2])
    return target.forward(torch.tensor([7, 8, 9, 10]), positions, cache, mask).logits


@pytest.mark.parametrize("form", ["new rows", "all rows"])
@pytest.mark.parametrize("attention", BACKENDS)
def test_each_tree_node_equals_its_own_path_alone(attention, form):
    # Eager attention takes its softmax in fp32 whatever the dtype.
    tolerance = 1e-5 if attention == "eager" else 1e-11
    target = tiny_target(5, attention=attention, q_heads=6)
    input_ids, pixels = tiny_prompt(target, 5)
    tree = tree_on(target, input_ids, pixels, form)
    for node, path in enumerate([[7], [7, 8], [7, 9], [7, 8, 10]]):
        cache = target.new_cache(len(input_ids), 10)
        target.prefill(input_ids, pixels, cache)
        for token in path:
            alone = target.forward(torch.tensor([token]), None, cache).logits[-1]
        torch.testing.assert_close(tree[node], alone, atol=tolerance, rtol=0)


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_chain_after_a_video_prefill_equals_one_full_pass(attention):
    target = tiny_target(6, dtype=torch.float32, attention=attention)
    input_ids, pixels = tiny_prompt(target, 6)
    cache = target.new_cache(len(input_ids), 20)
    target.prefill(input_ids, pixels, cache)
    new = torch.tensor([8, 9, 10])
    logits = target.forward(new, None, cache).logits
    everything = torch.cat((input_ids, new))
    full = target.model(input_ids=everything[None], pixel_values_videos=pixels).logits[0, -3:]
    torch.testing.assert_close(logits, full, atol=1e-4, rtol=1e-5)
    # And in pieces of any size: positions continue at the cache's length.
    cache.truncate(len(input_ids))
    pieces = [target.forward(new[:1], None, cache), target.forward(new[1:], None, cache)]
    torch.testing.assert_close(torch.cat([p.logits for p in pieces]), logits, atol=1e-4, rtol=1e-5)


def test_float64_is_float64():
    """Hugging Face's norms round to fp32; ours must not, or 1e-12 equalities cannot hold."""
    target = tiny_target(7)
    norm = target.text_model.norm
    hidden = torch.randn(3, target.hidden_size, dtype=torch.float64)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    exact = norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))
    torch.testing.assert_close(norm(hidden), exact, atol=1e-14, rtol=0)


def test_prompts_of_different_length_in_one_padded_batch():
    target = tiny_target(8, dtype=torch.float32)
    prompts = [torch.randint(6, 40, (length,)) for length in (5, 9)]
    padded = torch.zeros(2, 9, dtype=torch.long)
    mask = torch.zeros(2, 9, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, 9 - len(prompt) :] = prompt
        mask[row, 9 - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batched = target.model(input_ids=padded, attention_mask=mask, position_ids=positions).logits
    assert not batched.isnan().any()
    for row, prompt in enumerate(prompts):
        cache = target.new_cache(len(prompt), 1)
        alone = target.prefill(prompt, None, cache).logits
        torch.testing.assert_close(batched[row, -1], alone, atol=1e-5, rtol=0)


def test_vision_encoding_does_not_depend_on_chunks(monkeypatch):
    target = tiny_target(9)
    pixels = target.prepare_frames(tiny_frames(9, 5))
    whole = target.encode_video(pixels)
    assert whole.shape == (5 * 9 + 1, target.hidden_size)
    official = target.model.get_video_features(pixels, return_dict=True).pooler_output[0]
    torch.testing.assert_close(whole, official, atol=0, rtol=0)
    for size in (1, 2, 3):
        monkeypatch.setattr(frozen, "FRAMES_PER_CHUNK", size)
        torch.testing.assert_close(target.encode_video(pixels), whole, atol=1e-12, rtol=0)
    assert torch.equal(whole[-1], target.model.model.image_newline)


def test_a_newline_a_frame_is_refused(monkeypatch):
    """Ports of this family differ in where the newline token goes; here it ends the video."""
    target = tiny_target(9)
    features = torch.zeros(1, 2 * 10, target.hidden_size)
    given = SimpleNamespace(pooler_output=features)
    monkeypatch.setattr(target.model, "get_video_features", lambda *_, **__: given)
    with pytest.raises(InputError, match="2 frames became 20 video tokens, allowed: 19"):
        target.encode_video(target.prepare_frames(tiny_frames(9, 2)))


def test_a_long_prompts_mlps_run_on_a_few_rows_at_a_time(monkeypatch):
    target = tiny_target(9)
    input_ids, pixels = tiny_prompt(target, 9)
    seen, results = [], []
    target.text_model.layers[0].mlp.gate_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1])
    )
    for limit in (len(input_ids), 10):
        monkeypatch.setattr(frozen, "LONG_PROMPT", limit)
        cache = target.new_cache(len(input_ids), 1)
        results.append(target.prefill(input_ids, pixels, cache, (0, 2)))
    assert seen == [len(input_ids), 10, 10, len(input_ids) - 20]
    torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-11, rtol=0)
    torch.testing.assert_close(results[0].tapped, results[1].tapped, atol=1e-11, rtol=0)
    target.forward(input_ids[:1], None, cache)
    assert seen[4:] == [1] and "forward" not in vars(target.text_model.layers[0].mlp)


def test_the_clip_changes_the_logits():
    target = tiny_target(10)
    input_ids, pixels = tiny_prompt(target, 10)
    other = target.prepare_frames(tiny_frames(11))
    logits = [
        target.prefill(input_ids, p, target.new_cache(len(input_ids), 1)).logits
        for p in (pixels, other)
    ]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_mixed_image_and_video_features_keep_their_places():
    """A fault once put the image mask where the video mask belongs; ours is one video only."""
    target = tiny_target(12)
    image = torch.randn(1, 1, 3, FRAME_SIDE, FRAME_SIDE, dtype=torch.float64)
    videos = [target.prepare_frames(tiny_frames(seed, 1)) for seed in (0, 1)]
    sizes = torch.tensor([[FRAME_SIDE, FRAME_SIDE]])
    outputs = target.model.get_image_features(
        image, image_sizes=sizes, batch_num_images=torch.tensor([2]), return_dict=True
    )
    image_rows = len(outputs.pooler_output[0])
    ids = torch.tensor([[8] + [IMAGE] * image_rows + [9] + [VIDEO] * 10 + [7]])
    seen = []
    target.model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"].detach()), with_kwargs=True
    )
    for video in videos:
        target.model(
            input_ids=ids,
            pixel_values=image,
            image_sizes=sizes,
            batch_num_images=torch.tensor([2]),
            pixel_values_videos=video,
        )
    places = [slice(1, 1 + image_rows), slice(2 + image_rows, 12 + image_rows)]
    assert torch.equal(seen[0][0, places[0]], outputs.pooler_output[0])
    assert torch.equal(seen[1][0, places[0]], outputs.pooler_output[0])
    for embeds, video in zip(seen, videos, strict=True):
        assert torch.equal(embeds[0, places[1]], target.encode_video(video))
    with pytest.raises(InputError, match="image placeholders"):
        target.prefill(ids[0], videos[0], target.new_cache(60, 1))


# Taps.


def test_tapped_states_are_outputs_of_their_layers():
    target = tiny_target(13)
    input_ids, pixels = tiny_prompt(target, 13)
    ids = (0, 2, 3)
    cache = target.new_cache(len(input_ids), 10)
    prefill = target.prefill(input_ids, pixels, cache, ids)
    new = torch.tensor([8, 9, 10])
    after = target.forward(new, None, cache, tap_layer_ids=ids)
    everything = torch.cat((input_ids, new))
    states = target.model(
        input_ids=everything[None], pixel_values_videos=pixels, output_hidden_states=True
    ).hidden_states
    assert len(states) == target.num_layers + 1
    tapped = torch.cat((prefill.tapped, after.tapped))
    assert tapped.shape == (len(everything), 3 * target.hidden_size)
    for column, layer_id in enumerate(ids[:2]):
        part = tapped[:, column * target.hidden_size : (column + 1) * target.hidden_size]
        torch.testing.assert_close(part, states[layer_id + 1][0], atol=1e-11, rtol=0)
    # The last entry of `hidden_states` is taken after the final norm, the tap before it.
    last = tapped[:, 2 * target.hidden_size :]
    torch.testing.assert_close(target.text_model.norm(last), states[-1][0], atol=1e-11, rtol=0)
    torch.testing.assert_close(target.head(states[-1][0, -3:]), after.logits, atol=1e-11, rtol=0)


def test_the_tap_convention_shows_on_layers_that_add_powers_of_ten():
    target = tiny_target(14)
    with torch.no_grad():
        for layer in target.text_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    for number, layer in enumerate(target.text_model.layers):
        layer.register_forward_hook(lambda module, args, output, n=number: output + 10.0**n)
    prompt = torch.tensor([8, 9])
    tapped = target.prefill(prompt, None, target.new_cache(2, 1), (0, 2)).tapped
    embeds = target.embed(prompt)
    torch.testing.assert_close(tapped[:, : target.hidden_size], embeds + 1)
    torch.testing.assert_close(tapped[:, target.hidden_size :], embeds + 111)


def test_hooks_are_there_only_while_tapping():
    target = tiny_target(15)
    prompt = torch.tensor([8, 9, 10])
    cache = target.new_cache(3, 5)
    counts = []
    target.text_model.layers[1].register_forward_pre_hook(
        lambda module, args: counts.append(len(module._forward_hooks))
    )
    target.prefill(prompt, None, cache, (1,))
    target.forward(prompt[:1], None, cache)
    target.forward(prompt[:1], None, cache, tap_layer_ids=(1,))
    assert counts == [1, 0, 1]
    assert all(not layer._forward_hooks for layer in target.text_model.layers)
    with pytest.raises(InputError, match="do not fit"):
        target.forward(torch.full((90,), 8), None, cache, tap_layer_ids=(1,))
    assert all(not layer._forward_hooks for layer in target.text_model.layers)


def test_tapped_states_can_be_trained_on():
    target = tiny_target(16)
    tapped = target.prefill(torch.tensor([8, 9]), None, target.new_cache(2, 1), (1,)).tapped
    weight = torch.ones(target.hidden_size, 1, dtype=torch.float64, requires_grad=True)
    (tapped @ weight).sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], tapped.sum(0))


@pytest.mark.parametrize("ids", [(-1,), (4,), (0, 4)])
def test_taps_out_of_range_are_refused(ids):
    target = tiny_target(16)
    with pytest.raises(InputError, match=r"allowed: 0\.\.3"):
        target.forward(torch.tensor([8]), None, target.new_cache(2, 1), tap_layer_ids=ids)


@pytest.mark.parametrize(
    ("num_layers", "n", "expected"),
    [
        (28, 4, (1, 9, 17, 25)),
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 5, (1, 9, 17, 25, 33)),
        (12, 4, (1, 4, 6, 9)),  # 3.67 and 6.33
        (11, 3, (1, 5, 8)),  # 4.5 goes up
        (28, 1, (14,)),
        (6, 2, (1, 3)),
    ],
)
def test_default_tap_layers(num_layers, n, expected):
    assert default_tap_layers(num_layers, n) == expected


@pytest.mark.parametrize(("num_layers", "n"), [(28, 0), (4, 2), (8, 6), (1, 1), (2, 1), (28, 26)])
def test_default_tap_layers_refuses_shallow_targets(num_layers, n):
    with pytest.raises(InputError, match="num_tapped_layers"):
        default_tap_layers(num_layers, n)


@pytest.mark.parametrize(
    "ids", [None, [], [-1, 2], [0, 3], [0, 4], [2, 1], [1, 1], [0.0, 1], [True]]
)
def test_stored_tap_ids_are_checked(ids):
    with pytest.raises(InputError, match="target_layer_ids"):
        check_tap_layers(ids, 4, "drafter")


def test_good_tap_ids_pass():
    assert check_tap_layers([0, 2], 4, "drafter") == (0, 2)


# Refusals and identity.


def test_placeholders_and_pixels_must_match():
    target = tiny_target(17)
    input_ids, pixels = tiny_prompt(target, 17)
    with pytest.raises(InputError, match="19 video placeholders but no pixel values"):
        target.prefill(input_ids, None, target.new_cache(len(input_ids), 1))
    without = input_ids[input_ids != VIDEO]
    with pytest.raises(InputError, match="0 video placeholders for 2 frames, allowed: 19"):
        target.prefill(without, pixels, target.new_cache(len(input_ids), 1))
    with pytest.raises(InputError, match="19 video placeholders for 1 frames, allowed: 10"):
        target.prefill(input_ids, pixels[:, :1], target.new_cache(len(input_ids), 1))
    with pytest.raises(InputError, match="pixel values"):
        target.prefill(input_ids, pixels[0], target.new_cache(len(input_ids), 1))


def test_sending_the_pixels_again_is_refused():
    target = tiny_target(17)
    input_ids, pixels = tiny_prompt(target, 17)
    cache = target.new_cache(len(input_ids), 40)
    target.prefill(input_ids, pixels, cache)
    with pytest.raises(InputError, match=f"already holds {len(input_ids)} rows"):
        target.prefill(input_ids, pixels, cache)


def test_lengths_are_checked_before_anything_runs():
    target = tiny_target(18, max_positions=64)
    target.new_cache(40, 8)
    with pytest.raises(InputError, match=r"prompt of 41 tokens \+ 8 new .* = 65 .* 64"):
        target.new_cache(41, 8)
    with pytest.raises(InputError, match=r"70 tokens \(55 of them video\) .* never truncated"):
        target.check_lengths(70, 1, video_tokens=55)
    with pytest.raises(InputError, match="at least 1 each"):
        target.new_cache(5, 0)
    with pytest.raises(InputError, match="at most 64"):
        target.prefill(torch.full((65,), 8), None, KVCache(4, 2, 8, 99, torch.float64, "cpu"))


def test_capacity_is_prompt_and_new_tokens_and_one_tree():
    target = tiny_target(18)
    assert target.new_cache(30, 20).capacity == 30 + 20 + 61
    assert target.new_cache(30, 20, verify_rows=121).capacity == 171


def test_special_ids():
    target = tiny_target(19)
    tokens = len(target.tokenizer)
    assert target.mask_token_id == tokens  # the first row beyond the tokenizer
    assert target.banned_ids.tolist() == [IMAGE, VIDEO, *range(tokens, target.vocab_size)]
    assert target.stop_ids == {IM_END}


def test_the_stop_set_is_a_union():
    model = tiny_model(0, tiny_config(), torch.float32)
    model.generation_config.eos_token_id = [7, 8]
    model.config.eos_token_id = 9
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "red"
    target = Target(model, tokenizer, PREPROCESSING)
    assert target.stop_ids == {7, 8, 9, IM_END, tokenizer.convert_tokens_to_ids("red")}


def test_mask_rows_that_are_zero_or_odd_are_passed_over():
    target = tiny_target(20)
    tokens = len(target.tokenizer)
    with torch.no_grad():
        target.embedding.weight[tokens] = 0.0
        target.embedding.weight[tokens + 1] *= 1e3
        target.embedding.weight[tokens + 2, 0] = float("nan")
    assert target.mask_token_id == tokens + 3


def test_without_spare_rows_an_unused_added_token_masks():
    config = tiny_config()
    tokenizer = tiny_tokenizer()
    config.text_config.vocab_size = len(tokenizer) + 1
    model = tiny_model(0, config, torch.float32)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<spare>"]})
    spare = tokenizer.convert_tokens_to_ids("<spare>")
    target = Target(model, tokenizer, PREPROCESSING)
    assert target.mask_token_id == spare == target.vocab_size - 1
    with torch.no_grad():
        target.embedding.weight[spare] = 0.0
    del target.mask_token_id
    with pytest.raises(InputError, match="no unused embedding row"):
        _ = target.mask_token_id


def test_generation_settings_that_are_ignored_are_named():
    model = tiny_model(0, tiny_config(), torch.float32)
    model.generation_config.repetition_penalty = 1.05
    model.generation_config.top_k = 20
    target = Target(model, tiny_tokenizer(), PREPROCESSING)
    assert target.ignored_generation_settings == {"repetition_penalty": 1.05, "top_k": 20}
    assert tiny_target(0).ignored_generation_settings == {}


def test_not_finite_logits_stop_the_clip():
    target = tiny_target(21)
    with torch.no_grad():
        target.lm_head.weight[3] = float("inf")
    with pytest.raises(InputError, match="not finite"):
        target.prefill(torch.tensor([8]), None, target.new_cache(1, 1))


def test_the_cache_keyword_is_found_in_either_spelling():
    assert cache_keyword(lambda inputs_embeds, cache=None: None) == "cache"
    assert cache_keyword(lambda inputs_embeds, past_key_values=None: None) == "past_key_values"
    with pytest.raises(InputError, match="neither"):
        cache_keyword(lambda inputs_embeds, kv=None: None)


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_either_spelling_fills_the_cache(keyword):
    target = tiny_target(22)
    target.cache_keyword = keyword
    cache = target.new_cache(12, 1)
    target.prefill(torch.full((12,), 8), None, cache)
    assert cache.length == 12


def test_a_misspelt_keyword_cannot_pass():
    target = tiny_target(22)
    target.cache_keyword = "kache"
    with pytest.raises(RuntimeError, match="did not use the cache"):
        target.prefill(torch.full((12,), 8), None, target.new_cache(12, 1))


def test_the_text_model_is_found_by_what_it_can_do():
    target = tiny_target(23)
    assert target.text_model is target.model.model.language_model
    with pytest.raises(InputError, match="no decoder"):
        find_text_model(target.model.model.vision_tower)


def test_facts_name_what_was_loaded():
    facts = tiny_target(24).facts()
    assert facts["layers"] == 4
    assert facts["kv_bytes_per_token"] == 2 * 4 * 2 * 8 * 8
    assert facts["weight_bytes"] == 8 * facts["parameters"]
    assert facts["stop_ids"] == [IM_END]
    assert facts["attention"] == "vflash"


def test_unknown_attention_is_refused():
    with pytest.raises(InputError, match="attention: found 'flash'"):
        tiny_target(0, attention="flash")
