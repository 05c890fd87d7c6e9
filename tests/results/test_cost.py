"""T10 and F9: break-even and speed-ups by hand, what is drawn, and what is marked how."""

import math

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from tests.results.synthetic import DEVICE, cost_rows, decoded_records
from vflash_analysis import paths
from vflash_analysis.errors import InputError
from vflash_analysis.records import typed_frame, write_records_csv
from vflash_analysis.results.cost import cost_groups, cost_table, keyed, seconds_at
from vflash_analysis.results.cost_figures import UNMEASURED, cost_figure
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.results.style import QUIET, colour
from vflash_analysis.results.tidy import (
    MEASURED,
    MISSING,
    MODELLED,
    PUBLISHED_ONLY,
    STORED,
    parse_setting,
)
from vflash_analysis.schemas import COSTS


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(autouse=True)
def measured_folder(tmp_path, monkeypatch):
    """An empty `data/measured`."""
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    return tmp_path


def of_costs(costs: pd.DataFrame):
    return records_from_frames({"costs": typed_frame(costs, COSTS)}, "synthetic")


def value(frame: pd.DataFrame, quantity: str, **keys: str) -> float:
    rows = keyed(frame)
    rows = rows.loc[rows["quantity"] == quantity]
    for name, wanted in keys.items():
        rows = rows.loc[rows[name] == wanted]
    assert len(rows) == 1, (quantity, keys, len(rows))
    return float(rows["value"].iloc[0])


# ---- T10 --------------------------------------------------------------------------------------
def test_break_even_and_speed_up_by_hand():
    records = decoded_records(cost_rows())
    frame = cost_table(records).frame
    at = {"shape": "pocket", "context": "1000"}
    # 5 ms an AR step; a chain cycle drafts 3 and verifies 10, a tree's 4 and 15
    assert value(frame, "cycle_ms", method="chain", **at) == 13
    assert value(frame, "breakeven_tau", method="chain", **at) == pytest.approx(2.6)
    assert value(frame, "breakeven_tau", method="tree60", **at) == pytest.approx(3.8)
    (chain,) = [row for _, row in records.generations.iterrows() if row["method"] == "chain"]
    tau = (chain["new_tokens"] - 1) / chain["verify_calls"]
    found = value(frame, "modelled_speedup", method="chain", **at)
    assert found == pytest.approx(tau / 2.6, rel=1e-5)
    rows = keyed(frame)
    predicted = rows.loc[rows["quantity"] == "modelled_speedup"]
    assert set(predicted["tau"]) == {f"{tau:.2f}"}  # nothing was decoded with a tree
    # the 7B's too is at the length that this profile decoded, and its row says so
    assert {"pocket", "llava-onevision-7b"} == set(predicted["shape"])
    (profile,) = set(records.generations["profile"])
    assert {parse_setting(text)["tau_of"] for text in predicted["setting"]} == {profile}
    assert (
        f"at the decoded length (chain {tau:.2f}, {profile}; suites pooled"
        in cost_table(records).caption
    )


def test_times_limits_and_memory_of_a_forward():
    frame = cost_table(of_costs(cost_rows())).frame
    at = {"shape": "pocket", "context": "200", "forward": "ar"}
    assert value(frame, "copy_bandwidth", shape="pocket") == 10
    assert value(frame, "forward_ms", by="vflash", **at) == 4.2
    assert value(frame, "forward_ms", by="hf_sdpa", **at) == 5.4
    assert value(frame, "limit_ms", **at) == 2  # 20 MB at 10 GB/s
    assert value(frame, "limit_share", **at) == pytest.approx(2 / 4.2, rel=1e-5)
    assert value(frame, "peak_bytes", by="vflash", **at) == 200_000
    row = keyed(frame).query("forward == 'ar' and by == 'vflash' and context == '200'").iloc[0]
    assert (row["low"], row["high"], row["n"]) == (3.99, 4.41, 5)
    assert row["device"] == f"{DEVICE}, float32" and row["status"] == MEASURED


