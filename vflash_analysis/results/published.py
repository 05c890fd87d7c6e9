"""The numbers printed in the papers, as tidy rows.

They stand beside ours with the hardware they were measured on and never enter a mean of ours. The
row "SpecVLM (0.5B drafter)" is the training-free SpecVLM of Ji et al.; another system of the same
name (Huang et al.) appears in the headlines under its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from vflash_analysis.errors import InputError
from vflash_analysis.paths import DATA
from vflash_analysis.results.tidy import (
    COMPARABLE,
    NOT_COMPARABLE,
    PUBLISHED_ONLY,
    Origin,
    setting_text,
)
from vflash_analysis.schemas import BENCHMARKS, PAPER_TARGET
from vflash_analysis.stats import Interval

PUBLISHED = DATA / "published"
PAGE = "vflash_fm_page"
PAGE_DEVICE = "one H100 (as published)"
OTHER_DEVICE = "other hardware and protocol (as published)"
HEADLINE_SOURCES = ("parallelvlm_and_related", "sparrow_lvspec_parallelvlm_mmspec")
DEVICE_SOURCE = "nvidia_h100_datasheet"
TABLE4_DEVICE = "A800, Qwen2.5-VL-7B (as published)"
TABLE5_DEVICE = "L20, LLaVA-OneVision-7B (as published)"
LENGTHS_SUITE = "VDC"  # of SPARROW's tables 4 and 5

METHOD_KEYS = {
    ("SpecVLM", "0.5B drafter"): "specvlm_ji",
    ("ParallelVLM", "0.5B drafter"): "parallelvlm",
    ("SPARROW", "learned drafter"): "sparrow",
    ("VFlash-FM", "Tree-60"): "tree60",
    ("VFlash-FM", "chain"): "chain",
}
_HEADLINE_KEYS = {"SpecVLM": "specvlm_ji", "ParallelVLM": "parallelvlm", "LVSpec": "lvspec",
                  "SPARROW": "sparrow"}  # fmt: skip
_SPARROW_KEYS = {"MSD": "msd", "ViSpec": "vispec", "ViSpec (orig.)": "vispec",
                 "MSD+VATA": "msd", "Sparrow": "sparrow"}  # fmt: skip
_BENCHMARK_NAMES = {"VideoDetailCaption": "VDC", "LongVideoBench": "LVB"}


def load_published(name: str) -> pd.DataFrame:
    """One CSV of `data/published` with every cell as text, as printed."""
    path = PUBLISHED / f"{name}.csv"
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; allowed are {sorted(p.stem for p in PUBLISHED.glob('*.csv'))}"
        )
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def _cells(name: str) -> list[dict[str, str]]:
    table = load_published(name)
    return [{str(key): str(cell) for key, cell in row.items()} for row in table.to_dict("records")]


def printed_number(text: str) -> Interval:
    """A printed cell as a value; "1.5-2.3" has only ends, an empty cell nothing."""
    ends = text.split("-") if text else []
    try:
        numbers = [float(end) for end in ends]
    except ValueError as error:
        raise InputError(f"published value '{text}': allowed is a number or low-high") from error
    if len(numbers) == 2:
        return Interval(math.nan, numbers[0], numbers[1], 0)
    return Interval(numbers[0] if numbers else math.nan, math.nan, math.nan, 0)


def speedups() -> pd.DataFrame:
    """The page's speed-up table: method, variant, benchmark, value, device, source, note.

    `method` is ours (`METHOD_KEYS`), `value` nan where the page says "not reported".
    """
    table = load_published("speedup_llava_onevision_7b")
    pairs = list(zip(table["method"], table["variant"], strict=True))
    unknown = sorted(set(pairs) - set(METHOD_KEYS))
    if unknown:
        raise InputError(f"speedup_llava_onevision_7b.csv: {unknown} not in {list(METHOD_KEYS)}")
    return table.assign(
        method=[METHOD_KEYS[pair] for pair in pairs],
        value=[printed_number(cell).value for cell in table["speedup"]],
        device=[PAGE_DEVICE if pair[0] == "VFlash-FM" else OTHER_DEVICE for pair in pairs],
    ).drop(columns="speedup")


def same_setup(target: str, device: str) -> bool:
    """Whether our numbers were measured on the page's target and hardware, so they compare.

    A target may bear that name only if its sizes are the paper's: loading it checks them.
    """
    return target == PAPER_TARGET and "h100" in device.lower()


def speedup_rows(item: str, comparable: bool) -> list[dict[str, Any]]:
    """The page's speed-ups as tidy rows.

    Args:
        item: the table they stand in.
        comparable: whether our target and hardware are the page's (`same_setup`).
    """
    facts = _protocol()
    per_benchmark = int(facts["clips_per_benchmark_and_seed"]) * int(facts["seeds"])
    rows = []
    for cell in speedups().to_dict("records"):
        from_page = cell["device"] == PAGE_DEVICE
        status = COMPARABLE if from_page and comparable else NOT_COMPARABLE
        n = per_benchmark * (len(BENCHMARKS) if cell["benchmark"] == "macro" else 1)
        row = Origin(item, str(cell["device"]), status, str(cell["source"])).row(
            "decode_speedup",
            float(cell["value"]),
            "x",
            n=n if from_page else None,
            benchmark=str(cell["benchmark"]),
            method=str(cell["method"]),
        )
        # "not reported" is a fact about the paper, not a run of ours that is missing
        rows.append({**row, "status": status})
    return rows


def recomputed_rows(item: str) -> list[dict[str, Any]]:
    """The macro averages anew, as the mean of the suites that each row prints.

    A method that prints no suite has none.
    """
    cells = speedups()
    rows = []
    for method, own in cells.loc[cells["benchmark"] != "macro"].groupby("method", sort=False):
        values = own["value"].dropna()
        if values.empty:
            continue
        origin = Origin(item, str(own["device"].iloc[0]), PUBLISHED_ONLY, PAGE)
        setting = f"mean of the {len(values)} printed suites"
        row = origin.row("decode_speedup", float(values.mean()), "x", benchmark="macro",
                         method=str(method), setting=setting)  # fmt: skip
        rows.append(row)
    return rows


_PROTOCOL_TOLD = ("ar_ms_per_token_low", "ar_ms_per_token_high")  # by `protocol_rows`


def setting_rows(item: str) -> list[dict[str, Any]]:
    """The rest of what the page says of its protocol and demo; a name is in the setting."""
    rows = []
    for cell in _cells("vflash_fm_protocol"):
        if cell["quantity"] in _PROTOCOL_TOLD:
            continue
        named = not cell["unit"]
        shown = {**cell, "value": ""} if named else cell
        setting = cell["value"] if named else ""
        rows.append(_published_only(item, PAGE_DEVICE, shown, method="", setting=setting))
    return rows


def device_rows(item: str) -> list[dict[str, Any]]:
    """What a device's maker prints of it."""
    return [
        _published_only(item, f"{cell['device']} (as published)", cell, method="")
        for cell in _cells("devices")
    ]


