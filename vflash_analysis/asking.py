"""Questions to a process of its own: the light commands ask what they load no model for.

    ask("vflash_analysis.preflight", {"profile": "h100", "overrides": {}})

One JSON object goes in on standard input, one comes out as the last line of standard output: the
answer, or why there is none. Standard error is for what the process says meanwhile. The process
ends when the one that asked does.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vflash_analysis import config, paths
from vflash_analysis.errors import InputError
from vflash_analysis.workers import end_with

REFUSED = "refused"  # key of an answer that says why there is none
ASKER = "VFLASH_ASKER"  # environment variable: the pid to end with
BAD_INPUT = 2  # exit code of a process that refuses


def folders() -> dict[str, str]:
    """Folders as a process that runs in the checkout must be told them: environment variables."""
    own = {"VFLASH_ROOT": str(paths.ROOT), "VFLASH_RUNS": str(paths.RUNS)}
    return own | config.local_environment()


def ask(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    silent: str = "no message",
    live: bool = False,
) -> dict[str, Any]:
    """What a module that runs `answer` says to a request.

    Args:
        module: its dotted name.
        request: JSON types.
        environment: variables beyond this process's and `folders`.
        silent: what is said of a process that fails without a word.
        live: whether its standard error is also shown on this one's, line by line as it comes.

    Raises:
        InputError: the process refused, with its reason; or it failed, with the last line of its
            standard error.
    """
    # files, not pipes: only standard error is read while the process runs
    with (
        tempfile.TemporaryFile("w+") as asked,
        tempfile.TemporaryFile("w+", errors="replace") as told,
    ):
        json.dump(dict(request), asked)
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=asked,
            stdout=told,
            stderr=subprocess.PIPE,
            cwd=paths.ROOT,
            env={**os.environ, **folders(), **(environment or {}), ASKER: str(os.getpid())},
        )
        assert process.stderr is not None
        # a progress bar's "\r" is passed on as it is
        with process, io.TextIOWrapper(process.stderr, errors="replace", newline="") as said:
            last = _last_line(said, live)
        told.seek(0)
        lines = told.read().splitlines()
    answered = bool(lines) and process.returncode in (0, BAD_INPUT)
    found: dict[str, Any] = json.loads(lines[-1]) if answered else {}
    if process.returncode:
        raise InputError(found.get(REFUSED) or last or silent)
    return found


def _last_line(lines: Iterable[str], live: bool) -> str:
    """The last line that is not blank; each is passed on to standard error if `live`."""
    last = ""
    for line in lines:
        last = line.strip() or last
        if live:
            print(line, end="", file=sys.stderr, flush=True)
    return last


def answer(respond: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Answer the one request on standard input; the exit code, BAD_INPUT where it refuses."""
    if asker := os.environ.get(ASKER):
        end_with(int(asker), lambda: os._exit(1))
    request = json.loads(sys.stdin.read())
    try:
        print(json.dumps(respond(request)))
    except InputError as error:
        print(json.dumps({REFUSED: str(error)}))
        return BAD_INPUT
    return 0
