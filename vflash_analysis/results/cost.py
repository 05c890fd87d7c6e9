"""T10, which F9 draws: what forwards cost, and what follows for the speed-up.

With the milliseconds of an autoregressive step, of a draft and of a verify at one context length,
a cycle takes draft + verify, a method breaks even where it commits cycle / AR tokens a cycle, and
committing tau tokens a cycle is tau AR / cycle times as fast (`metrics`). The limit of a forward is
the bytes it cannot do without (`sizes`) over the device's copy bandwidth, bytes read and written
counted alike; what stays in a processor's caches can beat it.

Three kinds of rows, told apart by `status`: measured by this run or stored with it; stored in
`data/measured`, of other shapes and machines; and modelled, the 7B at the rates that the maker of
one H100 prints, of which nothing was run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from vflash_analysis import metrics, paths, shapes, sizes
from vflash_analysis.config import CostSettings, DrafterSettings
from vflash_analysis.metrics import grouped, ratio, value_of
from vflash_analysis.records import read_records_csv
from vflash_analysis.results import published
from vflash_analysis.results.objectives import FLOW_ARM
from vflash_analysis.results.sources import (
    DecodeGroup,
    Records,
    decode_groups,
    method_rows,
)
from vflash_analysis.results.tidy import (
    MISSING,
    MODELLED,
    PUBLISHED_ONLY,
    STORED,
    Origin,
    label,
    parse_setting,
    setting_text,
    tidy,
)
from vflash_analysis.results.write import (
    NO_VALUE,
    Section,
    Table,
    pivot,
    places,
    titled,
    value_text,
)
from vflash_analysis.schemas import (
    BLOCK_SIZE,
    COPY,
    COSTS,
    FORWARDS,
    HUGGING_FACE,
    NEW_CONTEXT,
    OURS,
    VERIFY_ROWS,
    VFLASH_METHODS,
)
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap, Interval

T10 = "T10_cost_model"
LIMIT, PAGE = "limit", "page"  # `by`, beside OURS and HUGGING_FACE: whose forward it is
MODELLED_DEVICE = "H100 SXM"
MODELLED_SHAPE = "llava-onevision-7b"
_ROWS = {"ar": 1, "verify_chain": BLOCK_SIZE, "verify_tree60": VERIFY_ROWS}
_BY = {OURS: "ours", HUGGING_FACE: "HF SDPA", LIMIT: "modelled", PAGE: "the page"}
_NONE = math.nan
Row = dict[str, Any]


@dataclass(frozen=True)
class Taus:
    """Accepted lengths by method, and the profile whose decodes they are of."""

    of: str = ""
    by_method: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CostGroup:
    """Costs of one shape on one machine.

    Attributes:
        shape, device, dtype: of the rows.
        frame: COSTS rows.
        origin: device, standing and source, as tidy rows name them.
    """

    shape: str
    device: str
    dtype: str
    frame: pd.DataFrame
    origin: Origin


def cost_groups(records: Records) -> list[CostGroup]:
    """The run's costs, then those of `data/measured`; two machines are two groups.

    Raises:
        InputError: a file of `data/measured` that is not readable as COSTS.
    """
    found = own_groups(records)
    for path in sorted(paths.MEASURED.glob("*.csv")):
        frame = read_records_csv(path, COSTS)
        found += _groups_of(frame, STORED, paths.relative_to_root(path))
    return found


def own_groups(records: Records) -> list[CostGroup]:
    """The costs of the records alone."""
    return list(_groups_of(records.costs, records.status, records.source))


def _groups_of(frame: pd.DataFrame, status: str, source: str) -> Iterator[CostGroup]:
    for key, own in grouped(frame, ["shape", "device", "dtype"]):
        shape, device, dtype = map(str, key)
        origin = Origin(T10, f"{device}, {dtype}", status, source)
        yield CostGroup(shape, device, dtype, own, origin)


def seconds_at(group: CostGroup, forward: str, context: float) -> float:
    """Seconds of one of our forwards after `context` tokens.

    Interpolated between the measured lengths; nan outside them, and where none is.
    """
    own = group.frame.loc[
        (group.frame["implementation"] == OURS)
        & (group.frame["forward"] == forward)
        & group.frame["seconds"].notna()
    ].sort_values("context_tokens")
    if own.empty:
        return _NONE
    lengths, seconds = (own[c].to_numpy(dtype=float) for c in ("context_tokens", "seconds"))
    return float(np.interp(context, lengths, seconds, left=_NONE, right=_NONE))


def decoded_taus(group: DecodeGroup, records: Records) -> Taus:
    """Accepted length of chain and Tree-60 over all suites, of flow drafters where there are some."""
    found = {}
    for method in VFLASH_METHODS:
        rows = method_rows(group, records, method, FLOW_ARM)
        rows = method_rows(group, records, method) if rows.empty else rows
        if not rows.empty:
            found[method] = value_of(metrics.accepted_length_parts(rows), ratio)
    return Taus(", ".join(sorted(set(group.rows["profile"]))), found)


def _forward_rows(group: CostGroup) -> list[Row]:
    """Times, limits and memory of every forward, and the copy bandwidth."""
    rows: list[Row] = []
    copies = group.frame.loc[group.frame["forward"] == COPY]
    bytes_per_s = _NONE
    for _, copy in copies.iterrows():
        bytes_per_s = float(copy["read_bytes"]) / float(copy["seconds"])
        setting = setting_text(shape=group.shape)
        n = int(copy["repeats"])
        rows.append(
            group.origin.row("copy_bandwidth", bytes_per_s / 1e9, "GB/s", n, setting=setting)
        )
    for _, one in group.frame.loc[group.frame["forward"] != COPY].iterrows():
        setting = setting_text(
            shape=group.shape, context=one["context_tokens"], forward=one["forward"],
            by=one["implementation"],
        )  # fmt: skip
        middle, low, high = (
            1000 * float(one[name]) if pd.notna(one[name]) else _NONE
            for name in ("seconds", "seconds_low", "seconds_high")
        )
        time = Interval(middle, low, high, int(one["repeats"]))
        limit = 1000 * float(one["read_bytes"]) / bytes_per_s
        rows.append(group.origin.row("forward_ms", time, "ms", setting=setting))
        if one["implementation"] == OURS:
            rows.append(group.origin.row("limit_ms", limit, "ms", setting=setting))
            rows.append(group.origin.row("limit_share", limit / middle, "share", setting=setting))
        peak = float(one["peak_bytes"]) if pd.notna(one["peak_bytes"]) else _NONE
        rows.append(group.origin.row("peak_bytes", peak, "B", setting=setting))
    return rows


def _method_rows(
    origin: Origin, shape: str, context: int, ar_s: float, cycles_s: dict[str, float], taus: Taus
) -> list[Row]:
    """Cycle, break-even and speed-up of chain and Tree-60 at one context length."""
    rows = []
    for method, cycle_s in cycles_s.items():
        setting = setting_text(shape=shape, context=context)
        even = metrics.breakeven_tau(ar_s, cycle_s)
        rows.append(origin.row("cycle_ms", 1000 * cycle_s, "ms", method=method, setting=setting))
        rows.append(origin.row("breakeven_tau", even, "tokens", method=method, setting=setting))
        if method in taus.by_method:
            tau = taus.by_method[method]
            speedup = metrics.speedup_at_tau(tau, ar_s, cycle_s)
            setting = setting_text(shape=shape, context=context, tau=f"{tau:.2f}", tau_of=taus.of)
            rows.append(
                origin.row("modelled_speedup", speedup, "x", method=method, setting=setting)
            )
    return rows


def _measured_method_rows(group: CostGroup, taus: Taus) -> list[Row]:
    rows = []
    lengths = group.frame.loc[group.frame["forward"] == "ar", "context_tokens"]
    for context in sorted({int(length) for length in lengths}):
        cycles_s = {
            method: seconds_at(group, f"draft_{method}", context)
            + seconds_at(group, f"verify_{method}", context)
            for method in VFLASH_METHODS
        }
        ar_s = seconds_at(group, "ar", context)
        rows += _method_rows(group.origin, group.shape, context, ar_s, cycles_s, taus)
    return rows


def modelled_rows(taus: Taus) -> list[Row]:
    """The 7B in bfloat16 at an H100's printed rates: the slower of reading and computing.

    A forward takes max(bytes / bandwidth, operations / rate) (`sizes.Work.seconds`), which no
    implementation can beat and none reaches.
    """
    facts = published.device_facts(MODELLED_DEVICE)
    target = shapes.NAMED_SHAPES[MODELLED_SHAPE]
    drafter = shapes.DrafterShape.of(target, DrafterSettings())
    origin = Origin(T10, f"{facts.name}, bfloat16 (modelled)", MODELLED, facts.source)
    rows: list[Row] = []
    for context in CostSettings().context_tokens:
        work = {
            forward: sizes.decoder_work(target, n_rows, context, itemsize=2)
            for forward, n_rows in _ROWS.items()
        }
        draft = sizes.draft_work(drafter, context, NEW_CONTEXT, itemsize=2)
        work |= {f"draft_{method}": draft for method in VFLASH_METHODS}
        work["context_projection"] = sizes.context_work(drafter, context, itemsize=2)
        seconds = {f: w.seconds(facts.bytes_per_s, facts.flops_per_s) for f, w in work.items()}
        for forward, taken in seconds.items():
            setting = setting_text(shape=MODELLED_SHAPE, context=context, forward=forward, by=LIMIT)
            rows.append(origin.row("forward_ms", 1000 * taken, "ms", setting=setting))
        cycles_s = {m: seconds[f"draft_{m}"] + seconds[f"verify_{m}"] for m in VFLASH_METHODS}
        rows += _method_rows(origin, MODELLED_SHAPE, context, seconds["ar"], cycles_s, taus)
    return rows


def _page_row() -> Row:
    """The page's autoregressive time, at the context length it gives for one of the demo clips."""
    time, context = published.demo_ar_time()
    setting = setting_text(shape=MODELLED_SHAPE, context=context, forward="ar", by=PAGE)
    origin = Origin(T10, published.PAGE_DEVICE, PUBLISHED_ONLY, published.PAGE)
    row = origin.row("forward_ms", time, "ms", method="ar", setting=setting)
    return {**row, "status": PUBLISHED_ONLY}


