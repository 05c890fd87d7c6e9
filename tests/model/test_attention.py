"""Attention against a naive reference, for every shape that decoding and training use."""

import math

import pytest
import torch
from torch.nn import functional
from transformers.cache_utils import StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.tiny import tiny_prompt, tiny_target
from vflash_analysis.errors import InputError
from vflash_analysis.model import attention
from vflash_analysis.model.attention import (
    HF_NAME,
    additive_mask,
    backend_mask,
    block_attention_with_lse,
    chain_mask,
    fold_mask,
    grouped_attention,
    merge_by_lse,
    prefix_and_block,
    register_attention,
    vflash_attention,
    vflash_mask,
)


def naive(query, key, value, visible, scale):
    """Plain fp32 attention, one query head at a time; `visible` broadcasts to (B, H, Q, K)."""
    groups = query.shape[1] // key.shape[1]
    visible = visible.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head].float() @ key[:, head // groups].float().transpose(-1, -2) * scale
        weights = scores.masked_fill(~visible[:, head], -math.inf).softmax(-1)
        heads.append(weights @ value[:, head // groups].float())
    return torch.stack(heads, dim=2)  # (B, Q, H, D)


def random_heads(seed, queries, keys, heads=14, kv_heads=2, head_dim=16, batch=1):
    """Queries as a projection yields them (a transposed view), keys as views of a larger cache."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, heads, head_dim, generator=generator).transpose(1, 2)
    key = torch.randn(batch, kv_heads, keys + 9, head_dim, generator=generator)[:, :, :keys]
    value = torch.randn(batch, kv_heads, keys + 9, head_dim, generator=generator)[:, :, :keys]
    return query, key, value


def random_tree_mask(seed, nodes):
    """Ancestors-or-self mask (N, N) of a random tree."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(0, node, (1,), generator=generator))
        mask[node] |= mask[parent]
    return mask


ALL = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 300), (16, 16), (40, 40), (16, 300), (5, 64), (61, 200)]
)
def test_causal_is_aligned_to_the_bottom_right(heads, kv_heads, queries, keys):
    query, key, value = random_heads(0, queries, keys, heads, kv_heads)
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    out = grouped_attention(query, key, value, None, True, 0.3)
    torch.testing.assert_close(out, naive(query, key, value, visible, 0.3), atol=1e-5, rtol=0)


def test_the_top_left_alignment_of_sdpa_would_be_noticed():
    query, key, value = random_heads(0, 16, 300, 2, 2)
    wrong = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    right = grouped_attention(query, key, value, None, True, 0.3)
    assert (wrong.transpose(1, 2) - right).abs().max() > 0.1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", ["narrow", "full", "folded", "additive"])
def test_random_trees_on_a_long_cache(seed, form):
    nodes, keys = 20 + seed, 150 + 7 * seed
    query, key, value = random_heads(seed, nodes, keys)
    tree = random_tree_mask(seed, nodes)
    full = functional.pad(tree, (keys - nodes, 0), value=True)[None, None]
    mask = {
        "narrow": tree[None, None],
        "full": full,
        "folded": fold_mask(full, 7),
        "additive": fold_mask(additive_mask(full, torch.float32), 7),
    }[form]
    out = grouped_attention(query, key, value, mask, True, 0.25)
    torch.testing.assert_close(out, naive(query, key, value, full, 0.25), atol=1e-5, rtol=0)


