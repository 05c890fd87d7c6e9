"""Loading a target from a folder: the round trip, and every refusal before or after reading."""

import contextlib
import json
import logging
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlavaOnevisionConfig, Qwen2Config, SiglipVisionConfig

from tests.hub_notes import note_commit
from tests.tiny import (
    IMAGE,
    PREPROCESSING,
    TEMPLATE,
    save_target,
    tiny_config,
    tiny_model,
    tiny_prompt,
    tiny_target,
    tiny_tokenizer,
)
from vflash_analysis.errors import InputError
from vflash_analysis.model import weights
from vflash_analysis.model.inputs import parse_frame_preprocessing, read_chat_template
from vflash_analysis.model.known import check_known, known_shape
from vflash_analysis.model.source import (
    check_full_attention,
    folder_name,
    folder_revision,
    folder_sha256,
    text_config_sha256,
)
from vflash_analysis.model.target import Target, load_target, outline_target, read_files
from vflash_analysis.model.text_stack import store_input_major
from vflash_analysis.shapes import LLAVA_ONEVISION_05B, LLAVA_ONEVISION_7B

# Hugging Face saves and loads this model under the names of the original checkpoint.
STORED_HEAD = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved fp32 target, shared by tests that do not change it."""
    target = tiny_target(0, dtype=torch.float32)
    return target, save_target(target, tmp_path_factory.mktemp("target"))


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the saved folder that a test may damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in saved[1].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def test_linear_weights_are_stored_for_few_rows_and_nothing_else_changes(saved):
    loaded = load_target(saved[1], "float32", "cpu")
    linear = [m for m in loaded.text_model.modules() if isinstance(m, torch.nn.Linear)]
    assert linear and all(m.weight.t().is_contiguous() for m in linear)
    assert loaded.embedding.weight.is_contiguous()
    own, others = loaded.model.state_dict(), saved[0].model.state_dict()
    assert all(torch.equal(own[name], others[name]) for name in others)


def test_a_saved_target_loads_with_the_same_logits_and_no_socket(saved, monkeypatch):
    target, folder = tiny_target(0, dtype=torch.float32), saved[1]
    store_input_major(target.text_model)  # the order of additions goes with the layout

    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    loaded = load_target(folder, "float32", "cpu")
    input_ids, pixels = tiny_prompt(loaded, 1)
    assert torch.equal(input_ids, tiny_prompt(target, 1)[0])
    assert torch.equal(pixels, tiny_prompt(target, 1)[1])
    for weight in loaded.model.parameters():  # and with its alignment, a file's in a mapped one
        weight.data = weight.data.clone()
    logits = [
        t.prefill(input_ids, pixels, t.new_cache(len(input_ids), 1)).logits
        for t in (loaded, target)
    ]
    assert torch.equal(*logits)
    assert loaded.stop_ids == target.stop_ids
    assert loaded.mask_token_id == target.mask_token_id
    assert loaded.template == TEMPLATE
    assert loaded.template_file.endswith("chat_template.jinja")
    assert loaded.source_sha256 == folder_sha256(folder)
    assert loaded.revision == "local"
    assert loaded.source == folder.name
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_dtype_is_what_was_asked_for_and_rotary_frequencies_stay_exact(saved, copy):
    half = tiny_target(0, dtype=torch.bfloat16)
    half.model.save_pretrained(copy)
    for source, asked in ((copy, "float32"), (copy, "bfloat16"), (saved[1], "float64")):
        loaded = load_target(source, asked, "cpu")
        assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{asked}"}
        expected = 1 / 10_000 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
        assert torch.equal(loaded.text_model.rotary_emb.inv_freq.float(), expected)
        weight = loaded.text_model.layers[0].mlp.up_proj.weight
        assert weight.is_contiguous() == (asked == "bfloat16")


def test_a_tied_head_follows_the_text_config(tmp_path):
    """Top level says untied, the text config tied, no head is stored: the head must be tied."""
    target = tiny_target(1, dtype=torch.float32, tie=True)
    folder = save_target(target, tmp_path)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    content = json.loads((folder / "config.json").read_text())
    assert content["text_config"]["tie_word_embeddings"] is True
    assert STORED_HEAD not in load_file(folder / "model.safetensors")
    loaded = load_target(folder, "float32", "cpu")
    assert torch.equal(loaded.lm_head.weight, loaded.embedding.weight)
    assert torch.equal(loaded.embedding.weight, target.embedding.weight)


def test_a_missing_head_is_refused(copy):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    del tensors[STORED_HEAD]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 missing keys: lm_head\.weight"):
        load_target(copy, "float32", "cpu")


def test_renamed_prefixes_are_listed(copy):
    path = copy / "model.safetensors"
    tensors = {
        name.replace("layers.0.", "blocks.0."): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"missing keys: .*layers\.0.* unexpected keys: .*blocks"):
        load_target(copy, "float32", "cpu")


@pytest.mark.parametrize("name", ["multi_modal_projector.linear_1.bias", "layers.0.mlp.up_proj"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy, name, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    (stored,) = [key for key in tensors if name in key and "vision" not in key]
    shape = tuple(tensors[stored].shape)
    tensors[stored] = torch.zeros(shape[0] + 1, *shape[1:])
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 tensors of another shape: ") as error:
        load_target(copy, "float32", "cpu")
    found = (shape[0] + 1, *shape[1:])
    assert name in str(error.value)
    assert str(error.value).endswith(f": found {found}, allowed: {shape}")
    assert "REPORT" not in caplog.text  # the library's table


@pytest.mark.parametrize("damage", ["half", "empty", "longer", "cut", "header", "text", "huge"])
def test_damaged_weights_are_named_with_their_size(copy, damage):
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "half": whole[: len(whole) // 2],
            "empty": b"",
            "longer": whole + b"\0\0",
            "cut": whole[:-2],
            "header": whole[:100],
            "text": (20).to_bytes(8, "little") + b"this is not a header",
            "huge": (1 << 40).to_bytes(8, "little") + b"xx",
        }[damage]
    )
    with pytest.raises(InputError) as error:
        load_target(copy, "float32", "cpu")
    message = str(error.value)
    assert f"{path}: {path.stat().st_size} bytes, no whole safetensors file" in message
    assert "\n" not in message


def test_sharded_weights_are_all_checked(copy):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, copy / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    load_target(copy, "float32", "cpu")
    (copy / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"b\.safetensors: file not found"):
        load_target(copy, "float32", "cpu")
    index.write_text("{}")
    with pytest.raises(InputError, match="weight_map"):
        weights.check_weights(copy)


def test_other_weight_formats_are_named(copy):
    (copy / "model.safetensors").rename(copy / "model-q4.gguf")
    with pytest.raises(InputError, match=r"found model-q4\.gguf, allowed: model\.safetensors"):
        load_target(copy, "float32", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/folder", "float32", "cpu"), "not a local folder"),
        (("llava-hf/llava-onevision-qwen2-7b-ov-hf", "bfloat16", "cpu"), "nothing is downloaded"),
        (("SAVED", "int8", "cpu"), "dtype: found 'int8'"),
        (("SAVED", torch.int8, "cpu"), "dtype"),
        (("SAVED", "float32", "cpu", "flash"), "attention: found 'flash'"),
    ],
)
def test_wrong_arguments(saved, arguments, message):
    source = saved[1] if arguments[0] == "SAVED" else arguments[0]
    with pytest.raises(InputError, match=message):
        load_target(source, *arguments[1:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none(saved):
    with pytest.raises(InputError, match="no CUDA device"):
        load_target(saved[1], "float32", "cuda")


def test_a_folder_without_config_or_preprocessor(copy):
    (copy / "video_preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="no video_preprocessor_config"):
        load_target(copy, "float32", "cpu")
    (copy / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        load_target(copy, "float32", "cpu")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["novel_attention"]}, "novel_attention"),
        ({"layer_types": None, "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": None, "mamba_d_state": 16}, "mamba_d_state"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
    ],
)
def test_stacks_that_cannot_be_rolled_back_are_refused_by_name(changes, named):
    config = SimpleNamespace(
        model_type="novel", layer_types=["full_attention"], num_key_value_heads=2
    )
    check_full_attention(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(InputError, match=named):
        check_full_attention(config)


def test_a_sliding_window_checkpoint_is_refused(copy):
    content = json.loads((copy / "config.json").read_text())
    content["text_config"].update(
        layer_types=["full_attention"] * 3 + ["sliding_attention"], use_sliding_window=True
    )
    (copy / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="sliding_attention cannot be rolled back"):
        load_target(copy, "float32", "cpu")


def test_a_model_without_a_video_side_here_is_refused(copy):
    text = Qwen2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    text.save_pretrained(copy)
    with pytest.raises(InputError, match="model type 'qwen2' has no video side"):
        load_target(copy, "float32", "cpu")


def test_frames_must_fit_the_vision_tower(copy):
    edit_json(copy / "video_preprocessor_config.json", size={"height": 24, "width": 24})
    with pytest.raises(InputError, match="24 x 24, allowed: the vision tower's 20 x 20"):
        load_target(copy, "float32", "cpu")


GOOD = {
    "size": {"height": 20, "width": 20},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def test_frame_settings_are_read():
    settings = parse_frame_preprocessing(GOOD, "memory")
    assert settings == PREPROCESSING


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"size": {"shortest_edge": 20}}, "size"),
        ({"resample": 0}, "resample"),
        ({"image_mean": None}, "image_mean"),
        ({"image_std": [0.5]}, "image_std"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_normalize": False}, "do_normalize"),
    ],
)
def test_frame_settings_that_are_not_implemented_are_refused(change, named):
    with pytest.raises(InputError, match=f"file.json: {named}: found"):
        parse_frame_preprocessing({**GOOD, **change}, "file.json")


def test_nested_processor_settings_come_first(copy):
    nested = {**GOOD, "image_mean": [0.1, 0.2, 0.3]}
    (copy / "processor_config.json").write_text(json.dumps({"video_processor": nested}))
    assert load_target(copy, "float32", "cpu").preprocessing.mean == (0.1, 0.2, 0.3)


def test_the_older_preprocessor_name_is_read(copy):
    path = copy / "video_preprocessor_config.json"
    path.rename(copy / "preprocessor_config.json")
    loaded = load_target(copy, "float32", "cpu")
    assert loaded.preprocessing.file.endswith("/preprocessor_config.json")


def test_the_processors_template_wins_over_the_tokenizers(copy):
    """The tokenizer's own template often knows no video."""
    (copy / "chat_template.jinja").unlink()
    edit_json(copy / "tokenizer_config.json", chat_template="{{ messages[0]['role'] }}")
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    loaded = load_target(copy, "float32", "cpu")
    assert loaded.template == TEMPLATE
    assert loaded.template_file.endswith("chat_template.json")
    (copy / "chat_template.json").unlink()
    assert read_chat_template(copy) is None
    alone = load_target(copy, "float32", "cpu")
    assert alone.template_file == "tokenizer"
    with pytest.raises(InputError, match=r"tokenizer: the chat template .* 0 video"):
        alone.build_prompt("what happens", 2)


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "processor_config.json",
        "chat_template.json",
        "chat_template.jinja",
        "video_preprocessor_config.json",
        "preprocessor_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_a_folder_or_a_link_to_nothing_is_no_absent_file(copy, name):
    file = copy / name
    file.unlink(missing_ok=True)
    file.symlink_to("nowhere")
    with pytest.raises(InputError) as error:
        read_files(copy)
    assert str(error.value).startswith(f"{file}: found a link to nothing")
    file.unlink()
    file.mkdir()
    with pytest.raises(InputError) as error:
        read_files(copy)
    assert str(error.value) == f"{file}: found a folder, allowed: a file, or none of this name"


