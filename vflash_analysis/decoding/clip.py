"""One clip decoded by every method of a plan from one prefill, as record rows.

The prompt and the video go through the target once; the cache is truncated back to the prompt
before every decode, so all methods start from the same contents. A method that fails costs its own
rows; a clip that cannot be read gives rows with its reason and nothing measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from vflash_analysis.clips.frozen import prompt_sha256, verified_sha256
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.read import ClipError
from vflash_analysis.config import DecodeSettings, Profile
from vflash_analysis.decoding.huggingface import generate_outside
from vflash_analysis.decoding.loop import Cycle, Generation, decode
from vflash_analysis.decoding.lossless import ExactLogits, judge
from vflash_analysis.decoding.plan import Planned
from vflash_analysis.decoding.shown import text_ends
from vflash_analysis.environment import device_label
from vflash_analysis.errors import InputError
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.prompts import read_prompt
from vflash_analysis.model.taps import select_taps
from vflash_analysis.model.target import Prefill, Target
from vflash_analysis.records import blank_row
from vflash_analysis.schemas import COMPILED, CYCLES, GENERATIONS, VERIFY_ROWS

WARMUP = -1  # `repeat` of a decode that only warms up

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class ShardFacts:
    """What the rows of a shard share beside the settings.

    Attributes:
        run_id, profile: identity of the run.
        sample_seed: which clips were drawn.
        num_frames: frames read from every clip.
        on_bad_clip: "skip" records a clip's failure and goes on, "fail" raises it.
        by_suite: whether the rows of each suite have a run id of their own, "<run_id>/<suite>":
            the clips are of several suites, which may share ids.
    """

    run_id: str
    profile: str
    sample_seed: int
    num_frames: int
    on_bad_clip: str = "skip"
    by_suite: bool = False

    @classmethod
    def of(cls, settings: Profile, run_id: str, sample_seed: int) -> ShardFacts:
        """Those of a profile."""
        clips = settings.clips
        return cls(run_id, settings.name, sample_seed, clips.num_frames, clips.on_bad_clip)

    @classmethod
    def of_study(cls, settings: Profile, run_id: str, num_frames: int | None = None) -> ShardFacts:
        """Those of a study: clips of all suites and the first sample seed.

        At the profile's number of frames unless another is given.
        """
        own = cls.of(settings, run_id, settings.clips.sample_seeds[0])
        frames = own.num_frames if num_frames is None else num_frames
        return replace(own, num_frames=frames, by_suite=True)

    def run_id_of(self, clip: Clip) -> str:
        """The run id of a clip's rows."""
        return f"{self.run_id}/{clip.benchmark}" if self.by_suite else self.run_id


def part_id(clip: Clip) -> str:
    """Names a clip's part among those of several suites, which may share ids."""
    return f"{clip.benchmark}/{clip.clip_id}"


def in_turn(planned: Sequence[T], turn: int) -> list[T]:
    """The order of turn 0, 1, 2, ...: every rotation forwards, then backwards.

    So each runs first, and last, equally often, and not always after the same one.
    """
    shift = turn // 2 % len(planned)
    rotated = [*planned[shift:], *planned[:shift]]
    return rotated[::-1] if turn % 2 else rotated


def reason_of(error: Exception) -> str:
    """One line for a failed row's `reason`."""
    if isinstance(error, ClipError):
        return f"{error.reason}: {error.detail}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out_of_memory: {str(error).splitlines()[0]}"
    return str(error)


