"""T5: decoding at several numbers of frames, beside what SPARROW prints by visual length.

A length counts only while the target still reads its clips: where its own gates fail there, the
rows of that length say `target fails`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from vflash_analysis import metrics
from vflash_analysis.metrics import Combine, ratio, ratio_of_ratios
from vflash_analysis.results import published
from vflash_analysis.results.sources import (
    DecodeGroup,
    Records,
    count_clips,
    decode_groups,
)
from vflash_analysis.results.tables import baseline, cycles_of, overall
from vflash_analysis.results.tidy import (
    MISSING,
    TARGET_FAILS,
    Origin,
    label,
    parse_setting,
    setting_text,
    tidy,
)
from vflash_analysis.results.write import Section, Table, cell_text, pivot, places, titled
from vflash_analysis.schemas import VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap

ITEM = "T5_visual_length"
STUDY = "lengths"
SECONDS = ("wall_s", "decode_s", "prefill_s")  # of a text, as SPARROW's table 5 splits it
Row = dict[str, Any]


def at_lengths(study: Records) -> Iterator[tuple[int, Records]]:
    """The study's records of each number of frames, fewest first."""
    rows = study.generations
    for count in sorted(set(rows["frames_requested"].dropna().astype(int))):
        yield count, replace(study, generations=rows.loc[rows["frames_requested"] == count])


def failed_lengths(study: Records) -> dict[int, str]:
    """Numbers of frames at which no clip could be decoded, each with the first clip's reason."""
    found = {}
    for frames, part in at_lengths(study):
        rows = part.generations.loc[~part.generations["warmup"].astype(bool)]
        if (rows["status"] != "ok").all():
            found[frames] = str(rows["reason"].iloc[0])
    return found


def _missing_rows(study: Records, frames: int | None = None) -> list[Row]:
    """The paper's methods without a number."""
    origin = Origin(ITEM, "", MISSING, study.source)
    return [
        origin.row(
            "accepted_length", float("nan"), "tokens", benchmark="macro", method=method,
            setting=setting_text(frames=frames),
        )
        for method in VFLASH_METHODS
    ]  # fmt: skip


def _mean_parts(rows: pd.DataFrame, values: pd.Series) -> pd.DataFrame:
    """Parts of the mean of `values` over decodes; `ratio`."""
    keys = [key for key in ("benchmark", "video", "clip_id", "sample_seed") if key in rows.columns]
    return rows[keys].assign(p0=values.astype(float).to_numpy(), p1=1.0).dropna(subset=["p0"])


def gate_parts(records: Records, rows: pd.DataFrame, frames: int) -> dict[str, pd.DataFrame]:
    """Parts of the target's gates at one length, by quantity; `ratio`.

    Args:
        records: the study's.
        rows: plain decodes at that length.
        frames: their number.
    """
    told = records.measures.loc[records.measures["setting"] == f"frames={frames}"]
    told = told.assign(video=told["clip_id"])
    parts = {
        str(quantity): own.assign(p0=own["total"], p1=own["count"])
        for quantity, own in told.groupby("quantity")
    }
    ended = (rows["stop_reason"] == "eos").astype(float)
    return {**parts, "ended_share": _mean_parts(rows, ended)}


def target_fails(parts: dict[str, pd.DataFrame]) -> bool:
    """Whether one of the target's gates fails; a gate without data, on real clips, does not."""
    found = {name: metrics.value_of(own, ratio) for name, own in parts.items()}
    return any(
        found[name] < limit for name, limit in metrics.TARGET_LIMITS.items() if name in found
    )


def _wanted(
    group: DecodeGroup, method: str, setting: str
) -> list[tuple[str, str, pd.DataFrame, Combine]]:
    """(quantity, unit, parts, formula) of one method at one length."""
    own = group.rows
    rows = own.loc[(own["method"] == method) & (own["setting"] == setting)]
    total = metrics.end_to_end_s(rows)
    times = [
        ("wall_s", total),
        ("decode_s", rows["decode_s"]),
        ("prefill_s", total - rows["decode_s"]),
    ]
    wanted: list[tuple[str, str, pd.DataFrame, Combine]] = [
        (quantity, "s", _mean_parts(rows, values), ratio) for quantity, values in times
    ]
    wanted.append(("generated_tokens", "tokens", _mean_parts(rows, rows["new_tokens"]), ratio))
    if method == "ar":
        return [("ar_ms_per_token", "ms", metrics.ms_per_token_parts(rows), ratio), *wanted]
    pairs = metrics.pair_clips(baseline(own, rows), rows)
    cycles = cycles_of(group, rows)
    return [
        ("accepted_length", "tokens", metrics.accepted_length_parts(rows), ratio),
        ("decode_speedup", "x", metrics.decode_speedup_parts(pairs), ratio_of_ratios),
        ("end_to_end_speedup", "x", metrics.end_to_end_speedup_parts(pairs), ratio_of_ratios),
        ("draft_ms", "ms", metrics.cycle_ms_parts(cycles, "draft_s"), ratio),
        ("verify_ms", "ms", metrics.cycle_ms_parts(cycles, "verify_s"), ratio),
        ("target_calls", "calls", _mean_parts(rows, rows["verify_calls"]), ratio),
        *wanted,
    ]


