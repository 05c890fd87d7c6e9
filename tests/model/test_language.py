"""A target without a vision side: its passes, its loading, and what it refuses."""

import struct

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.tiny import (
    IM_END,
    SPARE_ROWS,
    TEXT_TEMPLATE,
    WORDS,
    save_target,
    tiny_frames,
    tiny_language_model,
    tiny_language_target,
    tiny_prompt,
    tiny_target,
    tiny_tokenizer,
)
from vflash_analysis.clips.frozen import verified_sha256
from vflash_analysis.clips.instructions import instructions
from vflash_analysis.clips.lists import Clip
from vflash_analysis.config import DrafterSettings
from vflash_analysis.decoding.tree import ancestor_mask, tree_depths
from vflash_analysis.errors import InputError
from vflash_analysis.model import language
from vflash_analysis.model.drafter import drafter_config
from vflash_analysis.model.language import check_gguf, load_language_model
from vflash_analysis.model.prompts import read_prompt
from vflash_analysis.model.text_stack import takes_mask_by_type

QUESTION = "describe a red circle"


@pytest.fixture(scope="module")
def target():
    return tiny_language_target(0)


def whole_logits(target, ids):
    """Hugging Face's own forward over a whole text: (n, V)."""
    with torch.no_grad():
        return target.model(input_ids=ids[None], use_cache=False).logits[0]


def test_a_question_alone_becomes_one_turn_of_the_template(target):
    ids = target.build_prompt(QUESTION, 0).tolist()
    spelled = target.tokenizer.convert_ids_to_tokens(ids)
    assert spelled == [
        "<|im_start|>", "user", *QUESTION.split(), "<|im_end|>", "<|im_start|>", "assistant",
    ]  # fmt: skip


@pytest.mark.parametrize("attention", ["vflash", "sdpa", "eager"])
def test_prefill_chain_and_tree_rows_are_the_models_own_logits(attention):
    target = tiny_language_target(1, attention=attention)
    ids = target.build_prompt(QUESTION, 0)
    text = torch.tensor([7, 9, 11, 8, 20, 21])
    cache = target.new_cache(len(ids), 20)
    first = target.prefill(ids, None, cache, (0, 2))
    rows = target.forward(text, None, cache, tap_layer_ids=(0, 2))
    whole = whole_logits(target, torch.cat([ids, text]))
    found = torch.cat([first.logits[None], rows.logits])
    torch.testing.assert_close(found, whole[len(ids) - 1 :], rtol=0, atol=1e-10)
    with torch.no_grad():
        states = target.model(
            input_ids=torch.cat([ids, text])[None], output_hidden_states=True
        ).hidden_states
    expected = torch.cat([states[1][0], states[3][0]], -1)
    torch.testing.assert_close(torch.cat([first.tapped, rows.tapped]), expected, rtol=0, atol=1e-10)
    tokens, parents = [7, 8, 9, 10, 12], [-1, -1, 0, 0, 1]
    cache.truncate(len(ids))
    depths = torch.tensor([0, *tree_depths(tokens, parents)])
    tree = target.forward(
        torch.tensor([6, *tokens]), depths + len(ids), cache, ancestor_mask(parents)
    ).logits
    for node, path in enumerate(([7], [8], [7, 9], [7, 10], [8, 12]), start=1):
        alone = whole_logits(target, torch.cat([ids, torch.tensor([6, *path])]))[-1]
        torch.testing.assert_close(tree[node], alone, rtol=0, atol=1e-10)


def test_special_rows_and_facts(target):
    """No placeholder exists: what is never drafted are the rows beyond the tokenizer."""
    known = len(target.tokenizer)
    assert target.placeholder_ids == frozenset()
    assert target.mask_token_id == known
    assert target.banned_ids.tolist() == list(range(known, known + SPARE_ROWS))
    assert target.stop_ids == {IM_END}
    facts = target.facts()
    assert (facts["model_type"], facts["tokens_per_frame"]) == ("llama", 0)
    assert (facts["query_heads"], facts["kv_heads"]) == (9, 3)
    assert target.lm_head.weight is target.embedding.weight
    assert tiny_target(0).placeholder_ids == {3, 4}


