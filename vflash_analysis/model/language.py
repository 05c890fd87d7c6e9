"""Load a language model without a vision side as a target: a GGUF file, or a Hugging Face folder.

    target = load_language_model("SmolLM2-135M-Instruct.Q4_1.gguf", "float32", "cpu")

What is loaded is a `Target` like any other; only its prompts are questions alone. Hugging Face
reads a GGUF file by expanding its quantised weights, so the model takes four to eight times the
file's size in memory; how much is said before it is taken. Reading one needs the package `gguf`.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf import GgufHeader, read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.utils import is_gguf_available

from vflash_analysis.errors import InputError
from vflash_analysis.model import source as folders
from vflash_analysis.model import weights
from vflash_analysis.model.attention import NAME
from vflash_analysis.model.frozen import Target, check_config
from vflash_analysis.model.target import check_arguments, make_ready
from vflash_analysis.records import sha256_of_file

NOT_ARCHITECTURES = ("general", "tokenizer")  # other sections of Hugging Face's table of names


def load_language_model(
    source: str | Path,
    dtype: str | torch.dtype,
    device: str | torch.device,
    attention: str = NAME,
    log: Callable[[str], None] = print,
) -> Target:
    """Load a target that reads no video.

    Args:
        source: a GGUF file, or a local folder in Hugging Face layout.
        dtype: of the weights, always explicit.
        device: "cpu" or "cuda".
        attention: "vflash", "sdpa" or "eager".
        log: prints one line.

    Raises:
        InputError: the file, the architecture, its layers or its weights are not usable; the
            message names what was found.
    """
    torch_dtype = check_arguments(dtype, device, attention)
    place = Path(source)
    options: dict[str, Any] = {"local_files_only": True}
    if place.is_dir():
        folder = folders.check_folder(place)
        folders.check_objects(folder)
        weights.check_weights(folder)
        name, sha256 = folders.folder_name(folder), folders.folder_sha256(folder)
        revision = folders.folder_revision(folder)
    else:
        check_gguf(place, torch_dtype, log)
        folder, options["gguf_file"] = place.parent, place.name
        name, sha256, revision = place.stem, sha256_of_file(place), "local"
    with folders.reading(f"{place}: config not usable"):
        config = AutoConfig.from_pretrained(folder, **options)
    check_config(config, str(place), reads_video=False)
    model = weights.read_model(  # fails where it writes no text
        AutoModelForCausalLM, place, folder, torch_dtype, config=config, **options
    )
    with folders.reading(f"{place}: tokenizer not usable"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    target = Target(model.to(device), tokenizer, None, attention, None, name, sha256, revision)
    _check_decoder(target, place)
    make_ready(target, place)
    return target


def check_gguf(file: Path, dtype: torch.dtype, log: Callable[[str], None] = print) -> None:
    """Refuse a GGUF file that cannot be read, before anything is; say what it will take.

    Raises:
        InputError: no such file, no whole GGUF file, an architecture or a tensor type that
            transformers does not expand, or no package `gguf`.
    """
    if not file.is_file():
        raise InputError(f"{file}: found no file, allowed: a GGUF file or a local folder")
    size = file.stat().st_size
    with folders.reading(f"{file}: {size} bytes, no GGUF file"):
        architecture = str(read_gguf_metadata(str(file))[0]["general.architecture"])
    known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - set(NOT_ARCHITECTURES))
    if architecture not in known:
        raise InputError(f"{file}: GGUF architecture {architecture!r}, allowed: {', '.join(known)}")
    with folders.reading(f"{file}: {size} bytes, no readable tensors"):
        header = GgufHeader.from_file(str(file))
        end = header.data_start + max(t.offset + t.nbytes for t in header.tensors)
    if end > size:
        raise InputError(f"{file}: {size} bytes, no whole GGUF file (its tensors end at {end})")
    if not is_gguf_available():
        raise InputError(f"{file}: reading it needs the package gguf: pip install gguf")
    needed = sum(math.prod(tensor.shape) for tensor in header.tensors) * dtype.itemsize
    log(
        f"{file.name}: {size / 1e6:.0f} MB become {needed / 1e6:.0f} MB of "
        f"{str(dtype).removeprefix('torch.')} in memory, {needed / size:.1f} times as much"
    )


def _check_decoder(target: Target, place: Path) -> None:
    """Refuse a model whose decoder and head alone do not choose the whole model's tokens.

    Some models do more after the decoder or before it than the passes here know of. The choice of
    either may cost 1 % of the row's range in the other's logits: two forwards may round apart.

    Raises:
        InputError: another choice at a row of a short prompt.
    """
    prompt = target.build_prompt("What is a bridge made of?", 0)
    cache, head = target.new_cache(len(prompt), 1), len(prompt) // 2
    first = target.prefill(prompt[:head], None, cache).logits
    ours = torch.cat([first[None], target.forward(prompt[head:], None, cache).logits]).float()
    with torch.inference_mode():
        theirs = target.model(input_ids=prompt[None]).logits[0, head - 1 :].float()
    chosen = theirs.gather(-1, ours.argmax(-1, keepdim=True))[:, 0]
    allowed = 0.01 * (theirs.amax(-1) - theirs.amin(-1))
    wrong = int((theirs.amax(-1) - chosen > allowed).sum())
    if wrong:
        raise InputError(
            f"{place}: model type {target.config.model_type!r}: decoder and head alone choose other "
            f"tokens than the model at {wrong} of {len(ours)} rows, allowed: 0"
        )
