"""What `vflash report` tells of a run beside its numbers: manifests, coverage, bad clips."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from vflash_analysis import paths
from vflash_analysis.errors import InputError
from vflash_analysis.publish import read_runs
from vflash_analysis.records import MANIFEST_NAME
from vflash_analysis.results.page import Facts
from vflash_analysis.stages import Shard
from vflash_analysis.strict import read_json
from vflash_analysis.summary import Summary

_SHARED = ("git_commit", "git_dirty", "device", "driver", "threads", "versions", "seeds")


def tracked_facts() -> Facts:
    """Of the tracked records: commit and device of every shard that they hold."""
    return Facts("The tracked pocket run", read_runs())


def run_facts(profile: str, shards: Sequence[Shard]) -> Facts:
    """Of a run's plan: what its manifests say, and which shards it lacks."""
    done = [shard for shard in shards if shard.done]
    waiting = [(s.name, str(s.why_not_done())) for s in shards if s not in done]
    waiting += [(s.name, "stale: its code or inputs have changed") for s in done if s.stale]
    ended = Summary(profile).read()
    return Facts(
        f"Run of the profile {profile}",
        _machine([read_json(shard.folder / MANIFEST_NAME) for shard in done]),
        _coverage(shards, done),
        pd.DataFrame(waiting, columns=["shard", "why"]),
        ended.drop(columns=[name for name in ("notebook",) if name in ended]),
        _bad_clips(done),
    )


def _machine(manifests: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Each fact with all the values that the shards' manifests give it."""
    rows = []
    for name in _SHARED:
        found: dict[str, int] = {}
        for manifest in manifests:
            value = manifest.get(name)
            if isinstance(value, dict):
                told = ", ".join(f"{key} {one}" for key, one in sorted(value.items()) if one)
            else:
                told = "" if value is None else str(value)
            if told:
                found[told] = found.get(told, 0) + 1
        rows += [(name.replace("_", " "), value, n) for value, n in sorted(found.items())]
    return pd.DataFrame(rows, columns=["fact", "value", "shards"])


def _coverage(shards: Sequence[Shard], done: Sequence[Shard]) -> pd.DataFrame:
    """Shards planned and done by stage and suite, and the units of work that the done ones count."""
    rows: dict[tuple[str, str], list[int]] = {}
    for shard in shards:
        counts = rows.setdefault((shard.stage, str(shard.parameters.get("benchmark", ""))), [0] * 4)
        counts[0] += 1
        if shard in done:
            manifest = read_json(shard.folder / MANIFEST_NAME)
            counts[1] += 1
            counts[2] += int(manifest.get("planned", 0))
            counts[3] += int(manifest.get("done", 0))
    names = ["stage", "suite", "shards planned", "shards done", "units planned", "units done"]
    return pd.DataFrame([(*key, *counts) for key, counts in rows.items()], columns=names)


def _bad_clips(done: Sequence[Shard]) -> pd.DataFrame | None:
    """Clips that were bad or flagged when the frames that a run uses were read; None unread."""
    for shard in done:
        path = shard.folder / "checked.csv"
        if shard.stage == "clips" and path.is_file():
            try:
                checked = pd.read_csv(path, dtype=str, keep_default_na=False)
                unusual = checked.loc[checked["status"] != "ok"]
                return unusual[["clip_id", "status", "reason", "message"]]
            except (ValueError, KeyError) as error:
                raise InputError(f"{paths.relative_to_root(path)}: not readable: {error}") from None
    return None