@pytest.mark.parametrize("queries", [1, 4, 12])
def test_padding_is_honoured_per_sequence(queries):
    query, key, value = random_heads(3, queries, 12, batch=3)
    padding = torch.arange(12)[None] >= torch.tensor([0, 3, 7])[:, None]  # (3, 12)
    # The last `queries` rows of each sequence, so that every row sees itself.
    visible = padding[:, None, None, :] & torch.ones(queries, 12, dtype=torch.bool).tril(
        12 - queries
    )
    visible = visible | torch.eye(12, dtype=torch.bool)[12 - queries :]
    out = grouped_attention(query, key, value, visible, True, 0.3)
    torch.testing.assert_close(out, naive(query, key, value, visible, 0.3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_row_that_sees_nothing_is_zero_and_harmless(queries, additive):
    query, key, value = random_heads(1, queries, 8)
    mask = torch.ones(1, 1, queries, 8, dtype=torch.bool)
    mask[..., 0, :] = False
    given = additive_mask(mask, torch.float32) if additive else mask
    out = grouped_attention(query, key, value, given, True, 0.3)
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    if queries > 1:
        expected = naive(query[:, :, 1:], key, value, ALL, 0.3)
        torch.testing.assert_close(out[:, 1:], expected, atol=1e-5, rtol=0)


def test_bidirectional_without_a_mask():
    query, key, value = random_heads(4, 16, 50)
    out = grouped_attention(query, key, value, None, False, 0.3)
    torch.testing.assert_close(out, naive(query, key, value, ALL, 0.3), atol=1e-5, rtol=0)


# The log-sum-exp merge that the CUDA path uses, checked through torch's CPU flash kernel.


@pytest.mark.parametrize("seed", range(4))
def test_prefix_and_block_equal_the_whole(seed):
    nodes, keys = 16, 120
    query, key, value = random_heads(seed, nodes, keys)
    tree = random_tree_mask(seed, nodes)
    rows = query.reshape(1, 2, 7 * nodes, 16)
    out = prefix_and_block(rows, key, value, fold_mask(tree[None, None], 7), 0.25)
    out = out.view(1, 14, nodes, 16).transpose(1, 2)
    full = functional.pad(tree, (keys - nodes, 0), value=True)
    torch.testing.assert_close(out, naive(query, key, value, full, 0.25), atol=1e-5, rtol=0)


def test_the_cuda_form_goes_through_the_merge(monkeypatch):
    """With the device test answered yes, a narrow mask takes the prefix path and agrees."""
    query, key, value = random_heads(2, 16, 90)
    tree = random_tree_mask(2, 16)[None, None]
    expected = grouped_attention(query, key, value, tree, True, 0.25)
    calls = []
    monkeypatch.setattr(attention, "_flash_prefix_possible", lambda query: True)
    merge = attention.merge_by_lse
    monkeypatch.setattr(attention, "merge_by_lse", lambda *a: calls.append(1) or merge(*a))
    out = grouped_attention(query, key, value, tree, True, 0.25)
    assert calls == [1]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    chain = grouped_attention(query, key, value, None, True, 0.25)
    visible = torch.ones(16, 90, dtype=torch.bool).tril(74)
    torch.testing.assert_close(chain, naive(query, key, value, visible, 0.25), atol=1e-5, rtol=0)


def test_the_gpu_is_asked_while_compiling(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def double_on_ampere(number):
        return 2 * number if attention._is_ampere(number.device) else number

    traced = torch.compile(double_on_ampere, backend="eager", fullgraph=True)
    assert traced(torch.ones(1)).item() == 2


def test_merge_is_stable_and_handles_empty_sides():
    out_a, out_b = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    inf = torch.full((2, 3), -math.inf)
    finite = torch.full((2, 3), 400.0)  # exp(400) overflows fp32
    torch.testing.assert_close(merge_by_lse(out_a, finite, out_b, inf), out_a)
    torch.testing.assert_close(merge_by_lse(out_a, inf, out_b, finite), out_b)
    torch.testing.assert_close(merge_by_lse(out_a, finite, out_b, finite), (out_a + out_b) / 2)
    assert torch.equal(merge_by_lse(out_a, inf, out_b, inf), torch.zeros_like(out_a))


def test_block_attention_reports_the_softmax_denominator():
    query, key, value = random_heads(5, 3, 6, 2, 2)
    mask = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 1], [0] * 6], dtype=torch.bool)
    out, lse = block_attention_with_lse(query, key, value, mask, 0.5)
    score = (query[0, 1, 0] * key[0, 1, 0]).sum() * 0.5
    torch.testing.assert_close(lse[0, 1, 0], score)
    torch.testing.assert_close(out[0, 1, 0], value[0, 1, 0])
    assert bool(torch.isneginf(lse[:, :, 2]).all())
    assert torch.equal(out[:, :, 2], torch.zeros(1, 2, 16))


# The registration with Hugging Face.


def test_function_and_mask_function_are_registered_together():
    register_attention()
    assert ALL_ATTENTION_FUNCTIONS[HF_NAME] is vflash_attention
    assert ALL_MASK_ATTENTION_FUNCTIONS[HF_NAME] is vflash_mask
    # Hugging Face takes every name with "flash" in it for a FlashAttention package.
    assert "flash" not in HF_NAME


