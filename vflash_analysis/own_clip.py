"""Decode one clip of the user's own, plainly and with a drafter, into records: `vflash demo CLIP`.

A process of its own, as the command line loads no model:

    echo '{"clip": "a.mp4", "prompt": "", "out": "folder", "profile": "pocket", "overrides": {},
           "target": "", "drafter": ""}' | python -m vflash_analysis.own_clip
"""

from __future__ import annotations

import sys
import tempfile
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
from vflash_analysis.decoding.plan import plan_methods
from vflash_analysis.decoding.shard import decode_planned
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_sha256
from vflash_analysis.model.target import load_target
from vflash_analysis.records import sha256_of_file

METHODS = ("ar", "chain", "tree60")
WARMUP_TOKENS = 16  # of each method: every forward of it runs
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


def decode_own_clip(asked: Request) -> tuple[Clip, bool]:
    """Decode the clip with METHODS; its tables and strip go to `asked.out`.

    Returns:
        The clip, and whether the pocket target decoded it.

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
    decode = replace(settings.decode, methods=METHODS, repeats=1, warmup_clips=0)
    inputs = {
        "clip": sha256_of_file(file),
        "target": target.source_sha256,
        "drafter": drafter_sha256(drafter),
    }
    parameters = {"prompt": prompt, "settings": config.to_json(settings)}
    run_id = identity.run_id("own_clip", parameters, "", inputs)
    facts = ShardFacts(run_id, settings.name, 0, settings.clips.num_frames, on_bad_clip="fail")
    ways = ", ".join(METHODS)
    _say(f"decoding {file.name} at {facts.num_frames} frames: {ways}")
    planned = plan_methods(target, {drafter.name: drafter}, decode)
    # a compiled forward is of one cache length, which the cap sets
    cap = decode.max_new_tokens
    short = replace(decode, max_new_tokens=cap if wanted.compile else min(WARMUP_TOKENS, cap))
    with open_reader(settings.clips) as reader:
        _say(f"warming up: {short.max_new_tokens} tokens with each method")
        with tempfile.TemporaryDirectory() as unused:
            decode_planned(target, planned, [clip], reader, short, unused, facts, log=_unsaid)
        decode_planned(target, planned, [clip], reader, decode, asked.out, facts, log=_say)
    return clip, pocket


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _unsaid(line: str) -> None:
    """The warm-up's times are nobody's."""


def main() -> int:
    """Answer one request, see `asking`."""

    def respond(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            clip, pocket = decode_own_clip(Request(**asked))
        except LosslessError as error:  # told in one line too
            raise InputError(str(error)) from error
        return {
            "clip_id": clip.clip_id,
            "prompt": clip.prompt,
            "methods": METHODS,
            "pocket": pocket,
        }

    return answer(respond)


if __name__ == "__main__":
    sys.exit(main())
