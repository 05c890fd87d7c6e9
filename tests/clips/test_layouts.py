"""The five suites' layouts from pocket clips, through the adapters: the same clips, frame by frame."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from vflash_analysis import config, paths
from vflash_analysis.clips import layouts, pocket
from vflash_analysis.clips.lists import Clip, read_video_list
from vflash_analysis.clips.overlap import Evaluated, check_disjoint
from vflash_analysis.clips.read import ClipFrames, FrameReader
from vflash_analysis.clips.suites import Suite, Task, load_suites, suite_clips, suite_videos
from vflash_analysis.errors import InputError

SETTINGS = config.load_profile("smoke").clips
SUITES = load_suites(paths.DATA / "suites")
OTHER_TASKS = {
    row["name"]: Task(**row)
    for row in yaml.safe_load((paths.DATA / "suites" / "MVBench.yaml").read_text())["other_tasks"]
}
FRAMES = 7


def mvbench(revision: str, *tasks: str) -> Suite:
    own = SUITES["MVBench"].tasks or ()
    return replace(
        SUITES["MVBench"], revision=revision, tasks=(*own, *(OTHER_TASKS[t] for t in tasks))
    )


def mlvu_dev() -> Suite:
    (packing,) = SUITES["MLVU"].other_packings or ()
    return replace(
        SUITES["MLVU"],
        hub_id=packing.hub_id,
        adapter=packing.adapter,
        metadata=packing.metadata,
        videos=packing.videos,
        archives=packing.archives,
    )


@pytest.fixture(scope="module")
def reader() -> Iterator[FrameReader]:
    with FrameReader(60) as one:
        yield one


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, layouts.Made]]:
    """What `vflash clips rehearse` writes: a data folder and the pocket clip behind every clip."""
    folder = tmp_path_factory.mktemp("data")
    return folder, layouts.write_layouts(folder, SETTINGS, SUITES)


@pytest.fixture(scope="module")
def pocket_clips(written: tuple[Path, dict[str, layouts.Made]]) -> list[Clip]:
    """The clips of the three families of short ones, twelve: more than there are picture sizes."""
    _, made = written
    return [clip for name in ("MVBench", "VDC", "Video-MME") for clip in made[name].values()]


def same_frames(one: ClipFrames, other: ClipFrames) -> bool:
    """The same pictures, and the same time stamps from each clip's own first frame on."""
    shift = one.timestamps_s[0] - other.timestamps_s[0]
    stamps = np.allclose(one.timestamps_s - shift, other.timestamps_s, atol=2e-3)
    return stamps and np.array_equal(one.frames, other.frames)


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_listed_drawn_and_read_as_it_was_written(
    written: tuple[Path, dict[str, layouts.Made]], reader: FrameReader, name: str
) -> None:
    folder, made = written
    listed = suite_videos(SUITES[name], folder)
    assert [clip.clip_id for clip in listed] == sorted(made[name])
    drawn = suite_clips(SUITES[name], folder, 0, SETTINGS.clips_per_suite_all)
    assert len(drawn) == SETTINGS.clips_per_suite_all < len(listed)
    for clip in listed:
        original = made[name][clip.clip_id]
        assert same_frames(reader.read_clip(clip, FRAMES), reader.read(original.path, FRAMES))
    if name == "VDC":
        assert [clip.prompt for clip in listed] == [made[name][c.clip_id].prompt for c in listed]
    if name in ("VDC", "Video-MME"):
        assert {Path(clip.path).suffix for clip in listed} == {".mp4", ".MP4", ".mkv"}


def test_the_training_list_holds_a_folder_a_stretch_and_files(
    written: tuple[Path, dict[str, layouts.Made]], reader: FrameReader
) -> None:
    folder, _ = written
    clips = read_video_list(folder / "training.jsonl")
    assert len(clips) == SETTINGS.training_clips + SETTINGS.validation_clips
    assert [clip.frames_per_s for clip in clips[:3]] == [3.0, None, None]
    assert [clip.start_s for clip in clips[:3]] == [None, 1.0, None]
    for clip in clips[1:3]:
        original = folder / "pocket" / f"{clip.clip_id}.mp4"
        assert same_frames(reader.read_clip(clip, FRAMES), reader.read(original, FRAMES))
    evaluation = [clip for name in SUITES for clip in suite_videos(SUITES[name], folder)]
    check_disjoint(clips, Evaluated(evaluation))


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lmms-lab").mkdir()
    with pytest.raises(InputError, match="holds something; allowed is a new or an empty folder"):
        layouts.write_layouts(tmp_path, SETTINGS, SUITES)
    assert [path.name for path in tmp_path.iterdir()] == ["lmms-lab"]


