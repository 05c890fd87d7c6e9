"""A shard end to end: rows, warm-up, bad clips, resume, several drafters, the losslessness check."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.tiny import tiny_drafter, tiny_frames, tiny_target
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.read import ClipError, ClipFrames, ClipInfo
from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding import clip as clip_module
from vflash_analysis.decoding import loop
from vflash_analysis.decoding.clip import ClipDecoder, ShardFacts, in_turn
from vflash_analysis.decoding.lossless import LosslessError
from vflash_analysis.decoding.methods.block import BlockDrafting
from vflash_analysis.decoding.plan import plan_methods
from vflash_analysis.decoding.shard import NothingDecoded, decode_shard, in_suites
from vflash_analysis.errors import InputError
from vflash_analysis.records import find_strips, part_path, read_records, sha256_of_file
from vflash_analysis.schemas import CYCLES, GENERATIONS, VOCABULARY

FRAMES = 2
FACTS = ShardFacts(run_id="run", profile="smoke", sample_seed=0, num_frames=FRAMES)
SETTINGS = DecodeSettings(methods=("ar", "chain", "tree60"), max_new_tokens=6, warmup_clips=1)


class Reader:
    """Frames from the clip's number; some clips are bad, and reading can be cut off."""

    def __init__(self, bad=(), stop_at=None):
        self.bad, self.stop_at, self.names = set(bad), stop_at, []

    def read_clip(self, clip, num_frames):
        name = Path(clip.path).stem
        if name == self.stop_at:
            raise KeyboardInterrupt
        self.names.append(name)
        if name in self.bad:
            raise ClipError(clip.path, "damaged", "no frame at 3")
        info = ClipInfo(28, 24, 10.0, 20, 2.0, "h264", 8, "decord", "0.6.0", n_repeated=1)
        frames = tiny_frames(int(name[1:]), num_frames).numpy()
        return ClipFrames(frames, np.zeros(num_frames), np.arange(num_frames), info, 0.125)


@pytest.fixture(scope="module")
def target():
    return tiny_target(3)


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    for name, seed, taps in (("flow-0", 1, (0, 2)), ("mask-0", 2, (1,))):
        drafter = tiny_drafter(target, seed, target_layer_ids=taps)
        drafter.config.training = {"objective": f"{name[:4]}_objective", "train_seed": seed}
        drafter.save_pretrained(folder / name)
    return {name: folder / name for name in ("flow-0", "mask-0")}


@pytest.fixture
def clips(tmp_path):
    made = []
    for number in range(3):
        path = tmp_path / f"c{number}.mp4"
        path.write_bytes(bytes([number]) * 8)
        made.append(Clip(f"c{number}", "VDC", "suites", str(path), "describe the clip"))
    return made


def tables(folder):
    return (
        read_records(folder / "generations.parquet", GENERATIONS),
        read_records(folder / "cycles.parquet", CYCLES),
    )


