"""Copy a finished pocket run to the tracked places: `make publish`.

The records of the run replace those in `data/records/pocket`, and `figures/pocket` is redrawn from
those files, so that `make figures` gives the same bytes on any machine without torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from vflash_analysis import paths, records
from vflash_analysis.errors import InputError
from vflash_analysis.records import ANCHORS
from vflash_analysis.results.report import build_results
from vflash_analysis.results.sources import TABLES, load_records
from vflash_analysis.stages import Shard

SIZE_LIMIT = 2_000_000  # bytes of all tracked records together
# Bulky columns that only single cycles are shown from: kept for the first clip of each benchmark.
CYCLE_DETAIL = ("draft_parents", "draft_logprobs", "target_token_ids", "target_rank")


def record_folders(shards: Sequence[Shard]) -> list[Path]:
    """Folders of the finished shards that hold record tables.

    Raises:
        InputError: no shard with records is done.
    """
    names = {f"{schema.name}.parquet" for schema in TABLES}
    found = [s.folder for s in shards if names & set(s.outputs) and s.done]
    if not found:
        raise InputError("records: no finished shard has any; vflash run makes them")
    return found


def slim(generations: pd.DataFrame, cycles: pd.DataFrame) -> pd.DataFrame:
    """Cycles without bulky detail, except those of the first clip of each benchmark.

    Args:
        generations: tells which clip belongs to which benchmark.
        cycles: every cycle; none is dropped.
    """
    firsts = set(generations.groupby("benchmark")["clip_id"].min())
    keep = cycles["clip_id"].isin(firsts)
    bare = {c: cycles[c].where(keep, None).astype(object) for c in CYCLE_DETAIL}
    return cycles.assign(**bare)


def refuse_fewer_drafters(anchors: pd.DataFrame) -> None:
    """Refuse to replace the tracked ablation (table T3) by the few drafters that decode.

    Args:
        anchors: those that would be tracked from now on.

    Raises:
        InputError: the tracked anchors are of more drafters.
    """
    path = paths.TRACKED_RECORDS / f"{ANCHORS.name}.parquet"
    if not path.is_file():
        return
    tracked = pd.read_parquet(path, columns=["drafter_sha256"])["drafter_sha256"].nunique()
    found = anchors["drafter_sha256"].nunique()
    if found < tracked:
        raise InputError(
            f"publish: found anchors of {found} drafters, allowed: {tracked} or more, as tracked for "
            "T3; finish vflash run --ablation, then publish with --ablation"
        )


def publish(shards: Sequence[Shard], n_samples: int, ablation: bool = False) -> list[Path]:
    """Replace the tracked records by a finished run's and redraw the tracked figures.

    Args:
        shards: a plan whose every shard is done.
        n_samples: bootstrap resamples of the figures, the profile's.
        ablation: whether the plan holds the ablation's drafters.

    Returns:
        The files written.

    Raises:
        InputError: a shard is not done, the records are too large to track, or they would drop the
            tracked ablation.
    """
    for shard in shards:
        reason = shard.why_not_done()
        if reason:
            raise InputError(f"publish: {shard.name} is not done: {reason}")
    found = load_records(record_folders(shards))
    frames = {schema.name: getattr(found, schema.name) for schema in TABLES}
    if not ablation:
        refuse_fewer_drafters(frames[ANCHORS.name])
    frames["cycles"] = slim(frames["generations"], frames["cycles"])
    drafts = paths.RUNS / ".publish"
    written = []
    for schema in TABLES:
        records.write_records(drafts / f"{schema.name}.parquet", frames[schema.name], schema)
    size = sum(path.stat().st_size for path in drafts.glob("*.parquet"))
    if size > SIZE_LIMIT:
        raise InputError(
            f"publish: records are {size:,} bytes, allowed: {SIZE_LIMIT:,}; see {drafts}"
        )
    for schema in TABLES:
        target = paths.TRACKED_RECORDS / f"{schema.name}.parquet"
        draft = drafts / target.name
        records.replace_atomically(target, partial(shutil.copyfile, draft))
        written.append(target)
    return [*written, *build_results(n_samples=n_samples)]
