"""Figures, tested on what they drew: slots, colours, order, labels, bytes."""

import hashlib
import warnings

import matplotlib
import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import seaborn as sns
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from tests.results.synthetic import training_rows
from vflash_analysis.errors import InputError
from vflash_analysis.records import typed_frame
from vflash_analysis.results.curves import acceptance_frame, training_frame
from vflash_analysis.results.figures import acceptance_figure, speedup_figure
from vflash_analysis.results.objectives import objectives_table
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.results.style import (
    STYLE,
    TEXT_WIDTH,
    colour,
    error_bar,
    finish,
    new_figure,
    save_figure,
    spread,
    styled,
)
from vflash_analysis.results.tables import speedup_table
from vflash_analysis.results.tidy import ARM_ORDER, METHOD_ORDER, NAMES, read_tidy_csv
from vflash_analysis.results.training_figures import objectives_figure, training_figure
from vflash_analysis.schemas import TRAINING

GROUPS = ["VDC", "Video-MME", "MVBench", "MLVU", "LVB", "macro average"]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def speed(records, boot):
    return speedup_table(records, boot).frame


@pytest.fixture(scope="module")
def slots(records, boot):
    return acceptance_frame(records, boot)


@pytest.fixture(scope="module")
def steps(records):
    return training_frame(records)


@pytest.fixture(scope="module")
def arms(records, boot):
    return objectives_table(records, boot).frame


def bars(axis) -> list[Rectangle]:
    return [p for p in axis.patches if isinstance(p, Rectangle) and p.get_width() < 0.2]


def texts(figure) -> list[str]:
    found = [text.get_text() for axis in figure.axes for text in axis.texts]
    return found + [text.get_text() for text in figure.texts]


def tick_names(axis) -> list[str]:
    return [label.get_text().split("\n")[0] for label in axis.get_xticklabels()]


def line_colours(axis) -> set[str]:
    return {
        matplotlib.colors.to_hex(line.get_color()).upper()
        for line in axis.lines
        if len(line.get_xdata()) > 1
    }


# ---- F1 ---------------------------------------------------------------------------------------
def test_f1_draws_every_value_of_its_frame(speed):
    figure, drawn = speedup_figure(speed)
    axis = figure.axes[0]
    shown = drawn.loc[(drawn["quantity"] == "decode_speedup") & drawn["value"].notna()]
    heights = sorted(bar.get_height() for bar in bars(axis))
    assert heights == pytest.approx(sorted(shown["value"]))
    assert set(drawn["objective"]) == {"", "self_reveal"}


def test_case_129_a_method_without_data_keeps_its_labelled_slot(speed):
    one_missing = speed.loc[(speed["method"] != "tree60") | (speed["source"] == "vflash_fm_page")]
    figure, _ = speedup_figure(one_missing)
    assert tick_names(figure.axes[0]) == GROUPS
    assert texts(figure).count("no data") == 6
    assert texts(figure).count("not reported") == 6  # five suites of the paper's chain, one SPARROW
    all_nan = speed.assign(value=speed["value"].where(speed["method"] != "chain"))
    figure, _ = speedup_figure(all_nan)
    assert texts(figure).count("no data") == 6


def test_case_131_row_order_does_not_change_the_figure(speed):
    places = []
    for frame in (speed, speed.iloc[::-1]):
        axis = speedup_figure(frame)[0].axes[0]
        places.append(sorted((round(b.get_x(), 6), b.get_height()) for b in bars(axis)))
        assert tick_names(axis) == GROUPS
    assert places[0] == places[1]


def test_case_133_an_infinite_speedup_is_refused(speed):
    frame = speed.copy()
    frame.loc[frame.index[0], "value"] = np.inf
    with pytest.raises(InputError, match="is infinite"):
        speedup_figure(frame)


