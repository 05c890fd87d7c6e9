"""The frame-reading child process: `python -m vflash_analysis.clips.serve`, started by `clips.child`.

Protocol: one JSON line per request on stdin; each answer on stdout is an 8-byte little-endian
length, a JSON header of that length and, for a clip that was read, the distinct frames as raw
bytes. The first header, before any request, tells reader versions and settings.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from vflash_analysis.clips import frames as frame_folders
from vflash_analysis.clips.backends import (
    ReadFailure,
    Reading,
    explain,
    probe,
    read_decord,
    read_pyav,
)
from vflash_analysis.clips.sampling import Wanted

MODULES = {"decord": "decord", "pyav": "av", frame_folders.FRAMES: "PIL"}
BUILT_IN = {
    "decord": read_decord,
    "pyav": read_pyav,
    frame_folders.FRAMES: frame_folders.read_folder,
}


def _backend(name: str) -> Callable[[str, Wanted, int], Reading]:
    """Return a backend by name, or by "module:function" for a reader of the user's own.

    Raises:
        ReadFailure: reason "no_reader" where its module cannot be imported, whatever the error: a
            broken install is as good as none.
    """
    module, _, function = name.partition(":")
    module = MODULES.get(name, module)
    try:
        imported = importlib.import_module(module)
        return BUILT_IN[name] if name in BUILT_IN else getattr(imported, function)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{module} cannot be imported ({said[:200]})"
        raise ReadFailure("no_reader", message) from error


def _answer(request: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
    """Do one request; never raises for a bad clip."""
    path, name = request["path"], request["backend"]
    try:
        wanted = Wanted(**request["wanted"])
        reading = _backend(name)(path, wanted, request["num_threads"])
        frames = np.ascontiguousarray(reading.frames, dtype=np.uint8)
        if frames.ndim != 4 or frames.shape[-1] != 3:
            raise ReadFailure(
                "damaged", f"frames have shape {frames.shape} instead of (T, H, W, 3)"
            )
        if len(frames) != len(np.unique(reading.indices)):
            raise ReadFailure("damaged", f"{len(frames)} frames for indices {reading.indices}")
        header: dict[str, Any] = {"ok": True, "shape": frames.shape}
        header.update(
            {
                key: getattr(reading, key)
                for key in ("n_frames", "duration_s", "n_substituted", "reader_version")
            }
        )
        header.update(indices=reading.indices.tolist(), timestamps_s=reading.timestamps_s.tolist())
        # The frames are there; the container's own claims may stay missing.
        with contextlib.suppress(Exception):
            header.update(probe(path))
        return header, frames
    except Exception as error:
        reason, message = explain(path, error)
        return {"ok": False, "reason": reason, "message": message}, None


def _environment() -> dict[str, Any]:
    """Return reader versions (None: cannot be imported) and the child's settings."""
    facts: dict[str, Any] = {
        "decord_eof_retry_max": os.environ.get("DECORD_EOF_RETRY_MAX"),
        "pid": os.getpid(),
    }
    for name, module in MODULES.items():
        try:
            facts[name] = str(importlib.import_module(module).__version__)
        except Exception:  # a broken install is as good as none, and must not end the child
            facts[name] = None
    return facts


def _send(out: BinaryIO, header: dict[str, Any], frames: np.ndarray | None = None) -> None:
    text = json.dumps(header).encode()
    out.write(len(text).to_bytes(8, "little") + text)
    if frames is not None:
        out.write(frames.data.cast("B"))
    out.flush()


def serve(requests: BinaryIO, out: BinaryIO) -> None:
    """Answer requests until the pipe closes."""
    environment = _environment()
    if environment["pyav"]:
        logging = importlib.import_module("av.logging")
        logging.set_level(logging.ERROR)
        logging.restore_default_callback()  # to stderr, where the parent counts decoder errors
    _send(out, environment)
    for line in requests:
        request = json.loads(line)
        # A native loop holds the interpreter, so only the kernel can end this process once the
        # parent is gone.
        signal.setitimer(signal.ITIMER_REAL, request["give_up_s"])
        header, frames = _answer(request)
        _send(out, header, frames)
        signal.setitimer(signal.ITIMER_REAL, 0)
        del header, frames
        gc.collect()


def main() -> None:
    """Serve on the real stdin and stdout; whatever libraries print goes to stderr instead."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, out)
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
