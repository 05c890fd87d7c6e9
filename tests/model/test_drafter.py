"""The drafter: training path against decoding path, what blocks may see, saving, matching."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.tiny import VIDEO, save_target, tiny_drafter, tiny_frames, tiny_prompt, tiny_target
from vflash_analysis.config import DrafterSettings
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import (
    VFlashConfig,
    VFlashDrafter,
    check_drafter_matches,
    context_rows,
    drafter_cache,
    drafter_config,
    drafter_sha256,
    load_drafter,
    new_drafter,
    visible_context,
)
from vflash_analysis.model.network import check_drafter_config
from vflash_analysis.model.target import load_target

SLOTS = 16


@pytest.fixture(scope="module")
def target():
    return tiny_target(0, num_layers=5)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, 0)


def config_of(target, **shape):
    """Config of a drafter with one tapped layer."""
    return drafter_config(target, DrafterSettings(num_tapped_layers=1, **shape))


def text(target, seed, length=40):
    """Token ids and tapped states (1, length, n*H) of a random text run through the target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 40, (length,), generator=generator)
    tapped = target.prefill(ids, None, target.new_cache(length, 1), (0, 3)).tapped
    return ids, tapped[None]


def noise(target, ids, anchors):
    """Embeddings (1, A, S, H) of blocks: each anchor's token and masks."""
    blocks = torch.full((len(anchors), SLOTS), target.mask_token_id)
    blocks[:, 0] = ids[torch.tensor(anchors)]
    return target.embed(blocks)[None]


def blocks_pass(drafter, target, ids, tapped, anchors, **arguments):
    """The training path on one text: (1, A, S, H)."""
    positions = torch.arange(len(ids))[None]
    chosen = torch.tensor([anchors])
    visible = visible_context(positions, chosen)
    context = drafter.project(tapped, visible.any(1))
    return drafter.forward_blocks(
        noise(target, ids, anchors),
        drafter.context_keys_values(context, positions),
        chosen[..., None] + torch.arange(SLOTS),
        visible,
        **arguments,
    )


@pytest.mark.parametrize("max_rows", [None, 16, 48])
def test_training_path_equals_the_cached_decoding_path_at_every_anchor(target, drafter, max_rows):
    ids, tapped = text(target, 1)
    anchors = list(range(1, 40))
    trained = blocks_pass(drafter, target, ids, tapped, anchors, max_rows=max_rows)
    embeds = noise(target, ids, anchors)
    cache = drafter_cache(drafter, 40 + SLOTS)
    held = 0
    for number, anchor in enumerate(anchors):
        # Context grows by what was committed since: uneven steps, in the way decoding adds it.
        if number % 4 == 1:
            continue
        new = tapped[:, held:anchor]
        out = drafter(embeds[:, number], new, cache=cache).last_hidden_state
        torch.testing.assert_close(out, trained[:, number], atol=1e-10, rtol=0)
        assert cache.length == anchor + SLOTS
        cache.drop(SLOTS)
        held = anchor


def test_context_can_be_added_ahead_of_the_first_draft(target, drafter):
    ids, tapped = text(target, 2)
    embeds = noise(target, ids, [30])[:, 0]
    one, two = drafter_cache(drafter, 60), drafter_cache(drafter, 60)
    together = drafter(embeds, tapped[:, :30], cache=one).last_hidden_state
    drafter.append_context(tapped[:, :30], torch.arange(30)[None], two)
    assert two.length == 30
    apart = drafter(embeds, None, cache=two).last_hidden_state
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=0)
    without_cache = drafter(embeds, tapped[:, :30]).last_hidden_state
    torch.testing.assert_close(together, without_cache, atol=1e-12, rtol=0)
    for layer in range(2):
        for a, b in zip(one.keys_values(layer), two.keys_values(layer), strict=True):
            torch.testing.assert_close(a[:, :, :30], b[:, :, :30], atol=1e-12, rtol=0)