# ---------------------------------------------------------------- MVBench's two revisions


def test_mvbench_main_reads_stretches_webm_avi_and_patched_files_exactly(
    pocket_clips: list[Clip], reader: FrameReader, tmp_path: Path
) -> None:
    suite = mvbench(
        "main", "action_antonym", "fine_grained_pose", "object_existence", "state_change"
    )
    made = layouts.write_layout(suite, tmp_path, pocket_clips)
    clips = suite_videos(suite, tmp_path)
    assert [clip.clip_id for clip in clips] == sorted(made) and len(clips) == len(pocket_clips)
    kinds = {Path(clip.path).suffix for clip in clips}
    assert kinds == {".mp4", ".webm", ".avi"}
    assert any("/video/data0613/clevrer/" in clip.path for clip in clips)
    bounded = [clip for clip in clips if clip.start_s is not None]
    assert {clip.clip_id.split("/")[0] for clip in bounded} == {"star"}
    for clip in clips:
        original = reader.read(made[clip.clip_id].path, FRAMES)
        assert same_frames(reader.read_clip(clip, FRAMES), original), clip.clip_id
    # CLEVRER's and Perception Test's files are called the same and are two clips each
    names = [clip.clip_id.rsplit("/", 1)[1] for clip in clips if "video_1" in clip.clip_id]
    assert len(set(names)) < len(names)


def test_several_clips_of_one_video_are_told_apart_by_their_bounds(
    pocket_clips: list[Clip], reader: FrameReader, tmp_path: Path
) -> None:
    stretches = layouts.join_clips(pocket_clips, tmp_path)
    by_video = {path: [s for s in stretches if s[1] == path] for _, path, _, _ in stretches}
    assert max(map(len, by_video.values())) > 1  # more clips than sizes
    for path, held in by_video.items():
        for (_, _, _, before), (_, _, after, _) in itertools.pairwise(held):
            assert after == before
        for clip, _, start_s, end_s in held:
            got = reader.read(path, FRAMES, start_s=start_s, end_s=end_s)
            assert same_frames(got, reader.read(clip.path, FRAMES))
            assert start_s <= got.timestamps_s[0] and got.timestamps_s[-1] < end_s


def test_mvbench_main_reads_frame_folders_at_three_a_second(
    pocket_clips: list[Clip], reader: FrameReader, tmp_path: Path
) -> None:
    suite = replace(mvbench("main"), tasks=(OTHER_TASKS["episodic_reasoning"],))
    made = layouts.write_layout(suite, tmp_path, pocket_clips[:2])
    for clip in suite_videos(suite, tmp_path):
        assert clip.frames_per_s == 3.0 and clip.start_s == 0.0
        n_images = len(list(Path(clip.path).iterdir()))
        assert clip.end_s == n_images / 3
        got = reader.read_clip(clip, n_images)
        original = made[clip.clip_id]
        whole = reader.read(original.path, 1).info
        every = reader.read(original.path, whole.n_frames).frames
        assert whole.fps is not None
        for number, frame in enumerate(got.frames):
            shown = every[int(number * round(whole.fps) / 3)]
            assert np.abs(frame.astype(int) - shown).mean() < 4  # JPEG's loss, and no more


def test_mvbench_video_reads_clips_that_were_cut_and_bounds_name_them_only(
    pocket_clips: list[Clip], reader: FrameReader, tmp_path: Path
) -> None:
    suite = mvbench("video", "action_antonym")
    made = layouts.write_layout(suite, tmp_path, pocket_clips[:6])
    clips = suite_videos(suite, tmp_path)
    assert [clip.clip_id for clip in clips] == sorted(made)
    assert all(clip.start_s is clip.end_s is clip.frames_per_s is None for clip in clips)
    assert reader.read_clip(clips[0], 2).info.flags == ()


def test_mlvu_is_read_in_its_other_packing(
    pocket_clips: list[Clip], reader: FrameReader, tmp_path: Path
) -> None:
    made = layouts.write_layout(mlvu_dev(), tmp_path, pocket_clips[:4])
    clips = suite_videos(SUITES["MLVU"], tmp_path)  # found without being told
    assert [clip.clip_id for clip in clips] == sorted(made)
    assert {Path(clip.path).parent.name for clip in clips} == {"video_part_1", "video_part_2"}
    assert reader.read_clip(clips[0], 2).info.flags == ()


def test_every_frame_rate_divides_the_joined_videos_clock() -> None:
    assert all(layouts.TICKS_PER_S % rate == 0 for rate in pocket.RATES)
