"""What a run takes, before it starts: device memory by part, disk, and hours on one GPU.

Arithmetic over a profile and the target's sizes (`sizes.py`); nothing is measured or loaded.
`vflash plan` prints it, `vflash doctor` holds the memory against the device.

Hours rest on two shares of the device's peak, both stated in the table's caption:

    an autoregressive step = bytes read / (BANDWIDTH_SHARE x bandwidth)
    everything else        = operations / (COMPUTE_SHARE x peak operations)

Every method is counted as slow as autoregressive decoding. Left out: warm-ups, reading of frames, and
the judging of near ties.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vflash_analysis import config, shapes, sizes
from vflash_analysis.config import DrafterKey, Profile
from vflash_analysis.errors import InputError
from vflash_analysis.results.published import DeviceFacts, device_facts
from vflash_analysis.schemas import (
    COMPARISON_METHODS,
    ON_FEW_CLIPS,
    VERIFY_ROWS,
    WITH_DRAFTER,
)
from vflash_analysis.shapes import DrafterShape, TargetShape
from vflash_analysis.sizes import Work
from vflash_analysis.stages import Shard

TEXT_TOKENS = 30  # of a prompt beside its video: the page's 25,119 less 128 x 196 + 1
LOGITS_COPIES = 5  # that live at the loss's peak, see `shapes.LOGITS_BYTES`
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# The page's 10.6 to 11.1 ms a token on one H100 against the 4.65 ms that reading takes there.
BANDWIDTH_SHARE = 0.43
COMPUTE_SHARE = 0.4  # our assumption for long prefills and training in bfloat16


GPU = "H100 SXM"  # of `data/published/devices.csv`, whose peaks the hours stand on


@dataclass(frozen=True)
class Sizes:
    """A profile's sizes: the target's and drafter's shapes, and the longest prompt."""

    target: TargetShape
    drafter: DrafterShape
    prompt_tokens: int
    itemsize: int


def sizes_of(profile: Profile, target: TargetShape) -> Sizes:
    """The sizes a profile gives to a target of some shape."""
    drafter = DrafterShape.of(target, profile.drafter)
    frame = 0 if target.vision is None else target.vision.tokens_per_frame
    prompt = profile.clips.num_frames * frame + 1 + TEXT_TOKENS
    return Sizes(target, drafter, prompt, ITEMSIZE[profile.target.dtype])


def target_shape(profile: Profile) -> TargetShape | None:
    """The shape in the target folder's `config.json`; None for a target that is not built yet.

    The paper's 7B where the folder is left to this machine and is not there, so that a plan can be
    made before a checkpoint is.

    Raises:
        InputError: a config that leaves out a number.
    """
    if profile.target.source == config.TINY_TARGET:
        return None
    if profile.target.source is None:
        folder = config.local_paths().get("target")
        if folder is None or not (folder / "config.json").is_file():
            return shapes.LLAVA_ONEVISION_7B
    else:
        folder = config.target_folder(profile.target)
    return shapes.read_shape(folder / "config.json")


