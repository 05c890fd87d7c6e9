"""The same text through Hugging Face's own `generate`, timed like our loop: a check from outside.

`hf_generate` is plain greedy `model.generate` with its default cache, against which our `ar` is
measured. `hf_dflash` is `generate` with the same drafter (`speculation_type="dflash"`), against
which our `chain` is measured.

Our decode time starts when the first token is known. `generate` cannot start from a prefill, so a
streamer notes when its first token arrives (the prefill's) and decode time runs from there to the
end of the call. `generate` copies every token to the host before it reaches the streamer, so the
notes are synchronised on CUDA too. Drafting, its projection of the prompt included, falls inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from vflash_analysis.decoding.loop import LENGTH, STOP_TOKEN, Generation
from vflash_analysis.model.target import Target


class _Arrivals(BaseStreamer):
    """Notes when tokens arrive; the first thing `generate` puts is the prompt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times_s: list[float] = []
        self.end_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(self._clock())

    def end(self) -> None:
        self.end_s = self._clock()


def generate_outside(
    target: Target,
    input_ids: torch.Tensor,
    pixel_values: torch.Tensor | None,
    max_new_tokens: int,
    drafter: Any = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Generation:
    """Greedy `generate` from pixels and prompt.

    Args:
        target: its model runs as it is set up, attention included.
        input_ids: (P,) prompt.
        pixel_values: (1, T, 3, S, S), or None for a prompt without video.
        max_new_tokens: 1 or more.
        drafter: a VFlash drafter for `speculation_type="dflash"`; None for plain decoding.
        clock: monotonic seconds.
    """
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(target.stop_ids),
        pad_token_id=min(target.stop_ids),
        speculation_type=None if drafter is None else "dflash",
    )
    arrivals = _Arrivals(clock)
    calls = {"target": 0, "drafter": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    handles = [target.text_model.register_forward_pre_hook(count("target"))]
    if drafter is not None:
        handles.append(drafter.register_forward_pre_hook(count("drafter")))
    own_config = target.model.generation_config
    # `generate` fills gaps of the config it is given from the model's own; give it nothing to fill.
    target.model.generation_config = config
    try:
        begin_s = clock()
        output = target.model.generate(
            input_ids=input_ids[None],
            attention_mask=torch.ones_like(input_ids)[None],
            pixel_values_videos=pixel_values,
            generation_config=config,
            streamer=arrivals,
            **({} if drafter is None else {"assistant_model": drafter}),
        )
    finally:
        target.model.generation_config = own_config
        for handle in handles:
            handle.remove()
    token_ids = output[0, len(input_ids) :].tolist()
    first_s = arrivals.times_s[1]
    return Generation(
        token_ids=token_ids,
        stop_reason=STOP_TOKEN if token_ids[-1] in target.stop_ids else LENGTH,
        prefill_s=first_s - begin_s,
        decode_s=arrivals.end_s - first_s,
        verify_calls=calls["target"] - 1,
        draft_calls=calls["drafter"],
    )
