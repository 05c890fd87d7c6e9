"""One self-contained HTML page of a place's results: `vflash report`.

Everything is in the file, tables as HTML and figures as data URIs, so it opens from a disk, in
JupyterLab or on paper without a network. Equal data give equal bytes.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from string import Template
from typing import IO

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from vflash_analysis.progress import CountLine
from vflash_analysis.results import style
from vflash_analysis.results.report import (
    FIGURE_OF_FRAME,
    FIGURE_OF_TABLE,
    TABLES,
    make_figure,
    make_table,
)
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tidy import MEASURED, MISSING, STORED
from vflash_analysis.results.write import Section, Table, cell_text, pivot
from vflash_analysis.stats import Bootstrap

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1100px;
  padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.25rem; border-bottom: 1px solid #ccc; margin-top: 2.5rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; }
h4 { font-size: .95rem; margin: 1rem 0 .3rem; }
.caption { color: #555; font-size: .88rem; max-width: 60rem; }
nav ul { columns: 2; padding-left: 1.2rem; }
.scroll { overflow-x: auto; }
.tall { max-height: 24rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #e3e3e3; text-align: left;
  vertical-align: top; }
th.long { min-width: 12rem; }
td.long { min-width: 16rem; }
thead th { border-bottom: 2px solid #888; }
th:first-child { position: sticky; left: 0; background: #fff; }
img { width: 100%; height: auto; }
figure { margin: 1rem 0; }
@media print {
  body { max-width: none; font-size: 9pt; padding: 0; }
  .caption { font-size: 8pt; max-width: none; }
  nav { display: none; }
  .scroll { overflow: visible; max-height: none; }
  table { font-size: 6.5pt; }
  th.long, td.long { min-width: 0; }
  th:first-child { position: static; }
  h3, h4 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
}
</style>
</head>
<body>
<h1>$title</h1>
<p>$summary</p>
<nav aria-label="contents"><h2>Contents</h2><ul>
$contents
</ul></nav>
$body
</body>
</html>
""")
_ROW = ' scope="row"'
_NO_PLAN = "These are tracked records, not a run of this machine: there is no plan to compare with."
_NO_CLIPS = "No list of bad clips: it is written where a run reads its clips."
_GOOD_CLIPS = "Every clip was read as asked."
_MOST_ROWS = 20  # of a frame that a screen shows without a scroll bar of its own
_HEADLINES = (("T1_speedup", "decode_speedup"), ("T2_accepted_length", "accepted_length"))


@dataclass(frozen=True)
class Facts:
    """What a page tells beside tables and figures; an empty frame becomes a sentence.

    Attributes:
        title: of the page.
        machine: fact, value: commit, devices, versions, seeds.
        coverage: stage, suite, planned and done.
        waiting: shard and why it is not done, or that it is stale.
        summary: how shards ended when they last ran.
        bad_clips: clips that could not be read as asked, with status, reason and message; None where
            no clips were read.
    """

    title: str
    machine: pd.DataFrame = field(default_factory=pd.DataFrame)
    coverage: pd.DataFrame = field(default_factory=pd.DataFrame)
    waiting: pd.DataFrame = field(default_factory=pd.DataFrame)
    summary: pd.DataFrame = field(default_factory=pd.DataFrame)
    bad_clips: pd.DataFrame | None = None