def test_pictures_are_refused_by_a_target_without_eyes(target):
    with pytest.raises(InputError, match="num_frames: found 2, allowed: 0"):
        target.build_prompt(QUESTION, 2)
    with pytest.raises(InputError, match="reads no video"):
        target.prepare_frames(tiny_frames(0))
    ids = target.build_prompt(QUESTION, 0)
    _, pixels = tiny_prompt(tiny_target(0), 0)
    with pytest.raises(InputError, match="found pixel values, but tiny language model 0 reads no"):
        target.prefill(ids, pixels, target.new_cache(len(ids), 1))


def test_a_video_target_refuses_a_question_alone(target):
    (clip,) = instructions("training", 1)
    with pytest.raises(InputError, match="num_frames: found 0, allowed: at least 1"):
        read_prompt(tiny_target(0), clip, None, 0)
    read = read_prompt(target, clip, None, 0)
    assert read.pixel_values is None and read.read is None and read.video_tokens == 0
    assert read.input_ids.tolist() == target.build_prompt(clip.prompt, 0).tolist()


def test_a_clip_without_a_file_has_no_digest(tmp_path):
    assert verified_sha256(Clip("c", "VDC", "training", "", QUESTION)) is None
    file = tmp_path / "c.mp4"
    file.write_bytes(b"abc")
    digest = verified_sha256(Clip("c", "VDC", "training", str(file), QUESTION))
    assert digest is not None and digest.startswith("ba7816bf8f01cfea")  # of "abc", FIPS 180-2


def test_decoders_say_whether_they_take_a_mask_for_each_layer_type():
    assert takes_mask_by_type(Qwen2ForCausalLM(small(Qwen2Config)).model.forward)
    assert not takes_mask_by_type(tiny_language_model(0, torch.float32).model.forward)
    # Mistral's config has layer types, its decoder takes one mask all the same
    assert not takes_mask_by_type(MistralForCausalLM(small(MistralConfig)).model.forward)


def small(config_class, **changes):
    values = {
        "vocab_size": 6 + len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "eos_token_id": IM_END,
        "pad_token_id": 0,
        "sliding_window": None,
    }
    return config_class(**{**values, **changes})


