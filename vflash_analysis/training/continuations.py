"""The target's own greedy texts with the states a drafter reads: collected once, read many times.

`collect_continuations` writes, clip by clip so that a killed run resumes,

    states/<clip id>.safetensors     tapped states (P + N - 1, n * H) of prompt and continuation
    parts/continuations/...          one record per clip, merged last into
    continuations.parquet            every clip of the list, a bad one with its reason

The states of the last token are not kept: nothing follows it. `ContinuationSet` reads such a
folder; `OnlineContinuations` has the same interface and recomputes the states with the target,
for contexts too long to store (0.7 GB per clip at 25k tokens).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vflash_analysis.clips.frozen import verified_sha256
from vflash_analysis.clips.lists import Clip, video_sha256
from vflash_analysis.errors import InputError
from vflash_analysis.model.prompts import read_prompt
from vflash_analysis.model.taps import select_taps
from vflash_analysis.model.target import Target
from vflash_analysis.records import (
    blank_row,
    merge_parts,
    part_path,
    read_records,
    replace_atomically,
    write_part,
)
from vflash_analysis.schemas import CONTINUATIONS, VERIFY_ROWS
from vflash_analysis.training.batches import Continuation
from vflash_analysis.training.progress import Progress
from vflash_analysis.training.read_ahead import ReadAhead

STATES = "states"


@dataclass(frozen=True)
class GreedyText:
    """A greedy continuation: new tokens (N,), states (P + N - 1, n * H) if any, "eos" or "length"."""

    token_ids: Tensor
    states: Tensor | None
    stop_reason: str


def greedy_continuation(
    target: Target,
    input_ids: Tensor,
    pixel_values: Tensor | None,
    max_new_tokens: int,
    tap_layer_ids: Sequence[int] = (),
    guess: Sequence[int] = (),
) -> GreedyText:
    """Greedy decoding that keeps the tapped states; ties go to the lowest id.

    A guess saves forwards: the target reads its next tokens along (60 of them at first, then one
    more than twice as many as were right last time) and keeps those it would have written itself.
    That is the same text wherever forwards of one row and of several round alike; so not in half
    precision, where a near tie may fall the other way.

    Args:
        target: the frozen target.
        input_ids: (P,) prompt.
        pixel_values: of the clip.
        max_new_tokens: the text is cut there.
        tap_layer_ids: layers whose outputs are kept; none: no states.
        guess: what the text may be, such as the clip's reference; empty: one token per forward.

    Returns:
        The text; a stop token is its last token.
    """
    cache = target.new_cache(len(input_ids), max_new_tokens)
    first = target.prefill(input_ids, pixel_values, cache, tap_layer_ids)
    tokens, states = [int(first.logits.argmax())], [first.tapped]
    n_drafts = VERIFY_ROWS - 1
    while tokens[-1] not in target.stop_ids and len(tokens) < max_new_tokens:
        room = max_new_tokens - len(tokens)
        drafts = list(guess[len(tokens) :][: min(n_drafts, room - 1)])
        ids = torch.tensor([tokens[-1], *drafts], device=target.device)
        step = target.forward(ids, None, cache, tap_layer_ids=tap_layer_ids)
        chosen = step.logits.argmax(-1).tolist()
        right = 0
        while right < len(drafts) and drafts[right] == chosen[right] not in target.stop_ids:
            right += 1
        cache.drop(len(drafts) - right)
        states.append(None if step.tapped is None else step.tapped[: right + 1])
        tokens += chosen[: right + 1]
        n_drafts = min(2 * right + 1, VERIFY_ROWS - 1)
    tapped = [part for part in states if part is not None]
    return GreedyText(
        torch.tensor(tokens, device=target.device),
        torch.cat(tapped) if tapped else None,
        "eos" if tokens[-1] in target.stop_ids else "length",
    )


def teacher_forced_states(
    target: Target,
    input_ids: Tensor,
    prompt_tokens: int,
    pixel_values: Tensor | None,
    tap_layer_ids: Sequence[int],
    rows: int = 64,
) -> Tensor:
    """Tapped states of a known text: prompt with pixels, then the continuation on the cache.

    Args:
        target: the frozen target.
        input_ids: (P + N,)
        prompt_tokens: P.
        pixel_values: of the clip.
        tap_layer_ids: layers whose outputs are kept.
        rows: tokens per forward of the continuation.

    Returns:
        (P + N - 1, n * H); the last token is not run.
    """
    text = input_ids[prompt_tokens:-1]
    cache = target.new_cache(prompt_tokens, max(1, len(text)))
    first = target.prefill(input_ids[:prompt_tokens], pixel_values, cache, tap_layer_ids)
    states = [first.tapped]
    for part in text.split(rows) if len(text) else ():
        states.append(target.forward(part, None, cache, tap_layer_ids=tap_layer_ids).tapped)
    return torch.cat([part for part in states if part is not None])


def states_path(folder: str | Path, clip_id: str) -> Path:
    """Where the states of a clip lie."""
    return Path(folder) / STATES / f"{quote(clip_id, safe='')}.safetensors"


def _write_states(path: Path, states: Tensor, tap_layer_ids: Sequence[int]) -> None:
    tensors = {STATES: states.to("cpu", torch.bfloat16).contiguous()}
    marks = {"tap_layer_ids": ",".join(map(str, tap_layer_ids))}
    replace_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=marks))


def read_states(path: str | Path) -> tuple[Tensor, tuple[int, ...]]:
    """States (P + N - 1, n * H) of one clip and the layers they were tapped from.

    Raises:
        InputError: the file is missing, cut short or not of this kind; names path and size.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file of states; collect the continuations again")
    try:
        with safe_open(path, framework="pt") as handle:
            ids = handle.metadata()["tap_layer_ids"]
            return handle.get_tensor(STATES), tuple(int(i) for i in ids.split(","))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: found {path.stat().st_size} bytes that are no complete file of states "
            f"({error}); collect the continuations again"
        ) from error


