"""Calls of notebooks 50 and 71: from settings to decoded clips, and what a reader looks at then."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from vflash_analysis.clips.prepare import first_seed_clips, open_reader, suite_list
from vflash_analysis.config import Profile
from vflash_analysis.decoding.clip import ShardFacts
from vflash_analysis.decoding.plan import plan_methods
from vflash_analysis.decoding.shard import decode_planned, decode_shard
from vflash_analysis.records import read_records, write_records
from vflash_analysis.schemas import ANCHORS, GENERATIONS, TRAINING, VFLASH_METHODS
from vflash_analysis.training.pipeline import open_target


def decode_suite(
    settings: Profile,
    benchmark: str,
    sample_seed: int,
    run_id: str,
    clips_folder: Path,
    target_folder: Path,
    drafters: Mapping[str, Path],
    out_folder: Path,
) -> None:
    """Decode the clips of one suite and sample seed with every method; resumes.

    Args:
        settings: the profile.
        benchmark: the suite.
        sample_seed: which of its clip lists.
        run_id: of the run, kept in every row.
        clips_folder: results of the clips stage.
        target_folder: results of the target stage.
        drafters: name to the folder of a drafter stage's results.
        out_folder: this stage's folder.
    """
    clips = suite_list(clips_folder, benchmark, sample_seed, settings.clips.clips_per_suite)
    facts = ShardFacts.of(settings, run_id, sample_seed)
    folders = {name: folder / "drafter" for name, folder in drafters.items()}
    target = open_target(settings, target_folder)
    with open_reader(settings.clips) as reader:
        decode_shard(target, folders, clips, reader, settings.decode, out_folder, facts)


def decode_design(
    settings: Profile,
    run_id: str,
    clips_folder: Path,
    target_folder: Path,
    drafters: Mapping[str, Path],
    out_folder: Path,
) -> None:
    """Decode the first sample seed's clips of every suite, one thing changed at a time; resumes.

    Rows of a suite have the run id "<run_id>/<suite>".

    Args:
        settings: the profile; `design.methods` decode with its own drafter, and every drafter of
            `design.variants` as a chain and as Tree-60.
        run_id: of the run.
        clips_folder: results of the clips stage.
        target_folder: results of the target stage.
        drafters: name to the folder of a drafter stage's results, the profile's own first.
        out_folder: this stage's folder.
    """
    clips = first_seed_clips(clips_folder, settings.clips, settings.design.clips_per_suite)
    target = open_target(settings, target_folder)
    folders = {name: folder / "drafter" for name, folder in drafters.items()}
    own = next(iter(folders))
    varied = {name: folder for name, folder in folders.items() if name != own}
    decode = dataclasses.replace(settings.decode, methods=settings.design.methods)
    planned = plan_methods(target, {own: folders[own]}, decode)
    if varied:
        shapes = dataclasses.replace(decode, methods=VFLASH_METHODS)
        planned += plan_methods(target, varied, shapes)
    facts = ShardFacts.of_study(settings, run_id)
    with open_reader(settings.clips) as reader:
        decode_planned(target, planned, clips, reader, decode, out_folder, facts)
    for schema in (ANCHORS, TRAINING):  # what its drafters are: the study stands by itself
        paths = [folder / f"{schema.name}.parquet" for folder in drafters.values()]
        rows = pd.concat([read_records(path, schema) for path in paths])
        write_records(out_folder / f"{schema.name}.parquet", rows, schema)


def _measured(out_folder: Path) -> pd.DataFrame:
    rows = read_records(out_folder / "generations.parquet", GENERATIONS)
    return rows[~rows["warmup"]]


def counts(out_folder: Path) -> tuple[int, int]:
    """(decodes planned, decodes that gave a text), warm-up left out."""
    rows = _measured(out_folder)
    return len(rows), int((rows["status"] == "ok").sum())


def summarise(out_folder: Path) -> pd.DataFrame:
    """One row per method and drafter.

    Columns: texts; tokens_per_verify = sum(new_tokens - 1) / sum(verify_calls); ms_per_token =
    sum(decode_s) / sum(new_tokens - 1); identical, the share of texts equal to greedy decoding.
    """
    rows = _measured(out_folder)
    rows = rows[rows["status"] == "ok"].assign(drafter=rows["drafter"].fillna(""))
    told = []
    for (method, setting, drafter), own in rows.groupby(
        ["method", "setting", "drafter"], sort=False
    ):
        tokens = (own["new_tokens"] - 1).sum()
        calls = own["verify_calls"].sum()
        told.append(
            {
                "method": method,
                "setting": setting,
                "drafter": drafter,
                "texts": len(own),
                "tokens_per_verify": tokens / calls if calls else float("nan"),
                "ms_per_token": 1000 * own["decode_s"].sum() / tokens if tokens else float("nan"),
                "identical": own["identical_to_ar"].astype("Float64").mean(),
            }
        )
    return pd.DataFrame(told).round(3)


def failed_clips(out_folder: Path) -> pd.DataFrame:
    """Decodes that gave no text: clip, method, reason."""
    rows = _measured(out_folder)
    return rows.loc[rows["status"] != "ok", ["clip_id", "method", "reason"]].drop_duplicates()


def sample_text(out_folder: Path) -> pd.DataFrame:
    """The first clip's text by method, with the number of verify calls it took."""
    rows = _measured(out_folder)
    rows = rows[rows["clip_id"] == rows["clip_id"].min()]
    columns = ["clip_id", "method", "drafter", "new_tokens", "verify_calls", "text"]
    return rows[columns].fillna({"drafter": ""})
