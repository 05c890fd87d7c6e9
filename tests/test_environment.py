"""pyproject, lock, environment, Makefile and CI say the same thing; the base stays light."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
import yaml

from vflash_analysis import config, environment, estimate, paths, stages
from vflash_analysis.errors import InputError

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = environment.locked_versions()
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(.*)")


def requirements(lines):
    return {m[1].lower().replace("_", "-"): m[2] for m in map(REQUIREMENT.fullmatch, lines)}


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_every_requirement_is_pinned_within_its_range():
    assert all("==" in line for line in EXTRAS["smollm2"])  # by hand only: pinned where it stands
    locked = [line for name, extra in EXTRAS.items() if name != "smollm2" for line in extra]
    everything = [*PROJECT["dependencies"], *locked]
    for name, limits in requirements(everything).items():
        assert name in LOCK, name
        for sign, version in re.findall(r"(>=|<)([\d.]+)", limits):
            found, limit = numbers(LOCK[name]), numbers(version)
            assert found >= limit if sign == ">=" else found < limit, (name, limits, LOCK[name])


def test_the_base_is_light():
    base = set(requirements(PROJECT["dependencies"]))
    assert base == set(environment.BASE)
    heavy = set(environment.TORCH) | {"decord", "av", "papermill", "jupyterlab"}
    assert not base & heavy


def test_transformers_range_is_stated_once_and_the_same_everywhere():
    assert requirements(EXTRAS["torch"])["transformers"] == ">=5.24,<5.40"
    assert environment.TRANSFORMERS_RANGE == ((5, 24), (5, 40))
    assert environment.transformers_fits(LOCK["transformers"])
    told = [
        environment.transformers_fits(v) for v in ("5.23.9", "5.24.0", "5.39.9", "5.40.0", "6.0")
    ]
    assert told == [False, True, True, False, False]


def test_the_lock_has_exact_public_pins_only():
    text = (paths.ROOT / "requirements.lock").read_text()
    for line in text.splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line), line
    assert "vflash" not in text and "torch==2.13.0\n" in text
    names = [line.split("==")[0].lower() for line in text.splitlines()]
    assert names == sorted(names, key=str.lower) and len(set(names)) == len(names)


def test_environment_yml_installs_the_lock_and_the_project():
    told = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    assert "python=3.11" in told["dependencies"] and "pip" in told["dependencies"]
    (pip,) = [part["pip"] for part in told["dependencies"] if isinstance(part, dict)]
    assert pip == ["-r requirements.lock", "-e ."]
    assert PROJECT["requires-python"] == ">=3.11"


def test_makefile_installs_from_the_same_lock():
    text = (paths.ROOT / "Makefile").read_text()
    assert "LOCK := requirements.lock" in text
    assert "$(FULL),-r $(LOCK) -e ." in text and "$(BASE),-c $(LOCK) -e ." in text
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    wanted = {
        "reproduce", "smoke", "test", "test-all", "test-workflow", "lab", "figures", "publish",
    }  # fmt: skip
    assert wanted <= targets
    figures = re.search(r"^figures:(.*)$", text, re.MULTILINE)[1]
    assert "BASE" in figures and "FULL" not in figures


def test_make_installs_nothing_while_the_lock_is_unchanged(tmp_path):
    """The stamp's checksum decides: with it in place no pip runs, without it pip does."""
    log = tmp_path / "log"
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    for name in ("python", "vflash"):
        (bin_ / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n')
        (bin_ / name).chmod(0o755)

    def make(target):
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["make", "-s", target, f"VENV={tmp_path / 'venv'}"],
            cwd=paths.ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    first = make("test")
    assert first[0].startswith("python -m pip install --quiet --upgrade pip")
    assert "-r requirements.lock -e ." in first[1]
    assert first[2].startswith("python -m pytest -m not slow and not gpu")
    assert make("test") == first[2:]
    assert make("figures") == ["vflash figures"]  # the full install serves for the base
    stamp = tmp_path / "venv" / ".base-stamp"
    stamp.write_text("another lock\n")
    os.utime(stamp, (1, 1))
    again = make("figures")
    assert "-c requirements.lock -e ." in again[1] and again[2] == "vflash figures"


@pytest.mark.parametrize("module", ["vflash_analysis", "vflash_analysis.config", "vflash_analysis.metrics",
                                    "vflash_analysis.stats", "vflash_analysis.records", "vflash_analysis.runner",
                                    "vflash_analysis.cli", "vflash_analysis.notebook"])  # fmt: skip
def test_light_modules_load_nothing_heavy(module):
    code = (
        f"import sys, {module}\n"
        "print({'torch', 'transformers', 'decord', 'av', 'papermill'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


def test_no_legacy_cache_calls():
    for file in paths.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("to_legacy_cache", "from_legacy_cache"), file


def test_no_file_names_a_machine():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=paths.ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    kinds = (".py", ".toml", ".lock", ".yml", ".yaml", ".md", ".cff", ".ipynb", "Makefile", "run")
    pattern = re.compile(r"file:" r"//|(?<![\w.])/(?:home|root|mnt)/")
    for name in filter(None, listed):
        path = paths.ROOT / name
        if name.endswith(kinds) and path.is_file():
            assert not pattern.search(path.read_text(encoding="utf-8")), name


def test_the_environment_table_tells_what_is_there(monkeypatch):
    monkeypatch.setenv(environment.EOF_RETRY, "7")
    table = environment.environment_table(config.load_profile("smoke"), 0.0).set_index("item")
    assert table.loc["reader threads", "found"] == "2"
    assert table.loc["eof_retry", "found"] == "7"
    assert table.loc["torch", "wanted"] == LOCK["torch"]
    assert bool(table.loc["kernel python3", "ok"]) and bool(table.loc["device", "ok"])
    assert {"python", "frame readers", "free disk", "transformers"} <= set(table.index)


def test_the_disk_that_is_wanted_is_the_plan_s_where_results_go(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        environment.shutil, "disk_usage", lambda p: asked.append(p) or SimpleNamespace(free=20e9)
    )
    monkeypatch.setattr(config, "local_paths", dict)
    for name, fits in (("smoke", True), ("pocket", True), ("h100", False)):
        profile = config.load_profile(name)
        monkeypatch.setattr(paths, "RUNS", tmp_path / "plan")
        needed = estimate.disk_bytes(profile, stages.plan(name))
        monkeypatch.setattr(paths, "RUNS", tmp_path / "not" / "yet")
        table = environment.environment_table(profile, needed).set_index("item")
        row = table.loc["free disk"]
        assert (bool(row["ok"]), row["found"]) == (fits, "20.0 GB"), name
        assert row["wanted"] == f"{2 + needed / 1e9:.1f} GB or more"
        assert ("VFLASH_RUNS" in row["note"]) != fits
    # h100: two checkpoints of masters and two averages, and two drafters, 3.93 GB of masters each
    assert needed == pytest.approx((2 * 3 + 2) * 3.93e9, rel=0.01)
    assert set(asked) == {tmp_path}


def test_a_disk_need_that_cannot_be_told_is_unknown_and_not_ok():
    table = environment.environment_table(config.load_profile("smoke"), None).set_index("item")
    row = table.loc["free disk"]
    assert (row["wanted"], bool(row["ok"])) == ("unknown", False) and "cannot be read" in row[
        "note"
    ]


def test_without_a_reader_the_table_names_the_alternatives(monkeypatch):
    really = environment.package_versions
    monkeypatch.setattr(
        environment, "package_versions",
        lambda names: {n: None if n in environment.READERS else v for n, v in really(names).items()},
    )  # fmt: skip
    table = environment.environment_table(config.load_profile("smoke"), 0.0).set_index("item")
    row = table.loc["frame readers"]
    assert not row["ok"]
    assert all(name in row["note"] for name in ("decord", "eva-decord", "decord2", "av"))


def test_a_wrong_transformers_and_a_missing_folder_are_shown(monkeypatch, tmp_path):
    really = environment.package_versions
    monkeypatch.setattr(
        environment, "package_versions",
        lambda names: {n: "5.41.0" if n == "transformers" else v for n, v in really(names).items()},
    )  # fmt: skip
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    monkeypatch.delenv("VFLASH_DATA", raising=False)
    table = environment.environment_table(config.load_profile("h100"), 0.0).set_index("item")
    assert not table.loc["transformers range", "ok"]
    assert table.loc["target", "note"] == "no config.json there"
    assert "VFLASH_DATA" in table.loc["videos", "note"] and not table.loc["videos", "ok"]


def test_the_lock_is_read_strictly(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    with pytest.raises(InputError, match="no such file"):
        environment.locked_versions()
    (tmp_path / "requirements.lock").write_text("numpy==2.0  # a comment\n\nPy_YAML==6\n")
    assert environment.locked_versions() == {"numpy": "2.0", "py-yaml": "6"}
    (tmp_path / "requirements.lock").write_text("numpy==2.0\ntorch>=2\n")
    with pytest.raises(InputError, match=r"requirements\.lock: line 2: found 'torch>=2'"):
        environment.locked_versions()


def test_a_manifest_names_machine_commit_and_versions():
    facts = environment.machine()
    json.dumps(facts)
    assert {"device", "driver", "threads", "versions", "git_commit", "git_dirty"} <= set(facts)
    assert facts["versions"]["numpy"] and facts["versions"]["python"]


def test_free_memory_is_what_the_kernel_says_or_unknown(monkeypatch, tmp_path):
    found = environment.free_bytes("cpu")
    assert found is not None and 2**20 < found < 2**50

    class Nowhere(type(tmp_path)):
        def read_text(self, *arguments, **keywords):
            raise FileNotFoundError(str(self))

    monkeypatch.setattr(environment, "Path", Nowhere)
    assert environment.free_bytes("cpu") is None


def test_a_container_s_limit_counts_where_it_leaves_less(monkeypatch, tmp_path):
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "/proc/self/cgroup": "1:name=systemd:/\n0::/jobs/7\n",
        "/sys/fs/cgroup/memory.max": "3000000\n",
        "/sys/fs/cgroup/memory.current": "1500000\n",
        "/sys/fs/cgroup/memory.stat": "anon 900000\ninactive_file 500000\n",
    }

    class Given(type(tmp_path)):
        def read_text(self, *arguments, **keywords):
            if str(self) not in files:
                raise FileNotFoundError(str(self))
            return files[str(self)]

    def group(folder, limit, used, kept, bytes_):
        for name, number in zip((limit, used), bytes_, strict=False):
            files[f"/sys/fs/cgroup{folder}/{name}"] = f"{number}\n"
        files[f"/sys/fs/cgroup{folder}/memory.stat"] = f"anon 1\n{kept} {bytes_[2]}\n"

    monkeypatch.setattr(environment, "Path", Given)
    assert environment.free_bytes("cpu") == 2_000_000
    second = ("memory.max", "memory.current", "inactive_file")
    group("/jobs/7", *second, (900_000, 200_000, 100_000))  # a job's own limit
    assert environment.free_bytes("cpu") == 800_000
    group("/jobs/7", *second, ("max", 200_000, 0))
    group("/jobs", *second, (1_000_000, 990_000, 0))  # that of all jobs together
    assert environment.free_bytes("cpu") == 10_000
    files["/proc/self/cgroup"] = "0::/\n"
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert environment.free_bytes("cpu") == 8000 * 1024
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group("/memory", *first, (500_000, 600_000, 0))  # version 1; a container's path is not shown
    files["/proc/self/cgroup"] = "4:cpu,memory:/docker/abc\n0::/\n"
    assert environment.free_bytes("cpu") == 0


def test_an_idle_gpu_is_not_the_device_and_the_driver_is_the_drivers(monkeypatch):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: False,
        get_device_name=lambda device: "NVIDIA H100 80GB HBM3",
    )
    torch = SimpleNamespace(
        cuda=cuda, get_num_threads=lambda: 7, version=SimpleNamespace(cuda="12.8")
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(environment, "_cpu_model", lambda: "Xeon")
    asked = []
    answer = {"driver_version": "570.1", "clocks.sm": "1980 MHz"}
    monkeypatch.setattr(
        environment, "nvidia_smi", lambda *fields, gpu: asked.append(gpu) or [dict(answer)]
    )
    monkeypatch.setenv(environment.VISIBLE_GPUS, "GPU-b,GPU-a")
    for idle in (environment.machine(), environment.machine("cpu")):
        assert idle["device"] == environment.device_label("cpu") == "cpu (Xeon, 7 threads)"
        assert idle["driver"] is None and "cuda" not in idle["versions"]
    cuda.is_initialized = lambda: True
    used = environment.machine()
    assert used["device"] == "NVIDIA H100 80GB HBM3" and used["driver"] == "570.1"
    unknown = {"clocks.mem": None, "clocks.max.sm": None}
    assert used["clocks"] == {"clocks.sm": "1980 MHz"} | unknown
    assert used["versions"]["cuda"] == "12.8" and asked == ["GPU-b"]  # not the machine's first
    assert environment.machine("cpu")["device"] == "cpu (Xeon, 7 threads)"


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("570.1, 1980 MHz\n570.1, 210 MHz\n", ["1980 MHz", "210 MHz"]),
        ("570.1\n", []),
        ("", []),
    ],
)
def test_nvidia_smi_is_read_or_stays_unknown(monkeypatch, printed, found):
    commands = []

    def run(command, **options):
        commands.append(command)
        return SimpleNamespace(stdout=printed)

    monkeypatch.setattr(environment.subprocess, "run", run)
    rows = environment.nvidia_smi("driver_version", "clocks.sm", gpu="GPU-b")
    assert rows == [{"driver_version": "570.1", "clocks.sm": clock} for clock in found]
    environment.nvidia_smi("index")
    assert [command[-1] for command in commands] == ["--id=GPU-b", "--format=csv,noheader"]
