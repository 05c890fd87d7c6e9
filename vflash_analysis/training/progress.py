"""What a training run reports: averages over a window of steps, and lines with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vflash_analysis.progress import clock


class Window:
    """Log sums since the last logged row; JSON, so that a checkpoint can hold it.

    Args:
        sums: name to summed numbers.
    """

    def __init__(self, sums: Mapping[str, list[float]] | None = None) -> None:
        self.sums = dict(sums or {})

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Adds a step's sums; of `weights`, the last value counts."""
        for name, value in sums.items():
            new = value.double().reshape(-1).tolist()
            if name in self.sums and name != "weights":
                new = [a + b for a, b in zip(self.sums[name], new, strict=True)]
            self.sums[name] = new

    def _ratios(self, top: str, bottom: str) -> list[float | None] | None:
        if bottom not in self.sums:
            return None
        pairs = zip(self.sums[top], self.sums[bottom], strict=True)
        return [a / b if b else None for a, b in pairs]

    def _ratio(self, top: str, bottom: str) -> float | None:
        ratios = self._ratios(top, bottom)
        return None if ratios is None else ratios[0]

    def _count(self, name: str) -> int | None:
        return int(self.sums[name][0]) if name in self.sums else None

    def row(self) -> dict[str, Any]:
        """Columns of a TRAINING row that are averages over the window.

        `loss_mask` and `loss_flow` are L0 and L1 pooled over the window, `loss` is
        L0 + lambda L1 with the last lambda, `slot_*` are of the all-mask state, slots 1..K.
        `wrong_corrected` is the share of the `n_wrong` wrongly revealed slots whose label the
        drafter then chose, `right_kept` the same of the `n_right` right ones.
        """
        terms = [term or 0.0 for term in self._ratios("numerators", "denominators") or []]
        return {
            "loss": sum(w * t for w, t in zip(self.sums["weights"], terms, strict=True)),
            "loss_mask": terms[0],
            "loss_flow": terms[1] if len(terms) > 1 else None,
            "slot_accuracy": self._ratios("slot_correct", "slot_n"),
            "slot_loss": self._ratios("slot_ce", "slot_n"),
            "wrong_corrected": self._ratio("n_corrected", "n_wrong"),
            "right_kept": self._ratio("n_kept", "n_right"),
            "n_wrong": self._count("n_wrong"),
            "n_right": self._count("n_right"),
        }


class Progress:
    """Plain lines with the time left, at most one per `every_s` seconds.

    Args:
        name: what is counted, "step" or "clip".
        total: how many there are.
        done: how many were done before it began; they do not enter the rate.
        log: prints one line.
        every_s: seconds between lines.
    """

    def __init__(
        self,
        name: str,
        total: int,
        done: int = 0,
        log: Callable[[str], None] = print,
        every_s: float = 10.0,
    ) -> None:
        self._name, self._total, self._first, self._log = name, total, done, log
        self._every_s = every_s
        self._start = time.perf_counter()
        self._shown = -float("inf")

    def update(self, done: int, text: str = "") -> None:
        """Prints a line if one is due, always at the end."""
        now = time.perf_counter()
        if done < self._total and now - self._shown < self._every_s:
            return
        self._shown = now
        pace = (now - self._start) / max(1, done - self._first)
        left = clock(pace * (self._total - done))
        parts = [
            f"{self._name} {done}/{self._total}",
            text,
            f"{1000 * pace:.0f} ms each",
            f"{left} left",
        ]
        self._log(" | ".join(part for part in parts if part))
