"""The methods by name. A new one is a file beside this, its `ENTRIES` in the table below, and its
name in `schemas.METHOD_NAMES`, which settings are checked against.

A method is named as in `decode.methods` of a profile: "chain", or with options "tree60:spine_first",
"chain:rounds=2,context=text_only", "ar:verify16". Options end up in the records' `setting` column;
without any it is "", the default that the main tables show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.methods import ar, block, lookup
from vflash_analysis.decoding.methods.base import Entry, Method, Prompt, Proposal
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import Target
from vflash_analysis.strict import read_json

__all__ = [
    "METHODS", "Entry", "Method", "Prompt", "Proposal", "build_method", "drafter_type", "parse_method",
]  # fmt: skip

METHODS: dict[str, Entry] = {**ar.ENTRIES, **block.ENTRIES, **lookup.ENTRIES}


def parse_method(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of "name:option,option=value".

    Raises:
        InputError: an unknown name, or an option that is empty or given twice.
    """
    name, _, rest = spec.partition(":")
    if name not in METHODS:
        raise InputError(f"decode.methods: found {spec!r}, allowed: {', '.join(METHODS)}")
    options: dict[str, str] = {}
    for word in rest.split(",") if rest else []:
        key, _, value = word.partition("=")
        if not key or key in options:
            raise InputError(f"decode.methods: {spec!r}: option {word!r} is empty or given twice")
        options[key] = value
    return name, options


def build_method(
    spec: str, target: Target, settings: DecodeSettings, network: Any = None
) -> Method:
    """The method `spec` names, on a network that its entry's `load` returned (None if it needs none).

    Raises:
        InputError: unknown name or option, or a value out of range.
    """
    name, options = parse_method(spec)
    entry = METHODS[name]
    if entry.drafter_type is not None and network is None:
        raise InputError(f"decode.methods: {spec!r} needs a drafter of type {entry.drafter_type}")
    return entry.build(target, network, settings, options)


def drafter_type(folder: Path) -> str:
    """`model_type` of a saved drafter, which tells the methods it runs with.

    Raises:
        InputError: no readable config.json in the folder.
    """
    config = read_json(Path(folder) / "config.json")
    return str(config.get("model_type") if isinstance(config, dict) else None)