def test_rows_of_every_method_clip_and_cycle(target, drafters, clips, tmp_path):
    settings = replace(
        SETTINGS, methods=("ar", "chain", "tree60", "ar:verify16", "hf_generate", "hf_dflash")
    )
    lines: list[str] = []
    decode_shard(
        target,
        {"flow-0": drafters["flow-0"]},
        clips,
        Reader(),
        settings,
        tmp_path,
        FACTS,
        lines.append,
    )
    generations, cycles = tables(tmp_path)
    assert len(generations) == 6 * 3 + 6 and (generations["status"] == "ok").all()
    warm = generations.loc[generations["warmup"]]
    assert set(warm["clip_id"]) == {"c0"} and set(warm["repeat"]) == {-1} and len(warm) == 6
    # Every text is the greedy one; plain decoding itself is the reference and not compared.
    plain = (generations["method"] == "ar") & (generations["setting"] == "")
    assert generations.loc[plain & ~generations["warmup"], "identical_to_ar"].isna().all()
    assert generations.loc[~plain, "identical_to_ar"].all()
    assert generations["divergence_kind"].isna().all()
    for _, group in generations.groupby("clip_id"):
        assert group["output_sha256"].nunique() == group["text"].nunique() == 1
    assert generations["output_sha256"].nunique() == 3
    # What was read and how.
    assert set(generations["reader"]) == {"decord 0.6.0"}
    assert set(generations["frames_requested"]) == {FRAMES}
    assert set(generations["frames_used"]) == {FRAMES - 1}
    assert set(generations["frame_read_s"]) == {0.125}
    assert set(generations["video_tokens"]) == {FRAMES * target.tokens_per_frame + 1}
    assert generations["video_sha256"].nunique() == 3
    ours = generations.loc[~generations["method"].str.startswith("hf_")]
    outside = generations.loc[generations["method"].str.startswith("hf_")]
    assert (ours["decode_s"] > 0).all() and (outside["decode_s"] > 0).all()
    assert ours["context_projection_s"].notna().all() and outside["vision_s"].isna().all()
    assert set(generations.loc[generations["drafter"].notna(), "drafter"]) == {"flow-0"}
    assert set(ours.loc[ours["method"] == "chain", "objective"]) == {"flow_objective"}
    assert set(ours.loc[ours["method"] == "ar", "drafter_sha256"]) == {""}
    # Cycles belong to a row each and commit all its tokens but the prefill's.
    keys = ["clip_id", "method", "setting", "drafter_sha256", "repeat"]
    committed = cycles.groupby(keys)["n_committed"].sum()
    for _, row in ours.iterrows():
        assert committed[tuple(row[keys])] == row["new_tokens"] - 1
    assert len(committed) == len(ours)
    calls = cycles.groupby(keys).size()
    assert all(calls[tuple(row[keys])] == row["verify_calls"] for _, row in ours.iterrows())
    tree = cycles.loc[cycles["method"] == "tree60"].iloc[0]
    assert len(tree["draft_token_ids"]) == len(tree["draft_parents"]) == 60
    assert len(tree["target_token_ids"]) == tree["n_committed"]
    # Hugging Face needs the same target forwards for the same chain.
    counts = generations.set_index(["method", "setting", "clip_id", "repeat"])["verify_calls"]
    for clip_id in ("c0", "c1", "c2"):
        assert counts["hf_generate", "", clip_id, 0] == counts["ar", "", clip_id, 0]
    assert cycles["tree_s"].notna().equals(cycles["method"] == "tree60")
    assert (cycles["tree_s"].dropna() <= cycles.loc[cycles["method"] == "tree60", "other_s"]).all()
    # What a reader looks at.
    assert set(generations["prompt"]) == {"describe the clip"}
    for _, row in generations.iterrows():
        ends = row["text_ends"]
        assert len(ends) == row["new_tokens"] and ends[-1] == len(row["text"])
        shown = target.tokenizer.decode(row["token_ids"][:2], skip_special_tokens=True)
        assert row["text"][: ends[1]] == shown
    words = read_records(tmp_path / "vocabulary.parquet", VOCABULARY)
    lists = [*generations["token_ids"], *cycles["draft_token_ids"]]
    occurring = sorted({int(one) for ids in lists for one in ids})
    assert words["token_id"].tolist() == occurring
    assert words["text"].tolist() == [target.tokenizer.decode([one]) for one in occurring]
    assert set(words["target"]) == set(generations["target"])
    strips = {name: Image.open(path).size for name, path in find_strips(tmp_path).items()}
    assert strips == {f"c{number}": (FRAMES * 28, 24) for number in range(3)}
    assert len(lines) == 4 and all("\r" not in line for line in lines)
    assert lines[0].startswith("clip 1/3 | c0: ms/token ar ") and "left" in lines[0]
    assert lines[-1] == (
        "3 of 3 clips decoded; 15 of 15 texts identical to greedy decoding, 0 near ties; "
        "0 of 18 decodes failed"
    )


@given(st.integers(1, 9), st.integers(0, 40))
def test_each_decode_runs_first_and_last_equally_often(n, start):
    orders = [in_turn(list(range(n)), turn) for turn in range(2 * start, 2 * (start + n))]
    assert all(sorted(order) == list(range(n)) for order in orders)
    for place in (0, -1):
        assert Counter(order[place] for order in orders) == dict.fromkeys(range(n), 2)
    if n > 2:  # and after either of its neighbours
        after = {pair for order in orders for pair in itertools.pairwise(order)}
        assert all({(a, b), (b, a)} <= after for a, b in itertools.pairwise(range(n)))


