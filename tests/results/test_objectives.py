"""T3 and the data of F4 and F5: paired differences, intervals over seeds, final drafters."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from tests.results.synthetic import drafter_columns, generation_row, records_of, training_rows
from vflash_analysis.errors import InputError
from vflash_analysis.records import typed_frame
from vflash_analysis.results import objectives
from vflash_analysis.results.curves import acceptance_frame, training_frame
from vflash_analysis.results.objectives import anchors_with_arms, objectives_table
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.results.tidy import ARM_ORDER, write_tidy_csv
from vflash_analysis.results.training_figures import objectives_figure
from vflash_analysis.results.write import markdown
from vflash_analysis.schemas import ANCHORS, TRAINING
from vflash_analysis.stats import Bootstrap

FEW = Bootstrap(n_samples=50)
CELL = "clips=100;steps=100"
LENGTHS = {"mask_only": {1: (2, 4), 2: (3, 5)}, "self_reveal": {1: (3, 6), 2: (5, 7)}}


def known_anchors() -> pd.DataFrame:
    """Two arms, two seeds, two videos of one anchor each; accepted drafts as in LENGTHS."""
    rows = []
    for arm, seeds in LENGTHS.items():
        for seed, accepted in seeds.items():
            for clip, n_accepted in zip(("a", "b"), accepted, strict=True):
                match = [k < n_accepted for k in range(15)]
                rows.append(
                    drafter_columns(arm, seed, 100, 100)
                    | {"clip_id": clip, "benchmark": "VDC", "split": "validation"}
                    | {"anchor_index": 0, "n_slots": 15, "n_accepted": n_accepted}
                    | {"slot_match": match}
                )
    return pd.DataFrame(rows)[list(ANCHORS.columns)]


def anchors_only(frame: pd.DataFrame):
    return records_from_frames({"anchors": typed_frame(frame, ANCHORS)}, "synthetic")


@pytest.fixture(scope="module")
def known():
    return objectives_table(anchors_only(known_anchors()), FEW).frame


def pick(frame: pd.DataFrame, **keys) -> pd.Series:
    for key, value in keys.items():
        frame = frame.loc[frame[key] == value]
    assert len(frame) == 1, f"{len(frame)} rows for {keys}"
    return frame.iloc[0]


def test_t3_values_by_hand(known):
    row = pick(known, quantity="anchor_accepted_length", objective="mask_only", setting=CELL)
    assert (row["value"], row["n"]) == (np.mean([3, 5, 4, 6]), 4)
    row = pick(known, quantity="anchor_accepted_length", objective="self_reveal", setting=CELL)
    assert row["value"] == np.mean([4, 7, 6, 8])
    seed = pick(
        known,
        quantity="anchor_accepted_length",
        objective="self_reveal",
        setting=f"{CELL};seed=2",
    )
    assert (seed["value"], seed["n"]) == (7, 2)


def test_t3_differences_are_paired_by_seed_and_anchor(known):
    minus = f"{CELL};minus=mask_only"
    row = pick(known, quantity="paired_difference", setting=minus)
    assert (row["value"], row["n"], row["objective"]) == (1.75, 4, "self_reveal")
    seeds = [pick(known, setting=f"{minus};seed={seed}")["value"] for seed in (1, 2)]
    assert seeds == [1.5, 2.0]
    t = pick(known, quantity="paired_difference_t", setting=minus)
    # two seeds, 1.5 and 2: mean 1.75, standard error 0.25, t(0.975, 1) = 12.706
    assert (t["value"], t["n"]) == (1.75, 2)
    assert t["high"] - t["value"] == pytest.approx(12.706 * 0.25, rel=1e-3)


def test_t3_says_where_an_arm_has_reached_its_plateau():
    rows = []
    for arm, lengths in {"mask_only": (4, 6, 6), "self_reveal": (4, 6, 9)}.items():
        for steps, length in zip((100, 200, 400), lengths, strict=True):
            own = known_anchors().iloc[:1].assign(n_accepted=length - 1)
            columns = drafter_columns(arm, 1, steps, 100)
            rows.append(own.assign(**{name: [value] for name, value in columns.items()}))
    frame = objectives_table(anchors_only(pd.concat(rows)), FEW).frame
    row = pick(frame, quantity="plateau", objective="mask_only", setting="clips=100")
    assert (row["value"], row["n"]) == (6, 3)
    row = pick(frame, quantity="plateau", objective="self_reveal")
    assert np.isnan(row["value"]) and row["status"] == "missing"


def test_a_seed_that_one_arm_lacks_is_in_no_difference():
    frame = known_anchors()
    extra = frame.loc[(frame["objective"] == "self_reveal") & (frame["train_seed"] == 1)]
    extra = extra.assign(train_seed=3, drafter_sha256="third", n_accepted=15)
    table = objectives_table(anchors_only(pd.concat([frame, extra])), FEW).frame
    row = pick(table, quantity="paired_difference", setting=f"{CELL};minus=mask_only")
    assert (row["value"], row["n"]) == (1.75, 4)
    row = pick(table, quantity="anchor_accepted_length", objective="self_reveal", setting=CELL)
    assert row["n"] == 6


def test_t3_accuracy_of_masked_slots(known):
    row = pick(
        known, quantity="masked_slot_accuracy", objective="mask_only", setting=f"{CELL};revealed=0"
    )
    assert row["value"] == pytest.approx((2 + 4 + 3 + 5) / 60, rel=1e-5)
    assert row["n"] == 60


def test_revealed_slots_are_not_scored_and_other_contexts_stand_apart():
    frame = known_anchors()
    shown = frame.assign(
        setting="revealed=4",
        slot_match=[[None] * 4 + list(slots[4:]) for slots in frame["slot_match"]],
    )
    zeroed = frame.assign(setting="context=zeroed", n_accepted=0)
    table = objectives_table(anchors_only(pd.concat([frame, shown, zeroed])), FEW).frame
    keys = {"objective": "self_reveal", "quantity": "masked_slot_accuracy"}
    row = pick(table, setting=f"{CELL};revealed=4", **keys)
    # slots 5..15 of accepted 3, 6, 5, 7: 0 + 2 + 1 + 3 right of 44
    assert (row["value"], row["n"]) == (pytest.approx(6 / 44, rel=1e-5), 44)
    row = pick(
        table,
        quantity="anchor_accepted_length",
        setting=f"{CELL};context=zeroed",
        objective="self_reveal",
    )
    assert row["value"] == 1
    deployed = pick(table, quantity="anchor_accepted_length", setting=CELL, objective="self_reveal")
    assert deployed["value"] == 6.25


def test_arms_must_share_their_anchors():
    frame = known_anchors()
    with pytest.raises(InputError, match="do not share the same 2 anchors"):
        anchors_with_arms(anchors_only(frame.iloc[:-1]))


def test_two_splits_keep_their_names():
    frame = known_anchors()
    both = pd.concat([frame, frame.assign(split="suites", clip_id="x" + frame["clip_id"])])
    table = objectives_table(anchors_only(both), FEW).frame
    settings = set(table.loc[table["quantity"] == "paired_difference", "setting"])
    assert {f"{CELL};split={s};minus=mask_only" for s in ("suites", "validation")} <= settings


def test_t3_has_every_arm_budget_and_quantity(records, boot):
    table = objectives_table(records, boot)
    frame = table.frame
    for steps in (100, 200):
        cell = frame.loc[frame["setting"] == f"clips=100;steps={steps}"]
        for quantity in ("anchor_accepted_length", "forward_equivalents", "train_s"):
            assert set(cell.loc[cell["quantity"] == quantity, "objective"]) == set(ARM_ORDER)
        tau = cell.loc[(cell["quantity"] == "accepted_length") & (cell["method"] == "chain")]
        assert set(tau["objective"]) == set(ARM_ORDER)
        assert set(tau["device"]) == {"2 CPU cores, float32"}
    double = pick(
        frame,
        quantity="forward_equivalents",
        objective="mask_only_2x",
        setting="clips=100;steps=100",
    )
    single = pick(
        frame, quantity="forward_equivalents", objective="mask_only", setting="clips=100;steps=100"
    )
    assert double["value"] == 2 * single["value"]
    kept = pick(
        frame, quantity="right_kept", objective="self_reveal", setting="clips=100;steps=200"
    )
    assert (kept["value"], kept["n"]) == (0.97, 400)
    assert "paired difference (tokens): self reveal minus" in markdown(table)
    assert "decoded chain" in table.caption and "stored" not in table.caption


def test_t3_times_only_the_drafters_that_decode(records, boot):
    decode = records.generations["drafter_sha256"].str.startswith("self_reveal-1-200-")
    some = dataclasses.replace(
        records,
        generations=records.generations.loc[decode | (records.generations["method"] == "ar")],
    )
    frame = objectives_table(some, boot).frame
    timed = frame.loc[frame["quantity"] == "train_s"]
    assert timed[["objective", "setting", "n"]].values.tolist() == [
        ["self_reveal", "clips=100;steps=200", 1]
    ]
    assert "decoded chain" not in objectives_table(anchors_only(known_anchors()), FEW).caption


@pytest.fixture
def tracked(known, tmp_path, monkeypatch):
    """A tracked table of two seeds of two arms."""
    stored = known.assign(status="stored", source="data/records/pocket")
    write_tidy_csv(tmp_path / "T3_objectives.csv", stored)
    monkeypatch.setattr(objectives, "TRACKED_FIGURES", tmp_path)
    return known


def test_stored_rows_stand_beside_those_of_a_run_and_are_never_mixed(tracked):
    frame = known_anchors()
    own = frame.loc[(frame["objective"] == "mask_only") & (frame["train_seed"] == 1)]
    table = objectives_table(dataclasses.replace(anchors_only(own), as_tracked=True), FEW)
    stored = table.frame.loc[table.frame["status"] == "stored"]
    assert len(stored) == len(tracked) and len(table.frame) > len(stored)
    keys = {"quantity": "anchor_accepted_length", "objective": "mask_only", "setting": CELL}
    assert pick(table.frame, **keys, status="measured")["value"] == 4
    assert pick(table.frame, **keys, status="stored")["value"] == np.mean([3, 5, 4, 6])
    text = markdown(table)
    assert "Rows marked stored: the tracked records, not this run" in text
    words = "100 training clips, 100 steps"
    assert f"| {words} | 4.00" in text and f"| {words} (stored) | 4.50" in text
    figure, drawn = objectives_figure(table.frame)
    assert set(drawn["status"]) == {"measured", "stored"}
    assert "Hollow: the tracked records" in figure.texts[-1].get_text().replace("\n", " ")


def test_stored_rows_stand_beside_no_run_of_other_settings(tracked):
    whole = anchors_only(known_anchors())
    assert not whole.as_tracked
    assert set(objectives_table(whole, FEW).frame["status"]) == {"measured"}


def test_t3_rows_are_in_the_order_of_their_numbers():
    rows = []
    for steps, clips in ((1100, 1600), (275, 1600), (275, 150)):
        columns = drafter_columns("mask_only", 1, steps, clips)
        own = known_anchors().iloc[:1].assign(**{k: [v] for k, v in columns.items()})
        rows += [own.assign(setting=asked) for asked in ("", "rounds=2", "context=zeroed")]
    (section, *_) = objectives_table(anchors_only(pd.concat(rows)), FEW).sections
    sizes = [f"{words} training clips, " for words in ("150", "1,600", "1,600")]
    sizes = [one + steps for one, steps in zip(sizes, ("275", "275", "1,100"), strict=True)]
    sizes = [f"{one} steps" for one in sizes]
    asked = ("", ", context zeroed", ", 2 drafter forwards")
    assert [row[0] for row in section.body] == [size + one for one in asked for size in sizes]


def test_a_table_of_stored_rows_alone_does_not_say_so_in_every_cell():
    rising = known_anchors().assign(n_accepted=15)
    rising = rising.assign(steps=200, drafter_sha256=rising["drafter_sha256"] + "-200")
    both = anchors_only(pd.concat([known_anchors(), rising]))
    table = objectives_table(dataclasses.replace(both, status="stored"), FEW)
    assert set(table.frame["status"]) == {"stored", "missing"}  # missing: the plateaus
    assert "(stored)" not in markdown(table)


def test_a_plateau_needs_a_doubling_of_the_budget():
    far = known_anchors().assign(steps=400)
    far = far.assign(drafter_sha256=far["drafter_sha256"] + "-400")
    table = objectives_table(anchors_only(pd.concat([known_anchors(), far])), FEW)
    assert "plateau" not in set(table.frame["quantity"])


def test_arms_are_compared_without_the_seed_that_settings_were_chosen_on():
    anchors = known_anchors()
    chosen = anchors.loc[anchors["train_seed"] == 1, "drafter_sha256"].unique()
    rows = [
        generation_row("chain", "a", drafter_sha256=sha, objective=arm, train_seed=1, new_tokens=9,
                       verify_calls=2, decode_s=0.1)
        for sha, arm in zip(chosen, ("mask_only", "self_reveal"), strict=True)
    ]  # fmt: skip
    frame = objectives_table(records_of(pd.DataFrame(rows), anchors=anchors), FEW).frame
    row = pick(frame, quantity="anchor_accepted_length", objective="mask_only", setting=CELL)
    assert (row["value"], row["n"]) == (np.mean([4, 6]), 2)  # seed 2 alone
    alone = anchors.loc[anchors["train_seed"] == 1]
    frame = objectives_table(records_of(pd.DataFrame(rows), anchors=alone), FEW).frame
    row = pick(frame, quantity="anchor_accepted_length", objective="mask_only", setting=CELL)
    assert (row["value"], row["n"]) == (np.mean([3, 5]), 2)  # there is no other


def test_common_random_numbers_make_the_paired_interval_narrow(records):
    frame = objectives_table(records, Bootstrap(400)).frame
    cell = "clips=100;steps=200"
    value = pick(frame, quantity="anchor_accepted_length", objective="self_reveal", setting=cell)
    difference = frame.loc[
        (frame["quantity"] == "paired_difference")
        & (frame["setting"] == f"{cell};minus=self_reveal_rev0")
        & (frame["method"] == "")
    ].iloc[0]
    assert difference["high"] - difference["low"] < value["high"] - value["low"]
    assert difference["low"] > 0


def test_f4_data_by_hand():
    frame = acceptance_frame(anchors_only(known_anchors()), FEW)
    rows = frame.loc[frame["objective"] == "mask_only"].set_index(["quantity", "setting"])
    assert frame["setting"].unique().tolist() == [str(slot) for slot in range(1, 16)]
    # accepted 2, 4, 3, 5: all four pass slot 2, three pass slot 3, two slot 4, one slot 5
    for slot, survival, conditional in ((2, 1, 1), (3, 3 / 4, 3 / 4), (4, 2 / 4, 2 / 3)):
        assert rows.loc[("survival", str(slot)), "value"] == pytest.approx(survival, rel=1e-5)
        assert rows.loc[("conditional_acceptance", str(slot)), "value"] == pytest.approx(
            conditional, rel=1e-5
        )
    assert rows.loc[("conditional_acceptance", "5"), "n"] == 2
    assert rows.loc[("survival", "6"), "value"] == 0
    assert np.isnan(rows.loc[("conditional_acceptance", "7"), "value"])


def test_f4_uses_final_drafters_and_both_sources(records, boot):
    frame = acceptance_frame(records, boot)
    assert set(frame["method"]) == {"", "chain"}
    assert set(frame["objective"]) == {"mask_only", "self_reveal"}
    assert len(frame) == 2 * 2 * 2 * 15
    anchors = records.anchors
    final = anchors.loc[(anchors["steps"] == 200) & (anchors["objective"] == "self_reveal")
                        & (anchors["revealed_weight"] == 1)]  # fmt: skip
    first = pick(frame, method="", objective="self_reveal", quantity="survival", setting="1")
    assert first["n"] == len(final)
    assert first["value"] == pytest.approx((final["n_accepted"] >= 1).mean(), rel=1e-5)


def test_f5_data_is_the_mean_and_range_over_seeds():
    rows = training_rows(("mask_only",), (1, 2), (100,), (100,))
    records = records_from_frames({"training": typed_frame(rows, TRAINING)}, "synthetic")
    frame = training_frame(records)
    last = rows.loc[rows["step"] == 100]
    row = pick(frame, quantity="loss_mask", setting="step=100")
    assert row["value"] == pytest.approx(last["loss_mask"].mean(), rel=1e-5)
    assert row["low"] == pytest.approx(last["loss_mask"].min(), rel=1e-5)
    slot = pick(frame, quantity="slot_accuracy", setting="step=100;slot=8")
    by_seed = [values[7] for values in last["slot_accuracy"]]
    assert slot["high"] == pytest.approx(max(by_seed), rel=1e-5)
    assert slot["n"] == 2
    assert "loss_flow" not in set(frame["quantity"])


def test_f5_pools_devices_and_names_them():
    rows = training_rows(("mask_only",), (1, 2), (100,), (100,))
    rows["device"] = ["1 thread" if seed == 1 else "2 threads" for seed in rows["train_seed"]]
    frame = training_frame(
        records_from_frames({"training": typed_frame(rows, TRAINING)}, "synthetic")
    )
    assert set(frame["device"]) == {"1 thread; 2 threads"}
    assert set(frame.loc[frame["quantity"] == "loss_mask", "n"]) == {2}


def test_f5_prefers_validation_clips():
    rows = training_rows(("mask_only",), (1,), (100,), (100,))
    held_out = rows.assign(setting="validation", loss_mask=9.0)
    both = typed_frame(pd.concat([rows, held_out]), TRAINING)
    frame = training_frame(records_from_frames({"training": both}, "synthetic"))
    assert set(frame.loc[frame["quantity"] == "loss_mask", "value"]) == {9.0}


def test_no_records_give_empty_frames():
    nothing = records_from_frames({}, "synthetic")
    assert training_frame(nothing).empty
    assert acceptance_frame(nothing, FEW).empty
    assert objectives_table(nothing, FEW).frame.empty
