"""What a target and its drafter take in bytes and operations, by arithmetic on their shapes.

Nothing is measured and nothing heavy is imported. `vflash doctor` holds the bytes against the
device, `vflash plan` turns operations into hours, and tables and figures draw limits from both:
nothing trained or decoded depends on them. Tests hold every byte against measured ones.

    kv_bytes(shape, 25_119, itemsize=2)
"""

from __future__ import annotations

from dataclasses import dataclass

from vflash_analysis.shapes import (
    FRAMES_PER_CHUNK,
    LONG_PROMPT,
    DrafterShape,
    TargetShape,
)


def kv_bytes(shape: TargetShape, rows: int, itemsize: int) -> int:
    """Bytes of the target's keys and values: 2 x layers x key/value heads x head size a row."""
    return 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim * rows * itemsize


def tap_bytes(drafter: DrafterShape, rows: int, itemsize: int) -> int:
    """Bytes of the tapped states of `rows` positions."""
    return drafter.num_tapped_layers * drafter.target.hidden_size * rows * itemsize


def drafter_kv_bytes(drafter: DrafterShape, rows: int, itemsize: int) -> int:
    """Bytes of the drafter's keys and values."""
    target = drafter.target
    return 2 * drafter.num_layers * target.num_key_value_heads * target.head_dim * rows * itemsize


def optimizer_bytes(drafter: DrafterShape) -> int:
    """Bytes beside a drafter's masters in training: gradient and AdamW's two averages, fp32."""
    return 3 * 4 * drafter.parameters


def saved_bytes(drafter: DrafterShape, rows: int, blocks: int, passes: int, keep: bool) -> float:
    """Bytes that a training step saves of one clip for its backward pass, under bfloat16 autocast.

    Of the context: the states, the projected rows in fp32 and rounded, and each layer's keys and
    values, before and after norm and rotation. Of the blocks: every layer's input; and if all
    activations are kept (`keep`, no activation checkpointing) also those inside the layers and
    their weights, rounded anew in each pass. The logits of the loss come on top.
    `tests/model/test_paper_size.py` counts them exactly.

    Args:
        rows: context positions.
        blocks: anchors of the clip.
        passes: forwards with gradient: 1 from masks, 2 with a revealed state.
        keep: no activation checkpointing.
    """
    target, layers = drafter.target, drafter.num_layers
    hidden, keys = target.hidden_size, target.num_key_value_heads * target.head_dim
    wide = drafter.intermediate_size or target.intermediate_size
    context = tap_bytes(drafter, rows, 2) + rows * (6 * hidden + 16 * layers * keys)
    slots = blocks * drafter.block_size
    inputs = passes * layers * slots * hidden * 4
    inside = slots * (6 * wide + 32 * hidden) + 2 * drafter.layer_parameters
    kept = passes * layers * inside if keep else inside
    return context + 2 * drafter.projector_parameters + inputs + kept