def _is_current(
    folder: Path,
    clip: Clip,
    target: Target,
    prompt: Tensor,
    max_new_tokens: int,
    taps: tuple[int, ...] | None,
) -> bool:
    """Whether a clip's text is there: of this target, video, prompt and length; and its states.

    `taps` None asks for no states.
    """
    part = part_path(folder, CONTINUATIONS, clip.clip_id)
    if not part.is_file() or not (clip.path == "" or Path(clip.path).exists()):
        return False
    row = read_records(part, CONTINUATIONS).iloc[0]
    if row["status"] != "ok" or row["target_sha256"] != target.source_sha256:
        return False
    video = row["video_sha256"]
    if (None if pd.isna(video) else video) != (video_sha256(clip.path) if clip.path else None):
        return False
    ids = row["input_ids"]
    cut = row["stop_reason"] == "length"
    if row["new_tokens"] > max_new_tokens or (cut and row["new_tokens"] < max_new_tokens):
        return False
    if ids[: row["prompt_tokens"]].tolist() != prompt.tolist():
        return False
    if taps is None:
        return True
    try:
        states, stored = read_states(states_path(folder, clip.clip_id))
    except InputError:
        return False
    return stored == taps and states.shape[0] == len(ids) - 1


def _guess(target: Target, clip: Clip) -> list[int]:
    """The clip's reference as what its text may be; nothing in half precision, see above."""
    if clip.reference is None or target.dtype.itemsize < 4:
        return []
    ids: list[int] = target.tokenizer.encode(clip.reference, add_special_tokens=False)
    return ids


