"""Settings are read strictly: every refusal names the setting, what was found, what is allowed."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflash_analysis import config, paths, strict
from vflash_analysis.errors import InputError


@pytest.mark.parametrize("name", ["smoke", "pocket", "h100"])
def test_every_profile_loads(name):
    profile = config.load_profile(name)
    assert profile.name == name
    assert profile.decode.methods[0] == "ar"
    assert json.loads(json.dumps(config.to_json(profile))) == config.to_json(profile)


def test_a_training_list_is_a_corpus_or_a_file_of_ones_own():
    named = config.load_profile("h100").clips
    assert named.training_corpus == "LLaVA-Video-178K" in config.corpus_names()
    for own in ("training.jsonl", None):
        assert dataclasses.replace(named, training_list=own).training_corpus is None


def test_profiles_are_those_of_the_readme():
    assert config.profile_names() == ("h100", "pocket", "smoke")


def test_profiles_state_the_sizes_of_the_protocol():
    h100 = config.load_profile("h100")
    assert (h100.clips.num_frames, h100.decode.max_new_tokens) == (128, 256)
    assert h100.target.dtype == "bfloat16"
    assert (h100.drafter.block_size, h100.decode.tree_nodes, h100.drafter.num_tapped_layers) == (
        16, 60, 4,
    )  # fmt: skip
    sizes = {
        name: (len(p.clips.sample_seeds), p.clips.clips_per_suite, p.clips.clips_per_suite_all)
        for name, p in ((n, config.load_profile(n)) for n in config.profile_names())
    }
    assert sizes == {"smoke": (1, 2, 2), "pocket": (3, 12, 20), "h100": (3, 50, 50)}


def test_h100_measures_after_the_lengths_that_the_7b_is_modelled_at():
    assert config.load_profile("h100").cost.context_tokens == config.CostSettings().context_tokens


GROUP = {"arms": ["mask_only"], "budgets": [1], "training_clips": [4], "train_seeds": [0]}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.stpes": 3}, "training.stpes: unknown setting, allowed: steps"),
        (
            {"clips.training_list": "LLaVA-Video"},
            'clips.training_list: found text "LLaVA-Video", allowed: LLaVA-Video-178K, a file that',
        ),
        (
            {"training.objective": "mask_only"},
            "training.objective: set by each drafter's own shard",
        ),
        ({"training.train_seed": 3}, "allowed: `train_seeds` and `ablation`"),
        ({"train.steps": 3}, "train.steps: unknown setting, no section train; sections: target"),
        ({"steps": 3}, "steps: unknown setting, allowed: target"),
        ({"name": "other"}, "name: unknown setting, allowed: target"),
        ({"training.steps.x": 3}, "training.steps.x: unknown setting, no section training.steps"),
        ({"training.steps": "3"}, 'training.steps: found text "3", allowed: a whole number'),
        ({"training.steps": 3.0}, "training.steps: found number 3.0, allowed: a whole number"),
        (
            {"training.steps": True},
            "training.steps: found true/false true, allowed: a whole number",
        ),
        ({"training.steps": 0}, "training.steps: found whole number 0, allowed: 1 or more"),
        ({"training.steps": None}, "training.steps: found null, allowed: a whole number"),
        ({"drafter.block_size": 17}, "drafter.block_size: found whole number 17, allowed: 2 to 16"),
        ({"drafter.block_size": 1}, "drafter.block_size: found whole number 1, allowed: 2 to 16"),
        ({"training.learning_rate": "1e-3"}, 'training.learning_rate: found text "1e-3"'),
        ({"training.gamma": float("nan")}, "training.gamma: found nan, allowed: a finite number"),
        ({"training.reveal_order": "x"}, 'allowed: one of "confidence", "random"'),
        ({"target.dtype": "float16"}, 'allowed: one of "float32", "bfloat16", "float64"'),
        ({"target": 3}, "target: found whole number 3, allowed: a mapping of settings"),
        ({"clips.benchmarks": "VDC"}, 'clips.benchmarks: found text "VDC", allowed: a list'),
        (
            {"clips.benchmarks": ["VDC", "x"]},
            'clips.benchmarks[1]: found text "x", allowed: one of',
        ),
        ({"clips.benchmarks": []}, "clips.benchmarks: found list []"),
        ({"train_seeds": [0, 0]}, "train_seeds: found list [0, 0], allowed: each item once"),
        ({"train_seeds": [-1]}, "train_seeds: found list [-1], allowed: items from 0 up"),
        (
            {"ablation": [GROUP | {"budgets": [0]}]},
            "ablation[0].budgets: found list [0], allowed: items from 1 up",
        ),
        ({"ablation": [GROUP, GROUP]}, "allowed: each item once"),
        (
            {"ablation": [GROUP | {"arms": ["x"]}]},
            'ablation[0].arms[0]: found text "x", allowed: one of',
        ),
        (
            {"ablation": [GROUP | {"training_clips": [10**6]}]},
            "ablation[0].training_clips: found 1000000, allowed: at most",
        ),
        ({"decode.methods": ["chain"]}, 'decode.methods: found list ["chain"]'),
        (
            {"decode.methods": ["ar", "chian:rounds=2"]},
            "decode.methods: found 'chian:rounds=2', all",
        ),
        (
            {"decode.methods": ["ar", "hf_dflash:block=4"]},
            "decode.methods: found 'hf_dflash:block=4', allowed: ar, chain,",
        ),
        ({"drafter.context": 1.5}, "drafter.context: found 1.5, allowed: 0 to 1"),
        ({"drafter.context": "some"}, 'drafter.context: found text "some"'),
        ({"clips.clips_per_suite": 99}, "clips.clips_per_suite: found 99, allowed: at most"),
        ({"layers.clips_per_suite": 99}, "layers.clips_per_suite: found 99, allowed: at most"),
        ({"training.training_clips": 10**6}, "training.training_clips: found 1000000, allowed: at"),
        ({"drafter.source": "x", "train_seeds": [0, 1]}, "allowed with drafter.source: one"),
        ([("training.steps", 3)], "overrides: found list"),
    ],
)
def test_a_bad_override_is_refused_by_name(overrides, message):
    with pytest.raises(InputError) as refusal:
        config.load_profile("pocket", overrides)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unknown_profile_lists_the_known_ones():
    with pytest.raises(InputError, match="profile: found 'nano', allowed: h100, pocket, smoke"):
        config.load_profile("nano")


@pytest.mark.parametrize(
    "section", ["target", "clips", "drafter", "training", "decode", "cost", "layers"]
)
def test_a_missing_setting_is_named_even_where_the_code_has_a_default(section):
    values = strict.read_yaml(paths.PROFILES / "pocket.yaml")
    for key in list(values[section]):
        one_less = json.loads(json.dumps(values))
        del one_less[section][key]
        with pytest.raises(InputError, match=rf"^{section}\.{key}: missing, allowed: "):
            config.build_profile(one_less)
    for key in GROUP:
        one_less = json.loads(json.dumps(values))
        del one_less["ablation"][1][key]
        with pytest.raises(InputError, match=rf"^ablation\[1\]\.{key}: missing, allowed: "):
            config.build_profile(one_less)
    one_more = json.loads(json.dumps(values))
    one_more[section]["extra"] = 1
    with pytest.raises(InputError, match=rf"^{section}\.extra: unknown setting"):
        config.build_profile(one_more)


def test_overrides_change_the_one_value_and_no_file():
    before = config.load_profile("pocket")
    after = config.load_profile("pocket", {"training.steps": 7, "drafter.context": 0.25})
    assert after.training == dataclasses.replace(before.training, steps=7)
    assert after.drafter.context == 0.25
    assert config.load_profile("pocket") == before


def test_whole_numbers_serve_as_numbers_and_lists_become_tuples():
    profile = config.load_profile("pocket", {"training.gamma": 5, "train_seeds": [4, 2]})
    assert profile.training.gamma == 5.0 and isinstance(profile.training.gamma, float)
    assert profile.train_seeds == (4, 2)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("training.gamma", 10**400, "a finite number"),
        ("training.steps", "9" * 5000, "a whole number"),  # too long for a number: it stays text
        ("target.source", "", "null or a folder"),
        ("clips.frozen_lists", "", "null or a folder"),
        ("clips.frozen_lists", "a\0", "text without NUL"),
        ("drafter.source", " ", "null or a folder"),
    ],
)
def test_extreme_values_get_one_line(name, value, allowed):
    with pytest.raises(InputError) as refusal:
        config.load_profile("pocket", dict([strict.parse_override(f"{name}={value}")]))
    told = str(refusal.value)
    assert told.startswith(f"{name}: found ") and allowed in told and len(told) < 200


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists))
def test_any_json_value_survives_the_command_line_or_is_refused_with_one_line(value):
    name, parsed = strict.parse_override(f"drafter.block_size={json.dumps(value)}")
    assert (name, parsed) == ("drafter.block_size", value)
    try:
        profile = config.load_profile("smoke", {name: parsed})
    except InputError as refusal:
        assert str(refusal).startswith("drafter.block_size: found ")
    else:
        assert profile.drafter.block_size == value and type(value) is int and 2 <= value <= 16


def test_arms_share_everything_but_what_they_change():
    base = config.load_profile("pocket").training
    for arm in config.ARMS:
        settings = config.arm_settings(base, config.DrafterKey(arm, 9, 50, 7))
        assert (settings.steps, settings.train_seed, settings.training_clips) == (50, 9, 7)
        changed = {
            f.name
            for f in dataclasses.fields(base)
            if getattr(settings, f.name) != getattr(base, f.name)
        }
        assert changed <= {
            "objective",
            "steps",
            "train_seed",
            "training_clips",
            "revealed_weight",
            "anchors_per_clip",
        }
    doubled = config.arm_settings(base, config.DrafterKey("mask_only_2x", 9, 50, 7))
    assert doubled.anchors_per_clip == 2 * base.anchors_per_clip
    assert (
        config.arm_settings(base, config.DrafterKey("self_reveal_rev0", 9, 50, 7)).revealed_weight
        == 0
    )
    with pytest.raises(InputError, match="arm: found 'x', allowed: self_reveal"):
        config.arm_settings(base, config.DrafterKey("x", 9, 50, 7))


def test_a_variant_changes_one_setting_of_a_drafter():
    profile = config.load_profile("smoke")
    assert config.with_variant(profile, "") is profile
    changed = config.with_variant(profile, "drafter.block_size=8")
    assert changed.drafter == dataclasses.replace(profile.drafter, block_size=8)
    assert dataclasses.replace(changed, drafter=profile.drafter) == profile
    assert config.with_variant(profile, "training.gamma=4").training.gamma == 4.0
    assert config.with_variant(profile, "drafter.context=text_only").drafter.context == "text_only"
    once = config.with_variant(profile, "drafter.block_size=4")
    assert config.with_variant(once, "drafter.block_size=8") == changed


ONE_OF_A_DRAFTER = "allowed: one setting of `drafter` or `training` that no other parameter sets"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        *(
            (variant, f'variant: found text "{variant}", {ONE_OF_A_DRAFTER}')
            for variant in (
                "drafter.block_size", "block_size=8", "decode.tree_nodes=8", "drafter.source=x",
                "training.steps=8", "training.training_clips=2",
            )
        ),
        ("training.objective=mask_only", "training.objective: set by each drafter's own shard"),
        ("training.train_seed=3", "training.train_seed: set by each drafter's own shard"),
        ("drafter.blocks=4", "drafter.blocks: unknown setting, allowed: source"),
        ("drafter.block_size=99", "drafter.block_size: found whole number 99, allowed: 2 to 16"),
        ("drafter.context=2.5", "drafter.context: found 2.5, allowed: 0 to 1"),
    ],
)  # fmt: skip
def test_a_variant_of_anything_else_is_refused_where_it_is_named(variant, message):
    profile = config.load_profile("smoke")
    with pytest.raises(InputError) as refusal:
        config.with_variant(profile, variant)
    assert str(refusal.value).startswith(message)
    with pytest.raises(InputError) as refusal:  # before any stage begins
        config.load_profile("smoke", {"design.variants": [variant]})
    assert str(refusal.value).startswith(message)


def test_drafters_of_the_studies():
    profile = config.load_profile("pocket")
    first = config.main_drafters(profile)[0]
    keys = config.design_drafters(profile)
    assert [key.variant for key in keys] == list(profile.design.variants)
    assert {dataclasses.replace(key, variant="") for key in keys} == {first}
    given = dataclasses.replace(profile.drafter, source="data/pocket/drafters")
    alone = dataclasses.replace(profile, drafter=given, train_seeds=(0,))
    assert config.design_drafters(alone) == []
    own = dataclasses.replace(profile, train_seeds=(5, 0))
    lengths = config.lengths_drafter(own)
    assert lengths == config.DrafterKey(
        "self_reveal", 5, own.lengths.steps, own.lengths.training_clips
    )


def test_states_are_kept_for_every_number_of_tapped_layers_that_some_drafter_reads():
    assert config.tapped_counts(config.load_profile("smoke")) == [1]
    variants = ["drafter.num_tapped_layers=3", "drafter.block_size=4"]
    assert config.tapped_counts(config.load_profile("smoke", {"design.variants": variants})) == [
        1,
        3,
    ]
    assert config.tapped_counts(config.load_profile("pocket")) == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "lengths.methods",
            ["chain"],
            'lengths.methods: found list ["chain"], allowed: a list with',
        ),
        ("design.methods", ["ar", "x"], "design.methods: found 'x', allowed: ar, chain"),
        ("lengths.clips_per_suite", 3, "lengths.clips_per_suite: found 3, allowed: at most clips."),
        ("design.clips_per_suite", 3, "design.clips_per_suite: found 3, allowed: at most clips."),
        ("lengths.training_clips", 5, "lengths.training_clips: found 5, allowed: at most clips."),
        ("lengths.target", " ", 'lengths.target: found text " ", allowed: null or a folder'),
    ],
)
def test_settings_of_the_studies_are_checked(name, value, message):
    with pytest.raises(InputError) as refusal:
        config.load_profile("smoke", {name: value})
    assert str(refusal.value).startswith(message)


def test_paths_of_a_machine_come_from_the_environment_then_from_local_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.delenv("VFLASH_TARGET", raising=False)
    monkeypatch.delenv("VFLASH_DATA", raising=False)
    target = config.load_profile("h100").target
    with pytest.raises(InputError, match=r"target\.source: .*VFLASH_TARGET"):
        config.target_folder(target)
    with pytest.raises(InputError, match="VFLASH_DATA: not set"):
        config.data_folder()
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path / "none"))
    with pytest.raises(
        InputError, match=r"VFLASH_DATA: found '\S+none', allowed: a folder that is"
    ):
        config.data_folder()
    monkeypatch.setenv("VFLASH_DATA", "/videos/\udcff")  # a byte that is no UTF-8
    with pytest.raises(InputError, match=r"VFLASH_DATA: found .*udcff., allowed: a path in UTF-8"):
        config.local_paths()
    monkeypatch.delenv("VFLASH_DATA")
    (tmp_path / "local.yaml").write_text("target: weights/7b\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # as a notebook's kernel or a job does
    assert config.target_folder(target) == tmp_path / "weights" / "7b"
    assert config.local_environment() == {}
    monkeypatch.setenv("VFLASH_TARGET", "7b")
    assert config.target_folder(target) == elsewhere / "7b"
    assert config.local_environment() == {"VFLASH_TARGET": str(elsewhere / "7b")}
    (tmp_path / "local.yaml").write_text("targt: x\n")
    with pytest.raises(InputError, match=r"local\.yaml: targt: unknown setting"):
        config.target_folder(target)
    monkeypatch.delenv("VFLASH_TARGET")
    for empty in ("", "# nothing yet\n"):
        (tmp_path / "local.yaml").write_text(empty)
        assert config.local_paths() == {}
    (tmp_path / "local.yaml").write_text("target: ~nosuchuser/x\n")
    assert config.local_paths()["target"] == tmp_path / "~nosuchuser" / "x"
    (tmp_path / "local.yaml").write_text("target: /weights/7b\n")
    assert config.local_paths() == {"target": Path("/weights/7b")}
    (tmp_path / "local.yaml").write_text("target: ''\n")
    with pytest.raises(InputError, match=r'local\.yaml: target: found text "", allowed: a path'):
        config.local_paths()
    (tmp_path / "local.yaml").write_text("target: 3\n")
    with pytest.raises(InputError, match=r"local\.yaml: target: found whole number 3"):
        config.target_folder(target)


def test_a_profile_with_its_own_folder_ignores_the_machine(monkeypatch):
    monkeypatch.setenv("VFLASH_TARGET", "elsewhere")
    pocket = config.load_profile("pocket").target
    assert config.target_folder(pocket) == paths.ROOT / "data" / "pocket" / "target"
    with pytest.raises(InputError, match="built by the target stage"):
        config.target_folder(config.load_profile("smoke").target)


UNUSABLE = ["a\0b", "\ud800", "x" * 256, "/".join(1000 * ["abcd"]), " "]


@pytest.mark.parametrize("text", UNUSABLE)
def test_a_folder_of_this_machine_that_can_be_no_path_is_one_line(tmp_path, monkeypatch, text):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.delenv("VFLASH_DATA", raising=False)
    (tmp_path / "local.yaml").write_text(f"data: {json.dumps(text)}\n")
    with pytest.raises(
        InputError, match=r"^local\.yaml: data: found text .*, allowed: a path in UTF"
    ):
        config.local_paths()
    (tmp_path / "local.yaml").unlink()
    if "\0" not in text:
        monkeypatch.setattr(os, "environ", {"VFLASH_DATA": text})
        with pytest.raises(
            InputError, match=r"^VFLASH_DATA: found text .*, allowed: a path in UTF-8"
        ):
            config.local_paths()
    with pytest.raises(InputError, match=r"^file: found text .*, allowed: "):
        strict.convert(text, Annotated[str, strict.BELOW], "file")


def test_a_local_yaml_that_is_no_file_is_not_taken_for_none(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    (tmp_path / "local.yaml").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"local\.yaml"):
        config.local_paths()
