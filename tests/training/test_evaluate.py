"""Every anchor of a fixed text: an oracle, hand-made drafters, and the decoding forward."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_drafter, tiny_target
from tests.training.toys import ListSource, Oracle, oracle_source, random_source
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_cache
from vflash_analysis.records import read_records, write_records
from vflash_analysis.schemas import ANCHORS
from vflash_analysis.training.batches import make_batch
from vflash_analysis.training.blocks import (
    block_hidden,
    project_context,
    score_slots,
    target_pieces,
)
from vflash_analysis.training.evaluate import (
    SETTINGS,
    AnchorSetting,
    draft_blocks,
    drafter_facts,
    evaluate_anchors,
    other_clips,
    with_context_of,
)

TARGET = tiny_target(0)
PIECES = target_pieces(TARGET)
FACTS: dict[str, Any] = {
    "target_sha256": "t",
    "drafter_sha256": "d",
    "objective": "self_reveal",
    "train_seed": 0,
    "steps": 1,
    "training_clips": 1,
    "forward_equivalents": 1.0,
    "revealed_weight": 1.0,
    "anchors_per_clip": 1,
    "variant": "",
}


def rows_of(drafter: Any, pieces: Any, source: Any, **keywords: Any) -> list[dict[str, Any]]:
    keywords = {"log": lambda line: None, "settings": [AnchorSetting()], **keywords}
    return evaluate_anchors(drafter, pieces, source, FACTS, **keywords)


def test_an_oracle_has_full_acceptance_at_every_anchor() -> None:
    source = oracle_source(3, new=25)
    oracle = Oracle([item.input_ids for item in source.items], 30)
    rows = rows_of(oracle, oracle.pieces(), source)
    assert [r["anchor_index"] for r in rows] == list(range(24)) * 3
    assert [r["n_slots"] for r in rows[:24]] == [min(15, 24 - a) for a in range(24)]
    assert all(r["n_accepted"] == r["n_slots"] == len(r["slot_match"]) for r in rows)
    assert all(all(r["slot_match"]) for r in rows)


def test_a_shifted_oracle_is_not_accepted() -> None:
    source = oracle_source(2, new=25)
    oracle = Oracle([item.input_ids for item in source.items], 30, shift=1)
    rows = rows_of(oracle, oracle.pieces(), source)
    assert np.mean([r["n_accepted"] for r in rows]) < 1


def test_acceptance_stops_at_the_first_miss() -> None:
    source = oracle_source(1, new=6, prompt=5)
    texts = source.items[0].input_ids.clone()
    texts[5 + 3] = 28  # what the drafter says at the fourth token of the text is wrong
    oracle = Oracle([texts], 30)
    rows = rows_of(oracle, oracle.pieces(), source)
    assert [r["n_accepted"] for r in rows] == [2, 1, 0, 2, 1]
    assert rows[1]["slot_match"] == [True, False, True, True]


def test_rows_fit_the_schema_and_read_back(tmp_path: Path) -> None:
    drafter = tiny_drafter(TARGET, 1)
    source = random_source(drafter, 3)
    rows = rows_of(drafter, PIECES, source, settings=SETTINGS)
    write_records(tmp_path / "a.parquet", rows, ANCHORS)
    frame = read_records(tmp_path / "a.parquet", ANCHORS)
    assert len(frame) == len(rows)
    names = ["", "revealed=4", "revealed=8", "revealed=12", "rounds=2"]
    assert set(frame["setting"]) == {*names, "context=zeroed", "context=shuffled"}
    assert frame.groupby("setting")["clip_id"].nunique().eq(3).to_dict()[""]


def test_matches_equal_the_decoding_forward() -> None:
    """Each anchor through the drafter's cache path, as decoding runs it."""
    drafter = tiny_drafter(TARGET, 1)
    source = random_source(drafter, 2, new=(20, 13))
    rows = rows_of(drafter, PIECES, source)
    assert any(any(r["slot_match"]) for r in rows)
    masks = torch.full((15,), drafter.config.mask_token_id)
    numbers = {item.clip_id: item for item in source.items}
    for row in rows:
        item = numbers[row["clip_id"]]
        at = item.prompt_tokens + row["anchor_index"]
        with torch.no_grad():
            output = drafter(
                PIECES.embed(torch.cat([item.input_ids[at : at + 1], masks]))[None],
                item.states[None, :at],
                torch.arange(at + 16)[None],
                cache=drafter_cache(drafter, at + 16),
            )
            logits = PIECES.head(output.last_hidden_state[0, 1:])
        logits[:, TARGET.banned_ids] = -torch.inf
        told = logits.argmax(-1)[: row["n_slots"]]
        label = item.input_ids[at + 1 : at + 16]
        assert row["slot_match"] == (told == label).tolist()
        leading = (told == label).long().cumprod(0).sum()
        assert row["n_accepted"] == int(leading)