def test_kept_context_rows_keep_their_positions(target, drafter):
    ids, tapped = text(target, 3)
    rows = torch.tensor([0, 3, 4, 11, 20])
    embeds = noise(target, ids, [30])[:, 0]
    cache = drafter_cache(drafter, 60)
    drafter.append_context(tapped[:, rows], rows[None], cache)
    positions = 30 + torch.arange(SLOTS)[None]
    out = drafter(embeds, None, positions, cache=cache).last_hidden_state
    visible = torch.zeros(1, 1, 40, dtype=torch.bool)
    visible[..., rows] = True
    expected = drafter.forward_blocks(
        embeds[:, None],
        drafter.context_keys_values(drafter.project(tapped), torch.arange(40)[None]),
        positions[:, None],
        visible,
    )
    torch.testing.assert_close(out, expected[:, 0], atol=1e-12, rtol=0)
    shifted = drafter(embeds, tapped[:, rows]).last_hidden_state
    assert (shifted - out).abs().max() > 1e-3


def loss_and_gradients(drafter, target, ids, tapped, anchors):
    drafter.zero_grad()
    hidden = blocks_pass(drafter, target, ids, tapped, anchors)
    labels = torch.stack([ids.roll(-anchor)[:SLOTS] for anchor in anchors])
    loss = functional.cross_entropy(target.head(hidden)[0].flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in drafter.parameters()]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_states_at_and_after_the_last_anchor_cannot_matter(target, value):
    drafter = tiny_drafter(target, 3)
    ids, tapped = text(target, 4)
    loss, gradients = loss_and_gradients(drafter, target, ids, tapped, [5, 6, 17])
    spoilt = tapped.clone()
    spoilt[:, 17:] = value
    again, spoilt_gradients = loss_and_gradients(drafter, target, ids, spoilt, [5, 6, 17])
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, spoilt_gradients, strict=True))


def test_each_of_200_anchors_sees_only_what_lies_before_it(target):
    """Huge states from an anchor on change no output of that anchor's block, neighbours included."""
    drafter = tiny_drafter(target, 4)
    ids, tapped = text(target, 5, length=210)
    anchors = list(range(1, 201))
    clean = blocks_pass(drafter, target, ids, tapped, anchors)
    for spoilt_from in (1, 2, 60, 133, 200):
        spoilt = tapped.clone()
        spoilt[:, spoilt_from:] = 1e8
        out = blocks_pass(drafter, target, ids, spoilt, anchors)
        # The block of anchor a reads positions < a, so it is untouched when a <= spoilt_from.
        untouched = spoilt_from
        assert torch.equal(out[:, :untouched], clean[:, :untouched])
        if spoilt_from < 200:
            assert (out[:, untouched] - clean[:, untouched]).abs().max() > 1e-6


def test_the_anchors_own_state_would_change_the_output_if_it_were_seen(target, drafter):
    ids, tapped = text(target, 6)
    positions = torch.arange(40)[None]
    arguments = (
        noise(target, ids, [9]),
        drafter.context_keys_values(drafter.project(tapped), positions),
        9 + torch.arange(SLOTS)[None, None],
    )
    right = drafter.forward_blocks(*arguments, positions[:, None] < 9)
    leak = drafter.forward_blocks(*arguments, positions[:, None] <= 9)
    assert (right - leak).abs().max() > 1e-3


@pytest.mark.parametrize("max_rows", [None, 16, 32])
def test_a_block_is_bidirectional_inside_and_closed_to_others(target, drafter, max_rows):
    ids, tapped = text(target, 7)
    positions = torch.arange(40)[None]
    anchors = torch.tensor([[8, 9, 30]])
    visible = visible_context(positions, anchors)
    embeds = noise(target, ids, [8, 9, 30])
    blocks = anchors[..., None] + torch.arange(SLOTS)
    context = drafter.context_keys_values(drafter.project(tapped), positions)

    def run(embeds):
        return drafter.forward_blocks(embeds, context, blocks, visible, max_rows=max_rows)

    before = run(embeds)
    changed = embeds.clone()
    changed[0, 1, 5] = target.embed(torch.tensor(11))
    after = run(changed)
    difference = (after - before).abs().amax(-1)[0]  # (A, S)
    assert torch.equal(difference[0], torch.zeros(SLOTS, dtype=difference.dtype))
    assert torch.equal(difference[2], torch.zeros(SLOTS, dtype=difference.dtype))
    assert bool((difference[1] > 1e-6).all())  # earlier and later slots alike


