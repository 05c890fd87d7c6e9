"""Committed notebooks read as pages and stay clean: a static check of every file in notebooks/."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys

import nbformat
import pytest

from vflash_analysis import identity, paths
from vflash_analysis.decoding.language import Experiment
from vflash_analysis.errors import InputError
from vflash_analysis.stages import STAGES
from vflash_analysis.training import pipeline

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
NAMES = [path.name for path in NOTEBOOKS]
BY_HAND = {"66_decode_language_model.ipynb"}  # pages of their own: no stage, no profile
OF_STAGES = [path for path in NOTEBOOKS if path.name not in BY_HAND]
STAGE_NAMES = [path.name for path in OF_STAGES]
MAX_LINES = 15
FORBIDDEN_NODES = {
    ast.FunctionDef: "a definition",
    ast.AsyncFunctionDef: "a definition",
    ast.ClassDef: "a definition",
    ast.Lambda: "a definition",
    ast.While: "a loop",
    ast.For: "a loop",
    ast.Try: "a try block",
    ast.Global: "global",
}  # fmt: skip
WRITES = re.compile(r"to_csv$|write_|save_|train_drafter|score_drafter|collect_|decode_suite")
FORBIDDEN_MODULES = {"decord", "av", "os", "subprocess", "sys"}
FORBIDDEN_CALLS = {"exit", "quit", "eval", "exec", "input", "get_ipython"}
SETTINGS = {  # what Jupyter, papermill or a widget may leave behind
    "notebook": {"kernelspec", "language_info"},
    "cell": {"tags"},
    "language": {"name"},
}


def faults(book: dict) -> list[str]:
    """Everything that keeps a notebook from being clean, one line each."""
    found = []
    metadata, cells = book["metadata"], book["cells"]
    found += [f"notebook metadata {key}" for key in set(metadata) - SETTINGS["notebook"]]
    if metadata.get("kernelspec", {}).get("name") != "python3":
        found.append(f"kernel {metadata.get('kernelspec', {}).get('name')}")
    found += [f"language {key}" for key in set(metadata["language_info"]) - SETTINGS["language"]]
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    if len(tagged) != 1 or tagged[0]["cell_type"] != "code":
        found.append(f"{len(tagged)} parameters cells")
    for number, cell in enumerate(cells):
        where = f"cell {number}"
        found += [f"{where}: metadata {key}" for key in set(cell["metadata"]) - SETTINGS["cell"]]
        if cell["cell_type"] != "code":
            continue
        text = "".join(cell["source"])
        if cell["outputs"] or cell["execution_count"] is not None:
            found.append(f"{where}: outputs or an execution count")
        if len(text.splitlines()) > MAX_LINES:
            found.append(f"{where}: {len(text.splitlines())} lines")
        if re.search(r"^\s*[!%]", text, re.MULTILINE):
            found.append(f"{where}: a shell line or magic")
        else:
            found += [f"{where}: {fault}" for fault in _code_faults(ast.parse(text))]
    return found


def _code_faults(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if type(node) in FORBIDDEN_NODES:
            found.append(FORBIDDEN_NODES[type(node)])
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "."]
            found += [f"imports {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            if name in FORBIDDEN_CALLS:
                found.append(f"calls {name}")
    return found


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_committed_notebook_is_clean(path):
    assert faults(read(path)) == []
    nbformat.validate(nbformat.read(path, as_version=4))


def test_there_is_one_notebook_per_stage():
    assert sorted(stage.notebook for stage in STAGES.values()) == STAGE_NAMES
    assert set(NAMES) - set(STAGE_NAMES) == BY_HAND
    assert all(re.fullmatch(r"\d\d_[a-z]+(_[a-z]+)+\.ipynb", name) for name in NAMES)


def test_notebooks_are_small():
    assert all(path.stat().st_size < 20_000 for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_reads_as_a_page(path):
    book = read(path)
    first = "".join(book["cells"][0]["source"])
    assert book["cells"][0]["cell_type"] == "markdown"
    assert first.startswith(f"# {path.name[:2]} · ")
    for word in ("reproduces", "needs", "writes", "takes"):
        assert f"| {word} |" in first
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert "parameters" in code[0]["metadata"]["tags"]
    if path.name in BY_HAND:
        assert "run by hand" in first and "build(" in "".join(code[1]["source"])
        return
    assert "open_stage(" in "".join(code[1]["source"])
    assert any("stage.finish(" in "".join(cell["source"]) for cell in code)


@pytest.mark.parametrize("path", OF_STAGES, ids=STAGE_NAMES)
def test_a_finished_stage_opened_again_writes_nothing(path):
    """What writes into the stage's folder stands under `if ... not stage.done:`."""
    for cell in identity.code_cells(path):
        for statement in ast.parse(cell["text"]).body:
            text = ast.unparse(statement)
            if isinstance(statement, ast.If):
                assert "stage.done" in ast.unparse(statement.test) or "retrain" in text
            else:
                calls = [
                    ast.unparse(n.func) for n in ast.walk(statement) if isinstance(n, ast.Call)
                ]
                assert not [c for c in calls if WRITES.search(c)], text