def _protocol() -> dict[str, str]:
    return {row["quantity"]: row["value"] for row in _cells("vflash_fm_protocol")}


def protocol_rows(item: str) -> list[dict[str, Any]]:
    """The page's autoregressive milliseconds per token, and its demo clips' equality with AR."""
    time, _ = demo_ar_time()
    n = time.n
    origin = Origin(item, PAGE_DEVICE, PUBLISHED_ONLY, PAGE)
    rows = [
        origin.row(
            "ar_ms_per_token",
            time,
            "ms",
            method="ar",
            setting="demo clips",
        ),
        origin.row("identical_share", 1.0, "share", n=n, method="tree60", setting="demo clips"),
    ]
    return [{**row, "status": PUBLISHED_ONLY} for row in rows]


@dataclass(frozen=True)
class DeviceFacts:
    """What a device's maker prints: bytes and operations a second, and where."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    source: str


def device_facts(name: str) -> DeviceFacts:
    """The printed rates of a device of `data/published/devices.csv`, compute dense in bfloat16.

    Raises:
        InputError: the file does not hold it.
    """
    cells = {c["quantity"]: c for c in _cells("devices") if c["device"] == name}
    if set(cells) != {"memory_bandwidth", "bfloat16_compute"}:
        raise InputError(f"devices.csv: {name}: found {sorted(cells)}, allowed: both its rates")
    memory, compute = cells["memory_bandwidth"], cells["bfloat16_compute"]
    rates = (1e12 * float(memory["value"]), 1e12 * float(compute["value"]))
    return DeviceFacts(name, *rates, memory["source"])


def demo_ar_time() -> tuple[Interval, int]:
    """The page's autoregressive milliseconds a token on its demo clips, and one's context tokens."""
    facts = _protocol()
    low, high = (float(facts[f"ar_ms_per_token_{end}"]) for end in ("low", "high"))
    found = Interval(math.nan, low, high, int(facts["demo_clips"]))
    return found, int(facts["demo_context_tokens"])


def _published_only(
    item: str,
    device: str,
    cell: dict[str, str],
    method: str,
    benchmark: str = "",
    setting: str = "",
) -> dict[str, Any]:
    """A row from a cell with the columns quantity, value, unit and source."""
    row = Origin(item, device, PUBLISHED_ONLY, cell["source"]).row(
        cell["quantity"],
        printed_number(cell["value"]),
        cell["unit"],
        benchmark=benchmark,
        method=method,
        setting=setting,
    )
    return {**row, "status": PUBLISHED_ONLY, "n": pd.NA}


def _length(cell: dict[str, str]) -> dict[str, str]:
    return {
        **cell,
        "quantity": "accepted_length",
        "value": cell["accepted_length"],
        "unit": "tokens per call",
    }


def headline_rows(item: str) -> list[dict[str, Any]]:
    """What the neighbours printed for other targets."""
    return [
        _published_only(
            item,
            OTHER_DEVICE,
            cell,
            method=_HEADLINE_KEYS.get(cell["method"], cell["method"]),
            setting=setting_text(target=cell["target"] or None, note=cell["note"] or None),
        )
        for cell in _cells("other_targets_headlines")
    ]


_TABLE5_NAMES = {"wall": "wall_s", "decode": "decode_s", "prefill": "prefill_s"}
# The quantities of SPARROW's table 5, as tidy rows name them.
BREAKDOWN = ("accepted_length", "generated_tokens", "target_calls", *_TABLE5_NAMES.values())


def length_rows(item: str) -> list[dict[str, Any]]:
    """SPARROW's tables 4 and 5: decoding by visual length."""
    rows = []
    for cell in _cells("sparrow_table4_visual_length"):
        keys = {
            "method": _SPARROW_KEYS[cell["method"]],
            "benchmark": LENGTHS_SUITE,
            "setting": setting_text(visual_tokens=cell["visual_tokens"], variant=cell["method"]),
        }
        speed = {"quantity": "decode_speedup", "value": cell["decode_speedup"], "unit": "x"}
        rows.append(_published_only(item, TABLE4_DEVICE, _length(cell), **keys))
        rows.append(_published_only(item, TABLE4_DEVICE, {**cell, **speed}, **keys))
    for cell in _cells("sparrow_table5_breakdown"):
        named = {**cell, "quantity": _TABLE5_NAMES.get(cell["quantity"], cell["quantity"])}
        setting = setting_text(visual_tokens=cell["visual_tokens"])
        rows.append(
            _published_only(
                item,
                TABLE5_DEVICE,
                named,
                method="sparrow",
                benchmark=LENGTHS_SUITE,
                setting=setting,
            )
        )
    return rows


