"""The parent's end of the frame-reading child: start, ask, wait no longer than allowed, replace.

The child is `python -m vflash_analysis.clips.serve`, not forked and not through
`multiprocessing`: that works from notebooks, papermill and DataLoader workers alike, and the child
ends when its pipe closes, also when this process is killed. While it reads, a kernel timer set by
itself ends it even if native code holds its interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import vflash_analysis
from vflash_analysis.errors import InputError

_START_LIMIT_S = 120.0  # a cold import of the readers from a network disk
_LOG_LIMIT = 1 << 20  # bytes of the child's messages that are looked at per clip
_DECODER_ERROR = re.compile(r"error|corrupt|conceal|invalid|missing|unavailable", re.IGNORECASE)


class _ChildGone(Exception):
    """The child ended in the middle of a request."""


class Child:
    """One child process, started on first use, replaced after a time-out or a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None
        self._log: Any = None
        self.environment: dict[str, Any] = {}

    def close(self) -> None:
        """End the process; a later request starts a new one."""
        process, log, self._process, self._log = self._process, self._log, None, None
        if log is not None:
            log.close()
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if self._owner == os.getpid():  # a forked copy must not end its parent's child
            process.kill()
            process.wait()

    def start(self) -> None:
        """Start the process where none is running, and wait until it has told its reader versions.

        Raises:
            InputError: the child does not come up.
        """
        if (
            self._process is not None
            and self._owner == os.getpid()
            and self._process.poll() is None
        ):
            return
        self.close()
        package = str(Path(vflash_analysis.__file__).resolve().parents[1])
        paths = [os.environ.get("PYTHONPATH"), package]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # No name on disk, so nothing is left behind whatever happens.
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        # -P: a file called av.py in the working directory must not become the reader.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vflash_analysis.clips.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a notebook reaches this process only
        )
        self._owner = os.getpid()
        try:
            self.environment = self._receive_json(time.monotonic() + _START_LIMIT_S)
        except (TimeoutError, _ChildGone):
            said = self._last_words()
            self.close()
            raise InputError(
                f"the frame reader did not start ({sys.executable}): {said or 'no message'}"
            ) from None
        except BaseException:
            self.close()
            raise

    def request(
        self, request: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], np.ndarray | None, list[str]]:
        """Send one request and return (header, frames, decoder errors).

        Returns:
            header: the child's; where it timed out or crashed one with "ok", "reason" and
                "message".
            frames: (U, H, W, 3) uint8, None where the header's "ok" is false.
            errors: FFmpeg's error lines: it patches broken pictures and says so only there.
        """
        self.start()
        process = self._process
        assert process is not None and process.stdin is not None
        self._log.truncate(0)
        deadline = time.monotonic() + timeout_s
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            header = self._receive_json(deadline)
            if not header["ok"]:
                return header, None, []
            frames = np.empty(header["shape"], dtype=np.uint8)  # (U, H, W, 3)
            self._receive(frames.data.cast("B"), deadline)
            errors = [
                line
                for line in self._log_lines()
                if " @ 0x" in line and _DECODER_ERROR.search(line)
            ]
            return header, frames, errors
        except TimeoutError:
            self.close()
            return (
                {"ok": False, "reason": "timeout", "message": f"no answer within {timeout_s:g} s"},
                None,
                [],
            )
        except (_ChildGone, BrokenPipeError):
            code, said = _exit_code(process), self._last_words()
            self.close()
            message = f"the reader's process ended with code {code}" + (f": {said}" if said else "")
            return {"ok": False, "reason": "crashed", "message": message}, None, []
        except BaseException:
            # An interrupt: what the child still sends belongs to no later request.
            self.close()
            raise

    def _receive_json(self, deadline: float) -> dict[str, Any]:
        size = bytearray(8)
        self._receive(memoryview(size), deadline)
        text = bytearray(int.from_bytes(size, "little"))
        self._receive(memoryview(text), deadline)
        return json.loads(text)

    def _receive(self, target: memoryview, deadline: float) -> None:
        """Fill `target` from the child, or raise TimeoutError or _ChildGone."""
        assert self._process is not None
        pipe: Any = self._process.stdout
        filled = 0
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while filled < len(target):
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise TimeoutError
                count = pipe.readinto(target[filled:])
                if not count:
                    raise _ChildGone
                filled += count

    def _log_lines(self) -> list[str]:
        self._log.seek(0)
        text = self._log.read(_LOG_LIMIT).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def _last_words(self) -> str:
        return " ".join(self._log_lines()[-1:])[:300]


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the code of a child that closed its pipe; None for one that lives on all the same."""
    try:
        return process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return None
