"""What data is there, what is missing, and the commands that bring it; nothing is downloaded here.

    vflash doctor --data --profile h100

Every suite and training corpus of a profile is looked for below `VFLASH_DATA`: its metadata, the
videos that they list, the clips that would be drawn, and the hub's commit that the files came from
(`hf download --local-dir` leaves it beside them). A run on the suites refuses by the same look.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vflash_analysis import config, paths, strict
from vflash_analysis.clips import corpora, frozen
from vflash_analysis.clips.lists import Clip, read_video_list
from vflash_analysis.clips.overlap import Evaluated
from vflash_analysis.clips.read import file_fault
from vflash_analysis.clips.suites import DatasetNotThere, find_dataset, load_suite, suite_videos
from vflash_analysis.config import ClipSettings
from vflash_analysis.environment import free_disk_bytes
from vflash_analysis.errors import InputError
from vflash_analysis.hub import ABBREVIATION, folder_commits, is_commit


@dataclass(frozen=True)
class Download:
    """The `download` section of a description.

    Attributes:
        include: patterns of the files that are needed; None for all.
        unpack: shell commands for the dataset's folder; None where nothing is packed.
    """

    include: tuple[str, ...] | None
    unpack: tuple[str, ...] | None


@dataclass(frozen=True)
class Card:
    """What a description in `data/suites` or `data/training` says of its dataset as a whole.

    Attributes:
        revision: commit (or its beginning) or branch of the hub; None is the default branch.
        gated: whether a form must be accepted before the hub hands anything out.
        download_bytes: size of the needed files; None where nobody has stated it.
        expected_clips: different videos, where known.
    """

    name: str
    hub_id: str
    revision: str | None
    licence: str
    gated: bool
    download_bytes: int | None
    expected_clips: int | None
    download: Download


@dataclass(frozen=True)
class Holding:
    """One suite or training corpus as it is on this machine.

    Attributes:
        name: of the suite or corpus, or of a list made by hand.
        card: None for a list made by hand.
        folder: where its metadata are; None where they are not.
        listed, found: videos in the metadata, and those of them whose files are there.
        drawn, drawn_found: the same of the clips that a run uses.
        commits: of the hub, that its files came from; empty where nothing tells.
        faults: why a run cannot use it, a line each.
        gaps: what a run would report and go on without, a line each.
    """

    name: str
    card: Card | None
    folder: Path | None = None
    listed: int = 0
    found: int = 0
    drawn: int = 0
    drawn_found: int = 0
    commits: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.faults and not self.gaps


def load_card(path: Path, hub_id: str | None = None) -> Card:
    """Read what a description says of its dataset, or of the packing with another hub id.

    Raises:
        InputError: a missing or mistyped key, by name.
    """
    keys = strict.read_yaml(path)
    if hub_id is not None:
        others = {one["hub_id"]: one for one in keys.get("other_packings") or ()}
        own = (
            {"revision": None, "expected_clips": None, **others[hub_id]} if hub_id in others else {}
        )
        keys |= {"hub_id": hub_id, **own}
    used = {field.name for field in dataclasses.fields(Card)}
    return strict.build(Card, {k: v for k, v in keys.items() if k in used}, path.name)


def commands(card: Card, data_root: Path | None, folder: Path | None = None) -> list[str]:
    """Shell lines that download and unpack a dataset.

    Args:
        data_root: `VFLASH_DATA`; None where it is not set.
        folder: where a part of the dataset lies; where its adapter looks first when None.
    """
    if data_root is None:
        place = f'"$VFLASH_DATA"/{shlex.quote(card.hub_id)}'
    else:
        place = shlex.quote(str(folder or data_root / card.hub_id))
    words = ["hf download", shlex.quote(card.hub_id), "--repo-type dataset"]
    if card.revision:
        words.append(f"--revision {shlex.quote(card.revision)}")
    words += [f"--include {shlex.quote(pattern)}" for pattern in card.download.include or ()]
    lines = [" ".join([*words, f"--local-dir {place}"])]
    lines += [f"(cd {place} && {command})" for command in card.download.unpack or ()]
    if card.gated:
        form = f"https://huggingface.co/datasets/{card.hub_id}"
        lines.insert(0, f"# first accept the form at {form}, then: hf auth login")
    return lines


# ---------------------------------------------------------------- looking


def take_stock(settings: ClipSettings, data_root: Path | None) -> list[Holding]:
    """Look for every suite of a profile and for its training clips; opens no video.

    Args:
        settings: the profile's `clips`, of source "suites".
        data_root: `VFLASH_DATA`; None where it is not set.
    """
    holdings, every_video = [], []
    for name in settings.benchmarks:
        path = paths.DATA / "suites" / f"{name}.yaml"
        holding, videos = _look(path, data_root)
        every_video += videos
        if holding.folder is not None and not holding.faults:
            draw = functools.partial(_drawn, path, videos, holding.folder, settings)
            holding = _with_drawn(holding, settings, draw)
        holdings.append(holding)
    if settings.training_corpus:
        path = paths.DATA / "training" / f"{settings.training_corpus}.yaml"
        holding, _ = _look(path, data_root)
    else:
        holding = _look_for_list(settings.training_list, data_root)
    if not holding.faults and data_root is not None:
        evaluated = Evaluated(every_video)
        holding = _with_drawn(holding, settings, lambda: _learnt(settings, data_root, evaluated))
    return [*holdings, holding]


def _look(path: Path, data_root: Path | None) -> tuple[Holding, list[Clip]]:
    """A dataset without its draw, and its videos; what keeps it from being read is its fault."""
    card, suite, folder = load_card(path), load_suite(path), None
    try:
        root = config.need_data(data_root)
        packed, folder = find_dataset(suite, root)
        card = load_card(path, packed.hub_id)
        videos = suite_videos(suite, root)
    except DatasetNotThere as error:
        form = f"; {card.hub_id} is handed out after its form has been accepted"
        return Holding(card.name, card, faults=(f"{error}{form if card.gated else ''}",)), []
    except InputError as error:
        return Holding(card.name, card, folder, faults=(str(error),)), []
    commits, faults, gaps = folder_commits(folder), [], []
    if card.revision and ABBREVIATION.fullmatch(card.revision):
        others = [commit for commit in commits if not is_commit(commit, card.revision)]
        faults += [
            f"{card.name}: files below {folder} are of commit {commit}, allowed: {card.revision}"
            for commit in others
        ]
    elif len(commits) > 1:
        gaps.append(f"{card.name}: files below {folder} are of {len(commits)} commits of the hub")
    if card.expected_clips not in (None, len(videos)):
        gaps.append(
            f"{card.name}: {len(videos)} videos are listed, expected: {card.expected_clips}; "
            "another revision draws other clips"
        )
    found = sum(file_fault(clip) is None for clip in videos)
    holding = Holding(
        card.name,
        card,
        folder,
        len(videos),
        found,
        commits=commits,
        faults=tuple(faults),
        gaps=tuple(gaps),
    )
    return holding, videos


def _look_for_list(name: str | None, data_root: Path | None) -> Holding:
    if name is None:
        told = f"clips.training_list: found null, allowed: {', '.join(config.corpus_names())}"
        return Holding("training", None, faults=(f"{told}, or a JSONL file",))
    try:
        clips = read_video_list(config.need_data(data_root) / name)
    except InputError as error:
        return Holding(name, None, faults=(str(error),))
    found = sum(file_fault(clip) is None for clip in clips)
    return Holding(name, None, data_root, len(clips), found)


def _drawn(path: Path, videos: Sequence[Clip], folder: Path, settings: ClipSettings) -> list[Clip]:
    """A suite's clips of all sample seeds, each once, as the clips stage chooses them."""
    suite = load_suite(path)
    chosen: dict[str, Clip] = {}
    for seed in settings.sample_seeds:
        clips, _ = frozen.chosen_clips(settings, suite, seed, videos, folder)
        chosen |= {clip.clip_id: clip for clip in clips}
    return list(chosen.values())


