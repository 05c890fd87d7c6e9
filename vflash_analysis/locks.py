"""One writer per run folder: a lock file that names its process.

A second run in the same folder is refused with one line; the lock of a process that has died is
taken over. Whether a process of another host lives cannot be asked, so every holder touches its
lock now and then, and one that has been silent for long is taken over too; its age is told by the
clock of the file server that both hosts share. The runner hands its lock to the notebook's kernel
through `VFLASH_LOCK_TOKEN`.
"""

import contextlib
import json
import os
import socket
import stat
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from vflash_analysis import paths
from vflash_analysis.errors import InputError

LOCK_NAME = "LOCK"
TOKEN_VARIABLE = "VFLASH_LOCK_TOKEN"
MOST_PIDS = 2**22  # of a Linux kernel
BEAT_S = 15.0
SILENT_S = 300.0  # far above BEAT_S and above the minute for which NFS may show an old time stamp


def process_start(pid: int) -> str | None:
    """When a process started, as the system counts it; None when that cannot be told.

    Tells a process from a later one that was given the same number.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_alive(pid: int, started: str | None) -> bool:
    """Whether the process that had number `pid`, started at `started`, still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs under another user
    return started is None or process_start(pid) in (None, started)


class FolderLock:
    """The right to write into a run folder, held until `release`.

    Args:
        folder: the run folder; made when it is not there.

    Raises:
        InputError: another living process holds it, or one of another host that was heard of in
            the last `SILENT_S` seconds; the line names the process and the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self.token = uuid.uuid4().hex
        self._owned = False
        self._released = threading.Event()
        self._now = 0.0  # of the clock that stamps the files in this folder
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(5):
            if self._try():
                return
            owner = self._owner()
            if owner is None:
                continue  # it vanished between the two looks
            token = os.environ.get(TOKEN_VARIABLE)
            if token and owner.get("token") == token:
                return  # our own runner holds it for us
            if not self._is_gone(owner):
                break
            self._remove_stale(str(owner.get("token")))
        owner = self._owner() or {}
        there = owner.get("host") in (None, socket.gethostname())
        raise InputError(
            f"{paths.relative_to_root(folder)}: in use by process {owner.get('pid', '?')} on "
            f"{owner.get('host', '?')} since {owner.get('since', '?')}; wait for it, or remove "
            f"{LOCK_NAME} there if that process is gone"
            + ("" if there else f" (after {SILENT_S / 60:.0f} minutes it counts as gone)")
        )

    def _is_gone(self, owner: dict[str, Any]) -> bool:
        """Whether the holder has ended, as far as it can be told; a lock that says nothing stays."""
        if not owner.get("host"):
            return False
        if owner["host"] == socket.gethostname():
            return not is_alive(int(owner["pid"]), owner.get("started"))
        try:
            return self._now - self.path.stat().st_mtime > SILENT_S
        except FileNotFoundError:
            return True

    def _try(self) -> bool:
        """Create the lock file whole or not at all."""
        pid = os.getpid()
        owner = {
            "pid": pid,
            "started": process_start(pid),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": self.token,
        }
        draft = self.path.with_name(f".{LOCK_NAME}.{self.token}")
        draft.write_text(json.dumps(owner))
        self._now = draft.stat().st_mtime
        try:
            os.link(draft, self.path)
        except FileExistsError:
            if draft.stat().st_nlink < 2:  # else it was made, and the file server's answer was lost
                return False
        finally:
            draft.unlink()
        self._owned = True
        threading.Thread(target=self._beat, daemon=True).start()
        return True

    def _beat(self) -> None:
        """Show other hosts that this process lives, for as long as the lock is its own."""
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a file server that is away comes back
                if (self._owner() or {}).get("token") != self.token:
                    return
                with self.path.open("rb") as held:  # another may have taken it over since
                    if self.token.encode() in held.read():
                        os.utime(held.fileno())

    def _owner(self) -> dict[str, Any] | None:
        """What the lock file says; None where there is none, empty when it says no such thing."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # reading a pipe would never end
                return {}
            owner = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(owner, dict) or type(owner.get("pid")) is not int:
            return {}
        texts = [owner.get(name) for name in ("host", "started", "since", "token")]
        printable = all(
            text is None or (isinstance(text, str) and text.isprintable()) for text in texts
        )
        return owner if 0 < owner["pid"] < MOST_PIDS and printable else {}

    def _remove_stale(self, token: str) -> None:
        """Move a dead process's lock away; of several that try, one succeeds."""
        aside = self.path.with_name(f".{LOCK_NAME}.{self.token}.stale")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if json.loads(aside.read_text()).get("token") != token:  # a living process was quicker
            os.rename(aside, self.path)
        else:
            aside.unlink()

    def release(self) -> None:
        """Give the folder up; does nothing for a lock that the runner holds for us."""
        if self._owned:
            self._released.set()
            if (self._owner() or {}).get("token") == self.token:  # else another has taken it over
                self.path.unlink(missing_ok=True)
            self._owned = False

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
