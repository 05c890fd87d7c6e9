"""Scenes drawn as frames: labels of patches, other numbers of frames, other scenes."""

import numpy as np
import pytest

from vflash_analysis.clips import pocket
from vflash_analysis.clips.wording import answer
from vflash_analysis.training import pocket_pool


def test_patch_labels_of_a_square_between_two_patches():
    under = np.zeros((1, 64, 64), np.uint8)
    under[0, 8:16, 12:20] = 5  # covers half of patches (row 1, columns 1 and 2)
    codes, offsets = pocket_pool._patch_labels(under)
    assert np.flatnonzero(codes[0]).tolist() == [9, 10]
    assert offsets[0, 9].tolist() == [0.5, 0.0]
    assert offsets[0, 10].tolist() == [-0.5, 0.0]


def test_a_scene_is_the_same_in_any_number_of_frames_and_a_range_takes_up_where_another_ends():
    draw = pocket_pool._draw
    whole, texts = draw(("target_evaluation", "VDC", range(4), 2))
    later, later_texts = draw(("target_evaluation", "VDC", range(1, 4, 2), 2))
    assert all(np.array_equal(a[1::2], b) for a, b in zip(whole, later, strict=True))
    assert [column[1::2] for column in texts] == later_texts
    longer, same_texts = draw(("target_evaluation", "VDC", range(2), 5))
    assert [column[:2] for column in texts] == same_texts
    assert [array.shape[1] for array in longer[:3]] == [5, 5, 5]
    scenes = pocket.scenes("target_evaluation", "VDC")
    assert texts[1] == [answer(next(scenes)) for _ in range(4)]


@pytest.mark.parametrize(("num_frames", "video_tokens"), [(2, 33), (9, 145)])
def test_a_clips_placeholders(num_frames, video_tokens):
    assert pocket_pool.placeholders(num_frames) == video_tokens  # 16 cells a frame, a newline


def test_a_pool_draws_its_scenes_in_a_fixed_order(monkeypatch):
    """Which scene is drawn by which process decides the order; it must not change."""
    jobs = []

    class Pool:
        def __enter__(self):
            return self

        def __exit__(self, *raised):
            return False

        def map(self, function, given):
            jobs.extend(given)
            return map(function, given)

    monkeypatch.setattr(pocket_pool, "worker_pool", Pool)
    monkeypatch.setattr(pocket, "FAMILIES", ("VDC", "MLVU"))
    pool = pocket_pool.draw_pool("target_evaluation", 3, num_frames=2)
    assert jobs == [
        ("target_evaluation", family, range(start, 3, 2), 2)
        for family in ("VDC", "MLVU")
        for start in (0, 1)
    ]
    further = pocket_pool.draw_pool("target_evaluation", 2, num_frames=2, first=3)
    first, then = set(), set()
    for family in ("VDC", "MLVU"):
        scenes = pocket.scenes("target_evaluation", family)
        first |= {answer(next(scenes)) for _ in range(3)}
        then |= {answer(next(scenes)) for _ in range(2)}
    assert set(pool.answers) == first and len(pool.answers) == 6
    assert set(further.answers) == then and len(further.answers) == 4
