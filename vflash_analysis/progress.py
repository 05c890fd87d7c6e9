"""One live line that says what runs, for how long, and how much is left; plain lines in a log."""

import os
import threading
import time
from typing import Any

TICK_S = 1.0
LOG_EVERY_S = 30.0


def clock(seconds: float) -> str:
    """Seconds as `0:07`, `12:34` or `1:02:03`."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class _Line:
    """A line redrawn in place on a terminal, plain lines elsewhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._live = bool(getattr(stream, "isatty", lambda: False)())
        self._lock = threading.Lock()

    def _write(self, text: str, stays: bool) -> None:
        with self._lock:
            if self._live:
                self._stream.write(
                    "\r\x1b[K" + (text + "\n" if stays else text[: _width(self._stream)])
                )
            elif stays:
                self._stream.write(text + "\n")
            self._stream.flush()


class CountLine(_Line):
    """Progress over many like things, such as files.

    On a terminal one line is redrawn with each of them, at most ten times a second; elsewhere a line
    is written every half minute and at the end.

    Args:
        what: what is counted, in the plural.
        total: how many there are.
        stream: where to write.
    """

    def __init__(self, what: str, total: int, stream: Any) -> None:
        super().__init__(stream)
        self._what, self._total = what, total
        self._began = self._written = time.monotonic()

    def update(self, done: int, note: str = "") -> None:
        """So many are done."""
        now = time.monotonic()
        at_end = done >= self._total
        if not at_end and now - self._written < (0.1 if self._live else LOG_EVERY_S):
            return
        self._written = now
        took = now - self._began
        told = f"in {clock(took)}"
        if not at_end:
            told = f"about {clock(took / max(1, done) * (self._total - done))} left"
        note = f", {note}" if note else ""
        self._write(f"{done}/{self._total} {self._what}{note}, {told}", at_end or not self._live)


class ProgressLine(_Line):
    """Progress over a number of shards.

    On a terminal one line is redrawn every second; elsewhere a line is written when a shard starts
    and ends, and one every half minute with what it printed last.

    Args:
        total: shards to run.
        stream: where to write.
    """

    def __init__(self, total: int, stream: Any) -> None:
        super().__init__(stream)
        self._total = total
        self._index = 0
        self._name = self._last = ""
        self._started = 0.0
        self._expected, self._all_known = 0.0, False
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def _head(self) -> str:
        return f"[{self._index}/{self._total}] {self._name}"

    def _left(self) -> str:
        left = max(0.0, self._expected - (time.monotonic() - self._started))
        if self._all_known:
            return f", about {clock(left)} left"
        return f", about {clock(left)} and more left" if left else ""

    def _tick(self) -> None:
        said = time.monotonic()
        while not self._stop.wait(TICK_S):
            if not self._name:
                continue
            now = time.monotonic()
            told = f" · {self._last}" if self._last else ""
            text = f"{self._head()} {clock(now - self._started)}{self._left()}{told}"
            due = now - said >= LOG_EVERY_S
            if self._live or due:
                self._write(text, stays=not self._live)
                said = now

    def start(self, name: str, expected_s: float, all_known: bool = True) -> None:
        """A shard begins; `expected_s` covers it and all after it, of which some may be unknown."""
        self._index += 1
        self._last, self._started = "", time.monotonic()
        self._expected, self._all_known = expected_s, all_known
        self._name = name
        self._write(f"{self._head()} …{self._left()}", stays=not self._live)

    def show(self, line: str) -> None:
        """The latest line the shard printed."""
        self._last = line

    def end(self, status: str, seconds: float, reason: str = "") -> None:
        """The shard ended."""
        told = f": {reason}" if reason else ""
        text = f"{self._head()} {status} in {clock(seconds)}{told}"
        self._name = ""
        self._write(text, stays=True)

    def skip(self, name: str, reason: str) -> None:
        """A shard is left out."""
        self._index += 1
        self._write(f"[{self._index}/{self._total}] {name} left out: {reason}", stays=True)

    def close(self) -> None:
        """Stop redrawing."""
        self._stop.set()
        self._ticker.join(timeout=2 * TICK_S)


def _width(stream: Any) -> int:
    """Columns of a terminal, one less so that the line never wraps."""
    try:
        return os.get_terminal_size(stream.fileno()).columns - 1
    except (OSError, ValueError, AttributeError):
        return 79
