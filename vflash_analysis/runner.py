"""Run a plan: one shard after the other, each in a kernel of its own, judged by what it left.

    vflash run --profile pocket

A shard counts only if `DONE` and every declared output are there. Finished shards are skipped, so
running again does nothing and says so; a failed notebook is kept beside its results; whatever needs
a failed shard is left out and named in the summary.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vflash_analysis import config, environment, estimate, paths, records
from vflash_analysis.asking import ask, folders
from vflash_analysis.devices import one_device
from vflash_analysis.environment import MEMORY, row
from vflash_analysis.errors import InputError
from vflash_analysis.execute import one_line
from vflash_analysis.notebook import RUN_ID_VARIABLE, STALE_VARIABLE
from vflash_analysis.progress import ProgressLine
from vflash_analysis.stages import Shard, missing_inputs
from vflash_analysis.strict import read_json
from vflash_analysis.summary import Outcome, Summary

EXECUTED_NOTEBOOK = "notebook.ipynb"
LOG_LIMIT = 900_000  # bytes of a notebook's standard output that are kept


@dataclass(frozen=True)
class Limits:
    """Wall-clock limits in seconds: of a cell, and of a kernel's start."""

    timeout_s: int | None = None  # none: a cell of the h100 profile may train for days
    start_timeout_s: int = 120


def _pump(stream: Any, log: Path, show: Callable[[str], None]) -> None:
    """Copy a notebook's output to its log, up to a size, and show the latest line."""
    written = 0
    with log.open("w", encoding="utf-8") as out:
        for line in stream:
            if written < LOG_LIMIT:
                out.write(line)
                written += len(line)
                if written >= LOG_LIMIT:
                    out.write("… (cut)\n")
            if line.strip():
                show(one_line(line, 100))


def _end(process: subprocess.Popen[str]) -> None:
    """End a notebook's process and its kernel: asked first, then killed."""
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _request(shard: Shard, limits: Limits, keep_stale: bool) -> dict[str, Any]:
    """What `vflash_analysis.execute` needs to know."""
    return {
        "shard": shard.name,
        "device": shard.device,
        "notebook": str(shard.notebook),
        "output": str(shard.folder / EXECUTED_NOTEBOOK),
        "parameters": dict(shard.parameters),
        "folder": str(shard.folder),
        "cwd": str(paths.ROOT),
        "runner": os.getpid(),
        "kernel": "python3",
        "timeout_s": limits.timeout_s,
        "start_timeout_s": limits.start_timeout_s,
        "environment": {
            **folders(),
            STALE_VARIABLE: "1" if keep_stale else "0",
            RUN_ID_VARIABLE: shard.run_id,
            "JUPYTER_PREFER_ENV_PATH": "1",  # this interpreter's kernel, whatever a user installed
            "TQDM_DISABLE": "1",
        },
    }


def _wait_for(process: subprocess.Popen[str], log: Path, show: Callable[[str], None]) -> None:
    """Wait for a notebook's process; an interrupt ends it and its kernel."""
    pump = threading.Thread(target=_pump, args=(process.stdout, log, show), daemon=True)
    pump.start()
    try:
        process.wait()
    except BaseException:
        _end(process)
        raise
    pump.join(timeout=10)


def _execute(
    shard: Shard, limits: Limits, show: Callable[[str], None], keep_stale: bool
) -> tuple[str, str]:
    """Execute the notebook in a process of its own; status and reason as that process saw them."""
    file = shard.folder / f".request-{os.getpid()}.json"
    answer = file.with_suffix(".answer")
    drafts = {name: shard.folder / f".{name}.{os.getpid()}" for name in ("log.txt", "stderr.txt")}
    held = True  # whether the folder was ours: another run's logs stay as they are
    try:
        request = _request(shard, limits, keep_stale)
        records.write_json_atomic(file, request)
        with drafts["stderr.txt"].open("w", encoding="utf-8") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "vflash_analysis.execute", str(file)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                cwd=paths.ROOT,
                env={**os.environ, **request["environment"]},
            )
        _wait_for(process, drafts["log.txt"], show)
        if not answer.is_file():
            return "died", "the notebook's process ended without an answer"
        told = json.loads(answer.read_text(encoding="utf-8"))
        held = told["held"]
        return told["status"], told["reason"]
    except OSError as error:
        place = paths.relative_to_root(shard.folder)
        return "error", f"{place}: {error.strerror or error}"
    finally:
        for name, draft in drafts.items():
            if held and draft.is_file():
                os.replace(draft, shard.folder / name)
            draft.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


