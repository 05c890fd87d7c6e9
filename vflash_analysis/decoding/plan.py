"""Which decodes a shard consists of: every method with every drafter it runs with, by name.

The profile lists methods; the drafters come by name and folder. A method that needs a drafter runs
once per drafter of its type. Hugging Face's own loops stand in the same list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vflash_analysis.config import DecodeSettings
from vflash_analysis.decoding.methods import (
    METHODS,
    Method,
    build_method,
    drafter_type,
    parse_method,
)
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import VFlashConfig, drafter_sha256, load_drafter
from vflash_analysis.model.target import Target
from vflash_analysis.schemas import HF_DFLASH, HF_GENERATE, ON_FEW_CLIPS


@dataclass(frozen=True)
class Planned:
    """One decode of every clip.

    Attributes:
        name, setting, drafter_sha256: its key in the records.
        drafter: name of the drafter, None without one.
        objective, train_seed: how the drafter was trained, None where unknown.
        method: for our loop; None for Hugging Face's.
        network: the drafter, for Hugging Face's loop.
    """

    name: str
    setting: str = ""
    drafter_sha256: str = ""
    drafter: str | None = None
    objective: str | None = None
    train_seed: int | None = None
    method: Method | None = field(default=None, compare=False)
    network: Any = field(default=None, compare=False)

    @property
    def on_few_clips(self) -> bool:
        """Whether only the first `comparison_clips` clips are decoded, to compare with."""
        return self.name in ON_FEW_CLIPS

    @property
    def key(self) -> tuple[str, str, str]:
        """Unique within a shard."""
        return (self.name, self.setting, self.drafter_sha256)


def plan_methods(
    target: Target, drafters: Mapping[str, Path], settings: DecodeSettings
) -> list[Planned]:
    """The decodes of a shard in the order of `decode.methods`; each drafter is loaded once.

    Args:
        target: the target.
        drafters: name -> folder of a saved drafter.
        settings: names the methods; see `decoding.methods` for how.

    Raises:
        InputError: unknown method, a method without a drafter of its type, a drafter that belongs
            to another target, or the same decode twice.
    """
    kinds = {name: drafter_type(folder) for name, folder in drafters.items()}
    loaded: dict[tuple[str, Any], Any] = {}
    planned: list[Planned] = []

    def runs_with(spec: str, kind: str, load: Any) -> list[tuple[dict[str, Any], Any]]:
        fitting = [name for name, found in kinds.items() if found == kind]
        if not fitting:
            have = ", ".join(f"{name} ({found})" for name, found in kinds.items()) or "none"
            raise InputError(
                f"decode.methods: {spec!r} needs a drafter of type {kind!r}, found: {have}"
            )
        pairs = []
        for name in fitting:
            if (name, load) not in loaded:
                loaded[name, load] = load(Path(drafters[name]), target)
            network = loaded[name, load]
            training = getattr(network.config, "training", None) or {}
            facts = {
                "drafter": name,
                "drafter_sha256": drafter_sha256(drafters[name]),
                "objective": training.get("objective"),
                "train_seed": training.get("train_seed"),
            }
            pairs.append((facts, network))
        return pairs

    for spec in settings.methods:
        if spec == HF_GENERATE:
            planned.append(Planned(HF_GENERATE))
            continue
        if spec == HF_DFLASH:
            for facts, network in runs_with(spec, VFlashConfig.model_type, load_drafter):
                planned.append(Planned(HF_DFLASH, network=network, **facts))
            continue
        entry = METHODS[parse_method(spec)[0]]
        pairs: Sequence[tuple[dict[str, Any], Any]] = [({}, None)]
        if entry.drafter_type is not None:
            pairs = runs_with(spec, entry.drafter_type, entry.load)
        for facts, network in pairs:
            method = build_method(spec, target, settings, network)
            planned.append(Planned(method.name, method.setting, method=method, **facts))
    keys = [one.key for one in planned]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice or not planned:
        raise InputError(f"decode.methods: found {len(planned)} decodes, twice: {twice}")
    return planned


def of_clip(planned: Sequence[Planned], number: int, settings: DecodeSettings) -> list[Planned]:
    """The decodes of the clip with this number in its suite.

    What is only compared with runs on the first `comparison_clips` clips.
    """
    limit = settings.comparison_clips
    few = limit is not None and number >= limit
    return [one for one in planned if not (few and one.on_few_clips)]
