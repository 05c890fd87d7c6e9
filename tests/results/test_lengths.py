"""T5 and F6 from a study whose numbers are known by hand."""

from dataclasses import replace

import pandas as pd
import pytest

from tests.results.synthetic import DEVICE, cycle_row, generation_row, records_of
from vflash_analysis.records import blank_row, typed_frame
from vflash_analysis.results import lengths
from vflash_analysis.results.report import make_figure, make_table
from vflash_analysis.results.tidy import MISSING, TARGET_FAILS, parse_setting
from vflash_analysis.schemas import BENCHMARKS, GENERATIONS, MEASURES, ROW_KEY
from vflash_analysis.stats import Bootstrap

BOOT = Bootstrap(n_samples=50)
FRAMES = {2: 33, 9: 145, 100: 1601}  # frames -> visual tokens
# what a failed decode's row still holds
KEPT = (
    *ROW_KEY, "profile", "target", "target_revision", "benchmark", "sample_seed", "dtype",
    "attention", "device", "warmup", "frames_requested",
)  # fmt: skip
RIGHT = {2: (19, 10), 9: (19, 19), 100: (19, 16)}  # of 20 words each: static, dynamic


def study_of(stop_reason: str = "eos"):
    generations, cycles, measures = [], [], []
    for frames, tokens in FRAMES.items():
        run = f"r/frames={frames}"
        seen = {"run_id": run, "frames_requested": frames, "video_tokens": tokens}
        for benchmark in BENCHMARKS:
            for number in range(2):
                clip = f"{benchmark}-{number}"
                told = seen | {"new_tokens": 11, "decode_s": 0.1, "verify_calls": 10}
                told |= {"prefill_s": tokens / 1000, "vision_s": 0.0, "frame_read_s": 0.0}
                plain = generation_row("ar", clip, benchmark, stop_reason=stop_reason, **told)
                generations.append(plain)
                for setting, calls in (("", 5), ("context=text_only", 10)):
                    own = told | {"verify_calls": calls, "decode_s": calls / 100}
                    own |= {"setting": setting, "drafter_sha256": "d"}
                    row = generation_row("chain", clip, benchmark, **own)
                    generations.append(row)
                    for cycle in range(calls):
                        part = {"n_committed": 10 // calls, "n_accepted": 10 // calls - 1}
                        part |= {"censored": False, "draft_s": 0.004, "verify_s": 0.006}
                        part |= {"other_s": 0.0, "end_s": 0.01 * (cycle + 1)}
                        cycles.append(cycle_row(row, cycle) | part)
                shared = {"run_id": "r", "target": "t", "target_sha256": "t", "device": DEVICE}
                shared |= {"dtype": "float32", "clip_id": clip, "benchmark": benchmark}
                shared |= {"sample_seed": 1, "study": "lengths", "setting": f"frames={frames}"}
                for quantity, right in zip(
                    ("static_accuracy", "dynamic_accuracy"), RIGHT[frames], strict=True
                ):
                    counts = {"layer": -1, "quantity": quantity, "total": right, "count": 20}
                    measures.append(blank_row(MEASURES) | shared | counts)
    return records_of(
        pd.DataFrame(generations), pd.DataFrame(cycles), measures=pd.DataFrame(measures)
    )


def with_study(study):
    return replace(
        records_of(pd.DataFrame([generation_row("ar", "x")])), studies={"lengths": study}
    )


@pytest.fixture(scope="module")
def records():
    return with_study(study_of())


def ours(
    frame: pd.DataFrame, quantity: str, method: str = "chain", context: str = ""
) -> pd.DataFrame:
    keys = [parse_setting(text) for text in frame["setting"]]
    mine = frame.assign(frames=[key.get("frames", "") for key in keys])
    chosen = [key.get("context", "") == context for key in keys]
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


def test_a_length_at_which_nothing_could_be_decoded_is_named_and_has_no_number():
    study = study_of()
    rows = study.generations
    longest = rows["frames_requested"] == 100
    failed = [
        blank_row(GENERATIONS)
        | {name: row[name] for name in KEPT}
        | {"status": "failed", "reason": "out_of_memory: CUDA out of memory."}
        for row in rows.loc[longest].to_dict("records")
    ]
    rows = pd.concat([rows.loc[~longest], typed_frame(failed, GENERATIONS)], ignore_index=True)
    records = with_study(replace(study, generations=rows))
    table = make_table("T5_visual_length", records, BOOT)
    whole = make_table("T5_visual_length", with_study(study), BOOT).frame
    told = "No clip could be decoded at 100 frames (out_of_memory: CUDA out of memory). Ours:"
    assert told in table.caption
    for quantity in ("accepted_length", "decode_speedup"):
        found, before = (ours(frame, quantity) for frame in (table.frame, whole))
        shorter = [found.loc[["2", "9"], "value"], before.loc[["2", "9"], "value"]]
        assert shorter[0].equals(shorter[1])
    lost = ours(table.frame, "accepted_length").loc["100"]
    assert lost["status"] == MISSING and pd.isna(lost["value"])
    figure, _ = make_figure("F6_visual_length", records, BOOT)
    drawn = {x for line in figure.axes[0].lines for x in line.get_xdata()}
    assert {33, 145} <= drawn and 1601 not in drawn


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
    assert list(lengths.at_lengths(empty.study("lengths"))) == []
