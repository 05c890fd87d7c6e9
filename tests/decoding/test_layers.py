"""What is measured of a clip: every quantity once, equal to its parts; bad clips, resume, refusals."""

import dataclasses

import pytest
import torch

from tests.decoding.test_shard import Reader
from tests.tiny import tiny_frames, tiny_language_target, tiny_target
from vflash_analysis.clips.lists import Clip
from vflash_analysis.config import LayerSettings
from vflash_analysis.decoding import layers
from vflash_analysis.decoding.clip import ShardFacts
from vflash_analysis.decoding.layers import clip_rows, measure_clips
from vflash_analysis.errors import InputError
from vflash_analysis.records import read_records
from vflash_analysis.schemas import MEASURES, NO_LAYER
from vflash_analysis.training.continuations import greedy_continuation

FACTS = ShardFacts(run_id="run", profile="smoke", sample_seed=7, num_frames=2)
SETTINGS = LayerSettings(clips_per_suite=2, max_new_tokens=8, removal_every=1)
LAYERS = 4


@pytest.fixture(scope="module")
def target():
    return tiny_target(3, LAYERS, dtype=torch.float32)


@pytest.fixture
def clips(tmp_path):
    made = []
    for number, benchmark in enumerate(("VDC", "VDC", "LVB")):
        path = tmp_path / f"c{number}.mp4"
        path.write_bytes(bytes([number]) * 8)
        made.append(Clip(f"c{number}", benchmark, "suites", str(path), "what happens then ?"))
    return made


def table(folder):
    return read_records(folder / "measures.parquet", MEASURES)


