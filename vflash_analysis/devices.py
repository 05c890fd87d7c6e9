"""One shard at a time on a device, so that timed shards never disturb each other.

A stage that computes on the target's device takes one before its kernel starts: on CUDA one of the
visible GPUs that is free, on the CPU the machine's one. Where all are taken it waits and says who
has them. The lock is the operating system's (`flock`): it counts for every checkout and user of the
machine and ends with its process, however that ends.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vflash_analysis.environment import VISIBLE_GPUS, nvidia_smi
from vflash_analysis.errors import InputError

LOCKS = Path("/tmp")  # not TMPDIR, which a scheduler sets anew for every job
POLL_S = 0.5


def visible_gpus() -> list[str]:
    """The GPUs that may be used, by UUID: a number means another GPU in another job's container.

    `CUDA_VISIBLE_DEVICES` is respected, its numbers counted as nvidia-smi does; as in CUDA, what
    follows an entry that names no GPU is left out, and a GPU named twice hides all. Without
    nvidia-smi its entries stand as they are.
    """
    uuids = {row["index"]: row["uuid"] for row in nvidia_smi("index", "uuid")}
    asked = os.environ.get(VISIBLE_GPUS)
    if asked is None:
        return list(uuids.values())
    found: list[str] = []
    for entry in (part.strip() for part in asked.split(",")):
        starting = [uuid for uuid in uuids.values() if entry and uuid.startswith(entry)]
        if entry in uuids:
            found.append(uuids[entry])
        elif len(starting) == 1:
            found += starting
        elif entry.startswith("MIG-") or (not uuids and entry not in ("", "-1")):
            found.append(entry)
        else:
            break
    return found if len(set(found)) == len(found) else []


def _opened(path: Path) -> int:
    """The lock file, open. Other users' files open too, but not with O_CREAT in a sticky folder.

    Raises:
        InputError: a folder, a link, a pipe or a file of no use to us lies there.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            file = os.open(path, flags | os.O_CREAT, 0o666)
            with contextlib.suppress(PermissionError):  # another user was quicker
                os.fchmod(file, 0o666)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}, allowed: a lock file; remove it") from error
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise InputError(f"{path}: found no ordinary file, allowed: a lock file; remove it")


def _try(path: Path, holder: str) -> int | None:
    """Lock the file and write down who has it; None where another process does."""
    file = _opened(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_ino == path.stat().st_ino:  # else it was removed meanwhile
            os.ftruncate(file, 0)
            os.write(file, holder.encode())
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(file)
    return None


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    return "another process"


@contextmanager
def one_device(
    kind: str, shard: str, say: Callable[[str], None] = print
) -> Iterator[Mapping[str, str]]:
    """Hold one device of the machine, waiting for it if need be.

    Args:
        kind: "cuda", "cpu", or "" for a stage that needs none.
        shard: who asks, as a waiting process shall name it.
        say: called with one line whenever the holders change while it waits.

    Raises:
        InputError: something else than a lock file lies in its place.

    Yields:
        What the kernel's environment must say for it to use that device; empty on the CPU, and
        where no GPU can be told from another (they then count as one).
    """
    if not kind:
        yield {}
        return
    names = (visible_gpus() if kind == "cuda" else []) or [kind]
    locks = {name: LOCKS / f"vflash-device-{name.replace('/', '-')}.lock" for name in names}
    holder = f"{shard}, process {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    said = ""
    while True:
        for name, path in locks.items():
            file = _try(path, holder)
            if file is None:
                continue
            try:
                yield {} if name == kind else {VISIBLE_GPUS: name}
            finally:
                os.close(file)
            return
        taken = "; ".join(f"{name} is used by {_holder(path)}" for name, path in locks.items())
        if taken != said:
            say(f"{shard} waits: {taken}")
            said = taken
        time.sleep(POLL_S)