class ClipDecoder:
    """Turns clips into GENERATIONS and CYCLES rows.

    Args:
        target: the target.
        planned: every decode of the shard.
        reader: reads frames (`clips.read.FrameReader`).
        settings: cap, repeats.
        facts: what all rows share.
    """

    def __init__(
        self,
        target: Target,
        planned: Sequence[Planned],
        reader: Any,
        settings: DecodeSettings,
        facts: ShardFacts,
    ) -> None:
        self._target, self._reader = target, reader
        self._settings, self._facts = settings, facts
        methods = [one.method for one in planned if one.method is not None]
        self._taps = sorted({layer for method in methods for layer in method.tap_layer_ids})
        self._verify_rows = max([VERIFY_ROWS, *(m.max_draft_tokens + 1 for m in methods)])
        self._exact = ExactLogits(target)
        self._shared = {
            "profile": facts.profile,
            "target": target.source,
            "target_revision": (
                f"sha256:{target.source_sha256[:16]}"
                if target.revision in ("", "local")
                else target.revision
            ),
            "sample_seed": facts.sample_seed,
            "dtype": str(target.dtype).removeprefix("torch."),
            "attention": target.attention,
            # Tables never pool devices: so nor compiled decodes with others.
            "device": device_label(target.device) + (COMPILED if target.compiled else ""),
            "frames_requested": facts.num_frames,
        }

    def decode(
        self, clip: Clip, planned: Sequence[Planned], turn: int, warm_up: bool
    ) -> tuple[list[Row], list[Row]]:
        """All rows of one clip.

        Args:
            clip: the clip.
            planned: its decodes, some of the shard's.
            turn: its number in the shard, which with the repeat sets their order.
            warm_up: decode once more beforehand, in rows flagged `warmup` (`repeat` -1).

        Returns:
            GENERATIONS rows and CYCLES rows.

        Raises:
            InputError: the clip fails and `on_bad_clip` is "fail".
        """
        repeats = ([WARMUP] if warm_up else []) + list(range(self._settings.repeats))
        try:
            prompt = self._prompt(clip)
            generations: list[Row] = []
            cycles: list[Row] = []
            for repeat in repeats:
                if repeat <= 0:  # afresh after the warm-up, whose own prefill was a cold one
                    cache, prefill = self._prefill(*prompt[:2])
                for one in in_turn(planned, turn + max(repeat, 0)):
                    row, own_cycles = self._row(clip, one, repeat, prompt, cache, prefill)
                    generations.append(row)
                    cycles += own_cycles
            self._judge(generations, prompt, cache)
        except (InputError, torch.OutOfMemoryError) as error:
            if self._facts.on_bad_clip == "fail":
                raise InputError(f"clip {clip.clip_id}: {reason_of(error)}") from error
            return [
                self._failed(clip, one, repeat, reason_of(error))
                for repeat in repeats
                for one in planned
            ], []
        return generations, cycles

    def _prompt(self, clip: Clip) -> tuple[torch.Tensor, torch.Tensor | None, Row]:
        """Prompt ids, pixel values and the columns that describe what was read."""
        prompt = read_prompt(self._target, clip, self._reader, self._facts.num_frames)
        measured: Row = {
            "video_sha256": verified_sha256(clip),
            "prompt_tokens": len(prompt.input_ids),
            "video_tokens": prompt.video_tokens,
            "prompt": clip.prompt,
            "prompt_sha256": prompt_sha256(clip.prompt),
            "template_sha256": self._target.template_sha256,
        }
        if prompt.read is not None:
            info = prompt.read.info
            measured |= {
                "frames_used": len(prompt.read.frames) - info.n_repeated,
                "reader": f"{info.reader} {info.reader_version}",
                "frame_read_s": prompt.read.seconds,
            }
        return prompt.input_ids, prompt.pixel_values, measured

    def _prefill(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None
    ) -> tuple[KVCache, Prefill]:
        cache = self._target.new_cache(
            len(input_ids), self._settings.max_new_tokens, self._verify_rows
        )
        return cache, self._target.prefill(input_ids, pixel_values, cache, self._taps)

    def _identity(self, clip: Clip, planned: Planned, repeat: int) -> Row:
        return self._shared | {
            "run_id": self._facts.run_id_of(clip),
            "clip_id": clip.clip_id,
            "benchmark": clip.benchmark,
            "method": planned.name,
            "setting": planned.setting,
            "drafter_sha256": planned.drafter_sha256,
            "drafter": planned.drafter,
            "objective": planned.objective,
            "train_seed": planned.train_seed,
            "repeat": repeat,
            "warmup": repeat == WARMUP,
        }

    def _failed(self, clip: Clip, planned: Planned, repeat: int, reason: str) -> Row:
        identity = self._identity(clip, planned, repeat)
        return blank_row(GENERATIONS) | identity | {"status": "failed", "reason": reason}

    def _row(
        self,
        clip: Clip,
        planned: Planned,
        repeat: int,
        prompt: tuple[torch.Tensor, torch.Tensor | None, Row],
        cache: KVCache,
        prefill: Prefill,
    ) -> tuple[Row, list[Row]]:
        """One decode; its failure is its own, unless the profile says to stop."""
        try:
            found = self._run(planned, prompt[0], prompt[1], cache, prefill)
        except (InputError, torch.OutOfMemoryError) as error:
            if self._facts.on_bad_clip == "fail":
                raise
            return self._failed(clip, planned, repeat, reason_of(error)), []
        ids = np.asarray(found.token_ids, dtype=np.int32)
        row = blank_row(GENERATIONS) | self._identity(clip, planned, repeat) | prompt[2]
        tokenizer = self._target.tokenizer
        text = tokenizer.decode(found.token_ids, skip_special_tokens=True)
        row |= {
            "new_tokens": len(found.token_ids),
            "stop_reason": found.stop_reason,
            "verify_calls": found.verify_calls,
            "draft_calls": found.draft_calls,
            "decode_s": found.decode_s,
            "text": text,
            "token_ids": found.token_ids,
            "text_ends": text_ends(tokenizer, found.token_ids, text),
            "output_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            "status": "ok",
        }
        if found.prefill_s is not None:
            return row | {"prefill_s": found.prefill_s}, []
        row |= {
            "vision_s": prefill.vision_s,
            "prefill_s": prefill.prefill_s,
            "context_projection_s": found.context_projection_s,
        }
        key = {name: row[name] for name in CYCLES.columns if name in row}
        return row, [cycle_row(key, number, c) for number, c in enumerate(found.cycles)]

    def _run(
        self,
        planned: Planned,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None,
        cache: KVCache,
        prefill: Prefill,
    ) -> Generation:
        cap = self._settings.max_new_tokens
        if planned.method is None:
            return generate_outside(self._target, input_ids, pixel_values, cap, planned.network)
        cache.truncate(len(input_ids))
        if prefill.tapped is not None:
            wanted = planned.method.tap_layer_ids
            tapped = select_taps(prefill.tapped, self._taps, wanted) if wanted else None
            prefill = replace(prefill, tapped=tapped)
        return decode(self._target, input_ids, prefill, cache, planned.method, cap)

    def _judge(
        self,
        rows: list[Row],
        prompt: tuple[torch.Tensor, torch.Tensor | None, Row],
        cache: KVCache,
    ) -> None:
        """Fills in how each text compares with the first measured plain greedy one."""
        input_ids, pixel_values, _ = prompt
        plain = [r for r in rows if (r["method"], r["setting"], r["repeat"]) == ("ar", "", 0)]
        if not plain or plain[0]["status"] != "ok":
            return
        reference = plain[0]["token_ids"]

        def exact(prefix: Sequence[int]) -> torch.Tensor:
            return self._exact.after(input_ids, pixel_values, prefix)

        for row in rows:
            if row is plain[0] or row["status"] != "ok":
                continue
            found = judge(self._target, cache, len(input_ids), row["token_ids"], reference, exact)
            row["identical_to_ar"] = found is None
            if found is not None:
                row["first_divergence"] = found.position
                row["divergence_gap"] = found.gap
                row["divergence_kind"] = found.kind


def cycle_row(key: Row, number: int, cycle: Cycle) -> Row:
    """A CYCLES row of one cycle under its generation's key."""
    return blank_row(CYCLES) | key | vars(cycle) | {"cycle": number}