def _anchor(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def _cell(tag: str, text: str, most: int, marks: str = "") -> str:
    """A cell, which breaks anywhere but within brackets; above `most` characters it is long."""
    kept = re.sub(r"\[[^\]]*\]", lambda span: span[0].replace(" ", "\u00a0"), text)
    long = ' class="long"' if len(text) > most else ""
    return f"<{tag}{marks}{long}>{escape(kept)}</{tag}>"


def _grid(header: Sequence[str], body: Sequence[Sequence[str]], marks: str = "scroll") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    rows = []
    for cells in body:
        first, *rest = cells
        told = "".join(_cell("td", one, 60) for one in rest)
        rows.append(f"<tr>{_cell('th', first, 24, _ROW)}{told}</tr>")
    return (
        f'<div class="{marks}"><table><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _frame(frame: pd.DataFrame, nothing: str) -> str:
    """A frame as a table, scrolled on a screen where it is long, or the sentence for none."""
    if frame.empty:
        return f"<p>{escape(nothing)}</p>"
    marks = "scroll tall" if len(frame) > _MOST_ROWS else "scroll"
    return _grid([str(column) for column in frame.columns], _texts(frame), marks)


def _texts(frame: pd.DataFrame) -> list[list[str]]:
    return [["" if pd.isna(c) else str(c) for c in row] for row in frame.to_numpy(dtype=object)]


def _section(section: Section) -> str:
    return f"<h4>{escape(section.title)}</h4>\n{_grid(section.header, section.body)}"


def _table(table: Table) -> str:
    return "\n".join(
        [
            f'<h3 id="{_anchor(table.stem)}">{escape(table.title)}</h3>',
            f'<p class="caption">{escape(table.caption)}</p>',
            *(_section(section) for section in table.sections),
        ]
    )


def data_uri(figure: Figure) -> str:
    """The figure without title and caption as SVG or PNG in a data URI, whichever is shorter."""
    found = []
    for text in (figure.texts[0], figure.texts[-1]):  # the page has both as text
        text.set_visible(False)
    kept = [*figure.get_default_bbox_extra_artists(), *figure.legends]  # not in the layout, so cut
    with matplotlib.rc_context(style.SAVED):
        for ending, mime in (("svg", "image/svg+xml"), ("png", "image/png")):
            held = io.BytesIO()
            figure.savefig(
                held,
                format=ending,
                metadata=style.METADATA[ending],
                bbox_inches="tight",
                bbox_extra_artists=kept,
            )
            found.append(f"data:{mime};base64,{base64.b64encode(held.getvalue()).decode()}")
    return min(found, key=len)


def _number(stem: str) -> int:
    """Figures stand in the order of their numbers, the one without a number last."""
    found = re.match(r"F(\d+)_", stem)
    return int(found[1]) if found else 1000


def _figure(stem: str, figure: Figure) -> tuple[str, str]:
    """Title with the item's name, and the figure with its caption as text."""
    item = stem if _number(stem) == 1000 else stem.split("_")[0]
    title = f"{item} {figure.texts[0].get_text()}"
    caption = " ".join(figure.texts[-1].get_text().split())
    words = escape(f"{title}. {caption}", quote=True)
    return title, (
        f'<h3 id="{_anchor(stem)}">{escape(title)}</h3>\n<figure><img alt="{words}" '
        f'src="{data_uri(figure)}">\n<figcaption class="caption">{escape(caption)}</figcaption>'
        "</figure>"
    )


def failed_decodes(records: Records) -> pd.DataFrame:
    """Decodes that gave no text: suite, method, reason and how many."""
    failed = records.generations.loc[records.generations["status"] == "failed"]
    keys = {"benchmark": "suite", "method": "method", "reason": "reason"}
    named = failed[list(keys)].fillna("").rename(columns=keys)
    counts = named.groupby(list(keys.values()), sort=True).size()
    return counts.rename("decodes").reset_index()


def _coverage(facts: Facts) -> list[str]:
    """What of the plan is done, what is not, and how it ended; of records without a plan a line."""
    head = '<h2 id="coverage">Coverage</h2>'
    if facts.coverage.empty:
        return [head, f"<p>{_NO_PLAN}</p>"]
    return [
        head,
        _frame(facts.coverage, ""),
        '<h3 id="lacking">Shards that lack or are stale</h3>',
        _frame(facts.waiting, "None."),
        '<h3 id="ended">How shards ended when they last ran</h3>',
        _frame(facts.summary, "No run has left a summary here."),
    ]


def _headline(tables: Mapping[str, Table]) -> str:
    """Macro speed-up and accepted length of every method and arm of ours, from their tables."""
    found = []
    for stem, quantity in _HEADLINES:
        rows = tables[stem].frame
        ours = (rows["benchmark"] == "macro") & rows["status"].isin((MEASURED, STORED, MISSING))
        rows = rows.loc[ours & (rows["quantity"] == quantity)]
        found.append(rows.assign(cell=[cell_text(row) for _, row in rows.iterrows()]))
    rows = pd.concat(found)
    if rows.empty:
        return "<p>Nothing was decoded.</p>"
    names = [("method", "method"), ("objective", "objective"), ("device", "device")]
    return _section(
        pivot(rows, "Mean of the suites", names, "quantity", list(dict(_HEADLINES).values()))
    )


def _summary(records: Records) -> str:
    """A paragraph on what the page holds."""
    rows = records.generations.loc[~records.generations["warmup"].astype(bool)]
    n_ok = int((rows["status"] == "ok").sum())
    devices = sorted(set(rows["device"])) or ["no device"]
    told = (
        f"{n_ok:,} of {len(rows):,} decodes of {rows['clip_id'].nunique():,} clips in "
        f"{rows['benchmark'].nunique()} suites gave a text, on {' and '.join(devices)}. "
        f"Everything below is computed from {records.source} ({records.status})."
    )
    if records.lacking:
        told += f" Not in it, as not done: {', '.join(records.lacking)}."
    if records.stale:
        told += f" Reused though their code or inputs have changed: {', '.join(records.stale)}."
    return told


def report_page(records: Records, facts: Facts, boot: Bootstrap, stream: IO[str]) -> str:
    """The page's HTML.

    Args:
        records: of a run, or the tracked ones.
        facts: what is told beside them.
        boot: of the intervals.
        stream: where the progress goes.
    """
    figures = sorted((*FIGURE_OF_TABLE, *FIGURE_OF_FRAME), key=_number)
    line = CountLine("tables and figures", len(TABLES) + len(figures), stream)
    made = {}
    for stem in TABLES:
        made[stem] = make_table(stem, records, boot)
        line.update(len(made), stem)
    parts = [
        '<h2 id="headline">In short</h2>',
        _headline(made),
        '<h2 id="run">The run</h2>',
        _frame(facts.machine, "No manifest was found."),
        *_coverage(facts),
        '<h2 id="bad">Bad clips and failed decodes</h2>',
        (
            f"<p>{_NO_CLIPS}</p>"
            if facts.bad_clips is None
            else _frame(facts.bad_clips, _GOOD_CLIPS)
        ),
        _frame(failed_decodes(records), "No decode failed."),
        '<h2 id="figures">Figures</h2>',
        "<p>F3, the replay, is a page of its own: F3_replay.html, which vflash figures writes.</p>",
    ]
    entries = [
        ("headline", "In short"),
        ("run", "The run"),
        ("coverage", "Coverage"),
        ("bad", "Bad clips"),
    ]
    for place, stem in enumerate(figures, start=1):
        table = made[FIGURE_OF_TABLE[stem][0]] if stem in FIGURE_OF_TABLE else None
        title, text = _figure(stem, make_figure(stem, records, boot, table)[0])
        parts.append(text)
        entries.append((_anchor(stem), title))
        line.update(len(made) + place, stem)
    parts.append('<h2 id="tables">Tables</h2>')
    for stem, table in made.items():
        parts.append(_table(table))
        entries.append((_anchor(stem), table.title))
    contents = "\n".join(
        f'<li><a href="#{name}">{escape(words)}</a></li>' for name, words in entries
    )
    return _PAGE.substitute(
        title=escape(facts.title), summary=escape(_summary(records)), contents=contents,
        body="\n".join(parts),
    )  # fmt: skip
