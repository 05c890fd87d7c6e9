"""Analytic compute of a training step, the common axis on which objectives are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def context_cost(config: Any) -> float:
    """Cost of one context token in block forwards: a ratio of multiplications by weights.

    A context token passes the projector (n H x H) and each layer's key and value projections; a
    block passes each layer (attention projections and MLP) in all its slots and the head in all
    but the first. Attention scores, norms and rotations are left out on both sides.

    Args:
        config: a `VFlashConfig`.
    """
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config.intermediate_size
    block = config.block_size * config.num_hidden_layers * layer
    block += (config.block_size - 1) * hidden * config.vocab_size
    token = len(config.target_layer_ids) * hidden**2 + config.num_hidden_layers * 2 * hidden * keys
    return token / block


def forward_equivalents(sums: Mapping[str, Tensor], cost_of_context_token: float) -> float:
    """Analytic compute of a step; the unit is one block through the drafter without gradient.

        3 blocks (all-mask state) + 3 blocks (revealed state) + 1 per reveal forward of a block
        + 3 context tokens x their cost

    A pass with gradient counts 3: forward, and twice that for the gradients of inputs and weights.
    The second term is there only for objectives with a revealed state. Blocks without supervised
    slots do not count.

    Args:
        sums: of `LossParts`, over the global batch.
        cost_of_context_token: of `context_cost`.
    """
    per_block = 6.0 if "n_reveal_forwards" in sums else 3.0
    extra = float(sums["n_reveal_forwards"]) if "n_reveal_forwards" in sums else 0.0
    context = 3.0 * float(sums["n_context"]) * cost_of_context_token
    return per_block * float(sums["n_blocks"]) + extra + context
