"""What a folder says of the hub's commits, and which names of one are its."""

from pathlib import Path

import pytest

from tests.hub_notes import note_commit
from vflash_analysis.hub import folder_commits, is_commit

ONE, TWO = 40 * "1", 40 * "2"


def note(folder: Path, file: str, first_line: str, there: bool = True) -> None:
    note_commit(folder, file, first_line)
    if there:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def test_notes_count_below_folders_too_and_only_of_files_that_are_there(tmp_path):
    assert folder_commits(tmp_path) == ()
    note(tmp_path, "a.json", TWO)
    note(tmp_path, "videos/x.tar.gz", ONE)
    note(tmp_path, "b.json", TWO)
    note(tmp_path, "gone.zip", 40 * "3", there=False)
    note(tmp_path, "short.json", ONE[:12])
    note(tmp_path, "long.json", 1000 * "1")
    note(tmp_path, "branch.json", "main")
    assert folder_commits(tmp_path) == (ONE, TWO)


def test_a_folder_of_the_hubs_cache_is_named_by_its_commit(tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / ONE
    folder.mkdir(parents=True)
    assert folder_commits(folder) == (ONE,)
    (tmp_path / "link").symlink_to(folder)
    assert folder_commits(tmp_path / "link") == (ONE,)


@pytest.mark.parametrize(
    ("wanted", "same"),
    [(ONE, True), (ONE[:7], True), (ONE[:6], False), (TWO, False), ("main", False), ("", False)],
)
def test_a_commit_is_named_in_full_or_by_seven_digits(wanted, same):
    assert is_commit(ONE, wanted) == same
