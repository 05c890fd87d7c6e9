"""Special tokens of a target: what stops a text, what is never drafted, what masks a slot."""

from typing import Any

import torch

from vflash_analysis.errors import InputError
from vflash_analysis.strict import shown


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Union of the stop tokens of generation config, config, text config and tokenizer.

    Raises:
        InputError: one is no row of the embedding.
    """
    text_config = model.config.get_text_config(decoder=True)
    rows, found = text_config.vocab_size, set()
    for file, holder in (
        ("generation_config.json", model.generation_config),
        ("config.json", model.config),
        ("config.json: text_config", text_config),
        ("tokenizer_config.json", tokenizer),
    ):
        value = getattr(holder, "eos_token_id", None)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < rows:
                raise InputError(
                    f"{file}: eos_token_id: found {shown(value)}, allowed: ids from 0 to {rows - 1}"
                )
            found.add(token_id)
    return frozenset(found)


def ignored_generation_settings(generation_config: Any) -> dict[str, Any]:
    """Settings of a checkpoint's generation config that greedy decoding here does not follow."""
    known = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    known |= {"_from_model_config", "use_cache"}
    return {
        name: value
        for name, value in generation_config.to_diff_dict().items()
        if name not in known and value not in (None, False)
    }


def unused_row(embedding: torch.Tensor, tokenizer: Any, taken: set[int], template: str) -> int:
    """An existing embedding row that no text uses, for the masked slots of a block.

    The first row beyond the tokenizer, else an added token that is neither taken nor part of the
    chat template. Its embedding is finite, non-zero and of ordinary norm: within a factor 10 of
    the median row's.

    Args:
        embedding: (V, H) input embedding.
        tokenizer: its tokenizer.
        taken: ids in use: stop tokens and placeholders. Pad, bos and unk are added here.
        template: the chat template.

    Raises:
        InputError: no such row.
    """
    rows, known = len(embedding), len(tokenizer)
    norms = embedding.detach().to(torch.float32).norm(dim=-1)  # (V,)
    usual = float(norms[: min(known, rows)].median())
    used = taken | {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    added = [
        token_id
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token_id not in used and str(token) not in template
    ]
    for row in [*range(known, rows), *added]:
        # NaN and infinity fail the comparison too.
        if usual / 10 < float(norms[row]) < usual * 10:
            return row
    raise InputError(
        f"mask_token_id: found no unused embedding row of ordinary norm ({rows} rows, {known} "
        "tokens)"
    )
