"""Scenes drawn as frames, with what is to be seen in them: what the pocket target learns from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from vflash_analysis.clips import pocket
from vflash_analysis.clips.wording import answer, question
from vflash_analysis.workers import worker_pool

NUM_FRAMES = 9  # of a clip, unless another number is asked for
IMAGE_SIZE, PATCH_SIZE = 64, 8  # pixels
GRID = IMAGE_SIZE // PATCH_SIZE


@dataclass(frozen=True)
class Pool:
    """Scenes drawn once and used many times, in order of their index.

    Attributes:
        frames: (N, T, 64, 64, 3) uint8, resized as the target's preprocessing does.
        codes: (N, T, 64) uint8, the shape under most of each patch (0: floor), as `pocket.render`
            numbers them.
        offsets: (N, T, 64, 2) float16, from the patch's centre to the centre of that shape, in
            patches.
        floors: (N,) uint8.
        questions, answers: N texts each.
    """

    frames: np.ndarray
    codes: np.ndarray
    offsets: np.ndarray
    floors: np.ndarray
    questions: list[str]
    answers: list[str]


def _draw(
    job: tuple[str, str, range, int],
) -> tuple[list[np.ndarray], list[list[str]]]:
    """Draw some of the scenes of a split and family, in a number of frames: a pool's four arrays
    and its two texts."""
    split, family, wanted, num_frames = job
    torch.set_num_threads(1)
    source, out = pocket.scenes(split, family), []
    for index in range(wanted.stop):
        scene = next(source)
        if index not in wanted:
            continue
        rng = np.random.default_rng([7, pocket.FAMILIES.index(family), index])
        width, height = pocket.SIZES[rng.integers(len(pocket.SIZES))]
        times = (np.arange(num_frames) + 0.5 + rng.uniform(-0.1, 0.1)) / num_frames
        pictures, under = pocket.render(scene, times, width, height, rng)
        planes = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
        small = F.interpolate(planes, (IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", antialias=True)
        frames = small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
        ys = (np.arange(IMAGE_SIZE) * height // IMAGE_SIZE)[:, None]
        xs = (np.arange(IMAGE_SIZE) * width // IMAGE_SIZE)[None]
        codes, offsets = _patch_labels(under[:, ys, xs])
        floor = np.uint8(list(pocket.FLOORS).index(scene.floor))
        out.append((frames, codes, offsets, floor, question(scene), answer(scene)))
    columns = list(zip(*out, strict=True))
    arrays = [np.stack(column) for column in columns[:4]]
    return arrays, [list(column) for column in columns[4:]]


def _patch_labels(under: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels of each patch from what is under each pixel, (T, 64, 64) -> (T, 64) uint8 and (T, 64,
    2) float16."""
    n_frames = len(under)
    patches = (
        under.reshape(n_frames, GRID, PATCH_SIZE, GRID, PATCH_SIZE)
        .transpose(0, 1, 3, 2, 4)
        .reshape(n_frames, GRID * GRID, -1)
    )
    codes = np.zeros((n_frames, GRID * GRID), np.uint8)
    offsets = np.zeros((n_frames, GRID * GRID, 2), np.float16)
    most = np.full((n_frames, GRID * GRID), PATCH_SIZE * PATCH_SIZE // 8)
    middles = (
        np.stack(np.divmod(np.arange(GRID * GRID), GRID)[::-1], -1) + 0.5
    )  # (64, 2) as x, y in patches
    for code in np.unique(under[under > 0]):
        area = (patches == code).sum(-1)
        for frame in np.flatnonzero(area.any(-1)):
            ys, xs = np.nonzero(under[frame] == code)
            centre = np.array([xs.mean() + 0.5, ys.mean() + 0.5]) / PATCH_SIZE
            wins = area[frame] > most[frame]
            codes[frame, wins], offsets[frame, wins] = code, (centre - middles)[wins]
            most[frame, wins] = area[frame, wins]
    return codes, offsets


def placeholders(num_frames: int) -> int:
    """Video tokens of a clip of that many frames: its cells and the newline."""
    return num_frames * (GRID // 2) ** 2 + 1


def draw_pool(
    split: str, scenes_per_family: int, num_frames: int = NUM_FRAMES, first: int = 0
) -> Pool:
    """Draw scenes of each family of a split, from its `first` on, the families mixed evenly."""
    n = 2  # parts of a family; another number would mix the scenes in another order
    jobs = [
        (split, family, range(first + start, first + scenes_per_family, n), num_frames)
        for family in pocket.FAMILIES
        for start in range(n)
    ]
    with worker_pool() as pool:
        parts = []
        for part in pool.map(_draw, jobs):
            parts.append(part)
            print(f"pool: {len(parts)} of {len(jobs)} parts drawn", flush=True)
    return join_parts(parts)


def join_parts(parts: list[tuple[list[np.ndarray], list[list[str]]]]) -> Pool:
    """One pool of several parts, in an order drawn once."""
    order = np.random.default_rng(0).permutation(sum(len(arrays[0]) for arrays, _ in parts))
    frames, codes, offsets, floors = (
        np.concatenate([arrays[i] for arrays, _ in parts])[order] for i in range(4)
    )
    questions, answers = ([text for _, texts in parts for text in texts[i]] for i in range(2))
    return Pool(
        frames,
        codes,
        offsets,
        floors,
        [questions[i] for i in order],
        [answers[i] for i in order],
    )
