"""Compiled steps against `Target.forward` and the drafter's own forward, run here without compiling."""

import pytest
import torch

from tests.tiny import save_target, tiny_drafter, tiny_prompt, tiny_target
from vflash_analysis.errors import InputError
from vflash_analysis.model import attention, fixed
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.compiled import CompiledTarget, DraftStep
from vflash_analysis.model.drafter import drafter_cache
from vflash_analysis.model.fixed import FixedSize
from vflash_analysis.model.target import load_target


@pytest.fixture(autouse=True)
def uncompiled():
    """What a step computes is the same function uncompiled; `tests/decoding` compiles it."""
    with torch.compiler.set_stance("force_eager"):
        yield


def ready(seed=0, **kwargs):
    """A target that decodes compiled, and its cache holding a prompt."""
    target = tiny_target(seed, **kwargs)
    target.compiled = CompiledTarget(target)
    input_ids, pixels = tiny_prompt(target, seed, num_frames=6)  # 55 video tokens, more than a step
    cache = target.new_cache(len(input_ids), 20)
    target.prefill(input_ids, pixels, cache)
    return target, cache


def copy_of(cache):
    """The same rows in a cache of another size."""
    copy = KVCache(cache.num_layers, 2, 8, cache.length + 80, torch.float64, "cpu")
    for layer in range(cache.num_layers):
        copy.update(*cache.keys_values(layer), layer)
    return copy


