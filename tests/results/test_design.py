"""T6 and T7 from a study whose numbers are known by hand."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from tests.results.synthetic import (
    cycle_row,
    failed_row,
    generation_row,
    records_of,
    training_rows,
)
from vflash_analysis.publish import slim_study
from vflash_analysis.records import typed_frame
from vflash_analysis.results import design, published
from vflash_analysis.results.report import make_table
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.results.tidy import MISSING, parse_setting
from vflash_analysis.schemas import BENCHMARKS, DESIGN_STUDY, TRAINING
from vflash_analysis.stats import Bootstrap

BOOT = Bootstrap(n_samples=50)
# method, setting, variant -> verify calls and seconds of a text of 10 tokens after the first
DECODES = {
    ("chain", "", ""): (5, 0.050),
    ("chain", "context=0.5", ""): (10, 0.100),
    ("chain", "context=text_only", ""): (8, 0.080),
    ("chain", "rounds=2", ""): (4, 0.080),
    ("chain", "", "drafter.context=text_only"): (4, 0.040),
    ("chain", "", "drafter.num_hidden_layers=1"): (10, 0.050),
    ("tree60", "", ""): (4, 0.050),
    ("tree60", "nodes=16", ""): (5, 0.040),
    ("tree60", "", "drafter.num_hidden_layers=1"): (8, 0.060),
}


def study_of(benchmarks=BENCHMARKS, decodes=DECODES, fails=lambda row: False, slots=15):
    """Two clips a suite; `fails` tells the decodes that do, `slots` what a block drafts.

    The own tree's first cycle of a clip has a token of a sibling in its second slot.
    """
    generations, cycles, training = [], [], {}
    for benchmark in benchmarks:
        for number in range(2):
            clip = f"{benchmark}-{number}"
            plain = {"new_tokens": 11, "verify_calls": 10, "decode_s": 0.1}
            generations.append(generation_row("ar", clip, benchmark, **plain))
            for (method, setting, variant), (calls, seconds) in decodes.items():
                told = {"setting": setting, "drafter_sha256": f"d:{variant}"}
                told |= {"new_tokens": 11, "verify_calls": calls, "decode_s": seconds}
                row = generation_row(method, clip, benchmark, **told)
                generations.append(failed_row(row) if fails(row) else row)
                for cycle in range(calls):
                    committed = 10 // calls + (cycle < 10 % calls)
                    part = {"n_committed": committed, "n_accepted": committed - 1}
                    part |= {"censored": False, "draft_s": 0.002, "verify_s": 0.003}
                    part |= {"other_s": 0.0, "end_s": 0.005 * (cycle + 1)}
                    ranks = [0] * committed
                    if method == "tree60" and cycle == 0:
                        ranks[1] = 2
                    part |= {"target_rank": ranks, "draft_parents": [-1, 0, 0]}
                    part |= {"draft_logprobs": [math.log(0.5)] * 3}
                    cycles.append(cycle_row(row, cycle) | part)
                log = training_rows(("self_reveal",), (0,), (20,), (100,)).tail(1)
                log = log.assign(drafter_sha256=f"d:{variant}", variant=variant, seconds=7.0)
                log["slot_accuracy"] = [[0.5] * slots]
                training[variant] = log
    return records_of(
        pd.DataFrame(generations),
        pd.DataFrame(cycles),
        training=typed_frame(pd.concat(training.values()), TRAINING),
    )


def with_study(study):
    rows = pd.DataFrame([generation_row("ar", "x")])
    return replace(records_of(rows), studies={DESIGN_STUDY: study})


@pytest.fixture(scope="module")
def records():
    return with_study(study_of())


def values(frame: pd.DataFrame, quantity: str, benchmark: str = "macro") -> dict:
    own = frame.loc[(frame["quantity"] == quantity) & (frame["benchmark"] == benchmark)]
    keys = [tuple(parse_setting(text).values()) for text in own["setting"]]
    return dict(
        zip(zip(own["method"], *zip(*keys, strict=True), strict=True), own["value"], strict=True)
    )


def test_shares_of_training_and_inference_stand_apart(records):
    frame = make_table("T6_visual_share", records, BOOT).frame
    assert values(frame, "accepted_length") == {
        ("chain", "inference", "1"): 2.0,
        ("chain", "inference", "0.5"): 1.0,
        ("chain", "inference", "0"): 1.25,
        ("chain", "training", "1"): 2.0,
        ("chain", "training", "0"): 2.5,
    }
    assert values(frame, "paired_difference") == {
        ("chain", "inference", "0.5"): -1.0,
        ("chain", "inference", "0"): -0.75,
        ("chain", "training", "0"): 0.5,
    }
    paper = frame.loc[frame["status"] == "published only"]
    assert len(paper) == len(published.share_rows("T6_visual_share")) == 14
    assert {parse_setting(t)["share"] for t in paper["setting"]} == {"1", "0.5", "0.125", "0"}


LENGTHS = {  # of DECODES, in T7
    ("tree60", "tree nodes", "60"): 2.5,
    ("tree60", "tree nodes", "16"): 2.0,
    ("chain", "tree nodes", "chain"): 2.0,
    ("chain", "reveal rounds", "1"): 2.0,
    ("chain", "reveal rounds", "2"): 2.5,
    ("chain", "num_hidden_layers", "profile"): 2.0,
    ("tree60", "num_hidden_layers", "profile"): 2.5,
    ("chain", "num_hidden_layers", "1"): 1.0,
    ("tree60", "num_hidden_layers", "1"): 1.25,
}


def test_one_choice_is_changed_at_a_time(records):
    frame = make_table("T7_design_choices", records, BOOT).frame
    assert values(frame, "accepted_length") == LENGTHS
    assert values(frame, "decode_speedup")["tree60", "tree nodes", "16"] == 2.5
    assert values(frame, "paired_difference") == {
        ("tree60", "tree nodes", "16"): -0.5,
        ("chain", "reveal rounds", "2"): 0.5,
        ("chain", "num_hidden_layers", "1"): -1.0,
        ("tree60", "num_hidden_layers", "1"): -1.25,
    }
    assert values(frame, "draft_ms")["chain", "reveal rounds", "1"] == 2.0
    trained = frame.loc[frame["quantity"] == "train_s"]
    assert set(trained["value"]) == {7.0} and set(trained["n"]) == {1}


def test_every_section_has_the_profiles_own_first(records):
    table = make_table("T7_design_choices", records, BOOT)
    firsts = {section.title: section.body[0][0] for section in table.sections}
    assert firsts["nodes of the tree"] == "60"
    assert firsts["layers of the drafter, trained anew"] == "profile"
    assert firsts["drafter forwards for a block"] == "1"


def test_what_is_not_listed_follows_under_its_own_name():
    decodes = DECODES | {
        ("chain", "unbanned", ""): (10, 0.100),
        ("chain", "rounds=2,block=8", ""): (2, 0.040),
        ("tree60", "rounds=2", ""): (2, 0.050),
        ("tree60", "context=0.5", ""): (5, 0.050),
        ("chain", "", "training.lambda_flow=0.5"): (4, 0.040),
        ("tree60", "", "drafter.intermediate_size=96"): (2, 0.040),
    }
    table = make_table("T7_design_choices", with_study(study_of(decodes=decodes)), BOOT)
    lengths = values(table.frame, "accepted_length")
    own = {key: value for key, value in lengths.items() if key not in LENGTHS}
    assert {key: lengths[key] for key in LENGTHS} == LENGTHS
    assert own == {
        ("tree60", "reveal rounds", "1"): 2.5,
        ("tree60", "reveal rounds", "2"): 5.0,
        ("tree60", "drafter.intermediate_size", "profile"): 2.5,
        ("tree60", "drafter.intermediate_size", "96"): 5.0,
        ("chain", "reveal rounds + slots of a block", "1 + 16"): 2.0,
        ("chain", "reveal rounds + slots of a block", "2 + 8"): 5.0,
        ("chain", "training.lambda_flow", "profile"): 2.0,
        ("chain", "training.lambda_flow", "0.5"): 2.5,
        ("chain", "unbanned", "no"): 2.0,
        ("chain", "unbanned", "yes"): 1.0,
        ("tree60", "visual share read", "profile"): 2.5,
        ("tree60", "visual share read", "0.5"): 2.0,
    }
    assert [section.title for section in table.sections][:-2] == [
        "nodes of the tree",
        "drafter forwards for a block",
        "layers of the drafter, trained anew",
        "drafter.intermediate_size, drafter trained anew",
        "reveal rounds + slots of a block",
        "training.lambda_flow, drafter trained anew",
        "unbanned",
        "visual share read",
    ]


def test_the_profiles_own_values_are_those_of_the_records():
    """A profile of a tree of 30 nodes, two drafter forwards and a drafter of a block of 8."""
    decodes = {
        ("chain", "rounds=2,block=4", ""): (10, 0.100),
        ("chain", "rounds=2", ""): (5, 0.050),
        ("chain", "", ""): (4, 0.040),
        ("tree60", "nodes=16,rounds=2", ""): (5, 0.040),
        ("tree60", "rounds=2", ""): (2, 0.050),
        ("tree60", "nodes=30,rounds=2", ""): (4, 0.050),
        ("tree60", "nodes=30,spine_first,rounds=2", ""): (2, 0.050),
        ("chain", "rounds=2", "training.gamma=4"): (10, 0.050),
        ("tree60", "nodes=30,rounds=2", "training.gamma=4"): (8, 0.060),
    }
    frame = make_table(
        "T7_design_choices", with_study(study_of(decodes=decodes, slots=7)), BOOT
    ).frame
    assert values(frame, "accepted_length") == {
        ("tree60", "tree nodes", "30"): 2.5,
        ("chain", "tree nodes", "chain"): 2.0,
        ("tree60", "tree nodes", "16"): 2.0,
        ("tree60", "tree nodes", "60"): 5.0,
        ("tree60", "spine first", "no"): 2.5,
        ("tree60", "spine first", "yes"): 5.0,
        ("chain", "reveal rounds", "2"): 2.0,
        ("chain", "reveal rounds", "1"): 2.5,
        ("chain", "slots of a block", "8"): 2.0,
        ("chain", "slots of a block", "4"): 1.0,
        ("chain", "gamma", "profile"): 2.0,
        ("tree60", "gamma", "profile"): 2.5,
        ("chain", "gamma", "4"): 1.0,
        ("tree60", "gamma", "4"): 1.25,
    }
    assert values(frame, "paired_difference")["tree60", "tree nodes", "60"] == 2.5
    slots = {parse_setting(text)["slot"] for text in frame["setting"] if "slot=" in text}
    assert slots == {str(slot) for slot in range(1, 8)}


def test_without_drafters_trained_anew_the_own_setting_is_the_least_changed_one():
    decodes = {
        ("tree60", "nodes=16", ""): (5, 0.040),
        ("tree60", "nodes=30", ""): (4, 0.050),
        ("tree60", "nodes=30,spine_first", ""): (2, 0.050),
        ("chain", "rounds=4", ""): (2, 0.080),
        ("chain", "", ""): (5, 0.050),
    }
    frame = make_table("T7_design_choices", with_study(study_of(decodes=decodes)), BOOT).frame
    differences = values(frame, "paired_difference")
    assert differences == {
        ("tree60", "tree nodes", "16"): -0.5,
        ("tree60", "spine first", "yes"): 2.5,
        ("chain", "reveal rounds", "4"): 3.0,
    }


def test_a_share_is_a_number_however_it_was_given():
    decodes = {
        ("chain", "", ""): (5, 0.050),
        ("chain", "context=all", ""): (4, 0.040),
        ("chain", "context=0.50", ""): (2, 0.040),
        ("chain", "context=0.0", ""): (10, 0.100),
        ("chain", "context=text_only", ""): (5, 0.050),
        ("chain", "", "drafter.context=text_only"): (10, 0.100),
        ("chain", "", "drafter.context=0.25"): (2, 0.040),
    }
    table = make_table("T6_visual_share", with_study(study_of(decodes=decodes)), BOOT)
    own = table.frame.loc[
        (table.frame["quantity"] == "accepted_length") & (table.frame["benchmark"] == "macro")
    ]
    told = dict(zip(own["setting"], own["value"], strict=True))
    # both decodes without the video are one choice: 20 tokens in 15 calls
    assert told == {
        "phase=inference": 2.0,  # reading all of them is a change: the own share is another
        "phase=inference;share=1": 2.5,
        "phase=inference;share=0.5": 5.0,
        "phase=inference;share=0": pytest.approx(4 / 3, rel=1e-5),
        "phase=training": 2.0,
        "phase=training;share=0": 1.0,
        "phase=training;share=0.25": 5.0,
    }
    read = [row[2] for row in table.sections[0].body]
    assert read == ["the profile's own", "100 %", "50 %", "0 %", "the profile's own", "0 %", "25 %"]


def test_a_paired_difference_counts_the_clips_that_both_decoded():
    def fails(row):
        alone = (row["clip_id"], row["setting"], row["drafter_sha256"])
        return row["method"] == "chain" and alone == ("LVB-1", "", "d:")

    records = with_study(study_of(fails=fails))
    for stem, setting in (
        ("T6_visual_share", "phase=inference;share=0.5"),
        ("T7_design_choices", "choice=reveal rounds;value=2"),
    ):
        frame = make_table(stem, records, BOOT).frame
        own = frame.loc[(frame["setting"] == setting) & (frame["benchmark"] == "macro")]
        n = own.set_index("quantity")["n"]
        assert (n["accepted_length"], n["paired_difference"]) == (10, 9)


def test_a_suite_that_gave_nothing_leaves_no_value_over_all():
    def fails(row):
        return row["benchmark"] == "MLVU" and row["setting"] in ("rounds=2", "context=0.5")

    records = with_study(study_of(fails=fails))
    t7 = make_table("T7_design_choices", records, BOOT).frame
    for quantity in ("accepted_length", "paired_difference", "decode_speedup", "draft_ms"):
        rows = t7.loc[t7["setting"] == "choice=reveal rounds;value=2"].set_index("quantity")
        assert (rows.loc[quantity, "benchmark"], rows.loc[quantity, "status"]) == ("macro", MISSING)
    assert values(t7, "accepted_length")["tree60", "tree nodes", "16"] == 2.0
    differences = values(make_table("T6_visual_share", records, BOOT).frame, "paired_difference")
    assert math.isnan(differences["chain", "inference", "0.5"])
    assert differences["chain", "inference", "0"] == -0.75


def test_the_quality_of_the_own_trees_by_hand(records):
    """A clip's cycles commit 3, 3, 2 and 2 tokens, which are first choices but for one sibling.

    Their trees have a node of probability 1/2 and two children of it, of 1/2 each.
    """
    frame = make_table("T7_design_choices", records, BOOT).frame
    own = frame.loc[frame["setting"].str.startswith("quality;")]
    assert set(own["benchmark"]) == {"pooled"} and set(own["method"]) == {"tree60"}
    own = own.assign(place=own["setting"].str.removeprefix("quality;"))
    rows = own.set_index(["quantity", "place"])[["value", "n"]]
    for quantity, place, value, n in (
        ("recall", "slot=1;k=1", 1.0, 40),
        ("recall", "slot=2;k=1", 0.75, 40),
        ("recall", "slot=2;k=2", 0.75, 40),
        ("recall", "slot=2;k=4", 1.0, 40),
        ("recall", "slot=3;k=1", 1.0, 20),
        ("first_choice_right", "after=first choice", 0.8, 50),
        ("first_choice_right", "after=sibling", 1.0, 10),
        ("predicted_length", "over=kept cycles", 2.0, 40),
        ("accepted_length_uncensored", "over=kept cycles", 2.5, 40),
    ):
        assert tuple(rows.loc[(quantity, place)]) == (value, n), (quantity, place)
    assert math.isnan(rows.loc[("recall", "slot=4;k=1"), "value"])
    assert {parse_setting(text)["slot"] for text in own["setting"] if "slot" in text} == {
        str(slot) for slot in range(1, 16)
    }


@pytest.mark.parametrize(
    ("suites", "of", "words"),
    [
        (("VDC",), "VDC", "VDC alone"),
        (("VDC", "LVB"), "pooled", "the clips of VDC, LVB pooled, no mean over suites"),
    ],
)
def test_fewer_suites_by_choice_are_named(suites, of, words):
    few = with_study(study_of(suites))
    table = make_table("T7_design_choices", few, BOOT)
    assert values(table.frame, "accepted_length", of)["chain", "reveal rounds", "2"] == 2.5
    assert f"(parentheses: clips), {words}. " in table.caption
    assert "Nothing of ours" not in table.caption
    shares = make_table("T6_visual_share", few, BOOT)
    assert values(shares.frame, "paired_difference", of)["chain", "inference", "0.5"] == -1.0
    assert f"Paired differences: {words}. " in shares.caption


def test_nothing_measured_keeps_its_places():
    empty = records_of(pd.DataFrame([generation_row("ar", "x")]))
    for stem in ("T6_visual_share", "T7_design_choices"):
        table = make_table(stem, empty, BOOT)
        ours = table.frame.loc[table.frame["status"] != "published only"]
        assert set(ours["status"]) == {MISSING} and len(ours) > 1
        assert table.caption.startswith("Nothing of ours here: ")
        assert "vflash run --all makes them." in table.caption
        assert "mean over suites" in table.caption
    (section,) = table.sections  # T7: what there would be, on one look
    assert [row[0] for row in section.body] == list(design._TITLES.values())
    assert {row[1] for row in section.body} == {"–"}


def test_a_choice_is_named_by_what_was_changed():
    for setting, variant, expected in (
        ("nodes=120", "", ("tree nodes", "120")),
        ("spine_first", "", ("spine first", "yes")),
        ("context=text_only", "", ("visual share read", "0")),
        ("context=all,rounds=2", "", ("reveal rounds + visual share read", "2 + 1")),
        ("block=16", "", ("", "")),  # as it was trained
        ("", "training.gamma=4", ("gamma", "4")),
        ("", "drafter.context=text_only", ("context", "0")),
        ("", "drafter.context=0.50", ("context", "0.5")),
        ("", "training.lambda_flow=2", ("training.lambda_flow", "2")),
        ("", "", ("", "")),
    ):
        own = design._options_of("", "16")
        assert design._choice_of(design._options_of(setting, "16"), own, variant) == expected


def test_what_is_tracked_of_the_study_gives_the_same_tables(records):
    study = records.study(DESIGN_STUDY)
    slim = {schema.name: frame for schema, frame in slim_study(DESIGN_STUDY, study).items()}
    assert slim["anchors"].empty
    detailed = slim["cycles"].loc[slim["cycles"]["draft_parents"].notna()]
    assert set(zip(detailed["method"], detailed["setting"], strict=True)) == {("tree60", "")}
    assert set(detailed["drafter_sha256"]) == {"d:"}
    tracked = with_study(records_from_frames(slim, study.source))
    for stem in ("T6_visual_share", "T7_design_choices"):
        pd.testing.assert_frame_equal(
            make_table(stem, tracked, BOOT).frame, make_table(stem, records, BOOT).frame
        )
