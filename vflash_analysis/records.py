"""The record tables on disk: one schema each, checked on write and on read.

Every number in a table or figure comes from one of these Parquet files. A file carries the name and
version of its schema, so a stale one is refused instead of read as something else; it is written to
a temporary name and renamed, so a killed run never leaves half a file; `DONE` is written last and
is the only proof that a run is complete. A failed clip is a row with `status`, `reason` and nulls.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from vflash_analysis.errors import InputError
from vflash_analysis.schemas import SCHEMA_KEY, VERSION_KEY, Schema
from vflash_analysis.strict import read_json

DONE_NAME = "DONE"
MANIFEST_NAME = "manifest.json"

Rows = pd.DataFrame | Iterable[Mapping[str, Any]]


def blank_row(schema: Schema) -> dict[str, Any]:
    """A row with every column of `schema` set to None: fill what is known, leave the rest missing."""
    return dict.fromkeys(schema.columns)


def _column_values(rows: Rows, schema: Schema, where: str) -> dict[str, list[Any]]:
    if isinstance(rows, pd.DataFrame):
        found = [str(column) for column in rows.columns]
        _check_columns(found, schema, where)
        return {column: rows[column].tolist() for column in schema.columns}
    values: dict[str, list[Any]] = {column: [] for column in schema.columns}
    for number, row in enumerate(rows):
        _check_columns(list(row), schema, f"{where}, row {number}")
        for column, column_values in values.items():
            column_values.append(row[column])
    return values


def _check_columns(found: Sequence[str], schema: Schema, where: str) -> None:
    unknown = sorted(set(found) - set(schema.columns))
    missing = sorted(set(schema.columns) - set(found))
    if unknown or missing or len(found) != len(schema.columns):
        raise InputError(
            f"{where}: not the columns of '{schema.name}': unknown {unknown}, missing {missing}"
        )


def _is_missing(value: Any) -> bool:
    if value is None or value is pd.NA:
        return True
    return isinstance(value, (float, np.floating)) and math.isnan(value)


def _fault(value: Any, kind: pa.DataType) -> str | None:
    """What Arrow would let pass: an infinity, or a fraction cut to an integer."""
    if pa.types.is_list(kind):
        numbers = np.asarray(value)
        if numbers.size and numbers.dtype.kind == "f":
            if np.isinf(numbers).any():
                return "holds an infinity, must be finite"
            if pa.types.is_integer(kind.value_type):
                return "holds fractions, must be integers"
        return None
    if isinstance(value, (float, np.floating)):
        if math.isinf(value):
            return f"is {value}, must be finite"
        if pa.types.is_integer(kind) and not float(value).is_integer():
            return f"is {value}, must be an integer"
    if isinstance(value, (bool, np.bool_)) and not pa.types.is_boolean(kind):
        return f"is {value}, must be {kind}"
    return None


def _arrow_column(values: list[Any], field: pa.Field, where: str) -> pa.Array:
    """One checked column: right type, no null where one is required, no infinity anywhere."""
    clean = [None if _is_missing(value) else value for value in values]
    for number, value in enumerate(clean):
        if value is None:
            if not field.nullable:
                raise InputError(f"{where}, row {number}: '{field.name}' is missing and required")
            continue
        fault = _fault(value, field.type)
        if fault:
            raise InputError(f"{where}, row {number}: '{field.name}' {fault}")
    try:
        return pa.array(clean, type=field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{where}: '{field.name}' must be {field.type}: {reason}") from error


def to_table(rows: Rows, schema: Schema, where: str = "rows") -> pa.Table:
    """Rows (dicts or a frame) as a checked Arrow table with the schema's marks.

    Raises:
        InputError: unknown or missing column, wrong type, a required null, an infinity.
    """
    values = _column_values(rows, schema, where)
    arrays = [_arrow_column(values[field.name], field, where) for field in schema.arrow]
    return pa.Table.from_arrays(arrays, schema=schema.arrow)


def replace_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Lets `write` fill a temporary file beside `path`, flushes it and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # process numbers meet on a file system that hosts share, in containers nearly always
    writer = f"{socket.gethostname()}-{os.getpid()}"
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_records(path: str | Path, rows: Rows, schema: Schema) -> int:
    """Writes rows as Parquet (temporary file, then rename) and returns the number of rows."""
    path = Path(path)
    table = to_table(rows, schema, str(path))
    times = [field.name for field in schema.arrow if pa.types.is_float64(field.type)]
    others = [name for name in schema.columns if name not in times]
    # Measured numbers hardly repeat; a byte of each after another compresses by a quarter more.
    save = partial(
        pq.write_table, table, compression="zstd", use_dictionary=others,
        use_byte_stream_split=times,
    )  # fmt: skip
    replace_atomically(path, save)
    return table.num_rows


def _read_checked_table(path: Path, schema: Schema) -> pa.Table:
    if not path.is_file():
        raise InputError(f"{path}: no such record file ('{schema.name}' expected)")
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowInvalid, OSError) as error:
        size = path.stat().st_size
        raise InputError(f"{path}: not a readable Parquet file ({size} bytes)") from error
    marks = table.schema.metadata or {}
    name = marks.get(SCHEMA_KEY, b"none").decode()
    version = marks.get(VERSION_KEY, b"none").decode()
    if (name, version) != (schema.name, str(schema.version)):
        raise InputError(
            f"{path}: schema '{name}' version {version}, allowed is "
            f"'{schema.name}' version {schema.version}: run the stage again"
        )
    _check_columns(table.schema.names, schema, str(path))
    for field in schema.arrow:
        if table.schema.field(field.name).type != field.type:
            kind = table.schema.field(field.name).type
            raise InputError(f"{path}: '{field.name}' is {kind}, allowed is {field.type}")
    return table.select(list(schema.columns))


_PANDAS_TYPES = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}


def read_records(path: str | Path, schema: Schema) -> pd.DataFrame:
    """Reads a record file as a frame: ids stay strings, missing integers and truths are `pd.NA`.

    Raises:
        InputError: no such file, unreadable, another or a stale schema, other columns or types.
    """
    return _read_checked_table(Path(path), schema).to_pandas(types_mapper=_PANDAS_TYPES.get)


def write_records_csv(path: str | Path, rows: Rows, schema: Schema) -> None:
    """Writes rows as CSV, checked as for Parquet; a missing value is an empty cell."""
    frame = to_table(rows, schema, str(path)).to_pandas(types_mapper=_PANDAS_TYPES.get)
    write_text_atomic(path, frame.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


def read_records_csv(path: str | Path, schema: Schema) -> pd.DataFrame:
    """Reads what `write_records_csv` wrote.

    Raises:
        InputError: no such file, not CSV, or other columns or types than the schema's.
    """
    path = Path(path)
    try:
        text = pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file ('{schema.name}' expected)") from error
    except ValueError as error:
        raise InputError(f"{path}: not readable as CSV: {error}") from None
    _check_columns(list(text.columns), schema, str(path))
    for field in schema.arrow:
        if pa.types.is_string(field.type):
            if field.nullable:
                text[field.name] = text[field.name].where(text[field.name] != "", None)
            continue
        try:
            text[field.name] = pd.to_numeric(text[field.name].replace("", None))
        except ValueError as error:
            raise InputError(f"{path}: '{field.name}': {error}") from None
    return to_table(text, schema, str(path)).to_pandas(types_mapper=_PANDAS_TYPES.get)


def typed_frame(rows: Rows, schema: Schema) -> pd.DataFrame:
    """Rows as the frame that writing and reading them would give, without a file."""
    return to_table(rows, schema).to_pandas(types_mapper=_PANDAS_TYPES.get)


def empty_records(schema: Schema) -> pd.DataFrame:
    """A frame of no rows with the schema's columns and types."""
    return typed_frame([], schema)