@pytest.mark.parametrize("clips_per_batch", [1, 2])
def test_the_batch_size_changes_nothing(clips_per_batch: int) -> None:
    drafter = tiny_drafter(TARGET, 1)
    source = random_source(drafter, 5)
    settings = [*SETTINGS, AnchorSetting(rounds=3)]
    whole = rows_of(drafter, PIECES, source, settings=settings, clips_per_batch=5)
    cut = rows_of(drafter, PIECES, source, settings=settings, clips_per_batch=clips_per_batch)
    assert whole == cut


def test_revealed_slots_hold_the_truth_and_are_not_scored() -> None:
    source = oracle_source(2, new=25)
    always_wrong = Oracle([torch.full((40,), 28)] * 2, 30)
    settings = [AnchorSetting(revealed=n) for n in (0, 4, 8, 12)]
    rows = rows_of(always_wrong, always_wrong.pieces(), source, settings=settings)
    for n, seen in zip((4, 8, 12), always_wrong.seen[1:], strict=True):
        of_setting = [r for r in rows if r["setting"] == f"revealed={n}"]
        assert [r["anchor_index"] for r in of_setting] == [*range(10), *range(10)]  # full blocks
        assert all(r["slot_match"].count(None) == n for r in of_setting)
        assert all(r["slot_match"].count(True) == 0 for r in of_setting)
        for r in of_setting:
            first_hidden = next(k for k, v in enumerate(r["slot_match"]) if v is not None)
            assert r["n_accepted"] == first_hidden
        tokens = seen[0, 0, 1:]
        label = source.items[0].input_ids[6:21]
        assert tokens.tolist() == [
            int(label[k]) if v is None else 29 for k, v in enumerate(of_setting[0]["slot_match"])
        ]
    hidden = {
        n: [
            {k for k, v in enumerate(r["slot_match"]) if v is None}
            for r in rows
            if r["setting"] == f"revealed={n}"
        ]
        for n in (4, 8, 12)
    }
    assert all(a < b < c for a, b, c in zip(hidden[4], hidden[8], hidden[12], strict=True))
    assert len({frozenset(s) for s in hidden[4]}) > 5  # drawn per anchor


def test_draft_rounds_write_the_most_confident_slots_and_may_overwrite_them() -> None:
    drafter = tiny_drafter(TARGET, 1)
    source = random_source(drafter, 2, new=(20, 13))
    batch = make_batch(source.items, [torch.arange(19), torch.arange(12)], 15)
    with torch.no_grad():
        context = project_context(drafter, batch)
        tokens = torch.full_like(batch.labels, drafter.config.mask_token_id)
        written = torch.zeros_like(batch.supervised)
        for goal in (4, 8, 12, 15):  # ceil(15 r / 4)
            scores = score_slots(
                block_hidden(drafter, batch, context, tokens, PIECES), batch.labels, PIECES
            )
            for b, a in torch.cartesian_prod(torch.arange(2), torch.arange(19)).tolist():
                ranked = scores.confidence[b, a].masked_fill(written[b, a], -torch.inf)
                for k in ranked.argsort(descending=True)[: goal - int(written[b, a].sum())]:
                    tokens[b, a, k] = scores.prediction[b, a, k]
                    written[b, a, k] = True
        found = draft_blocks(drafter, batch, context, PIECES, rounds=4)
    assert torch.equal(found, scores.prediction)
    assert not torch.equal(found, tokens)  # the last forward changed some written slot


