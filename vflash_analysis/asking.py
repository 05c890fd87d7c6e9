"""Questions to a process of its own: the light commands ask what they load no model for.

    ask("vflash_analysis.preflight", {"profile": "h100", "overrides": {}})

One JSON object goes in on standard input, one comes out as the last line of standard output.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vflash_analysis import config, paths
from vflash_analysis.errors import InputError


def folders() -> dict[str, str]:
    """Folders as a process that runs in the checkout must be told them: environment variables."""
    own = {"VFLASH_ROOT": str(paths.ROOT), "VFLASH_RUNS": str(paths.RUNS)}
    return own | config.local_environment()


def ask(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    silent: str = "no message",
) -> dict[str, Any]:
    """What a module that runs `answer` says to a request.

    Args:
        module: its dotted name.
        request: JSON types.
        environment: variables beyond this process's and `folders`.
        silent: what is said of a process that fails without a word.

    Raises:
        InputError: the process failed; its last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(dict(request)),
        capture_output=True,
        text=True,
        cwd=paths.ROOT,
        env={**os.environ, **folders(), **(environment or {})},
    )
    if done.returncode:
        raise InputError((done.stderr.strip().splitlines() or [silent])[-1])
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def answer(respond: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Answer the one request on standard input; the exit code, 2 on bad input."""
    request = json.loads(sys.stdin.read())
    try:
        print(json.dumps(respond(request)))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