def test_case_135_nullable_numbers_are_drawn(speed):
    frame = speed.assign(value=speed["value"].astype("Float64"), low=speed["low"].astype("Float64"))
    assert len(bars(speedup_figure(frame)[0].axes[0])) == len(
        bars(speedup_figure(speed)[0].axes[0])
    )


def test_case_125_a_bar_without_interval_has_no_error_bar(speed):
    figure, _ = speedup_figure(speed.assign(low=np.nan, high=np.nan))
    assert not figure.axes[0].containers or all(
        type(c).__name__ != "ErrorbarContainer" for c in figure.axes[0].containers
    )


def test_published_bars_are_hatched_and_ours_are_not(speed):
    ours = speed.loc[(speed["source"] != "vflash_fm_page") & (speed["objective"] == "self_reveal")]
    ours = ours.loc[(ours["quantity"] == "decode_speedup")]
    solid = [bar for bar in bars(speedup_figure(speed)[0].axes[0]) if not bar.get_hatch()]
    assert sorted(b.get_height() for b in solid) == pytest.approx(sorted(ours["value"]))
    same = speed.assign(status=speed["status"].replace("not comparable", "comparable"))
    assert not any(bar.get_hatch() for bar in bars(speedup_figure(same)[0].axes[0]))


def test_case_123_each_device_has_its_panel_and_the_caption_names_them(speed):
    other = speed.loc[speed["source"] != "vflash_fm_page"].assign(device="NVIDIA H200, bfloat16")
    figure, _ = speedup_figure(pd.concat([speed, other]))
    assert len(figure.axes) == 2
    caption = figure.texts[-1].get_text().replace("\n", " ")
    assert "2 CPU cores, float32 and NVIDIA H200, bfloat16" in caption
    assert "n = 2 clips per suite" in caption
    assert "95 % bootstrap over videos" in caption


# ---- F4 ---------------------------------------------------------------------------------------
def test_f4_lines_are_the_frames_values(slots):
    figure, drawn = acceptance_figure(slots)
    assert len(figure.axes) == 4
    own = drawn.loc[
        (drawn["method"] == "")
        & (drawn["quantity"] == "survival")
        & (drawn["objective"] == "self_reveal")
    ]
    line = next(line for line in figure.axes[1].lines if line.get_color() == colour("self_reveal"))
    sure = own["low"].notna()
    assert line.get_ydata().tolist() == own.loc[sure, "value"].tolist()
    assert line.get_xdata().tolist() == own.loc[sure, "setting"].astype(int).tolist()


def test_case_130_colours_do_not_move_when_an_arm_is_absent(slots):
    without = slots.loc[(slots["objective"] != "mask_only") | (slots["method"] == "chain")]
    figure, _ = acceptance_figure(without)
    assert colour("mask_only") not in line_colours(figure.axes[0])
    for axis in figure.axes[:4]:
        assert colour("self_reveal") in line_colours(axis)
    assert colour("mask_only") in line_colours(figure.axes[2])


def test_f4_tells_of_open_markers_only_where_it_draws_some(slots):
    def told(frame) -> bool:
        return "open markers" in acceptance_figure(frame)[0].texts[-1].get_text().replace("\n", " ")

    sure = slots.loc[slots["low"].notna() & slots["high"].notna()].reset_index(drop=True)
    assert not sure.empty and not told(sure)
    assert told(sure.assign(low=sure["low"].where(sure.index > 0)))


def test_case_139_equal_values_are_drawn(slots):
    flat = slots.assign(value=0.5, low=0.5, high=0.5, status="measured")
    figure, _ = acceptance_figure(flat)
    for axis in figure.axes:
        assert any(len(line.get_xdata()) == 15 for line in axis.lines)


def test_an_empty_frame_says_no_data(slots, steps, arms):
    for draw, frame in (
        (acceptance_figure, slots),
        (training_figure, steps),
        (objectives_figure, arms),
    ):
        figure, drawn = draw(frame.iloc[:0])
        assert "no data" in texts(figure)
        assert drawn.empty


