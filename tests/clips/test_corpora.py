"""Training clips: the draw, what is left out of a corpus, lists made by hand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest

from tests.clips import hub
from vflash_analysis.clips import corpora, prepare
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.overlap import Evaluated
from vflash_analysis.errors import InputError

SETTINGS = hub.SETTINGS
NAMES = [f"ytb_Training{i:03d}" for i in range(9)]
NO_SUITE = Evaluated([])


def stems(clips: list[Clip]) -> list[str]:
    return [Path(clip.path).stem for clip in clips]


def test_the_draw_is_the_lowest_hashes_whatever_the_order_of_rows_and_files(tmp_path):
    hub.make_corpus(tmp_path / "one", NAMES)
    hub.make_corpus(tmp_path / "two", NAMES, reverse=True)
    one = corpora.training_clips(SETTINGS, tmp_path / "one", NO_SUITE)
    Path(one.training[0].path).unlink()  # a corpus half unpacked draws the same
    assert one == corpora.training_clips(SETTINGS, tmp_path / "one", NO_SUITE)
    two = corpora.training_clips(SETTINGS, tmp_path / "two", NO_SUITE)
    assert stems(one.training) == stems(two.training) and len(one.training) == 5
    assert stems(one.validation) == stems(two.validation) and len(one.validation) == 2
    ids = [clip.clip_id for clip in [*one.validation, *one.training]]
    key = "LLaVA-Video-178K/0/{}".format
    hashes = [hashlib.sha256(key(clip_id).encode()).hexdigest() for clip_id in ids]
    assert hashes == sorted(hashes) and len(set(ids)) == 7


def test_more_training_clips_contain_fewer_and_keep_validation(tmp_path):
    hub.make_corpus(tmp_path, NAMES)
    few = corpora.training_clips(
        dataclasses.replace(SETTINGS, training_clips=3), tmp_path, NO_SUITE
    )
    more = corpora.training_clips(SETTINGS, tmp_path, NO_SUITE)
    assert more.training[:3] == few.training and more.validation == few.validation


def test_a_corpus_loses_every_video_that_a_suite_has_drawn_or_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path / "videos"))
    hub.make_suites(tmp_path / "videos")
    shared = [f"ytb_Desc000000{i}" for i in range(8)]  # VideoDetailCaption calls them v_Desc…
    hub.make_corpus(tmp_path / "videos", [*NAMES, *shared])
    folder = f"{hub.CORPUS}/{hub.SUBSETS[0]}/liwei_youtube_videos/videos/youtube_video_2024"
    copied = tmp_path / "videos" / folder / f"{NAMES[0]}.mp4"
    copied.write_bytes(b"Long_vid-05")  # the bytes of a LongVideoBench video
    wanted = dataclasses.replace(SETTINGS, training_clips=6)
    prepare.prepare_lists(wanted, tmp_path / "out")
    learnt = [
        clip for n in ("training", "validation") for clip in prepare.read_list(tmp_path / "out", n)
    ]
    assert sorted(stems(learnt)) == NAMES[1:]
    table = pd.read_csv(tmp_path / "out" / "left_out.csv")
    assert table["reason"].value_counts().to_dict() == {"same_source": 8, "same_file": 1}
    row = table.set_index("reason").loc["same_file"]
    assert (row["benchmark"], row["suite_clip_id"], row["path"]) == (
        "LVB",
        "Long_vid-05",
        str(copied),
    )
    printed = capsys.readouterr().out
    assert (
        "left out as videos of a suite: 8 same_source, 1 same_file; named in left_out.csv"
        in printed
    )
    with pytest.raises(
        InputError, match=r"found 8 clips in LLaVA-Video-178K beside the 9 that suites"
    ):
        prepare.prepare_lists(dataclasses.replace(wanted, training_clips=7), tmp_path / "out")


def test_a_list_made_by_hand_is_drawn_alike_and_an_overlap_in_it_is_an_error(tmp_path, monkeypatch):
    root = tmp_path / "videos"
    monkeypatch.setenv("VFLASH_DATA", str(root))
    hub.make_suites(root)
    rows = [json.dumps({"video": f"own/{name}.mp4", "prompt": "What?"}) for name in NAMES]
    by_hand = dataclasses.replace(SETTINGS, training_list="training.jsonl")
    for order in (rows, rows[::-1]):
        (root / "training.jsonl").write_text("\n".join(order))
        prepare.prepare_lists(by_hand, tmp_path / "out")
        chosen = stems(prepare.read_list(tmp_path / "out", "training"))
        assert len(chosen) == 5
        assert chosen == stems(corpora.training_clips(by_hand, root, NO_SUITE).training)
    assert pd.read_csv(tmp_path / "out" / "left_out.csv").empty
    (root / "training.jsonl").write_text(
        "\n".join([*rows[:6], json.dumps({"video": "Desc0000001.mp4", "prompt": "What?"})])
    )
    with pytest.raises(InputError, match=r"VDC clip 'v_Desc0000001' .* one source video"):
        prepare.prepare_lists(by_hand, tmp_path / "out")


def test_no_list_and_an_empty_one_are_refused(tmp_path):
    none = dataclasses.replace(SETTINGS, training_list=None)
    with pytest.raises(InputError, match=r"training_list: found null.*LLaVA-Video-178K"):
        corpora.training_clips(none, tmp_path, NO_SUITE)
    (tmp_path / "mine.jsonl").write_text("")
    empty = dataclasses.replace(SETTINGS, training_list="mine.jsonl")
    with pytest.raises(InputError, match=r"clips\.training_clips: found 0 clips in mine\.jsonl"):
        corpora.training_clips(empty, tmp_path, NO_SUITE)
