"""Load a target from a local folder in Hugging Face layout; refuse anything half right.

Checks run before the weights are read, cheapest first: files and their sizes, the model's kind, the
frame settings, the paper's facts. After reading, every tensor must have found its place. The target
itself is in `frozen.py`; its names are importable from here.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from vflash_analysis.errors import InputError
from vflash_analysis.model import inputs, text_stack
from vflash_analysis.model import source as folders
from vflash_analysis.model.attention import NAME
from vflash_analysis.model.cache import BLOCK_SIZE
from vflash_analysis.model.frozen import ATTENTIONS, Forward, Prefill, Target, check_config

__all__ = ["ATTENTIONS", "BLOCK_SIZE", "DTYPES", "Forward", "Prefill", "Target", "load_target"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_log = logging.getLogger(__name__)


def load_target(
    source: str | Path,
    dtype: str | torch.dtype,
    device: str | torch.device,
    attention: str = NAME,
    compile: bool = False,
    revision: str | None = None,
) -> Target:
    """Load a target from a local folder in Hugging Face layout.

    Args:
        source: the folder.
        dtype: of the weights, always explicit.
        device: "cpu" or "cuda".
        attention: "vflash", "sdpa" or "eager", for the text stack.
        compile: compile every decoder layer with `torch.compile`.
        revision: recorded beside results; None reads it from a Hugging Face cache's folder name.

    Raises:
        InputError: the folder, a file in it, the model's kind or its weights are not usable; the
            message names what was found.
    """
    folder = folders.check_folder(source)
    torch_dtype = check_arguments(dtype, device, attention)
    folders.check_weights(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_config(config, str(folder))
    preprocessing = inputs.read_frame_preprocessing(folder)
    name = folders.folder_name(folder)
    if folders.is_llava_onevision_7b(config, name):
        folders.check_llava_onevision_7b(config, preprocessing.mean, preprocessing.std)
    image_size = config.vision_config.image_size
    if (preprocessing.height, preprocessing.width) != (image_size, image_size):
        raise InputError(
            f"{preprocessing.file}: size: found {preprocessing.height} x {preprocessing.width}, "
            f"allowed: the vision tower's {image_size} x {image_size}"
        )
    _log.info("loading %s in %s", folder, torch_dtype)
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, config=config, dtype=torch_dtype, local_files_only=True, output_loading_info=True
    )
    check_loaded(folder, model, info, torch_dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    target = Target(
        # Only moved: `.to(dtype)` would also round the rotary frequencies, which stay fp32.
        model.to(device),
        tokenizer,
        preprocessing,
        attention,
        inputs.read_chat_template(folder),
        name,
        folders.folder_sha256(folder),
        folders.folder_revision(folder) if revision is None else revision,
    )
    make_ready(target, folder)
    if compile:
        for layer in target.text_model.layers:
            layer.compile(dynamic=True)
    return target


def check_arguments(
    dtype: str | torch.dtype, device: str | torch.device, attention: str
) -> torch.dtype:
    """The dtype that is meant, once everything that needs no file has been checked.

    Raises:
        InputError: an unknown dtype or attention, or CUDA where there is none.
    """
    torch_dtype = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is None or torch_dtype not in DTYPES.values():
        raise InputError(f"dtype: found {dtype!r}, allowed: {', '.join(DTYPES)}")
    if attention not in ATTENTIONS:
        raise InputError(f"attention: found {attention!r}, allowed: {', '.join(ATTENTIONS)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError("device: found 'cuda', but torch sees no CUDA device, allowed: cpu")
    return torch_dtype


def make_ready(target: Target, place: Path) -> None:
    """What every loaded target gets: weights stored for few rows, and a word on ignored settings."""
    text_stack.store_input_major(target.text_model)
    if target.ignored_generation_settings:
        _log.warning(
            "%s: generation settings that greedy decoding ignores: %s",
            place,
            target.ignored_generation_settings,
        )


def check_loaded(place: Path, model: Any, info: dict[str, Any], dtype: torch.dtype) -> None:
    """Refuse a partial load, or parameters that are not all in the dtype that was asked for.

    A missing tensor would be random, an unexpected one is unused.
    """
    problems = [
        f"{len(info[kind])} {kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:6])}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if info.get(kind)
    ]
    if problems:
        raise InputError(f"{place}: weights do not fit the config: {'; '.join(problems)}")
    other = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    if other:
        raise InputError(f"{place}: found parameters in {other} after loading in {dtype}")
