"""F7 and F8: sums over clips by hand, what is drawn, and panels without data."""

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest

from tests.results.synthetic import DEVICE, measure_rows, records_of
from vflash_analysis.errors import InputError
from vflash_analysis.records import typed_frame
from vflash_analysis.results.layer_figures import attention_figure, similarity_figure
from vflash_analysis.results.layers import (
    attention_frame,
    clip_counts,
    measured_clips,
    removal_table,
    similarity_frame,
)
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.schemas import MEASURES
from vflash_analysis.stats import Bootstrap

BOOT = Bootstrap(n_samples=40)
VISUAL_COLOUR = "#D55E00"


def records_from(rows):
    return records_from_frames({"measures": typed_frame(rows, MEASURES)}, "synthetic")


@pytest.fixture
def measured():
    return records_from(measure_rows())


def value(frame, quantity, setting):
    (row,) = frame[(frame["quantity"] == quantity) & (frame["setting"] == setting)].to_dict(
        "records"
    )
    return row


def test_a_value_is_the_ratio_of_sums_over_clips():
    """10 of 20 words and 1 of 5: 11/25, not the mean of 1/2 and 1/5."""
    rows = measure_rows(benchmarks=("VDC",), n_clips=2)
    kept = rows[(rows["quantity"] == "static_accuracy") & (rows["layer"] == 1)]
    kept = kept.assign(total=[10.0, 1.0], count=[20.0, 5.0])
    row = value(attention_frame(records_from(kept), BOOT), "static_accuracy", "1")
    assert row["value"] == 0.44 and row["n"] == 2
    assert row["low"] == pytest.approx(0.2) and row["high"] == pytest.approx(0.5)
    assert row["device"] == f"{DEVICE}, float32" and row["unit"] == "share"
    assert row["status"] == "measured"


def test_two_clips_of_one_video_are_one_unit():
    rows = measure_rows(benchmarks=("VDC",), n_clips=2)
    kept = rows[(rows["quantity"] == "agreement") & (rows["layer"] == 0)]
    row = value(
        attention_frame(records_from(kept.assign(video_sha256="v")), BOOT), "agreement", "0"
    )
    assert row["n"] == 2 and np.isnan(row["low"])


def test_frames_hold_every_layer_and_what_is_of_none(measured):
    frame = attention_frame(measured, BOOT)
    assert set(frame.loc[frame["quantity"] == "attention_visual", "setting"]) == {"0", "1", "2"}
    assert set(frame.loc[frame["quantity"] == "agreement", "setting"]) == {"0", "1", "2", "3"}
    assert value(frame, "visual_positions", "")["value"] == 0.8
    assert set(frame["item"]) == {"F7_visual_attention"}
    similar = similarity_frame(measured, BOOT)
    assert set(similar["unit"]) == {"cosine"} and len(similar) == 4 * 3
    assert not similar["quantity"].isin(frame["quantity"]).any()


def test_another_studys_measures_and_failed_clips_stay_out():
    rows = measure_rows(benchmarks=("VDC",), n_clips=2)
    other = rows.assign(study="lengths", total=0.0)
    failed = rows.iloc[:1].assign(quantity="clip", clip_id="bad", total=None, count=None,
                                  reason="damaged")  # fmt: skip
    everything = records_from(pd.concat([rows, other, failed]))
    pd.testing.assert_frame_equal(
        attention_frame(everything, BOOT), attention_frame(records_from(rows), BOOT)
    )


def test_targets_are_never_pooled_and_devices_stay_apart():
    rows = measure_rows(benchmarks=("VDC",), n_clips=2)
    with pytest.raises(InputError, match="'target_sha256' has 2 values"):
        attention_frame(records_from(pd.concat([rows, rows.assign(target_sha256="b" * 64)])), BOOT)
    two = pd.concat([rows, rows.assign(device="H100")])
    frame = attention_frame(records_from(two), BOOT)
    assert set(frame["device"]) == {f"{DEVICE}, float32", "H100, float32"}
    figure, _ = attention_figure(frame)
    assert len(figure.axes) == 6


def test_one_clip_measured_by_two_runs_is_refused():
    rows = measure_rows(benchmarks=("VDC",), n_clips=1)
    with pytest.raises(InputError, match=r"measures of clip VDC-00 on .* are in several runs"):
        records_from(pd.concat([rows, rows.assign(run_id="r2")]))


