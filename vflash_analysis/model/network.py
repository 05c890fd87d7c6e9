"""The drafter network, which fills a block of masked slots from the target's hidden states.

Each layer attends from 16 block slots to [context ; block]. The context is the target's tapped
states, projected once (linear + RMSNorm) and shared by all layers; each layer has its own key and
value projections for it. Inside the block attention is bidirectional; the context holds positions
strictly before the anchor. Embedding and LM head are the target's own and never registered here.

Saved and loaded by `save_pretrained` / `from_pretrained` and named as Hugging Face names it, so
`target.model.generate(..., assistant_model=drafter, speculation_type="dflash")` works too.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

from vflash_analysis.errors import InputError
from vflash_analysis.model.attention import grouped_attention
from vflash_analysis.model.block_attention import BlockView, attend_blocks, view_blocks
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.taps import check_tap_layers
from vflash_analysis.schemas import BLOCK_SIZE

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class VFlashConfig(PreTrainedConfig):
    """Shape of a drafter and the target it belongs to.

    `target_layer_ids` l means the output of decoder layer l (Hugging Face's `hidden_states[l+1]`).
    `context` is which prompt positions it was trained to see (see `context_rows`); `training`
    holds facts about the training run.
    """

    model_type = "vflash"

    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    block_size: int = BLOCK_SIZE
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    target_num_layers: int | None = None
    target_source: str | None = None
    target_revision: str | None = None
    target_sha256: str | None = None
    target_text_config_sha256: str | None = None
    vocab_size: int | None = None
    context: str | float = "all"
    training: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)


def check_drafter_config(config: VFlashConfig) -> None:
    """Refuse a config that could only fail later or draft badly in silence.

    Raises:
        InputError: missing or out-of-range tap ids, mask id, block size, layer types or rotary
            settings.
    """
    if not isinstance(config.target_num_layers, int):
        raise InputError("drafter: found no target_num_layers")
    check_tap_layers(config.target_layer_ids, config.target_num_layers, "drafter")
    if not isinstance(config.vocab_size, int) or not isinstance(config.mask_token_id, int):
        raise InputError(
            f"drafter: found vocab_size {config.vocab_size}, mask_token_id {config.mask_token_id}, "
            "allowed: whole numbers"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise InputError(
            f"drafter: mask_token_id: found {config.mask_token_id}, allowed: an existing row below "
            f"{config.vocab_size}"
        )
    if not 2 <= config.block_size <= BLOCK_SIZE:
        raise InputError(
            f"drafter: block_size: found {config.block_size}, allowed: 2..{BLOCK_SIZE}"
        )
    if config.layer_types != ["full_attention"] * config.num_hidden_layers:
        raise InputError(
            f"drafter: layer_types: found {config.layer_types}, allowed: full_attention for each "
            f"of {config.num_hidden_layers} layers"
        )
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "default" or "rope_theta" not in rope:
        raise InputError(
            f"drafter: rope_parameters: found {rope}, allowed: rope_type default and rope_theta, "
            "copied from the target"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"drafter: {config.num_attention_heads} query heads cannot share "
            f"{config.num_key_value_heads} key/value heads"
        )


class RMSNorm(nn.RMSNorm):
    """Torch's RMS norm in the dtype of its weight, so that autocast neither rounds nor slows it."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., H) to (..., H)"""
        return super().forward(states.to(self.weight.dtype))


class DrafterAttention(nn.Module):
    """Projections of one layer: queries from the block, keys and values from context and block."""

    def __init__(self, config: VFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_causal = False
        self.scaling = config.head_dim**-0.5
        hidden, heads, kv_heads = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (-1, self.head_dim))  # (B, N, heads, D)

    def queries(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Normed block states (B, Q, H) to rotated queries (B, heads, Q, D)."""
        return _rotate(self.q_norm(self._split(self.q_proj(states))).transpose(1, 2), cos, sin)

    def keys_values(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States (B, N, H) to rotated keys and values, each (B, kv_heads, N, D)."""
        keys = _rotate(self.k_norm(self._split(self.k_proj(states))).transpose(1, 2), cos, sin)
        return keys, self._split(self.v_proj(states)).transpose(1, 2)


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: VFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., H) to (..., H)"""
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class DrafterLayer(nn.Module):
    """One layer; only block slots are queries and get residual and MLP updates."""

    def __init__(self, config: VFlashConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = DrafterMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def blocks(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context_keys: torch.Tensor,
        context_values: torch.Tensor,
        view: BlockView,
    ) -> torch.Tensor:
        """The layer over the rows of many blocks (B, A * S, H), see `forward_blocks`."""
        attention = self.self_attn
        normed = self.input_layernorm(hidden)
        queries = attention.queries(normed, cos, sin)
        keys, values = attention.keys_values(normed, cos, sin)
        attended = attend_blocks(
            queries, keys, values, context_keys, context_values, view, attention.scaling
        )
        return self.finish(hidden, attended)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, residuals and MLP: hidden (B, Q, H), attended (B, Q, heads, D)."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class VFlashDrafter(PreTrainedModel):
    """The block drafter (see the module's text).

    Raises:
        InputError: the config is incomplete (see `check_drafter_config`).
    """

    config_class = VFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True  # of `forward_blocks`; Hugging Face's switch
    _supports_sdpa = True
    _no_split_modules = ("DrafterLayer",)

    def __init__(self, config: VFlashConfig) -> None:
        super().__init__(config)
        check_drafter_config(config)
        taps = len(config.target_layer_ids or ())
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.context_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self._rotary_table: tuple[torch.Tensor, torch.Tensor] | None = None
        self.post_init()

    @property
    def drafter_layers(self) -> list[DrafterLayer]:
        """The layers, in order."""
        return cast(list[DrafterLayer], list(self.layers))

    def project(self, tapped: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Context hidden states shared by all layers: RMSNorm(W [h_1 .. h_n]).

        Args:
            tapped: (..., n*H) tapped target states side by side.
            keep: (...) bool; rows that no block may see are zeroed first, so that whatever they
                hold (padding, NaN) reaches neither outputs nor gradients.

        Returns:
            (..., H)
        """
        if keep is not None:
            tapped = tapped.masked_fill(~keep.unsqueeze(-1), 0.0)
        return self.context_norm(self.fc(tapped))

    def _make_rotary_table(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (max_position_embeddings, D), computed in fp32 as the target's."""
        config = self.config
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=weight.device)
        frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** (steps / config.head_dim))
        positions = torch.arange(config.max_position_embeddings, device=weight.device)
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (B, 1, N, D) of positions (B, N) below `max_position_embeddings`."""
        weight, table = self.fc.weight, self._rotary_table
        if table is None or (table[0].dtype, table[0].device) != (weight.dtype, weight.device):
            with torch.inference_mode(False):
                table = self._rotary_table = self._make_rotary_table(weight)
        return table[0][positions].unsqueeze(1), table[1][positions].unsqueeze(1)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """One drafter forward on a cache; appends [new context ; block] rows to it.

        The caller drops the block's rows afterwards (Hugging Face's `crop`, our loop's `drop`).

        Args:
            noise_embeds: (B, S, H) target embeddings of the anchor and the (masked) slots.
            context_hidden_states: (B, C, n*H) tapped states of the new context positions; None
                when `append_context` has added them all.
            position_ids: (B, C + S) of the new context and the block; None continues at the
                cache's length.
            attention_mask: None, or 2-D (B, keys) with 0 for padding, or 4-D bool.
            cache: keys and values of earlier context.

        Returns:
            `last_hidden_state` (B, S, H), after the final norm; slot k predicts token anchor + k.

        Raises:
            InputError: positions or mask do not cover context and block, or more rows than
                `max_position_embeddings`.
        """
        context = None
        new = 0
        if context_hidden_states is not None and context_hidden_states.shape[1]:
            context = self.project(context_hidden_states)
            new = context.shape[1]
        slots = noise_embeds.shape[1]
        held = 0 if cache is None else int(cache.get_seq_length())
        if held + new + slots > self.config.max_position_embeddings:
            raise InputError(
                f"drafter: found {held + new + slots} context and block rows, allowed: "
                f"max_position_embeddings {self.config.max_position_embeddings}"
            )
        if position_ids is None:
            position_ids = torch.arange(held, held + new + slots, device=noise_embeds.device)
            position_ids = position_ids[None]
        if position_ids.shape[-1] != new + slots:
            raise InputError(
                f"drafter: found {position_ids.shape[-1]} positions for {new} context and {slots} "
                "block rows, allowed: one each"
            )
        mask = _padding_mask(attention_mask, held + new + slots)
        hidden = self.run_layers(noise_embeds, context, position_ids, mask, cache)
        return BaseModelOutput(last_hidden_state=hidden)

    def run_layers(
        self,
        noise_embeds: torch.Tensor,
        context: torch.Tensor | None,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor:
        """All layers and the final norm over a block and its new context.

        Args:
            noise_embeds: (B, S, H)
            context: (B, C, H) from `project`, or None.
            position_ids: (B, C + S)
            mask: for `grouped_attention`, over the rows that the cache returns.
            cache: takes [context ; block] rows and returns all, by its `update`; or None.

        Returns:
            (B, S, H)
        """
        cos, sin = self.rotary(position_ids)
        new = 0 if context is None else context.shape[1]
        hidden = noise_embeds
        for number, layer in enumerate(self.drafter_layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            queries = attention.queries(normed, cos[:, :, new:], sin[:, :, new:])
            rows = normed if context is None else torch.cat((context, normed), dim=1)
            keys, values = attention.keys_values(rows, cos, sin)
            if cache is not None:
                keys, values = cache.update(keys, values, number)
            attended = grouped_attention(queries, keys, values, mask, False, attention.scaling)
            hidden = layer.finish(hidden, attended)
        return self.norm(hidden)

    def append_context(
        self,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        cache: KVCache,
    ) -> None:
        """Project tapped states and append their keys and values, without drafting.

        Decoding calls it once for the prompt, so that its cost is timed apart.

        Args:
            context_hidden_states: (B, C, n*H)
            position_ids: (B, C)
            cache: the drafter's cache.
        """
        context = self.project(context_hidden_states)
        cos, sin = self.rotary(position_ids)
        for number, layer in enumerate(self.drafter_layers):
            cache.update(*layer.self_attn.keys_values(context, cos, sin), number)

    def context_keys_values(
        self, context_hidden: torch.Tensor, context_positions: torch.Tensor
    ) -> KeysValues:
        """Every layer's keys and values of the context, for `forward_blocks`.

        Args:
            context_hidden: (B, C, H) from `project`.
            context_positions: (B, C)

        Returns:
            per layer: keys and values, each (B, kv_heads, C, D)
        """
        cos, sin = self.rotary(context_positions)
        return [
            self._recomputed(layer.self_attn.keys_values, context_hidden, cos, sin)
            for layer in self.drafter_layers
        ]

    def forward_blocks(
        self,
        noise_embeds: torch.Tensor,
        context_keys_values: KeysValues,
        block_positions: torch.Tensor,
        visible: torch.Tensor,
        max_rows: int | None = None,
    ) -> torch.Tensor:
        """Many blocks against one context in one pass: the training path, same layers as `forward`.

        A block sees the context rows `visible` allows and itself, never another block. Rows that
        are visible to no block must be finite: see `project(keep=)`.

        Args:
            noise_embeds: (B, A, S, H) target embeddings of A blocks of S slots.
            context_keys_values: from `context_keys_values`, shared by several passes of a step.
            block_positions: (B, A, S), anchor .. anchor + S - 1.
            visible: (B, A, C) bool; True where the context row is valid and strictly before the
                block's anchor (see `visible_context`).
            max_rows: block rows attended at once, a bound on memory and on work wasted across
                blocks; it does not change results. None takes what is fast for the device.

        Returns:
            (B, A, S, H) after the final norm
        """
        batch, anchors, slots, width = noise_embeds.shape
        cos, sin = self.rotary(block_positions.flatten(1))
        hidden = noise_embeds.flatten(1, 2)  # (B, A * S, H)
        if max_rows is None:
            max_rows = 512 if hidden.is_cuda else 128
        config = self.config
        groups = config.num_attention_heads // config.num_key_value_heads
        view = view_blocks(visible, slots, max_rows, groups, hidden.dtype, config.head_dim)
        for layer, (context_keys, context_values) in zip(
            self.drafter_layers, context_keys_values, strict=True
        ):
            hidden = self._recomputed(
                layer.blocks, hidden, cos, sin, context_keys, context_values, view
            )
        return self.norm(hidden).view(batch, anchors, slots, width)

    def _recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Part of a layer; with activation checkpointing the backward pass runs it once more."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(function, *arguments)
        return function(*arguments)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (B, heads, N, D)."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def _padding_mask(attention_mask: torch.Tensor | None, keys: int) -> torch.Tensor | None:
    """Bool mask (B, 1, 1, keys) of a 2-D one; None where nothing is hidden."""
    if attention_mask is None:
        return None
    if attention_mask.dim() not in (2, 4) or attention_mask.shape[-1] != keys:
        raise InputError(
            f"drafter: attention_mask: found shape {tuple(attention_mask.shape)}, allowed: 2-D or "
            f"4-D over {keys} keys"
        )
    if attention_mask.dim() == 4:
        return attention_mask
    visible = attention_mask.to(torch.bool)
    return None if bool(visible.all()) else visible[:, None, None, :]
