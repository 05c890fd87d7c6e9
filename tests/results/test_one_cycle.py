"""F2: one cycle's rows from known records, the rule that picks it, and what is drawn."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vflash_analysis.errors import InputError
from vflash_analysis.results.one_cycle import (
    accepted_path,
    nearest_cycle,
    one_cycle_frame,
    packed,
    slots_of,
    unpacked,
)
from vflash_analysis.results.one_cycle_figure import _caption, boxed, one_cycle_figure
from vflash_analysis.results.tidy import parse_setting, setting_text


def rows_of(frame, quantity):
    own = frame.loc[frame["quantity"] == quantity]
    return own, [parse_setting(text) for text in own["setting"]]


@given(st.text(max_size=8))
def test_any_text_survives_in_a_setting(text):
    keys = parse_setting(setting_text(slot=1, text=packed(text)))
    assert unpacked(keys["text"]) == text if text else keys["slot"] == "1"


def test_slots_and_the_accepted_path_of_a_tree():
    #  anchor -> 0 (a) -> 2 (b) ; anchor -> 1 (c) -> 3 (b) -> 4 (d)
    tokens, parents = [10, 12, 11, 11, 13], [-1, -1, 0, 1, 3]
    assert slots_of(parents) == [1, 1, 2, 2, 3]
    assert accepted_path(tokens, parents, [12, 11, 13]) == [1, 3, 4]
    assert accepted_path(tokens, parents, []) == []
    with pytest.raises(InputError, match="accepted token 99 is no draft"):
        accepted_path(tokens, parents, [12, 99])


@pytest.mark.parametrize("method", ["chain", "tree60"])
def test_its_rows_are_the_records(records, method):
    frame = one_cycle_frame(records, "VDC-00", method, cycle=0)
    cycles = records.cycles
    own = cycles.loc[(cycles["clip_id"] == "VDC-00") & (cycles["cycle"] == 0)]
    drafter = frame["objective"].iloc[0]
    assert drafter == "self_reveal" and set(frame["method"]) == {method, "ar"}
    which, (keys,) = rows_of(frame, "cycle_number")
    assert keys == {"clip": "VDC-00", "chosen": "hand"} and which["value"].item() == 0
    committed, keys = rows_of(frame, "committed_token")
    plain, plain_keys = rows_of(frame, "ar_forward_ms")
    assert [k["text"] for k in keys] == [k["text"] for k in plain_keys]
    n_accepted = int(committed["value"].sum())
    assert committed["value"].tolist() == [1.0] * n_accepted + [0.0]
    shas = records.generations.loc[records.generations["objective"] == "self_reveal"]
    found = own.loc[(own["method"] == method) & own["drafter_sha256"].isin(shas["drafter_sha256"])]
    assert (n_accepted, len(committed)) in set(
        zip(found["n_accepted"], found["n_committed"], strict=True)
    )
    ar = cycles.loc[(cycles["clip_id"] == "VDC-00") & (cycles["method"] == "ar")]
    assert plain["value"].tolist() == pytest.approx(
        (1000 * ar["verify_s"]).tolist()[: len(plain)], rel=1e-5
    )
    drafts, keys = rows_of(frame, "draft_accepted")
    assert drafts["value"].sum() == n_accepted
    right = [k["text"] for k, hit in zip(keys, drafts["value"], strict=True) if hit]
    assert right == [k["text"] for k in plain_keys[:n_accepted]]
    assert len(drafts) == 15 if method == "chain" else len(drafts) > 15
    parts = ("context_projection", "draft", "verify", "other")
    ms = {q: rows_of(frame, f"{q}_ms")[0]["value"].sum() for q in parts}
    assert ms["context_projection"] == pytest.approx(2.0)  # of the prompt, in the first cycle only
    later = one_cycle_frame(records, "VDC-00", method, cycle=1)
    assert "context_projection_ms" not in set(later["quantity"])
    assert rows_of(frame, "cycle_ms")[0]["value"].item() == pytest.approx(
        sum(ms.values()), rel=1e-4
    )
    assert len(rows_of(frame, "tree_ms")[0]) == (method == "tree60")


def test_the_rule_takes_the_cycle_nearest_to_the_median(records):
    frame = one_cycle_frame(records)
    _, (keys,) = rows_of(frame, "cycle_number")
    assert keys["chosen"] == "rule"
    median = rows_of(frame, "median_accepted_drafts")[0]["value"].item()
    assert rows_of(frame, "committed_token")[0]["value"].sum() == median
    cycles = records.cycles.loc[records.cycles["method"] == "chain"].head(3).reset_index(drop=True)
    cycles = cycles.assign(n_accepted=[9, 4, 6], censored=[False, False, True], cycle=[0, 1, 2])
    assert nearest_cycle(cycles, 6) == (2, 1)  # the cut one does not count
    assert nearest_cycle(cycles.assign(censored=True), 6) == (0, 2)


def test_what_the_records_do_not_hold_is_named(records):
    for choice, told in (
        ({"method": "lookup"}, "method: found 'lookup', allowed: chain, tree60"),
        ({"clip_id": "VDC-01"}, "clip_id: found 'VDC-01', allowed: one whose chain cycles"),
        ({"clip_id": "VDC-00", "drafter": "none"}, "drafter: found 'none'"),
        ({"clip_id": "VDC-00", "cycle": 999}, "cycle: found 999, allowed: 0 to"),
    ):
        with pytest.raises(InputError, match=told):
            one_cycle_frame(records, **choice)


def test_the_rule_takes_a_cycle_before_the_texts_part(records):
    """Half precision: a text may leave plain decoding's at a near tie; its later cycles stay out."""
    rows = records.generations
    chains = rows["method"] == "chain"
    parted = dataclasses.replace(
        records, generations=rows.assign(first_divergence=np.where(chains, 12, np.nan))
    )
    found = one_cycle_frame(parted)
    number, (keys,) = rows_of(found, "cycle_number")
    own = records.cycles.loc[
        (records.cycles["clip_id"] == keys["clip"]) & (records.cycles["method"] == "chain")
    ]
    ends = own.groupby("drafter_sha256")["n_committed"].cumsum()
    assert (ends.loc[own["cycle"] == number["value"].item()] < 12).any()
    assert len(rows_of(found, "ar_forward_ms")[0])


