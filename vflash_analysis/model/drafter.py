"""Drafters as the stages use them: made for a target, saved, loaded, checked, given a context.

The network itself is in `network.py`.
"""

import hashlib
import json
from pathlib import Path

import torch

from vflash_analysis.config import DrafterSettings
from vflash_analysis.errors import InputError
from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.frozen import Target
from vflash_analysis.model.network import VFlashConfig, VFlashDrafter, check_drafter_config
from vflash_analysis.model.source import text_config_sha256
from vflash_analysis.model.taps import check_tap_layers, default_tap_layers
from vflash_analysis.model.text_stack import store_input_major
from vflash_analysis.model.weights import check_safetensors, read_model
from vflash_analysis.strict import read_object

NOT_IDENTITY = ("transformers_version", "_name_or_path", "target_source", "target_revision")
"""Config entries that tell where and by what a drafter was saved, not what it is.

The target is identified by `target_sha256`.
"""


def visible_context(
    context_positions: torch.Tensor, anchors: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Which context rows each block may see: valid ones strictly before its anchor.

    The anchor itself has no target state when it is drafted from, so position < anchor.

    Args:
        context_positions: (B, C)
        anchors: (B, A) anchor positions.
        valid: (B, C) bool, False for padding.

    Returns:
        (B, A, C) bool
    """
    visible = context_positions[:, None, :] < anchors[:, :, None]
    return visible if valid is None else visible & valid[:, None, :]


def context_rows(is_video: torch.Tensor, context: str | float) -> torch.Tensor:
    """Prompt positions whose states a drafter reads; kept rows keep their own positions.

    Args:
        is_video: (P,) bool, True at video positions.
        context: "all"; "text_only"; or a fraction in [0, 1] of the video positions, kept evenly
            spaced beside all text.

    Returns:
        (n,) long, rising

    Raises:
        InputError: another word, or a fraction outside [0, 1].
    """
    number = isinstance(context, int | float) and not isinstance(context, bool)
    if context not in ("all", "text_only") and not (number and 0 <= float(context) <= 1):
        raise InputError(f"context: found {context!r}, allowed: all, text_only, or 0 to 1")
    keep = torch.ones_like(is_video)
    if context != "all":
        video = is_video.nonzero().flatten()
        share = 0.0 if context == "text_only" else float(context)
        order = torch.arange(len(video), device=is_video.device, dtype=torch.float64)
        # Row i is kept when the running count floor(i * share) steps up to it.
        kept = torch.floor((order + 1) * share) > torch.floor(order * share)
        keep[video] = kept
    return keep.nonzero().flatten()


def drafter_config(target: Target, settings: DrafterSettings) -> VFlashConfig:
    """Config of a drafter for a target: its sizes and rotary settings, and its identity.

    Raises:
        InputError: too many tapped layers, rotary settings that are not implemented, or a target
            whose config lacks what a drafter copies from it.
    """
    text = target.text_config
    absent = [
        name
        for name in ("intermediate_size", "hidden_act", "rms_norm_eps", "rope_parameters")
        if getattr(text, name, None) is None
    ]
    if absent:
        raise InputError(
            f"target {text.model_type}: its text config has no {', '.join(absent)}, allowed: a "
            "decoder with rotary positions, RMS norms and one MLP, after which a drafter is shaped"
        )
    config = VFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or text.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        hidden_act=text.hidden_act,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=target.max_positions,
        rope_parameters=dict(text.rope_parameters),
        block_size=settings.block_size,
        mask_token_id=target.mask_token_id,
        target_layer_ids=list(default_tap_layers(target.num_layers, settings.num_tapped_layers)),
        target_num_layers=target.num_layers,
        target_source=target.source,
        target_revision=target.revision,
        target_sha256=target.source_sha256,
        target_text_config_sha256=text_config_sha256(text),
        vocab_size=target.vocab_size,
        # 0.02 suits widths of thousands; narrower layers would start as good as switched off
        initializer_range=max(0.02, 0.6 * target.hidden_size**-0.5),
        context=settings.context,
    )
    check_drafter_config(config)
    return config


def new_drafter(
    config: VFlashConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> VFlashDrafter:
    """An untrained drafter; equal seeds give equal weights on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = VFlashDrafter(config)
    return drafter.to(device=device, dtype=dtype)


def _check_saved(folder: str | Path) -> Path:
    """The folder of a saved drafter, its config there and its weights whole."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: found no drafter (config.json)")
    check_safetensors(folder / "model.safetensors")
    return folder


def load_drafter(folder: str | Path, target: Target) -> VFlashDrafter:
    """Load a saved drafter in the target's dtype and place, checked against the target.

    Raises:
        InputError: a file is missing or damaged, weights do not fit the config, or the drafter
            belongs to another target.
    """
    folder = _check_saved(folder)
    drafter: VFlashDrafter = read_model(VFlashDrafter, folder, folder, target.dtype)
    check_drafter_matches(drafter, target)
    drafter = drafter.to(target.device).eval()
    store_input_major(drafter)
    return drafter


def check_drafter_matches(drafter: VFlashDrafter, target: Target) -> None:
    """Refuse a drafter trained for another target: text would stay right, acceptance would not.

    Raises:
        InputError: lists what differs.
    """
    config = drafter.config
    facts = [
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        # What fits the target fits the drafter, so lengths are checked once.
        ("max_position_embeddings", config.max_position_embeddings, target.max_positions),
        ("target_num_layers", config.target_num_layers, target.num_layers),
        (
            "text config",
            config.target_text_config_sha256,
            text_config_sha256(target.text_config),
        ),
        ("target weights", config.target_sha256, target.source_sha256),
    ]
    wrong = [f"{name} {found} (target: {is_})" for name, found, is_ in facts if found != is_]
    if config.mask_token_id not in target.banned_ids.tolist():
        wrong.append(f"mask_token_id {config.mask_token_id} is a token of the target's texts")
    if wrong:
        raise InputError(
            f"drafter trained for {config.target_source}, not for {target.source}: "
            f"{'; '.join(wrong)}"
        )
    check_tap_layers(config.target_layer_ids, target.num_layers, "drafter")


def drafter_cache(drafter: VFlashDrafter, capacity: int) -> KVCache:
    """An empty cache for a drafter: context rows plus one block must fit `capacity`."""
    config = drafter.config
    return KVCache(
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
        capacity,
        drafter.dtype,
        drafter.device,
    )


def drafter_sha256(folder: str | Path) -> str:
    """Identity of a saved drafter: hash of its weights and config without `NOT_IDENTITY`.

    Raises:
        InputError: a file is missing or damaged.
    """
    folder = _check_saved(folder)
    config = read_object(folder / "config.json")
    kept = {name: value for name, value in config.items() if name not in NOT_IDENTITY}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    digest.update((folder / "model.safetensors").read_bytes())
    return digest.hexdigest()