def _learnt(settings: ClipSettings, data_root: Path, evaluated: Evaluated) -> list[Clip]:
    learnt = corpora.training_clips(settings, data_root, evaluated)
    return [*learnt.validation, *learnt.training]


def _with_drawn(holding: Holding, settings: ClipSettings, draw: Any) -> Holding:
    """The holding with its drawn clips counted; a draw without a file is a fault."""
    try:
        drawn = draw()
    except InputError as error:
        return dataclasses.replace(holding, faults=(*holding.faults, str(error)))
    absent = [fault for clip in drawn if (fault := file_fault(clip))]
    n_found = len(drawn) - len(absent)
    faults, gaps = list(holding.faults), list(holding.gaps)
    if absent:
        told = (
            f"{holding.name}: {n_found} of {len(drawn)} drawn videos are there, first not: "
            f"{absent[0]}"
        )
        whole = settings.on_bad_clip == "fail" or not n_found
        (faults if whole else gaps).append(told)
    return dataclasses.replace(
        holding,
        drawn=len(drawn),
        drawn_found=n_found,
        faults=tuple(faults),
        gaps=tuple(gaps),
    )


# ---------------------------------------------------------------- telling


def refusals(settings: ClipSettings) -> list[str]:
    """Why a run on the suites cannot begin, one line per cause; empty where it can."""
    if settings.source != "suites":
        return []
    try:
        root = config.data_folder()
    except InputError as error:
        return [str(error)]
    return [fault for holding in take_stock(settings, root) for fault in holding.faults]