def part_path(folder: str | Path, schema: Schema, part_id: str) -> Path:
    """Where the rows of one clip (or other unit of resume) lie until they are merged."""
    if not part_id:
        raise InputError(f"{folder}: a part needs a non-empty id")
    return Path(folder) / "parts" / schema.name / f"{quote(part_id, safe='')}.parquet"


def strip_path(folder: str | Path, clip_id: str) -> Path:
    """Where a clip's film strip lies beside the records of its decodes."""
    return Path(folder) / "strips" / f"{quote(clip_id, safe='')}.jpg"


def find_strips(folder: str | Path) -> dict[str, Path]:
    """The film strips of a folder, by clip_id."""
    return {unquote(path.stem): path for path in sorted(Path(folder).glob("strips/*.jpg"))}


def write_part(folder: str | Path, schema: Schema, part_id: str, rows: Rows) -> int:
    """Writes one part; writing the same id again replaces it, so a resume never doubles rows."""
    return write_records(part_path(folder, schema, part_id), rows, schema)


def merge_parts(folder: str | Path, schema: Schema, part_ids: Sequence[str]) -> int:
    """Merges the named parts, in the order given, into `<folder>/<schema name>.parquet`.

    Returns the number of rows. Raises InputError if a part is missing or named twice.
    """
    if len(set(part_ids)) != len(part_ids):
        raise InputError(f"{folder}: a part of '{schema.name}' is named twice")
    tables = [_read_checked_table(part_path(folder, schema, p), schema) for p in part_ids]
    plain = [table.cast(schema.arrow) for table in tables]
    merged = pa.concat_tables(plain) if plain else schema.arrow.empty_table()
    out = Path(folder) / f"{schema.name}.parquet"
    replace_atomically(out, lambda temporary: pq.write_table(merged, temporary, compression="zstd"))
    return merged.num_rows


