"""Attention masses, cosines and text states of one prefill, against Hugging Face's own outputs."""

import pytest
import torch

from tests.tiny import IMAGE, VIDEO, tiny_language_target, tiny_prompt, tiny_target
from vflash_analysis.errors import InputError
from vflash_analysis.model import watch
from vflash_analysis.model.attention import HF_NAME
from vflash_analysis.model.positions import (
    INSTRUCTION,
    TEMPLATE,
    VISUAL,
    last_position,
    prompt_kinds,
)
from vflash_analysis.model.watch import attention_masses, cosines, watched_prefill

QUESTION = "what happens then ?"


def read(target, seed=3, question=QUESTION, num_frames=2):
    """Prompt ids, pixels and kinds."""
    _, pixels = tiny_prompt(target, seed, num_frames)
    input_ids = target.build_prompt(question, num_frames)
    return input_ids, pixels, prompt_kinds(target, question, input_ids)


def watched(target, queries, **how):
    input_ids, pixels, kinds = read(target, **how)
    cache = target.allocate_cache(len(input_ids))
    return (
        watched_prefill(target, input_ids, pixels, kinds, cache, queries),
        cache,
        input_ids,
        kinds,
    )


def reference(target, input_ids, pixels):
    """Hugging Face's own weights, each (1, heads, P, P), where eager, and states, each (1, P, H)."""
    embeds = target.embed(input_ids).clone()
    embeds[input_ids == target.video_token_id] = target.encode_video(pixels)
    with torch.inference_mode():
        out = target.text_model(
            inputs_embeds=embeds[None],
            output_attentions=target.attention == "eager",
            output_hidden_states=True,
            use_cache=False,
        )
    return out.attentions, torch.stack(out.hidden_states)[:, 0]


# --------------------------------------------------------------------------- kinds


def test_the_kinds_of_a_prompt():
    target = tiny_target(0)
    input_ids, _, kinds = read(target)
    words = target.tokenizer.convert_ids_to_tokens(input_ids.tolist())
    # <|im_start|>user <video>…\nwhat happens then ?<|im_end|><|im_start|>assistant
    assert words[:2] == ["<|im_start|>", "user"] and set(words[2:21]) == {"<video>"}
    assert words[21:] == ["what", "happens", "then", "?", "<|im_end|>", "<|im_start|>", "assistant"]
    assert kinds.tolist() == [TEMPLATE] * 2 + [VISUAL] * 19 + [INSTRUCTION] * 4 + [TEMPLATE] * 3
    assert last_position(kinds, INSTRUCTION) == 24 and last_position(kinds, VISUAL) == 20


def test_a_text_that_a_template_spells_too_is_still_found():
    """'user' stands in the template before the video, and in the question after it."""
    target = tiny_target(0)
    _, _, kinds = read(target, question=" user ")
    assert kinds.tolist() == [TEMPLATE] * 2 + [VISUAL] * 19 + [INSTRUCTION] + [TEMPLATE] * 3


@pytest.mark.parametrize("question", ["", "  "])
def test_a_prompt_without_a_text_is_refused(question):
    target = tiny_target(0)
    with pytest.raises(InputError, match="allowed: a text that follows it unchanged"):
        read(target, question=question)


def test_a_text_that_the_template_changes_is_refused():
    target = tiny_target(0)
    target.template = target.template.replace("part['text']", "part['text'] | upper")
    with pytest.raises(InputError, match="found the text 'what happens then \\?' not after"):
        read(target)


def test_another_prompt_than_the_text_gives_is_refused():
    target = tiny_target(0)
    input_ids = target.build_prompt(QUESTION, 2)
    with pytest.raises(InputError, match="prompt: found 28 tokens, 29 by its text"):
        prompt_kinds(target, QUESTION + " red", input_ids)


def test_a_target_without_a_video_is_refused_in_one_line():
    target = tiny_language_target(0)
    with pytest.raises(
        InputError, match="tiny language model 0: reads no video, allowed:"
    ) as found:
        prompt_kinds(target, QUESTION, target.build_prompt(QUESTION, 0))
    assert "\n" not in str(found.value)


# --------------------------------------------------------------------------- attention


