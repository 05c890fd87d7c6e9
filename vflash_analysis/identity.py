"""What a run is made of: digests of code, of input files and of parameters.

A run_id changes when parameters, the code of the stage or its inputs change, and with nothing else:
comments, docstrings, formatting and the place of the checkout leave it alone. Digests of files are
cached by path, size and modification time, so planning a finished run takes a second.
"""

import ast
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vflash_analysis import paths
from vflash_analysis.errors import InputError
from vflash_analysis.records import sha256_of_file, write_json_atomic
from vflash_analysis.strict import read_json

PACKAGE_NAME = "vflash_analysis"
# Modules that decide where and when a stage runs, not what it computes.
ORCHESTRATION = frozenset(
    f"{PACKAGE_NAME}.{name}"
    for name in (
        "paths", "errors", "config", "strict", "environment", "identity", "locks", "devices",
        "stages", "notebook", "execute", "progress", "workers", "runner", "publish", "run_facts", "demo", "cli",
        "asking", "estimate", "preflight",
    )
)  # fmt: skip
ABSENT = "absent"


def sha256_of_json(value: Any) -> str:
    """SHA-256, in hex, of a JSON value with sorted keys."""
    text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def run_id(stage: str, parameters: Mapping[str, Any], code: str, inputs: Mapping[str, str]) -> str:
    """Twelve hex digits that name a run: what is computed, by which code, from which inputs."""
    parts = {"stage": stage, "parameters": parameters, "code": code, "inputs": inputs}
    return sha256_of_json(parts)[:12]


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The same tree with the docstrings of the module, its classes and functions removed."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def _parse(text: str, where: Path) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        line = error.lineno or 0
        raise InputError(f"{paths.relative_to_root(where)}: line {line}: {error.msg}") from None


def module_file(name: str) -> Path | None:
    """The source file of a module of the package, None when it is no module."""
    place = paths.PACKAGE.joinpath(*name.split(".")[1:])
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return None


def imported_modules(tree: ast.Module) -> set[str]:
    """Modules of the package that a tree imports, at any depth, parents included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    ours = {name for name in names if name.split(".")[0] == PACKAGE_NAME}
    parents = {".".join(n.split(".")[:i]) for n in ours for i in range(1, n.count(".") + 1)}
    return {name for name in ours | parents if module_file(name)}


@cache
def _module_facts(file: Path, mtime_ns: int, size: int) -> tuple[str, frozenset[str]]:
    """Digest of a module's code and the modules of the package it imports."""
    tree = _parse(file.read_text(encoding="utf-8"), file)
    imports = frozenset(imported_modules(tree))
    dumped = ast.dump(without_docstrings(tree), annotate_fields=False)
    return hashlib.sha256(dumped.encode()).hexdigest(), imports


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook file, each with `text` (its source) and `tags`."""
    book = read_json(notebook)
    return [
        {"text": "".join(cell["source"]), "tags": cell.get("metadata", {}).get("tags", [])}
        for cell in book["cells"]
        if cell["cell_type"] == "code"
    ]


def code_digest(notebook: Path, leaves_out: str = "") -> str:
    """SHA-256 of a stage's code (see `code_parts`)."""
    return sha256_of_json(code_parts(notebook, leaves_out))


def code_parts(notebook: Path, leaves_out: str = "") -> dict[str, str]:
    """Digests of a stage's code: of its cells, and by name of every module that they reach.

    The `parameters` cell is left out (parameters are hashed by value), and so is orchestration.

    Args:
        notebook: the stage's.
        leaves_out: a package whose modules the results do not depend on, "" for none.
    """
    cells = [cell["text"] for cell in code_cells(notebook) if "parameters" not in cell["tags"]]
    tree = _parse("\n".join(cells), notebook)
    digests = {
        "notebook": hashlib.sha256(ast.dump(tree, annotate_fields=False).encode()).hexdigest()
    }
    waiting = imported_modules(tree) - ORCHESTRATION
    while waiting:
        name = waiting.pop()
        file = module_file(name)
        left_out = leaves_out and f"{name}.".startswith(f"{leaves_out}.")
        if file is None or name in digests or left_out:
            continue
        status = file.stat()
        digests[name], imports = _module_facts(file, status.st_mtime_ns, status.st_size)
        waiting |= set(imports) - ORCHESTRATION
    return digests


class FileDigests:
    """SHA-256 of files and folders, remembered by path, size and modification time.

    Args:
        store: JSON file that keeps what was computed; read once, written by `save`.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._known: dict[str, list[Any]] = {}
        self._changed = False
        if store.is_file():
            try:
                kept = dict(read_json(store)).items()
                self._known = {k: v for k, v in kept if isinstance(v, list) and len(v) == 3}
            except (InputError, TypeError, ValueError):
                pass  # a damaged cache costs time, nothing else

    def known(self, path: Path) -> str | None:
        """Digest of a file that has not changed since it was kept; None of any other."""
        known = self._known.get(os.path.realpath(path))
        return str(known[2]) if known and known[:2] == _status(path) else None

    def of_file(self, path: Path) -> str:
        """Digest of a file's bytes; "absent" where there is none.

        Raises:
            InputError: it changed while it was read, so no digest is that of the file.
        """
        if not path.is_file():
            return ABSENT
        digest = self.known(path)
        if digest is None:
            before = _status(path)
            digest = sha256_of_file(path)
            if _status(path) != before:
                raise InputError(
                    f"{path}: found a file that changed while it was read, allowed: one that "
                    "nothing writes to"
                )
            self._known[os.path.realpath(path)] = [*before, digest]
            self._changed = True
        return digest

    def of(self, path: Path) -> str:
        """Digest of a file, or of a folder's relative names and contents (hidden files left out)."""
        if not path.is_dir():
            return self.of_file(path)
        files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        if not files:
            return ABSENT
        return sha256_of_json({str(p.relative_to(path)): self.of_file(p) for p in files})

    def save(self) -> None:
        """Keep what was computed; a folder that cannot be written costs time, nothing else."""
        if self._changed:
            with contextlib.suppress(OSError):
                write_json_atomic(self._store, dict(self._known))  # threads may add to it
                self._changed = False


def _status(path: Path) -> list[int]:
    """Size and modification time, by which a file is known to be the same."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def digests_of(inputs: Iterable[tuple[str, Path | None]], digests: FileDigests) -> dict[str, str]:
    """Digest by input name, so that no path of this machine takes part in a run_id."""
    return {name: digests.of(path) if path else ABSENT for name, path in inputs}
