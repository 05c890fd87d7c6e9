"""The clips that the training stages take from the lists of notebook 10."""

import dataclasses
import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.tiny import tiny_drafter, tiny_frames, tiny_target
from vflash_analysis import config
from vflash_analysis.clips.lists import Clip, write_clip_list
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_sha256
from vflash_analysis.records import blank_row, read_records, write_records
from vflash_analysis.schemas import ANCHORS, CONTINUATIONS, TRAINING
from vflash_analysis.strict import read_json
from vflash_analysis.training import pipeline

FACTS = {
    "target_sha256": "t", "drafter_sha256": "d", "objective": "mask_only", "train_seed": 0,
    "steps": 4, "training_clips": 2, "forward_equivalents": 1.0, "revealed_weight": 1.0,
    "anchors_per_clip": 3, "device": "cpu", "variant": "",
}  # fmt: skip
ANCHOR_FACTS = {name: value for name, value in FACTS.items() if name != "device"}


def test_anchor_clips_come_from_every_suite_and_a_shared_video_once(tmp_path):
    profile = config.load_profile("smoke")
    for benchmark, names in (("VDC", "zyx"), ("MLVU", "abz"), ("LVB", "zdc")):
        clips = [Clip(i, benchmark, "test", str(tmp_path / f"{i}.mp4"), "What?") for i in names]
        write_clip_list(tmp_path / f"suite-{benchmark}-0.jsonl", clips)
    settings = dataclasses.replace(
        profile,
        clips=dataclasses.replace(
            profile.clips, benchmarks=("VDC", "MLVU", "LVB"), clips_per_suite_all=3
        ),
        training=dataclasses.replace(profile.training, anchor_clips=5),
    )
    found = pipeline.clips_of(settings, tmp_path, "suites")
    assert [(clip.benchmark, clip.clip_id) for clip in found] == [
        ("VDC", "z"), ("MLVU", "a"), ("VDC", "y"), ("MLVU", "b"), ("LVB", "d"),
    ]  # fmt: skip


def test_a_given_drafter_is_taken_by_its_arm_and_needs_no_training_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(config.paths, "ROOT", tmp_path)
    target = tiny_target(0, num_layers=3)
    profile = config.load_profile("smoke")
    profile = dataclasses.replace(
        profile,
        drafter=dataclasses.replace(profile.drafter, source="given"),
        training=dataclasses.replace(profile.training, anchor_clips=1),
    )
    drafters = {arm: tiny_drafter(target, seed, 1) for seed, arm in enumerate(config.ARMS)}
    for arm, drafter in drafters.items():
        drafter.save_pretrained(tmp_path / "given" / arm)
    for arm in ("mask_only", "self_reveal"):
        key = config.DrafterKey(arm, 0, 4, 4)
        folder = pipeline.train_drafter(target, profile, key, tmp_path, tmp_path, tmp_path / arm)
        assert drafter_sha256(folder) == drafter_sha256(tmp_path / "given" / arm)
        assert read_records(tmp_path / arm / "training.parquet", TRAINING).empty
    assert drafter_sha256(tmp_path / "mask_only" / "drafter") != drafter_sha256(folder)

    def collect(target, clips, reader, *, out_folder, **_):
        asked.append(out_folder.name)

    asked: list[str] = []
    monkeypatch.setattr(pipeline, "collect_continuations", collect)
    monkeypatch.setattr(pipeline, "clips_of", lambda *_: [])
    monkeypatch.setattr(pipeline, "open_target", lambda *_: target)
    pipeline.collect_lists(profile, tmp_path, tmp_path, tmp_path / "texts")
    assert asked == ["suites"]
    for name in ("training", "validation"):
        path = tmp_path / "texts" / name / "continuations.parquet"
        assert read_records(path, CONTINUATIONS).empty


@pytest.mark.parametrize("profile", ["smoke", "h100"])
def test_only_a_target_of_the_checkout_is_trained_anew(profile, tmp_path, monkeypatch):
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    settings = config.load_profile(profile, {"clips.target_training_clips": 5})
    with pytest.raises(InputError, match=f"retrain: found profile {profile}"):
        pipeline.retrain_target(settings)


def test_retraining_goes_on_with_the_target_of_many_lengths(tmp_path, monkeypatch):
    calls = []
    for name in ("retrain", "retrain_lengths"):
        note = functools.partial(lambda *call: calls.append(call), name)
        monkeypatch.setattr(pipeline.pocket_target, name, note)
    settings = config.load_profile("pocket")
    scenes = settings.clips.target_training_clips // 5
    monkeypatch.setattr(config.paths, "ROOT", tmp_path)
    base, lengths = tmp_path / "data/pocket/target", tmp_path / "data/pocket/target_lengths"
    first, second = ("retrain", base, scenes), ("retrain_lengths", base, lengths)
    pipeline.retrain_target(settings)
    assert calls == [first, second]
    (tmp_path / "data/pocket/target_lengths-work").mkdir(parents=True)  # the first one is trained
    pipeline.retrain_target(settings)
    assert calls[2:] == [second]
    for same in (None, settings.target.source):
        own = dataclasses.replace(settings.lengths, target=same)
        calls.clear()
        pipeline.retrain_target(dataclasses.replace(settings, lengths=own))
        assert calls == [first]


