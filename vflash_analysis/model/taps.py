"""Tapped layers: whose outputs a drafter reads, and the hooks that read them.

Layer id l means the output of decoder layer l, Hugging Face's `hidden_states[l + 1]`. The last
layer is never tapped: its entry there is taken after the final norm.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vflash_analysis.errors import InputError


def default_tap_layers(num_layers: int, n: int) -> tuple[int, ...]:
    """Layers whose outputs a drafter reads: evenly spaced from layer 1 to layer L - 3.

    round(1 + i (L - 4) / (n - 1)) for i = 0..n-1, half up (DFlash); n = 1 gives L // 2. Layer id l
    means the output of decoder layer l, Hugging Face's `hidden_states[l + 1]`.

    Args:
        num_layers: L.
        n: tapped layers.

    Raises:
        InputError: n is out of range, or the target is too shallow for n distinct rising ids
            below the last layer.
    """
    if n < 1:
        raise InputError(f"num_tapped_layers: found {n}, allowed: at least 1")
    if n == 1:
        ids: tuple[int, ...] = (num_layers // 2,)
    else:
        # Integer form of the rounded formula, so that halves always go up.
        ids = tuple((2 * (n - 1 + i * (num_layers - 4)) + n - 1) // (2 * (n - 1)) for i in range(n))
    return check_tap_layers(ids, num_layers, f"num_tapped_layers: {n}")


def check_tap_layers(ids: Sequence[int] | None, num_layers: int, name: str) -> tuple[int, ...]:
    """Range-check stored tap ids.

    Args:
        ids: target layer ids.
        num_layers: layers of the target.
        name: what is named in messages.

    Raises:
        InputError: ids are missing, not rising, negative, or at or beyond the last layer, whose
            entry in `hidden_states` is taken after the final norm.
    """
    if not ids:
        raise InputError(f"{name}: found no target_layer_ids, allowed: a list of layer ids")
    checked = tuple(ids)
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in checked)
    if (
        not whole
        or any(not 0 <= i <= num_layers - 2 for i in checked)
        or any(a >= b for a, b in itertools.pairwise(checked))
    ):
        raise InputError(
            f"{name}: found target_layer_ids {list(checked)}, allowed: distinct rising ids in "
            f"0..{num_layers - 2} of a target of {num_layers} layers"
        )
    return checked


def select_taps(tapped: torch.Tensor, held: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """The states of some of the tapped layers.

    Args:
        tapped: (P, len(held) * H) states of layers `held`, side by side.
        held: layer ids in `tapped`.
        wanted: layer ids to take, one or more, all of them in `held`.

    Returns:
        (P, len(wanted) * H), `tapped` itself where nothing is left out.
    """
    if tuple(wanted) == tuple(held):
        return tapped
    places = [list(held).index(layer_id) for layer_id in wanted]
    by_layer = tapped.view(tapped.shape[0], len(held), -1)  # (P, layers, H)
    return by_layer[:, places].flatten(1)


@contextmanager
def tap_outputs(layers: Any, ids: Sequence[int], tapped: torch.Tensor) -> Iterator[None]:
    """Hooks that write the outputs of layers `ids` side by side into `tapped` (q, n*H)."""
    width = tapped.shape[1] // len(ids)

    def writer(column: int) -> Callable[..., None]:
        def write(module: torch.nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output  # (1, q, H)
            tapped[:, column : column + width] = hidden[0]

        return write

    handles = [
        layers[layer_id].register_forward_hook(writer(number * width))
        for number, layer_id in enumerate(ids)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
