"""The cost model's measurements: of a profile's target (notebook 65), or of any shape by command.

    python -m vflash_analysis.decoding.cost --shape llava-onevision-7b --device cuda --dtype bfloat16

No checkpoint is needed: weights, keys and values are random, as what a forward costs depends on
shapes alone; nothing is compiled, whatever `target.compile` says. From the rows the results draw
break-even accepted lengths, speed-ups over the accepted length and the distance to what memory
bandwidth allows. The command writes its rows as CSV (by default into `data/measured`, where figures
find them) and the machine's facts beside them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vflash_analysis import environment, paths, shapes, strict
from vflash_analysis.config import CostSettings, DrafterSettings, Profile
from vflash_analysis.decoding.measure import Row, Subject, check_device, measure
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import DTYPES
from vflash_analysis.records import (
    git_state,
    typed_frame,
    write_json_atomic,
    write_records,
    write_records_csv,
)
from vflash_analysis.schemas import COSTS, TREE_NODES
from vflash_analysis.shapes import TargetShape
from vflash_analysis.training.pipeline import weights_folder


def measure_profile(settings: Profile, target_folder: Path, run_id: str, out_folder: Path) -> None:
    """Measure a profile's target and drafter and write `costs.parquet`: what notebook 65 runs.

    Args:
        settings: the profile.
        target_folder: results of the target stage, in which a target that it builds lies.
        run_id: of the run.
        out_folder: gets the records.

    Raises:
        InputError: no readable config.json of the target, or its device is too small.
    """
    wanted = settings.target
    shape = shapes.read_shape(weights_folder(settings, target_folder) / "config.json")
    subject = Subject(
        shapes.shape_name(shape, settings.name),
        shape,
        settings.drafter,
        settings.decode.tree_nodes,
        wanted.dtype,
        wanted.device,
        wanted.attention,
        run_id,
    )
    write_records(out_folder / f"{COSTS.name}.parquet", measure(subject, settings.cost), COSTS)


def _named_shape(text: str) -> tuple[str, TargetShape]:
    """A shape of `shapes.NAMED_SHAPES`, or of a config.json, with its name."""
    if text in shapes.NAMED_SHAPES:
        return text, shapes.NAMED_SHAPES[text]
    path = paths.expanded(text)
    if path.suffix != ".json":
        raise InputError(
            f"--shape: found {text!r}, allowed: {', '.join(shapes.NAMED_SHAPES)} or the path of a "
            "config.json"
        )
    shape = shapes.read_shape(path)
    return shapes.shape_name(shape, path.resolve().parent.name), shape


def _settings(contexts: str, repeats: int) -> CostSettings:
    """What to time, as the command line names it.

    Raises:
        InputError: a length or the repeats are out of bounds, or a length comes twice.
    """
    words = [word.strip() for word in contexts.split(",")]
    lengths = [int(word) if word.isdecimal() and len(word) < 10 else word for word in words]
    if len(set(lengths)) != len(lengths):
        raise InputError(f"--contexts: found {contexts!r}, allowed: distinct lengths")
    asked = {"context_tokens": lengths, "repeats": repeats}
    settings: CostSettings = strict.build(CostSettings, asked, "cost")
    return settings


def _out_file(given: str | None, subject: Subject) -> Path:
    """Where the rows go, seen to be writable before anything is measured.

    Raises:
        InputError: another suffix than .csv, a folder in the place of a file, or a folder that is
            not there and cannot be made, or not be written to.
    """
    if given is None:
        own = _slug(f"{environment.device_label(subject.device)} {subject.dtype}")
        out = paths.MEASURED / f"{subject.name}_{own}.csv"
    else:
        out = paths.expanded(given)
    if out.suffix != ".csv":
        raise InputError(
            f"--out: found {str(out)!r}, allowed: the path of a file that ends in .csv"
        )
    for file in (out, out.with_suffix(".json")):
        if file.is_dir():
            raise InputError(f"--out: found a folder at {file}, allowed: a file, or nothing")
    if not out.exists() and out.with_suffix(".json").exists():
        raise InputError(
            f"--out: found {out.with_suffix('.json')}, which would be written over, allowed: "
            "another name"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise InputError(
            f"--out: found {out.parent}: {error.strerror}, allowed: a folder to write to"
        ) from None
    return out


def _slug(text: str) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
    return "-".join(words)


def _write(out: Path, rows: list[Row], machine: dict[str, Any]) -> None:
    """The rows, and the machine's facts beside them; rows that find no room are printed.

    Raises:
        InputError: a file could not be written.
    """
    try:
        write_records_csv(out, rows, COSTS)
        write_json_atomic(out.with_suffix(".json"), machine)
    except OSError as error:
        typed_frame(rows, COSTS).to_csv(sys.stdout, index=False)
        raise InputError(
            f"{out}: {error.strerror}, allowed: a place to write to; what was measured is printed"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 2 on bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", required=True, help="a name, or the path of a config.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    lengths = ",".join(map(str, CostSettings().context_tokens))
    parser.add_argument("--contexts", default=lengths, help="lengths, tokens")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each forward")
    parser.add_argument("--out", help="a .csv file; default: in data/measured")
    asked = parser.parse_args(arguments)
    try:
        name, shape = _named_shape(asked.shape)
        settings = _settings(asked.contexts, asked.repeats)
        subject = Subject(
            name,
            shape,
            DrafterSettings(),
            TREE_NODES,
            asked.dtype,
            asked.device,
            "vflash",
            run_id=str(git_state(paths.ROOT)["git_commit"] or "no commit")[:12],
        )
        check_device(subject, max(settings.context_tokens))  # a file is named after its device
        out = _out_file(asked.out, subject)
        rows = measure(subject, settings)
        _write(out, rows, environment.machine(asked.device))
        print(f"{len(rows)} rows in {paths.relative_to_root(out)}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
