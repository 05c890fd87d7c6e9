"""Progress: one live line on a terminal, plain lines elsewhere."""

import io
import time
from types import SimpleNamespace

from vflash_analysis.progress import CountLine, ProgressLine, clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_count_is_one_live_line_on_a_terminal_and_few_lines_elsewhere(monkeypatch):
    now = [0.0]
    clock_of_its_own = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("vflash_analysis.progress.time", clock_of_its_own)

    class Screen(io.StringIO):
        def isatty(self):
            return True

    screen, plain = Screen(), io.StringIO()
    for stream in (screen, plain):
        now[0] = 0.0
        line = CountLine("clips read", 100, stream)
        for done in range(1, 101):
            now[0] += 1.0
            line.update(done, "2 bad" if done >= 50 else "")
    redrawn = screen.getvalue().split("\r\x1b[K")
    assert redrawn[1] == "1/100 clips read, about 1:39 left" and len(redrawn) == 101
    assert screen.getvalue().count("\n") == 1
    assert plain.getvalue().splitlines() == [
        "30/100 clips read, about 1:10 left",
        "60/100 clips read, 2 bad, about 0:40 left",
        "90/100 clips read, 2 bad, about 0:10 left",
        "100/100 clips read, 2 bad, in 1:40",
    ]


def test_progress_is_one_live_line_on_a_terminal_and_plain_lines_elsewhere(monkeypatch):
    monkeypatch.setattr("vflash_analysis.progress.TICK_S", 0.01)
    screen = Terminal()
    line = ProgressLine(2, screen)
    line.start("decode-VDC-0", 65.0)
    line.show("clip 3/12")
    for _ in range(500):
        time.sleep(0.01)
        if "clip 3/12" in screen.getvalue():
            break
    line.end("ok", 5.0)
    line.close()
    assert "[1/2] decode-VDC-0 0:0" in screen.getvalue() and "about 1:0" in screen.getvalue()
    assert screen.getvalue().count("\n") == 1  # redrawn in place; only the end stays
    plain = io.StringIO()
    line = ProgressLine(2, plain)
    line.start("clips", 0.0, all_known=False)
    line.end("error", 61.0, "boom")
    line.start("decode", 90.0, all_known=False)
    line.close()
    assert plain.getvalue().splitlines() == [
        "[1/2] clips …",
        "[1/2] clips error in 1:01: boom",
        "[2/2] decode …, about 1:30 and more left",
    ]


def test_clock():
    assert [clock(s) for s in (0, 59.6, 61, 3600, 7322)] == [
        "0:00", "1:00", "1:01", "1:00:00", "2:02:02",
    ]  # fmt: skip