def keyed(rows):
    """(quantity, layer) -> (total, count), each once."""
    found = {(row["quantity"], row["layer"]): (row["total"], row["count"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_clip_gives_every_quantity_at_every_layer(target, clips):
    found = keyed(clip_rows(target, clips[0], Reader(), SETTINGS, FACTS))
    by_layer = [f"{query}_{kind}" for query in ("attention", "end_attention")
                for kind in ("instruction", "visual", "text")]  # fmt: skip
    by_layer += ["attention_visual_max_head"]
    by_layer += [
        f"{of}_similarity_{kind}" for of in ("step", "input") for kind in ("visual", "text")
    ]
    wanted = {(name, layer) for name in by_layer for layer in range(LAYERS)}
    wanted |= {("visual_positions", NO_LAYER), ("end_visual_positions", NO_LAYER)}
    wanted |= {("agreement", layer) for layer in range(LAYERS + 1)}
    assert set(found) == wanted  # no facts: nothing says what is right
    # <|im_start|>user, 19 of video, 4 words, of which the last sees 25 positions, 3 of the template
    assert found["visual_positions", NO_LAYER] == (19, 25)
    assert found["end_visual_positions", NO_LAYER] == (19, 28)
    for layer in range(LAYERS):
        for query in ("attention", "end_attention"):
            masses = [found[f"{query}_{kind}", layer] for kind in ("instruction", "visual", "text")]
            assert sum(total for total, _ in masses) == pytest.approx(1, abs=1e-6)
            assert {count for _, count in masses} == {1}
        most, mean = (
            found["attention_visual_max_head", layer][0],
            found["attention_visual", layer][0],
        )
        assert mean < most < 1
        for of in ("step", "input"):
            assert found[f"{of}_similarity_visual", layer][1] == 19
            assert found[f"{of}_similarity_text", layer][1] == 9
            assert abs(found[f"{of}_similarity_text", layer][0]) < 9


def test_nothing_removed_agrees_with_the_whole_of_the_targets_own_text(target, clips):
    found = keyed(clip_rows(target, clips[0], Reader(), SETTINGS, FACTS))
    input_ids = target.build_prompt(clips[0].prompt, 2)
    pixels = target.prepare_frames(tiny_frames(0, 2))
    own = greedy_continuation(target, input_ids, pixels, SETTINGS.max_new_tokens)
    n = len(own.token_ids)
    assert found["agreement", LAYERS] == (n, n)
    assert [found["agreement", x][1] for x in range(LAYERS)] == [n] * LAYERS
    assert min(found["agreement", x][0] for x in range(LAYERS)) < n


def test_texts_of_generated_clips_are_scored_word_by_word(target, clips, monkeypatch):
    """Colour right, shape wrong; of what happens one word of two."""
    wanted = "a red square grows early"
    clip = dataclasses.replace(clips[0], reference=wanted, facts={"sha256": "x"})
    monkeypatch.setattr(target.tokenizer, "decode", lambda ids, **how: "a red circle grows")
    found = keyed(clip_rows(target, clip, Reader(), SETTINGS, FACTS))
    for layer in (NO_LAYER, *range(LAYERS + 1)):
        assert found["static_accuracy", layer] == found["dynamic_accuracy", layer] == (1, 2)


def test_layers_are_removed_in_strides_and_never_is_always_there(target, clips):
    every = dataclasses.replace(SETTINGS, removal_every=3)
    found = keyed(clip_rows(target, clips[0], Reader(), every, FACTS))
    assert [layer for name, layer in found if name == "agreement"] == [0, 3, 4]


def test_a_bad_clip_is_a_row_with_its_reason(target, clips, tmp_path):
    lines = []
    measure_clips(target, clips, Reader(bad=["c1"]), SETTINGS, tmp_path, FACTS, lines.append)
    rows = table(tmp_path)
    bad = rows[rows["clip_id"] == "c1"]
    assert bad[["quantity", "layer", "reason"]].values.tolist() == [
        ["clip", NO_LAYER, "damaged: no frame at 3"]
    ]
    assert bad[["total", "count"]].isna().all(axis=None)
    good = rows[rows["clip_id"] != "c1"]
    assert good.groupby(["benchmark", "clip_id"]).size().tolist() == [51, 51]
    assert good["reason"].isna().all() and good["video_sha256"].nunique() == 2
    assert set(rows["study"]) == {"layers"} and set(rows["sample_seed"]) == {7}
    assert set(rows["device"].str[:3]) == {"cpu"} and set(rows["dtype"]) == {"float32"}
    assert len(lines) == 3 and "c1: failed: damaged" in lines[1] and lines[2].startswith("clip 3/3")


def test_one_clip_in_two_suites_is_measured_for_each(target, clips, tmp_path):
    both = [clips[0], dataclasses.replace(clips[0], benchmark="MLVU")]
    measure_clips(target, both, Reader(), SETTINGS, tmp_path, FACTS, lambda line: None)
    assert table(tmp_path).groupby("benchmark").size().tolist() == [51, 51]


def test_a_bad_clip_ends_a_run_that_must_not_skip(target, clips, tmp_path):
    strict = dataclasses.replace(FACTS, on_bad_clip="fail")
    with pytest.raises(InputError, match="clip c0: damaged: no frame at 3"):
        measure_clips(target, clips, Reader(bad=["c0"]), SETTINGS, tmp_path, strict)


def test_clips_that_all_fail_are_an_error_after_the_table_is_written(target, clips, tmp_path):
    bad = Reader(bad=["c0", "c1", "c2"])
    with pytest.raises(InputError, match="none of 3 clips could be measured; first: c0: damaged"):
        measure_clips(target, clips, bad, SETTINGS, tmp_path, FACTS, lambda line: None)
    assert len(table(tmp_path)) == 3


def test_a_prompt_that_does_not_fit_costs_its_clip_alone(target, clips, tmp_path):
    long = dataclasses.replace(clips[1], prompt="red " * 600)
    some = [clips[0], long]
    measure_clips(target, some, Reader(), SETTINGS, tmp_path, FACTS, lambda line: None)
    (reason,) = table(tmp_path)["reason"].dropna()
    assert "max_position_embeddings 512" in reason


def test_a_killed_run_goes_on_where_it_was(target, clips, tmp_path):
    whole = tmp_path / "whole"
    measure_clips(target, clips, Reader(), SETTINGS, whole, FACTS, lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        cut = Reader(stop_at="c2", bad=["c1"])
        measure_clips(target, clips, cut, SETTINGS, tmp_path, FACTS, lambda line: None)
    again = Reader()
    measure_clips(target, clips, again, SETTINGS, tmp_path, FACTS, lambda line: None)
    assert again.names == ["c1", "c2"]  # a failed one is tried again
    assert table(tmp_path).equals(table(whole))
    other = dataclasses.replace(FACTS, run_id="other")
    measure_clips(target, clips, again, SETTINGS, tmp_path, other, lambda line: None)
    assert again.names[2:] == ["c0", "c1", "c2"]


def test_a_target_that_reads_no_video_is_refused_before_any_clip(clips, tmp_path):
    language = tiny_language_target(0)
    with pytest.raises(InputError) as refusal:
        measure_clips(language, clips, Reader(), SETTINGS, tmp_path, FACTS)
    assert str(refusal.value) == (
        "layers: tiny language model 0 reads no video, allowed: a target with visual tokens"
    )
    assert list(tmp_path.glob("parts")) == []


def test_the_profiles_first_clips_of_the_first_seed_are_measured(clips, tmp_path, monkeypatch):
    from vflash_analysis.clips import prepare
    from vflash_analysis.config import load_profile

    asked = []

    def first(folder, benchmark, seed, n):
        asked.append((benchmark, seed, n))
        return [clips[0]]

    seen = {}
    monkeypatch.setattr(prepare, "suite_list", first)
    monkeypatch.setattr(layers, "open_target", lambda settings, folder: "target")
    monkeypatch.setattr(
        layers, "measure_clips",
        lambda target, clips, reader, settings, folder, facts: seen.update(
            target=target, n=len(clips), settings=settings, facts=facts
        ),
    )  # fmt: skip
    settings = load_profile("pocket")
    layers.measure_layers(settings, tmp_path, tmp_path, "r9", tmp_path)
    assert asked == [(name, 0, 4) for name in settings.clips.benchmarks]
    assert seen["n"] == 5 and seen["settings"] == settings.layers
    assert (seen["facts"].run_id, seen["facts"].num_frames) == ("r9", 9)