def test_one_round_is_the_deployed_draft() -> None:
    drafter = tiny_drafter(TARGET, 1)
    source = random_source(drafter, 2)
    settings = [AnchorSetting(), AnchorSetting(rounds=2)]
    rows = rows_of(drafter, PIECES, source, settings=settings)
    plain = [r["slot_match"] for r in rows if r["setting"] == ""]
    assert plain == [r["slot_match"] for r in rows_of(drafter, PIECES, source)]
    assert plain != [r["slot_match"] for r in rows if r["setting"] == "rounds=2"]


def test_context_modes_change_the_states_only() -> None:
    source = random_source(tiny_drafter(TARGET, 1), 2, new=(20, 9))
    long, short = source.items
    moved, covered = with_context_of(long, short)
    n = short.states.shape[0]
    assert torch.equal(moved.states[:n], short.states)
    assert covered.tolist() == [True] * n + [False] * (long.states.shape[0] - n)
    assert torch.equal(moved.input_ids, long.input_ids)
    back, all_covered = with_context_of(short, long)
    assert bool(all_covered.all()) and torch.equal(back.states, long.states[:n])


def test_an_oracle_of_states_needs_its_own_context() -> None:
    """The oracle reads which clip it is from the states: zeroed or swapped, it is wrong."""
    source = oracle_source(4, new=25)
    oracle = Oracle([item.input_ids for item in source.items], 30)
    rows = rows_of(oracle, oracle.pieces(), source, settings=SETTINGS)
    share = {
        name: np.mean([r["n_accepted"] / r["n_slots"] for r in rows if r["setting"] == name])
        for name in ("", "context=zeroed", "context=shuffled")
    }
    assert share[""] == 1.0 and share["context=shuffled"] < 0.2
    # Zeroed states say "clip 0": right for that clip alone.
    assert 0.25 <= share["context=zeroed"] < 0.45


@pytest.mark.parametrize("n_clips", [2, 3, 11])
def test_every_clip_gets_another_clips_context(n_clips: int) -> None:
    partner = other_clips(n_clips, seed=4)
    assert sorted(partner) == list(range(n_clips))
    assert all(here != there for here, there in enumerate(partner))
    with pytest.raises(InputError, match="found 1 clips"):
        other_clips(1, 0)


def test_texts_without_anchor_are_left_out() -> None:
    items = oracle_source(4, new=25).items
    one = dataclasses.replace(
        items[1],
        input_ids=items[1].input_ids[: items[1].prompt_tokens + 1],
        states=items[1].states[: items[1].prompt_tokens],
    )
    source = ListSource([items[0], one, items[2], items[3]])
    oracle = Oracle([item.input_ids for item in items], 30)
    rows = rows_of(oracle, oracle.pieces(), source)
    assert {r["clip_id"] for r in rows} == {"clip-0", "clip-2", "clip-3"}


def test_facts_come_from_the_drafters_config() -> None:
    drafter = tiny_drafter(TARGET, 1)
    with pytest.raises(InputError, match=r"config.training: found no objective"):
        drafter_facts(drafter, "d")
    drafter.config.training = {k: FACTS[k] for k in list(FACTS)[2:-1]}
    expected = {**FACTS, "target_sha256": TARGET.source_sha256}
    assert drafter_facts(drafter, "d") == expected
    changed = "drafter.block_size=8"
    assert drafter_facts(drafter, "d", changed) == expected | {"variant": changed}


def test_setting_names() -> None:
    assert AnchorSetting().name == ""
    assert AnchorSetting(revealed=4, rounds=2, context="zeroed").name == (
        "revealed=4,rounds=2,context=zeroed"
    )
