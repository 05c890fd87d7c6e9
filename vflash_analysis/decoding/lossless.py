"""Is a text the target's own greedy text, and if not, is the difference rounding or a bug?

A lossless method commits exactly the tokens of plain greedy decoding. Kernels round differently for
1, 16 and 61 rows, so two tokens with almost equal logits may swap. What is allowed depends on the
precision the target ran in:

* float64: nothing. Any difference is a logic error.
* float32: a difference where the float64 logits of the two tokens are less than 1e-4 apart.
* half precision: a difference where the two tokens' logits are no further apart than the row count
  alone moves the logits of that prefix (passes of 1 against 16 and 61 rows).

Anything else is a logic error. In half precision the share of identical texts is reported beside
the same share for `ar` at setting `verify16` and `verify61`, which involves no drafter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch

from vflash_analysis.model.cache import KVCache
from vflash_analysis.model.target import Target
from vflash_analysis.schemas import BLOCK_SIZE, VERIFY_ROWS

NEAR_TIE = "near_tie"
LOGIC_ERROR = "logic_error"
FP32_GAP = 1e-4
BLOCK_ROWS = (BLOCK_SIZE, VERIFY_ROWS)  # of a chain's verify and Tree-60's


class LosslessError(RuntimeError):
    """A text differs from plain greedy decoding where no rounding can explain it."""


@dataclass(frozen=True)
class Divergence:
    """The first difference between a text and the greedy one.

    Attributes:
        position: 0-based index of the first token that differs; where one text merely ends
            earlier, the length of the shorter one.
        gap: largest logit minus the lower logit of the two tokens, 0 or more; None where one text
            has no token there. It is the top-two gap when those two lead, and more otherwise.
        allowed: largest gap that counts as a near tie.
        kind: "near_tie" or "logic_error".
    """

    position: int
    gap: float | None
    allowed: float
    kind: str


def first_divergence(token_ids: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first difference, the shorter length if one continues the other, None if equal."""
    for index, (ours, theirs) in enumerate(zip(token_ids, reference, strict=False)):
        if ours != theirs:
            return index
    return None if len(token_ids) == len(reference) else min(len(token_ids), len(reference))


def choice_gap(logits: torch.Tensor, first: int, second: int) -> float:
    """Largest of `logits` (V,) minus the lower one of two tokens' logits."""
    return float(logits.max() - torch.minimum(logits[first], logits[second]))


@torch.inference_mode()
def logits_after(
    target: Target, cache: KVCache, prompt_tokens: int, prefix: Sequence[int], rows: int
) -> torch.Tensor:
    """The target's logits after prompt + prefix, fed through forwards of exactly `rows` rows.

    Args:
        cache: holds at least the prompt; holds exactly the prompt afterwards.
        prefix: 1 or more tokens; the last forward is filled up after them with copies of the last
            one, which no earlier row sees.

    Returns:
        (V,) float64 copies of the logits as the target's precision gave them.
    """
    cache.truncate(prompt_tokens)
    step = None if target.compiled is None else target.compiled.step(cache, rows, ())
    filled = [*prefix, *[prefix[-1]] * (-len(prefix) % rows)]
    ids = torch.tensor(filled, device=target.device)
    positions = torch.arange(len(filled), device=target.device) + prompt_tokens
    for begin in range(0, len(filled), rows):
        part = slice(begin, begin + rows)
        if step is None:
            forward = target.forward(ids[part], positions[part], cache)
        else:  # its passes round as they do, not as uncompiled ones
            forward = step(ids[part], positions[part], None)
    logits = forward.logits[(len(prefix) - 1) % rows].double()
    cache.truncate(prompt_tokens)
    return logits


def judge(
    target: Target,
    cache: KVCache,
    prompt_tokens: int,
    token_ids: Sequence[int],
    reference: Sequence[int],
    exact_logits: Callable[[Sequence[int]], torch.Tensor] | None = None,
) -> Divergence | None:
    """Compare a text with the greedy one and explain the first difference.

    Args:
        target: the target both texts came from.
        cache: holds the prompt, with room for the text and 61 rows; left holding the prompt.
        prompt_tokens: P.
        token_ids: the text to judge.
        reference: plain greedy decoding's.
        exact_logits: prefix -> (V,) float64 logits of the same weights; needed in float32 only.

    Returns:
        None for identical texts.
    """
    position = first_divergence(token_ids, reference)
    if position is None:
        return None
    half = target.dtype in (torch.float16, torch.bfloat16)
    allowed = FP32_GAP if target.dtype == torch.float32 else 0.0
    # The first token is the prefill's, shared by all methods: nothing can round differently there.
    if position == 0 or position >= min(len(token_ids), len(reference)):
        return Divergence(position, None, allowed, LOGIC_ERROR)
    prefix = list(reference[:position])
    if target.dtype == torch.float32 and exact_logits is not None:
        logits = exact_logits(prefix)
    else:
        logits = logits_after(target, cache, prompt_tokens, prefix, rows=1)
    gap = choice_gap(logits, token_ids[position], reference[position])
    if half:
        for rows in BLOCK_ROWS:
            other = logits_after(target, cache, prompt_tokens, prefix, rows)
            allowed = max(allowed, float((other - logits).abs().max()))
        near = gap <= allowed
    else:
        near = target.dtype == torch.float32 and exact_logits is not None and gap < allowed
    return Divergence(position, gap, allowed, NEAR_TIE if near else LOGIC_ERROR)


class ExactLogits:
    """Float64 logits of a target's weights, for judging differences in float32.

    The float64 twin is made when it is first asked, which is when a text differs.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._twin: Target | None = None

    @torch.inference_mode()
    def after(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None, prefix: Sequence[int]
    ) -> torch.Tensor:
        """Logits (V,) in float64 after prompt + prefix, everything recomputed from the pixels."""
        if self._twin is None:
            target = self._target
            self._twin = Target(
                copy.deepcopy(target.model).double(),
                target.tokenizer,
                target.preprocessing,
                target.attention,
                (target.template, target.template_file),
                target.source,
                target.source_sha256,
                target.revision,
            )
        cache = self._twin.new_cache(len(input_ids), len(prefix) + 1)
        pixels = None if pixel_values is None else pixel_values.double()
        self._twin.prefill(input_ids, pixels, cache)
        ids = torch.tensor(list(prefix), device=input_ids.device)
        return self._twin.forward(ids, None, cache).logits[-1]


def check_lossless(dtype: torch.dtype, generations: pd.DataFrame) -> None:
    """Fails a run whose texts differ in a way its precision does not allow.

    Args:
        dtype: the target's; in half precision differences are reported, not fatal.
        generations: GENERATIONS rows, warm-ups included.

    Raises:
        LosslessError: a logic error in float32 or float64, naming the first one and their number.
    """
    errors = generations.loc[generations["divergence_kind"] == LOGIC_ERROR]
    if dtype in (torch.float16, torch.bfloat16) or errors.empty:
        return
    first = errors.iloc[0]
    gap = first["divergence_gap"]
    told = "one text ends there" if pd.isna(gap) else f"logit gap {gap:.3g}"
    raise LosslessError(
        f"{len(errors)} of {len(generations)} texts differ from greedy decoding in "
        f"{str(dtype).removeprefix('torch.')}; first: {first['method']} {first['setting']} on clip "
        f"{first['clip_id']}, token {first['first_divergence']}, {told}"
    )