def test_what_is_no_file_has_no_part_in_the_identity(copy):
    before = folder_sha256(copy)
    (copy / "folder.safetensors").mkdir()
    (copy / "link.safetensors").symlink_to("nowhere")
    assert folder_sha256(copy) == before


def test_no_template_at_all_is_refused(copy):
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template"):
        load_target(copy, "float32", "cpu")


def test_identity_follows_content_and_large_files_are_sampled(copy, monkeypatch):
    whole = folder_sha256(copy)
    (copy / "README.md").write_text("notes")
    assert folder_sha256(copy) == whole
    monkeypatch.setattr("vflash_analysis.model.source._HASHED_WHOLE", 10)
    monkeypatch.setattr("vflash_analysis.model.source._SAMPLE_BYTES", 64)
    sampled = folder_sha256(copy)
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert folder_sha256(copy) != sampled
    monkeypatch.undo()
    assert folder_sha256(copy) != whole


def test_a_name_is_no_path_and_a_commit_is_no_name(tmp_path, monkeypatch):
    name = "llava-onevision-qwen2-7b-ov-hf"
    (tmp_path / name).mkdir()
    assert folder_name(tmp_path / name) == name
    assert folder_name(tmp_path / name / ".." / name) == name
    monkeypatch.chdir(tmp_path / name)
    assert folder_name(Path(".")) == name
    snapshot = tmp_path / f"models--llava-hf--{name}" / "snapshots" / "0d5068"
    assert folder_name(snapshot) == name
    assert folder_name(tmp_path / "snapshots" / "0d5068") == "unknown"


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("llava-onevision-qwen2-7b-ov-hf", 3584),
        ("llava-onevision-qwen2-7b-ov-chat-hf", 3584),
        ("llava-onevision-qwen2-0.5b-ov-hf", 896),
    ],
)
def test_a_known_name_stands_for_its_checkpoint(copy, name, width):
    named = copy.rename(copy.parent / name)
    message = rf"config\.json: text_config\.hidden_size: found 32, allowed: {width}"
    with pytest.raises(InputError, match=message):
        load_target(named, "float32", "cpu")
    assert load_target(named.rename(copy), "float32", "cpu").source == copy.name


