"""Plausible record frames built in code: what a small pocket run would leave, with known structure.

Acceptance at slot k is a coin with probability p * fade**k; the same random numbers serve every arm,
so arms are paired as they are when they read the same anchors.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from vflash_analysis.records import blank_row, typed_frame, write_records
from vflash_analysis.results.sources import Records, records_from_frames
from vflash_analysis.schemas import (
    ANCHORS,
    BENCHMARKS,
    COSTS,
    CYCLES,
    GENERATIONS,
    ROW_KEY,
    SCHEMAS,
    TRAINING,
)

DEVICE = "2 CPU cores"
STRENGTH = {
    "mask_only": 0.0,
    "mask_only_2x": 0.012,
    "true_reveal": 0.010,
    "wrong_reveal": 0.016,
    "self_reveal_rev0": 0.020,
    "self_reveal": 0.035,
}
COST = {"mask_only": 3.0, "mask_only_2x": 6.0}  # forward-equivalents per anchor, 7 for flow arms
BENCHMARK_SHIFT = dict(zip(BENCHMARKS, (0.03, 0.0, -0.05, 0.02, -0.01), strict=True))
SLOTS = np.arange(1, 16)


def drafter_columns(arm: str, seed: int, steps: int, clips: int) -> dict[str, object]:
    """The columns that ANCHORS and TRAINING share."""
    objective = "mask_only" if arm.startswith("mask_only") else arm.removesuffix("_rev0")
    anchors = 24 if arm == "mask_only_2x" else 12
    return {
        "target_sha256": "a" * 64,
        "drafter_sha256": f"{arm}-{seed}-{steps}-{clips}",
        "objective": objective,
        "train_seed": seed,
        "steps": steps,
        "training_clips": clips,
        "forward_equivalents": COST.get(arm, 7.0) * 12 * 4 * steps,
        "revealed_weight": 0.0 if arm.endswith("_rev0") else 1.0,
        "anchors_per_clip": anchors,
        "setting": "",
    }


def hit_rate(arm: str, steps: int, clips: int) -> float:
    """Acceptance of slot 1, rising with compute to a plateau that the data size sets."""
    ceiling = 0.80 + 0.02 * math.log2(clips / 100) + STRENGTH[arm]
    return ceiling - 0.30 * math.exp(-steps * COST.get(arm, 7.0) / 500)


def anchor_rows(
    arms: tuple[str, ...],
    seeds: tuple[int, ...],
    budgets: tuple[int, ...],
    sizes: tuple[int, ...],
    n_clips: int = 4,
    n_anchors: int = 20,
) -> pd.DataFrame:
    rows = []
    for benchmark in BENCHMARKS:
        for clip in range(n_clips):
            generator = np.random.default_rng([7, BENCHMARKS.index(benchmark), clip])
            coins = generator.random((n_anchors, 15))
            shift = BENCHMARK_SHIFT[benchmark] + generator.normal(0, 0.03)
            for arm in arms:
                for seed in seeds:
                    for steps in budgets:
                        for size in sizes:
                            wobble = np.random.default_rng([9, seed, steps]).normal(0, 0.004)
                            rate = hit_rate(arm, steps, size) + shift + wobble
                            rates = np.clip(rate, 0, 0.99) * 0.985 ** (SLOTS - 1)
                            match = coins < rates
                            for index in range(n_anchors):
                                n_slots = min(15, n_anchors + 10 - index)
                                hits = match[index, :n_slots]
                                miss = np.flatnonzero(~hits)
                                rows.append(
                                    {
                                        **drafter_columns(arm, seed, steps, size),
                                        "clip_id": f"{benchmark}-{clip:02d}",
                                        "benchmark": benchmark,
                                        "split": "validation",
                                        "anchor_index": index,
                                        "n_slots": n_slots,
                                        "n_accepted": int(miss[0]) if miss.size else n_slots,
                                        "slot_match": hits.tolist(),
                                    }
                                )
    return pd.DataFrame(rows)[list(ANCHORS.columns)]


def training_rows(
    arms: tuple[str, ...], seeds: tuple[int, ...], budgets: tuple[int, ...], sizes: tuple[int, ...]
) -> pd.DataFrame:
    rows = []
    for arm in arms:
        for seed in seeds:
            for steps in budgets:
                for size in sizes:
                    facts = drafter_columns(arm, seed, steps, size)
                    generator = np.random.default_rng([3, seed, steps])
                    for step in range(0, steps + 1, max(1, steps // 20)):
                        rate = hit_rate(arm, step, size)
                        accuracy = np.clip(rate * 0.955 ** (SLOTS - 1), 0, 1)
                        accuracy = accuracy + generator.normal(0, 0.006, 15)
                        loss = 4.5 * (1 - rate) + 0.3 + generator.normal(0, 0.02)
                        row = blank_row(TRAINING)
                        row |= facts
                        row |= {
                            "device": DEVICE,
                            "step": step,
                            "loss": loss,
                            "loss_mask": loss,
                            "learning_rate": 1e-3,
                            "seconds": 0.2 * step * COST.get(arm, 7.0) / 3,
                            "forward_equivalents_done": facts["forward_equivalents"] * step / steps,
                            "slot_accuracy": accuracy.tolist(),
                            "slot_loss": (4 * (1 - accuracy)).tolist(),
                        }
                        if not arm.startswith("mask_only"):
                            row |= {
                                "loss_flow": loss * 0.8,
                                "wrong_corrected": 0.3,
                                "right_kept": 0.97,
                                "n_wrong": 40,
                                "n_right": 200,
                            }
                        rows.append(row)
    return pd.DataFrame(rows)[list(TRAINING.columns)]


def generation_row(
    method: str, clip_id: str, benchmark: str = "VDC", device: str = DEVICE, **changes: object
) -> dict[str, object]:
    """A GENERATIONS row of a finished decode; `changes` overrules columns."""
    row = blank_row(GENERATIONS)
    row |= {
        "run_id": "r1",
        "clip_id": clip_id,
        "method": method,
        "drafter_sha256": "",
        "setting": "",
        "repeat": 0,
        "profile": "pocket",
        "target": "pocket-llava-onevision",
        "target_revision": "1",
        "benchmark": benchmark,
        "sample_seed": 1,
        "dtype": "float32",
        "attention": "vflash",
        "device": device,
        "status": "ok",
        "warmup": False,
        "video_sha256": f"sha-{clip_id}",
        "prompt_tokens": 300,
        "video_tokens": 257,
        "frames_requested": 8,
        "frames_used": 8,
        "reader": "decord 0.6.0",
        "prompt_sha256": "p",
        "template_sha256": "t",
        "stop_reason": "eos",
        "frame_read_s": 0.05,
        "vision_s": 0.08,
        "prefill_s": 0.12,
        "text": "a red square moves left",
        "output_sha256": f"out-{clip_id}",
    }
    return row | changes


def cycle_row(row: dict[str, object], number: int) -> dict[str, object]:
    """A CYCLES row under its generation's key; an AR cycle commits one token."""
    keys = {key: row[key] for key in ROW_KEY}
    return blank_row(CYCLES) | keys | {"cycle": number, "start_position": 300 + number}


