"""The Snakefile over the plan: what it reads, dry runs of the profiles, runs of a fake and of smoke."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vflash_analysis import paths, records, stages

WORKFLOW = paths.ROOT / "workflow"
SNAKEFILE = WORKFLOW / "Snakefile"
SNAKEMAKE = shutil.which("snakemake")
needs_snakemake = pytest.mark.skipif(
    SNAKEMAKE is None, reason="no snakemake on PATH; `make test-workflow` installs it and runs this"
)
VFLASH = Path(sys.executable).parent / "vflash"

LAST = "drafter-a-0-drafter.block_size=8"  # a name with what a shell or a file name might not bear
# Two decodes on a GPU between stages without one; it keeps a log of what began and ended.
FAKE = """
import json, os, sys, time
from pathlib import Path
place = Path(__file__).parent
needs = {"clips": [], "decode-VDC-0": ["clips"], "decode-Video-MME-0": ["clips"],
         "drafter-a-0-drafter.block_size=8": ["decode-VDC-0", "decode-Video-MME-0"]}
def row(name):
    stage = name.split("-")[0]
    folder = Path("runs") / stage / f"id{len(name)}"
    return {"name": name, "stage": stage, "run_id": folder.name, "folder": str(folder),
            "dependencies": needs[name], "device": "cuda" if stage == "decode" else "",
            "done": (place / folder / "outputs").exists()}
def log(text):
    with (place / "log").open("a") as out:
        print(text, file=out)
if "--refuse" in sys.argv:
    sys.exit("vflash: --refuse: found x, allowed: y")
if sys.argv[1] == "plan":
    print("a table")
    print(json.dumps({"profile": "p", "shards": [row(name) for name in needs]}))
else:
    name = sys.argv[-1]
    log(f"begin {name} {' '.join(sys.argv[1:-1])}")
    if (place / "broken").exists() and name == (place / "broken").read_text():
        sys.exit(f"  {name}: error: boom")
    time.sleep(0.5)
    folder = place / row(name)["folder"]
    (folder / "outputs").touch()
    (folder / "DONE").touch()
    log(f"end {name}")
"""


@pytest.fixture
def fake(tmp_path):
    """A checkout with nothing but a command that plays vflash; returns its folder."""
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "vflash").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/fake.py "$@"\n')
    (tmp_path / "vflash").chmod(0o755)
    return tmp_path


def names_of(config: dict[str, str]) -> dict[str, object]:
    """The Snakefile's Python, up to its first rule, without Snakemake."""
    source = SNAKEFILE.read_text().split("\nworkdir:")[0]
    imported = "from snakemake.exceptions import WorkflowError\n"
    assert source.count(imported) == 1
    found: dict[str, object] = {
        "config": config,
        "workflow": SimpleNamespace(basedir=str(WORKFLOW)),
        "WorkflowError": RuntimeError,
    }
    exec(source.replace(imported, ""), found)
    return found


def test_it_is_short():
    lines = SNAKEFILE.read_text().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 100


def test_it_reads_the_plan_and_hands_its_options_on(fake):
    told = names_of({"checkout": str(fake), "vflash": "vflash", "profile": "p", "run": "--all"})
    assert told["RUN"] == f"{fake}/vflash run --profile p --all --only"
    assert list(told["DONE"].items())[:2] == [
        ("clips", "runs/clips/id5/DONE"),
        ("decode-VDC-0", "runs/decode/id12/DONE"),
    ]
    assert [s["name"] for s in told["WAITING"].values()] == list(told["DONE"])
    (fake / "runs/clips/id5").mkdir(parents=True)
    (fake / "runs/clips/id5/outputs").touch()
    assert "id5" not in names_of({"checkout": str(fake), "vflash": "vflash"})["WAITING"]


def test_what_vflash_refuses_and_what_is_damaged_is_one_line(fake):
    here = {"checkout": str(fake), "vflash": "vflash"}
    with pytest.raises(RuntimeError, match=r"^vflash: --refuse: found x, allowed: y$"):
        names_of(here | {"run": "--refuse"})
    (fake / "runs/clips/id5").mkdir(parents=True)
    (fake / "runs/clips/id5/DONE").touch()  # which the plan does not count as done
    with pytest.raises(RuntimeError, match=r"^runs/clips/id5: damaged; remove it and run again$"):
        names_of(here)


def test_the_plan_has_what_the_snakefile_reads():
    read = set(re.findall(r"(?:shard|\]|OWN\[0\])\[\"(\w+)\"\]", SNAKEFILE.read_text()))
    assert {"name", "run_id", "folder", "done", "stage", "dependencies"} <= read
    for shard in stages.plan("smoke"):
        assert read <= set(shard.as_json())