ONE, OTHER = "0d5068" + "a" * 34, "1" * 40


def hub_cache(place):
    folder = place / "models--org--name" / "snapshots" / ONE
    folder.mkdir(parents=True)
    return folder


def downloaded(place, *commits):
    """A folder as `hf download --local-dir` leaves it, a file of each commit."""
    for number, commit in enumerate(commits):
        (place / f"{number}.json").touch()
        note_commit(place, f"{number}.json", commit)
    note_commit(place, "removed.json", OTHER)
    (place / ".cache" / "huggingface" / "download" / "0.json.lock").touch()
    return place


@pytest.mark.parametrize(
    ("make", "wanted", "found"),
    [
        (hub_cache, None, ONE),
        (hub_cache, ONE, ONE),
        (hub_cache, ONE[:7], ONE),
        (lambda place: downloaded(place, ONE, ONE), None, ONE),
        (lambda place: downloaded(place, ONE), ONE, ONE),
        (lambda place: downloaded(place, ONE, OTHER), None, "local"),
        (lambda place: downloaded(place, "no commit"), None, "local"),
        (lambda place: place, None, "local"),
        (lambda place: place, "pocket-1", "pocket-1"),  # our own name, which claims no commit
        (lambda place: place, ONE, f"{ONE}, as configured"),
        (lambda place: place, ONE[:7], f"{ONE[:7]}, as configured"),
        (lambda place: place, "main", "main, as configured"),
    ],
)
def test_the_revision_recorded_is_the_folders_own(tmp_path, make, wanted, found):
    assert folder_revision(make(tmp_path), wanted) == found


