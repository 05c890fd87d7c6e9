"""The HTML page of a place: whole, well formed, escaped, the same twice, and readable in a browser."""

import base64
import dataclasses
import io
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from matplotlib.lines import Line2D

from tests.browser import needs_chromium, visit
from tests.results.synthetic import generation_row, records_of
from vflash_analysis.results import page, report, style
from vflash_analysis.results.page import Facts, failed_decodes, report_page
from vflash_analysis.results.write import Section, Table, cell_text

VOID = {"meta", "img", "br", "link"}
TITLE = 'A run <of> "two" & more'


class Reader(HTMLParser):
    """Checks the nesting; keeps ids, links, sources and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[dict] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[key] for key in ("href", "src") if key in found]
        self.images += [found] if tag == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def small(monkeypatch):
    """One table with a cell to be escaped, and the one figure that is drawn quickest."""
    rows = (("a <b> & c", "1.00"), ("d", "x" * 80))
    table = Table("T0_own", "T0 Own", "Caption <i>.", pd.DataFrame(),
                  (Section("part & parcel", ("name", "value"), rows),))  # fmt: skip
    one = {"F5_training": report.FIGURE_OF_FRAME["F5_training"]}
    for module in (page, report):
        headlines = {stem: report.TABLES[stem] for stem, _ in page._HEADLINES}
        tables = {"T0_own": lambda records, boot: table, **headlines}
        monkeypatch.setattr(module, "TABLES", tables)
        monkeypatch.setattr(module, "FIGURE_OF_TABLE", {})
        monkeypatch.setattr(module, "FIGURE_OF_FRAME", one)


@pytest.fixture
def facts():
    return Facts(
        TITLE,
        machine=pd.DataFrame([("git commit", "abc", 3)], columns=["fact", "value", "shards"]),
        coverage=pd.DataFrame([("clips", 1)], columns=["stage", "shards done"]),
        bad_clips=pd.DataFrame([("clip-7", "bad", "not_video", "no <stream>")],
                               columns=["clip_id", "status", "reason", "message"]),
    )  # fmt: skip


@pytest.fixture
def lacking(records):
    """A run whose decodes failed once, that lacks one shard and reused another."""
    failed = generation_row("chain", "VDC-x", "VDC", status="failed", reason="damaged <file>")
    generations = pd.concat(
        [records.generations, records_of(pd.DataFrame([failed])).generations], ignore_index=True
    )
    return dataclasses.replace(
        records, generations=generations, lacking=("decode-LVB-2",), stale=("decode-VDC-0",)
    )


@pytest.mark.usefixtures("small")
def test_the_page_is_whole_escaped_and_asks_for_nothing(lacking, facts, boot):
    text = report_page(lacking, facts, boot, io.StringIO())
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and len(set(reader.ids)) == len(reader.ids)
    inside = [link[1:] for link in reader.links if link.startswith("#")]
    assert {"t0-own", "f5-training", "coverage"} <= set(inside) <= set(reader.ids)
    assert all(link.startswith(("#", "data:image/")) for link in reader.links)
    assert "http" not in text and "<script" not in text
    for words in (TITLE, "a <b> & c", "part & parcel", "Caption <i>.", "no <stream>", "clip-7",
                  "damaged <file>", "git commit"):  # fmt: skip
        assert words in reader.text
    assert "Not in it, as not done: decode-LVB-2." in reader.text
    assert "have changed: decode-VDC-0." in reader.text
    (image,) = reader.images
    assert image["alt"].startswith("F5 Training: loss and accuracy by slot. ")
    assert "No run has left a summary here." in reader.text
    assert text == report_page(lacking, facts, boot, io.StringIO())


@pytest.mark.usefixtures("small")
def test_a_page_without_facts_says_so(records, boot):
    text = report_page(records, Facts("Nothing"), boot, io.StringIO())
    for told in (
        "No manifest was found.",
        "These are tracked records, not a run of this machine: there is no plan to compare with.",
        "No list of bad clips: it is written where a run reads its clips.",
        "No decode failed.",
    ):
        assert f"<p>{told}</p>" in text


@pytest.mark.usefixtures("small")
def test_a_page_begins_with_its_headline_and_folds_nothing(records, facts, boot):
    many = pd.DataFrame(
        [(f"shard-{i}", f"commit-{i}") for i in range(50)], columns=["shard", "git"]
    )
    facts = dataclasses.replace(facts, machine=many, bad_clips=facts.bad_clips.iloc[:0])
    text = report_page(records, facts, boot, io.StringIO())
    assert "<details" not in text and "commit-49" in text  # print shows no folded rows
    assert "<p>Every clip was read as asked.</p>" in text
    first, _, rest = text.partition("<table>")
    assert 'id="headline"' in first and 'id="run"' not in first
    headline = rest.partition("</table>")[0].replace("\u00a0", " ")
    assert "SPARROW" not in headline and "as published" not in headline
    for stem, quantity in page._HEADLINES:
        frame = report.make_table(stem, records, boot).frame
        rows = frame.loc[(frame["quantity"] == quantity) & (frame["benchmark"] == "macro")]
        rows = rows.loc[rows["status"] == "measured"]
        assert len(rows) > 1
        assert all(cell_text(row) in headline for _, row in rows.iterrows())


@pytest.mark.usefixtures("small")
def test_a_page_tells_how_far_it_is(records, facts, boot):
    stream = io.StringIO()
    report_page(records, facts, boot, stream)
    assert stream.getvalue().splitlines()[-1].startswith("4/4 tables and figures, F5_training, in ")


def test_cells_do_not_break_within_an_interval():
    told = page._grid(("a", "b"), [("x" * 30, "1.0 [0.5, 2.0] (3)")])
    assert "<td>1.0 [0.5,\u00a02.0] (3)</td>" in told
    assert f'<th scope="row" class="long">{"x" * 30}</th>' in told


def test_a_figure_keeps_its_legend_without_title_and_caption():
    heights = []
    for handles in ([], [Line2D([], [], label="a line")]):
        figure, axes = style.new_figure(3.3, 2.0, 1, 1)
        (axis,) = axes.flatten()
        axis.plot([0, 1])
        style.finish(figure, "Title", "Caption.", handles)
        kind, data = page.data_uri(figure).split(";base64,")
        assert kind == "data:image/svg+xml"
        found = re.search(r'height="([0-9.]+)pt"', base64.b64decode(data).decode())
        panel = axis.get_tightbbox().height * 72 / figure.dpi
        heights.append(float(found[1]) - panel)
    assert heights[0] == pytest.approx(14.4, abs=0.1)  # the margin alone, 0.1 in on each side
    assert heights[1] > heights[0] + 10


def test_figures_stand_in_the_order_of_their_numbers():
    stems = sorted(("F_objectives", "F10_b", "F2_c"), key=page._number)
    assert stems == ["F2_c", "F10_b", "F_objectives"]


def test_failed_decodes_are_counted_by_reason(lacking):
    assert failed_decodes(lacking).to_numpy().tolist() == [["VDC", "chain", "damaged <file>", 1]]


@needs_chromium
@pytest.mark.usefixtures("small")
def test_a_browser_shows_it_without_a_message_or_a_request(records, facts, boot, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report_page(records, facts, boot, io.StringIO()), encoding="utf-8")
    seen = visit(path)
    assert seen.errors == [] and seen.requests == []
    assert len(seen.texts("caption")) == 4  # three tables and a figure
