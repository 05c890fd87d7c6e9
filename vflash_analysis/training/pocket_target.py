"""Train the pocket target: a LLaVA-OneVision architecture of under 3 M parameters.

Three steps: a pool of scenes drawn as frames; the vision tower and projector on dense labels (what
is at each place and where its centre is); the text stack on questions and answers. The tower comes
first because a captioning loss alone teaches it little of shape and place. While captions are
learnt, a middle layer is asked at each video position how the shape there moves and what it first
looked like, because motion must be read across frames by the text stack. All these heads are thrown
away. Run by notebook 20 with `retrain = True`.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from vflash_analysis.clips import pocket
from vflash_analysis.clips.wording import answer, question
from vflash_analysis.errors import InputError
from vflash_analysis.records import replace_atomically, write_json_atomic
from vflash_analysis.strict import read_json
from vflash_analysis.workers import worker_pool

NUM_FRAMES = 9
LENGTHS = (2, 4, 9, 20, 45, 100)  # frames of the clips that the target of many lengths learns from
LONGEST = 2048  # its positions
IMAGE_SIZE, PATCH_SIZE = 64, 8  # pixels
GRID = IMAGE_SIZE // PATCH_SIZE
VOCABULARY_ROWS = 640
LOG_EVERY, CHECKPOINT_EVERY = 50, 250  # steps
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
N_COLOURS, N_SHAPES, N_SIZES, N_FLOORS = 6, 4, 2, 4
MAX_SHAPES = 3
# The checkpoint's own chat format, written anew: a role, the video, a line break, the question.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ '\\n' + part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Pool:
    """Scenes drawn once and used many times, in order of their index.

    Attributes:
        frames: (N, T, 64, 64, 3) uint8, resized as the target's preprocessing does.
        codes: (N, T, 64) uint8, the shape under most of each patch (0: floor), as `pocket.render`
            numbers them.
        offsets: (N, T, 64, 2) float16, from the patch's centre to the centre of that shape, in
            patches.
        floors: (N,) uint8.
        questions, answers: N texts each.
    """

    frames: np.ndarray
    codes: np.ndarray
    offsets: np.ndarray
    floors: np.ndarray
    questions: list[str]
    answers: list[str]

    @property
    def video_tokens(self) -> int:
        """Placeholders of one clip: its cells and the newline."""
        return self.frames.shape[1] * (GRID // 2) ** 2 + 1


def _draw(
    job: tuple[str, str, range, int],
) -> tuple[list[np.ndarray], list[list[str]]]:
    """Draw some of the scenes of a split and family, in a number of frames: a pool's four arrays
    and its two texts."""
    split, family, wanted, num_frames = job
    torch.set_num_threads(1)
    source, out = pocket.scenes(split, family), []
    for index in range(wanted.stop):
        scene = next(source)
        if index not in wanted:
            continue
        rng = np.random.default_rng([7, pocket.FAMILIES.index(family), index])
        width, height = pocket.SIZES[rng.integers(len(pocket.SIZES))]
        times = (np.arange(num_frames) + 0.5 + rng.uniform(-0.1, 0.1)) / num_frames
        pictures, under = pocket.render(scene, times, width, height, rng)
        planes = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
        small = F.interpolate(planes, (IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", antialias=True)
        frames = small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
        ys = (np.arange(IMAGE_SIZE) * height // IMAGE_SIZE)[:, None]
        xs = (np.arange(IMAGE_SIZE) * width // IMAGE_SIZE)[None]
        codes, offsets = _patch_labels(under[:, ys, xs])
        floor = np.uint8(list(pocket.FLOORS).index(scene.floor))
        out.append((frames, codes, offsets, floor, question(scene), answer(scene)))
    columns = list(zip(*out, strict=True))
    arrays = [np.stack(column) for column in columns[:4]]
    return arrays, [list(column) for column in columns[4:]]


def _patch_labels(under: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels of each patch from what is under each pixel, (T, 64, 64) -> (T, 64) uint8 and (T, 64,
    2) float16."""
    n_frames = len(under)
    patches = (
        under.reshape(n_frames, GRID, PATCH_SIZE, GRID, PATCH_SIZE)
        .transpose(0, 1, 3, 2, 4)
        .reshape(n_frames, GRID * GRID, -1)
    )
    codes = np.zeros((n_frames, GRID * GRID), np.uint8)
    offsets = np.zeros((n_frames, GRID * GRID, 2), np.float16)
    most = np.full((n_frames, GRID * GRID), PATCH_SIZE * PATCH_SIZE // 8)
    middles = (
        np.stack(np.divmod(np.arange(GRID * GRID), GRID)[::-1], -1) + 0.5
    )  # (64, 2) as x, y in patches
    for code in np.unique(under[under > 0]):
        area = (patches == code).sum(-1)
        for frame in np.flatnonzero(area.any(-1)):
            ys, xs = np.nonzero(under[frame] == code)
            centre = np.array([xs.mean() + 0.5, ys.mean() + 0.5]) / PATCH_SIZE
            wins = area[frame] > most[frame]
            codes[frame, wins], offsets[frame, wins] = code, (centre - middles)[wins]
            most[frame, wins] = area[frame, wins]
    return codes, offsets


def draw_pool(
    split: str, scenes_per_family: int, num_frames: int = NUM_FRAMES, first: int = 0
) -> Pool:
    """Draw scenes of each family of a split from the `first` on, the families mixed evenly."""
    n = 2  # parts of a family; another number would mix the scenes in another order
    jobs = [
        (split, family, range(first + start, first + scenes_per_family, n), num_frames)
        for family in pocket.FAMILIES
        for start in range(n)
    ]
    with worker_pool() as pool:
        parts = []
        for part in pool.map(_draw, jobs):
            parts.append(part)
            print(f"pool: {len(parts)} of {len(jobs)} parts drawn", flush=True)
    return join_parts(parts)


def join_parts(parts: list[tuple[list[np.ndarray], list[list[str]]]]) -> Pool:
    """One pool of several parts, in an order drawn once."""
    order = np.random.default_rng(0).permutation(sum(len(arrays[0]) for arrays, _ in parts))
    frames, codes, offsets, floors = (
        np.concatenate([arrays[i] for arrays, _ in parts])[order] for i in range(4)
    )
    questions, answers = ([text for _, texts in parts for text in texts[i]] for i in range(2))
    return Pool(
        frames,
        codes,
        offsets,
        floors,
        [questions[i] for i in order],
        [answers[i] for i in order],
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the special tokens and chat format of LLaVA-OneVision."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_ROWS - 8 - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(
            {c for text in texts for c in text} and pre_tokenizers.ByteLevel.alphabet()
        ),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(set(texts)), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, num_hidden_layers: int = 12
) -> LlavaOnevisionForConditionalGeneration:
    """The pocket target with random weights, in float32; the smoke profile's has fewer layers."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": VOCABULARY_ROWS,
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"]
    )
    return model


def normalise(frames: np.ndarray | Tensor) -> Tensor:
    """uint8 frames (..., S, S, 3) -> float32 (..., 3, S, S), scaled to -1..1 (mean and std 0.5)."""
    return torch.as_tensor(frames).movedim(-1, -3).float() / 127.5 - 1


def schedule(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


class DenseHead(nn.Linear):
    """Reads from one hidden state what is at its place: colour, shape, size and the centre, thrown
    away after training.

    With `moving` also the step since the last frame, the first frame's colour and size of the
    shape, when it changed, and how many shapes are gone.
    """

    def __init__(self, width: int, moving: bool = False) -> None:
        self.parts = [N_COLOURS + N_FLOORS + 1, N_SHAPES + 2, N_SIZES + 1, 2]
        self.parts += [2, N_COLOURS, N_SIZES, 3, MAX_SHAPES + 1] if moving else []
        super().__init__(width, sum(self.parts))

    def loss(self, hidden: Tensor, labels: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Mean loss over places, and the shares of right colours, shapes and sizes over places with
        a shape.

        Args:
            hidden: (..., W).
            labels: as from `dense_labels`, each (...) or (..., 2).
        """
        outs = dict(zip(_LABELS, self(hidden).float().split(self.parts, dim=-1), strict=False))
        covered = labels["colour"] < N_COLOURS
        total, right = torch.zeros(()), {}
        for name, out in outs.items():
            if name in ("colour", "shape", "size"):
                total = total + F.cross_entropy(out.flatten(0, -2), labels[name].flatten())
                right[name] = (out.argmax(-1) == labels[name])[covered].float().mean().item()
                continue
            seen = covered if name == "centre" else covered & labels["followed"]
            seen = torch.ones_like(covered) if name == "gone" else seen
            if name in ("centre", "step"):
                off = F.smooth_l1_loss(out[seen], labels[name][seen], beta=0.2)
                total = total + PRECISION[name] * off
            else:
                total = total + F.cross_entropy(out[seen], labels[name][seen])
        return total, right


