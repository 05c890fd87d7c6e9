"""Several processes leave what one leaves: the same clips, the same texts, bad clips by name."""

from functools import partial

import pytest

from vflash_analysis import config, workers
from vflash_analysis.clips import pocket
from vflash_analysis.clips.prepare import open_reader
from vflash_analysis.errors import InputError
from vflash_analysis.records import read_records
from vflash_analysis.schemas import CONTINUATIONS
from vflash_analysis.training import collect, pipeline
from vflash_analysis.training.collect import collect_in_parallel
from vflash_analysis.training.continuations import collect_continuations

SETTINGS = config.load_profile("smoke")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return pocket.make_split("drafter_training", 1, tmp_path_factory.mktemp("clips"))


@pytest.fixture
def two_processes(monkeypatch):
    """Every clip is a share of its own, for either of two processes."""
    monkeypatch.setattr(pocket, "PARALLEL_FROM", 1)
    for module in (workers, pocket):
        monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    for module in (pocket, collect):
        monkeypatch.setattr(module, "CLIPS_AT_ONCE", 1)


def test_clips_made_by_several_processes_are_the_same(clips, tmp_path, two_processes):
    again = pocket.make_split("drafter_training", 1, tmp_path)
    assert [(c.clip_id, c.facts) for c in again] == [(c.clip_id, c.facts) for c in clips]


def test_texts_of_several_processes_are_the_same(clips, tmp_path, two_processes):
    pipeline.build_untrained(clips, tmp_path / "target")
    load = partial(pipeline.open_target, SETTINGS, tmp_path)
    target = load()
    options = {
        "num_frames": SETTINGS.clips.num_frames,
        "max_new_tokens": 6,
        "tap_layer_ids": pipeline.tapped_layers(target, SETTINGS),
        "on_bad_clip": "fail",
    }
    parallel, alone = tmp_path / "parallel", tmp_path / "alone"
    collect_in_parallel(load, clips, SETTINGS.clips, parallel, options)
    with open_reader(SETTINGS.clips) as reader:
        for folder in (parallel, alone):  # the first finds every clip done
            collect_continuations(target, clips, reader, out_folder=folder, **options)
    found, wanted = (
        read_records(folder / "continuations.parquet", CONTINUATIONS)
        for folder in (parallel, alone)
    )
    assert found["text"].tolist() == wanted["text"].tolist() and len(found) == len(clips)
    assert (found["status"] == "ok").all()
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    bad = [type(clips[0])("x", "VDC", "drafter_training", str(broken), "What?")]
    with pytest.raises(InputError, match=r"broken\.mp4"):
        collect_in_parallel(load, bad, SETTINGS.clips, tmp_path / "bad", options)
