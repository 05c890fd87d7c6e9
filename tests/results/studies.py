"""Records of the studies `lengths` and `design`, small enough to be known by hand.

A text has 10 tokens after the first; AR takes 0.1 s for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from tests.results.synthetic import DEVICE, cycle_row, generation_row, records_of
from vflash_analysis.results.sources import Records
from vflash_analysis.schemas import BENCHMARKS

TEXT = {"new_tokens": 11, "decode_s": 0.1, "verify_calls": 10}
TEXT |= {"prefill_s": 1.0, "vision_s": 0.0, "frame_read_s": 0.0}


def lengths_study(
    tokens: Mapping[int, int],
    devices: tuple[str, ...] = (DEVICE,),
    unended: tuple[str, ...] = (),
) -> Records:
    """Tree-60 in 4 calls on VDC, in 5 on other suites, always twice as fast as AR.

    Args:
        tokens: visual tokens by number of frames.
        devices: that decoded all of it.
        unended: suites whose texts are cut at the cap, so that the target fails its gate.
    """
    generations, cycles = [], []
    for device in devices:
        for frames, visual in tokens.items():
            for benchmark in BENCHMARKS:
                seen = {"run_id": f"{device}/{frames}", "frames_requested": frames}
                seen |= {"video_tokens": visual, "device": device}
                seen |= {"stop_reason": "length" if benchmark in unended else "eos"}
                clip = f"{benchmark}-0"
                generations.append(generation_row("ar", clip, benchmark, **TEXT | seen))
                calls = {"verify_calls": 4 if benchmark == "VDC" else 5, "decode_s": 0.05}
                told = TEXT | seen | calls | {"drafter_sha256": "d"}
                generations.append(generation_row("tree60", clip, benchmark, **told))
                cycles += _cycles(generations[-1])
    return records_of(pd.DataFrame(generations), pd.DataFrame(cycles))


def design_study() -> Records:
    """The chain with all visual positions and with half: on VDC in 2 calls, elsewhere in 5."""
    generations, cycles = [], []
    for benchmark in BENCHMARKS:
        clip = f"{benchmark}-0"
        generations.append(generation_row("ar", clip, benchmark, **TEXT))
        for setting in ("", "context=0.5"):
            own = {"setting": setting, "drafter_sha256": "d", "decode_s": 0.05}
            own["verify_calls"] = 2 if benchmark == "VDC" else 5
            generations.append(generation_row("chain", clip, benchmark, **TEXT | own))
            cycles += _cycles(generations[-1])
    return records_of(pd.DataFrame(generations), pd.DataFrame(cycles))


def _cycles(row: dict) -> list[dict]:
    """The cycles of a drafted text, its tokens shared out among its calls."""
    calls = row["verify_calls"]
    found = []
    for number in range(calls):
        committed = 10 // calls + (number < 10 % calls)
        part = {"n_committed": committed, "n_accepted": committed - 1, "censored": False}
        part |= {"draft_s": 0.002, "verify_s": 0.003, "other_s": 0.0, "end_s": 0.01 * (number + 1)}
        found.append(cycle_row(row, number) | part)
    return found