def run_shard(
    shard: Shard,
    limits: Limits | None = None,
    show: Callable[[str], None] = lambda line: None,
    keep_stale: bool = False,
) -> Outcome:
    """Execute one shard's notebook and judge it by what it left.

    Args:
        shard: what to run.
        limits: wall-clock limits.
        show: called with each line that the notebook prints.
        keep_stale: let the notebook use stale results of earlier stages.

    Returns:
        status "ok" only if `DONE` and every declared output are there and unchanged.
    """
    started = time.monotonic()
    status, reason = _execute(shard, limits or Limits(), show, keep_stale)
    if status == "ok":
        reason = shard.why_not_done() or ""
        if reason:
            status = "incomplete"
            (shard.folder / records.DONE_NAME).unlink(missing_ok=True)
        reason = reason or lacking(shard)
    kept = paths.relative_to_root(shard.folder / EXECUTED_NOTEBOOK)
    return Outcome(shard.name, status, time.monotonic() - started, reason, kept)


def lacking(shard: Shard) -> str:
    """What a finished shard did not give a result for, as "11 of 12 units"; empty if nothing."""
    if not shard.done:
        return ""
    payload = read_json(shard.folder / records.DONE_NAME).get("payload") or {}
    planned, done = payload.get("planned", 1), payload.get("done", 1)
    return f"{done} of {planned} units" if done < planned else ""


def reopen_lacking(shards: Sequence[Shard]) -> list[str]:
    """Take `DONE` from shards that lack results, and from all that read them; returns their names.

    Run again, such a shard keeps what it has and tries only the rest.
    """
    reopened: list[str] = []
    for shard in shards:  # each comes after what it needs
        if shard.done and (lacking(shard) or set(shard.dependencies) & set(reopened)):
            (shard.folder / records.DONE_NAME).unlink()
            reopened.append(shard.name)
    return reopened


