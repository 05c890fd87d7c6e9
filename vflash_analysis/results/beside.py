"""T9: every published number, and ours beside it where there is one, each with its status."""

from __future__ import annotations

from typing import Any

import pandas as pd

from vflash_analysis.results import published
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tables import is_comparable, lossless_table, speedup_rows
from vflash_analysis.results.tidy import (
    BENCHMARK_ORDER,
    COMPARABLE,
    MISSING,
    NOT_COMPARABLE,
    PUBLISHED_ONLY,
    tidy,
)
from vflash_analysis.results.write import Section, Table, pivot, places, titled
from vflash_analysis.schemas import VFLASH_METHODS
from vflash_analysis.stats import DEFAULT_BOOTSTRAP, Bootstrap

ITEM = "T9_beside_paper"
MAIN_ARM = "self_reveal"


def _our_rows(records: Records, boot: Bootstrap) -> list[dict[str, Any]]:
    """Our side: speed-ups and AR time as in T1, equality as in T4; missing kept for our methods."""
    page_methods = tuple(dict.fromkeys(published.speedups()["method"]))
    ours = [
        row
        for row in speedup_rows(ITEM, records, boot, page_methods, (MAIN_ARM,))
        if row["quantity"] in ("decode_speedup", "ar_ms_per_token")
        and (row["method"] in ("ar", *VFLASH_METHODS) or row["status"] != MISSING)
    ]
    shares = lossless_table(records, boot).frame
    kept = shares.loc[
        (shares["quantity"] == "identical_share")
        & shares["method"].isin(VFLASH_METHODS)
        & shares["objective"].isin(("", MAIN_ARM))
        & (shares["setting"] == "")
    ]
    return ours + [
        {str(k): v for k, v in row.items()} for row in kept.assign(item=ITEM).to_dict("records")
    ]


def _with_standing(frame: pd.DataFrame) -> pd.DataFrame:
    """With one status for all cells of a method and place: "missing" only where all of them are."""
    keys = ["quantity", "method", "where"]
    known = frame["status"].where(frame["status"] != MISSING)
    first = known.groupby([frame[key] for key in keys]).transform("first")
    return frame.assign(standing=first.fillna(MISSING))


def _sections(frame: pd.DataFrame) -> tuple[Section, ...]:
    """Ours beside the page's, then what others printed; `frame` as `places` gives it."""
    elsewhere = (frame["status"] == PUBLISHED_ONLY) & (frame["source"] != published.PAGE)
    beside, rest = _with_standing(frame.loc[~elsewhere]), frame.loc[elsewhere].assign(all="value")
    names = [("method", "method"), ("where", "where"), ("standing", "status")]
    sections = []
    for quantity in ("decode_speedup", "ar_ms_per_token", "identical_share"):
        own = beside.loc[beside["quantity"] == quantity]
        columns = [*BENCHMARK_ORDER, *([""] if (own["benchmark"] == "").any() else [])]
        sections.append(pivot(own, titled(own), names, "benchmark", columns))
    names = [(key, key) for key in ("method", "benchmark", "setting", "quantity", "unit", "where")]
    return (*sections, pivot(rest, "published only", names, "all", ("value",)))


def beside_paper_table(records: Records, boot: Bootstrap = DEFAULT_BOOTSTRAP) -> Table:
    """T9, from records and the published numbers."""
    ours = _our_rows(records, boot)
    comparable = is_comparable(records)
    measured = {str(row["method"]) for row in ours if row["status"] != MISSING}
    frame = tidy(
        [
            *ours,
            *published.speedup_rows(ITEM, comparable, measured),
            *published.protocol_rows(ITEM, COMPARABLE if comparable else NOT_COMPARABLE),
            *published.headline_rows(ITEM),
            *published.sparrow_rows(ITEM),
        ]
    )
    lettered, where = places(frame)
    caption = (
        "Ours beside the published numbers. Status: measured (this run), stored (tracked "
        "records), missing (nothing decoded), published only (a method we did not run), not "
        "comparable (another target or hardware), comparable. Parentheses: n clips. "
        f"{boot.caption()} {where}"
    )
    return Table(ITEM, "T9 Ours beside the paper", caption, frame, _sections(lettered))