# A shape moves half a patch between frames: motion is read only once centres are read finely.
PRECISION = {"centre": 4.0, "step": 8.0}
_LABELS = (
    "colour",
    "shape",
    "size",
    "centre",
    "step",
    "first_colour",
    "first_size",
    "change",
    "gone",
)


def dense_labels(codes: Tensor, offsets: Tensor, floors: Tensor) -> dict[str, Tensor]:
    """Labels of every place of clips, from the pool's arrays or from `cells`.

    Args:
        codes: (B, T, N), as `pocket.render` numbers them.
        offsets: (B, T, N, 2) from the place's middle to the shape's centre, in patches.
        floors: (B,).

    Returns:
        colour (floors follow the colours, the star is last), shape, size: (B, T, N) classes.
        centre: (B, T, N, 2).
        step: (B, T, N, 2), how far the shape at the place moved since the last frame, in patches.
        first_colour, first_size: (B, T, N) of that shape in the first frame.
        change: (B, T, N), whether that shape looks other than in the first frame: 0 no, 1 since
            the clip's first half, 2 since its second.
        followed: (B, T, N), whether step, first looks and change are known.
        gone: (B, T, N), how many of the first frame's shapes are not in this frame.
    """
    star, some = codes == pocket.STAR_CODE, codes > 0
    index = (codes - 1).clamp(min=0)
    colour = torch.where(some, index % N_COLOURS, N_COLOURS + floors[:, None, None])
    shape = torch.where(some & ~star, 1 + index // N_COLOURS % N_SHAPES, 0)
    size = torch.where(some, index // (N_COLOURS * N_SHAPES), 0).clamp(max=1)
    labels = {
        "colour": torch.where(star, N_COLOURS + N_FLOORS, colour),
        "shape": torch.where(star, N_SHAPES + 1, shape),
        "size": torch.where(some & ~star, 1 + size, 0),
        "centre": offsets,
    }
    side = math.isqrt(codes.shape[-1])
    scale = GRID // side
    rows, columns = np.divmod(np.arange(side * side), side)
    middles = (torch.from_numpy(np.stack([columns, rows], -1)) + 0.5) * scale  # (N, 2) in patches
    # A scene's shapes differ in shape, so a shape is followed by it: one centre per frame and
    # shape, NaN when not seen.
    member = F.one_hot(shape, N_SHAPES + 1)[..., None].float()  # (B, T, N, S, 1)
    centres = (member * (offsets + middles)[..., None, :]).sum(2) / member.sum(2)  # (B, T, S, 2)
    steps = torch.cat([torch.full_like(centres[:, :1], math.nan), centres.diff(dim=1)], dim=1)
    looks = {}
    for name, value in (("first_colour", colour), ("first_size", size)):
        of_shape = (member[:, 0, :, :, 0] * value[:, 0, :, None]).amax(1).long()  # (B, S)
        looks[name] = of_shape.gather(1, shape.flatten(1)).view_as(shape)
    seen = member[..., 0].amax(2).bool()  # (B, T, S)
    gone = (seen[:, :1] & ~seen).sum(-1)[..., None].expand_as(shape)
    code = (member[..., 0] * codes[..., None]).amax(2)  # (B, T, S)
    changed = seen & (code != code[:, :1])
    late = changed.long().argmax(1, keepdim=True) >= codes.shape[1] / 2  # (B, 1, S)
    change = torch.where(changed, 1 + late.long(), 0).gather(2, shape.flatten(2)).view_as(shape)
    at_place = shape[..., None].expand(*shape.shape, 2)
    step = steps.gather(2, at_place)  # (B, T, N, 2)
    first_seen = member[:, 0, :, :, 0].amax(1).bool().gather(1, shape.flatten(1)).view_as(shape)
    followed = first_seen & step.isfinite().all(-1)
    return labels | looks | {"step": step, "followed": followed, "change": change, "gone": gone}


def cells(codes: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of the pooled 2 x 2 cells: those of the patch nearest to its shape's centre.

    Args:
        codes: (B, T, 64).
        offsets: (B, T, 64, 2).

    Returns:
        (B, T, 16) and (B, T, 16, 2), offsets from the cell's middle.
    """
    half = GRID // 2
    order = (
        torch.arange(GRID * GRID).view(half, 2, half, 2).permute(0, 2, 1, 3).reshape(-1, 4)
    )  # (16, 4)
    distance = offsets.norm(dim=-1).masked_fill(codes == 0, math.inf)[..., order]  # (B, T, 16, 4)
    best = distance.argmin(-1, keepdim=True)
    code = codes[..., order].gather(-1, best)[..., 0]
    within = torch.tensor(
        [[-0.5, -0.5], [0.5, -0.5], [-0.5, 0.5], [0.5, 0.5]]
    )  # of the four patches
    offset = (offsets[..., order, :] + within).gather(-2, best[..., None].expand(*best.shape, 2))[
        ..., 0, :
    ]
    return code, offset


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


def encode_examples(tokenizer: PreTrainedTokenizerFast, pool: Pool) -> list[tuple[list[int], int]]:
    """Token ids of prompt, answer and stop token with the video's placeholders in place, and where
    the answer starts."""
    prompts: dict[str, list[int]] = {}
    for asked in sorted(set(pool.questions)):
        message = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": asked}]}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        text = text.replace("<video>", "<video>" * pool.video_tokens)
        prompts[asked] = tokenizer(text, add_special_tokens=False)["input_ids"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = tokenizer(pool.answers, add_special_tokens=False)["input_ids"]
    return [
        (prompts[q] + text + [stop], len(prompts[q]))
        for q, text in zip(pool.questions, texts, strict=True)
    ]


def train_captions(
    model: LlavaOnevisionForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pools: Sequence[Pool],
    steps: int,
    batch: int = 32,
    learning_rate: float = 1.5e-3,
    warmup: int = 150,
    seed: int = 1,
    dense_weight: float = 0.5,
    checkpoint: Path | None = None,
) -> list[dict]:
    """Train projector and text stack on questions and answers; the vision tower stays as it is.

    Loss over the answer and its stop token only, plus `dense_weight` times what a `DenseHead`
    misreads at the video positions of the middle layer. Sequences are padded to a multiple of 32.

    Args:
        pools: steps take turns among them; each holds clips of one number of frames.
        batch: clips a step of NUM_FRAMES frames; of longer ones as many as have those tokens.
        checkpoint: written every 250 steps; one that is there is gone on from.

    Returns:
        One row every 50 steps: step, loss, dense_loss, share of right next tokens over the answers,
            seconds.
    """
    inner = model.model
    encoded = [encode_examples(tokenizer, pool) for pool in pools]
    seen = [tower_features(model, pool.frames) for pool in pools]
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
        turn = step % len(pools)
        pool, examples, features = pools[turn], encoded[turn], seen[turn]
        clips = min(batch, max(1, batch * NUM_FRAMES // pool.frames.shape[1]))
        picked = _picked(step // len(pools), clips, len(examples), seed)
        length = -(-max(len(examples[i][0]) for i in picked) // 32) * 32
        ids = torch.full((clips, length), tokenizer.pad_token_id)
        answered = torch.zeros((clips, length), dtype=torch.bool)
        for row, i in enumerate(picked):
            tokens, begin = examples[i]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            answered[row, begin : len(tokens)] = True
        first = int((ids[0] == model.config.video_token_id).nonzero()[0])
        codes = torch.from_numpy(pool.codes[picked]).long()  # (B, T, 64)
        offsets = torch.from_numpy(pool.offsets[picked]).float()
        labels = dense_labels(*cells(codes, offsets), torch.from_numpy(pool.floors[picked]).long())
        middle.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            video = inner.apply_pooling(inner.multi_modal_projector(features[picked].flatten(0, 1)))
            video = video.reshape(clips, pool.video_tokens - 1, -1)
            words = inner.get_input_embeddings()(ids)
            newline = inner.image_newline.expand(clips, 1, -1)
            embeds = torch.cat(
                [words[:, :first], video, newline, words[:, first + pool.video_tokens :]], dim=1
            )  # (B, S, H)
            out = inner.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
            logits = model.lm_head(out[:, :-1][answered[:, 1:]]).float()  # (N, V)
            places = middle[0][:, first : first + pool.video_tokens - 1]
            places = places.unflatten(1, (pool.frames.shape[1], -1))  # (B, T, cells, H)
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


def _picked(step: int, batch: int, n_examples: int, seed: int) -> list[int]:
    """The examples of a step: consecutive ones of the epochs' own orders, whatever came before."""
    places = range(step * batch, (step + 1) * batch)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(n_examples)
        for epoch in {place // n_examples for place in places}
    }
    return [int(orders[place // n_examples][place % n_examples]) for place in places]


def save_target(
    model: LlavaOnevisionForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write the target as a Hugging Face folder: bfloat16 weights, tokenizer, frame settings."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlavaOnevisionForConditionalGeneration(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json_atomic(
        folder / "video_preprocessor_config.json",
        {
            "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
            "resample": 3,  # bicubic
            "do_resize": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )


def retrain(
    out_folder: Path, scenes_per_family: int, tower_steps: int = 1500, caption_steps: int = 3000
) -> None:
    """Train the pocket target from nothing and write it, with its training record, to `out_folder`.

    What is done is kept in `<out_folder>-work` until the target is written; a run that was stopped
    goes on from there.

    Raises:
        InputError: that folder holds a run with other settings.
    """
    work = out_folder.with_name(out_folder.name + "-work")
    work.mkdir(parents=True, exist_ok=True)
    pool = draw_pool("target_training", scenes_per_family)
    print(f"pool: {len(pool.answers)} scenes", flush=True)
    tokenizer = train_tokenizer(pool.answers + pool.questions)
    model = build_model(tokenizer, seed=0)
    texts = hashlib.sha256("\n".join(pool.questions + pool.answers).encode()).hexdigest()
    settings = {
        "scenes": len(pool.answers),
        "texts_sha256": texts,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tower_steps": tower_steps,
        "caption_steps": caption_steps,
    }
    settings_file = work / "settings.json"
    if settings_file.is_file() and read_json(settings_file) != settings:
        raise InputError(
            f"{work}: holds a run with other settings; remove the folder to start anew"
        )
    write_json_atomic(settings_file, settings)
    tower_file = work / "tower.pt"
    if tower_file.is_file():
        state = torch.load(tower_file, weights_only=True)
        model.load_state_dict(state["model"])
        tower = state["rows"]
    else:
        tower = train_tower(model, pool, tower_steps)
        state = {"model": model.state_dict(), "rows": tower}
        replace_atomically(tower_file, partial(torch.save, state))
    captions = train_captions(
        model, tokenizer, [pool], caption_steps, checkpoint=work / "captions.pt"
    )
    save_target(model, tokenizer, work / "target")
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    record = {**settings, **facts, "tower": tower, "captions": captions}
    write_json_atomic(work / "target" / "training_record.json", record)
    if out_folder.exists():
        out_folder.rename(work / "before")
    (work / "target").rename(out_folder)
    shutil.rmtree(work)


def retrain_lengths(
    base_folder: Path, out_folder: Path, steps: int = 2000, learning_rate: float = 6e-4
) -> None:
    """Go on training a pocket target on clips of LENGTHS frames; its vision tower stays.

    What is done is kept in `<out_folder>-work`, as `retrain` does.
    """
    work = out_folder.with_name(out_folder.name + "-work")
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base_folder)
    tokenizer.model_max_length = LONGEST
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(base_folder, dtype=torch.float32)
    model.config.text_config.max_position_embeddings = LONGEST
    first, pools = 0, []
    for num_frames in LENGTHS:
        scenes = min(800, 8000 // num_frames)  # of each family
        pools.append(draw_pool("target_training", scenes, num_frames, first))
        first += scenes
    rows = train_captions(
        model,
        tokenizer,
        pools,
        steps,
        learning_rate=learning_rate,
        checkpoint=work / "captions.pt",
    )
    save_target(model, tokenizer, work / "target")
    record = {
        "scenes": [len(pool.answers) for pool in pools],
        "frames": list(LENGTHS),
        "caption_steps": steps,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "captions": rows,
    }
    write_json_atomic(work / "target" / "training_record.json", record)
    if out_folder.exists():
        out_folder.rename(work / "before")
    (work / "target").rename(out_folder)
    shutil.rmtree(work)
