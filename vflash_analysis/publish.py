"""Copy a finished pocket run to the tracked places: `make publish`.

The records of the run replace those in `data/records/pocket`, its first training seed's drafters
those in `data/pocket/drafters`, and `figures/pocket` and README's claims are made anew from the
tracked records, so that `make figures` gives the same bytes on any machine without torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from vflash_analysis import paths, records
from vflash_analysis.errors import InputError
from vflash_analysis.records import ANCHORS, TRAINING
from vflash_analysis.results.claims import write_claims
from vflash_analysis.results.curves import VALIDATION
from vflash_analysis.results.difficulty import difficulty_gates
from vflash_analysis.results.report import build_results
from vflash_analysis.results.sources import TABLES, Records, final_drafters, load_records
from vflash_analysis.results.tidy import read_tidy_csv
from vflash_analysis.stages import Shard
from vflash_analysis.stats import Bootstrap

SIZE_LIMIT = 2_000_000  # bytes of all tracked records together
# Bulky columns that only single cycles are shown from: kept for the first clip of each benchmark.
CYCLE_DETAIL = ("draft_parents", "draft_logprobs", "target_token_ids", "target_rank")

TRACKED_DRAFTERS = paths.DATA / "pocket" / "drafters"
STAGES = ("target", "drafter", "decode")  # whose results are tracked
TARGET_GATES = ("gates.csv", "kinds.csv")
LENGTH_SETTINGS = ("", "rounds=2")  # of ANCHORS: one drafter forward, two


def records_of(shards: Sequence[Shard]) -> Records:
    """Records of the finished shards of a plan, which also name the others and the stale ones.

    Raises:
        InputError: no shard with records is done.
    """
    names = {f"{schema.name}.parquet" for schema in TABLES}
    holding = [shard for shard in shards if names & set(shard.outputs)]
    done = [shard for shard in holding if shard.done]
    if not done:
        raise InputError("records: no finished shard has any; vflash run makes them")
    return replace(
        load_records([shard.folder for shard in done]),
        lacking=tuple(shard.name for shard in holding if shard not in done),
        stale=tuple(shard.name for shard in done if shard.stale),
    )


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


def slim_anchors(found: Records) -> pd.DataFrame:
    """The anchors that tables and figures need.

    Slot by slot and with every question for each arm's final drafters (F4, the gates);
    for the others the accepted length, in one and in two rounds (T3).
    """
    final = set(final_drafters(found)["drafter_sha256"])
    anchors = found.anchors
    whole = anchors["drafter_sha256"].isin(final)
    kept = anchors.loc[whole | anchors["setting"].isin(LENGTH_SETTINGS)]
    matches = kept["slot_match"].where(whole.loc[kept.index], None).astype(object)
    return kept.assign(slot_match=matches)


def slim_training(found: Records) -> pd.DataFrame:
    """The training log that tables and figures need.

    Whole for the drafters that decode; of the others, what was scored on validation clips (F5) and
    the last logged step (T3).
    """
    log = found.training
    decode = log["drafter_sha256"].isin(set(found.generations["drafter_sha256"]))
    last = log["step"] == log.groupby(["drafter_sha256", "setting"])["step"].transform("max")
    return log.loc[decode | (log["setting"] == VALIDATION) | last]


def refuse_fewer_drafters(anchors: pd.DataFrame) -> None:
    """Refuse to replace the tracked ablation (table T3) by one of fewer drafters.

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
            "T3; vflash run --profile pocket --ablation trains them"
        )


def track_drafter(shard: Shard) -> Path:
    """Copy a shard's drafter beside the tracked target, in its arm's folder."""
    place = TRACKED_DRAFTERS / str(shard.parameters["arm"])
    draft, old = (place.with_name(f".{place.name}.{word}") for word in ("new", "old"))
    for left_over in (draft, old):
        shutil.rmtree(left_over, ignore_errors=True)
    shutil.copytree(shard.folder / "drafter", draft)
    if place.exists():
        place.rename(old)
    draft.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    return place


def tracked_gates(n_samples: int) -> pd.DataFrame:
    """Gates of the tracked target and texts: gate, value, allowed, n, passed."""
    target = pd.read_csv(paths.TRACKED_RECORDS / TARGET_GATES[0])
    texts = difficulty_gates(load_records(), Bootstrap(n_samples=n_samples))
    both = pd.concat(
        [
            target.assign(gate="the target: " + target["gate"]),
            texts.assign(gate="its texts: " + texts["gate"]),
        ],
        ignore_index=True,
    )
    return both[["gate", "value", "allowed", "n", "passed"]]


def publish(shards: Sequence[Shard], compared: Sequence[Shard], n_samples: int) -> list[Path]:
    """Replace the tracked records by a finished run's and redraw the tracked figures.

    Args:
        shards: a plan; those of `STAGES` must be done.
        compared: the ablation's drafters; those that are done are taken.
        n_samples: bootstrap resamples of the figures, the profile's.

    Returns:
        The files written.

    Raises:
        InputError: a shard is not done, the records are too large to track, or they would drop
            tracked drafters.
    """
    shards = [shard for shard in shards if shard.stage in STAGES]
    for shard in shards:
        reason = shard.why_not_done()
        if reason:
            raise InputError(f"publish: {shard.name} is not done: {reason}")
    found = records_of([*shards, *compared])
    frames = {schema.name: getattr(found, schema.name) for schema in TABLES}
    refuse_fewer_drafters(frames[ANCHORS.name])
    frames["cycles"] = slim(frames["generations"], frames["cycles"])
    frames[ANCHORS.name] = slim_anchors(found)
    frames[TRAINING.name] = slim_training(found)
    seed = min((s.parameters["train_seed"] for s in shards if s.stage == "drafter"), default=0)
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
    for shard in shards:
        for name in TARGET_GATES if shard.stage == "target" else ():
            target = paths.TRACKED_RECORDS / name
            records.replace_atomically(target, partial(shutil.copyfile, shard.folder / name))
            written.append(target)
        if shard.stage == "drafter" and shard.parameters["train_seed"] == seed:
            written.append(track_drafter(shard))
    written += build_results(n_samples=n_samples)
    speedups = read_tidy_csv(paths.TRACKED_FIGURES / "T1_speedup.csv")
    return [*written, write_claims(paths.ROOT / "README.md", speedups, tracked_gates(n_samples))]
