"""Training clips for the real suites: a corpus of `data/training`, or a list made by hand.

`clips.training_list` names either: `LLaVA-Video-178K` is `data/training/LLaVA-Video-178K.yaml`, and
`training.jsonl` is a file of video + prompt lines below `VFLASH_DATA`. Both are put in order by the
rule by which suites are drawn, lowest hash first (`suites.draw_clip_ids`), so neither the order of
rows nor which files are there decides what is learnt from. Validation takes the first clips and
training the next, so more training clips contain fewer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vflash_analysis import config, paths
from vflash_analysis.clips.lists import Clip, read_video_list
from vflash_analysis.clips.overlap import Evaluated, Overlap, check_disjoint, without_overlaps
from vflash_analysis.clips.suites import Suite, draw_clip_ids, load_suite, suite_videos
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


def in_order(clips: Sequence[Clip], name: str) -> list[Clip]:
    """Clips of a corpus by rank: lowest SHA-256 of "name/DRAW_SEED/clip_id" first."""
    by_id = {clip.clip_id: clip for clip in clips}
    if not by_id:
        return []
    return [by_id[i] for i in draw_clip_ids(by_id, name, DRAW_SEED, len(by_id))]


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
    n_validation = settings.validation_clips
    wanted = settings.training_clips + n_validation
    left_out: list[Overlap] = []
    if corpus is None:
        # The file's own name stays out of the rule: a renamed list is drawn alike.
        taken = in_order(read_video_list(data_root / name), "custom")[:wanted]
        check_disjoint(taken, evaluated)
    else:
        ranked = in_order(suite_videos(load_corpus(corpus), data_root), corpus)
        taken, left_out = without_overlaps(ranked, evaluated, wanted)
    if len(taken) < wanted:
        less = f" beside the {len(left_out)} that suites share" if left_out else ""
        raise InputError(
            f"clips.training_clips: found {len(taken)} clips in {name}{less}, allowed: {wanted} or "
            "more (training and validation)"
        )
    return TrainingClips(taken[n_validation:], taken[:n_validation], left_out)
