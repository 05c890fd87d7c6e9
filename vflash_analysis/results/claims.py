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
from vflash_analysis.strict import read_text

BLOCKS = ("claims", "checks")


def block(name: str) -> tuple[str, str]:
    """The README's lines before and after the block of a name."""
    return f"<!-- {name}: written by `make publish` -->", f"<!-- end of {name} -->"


def _row(name: str, rows: pd.DataFrame) -> str:
    cells = {str(row["benchmark"]): cell_text(row).split(" (n ")[0] for _, row in rows.iterrows()}
    return f"| {name} | {' | '.join(cells.get(b, NO_VALUE) for b in BENCHMARK_ORDER)} |"


def _gate_lines(gates: pd.DataFrame) -> list[str]:
    lines = ["| gate | found | allowed | n | |", "|---|---|---|---|---|"]
    for gate in gates.itertuples():
        held = "holds" if gate.passed else "**does not hold**"
        lines.append(f"| {gate.gate} | {gate.value:.3f} | {gate.allowed} | {gate.n} | {held} |")
    return lines


def _measured(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Our rows of T1, and of these the speed-ups of chain and Tree-60.

    Raises:
        InputError: there is no such speed-up, or those of several devices.
    """
    published = frame["device"].str.endswith("(as published)")
    ours = frame.loc[~published & (frame["status"] != MISSING)]
    speed = ours.loc[(ours["quantity"] == "decode_speedup") & ours["method"].isin(VFLASH_METHODS)]
    devices = set(speed["device"])
    if len(devices) != 1:
        raise InputError(f"claims: found speed-ups of {len(devices)} devices, one is needed")
    return ours, speed


def claims(frame: pd.DataFrame) -> str:
    """Markdown of T1's speed-ups beside the published ones, with device and n.

    Args:
        frame: T1's tidy frame, of decodes on one device.

    Raises:
        InputError: it holds no speed-up of ours, or those of several devices.
    """
    _, speed = _measured(frame)
    lines = [
        f"| | {' | '.join(BENCHMARK_ORDER)} |",
        "|---" * (1 + len(BENCHMARK_ORDER)) + "|",
    ]
    for method in VFLASH_METHODS[::-1]:
        for arm in (FLOW_ARM, BASE_ARM):
            own = speed.loc[(speed["method"] == method) & (speed["objective"] == arm)]
            if not own.empty:
                lines.append(_row(f"pocket, {label(method)}, {label(arm)}", own))
    page = frame.loc[(frame["device"] == PAGE_DEVICE) & (frame["quantity"] == "decode_speedup")]
    for method in VFLASH_METHODS[::-1]:
        own = page.loc[page["method"] == method]
        lines.append(_row(f"LLaVA-OneVision-7B, {label(method)}, as published on one H100", own))
    per_suite = sorted(set(speed.loc[speed["benchmark"] != "macro", "n"].astype(int)))
    total = int(speed.loc[speed["benchmark"] == "macro", "n"].max())
    told = (
        f"Pocket rows: {speed['device'].iloc[0]}, n = {' to '.join(map(str, per_suite))} clips a "
        f"suite, {total} in all; brackets are 95 % bootstrap intervals over videos."
    )
    return "\n".join([*lines, "", told])


def checks(frame: pd.DataFrame, gates: pd.DataFrame) -> str:
    """Markdown of what shows that the claims mean anything: the baseline's times and the gates.

    Args:
        frame: T1's tidy frame, of decodes on one device.
        gates: what the target can tell of a clip and how hard its texts are to draft: columns
            gate, value, allowed, n, passed.

    Raises:
        InputError: the frame holds no speed-up of ours, or those of several devices.
    """
    ours, _ = _measured(frame)
    macro = {
        (row["quantity"], row["method"], row["objective"]): float(row["value"])
        for _, row in ours.loc[ours["benchmark"] == "macro"].iterrows()
    }
    told = (
        f"Autoregressive decoding takes {macro['ar_ms_per_token', 'ar', '']:.2f} ms a token (macro)"
    )
    for quantity, method, arm, words in (
        ("ar_vs_generate", "ar", "", "Hugging Face's `generate` takes {} as long as it"),
        ("chain_vs_hf_dflash", "chain", FLOW_ARM, "its own block-draft loop {} as long as our "
         "chain on the same drafter"),
    ):  # fmt: skip
        if (quantity, method, arm) in macro:
            factor = value_text(macro[quantity, method, arm], "x")
            told += "; " + words.format(factor)
    shares = [
        f"{100 * macro['decode_speedup', method, FLOW_ARM] / predicted:.0f} % ({label(method)})"
        for method in VFLASH_METHODS[::-1]
        if (predicted := macro.get(("predicted_speedup", method, FLOW_ARM)))
    ]
    told += (
        ". The speed-up is this share of what accepted length and cycle time give, so the parts "
        f"add up: {', '.join(shares)}."
    )
    return "\n".join([told, "", *_gate_lines(gates)])


def readme_blocks(frame: pd.DataFrame, gates: pd.DataFrame) -> dict[str, str]:
    """What the README's blocks say, by their names; errors as in `claims`."""
    return dict(zip(BLOCKS, (claims(frame), checks(frame, gates)), strict=True))


def check_readme(readme: Path) -> str:
    """The README's text, whose blocks can be replaced.

    Raises:
        InputError: it is not UTF-8, or lacks a block's first or last line, or has one twice, or
            one block within another.
    """
    text = read_text(readme, readme.name)
    lines = [line for name in BLOCKS for line in block(name)]
    places = [text.find(line) for line in lines]
    if any(text.count(line) != 1 for line in lines) or places != sorted(places):
        told = ", ".join(lines)
        raise InputError(f"{readme.name}: found not these lines, each once, in this order: {told}")
    return text


def write_claims(readme: Path, frame: pd.DataFrame, gates: pd.DataFrame) -> Path:
    """Replace the README's blocks; errors as in `claims` and `check_readme`."""
    text = check_readme(readme)
    for name, told in readme_blocks(frame, gates).items():
        start, end = block(name)
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{told}\n{end}{rest.partition(end)[2]}"
    write_text_atomic(readme, text)
    return readme
