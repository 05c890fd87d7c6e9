"""MVBench's metadata: clips cut beforehand (revision `video`) or stretches of videos (`main`).

One or the other: the bounds of `main` do not apply to a clip that was cut by them. Clips were cut
where the branch's folder is called "..._segment": the STAR, STA and TVQA sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vflash_analysis.clips.lists import may_have_number
from vflash_analysis.clips.metadata import Video, json_rows, split_ending
from vflash_analysis.errors import InputError

if TYPE_CHECKING:
    from vflash_analysis.clips.suites import Suite, Task

CUT = "_segment"  # ends the name of a folder whose clips were cut beforehand
PATCH = "data0613"  # the hub's later archive: clips that the first ones lack, in the same folders


def list_clips(suite: Suite, folder: Path) -> list[Video]:
    """Return the clips of the suite's tasks, one per question.

    Raises:
        InputError: an unknown revision, or the other one's folders; a metadata file that is missing
            or has no `video`; on `main` a row without its bounds.
    """
    if suite.revision not in ("video", "main"):
        raise InputError(
            f"{suite.name}: revision is {suite.revision!r}; allowed are 'video', clips cut "
            "beforehand, and 'main', whole videos with their bounds"
        )
    videos = []
    for task in suite.tasks or ():
        _refuse_other_revision(suite, folder, task)
        metadata = folder / suite.metadata.replace("{task}", task.name)
        for number, row in enumerate(json_rows(metadata, ["video"])):
            if suite.revision == "video":
                videos.append(_cut_clip(task, row))
            else:
                place = f"{metadata}, row {number}"
                videos.append(_stretch(task, row, main_folder(suite, task), place))
    return videos


def main_folder(suite: Suite, task: Task) -> str:
    """Return a task's folder on the branch `main`, below `video`."""
    renamed = {row.folder: row.main for row in suite.main_folders or ()}
    return renamed.get(task.folder, task.folder)


def _cut_clip(task: Task, row: dict[str, Any]) -> Video:
    """A clip of `video`: the file is the clip, so bounds only take part in its name."""
    stem, extension = split_ending(row["video"])
    bounds = f"_{row.get('start')}_{row.get('end')}"
    if task.folder.endswith(CUT) and row.get("start") is not None and not stem.endswith(bounds):
        stem += bounds
    # The source's folder belongs to the id: CLEVRER and Perception Test use the same file names.
    clip_id = f"{task.folder}/{stem}"
    return Video(clip_id, clip_id + extension, other_file=f"{PATCH}/{clip_id}{extension}")


def _stretch(task: Task, row: dict[str, Any], folder: str, place: str) -> Video:
    """A clip of `main`: a whole video or frame folder, or what is between its bounds."""
    file = f"{folder}/{row['video']}"
    clip_id = split_ending(file)[0]
    start_s = end_s = None
    if task.folder.endswith(CUT):
        start_s, end_s = (may_have_number(place, row, name) for name in ("start", "end"))
        if start_s is None or end_s is None:
            raise InputError(
                f"{place}: start is {start_s} and end {end_s}; allowed on revision 'main' are both, "
                "in seconds"
            )
        clip_id += f"_{row['start']}_{row['end']}"
    return Video(
        clip_id,
        f"video/{file}",
        other_file=f"video/{PATCH}/{file}",
        start_s=start_s,
        end_s=end_s,
        frames_per_s=may_have_number(place, row, "fps"),
    )


def _refuse_other_revision(suite: Suite, folder: Path, task: Task) -> None:
    """Raise InputError where a task's folder is not there and it can be said why."""
    on_main = main_folder(suite, task)
    own, other, other_revision = folder / task.folder, folder / "video" / on_main, "main"
    if suite.revision == "main":
        own, other, other_revision = other, own, "video"
    if own.is_dir():
        return
    if other.is_dir():
        raise InputError(
            f"{suite.name}: {own} is not there, but {other} of revision {other_revision!r} is; "
            f"allowed: revision {suite.revision!r} of {suite.hub_id}, or revision: {other_revision} "
            f"in {suite.name}.yaml"
        )
    archive = folder / "video" / f"{on_main.split('/')[0]}.zip"
    if suite.revision == "main" and archive.is_file():
        raise InputError(f"{suite.name}: {own} is not there; {archive} must be unpacked beside it")
    if suite.revision == "main" and task.name in (suite.withdrawn or ()):
        raise InputError(
            f"{suite.name}: task {task.name}: {own} is not there; its videos were withdrawn from "
            f"{suite.hub_id}; allowed: their owners' copy there, or tasks without {task.name}"
        )
