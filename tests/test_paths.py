"""One module knows the folders, whatever the working directory."""

import os
import subprocess
import sys

import pytest

from vflash_analysis import paths
from vflash_analysis.errors import InputError


def test_root_is_this_checkout():
    assert (paths.ROOT / "pyproject.toml").is_file()
    assert paths.PACKAGE == paths.ROOT / "vflash_analysis"


def test_root_is_found_above_the_current_folder(tmp_path):
    checkout = tmp_path / "a checkout"
    (checkout / "vflash_analysis").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    deep = checkout / "notebooks" / "x"
    deep.mkdir(parents=True)
    assert paths.find_root(start=deep) == checkout
    assert paths.find_root(start=checkout) == checkout


def test_outside_any_checkout_the_package_tells(tmp_path):
    assert paths.find_root(start=tmp_path) == paths.PACKAGE.parent


def test_a_given_root_settles_it_or_is_refused(tmp_path):
    assert paths.find_root(start=tmp_path, given=str(paths.ROOT)) == paths.ROOT
    assert paths.find_root(start=tmp_path, given="") == paths.PACKAGE.parent
    with pytest.raises(InputError, match="VFLASH_ROOT: found"):
        paths.find_root(given=str(tmp_path))


def test_the_root_is_the_same_from_anywhere_and_nothing_heavy_loads(tmp_path):
    code = (
        "import sys, vflash_analysis.paths as p, vflash_analysis.config, vflash_analysis.runner\n"
        "heavy = {'torch', 'transformers', 'decord', 'av', 'papermill'} & set(sys.modules)\n"
        "print(p.ROOT, p.RUNS, sorted(heavy))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VFLASH_")}
    told = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True,
            check=True,
        ).stdout.strip()
        for cwd in (tmp_path, paths.ROOT, paths.NOTEBOOKS)
    }  # fmt: skip
    assert told == {f"{paths.ROOT} {paths.ROOT / 'runs'} []"}


def test_runs_can_lie_on_another_disk(tmp_path):
    code = "import vflash_analysis.paths as p; print(p.RUNS)"
    told = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "VFLASH_RUNS": str(tmp_path / "r")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == str(tmp_path / "r")


def test_paths_are_shown_relative_to_the_checkout(tmp_path):
    assert paths.relative_to_root(paths.ROOT / "data" / "x.csv") == "data/x.csv"
    assert paths.relative_to_root(tmp_path) == str(tmp_path)