def decode_memory(profile: Profile, own: Sizes) -> dict[str, int]:
    """Bytes by part while a clip is decoded; their sum is the most at any time.

    Every block method keeps a drafter cache of its own from one text to the next. The last part is
    the most that one of these needs for itself, as they follow one another: our vision chunks, our
    prefill, and Hugging Face's own loop where it is asked for, which encodes all frames at once,
    runs whole MLPs and has a second cache.
    """
    rows = own.prompt_tokens + profile.decode.max_new_tokens
    frames, item, target = profile.clips.num_frames, own.itemsize, own.target
    drafters = len(config.main_drafters(profile))
    named = [method.partition(":")[0] for method in profile.decode.methods]
    block_methods = sum(name in WITH_DRAFTER and name not in COMPARISON_METHODS for name in named)
    passing = [
        sizes.prefill_bytes(target, own.prompt_tokens, item),
        sizes.vision_bytes(target, frames, item),
    ]
    if set(named) & set(COMPARISON_METHODS):
        prefill = sizes.prefill_bytes(target, own.prompt_tokens, item, own.prompt_tokens)
        passing.append(sizes.kv_bytes(target, rows, item) + prefill)
        passing.append(sizes.vision_bytes(target, frames, item, frames))
    return {
        "weights": target.parameters * item,
        "KV cache": sizes.kv_bytes(target, rows + VERIFY_ROWS, item),
        "tapped states": sizes.tap_bytes(own.drafter, own.prompt_tokens, item),
        f"drafters ({drafters})": drafters * own.drafter.parameters * item,
        "drafters' KV caches": drafters
        * block_methods
        * sizes.drafter_kv_bytes(own.drafter, rows + own.drafter.block_size, item),
        "pixels": sizes.pixel_bytes(target, frames, item),
        "prefill, vision or generate": max(passing),
    }


def training_memory(profile: Profile, own: Sizes) -> dict[str, int]:
    """Bytes by part while a drafter trains in one process, a clip at a time.

    The last part is the more of two that follow one another: the target's prefill, where states are
    recomputed, and what the drafter's own step saves.
    """
    settings, frames, item = profile.training, profile.clips.num_frames, own.itemsize
    rows = own.prompt_tokens + profile.continuations.max_new_tokens
    prefill = max(
        sizes.prefill_bytes(own.target, own.prompt_tokens, item),
        sizes.vision_bytes(own.target, frames, item),
    )
    recomputed = sizes.kv_bytes(own.target, rows + VERIFY_ROWS, item) + prefill
    recomputed += sizes.pixel_bytes(own.target, frames, item)
    recomputed += sizes.tap_bytes(own.drafter, rows, item)
    anchors, keep = settings.anchors_per_clip, not settings.activation_checkpointing
    slots = anchors * (own.drafter.block_size - 1)
    logits = min(shapes.LOGITS_BYTES, slots * own.target.vocab_size * 4)
    saved = sizes.saved_bytes(own.drafter, rows, anchors, 2, keep) + LOGITS_COPIES * logits
    if profile.continuations.states == "stored":
        recomputed = 0
    return {
        "weights": own.target.parameters * item,
        "drafter in fp32": 4 * own.drafter.parameters,
        "gradients and AdamW": sizes.optimizer_bytes(own.drafter),
        "prefill or a step's activations": int(max(recomputed, saved)),
    }


# ---------------------------------------------------------------- hours


def _prefill(profile: Profile, own: Sizes) -> Work:
    """Vision and text stack over one clip's prompt."""
    frames = profile.clips.num_frames
    vision = sizes.vision_work(own.target, frames, own.itemsize)
    return vision + sizes.prefill_work(own.target, own.prompt_tokens, own.itemsize)


def _step_s(own: Sizes, gpu: DeviceFacts, new_tokens: int) -> float:
    """Seconds of an autoregressive step, at the middle of a text."""
    held = own.prompt_tokens + new_tokens // 2
    step = sizes.decoder_work(own.target, 1, held, own.itemsize)
    return step.bytes / (BANDWIDTH_SHARE * gpu.bytes_per_s)


def _compute_s(work: Work, gpu: DeviceFacts) -> float:
    return work.flops / (COMPUTE_SHARE * gpu.flops_per_s)


def _states(profile: Profile, own: Sizes) -> Work:
    """The target once over a clip and its text, for the states that a drafter reads."""
    text = profile.continuations.max_new_tokens
    rest = sizes.decoder_work(own.target, text, own.prompt_tokens, own.itemsize)
    return _prefill(profile, own) + rest