def test_the_7b_is_modelled_beside_the_page_and_marked_so():
    frame = cost_table(of_costs(cost_rows())).frame
    at = {"shape": "llava-onevision-7b", "context": "25119"}
    # 15.58 GB at 3.35 TB/s; computing would be faster even for 61 rows
    assert value(frame, "forward_ms", forward="ar", by="limit", **at) == pytest.approx(4.65, 1e-3)
    assert value(frame, "breakeven_tau", method="tree60", **at) == pytest.approx(1.21, abs=0.01)
    rows = keyed(frame)
    page = rows.loc[rows["by"] == "page"].iloc[0]
    assert (page["low"], page["high"], page["status"]) == (10.6, 11.1, PUBLISHED_ONLY)
    seven = rows.loc[(rows["shape"] == at["shape"]) & (rows["by"] != "page")]
    assert set(seven["status"]) == {MODELLED}
    assert set(rows.loc[rows["shape"] == "pocket", "status"]) == {MEASURED}
    # nothing decoded: no accepted length, so no speed-up at one
    assert not (frame["quantity"] == "modelled_speedup").any()


def test_files_of_other_machines_stand_beside_and_keep_their_source(measured_folder):
    other = cost_rows(shape="llava-onevision-0.5b", device="NVIDIA H200", dtype="bfloat16")
    write_records_csv(measured_folder / "other.csv", other, COSTS)
    frame = cost_table(of_costs(cost_rows())).frame
    rows = keyed(frame)
    stored = rows.loc[rows["shape"] == "llava-onevision-0.5b"]
    assert set(stored["status"]) == {STORED}
    assert set(stored["device"]) == {"NVIDIA H200, bfloat16"}
    assert all(source.endswith("other.csv") for source in stored["source"])
    (measured_folder / "bad.csv").write_text("shape,device\n")
    with pytest.raises(InputError, match="bad\\.csv: not the columns of 'costs'"):
        cost_table(of_costs(cost_rows()))


def test_a_run_without_costs_keeps_a_missing_row():
    frame = cost_table(of_costs(cost_rows().iloc[:0])).frame
    missing = frame.loc[frame["status"] == MISSING]
    assert len(missing) == 1 and math.isnan(missing["value"].iloc[0])


def test_a_forward_that_did_not_fit_is_missing_and_the_rest_stays():
    costs = cost_rows()
    refused = (costs["implementation"] == "hf_sdpa") & (costs["forward"] == "verify_tree60")
    costs.loc[refused, ["seconds", "seconds_low", "seconds_high", "peak_bytes"]] = None
    costs.loc[refused, "reason"] = "out_of_memory"
    frame = cost_table(of_costs(costs)).frame
    rows = keyed(frame)
    absent = rows.loc[rows["status"] == MISSING]
    assert set(absent["forward"]) == {"verify_tree60"} and set(absent["by"]) == {"hf_sdpa"}
    assert value(frame, "breakeven_tau", method="tree60", context="1000") == pytest.approx(3.8)


def test_costs_of_two_runs_on_one_machine_are_refused():
    twice = pd.concat([cost_rows(), cost_rows().assign(run_id="r2")])
    with pytest.raises(InputError, match=r"costs of pocket on .* in several runs \['r1', 'r2'\]"):
        of_costs(twice)


def test_between_lengths_costs_are_interpolated_and_outside_kept():
    (group,) = cost_groups(of_costs(cost_rows()))
    assert seconds_at(group, "ar", 600) == pytest.approx(4.6e-3)
    assert np.isnan([seconds_at(group, "ar", length) for length in (5, 9000)]).all()
    assert math.isnan(seconds_at(group, "none", 600))


def test_the_table_reads_as_grids():
    sections = {s.title: s for s in cost_table(decoded_records(cost_rows())).sections}
    times = sections["time of a forward (ms)"]
    assert times.header[:4] == ("shape", "context", "by", "where")
    assert times.body[0][:3] == ("pocket", "200", "ours") and times.body[0][4] == "4.20"
    assert times.body[-1][2] == "the page" and times.body[-1][4] == "10.60 to 11.10"
    assert sections["peak memory beyond weights and caches"].body[0][4] == "0.2 MB"
    even = sections["accepted length τ that breaks even (tokens)"]
    assert even.body[1] == ("pocket", "1000", "A", "2.60", "3.80")


