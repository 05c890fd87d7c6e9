"""Clips of one sample seed decoded by every method: what notebook 50 runs, and the studies.

    decode_shard(target, drafters, clips, reader, settings.decode, stage.folder, facts)

Clip by clip, all methods from one prefill. The rows of a clip are written together when it is done,
so a killed run resumes at the next clip; the tables are merged at the end. Beside them lie the
texts of all tokens that occur, and film strips of the first clips. Hugging Face's own loops run in
the same pass where `decode.methods` names `hf_generate` or `hf_dflash`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from vflash_analysis.clips.lists import Clip
from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.clip import WARMUP, ClipDecoder, Row, ShardFacts, part_id
from vflash_analysis.decoding.lossless import NEAR_TIE, check_lossless
from vflash_analysis.decoding.plan import Planned, of_clip, plan_methods
from vflash_analysis.decoding.shown import StripWriter, token_texts
from vflash_analysis.errors import InputError
from vflash_analysis.model.target import Target
from vflash_analysis.records import (
    merge_parts,
    part_path,
    read_records,
    write_part,
    write_records,
)
from vflash_analysis.schemas import CYCLES, GENERATIONS, SHOWN_CLIPS, VOCABULARY
from vflash_analysis.training.progress import Progress


class NothingDecoded(InputError):
    """No clip of a shard could be decoded; its tables are written."""


def decode_shard(
    target: Target,
    drafters: Mapping[str, Path],
    clips: Sequence[Clip],
    reader: Any,
    settings: DecodeSettings,
    out_folder: str | Path,
    facts: ShardFacts,
    log: Callable[[str], None] = print,
) -> None:
    """Decode clips with every method; writes the tables of generations, cycles and vocabulary.

    Args:
        target: the target.
        drafters: name -> folder; a method that needs a drafter runs with each of its type.
        clips: of one sample seed; of one suite, or of several where `facts.by_suite`.
        reader: reads frames (`clips.read.FrameReader`).
        settings: methods, cap, tree, warm-up, repeats.
        out_folder: gets the tables; parts of finished clips under `parts/`, frames of the first
            SHOWN_CLIPS as strips under `strips/`.
        facts: run id, profile, sample seed, frames, what to do with bad clips.
        log: prints one line.

    Raises:
        InputError: wrong settings; a bad clip under "fail".
        NothingDecoded: no clip could be decoded.
        LosslessError: a float32 or float64 text that is not the greedy one; the tables are written.
    """
    planned = plan_methods(target, drafters, settings)
    decode_planned(target, planned, clips, reader, settings, out_folder, facts, log)


def decode_planned(
    target: Target,
    planned: Sequence[Planned],
    clips: Sequence[Clip],
    reader: Any,
    settings: DecodeSettings,
    out_folder: str | Path,
    facts: ShardFacts,
    log: Callable[[str], None] = print,
) -> None:
    """`decode_shard` of decodes that are already planned.

    The first `warmup_clips` clips of every call are decoded once more beforehand, by all methods,
    in rows flagged `warmup`: after a resume the machine is cold again. Failed clips are tried again
    when the call is repeated.
    """
    if not clips:
        raise InputError("decode: found no clips")
    out_folder = Path(out_folder)
    shown = StripWriter(reader, out_folder, clips[:SHOWN_CLIPS])
    decoder = ClipDecoder(target, planned, shown, settings, facts)
    numbers = in_suites(clips)
    waiting = []
    for turn, (clip, number) in enumerate(zip(clips, numbers, strict=True)):
        own = of_clip(planned, number, settings)
        if not _is_finished(out_folder, clip, own, settings, facts):
            waiting.append((turn, clip, own))
    done = len(clips) - len(waiting)
    if done:
        suites = ", ".join(dict.fromkeys(clip.benchmark for clip in clips))
        log(f"{suites}: {done} of {len(clips)} clips were decoded before")
    progress = Progress("clip", len(clips), done, log, every_s=0.0)
    for place, (turn, clip, own) in enumerate(waiting):
        warm_up = place < settings.warmup_clips
        generations, cycles = decoder.decode(clip, own, turn, warm_up)
        # The generations are written last: they are what says that a clip is finished.
        write_part(out_folder, CYCLES, part_id(clip), cycles)
        write_part(out_folder, GENERATIONS, part_id(clip), generations)
        progress.update(done + place + 1, f"{clip.clip_id}: {summary(generations)}")
    ids = [part_id(clip) for clip in clips]
    merge_parts(out_folder, CYCLES, ids)
    merge_parts(out_folder, GENERATIONS, ids)
    _write_vocabulary(target, out_folder)
    _conclude(target, out_folder, log)


def in_suites(clips: Sequence[Clip]) -> list[int]:
    """Each clip's number in its suite, from 0."""
    seen: Counter[str] = Counter()
    numbers = []
    for clip in clips:
        numbers.append(seen[clip.benchmark])
        seen[clip.benchmark] += 1
    return numbers


