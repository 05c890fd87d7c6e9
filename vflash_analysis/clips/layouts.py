"""Pocket clips laid out as the hub has the five suites, to rehearse a run on them without the data.

    vflash clips rehearse FOLDER

Every writer mirrors one adapter of `clips.suites` and names what it wrote as the adapter will. Files
are real ones: copies, remuxes and lossless encodings of pocket clips in the containers of the
suites, several clips joined into one video with bounds, folders of frame images.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from vflash_analysis.clips import pocket
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.mvbench import CUT, PATCH, main_folder
from vflash_analysis.clips.suites import Suite, Task
from vflash_analysis.config import ClipSettings
from vflash_analysis.errors import InputError
from vflash_analysis.records import write_json_atomic, write_text_atomic

TICKS_PER_S = 120  # a multiple of every pocket clip's frame rate, so joining rounds no time stamp
LEAD_S = 1  # of plain grey before and after the clips of a joined video
IMAGES_PER_S = 3  # of a frame folder, as MVBench's TVQA source has them
LOSSLESS = {  # codec and options by extension; one thread, for the same bytes everywhere
    ".mp4": ("libx264", {"qp": "0", "bf": "0", "preset": "veryfast", "threads": "1"}),
    ".webm": ("libvpx-vp9", {"lossless": "1", "cpu-used": "8", "threads": "1"}),
    ".avi": ("libx264", {"qp": "0", "bf": "0", "preset": "veryfast", "threads": "1"}),
}
ENDINGS = (".mp4", ".MP4", ".mkv")  # in turn, where a suite has all three
MAIN_ENDINGS = {"ssv2_video": ".webm", "nturgbd": ".avi"}  # of MVBench's sources, .mp4 elsewhere
SPARE_CLIPS = 2  # per suite, more than are drawn, so that a draw leaves some out

Made = dict[str, Clip]  # the pocket clip by the id that the suite's adapter will give
Stretch = tuple[Clip, Path, float, float]  # a pocket clip, the joined video, its start and end, s


# ---------------------------------------------------------------- video files


def _frames_of(path: str | Path) -> tuple[list[av.VideoFrame], Fraction]:
    """All frames of a pocket clip, yuv420p, and its frame rate."""
    with av.open(str(path)) as held:
        rate = held.streams.video[0].average_rate
        assert rate is not None
        return list(held.decode(video=0)), rate


def encode_lossless(
    path: Path, frames: Sequence[av.VideoFrame], starts: Sequence[int], ticks_per_s: Fraction | int
) -> None:
    """Write yuv420p frames without loss; frame i starts at starts[i] / ticks_per_s seconds."""
    codec, options = LOSSLESS[path.suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(codec, rate=Fraction(ticks_per_s), options=options)
        stream.width, stream.height, stream.pix_fmt = frames[0].width, frames[0].height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, ticks_per_s)
        for frame, start in zip(frames, starts, strict=True):
            frame.pts, frame.time_base = start, Fraction(1, ticks_per_s)
            frame.pict_type = av.video.frame.PictureType.NONE  # else the source's order of types
            out.mux(stream.encode(frame))
        out.mux(stream.encode())


def _remux(source: str, target: Path) -> None:
    """The same packets in another container."""
    with av.open(source) as held, av.open(str(target), "w") as out:
        taken = held.streams.video[0]
        stream = out.add_stream_from_template(taken)
        for packet in held.demux(taken):
            if packet.size:
                packet.stream = stream
                out.mux(packet)


def place_video(clip: Clip, target: Path) -> Path:
    """Write a pocket clip under another name: the container is the name's, the pictures are its own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix.lower() == ".mp4":
        shutil.copyfile(clip.path, target)
    elif target.suffix == ".mkv":
        _remux(clip.path, target)
    else:
        frames, rate = _frames_of(clip.path)
        encode_lossless(target, frames, range(len(frames)), rate)
    return target


def join_clips(clips: Sequence[Clip], folder: Path) -> list[Stretch]:
    """Join pocket clips of one picture size into one longer video each, between plain stretches.

    Returns:
        Every clip with the video that holds it and its bounds there.
    """
    held = [(clip, *_frames_of(clip.path)) for clip in clips]
    by_size: dict[tuple[int, int], list[tuple[Clip, list[av.VideoFrame], Fraction]]] = {}
    for one in held:
        by_size.setdefault((one[1][0].width, one[1][0].height), []).append(one)
    found: list[Stretch] = []
    for (width, height), group in by_size.items():
        path = folder / f"{group[0][0].clip_id}-joined.mp4"
        frames, starts, now = [_plain(width, height)], [0], LEAD_S * TICKS_PER_S
        for clip, own, rate in group:
            ticks = int(TICKS_PER_S / rate)
            frames += own
            starts += [now + ticks * i for i in range(len(own))]
            ends = now + ticks * len(own)
            found.append((clip, path, now / TICKS_PER_S, ends / TICKS_PER_S))
            now = ends
        frames += [_plain(width, height), _plain(width, height)]
        encode_lossless(path, frames, [*starts, now, now + LEAD_S * TICKS_PER_S], TICKS_PER_S)
    return found