# ---- F5 ---------------------------------------------------------------------------------------
def test_f5_has_a_line_per_arm_and_panel(steps):
    figure, _ = training_figure(steps)
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "loss from all masks (nats)",
        *(f"accuracy at slot {slot}" for slot in (1, 2, 4, 8, 15)),
    ]
    for axis in figure.axes:
        assert line_colours(axis) == {colour(arm) for arm in ARM_ORDER}


def test_f5_keeps_absent_arms_in_the_legend(steps):
    one = steps.loc[steps["objective"] == "mask_only"]
    figure, _ = training_figure(one, arms=("mask_only", "self_reveal"))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["mask-only", "self reveal (flow): no data"]


def test_f5_accuracies_share_a_scale_around_their_data(steps):
    figure, _ = training_figure(steps)
    shares = steps.loc[steps["quantity"] == "slot_accuracy", ["value", "low", "high"]].to_numpy()
    low, high = np.nanmin(shares.astype(float)), np.nanmax(shares.astype(float))
    (limits,) = {axis.get_ylim() for axis in figure.axes[1:]}
    assert low - 0.1 < limits[0] <= low and high <= limits[1] < high + 0.2
    from_none = training_figure(steps.assign(value=0.0, low=0.0))[0]
    assert limits[0] > 0 and from_none.axes[1].get_ylim()[0] == 0
    told = [" ".join(one.texts[-1].get_text().split()) for one in (figure, from_none)]
    assert ["does not begin at 0" in text for text in told] == [True, False]


def test_f5_marks_of_arms_stand_apart():
    logged = range(100, 1300, 100)
    records = records_from_frames(
        {"training": typed_frame(training_rows(ARM_ORDER, (1,), (1200,), tuple(logged)), TRAINING)},
        "synthetic",
    )
    figure, _ = training_figure(training_frame(records))
    starts = [line.get_markevery() for line in figure.axes[0].lines]
    assert len(set(starts)) == len(ARM_ORDER) and all(every > 1 for _, every in starts)


def test_a_single_logged_step_is_a_visible_mark():
    rows = training_rows(("mask_only",), (1,), (100,), (100,))
    rows = rows.loc[rows["step"] == 100]
    records = records_from_frames({"training": typed_frame(rows, TRAINING)}, "synthetic")
    figure, _ = training_figure(training_frame(records))
    assert [line.get_marker() for line in figure.axes[0].lines] == ["s"]


# ---- T3's figure ------------------------------------------------------------------------------
def test_the_objectives_figure_has_a_panel_per_data_size(arms):
    larger = arms.loc[arms["setting"].str.startswith("clips=100")]
    larger = larger.assign(setting=larger["setting"].str.replace("clips=100", "clips=400"))
    figure, drawn = objectives_figure(pd.concat([arms, larger]))
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[:2] == ["100 training clips", "400 training clips"]
    assert len(figure.axes) == 4
    assert set(drawn["quantity"]) == {
        "forward_equivalents",
        "anchor_accepted_length",
        "accepted_length",
    }
    assert not drawn["setting"].str.contains("seed|minus").any()


@pytest.mark.parametrize(("status", "panels"), [("stored", 2), ("measured", 3)])
def test_stored_decodes_of_another_machine_share_the_panel_of_a_run(arms, status, panels):
    """But two machines of one run stand apart, and their panels say which."""
    others = arms.loc[arms["quantity"] == "accepted_length"]
    others = others.assign(device="another machine", status=status)
    figure, _ = objectives_figure(pd.concat([arms, others]))
    assert len(figure.axes) == panels
    named = ["another machine" in axis.get_ylabel() for axis in figure.axes]
    assert sum(named) == (status == "measured")