def decode_clip(
    method: str, clip_id: str, benchmark: str, rate: float, stream: int, device: str = DEVICE
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """One simulated decode: its GENERATIONS row and its CYCLES rows."""
    length_stream = np.random.default_rng([11, *clip_id.encode()])
    new_tokens = int(length_stream.integers(60, 110))
    generator = np.random.default_rng([13, stream, *clip_id.encode()])
    row = generation_row(method, clip_id, benchmark, device)
    ar_ms = 6.0 + float(length_stream.normal(0, 0.1))
    if method in ("ar", "hf_generate"):
        slow = 1.25 if method == "hf_generate" else 1.0
        row |= {
            "new_tokens": new_tokens,
            "verify_calls": new_tokens - 1,
            "draft_calls": 0,
            "context_projection_s": 0.0,
            "decode_s": slow * ar_ms / 1000 * (new_tokens - 1),
            "identical_to_ar": True if method == "hf_generate" else None,
        }
        if method == "hf_generate":
            return row, []
        step = {"n_accepted": 0, "n_committed": 1, "censored": False, "draft_s": 0.0}
        step |= {"verify_s": ar_ms / 1000, "other_s": 0.0}
        return row, [
            cycle_row(row, n) | step | {"end_s": (n + 1) * ar_ms / 1000}
            for n in range(new_tokens - 1)
        ]
    cycles = []
    committed, seconds = 0, 0.0
    while committed < new_tokens - 1:
        coins = generator.random(15)
        miss = np.flatnonzero(coins > np.clip(rate, 0, 0.99) * 0.985 ** (SLOTS - 1))
        accepted = int(miss[0]) if miss.size else 15
        if method == "tree60":
            accepted = min(15, accepted + int(generator.random() < 0.45))
        left = new_tokens - 1 - committed
        censored = accepted + 1 > left
        kept = min(accepted, left)
        n_committed = min(accepted + 1, left)
        verify = (9.6 if method == "chain" else 12.4) + float(generator.normal(0, 0.1))
        draft = 2.1 + float(generator.normal(0, 0.05))
        other = 0.5 if method == "chain" else 1.1
        seconds += (verify + draft + other) / 1000
        cycles.append(
            cycle_row(row, len(cycles))
            | {
                "start_position": 300 + committed,
                "n_accepted": kept,
                "n_committed": n_committed,
                "censored": censored,
                "draft_s": draft / 1000,
                "verify_s": verify / 1000,
                "other_s": other / 1000,
                "end_s": seconds,
                "draft_token_ids": [0] * 15 if method == "chain" and not cycles else None,
            }
        )
        committed += n_committed
    if method == "hf_dflash":
        seconds *= 1.3
        cycles = []
    row |= {
        "new_tokens": new_tokens,
        "verify_calls": len(cycles) or new_tokens // 4,
        "draft_calls": len(cycles) or new_tokens // 4,
        "context_projection_s": 0.002,
        "decode_s": seconds,
        "identical_to_ar": True,
    }
    return row, cycles


def decode_rows(
    arms: tuple[str, ...],
    seeds: tuple[int, ...],
    budgets: tuple[int, ...],
    sizes: tuple[int, ...],
    n_clips: int = 4,
    device: str = DEVICE,
    methods: tuple[str, ...] = ("ar", "hf_generate", "chain", "tree60", "hf_dflash"),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """GENERATIONS and CYCLES: other arms than self_reveal are decoded with the chain only."""
    generations, cycles = [], []
    for benchmark in BENCHMARKS:
        for clip in range(n_clips):
            clip_id = f"{benchmark}-{clip:02d}"
            for method in [m for m in methods if m in ("ar", "hf_generate")]:
                row, own = decode_clip(method, clip_id, benchmark, 0, 0, device)
                generations.append(row)
                cycles += own
            for arm in arms:
                for seed in seeds:
                    for steps in budgets:
                        for size in sizes:
                            facts = drafter_columns(arm, seed, steps, size)
                            rate = hit_rate(arm, steps, size) + BENCHMARK_SHIFT[benchmark]
                            last = steps == max(budgets) and size == max(sizes)
                            wanted = [m for m in methods if m not in ("ar", "hf_generate")]
                            if not (arm == "self_reveal" and last):
                                wanted = [m for m in wanted if m == "chain"]
                            for method in wanted:
                                row, own = decode_clip(
                                    method, clip_id, benchmark, rate, seed, device
                                )
                                mark = {"drafter_sha256": facts["drafter_sha256"]}
                                row |= mark
                                row |= {
                                    "drafter": f"pocket-{arm}",
                                    "objective": facts["objective"],
                                    "train_seed": seed,
                                }
                                generations.append(row)
                                cycles += [cycle | mark for cycle in own]
    return (
        pd.DataFrame(generations)[list(GENERATIONS.columns)],
        pd.DataFrame(cycles, columns=list(CYCLES.columns)),
    )


# Milliseconds of a forward: at no context, and for every thousand tokens of it.
FORWARD_MS = {
    ("vflash", "ar"): (4.0, 1.0),
    ("vflash", "verify_chain"): (8.0, 2.0),
    ("vflash", "verify_tree60"): (12.0, 3.0),
    ("vflash", "draft_chain"): (2.0, 1.0),
    ("vflash", "draft_tree60"): (3.0, 1.0),
    ("vflash", "context_projection"): (0.0, 10.0),
    ("hf_sdpa", "ar"): (5.0, 2.0),
    ("hf_sdpa", "verify_chain"): (10.0, 6.0),
    ("hf_sdpa", "verify_tree60"): (15.0, 8.0),
}


def cost_rows(
    lengths: tuple[int, ...] = (200, 1000),
    shape: str = "pocket",
    device: str = DEVICE,
    dtype: str = "float32",
) -> pd.DataFrame:
    """COSTS of `FORWARD_MS`, with quartiles 5 % aside, and a device that copies 10 GB/s.

    Every forward must read 20 MB, so its limit is 2 ms; it holds 1 kB for every context token.
    """
    shared = {"run_id": "r1", "shape": shape, "device": device, "dtype": dtype}
    copied = {"implementation": "torch", "forward": "copy", "context_tokens": 0, "rows": 0}
    copied |= {"repeats": 5, "read_bytes": 2e9, "flops": 0.0}
    copied |= {"seconds": 0.2, "seconds_low": 0.2, "seconds_high": 0.2}
    rows = [blank_row(COSTS) | shared | copied]
    for length in lengths:
        for (implementation, forward), (base, more) in FORWARD_MS.items():
            seconds = (base + more * length / 1000) / 1000
            found = {"implementation": implementation, "forward": forward}
            found |= {"context_tokens": length, "rows": 16, "repeats": 5}
            found |= {"read_bytes": 2e7, "flops": 1e9, "seconds": seconds}
            found |= {"seconds_low": 0.95 * seconds, "seconds_high": 1.05 * seconds}
            rows.append(blank_row(COSTS) | shared | found | {"peak_bytes": 1000 * length})
    return pd.DataFrame(rows)[list(COSTS.columns)]


def write_synthetic(
    folder: Path,
    arms: tuple[str, ...] = tuple(STRENGTH),
    seeds: tuple[int, ...] = (1, 2, 3),
    budgets: tuple[int, ...] = (100, 200, 400),
    sizes: tuple[int, ...] = (100, 400),
    n_clips: int = 4,
    n_anchors: int = 20,
) -> Path:
    """Writes the five record files of a synthetic place and returns the folder."""
    generations, cycles = decode_rows(arms, seeds, budgets, sizes, n_clips)
    write_records(folder / "generations.parquet", generations, GENERATIONS)
    write_records(folder / "cycles.parquet", cycles, CYCLES)
    anchors = anchor_rows(arms, seeds, budgets, sizes, n_clips, n_anchors)
    write_records(folder / "anchors.parquet", anchors, ANCHORS)
    write_records(folder / "training.parquet", training_rows(arms, seeds, budgets, sizes), TRAINING)
    write_records(folder / "costs.parquet", cost_rows(), COSTS)
    return folder


def records_of(
    generations: pd.DataFrame, cycles: pd.DataFrame | None = None, **frames: pd.DataFrame
) -> Records:
    """Frames as records, with the types that reading their files would give."""
    given = {"generations": generations, **frames}
    if cycles is not None:
        given["cycles"] = cycles
    typed = {name: typed_frame(frame, SCHEMAS[name]) for name, frame in given.items()}
    return records_from_frames(typed, "synthetic")


def decoded_records(costs: pd.DataFrame, benchmarks: tuple[str, ...] = ("VDC",)) -> Records:
    """A clip of each suite by AR and by chain, with these costs."""
    rows, cycles = [], []
    for benchmark in benchmarks:
        for method in ("ar", "chain"):
            row, own = decode_clip(method, f"{benchmark}-00", benchmark, 0.7, 1)
            rows.append(row)
            cycles += own
    return records_of(pd.DataFrame(rows), pd.DataFrame(cycles), costs=costs)