def free_gb(data_root: Path | None) -> float:
    """Free disk, 1e9 bytes, where the data would go."""
    return free_disk_bytes(Path(os.path.realpath(data_root or paths.ROOT))) / 1e9


def as_row(holding: Holding, data_root: Path | None) -> dict[str, Any]:
    """A holding as JSON types, with the commands for what is missing."""
    card = holding.card
    row: dict[str, Any] = {
        "name": holding.name,
        "hub_id": card and card.hub_id,
        "licence": card and card.licence,
        "gated": card and card.gated,
        "revision": card and card.revision,
        "commits": list(holding.commits),
        "download_bytes": card and card.download_bytes,
        "folder": str(holding.folder) if holding.folder else None,
        "videos_expected": card and card.expected_clips,
    }
    for name in ("listed", "found", "drawn", "drawn_found"):
        row[name] = getattr(holding, name)
    row |= {"faults": list(holding.faults), "gaps": list(holding.gaps)}
    wanted = card is not None and not holding.complete
    return row | {"commands": commands(card, data_root, holding.folder) if card and wanted else []}


def disk_line(holdings: Sequence[Holding], data_root: Path | None) -> str:
    """What is still to be downloaded against the free disk."""
    lacking = [h.card for h in holdings if h.card and not h.complete]
    known = sum(card.download_bytes or 0 for card in lacking) / 1e9
    unknown = [card.name for card in lacking if card.download_bytes is None]
    more = f", and {', '.join(unknown)} of unknown size" if unknown else ""
    twice = "; packed ones need as much again while they are unpacked" if known else ""
    return f"to download {known:.0f} GB{more}{twice}; free {free_gb(data_root):.0f} GB"


def shown(holding: Holding, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `as_row` as a person reads it in the doctor's table."""
    told = {
        **row,
        "state": "ok" if holding.complete else "MISSING",
        "videos": f"{row['found']} of {row['videos_expected'] or row['listed'] or '?'}",
        "drawn": f"{row['drawn_found']} of {row['drawn'] or '?'}",
        "GB": f"{row['download_bytes'] / 1e9:.0f}" if row["download_bytes"] else "",
        "gated": {True: "form", False: "no"}.get(row["gated"], ""),
    }
    return {name: "" if value is None else value for name, value in told.items()}