def drafter_step_work(profile: Profile, own: Sizes, arm: str) -> Work:
    """A training step's operations in the drafter.

    A block's forward and gradient count three forwards, four where activations are made again; a
    revealed state the same again and, on average over R = 1..max rounds, (max - 1) / 2 forwards
    without gradient. The context is projected once, with gradient.
    """
    settings = config.arm_settings(profile.training, DrafterKey(arm, 0, 1, 1))
    block = sizes.draft_work(own.drafter, own.prompt_tokens, 0, own.itemsize)
    context = sizes.context_work(own.drafter, own.prompt_tokens, own.itemsize)
    with_gradient = 4.0 if settings.activation_checkpointing else 3.0
    passes = with_gradient
    if settings.objective != "mask_only":
        passes += with_gradient + (settings.max_reveal_rounds - 1) / 2
    blocks = settings.clips_per_step * settings.anchors_per_clip
    flops = blocks * passes * block.flops + 3.0 * settings.clips_per_step * context.flops
    return Work(0.0, flops)


@dataclass(frozen=True)
class StageEstimate:
    """One stage's share of a run.

    Attributes:
        stage: its name. shards: how many there are.
        gpu_hours: of all its shards together, one GPU each.
        disk_bytes: results and checkpoints that lie there at once.
    """

    stage: str
    shards: int
    gpu_hours: float
    disk_bytes: float


def estimate_stages(
    profile: Profile, own: Sizes, drafters: Sequence[DrafterKey], gpu: DeviceFacts
) -> list[StageEstimate]:
    """Hours and bytes by stage; stages that need no GPU to speak of are left out.

    Args:
        profile: the profile.
        own: of `sizes_of`.
        drafters: those that the run trains.
        gpu: whose peaks are taken.
    """
    clips, text = profile.clips, profile.continuations.max_new_tokens
    lists = clips.training_clips + clips.validation_clips + profile.training.anchor_clips
    stored = profile.continuations.states == "stored"
    states_s = 0.0 if stored else _compute_s(_states(profile, own), gpu)
    prefill_s = _compute_s(_prefill(profile, own), gpu)
    collect_s = lists * (prefill_s + text * _step_s(own, gpu, text))
    state_bytes = sizes.tap_bytes(own.drafter, own.prompt_tokens + text, 2)
    masters = 4 * own.drafter.parameters

    train_s = 0.0
    for key in drafters:
        changed = config.with_variant(profile, key.variant)
        settings = config.arm_settings(changed.training, key)
        validations = math.ceil(settings.steps / settings.evaluate_every)
        visits = settings.steps * settings.clips_per_step
        visits += validations * clips.validation_clips + settings.anchor_clips
        train_s += visits * states_s
        sizes_there = dataclasses.replace(own, drafter=DrafterShape.of(own.target, changed.drafter))
        work = drafter_step_work(changed, sizes_there, key.arm)
        train_s += settings.steps * _compute_s(work, gpu)

    decode, shards = profile.decode, len(clips.sample_seeds) * len(clips.benchmarks)
    limit = decode.comparison_clips
    few = clips.clips_per_suite if limit is None else min(limit, clips.clips_per_suite)
    texts = 0
    for method in decode.methods:
        name = method.partition(":")[0]
        each = few if name in ON_FEW_CLIPS else clips.clips_per_suite
        with_drafter = name in WITH_DRAFTER
        texts += each * (len(config.main_drafters(profile)) if with_drafter else 1)
    decoded_s = texts * decode.max_new_tokens * _step_s(own, gpu, decode.max_new_tokens)
    decode_s = shards * (clips.clips_per_suite * prefill_s + decoded_s * decode.repeats)
    return [
        StageEstimate("continuations", 1, collect_s / 3600, lists * state_bytes * stored),
        # at most two checkpoints of masters and AdamW's averages at a time, and every drafter
        StageEstimate(
            "drafter",
            len(drafters),
            train_s / 3600,
            2 * 3 * masters * bool(drafters) + len(drafters) * masters,
        ),
        StageEstimate("decode", shards, decode_s / 3600, 0.0),
    ]