def assert_same_rows(cache, other):
    assert cache.length == other.length
    for layer in range(cache.num_layers):
        for ours, theirs in zip(cache.keys_values(layer), other.keys_values(layer), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize("rows", [4, 9, 61])
@pytest.mark.parametrize("tree", [False, True])
def test_a_step_equals_the_forward_padded_or_not(rows, tree):
    target, cache = ready()
    assert cache.length > fixed.SIZE_STEP  # so there is a prefix
    other = copy_of(cache)
    ids = torch.tensor([8, 9, 10, 11])
    mask, depths = (TREE, torch.tensor([0, 1, 1, 2])) if tree else (None, torch.arange(4))
    step = target.compiled.step(cache, rows, (0, 2))
    for _ in range(3):  # the third behind rows of its own and of the padding
        positions = depths + cache.length
        own = target.forward(ids, positions, other, mask, (0, 2))
        found = step(ids, positions, mask)
        torch.testing.assert_close(found.logits, own.logits, atol=1e-11, rtol=0)
        torch.testing.assert_close(found.tapped, own.tapped, atol=1e-11, rtol=0)
        assert_same_rows(cache, other)
        for one in (cache, other):
            one.keep(one.length - 4, [0, 2, 3])
    single = target.compiled.step(cache, 1, ())
    own = target.forward(ids[:1], None, other)
    found = single(ids[:1], torch.tensor([cache.length]), None)
    torch.testing.assert_close(found.logits, own.logits, atol=1e-11, rtol=0)
    assert found.tapped is None


def test_the_cuda_form_agrees(monkeypatch):
    """With the device tests answered yes: prefix and tail apart, merged by log-sum-exp."""
    target, cache = ready(1)
    drafter = tiny_drafter(target, 6)
    other = copy_of(cache)
    block = torch.tensor([8, *[target.mask_token_id] * 15])
    states = torch.ones(70, 2 * target.hidden_size, dtype=torch.float64)

    def draft():
        step = DraftStep(target, drafter, 70, 12, 16, None)
        drafter.append_context(states[None], torch.arange(70)[None], step.cache)
        return step(block, states[:3], 80)

    expected = draft()
    ids, depths = torch.tensor([8, 9, 10, 11]), torch.tensor([0, 1, 1, 2])
    steps = [(1, ids[:1], depths[:1], None), (4, ids, depths, TREE), (9, ids, depths, TREE)]
    own = [target.forward(i, d + other.length, other, m).logits for _, i, d, m in steps]
    calls = []
    monkeypatch.setattr(fixed, "_narrow_masks", lambda device: True)
    monkeypatch.setattr(attention, "_flash_prefix_possible", lambda query: True)
    merge = attention.merge_by_lse
    monkeypatch.setattr(attention, "merge_by_lse", lambda *a: calls.append(1) or merge(*a))
    for (rows, i, d, m), logits in zip(steps, own, strict=True):
        found = target.compiled.step(cache, rows, ())(i, d + cache.length, m)
        torch.testing.assert_close(found.logits, logits, atol=1e-11, rtol=0)
    torch.testing.assert_close(draft(), expected, atol=1e-6, rtol=0)
    # Each step runs once when it is made and once when it is called; the drafter has two layers.
    assert len(calls) == 2 * 3 * target.num_layers + 2 * 2


def test_rows_behind_the_held_ones_do_not_count():
    target, cache = ready(1)
    step = target.compiled.step(cache, 2, ())
    ids, positions = torch.tensor([8, 9]), torch.arange(2) + cache.length
    logits = step(ids, positions, None).logits
    cache.drop(2)
    for memory in cache.layers_in_place():
        for layer in memory:
            layer[:, :, cache.length :] = 1e6
    assert torch.equal(step(ids, positions, None).logits, logits)


def test_a_new_cache_holds_finite_numbers_everywhere(monkeypatch):
    """Memory may hold anything; a row that no one sees still takes part with weight zero."""
    target, _ = ready(1)
    allocate = target.allocate_cache

    def dirty(capacity):
        cache = allocate(capacity)
        for memory in cache.layers_in_place():
            memory[0].fill_(float("nan"))
        return cache

    monkeypatch.setattr(target, "allocate_cache", dirty)
    keys, values = target.new_cache(200, 20).layers_in_place()
    assert all(bool(layer.eq(0).all()) for layer in (*keys, *values))
    CompiledTarget(target)  # the check at load


def test_prompts_between_two_multiples_of_64_share_a_size():
    assert FixedSize.of(63, 10) == FixedSize(0, 74)
    assert FixedSize.of(64, 10) == FixedSize.of(127, 10) == FixedSize(64, 74)
    assert FixedSize.of(127, 10).capacity == 138 >= 127 + 10


def test_there_is_one_cache_at_a_time():
    target, cache = ready(2)
    held = cache.length
    step = target.compiled.step(cache, 1, ())
    assert target.compiled.step(cache, 1, ()) is step
    assert target.new_cache(held + 1, 20) is cache
    assert cache.length == 0
    other = target.new_cache(held + 64, 20)
    assert other is not cache
    with pytest.raises(InputError, match="not the target's own"):
        target.compiled.step(cache, 1, ())
    assert target.compiled.step(other, 1, ()) is not step


def test_a_step_refuses_what_does_not_fit():
    target, cache = ready(3)
    step = target.compiled.step(cache, 4, ())
    ids = torch.arange(8, 13)
    with pytest.raises(InputError, match="found 5 tokens"):
        step(ids, ids, None)
    held = cache.length
    cache.advance(cache.capacity - held - 3)
    with pytest.raises(InputError, match=f"behind 64 to {cache.capacity - 4}"):
        step(ids[:1], ids[:1], None)
    cache.truncate(20)
    with pytest.raises(InputError, match="behind 20 rows"):
        step(ids[:1], ids[:1], None)


def test_a_decoder_that_does_more_than_its_layers_is_refused():
    target = tiny_target(4)

    def scale(module, args, kwargs):
        return args, {**kwargs, "inputs_embeds": 1.01 * kwargs["inputs_embeds"]}

    target.text_model.register_forward_pre_hook(scale, with_kwargs=True)
    with pytest.raises(InputError, match=r"tiny target 4: target\.compile: logits of the layers"):
        CompiledTarget(target)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_is_refused(attention):
    with pytest.raises(InputError, match=f"true with attention '{attention}', allowed: vflash"):
        CompiledTarget(tiny_target(4, attention=attention))


@pytest.mark.parametrize("context_rows", [3, 70])
def test_a_draft_equals_the_drafters_forward_for_every_number_of_new_rows(context_rows):
    target = tiny_target(5)
    drafter = tiny_drafter(target, 6, block_size=5)
    step = DraftStep(target, drafter, context_rows, 12, 5, target.banned_ids)
    cache = drafter_cache(drafter, 120)
    generator = torch.Generator().manual_seed(0)
    width = 2 * target.hidden_size

    def states(rows):
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    prompt = states(context_rows)
    for one in (step.cache, cache):
        drafter.append_context(prompt[None], torch.arange(context_rows)[None], one)
    anchor = context_rows + 7  # context left out: positions run ahead of rows
    block = torch.tensor([8, *[target.mask_token_id] * 4])
    for new in (0, 1, 5, 0, 3, 2):
        anchor += new
        tapped = states(new) if new else None
        hidden = drafter(
            noise_embeds=target.embed(block)[None],
            context_hidden_states=None if tapped is None else tapped[None],
            position_ids=torch.arange(anchor - new, anchor + 5)[None],
            cache=cache,
        ).last_hidden_state
        cache.drop(5)
        own = target.head(hidden[0, 1:]).float()
        own[:, target.banned_ids] = float("-inf")
        torch.testing.assert_close(step(block, tapped, anchor), own, atol=1e-6, rtol=0)
        assert_same_rows(step.cache, cache)
    with pytest.raises(InputError, match="compiled draft: found"):
        step.cache.advance(step.cache.capacity - step.cache.length - 4)
        step(block, None, anchor)


def test_a_step_for_drafts_is_kept_for_texts_of_its_size():
    target = tiny_target(5)
    step = DraftStep(target, tiny_drafter(target, 6), 70, 12, 16, None)
    assert step.fits(64, 12) and step.fits(127, 12)
    assert not step.fits(63, 12) and not step.fits(70, 13)


def test_the_setting_makes_a_loaded_target_compiled(tmp_path):
    folder = save_target(tiny_target(7, dtype=torch.float32), tmp_path)
    plain, wanted = (load_target(folder, "float32", "cpu", compile=c) for c in (False, True))
    assert plain.compiled is None and isinstance(wanted.compiled, CompiledTarget)
    assert (plain.facts()["compiled"], wanted.facts()["compiled"]) == (False, True)
