"""Decode one clip of the user's own, plainly and with a drafter, into records: `vflash demo CLIP`.

A process of its own, as the command line loads no model:

    echo '{"clip": "a.mp4", "prompt": "", "out": "folder", "profile": "pocket", "overrides": {},
           "target": "", "drafter": ""}' | python -m vflash_analysis.own_clip
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vflash_analysis import config, identity, paths
from vflash_analysis.asking import answer
from vflash_analysis.clips import suites, wording
from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.prepare import open_reader
from vflash_analysis.config import Profile
from vflash_analysis.decoding.clip import ShardFacts
from vflash_analysis.decoding.lossless import LosslessError
from vflash_analysis.decoding.shard import decode_shard
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_sha256
from vflash_analysis.model.target import load_target
from vflash_analysis.records import sha256_of_file

METHODS = ("ar", "chain", "tree60")
SUITE = "own clip"
POCKET_TARGET = "data/pocket/target"
POCKET_DRAFTER = paths.DATA / "pocket" / "drafters" / "self_reveal"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; paths are absolute.

    Attributes:
        clip: a video file.
        prompt: the question; "" takes the target's own.
        out: gets the records.
        profile, overrides: settings: dtype, device, frames, cap, tree.
        target: the target's folder; "" takes the profile's.
        drafter: a drafter's folder; "" takes the tracked one, for the tracked target alone.
    """

    clip: str
    prompt: str
    out: str
    profile: str
    overrides: dict[str, object]
    target: str
    drafter: str


def default_prompt(pocket: bool) -> str:
    """A question that the target knows: the pocket family's that describes, or the suites'."""
    return wording.QUESTIONS["VDC"][0] if pocket else suites.DESCRIPTION_PROMPT


def drafter_folder(asked: Request, pocket: bool) -> Path:
    """The drafter to decode with.

    Raises:
        InputError: none was given and the target is not the tracked one.
    """
    if asked.drafter:
        return Path(asked.drafter)
    if not pocket:
        raise InputError(
            "drafter: found none, allowed: --drafter DIR with a drafter trained for this target; the "
            "tracked one is of the pocket target"
        )
    return POCKET_DRAFTER


def decode_own_clip(asked: Request) -> Clip:
    """Decode the clip with METHODS; its tables and strip go to `asked.out`. Returns the clip.

    Raises:
        InputError: no such clip, target or drafter, a clip that cannot be read, a drafter of another
            target.
        LosslessError: a float32 or float64 text that is not the greedy one.
    """
    file = Path(asked.clip)
    if not file.is_file():
        raise InputError(f"clip: found no file {file}, allowed: a video file")
    settings: Profile = config.load_profile(asked.profile, asked.overrides)
    pocket = not asked.target and settings.target.source == POCKET_TARGET
    drafter = drafter_folder(asked, pocket)
    wanted = settings.target
    folder = asked.target or config.target_folder(wanted)
    _say(f"loading {paths.relative_to_root(folder)}")
    target = load_target(
        folder,
        wanted.dtype,
        wanted.device,
        attention=wanted.attention,
        compile=wanted.compile,
        revision=None if asked.target else wanted.revision or None,
    )
    prompt = asked.prompt or default_prompt(pocket)
    clip = Clip(file.stem, SUITE, "own", str(file), prompt)
    decode = replace(settings.decode, methods=METHODS, repeats=1, warmup_clips=1)
    inputs = {
        "clip": sha256_of_file(file),
        "target": target.source_sha256,
        "drafter": drafter_sha256(drafter),
    }
    parameters = {"prompt": prompt, "settings": config.to_json(settings)}
    run_id = identity.run_id("own_clip", parameters, "", inputs)
    facts = ShardFacts(run_id, settings.name, 0, settings.clips.num_frames, on_bad_clip="fail")
    ways = ", ".join(METHODS)
    _say(f"decoding {file.name} at {facts.num_frames} frames: {ways}, each once to warm up")
    with open_reader(settings.clips) as reader:
        decode_shard(
            target, {drafter.name: drafter}, [clip], reader, decode, asked.out, facts, log=_say
        )
    return clip


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def main() -> int:
    """Answer one request, see `asking`."""

    def respond(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            clip = decode_own_clip(Request(**asked))
        except LosslessError as error:  # told in one line too
            raise InputError(str(error)) from error
        return {"clip_id": clip.clip_id, "prompt": clip.prompt, "methods": METHODS}

    return answer(respond)


if __name__ == "__main__":
    sys.exit(main())