@pytest.mark.parametrize("make", [hub_cache, lambda place: downloaded(place, ONE)])
@pytest.mark.parametrize("wanted", [OTHER, OTHER[:7], ONE[:6], "main", "pocket-1"])
def test_another_revision_than_the_folders_is_refused(tmp_path, make, wanted):
    with pytest.raises(InputError, match=rf"target\.revision: found {wanted}, allowed: {ONE}, "):
        folder_revision(make(tmp_path), wanted)


def test_a_folder_of_several_commits_is_of_none(tmp_path):
    folder = downloaded(tmp_path, ONE, OTHER)
    with pytest.raises(InputError, match=f"holds files of {ONE} and {OTHER}, allowed: those of"):
        folder_revision(folder, ONE)


def seven_b_config(vision_changes=(), whole_changes=(), **text_changes):
    text = {
        "vocab_size": 152128,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "image_size": 384,
        "patch_size": 14,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
    }
    return LlavaOnevisionConfig(
        text_config=Qwen2Config(**{**text, **text_changes}).to_dict(),
        vision_config=SiglipVisionConfig(**{**vision, **dict(vision_changes)}).to_dict(),
        **dict(whole_changes),
    )


def check_7b(config, mean=(0.5, 0.5, 0.5)):
    shape = known_shape(config)
    assert shape == LLAVA_ONEVISION_7B
    frames = replace(PREPROCESSING, mean=mean, file="folder/video_preprocessor_config.json")
    check_known(Path("folder"), config, shape, frames)


