"""What tables and figures are made from: the record frames of one place, and which drafter is which.

Without a run the tracked pocket records stand in, and everything drawn from them is marked
"stored".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from vflash_analysis.config import TRACKED_PROFILE
from vflash_analysis.errors import InputError
from vflash_analysis.metrics import (
    KIND_COLUMNS,
    grouped,
    kinds,
    part_columns,
    refuse_mixed,
    usable,
    usable_cycles,
)
from vflash_analysis.paths import TRACKED_RECORDS, relative_to_root
from vflash_analysis.records import (
    DONE_NAME,
    MANIFEST_NAME,
    empty_records,
    find_strips,
    read_records,
    write_records,
)
from vflash_analysis.results.tidy import MEASURED, STORED, Origin
from vflash_analysis.schemas import (
    ANCHORS,
    COMPARISON_METHODS,
    COMPILED,
    COSTS,
    CYCLES,
    GENERATIONS,
    MEASURES,
    STUDIES,
    TRAINING,
    VOCABULARY,
    Schema,
)
from vflash_analysis.strict import read_json

TABLES = (GENERATIONS, CYCLES, ANCHORS, TRAINING, COSTS, MEASURES, VOCABULARY)


@dataclass(frozen=True)
class Records:
    """The record frames of one place, in the order of TABLES, and their standing.

    An absent table is an empty frame.

    Attributes:
        lacking: shards of the run whose records are not there.
        stale: shards reused though their code or inputs have changed.
        as_tracked: whether it is a run of the tracked profile without changed settings and of the
            target of the tracked records, so that tracked rows may stand beside its own.
        studies: records of STUDIES, which are never pooled with these.
        strips: film strips of some clips, by clip_id.
    """

    generations: pd.DataFrame
    cycles: pd.DataFrame
    anchors: pd.DataFrame
    training: pd.DataFrame
    costs: pd.DataFrame
    measures: pd.DataFrame
    vocabulary: pd.DataFrame
    status: str
    source: str
    lacking: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    as_tracked: bool = False
    studies: Mapping[str, Records] = field(default_factory=dict)
    strips: Mapping[str, Path] = field(default_factory=dict)

    def study(self, name: str) -> Records:
        """Records of one of STUDIES; empty ones where it was not measured."""
        return self.studies.get(name) or records_from_frames({}, self.source, self.status)

    def not_measured(self, name: str) -> str:
        """The sentence for a caption that says what measures a study, "" where it was measured."""
        if not self.study(name).generations.empty:
            return ""
        return (
            f"Nothing of ours here: {self.source} has no such decodes; vflash run --all makes them."
        )


def some_names(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list that may be long, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _read_all(folders: Sequence[Path], schema: Schema) -> dict[Path, pd.DataFrame]:
    """The rows of each folder that has some."""
    paths = {folder: folder / f"{schema.name}.parquet" for folder in folders}
    frames = {folder: _read(path, schema) for folder, path in paths.items() if path.is_file()}
    return {folder: frame for folder, frame in frames.items() if not frame.empty}


def _read(path: Path, schema: Schema) -> pd.DataFrame:
    with _making_anew(path):
        return read_records(path, schema)


@contextmanager
def _making_anew(path: Path) -> Iterator[None]:
    """Of a shard's damaged file the error also says how to make it anew."""
    try:
        yield
    except InputError as error:
        if not (path.parent / DONE_NAME).is_file():
            raise
        place = relative_to_root(path.parent)
        raise InputError(f"{error}; remove {place} and run again to make it anew") from None


def _refuse_decoded_twice(generations: pd.DataFrame) -> None:
    """A drafter's decode of a clip must not come from two runs (a stale one beside a new one)."""
    keys = [
        "device", "dtype", "benchmark", "sample_seed", "clip_id", "frames_requested", "method",
        "drafter_sha256", "setting", "repeat",
    ]  # fmt: skip
    drafted = generations.loc[generations["drafter_sha256"] != ""]
    twice = drafted.duplicated(keys, keep=False)
    if twice.any():
        first = drafted.loc[twice].iloc[0]
        runs = sorted(set(drafted.loc[twice, "run_id"]))
        raise InputError(
            f"{first['method']} on clip {first['clip_id']} is in several runs {runs[:3]}: give one"
        )


_ONE_COST = ("shape", "device", "dtype", "implementation", "forward", "context_tokens")
_ONE_MEASURE = (
    "target_sha256", "device", "dtype", "benchmark", "sample_seed", "clip_id", "study", "setting",
    "layer", "quantity",
)  # fmt: skip


