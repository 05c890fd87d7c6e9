"""Training clips for the real suites: a corpus of `data/training`, or a list made by hand.

`clips.training_list` names either: `LLaVA-Video-178K` is `data/training/LLaVA-Video-178K.yaml`, and
`training.jsonl` is a file of video + prompt lines below `VFLASH_DATA`. Both are put in order by the
rule by which suites are drawn, lowest hash first (`suites.by_rank`), so neither the order of rows
nor which files are there decides what is learnt from. Validation takes the first clips and training
the next of other videos, so more training clips contain fewer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vflash_analysis import config, paths
from vflash_analysis.clips.lists import Clip, read_video_list
from vflash_analysis.clips.overlap import (
    Evaluated,
    Overlap,
    check_disjoint,
    video_id,
    without_overlaps,
)
from vflash_analysis.clips.suites import Suite, by_rank, load_suite, suite_videos
from vflash_analysis.config import ClipSettings
from vflash_analysis.errors import InputError

DRAW_SEED = 0  # of the order of training clips; sample seeds are the suites' own


@dataclass(frozen=True)
class TrainingClips:
    """What a drafter learns from, and what was left out of it.

    Attributes:
        training, validation: clips in order of rank.
        left_out: corpus clips that share a video with a suite, each with its reason.
    """

    training: list[Clip]
    validation: list[Clip]
    left_out: list[Overlap]


def load_corpus(name: str) -> Suite:
    """The description of a corpus of `data/training`."""
    return load_suite(paths.DATA / "training" / f"{name}.yaml")


def training_clips(settings: ClipSettings, data_root: Path, evaluated: Evaluated) -> TrainingClips:
    """Draw what a drafter learns from and is validated on.

    Args:
        settings: the profile's `clips`.
        data_root: `VFLASH_DATA`.
        evaluated: all videos of the profile's suites.

    Raises:
        InputError: no such corpus or list, too few clips, or an overlap in a list made by hand.
    """
    name, corpus = settings.training_list, settings.training_corpus
    if name is None:
        raise InputError(
            'clips.training_list: found null, allowed with source "suites": '
            f"{', '.join(config.corpus_names())}, or a JSONL file"
        )
    wanted = settings.training_clips + settings.validation_clips
    left_out: list[Overlap] = []
    if corpus is None:
        # The file's own name stays out of the rule: a renamed list is drawn alike.
        usable = by_rank(read_video_list(data_root / name), "custom", DRAW_SEED)
        validation, training = _split(usable, settings)
        check_disjoint([*validation, *training], evaluated)
    else:
        ranked = by_rank(suite_videos(load_corpus(corpus), data_root), corpus, DRAW_SEED)
        # More are looked at than wanted: some videos of the validation come again below it.
        usable, left_out = without_overlaps(ranked, evaluated, 2 * wanted)
        validation, training = _split(usable, settings)
    found = len(validation) + len(training)
    if found < wanted:
        less = f" beside the {len(left_out)} that suites share" if left_out else ""
        raise InputError(
            f"clips.training_clips: found {found} clips in {name}{less}, allowed: {wanted} or "
            "more (training and validation)"
        )
    return TrainingClips(training, validation, left_out)


def _split(ranked: Sequence[Clip], settings: ClipSettings) -> tuple[list[Clip], list[Clip]]:
    """The first clips for validation, then those of other videos for training."""
    validation = list(ranked[: settings.validation_clips])
    held = {video_id(clip.path) or clip.path for clip in validation}
    rest = [
        clip
        for clip in ranked[settings.validation_clips :]
        if (video_id(clip.path) or clip.path) not in held
    ]
    return validation, rest[: settings.training_clips]
