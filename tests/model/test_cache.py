"""The cache against a list of rows, and against prefills of the target: contents, not lengths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_drafter, tiny_prompt, tiny_target
from vflash_analysis.errors import InputError
from vflash_analysis.model.cache import KVCache

CAPACITY = 24


def new_cache():
    return KVCache(3, 2, 4, CAPACITY, torch.float64, "cpu")


def rows_for(layer, numbers):
    """Distinct keys (1, 2, n, 4) made from row numbers; values are their negatives."""
    base = torch.tensor(numbers, dtype=torch.float64).view(1, 1, -1, 1)
    return (base + 100 * layer + torch.arange(8, dtype=torch.float64).view(1, 2, 1, 4) / 10).clone()


def append(cache, numbers):
    for layer in range(3):
        keys = rows_for(layer, numbers)
        cache.update(keys, -keys, layer)


def assert_holds(cache, numbers):
    assert cache.length == len(numbers) == cache.get_seq_length()
    for layer in range(3):
        keys, values = cache.keys_values(layer)
        assert torch.equal(keys, rows_for(layer, numbers))
        assert torch.equal(values, -rows_for(layer, numbers))


operation = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 6)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("crop"), st.integers(0, 5)),
    st.tuples(st.just("truncate"), st.integers(0, CAPACITY)),
    st.tuples(st.just("keep"), st.integers(0, CAPACITY), st.lists(st.integers(0, 7), unique=True)),
    st.tuples(st.just("reset")),
)


@settings(max_examples=60)
@given(st.lists(operation, max_size=14))
def test_any_sequence_of_operations_equals_a_list(operations):
    cache, model, fresh = new_cache(), [], iter(range(10_000))
    for name, *arguments in operations:
        if name == "append":
            numbers = [next(fresh) for _ in range(arguments[0])]
            if len(model) + len(numbers) > CAPACITY:
                with pytest.raises(InputError, match="capacity of 24"):
                    append(cache, numbers)
            else:
                append(cache, numbers)
                model += numbers
        elif name in ("drop", "crop"):
            count = arguments[0]
            if count > len(model):
                with pytest.raises(InputError, match="cannot drop"):
                    cache.drop(count)
            else:
                cache.drop(count) if name == "drop" else cache.crop(-count)
                model = model[: len(model) - count]
        elif name == "truncate":
            if arguments[0] > len(model):
                with pytest.raises(InputError, match="cannot truncate"):
                    cache.truncate(arguments[0])
            else:
                cache.truncate(arguments[0])
                model = model[: arguments[0]]
        elif name == "keep":
            start, rows = arguments
            if start > len(model) or any(start + row >= len(model) for row in rows):
                with pytest.raises(InputError, match="cannot keep"):
                    cache.keep(start, rows)
            else:
                cache.keep(start, rows)
                model = model[:start] + [model[start + row] for row in rows]
        else:
            cache.reset()
            model = []
        assert_holds(cache, model)


def test_a_failed_append_leaves_the_cache_as_it_was():
    cache = new_cache()
    append(cache, list(range(20)))
    with pytest.raises(InputError, match="20 rows held, 5 more do not fit the capacity of 24"):
        append(cache, list(range(5)))
    assert_holds(cache, list(range(20)))


def test_cropping_nothing_removes_nothing_and_positive_counts_are_refused():
    cache = new_cache()
    append(cache, [1, 2, 3])
    cache.crop(0)
    assert_holds(cache, [1, 2, 3])
    with pytest.raises(InputError, match="minus the rows"):
        cache.crop(2)
    with pytest.raises(InputError, match="cannot drop"):
        cache.drop(-1)


def test_rows_to_keep_must_differ():
    cache = new_cache()
    append(cache, [1, 2, 3])
    with pytest.raises(InputError, match="must differ"):
        cache.keep(0, [1, 1])


def test_what_hugging_face_asks_is_answered():
    cache = new_cache()
    append(cache, [1, 2, 3])
    assert len(cache) == 3
    assert cache.get_mask_sizes(5, 0) == (8, 0)
    assert cache.get_query_offset() == 3
    assert cache.get_max_length() == CAPACITY
    assert cache.is_croppable and cache.is_initialized and not cache.is_compileable
    assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False] * 3
    cache.activate_past_recording()
    assert not cache.is_recording_past(0)
    assert "3 of 24 rows" in repr(cache)
    for call in (cache.reorder_cache, cache.batch_select_indices, cache.batch_repeat_interleave):
        with pytest.raises(InputError, match="not supported"):
            call(torch.tensor([0]))


def test_sizes_must_be_positive():
    with pytest.raises(InputError, match="capacity 0"):
        KVCache(1, 1, 4, 0, torch.float32, "cpu")


def test_a_cache_made_in_inference_mode_is_writable_outside():
    with torch.inference_mode():
        cache = new_cache()
    append(cache, [1, 2])
    cache.keep(0, [1])
    assert_holds(cache, [2])


def test_generate_runs_on_it_and_gives_the_same_tokens():
    target = tiny_target(1)
    input_ids, pixels = tiny_prompt(target, 1)
    arguments = {
        "input_ids": input_ids[None],
        "attention_mask": torch.ones_like(input_ids)[None],
        "pixel_values_videos": pixels,
        "max_new_tokens": 20,
        "do_sample": False,
        "eos_token_id": None,
    }
    expected = target.model.generate(**arguments)
    cache = target.new_cache(len(input_ids), 20)
    assert torch.equal(target.model.generate(**arguments, cache=cache), expected)
    assert cache.length == len(input_ids) + 19  # the last token is never fed
    drafter = tiny_drafter(target, 1)
    cache = target.new_cache(len(input_ids), 20)
    assisted = target.model.generate(
        **arguments, cache=cache, assistant_model=drafter, speculation_type="dflash"
    )
    assert torch.equal(assisted, expected)


@pytest.mark.parametrize("seed", range(3))
def test_fifty_rounds_of_trees_leave_what_a_fresh_prefill_leaves(seed):
    """After each round only the accepted path stays, in order, whichever children won."""
    target = tiny_target(seed)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(6, 40, (5,), generator=generator)
    cache = target.new_cache(5, 250)
    target.prefill(prompt, None, cache)
    committed = prompt.tolist()
    for _ in range(50):
        nodes = int(torch.randint(2, 9, (1,), generator=generator))
        parents = [-1] + [
            int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes)
        ]
        mask = torch.eye(nodes, dtype=torch.bool)
        depths = [0] * nodes
        for node in range(1, nodes):
            mask[node] |= mask[parents[node]]
            depths[node] = depths[parents[node]] + 1
        tokens = torch.randint(6, 40, (nodes,), generator=generator)
        start = cache.length
        target.forward(tokens, start + torch.tensor(depths), cache, mask)
        leaf = int(torch.randint(0, nodes, (1,), generator=generator))
        path = mask[leaf].nonzero().flatten().tolist()
        cache.keep(start, path)
        committed += tokens[path].tolist()
        if len(committed) > 240:
            break
    fresh = target.new_cache(len(committed), 1)
    target.prefill(torch.tensor(committed), None, fresh)
    assert cache.length == len(committed)
    for layer in range(target.num_layers):
        for kept, direct in zip(cache.keys_values(layer), fresh.keys_values(layer), strict=True):
            torch.testing.assert_close(kept, direct, atol=1e-9, rtol=0)


def test_one_prefill_serves_several_runs():
    target = tiny_target(2)
    input_ids, pixels = tiny_prompt(target, 2)
    cache = target.new_cache(len(input_ids), 8)
    first = target.prefill(input_ids, pixels, cache).logits.argmax()[None]
    before = [tensor.clone() for tensor in cache.keys_values(1)]
    runs = []
    for _ in range(2):
        cache.truncate(len(input_ids))
        token, texts = first, []
        for _ in range(8):
            token = target.forward(token, None, cache).logits.argmax(-1)
            texts.append(int(token))
        runs.append(texts)
    cache.truncate(len(input_ids))
    assert runs[0] == runs[1]
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys_values(1), strict=True))


def test_two_clips_do_not_share_rows():
    target = tiny_target(3)
    results = []
    for order in ((4, 5), (5,)):
        for seed in order:
            input_ids, pixels = tiny_prompt(target, seed)
            cache = target.new_cache(len(input_ids), 4)
            logits = target.prefill(input_ids, pixels, cache).logits
        results.append(logits)
    assert torch.equal(*results)