def _refuse_measured_twice(rows: pd.DataFrame, keys: Sequence[str], words: str) -> None:
    """What was measured of one thing on one machine must not come from two runs.

    Args:
        rows: of a table whose rows are measurements.
        keys: what is measured once.
        words: names it, with columns of the row in braces.
    """
    twice = rows.duplicated(list(keys), keep=False)
    if twice.any():
        first = rows.loc[twice].iloc[0]
        runs = sorted(set(rows.loc[twice, "run_id"]))
        raise InputError(
            f"{words.format(**first)} on {first['device']} are in several runs {runs[:3]}: give one"
        )


def _words_once(vocabulary: pd.DataFrame) -> pd.DataFrame:
    """Each token of a target once, sorted; one token must not have two texts."""
    words = vocabulary.drop_duplicates().sort_values(["target", "token_id"], ignore_index=True)
    twice = words.duplicated(["target", "token_id"], keep=False)
    if twice.any():
        target, token_id = words.loc[twice, ["target", "token_id"]].iloc[0]
        texts = words.loc[(words["target"] == target) & (words["token_id"] == token_id), "text"]
        raise InputError(
            f"vocabulary: token {token_id} of {target} has the texts {list(texts)}, allowed is 1"
        )
    return words


def _refuse_mixed_run(decoded: Mapping[Path, pd.DataFrame]) -> None:
    """Refuses a run whose shards were decoded on several devices, by several readers and the like.

    Args:
        decoded: the generations of each of its folders.

    Raises:
        InputError: names the column, each value's shards, and the folders to remove.
    """
    for column in KIND_COLUMNS:
        shards: dict[str, list[str]] = {}
        places: dict[str, list[Path]] = {}
        for folder, frame in decoded.items():
            rows = frame.loc[(frame["status"] == "ok") & ~frame["warmup"].astype(bool)]
            kind_of = kinds(rows, column)
            for (kind, *shard), _ in rows.loc[kind_of.index].groupby(
                [kind_of, "benchmark", "sample_seed"]
            ):
                shards.setdefault(str(kind), []).append("-".join(map(str, ["decode", *shard])))
                places.setdefault(str(kind), []).append(folder)
        if len(shards) > 1:
            told = [f"{kind} in {some_names(names)}" for kind, names in shards.items()]
            fewest = min(places, key=lambda kind: len(places[kind]))
            remove = [relative_to_root(folder) for folder in dict.fromkeys(places[fewest])]
            raise InputError(
                f"decodes of one run: found {len(shards)} values of '{column}', allowed is 1: "
                f"{'; '.join(told)}; remove {some_names(remove, 9)} and run again as the others were"
            )


def load_records(folders: Sequence[Path] | None = None) -> Records:
    """Reads the record files of a run's folders; None for the tracked pocket records.

    Raises:
        InputError: a folder is absent or holds no records, one drafter's decode of a clip is there
            twice, or the run's decodes are of several kinds (`metrics.KIND_COLUMNS`).
    """
    paths = [TRACKED_RECORDS] if folders is None else folders
    for path in paths:
        if not any((path / f"{schema.name}.parquet").is_file() for schema in TABLES):
            raise InputError(f"{path}: no record files; expected {[t.name for t in TABLES]}")
    by_folder = {schema.name: _read_all(paths, schema) for schema in TABLES}
    _refuse_mixed_run(by_folder[GENERATIONS.name])
    frames = {
        name: pd.concat(found.values(), ignore_index=True)
        for name, found in by_folder.items()
        if found
    }
    source = relative_to_root(paths[0]) if len(paths) == 1 else f"{len(paths)} run folders"
    found = records_from_frames(frames, source, STORED if folders is None else MEASURED)
    strips = {name: path for folder in paths for name, path in find_strips(folder).items()}
    if folders is None:
        return replace(found, strips=strips, studies=tracked_studies())
    as_tracked = all(map(_as_tracked, paths)) and _of_tracked_target(found)
    return replace(found, strips=strips, as_tracked=as_tracked)


def tracked_studies() -> dict[str, Records]:
    """Those of STUDIES whose records are tracked, marked stored."""
    places = {name: TRACKED_RECORDS / name for name in STUDIES}
    return {
        name: replace(load_records([place]), status=STORED)
        for name, place in places.items()
        if place.is_dir()
    }


def study_records(name: str, folder: Path | None) -> Records:
    """One of STUDIES as its notebook shows it: that of a finished stage, None for the tracked one."""
    if folder is None:
        found = load_records()
        return replace(found, studies={n: s for n, s in found.studies.items() if n == name})
    study = load_records([folder])
    return replace(records_from_frames({}, study.source), studies={name: study})