def _plain(width: int, height: int) -> av.VideoFrame:
    grey = np.full((height, width, 3), 128, np.uint8)
    return av.VideoFrame.from_ndarray(grey, format="rgb24").reformat(format="yuv420p")


def write_frame_folder(clip: Clip, folder: Path) -> int:
    """Write the frames on screen at every third of a second as `00001.jpg` and on; return how many."""
    frames, rate = _frames_of(clip.path)
    n_images = len(frames) * IMAGES_PER_S // rate
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n_images):
        picture = frames[int(number * rate / IMAGES_PER_S)].to_image()
        picture.save(folder / f"{number + 1:05d}.jpg", quality=95)
    return int(n_images)


# ---------------------------------------------------------------- the suites' layouts


def _write_parquet(folder: Path, suite: Suite, rows: list[dict[str, Any]]) -> None:
    path = folder / suite.metadata.replace("*", "00000-of-00001")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


def _question(clip: Clip, number: int = 0) -> dict[str, Any]:
    """The fields that a multiple-choice row has beside its video."""
    choices = [str(clip.reference), "Nothing of it.", "All of it."]
    return {"question": f"{number + 1}: {clip.prompt}", "candidates": choices, "answer": choices[0]}


def _video_detail_caption(suite: Suite, folder: Path, clips: Sequence[Clip]) -> Made:
    made, rows = {}, []
    for clip, ending in zip(clips, itertools.cycle(ENDINGS), strict=False):
        name = f"v_{clip.clip_id}"
        place_video(clip, folder / suite.videos / f"{name}{ending}")
        rows.append({"video_name": name, "question": clip.prompt, "answer": clip.reference})
        made[name] = clip
    _write_parquet(folder, suite, rows)
    return made


def _video_mme(suite: Suite, folder: Path, clips: Sequence[Clip]) -> Made:
    made, rows = {}, []
    for number, clip in enumerate(clips):
        ending = ENDINGS[number % len(ENDINGS)]
        name = f"-{clip.clip_id}"  # names of this kind begin with any character
        place_video(clip, folder / suite.videos / f"{name}{ending}")
        made[name] = clip
        for question in range(3):
            own = {"video_id": f"{number:03d}", "duration": "short", "videoID": name}
            rows.append(
                own | {"question_id": f"{number:03d}-{question}"} | _question(clip, question)
            )
    _write_parquet(folder, suite, rows)
    return made


def _mvbench(suite: Suite, folder: Path, clips: Sequence[Clip]) -> Made:
    made: Made = {}
    tasks = suite.tasks or ()
    for number, task in enumerate(tasks):
        own = clips[number :: len(tasks)]
        write = _mvbench_cut if suite.revision == "video" else _mvbench_main
        rows, of_task = write(suite, folder, task, own)
        rows.append(rows[0] | {"question": "The same clip, asked about again?"})
        write_json_atomic(folder / suite.metadata.replace("{task}", task.name), rows)
        made |= of_task
    return made


def _mvbench_cut(
    suite: Suite, folder: Path, task: Task, clips: Sequence[Clip]
) -> tuple[list[dict[str, Any]], Made]:
    rows, made = [], {}
    for number, clip in enumerate(clips):
        name = f"{clip.clip_id}_{LEAD_S}.3_9.8" if task.folder.endswith(CUT) else _shared(number)
        place_video(clip, folder / task.folder / f"{name}.mp4")
        rows.append({"video": f"{name}.mp4"} | _question(clip))
        made[f"{task.folder}/{name}"] = clip
    return rows, made


def _mvbench_main(
    suite: Suite, folder: Path, task: Task, clips: Sequence[Clip]
) -> tuple[list[dict[str, Any]], Made]:
    own = main_folder(suite, task)
    videos = folder / "video"
    rows, made = [], {}
    if own.startswith("tvqa"):
        for clip in clips:
            n_images = write_frame_folder(clip, videos / own / clip.clip_id)
            bounds = {"start": 0, "end": n_images / IMAGES_PER_S, "fps": IMAGES_PER_S}
            rows.append({"video": clip.clip_id} | bounds | _question(clip))
            made[f"{own}/{clip.clip_id}_{bounds['start']}_{bounds['end']}"] = clip
    elif task.folder.endswith(CUT):
        for clip, path, start, end in join_clips(clips, videos / own):
            rows.append({"video": path.name, "start": start, "end": end} | _question(clip))
            made[f"{own}/{path.stem}_{start}_{end}"] = clip
    else:
        ending = MAIN_ENDINGS.get(own, ".mp4")
        for number, clip in enumerate(clips):
            within = videos / PATCH / own if number == 0 else videos / own
            place_video(clip, within / f"{_shared(number)}{ending}")
            rows.append({"video": f"{_shared(number)}{ending}"} | _question(clip))
            made[f"{own}/{_shared(number)}"] = clip
        (videos / own).mkdir(parents=True, exist_ok=True)
    return rows, made


