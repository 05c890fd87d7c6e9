"""Clips of public suites and training corpora from local folders: adapters and fixed draws.

A suite is one YAML file in `data/suites/` (hub id, revision, licence, layout, prompt rule) and one
function that reads its metadata; a training corpus is the same in `data/training/`. Videos are
never downloaded: `VFLASH_DATA` names a folder that holds the datasets as the hub lays them out,
`<VFLASH_DATA>/<org>/<name>` or `<VFLASH_DATA>/<name>`.

    suite = load_suite(DATA / "suites" / "VDC.yaml")
    clips = suite_clips(suite, config.data_folder(), sample_seed=0, n_clips=50)
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vflash_analysis import paths, strict
from vflash_analysis.clips import mvbench
from vflash_analysis.clips.lists import Clip, need_text
from vflash_analysis.clips.metadata import Video, json_rows, parquet_rows, split_ending
from vflash_analysis.clips.overlap import video_id
from vflash_analysis.errors import InputError
from vflash_analysis.strict import BELOW, PATTERN, is_below, shown

# The neighbours' prompt for every suite but VideoDetailCaption (SpecVLM's published script and
# paper, appendix A).
DESCRIPTION_PROMPT = (
    "Please provide a detailed description of the video, focusing on the main subjects, "
    "their actions, and the background scenes."
)

# Keys of a suite file that no clip hangs on; `clips.inventory` reads some of them.
FOR_THE_READER = (
    "title", "licence", "gated", "download_bytes", "download", "layout", "prompt_source",
    "expected_clips", "other_tasks", "notes", "unverified",
)  # fmt: skip


# ---------------------------------------------------------------- a suite's description


AdapterName = Literal[
    "video_detail_caption",
    "video_mme",
    "mvbench",
    "mlvu",
    "mlvu_dev",
    "long_video_bench",
    "llava_video",
]


@dataclass(frozen=True)
class Task:
    """One task of a suite that keeps a file per task: the task's name and its folder of clips."""

    name: str
    folder: Annotated[str, BELOW]


@dataclass(frozen=True)
class ExpectedPrompt:
    """Tokens of a whole prompt, video included, as published for a number of frames."""

    num_frames: int
    tokens: int


@dataclass(frozen=True)
class MainFolder:
    """A task's folder of clips on MVBench's revision `video`, and the one it stands for on `main`."""

    folder: str
    main: Annotated[str, BELOW]


@dataclass(frozen=True)
class Packing:
    """Another dataset on the hub that holds the same suite: the keys in which it differs."""

    hub_id: Annotated[str, BELOW]
    adapter: AdapterName
    metadata: Annotated[str, PATTERN]
    videos: Annotated[str, BELOW]
    archives: Annotated[str, PATTERN] | None


@dataclass(frozen=True)
class Suite:
    """One YAML file of `data/suites/`: where a public suite comes from and how its folder is read.

    Attributes:
        name: benchmark column. adapter: a key of `ADAPTERS`.
        hub_id, other_hub_ids: dataset names on the hub, the papers' own first.
        split: as the hub's card says.
        metadata, videos: a file pattern and a folder inside the dataset's folder; `videos` may be a
            pattern of folders.
        extensions: tried in this order after the name that the metadata gives.
        prompt: "question" asks the row's own question, "description" `DESCRIPTION_PROMPT`.
        tasks: for suites with a file per task; clips are drawn from all of these.
        revision: branch of the hub; MVBench's two are laid out differently.
        archives: pattern of the files that unpack to `videos`.
        main_folders: those that `main` calls otherwise. withdrawn: tasks whose videos it lost.
        other_packings: looked for after the suite's own.
        question: one of the suite's own as it is documented, where the rule is "question".
        expected_prompt_tokens: what the paper's prompts come to, to check one's own by.
    """

    name: str
    adapter: AdapterName
    hub_id: Annotated[str, BELOW]
    other_hub_ids: tuple[Annotated[str, BELOW], ...] | None
    split: str
    metadata: Annotated[str, PATTERN]
    videos: Annotated[str, BELOW]
    extensions: tuple[str, ...]
    prompt: Literal["question", "description"]
    tasks: tuple[Task, ...] | None
    revision: str | None = None
    archives: Annotated[str, PATTERN] | None = None
    main_folders: tuple[MainFolder, ...] | None = None
    withdrawn: tuple[str, ...] | None = None
    other_packings: tuple[Packing, ...] | None = None
    question: str | None = None
    expected_prompt_tokens: ExpectedPrompt | None = None


