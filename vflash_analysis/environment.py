"""What a run stands on: interpreter, packages, device, readers, disk; and what a manifest keeps.

Nothing heavy is imported here: torch is asked only where it is loaded already or where the caller
wants the device named. `vflash doctor` and the first notebook show the table.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from vflash_analysis import config, paths
from vflash_analysis.config import Profile
from vflash_analysis.errors import InputError
from vflash_analysis.records import git_state, package_versions

BASE = (
    "numpy", "pandas", "pyarrow", "scipy", "matplotlib", "pillow", "seaborn", "pyyaml", "typer", "rich",
)  # fmt: skip
TORCH = ("torch", "transformers", "accelerate", "safetensors", "tokenizers")
READERS = ("decord", "eva-decord", "decord2", "av")
NOTEBOOKS = ("papermill", "nbclient", "ipykernel", "jupyterlab", "nbstripout")
TRANSFORMERS_RANGE = ((5, 24), (5, 40))  # at least the first, below the second
ELSEWHERE = "VFLASH_RUNS puts results elsewhere"
LEAST_DISK_GB = 2.0  # for records, notebooks and logs, beside what the estimate counts
READER_THREADS = 2  # that a frame reader decodes with; many make small clips slower
EOF_RETRY = "DECORD_EOF_RETRY_MAX"
MEMORY = "memory, "  # begins the item of a row that counts for the stage named after it
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def installed() -> dict[str, str | None]:
    """Version by distribution of everything that can change a result; None where absent."""
    versions = package_versions((*BASE, *TORCH, *READERS, *NOTEBOOKS))
    return versions | {"python": platform.python_version()}


def locked_versions() -> dict[str, str]:
    """Versions pinned in `requirements.lock`, by lower-case distribution name.

    Raises:
        InputError: the file is missing or a line is no exact pin.
    """
    path = paths.ROOT / "requirements.lock"
    if not path.is_file():
        raise InputError(f"{path.name}: no such file")
    pins = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, equals, version = text.partition("==")
        if not equals:
            raise InputError(f"{path.name}: line {number}: found {text!r}, allowed: name==version")
        pins[name.strip().lower().replace("_", "-")] = version.strip()
    return pins


def kernel_command() -> list[str] | None:
    """The command that Jupyter's `python3` kernel starts; None when Jupyter is not installed."""
    if importlib.util.find_spec("jupyter_client") is None:
        return None
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        return list(KernelSpecManager().get_kernel_spec("python3").argv)
    except NoSuchKernel:
        return None


def row(item: str, found: Any, wanted: str, ok: bool, note: str = "") -> dict[str, Any]:
    """One row of `environment_table`."""
    shown = "missing" if found is None else str(found)
    return {"item": item, "found": shown, "wanted": wanted, "ok": ok, "note": note}


def _package_rows() -> list[dict[str, Any]]:
    """Rows for the packages: base is required, the rest is needed by what its note names."""
    found, locked = installed(), locked_versions()
    rows = []
    for group, names, need in (
        ("base", BASE, "everything"),
        ("torch", TORCH, "stages 20 to 50; tables and figures do without"),
        ("notebooks", NOTEBOOKS, "notebooks and the runner"),
    ):
        for name in names:
            version, pin = found[name], locked.get(name.lower(), "any")
            note = f"extra [{group}]: {need}" if version is None else ""
            if version and pin != "any" and version.split("+")[0] != pin:
                note = "differs from requirements.lock"
            rows.append(row(name, version, pin, version is not None or group != "base", note))
    return rows


def transformers_fits(version: str) -> bool:
    """Whether a transformers version lies in the range whose cache interface we speak."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return TRANSFORMERS_RANGE[0] <= numbers < TRANSFORMERS_RANGE[1]


def _reader_rows() -> list[dict[str, Any]]:
    found = package_versions(READERS)
    usable = [name for name, version in found.items() if version]
    shown = ", ".join(f"{name} {found[name]}" for name in usable) or None
    note = "" if usable else "no reader of video files: install decord, eva-decord, decord2 or av"
    return [
        row("frame readers", shown, " or ".join(READERS), bool(usable), note),
        row("reader threads", READER_THREADS, "any", True),
        row("eof_retry", os.environ.get(EOF_RETRY, "default"), "any", True, EOF_RETRY),
    ]


def _device_rows(profile: Profile) -> list[dict[str, Any]]:
    wanted = profile.target.device
    if importlib.util.find_spec("torch") is None:
        return [
            row("device", None, wanted, False, "torch is not installed: pip install -e .[torch]")
        ]
    import torch

    there = wanted == "cpu" or torch.cuda.is_available()
    name = device_label(wanted if there else "cpu")
    note = "" if there else "the profile wants a CUDA device"
    rows = [row("device", name, wanted, there, note)]
    return [*rows, row("torch threads", torch.get_num_threads(), "any", True)]


def free_disk_bytes(folder: Path) -> int:
    """Free disk where a folder's files would go: there or at the nearest folder above it."""
    place = folder
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _disk_row(disk_bytes: float | None) -> dict[str, Any]:
    """The row of the free disk; not ok where it is unknown what is needed."""
    free_gb = free_disk_bytes(paths.RUNS) / 1e9
    found = f"{free_gb:.1f} GB"
    if disk_bytes is None:
        return row("free disk", found, "unknown", False, "what the run reads cannot be read whole")
    needed_gb = LEAST_DISK_GB + disk_bytes / 1e9
    fits = free_gb >= needed_gb
    note = "" if fits else ELSEWHERE
    return row("free disk", found, f"{needed_gb:.1f} GB or more", fits, note)


