"""The tidy frame and its files: round trips, refusals, equal bytes."""

import math

import pandas as pd
import pytest

from vflash_analysis.errors import InputError
from vflash_analysis.results.tidy import (
    COLUMNS,
    Origin,
    checked,
    in_order,
    parse_setting,
    read_tidy_csv,
    round_number,
    setting_text,
    tidy,
    tidy_csv,
    write_tidy_csv,
)
from vflash_analysis.results.write import (
    Section,
    Table,
    cell_text,
    latex,
    latex_text,
    markdown,
    pivot,
    value_text,
    write_table,
)
from vflash_analysis.stats import Interval

ORIGIN = Origin("T0_test", "2 CPU cores, float32", "measured", "here")


def row(value=1.5, **keys):
    return ORIGIN.row("decode_speedup", value, "x", **keys)


def test_case_127_ids_survive_the_csv(tmp_path):
    names = ["007", "NA", "none", "1e3", "nan", ""]
    frame = tidy([row(method=name) for name in names])
    write_tidy_csv(tmp_path / "t.csv", frame)
    back = read_tidy_csv(tmp_path / "t.csv")
    assert back["method"].tolist() == names
    pd.testing.assert_frame_equal(back, frame)


def test_missing_numbers_survive_the_csv(tmp_path):
    frame = tidy(
        [
            row(Interval(2.0, 1.5, 2.5, 12), method="a"),
            row(float("nan"), method="b"),
            row(Interval(3.0, math.nan, math.nan, 1), method="c"),
        ]
    )
    write_tidy_csv(tmp_path / "t.csv", frame)
    pd.testing.assert_frame_equal(read_tidy_csv(tmp_path / "t.csv"), frame)
    assert frame["status"].tolist() == ["measured", "missing", "measured"]
    assert frame["n"].tolist()[0] == 12
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert lines[1] == (
        'T0_test,,a,,,decode_speedup,2,1.5,2.5,12,x,"2 CPU cores, float32",measured,here'
    )


def test_numbers_are_rounded_once_so_sums_in_any_order_give_equal_text():
    one, other = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    assert one != other
    assert tidy_csv(tidy([row(one)])) == tidy_csv(tidy([row(other)]))
    # figures draw the frame, so it must be equal too, not only its text
    pd.testing.assert_frame_equal(tidy([row(one)]), tidy([row(other)]), check_exact=True)
    assert round_number(1234567.8) == 1234570.0
    assert math.isnan(round_number(float("nan")))


def test_case_133_an_infinite_value_is_named():
    frame = tidy([row(method="chain", benchmark="VDC")])
    frame["value"] = [float("inf")]
    with pytest.raises(InputError, match=r"'benchmark': 'VDC'.*'value' is infinite"):
        checked(frame)


def test_case_135_nullable_columns_are_accepted():
    frame = tidy([row(1.0, method="a"), row(float("nan"), method="b")])
    nullable = frame.assign(value=pd.array([1.0, None], dtype="Float64"))
    pd.testing.assert_frame_equal(checked(nullable), frame)


def test_faulty_frames_are_refused():
    good = tidy([row()])
    with pytest.raises(InputError, match="two values for"):
        tidy([row(1.0), row(2.0)])
    with pytest.raises(InputError, match="'method' is missing"):
        checked(good.assign(method=[None]))
    with pytest.raises(InputError, match=r"status \['guessed'\]"):
        checked(good.assign(status=["guessed"]))
    with pytest.raises(InputError, match="columns"):
        checked(good.drop(columns="unit"))


def test_settings_read_back():
    text = setting_text(clips=240, steps=400, split=None, seed=1)
    assert text == "clips=240;steps=400;seed=1"
    assert parse_setting(text) == {"clips": "240", "steps": "400", "seed": "1"}
    assert parse_setting("spine_first") == {"spine_first": "spine_first"}
    assert parse_setting("") == {}


def test_order_is_fixed_and_unknown_names_come_last():
    assert in_order(["z", "tree60", "b", "chain"], ("chain", "tree60")) == [
        "chain",
        "tree60",
        "b",
        "z",
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3.8494, "x", "3.85×"),
        (0.987, "share", "98.7 %"),
        (12.0, "clips", "12"),
        (57600.0, "forwards", "57,600"),
        (10.65, "ms", "10.65"),
        (0.00012, "logits", "0.00012"),
        (float("nan"), "x", "–"),
    ],
)
def test_numbers_as_a_reader_sees_them(value, unit, text):
    assert value_text(value, unit) == text


def test_a_cell_carries_its_interval_and_n_of_planned():
    frame = tidy([row(Interval(2.0, 1.5, 2.5, 11), method="a"), row(2.0, method="b")])
    assert cell_text(frame.iloc[0], planned=12) == "2.00× [1.50, 2.50] (11/12)"
    assert cell_text(frame.iloc[0]) == "2.00× [1.50, 2.50] (n 11)"
    assert cell_text(frame.iloc[1]) == "2.00×"
    ends = tidy([row(Interval(math.nan, 10.6, 11.1, 4))]).assign(unit="ms")
    assert cell_text(ends.iloc[0]) == "10.60 to 11.10 (n 4)"


def example_table() -> Table:
    frame = tidy([row(method="a|b", benchmark="VDC"), row(2.5, method="50% x_1", benchmark="LVB")])
    section = pivot(frame, "speed & more", [("method", "method")], "benchmark", ("VDC", "LVB"))
    return Table("T0_test", "T0 Test", "Caption, 95 % interval.", frame, (section,))


def test_a_pivot_keeps_absent_cells():
    (section,) = example_table().sections
    assert section == Section(
        "speed & more",
        ("method", "VDC", "LVB"),
        (("a|b", "1.50×", "–"), ("50% x_1", "–", "2.50×")),
    )


def test_markdown_and_latex_escape_what_would_break_them():
    assert r"| a\|b | 1.50× | – |" in markdown(example_table())
    assert markdown(example_table()).startswith("# T0 Test\n")
    below = markdown(example_table(), level=3).splitlines()
    assert [line for line in below if line[0:1] == "#"] == ["### T0 Test", "#### speed & more"]
    text = latex(example_table())
    assert r"50\% x\_1 & -- & 2.50$\times$ \\" in text
    assert r"\textbf{speed \& more}" in text
    assert latex_text("τ ≥ 1 {a}") == r"$\tau$ $\geq$ 1 \{a\}"


def test_equal_tables_give_equal_bytes(tmp_path):
    first = write_table(tmp_path / "a", example_table())
    second = write_table(tmp_path / "b", example_table())
    assert [path.name for path in first] == ["T0_test.csv", "T0_test.md", "T0_test.tex"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert b"\r" not in one.read_bytes()
