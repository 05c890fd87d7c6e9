"""F3: the page says what the records say, at any time, in a browser without a network."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from tests.browser import needs_chromium, visit
from vflash_analysis.errors import InputError
from vflash_analysis.results import replay, replay_gif
from vflash_analysis.results.replay import (
    caption,
    chosen_clips,
    replay_of,
    replay_page,
    showing,
)
from vflash_analysis.results.report import write_replay
from vflash_analysis.results.tidy import NAMES
from vflash_analysis.schemas import BENCHMARKS


@pytest.fixture(scope="module")
def shown(records):
    return replay_of(records)


@pytest.fixture(scope="module")
def folder(shown, tmp_path_factory):
    place = tmp_path_factory.mktemp("replay")
    write_replay(place, shown, "Chosen so.")
    return place


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def test_the_clips_are_the_longest_of_the_first_four_suites_with_a_strip(records):
    assert chosen_clips(records) == {suite: f"{suite}-00" for suite in BENCHMARKS[:4]}
    bare = dataclasses.replace(records, strips={})
    rows = records.generations
    rows = rows.loc[(rows["method"] == "ar") & (rows["benchmark"] == "VDC")]
    longest = rows.loc[rows["new_tokens"].astype(int).idxmax(), "clip_id"]
    assert chosen_clips(bare)["VDC"] == longest
    assert replay_of(bare)[0].film is None


def test_suites_may_hold_clips_of_one_id(records):
    """Runs of two suites, each with clips 00 and 01: each suite shows its own."""

    def renamed(frame):
        suites = frame["clip_id"].str.rpartition("-")[0]
        return frame.assign(
            clip_id=frame["clip_id"].str[-2:], run_id=frame["run_id"] + "/" + suites
        )

    frames = {name: renamed(getattr(records, name)) for name in ("generations", "cycles")}
    same = dataclasses.replace(records, strips={}, **frames)
    shown = replay_of(same)
    assert [one.decodes[0].row["benchmark"] for one in shown] == list(BENCHMARKS[:4])
    ids = [one.decodes[0].clip_id for one in shown]
    assert ids == list(chosen_clips(same).values()) and len(set(ids)) < 4
    before = replay_of(dataclasses.replace(records, strips={}))
    assert [one.prompt for one in shown] == [one.prompt for one in before]


def test_the_page_holds_the_records(shown):
    data = data_of(replay_page(shown, "told"))
    assert data["caption"] == "told" and data["speed"] == 0.25 and len(data["clips"]) == 4
    for clip, one in zip(data["clips"], shown, strict=True):
        plain, tree = one.decodes
        assert clip["prompt"] == f"What does clip {plain.clip_id} show?" and clip["identical"]
        ((name, ratio),) = clip["speedups"]
        assert name == "Tree-60"
        assert ratio == pytest.approx(plain.ms_per_token / tree.ms_per_token, abs=1e-4)
        assert clip["film"]["frames"] == 4 and clip["film"]["width"] == 24
        for decode, own in zip(clip["decodes"], one.decodes, strict=True):
            assert decode["text"] == own.text
            assert decode["characters"] == own.characters.tolist()
            assert decode["ends_ms"] == pytest.approx(1000 * own.ends_s, abs=1e-3)
    assert data["end_ms"] == pytest.approx(1000 * max(one.decodes[0].decode_s for one in shown))


def test_the_caption_names_profile_and_target(records):
    assert "The pocket profile's target pocket-llava-onevision, " in caption(replay_of(records))
    unnamed = records.generations.assign(target="target")
    told = caption(replay_of(dataclasses.replace(records, generations=unnamed)))
    assert "The pocket profile's target, float32, on " in told


def test_another_token_takes_the_badge(records):
    rows = records.generations.copy()
    at = rows.index[(rows["clip_id"] == "VDC-00") & (rows["method"] == "tree60")]
    rows["token_ids"] = rows["token_ids"].astype(object)
    for place in at:
        ids = rows.at[place, "token_ids"].copy()
        ids[3] += 1
        rows.at[place, "token_ids"] = ids
    assert not showing(dataclasses.replace(records, generations=rows), "VDC-00").identical


def test_equal_data_give_equal_bytes(shown, folder, tmp_path):
    again = write_replay(tmp_path, shown, "Chosen so.")
    assert [path.name for path in again] == ["F3_replay.html", "F3_replay.gif"]
    for path in again:
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_the_animation_is_small_and_ends_in_a_rest(shown, folder):
    pictures, lasting = replay_gif.replay_frames(shown, "told")
    assert len(pictures) == len(lasting) <= replay_gif.MAX_FRAMES + 1
    assert all(ms % 10 == 0 for ms in lasting) and lasting[-1] == 3000
    end_ms = 1000 * max(one.decodes[0].decode_s for one in shown)
    assert 0 <= sum(lasting[:-1]) - 4 * end_ms < lasting[0]  # a quarter of real time
    with Image.open(folder / "F3_replay.gif") as found:
        assert found.size[0] == 830 and found.n_frames == len(pictures)
        assert found.info["loop"] == 0
    assert (folder / "F3_replay.gif").stat().st_size < 1_500_000


def test_all_decodes_of_a_clip_are_drawn_side_by_side(records, shown):
    def heads(one):
        """First and last column of the line above each decode's panel."""
        (picture, *_), _ = replay_gif.replay_frames([one], "told")
        grid = np.asarray(picture)
        tones = [ImageColor.getrgb(NAMES[decode.method].colour) for decode in one.decodes]
        top = next(y for y in range(len(grid)) if (grid[y] == tones[-1]).all(-1).sum() > 100)
        places = [np.flatnonzero((grid[top] == tone).all(-1)) for tone in tones]
        return [(int(xs[0]), int(xs[-1])) for xs in places]

    three = showing(records, "VDC-00", ("ar", "chain", "tree60"))
    assert heads(three) == [(12, 272), (284, 544), (556, 816)]  # from margin to margin
    assert heads(shown[0]) == [(12, 201), (213, 402)]  # two take half the width