def load_suite(path: str | os.PathLike[str]) -> Suite:
    """Read one suite's YAML file; keys that have a default may be left out.

    Raises:
        InputError: unreadable, or an unknown, missing or mistyped key, by name.
    """
    path = Path(path)
    fields = dataclasses.fields(Suite)
    left_out = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return strict.build(Suite, {**left_out, **read_description(path)}, path.name)


def read_description(path: Path) -> dict[str, Any]:
    """A suite's or corpus's YAML without what only tells its reader something, in its packings too.

    What is left decides the clips, and so enters what a run is known by.
    """
    keys = strict.read_yaml(path)
    packings = keys.get("other_packings")
    if isinstance(packings, list):
        keys["other_packings"] = [_for_clips(p) if isinstance(p, dict) else p for p in packings]
    return _for_clips(keys)


def _for_clips(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in FOR_THE_READER}


def load_suites(folder: str | os.PathLike[str]) -> dict[str, Suite]:
    """Return every suite described in a folder, by name."""
    suites = [load_suite(path) for path in sorted(Path(folder).glob("*.yaml"))]
    if not suites:
        raise InputError(
            f"{folder}: no suite is described there; allowed is a folder of *.yaml files"
        )
    return {suite.name: suite for suite in suites}


def chosen_suites(benchmarks: Iterable[str]) -> dict[str, Suite]:
    """Return the suites of a profile, as `data/suites` describes them, by name.

    Raises:
        InputError: one has no file there; see `load_suite`.
    """
    return {name: load_suite(paths.DATA / "suites" / f"{name}.yaml") for name in benchmarks}


class DatasetNotThere(InputError):
    """None of the places where a suite's metadata may lie holds them."""


def find_dataset(suite: Suite, data_root: str | os.PathLike[str]) -> tuple[Suite, Path]:
    """Return the suite as it is packed below `data_root` (`VFLASH_DATA`), and its folder there.

    Raises:
        DatasetNotThere: it is in none of the places it may be in.
    """
    others = [
        dataclasses.replace(suite, other_hub_ids=None, **dataclasses.asdict(packing))
        for packing in suite.other_packings or ()
    ]
    looked = []
    for packed in (suite, *others):
        for hub_id in (packed.hub_id, *(packed.other_hub_ids or ())):
            for place in (Path(data_root) / hub_id, Path(data_root) / hub_id.split("/")[-1]):
                if any(place.glob(packed.metadata.replace("{task}", "*"))):
                    return dataclasses.replace(packed, hub_id=hub_id), place
                looked.append(f"{place}/{packed.metadata}")
    raise DatasetNotThere(
        f"{suite.name}: {suite.metadata} of {suite.hub_id} was not found; "
        f"looked for {', '.join(looked)}"
    )


def _refuse_packed_videos(suite: Suite, folder: Path) -> None:
    """Raise InputError where there are archives of videos and nothing that they unpack to."""
    packed = sorted(folder.glob(suite.archives)) if suite.archives else []
    if not packed:
        return
    roots = [root for root in _video_roots(suite, folder) if root.is_dir()]
    if "*" in suite.videos:  # which folder they unpack to is not known, but what is in it
        unpacked = any(split_ending(file.name)[1] for root in roots for file in root.iterdir())
    else:
        unpacked = bool(roots)
    if not unpacked:
        raise InputError(
            f"{suite.name}: {folder / suite.videos}: found no videos; {packed[0].name}"
            f"{f' and {len(packed) - 1} more' if packed[1:] else ''} must be unpacked in {folder}"
        )


