"""The frozen target: frames and a question become a prompt, the prompt runs on our cache.

Any Hugging Face video language model whose decoder is full attention can be added; the vision side
implemented here is LLaVA-OneVision's (one pooled grid per frame, one newline token per video).
A language model without a vision side is a target too: its prompts are questions alone.
Decoding uses batch size 1. Forward passes go straight to the decoder with prepared masks, so an
autoregressive step costs less than one of `generate`'s. `target.py` loads one from a folder,
`language.py` one without a vision side.
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from vflash_analysis.errors import InputError
from vflash_analysis.model import inputs, text_stack, tokens
from vflash_analysis.model import source as folders
from vflash_analysis.model.attention import HF_NAME, NAME, backend_mask, register_attention
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.inputs import FramePreprocessing
from vflash_analysis.model.taps import tap_outputs
from vflash_analysis.model.text_stack import mlp_in_parts
from vflash_analysis.schemas import BLOCK_SIZE, VERIFY_ROWS
from vflash_analysis.shapes import FRAMES_PER_CHUNK, LONG_PROMPT

if TYPE_CHECKING:
    from vflash_analysis.model.compiled import CompiledTarget

VIDEO_MODELS = ("llava_onevision",)  # vision sides implemented by `Target.encode_video`
ATTENTIONS = (NAME, "sdpa", "eager")
NO_TOKEN = -1  # the id of a placeholder that a target without a vision side does not have


@dataclass(frozen=True)
class Prefill:
    """What a prefill yields: one row of logits (V,), tapped states (P, n*H), seconds."""

    logits: torch.Tensor
    tapped: torch.Tensor | None
    vision_s: float
    prefill_s: float


@dataclass(frozen=True)
class Forward:
    """What a forward on the cache yields: logits (q, V) and tapped states (q, n*H)."""

    logits: torch.Tensor
    tapped: torch.Tensor | None


class Target:
    """A frozen video language model with its tokenizer, frame settings and prompt template.

    Args:
        model: a Hugging Face model for image-text-to-text generation; for causal language modelling
            where it reads no video.
        tokenizer: its tokenizer.
        preprocessing: its frame settings; None for a model that reads no video.
        attention: "vflash", "sdpa" or "eager", for the text stack; vision stays on SDPA.
        template: chat template and the file it came from; None takes the tokenizer's.
        source: name in messages and records, never a path.
        source_sha256: identity of config, tokenizer and weights.
        revision: revision of the checkpoint.

    Raises:
        InputError: the model cannot be used: its type, layers or special tokens.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        preprocessing: FramePreprocessing | None,
        attention: str = NAME,
        template: tuple[str, str] | None = None,
        source: str = "memory",
        source_sha256: str = "",
        revision: str = "local",
    ) -> None:
        check_config(model.config, source, reads_video=preprocessing is not None)
        if attention not in ATTENTIONS:
            raise InputError(f"attention: found {attention!r}, allowed: {', '.join(ATTENTIONS)}")
        register_attention()
        of_text = HF_NAME if attention == NAME else attention
        model.set_attn_implementation(
            of_text
            if preprocessing is None
            else {"": "sdpa", "text_config": of_text, "vision_config": "sdpa"}
        )
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.preprocessing = preprocessing
        self.attention = attention
        self.source = source
        self.source_sha256 = source_sha256
        self.revision = revision
        self.config = model.config
        self.text_config = model.config.get_text_config(decoder=True)
        self.num_layers: int = self.text_config.num_hidden_layers
        self.hidden_size: int = self.text_config.hidden_size
        self.vocab_size: int = self.text_config.vocab_size
        self.num_kv_heads: int = self.text_config.num_key_value_heads
        self.max_positions: int = self.text_config.max_position_embeddings
        self.groups: int = self.text_config.num_attention_heads // self.num_kv_heads
        self.head_dim: int = (
            getattr(self.text_config, "head_dim", None)
            or self.hidden_size // self.text_config.num_attention_heads
        )
        self.text_model = text_stack.find_text_model(model)
        self.embedding: torch.nn.Embedding = model.get_input_embeddings()
        self.lm_head: torch.nn.Linear = model.get_output_embeddings()
        weight = self.embedding.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        if self.dtype == torch.float64:
            text_stack.widen_norms(self.text_model)
        self.cache_keyword = text_stack.cache_keyword(self.text_model.forward)
        self.compiled: CompiledTarget | None = None  # set where the profile asks for it
        self._mask_by_type = text_stack.takes_mask_by_type(self.text_model.forward)
        self.video_token_id = self.image_token_id = NO_TOKEN
        self.tokens_per_frame = 0
        if preprocessing is not None:
            self.video_token_id = model.config.video_token_id
            self.image_token_id = model.config.image_token_id
            vision = model.config.vision_config
            self.tokens_per_frame = ((vision.image_size // vision.patch_size + 1) // 2) ** 2
        found = template or (tokenizer.chat_template, "tokenizer")
        self.template: str = found[0]
        self.template_file: str = found[1]
        if not isinstance(self.template, str):
            raise InputError(f"{source}: found no chat template")
        self.template_sha256 = hashlib.sha256(self.template.encode()).hexdigest()
        self.stop_ids = tokens.stop_ids(model, tokenizer)
        if not self.stop_ids:
            raise InputError(f"{source}: found no stop token in generation config or tokenizer")
        self.ignored_generation_settings = tokens.ignored_generation_settings(
            model.generation_config
        )

    def facts(self) -> dict[str, Any]:
        """What a reader should see after loading: identity, sizes, special ids, ignored settings."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {
            "source": self.source,
            "revision": self.revision,
            "source_sha256": self.source_sha256,
            "model_type": self.config.model_type,
            "text_model": self.text_config.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": self.attention,
            "compiled": self.compiled is not None,
            "device": str(self.device),
            "parameters": parameters,
            "weight_bytes": parameters * self.dtype.itemsize,
            "layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "query_heads": self.num_kv_heads * self.groups,
            "kv_heads": self.num_kv_heads,
            "kv_bytes_per_token": 2
            * self.num_layers
            * self.num_kv_heads
            * self.head_dim
            * self.dtype.itemsize,
            "max_positions": self.max_positions,
            "vocabulary_rows": self.vocab_size,
            "tokens": len(self.tokenizer),
            "tokens_per_frame": self.tokens_per_frame,
            "stop_ids": sorted(self.stop_ids),
            "mask_token_id": self.mask_token_id,
            "template_file": self.template_file,
            "template_sha256": self.template_sha256,
            "ignored_generation_settings": self.ignored_generation_settings,
        }

    # Special rows.

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Tokens that stand for pictures in a prompt; none without a vision side."""
        return frozenset({self.video_token_id, self.image_token_id} - {NO_TOKEN})

    @cached_property
    def mask_token_id(self) -> int:
        """An existing embedding row that no text uses (see `tokens.unused_row`)."""
        taken = {*self.placeholder_ids, *self.stop_ids}
        return tokens.unused_row(self.embedding.weight, self.tokenizer, taken, self.template)

    @cached_property
    def banned_ids(self) -> torch.Tensor:
        """Ids that are never drafted: placeholders, mask, rows beyond the tokenizer; (n,) long."""
        ids = {*self.placeholder_ids, self.mask_token_id}
        ids |= set(range(len(self.tokenizer), self.vocab_size))
        return torch.tensor(sorted(ids), dtype=torch.long, device=self.device)

    # Inputs.

    def prepare_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """Frames (T, H, W, 3) uint8 to pixel values (1, T, 3, S, S) (see `inputs.pixel_values`).

        Raises:
            InputError: other frames, or any for a target that reads no video.
        """
        if self.preprocessing is None:
            raise InputError(f"{self.source}: found frames, but this target reads no video")
        return inputs.pixel_values(frames, self.preprocessing, self.dtype, self.device)

    def build_prompt(self, question: str, num_frames: int) -> torch.Tensor:
        """Token ids (P,) of one user turn with a video and a question, ready for the answer.

        `<video>` becomes num_frames * tokens_per_frame + 1 placeholders; the last is the newline
        token after the whole video. A target that reads no video takes 0 frames and the question.

        Raises:
            InputError: no frame where there must be some, or some where there may be none; other
                placeholders than one video (see `inputs.prompt_ids`).
        """
        if self.preprocessing is None:
            if num_frames:
                raise InputError(
                    f"num_frames: found {num_frames}, allowed: 0, as {self.source} reads no video"
                )
            ids = inputs.turn_ids(self, inputs.user_turn(self, question))
        elif num_frames < 1:
            raise InputError(f"num_frames: found {num_frames}, allowed: at least 1")
        else:
            ids = inputs.prompt_ids(self, question, num_frames * self.tokens_per_frame + 1)
        return torch.tensor(ids, dtype=torch.long, device=self.device)

    def check_lengths(
        self, prompt_tokens: int, max_new_tokens: int, video_tokens: int | None = None
    ) -> None:
        """Refuse a prompt that would outgrow the model's positions; nothing is ever truncated.

        Args:
            prompt_tokens: P.
            max_new_tokens: new tokens asked for.
            video_tokens: of the prompt, for the message.

        Raises:
            InputError: P + max_new_tokens + 16 exceeds `max_position_embeddings`.
        """
        if prompt_tokens < 1 or max_new_tokens < 1:
            raise InputError(
                f"lengths: found a prompt of {prompt_tokens} and {max_new_tokens} new tokens, "
                "allowed: at least 1 each"
            )
        needed = prompt_tokens + max_new_tokens + BLOCK_SIZE
        if needed > self.max_positions:
            video = "" if video_tokens is None else f" ({video_tokens} of them video)"
            raise InputError(
                f"prompt of {prompt_tokens} tokens{video} + {max_new_tokens} new + a block of "
                f"{BLOCK_SIZE} = {needed} positions, allowed: max_position_embeddings "
                f"{self.max_positions}; use fewer frames (prompts are never truncated)"
            )

    def new_cache(
        self, prompt_tokens: int, max_new_tokens: int, verify_rows: int = VERIFY_ROWS
    ) -> KVCache:
        """An empty cache that fits the prompt, the new tokens and one block being verified.

        Of a compiled target it is the same one again and again (see `CompiledTarget.cache`).

        Raises:
            InputError: see `check_lengths`.
        """
        self.check_lengths(prompt_tokens, max_new_tokens)
        if self.compiled is not None:
            return self.compiled.cache(prompt_tokens, max_new_tokens + verify_rows)
        return self.allocate_cache(prompt_tokens + max_new_tokens + verify_rows)

    def allocate_cache(self, capacity: int) -> KVCache:
        """An empty cache of so many rows."""
        return KVCache(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            capacity,
            self.dtype,
            self.device,
        )

    # Forward passes.

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the frozen input embedding: ids (...) to (..., H)."""
        return self.embedding(ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The frozen LM head: hidden (..., H) to logits (..., V)."""
        return self.lm_head(hidden)

    @torch.inference_mode()
    def encode_video(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Video tokens of a clip, the vision tower being run on a few frames at a time.

        Args:
            pixel_values: (1, T, 3, S, S)

        Returns:
            (T * tokens_per_frame + 1, H); the last row is the newline token.

        Raises:
            InputError: the model gives another number of tokens, such as a newline a frame.
        """
        chunks = pixel_values.split(FRAMES_PER_CHUNK, dim=1)
        parts = []
        for number, chunk in enumerate(chunks, start=1):
            # (1, t * tokens_per_frame + 1, H): every call appends the newline, only the last stays.
            features = self.model.get_video_features(chunk, return_dict=True).pooler_output
            parts.append(features[0] if number == len(chunks) else features[0, :-1])
            expected = chunk.shape[1] * self.tokens_per_frame + 1
            if features.shape[1] != expected:
                raise InputError(
                    f"{self.source}: {chunk.shape[1]} frames became {features.shape[1]} video "
                    f"tokens, allowed: {expected}, {self.tokens_per_frame} a frame and one newline"
                )
        return torch.cat(parts)

    def prefill(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None,
        cache: KVCache,
        tap_layer_ids: Sequence[int] = (),
    ) -> Prefill:
        """Run video and prompt through the target once, filling an empty cache.

        Args:
            input_ids: (P,) from `build_prompt`.
            pixel_values: (1, T, 3, S, S) from `prepare_frames`; None for a prompt without video.
            cache: empty, from `new_cache`.
            tap_layer_ids: layers whose outputs are returned.

        Returns:
            logits (V,) of the token after the prompt; tapped states (P, n*H) or None; seconds of
            vision encoding and of the text stack.

        Raises:
            InputError: placeholders and pixels do not match, or the cache is not empty.
        """
        if cache.length:
            raise InputError(f"prefill: the cache already holds {cache.length} rows, allowed: 0")
        if input_ids.dim() != 1 or not len(input_ids):
            raise InputError(f"prefill: found ids of shape {tuple(input_ids.shape)}, allowed: (P,)")
        if len(input_ids) > self.max_positions:
            raise InputError(
                f"prefill: prompt of {len(input_ids)} tokens, allowed: at most {self.max_positions}"
            )
        inputs.check_placeholders(self, input_ids, pixel_values)
        start = self._clock()
        features = None if pixel_values is None else self.encode_video(pixel_values)
        encoded = self._clock()
        tapped = self._tap_buffer(len(input_ids), tap_layer_ids)
        with torch.inference_mode():
            embeds = self.embedding(input_ids)
            if features is not None:
                embeds[input_ids == self.video_token_id] = features.to(embeds.dtype)
                del features
            long = len(input_ids) > LONG_PROMPT
            with mlp_in_parts(self.text_model, LONG_PROMPT) if long else nullcontext():
                hidden = self._decoder(embeds, None, None, cache, tap_layer_ids, tapped)
            logits = self.lm_head(hidden[-1])
        done = self._clock()
        if not bool(torch.isfinite(logits).all()):
            raise InputError(f"{self.source}: the prefill's logits are not finite in {self.dtype}")
        return Prefill(logits, tapped, encoded - start, done - encoded)

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        cache: KVCache,
        mask: torch.Tensor | None = None,
        tap_layer_ids: Sequence[int] = (),
    ) -> Forward:
        """Run q tokens on a filled cache; their rows are appended to it.

        Args:
            token_ids: (q,)
            position_ids: (q,); None continues at the cache's length.
            cache: the prompt's and the committed tokens' rows.
            mask: None for a chain (causal); else bool, True = visible, (q, q) over the new rows
                with every cached row visible, or (q, cached + q) over all rows.
            tap_layer_ids: layers whose outputs are returned.

        Returns:
            logits (q, V) and tapped states (q, n*H) or None

        Raises:
            InputError: the rows do not fit the cache, or the mask's shape is wrong.
        """
        tapped = self._tap_buffer(len(token_ids), tap_layer_ids) if tap_layer_ids else None
        with torch.inference_mode():
            hidden = self._decoder(
                self.embedding(token_ids), position_ids, mask, cache, tap_layer_ids, tapped
            )
            return Forward(self.lm_head(hidden), tapped)

    def _decoder(
        self,
        embeds: torch.Tensor,
        position_ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        cache: KVCache,
        tap_layer_ids: Sequence[int],
        tapped: torch.Tensor | None,
    ) -> torch.Tensor:
        """Decoder stack over embeds (q, H) to post-norm hidden states (q, H)."""
        held = cache.length
        keys = held + len(embeds)
        if position_ids is None:
            position_ids = torch.arange(held, keys, device=self.device)
        prepared = backend_mask(
            self.attention, len(embeds), keys, mask, self.groups, self.dtype, self.device
        )
        arguments: dict[str, Any] = {
            "inputs_embeds": embeds[None],
            # A prepared mask keeps the model from building one of its own.
            "attention_mask": {"full_attention": prepared} if self._mask_by_type else prepared,
            "position_ids": position_ids[None],
            "use_cache": True,
            self.cache_keyword: cache,
        }
        if tapped is None:
            hidden = self.text_model(**arguments).last_hidden_state
        else:
            with tap_outputs(self.text_model.layers, tap_layer_ids, tapped):
                hidden = self.text_model(**arguments).last_hidden_state
        if cache.length != keys:
            raise RuntimeError(
                f"{self.source}: the model did not use the cache ({cache.length} rows after a "
                f"pass that should leave {keys})"
            )
        return hidden[0]

    def _tap_buffer(self, rows: int, tap_layer_ids: Sequence[int]) -> torch.Tensor | None:
        # Made outside inference mode, so that training may use the states as inputs.
        if not tap_layer_ids:
            return None
        if any(not 0 <= layer_id < self.num_layers for layer_id in tap_layer_ids):
            raise InputError(
                f"tapped layers: found {list(tap_layer_ids)}, allowed: 0..{self.num_layers - 1}"
            )
        return torch.empty(
            rows, len(tap_layer_ids) * self.hidden_size, dtype=self.dtype, device=self.device
        )

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def check_config(config: Any, name: str, reads_video: bool = True) -> None:
    """Refuse a model that this suite cannot run, by name.

    Raises:
        InputError: no vision side for this model type where it must read video, or layers that
            cannot be rolled back.
    """
    folders.check_full_attention(config.get_text_config(decoder=True))
    if reads_video and config.model_type not in VIDEO_MODELS:
        raise InputError(
            f"{name}: model type {config.model_type!r} has no video side here, allowed: "
            f"{', '.join(VIDEO_MODELS)}"
        )