def test_one_prefill_serves_all_methods_in_their_turns(
    target, drafters, clips, tmp_path, monkeypatch
):
    prefills, order = [], []
    prefill, run = type(target).prefill, ClipDecoder._run
    monkeypatch.setattr(
        type(target),
        "prefill",
        lambda self, ids, *rest: prefills.append(len(ids)) or prefill(self, ids, *rest),
    )
    monkeypatch.setattr(
        ClipDecoder,
        "_run",
        lambda self, planned, *rest: order.append(planned.name) or run(self, planned, *rest),
    )
    settings = replace(SETTINGS, warmup_clips=0, repeats=2, max_new_tokens=4)
    decode_shard(
        target,
        {"a": drafters["flow-0"]},
        clips,
        Reader(),
        settings,
        tmp_path,
        FACTS,
        lambda _: None,
    )
    assert len(prefills) == 3
    plan = ["ar", "chain", "tree60"]
    ar, chain, tree60 = plan
    in_turns = [plan, [tree60, chain, ar], [chain, tree60, ar], [ar, tree60, chain]]
    turns = [0, 1, 1, 2, 2, 3]  # clip + repeat
    assert order == [name for turn in turns for name in in_turns[turn]]
    generations, _ = tables(tmp_path)
    assert (
        generations.groupby(["clip_id", "method"])["repeat"]
        .agg(list)
        .map(sorted)
        .eq([[0, 1]] * 9)
        .all()
    )


def test_bad_clips_are_rows_with_reasons_and_cost_nothing_else(target, drafters, clips, tmp_path):
    good = tmp_path / "good"
    decode_shard(
        target, {"a": drafters["flow-0"]}, clips, Reader(), SETTINGS, good, FACTS, lambda _: None
    )
    mixed, lines = tmp_path / "mixed", []
    decode_shard(
        target,
        {"a": drafters["flow-0"]},
        clips,
        Reader(bad={"c1"}),
        SETTINGS,
        mixed,
        FACTS,
        lines.append,
    )
    generations, cycles = tables(mixed)
    bad = generations.loc[generations["clip_id"] == "c1"]
    assert set(bad["status"]) == {"failed"} and len(bad) == 3
    assert set(bad["reason"]) == {"damaged: no frame at 3"}
    measured = ["new_tokens", "decode_s", "verify_calls", "token_ids", "text", "identical_to_ar"]
    assert bad[measured].isna().all().all()
    assert "c1" not in set(cycles["clip_id"])
    columns = ["clip_id", "method", "repeat", "output_sha256", "verify_calls"]
    whole, _ = tables(good)
    others = whole.loc[whole["clip_id"] != "c1", columns]
    assert others.to_dict("records") == generations.loc[
        generations["clip_id"] != "c1", columns
    ].to_dict("records")
    assert lines[-1].startswith("2 of 3 clips decoded; ")
    assert lines[-1].endswith("; 3 of 9 decodes failed")
    with pytest.raises(InputError, match="clip c1: damaged: no frame at 3"):
        decode_shard(
            target, {"a": drafters["flow-0"]}, clips, Reader(bad={"c1"}), SETTINGS, tmp_path / "fail",
            replace(FACTS, on_bad_clip="fail"), lambda _: None,
        )  # fmt: skip
    assert part_path(tmp_path / "fail", GENERATIONS, "VDC/c0").is_file()
    with pytest.raises(
        NothingDecoded, match="none of 3 clips could be decoded; first: clip c0: damaged"
    ):
        decode_shard(
            target, {"a": drafters["flow-0"]}, clips, Reader(bad={"c0", "c1", "c2"}), SETTINGS,
            tmp_path / "none", FACTS, lambda _: None,
        )  # fmt: skip


def test_a_video_that_is_not_its_frozen_lists_is_never_decoded(target, drafters, clips, tmp_path):
    digest = sha256_of_file(clips[0].path)
    named = [replace(clips[0], sha256=digest), replace(clips[1], sha256="0" * 64), clips[2]]
    decode_shard(
        target,
        {"a": drafters["flow-0"]},
        named,
        Reader(),
        SETTINGS,
        tmp_path,
        FACTS,
        lambda _: None,
    )
    generations, cycles = tables(tmp_path)
    failed = generations[generations["status"] == "failed"]
    assert set(failed["clip_id"]) == {"c1"} == {"c0", "c1", "c2"} - set(cycles["clip_id"])
    told = f"changed: sha256 {sha256_of_file(clips[1].path)}, its list names {'0' * 64}"
    assert set(failed["reason"]) == {told}


