"""Run one notebook with papermill in a process of its own and say how it ended.

    python -m vflash_analysis.execute REQUEST.json

The request names notebook, output, parameters, folder, kernel and limits; the answer is written to
`<request>.answer`. Papermill's own word is not enough: a dead kernel or `sys.exit(0)` can look
completed, so every cell of the executed notebook is looked at.
"""

import errno
import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vflash_analysis import paths
from vflash_analysis.devices import one_device
from vflash_analysis.errors import InputError
from vflash_analysis.locks import TOKEN_VARIABLE, FolderLock
from vflash_analysis.workers import end_with

# InputError and its subclasses, as a kernel names them
BAD_INPUT_NAMES = ("InputError", "ClipError", "DatasetNotThere", "NothingDecoded")
STARTS = 2  # a kernel that does not come up is started once more; a cell is never run twice


@dataclass(frozen=True)
class Ending:
    """How a notebook ended, before its results are looked at: status and one line of reason."""

    status: str  # ok, bad input, error, died, timeout, incomplete
    reason: str = ""


def one_line(text: str, limit: int = 400) -> str:
    """`text` on one line, without terminal colours, cut after `limit` characters."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    line = " ".join(plain.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def check_parameters(notebook: Path, parameters: dict[str, Any]) -> None:
    """Refuse parameters that the notebook does not take: papermill would only warn.

    Raises:
        InputError: no such notebook, no parameters cell, or an unknown parameter.
    """
    import papermill

    if not notebook.is_file():
        raise InputError(f"{paths.relative_to_root(notebook)}: no such notebook")
    known = papermill.inspect_notebook(str(notebook))
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise InputError(
            f"{notebook.name}: unknown parameter {unknown[0]}, allowed: {', '.join(known) or 'none'}"
        )


def judge_cells(cells: list[Any]) -> Ending:
    """Look at every executed cell: all must have run.

    Args:
        cells: cells of the executed notebook, as nbformat gives them.
    """
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        state = cell["metadata"].get("papermill", {})
        ran = state.get("status") == "completed" and not state.get("exception")
        if not ran and "".join(cell["source"]).strip():
            return Ending(
                "incomplete", f"the notebook stopped in cell {number}, by sys.exit or alike"
            )
    return Ending("ok")


def _describe(error: BaseException, folder: Path) -> Ending:
    """Put what papermill raised into a status and one line."""
    import nbclient.exceptions
    import papermill.exceptions

    full = errno.ENOSPC
    if isinstance(error, papermill.exceptions.PapermillExecutionError):
        if error.ename in BAD_INPUT_NAMES:
            return Ending("bad input", one_line(error.evalue))
        if f"[Errno {full}]" in error.evalue:
            return _disk_full(folder)
        return Ending("error", one_line(f"cell {error.cell_index}: {error.ename}: {error.evalue}"))
    if isinstance(error, nbclient.exceptions.CellTimeoutError):
        return Ending("timeout", "a cell ran past the limit and its kernel was ended")
    if isinstance(error, nbclient.exceptions.DeadKernelError):
        return Ending("died", "the kernel died (out of memory, or a crash in native code)")
    if isinstance(error, InputError):
        return Ending("bad input", one_line(str(error)))
    if isinstance(error, OSError) and error.errno == full:
        return _disk_full(folder)
    return Ending("error", one_line(f"{type(error).__name__}: {error}"))


def _disk_full(folder: Path) -> Ending:
    place = paths.relative_to_root(folder)
    return Ending("error", f"disk full while writing {place}: free some space and run again")


def _nothing_started(output: Path) -> bool:
    """Whether no cell of the output notebook has begun, so that starting again is safe."""
    try:
        cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return True
    states = [c["metadata"].get("papermill", {}) for c in cells if c["cell_type"] == "code"]
    return all(not state.get("start_time") for state in states)


def execute(request: dict[str, Any], log: Any = sys.stdout) -> Ending:
    """Execute the notebook of a request; a kernel that does not start is tried once more.

    Args:
        request: keys notebook, output, parameters, folder, cwd, kernel, timeout_s,
            start_timeout_s; `main` also takes shard, device, environment and runner, the pid to
            end with.
        log: gets the notebook's standard output as it comes.
    """
    import papermill

    output, folder = Path(request["output"]), Path(request["folder"])
    for attempt in range(1, STARTS + 1):
        output.unlink(missing_ok=True)
        try:
            check_parameters(Path(request["notebook"]), request["parameters"])
            book = papermill.execute_notebook(
                request["notebook"],
                str(output),
                parameters=request["parameters"],
                kernel_name=request["kernel"],
                cwd=request["cwd"],
                progress_bar=False,
                stdout_file=log,
                start_timeout=request["start_timeout_s"],
                execution_timeout=request["timeout_s"],
                shutdown_kernel="immediate",
                raise_on_iopub_timeout=True,
            )
        except Exception as error:
            ending = _describe(error, folder)
            retry = ending.status in ("error", "died") and _nothing_started(output)
            if not retry or attempt == STARTS:
                return ending
            print(
                f"kernel did not start ({ending.reason}); starting once more", file=log, flush=True
            )
            continue
        return judge_cells(book.cells)
    raise AssertionError("the loop returns")


def _end() -> None:
    """End this process and, by nbclient's handler, its kernel."""
    os.kill(os.getpid(), signal.SIGTERM)


def main(path: str) -> None:
    """Answer one request file."""
    # A checker of web addresses that jsonschema takes where it is there; nothing here needs one, and
    # it brings papermill's imports from 0.6 s to 1.7.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    end_with(request["runner"], _end)
    folder, held = Path(request["folder"]), False
    try:
        with FolderLock(folder) as lock:
            held = True
            (folder / "DONE").unlink(missing_ok=True)
            os.environ.update(request["environment"], **{TOKEN_VARIABLE: lock.token})
            with one_device(request["device"], request["shard"], partial(print, flush=True)) as gpu:
                os.environ.update(gpu)
                ending = execute(request)
            if ending.status != "ok":
                (folder / "DONE").unlink(missing_ok=True)
    except InputError as error:
        ending = Ending("bad input", one_line(str(error)))
    except OSError as error:
        ending = _describe(error, folder)
    answer = json.dumps({"status": ending.status, "reason": ending.reason, "held": held})
    Path(path).with_suffix(".answer").write_text(answer, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
