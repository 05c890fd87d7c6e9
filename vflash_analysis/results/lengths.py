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
from vflash_analysis.results.tables import (
    baseline,
    cycles_of,
    over_words,
    overall,
    planned_suites,
)
from vflash_analysis.results.tidy import (
    MISSING,
    TARGET_FAILS,
    Origin,
    label,
    parse_setting,
    setting_text,
    setting_words,
    tidy,
)
from vflash_analysis.results.write import Section, Table, cell_text, pivot, places, titled
from vflash_analysis.schemas import COMPILED, LENGTHS_STUDY, VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap

ITEM = "T5_visual_length"
NO_VIDEO = "context=text_only"  # the setting of a draft that reads no visual position
Row = dict[str, Any]


def at_lengths(study: Records) -> Iterator[tuple[int, Records]]:
    """The study's records of each number of frames, fewest first."""
    rows = study.generations
    for count in sorted(set(rows["frames_requested"].dropna().astype(int))):
        yield count, replace(study, generations=rows.loc[rows["frames_requested"] == count])


def _mean_parts(rows: pd.DataFrame, values: pd.Series) -> pd.DataFrame:
    """Parts of the mean of `values` over decodes; `ratio`."""
    keys = [key for key in ("benchmark", "video", "clip_id", "sample_seed") if key in rows.columns]
    return rows[keys].assign(p0=values.astype(float).to_numpy(), p1=1.0).dropna(subset=["p0"])


def gate_parts(records: Records, group: DecodeGroup, frames: int) -> dict[str, pd.DataFrame]:
    """Parts of the target's gates at one length on one device, by quantity; `ratio`.

    static_accuracy and dynamic_accuracy: words right / words that tell attributes, or motion and
    events, as measured there; none on clips without a reference. ended_share: texts of plain
    decoding that the stop token ended / all.

    Args:
        records: the study's.
        group: decodes at that length.
        frames: their number.

    Raises:
        InputError: measures of several targets, or an infinite number.
    """
    told = metrics.usable_measures(records.measures)
    here = (told["device"] == group.device.removesuffix(COMPILED)) & (told["dtype"] == group.dtype)
    told = told.loc[here & (told["setting"] == f"frames={frames}")]
    parts = {str(name): metrics.measure_parts(own) for name, own in told.groupby("quantity")}
    plain = _decoded(group, "ar", "")
    ended = (plain["stop_reason"] == "eos").astype(float)
    return {**parts, "ended_share": _mean_parts(plain, ended)}


def target_fails(parts: dict[str, pd.DataFrame]) -> bool:
    """Whether one of the target's gates fails, over the words or texts of all clips as where its
    weights are judged; a gate without data, on real clips, does not."""
    found = {name: metrics.value_of(own, ratio) for name, own in parts.items()}
    return any(
        found[name] < limit for name, limit in metrics.TARGET_LIMITS.items() if name in found
    )


def failing_lengths(study: Records) -> set[tuple[str, int]]:
    """Machine, as rows name it, and number of frames where the target fails."""
    return {
        (group.origin(ITEM, part).device, frames)
        for frames, part in at_lengths(study)
        for group in decode_groups(part)
        if target_fails(gate_parts(study, group, frames))
    }


def _decoded(group: DecodeGroup, method: str, setting: str) -> pd.DataFrame:
    rows = group.rows
    return rows.loc[(rows["method"] == method) & (rows["setting"] == setting)]


def _wanted(
    group: DecodeGroup, method: str, setting: str
) -> list[tuple[str, str, pd.DataFrame, Combine]]:
    """(quantity, unit, parts, formula) of one method at one length."""
    rows = _decoded(group, method, setting)
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
    pairs = metrics.pair_clips(baseline(group.rows, rows), rows)
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


def _visual_tokens(rows: pd.DataFrame) -> int | None:
    """Mean over the clips that were decoded, None where none was."""
    clips = rows.drop_duplicates(["benchmark", "clip_id"])["video_tokens"].dropna()
    return None if clips.empty else round(float(clips.mean()))


def _rows_at(frames: int, records: Records, study: Records, boot: Bootstrap) -> list[Row]:
    """Rows of one length; of what was tried there and gave nothing, missing ones."""
    suites = planned_suites(study)
    rows: list[Row] = []
    for group in decode_groups(records):
        origin = group.origin(ITEM, records)
        tokens = _visual_tokens(group.rows)
        place = partial(setting_text, frames=frames, visual_tokens=tokens)
        gates = gate_parts(study, group, frames)
        own: list[Row] = []
        for quantity, parts in gates.items():
            suite, value = overall(parts, ratio, boot, suites, pooled=True)
            n = count_clips(parts)
            own.append(origin.row(quantity, value, "share", n, suite, "ar", setting=place()))
        for method, setting in _tried(records, group):
            for quantity, unit, parts, combine in _wanted(group, method, setting):
                suite, value = overall(parts, combine, boot, suites)
                text = ";".join(filter(None, (place(), setting.replace(",", ";"))))
                n = count_clips(parts)
                own.append(origin.row(quantity, value, unit, n, suite, method, setting=text))
        if target_fails(gates):
            own = [r if r["status"] == MISSING else r | {"status": TARGET_FAILS} for r in own]
        rows += own
    return rows


