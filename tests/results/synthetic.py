"""Plausible record frames built in code: what a small pocket run would leave, with known structure.

Acceptance at slot k is a coin with probability p * fade**k; the same random numbers serve every arm,
so arms are paired as they are when they read the same anchors.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from vflash_analysis.records import blank_row, strip_path, typed_frame, write_records
from vflash_analysis.results.sources import Records, records_from_frames
from vflash_analysis.schemas import (
    ANCHORS,
    BENCHMARKS,
    COSTS,
    CYCLES,
    GENERATIONS,
    LAYERS_STUDY,
    MEASURES,
    NO_LAYER,
    ROW_KEY,
    SCHEMAS,
    TRAINING,
    VOCABULARY,
)

DEVICE = "2 CPU cores"
# Token ids are places in this list; some texts have what a key of `setting` or a page must not break.
WORDS = (
    "a",
    " red",
    " square",
    " é",
    " <b>",
    " a;b=c%",
    " moves",
    " left",
    ",",
    " then",
    " stops",
    ".",
)
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
        "variant": "",
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


def failed_row(row: dict[str, object]) -> dict[str, object]:
    """The row of the same decode where its clip was damaged: nothing is measured."""
    kept = {field.name for field in GENERATIONS.arrow if not field.nullable}
    kept |= {"drafter", "objective", "train_seed", "frames_requested"}
    identity = {name: value for name, value in row.items() if name in kept}
    return blank_row(GENERATIONS) | identity | {"status": "failed", "reason": "damaged"}


def cycle_row(row: dict[str, object], number: int) -> dict[str, object]:
    """A CYCLES row under its generation's key; an AR cycle commits one token."""
    keys = {key: row[key] for key in ROW_KEY}
    return blank_row(CYCLES) | keys | {"cycle": number, "start_position": 300 + number}


def tokens_of(clip_id: str, count: int) -> dict[str, object]:
    """The columns of a text of that many tokens, the same for every method."""
    ids = np.random.default_rng([17, *clip_id.encode()]).integers(0, len(WORDS), count).tolist()
    words = [WORDS[one] for one in ids]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return {"token_ids": ids, "text": "".join(words), "text_ends": ends}


def proposal_of(method: str, coming: list[int], accepted: int) -> dict[str, object]:
    """A proposal of which the first `accepted` tokens of `coming` are right, in detail.

    The chain has 15 slots; in a slot of the tree a wrong token stands beside the right one.
    """
    chain = [*coming[:accepted], *[(one + 1) % len(WORDS) for one in coming[accepted:15]]]
    chain += [0] * (15 - len(chain))
    drafts, parents = list(chain), list(range(-1, 14))
    if method == "tree60":
        drafts += [(one + 2) % len(WORDS) for one in chain[: accepted + 1]]
        parents += list(range(-1, accepted))
    return {
        "draft_token_ids": drafts,
        "draft_parents": parents,
        "draft_logprobs": [-0.125 * (1 + number % 15) for number in range(len(drafts))],
    }


def decode_clip(
    method: str, clip_id: str, benchmark: str, rate: float, stream: int, device: str = DEVICE
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """One simulated decode: its GENERATIONS row and its CYCLES rows."""
    length_stream = np.random.default_rng([11, *clip_id.encode()])
    new_tokens = int(length_stream.integers(60, 110))
    generator = np.random.default_rng([13, stream, *clip_id.encode()])
    row = generation_row(method, clip_id, benchmark, device) | tokens_of(clip_id, new_tokens)
    row |= {"prompt": f"What does clip {clip_id} show?"}
    ids = row["token_ids"]
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
            cycle_row(row, n)
            | step
            | {"end_s": (n + 1) * ar_ms / 1000, "target_token_ids": [ids[n + 1]]}
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
                "tree_s": 0.0004 if method == "tree60" else None,
            }
        )
        if clip_id.endswith("-00"):  # kept in detail
            coming = ids[committed + 1 :]
            cycles[-1] |= proposal_of(method, coming, accepted if not censored else kept)
            ranks = [0] * kept + [1] * (n_committed - kept)
            cycles[-1] |= {"target_token_ids": coming[:n_committed], "target_rank": ranks}
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


