"""Read YAML and JSON, and build frozen dataclasses from them, refusing by name what does not fit.

A message names the setting, what was found and what is allowed. Types understood: dataclasses,
`tuple[X, ...]`, `Literal` of texts, unions, int, float, str, bool and None; a number's range is
written as `Annotated[int, Bounds(1, 16)]`, a text's form as `Annotated[str, HEX_SHA256]`.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml

from vflash_analysis import paths
from vflash_analysis.errors import InputError


@dataclass(frozen=True)
class Bounds:
    """The closed range of a number."""

    low: float
    high: float = float("inf")

    def __str__(self) -> str:
        low, high = f"{self.low:.12g}", f"{self.high:.12g}"  # 12: no whole number as 1e+07
        return f"{low} or more" if high == "inf" else f"{low} to {high}"

    def fits(self, value: float) -> bool:
        """Whether a number lies in the range."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Form:
    """What a text must be, in words and as a test."""

    words: str
    fits: Callable[[str], Any]

    def __str__(self) -> str:
        return self.words


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON writes it
TEXT = "without NUL or lone surrogates"
HEX_SHA256 = Form("64 hex digits", re.compile("[0-9a-f]{64}").fullmatch)


def is_text(value: str) -> bool:
    """Whether a text can be written as UTF-8 and be part of a path: no NUL, no half of a pair."""
    return _NO_TEXT.search(value) is None


def fits_a_path(text: str) -> bool:
    """Whether a text can name a file, as Linux limits names and paths in bytes."""
    if not text.strip() or not is_text(text):
        return False
    return len(text.encode()) < 4096 and all(len(n.encode()) < 256 for n in text.split("/"))


def is_below(path: str) -> bool:
    """Whether a path stays below the folder that it counts from, links aside; `.` is that folder."""
    pure = PurePosixPath(path)
    inside = not pure.is_absolute() and ".." not in pure.parts
    return inside and fits_a_path(path)