def _shared(number: int) -> str:
    """A name that two sources use, as CLEVRER and Perception Test do."""
    return f"video_{10000 + number}"


def _mlvu(suite: Suite, folder: Path, clips: Sequence[Clip]) -> Made:
    made: Made = {}
    tasks = ("1_plotQA", "2_needle")
    for number, task in enumerate(tasks):
        rows = []
        for place, clip in enumerate(clips[number :: len(tasks)]):
            name = f"{place + 1}.mp4"  # the same in both tasks, and another video
            place_video(clip, folder / suite.videos / task / name)
            rows += [{"video": name, "duration": 8} | _question(clip, again) for again in range(2)]
            made[f"{task}/{place + 1}"] = clip
        write_json_atomic(folder / suite.metadata.replace("*", task), rows)
    return made


def _mlvu_dev(suite: Suite, folder: Path, clips: Sequence[Clip]) -> Made:
    made, rows = {}, []
    for number, clip in enumerate(clips):
        place_video(clip, folder / f"video_part_{number % 2 + 1}" / f"{clip.clip_id}.mp4")
        own = {"video_name": f"{clip.clip_id}.mp4", "task_type": "1_plotQA"}
        rows += [own | _question(clip, again) for again in range(2)]
        made[clip.clip_id] = clip
    _write_parquet(folder, suite, rows)
    return made


def _long_video_bench(suite: Suite, folder: Path, clips: Sequence[Clip]) -> Made:
    made, rows = {}, []
    for clip in clips:
        place_video(clip, folder / suite.videos / f"{clip.clip_id}.mp4")
        for again in range(2):
            own = {"video_id": clip.clip_id, "id": f"{clip.clip_id}_{again}"}
            rows.append(own | {"video_path": f"{clip.clip_id}.mp4"} | _question(clip, again))
        made[clip.clip_id] = clip
    write_json_atomic(folder / suite.metadata, rows)
    return made


LAYOUTS: dict[str, Callable[[Suite, Path, Sequence[Clip]], Made]] = {
    "video_detail_caption": _video_detail_caption,
    "video_mme": _video_mme,
    "mvbench": _mvbench,
    "mlvu": _mlvu,
    "mlvu_dev": _mlvu_dev,
    "long_video_bench": _long_video_bench,
}


def write_layout(suite: Suite, data_root: Path, clips: Sequence[Clip]) -> Made:
    """Write pocket clips as one suite's dataset below `data_root`, by its adapter and revision.

    Returns:
        The pocket clip by the id that `suite_videos` gives it.

    Raises:
        InputError: no layout is written for this adapter.
    """
    if suite.adapter not in LAYOUTS:
        raise InputError(
            f"{suite.name}: adapter: found {suite.adapter!r}, allowed in a rehearsal: "
            f"{', '.join(LAYOUTS)}"
        )
    return LAYOUTS[suite.adapter](suite, data_root / suite.hub_id, clips)


def write_layouts(
    folder: Path, settings: ClipSettings, described: Mapping[str, Suite]
) -> dict[str, Made]:
    """Write a folder that can stand in for `VFLASH_DATA`: five datasets and `training.jsonl`.

    Args:
        folder: new or empty; the pocket clips themselves go to `pocket` in it.
        settings: how many clips each list needs.
        described: the suites by name.

    Returns:
        By suite what `write_layout` gives.

    Raises:
        InputError: a folder that holds something: it may be the real data.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: holds something; allowed is a new or an empty folder")
    n_clips = settings.clips_per_suite_all + SPARE_CLIPS
    clips = pocket.make_split("suites", n_clips, folder / "pocket")
    made = {
        name: write_layout(suite, folder, [clip for clip in clips if clip.benchmark == name])
        for name, suite in described.items()
    }
    n_training = settings.training_clips + settings.validation_clips
    per_family = -(-n_training // len(pocket.FAMILIES))
    training = pocket.make_split("drafter_training", per_family, folder / "pocket")[:n_training]
    _write_training_list(folder, training)
    return made


def _write_training_list(folder: Path, clips: Sequence[Clip]) -> None:
    """A list of video + prompt; its first clip is a folder of images, its second a stretch."""
    videos: list[dict[str, Any]] = [{"video": f"pocket/{Path(clip.path).name}"} for clip in clips]
    write_frame_folder(clips[0], folder / "training" / "images")
    videos[0] = {"video": "training/images", "frames_per_s": IMAGES_PER_S}
    for _, path, start, end in join_clips(clips[1:2], folder / "training"):
        videos[1] = {"video": f"training/{path.name}", "start_s": start, "end_s": end}
    lines = [
        json.dumps({"id": clip.clip_id, "prompt": clip.prompt, "reference": clip.reference} | video)
        for clip, video in zip(clips, videos, strict=True)
    ]
    write_text_atomic(folder / "training.jsonl", "\n".join(lines) + "\n")