def memory(profile: Profile, own: Sizes) -> dict[str, dict[str, int]]:
    """Bytes by part, by stage; the other stages on the device take less than `decode`.

    Training is told of on CUDA alone: the formula is that of bfloat16 and a clip at a time.
    """
    parts = {"decode": decode_memory(profile, own)}
    if profile.drafter.source is None and profile.target.device == "cuda":
        parts["drafter"] = training_memory(profile, own)
    return parts


def disk_bytes(profile: Profile, shards: Sequence[Shard]) -> float | None:
    """Bytes that the shards of a plan which are not done have yet to leave in their folders.

    None where it is unknown, as the target's `config.json` cannot be read. A target that a stage
    builds leaves next to nothing.
    """
    try:
        target = target_shape(profile)
    except InputError:  # told where the target's files are
        return None
    if target is None:
        return 0.0
    waiting = [shard for shard in shards if not shard.done]
    trained = [] if profile.drafter.source else [s for s in waiting if s.stage == "drafter"]
    drafters = [shard.drafter_key for shard in trained]
    needed = 0.0
    for stage in estimate_stages(profile, sizes_of(profile, target), drafters, device_facts(GPU)):
        folders = [shard.folder for shard in waiting if shard.stage == stage.stage]
        if folders:
            needed += max(0.0, stage.disk_bytes - sum(map(_held_bytes, folders)))
    return needed


def _held_bytes(folder: Path) -> int:
    """Bytes of the files below a folder, as an interrupted run left them."""
    held = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run beside this one has replaced it
                held += os.stat(os.path.join(place, name)).st_size
    return held


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= 0.1 * scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB" if count else "0"


def told_parts(parts: dict[str, int]) -> str:
    """Parts from the largest down; those under a two-hundredth of the whole are left out."""
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    least = sum(parts.values()) / 200
    return ", ".join(f"{name} {size(held)}" for name, held in ranked if held >= least)


def describe(
    profile: Profile, ablation: bool = False, studies: bool = False
) -> dict[str, Any] | None:
    """The estimate as rows and lines to print; None for a target that is not built yet.

    Of the studies the drafters of `design.variants` are counted. Hours are told for profiles on CUDA
    alone: a CPU's peaks are not known here.
    """
    target = target_shape(profile)
    if target is None:
        return None
    own, gpu = sizes_of(profile, target), device_facts(GPU)
    drafters = config.main_drafters(profile)
    if ablation:
        drafters = list(dict.fromkeys([*drafters, *config.ablation_drafters(profile)]))
    if studies:
        drafters = [*drafters, *config.design_drafters(profile)]
    trained = [] if profile.drafter.source else drafters
    on_gpu = profile.target.device == "cuda"
    estimated = estimate_stages(profile, own, trained, gpu)
    stages = [
        {
            "stage": one.stage,
            "shards": one.shards,
            "gpu_hours": round(one.gpu_hours, 1) if on_gpu else None,
            "disk_bytes": one.disk_bytes,
        }
        for one in estimated
    ]
    parts = memory(profile, own)
    notes = [
        f"memory, {use}: {size(sum(held.values()))} ({told_parts(held)})"
        for use, held in parts.items()
    ]
    if on_gpu:
        hours = sum(one.gpu_hours for one in estimated)
        name = shapes.shape_name(target, "the target's own shape")
        notes.append(f"{hours:,.0f} GPU hours in all, for {name}")
        notes.append(
            f"hours on one {gpu.name}, estimated: a step reads at {BANDWIDTH_SHARE:.0%} of its "
            f"bandwidth, the rest computes at {COMPUTE_SHARE:.0%} of its peak; prompts of "
            f"{own.prompt_tokens:,} tokens; no method faster than autoregressive decoding"
        )
    if studies:
        notes.append(
            "of the studies the drafters of design.variants are counted; the decodes of both, and "
            "the texts and the drafter of lengths, are not"
        )
    return {"stages": stages, "memory_bytes": parts, "gpu": gpu.name, "notes": notes}
