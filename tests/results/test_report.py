"""Building a whole place from records, the same twice, and only what was asked for."""

import pytest

from tests.results.synthetic import decode_rows, records_of
from vflash_analysis.errors import InputError
from vflash_analysis.results import report, sources
from vflash_analysis.results.report import (
    ITEMS,
    build_results,
    default_place,
    make_figure,
    make_table,
)
from vflash_analysis.results.tidy import read_tidy_csv

TABLE_ITEMS = [item for item in ITEMS if item.startswith("T")]


def test_the_tables_of_a_place_are_built_from_its_folder(place, tmp_path):
    paths = build_results(place, tmp_path / "a", TABLE_ITEMS, n_samples=20)
    assert [p.name for p in paths] == [
        f"{item}.{ending}" for item in TABLE_ITEMS for ending in ("csv", "md", "tex")
    ]
    assert all(path.stat().st_size > 0 for path in paths)
    again = build_results(place, tmp_path / "b", ["T1_speedup", "T4_lossless"], n_samples=20)
    for path in again:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    for path in paths:
        if path.suffix == ".csv":
            frame = read_tidy_csv(path)
            assert set(frame["item"]) == {path.stem}


def test_a_figure_is_built_with_the_frame_it_drew(place, tmp_path):
    paths = build_results(place, tmp_path, ["F1_speedup"], n_samples=20)
    assert [path.name for path in paths] == [
        f"F1_speedup.{ending}" for ending in ("svg", "pdf", "png", "csv")
    ]
    drawn = read_tidy_csv(tmp_path / "F1_speedup.csv")
    assert set(drawn["quantity"]) == {"decode_speedup", "ar_ms_per_token"}


def test_every_figure_can_be_made_alone(records, boot):
    for item in ITEMS:
        if not item.startswith("T"):
            figure, drawn = make_figure(item, records, boot)
            assert figure.axes and len(drawn)
            report_title = figure.texts[0].get_text()
            assert report_title and figure.texts[-1].get_text() != report_title


def test_a_finished_table_spares_making_it_again(records, boot, monkeypatch):
    table = make_table("T1_speedup", records, boot)

    def refuse(*arguments):
        raise AssertionError("made twice")

    monkeypatch.setitem(report.TABLES, "T1_speedup", refuse)
    _, drawn = make_figure("F1_speedup", records, boot, table)
    assert len(drawn)


def test_tracked_records_are_stored_and_go_to_pocket(place, monkeypatch, boot, tmp_path):
    monkeypatch.setattr(sources, "TRACKED_RECORDS", place)
    frame = make_table("T2_accepted_length", boot=boot).frame
    assert set(frame["status"]) == {"stored"}
    stored = sources.load_records()
    assert default_place(stored).name == "pocket"
    monkeypatch.setattr(report, "FIGURES", tmp_path)
    (first, *_) = build_results(items=["T4_lossless"], n_samples=20)
    assert first.parent == tmp_path / "pocket"


def test_a_runs_results_go_to_latest(records):
    assert default_place(records).name == "latest"


def test_unknown_items_are_refused(records):
    with pytest.raises(InputError, match=r"items \['T99'\]"):
        build_results(records, items=["T99"])
    with pytest.raises(InputError, match="table 'F1_speedup'"):
        make_table("F1_speedup", records)
    with pytest.raises(InputError, match="figure 'T1_speedup'"):
        make_figure("T1_speedup", records)


def test_a_new_method_and_a_smoke_run_of_two_suites_build(tmp_path):
    generations, cycles = decode_rows(
        arms=("self_reveal",), seeds=(1,), budgets=(10,), sizes=(4,), n_clips=1
    )
    kept = generations["benchmark"].isin(("VDC", "LVB"))
    few = records_of(generations.loc[kept], cycles.loc[cycles["clip_id"].str.startswith("VDC")
                                                       | cycles["clip_id"].str.startswith("LVB")])  # fmt: skip
    paths = build_results(few, tmp_path, TABLE_ITEMS, n_samples=20)
    frame = read_tidy_csv(next(p for p in paths if p.name == "T1_speedup.csv"))
    ours = frame.loc[(frame["quantity"] == "decode_speedup") & (frame["source"] == "synthetic")]
    found = ours.loc[ours["status"] == "measured", "benchmark"]
    assert set(found) == {"VDC", "LVB"}
