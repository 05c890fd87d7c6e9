"""T6 and T7 from a study whose numbers are known by hand."""

from dataclasses import replace

import pandas as pd
import pytest

from tests.results.synthetic import cycle_row, generation_row, records_of, training_rows
from vflash_analysis.records import typed_frame
from vflash_analysis.results import design, published
from vflash_analysis.results.report import make_table
from vflash_analysis.results.tidy import MISSING, parse_setting
from vflash_analysis.schemas import BENCHMARKS, TRAINING
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


def study_of(benchmarks=BENCHMARKS, decodes=DECODES):
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
                generations.append(row)
                for cycle in range(calls):
                    committed = 10 // calls + (cycle < 10 % calls)
                    part = {"n_committed": committed, "n_accepted": committed - 1}
                    part |= {"censored": False, "draft_s": 0.002, "verify_s": 0.003}
                    part |= {"other_s": 0.0, "end_s": 0.005 * (cycle + 1)}
                    part |= {"target_rank": [0] * committed, "draft_parents": [-1]}
                    cycles.append(cycle_row(row, cycle) | part | {"draft_logprobs": [0.0]})
                log = training_rows(("self_reveal",), (0,), (20,), (100,)).tail(1)
                log = log.assign(drafter_sha256=f"d:{variant}", variant=variant, seconds=7.0)
                training[variant] = log
    return records_of(
        pd.DataFrame(generations),
        pd.DataFrame(cycles),
        training=typed_frame(pd.concat(training.values()), TRAINING),
    )


@pytest.fixture(scope="module")
def records():
    return replace(
        records_of(pd.DataFrame([generation_row("ar", "x")])), studies={"design": study_of()}
    )


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


def test_one_choice_is_changed_at_a_time(records):
    frame = make_table("T7_design_choices", records, BOOT).frame
    lengths = values(frame, "accepted_length")
    assert lengths == {
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


def test_one_suite_alone_is_pooled_and_nothing_measured_keeps_its_places():
    few = replace(
        records_of(pd.DataFrame([generation_row("ar", "x")])),
        studies={"design": study_of(("VDC",))},
    )
    frame = make_table("T7_design_choices", few, BOOT).frame
    assert values(frame, "accepted_length", "VDC")["chain", "reveal rounds", "2"] == 2.5
    empty = records_of(pd.DataFrame([generation_row("ar", "x")]))
    for stem in ("T6_visual_share", "T7_design_choices"):
        table = make_table(stem, empty, BOOT)
        ours = table.frame.loc[table.frame["status"] != "published only"]
        assert set(ours["status"]) == {MISSING} and len(ours) > 1
        assert table.caption.startswith("Nothing of ours here: ")
        assert "vflash run --all makes them." in table.caption
    (section,) = table.sections  # T7: what there would be, on one look
    assert [row[0] for row in section.body] == list(design._TITLES.values())
    assert {row[1] for row in section.body} == {"–"}
    assert "Nothing of ours" not in make_table("T7_design_choices", few, BOOT).caption


def test_a_choice_is_named_by_what_was_changed():
    for given, expected in {
        ("tree60", "nodes=120", ""): ("tree nodes", "120"),
        ("tree60", "spine_first", ""): ("spine first", "yes"),
        ("chain", "context=text_only", ""): ("visual share read", "0"),
        ("chain", "", "training.gamma=4"): ("gamma", "4"),
        ("chain", "", "drafter.context=text_only"): ("context", "0"),
        ("chain", "", ""): ("", ""),
    }.items():
        assert design._choice_of(*given) == expected
