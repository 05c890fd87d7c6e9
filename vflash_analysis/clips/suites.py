"""Clips of public suites and training corpora from local folders: adapters and fixed draws.

A suite is one YAML file in `data/suites/` (hub id, revision, licence, layout, prompt rule) and one
function here that reads its metadata; a training corpus is the same in `data/training/`. Videos are never downloaded: `VFLASH_DATA` names a folder
that holds the datasets as the hub lays them out, `<VFLASH_DATA>/<org>/<name>` or
`<VFLASH_DATA>/<name>`.

    suite = load_suite(DATA / "suites" / "VDC.yaml")
    clips = suite_clips(suite, config.data_folder(), sample_seed=0, n_clips=50)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vflash_analysis import strict
from vflash_analysis.clips.lists import Clip, need_text, read_video_list
from vflash_analysis.errors import InputError
from vflash_analysis.records import read_json

# The neighbours' prompt for every suite but VideoDetailCaption (SpecVLM's published script and
# paper, appendix A).
DESCRIPTION_PROMPT = (
    "Please provide a detailed description of the video, focusing on the main subjects, "
    "their actions, and the background scenes."
)

# Keys of a suite file that no clip hangs on; `clips.inventory` reads some of them.
FOR_THE_READER = (
    "title", "revision", "licence", "gated", "download_bytes", "download", "expected_clips",
    "notes", "unverified",
)  # fmt: skip


# ---------------------------------------------------------------- a suite's description


@dataclass(frozen=True)
class Task:
    """One task of a suite that keeps a file per task: the task's name and its folder of clips."""

    name: str
    folder: str


@dataclass(frozen=True)
class Suite:
    """One YAML file of `data/suites/`: where a public suite comes from and how its folder is read.

    Attributes:
        name: benchmark column. adapter: a key of `ADAPTERS`.
        hub_id, other_hub_ids: dataset names on the hub, the papers' own first.
        split: as the hub's card says.
        metadata, videos: a file pattern and a folder inside the dataset's folder.
        extensions: tried in this order after the name that the metadata gives.
        prompt: "question" asks the row's own question, "description" `DESCRIPTION_PROMPT`.
        tasks: for suites with a file per task.
    """

    name: str
    adapter: Literal[
        "video_detail_caption",
        "video_mme",
        "mvbench",
        "mlvu",
        "long_video_bench",
        "llava_video",
        "jsonl",
    ]
    hub_id: str
    other_hub_ids: tuple[str, ...] | None
    split: str
    metadata: str
    videos: str
    extensions: tuple[str, ...]
    prompt: Literal["question", "description"]
    tasks: tuple[Task, ...] | None


def load_suite(path: str | os.PathLike[str]) -> Suite:
    """Read one suite's YAML file.

    Raises:
        InputError: unreadable, or an unknown, missing or mistyped key, by name.
    """
    path = Path(path)
    keys = strict.read_yaml(path)
    used = {key: value for key, value in keys.items() if key not in FOR_THE_READER}
    return strict.build(Suite, used, path.name)


def load_suites(folder: str | os.PathLike[str]) -> dict[str, Suite]:
    """Return every suite described in a folder, by name."""
    suites = [load_suite(path) for path in sorted(Path(folder).glob("*.yaml"))]
    if not suites:
        raise InputError(
            f"{folder}: no suite is described there; allowed is a folder of *.yaml files"
        )
    return {suite.name: suite for suite in suites}


def find_dataset(suite: Suite, data_root: str | os.PathLike[str]) -> Path:
    """Return the suite's folder below `data_root` (`VFLASH_DATA`).

    Raises:
        InputError: it is in none of the places it may be in.
    """
    places = []
    for hub_id in (suite.hub_id, *(suite.other_hub_ids or ())):
        places += [Path(data_root) / hub_id, Path(data_root) / hub_id.split("/")[-1]]
    for place in places:
        if any(place.glob(suite.metadata.replace("{task}", "*"))):
            return place
    looked = ", ".join(str(place) for place in places)
    raise InputError(
        f"{suite.name}: {suite.metadata} of {suite.hub_id} was not found; looked in {looked}"
    )


