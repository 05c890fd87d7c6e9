"""Generated scenes: splits share nothing, files are what the scene says, texts tell what is shown."""

import itertools
import os
from pathlib import Path

import av
import numpy as np
import pytest

from vflash_analysis.clips import pocket, wording
from vflash_analysis.clips.read import FrameReader
from vflash_analysis.errors import InputError


def _scenes(split: str, family: str, n: int) -> list[pocket.Scene]:
    return list(itertools.islice(pocket.scenes(split, family), n))


def test_splits_share_no_description_and_repeat_none():
    seen: dict[str, str] = {}
    for split in pocket.SPLITS:
        for family in pocket.FAMILIES:
            for scene in _scenes(split, family, 15):
                description = scene.description()
                assert description not in seen or seen[description] != f"{split}/{family}"
                assert seen.get(description, split).split("/")[0] == split
                seen[description] = f"{split}/{family}"
                assert scene.split() == split


def test_the_same_scene_in_another_place_of_the_same_third_stays_in_its_split():
    scene = _scenes("suites", "VDC", 1)[0]
    moved = pocket.replace(
        scene, shapes=tuple(pocket.replace(s, y=s.y + 0.01) for s in scene.shapes)
    )
    assert moved.description() == scene.description()
    assert moved.split() == "suites"


def test_unknown_split_and_family_are_refused_by_name():
    with pytest.raises(InputError, match=r"'training'.*target_training"):
        next(pocket.scenes("training", "VDC"))
    with pytest.raises(InputError, match=r"'vdc'.*VDC"):
        pocket.draw_scene(np.random.default_rng(0), "vdc")


@pytest.mark.parametrize("family", pocket.FAMILIES)
def test_shapes_stay_in_the_picture(family):
    for scene in _scenes("target_evaluation", family, 10):
        for shape, time in itertools.product(scene.shapes, np.linspace(0, 1, 31)):
            phase = min(int(time * pocket.N_PHASES), pocket.N_PHASES - 1)
            _, size, visible = shape.look(phase)
            x, y = shape.centre(float(time))
            margin = pocket.RADII[size] - 1e-5
            assert not visible or (margin <= x <= 1 - margin and margin <= y <= 1 - margin)


def test_look_before_and_after_each_event():
    def look(kind, value=""):
        shape = pocket.Shape(
            "circle", "red", "small", 0.5, 0.5, ("still",) * 3, 0.2, pocket.Event(kind, 2, value)
        )
        assert shape.look(0) == shape.look(1) == ("red", "small", True)
        return shape.look(2)

    assert look("turns", "blue") == ("blue", "small", True)
    assert look("grows") == ("red", "large", True)
    assert look("vanishes") == ("red", "small", False)


def test_centre_moves_only_in_its_phase():
    shape = pocket.Shape("circle", "red", "small", 0.2, 0.5, ("still", "right", "up"), 0.3)
    assert shape.centre(0.0) == shape.centre(1 / 3) == (0.2, 0.5)
    assert shape.centre(0.5) == pytest.approx((0.35, 0.5))
    assert shape.centre(1.0) == pytest.approx((0.5, 0.2))


def test_under_tells_what_is_drawn():
    shape = pocket.Shape("square", "green", "large", 0.5, 0.5, ("still",) * 3, 0.2)
    scene = pocket.Scene("LVB", "pale", (shape,), star_phase=2)
    pictures, under = pocket.render(scene, np.array([0.1, 0.9]), 96, 96, np.random.default_rng(0))
    assert pictures.shape == (2, 96, 96, 3) and pictures.dtype == np.uint8
    code = 1 + list(pocket.COLOURS).index("green") + 6 * (pocket.SHAPES.index("square") + 4)
    assert set(np.unique(under[0])) == {0, code}
    assert set(np.unique(under[1])) == {0, code, pocket.STAR_CODE}
    rows, columns = np.nonzero(under[0] == code)
    side = 2 * 0.88 * 0.19 * 96
    assert np.ptp(rows) + 1 == np.ptp(columns) + 1 == pytest.approx(side, abs=1.1)
    drawn = pictures[
        0, rows.min() + 2 : rows.max() - 1, columns.min() + 2 : columns.max() - 1
    ].mean((0, 1))
    assert np.abs(drawn - pocket.COLOURS["green"]).max() < 3


