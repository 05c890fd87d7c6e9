"""Instructions: how many there are, that none comes twice, that the splits share no thing."""

import pytest

from vflash_analysis.clips.instructions import REQUESTS, THINGS, instructions
from vflash_analysis.errors import InputError


def test_every_request_about_every_thing_once():
    for split, things in THINGS.items():
        most = len(things) * len(REQUESTS)
        clips = instructions(split, most)
        assert len({clip.prompt for clip in clips}) == len({clip.clip_id for clip in clips}) == most
        assert all(clip.path == "" and clip.split == split for clip in clips)
    assert [len(things) for things in THINGS.values()] == [60, 40]


def test_held_out_things_are_in_no_training_instruction():
    training = " ".join(clip.prompt for clip in instructions("training", 720))
    assert not [thing for thing in THINGS["held_out"] if thing in training]


def test_the_first_ones_are_about_different_things_in_different_ways():
    clips = instructions("held_out", 40)
    assert [clip.prompt for clip in clips[:2]] == [
        "What is a harp used for?",
        "Describe a stapler to a child.",
    ]
    assert instructions("held_out", 41)[40].prompt == "Describe a harp to a child."
    assert clips == instructions("held_out", 80)[:40]


@pytest.mark.parametrize(
    ("split", "count", "message"),
    [
        ("training", 721, "training instructions: found 721, allowed: 1 to 720"),
        ("held_out", 0, "held_out instructions: found 0, allowed: 1 to 480"),
        ("suites", 1, "split: found 'suites', allowed: training, held_out"),
    ],
)
def test_more_than_there_are(split, count, message):
    with pytest.raises(InputError, match=message):
        instructions(split, count)
