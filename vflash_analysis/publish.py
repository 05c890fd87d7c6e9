"""Copy a finished pocket run to the tracked places: `make publish`.

The records of the run replace those in `data/records/pocket` (what the run did not train of the
ablation or measure of the studies stays, if it is of the same target; `runs.csv` there names run and
commit of each), its first training seed's drafters those in `data/pocket/drafters`, and
`figures/pocket` and README's claims are made anew from the tracked records, so that `make figures`
gives the same bytes on any machine without torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from vflash_analysis import paths, records, stages
from vflash_analysis.config import TRACKED_PROFILE
from vflash_analysis.errors import InputError
from vflash_analysis.results.claims import check_readme, write_claims
from vflash_analysis.results.curves import VALIDATION
from vflash_analysis.results.difficulty import difficulty_gates
from vflash_analysis.results.replay import chosen_clips
from vflash_analysis.results.report import build_results
from vflash_analysis.results.sources import (
    TABLES,
    Records,
    drafter_facts,
    final_drafters,
    load_records,
    that_decode,
    tracked_studies,
)
from vflash_analysis.results.tidy import read_tidy_csv
from vflash_analysis.schemas import (
    ANCHORS,
    CYCLES,
    DESIGN_STUDY,
    SHOWN_CLIPS,
    STUDIES,
    TRAINING,
    Schema,
)
from vflash_analysis.stages import Shard, shard_name
from vflash_analysis.stats import Bootstrap
from vflash_analysis.strict import read_json

# Bytes of all tracked records, film strips included. Every clone carries them, and every publishing
# adds as much again to the history.
SIZE_LIMIT = 4_000_000
# Bulky columns that single cycles and the quality of trees are shown from: kept for the first
# SHOWN_CLIPS of each benchmark's first sample seed.
CYCLE_DETAIL = ("draft_parents", "draft_logprobs", "target_token_ids", "target_rank")

TRACKED_DRAFTERS = paths.DATA / "pocket" / "drafters"
STAGES = ("target", "drafter", "decode", "cost", "layers", *STUDIES)  # whose results are tracked
TARGET_GATES = ("gates.csv", "kinds.csv")
LENGTH_SETTINGS = ("", "rounds=2")  # of ANCHORS: one drafter forward, two
README = paths.ROOT / "README.md"
RUNS_NAME = "runs.csv"
PROVENANCE = ("run_id", "git_commit", "git_dirty", "device")  # of a shard's manifest


def records_of(shards: Sequence[Shard]) -> Records:
    """Records of the finished shards of a plan, which also name the others and the stale ones.

    Where they may stand beside tracked rows, the tracked studies stand in for those not measured.

    Raises:
        InputError: no shard with records is done.
    """
    names = {f"{schema.name}.parquet" for schema in TABLES}
    holding = [shard for shard in shards if names & set(shard.outputs)]
    done = [shard for shard in holding if shard.done]
    pooled = [shard.folder for shard in done if not _of_study(shard)]
    if not pooled:
        raise InputError("records: no finished shard has any; vflash run makes them")
    found = load_records(pooled)
    studies = tracked_studies() if found.as_tracked else {}
    studies |= {s.stage: load_records([s.folder]) for s in done if s.stage in STUDIES}
    return replace(
        found,
        lacking=tuple(shard.name for shard in holding if shard not in done),
        stale=tuple(shard.name for shard in done if shard.stale),
        studies=studies,
    )


def _of_study(shard: Shard) -> bool:
    """Whether a shard's records belong to one of STUDIES, whose folder then holds them too."""
    return shard.stage in STUDIES or (shard.stage == "drafter" and bool(shard.drafter_key.variant))


def chosen_records(
    profile: str | None,
    overrides: Mapping[str, Any],
    ablation: bool = False,
    all_clips: bool = False,
    keep_stale: bool = False,
) -> Records:
    """Records of the finished shards of a plan; the tracked ones without a profile.

    Raises:
        InputError: options of a plan without a profile, or no finished shard has records.
    """
    if profile is None:
        if overrides or ablation or all_clips or keep_stale:
            raise InputError(
                "--set, --ablation, --all, --keep-stale: allowed with --profile only; the tracked "
                "records are drawn as they are"
            )
        return load_records()
    return records_of(stages.plan(profile, overrides, ablation, all_clips, keep_stale))


def slim(generations: pd.DataFrame, cycles: pd.DataFrame) -> pd.DataFrame:
    """Cycles without bulky detail, except those of the first clips of each benchmark.

    Args:
        generations: tells which clip belongs to which benchmark and sample seed.
        cycles: every cycle; none is dropped.
    """
    first_seed = generations.groupby("benchmark")["sample_seed"].transform("min")
    own = generations.loc[generations["sample_seed"] == first_seed, ["benchmark", "clip_id"]]
    own = own.drop_duplicates().sort_values("clip_id")
    firsts = set(own.groupby("benchmark").head(SHOWN_CLIPS)["clip_id"])
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
    decode = log["drafter_sha256"].isin(that_decode(found))
    last = log["step"] == log.groupby(["drafter_sha256", "setting"])["step"].transform("max")
    return log.loc[decode | (log["setting"] == VALIDATION) | last]


