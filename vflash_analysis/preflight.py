"""What a profile's target is and needs, told from its small files before anything is computed.

Prompt lengths, special tokens, tapped layers, and memory by part against the device. `vflash doctor`
shows the rows, `vflash run` refuses to start a long run whose row is not ok, and notebook 00 has
them on its page. As the light commands load no model, they ask a process of its own:

    echo '{"profile": "h100", "overrides": {}}' | python -m vflash_analysis.preflight
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from vflash_analysis import config, estimate, paths
from vflash_analysis.asking import answer
from vflash_analysis.clips import suites
from vflash_analysis.config import Profile
from vflash_analysis.environment import MEMORY, free_bytes, row
from vflash_analysis.errors import InputError
from vflash_analysis.hub import folder_commits
from vflash_analysis.model.inputs import prompt_text
from vflash_analysis.model.known import known_shape
from vflash_analysis.model.taps import default_tap_layers
from vflash_analysis.model.target import Target, TargetFiles, outline_target, read_files
from vflash_analysis.model.weights import stored_numbers, weight_files
from vflash_analysis.shapes import TargetShape

Rows = list[dict[str, Any]]


def target_rows(profile: Profile) -> Rows:
    """Rows of `environment_table`'s form about the profile's target; none where a stage builds it."""
    if profile.target.source == config.TINY_TARGET:
        return []
    try:
        folder = config.target_folder(profile.target)
        files = read_files(folder, profile.target.revision or None)
        target = outline_target(files)
        return [
            *_checkpoint_rows(files, target),
            *_token_rows(profile, target),
            *_prompt_rows(profile, target),
            *_memory_rows(profile, files.shape),
        ]
    except InputError as error:
        return [row("target files", None, "a checkpoint", False, str(error))]


def _checkpoint_rows(files: TargetFiles, target: Target) -> Rows:
    weights = weight_files(files.folder)
    size = estimate.size(sum(path.stat().st_size for path in weights))
    found = f"{len(weights)} file{'s' * (len(weights) > 1)}, {size}"
    held, needed = stored_numbers(files.folder), files.shape.parameters
    lacks = f"{files.folder}: found {held:,} stored numbers, allowed: {needed:,} or more"
    whole = held >= needed
    known = known_shape(files.config, files.name)
    commits = folder_commits(files.folder)
    told = "" if commits else "the folder does not tell its commit"
    if len(commits) > 1:
        told = (
            f"{files.folder}: found files of {len(commits)} commits of the hub "
            f"({', '.join(commit[:7] for commit in commits)}), allowed: those of one"
        )
    facts = "" if known is None else "every known fact of this checkpoint holds"
    return [
        row("target name", files.name, "any", True, facts),
        row("target revision", files.revision, "any", len(commits) < 2, told),
        row("target weights", found, "whole", whole, "" if whole else lacks),
        row("template", target.template_sha256[:16], "any", True, _shown(target.template_file)),
    ]


def _shown(file: str) -> str:
    """A file of the target as messages name it; the tokenizer's own template has none."""
    return paths.relative_to_root(Path(file)) if Path(file).is_absolute() else file


def _token_rows(profile: Profile, target: Target) -> Rows:
    names = target.tokenizer.convert_ids_to_tokens(sorted(target.stop_ids))
    stops = ", ".join(f"{n} ({i})" for n, i in zip(names, sorted(target.stop_ids), strict=True))
    taps = default_tap_layers(target.num_layers, profile.drafter.num_tapped_layers)
    ignored = target.ignored_generation_settings
    return [
        row("stop tokens", stops, "any", True),
        row("mask row", target.mask_token_id, "an unused row", True),
        row("tapped layers", ", ".join(map(str, taps)), f"of {target.num_layers}", True),
        row("ignored generation settings", ignored or "none", "any", True),
    ]


def _prompt_rows(profile: Profile, target: Target) -> Rows:
    """The form of a prompt, and the number of its tokens for each suite."""
    form = prompt_text(target, "…")
    rows = [row("prompt form", repr(form)[1:-1], "any", True)]
    if profile.clips.source != "suites":
        return rows
    for name, suite in suites.chosen_suites(profile.clips.benchmarks).items():
        question, note = _question(suite)
        prompt = target.build_prompt(question, profile.clips.num_frames)
        target.check_lengths(len(prompt), profile.decode.max_new_tokens)
        expected = suite.expected_prompt_tokens
        wanted = "any"
        if expected is not None and profile.clips.num_frames == expected.num_frames:
            wanted = f"{expected.tokens:,}"
            if len(prompt) != expected.tokens:
                note = f"differs: another template, question or frame count; {note}".strip("; ")
        rows.append(row(f"prompt tokens, {name}", f"{len(prompt):,}", wanted, True, note))
    return rows


def _question(suite: suites.Suite) -> tuple[str, str]:
    """A question of the suite and where it comes from; longer ones make longer prompts."""
    if suite.prompt == "description":
        return suites.DESCRIPTION_PROMPT, ""
    folder = config.local_paths().get("data")
    if folder is not None:
        try:
            return suites.suite_videos(suite, folder)[0].prompt, "its first question"
        except InputError:
            pass  # told by the rows of the data
    if suite.question:
        return suite.question, "its documented question"
    return suites.DESCRIPTION_PROMPT, "the description prompt stands in for its questions"


def _memory_rows(profile: Profile, shape: TargetShape) -> Rows:
    own = estimate.sizes_of(profile, shape)
    device = profile.target.device
    absent = device == "cuda" and not torch.cuda.is_available()
    free = None if absent else free_bytes(device)
    there = (
        "no CUDA device" if absent else "unknown" if free is None else f"{estimate.size(free)} free"
    )
    rows = []
    for stage, parts in estimate.memory(profile, own).items():
        total = sum(parts.values())
        wanted = "a CUDA device" if absent else f"at most {there}"
        ok = not absent and (free is None or total <= free)
        note = estimate.told_parts(parts)
        if not ok:
            note = f"device: found {there}, allowed: {estimate.size(total)} or more; {note}"
        rows.append(row(f"{MEMORY}{stage}", estimate.size(total), wanted, ok, note))
    return rows


def main() -> int:
    """Answer one request, see `asking`."""
    return answer(
        lambda asked: {
            "rows": target_rows(config.load_profile(asked["profile"], asked["overrides"]))
        }
    )


if __name__ == "__main__":
    sys.exit(main())
