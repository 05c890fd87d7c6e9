"""Train one drafter on several processes; the same call as notebook 40, under `accelerate launch`.

    accelerate launch --num_processes 8 -m vflash_analysis.training.launch --profile h100 \\
        --arm self_reveal --target TARGET --clips CLIPS --continuations CONTINUATIONS --out DRAFTER

The folders are those that `vflash plan` names; notebook 40 takes what it finds finished in DRAFTER.
A killed run resumes when started again, on as many processes as before. Every process loads the
target, reads its own clips with a frame reader of its own, and trains on its share of the batch,
so `training.clips_per_step` must be a multiple of them. Muon needs whole matrices, hence DDP.

FSDP2 shards gradients and optimizer state; NO_WRAP, since a step calls the drafter's layers one by
one and not through their own forwards, so all of the drafter is gathered for a step:

    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy NO_WRAP \\
        --fsdp_state_dict_type SHARDED_STATE_DICT --fsdp_cpu_ram_efficient_loading false -m ...

On two nodes, on each of them (`--machine_rank` 0 and 1), with run folders that both see:

    accelerate launch --multi_gpu --num_machines 2 --machine_rank 0 --main_process_ip HOST \\
        --main_process_port 29500 --num_processes 16 -m ... --set training.clips_per_step=16
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from vflash_analysis.config import DrafterKey, load_profile
from vflash_analysis.errors import InputError
from vflash_analysis.strict import parse_override
from vflash_analysis.training import pipeline


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 2 on bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default="h100")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="NAME=VALUE"
    )
    parser.add_argument("--arm", default="self_reveal")
    parser.add_argument("--train-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the profile's")
    parser.add_argument("--training-clips", type=int, help="default: the profile's")
    parser.add_argument("--variant", default="", help="one setting changed, NAME=VALUE")
    for name in ("target", "clips", "continuations"):
        parser.add_argument(
            f"--{name}", type=Path, required=True, help="folder of that stage's run"
        )
    parser.add_argument(
        "--out", type=Path, required=True, help="gets drafter/ and training.parquet"
    )
    asked = parser.parse_args(arguments)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        settings = load_profile(asked.profile, dict(map(parse_override, asked.overrides)))
        training = settings.training
        key = DrafterKey(
            asked.arm,
            asked.train_seed,
            asked.steps or training.steps,
            asked.training_clips or training.training_clips,
            asked.variant,
        )
        target = pipeline.open_target(settings, asked.target)
        folders = (asked.clips, asked.continuations, asked.out)
        pipeline.train_drafter(target, settings, key, *folders)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