def ask_preflight(
    profile: str, overrides: Mapping[str, Any], gpu: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The rows of `preflight.target_rows`, from a process that may load what this one does not.

    Without torch there are none: `environment_table` says that it is not installed. Where that
    process fails, its last line is the one row's note.

    Args:
        profile: its name.
        overrides: dotted setting to value.
        gpu: what `one_device` gave.
    """
    if importlib.util.find_spec("torch") is None:
        return []
    request = {"profile": profile, "overrides": dict(overrides)}
    try:
        rows: list[dict[str, Any]] = ask("vflash_analysis.preflight", request, gpu)["rows"]
    except InputError as error:
        return [row("target files", None, "a checkpoint", False, f"cannot be looked at: {error}")]
    return rows


def _refuse_small_disk(profile: config.Profile, waiting: Sequence[Shard]) -> None:
    """Refuse a run whose results will not fit on the disk.

    What the estimate leaves out is not asked for here: a run of less finds a full disk out soon
    enough, and goes on from there.

    Raises:
        InputError: names what is free and what is needed.
    """
    needed = estimate.disk_bytes(profile, waiting)
    free = environment.free_disk_bytes(paths.RUNS)
    if needed is not None and needed > max(free, 1e9 * environment.LEAST_DISK_GB):
        raise InputError(
            f"free disk: found {estimate.size(free)} at {paths.relative_to_root(paths.RUNS)}, "
            f"allowed: {estimate.size(needed)} or more; {environment.ELSEWHERE}"
        )


def _refuse_unfit(waiting: Sequence[Shard], say: Callable[[str], None]) -> None:
    """Refuse a run whose disk, target or device cannot do it, before its first shard.

    Only a target that this machine brings, or one on a GPU, is looked at: a tracked one on the CPU
    is found out soon enough.

    Raises:
        InputError: says what is wrong with the first thing that is.
    """
    needy = next((shard for shard in waiting if shard.device), None)
    if needy is None:
        return
    own = needy.parameters
    profile = config.load_profile(own["profile"], own["overrides"])
    _refuse_small_disk(profile, waiting)
    settings = profile.target
    if settings.source is not None and settings.device == "cpu":
        return
    stages = {shard.stage for shard in waiting}
    # Its memory is looked at as a shard will find it: not while another shard computes there.
    with one_device(needy.device, "the look at the target", say) as gpu:
        rows = ask_preflight(own["profile"], own["overrides"], gpu)
    for told in rows:
        spared = told["item"] == f"{MEMORY}drafter" and "drafter" not in stages
        if not told["ok"] and not spared:
            raise InputError(f"{told['item']}: {told['note']}")


def select(shards: Sequence[Shard], only: Sequence[str]) -> list[Shard]:
    """The shards of the named stages, or with the given names; all of them when none is named.

    Raises:
        InputError: a name is neither a stage nor a shard of the plan.
    """
    names = {shard.stage for shard in shards} | {shard.name for shard in shards}
    for name in only:
        if name not in names:
            stages = dict.fromkeys(shard.stage for shard in shards)
            raise InputError(
                f"--only: found {name!r}, allowed: {', '.join(stages)}, or a shard's name"
            )
    return [s for s in shards if not only or s.stage in only or s.name in only]


def run_plan(
    shards: Sequence[Shard],
    profile: str,
    only: Sequence[str] = (),
    limits: Limits | None = None,
    keep_stale: bool = False,
    stream: Any = None,
) -> list[Outcome]:
    """Run a plan in order.

    Args:
        shards: the plan.
        profile: its profile's name.
        only: stages or shard names to run; others are taken as they are.
        limits: wall-clock limits.
        keep_stale: as in `stages.plan`.
        stream: where progress goes; standard error when None.

    Returns:
        One outcome per selected shard, in order.

    Raises:
        InputError: an input file is missing or a name in `only` is unknown.
    """
    chosen = select(shards, only)
    waiting = [shard for shard in chosen if not shard.done]
    absent = missing_inputs(waiting)
    if absent:
        raise InputError(absent[0])
    _refuse_unfit(waiting, lambda told: print(told, file=stream or sys.stderr))
    summary = Summary(profile)
    finished = {shard.name for shard in shards if shard.done}
    outcomes: list[Outcome] = []
    unwritten = ""
    line = ProgressLine(len(waiting), stream or sys.stderr)
    try:
        for shard in chosen:
            if shard.name in finished:
                notes = ["stale results reused"] if shard.stale else []
                notes += [lack] if (lack := lacking(shard)) else []
                outcomes.append(Outcome(shard.name, "skipped", 0.0, "; ".join(notes)))
                continue
            missing = [name for name in shard.dependencies if name not in finished]
            if shard.done:
                outcome = Outcome(shard.name, "skipped", 0.0, "done by another run meanwhile")
                finished.add(shard.name)
                line.skip(shard.name, outcome.reason)
            elif missing:
                outcome = Outcome(shard.name, "blocked", 0.0, f"needs {missing[0]}")
                line.skip(shard.name, outcome.reason)
            else:
                todo = [s.stage for s in waiting[waiting.index(shard) :]]
                line.start(shard.name, *summary.expected(todo))
                outcome = run_shard(shard, limits, line.show, keep_stale)
                line.end(outcome.status, outcome.seconds, outcome.reason)
            if outcome.status == "ok":
                finished.add(shard.name)
            if outcome.status != "skipped":
                try:
                    summary.note(shard.stage, outcome)
                except InputError as error:  # the shard's own DONE is what counts
                    unwritten = str(error)
            outcomes.append(outcome)
    finally:
        line.close()
        if unwritten:
            print(unwritten, file=stream or sys.stderr)
    return outcomes
