"""The schemas of the record tables and the names that key columns may hold; see `records`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

BENCHMARKS = ("VDC", "Video-MME", "MVBench", "MLVU", "LVB")
# Those of the paper: one drafter in two shapes.
VFLASH_METHODS = ("chain", "tree60")
# Hugging Face's own loops, run on the same prompts as an independent comparison.
HF_GENERATE, HF_DFLASH = COMPARISON_METHODS = ("hf_generate", "hf_dflash")
COMPILED = ", compiled"  # ends `device` of decodes in compiled steps, which those loops never take
# What `decode.methods` may name, options after a colon aside.
METHOD_NAMES = ("ar", *VFLASH_METHODS, "lookup", *COMPARISON_METHODS)
WITH_DRAFTER = (*VFLASH_METHODS, HF_DFLASH)  # run once per drafter
ON_FEW_CLIPS = ("lookup", *COMPARISON_METHODS)  # decode `decode.comparison_clips` clips
BLOCK_SIZE = 16  # most slots of a block: the anchor and 15 masks
TREE_NODES = 60  # of `tree60`, the anchor not counted
SHOWN_CLIPS = 4  # of a suite and sample seed: kept with strips and every detail of their cycles
VERIFY_ROWS = 1 + TREE_NODES  # the most rows one verify appends
# Decodes that are never pooled with a run's others.
LENGTHS_STUDY, DESIGN_STUDY = STUDIES = ("lengths", "design")
# Name of the paper's target; its "-chat-hf" variant is another one.
PAPER_TARGET = "llava-onevision-qwen2-7b-ov-hf"

KEY = ("run_id", "clip_id", "method", "drafter_sha256", "setting")
ROW_KEY = (*KEY, "repeat")
SCHEMA_KEY = b"vflash_schema"
VERSION_KEY = b"vflash_schema_version"
_TOKENS = pa.list_(pa.int32())


@dataclass(frozen=True)
class Schema:
    """A table's name, version and columns; a column that is not nullable must be in every row."""

    name: str
    version: int
    arrow: pa.Schema

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.arrow.names)


def _schema(
    name: str, version: int, required: Mapping[str, Any], nullable: Mapping[str, Any]
) -> Schema:
    fields = [pa.field(column, kind, nullable=False) for column, kind in required.items()]
    fields += [pa.field(column, kind) for column, kind in nullable.items()]
    marks = {SCHEMA_KEY: name.encode(), VERSION_KEY: str(version).encode()}
    return Schema(name, version, pa.schema(fields, metadata=marks))


_KEY_FIELDS = {column: pa.string() for column in KEY}
_TRAINED_DRAFTER_FIELDS = {
    "target_sha256": pa.string(),
    "drafter_sha256": pa.string(),
    "objective": pa.string(),
    "train_seed": pa.int64(),
    "steps": pa.int64(),
    "training_clips": pa.int64(),
    "forward_equivalents": pa.float64(),
    "revealed_weight": pa.float64(),
    "anchors_per_clip": pa.int64(),
    "variant": pa.string(),
    "setting": pa.string(),
}