def test_batched_texts_with_padding_equal_single_ones(target, drafter):
    lengths, anchors = (12, 40), [[4, 9], [6, 33]]
    texts = [text(target, seed, length) for seed, length in zip((8, 9), lengths, strict=True)]
    tapped = torch.full((2, 40, texts[0][1].shape[-1]), math.nan, dtype=torch.float64)
    valid = torch.zeros(2, 40, dtype=torch.bool)
    for row, (_, states) in enumerate(texts):
        tapped[row, : lengths[row]] = states
        valid[row, : lengths[row]] = True
    chosen = torch.tensor(anchors)
    positions = torch.arange(40).expand(2, -1)
    visible = visible_context(positions, chosen, valid)
    embeds = torch.cat([noise(target, texts[row][0], anchors[row]) for row in range(2)])
    context = drafter.project(tapped, visible.any(1))
    blocks = chosen[..., None] + torch.arange(SLOTS)
    given = drafter.context_keys_values(context, positions)
    both = drafter.forward_blocks(embeds, given, blocks, visible)
    for row, (ids, states) in enumerate(texts):
        alone = blocks_pass(drafter, target, ids, states, anchors[row])
        torch.testing.assert_close(both[row], alone[0], atol=1e-12, rtol=0)


def test_shared_context_keys_give_the_same_gradients(target):
    drafter = tiny_drafter(target, 5)
    ids, tapped = text(target, 10)
    positions, anchors = torch.arange(40)[None], torch.tensor([[5, 20]])
    visible = visible_context(positions, anchors)
    blocks = anchors[..., None] + torch.arange(SLOTS)
    inputs = [noise(target, ids, [5, 20]), noise(target, ids.flip(0), [5, 20])]
    gradients = []
    for shared in (False, True):
        drafter.zero_grad()
        context = drafter.project(tapped)
        given = drafter.context_keys_values(context, positions)
        for embeds in inputs:
            own = given if shared else drafter.context_keys_values(context, positions)
            out = drafter.forward_blocks(embeds, own, blocks, visible)
            out.sin().sum().backward(retain_graph=True)
        gradients.append([parameter.grad.clone() for parameter in drafter.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_gradients_are_those_of_the_plain_formula(target):
    """Finite differences on a few weights of every matrix."""
    drafter = tiny_drafter(target, 6)
    ids, tapped = text(target, 11, length=24)
    _, gradients = loss_and_gradients(drafter, target, ids, tapped, [3, 7])
    step = 1e-6
    for parameter, gradient in zip(drafter.parameters(), gradients, strict=True):
        flat = parameter.data.view(-1)
        index = gradient.abs().flatten().argmax()
        original = float(flat[index])
        losses = []
        for sign in (1, -1):
            flat[index] = original + sign * step
            losses.append(loss_and_gradients(drafter, target, ids, tapped, [3, 7])[0])
        flat[index] = original
        slope = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(slope, gradient.flatten()[index], atol=1e-8, rtol=1e-5)


@pytest.mark.filterwarnings("error")
def test_autocast_runs_the_training_path(target):
    drafter = tiny_drafter(target, 7, dtype=torch.float32)
    plain = tiny_target(0, num_layers=5, dtype=torch.float32)
    ids, tapped = text(plain, 12)
    exact = blocks_pass(drafter, plain, ids, tapped, [5, 20])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = blocks_pass(drafter, plain, ids, tapped, [5, 20])
    assert (exact - rounded.float()).abs().mean() < 0.05


# The target's pieces.


def test_embedding_and_head_are_not_registered(target, drafter):
    names = set(drafter.state_dict())
    assert not [name for name in names if "embed" in name or "head" in name]
    rows = {len(tensor) for tensor in drafter.state_dict().values()}
    assert target.vocab_size not in rows
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def test_rotary_positions_are_the_targets():
    target = tiny_target(0, max_positions=32_768)
    drafter = new_drafter(config_of(target), seed=0)
    positions = torch.tensor([[0, 3, 400, 32_767]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # a cast makes the table anew
        hidden = torch.zeros(1, 4, target.hidden_size, dtype=dtype)
        cos, sin = target.text_model.rotary_emb(hidden, positions)
        ours = drafter.to(dtype).rotary(positions)
        assert ours[0].dtype == dtype
        assert torch.equal(ours[0][:, 0], cos) and torch.equal(ours[1][:, 0], sin)


def test_more_rows_than_positions_are_refused(target, drafter):
    rows = target.max_positions - 15
    states = torch.zeros(1, rows, len(drafter.config.target_layer_ids) * target.hidden_size)
    block = torch.zeros(1, 16, target.hidden_size, dtype=torch.float64)
    drafter(block, states[:, 1:].double())
    with pytest.raises(InputError, match="513 context and block rows, allowed: max_position"):
        drafter(block, states.double())


def test_config_copies_what_the_target_fixes(target):
    config = config_of(target, num_hidden_layers=3)
    text_config = target.text_config
    assert config.hidden_size == target.hidden_size
    assert config.intermediate_size == text_config.intermediate_size
    assert config.rope_parameters == text_config.rope_parameters
    assert config.layer_types == ["full_attention"] * 3
    assert config.mask_token_id == target.mask_token_id
    assert config.vocab_size == target.vocab_size
    assert config.block_size == 16
    assert config_of(target).target_layer_ids == [2]
    assert config_of(target, intermediate_size=7).intermediate_size == 7


def test_equal_seeds_give_equal_drafters(target):
    config = config_of(target)
    state = torch.get_rng_state()
    first, second, other = (new_drafter(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.dtype == torch.float32
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.fc.weight, other.fc.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": None}, "no target_layer_ids"),
        ({"target_layer_ids": [-1, 2]}, r"allowed: distinct rising ids in 0\.\.3"),
        ({"target_layer_ids": [0, 4]}, r"allowed: distinct rising ids in 0\.\.3"),
        ({"target_num_layers": None}, "no target_num_layers"),
        ({"mask_token_id": None}, "mask_token_id None"),
        ({"mask_token_id": 9999}, "an existing row below"),
        ({"block_size": 1}, "block_size: found 1"),
        ({"block_size": 17}, "block_size: found 17"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"num_attention_heads": 3}, "cannot share"),
    ],
)
def test_incomplete_configs_are_refused(target, changes, message):
    config = config_of(target, num_hidden_layers=2)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(InputError, match=message):
        check_drafter_config(config)
    with pytest.raises(InputError, match=message):
        VFlashDrafter(config)


def test_positions_and_masks_must_cover_context_and_block(target, drafter):
    ids, tapped = text(target, 13)
    embeds = noise(target, ids, [9])[:, 0]
    with pytest.raises(InputError, match="found 16 positions for 9 context and 16 block rows"):
        drafter(embeds, tapped[:, :9], torch.arange(16)[None])
    with pytest.raises(InputError, match="attention_mask"):
        drafter(embeds, tapped[:, :9], attention_mask=torch.ones(1, 9))


def test_a_padding_mask_hides_context(target, drafter):
    ids, tapped = text(target, 14)
    embeds = noise(target, ids, [9])[:, 0]
    positions = torch.arange(2, 9 + SLOTS)[None]
    expected = drafter(embeds, tapped[:, 2:9], positions).last_hidden_state
    mask = torch.ones(1, 9 + SLOTS, dtype=torch.long)
    mask[:, :2] = 0
    for hidden in (mask, mask.bool()[:, None, None]):
        out = drafter(embeds, tapped[:, :9], attention_mask=hidden).last_hidden_state
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    everything = drafter(embeds, tapped[:, :9], attention_mask=mask * 0 + 1).last_hidden_state
    assert (everything - expected).abs().max() > 1e-4


# Which context rows are read.


def test_context_rows_by_setting():
    is_video = torch.tensor([0, 1, 1, 1, 1, 0, 0]).bool()
    assert context_rows(is_video, "all").tolist() == list(range(7))
    assert context_rows(is_video, "text_only").tolist() == [0, 5, 6]
    assert context_rows(is_video, 0.5).tolist() == [0, 2, 4, 5, 6]
    assert context_rows(is_video, 0.0).tolist() == [0, 5, 6]
    assert context_rows(is_video, 1.0).tolist() == list(range(7))
    assert context_rows(is_video, 1).tolist() == list(range(7))


@settings(max_examples=60)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.floats(0, 1))
def test_a_fraction_keeps_all_text_and_that_share_of_video(flags, fraction):
    is_video = torch.tensor(flags)
    rows = context_rows(is_video, fraction)
    kept = torch.zeros_like(is_video)
    kept[rows] = True
    assert bool(kept[~is_video].all())
    assert int((kept & is_video).sum()) == math.floor(int(is_video.sum()) * fraction)
    assert rows.tolist() == sorted(set(rows.tolist()))


@pytest.mark.parametrize("context", ["video", -0.1, 1.1, True, None])
def test_other_context_settings_are_refused(context):
    with pytest.raises(InputError, match="context: found"):
        context_rows(torch.tensor([True]), context)


# Saving, loading, belonging.


def test_round_trip_and_identity(tmp_path):
    target = load_target(
        save_target(tiny_target(1, dtype=torch.float32), tmp_path / "t"), "float32", "cpu"
    )
    drafter = tiny_drafter(target, 1)
    drafter.config.training = {"objective": "self_reveal", "steps": 3}
    drafter.save_pretrained(tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    loaded = load_drafter(tmp_path / "d", target)
    assert not loaded.training  # eval mode
    assert loaded.config.training == {"objective": "self_reveal", "steps": 3}
    assert loaded.config.target_layer_ids == [0, 2]
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert loaded.layers[0].mlp.up_proj.weight.t().is_contiguous()  # as few rows are read soonest
    identity = drafter_sha256(tmp_path / "d")
    assert len(identity) == 64
    with torch.no_grad():
        drafter.fc.weight[0, 0] += 1
    drafter.save_pretrained(tmp_path / "e")
    assert drafter_sha256(tmp_path / "e") != identity
    wide = load_target(tmp_path / "t", "float64", "cpu")
    assert load_drafter(tmp_path / "d", wide).dtype == torch.float64


def test_identity_knows_no_place_and_no_library_version(tmp_path):
    saved = save_target(tiny_target(1, dtype=torch.float32), tmp_path / "one" / "t")
    target = load_target(saved, "float32", "cpu")
    folder = tmp_path / "d"
    tiny_drafter(target, 1).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    assert str(tmp_path) not in json.dumps(content) and content["target_source"] == "t"
    identity = drafter_sha256(folder)
    saved.rename(tmp_path / "moved")
    moved = load_target(tmp_path / "moved", "float32", "cpu")
    tiny_drafter(moved, 1).save_pretrained(tmp_path / "e")
    assert drafter_sha256(tmp_path / "e") == identity
    assert load_drafter(folder, moved).config.target_sha256 == moved.source_sha256
    for change, same in (
        ({"transformers_version": "5.30.0"}, True),
        ({"target_revision": "0d5068"}, True),
        ({"target_sha256": "0" * 64}, False),
        ({"mask_token_id": content["mask_token_id"] - 1}, False),
    ):
        (folder / "config.json").write_text(json.dumps(content | change))
        assert (drafter_sha256(folder) == identity) is same


def test_slices_of_a_large_buffer_can_be_saved(tmp_path):
    drafter = tiny_drafter(tiny_target(1), 1)
    buffer = torch.randn(1000, 64, dtype=torch.float64)
    drafter.fc.weight.data = buffer[10:42]  # (32, 64), part of something larger
    column = torch.randn(1000, 64, dtype=torch.float64)[:32, 3]
    drafter.norm.weight.data = column  # not contiguous
    drafter.save_pretrained(tmp_path)
    loaded = VFlashDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded.fc.weight, buffer[10:42])
    assert torch.equal(loaded.norm.weight, column)


def test_damaged_or_partial_drafters_are_named(tmp_path):
    target = tiny_target(1)
    tiny_drafter(target, 1).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    for call in (lambda: load_drafter(tmp_path, target), lambda: drafter_sha256(tmp_path)):
        with pytest.raises(InputError, match=f"{weights}: {len(whole) // 2} bytes, no whole"):
            call()
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"], config["layer_types"] = 3, ["full_attention"] * 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"11 missing keys: layers\.2\."):
        load_drafter(tmp_path, target)
    config["num_hidden_layers"], config["layer_types"] = 2, ["full_attention"] * 2
    config["intermediate_size"] += 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"6 tensors of another shape: \S+proj\.weight: found \("):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match="no drafter"):
        load_drafter(tmp_path, target)
    with pytest.raises(InputError, match="no drafter"):
        drafter_sha256(tmp_path)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"q_heads": 6}, "hidden_size 32"),
        ({"num_layers": 6}, "target_num_layers 5"),
        ({"kv_heads": 4}, "text config"),
        ({"max_positions": 256}, "max_position_embeddings 512"),
        ({"seed": 9}, "target weights tiny-0"),
    ],
)
def test_a_drafter_of_another_target_is_refused(target, drafter, other, named):
    check_drafter_matches(drafter, target)
    wrong = tiny_target(**{"seed": 0, "num_layers": 5, **other})
    with pytest.raises(InputError, match=named):
        check_drafter_matches(drafter, wrong)