def _is_pattern(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return is_below(path) and bool(parts) and all(p == "**" for p in parts if "**" in p)


BELOW = Form("a path below its folder, without `..`", is_below)
PATTERN = Form("a pattern of paths below its folder, without `..`", _is_pattern)


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice."""


def _strict_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = [key for i, key in enumerate(keys) if key in keys[:i]]
    if twice:
        raise yaml.constructor.ConstructorError(
            None, None, f"key {twice[0]!r} is given twice", node.start_mark
        )
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _strict_mapping)


def read_text(path: Path, place: str) -> str:
    """Read a file of UTF-8; messages begin with `place`.

    Raises:
        InputError: missing, unreadable, or not UTF-8, with the line of the first such byte.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{place}: no such file") from None
    except OSError as error:
        raise InputError(f"{place}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise InputError(f"{place}, line {line}: found byte {byte:#04x}, allowed: UTF-8") from None
    except ValueError as error:  # a NUL in the path
        raise InputError(f"{place!r}: {error}, allowed: a path {TEXT}") from None


def parse_json(text: str, place: str, line: int | None = None) -> Any:
    """Read JSON text; messages begin with `place`, and with `line` where the text is one line.

    Raises:
        InputError: no JSON, nested too deep, a number of too many digits, or a lone surrogate.
    """
    where = place if line is None else f"{place}, line {line}"
    try:
        value = json.loads(text)
        if _HALF_OF_A_PAIR.search(text):  # which may have its other half
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = line or error.lineno
        raise InputError(f"{place}, line {line}: not readable as JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not readable as JSON ({error})") from None
    return value


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        InputError: see `read_text` and `parse_json`.
    """
    return parse_json(read_text(Path(path), str(path)), str(path))


def check_object(value: Any, place: str) -> dict[str, Any]:
    """Return what must be a JSON object.

    Raises:
        InputError: it is something else; the line begins with `place`.
    """
    if not isinstance(value, dict):
        raise InputError(f"{place}: found a JSON {type(value).__name__}, allowed: an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; errors as in `read_json` and `check_object`."""
    return check_object(read_json(path), str(path))


def read_yaml(path: Path, may_be_empty: bool = False) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping; an empty file is one if `may_be_empty`.

    Raises:
        InputError: the file is missing, is not YAML, gives a key twice, or holds no mapping.
    """
    place = paths.relative_to_root(path)
    text = read_text(path, place)
    try:
        loaded = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise InputError(f"{place}: not readable as YAML: {line}") from None
    if loaded is None and may_be_empty:
        return {}
    if not isinstance(loaded, dict):
        raise InputError(f"{place}: found {shown(loaded)}, allowed: a mapping of settings")
    return loaded


def shown(value: Any) -> str:
    """A value and its kind in the words of JSON, for messages."""
    kinds = {bool: "true/false", int: "whole number", float: "number", str: "text", dict: "mapping"}
    if value is None:
        return "null"
    kind = (
        "list" if isinstance(value, list | tuple) else kinds.get(type(value), type(value).__name__)
    )
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # a number too long or a list too deep to be shown
        text = "of too many digits or brackets"
    return f"{kind} {text if len(text) <= 60 else text[:57] + '...'}"


def _allowed(kind: Any) -> str:
    """A type in the words of JSON, for messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return f"{_allowed(arguments[0])}, {arguments[1]}"
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_allowed(part) for part in arguments)
    if origin is tuple:
        return f"a list, each item {_allowed(arguments[0])}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(kind, "null" if kind is type(None) else "a mapping")


def convert(value: Any, kind: Any, name: str) -> Any:
    """Check `value` against the type `kind`; lists become tuples, whole numbers become floats.

    Raises:
        InputError: it does not fit; the line begins with `name`.
    """
    if isinstance(value, str) and not is_text(value):
        raise InputError(f"{name}: found {shown(value)}, allowed: text {TEXT}")
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        number = convert(value, arguments[0], name)
        rule: Bounds | Form = arguments[1]
        if not rule.fits(number):
            raise InputError(f"{name}: found {shown(value)}, allowed: {rule}")
        return number
    refusal = InputError(f"{name}: found {shown(value)}, allowed: {_allowed(kind)}")
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, name)
    if origin in (typing.Union, types.UnionType):
        for part in arguments:
            try:
                return convert(value, part, name)
            except InputError:
                continue
        raise refusal
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        raise refusal
    if origin is tuple:
        if not isinstance(value, list | tuple) or not value:
            raise refusal
        items = tuple(convert(item, arguments[0], f"{name}[{i}]") for i, item in enumerate(value))
        if len(set(items)) != len(items):
            raise InputError(f"{name}: found {shown(value)}, allowed: each item once")
        return items
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if value != value or value in (float("inf"), float("-inf")):
            raise InputError(f"{name}: found {value}, allowed: a finite number")
        try:
            return float(value)
        except OverflowError:
            raise InputError(f"{name}: found {shown(value)}, allowed: a finite number") from None
    if kind in (int, bool, str, type(None)) and type(value) is kind:
        return value
    raise refusal


def build(kind: type, values: Any, name: str = "") -> Any:
    """Build the dataclass `kind` from a mapping; every field must be there and no other.

    Args:
        kind: a dataclass.
        values: nested mappings of JSON values.
        name: dotted name of the section, for messages; empty at the top.

    Raises:
        InputError: an unknown, missing, mistyped or out-of-range value, by its dotted name.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{name}: found {shown(values)}, allowed: a mapping of settings")
    hints = typing.get_type_hints(kind, include_extras=True)
    prefix = f"{name}." if name else ""
    for key in values:
        if key not in hints:
            raise InputError(f"{prefix}{key}: unknown setting, allowed: {', '.join(hints)}")
    for key, hint in hints.items():
        if key not in values:
            raise InputError(f"{prefix}{key}: missing, allowed: {_allowed(hint)}")
    return kind(**{k: convert(values[k], hint, f"{prefix}{k}") for k, hint in hints.items()})


def parse_override(text: str) -> tuple[str, Any]:
    """Split `training.steps=300` into its dotted name and JSON value; bare words are text.

    Raises:
        InputError: there is no `=` or no name before it.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"--set: found {text!r}, allowed: name=value, as in training.steps=300")
    try:
        return name.strip(), json.loads(value)
    except (ValueError, RecursionError):  # no JSON, or a number too long or a list too deep for it
        pass
    if value.startswith(("[", "{")):  # bare words in a list, [VDC, MLVU]: YAML but not JSON
        try:
            return name.strip(), yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: 2026-13-45 is no date
            raise InputError(
                f"{name.strip()}: found {shown(value)}, allowed: a JSON value"
            ) from None
    return name.strip(), value


def apply_overrides(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `values` with each dotted name of `overrides` replaced.

    Raises:
        InputError: a name is no setting of the profile.
    """
    changed = json.loads(json.dumps(values))
    for name, value in overrides.items():
        *sections, last = str(name).split(".")
        place = changed
        for depth, section in enumerate(sections):
            if not isinstance(place.get(section), dict):
                known = ", ".join(key for key, v in place.items() if isinstance(v, dict)) or "none"
                where = ".".join(sections[: depth + 1])
                raise InputError(f"{name}: unknown setting, no section {where}; sections: {known}")
            place = place[section]
        if last not in place or name == "name":
            allowed = ", ".join(key for key in place if key != "name")
            raise InputError(f"{name}: unknown setting, allowed: {allowed}")
        place[last] = value
    return changed
