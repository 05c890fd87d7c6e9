"""The pocket target's files: a LLaVA-OneVision architecture of under 3 M parameters, its tokenizer
and chat format, and the prompts that it is trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from vflash_analysis.records import write_json_atomic
from vflash_analysis.training.pocket_pool import IMAGE_SIZE, PATCH_SIZE, Pool, placeholders

VOCABULARY_ROWS = 640
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
# The checkpoint's own chat format, written anew: a role, the video, a line break, the question.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ '\\n' + part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
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


def encode_examples(
    tokenizer: PreTrainedTokenizerFast, pool: Pool, num_frames: int
) -> list[tuple[list[int], int]]:
    """Token ids of prompt, answer and stop token with the placeholders of a video of that many
    frames in place, and where the answer starts."""
    prompts: dict[str, list[int]] = {}
    for asked in sorted(set(pool.questions)):
        message = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": asked}]}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        text = text.replace("<video>", "<video>" * placeholders(num_frames))
        prompts[asked] = tokenizer(text, add_special_tokens=False)["input_ids"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = tokenizer(pool.answers, add_special_tokens=False)["input_ids"]
    return [
        (prompts[q] + text + [stop], len(prompts[q]))
        for q, text in zip(pool.questions, texts, strict=True)
    ]


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