def _as_tracked(folder: Path) -> bool:
    """Whether a shard's folder holds results of the tracked profile with its own settings."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return False
    with _making_anew(path):
        parameters = read_json(path).get("parameters", {})
    changed = set(parameters.get("overrides", {})) - {"clips.clips_per_suite"}  # --all
    return parameters.get("profile") == TRACKED_PROFILE and not changed


def _of_tracked_target(found: Records) -> bool:
    """Whether a run is of the target that the tracked records are of, as far as both tell one.

    The tracked studies are asked through these records, never by their own target: the one that
    `lengths` has is trained anew with the tracked one.
    """
    path = TRACKED_RECORDS / f"{ANCHORS.name}.parquet"
    tracked = set(_read(path, ANCHORS)["target_sha256"]) if path.is_file() else set()
    own = (found.anchors, found.training, found.measures)
    ours = {target for frame in own for target in frame["target_sha256"]}
    return not ours or not tracked or ours == tracked


def write_study(folder: Path, study: Records, names: Sequence[str]) -> None:
    """Write tables of a study, as the notebook does that shows the tracked one.

    Args:
        folder: where.
        study: the records.
        names: files to write, "<table>.parquet" each.
    """
    for schema in TABLES:
        if f"{schema.name}.parquet" in names:
            write_records(folder / f"{schema.name}.parquet", getattr(study, schema.name), schema)


def records_from_frames(
    frames: Mapping[str, pd.DataFrame], source: str, status: str = MEASURED
) -> Records:
    """Records from frames by schema name, as a notebook has them; an absent table is empty.

    Raises:
        InputError: an unknown table, one drafter's decode of a clip or one forward's cost is there
            twice, or a token has two texts.
    """
    names = {schema.name: schema for schema in TABLES}
    unknown = sorted(set(frames) - set(names))
    if unknown:
        raise InputError(f"records: unknown tables {unknown}, allowed are {list(names)}")
    full = {name: frames.get(name, empty_records(schema)) for name, schema in names.items()}
    _refuse_decoded_twice(full["generations"])
    _refuse_measured_twice(full[COSTS.name], _ONE_COST, "costs of {shape}")
    _refuse_measured_twice(full[MEASURES.name], _ONE_MEASURE, "measures of clip {clip_id}")
    full[VOCABULARY.name] = _words_once(full[VOCABULARY.name])
    generations, cycles, anchors, training, costs, measures, words = (full[s.name] for s in TABLES)
    return Records(generations, cycles, anchors, training, costs, measures, words, status, source)


def arm_names(facts: pd.DataFrame) -> list[str]:
    """The arm of each drafter: its objective, marked where a compute control changes a setting.

    `self_reveal` without loss on revealed slots is `self_reveal_rev0`; `mask_only` with k times
    the anchors of the flow arms (of the fewest, if there are none) is `mask_only_<k>x`.
    """
    flow = facts.loc[facts["objective"] != "mask_only", "anchors_per_clip"]
    base = float((flow if len(flow) else facts["anchors_per_clip"]).min())
    times = facts["anchors_per_clip"].astype(float) / base
    without_loss = facts["revealed_weight"].astype(float) == 0
    names = []
    for objective, k, no_loss in zip(facts["objective"], times, without_loss, strict=True):
        if objective == "mask_only":
            names.append(objective if k == 1 else f"{objective}_{k:g}x")
        else:
            names.append(f"{objective}_rev0" if no_loss else objective)
    return names


def drafter_facts(records: Records) -> pd.DataFrame:
    """One row per trained drafter: sha256, arm, train_seed, steps, training_clips, compute."""
    columns = [
        "drafter_sha256", "objective", "train_seed", "steps", "training_clips",
        "forward_equivalents", "revealed_weight", "anchors_per_clip", "variant",
    ]  # fmt: skip
    both = [
        frame.loc[frame["setting"] == "", columns]
        for frame in (records.anchors, records.training)
        if not frame.empty
    ]
    if not both:
        return pd.DataFrame(columns=[*columns, "arm"])
    facts = pd.concat(both, ignore_index=True).drop_duplicates()
    twice = facts["drafter_sha256"].duplicated()
    if twice.any():
        name = facts.loc[twice, "drafter_sha256"].iloc[0]
        raise InputError(f"drafter {name}: anchors and training records tell different facts")
    facts = facts.sort_values("drafter_sha256", ignore_index=True)
    return facts.assign(arm=arm_names(facts))


def that_decode(records: Records) -> set[str]:
    """drafter_sha256 of the drafters that decoded, with "" if something did without one."""
    return set(records.generations["drafter_sha256"])


def compared_drafters(records: Records) -> pd.DataFrame:
    """The drafters by which arms are compared; columns as in `drafter_facts`.

    Where a data size and budget of an arm has other training seeds too, those of drafters that
    decode are left out: the settings were chosen on them.
    """
    facts = drafter_facts(records)
    decode = facts["drafter_sha256"].isin(that_decode(records))
    cell = [facts[key] for key in ("arm", "training_clips", "steps")]
    all_decode = decode.groupby(cell).transform("all").astype(bool)
    return facts.loc[~decode | all_decode]


def final_drafters(records: Records) -> pd.DataFrame:
    """The drafters, of all training seeds, that stand for their arm where one figure shows it.

    Their data size, and then their budget, is the largest among the drafters that decoded (among
    all where none did), so that anchors and decoded text show the same training; an arm without
    drafters of that size and budget gives its own largest. Columns as in `drafter_facts`.
    """
    facts = drafter_facts(records)
    if facts.empty:
        return facts
    decoded = facts.loc[facts["drafter_sha256"].isin(that_decode(records))]
    main = _largest(facts if decoded.empty else decoded)
    kept = []
    for _, arm in grouped(facts, ["arm"]):
        own = arm.loc[_of_size(arm, main)]
        kept.append(arm.loc[_of_size(arm, _largest(arm))] if own.empty else own)
    return pd.concat(kept, ignore_index=True)


def _largest(facts: pd.DataFrame) -> tuple[int, int]:
    """The largest (training_clips, steps)."""
    return max(zip(facts["training_clips"], facts["steps"], strict=True))


def _of_size(facts: pd.DataFrame, size: tuple[int, int]) -> pd.Series:
    return (facts["training_clips"] == size[0]) & (facts["steps"] == size[1])


@dataclass(frozen=True)
class DecodeGroup:
    """Decodes on one device in one dtype: usable generations (with `arm`), cycles, planned clips.

    `planned` counts distinct clip and sample seed per benchmark, failed ones included.
    """

    device: str
    dtype: str
    target: str
    rows: pd.DataFrame
    cycles: pd.DataFrame
    planned: dict[str, int]

    def origin(self, item: str, records: Records, method: str = "") -> Origin:
        """Of rows of one method alone: Hugging Face's loops run uncompiled beside compiled ones."""
        device = self.device
        if method in COMPARISON_METHODS:
            device = device.removesuffix(COMPILED)
        return Origin(item, f"{device}, {self.dtype}", records.status, records.source)