def summary(rows: Sequence[Row]) -> str:
    """A clip's result in one line: ms per token by method, or why it failed."""
    measured = [r for r in rows if not r["warmup"] and r["repeat"] == 0]
    times = []
    for row in measured:
        label = ":".join(filter(None, (row["method"], row["setting"])))
        label += f" ({row['drafter']})" if row["drafter"] else ""
        if row["status"] != "ok":
            times.append(f"{label} failed")
        elif row["new_tokens"] > 1:
            times.append(f"{label} {1000 * row['decode_s'] / (row['new_tokens'] - 1):.2f}")
    reasons = {row["reason"] for row in rows if row["status"] != "ok"}
    told = f"; failed: {'; '.join(sorted(reasons))}" if reasons else ""
    return (f"ms/token {', '.join(times)}" if times else "no time to tell") + told


def _is_finished(
    folder: Path,
    clip: Clip,
    planned: Sequence[Planned],
    settings: DecodeSettings,
    facts: ShardFacts,
) -> bool:
    """Whether a clip's parts hold exactly this plan's decodes, all successful."""
    paths = [part_path(folder, schema, part_id(clip)) for schema in (CYCLES, GENERATIONS)]
    if not all(path.is_file() for path in paths):
        return False
    try:
        rows = read_records(paths[1], GENERATIONS)
    except InputError:  # written by an older version
        return False
    keys = zip(rows["method"], rows["setting"], rows["drafter_sha256"], rows["repeat"], strict=True)
    found = sorted(key for key in keys if key[3] != WARMUP)
    wanted = sorted((*one.key, repeat) for one in planned for repeat in range(settings.repeats))
    of_run = set(rows["run_id"]) == {facts.run_id_of(clip)}
    return found == wanted and set(rows["status"]) == {"ok"} and of_run


def _write_vocabulary(target: Target, folder: Path) -> None:
    """The text of every token in the merged tables' drafts and texts."""
    generations = read_records(folder / f"{GENERATIONS.name}.parquet", GENERATIONS)
    cycles = read_records(folder / f"{CYCLES.name}.parquet", CYCLES)
    lists = [*generations["token_ids"].dropna(), *cycles["draft_token_ids"].dropna()]
    texts = token_texts(target.tokenizer, chain.from_iterable(lists))
    rows = [{"target": target.source, "token_id": i, "text": t} for i, t in texts.items()]
    write_records(folder / f"{VOCABULARY.name}.parquet", rows, VOCABULARY)


def _conclude(target: Target, folder: Path, log: Callable[[str], None]) -> None:
    """A last line with counts over the merged table, and the losslessness check."""
    rows = read_records(folder / f"{GENERATIONS.name}.parquet", GENERATIONS)
    measured = rows.loc[~rows["warmup"]]
    ok = measured.loc[measured["status"] == "ok"]
    compared = ok.loc[ok["identical_to_ar"].notna()]
    n_clips = _count_clips(measured)
    log(
        f"{_count_clips(ok)} of {n_clips} clips decoded; "
        f"{int(compared['identical_to_ar'].sum())} of {len(compared)} texts identical to greedy "
        f"decoding, {int((compared['divergence_kind'] == NEAR_TIE).sum())} near ties; "
        f"{len(measured) - len(ok)} of {len(measured)} decodes failed"
    )
    if ok.empty:
        first = measured.iloc[0]
        raise NothingDecoded(
            f"{', '.join(measured['benchmark'].unique())}: none of {n_clips} clips could be "
            f"decoded; first: clip {first['clip_id']}: {first['reason']}"
        )
    check_lossless(target.dtype, rows)


def _count_clips(rows: pd.DataFrame) -> int:
    return len(rows[["benchmark", "clip_id"]].drop_duplicates())