def write_text_atomic(path: str | Path, text: str) -> None:
    """Writes UTF-8 with `\\n` line ends to a temporary file and renames it."""
    replace_atomically(Path(path), lambda temporary: temporary.write_bytes(text.encode()))


def write_json_atomic(path: str | Path, payload: Any) -> None:
    """Writes JSON (sorted keys, one trailing newline; NaN and infinity refused) and renames it."""
    path = Path(path)
    try:
        text = json.dumps(payload, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be written as JSON: {error}") from error
    write_text_atomic(path, text + "\n")


def sha256_of_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def git_state(root: str | Path) -> dict[str, Any]:
    """`git_commit` and `git_dirty` of the checkout at `root`; both None outside a checkout."""

    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=20
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip()

    commit = ask("rev-parse", "HEAD")
    changes = ask("status", "--porcelain")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed version by distribution name, None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _describe_output(path: Path) -> dict[str, Any]:
    rows = pq.read_metadata(path).num_rows if path.suffix == ".parquet" else None
    return {"bytes": path.stat().st_size, "rows": rows, "sha256": sha256_of_file(path)}


def write_done(folder: str | Path, payload: Mapping[str, Any], outputs: Iterable[str]) -> None:
    """Writes `DONE`, the proof of completion: size, rows and SHA-256 of every output.

    Args:
        folder: the run's folder.
        payload: JSON facts to keep beside the outputs (counts, seconds).
        outputs: names relative to `folder`.

    Raises:
        InputError: an output is missing or empty, or there is none at all.
    """
    folder = Path(folder)
    names = sorted(set(outputs))
    if not names:
        raise InputError(f"{folder}: nothing to declare as done")
    for name in names:
        if not (folder / name).is_file() or (folder / name).stat().st_size == 0:
            raise InputError(f"{folder / name}: declared output is missing or empty")
    done = {
        "payload": dict(payload),
        "outputs": {name: _describe_output(folder / name) for name in names},
    }
    write_json_atomic(folder / DONE_NAME, done)


def why_not_done(folder: str | Path, check_sha256: bool = True) -> str | None:
    """One line saying why the run in `folder` does not count as complete, None if it does."""
    folder = Path(folder)
    if not (folder / DONE_NAME).is_file():
        return f"{folder}: no {DONE_NAME}"
    try:
        outputs = read_json(folder / DONE_NAME)["outputs"]
        entries = [(name, entry["bytes"], entry["sha256"]) for name, entry in outputs.items()]
    except (InputError, KeyError, TypeError, AttributeError):
        return f"{folder / DONE_NAME}: not in the expected form"
    if not entries:
        return f"{folder / DONE_NAME}: declares no output"
    for name, size, digest in entries:
        path = folder / name
        if not path.is_file():
            return f"{path}: declared output is missing"
        if path.stat().st_size != size:
            return f"{path}: {path.stat().st_size} bytes, {size} when it was declared done"
        if check_sha256 and sha256_of_file(path) != digest:
            return f"{path}: changed since it was declared done"
    return None
