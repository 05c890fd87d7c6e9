"""Two processes on the CPU (gloo): DDP and FSDP2 give what one process gives, killed or not.

accelerate takes FSDP2 for GPUs only: on a CPU its state would say DDP, whatever was asked for. So
`sharded` tells that state what it is; all that follows is accelerate's own: its plugin, made from
the variables that `accelerate launch` sets, sharding, checkpoints and the gathered weights.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.training.test_loop import PIECES, TARGET, Killed, killed_after, new, run
from tests.training.toys import ListSource, batch_of, random_source, settings
from vflash_analysis.model.drafter import drafter_sha256, load_drafter
from vflash_analysis.records import read_records
from vflash_analysis.schemas import TRAINING
from vflash_analysis.training import loop
from vflash_analysis.training.objectives import compute_loss
from vflash_analysis.training.step import TrainingStep, gradient_step

OPTIMIZERS = ("adamw", "muon")


class Processes:
    """What `gradient_step` needs of accelerate, without its choice of a device."""

    def __init__(self, count: int) -> None:
        self.num_processes = count

    def no_sync(self, model: Any) -> Any:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self, value: torch.Tensor, how: str) -> torch.Tensor:
        value = value.clone()
        if self.num_processes > 1:
            dist.all_reduce(value)
        return value


def gradients(source: ListSource, processes: Processes, shard: bool) -> dict[str, torch.Tensor]:
    drafter = new()
    chosen = settings(revealed_weight=0.5)
    model = TrainingStep(drafter, PIECES, chosen, compute_loss)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (processes.num_processes,)))
    gradient_step(model, [lambda with_states: batch_of(source, 15)], 3, processes)
    found = {name: p.grad for name, p in drafter.named_parameters()}
    assert all(hasattr(grad, "full_tensor") == shard for grad in found.values())
    return {n: grad.full_tensor() if shard else grad for n, grad in found.items()}


# As `accelerate launch` sets them for the command in `training/launch.py`.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


class Sharded(Accelerator):
    """Accelerate on CPUs, told that it shards."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        plugin = FullyShardedDataParallelPlugin()
        self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


@contextlib.contextmanager
def sharded() -> Iterator[None]:
    """Training under accelerate's FSDP2."""
    before = dict(os.environ)
    os.environ.update(FSDP2)
    AcceleratorState._reset_state()
    loop.Accelerator = Sharded  # type: ignore[misc]
    try:
        yield
    finally:
        loop.Accelerator = Accelerator  # type: ignore[misc]
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        AcceleratorState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def options(optimizer: str, objective: str = "self_reveal") -> dict[str, Any]:
    """4 steps in micro-batches of one clip: accumulation, and states that are made one by one."""
    chosen = settings(
        steps=4, revealed_weight=0.5, checkpoint_every=2, optimizer=optimizer, objective=objective
    )
    validation = random_source(new(), 9, prompt=14)
    return {"settings": chosen, "validation": validation, "log_every": 2, "micro_clips": 1}


def train_on(out: Path) -> None:
    """Trains once with each optimizer, into a folder of its name."""
    for optimizer in OPTIMIZERS:
        run(out / optimizer, **options(optimizer))


def killed_and_resumed(out: Path) -> list[str]:
    """Trains, killed in step 3 after the checkpoint of step 2, and again; what the second said."""
    wanted = options("adamw")
    # A rank's step is two counts and two losses: the kill comes between those of step 3.
    with pytest.raises(Killed):
        run(out, loss=killed_after(2 * 4 + 3), **wanted)
    assert not (out / "drafter").is_dir()
    lines: list[str] = []
    run(out, log=lines.append, **wanted)
    return lines


def worker(out: Path) -> None:
    """What each of the two processes runs."""
    torch.set_num_threads(1)
    train_on(out)
    source = random_source(new(), 4)
    rank, count = dist.get_rank(), dist.get_world_size()
    first = rank == 0
    lines = killed_and_resumed(out / "ddp")
    assert ("resuming after step 2 of 4" in lines) == first
    with sharded():
        run(out / "fsdp2", **options("adamw"))
        lines = killed_and_resumed(out / "fsdp2-resumed")
        assert ("resuming after step 2 of 4" in lines) == first
    gradient = gradients(ListSource(source.items[rank::count]), Processes(count), shard=True)
    whole = gradients(source, Processes(1), shard=False)
    worst = max(float((gradient[name] - whole[name]).abs().max()) for name in whole)
    (out / f"worst-{rank}.txt").write_text(str(worst))


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Same weights and metrics; each of 9 validation clips counts once; FSDP2's gradient; and a
    killed run goes on to the same bits, under DDP and under FSDP2."""
    train_on(tmp_path / "1")
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, pathlib\n"
        "from tests.training.test_distributed import worker\n"
        "worker(pathlib.Path(sys.argv[1]))\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(root), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "2")],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert float((tmp_path / "2" / f"worst-{rank}.txt").read_text()) < 1e-5
    found = [tmp_path / processes / "adamw" for processes in "12"]
    one, two = (read_records(out / "training.parquet", TRAINING) for out in found)
    assert one["step"].tolist() == two["step"].tolist() == [2, 4, 4]
    for name in ("loss", "loss_mask", "loss_flow"):
        a, b = (torch.tensor(frame[name].to_numpy(float)) for frame in (one, two))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(one["slot_accuracy"], two["slot_accuracy"], strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-12)
    assert one["n_right"].tolist() == two["n_right"].tolist()
    first, second, shards = (weights(out) for out in (*found, tmp_path / "2" / "fsdp2"))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(first[name], shards[name], rtol=1e-4, atol=1e-5)
    for straight, resumed in (("adamw", "ddp"), ("fsdp2", "fsdp2-resumed")):
        both = [tmp_path / "2" / name / "drafter" for name in (straight, resumed)]
        assert drafter_sha256(both[0]) == drafter_sha256(both[1])
        assert not (both[1].parent / "checkpoints").exists()
    # Muon turns a gradient in bfloat16: what two processes differ by is small beside the way gone
    start = new().state_dict()
    first, second = (weights(tmp_path / processes / "muon") for processes in "12")
    for name in first:
        way = (first[name] - start[name]).norm()
        assert way > 0 and (first[name] - second[name]).norm() < 0.1 * way


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_drafter(out / "drafter", TARGET).state_dict())
