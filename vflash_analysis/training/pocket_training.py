"""The pocket target's two trainings: the vision tower on dense labels, the text stack on captions.

While captions are learnt, a middle layer is asked at each video position how the shape there moves
and what it first looked like, because motion must be read across frames by the text stack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from vflash_analysis.records import replace_atomically
from vflash_analysis.training.pocket_heads import DenseHead, cells, dense_labels
from vflash_analysis.training.pocket_model import encode_examples, normalise
from vflash_analysis.training.pocket_pool import NUM_FRAMES, Pool, placeholders

LOG_EVERY, CHECKPOINT_EVERY = 50, 250  # steps
CAPTION_RATE = 1.5e-3  # highest learning rate of the text stack


def schedule(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def train_tower(
    model: LlavaOnevisionForConditionalGeneration,
    pool: Pool,
    steps: int,
    batch: int = 192,
    learning_rate: float = 1.5e-3,
    seed: int = 0,
) -> list[dict]:
    """Teach the vision tower and the projector what is at each place and where its centre lies.

    One head reads the tower's patches, one the pooled cells that the text stack will read.

    Returns:
        One row every 50 steps: step, loss, shares of right colours, shapes and sizes over covered
            cells, seconds.
    """
    inner = model.model
    patch_head = DenseHead(inner.config.vision_config.hidden_size)
    cell_head = DenseHead(inner.config.text_config.hidden_size)
    heads = nn.ModuleList([patch_head, cell_head])
    weights = [*inner.vision_tower.parameters(), *inner.multi_modal_projector.parameters()]
    optimizer = _optimizer(weights, heads, weight_decay=0.01)
    n_scenes, n_frames = pool.codes.shape[:2]
    rng, rows, start = np.random.default_rng(seed), [], time.perf_counter()
    for step in range(steps):
        scenes, frames = rng.integers(n_scenes, size=batch), rng.integers(n_frames, size=batch)
        codes = torch.from_numpy(pool.codes[scenes, frames]).long()[:, None]  # (B, 1, 64)
        offsets = torch.from_numpy(pool.offsets[scenes, frames]).float()[:, None]
        floors = torch.from_numpy(pool.floors[scenes]).long()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pixels = normalise(pool.frames[scenes, frames])
            seen = inner.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]
            pooled = inner.apply_pooling(inner.multi_modal_projector(seen))
            patch_loss, _ = patch_head.loss(seen[:, None], dense_labels(codes, offsets, floors))
            labels = dense_labels(*cells(codes, offsets), floors)
            cell_loss, right = cell_head.loss(pooled[:, None], labels)
        loss = patch_loss + cell_loss
        _set_rate(optimizer, learning_rate * schedule(step, steps, 50))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0 or step == steps - 1:
            seconds = time.perf_counter() - start
            rows.append({"step": step + 1, "loss": loss.item(), **right, "seconds": seconds})
            _report("tower", rows[-1], steps, seconds / (step + 1))
    return rows


def _optimizer(
    weights: list[nn.Parameter], heads: nn.Module, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW; heads learn five times as fast, so that what they ask for reaches the model early."""
    groups = [{"params": weights, "scale": 1.0}, {"params": list(heads.parameters()), "scale": 5.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True)


def _set_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def _report(stage: str, row: dict, steps: int, seconds_a_step: float) -> None:
    values = "  ".join(
        f"{key} {value:.4f}" for key, value in row.items() if key not in ("step", "seconds")
    )
    left = seconds_a_step * (steps - row["step"])
    print(
        f"{stage} {row['step']}/{steps}  {values}  {row['seconds']:.0f} s, {left:.0f} s left",
        flush=True,
    )


@torch.no_grad()
def tower_features(
    model: LlavaOnevisionForConditionalGeneration, frames: np.ndarray, batch: int = 32
) -> Tensor:
    """The tower's output for all frames of a pool: (N, T, 64, W) bfloat16."""
    out = []
    for start in range(0, len(frames), batch):
        part = normalise(frames[start : start + batch]).flatten(0, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = model.model.vision_tower(part, output_hidden_states=True).hidden_states[-1]
        out.append(seen.to(torch.bfloat16).unflatten(0, (-1, frames.shape[1])))
    return torch.cat(out)


def train_captions(
    model: LlavaOnevisionForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pool: Pool,
    steps: int,
    lengths: Sequence[int] = (NUM_FRAMES,),
    batch: int = 32,
    learning_rate: float = CAPTION_RATE,
    warmup: int = 150,
    seed: int = 1,
    dense_weight: float = 0.5,
    checkpoint: Path | None = None,
) -> list[dict]:
    """Train projector and text stack on questions and answers; the vision tower stays as it is.

    Loss over the answer and its stop token only, plus `dense_weight` times what a `DenseHead`
    misreads at the video positions of the middle layer. Sequences are padded to a multiple of 32.

    Args:
        pool: of at least as many frames as the longest clip.
        lengths: frames of a step's clips, taken evenly from the pool's; steps take turns.
        batch: clips a step of NUM_FRAMES frames; of longer ones as many as have those tokens.
        checkpoint: written every 250 steps; one that is there is gone on from.

    Returns:
        One row every 50 steps: step, loss, dense_loss, share of right next tokens over the answers,
            seconds.
    """
    inner = model.model
    encoded = [encode_examples(tokenizer, pool, frames) for frames in lengths]
    seen = tower_features(model, pool.frames)
    torch.manual_seed(seed)
    head = DenseHead(inner.config.text_config.hidden_size, moving=True)
    middle: list[Tensor] = []
    layers = inner.language_model.layers
    hook = layers[len(layers) // 2 - 1].register_forward_hook(lambda *call: middle.append(call[2]))
    trained = nn.ModuleList([inner.multi_modal_projector, inner.language_model])
    weights = [*trained.parameters(), inner.image_newline]
    optimizer = _optimizer(weights, head, weight_decay=0.05)
    rows: list[dict] = []
    first_step, before_s = 0, 0.0
    if checkpoint is not None and checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        rows, first_step, before_s = state["rows"], state["step"], state["seconds"]
    start, logged = time.perf_counter(), []
    for step in range(first_step, steps):
        examples, frames = encoded[step % len(lengths)], lengths[step % len(lengths)]
        taken = evenly(frames, pool.frames.shape[1])
        video_tokens = placeholders(frames)
        clips = min(batch, max(1, batch * NUM_FRAMES // frames))
        picked = _picked(step // len(lengths), clips, len(examples), seed)
        length = -(-max(len(examples[i][0]) for i in picked) // 32) * 32
        ids = torch.full((clips, length), tokenizer.pad_token_id)
        answered = torch.zeros((clips, length), dtype=torch.bool)
        for row, i in enumerate(picked):
            tokens, begin = examples[i]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            answered[row, begin : len(tokens)] = True
        first = int((ids[0] == model.config.video_token_id).nonzero()[0])
        codes = torch.from_numpy(pool.codes[picked][:, taken]).long()  # (B, T, 64)
        offsets = torch.from_numpy(pool.offsets[picked][:, taken]).float()
        features = seen[picked][:, taken]
        labels = dense_labels(*cells(codes, offsets), torch.from_numpy(pool.floors[picked]).long())
        middle.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            video = inner.apply_pooling(inner.multi_modal_projector(features.flatten(0, 1)))
            video = video.reshape(clips, video_tokens - 1, -1)
            words = inner.get_input_embeddings()(ids)
            newline = inner.image_newline.expand(clips, 1, -1)
            embeds = torch.cat(
                [words[:, :first], video, newline, words[:, first + video_tokens :]], dim=1
            )  # (B, S, H)
            out = inner.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
            logits = model.lm_head(out[:, :-1][answered[:, 1:]]).float()  # (N, V)
            places = middle[0][:, first : first + video_tokens - 1]
            places = places.unflatten(1, (frames, -1))  # (B, T, cells, H)
            dense, _ = head.loss(places, labels)
        wanted = ids[:, 1:][answered[:, 1:]]
        text = F.cross_entropy(logits, wanted)
        _set_rate(optimizer, learning_rate * schedule(step, steps, warmup))
        optimizer.zero_grad()
        (text + dense_weight * dense).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == wanted).float().mean().item()
        logged.append((text.item(), dense.item(), right))
        if (step + 1) % LOG_EVERY == 0 or step == steps - 1:
            spent = time.perf_counter() - start
            means = np.mean(logged, axis=0).tolist()
            rows.append(
                {
                    "step": step + 1,
                    **dict(zip(("loss", "dense_loss", "right"), means, strict=True)),
                    "seconds": before_s + spent,
                }
            )
            _report("captions", rows[-1], steps, spent / (step + 1 - first_step))
            logged = []
        if checkpoint is not None and (step + 1) % CHECKPOINT_EVERY == 0:
            state = {
                "model": model.state_dict(),
                "head": head.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rows": rows,
                "step": step + 1,
                "seconds": before_s + time.perf_counter() - start,
            }
            replace_atomically(checkpoint, partial(torch.save, state))
    hook.remove()
    return rows


def evenly(count: int, frames: int) -> np.ndarray:
    """Which of a clip's frames stand for it when only `count` are read: (count,), evenly spaced."""
    return ((np.arange(count) + 0.5) * frames / count).astype(int)


def _picked(step: int, batch: int, n_examples: int, seed: int) -> list[int]:
    """The examples of a step: consecutive ones of the epochs' own orders, whatever came before."""
    places = range(step * batch, (step + 1) * batch)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(n_examples)
        for epoch in {place // n_examples for place in places}
    }
    return [int(orders[place // n_examples][place % n_examples]) for place in places]