def test_each_page_links_to_the_next():
    for path, following in zip(OF_STAGES, [*OF_STAGES[1:], OF_STAGES[0]], strict=True):
        last = read(path)["cells"][-1]
        assert last["cell_type"] == "markdown"
        links = re.findall(r"\]\(([^)]+)\)", "".join(last["source"]))
        assert links == [following.name]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_every_link_leads_somewhere(path):
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
                assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_parameters_are_literals_with_a_comment_each_and_papermill_reads_them(path):
    import papermill

    cell = next(c for c in identity.code_cells(path) if "parameters" in c["tags"])
    names = []
    for line in cell["text"].splitlines():
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.Assign) and len(statement.targets) == 1
        ast.literal_eval(statement.value)
        assert re.search(r"  # \S", line), line
        names.append(statement.targets[0].id)
    stage = next((stage for stage in STAGES.values() if stage.notebook == path.name), None)
    expected = [field.name for field in dataclasses.fields(Experiment)]
    if stage is not None:
        expected = ["profile", "overrides", *stage.takes, *stage.by_hand]
    assert names == expected
    assert list(papermill.inspect_notebook(str(path))) == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_what_it_imports_exists(path):
    for cell in identity.code_cells(path):
        for node in ast.walk(ast.parse(cell["text"])):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("vflash_analysis"):
                file = identity.module_file(node.module)
                assert file is not None, node.module
                text = file.read_text(encoding="utf-8")
                for alias in node.names:
                    is_module = identity.module_file(f"{node.module}.{alias.name}")
                    assert is_module or re.search(rf"\b{alias.name}\b", text), alias.name


