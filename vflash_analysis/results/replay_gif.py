"""F3 as an animated GIF, for pages that run no script: drawn with Pillow and matplotlib's fonts.

The same recorded commits as `replay`'s page, at a quarter of real time, in a loop that rests at the
end. Equal data give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import matplotlib
from PIL import Image, ImageColor, ImageDraw, ImageFont

from vflash_analysis.records import replace_atomically
from vflash_analysis.results.playback import Playback
from vflash_analysis.results.replay import F3, SPEED, Showing
from vflash_analysis.results.style import FAINT, INK, QUIET
from vflash_analysis.results.tidy import NAMES

WIDTH, MARGIN, GAP = 830, 12, 12  # pixels
FILM_HEIGHT, FILM_WIDTH = 76, 136  # at most
LINE, SMALL_LINE = 17, 15
MAX_LINES = 16  # of a text; a longer one shows its last lines
MAX_FRAMES, FRAME_MS, REST_MS = 40, 50, 3000
FILM_MS = 250
GOOD, BAD = "#00664d", "#a33b00"
_SHADES, _FILM_COLOURS = 6, 96


@cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: float) -> list[str]:
    """The text in lines of at most `width` pixels; a word that is wider is cut into pieces."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if not line or font.getlength(longer) <= width:
                line = longer
            else:
                lines.append(line)
                line = word
            while font.getlength(line) > width:
                fit = next(n for n in range(len(line), 0, -1) if font.getlength(line[:n]) <= width)
                lines.append(line[:fit])
                line = line[fit:]
        lines.append(line)
    return lines


class _Card:
    """One clip's place in the picture."""

    def __init__(self, shown: Showing, width: int) -> None:
        self.shown, self.width = shown, width
        self.films = _films(shown)
        self.column = (width - (len(shown.decodes) - 1) * GAP) // len(shown.decodes)
        head = width - (self.films[0].width + GAP if self.films else 0)
        self.prompt = _wrapped(shown.prompt, _font(12, True), head)[:3]
        self.text_font = _font(12)
        lines = [len(_wrapped(one.text, self.text_font, self.column)) for one in shown.decodes]
        self.lines = min(MAX_LINES, max(lines))
        self.top = max(FILM_HEIGHT if self.films else 0, (2 + len(self.prompt)) * SMALL_LINE)
        self.height = self.top + 8 + 2 * LINE + 6 + self.lines * LINE

    def draw(self, picture: Image.Image, x: int, y: int, ms: float, wall_ms: float) -> None:
        pen = ImageDraw.Draw(picture)
        left = x
        if self.films:
            film = self.films[int(wall_ms / FILM_MS) % len(self.films)]
            picture.paste(film, (x, y))
            left = x + film.width + GAP
        row = self.shown.decodes[0].row
        pen.text((left, y), str(row["benchmark"]), fill=QUIET, font=_font(11))
        for number, line in enumerate(self.prompt, 1):
            pen.text((left, y + number * SMALL_LINE), line, fill=INK, font=_font(12, True))
        told = "= identical" if self.shown.identical else "≠ differs"
        if all(1000 * one.decode_s <= ms for one in self.shown.decodes):
            ratios = (f"{name} {ratio:.2f}×" for name, ratio in self.shown.speedups)
            told += f"   {', '.join(ratios)} on this clip"
        place = (left, y + (1 + len(self.prompt)) * SMALL_LINE + 1)
        pen.text(place, told, fill=GOOD if self.shown.identical else BAD, font=_font(12))
        for number, one in enumerate(self.shown.decodes):
            self._panel(pen, one, x + number * (self.column + GAP), y + self.top + 8, ms)

    def _panel(self, pen: ImageDraw.ImageDraw, one: Playback, x: int, y: int, ms: float) -> None:
        tone = NAMES[one.method].colour
        pen.line((x, y, x + self.column, y), fill=tone, width=3)
        done = one.after(ms / 1000)
        whole = done == len(one.ends_s)
        passed = 1000 * one.decode_s if whole else ms
        name = one.title + (" ✓" if whole else "")
        pen.text((x, y + 4), name, fill=INK, font=_font(12, True))
        tokens = int(one.tokens[done])
        told = f"{passed:.0f} ms, {tokens} token{'s' * (tokens > 1)}"
        told += f", {passed / (tokens - 1):.2f} ms each" if tokens > 1 else ""
        pen.text((x, y + 4 + LINE), told, fill=QUIET, font=_font(11))
        text = one.text[: int(one.characters[done])]
        for number, line in enumerate(_wrapped(text, self.text_font, self.column)[-self.lines :]):
            place = (x, y + 4 + (2 + number) * LINE)
            pen.text(place, line, fill=INK, font=self.text_font)


