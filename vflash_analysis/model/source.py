"""A target's folder on disk: what must be in it, checked before any weight is loaded.

Only local folders in the standard Hugging Face layout are read: `config.json`,
`generation_config.json`, `*.safetensors`, the tokenizer's files, a chat template, and the frame
preprocessor's settings. Nothing here opens a socket.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

from vflash_analysis.errors import InputError
from vflash_analysis.hub import ABBREVIATION, folder_commits, is_commit
from vflash_analysis.strict import read_object

# Says which commit; other names are ours.
_HUB_REVISION = re.compile(rf"{ABBREVIATION.pattern}|main|refs/.+")
# What Hugging Face reads of a checkpoint; each is one JSON object.
_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "processor_config.json",
    "chat_template.json",
    "video_preprocessor_config.json",
    "preprocessor_config.json",
    "model.safetensors.index.json",
)
_OTHERS = ("chat_template.jinja", "merges.txt", "model.safetensors")  # no JSON

# "default" drops the first state of a frame: a class token, which these towers have or have not.
_STRATEGIES = {"clip_vision_model": "default", "siglip_vision_model": "full"}

_SAMPLE_BYTES = 1 << 20
_HASHED_WHOLE = 64 << 20


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Make one line of whatever a library raises over a damaged file; memory is not the file's.

    Args:
        what: the file and what it is not, as the line begins.

    Raises:
        InputError: something was raised inside.
    """
    try:
        yield
    except (InputError, MemoryError, OutOfMemoryError):
        raise
    except Exception as error:  # no list could be whole: the libraries promise none
        told = " ".join(str(error).split())[:300]
        raise InputError(f"{what} ({type(error).__name__}: {told})") from error


def check_objects(folder: Path) -> None:
    """Refuse files of a checkpoint that are no files, and JSON files that are no JSON objects.

    A folder or a link to nothing (a cache that lost its blobs) would count as absent, and defaults
    be taken for it.

    Raises:
        InputError: names the first one.
    """
    for name in (*_OBJECTS, *_OTHERS):
        file = folder / name
        if file.is_file():
            if name in _OBJECTS:
                read_object(file)
        elif os.path.lexists(file):
            found = "a folder" if file.is_dir() else "a link to nothing or no plain file"
            raise InputError(f"{file}: found {found}, allowed: a file, or none of this name")


def check_folder(source: str | Path) -> Path:
    """A target's local folder, with a config.

    Raises:
        InputError: no such folder (names on a hub are not resolved), or no config.json in it.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise InputError(f"{source}: not a local folder (nothing is downloaded; give a path)")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: found no config.json")
    return folder


def folder_sha256(folder: Path) -> str:
    """Identity of a target: hash of its config, tokenizer and weights.

    Files up to 64 MiB are hashed whole. Of a larger one the size and 64 evenly spaced MiB are
    (header and first tensors included), so that a 16 GB checkpoint is identified in a second.
    """
    digest = hashlib.sha256()
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or (path.name not in names and path.suffix != ".safetensors"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _HASHED_WHOLE:
                digest.update(file.read())
                continue
            for part in range(64):
                file.seek((size - _SAMPLE_BYTES) * part // 63)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def folder_name(folder: Path) -> str:
    """Name that records show for a target; never a path, which would name a machine.

    A folder in a Hugging Face cache (`models--<org>--<name>/snapshots/<commit>`) is called by the
    model's name; a copied `snapshots` folder, of which only the commit is known, "unknown".
    """
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots":
        repository = resolved.parent.parent.name
        return repository.split("--")[-1] if repository.startswith("models--") else "unknown"
    return Path(os.path.abspath(folder)).name


def folder_revision(folder: Path, wanted: str | None = None) -> str:
    """The revision that records show for a folder.

    Its own commit, if it says one (`hub.folder_commits`). Else the one asked for, marked "as
    configured" where it names a commit or branch of a hub, of which the folder is no proof; else
    "local".

    Raises:
        InputError: the folder says another commit than the one asked for, or several.
    """
    commits = folder_commits(folder)
    if wanted and commits and not (len(commits) == 1 and is_commit(commits[0], wanted)):
        raise InputError(
            f"target.revision: found {wanted}, allowed: {commits[0]}, which {folder} holds"
            if len(commits) == 1
            else f"target.revision: found {wanted}, but {folder} holds files of "
            f"{' and '.join(commits)}, allowed: those of one commit"
        )
    if len(commits) == 1:
        return commits[0]
    if wanted and _HUB_REVISION.fullmatch(wanted):
        return f"{wanted}, as configured"
    return wanted or "local"


def rope_theta(text_config: Any) -> float | None:
    """Rotary base of a text config, in its new or its old spelling."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta", getattr(text_config, "rope_theta", None))
    return None if theta is None else float(theta)