CLEAN = {
    "cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["x = 1  # x\n"],
    "outputs": [], "execution_count": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"outputs": [{}]}, "outputs"),
        ({"execution_count": 3}, "outputs or an execution count"),
        ({"source": ["x = 1\n"] * 16}, "16 lines"),
        ({"source": ["!ls\n"]}, "a shell line"),
        ({"source": ["%matplotlib inline\n"]}, "a shell line or magic"),
        ({"source": ["def f():\n", "    pass\n"]}, "a definition"),
        ({"source": ["try:\n", "    x\n", "except:\n", "    pass\n"]}, "a try block"),
        ({"source": ["import sys\n"]}, "imports sys"),
        ({"source": ["from decord import VideoReader\n"]}, "imports decord"),
        ({"source": ["exit()\n"]}, "calls exit"),
        ({"metadata": {"tags": ["parameters"], "papermill": {}}}, "metadata papermill"),
        ({"metadata": {}}, "0 parameters cells"),
    ],
)
def test_the_check_finds_what_it_is_for(change, fault):
    book = {
        "metadata": {"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}},
        "cells": [CLEAN | change],
    }
    found = faults(book)
    assert (found == []) if fault is None else any(fault in line for line in found)
    book["metadata"] |= {"kernelspec": {"name": "my_env"}, "widgets": {}}
    assert {"kernel my_env", "notebook metadata widgets"} <= set(faults(book))


def test_a_text_in_place_of_false_does_not_train_the_target_anew(monkeypatch):
    monkeypatch.setattr(pipeline, "retrain_target", lambda settings: pytest.fail("trained anew"))
    book = json.loads((paths.NOTEBOOKS / "20_prepare_target.ipynb").read_text())
    (cell,) = [
        "".join(c["source"]) for c in book["cells"] if "retrain_target(" in "".join(c["source"])
    ]
    with pytest.raises(InputError, match='retrain: found text "false"'):
        exec(cell, {"profile": "pocket", "overrides": {}, "retrain": "false"})


@pytest.mark.slow
def test_the_same_result_from_any_working_directory(tmp_path):
    """papermill by hand from /, from the checkout and from notebooks/: one folder, equal bytes."""
    told = []
    for name, cwd in (("a", "/"), ("b", paths.ROOT), ("c", paths.NOTEBOOKS)):
        words = ["-m", "papermill", str(paths.NOTEBOOKS / "10_prepare_clips.ipynb")]
        words += [str(tmp_path / f"{name}.ipynb"), "-k", "python3", "-p", "profile", "smoke"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VFLASH_")}
        environment["VFLASH_RUNS"] = str(tmp_path / name)
        subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment, check=True, capture_output=True
        )
        (done,) = (tmp_path / name / "smoke" / "clips").glob("*/DONE")
        outputs = json.loads(done.read_text())["outputs"]
        lists = {k: v["sha256"] for k, v in outputs.items() if k.endswith(".jsonl")}
        told.append((done.parent.name, lists))
    assert told[0] == told[1] == told[2] and len(told[0][1]) >= 3


def test_every_notebook_from_60_on_falls_back_on_the_tracked_records():
    falling = {stage.notebook[:2] for stage in STAGES.values() if stage.falls_back}
    assert falling == {stage.notebook[:2] for stage in STAGES.values() if stage.notebook >= "60"}
    for stage in STAGES.values():
        assert stage.falls_back == ("or nothing" in page(stage.notebook)), stage.name


@pytest.mark.slow
def test_the_cost_page_without_a_target_shows_the_tracked_records(tmp_path):
    """By papermill: nothing is measured, and the folder is done."""
    out = tmp_path / "out.ipynb"
    words = ["-m", "papermill", str(paths.NOTEBOOKS / "65_measure_cost.ipynb"), str(out)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VFLASH_")}
    environment["VFLASH_RUNS"] = str(tmp_path)
    words += ["-k", "python3", "-p", "profile", "smoke"]
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    (done,) = (tmp_path / "smoke" / "cost").glob("*/DONE")
    assert "costs.parquet" in json.loads(done.read_text())["outputs"]
    assert json.loads((done.parent / "manifest.json").read_text())["tracked_records"]
    assert "turn " not in out.read_text()


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_a_page_names_every_notebook_it_needs(stage):
    (needs,) = re.findall(r"^\| needs \|(.*)\|$", page(stage.notebook), re.MULTILINE)
    # the clips of a target come with its evaluation, so what a needed page itself needs may be left out
    wanted = {STAGES[name].notebook for name in stage.needs}
    spared = {STAGES[n].notebook for name in stage.needs for n in STAGES[name].needs}
    assert wanted - spared <= set(re.findall(r"\]\((.*?)\)", needs))


def page(notebook: str) -> str:
    """The first cell, a notebook's own description."""
    return "".join(json.loads((paths.NOTEBOOKS / notebook).read_text())["cells"][0]["source"])