def per_clip(parts: pd.DataFrame) -> pd.DataFrame:
    """Parts summed per clip and sample seed: the same totals in far fewer rows."""
    keys = ["benchmark", "video", "clip_id", "sample_seed"]
    return parts.groupby(keys, sort=True, observed=True)[part_columns(parts)].sum().reset_index()


def count_clips(frame: pd.DataFrame) -> int:
    """Distinct clips, one per sample seed."""
    keys = [key for key in ("benchmark", "clip_id", "sample_seed") if key in frame.columns]
    return len(frame[keys].drop_duplicates())


def decode_groups(records: Records) -> Iterator[DecodeGroup]:
    """The decodes by device and dtype: two devices give two groups, never a mean.

    Raises:
        InputError: one group holds decodes of several targets, readers or prompt templates.
    """
    facts = drafter_facts(records)
    arms = dict(zip(facts["drafter_sha256"], facts["arm"], strict=True))
    for (device, dtype), frame in grouped(records.generations, ["device", "dtype"]):
        decoded = frame.loc[~frame["warmup"].astype(bool)]
        rows = usable(frame)
        refuse_mixed(rows)
        objective = rows["objective"].fillna("")
        named = zip(rows["drafter_sha256"], objective, strict=True)
        rows["arm"] = [arms.get(drafter, name) for drafter, name in named]
        yield DecodeGroup(
            device=str(device),
            dtype=str(dtype),
            target=str(frame["target"].iloc[0]),
            rows=rows,
            cycles=usable_cycles(records.cycles, rows),
            planned={str(key[0]): count_clips(g) for key, g in grouped(decoded, ["benchmark"])},
        )


def method_rows(
    group: DecodeGroup, records: Records, method: str, arm: str | None = None
) -> pd.DataFrame:
    """The rows of a method at its default setting; with an arm, of its final drafters only."""
    rows = group.rows.loc[(group.rows["method"] == method) & (group.rows["setting"] == "")]
    if arm is None:
        return rows
    rows = rows.loc[rows["arm"] == arm]
    final = final_drafters(records)
    chosen = rows.loc[rows["drafter_sha256"].isin(set(final["drafter_sha256"]))]
    # drafters without training records (one that was given) stand in only where none has them
    return rows if chosen.empty else chosen