def test_text_stack_only():
    target = tiny_target(0)
    assert target.text_config._attn_implementation == HF_NAME
    assert target.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("feature", ["softcap", "sliding_window", "position_bias"])
def test_features_that_are_not_implemented_are_refused(feature):
    query, key, value = random_heads(0, 2, 4)
    with pytest.raises(ValueError, match=feature):
        vflash_attention(torch.nn.Identity(), query, key, value, None, **{feature: 1.0})
    with pytest.raises(ValueError, match="dropout"):
        vflash_attention(torch.nn.Identity(), query, key, value, None, dropout=0.1)


def test_masks_are_skipped_only_where_none_is_needed():
    assert vflash_mask(1, 1, 30, q_offset=29) is None
    assert vflash_mask(1, 12, 12) is None
    chain = vflash_mask(1, 4, 12, q_offset=8)
    assert torch.equal(chain, chain_mask(4, 12, "cpu"))
    padded = vflash_mask(1, 1, 4, q_offset=3, attention_mask=torch.tensor([[0, 1, 1, 1]]).bool())
    assert padded.flatten().tolist() == [False, True, True, True]


def test_a_preallocated_cache_with_an_empty_tail_gets_a_mask():
    """Hugging Face would skip it and rely on SDPA's top-left alignment; our function needs it."""
    target = tiny_target(0, dtype=torch.float32)
    cache = StaticCache(config=target.text_config, max_cache_len=20)
    embeds = torch.zeros(1, 12, target.hidden_size)
    mask = create_causal_mask(target.text_config, embeds, None, cache)
    assert mask.shape == (1, 1, 12, 20)
    assert torch.equal(mask[0, 0], torch.ones(12, 20, dtype=torch.bool).tril())


def test_keys_are_never_replicated(monkeypatch):
    """Prefill, autoregressive steps, chain and tree hand the cache's own memory to the kernel."""
    target = tiny_target(0, q_heads=14, kv_heads=2)
    seen = []
    kernel = attention.scaled_dot_product_attention

    def spy(query, key, value, **kwargs):
        seen.append((query.shape[1], key.shape[1], key.data_ptr(), value.data_ptr()))
        return kernel(query, key, value, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    input_ids, pixels = tiny_prompt(target, 0)
    cache = target.new_cache(len(input_ids), 30)
    target.prefill(input_ids, pixels, cache)
    target.forward(input_ids[:1], None, cache)
    target.forward(input_ids[:5], None, cache)
    target.forward(input_ids[:9], None, cache, random_tree_mask(0, 9))
    assert len(seen) == 4 * target.num_layers
    for number, (_, kv_heads, key_memory, value_memory) in enumerate(seen):
        keys, values = cache.keys_values(number % target.num_layers)
        assert kv_heads == 2
        assert (key_memory, value_memory) == (keys.data_ptr(), values.data_ptr())
    # After the square prefill the query heads of a group are rows, not heads.
    assert {query_heads for query_heads, *_ in seen[target.num_layers :]} == {2}


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (4, 9)])
def test_masks_of_another_shape_are_refused(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(InputError, match="mask: found shape"):
        backend_mask("sdpa", 4, 10, mask, 1, torch.float32, torch.device("cpu"))


def test_eager_gets_an_additive_mask():
    mask = backend_mask("eager", 2, 5, None, 2, torch.float32, torch.device("cpu"))
    assert mask.dtype == torch.float32
    assert mask.shape == (1, 1, 2, 5)
    assert mask[0, 0, 0, :4].eq(0).all()
    assert mask[0, 0, 0, 4] < -1e30


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [200, 4000])
def test_flash_prefix_on_cuda(keys):
    """Half precision on CUDA: a tree over a long cache through the flash kernel and the merge."""
    query, key, value = (
        tensor.to("cuda", torch.bfloat16) for tensor in random_heads(0, 61, keys, 28, 4, 128)
    )
    tree = random_tree_mask(0, 61).cuda()
    full = functional.pad(tree, (keys - 61, 0), value=True)
    expected = naive(query, key, value, full, 128**-0.5)
    out = grouped_attention(query, key, value, tree[None, None], True, 128**-0.5)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