def _tried(records: Records, group: DecodeGroup) -> list[tuple[str, str]]:
    """(method, setting) of every decode of a group, failed ones included."""
    rows = records.generations
    here = (rows["device"] == group.device) & (rows["dtype"] == group.dtype)
    rows = rows.loc[here & ~rows["warmup"].astype(bool)]
    return list(dict.fromkeys(zip(rows["method"], rows["setting"], strict=True)))


def length_rows(records: Records, boot: Bootstrap) -> list[Row]:
    """T5's rows of ours, by number of frames, method and setting, over all suites (`overall`).

    accepted_length: tau = sum(new_tokens - 1) / sum(verify_calls), tokens per verify call.
    decode_speedup, end_to_end_speedup: AR seconds per token / the method's, of decoding, or with
    frame reading, vision and prefill. draft_ms, verify_ms: means over cycles. wall_s = frame
    reading + vision + prefill + decoding, decode_s, prefill_s = wall_s - decode_s, generated_tokens,
    target_calls: means over texts. ar_ms_per_token = 1000 sum(decode_s) / sum(new_tokens - 1).
    The gates: see `gate_parts`. n counts clips.

    `setting` is the number of frames, the mean visual tokens of a prompt (left out where no clip
    was decoded) and the decode's own setting.

    Args:
        records: the run's, with its studies.
        boot: for intervals.

    Returns:
        Missing rows where a suite that was tried, or AR for a speed-up, gave nothing; where the
        study was not measured, one for each of the paper's methods.

    Raises:
        InputError: decodes or measures that must not be pooled.
    """
    study = records.study(LENGTHS_STUDY)
    rows = [
        row for frames, part in at_lengths(study) for row in _rows_at(frames, part, study, boot)
    ]
    if rows:
        return rows
    origin = Origin(ITEM, "", MISSING, study.source)
    return [
        origin.row("accepted_length", float("nan"), "tokens", benchmark="macro", method=method)
        for method in VFLASH_METHODS
    ]


def own_setting(setting: str) -> str:
    """What a row's `setting` says beside its length: that of the decode, or a printed name."""
    words = [word for word in setting.split(";") if word]
    length = ("frames", "visual_tokens")
    return ";".join(word for word in words if word.partition("=")[0] not in length)


def variant_words(own: str) -> str:
    """An `own_setting` as a reader sees it."""
    words = own.split(";") if own else []
    return ", ".join(
        "drafter without video" if word == NO_VIDEO else setting_words(word) for word in words
    )


def undecoded_words(frame: pd.DataFrame) -> str:
    """The sentence that names the numbers of frames at which no clip was decoded, "" for none."""
    keys = [parse_setting(text) for text in frame["setting"]]
    found = {int(key["frames"]) for key in keys if "frames" in key and "visual_tokens" not in key}
    told = ", ".join(map(str, sorted(found)))
    return f"No clip could be decoded at these numbers of frames: {told}. " if told else ""


def _sections(frame: pd.DataFrame) -> tuple[Section, ...]:
    """One grid per quantity, visual tokens across; `frame` as `places` gives it."""
    frame = frame.assign(
        tokens=[parse_setting(text).get("visual_tokens", "") for text in frame["setting"]],
        variant=[variant_words(own_setting(text)) for text in frame["setting"]],
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


def _marked(row: pd.Series) -> str:
    return cell_text(row) + (" †" if row["status"] == TARGET_FAILS else "")


def length_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T5: accepted length, speed-ups and seconds by visual length, with SPARROW's tables 4 and 5."""
    frame = tidy([*length_rows(records, boot), *published.length_rows(ITEM)])
    lettered, where = places(frame)
    over = over_words(planned_suites(records.study(LENGTHS_STUDY)))
    limits = ", ".join(f"{label(q)} {100 * v:.0f} %" for q, v in metrics.TARGET_LIMITS.items())
    caption = (
        f"{records.not_measured(LENGTHS_STUDY)} Decoding by visual tokens of the prompt; each clip "
        "is decoded at every length, by a drafter trained on texts about clips of all these lengths. "
        f"Ours: {over}, but what the target tells: all its clips' words or texts alike; n: clips. "
        f"{undecoded_words(frame)}"
        f"† the target fails there: one of its gates is below its limit ({limits}), so what is "
        "accepted there means little. Seconds are of a text: wall is frame reading, vision, prefill "
        "and decoding, prefill all but decoding. Published rows are SPARROW's tables 4 and 5, other "
        f"targets and hardware. {boot.caption()} {where}"
    )
    return Table(ITEM, "T5 Decoding by visual length", caption.strip(), frame, _sections(lettered))