def measure_rows(
    benchmarks: tuple[str, ...] = BENCHMARKS, n_clips: int = 2, n_layers: int = 3
) -> pd.DataFrame:
    """MEASURES of the study of layers: the video's share falls with the layer, its need too."""
    shared = {"run_id": "r1", "target": "pocket", "target_sha256": "a" * 64, "device": DEVICE}
    shared |= {"dtype": "float32", "sample_seed": 0, "study": LAYERS_STUDY, "setting": ""}
    rows = []
    for benchmark in benchmarks:
        for clip in range(n_clips):
            wobble = float(np.random.default_rng([5, clip, *benchmark.encode()]).normal(0, 0.01))
            found = [("visual_positions", NO_LAYER, 8.0, 10.0)]
            found.append(("end_visual_positions", NO_LAYER, 8.0, 16.0))
            for layer in range(n_layers):
                visual = 0.7 - 0.1 * layer + wobble
                for query in ("attention", "end_attention"):
                    found.append((f"{query}_visual", layer, visual, 1.0))
                    found.append((f"{query}_instruction", layer, 0.9 - visual, 1.0))
                    found.append((f"{query}_text", layer, 0.1, 1.0))
                found.append(("attention_visual_max_head", layer, visual + 0.1, 1.0))
                for kind, count in (("visual", 8.0), ("text", 4.0)):
                    step = (0.9 + 0.02 * layer + wobble) * count
                    found.append((f"step_similarity_{kind}", layer, step, count))
                    found.append((f"input_similarity_{kind}", layer, step / (layer + 1), count))
            for layer in (NO_LAYER, *range(n_layers + 1)):
                kept = 1.0 if layer == NO_LAYER else layer / n_layers
                found.append(("static_accuracy", layer, 18 * kept, 20.0))
                found.append(("dynamic_accuracy", layer, 8 * kept, 10.0 + clip))
                if layer != NO_LAYER:
                    found.append(("agreement", layer, 30 + 20 * kept, 50.0))
            place = {"benchmark": benchmark, "clip_id": f"{benchmark}-{clip:02d}"}
            place["video_sha256"] = f"sha-{benchmark}-{clip}"
            for quantity, layer, total, count in found:
                row = {"quantity": quantity, "layer": layer, "total": total, "count": count}
                rows.append(blank_row(MEASURES) | shared | place | row)
    return pd.DataFrame(rows)[list(MEASURES.columns)]


def vocabulary_rows() -> pd.DataFrame:
    """VOCABULARY of WORDS."""
    target = generation_row("ar", "a")["target"]
    rows = [{"target": target, "token_id": i, "text": word} for i, word in enumerate(WORDS)]
    return pd.DataFrame(rows)


def write_strip(path: Path, frames: int = 4, size: tuple[int, int] = (24, 18)) -> None:
    """A strip of plain frames, each of another colour."""
    strip = Image.new("RGB", (frames * size[0], size[1]))
    for number in range(frames):
        frame = Image.new("RGB", size, (60 * number, 40, 200 - 40 * number))
        strip.paste(frame, (number * size[0], 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    strip.save(path, format="JPEG", quality=85, comment=str(frames))


def write_synthetic(
    folder: Path,
    arms: tuple[str, ...] = tuple(STRENGTH),
    seeds: tuple[int, ...] = (1, 2, 3),
    budgets: tuple[int, ...] = (100, 200, 400),
    sizes: tuple[int, ...] = (100, 400),
    n_clips: int = 4,
    n_anchors: int = 20,
) -> Path:
    """Writes the record files of a synthetic place, with film strips, and returns the folder."""
    generations, cycles = decode_rows(arms, seeds, budgets, sizes, n_clips)
    write_records(folder / "generations.parquet", generations, GENERATIONS)
    write_records(folder / "cycles.parquet", cycles, CYCLES)
    anchors = anchor_rows(arms, seeds, budgets, sizes, n_clips, n_anchors)
    write_records(folder / "anchors.parquet", anchors, ANCHORS)
    write_records(folder / "training.parquet", training_rows(arms, seeds, budgets, sizes), TRAINING)
    write_records(folder / "costs.parquet", cost_rows(), COSTS)
    write_records(folder / "measures.parquet", measure_rows(), MEASURES)
    write_records(folder / "vocabulary.parquet", vocabulary_rows(), VOCABULARY)
    for benchmark in BENCHMARKS:
        write_strip(strip_path(folder, f"{benchmark}-00"))
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
