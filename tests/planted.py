"""Notebooks and shards for tests, planted in a folder."""

from pathlib import Path

import nbformat

from vflash_analysis import records
from vflash_analysis.stages import Shard


def write_notebook(path: Path, cells: list[str], parameters: str) -> Path:
    """A notebook as a careless user saves it: a private kernel, an old error output."""
    old = nbformat.v4.new_output("error", ename="OldError", evalue="from last year", traceback=[])
    first = nbformat.v4.new_code_cell(parameters, outputs=[old], execution_count=7)
    first.metadata["tags"] = ["parameters"]
    book = nbformat.v4.new_notebook(
        cells=[first, *(nbformat.v4.new_code_cell(cell) for cell in cells)],
        metadata={"kernelspec": {"name": "my_env", "display_name": "mine", "language": "python"}},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)
    return path


def shard_at(folder: Path, name: str = "one", **changes) -> Shard:
    values = {
        "name": name, "stage": name, "notebook": folder / "n.ipynb", "parameters": {},
        "run_id": folder.name, "parameters_id": "p", "folder": folder, "dependencies": (),
        "outputs": ("table.csv",), "inputs": {},
    }  # fmt: skip
    return Shard(**(values | changes))


def finish(folder: Path, outputs=("table.csv",), **payload) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in outputs:
        (folder / name).write_text("value\n1\n")
    records.write_done(folder, payload, list(outputs))
