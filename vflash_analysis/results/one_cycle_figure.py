"""F2 drawn: plain decoding of some tokens above, the one cycle that committed them below.

Columns are slots: the anchor in column 0, slot k in column k. Fates of drafts are told apart by
colour, mark and line: accepted ones are ticked, the target's own token has an arrow, what was
discarded is struck through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.textpath import text_to_path

from vflash_analysis.results.one_cycle import BY_RULE, unpacked
from vflash_analysis.results.style import (
    INK,
    QUIET,
    SMALLEST,
    TEXT_WIDTH,
    Drawn,
    devices_text,
    finish,
    new_figure,
    no_data,
    styled,
)
from vflash_analysis.results.tidy import MISSING, checked, label, parse_setting

LEFT = 0.06  # inches, as all lengths here
COLUMN = (TEXT_WIDTH - 2 * LEFT) / 17  # of the anchor, 15 slots and the token after the last
BOX_WIDTH = COLUMN - 0.03
BOX, PITCH = 0.28, 0.37  # height of a token's box, and from one row to the next
SHOWN_BESIDE = 3  # other nodes of a slot of the tree that are written out


@dataclass(frozen=True)
class Fate:
    """How a token's box looks."""

    face: str
    edge: str
    mark: str = ""
    struck: bool = False


ACCEPTED = Fate("#d5efe4", "#00664d", "✓")
CORRECTION = Fate("#fde3bf", "#b35900", "→")
DISCARDED = Fate("#f1f1f1", "#8c8c8c", "×", struck=True)
NEUTRAL = Fate("white", "#8c8c8c")
ANCHOR = Fate("#dbe9f6", "#0072b2")
MASK = Fate("#e3e3e3", "#8c8c8c")


def _fitting(text: str) -> str:
    """As much of the text's beginning as a box is wide."""
    font = FontProperties(size=SMALLEST)
    n = len(text)
    while n > 1:
        points, _, _ = text_to_path.get_text_width_height_descent(text[:n], font, ismath=False)
        if points <= 72 * BOX_WIDTH - 2:
            break
        n -= 1
    return text[:n]