def keyed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its settings as columns: shape, context, forward, by, tau, tau_of; "" if unset."""
    keys = [parse_setting(text) for text in frame["setting"]]
    names = ("shape", "context", "forward", "by", "tau", "tau_of")
    return frame.assign(**{name: [key.get(name, "") for key in keys] for name in names})


def cost_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T10: forwards by shape and context, their limit and memory, and what a method needs to gain.

    The speed-up is at the accepted length decoded on the same machine, else at that of the first
    machine that decoded; for another target it says what that length would give there.
    """
    decoded = {(g.device, g.dtype): decoded_taus(g, records) for g in decode_groups(records)}
    first = next(iter(decoded.values()), Taus())
    rows: list[Row] = []
    for group in cost_groups(records):
        rows += _forward_rows(group)
        rows += _measured_method_rows(group, decoded.get((group.device, group.dtype), first))
    if records.costs.empty:
        missing = Origin(T10, "", MISSING, records.source)
        rows.append(missing.row("forward_ms", _NONE, "ms", setting=setting_text(forward="ar")))
    frame = tidy([*rows, *modelled_rows(first), _page_row()])
    lettered, where = places(frame)
    lengths = ", ".join(f"{label(name)} {tau:.2f}" for name, tau in first.by_method.items())
    told = f"{lengths}, {first.of}" if lengths else "none"
    caption = (
        "A target of each shape with random weights, cache and states, nothing compiled whatever "
        "`target.compile` says; median time of a forward, with [quartiles] and n timed runs in the "
        "CSV. Modelled: at best, by a roofline of an H100's printed rates; nothing was run. The "
        "page's row is its AR time per token on four demo clips. Limit: bytes a forward must read "
        "over copy bandwidth; caches can beat it. "
        f"Speed-up: accepted length × AR / (draft + verify), at the decoded length ({told}; suites "
        "pooled, where T2's macro is their mean), an assumption for any other target; the context "
        "projection, once a text, is not in it. "
        f"{where}"
    )
    return Table(T10, "T10 Cost model", caption, frame, _sections(lettered))


def _cell(row: pd.Series) -> str:
    """A value, or the range of a row that has no other; n and quartiles are in the CSV."""
    ends = [value_text(float(row[end]), str(row["unit"])) for end in ("value", "low", "high")]
    return ends[0] if ends[0] != NO_VALUE else " to ".join(ends[1:])


def _sections(frame: pd.DataFrame) -> tuple[Section, ...]:
    """Grids: forwards across for times, limits and memory; methods across for what follows."""
    there = keyed(frame.loc[frame["status"] != MISSING])
    there["by"] = [_BY.get(by, by) for by in there["by"]]
    of_forwards = [("shape", "shape"), ("context", "context"), ("by", "by"), ("where", "where")]
    of_methods = [name for name in of_forwards if name[0] != "by"]
    sections = []
    for quantities, names, column, order in (
        (("forward_ms", "limit_share", "peak_bytes"), of_forwards, "forward", FORWARDS),
        (("cycle_ms", "breakeven_tau", "modelled_speedup"), of_methods, "method", VFLASH_METHODS),
    ):
        for quantity in quantities:
            own = there.loc[there["quantity"] == quantity]
            if not own.empty:
                sections.append(pivot(own, titled(own), names, column, order, _cell))
    return tuple(sections)
