"""The clips that the training stages take from the lists of notebook 10."""

import dataclasses

from vflash_analysis import config
from vflash_analysis.clips.lists import Clip, write_clip_list
from vflash_analysis.training import pipeline


def test_anchor_clips_come_from_every_suite_and_a_shared_video_once(tmp_path):
    profile = config.load_profile("smoke")
    for benchmark, names in (("VDC", "zyx"), ("MLVU", "abz"), ("LVB", "zdc")):
        clips = [Clip(i, benchmark, "test", str(tmp_path / f"{i}.mp4"), "What?") for i in names]
        write_clip_list(tmp_path / f"suite-{benchmark}-0.jsonl", clips)
    settings = dataclasses.replace(
        profile,
        clips=dataclasses.replace(
            profile.clips, benchmarks=("VDC", "MLVU", "LVB"), clips_per_suite_all=3
        ),
        training=dataclasses.replace(profile.training, anchor_clips=5),
    )
    found = pipeline.clips_of(settings, tmp_path, "suites")
    assert [(clip.benchmark, clip.clip_id) for clip in found] == [
        ("VDC", "z"), ("MLVU", "a"), ("VDC", "y"), ("MLVU", "b"), ("LVB", "d"),
    ]  # fmt: skip