def saved(model, folder):
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEXT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_loads_with_the_same_logits_and_a_tied_head(tmp_path):
    target = tiny_language_target(2, torch.float32)
    loaded = load_language_model(saved(target.model, tmp_path), "float32", "cpu")
    assert loaded.lm_head.weight is loaded.embedding.weight
    assert loaded.source == tmp_path.name and loaded.revision == "local"
    assert loaded.build_prompt(QUESTION, 0).tolist() == target.build_prompt(QUESTION, 0).tolist()
    ids = loaded.build_prompt(QUESTION, 0)
    logits = [t.prefill(ids, None, t.new_cache(len(ids), 1)).logits for t in (loaded, target)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    linear = [m for m in loaded.text_model.modules() if isinstance(m, torch.nn.Linear)]
    assert linear and all(m.weight.t().is_contiguous() for m in linear)


@pytest.mark.parametrize("kind", [Qwen2ForCausalLM, MistralForCausalLM])
def test_other_decoders_load_too(kind, tmp_path):
    model = kind(small(kind.config_class))
    loaded = load_language_model(saved(model, tmp_path), "float32", "cpu")
    ids = loaded.build_prompt(QUESTION, 0)
    found = loaded.prefill(ids, None, loaded.new_cache(len(ids), 1)).logits
    torch.testing.assert_close(found, whole_logits(loaded, ids)[-1], rtol=0, atol=1e-5)


def test_a_decoder_without_what_a_drafter_copies_is_named(tmp_path):
    """Starcoder2 has layer norms, so its config has no `rms_norm_eps`: it decodes, undrafted."""
    model = Starcoder2ForCausalLM(small(Starcoder2Config))
    loaded = load_language_model(saved(model, tmp_path), "float32", "cpu")
    with pytest.raises(InputError, match="target starcoder2: its text config has no rms_norm_eps"):
        drafter_config(loaded, DrafterSettings(num_tapped_layers=1))


def test_layers_that_cannot_be_rolled_back_are_refused(tmp_path):
    types = ["full_attention", "sliding_attention"]
    config = small(Qwen2Config, sliding_window=8, use_sliding_window=True, layer_types=types)
    with pytest.raises(InputError, match="sliding_attention cannot be rolled back"):
        load_language_model(saved(Qwen2ForCausalLM(config), tmp_path), "float32", "cpu")


def test_a_decoder_that_is_not_the_whole_model_is_refused(tmp_path, monkeypatch):
    folder = saved(tiny_language_model(0, torch.float32), tmp_path)
    forward = LlamaForCausalLM.forward

    def shifted(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits.roll(1, -1)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(InputError, match="decoder and head alone choose other tokens"):
        load_language_model(folder, "float32", "cpu")


def test_a_video_model_is_no_language_model(tmp_path):
    folder = save_target(tiny_target(0, dtype=torch.float32), tmp_path)
    with pytest.raises(InputError, match=str(tmp_path)) as error:
        load_language_model(folder, "float32", "cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/file.gguf", "float32", "cpu"), "found no file, allowed: a GGUF file or"),
        (("no/such/file.gguf", "int8", "cpu"), "dtype: found 'int8'"),
        (("no/such/file.gguf", "float32", "cpu", "flash"), "attention: found 'flash'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        load_language_model(*arguments)


def text_bytes(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_bytes(architecture, ggml_type=0, rows=3):
    """The start of a GGUF file with one tensor (rows, 32), whose data are not written."""
    string, u32 = 8, 4
    entries = [("general.architecture", string, text_bytes(architecture))]
    entries += [("x.block_count", u32, struct.pack("<I", 1))]
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries))
    header += b"".join(text_bytes(k) + struct.pack("<I", kind) + v for k, kind, v in entries)
    return (
        header + text_bytes("token_embd.weight") + struct.pack("<IQQIQ", 2, 32, rows, ggml_type, 0)
    )


F32, Q8_0, UNKNOWN_TYPE = 0, 8, 99


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gguf_bytes("clip-vision"),
            r"model\.gguf: GGUF architecture 'clip-vision', allowed: .*llama",
        ),
        (gguf_bytes("general"), "GGUF architecture 'general', allowed"),
        (gguf_bytes("llama", UNKNOWN_TYPE), "no readable tensors .*ggml type 99"),
        (gguf_bytes("llama"), r"no whole GGUF file \(its tensors end at \d+\)"),
        (b"PK\x03\x04 a zip file in disguise", "no GGUF file .*magic"),
        (gguf_bytes("llama")[:40], "no GGUF file"),
        (gguf_bytes("llama")[:-30], "no GGUF file"),
        (b"", "0 bytes, no GGUF file"),
    ],
)
def test_case62_a_gguf_file_that_cannot_be_used_is_named(tmp_path, content, message):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        load_language_model(file, "float32", "cpu", log=pytest.fail)
    assert "\n" not in str(error.value) and str(file) in str(error.value)


def test_case62_what_a_gguf_file_takes_in_memory_is_said_before_it_is_taken(tmp_path, monkeypatch):
    """3,000 rows of 32 Q8_0 numbers take 34 bytes a row there, 128 in float32, 64 in half."""
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes("llama", Q8_0, 3000) + bytes(64 + 3000 * 34))
    lines: list[str] = []
    monkeypatch.setattr(language, "is_gguf_available", lambda: True)
    check_gguf(file, torch.float32, lines.append)
    check_gguf(file, torch.bfloat16, lines.append)
    assert lines[0] == "model.gguf: 0 MB become 0 MB of float32 in memory, 3.8 times as much"
    assert lines[1].endswith("of bfloat16 in memory, 1.9 times as much")
    monkeypatch.setattr(language, "is_gguf_available", lambda: False)
    with pytest.raises(InputError, match="needs the package gguf: pip install gguf"):
        check_gguf(file, torch.float32, pytest.fail)