def boxed(text: str) -> str:
    """A token as its box holds it: what cannot be seen made visible, in two lines at most."""
    seen = text.replace("\n", "\\n").replace("\t", "\\t").strip(" ") or "␣"
    seen = seen.replace("<|", "‹").replace("|>", "›")  # special tokens, narrower
    first = _fitting(seen)
    if len(first) < len(seen):
        first = first[: -(-len(seen) // 2)]
    second = _fitting(seen[len(first) :])
    if len(first) + len(second) < len(seen):
        second = second[:-1] + "…"
    return f"{first}\n{second}" if second else first


def middle_of(column: int) -> float:
    """Where the box of a column has its middle."""
    return LEFT + column * COLUMN + BOX_WIDTH / 2


class _Sheet:
    """An axis in inches, filled from the top down."""

    def __init__(self, axis: Axes, height: float) -> None:
        self.axis, self.y = axis, height
        axis.set_xlim(0, TEXT_WIDTH)
        axis.set_ylim(0, height)
        axis.axis("off")

    def down(self, inches: float) -> None:
        self.y -= inches

    def say(self, text: str, x: float = LEFT, size: float = 7.5, **options: Any) -> None:
        """A line of text; the next row begins below it."""
        self.axis.text(x, self.y, text, ha="left", va="top", fontsize=size, **options)
        self.down(0.2)

    def box(self, column: int, text: str, fate: Fate) -> None:
        """A token in its column, in the row that begins here."""
        x = LEFT + column * COLUMN
        self.axis.add_patch(
            FancyBboxPatch(
                (x + 0.03, self.y - BOX + 0.02), BOX_WIDTH - 0.06, BOX - 0.04,
                boxstyle="round,pad=0.02,rounding_size=0.04",
                facecolor=fate.face, edgecolor=fate.edge, linewidth=0.9,
            )
        )  # fmt: skip
        middle = (x + BOX_WIDTH / 2, self.y - BOX / 2)
        tone = QUIET if fate.struck else INK
        self.axis.text(
            *middle, text, ha="center", va="center_baseline", fontsize=SMALLEST, color=tone,
            linespacing=0.95, parse_math=False,
        )  # fmt: skip
        if fate.struck:
            self.axis.plot(
                [x + 0.05, x + BOX_WIDTH - 0.05],
                [middle[1]] * 2,
                color=fate.edge,
                linewidth=0.6,
                alpha=0.6,
            )

    def mark(self, column: int, fate: Fate) -> None:
        """The mark of a fate below the box of the row that begins here."""
        self.axis.text(
            middle_of(column), self.y - BOX - 0.01, fate.mark,
            ha="center", va="top", fontsize=8, color=fate.edge, fontweight="bold",
        )  # fmt: skip

    def arrow(self, x: float, length: float) -> None:
        self.axis.annotate(
            "", (x, self.y - length), (x, self.y), arrowprops={"arrowstyle": "->", "color": QUIET}
        )

    def name(self, text: str) -> None:
        """What the row that begins here holds, in the anchor's column."""
        self.axis.text(LEFT, self.y - BOX / 2, text, ha="left", va="center", fontsize=7)

    def bar(self, text: str, start: float, width: float, face: str, edge: str) -> None:
        """A part of the machine, as wide as asked, in the row that begins here."""
        self.axis.add_patch(
            Rectangle((start, self.y - BOX), width, BOX, facecolor=face, edgecolor=edge, lw=1.0)
        )
        place = (start + width / 2, self.y - BOX / 2)
        self.axis.text(*place, text, ha="center", va="center", fontsize=7, color=INK)


def _keys(rows: pd.DataFrame) -> list[Mapping[str, str]]:
    return [parse_setting(text) for text in rows["setting"]]


def _plain(sheet: _Sheet, rows: pd.DataFrame) -> None:
    """The same tokens by plain decoding: one forward each, with its time."""
    total = rows["value"].sum()
    n = len(rows)
    sheet.say("Autoregressive: one target forward per token", size=8.5, fontweight="bold")
    if rows.empty:
        sheet.say("the records hold no plain decoding of these tokens", color=QUIET)
        return
    for column, ms in enumerate(rows["value"], 1):
        sheet.box(column, f"{ms:.1f}", Fate("#e9e9e9", "#595959"))
    sheet.name("target,\nms")
    sheet.down(BOX)
    for column in range(1, n + 1):
        sheet.arrow(middle_of(column), 0.12)
    sheet.down(0.12)
    for column, keys in enumerate(_keys(rows), 1):
        sheet.box(column, boxed(unpacked(keys["text"])), NEUTRAL)
    sheet.name("text")
    sheet.down(BOX + 0.07)
    sheet.say(
        f"{n} token{'s' * (n > 1)} = {n} target forward{'s' * (n > 1)}, {total:.1f} ms", color=QUIET
    )


def _machine(sheet: _Sheet, value: Mapping[str, float]) -> None:
    """From the cached context to the drafter; the first cycle projects the whole prompt."""
    projected = "projector: keys, values"
    if "context_projection_ms" in value:
        projected = f"projector: {value['context_projection_ms']:.1f} ms"
    context, draft_ms = value["context_tokens"], value["draft_ms"]
    parts = (
        (f"the target's hidden states of {context:,.0f} positions, cached", 3.05),
        (projected, 1.4),
        (f"drafter: one forward, {draft_ms:.1f} ms", 1.75),
    )
    x = LEFT + 0.03
    for number, (text, width) in enumerate(parts):
        sheet.bar(text, x, width, "#dbe9f6", "#0072b2")
        x += width
        if number < len(parts) - 1:
            sheet.axis.annotate(
                "", (x + 0.24, sheet.y - BOX / 2), (x, sheet.y - BOX / 2),
                arrowprops={"arrowstyle": "->", "color": QUIET},
            )  # fmt: skip
            x += 0.24
    sheet.down(BOX + 0.1)


def _drafted(sheet: _Sheet, drafts: pd.DataFrame, is_tree: bool) -> None:
    """The proposal: per slot the accepted draft or the most probable one, and what stood beside."""
    n_slots = int(drafts["slot"].max())
    beside: dict[int, pd.DataFrame] = {}
    for slot in range(1, n_slots + 1):
        own = drafts.loc[drafts["slot"] == slot]
        own = own.sort_values(["accepted", "probability"], ascending=False, kind="stable")
        if own.empty:
            continue
        first = own.iloc[0]
        fate = ACCEPTED if first["accepted"] else DISCARDED
        sheet.box(slot, boxed(first["text"]), fate)
        sheet.mark(slot, fate)
        beside[slot] = own.iloc[1:]
    sheet.name("drafts")
    sheet.down(PITCH + 0.08)
    if not is_tree:
        return
    for line in range(SHOWN_BESIDE):
        for slot, others in beside.items():
            if line < len(others):
                sheet.box(slot, boxed(others["text"].iloc[line]), DISCARDED)
        sheet.down(BOX + 0.02)
    for slot, others in beside.items():
        more = len(others) - SHOWN_BESIDE
        if more > 0:
            sheet.axis.text(
                middle_of(slot), sheet.y, f"+{more} ×", ha="center", va="top", fontsize=7,
                color=QUIET,
            )  # fmt: skip
    sheet.axis.text(LEFT, sheet.y, "more", ha="left", va="top", fontsize=7, color=QUIET)
    sheet.down(0.22)


def _committed(sheet: _Sheet, rows: pd.DataFrame) -> None:
    last = len(rows)
    for column, (keys, value) in enumerate(zip(_keys(rows), rows["value"], strict=True), 1):
        fate = ACCEPTED if value else CORRECTION
        sheet.box(column, boxed(unpacked(keys["text"])), fate)
        sheet.mark(column, fate)
    sheet.name("text")
    sheet.down(PITCH + 0.1)
    side = "right" if last > 8 else "left"
    words = "↑ the next anchor" if side == "left" else "the next anchor ↑"
    edge = middle_of(last) + (0.05 if side == "right" else -0.05)
    sheet.axis.text(edge, sheet.y, words, ha=side, va="top", fontsize=7.5, color=INK)
    sheet.down(0.2)


def _legend(sheet: _Sheet) -> None:
    x = LEFT
    for fate, words in (
        (ACCEPTED, "accepted draft"),
        (CORRECTION, "the target's own token (correction or bonus)"),
        (DISCARDED, "verified and discarded"),
    ):
        sheet.axis.text(x, sheet.y, fate.mark, ha="left", va="top", fontsize=9, color=fate.edge,
                        fontweight="bold")  # fmt: skip
        sheet.axis.text(x + 0.16, sheet.y, words, ha="left", va="top", fontsize=7.5)
        x += 0.4 + 0.06 * len(words)
    sheet.down(0.24)


@styled
def one_cycle_figure(frame: pd.DataFrame) -> Drawn:
    """F2 from `one_cycle_frame`."""
    frame = checked(frame)
    by = {str(name): rows for name, rows in frame.groupby("quantity", sort=False)}
    which = by["cycle_number"].iloc[0]
    title = "One real cycle, and plain decoding of the same tokens"
    if which["status"] == MISSING:
        figure, axes = new_figure(TEXT_WIDTH, 1.4)
        axes[0, 0].axis("off")
        no_data(axes[0, 0], f"the records keep no {label(which['method'])} cycle in detail")
        finish(
            figure, title, "A cycle is drawn from a decode whose drafts were recorded in detail."
        )
        return figure, frame
    is_tree = which["method"] != "chain"
    height = 3.8 + (SHOWN_BESIDE * (BOX + 0.02) + 0.22 if is_tree else 0)
    told = _caption(by, which)
    figure, axes = new_figure(TEXT_WIDTH, height + 0.95)
    sheet = _Sheet(axes[0, 0], height)
    value = {name: float(rows["value"].iloc[0]) for name, rows in by.items()}
    _legend(sheet)
    _plain(sheet, by.get("ar_forward_ms", frame.iloc[:0]))
    sheet.down(0.08)
    sheet.say(
        f"{'VFlash-FM' if which['objective'] == 'self_reveal' else 'Block drafting'}, "
        f"{label(which['method'])}: one drafter forward and one target forward",
        size=8.5, fontweight="bold",
    )  # fmt: skip
    _machine(sheet, value)
    drafts = _drafts_of(by)
    anchor = _keys(by["context_tokens"])[0]["anchor"]
    sheet.box(0, boxed(unpacked(anchor)), ANCHOR)
    for slot in range(1, int(drafts["slot"].max()) + 1):
        sheet.box(slot, "M", MASK)
    sheet.down(BOX)
    sheet.axis.text(LEFT, sheet.y - 0.02, "anchor", ha="left", va="top", fontsize=7, color=QUIET)
    sheet.down(0.17)
    _drafted(sheet, drafts, is_tree)
    rows = len(drafts) + 1
    verify = f"target verifies {rows} rows in one forward, {value['verify_ms']:.1f} ms"
    sheet.bar(verify, LEFT + 0.03, 16 * COLUMN - 0.09, "#e9e9e9", "#595959")
    sheet.down(BOX + 0.1)
    _committed(sheet, by["committed_token"])
    finish(figure, title, told)
    return figure, frame


def _drafts_of(by: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """A row per drafted token: slot, text, probability, accepted."""
    keys = _keys(by["draft_probability"])
    return pd.DataFrame(
        {
            "slot": [int(one["slot"]) for one in keys],
            "text": [unpacked(one["text"]) for one in keys],
            "probability": by["draft_probability"]["value"].to_numpy(),
            "accepted": by["draft_accepted"]["value"].to_numpy() == 1,
        }
    )


def _caption(by: Mapping[str, pd.DataFrame], which: pd.Series) -> str:
    chosen = parse_setting(which["setting"])
    committed = by["committed_token"]
    n, accepted = len(committed), int(committed["value"].sum())
    cycle_ms = float(by["cycle_ms"]["value"].iloc[0])
    plain = by.get("ar_forward_ms")
    beside = ""
    if plain is not None:
        forwards = f"{n} forward{'s' * (n > 1)}"
        beside = f", where plain decoding took {plain['value'].sum():.1f} ms in {forwards}"
    rule = "chosen by hand"
    if chosen["chosen"] == BY_RULE:
        median = by["median_accepted_drafts"]["value"].iloc[0]
        rule = f"the first kept in detail whose accepted drafts come nearest to the median, {median:.0f}"
    tree = "tree_ms" in by
    told = (
        f", {by['tree_ms']['value'].iloc[0]:.1f} ms of them for building the tree" if tree else ""
    )
    other = float(by["other_ms"]["value"].iloc[0])
    return (
        f"{accepted} draft{'s' * (accepted != 1)} accepted, {n} token{'s' * (n > 1)} committed in "
        f"{cycle_ms:.1f} ms{beside}; {other:.1f} ms are neither draft nor verify{told}. Cycle "
        f"{int(which['value']) + 1} of {int(which['n'])} of clip {unpacked(chosen['clip'])} "
        f"({which['benchmark']}), {rule}; n = 1 cycle, no interval. {devices_text(committed)}."
    )