def test_files_read_back_as_the_scene(tmp_path):
    clips = pocket.make_split("suites", 1, tmp_path)
    assert [clip.benchmark for clip in clips] == list(pocket.FAMILIES)
    before = {clip.path: clip.facts["sha256"] for clip in clips}
    again = pocket.make_split("suites", 1, tmp_path / "again")
    assert [clip.facts["sha256"] for clip in again] == list(before.values())
    with FrameReader(timeout_s=30) as reader:
        for clip, scene in zip(
            clips, (_scenes("suites", f, 1)[0] for f in pocket.FAMILIES), strict=True
        ):
            frames = reader.read(clip.path, 9).frames
            shape = next(s for s in scene.shapes if s.moves[0] in pocket.MOVES)
            x, y = shape.centre(0.06)
            height, width = frames.shape[1:3]
            pixel = frames[0, int(y * height), int(x * width)].astype(int)
            assert np.abs(pixel - pocket.COLOURS[shape.colour]).max() < 45, (clip.clip_id, pixel)
            assert clip.reference == wording.answer(scene)


def test_a_clip_may_have_to_hold_more_frames_than_its_rate_gives(tmp_path):
    (scene,) = _scenes("suites", "VDC", 1)
    facts = [
        pocket.write_mp4(tmp_path / f"{least}.mp4", scene, np.random.default_rng(3), least)
        for least in (0, 5, 90)
    ]
    assert facts[0] == facts[1] and facts[0]["n_frames"] < 90  # enough already: as it was
    assert 91 <= facts[2]["n_frames"] <= 95 and facts[2]["fps"] > facts[0]["fps"]
    with av.open(str(tmp_path / "90.mp4")) as held:
        assert held.streams.video[0].frames == facts[2]["n_frames"]
    assert (tmp_path / "0.mp4").read_bytes() == (tmp_path / "5.mp4").read_bytes()


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"no video"])
def test_a_damaged_file_is_written_again(tmp_path, damage):
    first = pocket.make_split("suites", 1, tmp_path)
    path = Path(first[0].path)
    kept = {clip.path: os.stat(clip.path).st_mtime_ns for clip in first[1:]}
    path.write_bytes(damage(path.read_bytes()))
    assert pocket.make_split("suites", 1, tmp_path) == first  # the digest of the file included
    assert {name: os.stat(name).st_mtime_ns for name in kept} == kept


@pytest.mark.parametrize("family", pocket.FAMILIES)
def test_answers_name_what_is_seen_and_questions_do_not(family):
    for scene in _scenes("drafter_training", family, 40):
        text, asked = wording.answer(scene), wording.question(scene)
        assert text[0].isupper() and text.endswith(".") and "  " not in text
        assert scene.floor in text
        told = {
            word
            for kind in ("colour", "size", "direction", "place")
            for word in wording.LEXICON[kind]
        }
        assert not told & set(asked.lower().replace("?", "").replace(".", "").split())
        for shape in scene.shapes:
            assert shape.shape in text
            if family != "Video-MME":
                assert shape.event is None or shape.event.kind in text or shape.event.phase > 2


def test_attribute_matches_counts_missing_and_surplus_words():
    found = wording.attribute_matches(
        "A small red circle rolls upwards.", "A small blue circle and a large red square roll."
    )
    assert found["colour"] == (0, 2)
    assert found["size"] == (1, 2)
    assert found["shape"] == (1, 2)
    assert found["direction"] == (0, 1)
    assert found["floor"] == (0, 0)


def test_accuracy_counts_sum_attributes_apart_from_motion_and_events():
    found = wording.accuracy_counts(
        "A small red circle rolls upwards.", "A small blue circle rolls upwards, late."
    )
    assert found == {"static_accuracy": (2, 3), "dynamic_accuracy": (1, 2)}