def test_the_curve_has_a_column_of_batches_and_one_of_validation_clips(tmp_path):
    rows = [
        {
            **blank_row(TRAINING),
            **FACTS,
            "setting": setting,
            "step": step,
            "loss": loss,
            "loss_mask": loss,
        }
        for setting, step, loss in (("", 2, 3.0), ("", 4, 2.0), ("validation", 4, 2.5))
    ]
    write_records(tmp_path / "training.parquet", rows, TRAINING)
    curve = pipeline.training_curve(tmp_path)
    assert curve["training"].tolist() == [3.0, 2.0]
    assert curve.loc[4, "validation"] == 2.5 and curve["validation"].isna().tolist() == [
        True,
        False,
    ]


def test_accepted_length_is_that_of_full_blocks(tmp_path):
    rows = [
        {**blank_row(ANCHORS), **ANCHOR_FACTS, "clip_id": "a", "benchmark": benchmark, "split": "s"}
        | {"setting": "", "anchor_index": i, "n_slots": n, "n_accepted": accepted}
        | {"slot_match": [k < accepted for k in range(n)]}
        for i, (benchmark, n, accepted) in enumerate(
            [("VDC", 15, 3), ("VDC", 15, 6), ("VDC", 2, 2), ("LVB", 15, 0)]
        )
    ]
    write_records(tmp_path / "anchors.parquet", rows, ANCHORS)
    table = pipeline.acceptance_at_anchors(tmp_path)
    assert table.loc["", "VDC"] == 5.5 and table.loc["", "LVB"] == 1.0


class Reader:
    """Frames by the number in a clip's name; knows which were read, and at how many frames."""

    def __init__(self):
        self.read = []

    def read_clip(self, clip, num_frames):
        self.read.append((clip.clip_id, num_frames))
        frames = tiny_frames(int(clip.clip_id[1:]), num_frames).numpy()
        return SimpleNamespace(frames=frames)


def texts(target, folder, numbers, num_frames, taps):
    """Collect texts about some clips; returns the clips."""
    clips = []
    for number in numbers:
        path = folder.parent / f"c{number}.mp4"
        path.write_text(str(number))
        clips.append(Clip(f"c{number}", "VDC", "training", str(path), "describe the clip"))
    options = {"num_frames": num_frames, "max_new_tokens": 6, "tap_layer_ids": taps}
    pipeline.collect_continuations(
        target, clips, Reader(), out_folder=folder, log=lambda _: None, **options
    )
    return clips


def test_sources_are_read_from_disk_or_recomputed_at_their_own_number_of_frames(
    tmp_path, monkeypatch
):
    target, reader = tiny_target(0), Reader()
    monkeypatch.setattr(pipeline, "open_reader", lambda settings: nullcontext(reader))
    stored = config.load_profile("smoke")
    own = dataclasses.replace(stored.continuations, states="recomputed")
    online = dataclasses.replace(stored, continuations=own)
    taps = pipeline.tapped_layers(target, stored)
    groups = {
        tmp_path / name: (count, texts(target, tmp_path / name, numbers, count, taps))
        for name, numbers, count in (("a", (0, 1), 2), ("b", (2,), 3))
    }
    with pipeline.sources(target, stored, groups) as found:
        kept = [[item.states for item in map(one.__getitem__, range(len(one)))] for one in found]
    assert reader.read == []
    with pipeline.sources(target, online, groups) as found:
        made = [[item.states for item in map(one.__getitem__, range(len(one)))] for one in found]
    assert reader.read == [("c0", 2), ("c1", 2), ("c2", 3)]
    assert [len(part) for part in kept] == [2, 1]
    for a, b in zip([*kept[0], *kept[1]], [*made[0], *made[1]], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-9)  # bfloat16 on disk


def test_a_drafter_of_fewer_tapped_layers_trains_from_texts_collected_with_more(
    tmp_path, monkeypatch
):
    variant = "drafter.num_tapped_layers=1"
    changes = {"drafter.num_tapped_layers": 2, "design.variants": [variant], "training.steps": 1}
    profile = config.load_profile("smoke", changes)
    target = tiny_target(0, num_layers=6)
    assert pipeline.stored_layers(target, profile) == (1, 3)
    for name in ("training", "validation", "suites"):
        texts(target, tmp_path / name, (0, 1), 2, pipeline.stored_layers(target, profile))
    monkeypatch.setattr(pipeline, "clips_of", lambda *_: [])
    layers, widths = {}, {}
    for word in ("", variant):
        out = tmp_path / f"drafter-{word}"
        key = config.DrafterKey("mask_only", 0, 1, 2, word)
        folder = pipeline.train_drafter(target, profile, key, tmp_path, tmp_path, out)
        pipeline.score_drafter(target, profile, key, tmp_path, tmp_path, out)
        saved = read_json(folder / "config.json")
        layers[word] = saved["target_layer_ids"]
        log, anchors = (
            read_records(out / f"{schema.name}.parquet", schema) for schema in (TRAINING, ANCHORS)
        )
        assert set(log["variant"]) == set(anchors["variant"]) == {word}
        widths[word] = len(anchors)
    assert layers == {"": [1, 3], variant: [3]} and widths[""] == widths[variant] > 0


def test_a_given_drafter_has_no_variant(tmp_path):
    given = dataclasses.replace(config.load_profile("smoke").drafter, source="given")
    profile = dataclasses.replace(config.load_profile("smoke"), drafter=given)
    key = config.DrafterKey("mask_only", 0, 4, 4, "drafter.block_size=4")
    with pytest.raises(InputError, match=r"variant: found 'drafter\.block_size=4', allowed with"):
        pipeline.train_drafter(tiny_target(0), profile, key, tmp_path, tmp_path, tmp_path)