def test_a_plateau_is_drawn_only_where_the_last_doubling_gained_nothing(arms):
    def dotted(frame) -> int:
        figure, _ = objectives_figure(frame)
        return sum(line.is_dashed() for axis in figure.axes for line in axis.lines)

    levels = arms["quantity"] == "plateau"
    assert levels.sum() == len(ARM_ORDER)
    rising = arms.assign(
        value=arms["value"].mask(levels), status=arms["status"].mask(levels, "missing")
    )
    assert dotted(rising) == 0
    one = arms.loc[levels & (arms["objective"] == "mask_only")].index
    flat = rising.copy()
    flat.loc[one, ["value", "status"]] = [4.0, "measured"]
    assert dotted(flat) == 1  # on the anchors' panel, not on the decoded chain's


def test_the_caption_counts_the_training_seeds_of_a_point(arms):
    def told(frame) -> str:
        return objectives_figure(frame)[0].texts[-1].get_text().replace("\n", " ")

    assert "training seeds (2 a point)" in told(arms)
    fewer = (arms["objective"] == "true_reveal") & arms["setting"].str.contains("seed=2")
    assert "training seeds (1 to 2 a point)" in told(arms.loc[~fewer])


def test_a_method_that_was_decoded_has_its_bars(speed):
    lookup = speed.loc[(speed["method"] == "chain") & (speed["source"] != "vflash_fm_page")]
    lookup = lookup.assign(method="lookup", objective="")
    lookup = lookup.drop_duplicates(["benchmark", "quantity", "setting"])
    before, after = (speedup_figure(f)[0] for f in (speed, pd.concat([speed, lookup])))
    assert len(bars(after.axes[0])) == len(bars(before.axes[0])) + 6
    names = [text.get_text() for text in after.legends[0].get_texts()]
    assert names[-3:] == ["chain, ours", "Tree-60, ours", "n-gram lookup, ours"]


def test_an_absent_arm_is_named_in_the_caption(arms):
    figure, _ = objectives_figure(arms.loc[arms["objective"] != "wrong_reveal"])
    assert "No data: wrong reveal." in figure.texts[-1].get_text().replace("\n", " ")


def test_error_bars_are_never_negative():
    value, low, high = (
        np.array([1.0, 2.0, 3.0]),
        np.array([0.5, np.nan, 3.5]),
        np.array([2.0, 1, 4]),
    )
    assert error_bar(value, low, high).tolist() == [[0.5, 0, 0], [1, 0, 1]]


def test_end_labels_are_kept_apart():
    moved = spread([1.0, 1.01, 1.02, 5.0], 0.5)
    assert moved == sorted(moved)
    assert min(np.diff(moved)) >= 0.5 - 1e-6
    assert spread([3.0, 1.0], 0.5) == [3.0, 1.0]


# ---- style and files --------------------------------------------------------------------------
def test_every_method_and_arm_has_a_colour_of_its_own():
    arms, methods = ([NAMES[key] for key in order] for order in (ARM_ORDER, METHOD_ORDER))
    for shown in (arms, methods):
        assert len({name.colour for name in shown}) == len(shown)
    assert len({name.marker for name in arms}) == len(arms)
    with pytest.raises(InputError, match="no colour for 'mystery'"):
        colour("mystery")


def test_the_font_is_the_bundled_one():
    found = matplotlib.font_manager.findfont(STYLE["font.family"], fallback_to_default=False)
    assert found.startswith(matplotlib.get_data_path())


@styled
def small_figure():
    figure, axes = new_figure(3, 2)
    axes[0, 0].plot([1, 2], [3, 4])
    finish(figure, "Title", "A caption that names hardware, n and the interval.")
    return figure


