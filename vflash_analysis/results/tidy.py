"""The tidy frame behind every table and figure: one value a row, the same fourteen columns.

A key that does not apply is an empty string, a missing number is nan, an id stays the string it
was. Numbers are rounded to six significant digits when a row is made, so that equal records give
equal bytes whatever the order of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from vflash_analysis.errors import InputError
from vflash_analysis.metrics import refuse_infinite
from vflash_analysis.records import write_text_atomic
from vflash_analysis.schemas import BENCHMARKS
from vflash_analysis.stats import Interval

KEYS = ("item", "benchmark", "method", "objective", "setting", "quantity")
NUMBERS = ("value", "low", "high")
COLUMNS = (*KEYS, *NUMBERS, "n", "unit", "device", "status", "source")
TEXTS = (*KEYS, "unit", "device", "status", "source")

MEASURED, STORED, MISSING = "measured", "stored", "missing"
PUBLISHED_ONLY, NOT_COMPARABLE, COMPARABLE = "published only", "not comparable", "comparable"
MODELLED = "modelled"  # arithmetic on printed rates: nothing was run
TARGET_FAILS = "target fails"  # measured where the target's own gates fail
STATUSES = (
    MEASURED, STORED, MISSING, PUBLISHED_ONLY, NOT_COMPARABLE, COMPARABLE, MODELLED, TARGET_FAILS,
)  # fmt: skip

BENCHMARK_ORDER = (*BENCHMARKS, "macro")


class Name(NamedTuple):
    """How a method or training arm is shown; only an arm has a marker."""

    label: str
    colour: str
    marker: str = ""


# In the order of tables and legends. Okabe and Ito's colours and their neighbours: told apart with
# the common colour deficiencies.
NAMES: Mapping[str, Name] = {
    "ar": Name("Autoregressive", "#595959"),
    "chain": Name("chain", "#56B4E9"),
    "tree60": Name("Tree-60", "#0072B2"),
    "lookup": Name("n-gram lookup", "#B2A23F"),
    "small_chain": Name("Small target, chain", "#8C6BB1"),
    "small_tree": Name("Small target, tree", "#5E3C99"),
    "specvlm_ji": Name("SpecVLM (Ji)", "#E69F00"),
    "specvlm_self": Name("SpecVLM (Ji), self-drafting", "#B97E00"),
    "parallelvlm": Name("ParallelVLM", "#009E73"),
    "sparrow": Name("SPARROW", "#CC79A7"),
    "msd": Name("MSD", "#A6761D"),
    "vispec": Name("ViSpec", "#66A61E"),
    "medusa": Name("Medusa", "#E7298A"),
    "dflash": Name("DFlash", "#1B9E77"),
    "lvspec": Name("LVSpec", "#D55E00"),
    "viskip": Name("ViSkip", "#7570B3"),
    "hf_generate": Name("HF generate", "#8A8A8A"),
    "hf_dflash": Name("HF generate with the drafter", "#A6CEE3"),
    "mask_only": Name("mask-only", "#D55E00", "s"),
    "mask_only_2x": Name("mask-only, 2× anchors", "#E69F00", "D"),
    "true_reveal": Name("true reveal", "#009E73", "^"),
    "wrong_reveal": Name("wrong reveal", "#CC79A7", "v"),
    "self_reveal_rev0": Name("self reveal, no loss on revealed", "#56B4E9", "P"),
    "self_reveal": Name("self reveal (flow)", "#0072B2", "o"),
}
METHOD_ORDER = tuple(key for key, name in NAMES.items() if not name.marker)
ARM_ORDER = tuple(key for key, name in NAMES.items() if name.marker)

QUANTITIES: Mapping[str, str] = {
    "decode_speedup": "decoding speed-up",
    "decode_speedup_per_clip": "decoding speed-up, mean of clips",
    "end_to_end_speedup": "end-to-end speed-up",
    "accepted_length": "accepted length τ",
    "accepted_length_uncensored": "τ over uncut cycles",
    "accepted_length_per_clip": "τ, mean of clips",
    "accepted_drafts": "accepted drafts per cycle",
    "anchor_accepted_length": "accepted length at full-block anchors",
    "plateau": "plateau of the accepted length at anchors",
    "masked_slot_accuracy": "accuracy of masked slots",
    "wrong_corrected": "wrong reveals corrected",
    "right_kept": "right reveals kept",
    "cap_share": "share of texts at the cap",
    "identical_share": "share identical to AR",
    "ar_ms_per_token": "AR time per token",
    "ms_per_token": "time per token",
    "ar_vs_generate": "HF generate time over AR time",
    "chain_vs_hf_dflash": "HF dflash time over chain time",
    "predicted_speedup": "speed-up from accepted length and cycle time",
    "modelled_speedup": "speed-up by the cost model",
    "cycle_number": "the cycle shown",
    "median_accepted_drafts": "median of accepted drafts over uncut cycles",
    "context_tokens": "context tokens before the anchor",
    "draft_probability": "the drafter's probability of a drafted token",
    "draft_accepted": "whether a drafted token was accepted",
    "committed_token": "committed tokens: accepted drafts (1) and the target's own (0)",
    "ar_forward_ms": "time of a plain cycle, one target forward",
    "draft_ms": "draft time per cycle",
    "verify_ms": "verify time per cycle",
    "other_share": "share of other time",
    "other_ms": "other time per cycle",
    "context_projection_ms": "projection of the prompt, per cycle",
    "tree_ms": "tree building per cycle",
    "bookkeeping_ms": "bookkeeping per cycle",
    "frame_read_ms": "frame reading per clip",
    "vision_ms": "vision encoding per clip",
    "prefill_ms": "prefill per clip",
    "decode_ms": "decoding per clip",
    "end_to_end_ms": "time of a clip from its file",
    "cycle_ms": "time of a cycle",
    "forward_ms": "time of a forward",
    "limit_ms": "time that memory bandwidth allows",
    "limit_share": "bandwidth limit over time",
    "peak_bytes": "peak memory beyond weights and caches",
    "copy_bandwidth": "copy bandwidth, read and written",
    "breakeven_tau": "accepted length τ that breaks even",
    "forward_equivalents": "training forward-equivalents",
    "train_s": "training time",
    "ended_share": "texts that end by themselves",
    "wall_s": "seconds of a text, end to end",
    "decode_s": "seconds of a text, decoding",
    "prefill_s": "seconds of a text before decoding",
    "generated_tokens": "tokens of a text",
    "target_calls": "verify calls of a text",
    "recall": "recall@k",
    "first_choice_right": "first choice right after a",
    "predicted_length": "predicted accepted length",
    "paired_difference": "paired difference",
    "texts_compared": "texts compared",
    "near_tie": "near ties",
    "logic_error": "logic errors",
    "divergence_gap": "logit gap where they differ",
    "first_divergence": "first token that differs",
    "difference": "ours minus the published number",
    "speedup": "speed-up",
    "draft_window_expansion": "expansion of the draft window",
    "accepted_length_gain_over_training_free": "gain in τ over training-free methods",
    "speedup_gain_over_training_free": "gain in speed-up over training-free methods",
    "decode_speedup_at_25k_visual_tokens": "decoding speed-up after 25k visual tokens",
    "drafter_layers": "the drafter's layers",
    "block_size": "block",
    "drafter_forwards_per_block": "drafter forwards a block",
    "seeds": "sample seeds",
    "clips_per_benchmark_and_seed": "clips of a suite and seed",
    "demo_context_tokens": "context of the demo clip",
    "demo_ar_ms_per_token": "AR time per token, the demo clip",
    "demo_cycle_accepted_drafts": "accepted drafts of the demo cycle",
    "demo_cycle_committed": "tokens committed by the demo cycle",
    "replay_speed": "speed of the replay",
    "demo_clips": "clips of the replay",
    "memory_bandwidth": "memory bandwidth",
    "bfloat16_compute": "bfloat16 arithmetic",
    "paired_difference_t": "paired difference, t over seeds",
    "attention_visual": "attention of the last instruction token on the video",
    "attention_instruction": "attention of the last instruction token on the instruction",
    "attention_text": "attention of the last instruction token on the template",
    "attention_visual_max_head": "on the video, the head with most",
    "end_attention_visual": "attention of the last prompt token on the video",
    "end_attention_instruction": "attention of the last prompt token on the instruction",
    "end_attention_text": "attention of the last prompt token on the template",
    "visual_positions": "video's share of positions",
    "end_visual_positions": "video's share of all positions",
    "static_accuracy": "static attributes told right",
    "dynamic_accuracy": "motion and events told right",
    "agreement": "agreement with the target's own text",
    "step_similarity_visual": "cosine over a layer, visual positions",
    "step_similarity_text": "cosine over a layer, other positions",
    "input_similarity_visual": "cosine with the embedding, visual positions",
    "input_similarity_text": "cosine with the embedding, other positions",
}


# What a forward is called at the head of a column.
FORWARD_NAMES: Mapping[str, str] = {
    "verify_chain": "verify, chain",
    "verify_tree60": "verify, Tree-60",
    "draft_chain": "draft, chain",
    "draft_tree60": "draft, Tree-60",
    "context_projection": "context projection",
}


def label(key: str) -> str:
    """The words a reader sees for a method, arm or quantity; the key itself where none are set."""
    words = NAMES[key].label if key in NAMES else QUANTITIES.get(key, key)
    return FORWARD_NAMES.get(key, words)


def setting_text(**keys: Any) -> str:
    """Keys as one `setting` cell, in the order given: "clips=240;steps=400". None is left out."""
    return ";".join(f"{key}={value}" for key, value in keys.items() if value is not None)


def parse_setting(text: str) -> dict[str, str]:
    """The inverse of `setting_text`; a word without "=" is kept under its own name."""
    parts = [word.split("=", 1) for word in text.split(";") if word]
    return {part[0]: part[-1] for part in parts}


# What a key of a `setting` cell is called, with its value before or after it.
SETTING_NAMES: Mapping[str, str] = {
    "visual_tokens": "{} visual tokens",
    "clips": "{} training clips",
    "steps": "{} steps",
    "rounds": "{} drafter forwards",
    "revealed": "{} slots revealed",
    "context": "context {}",
    "split": "split {}",
    "variant": "{}",
    "target": "{}",
    "note": "{}",
    "input": "{}",
    "phase": "in {}",
    "share": "{} of visual positions",
    "mtp": "MTP {}",
    "ivsb": "IVSB {}",
    "vata": "VATA {}",
}


# Where printed numbers come from, as a caption names it; other sources as they stand.
SOURCE_NAMES: Mapping[str, str] = {
    "vflash_fm_page": "the VFlash-FM page",
    "parallelvlm_and_related": "ParallelVLM's abstract and its neighbours'",
    "sparrow_lvspec_parallelvlm_mmspec": "the papers of SPARROW, LVSpec and MMSpec",
    "nvidia_h100_datasheet": "NVIDIA's data sheet",
    **{f"sparrow table {number}": f"SPARROW, table {number}" for number in (1, 4, 5, 6, 7)},
}


def setting_words(text: str) -> str:
    """A `setting` cell as a reader sees it: "150 training clips, 1,100 steps"."""
    words = []
    for key, value in parse_setting(text).items():
        key, value = key.strip(), value.strip()
        number = f"{int(value):,}" if value.isdigit() and value != key else value
        if key == "share":
            number = f"{100 * float(value):g} %"
        plain = value if value == key else f"{key} {number}"
        words.append(SETTING_NAMES.get(key, plain.replace("{", "{{")).format(number))
    return ", ".join(words)


def round_number(value: float) -> float:
    """Six significant digits; nan stays nan."""
    return float(f"{value:.6g}") if math.isfinite(value) else float(value)


@dataclass(frozen=True)
class Origin:
    """What every row of one group shares: the table, where the numbers come from, the machine."""

    item: str
    device: str
    status: str
    source: str

    def row(
        self,
        quantity: str,
        value: Interval | float,
        unit: str,
        n: int | None = None,
        benchmark: str = "",
        method: str = "",
        objective: str = "",
        setting: str = "",
    ) -> dict[str, Any]:
        """One tidy row; a value that is nan gets the status "missing"."""
        if isinstance(value, Interval):
            number, low, high = value.value, value.low, value.high
            n = value.n if n is None else n
        else:
            number, low, high = float(value), math.nan, math.nan
        absent = math.isnan(number)
        return {
            "item": self.item,
            "benchmark": benchmark,
            "method": method,
            "objective": objective,
            "setting": setting,
            "quantity": quantity,
            "value": round_number(number),
            "low": round_number(low),
            "high": round_number(high),
            "n": pd.NA if n is None else int(n),
            "unit": unit,
            "device": self.device,
            "status": MISSING if absent else self.status,
            "source": self.source,
        }


def tidy(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A checked tidy frame of the rows, in their order."""
    return checked(pd.DataFrame(list(rows), columns=list(COLUMNS)))


