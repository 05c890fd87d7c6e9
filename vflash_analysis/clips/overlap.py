"""Training and evaluation share no video: by id, by source and by file.

A drafter that has seen a video accepts more of its text, so a training clip is an overlap when, for
any video of the suites (every one that their metadata lists, not only those drawn),

1. `same_id`: both lists give it the same clip id;
2. `same_source`: their file names are the same name of one source video (`source_id`): one YouTube,
   ActivityNet or Charades video turns up in several corpora under several paths, whole or cut, and
   encoded anew, so neither ids nor bytes show it;
3. `same_file`: their files hold the same bytes under names that say nothing.

A corpus of `data/training` loses its overlaps and says which (`without_overlaps`); in generated clips
and in a list made by hand an overlap is a mistake of whoever made them (`check_disjoint`).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from vflash_analysis.clips.lists import Clip, video_bytes, video_sha256
from vflash_analysis.errors import InputError

REASONS = ("same_id", "same_source", "same_file")
SHORTEST_NAME = 5  # characters of a file name that says which video it is; "clip" does not
SHORTEST_NUMBER = 7  # digits of one that does: shorter ones count the files of a folder
# An id inside a file name: a Charades id (5 characters) or a YouTube id (11), after a corpus's own
# prefix and before the bounds or the number of a cut: v_JspVuT6rsLA, ytb_7nRmsEw7nsE, EDXBD_1.1_8.7.
_WITHIN = re.compile(
    r"(?P<prefix>v_|yt_|ytb_|youtube_)?"
    r"(?:(?P<charades>(?=\d*[A-Z])[A-Z0-9]{5})|(?P<youtube>[A-Za-z0-9_-]{11}))"
    r"(?:[_.-]\d+(?:\.\d+)?){0,2}"
)
_EXTENSION = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}$")  # not the dot of a bound, as in 8.7


def video_id(path: str | os.PathLike[str]) -> str | None:
    """The YouTube or Charades id in a file's name, in lower case; None where there is none.

    Capitals and small letters together, or the prefix, tell a YouTube id from a word of eleven
    letters, capitals alone a Charades id.
    """
    match = _WITHIN.fullmatch(_EXTENSION.sub("", PurePath(path).name))
    if match is None:
        return None
    name: str = match["charades"] or match["youtube"]
    mixed = name != name.lower() and name != name.upper()
    return name.lower() if match["charades"] or match["prefix"] or mixed else None


def source_id(path: str | os.PathLike[str]) -> str | None:
    """The name of a video in its source, from its file's name; None for a name that says nothing.

    `video_id`, else the file's name less its extension, in lower case.
    """
    known = video_id(path)
    if known is not None:
        return known
    stem = _EXTENSION.sub("", PurePath(path).name)
    least = SHORTEST_NUMBER if stem.isdigit() else SHORTEST_NAME
    return stem.lower() if len(stem) >= least else None


@dataclass(frozen=True)
class Overlap:
    """A training clip, the evaluation clip it shares a video with, and by which of `REASONS`."""

    training: Clip
    evaluation: Clip
    reason: str


class Evaluated:
    """All videos of the evaluation, indexed by id, by source and by size.

    Args:
        clips: every clip that may be evaluated, with or without its file.
        by_source: compare names of source videos; generated clips have none.
    """

    def __init__(self, clips: Sequence[Clip], by_source: bool = True) -> None:
        self._by_id = {clip.clip_id: clip for clip in clips}
        named = [(source_id(clip.path), clip) for clip in clips] if by_source else []
        self._by_source = {name: clip for name, clip in named if name}
        self._by_size: dict[int, list[Clip]] = {}
        for clip in clips:
            if (size := video_bytes(clip.path)) is not None:
                self._by_size.setdefault(size, []).append(clip)
        self._digest = functools.cache(video_sha256)

    def same_name(self, clip: Clip) -> Overlap | None:
        """The overlap that ids or names of source videos show; reads no file."""
        if clip.clip_id in self._by_id:
            return Overlap(clip, self._by_id[clip.clip_id], "same_id")
        other = self._by_source.get(source_id(clip.path) or "")
        return Overlap(clip, other, "same_source") if other else None

    def same_file(self, clip: Clip) -> Overlap | None:
        """The overlap that bytes show; only files of equal size are hashed.

        A file that is not there cannot be compared and is left to the reader's own report.
        """
        for other in self._by_size.get(video_bytes(clip.path) or -1, []):
            if self._digest(clip.path) == self._digest(other.path):
                return Overlap(clip, other, "same_file")
        return None


def check_disjoint(training: Sequence[Clip], evaluated: Evaluated) -> None:
    """Raise InputError for the first training clip that is an overlap.

    Of names only a YouTube or Charades id counts here: two people call their videos video_001.
    """
    for clip in training:
        found = evaluated.same_name(clip)
        if found and found.reason == "same_source" and video_id(clip.path) is None:
            found = None
        found = found or evaluated.same_file(clip)
        if found is None:
            continue
        other, shared = found.evaluation, {
            "same_id": "have one id",
            "same_source": f"are one source video ({source_id(clip.path)})",
            "same_file": "are the same file",
        }  # fmt: skip
        raise InputError(
            f"training clip {clip.clip_id!r} ({clip.path}) and {other.benchmark} clip "
            f"{other.clip_id!r} ({other.path}) {shared[found.reason]}; training and evaluation must "
            "not share a video"
        )


def without_overlaps(
    ranked: Sequence[Clip], evaluated: Evaluated, wanted: int
) -> tuple[list[Clip], list[Overlap]]:
    """The first `wanted` training clips that are no overlap, and all overlaps found on the way.

    Names are compared for the whole corpus; files only as far as the clips are taken, since a corpus
    may hold hundreds of thousands.

    Args:
        ranked: the corpus in the order in which clips are taken.
        evaluated: the evaluation's videos.
        wanted: clips to take; fewer come back where the corpus has no more.
    """
    left_out = {clip.clip_id: found for clip in ranked if (found := evaluated.same_name(clip))}
    taken: list[Clip] = []
    for clip in ranked:
        if len(taken) == wanted:
            break
        if clip.clip_id in left_out:
            continue
        found = evaluated.same_file(clip)
        if found:
            left_out[clip.clip_id] = found
        else:
            taken.append(clip)
    return taken, list(left_out.values())