def collect_continuations(
    target: Target,
    clips: Sequence[Clip],
    reader: Any,
    *,
    num_frames: int,
    max_new_tokens: int,
    tap_layer_ids: Sequence[int],
    out_folder: str | Path,
    store_states: bool = True,
    on_bad_clip: str = "skip",
    log: Callable[[str], None] = print,
) -> Path:
    """The target's greedy text and states for every clip; clips that are done are skipped.

    A clip's reference serves as a guess (see `greedy_continuation`): it saves time only.

    Args:
        target: the frozen target.
        clips: in the order of the records; ids are unique.
        reader: a `FrameReader`.
        num_frames: frames per clip.
        max_new_tokens: the text is cut there.
        tap_layer_ids: layers whose outputs are kept.
        out_folder: see the module's head.
        store_states: False writes the records alone, for `OnlineContinuations`.
        on_bad_clip: "skip" records the reason and goes on; "fail" raises.
        log: prints one line.

    Returns:
        The CONTINUATIONS file.

    Raises:
        InputError: two clips share an id, or a clip is bad and `on_bad_clip` is "fail".
    """
    folder = Path(out_folder)
    clip_ids = [clip.clip_id for clip in clips]
    if len(set(clip_ids)) != len(clip_ids):
        twice = next(i for number, i in enumerate(clip_ids) if i in clip_ids[:number])
        raise InputError(f"clip list: found clip id {twice!r} twice, allowed: each id once")
    taps = tuple(tap_layer_ids) if store_states else ()

    def is_current(clip: Clip) -> bool:
        try:
            prompt = target.build_prompt(clip.prompt, num_frames)
        except InputError:
            return False  # tried again below, where its reason is kept
        return _is_current(folder, clip, target, prompt, max_new_tokens, taps or None)

    waiting = [clip for clip in clips if not is_current(clip)]
    progress = Progress("clip", len(clips), len(clips) - len(waiting), log)
    n_bad = 0
    for number, clip in enumerate(waiting, start=len(clips) - len(waiting) + 1):
        row = {
            **blank_row(CONTINUATIONS),
            "clip_id": clip.clip_id,
            "benchmark": clip.benchmark,
            "split": clip.split,
            "target_sha256": target.source_sha256,
        }
        try:
            prompt = read_prompt(target, clip, reader, num_frames)
            sha256, ids = verified_sha256(clip), prompt.input_ids
            guess = _guess(target, clip)
            text = greedy_continuation(
                target, ids, prompt.pixel_values, max_new_tokens, taps, guess
            )
        except InputError as error:
            if on_bad_clip == "fail":
                raise
            n_bad += 1
            log(f"bad clip {clip.clip_id}: {error}")
            row |= {"status": "failed", "reason": str(error)}
        else:
            if text.states is not None:
                path = states_path(folder, clip.clip_id)
                _write_states(path, text.states, taps)
            row |= {
                "status": "ok",
                "video_sha256": sha256,
                "prompt_tokens": len(ids),
                "video_tokens": prompt.video_tokens,
                "input_ids": [*ids.tolist(), *text.token_ids.tolist()],
                "new_tokens": len(text.token_ids),
                "stop_reason": text.stop_reason,
                "text": target.tokenizer.decode(text.token_ids, skip_special_tokens=True),
            }
        write_part(folder, CONTINUATIONS, clip.clip_id, [row])
        progress.update(number, f"{n_bad} bad" if n_bad else "")
    merge_parts(folder, CONTINUATIONS, clip_ids)
    return folder / "continuations.parquet"