def test_its_packages_are_pinned_and_not_the_packages_own():
    lines = (WORKFLOW / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"snakemake[a-z-]*==[0-9.]+", line) for line in lines), lines
    for file in ("pyproject.toml", "requirements.lock", "environment.yml"):
        assert "snakemake" not in (paths.ROOT / file).read_text()


def snakemake(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the workflow from `place`; output and errors together."""
    command = [str(SNAKEMAKE), "-s", str(SNAKEFILE), "--nocolor", *options]
    return subprocess.run(
        command, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def job_counts(printed: str) -> dict[str, int]:
    """Jobs by rule, as Snakemake tables them first."""
    table = printed.split("Job stats:")[1].split("total")[0]
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}


def run_fake(fake: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the fake's shards; what Snakemake said, and the log's new lines."""
    (fake / "log").unlink(missing_ok=True)
    told = snakemake(
        fake, "--cores", "16", "--keep-going", *options,
        "--config", f"checkout={fake}", "vflash=vflash", "run=--all --set x=[1,2]",
    )  # fmt: skip
    log = (fake / "log").read_text().splitlines() if (fake / "log").exists() else []
    return told, log


@needs_snakemake
def test_shards_on_a_gpu_wait_for_one_and_what_is_done_stays(fake):
    told, log = run_fake(fake, "--resources", "gpu=1")
    assert told.returncode == 0, told.stdout
    options = "run --profile pocket --all --set x=[1,2] --only"
    first, second = (line.split()[1] for line in log if line.startswith("begin decode"))
    assert {first, second} == {"decode-VDC-0", "decode-Video-MME-0"}
    order = [f"{word} {name}" for name in ("clips", first, second, LAST)
             for word in ("begin", "end")]  # fmt: skip
    assert [line.removesuffix(f" {options}") for line in log] == order
    told, log = run_fake(fake, "--forceall")
    assert told.returncode == 0 and log == [], told.stdout


@needs_snakemake
def test_two_gpus_decode_two_shards_at_once(fake):
    _, log = run_fake(fake, "--resources", "gpu=2")
    assert [line.split()[0] for line in log if " decode-" in line] == 2 * ["begin"] + 2 * ["end"]


@needs_snakemake
def test_a_failed_shard_is_a_failed_job_that_is_tried_again(fake):
    (fake / "broken").write_text("decode-VDC-0")
    told, log = run_fake(fake)
    assert told.returncode != 0 and "  decode-VDC-0: error: boom\n" in told.stdout
    assert "end decode-Video-MME-0" in log and f"begin {LAST}" not in " ".join(log)
    (fake / "broken").unlink()
    told, log = run_fake(fake)
    assert told.returncode == 0
    assert [line for line in log if line.startswith("end")] == ["end decode-VDC-0", f"end {LAST}"]


@needs_snakemake
@pytest.mark.parametrize("profile", ["", "slurm", "kubernetes"])
def test_dry_runs_plan_every_shard_once(tmp_path, monkeypatch, profile):
    monkeypatch.setenv("VFLASH_RUNS", str(tmp_path / "runs"))
    options = ["--config", f"checkout={paths.ROOT}", f"vflash={VFLASH}", "profile=smoke"]
    options += ["run=--all"]
    if profile:
        options += ["--profile", str(WORKFLOW / "profiles" / profile)]
    if profile == "kubernetes":
        options += ["--default-storage-prefix", str(tmp_path)]
    told = snakemake(tmp_path, "-n", *options)
    assert told.returncode == 0, told.stdout
    shards = stages.plan("smoke", all_clips=True)
    expected = {name: sum(s.stage == name for s in shards) for name in {s.stage for s in shards}}
    assert job_counts(told.stdout) == expected | {"all": 1}


@needs_snakemake
@pytest.mark.slow
def test_smoke_runs_through_it_and_a_second_run_has_nothing_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("VFLASH_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    config = ["--config", f"checkout={paths.ROOT}", f"vflash={VFLASH}", "profile=smoke"]
    threads = f"threads={os.environ.get('OMP_NUM_THREADS', '2')}"
    told = snakemake(tmp_path, "--cores", "2", *config, threads)
    assert told.returncode == 0, told.stdout
    for shard in stages.plan("smoke"):
        assert records.why_not_done(shard.folder) is None, shard.name
        assert (shard.folder / "notebook.ipynb").stat().st_size > 1000, shard.name
    assert "Nothing to be done" in snakemake(tmp_path, "--cores", "2", *config).stdout
