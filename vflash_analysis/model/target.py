"""Load a target from a local folder in Hugging Face layout; refuse anything half right.

Checks run before the weights are read, cheapest first: files and their sizes, the model's kind, the
frame settings, the paper's facts. After reading, every tensor must have found its place. The target
itself is in `frozen.py`; its names are importable from here.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from vflash_analysis import shapes
from vflash_analysis.errors import InputError
from vflash_analysis.model import inputs, known, text_stack, weights
from vflash_analysis.model import source as folders
from vflash_analysis.model.attention import NAME
from vflash_analysis.model.compiled import CompiledTarget
from vflash_analysis.model.frozen import ATTENTIONS, Forward, Prefill, Target, check_config

__all__ = [
    "ATTENTIONS",
    "DTYPES",
    "Forward",
    "Prefill",
    "Target",
    "TargetFiles",
    "load_target",
    "outline_target",
    "read_files",
]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetFiles:
    """A checkpoint's small files, read and checked, before any weight is.

    Attributes:
        folder: the checkpoint's. name, revision: as records show them.
        shape: sizes that its config gives.
        config, generation_config: Hugging Face's objects.
        tokenizer: its tokenizer. template: its chat template and that one's file, None where only
            the tokenizer has one.
        preprocessing: its frame settings.
    """

    folder: Path
    name: str
    revision: str
    shape: shapes.TargetShape
    config: Any
    generation_config: Any
    tokenizer: Any
    template: tuple[str, str] | None
    preprocessing: inputs.FramePreprocessing


def read_files(source: str | Path, revision: str | None = None) -> TargetFiles:
    """Read and check everything of a checkpoint but its weights, of which only headers are read.

    Args:
        source: the folder.
        revision: the one asked for, if any; see `source.folder_revision`.

    Raises:
        InputError: the folder, a file in it, the model's kind, a fact of a known checkpoint or the
            revision is not as it must be; names file and key.
    """
    folder = folders.check_folder(source)
    revision = folders.folder_revision(folder, revision)
    folders.check_objects(folder)
    weights.check_weights(folder)
    file, name = folder / "config.json", folders.folder_name(folder)
    shape = shapes.read_shape(file)
    preprocessing = inputs.read_frame_preprocessing(folder)
    with folders.reading(f"{file}: not usable"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_config(config, str(folder))
    folders.check_numbers(file, config)
    known_as = known.known_shape(config, name)
    if known_as is not None:
        known.check_known(folder, config, known_as, preprocessing)
    image_size = config.vision_config.image_size
    if (preprocessing.height, preprocessing.width) != (image_size, image_size):
        raise InputError(
            f"{preprocessing.file}: size: found {preprocessing.height} x {preprocessing.width}, "
            f"allowed: the vision tower's {image_size} x {image_size}"
        )
    template = inputs.read_chat_template(folder)  # before Hugging Face, which would not name it
    return TargetFiles(
        folder,
        name,
        revision,
        shape,
        config,
        _read_generation_config(folder, config),
        _read_tokenizer(folder),
        template,
        preprocessing,
    )


def _read_generation_config(folder: Path, config: Any) -> GenerationConfig:
    file = folder / "generation_config.json"
    if not file.is_file():
        return GenerationConfig.from_model_config(config)
    with folders.reading(f"{file}: not usable"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def _read_tokenizer(folder: Path) -> Any:
    file = folder / "tokenizer.json"
    if file.is_file():
        with folders.reading(f"{file}: not usable"):
            Tokenizer.from_file(str(file))
    with folders.reading(f"{folder / 'tokenizer_config.json'}: not usable"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _target(files: TargetFiles, model: Any, attention: str, sha256: str) -> Target:
    return Target(
        model,
        files.tokenizer,
        files.preprocessing,
        attention,
        files.template,
        files.name,
        sha256,
        files.revision,
    )


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
        compile: decode with compiled steps (see `compiled.py`); "vflash" attention only.
        revision: see `read_files`; recorded beside results.

    Raises:
        InputError: the folder, a file in it, the model's kind or its weights are not usable; the
            message names what was found.
    """
    folder = folders.check_folder(source)
    torch_dtype = check_arguments(dtype, device, attention)
    files = read_files(folder, revision)
    _log.info("loading %s in %s", folder, torch_dtype)
    model = weights.read_model(
        AutoModelForImageTextToText, folder, folder, torch_dtype, config=files.config
    )
    # Only moved: `.to(dtype)` would also round the rotary frequencies, which stay fp32.
    target = _target(files, model.to(device), attention, folders.folder_sha256(folder))
    make_ready(target, folder)
    if compile:
        target.compiled = CompiledTarget(target)
    return target


def outline_target(files: TargetFiles) -> Target:
    """A target that can build prompts and name its special tokens, but not run.

    Of the weights only the input embedding is read, which the masked slots' row is chosen from.

    Raises:
        InputError: the weights hold no input embedding, or the target cannot be used.
    """
    with folders.reading(f"{files.folder / 'config.json'}: not usable"), torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(files.config)
    model.generation_config = files.generation_config
    embedding = model.get_input_embeddings()
    with folders.reading(f"{files.folder}: embed_tokens.weight: not readable"):
        weight = weights.read_tensor(files.folder, "embed_tokens.weight")
    if weight.shape != embedding.weight.shape or not weight.is_floating_point():
        raise InputError(
            f"{files.folder}: embed_tokens.weight: found {weight.dtype} {tuple(weight.shape)}, "
            f"allowed: floats {tuple(embedding.weight.shape)} as config.json says"
        )
    embedding.weight = torch.nn.Parameter(weight, requires_grad=False)
    return _target(files, model, NAME, "")


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