def _films(shown: Showing) -> list[Image.Image]:
    """The clip's frames at the size in which they are shown."""
    film = shown.film
    if film is None:
        return []
    scale = min(FILM_HEIGHT / film.height, FILM_WIDTH / film.width)
    size = (max(1, round(film.width * scale)), max(1, round(film.height * scale)))
    with Image.open(film.path) as strip:
        whole = strip.convert("RGB")
    boxes = [(n * film.width, 0, (n + 1) * film.width, film.height) for n in range(film.frames)]
    return [whole.crop(box).resize(size, Image.Resampling.LANCZOS) for box in boxes]


class _Sheet:
    """Title, cards, caption; two cards side by side, unless one holds more than two decodes."""

    def __init__(self, shown: Sequence[Showing], told: str) -> None:
        n_across = 1 if any(len(one.decodes) > 2 for one in shown) else 2
        width = (WIDTH - 2 * MARGIN - (n_across - 1) * 2 * GAP) // n_across
        cards = [_Card(one, width) for one in shown]
        self.rows = [cards[n : n + n_across] for n in range(0, len(cards), n_across)]
        told = told or "These records hold no decode that can be played."
        self.caption = _wrapped(told, _font(11), WIDTH - 2 * MARGIN)
        heights = [max(card.height for card in row) for row in self.rows]
        self.tops = [MARGIN + 34 + sum(heights[:n]) + 2 * GAP * n for n in range(len(heights) + 1)]
        self.height = self.tops[-1] + len(self.caption) * SMALL_LINE + MARGIN

    def picture(self, ms: float, wall_ms: float, end_ms: float) -> Image.Image:
        made = Image.new("RGB", (WIDTH, self.height), "white")
        pen = ImageDraw.Draw(made)
        title = f"Autoregressive decoding and VFlash-FM, at {SPEED:g} of real time"
        pen.text((MARGIN, MARGIN - 2), title, fill=INK, font=_font(14, True))
        pen.line((MARGIN, MARGIN + 22, WIDTH - MARGIN, MARGIN + 22), fill=FAINT, width=2)
        reached = MARGIN + (WIDTH - 2 * MARGIN) * min(1.0, ms / end_ms)
        pen.line((MARGIN, MARGIN + 22, reached, MARGIN + 22), fill=QUIET, width=2)
        for row, top in zip(self.rows, self.tops, strict=False):
            for number, card in enumerate(row):
                card.draw(made, MARGIN + number * (card.width + 2 * GAP), top, ms, wall_ms)
        for number, line in enumerate(self.caption):
            place = (MARGIN, self.tops[-1] + number * SMALL_LINE)
            pen.text(place, line, fill=QUIET, font=_font(11))
        return made


def replay_frames(shown: Sequence[Showing], told: str) -> tuple[list[Image.Image], list[int]]:
    """The pictures of the animation and how many milliseconds each stands, a multiple of 10."""
    sheet = _Sheet(shown, told)
    if not shown:
        return [sheet.picture(0.0, 0.0, 1.0)], [REST_MS]
    end_ms = max(1000 * one.decode_s for each in shown for one in each.decodes)
    each_ms = max(FRAME_MS, 10 * math.ceil(end_ms / SPEED / MAX_FRAMES / 10))
    steps = range(math.ceil(end_ms / SPEED / each_ms) + 1)
    pictures = [sheet.picture(min(end_ms, n * each_ms * SPEED), n * each_ms, end_ms) for n in steps]
    return pictures, [each_ms] * (len(pictures) - 1) + [REST_MS]


def _palette(shown: Sequence[Showing]) -> Image.Image:
    """One palette for all pictures: shades of the inks, and what covers the films best."""
    films = [film for each in shown for film in _films(each)]
    mosaic = Image.new("RGB", (FILM_WIDTH, FILM_HEIGHT * max(1, len(films))), "white")
    for number, film in enumerate(films):
        mosaic.paste(film, (0, number * FILM_HEIGHT))
    tones = {NAMES[one.method].colour for each in shown for one in each.decodes}
    levels: list[int] = []
    for tone in (INK, QUIET, FAINT, GOOD, BAD, *sorted(tones)):
        ink = ImageColor.getrgb(tone)
        for share in range(_SHADES):
            levels += [round(255 + (one - 255) * share / (_SHADES - 1)) for one in ink[:3]]
    films_held = mosaic.quantize(_FILM_COLOURS, method=Image.Quantize.MAXCOVERAGE)
    levels += (films_held.getpalette() or [])[: 3 * _FILM_COLOURS]
    palette = Image.new("P", (1, 1))
    palette.putpalette(levels[: 3 * 256])
    return palette


def write_gif(folder: str | Path, shown: Sequence[Showing], told: str) -> Path:
    """Writes the animation as F3_replay.gif."""
    pictures, lasting = replay_frames(shown, told)
    palette = _palette(shown)
    flat = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in pictures]
    path = Path(folder) / f"{F3}.gif"
    save = partial(
        flat[0].save, format="GIF", save_all=True, append_images=flat[1:], duration=lasting,
        loop=0, optimize=False,
    )  # fmt: skip
    replace_atomically(path, save)
    return path
