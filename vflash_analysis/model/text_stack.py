"""The decoder inside a video language model, found and checked by what it can do."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from vflash_analysis.errors import InputError


def find_text_model(model: Any) -> Any:
    """The decoder stack of a model, by what it can do: layers, a final norm, embedded inputs.

    Raises:
        InputError: no such module.
    """
    candidates = [model.get_decoder(), *model.modules()]
    for module in candidates:
        layers = getattr(module, "layers", None)
        if (
            isinstance(layers, torch.nn.ModuleList)
            and isinstance(getattr(module, "embed_tokens", None), torch.nn.Module)
            and isinstance(getattr(module, "norm", None), torch.nn.Module)
        ):
            return module
    raise InputError(f"{type(model).__name__}: found no decoder with layers, embed_tokens and norm")


def cache_keyword(forward: Callable[..., Any]) -> str:
    """How a forward names its cache: `cache` since transformers 5.24, `past_key_values` before.

    Raises:
        InputError: it takes neither.
    """
    parameters = inspect.signature(forward).parameters
    for keyword in ("cache", "past_key_values"):
        if keyword in parameters:
            return keyword
    raise InputError("the decoder takes neither `cache` nor `past_key_values`")


def takes_mask_by_type(forward: Callable[..., Any]) -> bool:
    """Whether a forward takes prepared masks as a mapping by layer type (Qwen2), or one (Llama).

    Nothing in a signature or a config tells (Mistral's has layer types and takes one mask), but a
    forward that takes a mapping asks whether it was given a `dict`.
    """
    return "dict" in inspect.unwrap(forward).__code__.co_names


def widen_norms(text_model: torch.nn.Module) -> None:
    """Make RMS norms compute in float64: Hugging Face's round to fp32 whatever the weights' dtype.

    Only for float64, where the target serves as the reference of exactness.
    """
    for module in text_model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = _rms_norm(module)


@contextmanager
def mlp_in_parts(text_model: Any, rows: int) -> Iterator[None]:
    """Run each layer's MLP on so many rows at a time: of a long prompt it needs most memory.

    At 25k tokens the three inner activations of LLaVA-OneVision-7B would take 2.9 GB.
    """
    modules = [layer.mlp for layer in text_model.layers]

    def in_parts(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda hidden: torch.cat([forward(part) for part in hidden.split(rows, dim=1)], 1)

    for module in modules:
        module.forward = in_parts(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own again


def store_input_major(module: torch.nn.Module) -> None:
    """Store the weights of a frozen module's linear layers input by input, on a CPU only.

    Values and shapes stay, the order of additions may not. On one Xeon (torch 2.13, MKL, two
    threads, fp32) the pocket target's decoder took 5 % less time for 16 rows, 2 % less for 61 and
    as long as before for one. A backward pass would read the weights the other way round. Half
    precision is left alone: its kernels bring weights into an order of their own.
    """
    for layer in module.modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        if layer.weight.device.type == "cpu" and layer.weight.dtype.itemsize >= 4:
            layer.weight.data = layer.weight.data.t().contiguous().t()


def _rms_norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(
            hidden_states, module.weight.shape, module.weight, module.variance_epsilon
        )

    return forward
