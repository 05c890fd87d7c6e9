"""T5 and F6 from a study whose numbers are known by hand."""

from dataclasses import replace

import pandas as pd
import pytest

from tests.results.synthetic import DEVICE, cycle_row, failed_row, generation_row, records_of
from vflash_analysis.metrics import TARGET_LIMITS
from vflash_analysis.records import blank_row
from vflash_analysis.results import lengths
from vflash_analysis.results.report import make_figure, make_table
from vflash_analysis.results.tidy import MISSING, TARGET_FAILS, parse_setting
from vflash_analysis.schemas import BENCHMARKS, COMPILED, FAILED_CLIP, LENGTHS_STUDY, MEASURES
from vflash_analysis.stats import Bootstrap

BOOT = Bootstrap(n_samples=50)
FRAMES = {2: 33, 9: 145, 100: 1601}  # frames -> visual tokens
RIGHT = {2: (19, 10), 9: (19, 19), 100: (19, 16)}  # of 20 words each: static, dynamic


def measures_of(clip, benchmark, frames, **changes):
    shared = {"run_id": "r", "target": "t", "target_sha256": "t", "device": DEVICE}
    shared |= {"dtype": "float32", "clip_id": clip, "benchmark": benchmark}
    shared |= {"sample_seed": 1, "study": LENGTHS_STUDY, "setting": f"frames={frames}"}
    quantities = ("static_accuracy", "dynamic_accuracy")
    return [
        blank_row(MEASURES)
        | shared
        | {"layer": -1, "quantity": quantity, "total": right, "count": 20}
        | changes
        for quantity, right in zip(quantities, RIGHT[frames], strict=True)
    ]


# method and setting -> verify calls of a text of 10 tokens after the first
DECODES = {("chain", ""): 5, ("chain", "context=text_only"): 10}