def slim_study(name: str, found: Records) -> dict[Schema, pd.DataFrame]:
    """What is tracked of a study, by table: what its tables need.

    No anchors; of the training log the last logged step; of the cycles' drafts, in the study of
    design choices, those of Tree-60 and the drafter as the profile has them, on the clips that
    `slim` keeps.
    """
    frames = {schema: getattr(found, schema.name) for schema in TABLES}
    log, cycles = found.training, slim(found.generations, found.cycles)
    log = log.loc[log["setting"] == ""]
    last = log["step"] == log.groupby("drafter_sha256")["step"].transform("max")
    whole = set(log.loc[log["variant"] == "", "drafter_sha256"]) if name == DESIGN_STUDY else set()
    own = (cycles["method"] == "tree60") & (cycles["setting"] == "")
    own &= cycles["drafter_sha256"].isin(whole) & cycles["draft_parents"].notna()
    columns = (*CYCLE_DETAIL, "draft_token_ids")
    bare = {c: cycles[c].where(own, None).astype(object) for c in columns}
    return frames | {
        CYCLES: cycles.assign(**bare),
        ANCHORS: found.anchors.iloc[:0],
        TRAINING: log.loc[last],
    }


def slimmed(found: Records) -> dict[Schema, pd.DataFrame]:
    """What is tracked of a run's records, by table."""
    frames = {schema: getattr(found, schema.name) for schema in TABLES}
    return frames | {
        CYCLES: slim(found.generations, found.cycles),
        ANCHORS: slim_anchors(found),
        TRAINING: slim_training(found),
    }


def with_tracked(found: Records, waiting: Sequence[Shard]) -> Records:
    """A run's records, and the tracked ones of drafters of the ablation that it did not train.

    Args:
        found: the run's.
        waiting: the ablation's shards that are not done.

    Raises:
        InputError: the tracked drafters are of another target.
    """
    if not (paths.TRACKED_RECORDS / f"{ANCHORS.name}.parquet").is_file():
        return found
    with _tracked_readable():
        tracked = load_records([paths.TRACKED_RECORDS])
    names = {shard.name for shard in waiting}
    facts = drafter_facts(tracked).to_dict("records")
    kept = {fact["drafter_sha256"] for fact in facts if _drafter_name(fact) in names}
    if not kept:
        return found
    anchors, training = (
        frame.loc[frame["drafter_sha256"].isin(kept)]
        for frame in (tracked.anchors, tracked.training)
    )
    if set(anchors["target_sha256"]) != set(found.anchors["target_sha256"]):
        raise InputError(
            f"publish: found another target than that of the {len(kept)} drafters tracked for T3; "
            "vflash run --profile pocket --ablation trains them anew"
        )
    return replace(
        found,
        anchors=pd.concat([found.anchors, anchors], ignore_index=True),
        training=pd.concat([found.training, training], ignore_index=True),
    )


def _refuse_other_studies(found: Records) -> None:
    """Refuse tracked studies that would stay beside a run of another target.

    Args:
        found: the run's, with the studies that may stand beside it.
    """
    for name in STUDIES:
        place = paths.TRACKED_RECORDS / name
        if place.is_dir() and name not in found.studies:
            raise InputError(
                f"publish: found another target than that of the tracked study {name}; vflash run "
                f"--profile {TRACKED_PROFILE} --all measures it anew, or remove "
                f"{paths.relative_to_root(place)} to publish without it"
            )


def _drafter_name(fact: Mapping[Hashable, Any]) -> str:
    """The shard's name of a row of `drafter_facts`."""
    return shard_name("drafter", {key: fact[key] for key in stages.STAGES["drafter"].takes})


@contextmanager
def _tracked_readable() -> Iterator[None]:
    """Of a damaged or outdated tracked file the error also says what can be done."""
    try:
        yield
    except InputError as error:
        place = paths.relative_to_root(paths.TRACKED_RECORDS)
        raise InputError(
            f"publish: {error}; git restores {place}, or remove that folder to publish without the "
            "drafters it keeps"
        ) from None


def read_runs() -> pd.DataFrame:
    """The tracked `runs.csv` as text, see `provenance`; no rows where there is none.

    Raises:
        InputError: it is damaged.
    """
    path = paths.TRACKED_RECORDS / RUNS_NAME
    if not path.is_file():
        return pd.DataFrame(columns=["shard", *PROVENANCE])
    try:
        found = pd.read_csv(path, dtype=str)
    except ValueError as error:  # empty, no CSV, or no text
        raise InputError(f"{path}: not readable as CSV: {error}") from None
    if list(found.columns) != ["shard", *PROVENANCE]:
        raise InputError(f"{path}: found columns {list(found.columns)}, allowed: those of publish")
    return found


