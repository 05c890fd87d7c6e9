"""The README's claim table, written from T1's tidy frame so that it cannot differ from the records."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from vflash_analysis.errors import InputError
from vflash_analysis.records import write_text_atomic
from vflash_analysis.results.objectives import BASE_ARM, FLOW_ARM
from vflash_analysis.results.published import PAGE_DEVICE
from vflash_analysis.results.tidy import BENCHMARK_ORDER, MISSING, label
from vflash_analysis.results.write import NO_VALUE, cell_text, value_text
from vflash_analysis.schemas import VFLASH_METHODS

START, END = "<!-- claims: written by `make publish` -->", "<!-- end of claims -->"


def _row(name: str, rows: pd.DataFrame) -> str:
    cells = {str(row["benchmark"]): cell_text(row).split(" (n ")[0] for _, row in rows.iterrows()}
    return f"| {name} | {' | '.join(cells.get(b, NO_VALUE) for b in BENCHMARK_ORDER)} |"


def _gate_lines(gates: pd.DataFrame) -> list[str]:
    lines = ["| gate | found | allowed | n | |", "|---|---|---|---|---|"]
    for gate in gates.itertuples():
        held = "holds" if gate.passed else "**does not hold**"
        lines.append(f"| {gate.gate} | {gate.value:.3f} | {gate.allowed} | {gate.n} | {held} |")
    return lines


def claims(frame: pd.DataFrame, gates: pd.DataFrame) -> str:
    """Markdown of T1's speed-ups beside the published ones, with device, n and the checks.

    Args:
        frame: T1's tidy frame, of decodes on one device.
        gates: what the target can tell of a clip and how hard its texts are to draft: columns
            gate, value, allowed, n, passed.

    Raises:
        InputError: it holds no speed-up of ours, or those of several devices.
    """
    published = frame["device"].str.endswith("(as published)")
    ours = frame.loc[~published & (frame["status"] != MISSING)]
    speed = ours.loc[(ours["quantity"] == "decode_speedup") & ours["method"].isin(VFLASH_METHODS)]
    devices = sorted(set(speed["device"]))
    if len(devices) != 1:
        raise InputError(f"claims: found speed-ups of {len(devices)} devices, one is needed")
    macro = {
        (row["quantity"], row["method"], row["objective"]): float(row["value"])
        for _, row in ours.loc[ours["benchmark"] == "macro"].iterrows()
    }
    lines = [
        f"| | {' | '.join(BENCHMARK_ORDER)} |",
        "|---" * (1 + len(BENCHMARK_ORDER)) + "|",
    ]
    checks = []
    for method in VFLASH_METHODS[::-1]:
        for arm in (FLOW_ARM, BASE_ARM):
            own = speed.loc[(speed["method"] == method) & (speed["objective"] == arm)]
            if own.empty:
                continue
            lines.append(_row(f"pocket, {label(method)}, {label(arm)}", own))
            value, predicted = (
                macro[quantity, method, arm] for quantity in ("decode_speedup", "predicted_speedup")
            )
            if arm == FLOW_ARM:
                checks.append(f"{100 * value / predicted:.0f} % ({label(method)})")
    page = frame.loc[(frame["device"] == PAGE_DEVICE) & (frame["quantity"] == "decode_speedup")]
    for method in VFLASH_METHODS[::-1]:
        own = page.loc[page["method"] == method]
        lines.append(_row(f"LLaVA-OneVision-7B, {label(method)}, as published on one H100", own))
    per_suite = sorted(set(speed.loc[speed["benchmark"] != "macro", "n"].astype(int)))
    total = int(speed.loc[speed["benchmark"] == "macro", "n"].max())
    ar = macro["ar_ms_per_token", "ar", ""]
    told = (
        f"Pocket rows: {devices[0]}, n = {' to '.join(map(str, per_suite))} clips a suite, {total} "
        f"in all; brackets are 95 % bootstrap intervals over videos. Autoregressive decoding takes "
        f"{ar:.2f} ms a token (macro)"
    )
    for quantity, method, arm, words in (
        ("ar_vs_generate", "ar", "", "Hugging Face's `generate` takes {} as long as it"),
        ("chain_vs_hf_dflash", "chain", FLOW_ARM, "its own block-draft loop {} as long as our "
         "chain on the same drafter"),
    ):  # fmt: skip
        if (quantity, method, arm) in macro:
            factor = value_text(macro[quantity, method, arm], "x")
            told += "; " + words.format(factor)
    told += f". Measured speed-up over the predicted one: {', '.join(checks)}."
    return "\n".join([*lines, "", told, "", *_gate_lines(gates)])


def readme_parts(readme: Path) -> tuple[str, str]:
    """What stands before START and after END in the README.

    Raises:
        InputError: it lacks one of the two lines.
    """
    before, start, rest = readme.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise InputError(f"{readme.name}: found no lines {START} and {END}")
    return before, after


def write_claims(readme: Path, frame: pd.DataFrame, gates: pd.DataFrame) -> Path:
    """Replace what stands between START and END in the README; errors as in `readme_parts`."""
    before, after = readme_parts(readme)
    write_text_atomic(readme, f"{before}{START}\n{claims(frame, gates)}\n{END}{after}")
    return readme