def test_a_killed_run_resumes_at_the_next_clip(target, drafters, clips, tmp_path):
    chosen = {"a": drafters["flow-0"]}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    decode_shard(target, chosen, clips, Reader(), SETTINGS, whole, FACTS, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        decode_shard(
            target, chosen, clips, Reader(stop_at="c1"), SETTINGS, halves, FACTS, lambda _: None
        )
    assert not (halves / "generations.parquet").exists()
    first = part_path(halves, GENERATIONS, "VDC/c0").read_bytes()
    reader, lines = Reader(), []
    decode_shard(target, chosen, clips, reader, SETTINGS, halves, FACTS, lines.append)
    assert reader.names == ["c1", "c2"]
    assert part_path(halves, GENERATIONS, "VDC/c0").read_bytes() == first
    assert lines[0] == "VDC: 1 of 3 clips were decoded before"
    columns = ["clip_id", "method", "output_sha256", "verify_calls"]
    ours, reference = (
        t.loc[~t["warmup"], columns].sort_values(columns[:2]).to_dict("records")
        for t in (tables(halves)[0], tables(whole)[0])
    )
    assert ours == reference
    # The new process warms up again, on the clip it starts with.
    warm = tables(halves)[0].query("warmup")
    assert set(warm["clip_id"]) == {"c0", "c1"}
    # Nothing is left to do, unless the plan or the run changed.
    for settings, facts, expected in (
        (SETTINGS, FACTS, []),
        (replace(SETTINGS, methods=("ar", "chain")), FACTS, ["c0", "c1", "c2"]),
        (SETTINGS, replace(FACTS, run_id="other"), ["c0", "c1", "c2"]),
    ):
        reader = Reader()
        decode_shard(target, chosen, clips, reader, settings, halves, facts, lambda _: None)
        assert reader.names == expected


def test_a_failed_clip_is_tried_again(target, drafters, clips, tmp_path):
    chosen = {"a": drafters["flow-0"]}
    decode_shard(
        target, chosen, clips, Reader(bad={"c2"}), SETTINGS, tmp_path, FACTS, lambda _: None
    )
    reader = Reader()
    lines: list[str] = []
    decode_shard(target, chosen, clips, reader, SETTINGS, tmp_path, FACTS, lines.append)
    assert reader.names == ["c2"] and lines[-1].startswith("3 of 3 clips decoded; ")


def test_a_method_that_fails_costs_only_its_own_rows(
    target, drafters, clips, tmp_path, monkeypatch
):
    """A drafter without states, and a run out of memory that keeps no old numbers."""

    def start(self, prompt, timer):
        raise InputError(f"{self.name}: no states")

    monkeypatch.setattr(BlockDrafting, "start", start)
    chosen, out = {"a": drafters["flow-0"]}, tmp_path / "out"
    decode_shard(target, chosen, clips[:1], Reader(), SETTINGS, out, FACTS, lambda _: None)
    generations, cycles = tables(out)
    ok = generations.loc[generations["status"] == "ok"]
    assert set(ok["method"]) == {"ar"}
    failed = generations.loc[generations["status"] == "failed"]
    assert failed["reason"].str.fullmatch("(chain|tree60): no states").all()
    assert failed["decode_s"].isna().all() and set(cycles["method"]) == {"ar"}

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(clip_module, "generate_outside", out_of_memory)
    settings = replace(SETTINGS, methods=("ar", "hf_generate"))
    decode_shard(target, {}, clips[:1], Reader(), settings, out, FACTS, lambda _: None)
    generations, _ = tables(out)
    assert set(generations.query("method == 'hf_generate'")["reason"]) == {
        "out_of_memory: CUDA out of memory."
    }


def test_what_is_only_compared_with_may_run_on_the_first_clips_only(target, clips, tmp_path):
    methods = ("ar", "hf_generate", "lookup")
    settings = replace(SETTINGS, methods=methods, max_new_tokens=4, comparison_clips=1)
    for _ in range(2):  # the second call finds every clip finished
        decode_shard(target, {}, clips[:2], Reader(), settings, tmp_path, FACTS, lambda _: None)
        generations, _ = tables(tmp_path)
        measured = generations.loc[~generations["warmup"]]
        by_clip = measured.groupby("clip_id")["method"].agg(sorted).to_dict()
        assert by_clip == {"c0": ["ar", "hf_generate", "lookup"], "c1": ["ar"]}


def test_clips_are_numbered_within_their_suites():
    suites = ["VDC", "VDC", "LVB", "VDC", "LVB"]
    clips = [Clip(f"c{n}", suite, "suites", "", "?") for n, suite in enumerate(suites)]
    assert in_suites(clips) == [0, 1, 0, 2, 1] and in_suites([]) == []


def test_prompts_that_do_not_fit_are_named_skips(drafters, clips, tmp_path):
    small = tiny_target(3, max_positions=48)
    settings = replace(SETTINGS, methods=("ar",))
    with pytest.raises(InputError, match="max_position_embeddings 48"):
        decode_shard(small, {}, clips, Reader(), settings, tmp_path, FACTS, lambda _: None)
    assert tables(tmp_path)[0]["decode_s"].isna().all()


def test_two_drafters_with_other_taps_share_one_prefill(target, drafters, clips, tmp_path):
    decode_shard(
        target, drafters, clips[:1], Reader(), SETTINGS, tmp_path / "both", FACTS, lambda _: None
    )
    both, _ = tables(tmp_path / "both")
    columns = [
        "method",
        "drafter",
        "repeat",
        "verify_calls",
        "draft_calls",
        "objective",
        "train_seed",
    ]
    for name, folder in drafters.items():
        decode_shard(
            target,
            {name: folder},
            clips[:1],
            Reader(),
            SETTINGS,
            tmp_path / name,
            FACTS,
            lambda _: None,
        )
        alone, _ = tables(tmp_path / name)
        rows = both.loc[both["drafter"] == name, columns].sort_values(columns[:3])
        own = alone.loc[alone["drafter"] == name, columns].sort_values(columns[:3])
        assert len(rows) == 4 and rows.to_dict("records") == own.to_dict("records")
    assert len(both) == 2 * (1 + 2 * 2)
    assert both.loc[both["method"] != "ar", "drafter_sha256"].nunique() == 2


def test_a_lossy_loop_fails_the_shard_after_its_tables_are_written(
    target, drafters, clips, tmp_path, monkeypatch
):
    walk = loop.accept_walk

    def unchecked(token_ids, parents, target_argmax):
        first = token_ids[0] if len(token_ids) else target_argmax[0]
        return walk(token_ids, parents, [first, *target_argmax[1:]])

    monkeypatch.setattr(loop, "accept_walk", unchecked)
    with pytest.raises(
        LosslessError, match="texts differ from greedy decoding in float64; first: chain"
    ):
        decode_shard(
            target,
            {"a": drafters["flow-0"]},
            clips[:2],
            Reader(),
            SETTINGS,
            tmp_path,
            FACTS,
            lambda _: None,
        )
    generations, _ = tables(tmp_path)
    chain = generations.loc[generations["method"] == "chain"]
    assert (chain["divergence_kind"] == "logic_error").all() and not chain["identical_to_ar"].any()
    assert chain["first_divergence"].ge(1).all()


def test_plans_are_checked(target, drafters):
    def plan(*methods, **chosen):
        return plan_methods(target, chosen, replace(SETTINGS, methods=methods))

    both = plan("ar", "chain", "hf_dflash", **{n.replace("-", "_"): p for n, p in drafters.items()})
    assert [one.name for one in both] == ["ar", "chain", "chain", "hf_dflash", "hf_dflash"]
    assert both[1].network is None and both[3].network is not None
    flow = drafters["flow-0"]
    for message, arguments, chosen in (
        ("needs a drafter of type 'vflash', found: none", ("chain",), {}),
        ("needs a drafter of type 'vflash', found: none", ("hf_dflash",), {}),
        ("twice", ("chain", "ar", "chain"), {"a": flow}),
        ("twice", ("chain",), {"a": flow, "b": flow}),
        ("found 'medusa'", ("medusa",), {}),
        ("found 0 decodes", (), {}),
        ("no such file", ("chain",), {"a": flow.parent}),
    ):
        with pytest.raises(InputError, match=message):
            plan(*arguments, **chosen)
    with pytest.raises(InputError, match="no clips"):
        settings = replace(SETTINGS, methods=("ar",))
        decode_shard(target, {}, [], Reader(), settings, Path("unused"), FACTS)