def provenance(shards: Sequence[Shard], kept: Sequence[Shard]) -> pd.DataFrame:
    """Where each tracked shard comes from: shard, run_id, git_commit, git_dirty, device.

    Args:
        shards: those of this run.
        kept: those whose tracked records stay; their rows are those of the tracked file.
    """
    rows = []
    for shard in shards:
        manifest = read_json(shard.folder / records.MANIFEST_NAME)
        rows.append({"shard": shard.name} | {key: manifest[key] for key in PROVENANCE})
    if kept:
        with _tracked_readable():
            before = read_runs()
        rows += before.loc[before["shard"].isin([s.name for s in kept])].to_dict("records")
    return pd.DataFrame(rows, columns=["shard", *PROVENANCE])


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


def track_strips(strips: Sequence[Path]) -> list[Path]:
    """Put these film strips, those that the tracked replay shows, in place of the tracked ones."""
    folder = paths.TRACKED_RECORDS / "strips"
    tracked = [folder / path.name for path in strips]
    for path, target in zip(strips, tracked, strict=True):
        records.replace_atomically(target, partial(shutil.copyfile, path))
    for path in set(folder.glob("*")) - set(tracked):
        path.unlink()
    return tracked


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


def publish_planned(all_clips: bool, n_samples: int) -> list[Path]:
    """`publish` of the tracked profile's run, and of what there is of its ablation and studies."""
    shards = stages.plan(TRACKED_PROFILE, all_clips=all_clips)
    planned = {shard.name for shard in shards}
    whole = stages.plan(TRACKED_PROFILE, ablation=True, all_clips=all_clips, studies=True)
    return publish(shards, [s for s in whole if s.name not in planned], n_samples)


def publish(shards: Sequence[Shard], compared: Sequence[Shard], n_samples: int) -> list[Path]:
    """Replace the tracked records by a finished run's and redraw the tracked figures.

    Args:
        shards: a plan; those of `STAGES` must be done.
        compared: the ablation's drafters and the studies; of those that are not done the tracked
            records stay.
        n_samples: bootstrap resamples of the figures, the profile's.

    Returns:
        The files written.

    Raises:
        InputError: a shard is not done, the records are too large to track, or tracked drafters or
            studies are of another target.
    """
    shards = [shard for shard in shards if shard.stage in STAGES]
    for shard in shards:
        reason = shard.why_not_done()
        if reason:
            raise InputError(f"publish: {shard.name} is not done: {reason}")
    waiting = [shard for shard in compared if not shard.done]
    taken = [*shards, *(shard for shard in compared if shard not in waiting)]
    for shard in taken:
        reason = records.why_not_done(shard.folder)  # every byte, as it will be tracked
        if reason:
            raise InputError(f"publish: {reason}; remove that folder and run again")
    check_readme(README)
    found = with_tracked(records_of(taken), waiting)
    _refuse_other_studies(found)
    measured = [shard.stage for shard in taken if shard.stage in STUDIES]
    parts = {"": found, **{name: found.studies[name] for name in measured}}
    seed = min((s.parameters["train_seed"] for s in shards if s.stage == "drafter"), default=0)
    drafts = paths.RUNS / ".publish"
    written = []
    shutil.rmtree(drafts, ignore_errors=True)
    for place, part in parts.items():
        for schema, frame in (slim_study(place, part) if place else slimmed(part)).items():
            if len(frame) or not place:
                records.write_records(drafts / place / f"{schema.name}.parquet", frame, schema)
    kept = [paths.TRACKED_RECORDS / name for name in STUDIES if name not in measured]
    shown = dict.fromkeys(chosen_clips(found).values())
    strips = [found.strips[one] for one in shown if one in found.strips]
    sized = [path for place in (drafts, *kept) for path in place.rglob("*.parquet")]
    size = sum(path.stat().st_size for path in (*sized, *strips))
    if size > SIZE_LIMIT:
        raise InputError(
            f"publish: records are {size:,} bytes, allowed: {SIZE_LIMIT:,}; see {drafts}"
        )
    told = provenance(taken, waiting).to_csv(index=False, lineterminator="\n")
    written.append(paths.TRACKED_RECORDS / RUNS_NAME)
    records.write_text_atomic(written[0], told)
    for draft in sorted(drafts.rglob("*.parquet")):
        target = paths.TRACKED_RECORDS / draft.relative_to(drafts)
        target.parent.mkdir(parents=True, exist_ok=True)
        records.replace_atomically(target, partial(shutil.copyfile, draft))
        written.append(target)
    written += track_strips(strips)
    for shard in shards:
        for name in TARGET_GATES if shard.stage == "target" else ():
            target = paths.TRACKED_RECORDS / name
            records.replace_atomically(target, partial(shutil.copyfile, shard.folder / name))
            written.append(target)
        if shard.stage != "drafter" or shard.drafter_key.variant:
            continue
        if shard.parameters["train_seed"] == seed:
            written.append(track_drafter(shard))
    written += build_results(n_samples=n_samples)
    speedups = read_tidy_csv(paths.TRACKED_FIGURES / "T1_speedup.csv")
    return [*written, write_claims(README, speedups, tracked_gates(n_samples))]