def test_without_decodes_page_and_animation_say_so(records, tmp_path):
    empty = dataclasses.replace(records, generations=records.generations.iloc[:0])
    page, gif = write_replay(tmp_path, replay_of(empty), "Chosen so.")
    assert data_of(page.read_text())["clips"] == []
    with Image.open(gif) as found:
        assert found.size[0] == 830


def test_a_file_that_is_no_strip_is_named(records, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"bad.jpg: not readable as a film strip"):
        showing(dataclasses.replace(records, strips={"VDC-00": bad}), "VDC-00")
    Image.new("RGB", (10, 4)).save(bad, format="JPEG", comment="3")
    with pytest.raises(InputError, match=r"bad.jpg: found 3 frames in 10 pixels"):
        showing(dataclasses.replace(records, strips={"VDC-00": bad}), "VDC-00")


def texts_at(shown, seconds):
    return [decode.at(seconds) for one in shown for decode in one.decodes]


@needs_chromium
def test_it_plays_to_the_recorded_texts_without_a_word_on_the_console(shown, folder):
    page = visit(folder / "F3_replay.html")
    assert page.errors == [] and page.requests == []
    assert page.texts("live") == [decode.text for one in shown for decode in one.decodes]
    assert page.texts("badge") == ["= identical, token for token"] * 4
    assert page.texts("speedup") == [
        f" {name} {ratio:.2f}× on this clip" for one in shown for name, ratio in one.speedups
    ]
    assert page.texts("prompt") == [one.prompt for one in shown]


@needs_chromium
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
def test_at_a_given_time_exactly_the_recorded_part_stands_there(shown, folder, seconds):
    page = visit(folder / "F3_replay.html", fragment=f"t={seconds}")
    assert page.texts("live") == texts_at(shown, seconds)


@needs_chromium
def test_reduced_motion_begins_with_the_finished_texts(shown, folder):
    at_once = visit(
        folder / "F3_replay.html", flags=["--force-prefers-reduced-motion"], virtual_ms=50
    )
    assert at_once.texts("live") == [decode.text for one in shown for decode in one.decodes]
    assert '<button id="play" type="button" aria-label="Play">' in at_once.dom


KEYS = """<script>
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const told = [];
const note = () => told.push([state.playing, Math.round(1000 * state.ms / data.end_ms)]);
note(); press("ArrowRight"); note(); press("ArrowRight"); press("ArrowLeft"); note();
press(" "); note(); press(" "); note(); press("r"); note();
let fulls = 0; document.body.requestFullscreen = () => { fulls += 1; return Promise.resolve(); };
press("f"); told.push(fulls);
const out = document.createElement("p"); out.className = "told"; out.textContent = JSON.stringify(told);
document.body.append(out);
</script></body>"""


@needs_chromium
def test_the_keys_work_and_names_are_read_aloud(folder, tmp_path):
    page = tmp_path / "keys.html"
    page.write_text((folder / "F3_replay.html").read_text().replace("</body>", KEYS))
    found = visit(page, fragment="t=0", virtual_ms=5)
    (told,) = found.texts("told")
    paused, playing = False, True
    assert json.loads(told) == [
        [paused, 0], [paused, 20], [paused, 20], [playing, 20], [paused, 20], [playing, 0], 1,
    ]  # fmt: skip
    for name in ("Play", "Restart", "Speed of the playback", "Recorded time", "Playback"):
        assert f'aria-label="{name}"' in (folder / "F3_replay.html").read_text()


@needs_chromium
def test_it_plays_inside_another_page(shown, folder, tmp_path):
    outer = tmp_path / "outer.html"
    inner = replay.in_notebook((folder / "F3_replay.html").read_text())
    outer.write_text(f'<!doctype html><meta charset="utf-8">{inner}')
    page = visit(outer)
    assert page.errors == [] and page.requests == []


def test_every_drafted_method_has_its_own_ratio(records):
    shown = showing(records, "VDC-00", ("ar", "chain", "tree60"))
    plain, chain, tree = shown.decodes
    assert [name for name, _ in shown.speedups] == ["chain", "Tree-60"]
    assert [ratio for _, ratio in shown.speedups] == pytest.approx(
        [plain.ms_per_token / one.ms_per_token for one in (chain, tree)]
    )


def test_the_buttons_are_words():
    template = Path(replay.__file__).with_suffix(".html").read_text(encoding="utf-8")
    assert not set("▶⏸↺✓") & set(template)