GENERATIONS = _schema(
    "generations",
    2,
    {
        **_KEY_FIELDS,
        "repeat": pa.int64(),
        "profile": pa.string(),
        "target": pa.string(),
        "target_revision": pa.string(),
        "benchmark": pa.string(),
        "sample_seed": pa.int64(),
        "dtype": pa.string(),
        "attention": pa.string(),
        "device": pa.string(),
        "status": pa.string(),
        "warmup": pa.bool_(),
    },
    {
        "drafter": pa.string(),
        "objective": pa.string(),
        "train_seed": pa.int64(),
        "video_sha256": pa.string(),
        "prompt_tokens": pa.int64(),
        "video_tokens": pa.int64(),
        "frames_requested": pa.int64(),
        "frames_used": pa.int64(),
        "reader": pa.string(),
        "prompt": pa.string(),
        "prompt_sha256": pa.string(),
        "template_sha256": pa.string(),
        "new_tokens": pa.int64(),
        "stop_reason": pa.string(),
        "verify_calls": pa.int64(),
        "draft_calls": pa.int64(),
        "frame_read_s": pa.float64(),
        "vision_s": pa.float64(),
        "prefill_s": pa.float64(),
        "context_projection_s": pa.float64(),
        "decode_s": pa.float64(),
        "text": pa.string(),
        "token_ids": _TOKENS,
        "text_ends": _TOKENS,
        "output_sha256": pa.string(),
        "identical_to_ar": pa.bool_(),
        "first_divergence": pa.int64(),
        "divergence_gap": pa.float64(),
        "divergence_kind": pa.string(),
        "reason": pa.string(),
    },
)
"""One row per clip, method and repeat.

Keys are never null: `drafter_sha256` and `setting` are "" where there is none. A warm-up decode has
`warmup` true and a negative `repeat`. `reader` is name and version ("decord 0.6.0"). `status` is
"ok" or "failed" (then `reason` says why and every measured column is null). `divergence_kind` is
null, "near_tie" or "logic_error"; `first_divergence` is the 0-based index of the first token that
differs from `ar`. Seconds are `*_s`. `prompt` is the question without chat template;
`text[: text_ends[n - 1]]` is what a reader sees after n tokens, whole characters only.
"""

CYCLES = _schema(
    "cycles",
    2,
    {
        **_KEY_FIELDS,
        "repeat": pa.int64(),
        "cycle": pa.int64(),
        "start_position": pa.int64(),
        "n_accepted": pa.int64(),
        "n_committed": pa.int64(),
        "censored": pa.bool_(),
        "draft_s": pa.float64(),
        "verify_s": pa.float64(),
        "other_s": pa.float64(),
        "end_s": pa.float64(),
    },
    {
        "draft_token_ids": _TOKENS,
        "draft_parents": _TOKENS,
        "draft_logprobs": pa.list_(pa.float32()),
        "target_token_ids": _TOKENS,
        "target_rank": _TOKENS,
        "tree_s": pa.float64(),
    },
)
"""One row per cycle. `n_accepted` counts draft tokens equal to the target's choice and kept,
`n_committed` all tokens kept; `censored` marks a cycle cut by the stop token or the cap. Slots
after the cut were never judged. `end_s` is seconds since decode start. `tree_s` is the part of
`other_s` spent building a tree; null for a method that builds none."""

VOCABULARY = _schema(
    "vocabulary",
    1,
    {"target": pa.string(), "token_id": pa.int64(), "text": pa.string()},
    {},
)
"""One row per token that occurs in drafts or texts: what the target's tokenizer makes of it alone,
special tokens by their names."""

ANCHORS = _schema(
    "anchors",
    2,
    {
        **_TRAINED_DRAFTER_FIELDS,
        "clip_id": pa.string(),
        "benchmark": pa.string(),
        "split": pa.string(),
        "anchor_index": pa.int64(),
        "n_slots": pa.int64(),
        "n_accepted": pa.int64(),
    },
    {"slot_match": pa.list_(pa.bool_())},
)
"""One row per anchor of a fixed AR text. `variant` is the one setting in which the drafter differs
from its profile's, "" for none. `n_slots` (1..15) slots lie before the text's end, so
the later ones are censored; `slot_match` has n_slots entries."""

TRAINING = _schema(
    "training",
    2,
    {**_TRAINED_DRAFTER_FIELDS, "device": pa.string(), "step": pa.int64(), "loss": pa.float64()},
    {
        "loss_mask": pa.float64(),
        "loss_flow": pa.float64(),
        "learning_rate": pa.float64(),
        "seconds": pa.float64(),
        "forward_equivalents_done": pa.float64(),
        "slot_accuracy": pa.list_(pa.float64()),
        "slot_loss": pa.list_(pa.float64()),
        "wrong_corrected": pa.float64(),
        "right_kept": pa.float64(),
        "n_wrong": pa.int64(),
        "n_right": pa.int64(),
    },
)
"""One row per logged step; `seconds` counts from the start of training, resumes included."""

