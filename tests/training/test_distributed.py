"""Two processes on the CPU (gloo): DDP and FSDP2 give what one process gives."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.training.test_loop import PIECES, TARGET, new, run
from tests.training.toys import ListSource, batch_of, random_source, settings
from vflash_analysis.model.drafter import load_drafter
from vflash_analysis.records import TRAINING, read_records
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
    gradient_step(model, [batch_of(source, 15)], 3, processes)
    found = {name: p.grad for name, p in drafter.named_parameters()}
    assert all(hasattr(grad, "full_tensor") == shard for grad in found.values())
    return {n: grad.full_tensor() if shard else grad for n, grad in found.items()}


def train_on(out: Path) -> None:
    """Trains once with each optimizer, into a folder of its name."""
    for optimizer in OPTIMIZERS:
        chosen = settings(steps=4, revealed_weight=0.5, checkpoint_every=2, optimizer=optimizer)
        validation = random_source(new(), 9, prompt=14)
        run(out / optimizer, settings=chosen, validation=validation, log_every=2)


def worker(out: Path) -> None:
    """What each of the two processes runs."""
    torch.set_num_threads(1)
    train_on(out)
    source = random_source(new(), 4)
    rank, count = dist.get_rank(), dist.get_world_size()
    sharded = gradients(ListSource(source.items[rank::count]), Processes(count), shard=True)
    whole = gradients(source, Processes(1), shard=False)
    worst = max(float((sharded[name] - whole[name]).abs().max()) for name in whole)
    (out / f"worst-{rank}.txt").write_text(str(worst))


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Same weights and metrics; each of 9 validation clips counts once; FSDP2's gradient."""
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
    first, second = (weights(out) for out in found)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)
    # Muon turns a gradient in bfloat16: what two processes differ by is small beside the way gone
    start = new().state_dict()
    first, second = (weights(tmp_path / processes / "muon") for processes in "12")
    for name in first:
        way = (first[name] - start[name]).norm()
        assert way > 0 and (first[name] - second[name]).norm() < 0.1 * way


def weights(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_drafter(out / "drafter", TARGET).state_dict())