@pytest.mark.parametrize("attention", ["vflash", "sdpa", "eager"])
def test_masses_are_the_sums_of_eager_attention_weights(attention):
    target = tiny_target(4, attention=attention, dtype=torch.float32)
    seen, cache, input_ids, kinds = watched(target, [24, 27])
    eager = tiny_target(4, attention="eager", dtype=torch.float32)
    weights, _ = reference(eager, input_ids, read(eager)[1])
    assert seen.masses.shape == (4, 2, 4, 3)
    for place, row in enumerate((24, 27)):
        for kind in (INSTRUCTION, VISUAL, TEMPLATE):
            wanted = torch.stack([w[0, :, row, kinds == kind].sum(-1) for w in weights])
            torch.testing.assert_close(seen.masses[:, place, :, kind], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.masses.sum(-1), torch.ones(4, 2, 4), rtol=0, atol=1e-5)
    assert seen.masses.std() > 0.01  # weights that are all alike would hide a wrong row
    assert cache.length == len(input_ids)


def test_weights_by_hand():
    """Two query heads on one key head: scores ln 1, ln 3 and, doubled, ln 1, ln 9."""
    query = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    key = torch.tensor([[[0.0, 5.0], [2 * torch.log(torch.tensor(3.0)), 5.0]]])
    found = attention_masses(query, key, 0.5, torch.tensor([1, 0]), 3)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.25, 0.0], [0.9, 0.1, 0.0]]))


def test_every_query_head_reads_its_own_group():
    """Heads 0, 1 share key head 0 and heads 2, 3 key head 1, which sees nothing but key 1."""
    query = torch.ones(4, 1)
    key = torch.tensor([[[0.0], [0.0]], [[-1e4], [0.0]]])
    found = attention_masses(query, key, 1.0, torch.tensor([0, 1]), 2)
    assert found.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 1.0], [0.0, 1.0]]


def test_the_target_attends_as_before_afterwards():
    target = tiny_target(2)
    before = target.text_model.config._attn_implementation
    seen, cache, input_ids, _ = watched(target, [5])
    assert target.text_model.config._attn_implementation == before
    plain = target.allocate_cache(len(input_ids))
    prefill = target.prefill(input_ids, read(target)[1], plain)
    assert torch.equal(prefill.logits, seen.prefill.logits)
    for layer in range(4):
        for own, other in zip(cache.keys_values(layer), plain.keys_values(layer), strict=True):
            assert torch.equal(own, other)


def test_hooks_go_with_an_error(monkeypatch):
    target = tiny_target(2)
    monkeypatch.setattr(target, "prefill", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watched(target, [5])
    assert target.text_model.config._attn_implementation == HF_NAME
    assert not any(layer._forward_hooks for layer in target.text_model.layers)


# --------------------------------------------------------------------------- states


def test_cosines_and_text_states_are_those_of_hugging_faces_states(monkeypatch):
    monkeypatch.setattr(watch, "ROWS_AT_ONCE", 5)
    target = tiny_target(6)
    seen, _, input_ids, kinds = watched(target, [5])
    sdpa = tiny_target(6, attention="sdpa")
    states = reference(sdpa, input_ids, read(sdpa)[1])[1]  # the last one is after the final norm
    visual = kinds == VISUAL
    assert seen.text_rows.tolist() == (~visual).nonzero()[:, 0].tolist()
    torch.testing.assert_close(seen.text_states, states[:4, ~visual], rtol=1e-9, atol=1e-9)
    for layer in range(3):
        for kept, before in ((seen.step_cosines, layer), (seen.input_cosines, 0)):
            a, b = states[before], states[layer + 1]
            cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
            wanted = torch.stack([cosine[visual].sum(), cosine[~visual].sum()])
            torch.testing.assert_close(kept[layer], wanted, rtol=1e-9, atol=1e-9)
    assert torch.equal(seen.step_cosines[0], seen.input_cosines[0])
    assert seen.step_cosines.shape == seen.input_cosines.shape == (4, 2)


def test_a_state_that_is_half_turned_has_cosine_one_half():
    before = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    after = torch.tensor([[1.0, 3**0.5], [0.0, -1.0], [7.0, 7.0]])
    torch.testing.assert_close(cosines(before, after), torch.tensor([0.5, -1.0, 1.0]))


def test_the_placeholders_of_these_tests_are_the_targets():
    target = tiny_target(0)
    assert (target.video_token_id, target.image_token_id) == (VIDEO, IMAGE)
