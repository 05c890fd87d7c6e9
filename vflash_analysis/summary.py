"""How shards ended: what a run prints last, and `runs/<profile>/summary.csv`.

That file keeps how each shard ended when it last ran; runs beside each other share it, and the time
that a stage took last tells the time left.
"""

import fcntl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from vflash_analysis import paths, records
from vflash_analysis.errors import InputError
from vflash_analysis.progress import clock

STATUSES = ("ok", "skipped", "bad input", "error", "died", "timeout", "incomplete", "blocked")
GOOD = ("ok", "skipped")
MOST_SECONDS = 1e9  # thirty years: a cell above it is damaged


@dataclass(frozen=True)
class Outcome:
    """How a shard ended; `status` is one of STATUSES."""

    shard: str
    status: str
    seconds: float
    reason: str = ""
    notebook: str = ""


class Summary:
    """The last outcome of every shard of a profile, in the order in which they ended.

    Args:
        profile: its runs are in `runs/<profile>`.
    """

    COLUMNS = ("shard", "stage", "status", "seconds", "reason", "notebook")

    def __init__(self, profile: str) -> None:
        self.file = paths.RUNS / profile / "summary.csv"

    def read(self) -> pd.DataFrame:
        """One row a shard, columns COLUMNS; none where the file is absent or damaged."""
        try:
            rows = pd.read_csv(self.file, dtype=str, keep_default_na=False, on_bad_lines="skip")
            rows = rows.loc[:, list(self.COLUMNS)]
        except (OSError, ValueError, KeyError):  # what is lost is an estimate of time, nothing else
            return pd.DataFrame(columns=self.COLUMNS)
        seconds = pd.to_numeric(rows["seconds"], errors="coerce")
        return rows.assign(seconds=seconds.where(seconds.between(0, MOST_SECONDS)))

    def expected(self, stages: Sequence[str]) -> tuple[float, bool]:
        """Seconds for these shards' stages, and whether all are known: unknown ones count nothing."""
        rows = self.read()
        took = rows.loc[rows["status"] == "ok"].groupby("stage")["seconds"].last().dropna()
        known = [float(took[stage]) for stage in stages if stage in took]
        return sum(known), len(known) == len(stages)

    def note(self, stage: str, outcome: Outcome) -> None:
        """Write down how a shard ended, in place of its row before.

        Raises:
            InputError: the file cannot be written.
        """
        lock_file = self.file.with_name(".summary.lock")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with lock_file.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # of another run: held for a moment
                rows = self.read()
                own = [{**vars(outcome), "stage": stage}]
                others = rows.loc[rows["shard"] != outcome.shard].to_dict("records")
                told = pd.DataFrame([*others, *own], columns=self.COLUMNS)
                text = told.to_csv(index=False, float_format="%.1f", lineterminator="\n")
                records.write_text_atomic(self.file, text)
        except OSError as error:
            place = paths.relative_to_root(self.file)
            raise InputError(f"{place}: cannot be written ({error.strerror or error})") from error


def summary_lines(outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    """What a person reads at the end: counts, then one line per shard that gave no result."""
    counts = {status: sum(o.status == status for o in outcomes) for status in STATUSES}
    told = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    lines = [f"{told or 'no shards'} in {clock(seconds)}"]
    if counts["skipped"] == len(outcomes):
        lines = [f"nothing to do: all {len(outcomes)} shards are done"]
    for o in outcomes:
        if o.status in GOOD and " units" in o.reason:
            lines.append(f"  {o.shard}: {o.reason}; --retry-failed tries the others again")
        if o.status not in GOOD:
            kept = f" ({o.notebook})" if o.notebook else ""
            lines.append(f"  {o.shard}: {o.status}: {o.reason}{kept}")
    return lines


def summary_json(outcomes: Sequence[Outcome], seconds: float) -> Mapping[str, Any]:
    """The same for programs."""
    return {
        "ok": all(o.status in GOOD for o in outcomes),
        "seconds": round(seconds, 1),
        "shards": {o.shard: o.status for o in outcomes},
        "failed": {o.shard: o.reason for o in outcomes if o.status not in GOOD},
    }