# ---------------------------------------------------------------- adapters


@dataclass(frozen=True)
class _Video:
    """One video of a suite's metadata, before its file is looked for."""

    clip_id: str
    file: str  # relative to the suite's `videos` folder, with or without extension
    question: str | None = None
    answer: str | None = None


def _video_detail_caption(suite: Suite, folder: Path) -> list[_Video]:
    return [
        _Video(row["video_name"], row["video_name"], row["question"], row["answer"])
        for row in _parquet_rows(suite, folder, ["video_name", "question", "answer"])
    ]


def _video_mme(suite: Suite, folder: Path) -> list[_Video]:
    return [
        _Video(row["videoID"], row["videoID"]) for row in _parquet_rows(suite, folder, ["videoID"])
    ]


def _mvbench(suite: Suite, folder: Path) -> list[_Video]:
    videos = []
    for task in suite.tasks or ():
        for row in _json_rows(folder / suite.metadata.format(task=task.name), ["video"]):
            # The source's folder belongs to the id: two sources use the same file names.
            file = f"{task.folder}/{row['video']}"
            videos.append(_Video(os.path.splitext(file)[0], file))
    return videos


def _mlvu(suite: Suite, folder: Path) -> list[_Video]:
    videos = []
    for metadata in sorted(folder.glob(suite.metadata)):
        for row in _json_rows(metadata, ["video"]):
            file = f"{metadata.stem}/{row['video']}"
            videos.append(_Video(os.path.splitext(file)[0], file))
    return videos


def _long_video_bench(suite: Suite, folder: Path) -> list[_Video]:
    rows = _json_rows(folder / suite.metadata, ["video_id", "video_path"])
    return [_Video(row["video_id"], row["video_path"]) for row in rows]


def _llava_video(suite: Suite, folder: Path) -> list[_Video]:
    """Conversations about videos: a JSON file and an unpacked folder of videos per subset (task)."""
    videos = []
    for task in suite.tasks or ():
        pattern = suite.metadata.format(task=task.name)
        files = sorted(folder.glob(pattern))
        if not files:  # a draw from some of the subsets would be another draw
            raise InputError(
                f"{suite.name}: {folder / pattern} was not found; all tasks are needed"
            )
        for metadata in files:
            for number, row in enumerate(_json_rows(metadata, ["video"])):
                place = f"{metadata}, row {number}"
                asked, answered = _first_exchange(place, row.get("conversations"))
                file = f"{task.folder}/{row['video']}"
                videos.append(_Video(os.path.splitext(file)[0], file, asked, answered))
    return videos


def _first_exchange(place: str, turns: Any) -> tuple[str, str]:
    """The first question, without the placeholder of the pictures, and its answer."""
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(t, dict) for t in turns):
        raise InputError(f"{place}: conversations is no list of two turns or more")
    asked, answered = (need_text(f"{place}, a turn", turn, "value") for turn in turns[:2])
    return asked.replace("<image>", "").replace("<video>", "").strip(), answered


def _jsonl(suite: Suite, folder: Path) -> list[_Video]:
    """A corpus of the user's own: JSON lines with `video` (from the list's folder) and `prompt`."""
    lists = sorted(folder.glob(suite.metadata))
    clips = [clip for path in lists for clip in read_video_list(path)]
    return [_Video(clip.clip_id, clip.path, clip.prompt, clip.reference) for clip in clips]


ADAPTERS: dict[str, Callable[[Suite, Path], list[_Video]]] = {
    "video_detail_caption": _video_detail_caption,
    "video_mme": _video_mme,
    "mvbench": _mvbench,
    "mlvu": _mlvu,
    "long_video_bench": _long_video_bench,
    "llava_video": _llava_video,
    "jsonl": _jsonl,
}