CONTINUATIONS = _schema(
    "continuations",
    1,
    {
        "clip_id": pa.string(),
        "benchmark": pa.string(),
        "split": pa.string(),
        "target_sha256": pa.string(),
        "status": pa.string(),
    },
    {
        "video_sha256": pa.string(),
        "prompt_tokens": pa.int64(),
        "video_tokens": pa.int64(),
        "input_ids": _TOKENS,
        "new_tokens": pa.int64(),
        "stop_reason": pa.string(),
        "text": pa.string(),
        "reason": pa.string(),
    },
)
"""One row per clip: `input_ids` is prompt and continuation, `new_tokens` the continuation's part."""

FORWARDS = (
    "ar",
    *(f"{part}_{method}" for part in ("verify", "draft") for method in VFLASH_METHODS),
    "context_projection",
)
COPY = "copy"
OURS, HUGGING_FACE = "vflash", "hf_sdpa"  # whose forward it is
NEW_CONTEXT = 4  # rows that a draft's forward adds to its context: what a cycle may commit

COSTS = _schema(
    "costs",
    1,
    {
        "run_id": pa.string(),
        "shape": pa.string(),
        "device": pa.string(),
        "dtype": pa.string(),
        "implementation": pa.string(),
        "forward": pa.string(),
        "context_tokens": pa.int64(),
        "rows": pa.int64(),
        "repeats": pa.int64(),
        "read_bytes": pa.float64(),
        "flops": pa.float64(),
    },
    {
        "seconds": pa.float64(),
        "seconds_low": pa.float64(),
        "seconds_high": pa.float64(),
        "peak_bytes": pa.int64(),
        "reason": pa.string(),
    },
)
"""One row per implementation, forward and context length of a target with random weights.

`implementation` is OURS, HUGGING_FACE or "torch". `forward` is one of
FORWARDS, or COPY: a large copy on the device, whose `read_bytes` are bytes read plus bytes written
and whose context is 0. Elsewhere `read_bytes` and `flops` are what the forward cannot do without,
by `sizes`. `seconds` is the median of `repeats`, `seconds_low` and `seconds_high` its quartiles;
null, with a `reason`, where it did not fit the device. `peak_bytes` is what the forward held beyond
weights and caches."""

NO_LAYER = -1  # `layer` of what is of no layer
FAILED_CLIP = "clip"  # `quantity` of a clip that failed
LAYERS_STUDY = "layers"  # `study` of what notebook 70 measures

MEASURES = _schema(
    "measures",
    1,
    {
        "run_id": pa.string(),
        "target": pa.string(),
        "target_sha256": pa.string(),
        "device": pa.string(),
        "dtype": pa.string(),
        "clip_id": pa.string(),
        "benchmark": pa.string(),
        "sample_seed": pa.int64(),
        "study": pa.string(),
        "setting": pa.string(),
        "layer": pa.int64(),
        "quantity": pa.string(),
    },
    {
        "video_sha256": pa.string(),
        "total": pa.float64(),
        "count": pa.float64(),
        "reason": pa.string(),
    },
)
"""One row per clip, quantity and place: what the target does with a clip, or how well it tells it.

`study` says who measured ("layers"), `setting` under what ("" where there is one way), `layer` the
decoder layer, NO_LAYER where there is none. The clip's value is `total` / `count`; over clips both are
summed first, so a quantity is a ratio of sums. A clip that failed is one row of quantity
FAILED_CLIP with a `reason` and nulls."""

SCHEMAS = {
    s.name: s
    for s in (
        GENERATIONS,
        CYCLES,
        VOCABULARY,
        ANCHORS,
        TRAINING,
        CONTINUATIONS,
        COSTS,
        MEASURES,
    )
}