@styled
def legend_of(labels, columns):
    """The drawn legend's edges and number of rows, on a figure as wide as a page's text."""
    figure, _ = new_figure(TEXT_WIDTH, 4)
    finish(figure, "Title", "Caption.", [Patch(label=one) for one in labels], columns)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    places = [text.get_window_extent() for text in legend.get_texts()]
    rows = len({round(place.y0 + place.height / 2) // 4 for place in places})
    return box.x0, box.x1, figure.bbox.width, rows


@pytest.mark.parametrize("longest", [10, 34, 60, 90])
@pytest.mark.parametrize("n_entries", [2, 5, 6, 9])
def test_a_legend_stays_within_its_figure(longest, n_entries):
    labels = ["e" * (longest if place % 3 == 1 else 4) for place in range(n_entries)]
    left, right, width, _ = legend_of(labels, n_entries)
    assert 0 <= left < right <= width


def test_a_legend_takes_no_more_rows_than_it_needs():
    parts = ["verify", "draft", "prompt projection", "tree building", "bookkeeping", "cost model"]
    assert legend_of(parts, 6)[-1] == 1
    assert legend_of(parts, 3)[-1] == 2
    assert legend_of(["a", "b" * 60, "c"], 3)[-1] == 1


def test_a_caption_is_whole_again_once_its_lines_are_joined():
    words = " ".join(["LLaVA-OneVision-7B on one-H100-machine"] * 9)
    figure, _ = new_figure(3, 2)
    finish(figure, "Title", words)
    assert " ".join(figure.texts[-1].get_text().split("\n")) == words
    assert "\n" in figure.texts[-1].get_text()


def test_case_138_equal_data_give_equal_bytes(steps, tmp_path):
    steps = steps.loc[steps["objective"].isin(("mask_only", "self_reveal"))].reset_index(drop=True)
    digests = []
    for place in ("a", "b"):
        figure, drawn = training_figure(steps)
        paths = save_figure(tmp_path / place, "F5_training", figure, drawn)
        assert [path.suffix for path in paths] == [".svg", ".pdf", ".png", ".csv"]
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in paths])
    assert digests[0] == digests[1]
    pd.testing.assert_frame_equal(
        read_tidy_csv(tmp_path / "a" / "F5_training.csv"), steps, check_dtype=True
    )
    for name in ("F5_training.svg", "F5_training.pdf", "F5_training.png"):
        text = (tmp_path / "a" / name).read_bytes()
        assert b"CreationDate" not in text and b"<dc:date>" not in text
        assert matplotlib.__version__.encode() not in text


def test_bytes_do_not_depend_on_the_callers_style(tmp_path, steps):
    frame = steps.iloc[:0]
    plain = save_figure(tmp_path / "a", "x", small_figure(), frame)
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        other = save_figure(tmp_path / "b", "x", small_figure(), frame)
    for one, two in zip(plain, other, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_case_137_finished_figures_are_closed_and_can_be_saved(tmp_path, steps):
    frame, drawn = steps.iloc[:0], Image.new("RGB", (2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(25):
            figure = plt.figure()
            finish(figure, "title", "caption")
            figure.savefig = lambda place, **options: drawn.save(place, "PNG", dpi=(240, 240))
            save_figure(tmp_path, f"x{number}", figure, frame)
    assert plt.get_fignums() == []


def test_a_figure_that_cannot_be_saved_is_closed_and_leaves_no_file(tmp_path, steps):
    figure = small_figure()

    def fail(path, **options):
        path.write_bytes(b"half")
        raise OSError("disk full")

    figure.savefig = fail
    with pytest.raises(OSError, match="disk full"):
        save_figure(tmp_path, "x", figure, steps.iloc[:0])
    assert plt.get_fignums() == []
    assert list(tmp_path.iterdir()) == []


def test_case_134_a_heatmap_writes_every_number():
    # guards the versions in pyproject: an old seaborn with this matplotlib labels one row only
    axis = sns.heatmap(np.arange(12.0).reshape(3, 4), annot=True, cbar=False)
    assert len(axis.texts) == 12


def test_panels_stand_at_rounded_places(speed, arms):
    """The layout solver's last bits differ from process to process; bytes of files must not."""
    for figure, _ in (speedup_figure(speed), objectives_figure(arms)):
        bounds = [edge for axis in figure.axes for edge in axis.get_position(original=True).bounds]
        assert all(edge == pytest.approx(round(edge, 6), abs=1e-12) for edge in bounds)
