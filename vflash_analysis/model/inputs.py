"""From frames and a question to the target's inputs, in plain torch, as its files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.nn import functional

from vflash_analysis.errors import InputError
from vflash_analysis.model.source import reading
from vflash_analysis.strict import Bounds, convert, read_object

if TYPE_CHECKING:
    from vflash_analysis.model.frozen import Target

# Interpolation codes of preprocessor files (Pillow's) that a video model may ask for.
RESAMPLING = {2: "bilinear", 3: "bicubic"}
_SIDE = Annotated[int, Bounds(1, 16384)]  # pixels
_RESCALE = Annotated[float, Bounds(1e-6, 1)]
_MEAN, _STD = Annotated[float, Bounds(-1000, 1000)], Annotated[float, Bounds(1e-6, 1000)]
FRAMES_AT_ONCE = 4  # in fp32 and in their own size: 128 frames of 1080p would be 3.2 GB


@dataclass(frozen=True)
class FramePreprocessing:
    """How frames become pixels: resize (antialiased), round to uint8, rescale, normalise."""

    height: int
    width: int
    interpolation: str  # "bicubic" or "bilinear"
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    file: str = "memory"


def read_chat_template(folder: Path) -> tuple[str, str] | None:
    """The processor's chat template and the file it came from; None when only the tokenizer's.

    A processor's template knows video placeholders, the tokenizer's own often does not, so the
    processor's files come first.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        with reading(f"{jinja}: not readable as text"):
            return jinja.read_text(encoding="utf-8"), str(jinja)
    for name in ("chat_template.json", "processor_config.json"):
        path = folder / name
        if path.is_file():
            template = read_object(path).get("chat_template")
            if isinstance(template, str):
                return template, str(path)
    return None


def read_frame_preprocessing(folder: Path) -> FramePreprocessing:
    """Frame settings of a checkpoint, from the file Hugging Face itself would read first.

    Raises:
        InputError: no preprocessor file, or a setting that is missing or not implemented.
    """
    nested = folder / "processor_config.json"
    if nested.is_file():
        settings = read_object(nested).get("video_processor")
        if isinstance(settings, dict):
            return parse_frame_preprocessing(settings, str(nested))
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        path = folder / name
        if path.is_file():
            return parse_frame_preprocessing(read_object(path), str(path))
    raise InputError(f"{folder}: found no video_preprocessor_config.json for the frames")


def parse_frame_preprocessing(settings: Mapping[str, Any], file: str) -> FramePreprocessing:
    """Frame settings from a preprocessor's JSON object.

    Args:
        settings: the object.
        file: where it came from, for messages.

    Raises:
        InputError: a setting is missing or asks for a step that is not implemented.
    """
    size = settings.get("size")
    if not isinstance(size, Mapping) or not {"height", "width"} <= set(size):
        raise InputError(f"{file}: size: found {size!r}, allowed: height and width")
    height, width = (convert(size[s], _SIDE, f"{file}: size.{s}") for s in ("height", "width"))
    for step in ("do_center_crop", "do_pad"):
        if settings.get(step) and not (step == "do_pad" and height == width):
            raise InputError(f"{file}: {step}: found true, allowed: false")
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if settings.get(step, True) is not True:
            raise InputError(f"{file}: {step}: found {settings[step]!r}, allowed: true")
    resample = settings.get("resample", 3)
    if not isinstance(resample, int) or resample not in RESAMPLING:
        raise InputError(f"{file}: resample: found {resample!r}, allowed: {RESAMPLING}")
    mean, std = settings.get("image_mean"), settings.get("image_std")
    for name, values in (("image_mean", mean), ("image_std", std)):
        if not isinstance(values, list) or len(values) != 3:
            raise InputError(f"{file}: {name}: found {values!r}, allowed: three numbers")
    assert mean is not None and std is not None
    return FramePreprocessing(
        height=height,
        width=width,
        interpolation=RESAMPLING[resample],
        rescale_factor=convert(
            settings.get("rescale_factor", 1 / 255), _RESCALE, f"{file}: rescale_factor"
        ),
        mean=tuple(convert(value, _MEAN, f"{file}: image_mean") for value in mean),
        std=tuple(convert(value, _STD, f"{file}: image_std") for value in std),
        file=file,
    )


