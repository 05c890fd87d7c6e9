"""What the target does with visual tokens, layer by layer: what notebook 70 runs.

    measure_layers(settings, clips_folder, target_folder, run_id, out_folder)

Of every clip, from one prefill (quantities of MEASURES, by layer):

    attention_<kind>           attention of the last instruction token, mean over heads, summed over
                               the positions of a kind (instruction, visual, text; see `positions`)
    end_attention_<kind>       the same of the last prompt token, from which the answer begins
    attention_visual_max_head  of the head that attends most to the video
    visual_positions           share of visual positions among those that the last instruction token
                               sees: what attention spread evenly would give them (layer -1)
    end_visual_positions       the same for the last prompt token
    step_similarity_<kind>     cosine of a position's state before and after the layer, mean over
                               visual positions, or over all others (text)
    input_similarity_<kind>    the same between its embedding and its state after the layer

and, with the video removed from layer x on (`removal`; layer x, and -1 for plain decoding),

    agreement                  share of the target's own greedy tokens that are still its choice
                               when they are given (layers 0..L; L removes nothing)
    static_accuracy, dynamic_accuracy  of generated clips: words of the freely written text that tell
                               attributes, or motion and events, as the reference does
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vflash_analysis.clips.frozen import verified_sha256
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.prepare import first_seed_clips, open_reader
from vflash_analysis.clips.wording import accuracy_counts
from vflash_analysis.config import LayerSettings, Profile
from vflash_analysis.decoding.clip import Row, ShardFacts, part_id, reason_of
from vflash_analysis.decoding.loop import decode
from vflash_analysis.decoding.methods.ar import AutoRegressive
from vflash_analysis.decoding.removal import WithoutVideo
from vflash_analysis.environment import device_label
from vflash_analysis.errors import InputError
from vflash_analysis.model.positions import (
    INSTRUCTION,
    KIND_NAMES,
    VISUAL,
    last_position,
    prompt_kinds,
)
from vflash_analysis.model.prompts import read_prompt
from vflash_analysis.model.target import Target
from vflash_analysis.model.watch import Watched, watched_prefill
from vflash_analysis.records import blank_row, merge_parts, part_path, read_records, write_part
from vflash_analysis.schemas import FAILED_CLIP, LAYERS_STUDY, MEASURES, NO_LAYER
from vflash_analysis.training.pipeline import open_target
from vflash_analysis.training.progress import Progress

Place = tuple[str, int, float, float]  # quantity, layer, total, count


def measure_layers(
    settings: Profile, clips_folder: Path, target_folder: Path, run_id: str, out_folder: Path
) -> None:
    """Measure the first clips of every suite's first sample seed; resumes.

    Args:
        settings: the profile.
        clips_folder: results of the clips stage.
        target_folder: results of the target stage.
        run_id: of the run, kept in every row.
        out_folder: gets `measures.parquet`; parts of finished clips under `parts/`.

    Raises:
        InputError: the target reads no video, or no clip could be measured.
    """
    clips = first_seed_clips(clips_folder, settings.clips, settings.layers.clips_per_suite)
    facts = ShardFacts.of(settings, run_id, settings.clips.sample_seeds[0])
    target = open_target(settings, target_folder)
    with open_reader(settings.clips) as reader:
        measure_clips(target, clips, reader, settings.layers, out_folder, facts)


def measure_clips(
    target: Target,
    clips: Sequence[Clip],
    reader: Any,
    settings: LayerSettings,
    out_folder: Path,
    facts: ShardFacts,
    log: Callable[[str], None] = print,
) -> None:
    """Measure clips one by one and write `measures.parquet`; finished ones are skipped.

    Args:
        target: the target.
        clips: of any suites.
        reader: a `FrameReader`.
        settings: cap, and from which layers on the video is removed.
        out_folder: gets the table.
        facts: run id, sample seed, frames, what to do with bad clips.
        log: prints one line.

    Raises:
        InputError: the target reads no video; a bad clip under "fail"; no clip could be measured.
    """
    if target.preprocessing is None:
        raise InputError(
            f"layers: {target.source} reads no video, allowed: a target with visual tokens"
        )
    waiting = [clip for clip in clips if not _is_finished(out_folder, clip, facts.run_id)]
    done = len(clips) - len(waiting)
    progress = Progress("clip", len(clips), done, log, every_s=0.0)
    for number, clip in enumerate(waiting, start=done + 1):
        shared = _shared(target, clip, facts)
        try:
            rows = [shared | row for row in clip_rows(target, clip, reader, settings, facts)]
            told = clip.clip_id
        except (InputError, torch.OutOfMemoryError) as error:
            if facts.on_bad_clip == "fail":
                raise InputError(f"clip {clip.clip_id}: {reason_of(error)}") from error
            failed = {"layer": NO_LAYER, "quantity": FAILED_CLIP, "reason": reason_of(error)}
            rows = [shared | failed]
            told = f"{clip.clip_id}: failed: {failed['reason']}"
        write_part(out_folder, MEASURES, part_id(clip), rows)
        progress.update(number, told)
    merge_parts(out_folder, MEASURES, [part_id(clip) for clip in clips])
    _refuse_nothing(out_folder)


def clip_rows(
    target: Target, clip: Clip, reader: Any, settings: LayerSettings, facts: ShardFacts
) -> list[Row]:
    """What is measured of one clip: columns of MEASURES from `video_sha256` and `layer` on.

    Raises:
        InputError: the clip cannot be read, or its prompt is not of a text after a video.
    """
    prompt = read_prompt(target, clip, reader, facts.num_frames)
    ids, cap = prompt.input_ids, settings.max_new_tokens
    target.check_lengths(len(ids), cap, prompt.video_tokens)
    kinds = prompt_kinds(target, clip.prompt, ids)
    queries = (last_position(kinds, INSTRUCTION), len(ids) - 1)
    cache = target.allocate_cache(len(ids) + cap)
    seen = watched_prefill(target, ids, prompt.pixel_values, kinds, cache, queries)
    found = _attention(seen, kinds, queries) + _similarity(seen, prompt.video_tokens)
    native = decode(target, ids, seen.prefill, cache, AutoRegressive(), cap).token_ids
    cache.truncate(len(ids))
    found += _accuracies(target, clip, native, NO_LAYER)
    without = WithoutVideo(target, seen, cache, cap)
    for layer in (*range(0, target.num_layers, settings.removal_every), target.num_layers):
        chosen = without.logits(layer, native).argmax(-1).tolist()
        same = sum(a == b for a, b in zip(chosen, native, strict=True))
        found.append(("agreement", layer, same, len(native)))
        if clip.facts is not None:
            found += _accuracies(target, clip, without.greedy(layer), layer)
    names = ("quantity", "layer", "total", "count")
    video = {"video_sha256": verified_sha256(clip)}
    return [video | dict(zip(names, place, strict=True)) for place in found]


def _attention(seen: Watched, kinds: torch.Tensor, queries: Sequence[int]) -> list[Place]:
    found: list[Place] = []
    by_head = seen.masses.double().cpu()  # (L, queries, heads, kinds)
    for place, (prefix, query) in enumerate(zip(("", "end_"), queries, strict=True)):
        n_visual = float((kinds[: query + 1] == VISUAL).sum())
        found.append((f"{prefix}visual_positions", NO_LAYER, n_visual, query + 1))
        for kind, name in enumerate(KIND_NAMES):
            means = by_head[:, place, :, kind].mean(-1).tolist()
            found += [
                (f"{prefix}attention_{name}", layer, mean, 1.0) for layer, mean in enumerate(means)
            ]
    most = by_head[:, 0, :, VISUAL].amax(-1).tolist()
    found += [("attention_visual_max_head", layer, mass, 1.0) for layer, mass in enumerate(most)]
    return found


def _similarity(seen: Watched, video_tokens: int) -> list[Place]:
    counts = {"visual": video_tokens, "text": len(seen.text_rows)}
    found: list[Place] = []
    for prefix, cosines in (("step", seen.step_cosines), ("input", seen.input_cosines)):
        for column, (name, count) in enumerate(counts.items()):
            sums = cosines[:, column].tolist()
            found += [
                (f"{prefix}_similarity_{name}", layer, total, count)
                for layer, total in enumerate(sums)
            ]
    return found


def _accuracies(target: Target, clip: Clip, token_ids: Sequence[int], layer: int) -> list[Place]:
    """Right words and words of a text about a generated clip; nothing for another."""
    if clip.facts is None or clip.reference is None:
        return []
    text = target.tokenizer.decode(token_ids, skip_special_tokens=True)
    counts = accuracy_counts(text, clip.reference)
    return [(name, layer, float(right), float(words)) for name, (right, words) in counts.items()]


def _shared(target: Target, clip: Clip, facts: ShardFacts) -> Row:
    """The columns that all rows of a clip share."""
    return blank_row(MEASURES) | {
        "run_id": facts.run_id,
        "target": target.source,
        "target_sha256": target.source_sha256,
        "device": device_label(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "clip_id": clip.clip_id,
        "benchmark": clip.benchmark,
        "sample_seed": facts.sample_seed,
        "study": LAYERS_STUDY,
        "setting": "",
    }


def _is_finished(folder: Path, clip: Clip, run_id: str) -> bool:
    """Whether a clip's part is there, of this run and without a failure."""
    path = part_path(folder, MEASURES, part_id(clip))
    if not path.is_file():
        return False
    try:
        rows = read_records(path, MEASURES)
    except InputError:  # written by an older version
        return False
    return set(rows["run_id"]) == {run_id} and bool(rows["reason"].isna().all())


def _refuse_nothing(folder: Path) -> None:
    """The written table must hold a clip that did not fail."""
    rows = read_records(folder / f"{MEASURES.name}.parquet", MEASURES)
    if rows["reason"].notna().all():
        told = "" if rows.empty else f"; first: {rows['clip_id'].iloc[0]}: {rows['reason'].iloc[0]}"
        raise InputError(f"layers: none of {len(rows)} clips could be measured{told}")