def checked(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the tidy columns and types, or InputError naming the fault.

    Raises:
        InputError: other columns, a missing text key, an unknown status, an infinite number, or
            two rows with the same keys.
    """
    if list(frame.columns) != list(COLUMNS):
        raise InputError(f"tidy frame: columns {list(frame.columns)}, allowed {list(COLUMNS)}")
    frame = frame.reset_index(drop=True)
    for column in TEXTS:
        if frame[column].isna().any():
            raise InputError(
                f"tidy frame: '{column}' is missing in row {frame[column].isna().argmax()}"
            )
        frame[column] = frame[column].astype("str")
    for column in NUMBERS:
        frame[column] = frame[column].astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    frame["n"] = frame["n"].astype("Int64")
    refuse_infinite(frame)
    unknown = sorted(set(frame["status"]) - set(STATUSES))
    if unknown:
        raise InputError(f"tidy frame: status {unknown}, allowed {list(STATUSES)}")
    twice = frame.duplicated([*KEYS, "device", "source"])
    if twice.any():
        row = frame.loc[twice, list(KEYS)].iloc[0].to_dict()
        raise InputError(f"tidy frame: two values for {row}")
    return frame


def number_text(value: float) -> str:
    """A number as the CSV holds it: six significant digits, empty if missing."""
    return "" if math.isnan(value) else f"{value:.6g}"


def tidy_csv(frame: pd.DataFrame) -> str:
    """The frame as CSV text with `\\n` line ends; equal frames give equal text."""
    text = checked(frame).astype({"n": "object"})
    for column in NUMBERS:
        text[column] = [number_text(value) for value in text[column]]
    text["n"] = ["" if pd.isna(n) else str(int(n)) for n in text["n"]]
    return str(text.to_csv(index=False, lineterminator="\n"))


def write_tidy_csv(path: str | Path, frame: pd.DataFrame) -> None:
    """Writes the frame as CSV."""
    write_text_atomic(path, tidy_csv(frame))


def read_tidy_csv(path: str | Path) -> pd.DataFrame:
    """Reads a tidy CSV: a method called "NA" or an id "007" stays that text."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    for column in (*NUMBERS, "n"):
        if column in frame.columns:
            frame[column] = pd.to_numeric(frame[column].replace("", None))
    return checked(frame)


def in_order(values: Iterable[str], order: Sequence[str]) -> list[str]:
    """Distinct values in the fixed order; unknown ones after it, alphabetically."""
    found = set(values)
    return [v for v in order if v in found] + sorted(found - set(order))
