"""What a folder says of the Hugging Face hub's commits that its files came from.

A folder of the hub's cache is named by its commit (`.../snapshots/<commit>`);
`hf download --local-dir` keeps a note per file, `.cache/huggingface/download/<file>.metadata`,
whose first line is the commit.
"""

import re
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")
ABBREVIATION = re.compile(r"[0-9a-f]{7,40}")
_NOTES = Path(".cache", "huggingface", "download")


def folder_commits(folder: Path) -> tuple[str, ...]:
    """Full commits that the folder's files are of, sorted; none where it says nothing.

    The note of a file that is no longer there does not count.
    """
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots" and COMMIT.fullmatch(resolved.name):
        return (resolved.name,)
    found = set()
    for note in (folder / _NOTES).rglob("*.metadata"):
        file = folder / note.relative_to(folder / _NOTES).with_suffix("")
        if note.is_file() and file.is_file():
            with note.open(encoding="utf-8", errors="replace") as lines:
                found.add(lines.readline(100).strip())
    return tuple(sorted(commit for commit in found if COMMIT.fullmatch(commit)))


def is_commit(commit: str, wanted: str) -> bool:
    """Whether `wanted` names this commit: in full, or by its first 7 digits or more."""
    return bool(ABBREVIATION.fullmatch(wanted)) and commit.startswith(wanted)