def _video_roots(suite: Suite, folder: Path) -> list[Path]:
    """Return the folders that video names count from."""
    if "*" not in suite.videos:
        return [folder / suite.videos]
    found = [root for root in folder.glob(suite.videos) if root.is_dir()]
    seen = [r for r in found if not any(p[:1] == "." for p in r.relative_to(folder).parts)]
    return sorted(seen) or [folder / suite.videos]  # which names what a missing clip lacks


# ---------------------------------------------------------------- adapters


def _video_detail_caption(suite: Suite, folder: Path) -> list[Video]:
    fields = ["video_name", "question", "answer"]
    return [
        Video(row["video_name"], row["video_name"], row["question"], row["answer"])
        for row in parquet_rows(folder, suite.metadata, fields)
    ]


def _video_mme(suite: Suite, folder: Path) -> list[Video]:
    rows = parquet_rows(folder, suite.metadata, ["videoID"])
    return [Video(row["videoID"], row["videoID"]) for row in rows]


def _mlvu(suite: Suite, folder: Path) -> list[Video]:
    videos = []
    for metadata in sorted(folder.glob(suite.metadata)):
        for row in json_rows(metadata, ["video"]):
            # The task's folder belongs to the id: tasks use the same file names.
            file = f"{metadata.stem}/{row['video']}"
            videos.append(Video(split_ending(file)[0], file))
    return videos


def _mlvu_dev(suite: Suite, folder: Path) -> list[Video]:
    rows = parquet_rows(folder, suite.metadata, ["video_name"])
    return [Video(split_ending(row["video_name"])[0], row["video_name"]) for row in rows]


def _long_video_bench(suite: Suite, folder: Path) -> list[Video]:
    rows = json_rows(folder / suite.metadata, ["video_id", "video_path"])
    return [Video(row["video_id"], row["video_path"]) for row in rows]


def _llava_video(suite: Suite, folder: Path) -> list[Video]:
    """Conversations about videos: a JSON file and an unpacked folder of videos per subset (task)."""
    videos = []
    for task in suite.tasks or ():
        pattern = suite.metadata.replace("{task}", task.name)
        files = sorted(folder.glob(pattern))
        if not files:  # a draw from some of the subsets would be another draw
            raise InputError(
                f"{suite.name}: {folder / pattern} was not found; all tasks are needed"
            )
        for metadata in files:
            for number, row in enumerate(json_rows(metadata, ["video"])):
                place = f"{metadata}, row {number}"
                asked, answered = _first_exchange(place, row.get("conversations"))
                file = f"{task.folder}/{row['video']}"
                videos.append(Video(split_ending(file)[0], file, asked, answered))
    return videos


def _first_exchange(place: str, turns: Any) -> tuple[str, str]:
    """The first question, without the placeholder of the pictures, and its answer."""
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(t, dict) for t in turns):
        raise InputError(f"{place}: conversations is no list of two turns or more")
    asked, answered = (need_text(f"{place}, a turn", turn, "value") for turn in turns[:2])
    return asked.replace("<image>", "").replace("<video>", "").strip(), answered


ADAPTERS: dict[str, Callable[[Suite, Path], list[Video]]] = {
    "video_detail_caption": _video_detail_caption,
    "video_mme": _video_mme,
    "mvbench": mvbench.list_clips,
    "mlvu": _mlvu,
    "mlvu_dev": _mlvu_dev,
    "long_video_bench": _long_video_bench,
    "llava_video": _llava_video,
}


# ---------------------------------------------------------------- from a suite to clips