# ---- F9 ---------------------------------------------------------------------------------------
def lines_of(axis, tone: str) -> list[list[float]]:
    """Heights of the lines of one colour, without single points."""
    same = matplotlib.colors.to_hex(tone)
    return [
        list(line.get_ydata())
        for line in axis.lines
        if matplotlib.colors.to_hex(line.get_color()) == same and len(line.get_xdata()) > 1
    ]


def test_f9_draws_ours_beside_hugging_face_and_break_even():
    records = decoded_records(cost_rows())
    frame = cost_table(records).frame
    figure, drawn = cost_figure(frame)
    pd.testing.assert_frame_equal(drawn, frame)
    assert len(figure.axes) == 9  # pocket measured, the 7B modelled, a speed-up of each, one empty
    ar, chain = figure.axes[:2]
    speedup, modelled, empty = figure.axes[6:]
    assert not empty.axison
    assert lines_of(ar, colour("ar")) == [pytest.approx([4.2, 5.0])]
    assert lines_of(ar, "#CC79A7") == [pytest.approx([5.4, 7.0])]
    assert lines_of(chain, colour("chain")) == [
        pytest.approx([8.4, 10.0]), pytest.approx([2.2, 3.0])
    ]  # fmt: skip
    # at tau = 1 and 16 over break-even 2.6 after 1000 tokens and 10.6 / 4.2 after 200
    assert lines_of(speedup, colour("chain")) == [
        pytest.approx([1 / 2.6, 16 / 2.6]), pytest.approx([4.2 / 10.6, 16 * 4.2 / 10.6])
    ]  # fmt: skip
    told = [text.get_text() for text in speedup.texts]
    assert any("chain and Tree-60\nafter 1k: 2.60 and 3.80\n" in text for text in told)
    assert any(text.endswith("after 200: 2.52 and 3.76") for text in told)
    assert figure.axes[3].get_ylabel() == "llava-onevision-7b\nmodelled ms a forward"
    # the modelled forwards cost alike: one line for all, and a circle, and it says so
    assert len(lines_of(modelled, QUIET)) == 2  # with that of AR
    assert not lines_of(modelled, colour("chain")) and not lines_of(modelled, colour("tree60"))
    assert "after any length, one line: \n1.21 to 1.22" in modelled.texts[0].get_text()
    caption = figure.texts[-1].get_text().replace("\n", " ")
    assert f"Measured on {DEVICE}, float32: medians of n = 5 runs" in caption
    assert "random weights, not compiled." in caption
    assert "nothing compiled whatever `target.compile` says" in cost_table(records).caption


def test_f9_legend_shows_what_is_drawn():
    """Every entry's colour, dashes and marker are those of a line in a panel."""
    figure, _ = cost_figure(cost_table(decoded_records(cost_rows())).frame)

    def looks(lines):
        return {
            (matplotlib.colors.to_hex(one.get_color()), one.get_linestyle(), one.get_marker())
            for one in lines
        }

    drawn = looks(line for axis in figure.axes for line in axis.lines)
    told = looks(figure.legends[0].get_lines())
    assert told <= drawn and len(told) == len(figure.legends[0].get_texts())
    speedups = figure.axes[6]
    marks = {line.get_marker() for line in speedups.lines if len(line.get_xdata()) == 1}
    assert len(marks) == 2  # chain and Tree-60, told apart without colour
    assert all(text.get_bbox_patch() is not None for text in speedups.texts)  # no grid behind it


def test_f9_keeps_a_labelled_row_without_measurements():
    figure, _ = cost_figure(cost_table(of_costs(cost_rows().iloc[:0])).frame)
    assert figure.axes[0].get_ylabel().startswith(UNMEASURED)
    empty = [*figure.axes[:3], figure.axes[6]]
    assert [axis.texts[0].get_text() for axis in empty] == ["not measured"] * 4
