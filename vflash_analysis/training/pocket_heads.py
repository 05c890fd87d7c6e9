"""What the pocket target is asked about each place while it learns, and the heads that answer.

A captioning loss alone teaches little of shape and place. The heads are thrown away after training.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vflash_analysis.clips import pocket
from vflash_analysis.training.pocket_pool import GRID

N_COLOURS, N_SHAPES, N_SIZES, N_FLOORS = 6, 4, 2, 4
MAX_SHAPES = 3


class DenseHead(nn.Linear):
    """Reads from one hidden state what is at its place: colour, shape, size and the centre, thrown
    away after training.

    With `moving` also the step since the last frame, the first frame's colour and size of the
    shape, when it changed, and how many shapes are gone.
    """

    def __init__(self, width: int, moving: bool = False) -> None:
        self.parts = [N_COLOURS + N_FLOORS + 1, N_SHAPES + 2, N_SIZES + 1, 2]
        self.parts += [2, N_COLOURS, N_SIZES, 3, MAX_SHAPES + 1] if moving else []
        super().__init__(width, sum(self.parts))

    def loss(self, hidden: Tensor, labels: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Mean loss over places, and the shares of right colours, shapes and sizes over places with
        a shape.

        Args:
            hidden: (..., W).
            labels: as from `dense_labels`, each (...) or (..., 2).
        """
        outs = dict(zip(_LABELS, self(hidden).float().split(self.parts, dim=-1), strict=False))
        covered = labels["colour"] < N_COLOURS
        total, right = torch.zeros(()), {}
        for name, out in outs.items():
            if name in ("colour", "shape", "size"):
                total = total + F.cross_entropy(out.flatten(0, -2), labels[name].flatten())
                right[name] = (out.argmax(-1) == labels[name])[covered].float().mean().item()
                continue
            seen = covered if name == "centre" else covered & labels["followed"]
            seen = torch.ones_like(covered) if name == "gone" else seen
            if not seen.any():  # a single frame has no step
                continue
            if name in ("centre", "step"):
                off = F.smooth_l1_loss(out[seen], labels[name][seen], beta=0.2)
                total = total + PRECISION[name] * off
            else:
                total = total + F.cross_entropy(out[seen], labels[name][seen])
        return total, right


# A shape moves half a patch between frames: motion is read only once centres are read finely.
PRECISION = {"centre": 4.0, "step": 8.0}
_LABELS = (
    "colour",
    "shape",
    "size",
    "centre",
    "step",
    "first_colour",
    "first_size",
    "change",
    "gone",
)


def dense_labels(codes: Tensor, offsets: Tensor, floors: Tensor) -> dict[str, Tensor]:
    """Labels of every place of clips, from the pool's arrays or from `cells`.

    Args:
        codes: (B, T, N), as `pocket.render` numbers them.
        offsets: (B, T, N, 2) from the place's middle to the shape's centre, in patches.
        floors: (B,).

    Returns:
        colour (floors follow the colours, the star is last), shape, size: (B, T, N) classes.
        centre: (B, T, N, 2).
        step: (B, T, N, 2), how far the shape at the place moved since the last frame, in patches.
        first_colour, first_size: (B, T, N) of that shape in the first frame.
        change: (B, T, N), whether that shape looks other than in the first frame: 0 no, 1 since
            the clip's first half, 2 since its second.
        followed: (B, T, N), whether step, first looks and change are known.
        gone: (B, T, N), how many of the first frame's shapes are not in this frame.
    """
    star, some = codes == pocket.STAR_CODE, codes > 0
    index = (codes - 1).clamp(min=0)
    colour = torch.where(some, index % N_COLOURS, N_COLOURS + floors[:, None, None])
    shape = torch.where(some & ~star, 1 + index // N_COLOURS % N_SHAPES, 0)
    size = torch.where(some, index // (N_COLOURS * N_SHAPES), 0).clamp(max=1)
    labels = {
        "colour": torch.where(star, N_COLOURS + N_FLOORS, colour),
        "shape": torch.where(star, N_SHAPES + 1, shape),
        "size": torch.where(some & ~star, 1 + size, 0),
        "centre": offsets,
    }
    side = math.isqrt(codes.shape[-1])
    scale = GRID // side
    rows, columns = np.divmod(np.arange(side * side), side)
    middles = (torch.from_numpy(np.stack([columns, rows], -1)) + 0.5) * scale  # (N, 2) in patches
    # A scene's shapes differ in shape, so a shape is followed by it: one centre per frame and
    # shape, NaN when not seen.
    member = F.one_hot(shape, N_SHAPES + 1)[..., None].float()  # (B, T, N, S, 1)
    centres = (member * (offsets + middles)[..., None, :]).sum(2) / member.sum(2)  # (B, T, S, 2)
    steps = torch.cat([torch.full_like(centres[:, :1], math.nan), centres.diff(dim=1)], dim=1)
    looks = {}
    for name, value in (("first_colour", colour), ("first_size", size)):
        of_shape = (member[:, 0, :, :, 0] * value[:, 0, :, None]).amax(1).long()  # (B, S)
        looks[name] = of_shape.gather(1, shape.flatten(1)).view_as(shape)
    seen = member[..., 0].amax(2).bool()  # (B, T, S)
    gone = (seen[:, :1] & ~seen).sum(-1)[..., None].expand_as(shape)
    code = (member[..., 0] * codes[..., None]).amax(2)  # (B, T, S)
    changed = seen & (code != code[:, :1])
    late = changed.long().argmax(1, keepdim=True) >= codes.shape[1] / 2  # (B, 1, S)
    change = torch.where(changed, 1 + late.long(), 0).gather(2, shape.flatten(2)).view_as(shape)
    at_place = shape[..., None].expand(*shape.shape, 2)
    step = steps.gather(2, at_place)  # (B, T, N, 2)
    first_seen = member[:, 0, :, :, 0].amax(1).bool().gather(1, shape.flatten(1)).view_as(shape)
    followed = first_seen & step.isfinite().all(-1)
    return labels | looks | {"step": step, "followed": followed, "change": change, "gone": gone}


def cells(codes: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of the pooled 2 x 2 cells: those of the patch nearest to its shape's centre.

    Args:
        codes: (B, T, 64).
        offsets: (B, T, 64, 2).

    Returns:
        (B, T, 16) and (B, T, 16, 2), offsets from the cell's middle.
    """
    half = GRID // 2
    order = (
        torch.arange(GRID * GRID).view(half, 2, half, 2).permute(0, 2, 1, 3).reshape(-1, 4)
    )  # (16, 4)
    distance = offsets.norm(dim=-1).masked_fill(codes == 0, math.inf)[..., order]  # (B, T, 16, 4)
    best = distance.argmin(-1, keepdim=True)
    code = codes[..., order].gather(-1, best)[..., 0]
    within = torch.tensor(
        [[-0.5, -0.5], [0.5, -0.5], [-0.5, 0.5], [0.5, 0.5]]
    )  # of the four patches
    offset = (offsets[..., order, :] + within).gather(-2, best[..., None].expand(*best.shape, 2))[
        ..., 0, :
    ]
    return code, offset
