"""Shapes of a target and its drafter: the numbers of a checkpoint's `config.json`, and parameters.

No weight is read and nothing heavy is imported. Stage code needs shapes, to know a checkpoint and
to build one of random weights; what a shape takes in bytes and operations is in `sizes`, which no
trained or decoded result depends on.

    shape = read_shape(Path("…/config.json"))
    shape.parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from vflash_analysis.config import DrafterSettings
from vflash_analysis.errors import InputError
from vflash_analysis.strict import Bounds, check_object, convert, read_object

FRAMES_PER_CHUNK = 16  # frames of one pass through the vision tower
LONG_PROMPT = 4096  # rows; a longer prompt's MLPs run on so many at a time
MOST, MOST_LAYERS = 10**7, 1000  # that a config may give for a width or count, and for layers
LOGITS_BYTES = 2**28
"""Of one copy of the logits that training scores at a time; some five such copies live at its peak
(logits, their softmax, the allowed ones, temporaries). 441 rows of a 152,128-token vocabulary in
fp32, enough to keep the head's product busy; every row of a small vocabulary."""

# Fields of the shapes below that are read as they stand, and their keys in a `config.json`.
_VISION_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "image_size": "image_size",
    "patch_size": "patch_size",
}
_TEXT_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}


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
    def config(self) -> dict[str, int]:
        """Its numbers as the `vision_config` of a `config.json` names them."""
        return {key: getattr(self, name) for name, key in _VISION_KEYS.items()}

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
    def config(self) -> dict[str, int]:
        """Its numbers as the `text_config` of a `config.json` names them, `head_dim` aside."""
        return {key: getattr(self, name) for name, key in _TEXT_KEYS.items()}

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

    @classmethod
    def of(cls, target: TargetShape, settings: DrafterSettings) -> DrafterShape:
        """The drafter that these settings give a target."""
        return cls(
            target,
            settings.num_hidden_layers,
            settings.num_tapped_layers,
            settings.block_size,
            settings.intermediate_size,
        )

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
    config = read_object(path)
    text = check_object(config.get("text_config", config), f"{path}: text_config")
    numbers = {
        name: _number(path, "text_config", text, key, MOST_LAYERS if name == "num_layers" else MOST)
        for name, key in _TEXT_KEYS.items()
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
        vision=None if vision is None else _vision_shape(path, vision),
    )


def _check_divides(
    path: Path, section: str, key: str, value: int, whole_key: str, whole: int
) -> None:
    if whole % value:
        raise InputError(
            f"{path}: {section}.{key}: found {value}, allowed: a divisor of {whole_key} ({whole})"
        )


def _vision_shape(path: Path, given: Any) -> VisionShape:
    vision = check_object(given, f"{path}: vision_config")

    side = _number(path, "vision_config", vision, "image_size")
    most = {"num_layers": MOST_LAYERS, "patch_size": side}
    return VisionShape(
        **{
            name: _number(path, "vision_config", vision, key, most.get(name, MOST))
            for name, key in _VISION_KEYS.items()
        }
    )


def _number(path: Path, section: str, values: Mapping[str, Any], key: str, most: int = MOST) -> int:
    kind = Annotated[int, Bounds(1, most)]
    number: int = convert(values.get(key), kind, f"{path}: {section}.{key}")
    return number