def _place_rows(profile: Profile, disk_bytes: float | None) -> list[dict[str, Any]]:
    """Rows for the folders of this machine, the disk and the kernel."""
    rows = []
    if profile.target.source != config.TINY_TARGET:
        try:
            folder = config.target_folder(profile.target)
            there = (folder / "config.json").is_file()
            note = "" if there else "no config.json there"
            rows.append(row("target", paths.relative_to_root(folder), "a checkpoint", there, note))
        except InputError as error:
            rows.append(row("target", None, "a checkpoint", False, str(error)))
    if profile.clips.source == "suites":
        try:
            rows.append(row("videos", str(config.data_folder()), "a folder", True))
        except InputError as error:
            rows.append(row("videos", None, "a folder", False, str(error)))
    rows.append(_disk_row(disk_bytes))
    command = kernel_command()
    ours = command is not None and Path(command[0]).name.startswith("python")
    note = "" if ours else "pip install -e .[notebooks]"
    rows.append(row("kernel python3", command and command[0], "this interpreter", ours, note))
    return rows


def environment_table(profile: Profile, disk_bytes: float | None) -> pd.DataFrame:
    """What is there and what the profile wants: columns item, found, wanted, ok, note.

    Args:
        profile: the profile.
        disk_bytes: what its shards have yet to leave (`estimate.disk_bytes`); None: unknown.
    """
    wanted = ">=3.11"
    rows = [row("python", platform.python_version(), wanted, sys.version_info >= (3, 11))]
    rows += _package_rows()
    version = package_versions(["transformers"])["transformers"]
    if version is not None and not transformers_fits(version):
        low, high = (".".join(map(str, end)) for end in TRANSFORMERS_RANGE)
        rows.append(row("transformers range", version, f">={low},<{high}", False))
    rows += [*_reader_rows(), *_device_rows(profile), *_place_rows(profile, disk_bytes)]
    return pd.DataFrame(rows)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads() -> int | None:
    """Threads that torch computes with, or the machine's where torch is not loaded."""
    torch = sys.modules.get("torch")
    return os.cpu_count() if torch is None else torch.get_num_threads()


def nvidia_smi(*fields: str, gpu: str = "") -> list[dict[str, str]]:
    """The fields of every GPU, or of one, as nvidia-smi prints them; none where it cannot be asked.

    Args:
        fields: names that `nvidia-smi --help-query-gpu` lists.
        gpu: number or UUID.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    command += [f"--id={gpu}"] if gpu else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in answer.stdout.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def device_label(device: Any = "cpu") -> str:
    """The records' `device`: the GPU's name, or the CPU's model and the threads in use.

    Args:
        device: a `torch.device` or its name.
    """
    kind = str(device).partition(":")[0]
    if kind != "cuda":
        n = _threads()
        return f"{kind} ({_cpu_model()}, {n} thread{'' if n == 1 else 's'})"
    import torch

    return torch.cuda.get_device_name(device)


def free_bytes(device: Any) -> int | None:
    """Bytes that can still be taken on a device; None where the system does not say.

    On a CPU what the kernel calls available, or what the limit of a control group leaves (a
    container's, a job's) if that is less; files that the kernel merely keeps in memory do not
    count as used.

    Args:
        device: a `torch.device` or its name.
    """
    if str(device).startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    try:
        available = 1024 * dict(_numbers("/proc/meminfo"))["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return None
    return min([available, *_left_by_groups()])


# Of each version of control groups: where its memory groups lie, and the names of its files.
_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def _left_by_groups() -> Iterator[int]:
    """Bytes that are left under each limit on this process: of its control group and those above."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        for kind in {"", "memory"} & set(controllers.split(",")):
            root, limit, used, kept = _GROUPS[kind]
            for group in (PurePosixPath(own), *PurePosixPath(own).parents):
                folder = f"{root}{group}".rstrip("/")
                try:
                    most, now = (
                        int(Path(f"{folder}/{name}").read_text(encoding="utf-8"))
                        for name in (limit, used)
                    )
                    cached = dict(_numbers(f"{folder}/memory.stat"))[kept]
                except (OSError, ValueError, KeyError):
                    continue  # no limit ("max"), or a level that a container does not show
                yield max(0, most - now + cached)


def _numbers(file: str) -> Iterator[tuple[str, int]]:
    """Names and whole numbers of a file with one of each a line."""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        name, number = line.split()[:2]
        yield name.rstrip(":"), int(number)


def machine(device: Any = None) -> dict[str, Any]:
    """Facts a manifest keeps: device, driver, clocks, CPU, threads, versions, commit (JSON types).

    Args:
        device: what the stage computed on; None for the GPU if this process has used one, else the
            CPU. A GPU that is there and idle is not named.
    """
    torch = sys.modules.get("torch")
    if device is None:
        used = torch is not None and torch.cuda.is_initialized()
        device = "cuda" if used else "cpu"
    facts: dict[str, Any] = {
        "device": device_label(device),
        "driver": None,
        "clocks": None,
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": _threads(),
        "platform": platform.platform(),
        "versions": installed(),
    }
    if str(device).startswith("cuda"):
        clocks = ("clocks.sm", "clocks.mem", "clocks.max.sm")
        used = os.environ.get(VISIBLE_GPUS, "").partition(",")[0]
        told = [*nvidia_smi("driver_version", *clocks, gpu=used), {}][0]
        facts["driver"] = told.get("driver_version")
        facts["clocks"] = {name: told.get(name) for name in clocks}
        facts["versions"]["cuda"] = torch.version.cuda if torch is not None else None
    return facts | git_state(paths.ROOT)