def _parquet_rows(suite: Suite, folder: Path, columns: list[str]) -> Iterable[dict[str, Any]]:
    import pyarrow.parquet as parquet  # only the suites that come as Parquet need it

    for path in sorted(folder.glob(suite.metadata)):
        try:
            rows = parquet.read_table(path, columns=columns).to_pylist()
        except Exception as error:
            raise InputError(
                f"{path}: not a Parquet file with columns {columns} ({error})"
            ) from None
        yield from _complete(path, rows, columns)


def _json_rows(path: Path, fields: list[str]) -> list[dict[str, Any]]:
    return _complete(path, read_json(path), fields)


def _complete(path: Path, rows: Any, fields: list[str]) -> list[dict[str, Any]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: {type(rows).__name__}; allowed is a list of objects")
    for number, row in enumerate(rows):
        for name in fields:
            need_text(f"{path}, row {number}", row, name)
    return rows


# ---------------------------------------------------------------- from a suite to clips


def suite_videos(suite: Suite, data_root: str | os.PathLike[str]) -> list[Clip]:
    """Return every different video of a suite as a clip, sorted by id, with or without its file.

    Rows of one video are one clip: under a description prompt its questions would all give the same
    text.

    Raises:
        InputError: the dataset's folder or metadata is missing or not as described.
    """
    folder = find_dataset(suite, data_root)
    videos: dict[str, _Video] = {}
    for video in ADAPTERS[suite.adapter](suite, folder):
        videos.setdefault(video.clip_id, video)
    if not videos:
        raise InputError(f"{folder}: {suite.metadata} lists no videos")
    clips = []
    for clip_id, video in sorted(videos.items()):
        prompt = DESCRIPTION_PROMPT if suite.prompt == "description" else video.question
        if not prompt:
            raise InputError(
                f"{suite.name}: {clip_id} has no question, and the prompt rule is 'question'"
            )
        file = _find_file(folder / suite.videos / video.file, suite.extensions)
        clips.append(Clip(clip_id, suite.name, suite.split, file, prompt, video.answer))
    return clips


def _find_file(base: Path, extensions: Sequence[str]) -> str:
    """Return the first name that exists, else the first: a missing clip needs a path to report."""
    names = [f"{base}{extension}" for extension in extensions]
    return os.path.abspath(next((name for name in names if os.path.isfile(name)), names[0]))


def draw_clip_ids(
    clip_ids: Iterable[str], benchmark: str, sample_seed: int, n_clips: int
) -> list[str]:
    """Draw the ids with the lowest SHA-256 of "benchmark/sample_seed/clip_id", lowest first.

    The draw depends on nothing else: not on the order of rows, on a random library's version, or on
    which files are there. A shorter draw is the beginning of a longer one. Draws of different seeds
    may share clips.

    Raises:
        InputError: fewer different ids than asked for.
    """
    different = set(clip_ids)
    if not 1 <= n_clips <= len(different):
        raise InputError(
            f"{benchmark}: {n_clips} clips asked for; it has {len(different)}, so "
            f"allowed are 1 to {len(different)}"
        )

    def rank(clip_id: str) -> str:
        return hashlib.sha256(f"{benchmark}/{sample_seed}/{clip_id}".encode()).hexdigest()

    return sorted(different, key=rank)[:n_clips]


def suite_clips(
    suite: Suite, data_root: str | os.PathLike[str], sample_seed: int, n_clips: int
) -> list[Clip]:
    """Return the fixed clip list of a suite and sample seed, in the order of `draw_clip_ids`.

    Clips whose file is not there stay in the list, so that a run reports them by name ("missing")
    and a partly downloaded suite never shifts the draw.

    Raises:
        InputError: folder or metadata missing or not as described, or fewer videos than asked for.
    """
    clips = {clip.clip_id: clip for clip in suite_videos(suite, data_root)}
    return [clips[i] for i in draw_clip_ids(clips, suite.name, sample_seed, n_clips)]