def pixel_values(
    frames: torch.Tensor, settings: FramePreprocessing, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Turn uint8 frames into pixel values: resize, round to uint8, rescale, normalise.

    Args:
        frames: (T, H, W, 3) uint8, a tensor or an array.
        settings: the checkpoint's.
        dtype: of the result.
        device: of the work and the result.

    Returns:
        (1, T, 3, height, width)

    Raises:
        InputError: other shapes or types, or no frame.
    """
    frames = torch.as_tensor(frames)
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[-1] != 3 or not len(frames):
        raise InputError(
            f"frames: found {frames.dtype} {tuple(frames.shape)}, allowed: uint8 (T, H, W, 3), "
            "T >= 1"
        )
    size = (settings.height, settings.width)
    mean = torch.tensor(settings.mean, device=device).view(1, 3, 1, 1)
    std = torch.tensor(settings.std, device=device).view(1, 3, 1, 1)
    result = torch.empty(1, len(frames), 3, *size, dtype=dtype, device=device)
    for begin in range(0, len(frames), FRAMES_AT_ONCE):
        part = slice(begin, begin + FRAMES_AT_ONCE)
        pixels = frames[part].to(device).permute(0, 3, 1, 2).to(torch.float32)  # (t, 3, H, W)
        if pixels.shape[-2:] != size:
            pixels = functional.interpolate(
                pixels, size=size, mode=settings.interpolation, align_corners=False, antialias=True
            )
            pixels = pixels.round().clamp(0, 255)
        result[0, part] = (pixels * settings.rescale_factor - mean) / std
    return result


def user_turn(target: Target, content: str | list[dict[str, str]]) -> str:
    """One user turn through the chat template, up to where the answer begins.

    Args:
        target: its tokenizer and chat template are used.
        content: a text, or parts of a kind each as templates with pictures take them.

    Raises:
        InputError: the template is no template, or fails on such a turn.
    """
    with reading(f"{target.template_file}: the chat template cannot be filled"):
        text: str = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=target.template,
            add_generation_prompt=True,
            tokenize=False,
        )
    return text


def prompt_text(target: Target, question: str) -> str:
    """The user turn of a video and a question."""
    return user_turn(target, [{"type": "video"}, {"type": "text", "text": question}])


def turn_ids(target: Target, text: str) -> list[int]:
    """Token ids of a turn; its special tokens are spelt out by the template.

    Raises:
        InputError: the tokenizer's files load, but do not make a tokenizer that works.
    """
    with reading(f"{target.source}: tokenizer.json or tokenizer_config.json: not usable"):
        ids: list[int] = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def prompt_ids(target: Target, question: str, video_tokens: int) -> list[int]:
    """Token ids of `prompt_text`.

    Args:
        target: its tokenizer and chat template are used.
        question: the user's text.
        video_tokens: placeholders that the template's single `<video>` becomes.

    Raises:
        InputError: the template, or a question that spells a placeholder, does not give exactly
            one video placeholder and no image.
    """
    ids = turn_ids(target, prompt_text(target, question))
    video_id = target.video_token_id
    videos, images = ids.count(video_id), ids.count(target.image_token_id)
    if videos != 1 or images:
        raise InputError(
            f"{target.template_file}: the chat template with this question gives {videos} video and "
            f"{images} image placeholders, allowed: 1 video"
        )
    place = ids.index(video_id)
    return ids[:place] + [video_id] * video_tokens + ids[place + 1 :]


def check_placeholders(
    target: Target, input_ids: torch.Tensor, pixels: torch.Tensor | None
) -> None:
    """Refuse ids and pixels that do not belong together.

    Args:
        target: tells placeholders and video tokens of a frame.
        input_ids: (P,)
        pixels: (1, T, 3, S, S) or None.

    Raises:
        InputError: placeholders without pixels (the model would silently run on the placeholder's
            embedding), pixels without placeholders, or counts that differ; any pixels for a target
            that reads no video.
    """
    if target.preprocessing is None:
        if pixels is not None:
            raise InputError(f"prefill: found pixel values, but {target.source} reads no video")
        return
    video_tokens = int((input_ids == target.video_token_id).sum())
    if bool((input_ids == target.image_token_id).any()):
        raise InputError("prefill: found image placeholders, allowed: one video, no image")
    if pixels is None:
        if video_tokens:
            raise InputError(
                f"prefill: found {video_tokens} video placeholders but no pixel values, allowed: "
                "both or neither"
            )
        return
    if pixels.dim() != 5 or pixels.shape[0] != 1:
        raise InputError(
            f"prefill: found pixel values {tuple(pixels.shape)}, allowed: (1, T, 3, S, S)"
        )
    expected = pixels.shape[1] * target.tokens_per_frame + 1
    if video_tokens != expected:
        raise InputError(
            f"prefill: found {video_tokens} video placeholders for {pixels.shape[1]} frames, "
            f"allowed: {expected} ({target.tokens_per_frame} a frame and a newline); check the chat "
            f"template of {target.template_file}"
        )