def vision_bytes(
    shape: TargetShape, frames: int, itemsize: int, at_once: int = FRAMES_PER_CHUNK
) -> int:
    """Most bytes that encoding a clip, `at_once` frames a pass, holds beyond weights and pixels.

    Over a chunk of frames, what every layer gave (Hugging Face keeps it) and the more of two: in
    the last layer's MLP its norm and the wide states before and after the activation, in the
    projector three states of the decoder's width. Beside it the video tokens of earlier chunks.
    """
    vision = shape.vision
    if vision is None:
        return 0
    chunk = min(frames, at_once)
    mlp = vision.hidden_size + 2 * vision.intermediate_size
    widths = (vision.num_layers + 1) * vision.hidden_size + max(mlp, 3 * shape.hidden_size)
    earlier = (frames // chunk - 1) * chunk * vision.tokens_per_frame * shape.hidden_size
    return (chunk * vision.patches * widths + earlier) * itemsize


def pixel_bytes(shape: TargetShape, frames: int, itemsize: int) -> int:
    """Bytes of a clip's frames as the vision tower takes them."""
    return 0 if shape.vision is None else 3 * frames * shape.vision.image_size**2 * itemsize


def prefill_bytes(shape: TargetShape, rows: int, itemsize: int, mlp_rows: int | None = None) -> int:
    """Most bytes that a prefill of `rows` positions holds beyond weights, cache and taps.

    The more of two places in a decoder layer. Around its MLP: embedded inputs, the layer's input,
    the residual and its norm; inside it gate, up and their product, of `mlp_rows` rows at a time
    (None: `LONG_PROMPT`), beside the outputs of earlier ones. In its attention: those four, queries
    before and after rotation and the output, keys and values.
    """
    hidden, keys = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    at_once = LONG_PROMPT if mlp_rows is None else mlp_rows
    inner = min(rows, at_once) * 3 * shape.intermediate_size
    around = rows * hidden * (5 if rows > at_once else 4)
    return max(around + inner, rows * (7 * hidden + 3 * keys)) * itemsize


def measuring_bytes(drafter: DrafterShape, context: int, verify_rows: int, itemsize: int) -> int:
    """Bytes that measuring a decoder's forwards takes (`decoding/cost.py`), vision left out.

    Weights of decoder, embedding and drafter; the target's cache twice, ours and Hugging Face's;
    tapped states, and the drafter's cache for chain and tree. On top the larger of what a
    projection of the prompt holds (three times its states, keys and values of all layers before
    they are stored) and what Hugging Face's verify does (one layer's keys and values grown by
    concatenation, and repeated for every query head, beside a mask).
    """
    target = drafter.target
    embedding = 0 if target.tied else target.head_parameters
    weights = target.step_parameters + embedding + drafter.parameters
    rows = context + verify_rows
    held = 2 * kv_bytes(target, rows, itemsize) + tap_bytes(drafter, context, itemsize)
    held += 2 * drafter_kv_bytes(drafter, rows, itemsize)
    projection = 3 * context * target.hidden_size * itemsize
    projection += drafter_kv_bytes(drafter, context, itemsize)
    heads = target.num_attention_heads + target.num_key_value_heads
    attention = 2 * heads * target.head_dim * rows * itemsize + verify_rows * rows * (itemsize + 1)
    return weights * itemsize + held + max(projection, attention)


# ---------------------------------------------------------------- one forward


@dataclass(frozen=True)
class Work:
    """What one forward costs: bytes that must be read, and floating-point operations."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The roofline: the slower of reading and computing, neither waiting for the other."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def _attention_flops(layers: int, heads: int, head_dim: int, pairs: float) -> float:
    """Scores and weighted sums: two products of 2 x head size operations a query-key pair."""
    return 4.0 * layers * heads * head_dim * pairs


def decoder_work(shape: TargetShape, rows: int, context: int, itemsize: int) -> Work:
    """One decoder forward of `rows` new positions over `context` cached ones, with the head.

    Args:
        rows: 1 for an autoregressive step, 16 for a chain's verify, 61 for Tree-60's.
        context: rows held before.
        itemsize: bytes of a number.
    """
    pairs = rows * (context + (rows + 1) / 2)
    attention = _attention_flops(shape.num_layers, shape.num_attention_heads, shape.head_dim, pairs)
    read = shape.step_parameters * itemsize + kv_bytes(shape, context, itemsize)
    return Work(read, 2.0 * shape.step_parameters * rows + attention)


def prefill_work(shape: TargetShape, rows: int, itemsize: int) -> Work:
    """The text stack over a prompt, with one row of logits."""
    layers = shape.num_layers * shape.layer_parameters
    pairs = rows * (rows + 1) / 2
    attention = _attention_flops(shape.num_layers, shape.num_attention_heads, shape.head_dim, pairs)
    flops = 2.0 * layers * rows + 2.0 * shape.head_parameters + attention
    return Work(shape.step_parameters * itemsize, flops)


def vision_work(shape: TargetShape, frames: int, itemsize: int) -> Work:
    """The vision tower and projector over the frames of a clip."""
    vision = shape.vision
    if vision is None:
        return Work(0.0, 0.0)
    hidden = shape.hidden_size
    weights = vision.parameters + (vision.hidden_size + hidden) * hidden
    passes = -(-frames // FRAMES_PER_CHUNK)
    attention = _attention_flops(
        vision.num_layers, 1, vision.hidden_size, frames * vision.patches**2
    )
    return Work(passes * weights * itemsize, 2.0 * weights * frames * vision.patches + attention)


def draft_work(drafter: DrafterShape, context: int, new_context: int, itemsize: int) -> Work:
    """One drafter forward over a block, with new context rows and the target's head."""
    target = drafter.target
    layers = drafter.num_layers * drafter.layer_parameters
    pairs = drafter.block_size * (context + drafter.block_size)
    attention = _attention_flops(
        drafter.num_layers, target.num_attention_heads, target.head_dim, pairs
    )
    flops = (
        2.0 * layers * drafter.block_size
        + 2.0 * drafter.context_parameters * new_context
        + 2.0 * target.head_parameters * (drafter.block_size - 1)
        + attention
    )
    weights = (drafter.parameters + target.head_parameters) * itemsize
    return Work(weights + drafter_kv_bytes(drafter, context, itemsize), flops)


def context_work(drafter: DrafterShape, rows: int, itemsize: int) -> Work:
    """The projection of a prompt's tapped states into the drafter's cache."""
    weights = drafter.context_parameters * itemsize
    moved = tap_bytes(drafter, rows, itemsize) + drafter_kv_bytes(drafter, rows, itemsize)
    return Work(weights + moved, 2.0 * drafter.context_parameters * rows)
