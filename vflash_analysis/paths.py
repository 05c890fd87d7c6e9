"""The one module that knows where the project's folders are.

`ROOT` is the checkout: the folder that holds `pyproject.toml` and the package. It is found from the
environment variable `VFLASH_ROOT`, else by walking up from the current folder, else from where this
file lies, so notebooks give the same result from any working directory.
"""

import os
from pathlib import Path

from vflash_analysis.errors import InputError

PACKAGE = Path(__file__).resolve().parent


def is_checkout(folder: Path) -> bool:
    """True when `folder` holds both `pyproject.toml` and the package's own folder."""
    return (folder / "pyproject.toml").is_file() and (folder / "vflash_analysis").is_dir()


def expanded(text: str) -> Path:
    """A path with `~` put in full; that of an unknown user stays as it is, where `Path` would raise."""
    return Path(os.path.expanduser(text))


def find_root(start: Path | None = None, given: str | None = None) -> Path:
    """Find the checkout.

    Args:
        start: folder to walk up from; the current folder when None.
        given: a path that settles it (the value of `VFLASH_ROOT`); empty counts as not given.

    Returns:
        Absolute path of the checkout.

    Raises:
        InputError: `given` is not a checkout, or none was found.
    """
    if given:
        folder = expanded(given).resolve()
        if not is_checkout(folder):
            raise InputError(
                f"VFLASH_ROOT: found {folder}, allowed: a folder with pyproject.toml and vflash_analysis/"
            )
        return folder
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, PACKAGE.parent):
        if is_checkout(folder):
            return folder
    raise InputError(
        f"no checkout above {here}: set VFLASH_ROOT to the folder with pyproject.toml and vflash_analysis/"
    )


ROOT = find_root(given=os.environ.get("VFLASH_ROOT"))
DATA = ROOT / "data"
PROFILES = DATA / "profiles"
TRACKED_RECORDS = DATA / "records" / "pocket"
MEASURED = DATA / "measured"  # what forwards cost on other shapes and machines
FIGURES = ROOT / "figures"
TRACKED_FIGURES = FIGURES / "pocket"
RUNS = expanded(os.environ.get("VFLASH_RUNS") or str(ROOT / "runs")).resolve()
NOTEBOOKS = ROOT / "notebooks"


def relative_to_root(path: Path | str) -> str:
    """`path` as shown to people: relative to the checkout where it lies inside, else absolute."""
    full = Path(os.path.realpath(path))  # `resolve` raises for a link that leads to itself
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else str(full)