def _rows_at(frames: int, records: Records, study: Records, boot: Bootstrap) -> list[Row]:
    rows: list[Row] = []
    for group in decode_groups(records):
        origin = group.origin(ITEM, records)
        plain = group.rows.loc[(group.rows["method"] == "ar") & (group.rows["setting"] == "")]
        tokens = round(float(group.rows["video_tokens"].mean()))
        place = partial(setting_text, frames=frames, visual_tokens=tokens)
        gates = gate_parts(study, plain, frames)
        own: list[Row] = []
        for quantity, parts in gates.items():
            suite, value = overall(parts, ratio, boot)
            n = count_clips(parts)
            own.append(origin.row(quantity, value, "share", n, suite, "ar", setting=place()))
        for method, setting in dict.fromkeys(
            zip(group.rows["method"], group.rows["setting"], strict=True)
        ):
            for quantity, unit, parts, combine in _wanted(group, method, setting):
                suite, value = overall(parts, combine, boot)
                text = ";".join(filter(None, (place(), setting)))
                n = count_clips(parts)
                own.append(origin.row(quantity, value, unit, n, suite, method, setting=text))
        if target_fails(gates):
            own = [row | {"status": TARGET_FAILS} for row in own if row["status"] != MISSING]
        rows += own
    return rows


def length_rows(records: Records, boot: Bootstrap) -> list[Row]:
    """Ours by number of frames; missing rows for the paper's methods where nothing was decoded."""
    study = records.study(STUDY)
    failed = failed_lengths(study)
    rows: list[Row] = []
    for frames, part in at_lengths(study):
        if frames in failed:
            rows += _missing_rows(study, frames)
        else:
            rows += _rows_at(frames, part, study, boot)
    return rows or _missing_rows(study)


def _sections(frame: pd.DataFrame) -> tuple[Section, ...]:
    """One grid per quantity, visual tokens across; `frame` as `places` gives it."""
    keys = [parse_setting(text) for text in frame["setting"]]
    frame = frame.assign(
        tokens=[key.get("visual_tokens", "") for key in keys],
        variant=[key.get("variant", _context_of(key)) for key in keys],
    )
    names = [("method", "method"), ("variant", "variant"), ("where", "where")]
    lengths = sorted({t for t in frame["tokens"] if t}, key=int)
    sections = []
    for quantity in dict.fromkeys(frame["quantity"]):
        own = frame.loc[(frame["quantity"] == quantity) & (frame["tokens"] != "")]
        if own.empty:
            continue
        here = [t for t in lengths if t in set(own["tokens"])]
        grid = pivot(own, titled(own), names, "tokens", here, _marked)
        sections.append(replace(grid, header=(*grid.header[:3], *(f"{int(t):,}" for t in here))))
    return tuple(sections)


def _context_of(key: dict[str, str]) -> str:
    """What of the video a draft read, where it is not all."""
    return {"": "", "text_only": "drafter without video"}.get(key.get("context", ""), "")


def _marked(row: pd.Series) -> str:
    return cell_text(row) + (" †" if row["status"] == TARGET_FAILS else "")


def length_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T5: accepted length, speed-ups and seconds by visual length, with SPARROW's tables 4 and 5."""
    frame = tidy([*length_rows(records, boot), *published.length_rows(ITEM)])
    lettered, where = places(frame)
    failed = [
        f"{frames} frames ({reason.rstrip('.')})"
        for frames, reason in failed_lengths(records.study(STUDY)).items()
    ]
    nothing = f"No clip could be decoded at {', '.join(failed)}. " if failed else ""
    limits = ", ".join(f"{label(q)} {100 * v:.0f} %" for q, v in metrics.TARGET_LIMITS.items())
    caption = (
        f"{records.not_measured(STUDY)} Decoding by visual tokens of the prompt; each clip is "
        "decoded at every length, by a drafter trained on texts about clips of all these lengths. "
        f"{nothing}Ours: mean over suites; n: clips. "
        f"† the target fails there: one of its gates is below its limit ({limits}), so what is "
        "accepted there means little. Seconds are of a text: wall is frame reading, vision, prefill "
        "and decoding, prefill all but decoding. Published rows are SPARROW's tables 4 and 5, other "
        f"targets and hardware. {boot.caption()} {where}"
    )
    return Table(ITEM, "T5 Decoding by visual length", caption.strip(), frame, _sections(lettered))