def rope_type(text_config: Any) -> str:
    """How a text config scales its rotary frequencies: "default" does not."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def text_config_sha256(text_config: Any) -> str:
    """Hash of what a drafter relies on in a target's text config (not dtype or file versions)."""
    names = (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    facts = {name: getattr(text_config, name, None) for name in names}
    facts["rope_theta"] = rope_theta(text_config)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_full_attention(text_config: Any) -> None:
    """Refuse text stacks whose rollback would be silently wrong.

    Raises:
        InputError: sliding-window, recurrent or unknown layer types, by name.
    """
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        layer_types = ["full_attention"]
    wrong = sorted(set(layer_types) - {"full_attention"})
    if wrong:
        raise InputError(
            f"target {text_config.model_type}: layer types {', '.join(wrong)} cannot be rolled "
            "back after a rejected draft, allowed: full_attention"
        )
    if getattr(text_config, "use_sliding_window", False):
        raise InputError(
            f"target {text_config.model_type}: use_sliding_window is true, allowed: full_attention"
        )
    recurrent = [
        name
        for name in ("ssm_state_size", "mamba_d_state", "linear_num_key_heads", "rwkv_version")
        if getattr(text_config, name, None) is not None
    ]
    if recurrent:
        raise InputError(
            f"target {text_config.model_type}: recurrent layers ({', '.join(recurrent)}) cannot be "
            "rolled back, allowed: full_attention"
        )
    if not isinstance(getattr(text_config, "num_key_value_heads", None), int):
        raise InputError(
            f"target {text_config.model_type}: unknown attention layout, the text config has no "
            "num_key_value_heads"
        )


def check_numbers(file: Path, config: Any) -> None:
    """Refuse a video language model's numbers that a library would fail on or silently misread.

    Token ids that are no rows of the embedding or stand for two things, a model without positions,
    heads and layers that the vision tower does not have.

    Args:
        file: the config's, for messages.
        config: a video language model's.

    Raises:
        InputError: names file and key.
    """
    text, vision = config.get_text_config(decoder=True), config.vision_config
    width, layers = vision.hidden_size, vision.num_hidden_layers
    for name, value, low, high in (
        ("video_token_id", config.video_token_id, 0, text.vocab_size - 1),
        ("image_token_id", config.image_token_id, 0, text.vocab_size - 1),
        ("text_config.max_position_embeddings", text.max_position_embeddings, 1, 10**9),
        ("vision_config.num_attention_heads", vision.num_attention_heads, 1, width),
    ):
        if not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{file}: {name}: found {value!r}, allowed: {low} to {high}")
    if config.video_token_id == config.image_token_id:
        raise InputError(
            f"{file}: video_token_id: found {config.video_token_id}, allowed: another than "
            "image_token_id"
        )
    if width % vision.num_attention_heads:
        raise InputError(
            f"{file}: vision_config.num_attention_heads: found {vision.num_attention_heads}, "
            f"allowed: a divisor of hidden_size ({width})"
        )
    chosen = config.vision_feature_layer
    among = {
        *range(-layers - 1, 0),
        *range(1, layers + 1),
    }  # 0 alone reads as "none" in the library
    if not (chosen in among if isinstance(chosen, int) else chosen and among.issuperset(chosen)):
        raise InputError(
            f"{file}: vision_feature_layer: found {str(chosen)[:60]}, allowed: one or several of "
            f"{-layers - 1} to -1 and 1 to {layers}, as the vision tower has {layers} layers"
        )
    strategy = _STRATEGIES.get(vision.model_type)
    if strategy and config.vision_feature_select_strategy != strategy:
        raise InputError(
            f"{file}: vision_feature_select_strategy: found "
            f"{config.vision_feature_select_strategy!r}, allowed: {strategy!r}, as the tower is a "
            f"{vision.model_type}"
        )
