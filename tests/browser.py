"""Opens a page in headless Chromium and tells what came of it; the one helper for every such test.

page = visit(path, fragment="t=0.05")
assert page.errors == [] and page.requests == []
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="runs once `chromium` (Debian's package) is on the PATH"
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
_CONSOLE = re.compile(r":(\w+):CONSOLE[^\]]*\] \"(.*)\", source: ", re.DOTALL)
_OWN_SCHEMES = {"file", "data", "about", "blob", "chrome", "chrome-extension", "devtools"}
_BROWSER = "not an origin"
_LIMIT_S = 60


@dataclass(frozen=True)
class Page:
    """What a page was once its scripts had run.

    Attributes:
        dom: the document as HTML.
        errors: messages on the console, warnings and logs too: our pages print none.
        requests: URLs asked for beyond files and data in the page itself.
    """

    dom: str
    errors: list[str]
    requests: list[str]

    def texts(self, css_class: str) -> list[str]:
        """The text of every element of a class, in the order of the document."""
        reader = _Texts(css_class)
        reader.feed(self.dom)
        return reader.found


class _Texts(HTMLParser):
    _VOID = ("br", "hr", "img", "input", "link", "meta")

    def __init__(self, css_class: str) -> None:
        super().__init__(convert_charrefs=True)
        self._wanted, self._depth = css_class, 0
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._VOID:
            return
        if self._depth:
            self._depth += 1
        elif self._wanted in (dict(attrs).get("class") or "").split():
            self._depth = 1
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._depth and tag not in self._VOID:
            self._depth -= 1

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.found[-1] += data


def visit(
    path: Path,
    fragment: str = "",
    flags: Sequence[str] = (),
    size: tuple[int, int] = (1280, 900),
    virtual_ms: int = 10_000,
) -> Page:
    """Load a file, let that much virtual time pass, and read the document.

    Args:
        path: an HTML file.
        fragment: what follows the `#`.
        flags: more of Chromium's, as in `--force-prefers-reduced-motion`.
        size: of the window, in CSS pixels.
        virtual_ms: time that passes for the page's scripts; it passes at once for us.
    """
    assert CHROMIUM is not None
    address = path.resolve().as_uri() + (f"#{fragment}" if fragment else "")
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "net.json"
        words = [CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={place}/profile"]
        words += [f"--window-size={size[0]},{size[1]}", f"--virtual-time-budget={virtual_ms}"]
        words += [f"--log-net-log={log}", "--dump-dom", address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        asked = _requests(log.read_text(encoding="utf-8"))
    errors = [message for _, message in _CONSOLE.findall(done.stderr)]
    return Page(done.stdout, errors, asked)


def _requests(net_log: str) -> list[str]:
    """URLs that the page asked for, of schemes that leave the machine, by Chromium's net log.

    What the browser asks for on its own account has no page as its initiator.
    """
    try:
        events = json.loads(net_log)["events"]
    except json.JSONDecodeError:  # the browser ended before it closed the list
        events = json.loads(net_log.rstrip().rstrip(",") + "]}")["events"]
    asked = [event.get("params", {}) for event in events]
    urls = [one["url"] for one in asked if one.get("initiator", _BROWSER) != _BROWSER]
    return list(dict.fromkeys(url for url in urls if urlsplit(url).scheme not in _OWN_SCHEMES))