def test_the_facts_of_the_papers_target():
    check_7b(seven_b_config())
    assert known_shape(tiny_config()) is None
    assert known_shape(tiny_config(), "llava-onevision-qwen2-0.5b-ov-hf") == LLAVA_ONEVISION_05B


def test_older_spelling_of_the_rotary_base_and_its_scaling(tmp_path):
    content = seven_b_config().to_dict()
    content["text_config"].pop("rope_parameters")
    content["text_config"]["rope_theta"] = 1e6
    (tmp_path / "config.json").write_text(json.dumps(content))
    check_7b(AutoConfig.from_pretrained(tmp_path))
    content["text_config"]["rope_scaling"] = {"type": "linear", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"text_config\.rope_type: found linear, allowed: default"):
        check_7b(AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 27}, r"text_config\.num_hidden_layers: found 27, allowed: 28"),
        ({"num_key_value_heads": 28}, r"text_config\.num_key_value_heads: found 28, allowed: 4"),
        ({"intermediate_size": 18000}, r"text_config\.intermediate_size: found 18000"),
        ({"max_position_embeddings": 4096}, r"text_config\.max_position_embeddings: found 4096"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            r"text_config\.rope_theta: found 10000\.0, allowed: 1000000\.0",
        ),
        ({"vocab_size": 152064}, r"text_config\.vocab_size: found 152064, allowed: 152128"),
        ({"hidden_act": "gelu"}, r"text_config\.hidden_act: found gelu, allowed: silu"),
        ({"rms_norm_eps": 0.5}, r"text_config\.rms_norm_eps: found 0\.5, allowed: 1e-06"),
        *[
            (
                {"rope_parameters": {"rope_type": kind, "rope_theta": 1e6, "factor": 4.0}},
                rf"text_config\.rope_type: found {kind}, allowed: default",
            )
            for kind in ("yarn", "linear", "dynamic")
        ],
        *[
            ({"vision_changes": {key: value}}, rf"vision_config\.{key}: found {value}, allowed: ")
            for key, value in (
                ("num_hidden_layers", 13),
                ("hidden_size", 768),
                ("intermediate_size", 4096),
                ("patch_size", 16),
                ("num_attention_heads", 8),
                ("hidden_act", "gelu"),
                ("layer_norm_eps", 0.1),
            )
        ],
        *[
            ({"whole_changes": {key: value}}, f"{key}: found {value}, allowed: ")
            for key, value in (
                ("image_token_index", 151647),
                ("video_token_index", 151646),
                ("vision_feature_layer", -2),
                ("vision_feature_select_strategy", "default"),
                ("projector_hidden_act", "relu"),
                ("tie_word_embeddings", True),
            )
        ],
        ({"tie_word_embeddings": True}, "tie_word_embeddings: found True, allowed: False"),
    ],
)
def test_a_fact_that_differs_is_named_with_its_file_and_key(changes, named):
    with pytest.raises(InputError, match=rf"folder is no such .*config\.json: {named}"):
        check_7b(seven_b_config(**changes))


def test_frame_facts_that_differ_are_named():
    config = seven_b_config()
    config.vision_config.image_size = 336
    with pytest.raises(
        InputError,
        match=r"vision_config\.image_size: found 336, allowed: 384; video_preprocessor_config\.json: "
        r"image_mean: found \(0\.4, 0\.5, 0\.5\), allowed: \(0\.5, 0\.5, 0\.5\)",
    ):
        check_7b(config, (0.4, 0.5, 0.5))


def test_a_7b_folder_is_checked_before_its_weights_are_read(copy):
    seven_b_config(num_hidden_layers=2).save_pretrained(copy)
    with pytest.raises(InputError, match=r"num_hidden_layers: found 2, allowed: 28"):
        load_target(copy, "bfloat16", "cpu")


def test_another_commit_than_the_one_asked_for_is_refused(copy, tmp_path):
    one, other = "a" * 40, "b" * 40
    snapshot = tmp_path / "models--org--name" / "snapshots" / one
    snapshot.parent.mkdir(parents=True)
    copy.rename(snapshot)
    with pytest.raises(InputError, match=rf"target\.revision: found {other}, allowed: {one}"):
        load_target(snapshot, "float32", "cpu", revision=other)
    assert load_target(snapshot, "float32", "cpu", revision=one).revision == one