@pytest.mark.parametrize("token_id", [VIDEO - 2, 8])
def test_a_mask_that_is_a_token_of_the_texts_is_refused(target, token_id):
    drafter = tiny_drafter(target, 0)
    drafter.config.mask_token_id = token_id  # <|im_end|>, then a word
    with pytest.raises(InputError, match=f"mask_token_id {token_id} is a token"):
        check_drafter_matches(drafter, target)


def test_a_saved_config_reads_back(tmp_path, target):
    config = config_of(target, context=0.25)
    config.save_pretrained(tmp_path)
    assert VFlashConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


# Inside Hugging Face's own generate.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [4, 16])
def test_hugging_face_assisted_generation_gives_the_greedy_text(seed, block_size):
    target = tiny_target(seed)
    drafter = tiny_drafter(target, seed, block_size=block_size)
    drafts, verifies = [], []
    drafter.register_forward_hook(lambda *a: drafts.append(1))
    target.text_model.register_forward_hook(lambda *a: verifies.append(1))
    input_ids, pixels = tiny_prompt(target, seed)
    arguments = {
        "input_ids": input_ids[None],
        "attention_mask": torch.ones_like(input_ids)[None],
        "pixel_values_videos": pixels,
        "max_new_tokens": 24,
        "do_sample": False,
        "eos_token_id": None,
    }
    plain = target.model.generate(**arguments)
    verifies.clear()
    assisted = target.model.generate(
        **arguments, assistant_model=drafter, speculation_type="dflash"
    )
    assert torch.equal(assisted, plain)
    assert len(drafts) >= 1
    assert len(verifies) - 1 in (len(drafts), len(drafts) + 1)


def test_a_saved_drafter_assists_after_loading(tmp_path):
    target = tiny_target(2)
    tiny_drafter(target, 2).save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path, target)
    ids = target.build_prompt("what happens", 1)[None]
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": target.prepare_frames(tiny_frames(2, 1)),
        "max_new_tokens": 12,
        "do_sample": False,
    }
    assert torch.equal(
        target.model.generate(**arguments, assistant_model=drafter, speculation_type="dflash"),
        target.model.generate(**arguments),
    )
