"""Small random targets and drafters, built in code: every package's tests use them.

`tiny_target` is a LLaVA-OneVision of a few thousand parameters with a word-level tokenizer, in
memory; `save_target` writes it as a Hugging Face folder that `load_target` reads.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

from vflash_analysis.config import DrafterSettings
from vflash_analysis.model.drafter import VFlashDrafter, drafter_config, new_drafter
from vflash_analysis.model.inputs import FramePreprocessing
from vflash_analysis.model.target import Target

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<unk>")
PAD, IM_START, IM_END, IMAGE, VIDEO, UNK = range(len(SPECIAL))
_WORDS = (
    "user assistant describe the clip what happens then a red green blue small large circle square "
    "moves left right up down slowly quickly and meets another before it stops . , ? in order "
    "camera pans zooms first second third last one two three four turns grows shrinks bright dark"
)
WORDS = _WORDS.split()
SPARE_ROWS = 6  # embedding rows beyond the tokenizer
FRAME_SIDE = 20  # patches of 4: a 5 x 5 grid, pooled to 3 x 3 = 9 tokens a frame
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'video' %}<video>{% endif %}"
    "{% endfor %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ '\n' + part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PREPROCESSING = FramePreprocessing(
    FRAME_SIDE, FRAME_SIDE, "bicubic", 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over `SPECIAL` and `WORDS` with a chat template."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<image>", "<video>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_config(
    num_layers: int = 4,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    max_positions: int = 512,
    tie: bool = False,
) -> LlavaOnevisionConfig:
    """Config of a LLaVA-OneVision with hidden size q_heads * head_dim."""
    hidden = q_heads * head_dim
    text = Qwen2Config(
        vocab_size=len(SPECIAL) + len(WORDS) + SPARE_ROWS,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tie,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
    )
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=FRAME_SIDE,
        patch_size=4,
        vision_use_head=False,
    )
    return LlavaOnevisionConfig(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        tie_word_embeddings=tie,
        image_grid_pinpoints=[[FRAME_SIDE, FRAME_SIDE]],
    )


def tiny_model(
    seed: int, config: LlavaOnevisionConfig, dtype: torch.dtype
) -> LlavaOnevisionForConditionalGeneration:
    """A randomly initialised model whose one-dimensional parameters are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaOnevisionForConditionalGeneration(config).eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            # Parameters only: rotary frequencies stay fp32, as in a loaded checkpoint.
            parameter.data = parameter.data.to(dtype)
            # Norms and biases start at 1 and 0, which would hide a wrong use of either.
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(dtype))
    model.generation_config.eos_token_id = [IM_END]
    model.generation_config.pad_token_id = PAD
    return model


def tiny_target(
    seed: int,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float64,
    q_heads: int = 4,
    kv_heads: int = 2,
    attention: str = "vflash",
    max_positions: int = 512,
    tie: bool = False,
) -> Target:
    """A tiny random target in memory; texts are arbitrary but depend on clip and prompt."""
    config = tiny_config(num_layers, q_heads, kv_heads, max_positions=max_positions, tie=tie)
    return Target(
        tiny_model(seed, config, dtype),
        tiny_tokenizer(),
        PREPROCESSING,
        attention,
        source=f"tiny target {seed}",
        source_sha256=f"tiny-{seed}-{num_layers}-{q_heads}-{kv_heads}-{tie}",
    )


def tiny_language_model(seed: int, dtype: torch.dtype, num_layers: int = 4) -> LlamaForCausalLM:
    """A random Llama with nine query heads on three, a tied head and no layer types."""
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS) + SPARE_ROWS,
        hidden_size=36,
        intermediate_size=72,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def tiny_language_target(
    seed: int,
    dtype: torch.dtype = torch.float64,
    attention: str = "vflash",
    num_layers: int = 4,
) -> Target:
    """A tiny random target that reads no video."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEXT_TEMPLATE
    return Target(
        tiny_language_model(seed, dtype, num_layers),
        tokenizer,
        None,
        attention,
        source=f"tiny language model {seed}",
        source_sha256=f"tiny-language-{seed}-{num_layers}",
    )


def tiny_frames(seed: int, num_frames: int = 2) -> torch.Tensor:
    """Random frames (T, 24, 28, 3) uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_frames, 24, 28, 3), generator=generator, dtype=torch.uint8)


def tiny_prompt(
    target: Target, seed: int, num_frames: int = 2, words: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt ids (P,) and pixel values of a random clip and a random question."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(WORDS), (words,), generator=generator)
    question = " ".join(WORDS[int(pick)] for pick in picks)
    pixels = target.prepare_frames(tiny_frames(seed, num_frames))
    return target.build_prompt(question, num_frames), pixels


def save_target(target: Target, folder: Path) -> Path:
    """Write a target as a Hugging Face folder."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    settings = target.preprocessing
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(
            {
                "size": {"height": settings.height, "width": settings.width},
                "resample": 3,
                "rescale_factor": settings.rescale_factor,
                "image_mean": list(settings.mean),
                "image_std": list(settings.std),
                "do_resize": True,
                "do_rescale": True,
                "do_normalize": True,
            }
        )
    )
    return folder


def tiny_drafter(
    target: Target,
    seed: int,
    num_hidden_layers: int = 2,
    block_size: int = 16,
    target_layer_ids: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> VFlashDrafter:
    """An untrained drafter for a tiny target, in the target's dtype unless another is given."""
    ids = target_layer_ids or (0, target.num_layers - 2)
    shape = DrafterSettings(
        num_hidden_layers=num_hidden_layers, block_size=block_size, num_tapped_layers=1
    )
    config = drafter_config(target, shape)
    config.target_layer_ids = list(ids)
    config.initializer_range = 0.2
    return new_drafter(config, seed, dtype or target.dtype, target.device).eval()
