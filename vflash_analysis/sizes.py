"""Sizes of a target and its drafter: parameters, bytes and operations, by arithmetic alone.

From the numbers of a checkpoint's `config.json`; no weight is read and nothing heavy is imported.
`vflash doctor` holds the bytes against the device, `vflash plan` turns operations into hours, and
the cost model draws its limits from both. Tests hold every count against built models and every
byte against measured ones.

    shape = read_shape(Path("…/config.json"))
    kv_bytes(shape, 25_119, itemsize=2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vflash_analysis.errors import InputError
from vflash_analysis.records import read_json
from vflash_analysis.strict import shown

FRAMES_PER_CHUNK = 16  # frames of one pass through the vision tower
LONG_PROMPT = 4096  # rows; a longer prompt's MLPs run on so many at a time
MOST, MOST_LAYERS = 10**7, 1000  # that a config may give for a width or count, and for layers
LOGITS_BYTES = 2**28
"""Of one copy of the logits that training scores at a time; some five such copies live at its peak
(logits, their softmax, the allowed ones, temporaries). 441 rows of a 152,128-token vocabulary in
fp32, enough to keep the head's product busy; every row of a small vocabulary."""


@dataclass(frozen=True)
class VisionShape:
    """A SigLIP tower and the pooling after it.

    Attributes:
        num_layers, hidden_size, intermediate_size: of its encoder.
        image_size, patch_size: pixels of a side.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    image_size: int
    patch_size: int

    @property
    def patches(self) -> int:
        """Patches of a frame, which the tower attends over."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens_per_frame(self) -> int:
        """Video tokens of a frame: its patches pooled 2 x 2, a last odd row or column kept."""
        return ((self.image_size // self.patch_size + 1) // 2) ** 2

    @property
    def parameters(self) -> int:
        """Weights and biases of patch and position embedding, encoder and last norm."""
        hidden, wide = self.hidden_size, self.intermediate_size
        embedding = (3 * self.patch_size**2 + 1) * hidden + self.patches * hidden
        attention = 4 * (hidden + 1) * hidden
        mlp = (hidden + 1) * wide + (wide + 1) * hidden
        return embedding + self.num_layers * (attention + mlp + 4 * hidden) + 2 * hidden


@dataclass(frozen=True)
class TargetShape:
    """A video language model: a decoder with grouped heads, its head, and a vision tower.

    Attributes:
        num_layers .. vocab_size: of the decoder, under Hugging Face's names.
        qkv_bias: whether query, key and value projections have biases (Qwen2's do).
        tied: whether the head is the input embedding.
        vision: None for a text-only model.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    qkv_bias: bool = True
    tied: bool = False
    vision: VisionShape | None = None

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        hidden = self.hidden_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = 2 * hidden * queries + 2 * hidden * keys
        bias = queries + 2 * keys if self.qkv_bias else 0
        return attention + bias + 3 * hidden * self.intermediate_size + 2 * hidden

    @property
    def head_parameters(self) -> int:
        """Parameters that the LM head multiplies by, tied or not."""
        return self.vocab_size * self.hidden_size

    @property
    def step_parameters(self) -> int:
        """Parameters that a decoder forward reads: all layers, the last norm and the head."""
        return self.num_layers * self.layer_parameters + self.hidden_size + self.head_parameters

    @property
    def parameters(self) -> int:
        """All parameters; of LLaVA-OneVision with its projector and newline embedding."""
        embedding = 0 if self.tied else self.vocab_size * self.hidden_size
        text = self.step_parameters + embedding
        if self.vision is None:
            return text
        hidden, seen = self.hidden_size, self.vision.hidden_size
        projector = (seen + 1) * hidden + (hidden + 1) * hidden
        return text + self.vision.parameters + projector + hidden


@dataclass(frozen=True)
class DrafterShape:
    """A block drafter beside its target (`model/network.py`).

    Attributes:
        num_layers, intermediate_size: of the drafter; other widths are the target's.
        num_tapped_layers: target layers whose states it reads.
        block_size: slots of a block.
    """

    target: TargetShape
    num_layers: int
    num_tapped_layers: int
    block_size: int
    intermediate_size: int | None = None

    @property
    def projector_parameters(self) -> int:
        """The linear layer from concatenated tapped states to the context."""
        return self.num_tapped_layers * self.target.hidden_size**2

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: no biases, norms on the heads of queries and keys."""
        hidden, head_dim = self.target.hidden_size, self.target.head_dim
        queries = self.target.num_attention_heads * head_dim
        keys = self.target.num_key_value_heads * head_dim
        wide = self.intermediate_size or self.target.intermediate_size
        norms = 2 * hidden + 2 * head_dim
        return 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * wide + norms

    @property
    def context_parameters(self) -> int:
        """Parameters that a context token passes: projector, keys and values of every layer."""
        keys = self.target.num_key_value_heads * self.target.head_dim
        return self.projector_parameters + self.num_layers * 2 * self.target.hidden_size * keys

    @property
    def parameters(self) -> int:
        """All parameters; embedding and head are the target's and do not count."""
        norms = 2 * self.target.hidden_size
        return self.projector_parameters + self.num_layers * self.layer_parameters + norms


# ---------------------------------------------------------------- shapes of checkpoints

# Text stack of Qwen2-7B, SigLIP so400m without its last layer; rows of embedding and head as
# transformers issue 37471 names them.
LLAVA_ONEVISION_7B = TargetShape(
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=18944,
    vocab_size=152128,
    vision=VisionShape(26, 1152, 4304, 384, 14),
)
# The same with Qwen2-0.5B, whose head is its embedding.
LLAVA_ONEVISION_05B = TargetShape(
    num_layers=24,
    hidden_size=896,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=4864,
    vocab_size=152000,
    tied=True,
    vision=LLAVA_ONEVISION_7B.vision,
)


NAMED_SHAPES = {
    "llava-onevision-7b": LLAVA_ONEVISION_7B,
    "llava-onevision-0.5b": LLAVA_ONEVISION_05B,
}


def shape_name(shape: TargetShape, otherwise: str) -> str:
    """The name of a shape of NAMED_SHAPES, else the one given."""
    return next((name for name, known in NAMED_SHAPES.items() if known == shape), otherwise)


def read_shape(path: Path) -> TargetShape:
    """The shape that a checkpoint's `config.json` gives.

    Raises:
        InputError: the file is not there, leaves out a number that is needed, or has one that no
            model can have; names file and key.
    """
    config = _object(str(path), read_json(path))
    text = _object(f"{path}: text_config", config.get("text_config", config))
    numbers = {
        name: _number(path, "text_config", text, key, most)
        for name, key, most in (
            ("num_layers", "num_hidden_layers", MOST_LAYERS),
            ("hidden_size", "hidden_size", MOST),
            ("num_attention_heads", "num_attention_heads", MOST),
            ("num_key_value_heads", "num_key_value_heads", MOST),
            ("intermediate_size", "intermediate_size", MOST),
            ("vocab_size", "vocab_size", MOST),
        )
    }
    hidden, heads = numbers["hidden_size"], numbers["num_attention_heads"]
    if text.get("head_dim") is not None:
        head_dim = _number(path, "text_config", text, "head_dim")
    else:
        head_dim = hidden // heads
        _check_divides(path, "text_config", "num_attention_heads", heads, "hidden_size", hidden)
    groups = numbers["num_key_value_heads"]
    _check_divides(path, "text_config", "num_key_value_heads", groups, "num_attention_heads", heads)
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    vision = config.get("vision_config")
    return TargetShape(
        **numbers,
        head_dim=head_dim,
        qkv_bias=text.get("model_type") == "qwen2" or bool(text.get("attention_bias")),
        tied=bool(tied),
        vision=None
        if vision is None
        else _vision_shape(path, _object(f"{path}: vision_config", vision)),
    )


def _object(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{place}: found a JSON {type(value).__name__}, allowed: an object")
    return value


def _check_divides(
    path: Path, section: str, key: str, value: int, whole_key: str, whole: int
) -> None:
    if whole % value:
        raise InputError(
            f"{path}: {section}.{key}: found {value}, allowed: a divisor of {whole_key} ({whole})"
        )


def _vision_shape(path: Path, vision: Mapping[str, Any]) -> VisionShape:
    def number(key: str, most: int = MOST) -> int:
        return _number(path, "vision_config", vision, key, most)

    side = number("image_size")
    return VisionShape(
        number("num_hidden_layers", MOST_LAYERS),
        number("hidden_size"),
        number("intermediate_size"),
        side,
        number("patch_size", side),
    )


def _number(path: Path, section: str, values: Mapping[str, Any], key: str, most: int = MOST) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(
            f"{path}: {section}.{key}: found {shown(value)}, allowed: a whole number from 1 to "
            f"{most}"
        )
    return value


# ---------------------------------------------------------------- bytes


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
    """Bytes beside the masters of a drafter in training: gradient and AdamW's two averages, fp32."""
    return 3 * 4 * drafter.parameters


def saved_bytes(drafter: DrafterShape, rows: int, blocks: int, passes: int, keep: bool) -> float:
    """Bytes that a training step saves of one clip for its backward pass, under bfloat16 autocast.

    Of the context: the states, the projected rows in fp32 and rounded, and each layer's keys and
    values, before and after norm and rotation. Of the blocks: every layer's input; and if all
    activations are kept (`keep`, no activation checkpointing) also those inside the layers and
    their weights, rounded anew in each pass. The logits of the loss come on top. `tests/model/test_paper_size.py` counts them exactly.

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
    (None: `LONG_PROMPT`), beside the outputs of earlier ones. In its attention: those four, queries before and after
    rotation and the output, keys and values.
    """
    hidden, keys = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    at_once = LONG_PROMPT if mlp_rows is None else mlp_rows
    inner = min(rows, at_once) * 3 * shape.intermediate_size
    around = rows * hidden * (5 if rows > at_once else 4)
    return max(around + inner, rows * (7 * hidden + 3 * keys)) * itemsize


def measuring_bytes(drafter: DrafterShape, context: int, verify_rows: int, itemsize: int) -> int:
    """Bytes that measuring a decoder's forwards takes (`decoding/cost.py`), vision left out.

    Weights of decoder, embedding and drafter; the target's cache twice, ours and Hugging Face's;
    tapped states, and the drafter's cache for chain and tree. On top the larger of what a projection
    of the prompt holds (three times its states, keys and values of all layers before they are
    stored) and what Hugging Face's verify does (one layer's keys and values grown by
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
    """One drafter forward over a block, new context rows projected along, with the target's head."""
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