def study_of(
    stop_reason="eos",
    benchmarks=BENCHMARKS,
    decodes=DECODES,
    fails=lambda row: False,
    device=DEVICE,
    further=(),
):
    """Two clips a suite, at each of FRAMES; `fails` tells the decodes that do.

    `further` measures stand beside those of the decoded clips.
    """
    generations, cycles, measures = [], [], list(further)
    for frames, tokens in FRAMES.items():
        run = f"r/frames={frames}"
        seen = {"run_id": run, "frames_requested": frames, "video_tokens": tokens}
        for benchmark in benchmarks:
            for number in range(2):
                clip = f"{benchmark}-{number}"
                told = seen | {"new_tokens": 11, "decode_s": 0.1, "verify_calls": 10}
                told |= {"prefill_s": tokens / 1000, "vision_s": 0.0, "frame_read_s": 0.0}
                told |= {"device": device}
                plain = generation_row("ar", clip, benchmark, stop_reason=stop_reason, **told)
                generations.append(failed_row(plain) if fails(plain) else plain)
                for (method, setting), calls in decodes.items():
                    own = told | {"verify_calls": calls, "decode_s": calls / 100}
                    own |= {"setting": setting, "drafter_sha256": "" if method == "ar" else "d"}
                    row = generation_row(method, clip, benchmark, **own)
                    generations.append(failed_row(row) if fails(row) else row)
                    for cycle in range(0 if method == "ar" else calls):
                        part = {"n_committed": 10 // calls, "n_accepted": 10 // calls - 1}
                        part |= {"censored": False, "draft_s": 0.004, "verify_s": 0.006}
                        part |= {"other_s": 0.0, "end_s": 0.01 * (cycle + 1)}
                        cycles.append(cycle_row(row, cycle) | part)
                if not fails(plain):
                    measures += measures_of(clip, benchmark, frames)
    return records_of(
        pd.DataFrame(generations),
        pd.DataFrame(cycles),
        measures=pd.DataFrame(measures, columns=list(MEASURES.columns)),
    )


def with_study(study):
    return replace(
        records_of(pd.DataFrame([generation_row("ar", "x")])), studies={LENGTHS_STUDY: study}
    )


@pytest.fixture(scope="module")
def records():
    return with_study(study_of())


def ours(
    frame: pd.DataFrame, quantity: str, method: str = "chain", context: str = ""
) -> pd.DataFrame:
    keys = [parse_setting(text) for text in frame["setting"]]
    mine = frame.assign(frames=[key.get("frames", "") for key in keys])
    own = f"context={context}" if context else ""
    chosen = [lengths.own_setting(text) == own for text in frame["setting"]]
    mine = mine.loc[chosen]
    mine = mine.loc[
        (mine["quantity"] == quantity) & (mine["method"] == method) & (mine["frames"] != "")
    ]
    return mine.set_index("frames")


def test_each_length_has_its_own_numbers(records):
    frame = make_table("T5_visual_length", records, BOOT).frame
    assert ours(frame, "accepted_length")["value"].to_dict() == {"2": 2.0, "9": 2.0, "100": 2.0}
    assert set(ours(frame, "accepted_length", context="text_only")["value"]) == {1.0}
    assert set(ours(frame, "decode_speedup")["value"]) == {2.0}
    # (0.145 + 0.1) / (0.145 + 0.05), over the same tokens
    end_to_end = ours(frame, "end_to_end_speedup")["value"]
    assert end_to_end["9"] == pytest.approx(0.245 / 0.195, rel=1e-5)
    assert end_to_end["100"] == pytest.approx(1.701 / 1.651, rel=1e-5)
    assert ours(frame, "prefill_s", "ar")["value"]["100"] == pytest.approx(1.601)
    assert ours(frame, "wall_s")["value"]["2"] == pytest.approx(0.083)
    assert ours(frame, "target_calls")["value"]["9"] == 5
    assert (
        parse_setting(ours(frame, "accepted_length").loc["9", "setting"])["visual_tokens"] == "145"
    )
    assert set(ours(frame, "accepted_length")["n"]) == {10}


def test_a_length_at_which_the_target_fails_is_marked(records):
    frame = make_table("T5_visual_length", records, BOOT).frame
    standing = ours(frame, "accepted_length")["status"].to_dict()
    assert standing == {"2": TARGET_FAILS, "9": "measured", "100": "measured"}
    assert ours(frame, "dynamic_accuracy", "ar")["value"]["2"] == 0.5
    # texts that do not end by themselves fail it everywhere
    cut = make_table("T5_visual_length", with_study(study_of("length")), BOOT).frame
    assert set(ours(cut, "accepted_length")["status"]) == {TARGET_FAILS}


def test_real_clips_have_no_gate_but_the_texts_end(records):
    study = replace(study_of(), measures=study_of().measures.iloc[:0])
    frame = make_table("T5_visual_length", with_study(study), BOOT).frame
    assert set(ours(frame, "accepted_length")["status"]) == {"measured"}
    assert ours(frame, "static_accuracy", "ar").empty


def test_the_papers_lengths_stand_beside_and_marks_are_shown(records):
    table = make_table("T5_visual_length", records, BOOT)
    (grid,) = [s for s in table.sections if s.title.startswith("accepted length")]
    assert grid.header[3:] == (
        "33",
        "145",
        "500",
        "1,500",
        "1,601",
        "4,500",
        "15,000",
        "17,000",
        "25,000",
    )
    chain = next(row for row in grid.body if row[0] == "chain" and not row[1])
    assert chain[3].endswith("†") and not chain[4].endswith("†")
    sparrow = next(row for row in grid.body if row[1] == "Sparrow")
    assert sparrow[5].startswith("4.51")


def test_the_figure_marks_every_length_and_hollow_ones_where_the_target_fails(records):
    figure, frame = make_figure("F6_visual_length", records, BOOT)
    length = figure.axes[0]
    marks = [line for line in length.lines if line.get_marker() in ("o", "s", "^")]
    solid = [x for line in marks if line.get_markerfacecolor() != "white" for x in line.get_xdata()]
    hollow = [
        x for line in marks if line.get_markerfacecolor() == "white" for x in line.get_xdata()
    ]
    assert sorted(solid) == [145, 145, 1601, 1601] and sorted(hollow) == [33, 33]
    assert frame.equals(make_table("T5_visual_length", records, BOOT).frame)
    assert len(figure.axes) == 4


def test_a_gates_mark_is_hollow_where_that_gate_fails_and_its_limit_is_drawn(records):
    figure, _ = make_figure("F6_visual_length", records, BOOT)
    gates = figure.axes[3]
    level = [line.get_ydata()[0] for line in gates.lines if list(line.get_xdata()) == [0, 1]]
    assert sorted(level) == sorted(TARGET_LIMITS.values())
    hollow = {
        (line.get_marker(), x) for line in gates.lines if line.get_markerfacecolor() == "white"
        for x in line.get_xdata()
    }  # fmt: skip
    assert hollow == {("s", 33.0)}  # motion at the fewest frames; the other gates pass there


def test_nothing_measured_keeps_a_labelled_place():
    empty = records_of(pd.DataFrame([generation_row("ar", "x")]))
    table = make_table("T5_visual_length", empty, BOOT)
    mine = table.frame.loc[table.frame["status"] == MISSING]
    assert set(mine["method"]) == {"chain", "tree60"}
    assert table.caption.startswith("Nothing of ours here: ")
    figure, _ = make_figure("F6_visual_length", empty, BOOT)
    assert [text.get_text() for axis in figure.axes for text in axis.texts].count("no data") == 2
    told = " ".join(figure.texts[-1].get_text().split())
    assert told.startswith("Nothing of ours was decoded at these lengths: vflash run --all")
    assert list(lengths.at_lengths(empty.study(LENGTHS_STUDY))) == []


def marked(figure) -> set[str]:
    return {text.get_text() for text in figure.legends[0].get_texts()}


def caption_of(figure) -> str:
    return " ".join(figure.texts[-1].get_text().split())


def test_every_setting_has_its_own_row_and_line():
    decodes = DECODES | {
        ("chain", "context=0.5"): 2,
        ("chain", "rounds=2,context=text_only"): 1,
        ("tree60", ""): 2,
        ("tree60", "nodes=16"): 5,
        ("ar", "verify16"): 10,
    }
    records = with_study(study_of(decodes=decodes))
    table = make_table("T5_visual_length", records, BOOT)
    grids = {section.title.partition(" ")[0]: section for section in table.sections}
    assert {row[:2]: row[4].partition(" ")[0] for row in grids["accepted"].body[:6]} == {
        ("chain", ""): "2.00",
        ("chain", "drafter without video"): "1.00",
        ("chain", "context 0.5"): "5.00",
        ("chain", "2 drafter forwards, drafter without video"): "10.00",
        ("Tree-60", ""): "5.00",
        ("Tree-60", "nodes 16"): "2.00",
    }
    times = [row[:2] for row in grids["AR"].body]
    assert times == [("Autoregressive", ""), ("Autoregressive", "verify16")]
    figure, _ = make_figure("F6_visual_length", records, BOOT, table)
    length, _, seconds, _ = figure.axes
    lines = [list(line.get_xdata()) for line in length.lines]
    assert lines and all(len(set(x)) == len(x) for x in lines)
    assert len(seconds.patches) == len(FRAMES) * 2 * 2  # AR and Tree-60, before and in decoding
    further = {"chain, context 0.5", "Tree-60, nodes 16"}
    further.add("chain, 2 drafter forwards, drafter without video")
    assert marked(figure) >= further | {"chain", "Tree-60", "chain, drafter without video"}


def test_a_suite_that_fails_at_a_length_leaves_no_value_there():
    def fails(row):
        return row["benchmark"] == "MLVU" and row["frames_requested"] in (2, 100)

    frame = make_table("T5_visual_length", with_study(study_of(fails=fails)), BOOT).frame
    for quantity, method in (("accepted_length", "chain"), ("static_accuracy", "ar")):
        rows = ours(frame, quantity, method)
        # also where the target fails
        assert rows["status"].to_dict() == {"2": MISSING, "9": "measured", "100": MISSING}
        assert set(rows["benchmark"]) == {"macro" if method == "chain" else "pooled"}
    assert ours(frame, "accepted_length")["value"]["9"] == 2.0


def test_a_length_at_which_nothing_was_decoded_is_named():
    study = study_of(fails=lambda row: row["frames_requested"] == 9)
    table = make_table("T5_visual_length", with_study(study), BOOT)
    lost = ours(table.frame, "accepted_length").loc["9"]
    assert (lost["status"], lost["setting"]) == (MISSING, "frames=9")
    assert ours(table.frame, "accepted_length")["value"]["100"] == 2.0
    told = "No clip could be decoded at these numbers of frames: 9."
    assert told in table.caption and "145" not in table.sections[0].header
    figure, _ = make_figure("F6_visual_length", with_study(study), BOOT, table)
    assert told in caption_of(figure)
    whole = make_table("T5_visual_length", with_study(study_of()), BOOT)
    assert "No clip" not in whole.caption


@pytest.mark.parametrize("failed", [True, False])
def test_without_plain_decoding_there_is_a_length_but_no_speed_up(failed):
    study = study_of(fails=lambda row: failed and row["method"] == "ar")
    if not failed:
        rows = study.generations
        study = replace(study, generations=rows.loc[rows["method"] != "ar"])
    frame = make_table("T5_visual_length", with_study(study), BOOT).frame
    assert set(ours(frame, "accepted_length")["value"]) == {2.0}
    assert ours(frame, "accepted_length")["setting"]["9"] == "frames=9;visual_tokens=145"
    assert set(ours(frame, "decode_speedup")["status"]) == {MISSING}
    assert set(ours(frame, "ended_share", "ar")["status"]) == {MISSING}


def test_a_gate_is_of_the_decodes_own_device_and_of_clips_that_did_not_fail():
    nothing = {"quantity": FAILED_CLIP, "total": None, "count": None, "reason": "damaged"}
    further = measures_of("VDC-9", "VDC", 9, **nothing)[:1]
    for benchmark in BENCHMARKS:
        further += measures_of(f"{benchmark}-0", benchmark, 9, device="another", total=0)
    study = study_of(device=DEVICE + COMPILED, further=further)
    frame = make_table("T5_visual_length", with_study(study), BOOT).frame
    assert ours(frame, "static_accuracy", "ar")["value"]["9"] == 0.95
    standing = ours(frame, "accepted_length")["status"].to_dict()
    assert standing == {"2": TARGET_FAILS, "9": "measured", "100": "measured"}
    assert FAILED_CLIP not in set(frame["quantity"])


def test_a_gate_is_judged_by_the_value_that_is_shown():
    """Of all words 89 %, though the mean over suites is 94 %."""
    study = study_of()
    measures = study.measures
    chosen = (measures["benchmark"] == "VDC") & (measures["setting"] == "frames=9")
    chosen &= measures["quantity"] == "static_accuracy"
    assert chosen.sum() == 2
    told = measures.assign(
        total=measures["total"].mask(chosen, 890), count=measures["count"].mask(chosen, 1000)
    )
    frame = make_table("T5_visual_length", with_study(replace(study, measures=told)), BOOT).frame
    shown = ours(frame, "static_accuracy", "ar").loc["9"]
    assert shown["value"] == pytest.approx((2 * 890 + 8 * 19) / (2 * 1000 + 8 * 20))
    assert shown["status"] == ours(frame, "accepted_length")["status"]["9"] == TARGET_FAILS


def test_the_figure_counts_the_clips_of_each_length(records):
    figure, _ = make_figure("F6_visual_length", records, BOOT)
    assert "; n = 10 clips at every length; " in caption_of(figure)

    def fails(row):
        return row["clip_id"] == "VDC-1" and row["frames_requested"] == 100

    figure, _ = make_figure("F6_visual_length", with_study(study_of(fails=fails)), BOOT)
    counts = "; n = 10 at 33, 10 at 145, 9 at 1,601 visual tokens (clips); "
    assert counts in caption_of(figure)


@pytest.mark.parametrize(
    ("suites", "of", "words"),
    [
        (("VDC",), "VDC", "VDC alone"),
        (("VDC", "MLVU"), "pooled", "the clips of VDC, MLVU pooled, no mean over suites"),
        (BENCHMARKS, "macro", "mean over suites"),
    ],
)
def test_the_caption_says_over_which_suites(suites, of, words):
    table = make_table("T5_visual_length", with_study(study_of(benchmarks=suites)), BOOT)
    own = ours(table.frame, "accepted_length")
    assert set(own["benchmark"]) == {of} and set(own["value"]) == {2.0}
    told = (
        f"Ours: {words}, but what the target tells: all its clips' words or texts alike; n: clips."
    )
    assert told in table.caption
