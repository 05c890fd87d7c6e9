"""One clip is read ahead of those that are expected; errors come with the clip they belong to."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from vflash_analysis.errors import InputError
from vflash_analysis.training.read_ahead import ReadAhead


class Reads:
    """Notes what was read and by which thread; clip "bad" cannot be read."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.threads: set[int] = set()
        self.done = {name: threading.Event() for name in (*"abcd", "bad")}

    def __call__(self, clip_id: str) -> torch.Tensor:
        self.begun.append(clip_id)
        self.threads.add(threading.get_ident())
        self.done[clip_id].set()
        if clip_id == "bad":
            raise InputError("bad: damaged")
        return torch.tensor([ord(clip_id)])


def test_the_next_expected_clip_is_read_while_nobody_asks() -> None:
    reads = Reads()
    with contextlib.closing(ReadAhead(reads)) as frames:
        frames.expect("abc")
        assert frames("a").item() == ord("a")
        assert reads.done["b"].wait(10) and not reads.done["c"].is_set()
        frames.expect("bcd")  # the next step begins where this one ended
        assert [frames(name).item() for name in "bcd"] == [ord(name) for name in "bcd"]
    assert reads.begun == ["a", "b", "c", "d"]
    assert len(reads.threads) == 1 and threading.get_ident() not in reads.threads


def test_any_clip_may_be_asked_for() -> None:
    reads = Reads()
    with contextlib.closing(ReadAhead(reads)) as frames:
        assert frames("c").item() == ord("c")
        frames.expect("ab")
        assert frames("d").item() == ord("d")
        assert frames("b").item() == ord("b")
        assert frames("b").item() == ord("b")
    assert reads.begun[:2] == ["c", "d"] and reads.begun.count("b") == 2


def test_a_clip_that_cannot_be_read_is_told_when_its_turn_comes() -> None:
    reads = Reads()
    with contextlib.closing(ReadAhead(reads)) as frames:
        frames.expect(["a", "bad", "b"])
        frames("a")
        assert reads.done["bad"].wait(10)
        with pytest.raises(InputError, match="bad: damaged"):
            frames("bad")
        assert frames("b").item() == ord("b")
