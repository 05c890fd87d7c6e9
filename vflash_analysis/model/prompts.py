"""A clip as the target takes it: frames read, prompt ids and pixels made.

A clip without a file is a question alone, for a target that reads no video.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.read import ClipFrames
from vflash_analysis.model.frozen import Target


@dataclass(frozen=True)
class ReadPrompt:
    """The target's inputs for one clip.

    Attributes:
        input_ids: (P,)
        pixel_values: (1, T, 3, S, S); None for a clip without a file.
        read: the frames as they were read; None for a clip without a file.
        video_tokens: of the P.
    """

    input_ids: torch.Tensor
    pixel_values: torch.Tensor | None
    read: ClipFrames | None
    video_tokens: int


def read_prompt(target: Target, clip: Clip, reader: Any, num_frames: int) -> ReadPrompt:
    """Read a clip's frames and make the target's inputs.

    Args:
        target: the target.
        clip: the clip.
        reader: a `FrameReader`; not used for a clip without a file.
        num_frames: frames to read.

    Raises:
        InputError: the clip cannot be read, or the target does not take such a prompt.
    """
    read = reader.read_clip(clip, num_frames) if clip.path else None
    input_ids = target.build_prompt(clip.prompt, 0 if read is None else len(read.frames))
    pixels = None if read is None else target.prepare_frames(torch.from_numpy(read.frames))
    video_tokens = int((input_ids == target.video_token_id).sum())
    return ReadPrompt(input_ids, pixels, read, video_tokens)