def test_the_attention_figure_draws_its_frame(measured):
    frame = attention_frame(measured, BOOT)
    figure, drawn = attention_figure(frame)
    pd.testing.assert_frame_equal(drawn, frame)
    left, middle, right = figure.axes
    tone = matplotlib.colors.to_rgba(VISUAL_COLOUR)

    def lines_of(axis):
        return [line for line in axis.lines if len(line.get_xdata()) > 2]

    for axis, query in ((left, "attention"), (middle, "end_attention")):
        (visual,) = [
            line for line in lines_of(axis)
            if matplotlib.colors.to_rgba(line.get_color()) == tone and line.get_marker() == "s"
        ]  # fmt: skip
        wanted = [value(frame, f"{query}_visual", str(layer))["value"] for layer in range(3)]
        assert visual.get_ydata().tolist() == wanted
    assert len(lines_of(left)) == 4 and len(lines_of(middle)) == 3  # the head with most
    for axis, even in ((left, 0.8), (middle, 0.5)):
        assert [line.get_ydata()[0] for line in axis.lines if len(line.get_xdata()) == 2] == [even]
    dashed = sorted(line.get_ydata()[0] for line in right.lines if len(line.get_xdata()) == 2)
    plain = [value(frame, f"{kind}_accuracy", "")["value"] for kind in ("static", "dynamic")]
    assert dashed == sorted(plain)
    assert sorted(len(line.get_xdata()) for line in lines_of(right)) == [4, 4, 4]
    assert "n = 10 clips" in figure.texts[-1].get_text().replace("\n", " ")
    assert DEVICE in figure.texts[-1].get_text().replace("\n", " ")
    legend = figure.legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    told = {
        name: line.get_color() for name, line in zip(names, legend.get_lines(), strict=True)
        if name.endswith(", nothing removed")
    }  # fmt: skip
    drawn = [line.get_color() for line in right.lines if len(line.get_xdata()) == 2]
    assert sorted(told.values()) == sorted(drawn) and len(told) == 2
    assert "on the video, the head with most (left only)" in names


def test_the_similarity_figure_draws_its_frame(measured):
    frame = similarity_frame(measured, BOOT)
    figure, drawn = similarity_figure(frame)
    pd.testing.assert_frame_equal(drawn, frame)
    for axis, between in zip(figure.axes, ("step", "input"), strict=True):
        drawn_lines = {line.get_marker(): line.get_ydata().tolist() for line in axis.lines}
        for marker, kind in (("s", "visual"), ("D", "text")):
            wanted = [
                value(frame, f"{between}_similarity_{kind}", str(layer))["value"]
                for layer in range(3)
            ]
            assert drawn_lines[marker] == wanted


def test_the_template_and_all_other_positions_do_not_look_alike(measured):
    """F7's third kind is the template alone, F8's second all that is not visual."""
    left = attention_figure(attention_frame(measured, BOOT))[0].axes[0]
    (template,) = [
        line for line in left.lines
        if line.get_marker() == "o" and set(line.get_ydata()) == {0.1}
    ]  # fmt: skip
    right = similarity_figure(similarity_frame(measured, BOOT))[0].axes[0]
    colours = {line.get_color() for line in right.lines}
    assert len(colours) == 2 and template.get_color() not in colours


def test_a_suite_of_real_clips_has_agreement_and_says_what_it_lacks():
    rows = measure_rows()
    frame = attention_frame(records_from(rows[~rows["quantity"].str.contains("accuracy")]), BOOT)
    figure, _ = attention_figure(frame)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [word for word in words if "no data" in word] == [
        "static attributes told right: no data", "motion and events told right: no data",
    ]  # fmt: skip
    assert not any(text.get_text() == "no data" for text in figure.axes[2].texts)


@pytest.mark.parametrize(
    ("make", "draw", "panels"),
    [(attention_frame, attention_figure, 3), (similarity_frame, similarity_figure, 2)],
)
def test_without_measures_every_panel_says_so(make, draw, panels):
    empty = records_from_frames({}, "synthetic")
    figure, drawn = draw(make(empty, BOOT))
    assert drawn.empty
    assert [axis.texts[0].get_text() for axis in figure.axes] == ["no data"] * panels


def test_the_page_tells_removal_in_numbers(measured):
    told = removal_table(measured, BOOT)
    assert list(told.index) == ["plain decoding", "0", "1", "2", "3"]
    assert told.loc["plain decoding", "agreement with the target's own text"] == ""
    row = value(attention_frame(measured, BOOT), "agreement", "1")
    cell = f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    assert told.loc["1", "agreement with the target's own text"] == cell
    assert removal_table(records_from_frames({}, "synthetic"), BOOT).empty


def test_clips_are_counted_by_suite_with_what_went_wrong():
    rows = measure_rows(benchmarks=("VDC", "LVB"), n_clips=2)
    lost = (rows["clip_id"] == "VDC-01") & (rows["quantity"] == "agreement") & (rows["layer"] == 0)
    bad = rows.loc[lost].assign(quantity="clip", layer=-1, total=None, count=None, reason="damaged")
    rows = typed_frame(pd.concat([rows[rows["clip_id"] != "VDC-01"], bad]), MEASURES)
    assert clip_counts(rows) == (4, 3)
    assert measured_clips(rows).values.tolist() == [["LVB", 2, 2, ""], ["VDC", 2, 1, "damaged"]]
    assert list(measured_clips(rows.iloc[:0]).columns) == ["suite", "clips", "measured", "reasons"]


def test_records_of_a_run_hold_their_measures(records):
    assert set(records.measures["study"]) == {"layers"}
    assert records_of(records.generations.head(1)).measures.empty