class ContinuationSource(ABC):
    """Continuations by index, on disk or recomputed: the usable rows of a CONTINUATIONS file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        frame = read_records(self.folder / "continuations.parquet", CONTINUATIONS)
        good = frame[frame["status"] == "ok"]
        self.rows: list[dict[Any, Any]] = good.to_dict("records")

    def __len__(self) -> int:
        return len(self.rows)

    @abstractmethod
    def __getitem__(self, index: int) -> Continuation: ...

    def anchor_counts(self) -> list[int]:
        """Anchors each item offers: new tokens that have a successor."""
        return [int(row["new_tokens"]) - 1 for row in self.rows]

    def clip_ids(self) -> list[str]:
        """Clip id of each item."""
        return [row["clip_id"] for row in self.rows]

    def lengths(self) -> list[int]:
        """Tokens of prompt and continuation of each item."""
        return [len(row["input_ids"]) for row in self.rows]

    def expect(self, indices: Sequence[int]) -> None:  # noqa: B027
        """Which items will be asked for next, in this order; a source may read ahead."""

    def text(self, index: int) -> Continuation:
        """The item without its states: nothing is read or recomputed."""
        return self._continuation(self.rows[index], torch.empty(0, 0))

    def _continuation(self, row: dict[Any, Any], states: Tensor) -> Continuation:
        return Continuation(
            clip_id=row["clip_id"],
            benchmark=row["benchmark"],
            split=row["split"],
            input_ids=torch.tensor(row["input_ids"], dtype=torch.long),
            prompt_tokens=int(row["prompt_tokens"]),
            states=states,
        )


class ContinuationSet(ContinuationSource):
    """Continuations on disk, without the failed clips; states stay in memory once read.

    Args:
        folder: of `collect_continuations`.
        tap_layer_ids: layers whose states are taken of those that lie there.

    Raises:
        InputError: no such records; on access, a damaged or foreign file of states, or one without
            these layers.
    """

    def __init__(self, folder: str | Path, tap_layer_ids: Sequence[int]) -> None:
        super().__init__(folder)
        self._taps = tuple(tap_layer_ids)
        self._kept: dict[int, Continuation] = {}

    def __getitem__(self, index: int) -> Continuation:
        if index in self._kept:
            return self._kept[index]
        row = self.rows[index]
        path = states_path(self.folder, row["clip_id"])
        states, held = read_states(path)
        expected = len(row["input_ids"]) - 1
        if states.shape[0] != expected:
            raise InputError(f"{path}: found {states.shape[0]} rows of states, allowed: {expected}")
        if not set(self._taps) <= set(held):
            raise InputError(
                f"{path}: found states of layers {list(held)}, allowed: those of {list(self._taps)} "
                "and more; collect the continuations again"
            )
        item = self._continuation(row, select_taps(states, held, self._taps))
        self._kept[index] = item
        return item


def frame_reader(clips: Sequence[Clip], reader: Any, num_frames: int) -> Callable[[str], Tensor]:
    """Frames (T, H, W, 3) uint8 by clip id, read from the clip's file at every call."""
    by_id = {clip.clip_id: clip for clip in clips}

    def frames(clip_id: str) -> Tensor:
        read: Tensor = reader.read_clip(by_id[clip_id], num_frames).frames
        return read

    return frames


class JoinedContinuations(ContinuationSource):
    """Continuations of several sources, one after the other."""

    def __init__(self, sources: Sequence[ContinuationSource]) -> None:
        self._sources = list(sources)
        self.rows = [row for source in self._sources for row in source.rows]
        self._places = [(source, index) for source in self._sources for index in range(len(source))]

    def expect(self, indices: Sequence[int]) -> None:
        for source in self._sources:
            own = [self._places[i][1] for i in indices if self._places[i][0] is source]
            source.expect(own)

    def __getitem__(self, index: int) -> Continuation:
        source, place = self._places[index]
        return source[place]


class OnlineContinuations(ContinuationSource):
    """The same texts, with states recomputed by the target at every access and never stored.

    Args:
        folder: of `collect_continuations`; only its records are read.
        target: the target that wrote the texts.
        frames: of a clip by its id, see `frame_reader`.
        tap_layer_ids: layers whose outputs are read.

    Raises:
        InputError: the texts are another target's.
    """

    def __init__(
        self,
        folder: str | Path,
        target: Target,
        frames: ReadAhead,
        tap_layer_ids: Sequence[int],
    ) -> None:
        super().__init__(folder)
        self._target, self._frames, self._taps = target, frames, tuple(tap_layer_ids)
        writers = {row["target_sha256"] for row in self.rows} - {target.source_sha256}
        if writers:
            raise InputError(
                f"{self.folder}: texts of target {writers.pop()}, allowed: {target.source_sha256}, "
                "the target that is loaded"
            )

    def expect(self, indices: Sequence[int]) -> None:
        self._frames.expect([self.rows[index]["clip_id"] for index in indices])

    def __getitem__(self, index: int) -> Continuation:
        row = self.rows[index]
        ids = torch.tensor(row["input_ids"], dtype=torch.long, device=self._target.device)
        states = teacher_forced_states(
            self._target,
            ids,
            int(row["prompt_tokens"]),
            self._target.prepare_frames(self._frames(row["clip_id"])),
            self._taps,
        )
        return self._continuation(row, states)