def share_rows(item: str) -> list[dict[str, Any]]:
    """SPARROW's tables 1 and 7: the share of visual input in training and at inference."""
    return [
        _published_only(
            item,
            OTHER_DEVICE,
            _length(cell),
            method="sparrow",
            benchmark=cell["benchmark"],
            setting=setting_text(phase=phase, share=_share(cell["input"])),
        )
        for table, phase in (("1_training_input", "training"), ("7_inference_input", "inference"))
        for cell in _cells(f"sparrow_table{table}")
    ]


def _share(words: str) -> str:
    """ "12.5% visual + text" as "0.125"; "visual + text" is all of it.

    Raises:
        InputError: other words.
    """
    percent = words.removesuffix(" visual + text").removesuffix("%")
    if words == "visual + text":
        return "1"
    try:
        return f"{float(percent) / 100:g}"
    except ValueError:
        raise InputError(
            f'published input {words!r}, allowed: "visual + text", a share before it'
        ) from None


def sparrow_rows(item: str) -> list[dict[str, Any]]:
    """SPARROW's tables: by visual length (4, 5), by visual input (1, 7) and components (6)."""
    rows = length_rows(item)
    for cell in _cells("sparrow_table6_components"):
        names = ("visual_tokens", "mtp", "ivsb", "vata")
        rows.append(
            _published_only(
                item,
                OTHER_DEVICE,
                _length(cell),
                method="sparrow",
                benchmark=_BENCHMARK_NAMES.get(cell["benchmark"], cell["benchmark"]),
                setting=setting_text(**{name: cell[name] for name in names}),
            )
        )
    return rows + share_rows(item)
