"""Building a whole place from records, the same twice, and one table or figure alone."""

import itertools
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tests.results.synthetic import decode_rows, records_of
from vflash_analysis.errors import InputError
from vflash_analysis.results import report, sources
from vflash_analysis.results.report import (
    FIGURE_OF_FRAME,
    FIGURE_OF_TABLE,
    TABLES,
    build_results,
    make_figure,
    make_table,
)
from vflash_analysis.results.style import SMALLEST, TEXT_WIDTH
from vflash_analysis.results.tidy import read_tidy_csv

FIGURE_ITEMS = (*FIGURE_OF_TABLE, *FIGURE_OF_FRAME)


@pytest.fixture
def figures(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(report, "FIGURES", tmp_path)
    monkeypatch.setattr(report, "TRACKED_FIGURES", tmp_path / "pocket")
    return tmp_path


@pytest.fixture
def tables_only(monkeypatch):
    monkeypatch.setattr(report, "FIGURE_OF_TABLE", {})
    monkeypatch.setattr(report, "FIGURE_OF_FRAME", {})
    monkeypatch.setattr(report, "write_replay", lambda folder, shown, told: [])


def test_tables_and_figures_of_a_run_go_to_latest(records, figures, monkeypatch):
    monkeypatch.setattr(report, "FIGURE_OF_TABLE", {"F1_speedup": FIGURE_OF_TABLE["F1_speedup"]})
    monkeypatch.setattr(report, "FIGURE_OF_FRAME", {})
    paths = build_results(records, n_samples=20)
    endings = dict.fromkeys(TABLES, ("csv", "md", "tex"))
    endings["F1_speedup"] = ("svg", "pdf", "png", "csv")
    assert [path.relative_to(figures).as_posix() for path in paths] == [
        *(f"latest/{item}.{ending}" for item, own in endings.items() for ending in own),
        "latest/F3_replay.html",
        "latest/F3_replay.gif",
    ]
    assert all(path.stat().st_size > 0 for path in paths)
    for item in TABLES:
        assert set(read_tidy_csv(figures / "latest" / f"{item}.csv")["item"]) == {item}
    drawn = read_tidy_csv(figures / "latest" / "F1_speedup.csv")
    assert set(drawn["quantity"]) == {"decode_speedup", "ar_ms_per_token"}


@pytest.mark.usefixtures("tables_only")
def test_equal_records_give_equal_bytes(records, figures):
    first = {path: path.read_bytes() for path in build_results(records, n_samples=20)}
    assert first == {path: path.read_bytes() for path in build_results(records, n_samples=20)}


def test_every_figure_can_be_made_alone(records, boot):
    for item in FIGURE_ITEMS:
        figure, drawn = make_figure(item, records, boot)
        assert figure.axes and len(drawn)
        report_title = figure.texts[0].get_text()
        assert report_title and figure.texts[-1].get_text() != report_title


def shown_texts(figure) -> list[Text]:
    """Every text that is drawn: not the empty ones, those of switched-off axes and of ticks beyond."""
    hidden = {id(text) for axis in figure.axes if not axis.axison for text in axis.findobj(Text)}
    for axis in figure.axes:
        for one in (axis.xaxis, axis.yaxis):
            low, high = sorted(one.get_view_interval())
            beyond = [tick for tick in one.get_major_ticks() if not low <= tick.get_loc() <= high]
            hidden |= {id(text) for tick in beyond for text in (tick.label1, tick.label2)}
    found = figure.findobj(Text)
    return [t for t in found if t.get_visible() and t.get_text().strip() and id(t) not in hidden]


def test_on_paper_no_text_is_tiny_cut_or_over_its_neighbour(records, boot):
    """As wide as a page's text at most; wider figures would be scaled down, their type with them."""
    for item in FIGURE_ITEMS:
        figure, _ = make_figure(item, records, boot)
        width, height = figure.get_size_inches()
        scale = min(1.0, TEXT_WIDTH / width)
        renderer = FigureCanvasAgg(figure).get_renderer()
        for text in shown_texts(figure):
            assert scale * text.get_fontsize() >= SMALLEST, (item, text.get_text())
            box = text.get_window_extent(renderer)
            inside = box.x0 > -2 and box.y0 > -2
            inside &= box.x1 < 2 + figure.dpi * width and box.y1 < 2 + figure.dpi * height
            assert inside, (item, text.get_text())
        shown = {id(text) for text in shown_texts(figure)}
        for axis in figure.axes:
            for names in (axis.get_xticklabels(), axis.get_yticklabels()):
                boxes = [n.get_window_extent(renderer) for n in names if id(n) in shown]
                for one, other in itertools.pairwise(boxes):
                    assert not one.overlaps(other), (item, [n.get_text() for n in names])


def test_a_finished_table_spares_making_it_again(records, boot, monkeypatch):
    table = make_table("T1_speedup", records, boot)

    def refuse(*arguments):
        raise AssertionError("made twice")

    monkeypatch.setitem(report.TABLES, "T1_speedup", refuse)
    _, drawn = make_figure("F1_speedup", records, boot, table)
    assert len(drawn)


@pytest.mark.usefixtures("tables_only")
def test_tracked_records_are_stored_and_go_to_pocket(place, figures, monkeypatch):
    monkeypatch.setattr(sources, "TRACKED_RECORDS", place)
    paths = build_results(n_samples=20)
    assert {path.parent for path in paths} == {figures / "pocket"}
    statuses = read_tidy_csv(figures / "pocket" / "T2_accepted_length.csv")["status"]
    assert set(statuses) == {"stored"}


def test_unknown_items_are_refused(records, boot):
    with pytest.raises(InputError, match="table 'F1_speedup'"):
        make_table("F1_speedup", records, boot)
    with pytest.raises(InputError, match="figure 'T1_speedup'"):
        make_figure("T1_speedup", records, boot)


@pytest.mark.usefixtures("tables_only")
def test_a_new_method_and_a_smoke_run_of_two_suites_build(figures):
    generations, cycles = decode_rows(
        arms=("self_reveal",), seeds=(1,), budgets=(10,), sizes=(4,), n_clips=1
    )
    kept = generations["benchmark"].isin(("VDC", "LVB"))
    few = records_of(generations.loc[kept], cycles.loc[cycles["clip_id"].str.startswith("VDC")
                                                       | cycles["clip_id"].str.startswith("LVB")])  # fmt: skip
    paths = build_results(few, n_samples=20)
    frame = read_tidy_csv(next(p for p in paths if p.name == "T1_speedup.csv"))
    ours = frame.loc[(frame["quantity"] == "decode_speedup") & (frame["source"] == "synthetic")]
    found = ours.loc[ours["status"] == "measured", "benchmark"]
    assert set(found) == {"VDC", "LVB"}