def suite_videos(suite: Suite, data_root: str | os.PathLike[str]) -> list[Clip]:
    """Return every different video of a suite as a clip, sorted by id, with or without its file.

    Rows of one video, or of one stretch of it, are one clip: under a description prompt its
    questions would all give the same text.

    Raises:
        InputError: the dataset's folder or metadata is missing or not as described, or its archives
            are not unpacked.
    """
    suite, folder = find_dataset(suite, data_root)
    _refuse_packed_videos(suite, folder)
    videos: dict[str, Video] = {}
    for video in ADAPTERS[suite.adapter](suite, folder):
        videos.setdefault(video.clip_id, video)
    if not videos:
        raise InputError(f"{folder}: {suite.metadata} lists no videos")
    roots = _video_roots(suite, folder)
    clips = []
    for clip_id, video in sorted(videos.items()):
        prompt = DESCRIPTION_PROMPT if suite.prompt == "description" else video.question
        if not prompt:
            raise InputError(
                f"{suite.name}: {clip_id} has no question, and the prompt rule is 'question'"
            )
        if not is_below(video.file):
            raise InputError(
                f"{folder}/{suite.metadata}: video: found {shown(video.file)}, allowed: {BELOW}"
            )
        clip = Clip(
            clip_id,
            suite.name,
            suite.split,
            _find_file(roots, video, suite.extensions),
            prompt,
            video.answer,
            start_s=video.start_s,
            end_s=video.end_s,
            frames_per_s=video.frames_per_s,
        )
        clips.append(clip)
    return clips


def _find_file(roots: Sequence[Path], video: Video, extensions: Sequence[str]) -> str:
    """Return the first name that exists, else the first: a missing clip needs a path to report.

    A name is also tried without its own extension: some files were converted, and the metadata not.
    """
    is_there = os.path.isfile if video.frames_per_s is None else os.path.isdir
    names = [
        f"{base}{extension}"
        for file in (video.file, video.other_file)
        if file is not None
        for root in roots
        for base in dict.fromkeys((str(root / file), str(root / split_ending(file)[0])))
        for extension in extensions
    ]
    return os.path.abspath(next((name for name in names if is_there(name)), names[0]))


def by_rank(clips: Iterable[Clip], name: str, seed: int) -> list[Clip]:
    """Clips by the SHA-256 of "name/seed/clip_id", lowest first, each id once.

    The order depends on nothing else: not on the order of rows, on a random library's version, or
    on which files are there.
    """

    def rank(clip: Clip) -> str:
        return hashlib.sha256(f"{name}/{seed}/{clip.clip_id}".encode()).hexdigest()

    return sorted({clip.clip_id: clip for clip in clips}.values(), key=rank)


def draw_clips(clips: Iterable[Clip], benchmark: str, sample_seed: int, n_clips: int) -> list[Clip]:
    """Draw clips of different videos: the first of each video in the order of `by_rank`.

    A video is a file, or all files that bear one YouTube or Charades id: MVBench cuts several clips
    from one video, on one revision by bounds, on the other beforehand.

    A shorter draw is the beginning of a longer one. Draws of different seeds may share clips.

    Raises:
        InputError: fewer videos than asked for.
    """
    of_video: dict[str, Clip] = {}
    for clip in by_rank(clips, benchmark, sample_seed):
        of_video.setdefault(video_id(clip.path) or clip.path, clip)
    if not 1 <= n_clips <= len(of_video):
        raise InputError(
            f"{benchmark}: {n_clips} clips asked for; it has {len(of_video)} videos, so "
            f"allowed are 1 to {len(of_video)}"
        )
    return list(of_video.values())[:n_clips]


def suite_clips(
    suite: Suite, data_root: str | os.PathLike[str], sample_seed: int, n_clips: int
) -> list[Clip]:
    """Return the fixed clip list of a suite and sample seed (see `draw_clips`).

    Clips whose file is not there stay in the list, so that a run reports them by name ("missing")
    and a partly downloaded suite never shifts the draw.

    Raises:
        InputError: folder or metadata missing or not as described, or fewer videos than asked for.
    """
    return draw_clips(suite_videos(suite, data_root), suite.name, sample_seed, n_clips)
