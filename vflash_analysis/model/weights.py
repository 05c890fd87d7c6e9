"""A model's weights on disk: whole files, their headers, and models read from them."""

import logging
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vflash_analysis.errors import InputError
from vflash_analysis.model.source import reading
from vflash_analysis.strict import read_object

_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors")


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file whose header does not fit its size.

    Raises:
        InputError: the file is missing or not a whole safetensors file.
    """
    if not path.is_file():
        raise InputError(f"{path}: file not found")
    try:
        with safe_open(path, framework="pt"):
            return
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise InputError(f"{path}: {size} bytes, no whole safetensors file ({error})") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights, by its index if it has one.

    Raises:
        InputError: no safetensors weights; other formats are named.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: found no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or not _SHARD.fullmatch(name):
                raise InputError(
                    f"{index}: weight_map: found {str(name)[:60]!r}, allowed: names of .safetensors "
                    "files beside it"
                )
        return [folder / name for name in sorted(set(weight_map.values()))]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in {".gguf", ".bin", ".pt", ".pth", ".safetensors"}
    )
    found = ", ".join(others) if others else "no weight file"
    raise InputError(f"{folder}: found {found}, allowed: model.safetensors or its sharded index")


def check_weights(folder: Path) -> None:
    """Check every safetensors file that a folder's weights need.

    Raises:
        InputError: no safetensors weights, or a damaged or missing one.
    """
    for path in weight_files(folder):
        check_safetensors(path)


def read_tensor(folder: Path, suffix: str) -> Tensor:
    """The one tensor of a folder's weights whose name ends so; nothing else is read.

    Raises:
        InputError: none or several do.
    """
    found = []
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            found += [(path, name) for name in file.keys() if name.endswith(suffix)]  # noqa: SIM118
    if len(found) != 1:
        raise InputError(f"{folder}: found {len(found)} tensors named *{suffix}, allowed: 1")
    with safe_open(found[0][0], framework="pt") as file:
        return file.get_tensor(found[0][1])


def stored_numbers(folder: Path) -> int:
    """Elements of all tensors in a folder's weights, by the headers of its files."""
    total = 0
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def read_model(kind: Any, place: Path, folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Read a Hugging Face model, every tensor of which must find its place, in `dtype`.

    A missing tensor would be random, an unexpected one is unused.

    Args:
        kind: the class whose `from_pretrained` reads it.
        place: the file or folder that messages name.
        folder: the one read from.
        dtype: of the weights.
        options: more of `from_pretrained`'s.

    Raises:
        InputError: the model cannot be read, its tensors are not the config's, by name and shape,
            or parameters are not all in the dtype that was asked for.
    """
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_no_report)
    try:
        with reading(f"{place}: not loadable"):
            model, info = kind.from_pretrained(
                folder,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else it raises without a name; refused below
                **{"local_files_only": True, **options},
            )
    finally:
        log.removeFilter(_no_report)
    shapes = [
        f"{name}: found {tuple(found)}, allowed: {tuple(allowed)}"
        for name, found, allowed in info["mismatched_keys"]
    ]
    told = {"tensors of another shape": shapes} | {
        key.replace("_", " "): [str(name) for name in info[key]]
        for key in ("missing_keys", "unexpected_keys", "error_msgs")
    }
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:6])}"
        for what, names in told.items()
        if names
    ]
    if problems:
        raise InputError(f"{place}: weights do not fit the config: {'; '.join(problems)}")
    other = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    if other:
        raise InputError(f"{place}: found parameters in {other} after loading in {dtype}")
    return model


def _no_report(record: logging.LogRecord) -> bool:
    """Keep back the library's table of tensors that do not fit, which the one line tells."""
    return "LOAD REPORT" not in record.getMessage()
