"""The summary of a run: how shards ended, and how long the rest will take."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest

from vflash_analysis import execute, summary
from vflash_analysis.summary import Outcome, Summary


def test_time_left_comes_from_what_stages_took_before(runs):
    told = Summary("p")
    assert told.expected(["a"]) == (0, False)
    for outcome in (Outcome("a-0", "ok", 99), Outcome("a-1", "ok", 10), Outcome("a-2", "died", 1)):
        told.note("a", outcome)
    told.note("b", Outcome("b", "ok", 30))
    assert Summary("p").expected(["a", "b", "a"]) == (10 + 30 + 10, True)
    assert told.expected(["a", "unknown"]) == (10, False)


@pytest.mark.parametrize("damaged", ["", "[]", "shard,stage\na,b\n", "\x00\xff", '"'])
def test_a_damaged_summary_costs_an_estimate_and_nothing_else(runs, damaged):
    told = Summary("p")
    told.note("a", Outcome("a", "ok", 10))
    told.file.write_text(damaged)
    assert told.expected(["a"]) == (0, False)
    told.note("a", Outcome("a", "ok", 20))
    assert told.expected(["a"]) == (20, True)


def test_runs_beside_each_other_share_the_summary(runs):
    def note(number):
        Summary("p").note("a", Outcome(f"a-{number}", "ok", number, "what, and why"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(40)))
    told = Summary("p").read()
    assert sorted(told["seconds"]) == list(range(40)) and set(told["reason"]) == {"what, and why"}


def test_statuses_are_distinct_and_documented():
    assert len(set(summary.STATUSES)) == len(summary.STATUSES)
    documented = inspect.getsource(execute.Ending).split("status: str  # ")[1].splitlines()[0]
    assert set(documented.split(", ")) <= set(summary.STATUSES)


@pytest.mark.parametrize("cell", ["inf", "nan", "-1", "soon", "9" * 400, ""])
def test_a_damaged_cell_of_the_summary_costs_its_own_estimate(runs, cell):
    told = Summary("p")
    told.note("a", Outcome("a", "ok", 10.5))
    told.note("b", Outcome("b", "ok", 20))
    told.file.write_text(told.file.read_text().replace("10.5", cell))
    assert told.expected(["a", "b"]) == (20, False)
    told.note("c", Outcome("c", "ok", 30))
    assert told.read()["shard"].tolist() == ["a", "b", "c"]