def test_a_cycle_whose_tokens_plain_decoding_did_not_write_is_drawn_without_it(records):
    rows = records.generations.copy()
    rows["token_ids"] = [
        [7] * len(ids) if method == "ar" else ids
        for ids, method in zip(rows["token_ids"], rows["method"], strict=True)
    ]
    frame = one_cycle_frame(dataclasses.replace(records, generations=rows))
    assert "ar_forward_ms" not in set(frame["quantity"])
    said = [text.get_text() for text in one_cycle_figure(frame)[0].axes[0].texts]
    assert "the records hold no plain decoding of these tokens" in said


@pytest.mark.parametrize("method", ["chain", "tree60"])
def test_every_fate_has_a_mark_and_every_slot_a_mask(records, method):
    frame = one_cycle_frame(records, "VDC-00", method, cycle=0)
    figure, drawn = one_cycle_figure(frame)
    assert drawn.equals(frame)
    said = [text.get_text() for text in figure.axes[0].texts]
    committed, _ = rows_of(frame, "committed_token")
    accepted = int(committed["value"].sum())
    assert said.count("M") == 15
    assert said.count("✓") == 1 + 2 * accepted  # legend, proposal and committed tokens
    assert said.count("→") == 1 + (len(committed) - accepted)
    assert said.count("×") == 1 + 15 - accepted
    assert any("1 target forward" in text or "target forwards" in text for text in said)
    caption = figure.texts[-1].get_text().replace("\n", " ")
    assert "n = 1 cycle, no interval" in caption and "2 CPU cores, float32" in caption


def test_a_box_holds_a_token_in_two_lines_at_most():
    assert [boxed(text) for text in (" the", " ", "\n")] == ["the", "␣", "\\n"]
    assert boxed("<|im_end|>") == "‹im_\nend›"
    first, second = boxed("i" * 60).split("\n")
    assert set(first) == {"i"} and second == "i" * (len(first) - 1) + "…"
    assert len(boxed("m" * 60)) < len(first)  # wide letters


def test_records_without_detail_say_so(records):
    bare = dataclasses.replace(records, cycles=records.cycles.assign(draft_parents=None))
    figure, drawn = one_cycle_figure(one_cycle_frame(bare))
    assert drawn["status"].tolist() == ["missing"]
    assert "keep no chain cycle in detail" in figure.axes[0].texts[0].get_text()


@pytest.mark.parametrize(("n", "words"), [(1, "in 1 forward;"), (2, "in 2 forwards;")])
def test_the_caption_counts_forwards(records, n, words):
    frame = one_cycle_frame(records)
    by = dict(iter(frame.groupby("quantity")))
    for quantity in ("committed_token", "ar_forward_ms"):
        by[quantity] = by[quantity].iloc[:n]
    told = _caption(by, by["cycle_number"].iloc[0])
    assert words in told