def test_an_outline_builds_the_same_prompts_and_reads_one_tensor(saved, monkeypatch):
    target, folder = saved
    read = []
    inside = weights.safe_open

    @contextlib.contextmanager
    def opened(path, framework):
        with inside(path, framework=framework) as file:
            yield SimpleNamespace(
                keys=file.keys,
                get_tensor=lambda name: read.append(name) or file.get_tensor(name),
            )

    monkeypatch.setattr(weights, "safe_open", opened)
    outline = outline_target(read_files(folder))
    assert [name.rpartition(".")[0].rpartition(".")[2] for name in read] == ["embed_tokens"]
    prompt = target.build_prompt("describe the clip", 3)
    assert torch.equal(outline.build_prompt("describe the clip", 3), prompt)
    assert outline.stop_ids == target.stop_ids
    assert outline.mask_token_id == target.mask_token_id
    assert outline.template_sha256 == target.template_sha256
    assert all(p.is_meta for n, p in outline.model.named_parameters() if "embed_tokens" not in n)


def test_an_embedding_of_another_shape_is_named(copy):
    content = json.loads((copy / "config.json").read_text())
    edit_json(copy / "config.json", text_config={**content["text_config"], "vocab_size": 50})
    with pytest.raises(
        InputError,
        match=r"embed_tokens\.weight: found torch.float32 \(\d+, 32\), allowed: floats \(50, 32\)",
    ):
        outline_target(read_files(copy))


def test_the_text_config_hash_covers_what_a_drafter_relies_on():
    base = text_config_sha256(tiny_config().text_config)
    assert base == text_config_sha256(tiny_config().text_config)
    other = tiny_config()
    other.text_config.rope_parameters["rope_theta"] = 5.0
    assert text_config_sha256(other.text_config) != base
    assert text_config_sha256(tiny_config(num_layers=5).text_config) != base


def test_a_target_in_memory_needs_a_template_and_a_stop_token():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    model = tiny_model(0, tiny_config(), torch.float32)
    with pytest.raises(InputError, match="no chat template"):
        Target(model, tokenizer, PREPROCESSING)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    for config in (model.generation_config, model.config, model.config.text_config):
        config.eos_token_id = None
    with pytest.raises(InputError, match="no stop token"):
        Target(model, tokenizer, PREPROCESSING)


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("", "vision_feature_layer", (-50, -4, 0, 3, 10**30, [], [-1, 3], [0])),
        ("vision_config", "num_attention_heads", (-2, -1, 0, 3, 32, 2**70)),
        ("", "vision_feature_select_strategy", ("default",)),
        ("", "video_token_index", (IMAGE,)),
    ],
)
def test_what_the_vision_tower_has_not_is_refused_before_a_weight_is_read(
    copy, section, key, values
):
    file, key_in_message = copy / "config.json", key.replace("token_index", "token_id")
    content = json.loads(file.read_text())
    for value in values:
        changed = json.loads(json.dumps(content))
        (changed[section] if section else changed)[key] = value
        file.write_text(json.dumps(changed))
        place = f"{section}.{key_in_message}" if section else key_in_message
        with pytest.raises(InputError) as told:
            read_files(copy)
        assert str(told.value).startswith(f"{file}: {place}: found {value!r}, allowed: ")


@pytest.mark.parametrize("chosen", [-3, -1, 1, 2, [-1], [-2, -1]])
def test_layers_of_the_vision_tower_are_taken(copy, chosen):
    edit_json(copy / "config.json", vision_feature_layer=chosen)
    assert read_files(copy).config.vision_feature_layer == chosen


def test_a_tower_with_a_class_token_drops_it(copy):
    content = json.loads((copy / "config.json").read_text())
    content["vision_config"]["model_type"] = "clip_vision_model"
    edit_json(copy / "config.json", **content)
    with pytest.raises(InputError, match="select_strategy: found 'full', allowed: 'default'"):
        read_files(copy)
    edit_json(copy / "config.json", vision_feature_select_strategy="default")
    assert read_files(copy).config.vision_config.model_type == "clip_vision_model"
