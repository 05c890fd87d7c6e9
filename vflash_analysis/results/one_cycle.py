"""The data of F2: one real cycle from the records, beside plain decoding of the same tokens.

    frame = one_cycle_frame(records)                                  by the rule below
    frame = one_cycle_frame(records, "suites-VDC-0-0001", "tree60", cycle=2)

Without a choice by hand it is a chain's cycle of the flow drafter with the median number of accepted
drafts, over all its uncut cycles: the first such one among the cycles kept in detail, by suite, clip
and number, where plain decoding wrote the same tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd

from vflash_analysis.errors import InputError
from vflash_analysis.results.playback import PLAIN, decodes, own_cycles
from vflash_analysis.results.sources import Records
from vflash_analysis.results.tidy import BENCHMARK_ORDER, Origin, in_order, setting_text, tidy
from vflash_analysis.schemas import ROW_KEY, VFLASH_METHODS

F2 = "F2_cycle"
METHOD = "chain"
BY_RULE, BY_HAND = "rule", "hand"
Row = dict[str, Any]


def packed(text: str) -> str:
    """A token's text as a value within `setting`: what would end it is percent-coded."""
    return re.sub(r"[%;=\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", text)


def unpacked(text: str) -> str:
    """The inverse of `packed`."""
    return unquote(text)


def detailed(records: Records, method: str = METHOD) -> pd.DataFrame:
    """The decodes with a block drafter whose cycles were kept in detail, by suite and clip."""
    cycles = records.cycles
    cycles = cycles.loc[(cycles["method"] == method) & cycles["draft_parents"].notna()]
    kept = cycles[list(ROW_KEY)].drop_duplicates()
    rows = decodes(records).merge(kept, on=list(ROW_KEY), how="inner")
    order = in_order(rows["benchmark"], BENCHMARK_ORDER)
    rows = rows.assign(suite=rows["benchmark"].map(order.index))
    return rows.sort_values(["suite", "clip_id", "setting"], kind="stable", ignore_index=True)


def median_accepted(records: Records, decode: pd.Series) -> int:
    """The lower median of accepted drafts over the uncut cycles of a decode's method and drafter."""
    cycles = records.cycles
    keys = ("method", "drafter_sha256", "setting")
    same = np.logical_and.reduce([cycles[key] == decode[key] for key in keys])
    whole = cycles.loc[same & ~cycles["censored"].astype(bool) & (cycles["repeat"] >= 0)]
    accepted = np.sort(whole["n_accepted"].to_numpy(dtype=int))
    return int(accepted[(len(accepted) - 1) // 2]) if len(accepted) else 0


def before_divergence(cycles: pd.DataFrame, decode: pd.Series) -> pd.DataFrame:
    """The cycles of a decode that end before its text leaves plain decoding's."""
    if pd.isna(decode["first_divergence"]):
        return cycles
    last = cycles["start_position"] - decode["prompt_tokens"] + cycles["n_committed"]
    return cycles.loc[last < decode["first_divergence"]]


def nearest_cycle(cycles: pd.DataFrame, accepted: int) -> tuple[int, int]:
    """(how far off, which): the earliest cycle with about so many accepted drafts, uncut if any is."""
    whole = cycles.loc[~cycles["censored"].astype(bool)]
    whole = cycles if whole.empty else whole
    far = (whole["n_accepted"].astype(int) - accepted).abs()
    place = int(np.argmin(far))
    return int(far.iloc[place]), int(whole["cycle"].iloc[place])


def _chosen(
    records: Records, clip_id: str | None, method: str, drafter: str | None
) -> pd.DataFrame:
    """The decodes that a choice leaves; none where no choice was made and nothing was kept."""
    rows = detailed(records, method)
    rows = rows.loc[rows["setting"] == ""]
    wanted: Mapping[str, str | None] = {"clip_id": clip_id, "drafter": drafter}
    for column, value in wanted.items():
        found = rows.loc[rows[column] == value] if value is not None else rows
        if found.empty and (clip_id is not None or drafter is not None):
            known = list(dict.fromkeys(rows[column].dropna()))[:6]
            raise InputError(
                f"{column}: found {value!r}, allowed: one whose {method} cycles were kept in detail "
                f"({', '.join(map(str, known)) or 'none'})"
            )
        rows = found
    if (
        not rows.empty
    ):  # a drafter, the flow arm's first, is settled before the rule looks at cycles
        first = rows.sort_values(["other_arm", "train_seed"], kind="stable").iloc[0]
        rows = rows.loc[rows["drafter_sha256"] == first["drafter_sha256"]]
    return rows


def one_cycle_frame(
    records: Records,
    clip_id: str | None = None,
    method: str = METHOD,
    cycle: int | None = None,
    drafter: str | None = None,
) -> pd.DataFrame:
    """One cycle as tidy rows.

    Rows by quantity (`setting` names the clip, or slot, node and token):
    cycle_number: which, of n. median_accepted_drafts: what the rule looks for.
    context_tokens: positions before the anchor, whose text it holds.
    draft_probability, draft_accepted: each drafted token, slot 1 first; nodes of a tree hang on the
    node named `parent` (-1: the anchor). committed_token: 1 accepted draft, 0 the target's own.
    draft_ms, verify_ms, other_ms, tree_ms, cycle_ms: of the cycle; context_projection_ms: of the
    first cycle, what the projection of the prompt took, which its draft_ms leaves out.
    ar_forward_ms: of the plain cycle that committed that token; none where plain decoding wrote
    other tokens.

    Args:
        records: the records.
        clip_id, method, cycle, drafter: a choice by hand; None leaves it to the rule. `drafter` is
            its name in the records.

    Raises:
        InputError: a choice that the records do not hold in detail.
    """
    if method not in VFLASH_METHODS:
        raise InputError(f"method: found {method!r}, allowed: {', '.join(VFLASH_METHODS)}")
    rows_left = _chosen(records, clip_id, method, drafter)
    if rows_left.empty:
        nothing = Origin(F2, "", records.status, records.source)
        return tidy([nothing.row("cycle_number", math.nan, "", n=0, method=method)])
    median = median_accepted(records, rows_left.iloc[0])
    every = [own_cycles(records, one) for _, one in rows_left.iterrows()]
    same = [before_divergence(own, rows_left.iloc[place]) for place, own in enumerate(every)]
    eligible = same if any(map(len, same)) else every
    nearest = [
        (*nearest_cycle(own, median), place) for place, own in enumerate(eligible) if len(own)
    ]
    _, number, place = min(nearest, key=lambda found: (found[0], found[2]))
    row = rows_left.iloc[0 if cycle is not None else place]
    number = number if cycle is None else cycle
    cycles = own_cycles(records, row)
    if number not in set(cycles["cycle"]):
        raise InputError(f"cycle: found {cycle}, allowed: 0 to {len(cycles) - 1}")
    shown = cycles.loc[cycles["cycle"] == number].iloc[0]
    by_hand = cycle is not None or clip_id is not None or drafter is not None
    device = f"{row['device']}, {row['dtype']}"
    drawn = _Cycle(
        Origin(F2, device, records.status, records.source),
        row,
        shown,
        dict(zip(*_words(records, str(row["target"])), strict=True)),
    )
    chosen = setting_text(clip=packed(str(row["clip_id"])), chosen=BY_HAND if by_hand else BY_RULE)
    rows = [
        drawn.row("cycle_number", number, "", chosen, n=len(cycles)),
        drawn.row("median_accepted_drafts", median, "tokens"),
    ]
    return tidy([*rows, *drawn.context(), *drawn.drafts(), *drawn.committed(), *drawn.times(),
                 *_plain_rows(drawn, records)])  # fmt: skip


def _words(records: Records, target: str) -> tuple[list[int], list[str]]:
    own = records.vocabulary.loc[records.vocabulary["target"] == target]
    return own["token_id"].astype(int).tolist(), own["text"].tolist()


class _Cycle:
    """Rows of one cycle that share its keys."""

    def __init__(
        self, origin: Origin, decode: pd.Series, cycle: pd.Series, words: Mapping[int, str]
    ) -> None:
        self.origin, self.decode, self.cycle, self._words = origin, decode, cycle, words
        self.first = int(cycle["start_position"]) - int(
            decode["prompt_tokens"]
        )  # the anchor's place
        ids = [int(one) for one in decode["token_ids"]]
        self.anchor = ids[self.first]
        self.new = ids[self.first + 1 : self.first + 1 + int(cycle["n_committed"])]

    def text(self, token_id: int) -> str:
        """A token in words; by its number where the records have none."""
        return packed(self._words.get(int(token_id), f"#{token_id}"))

    def row(
        self, quantity: str, value: float, unit: str, setting: str = "", n: int | None = 1,
        method: str | None = None,
    ) -> Row:  # fmt: skip
        objective = self.decode["objective"] if method is None else ""
        return self.origin.row(
            quantity,
            value,
            unit,
            n,
            benchmark=str(self.decode["benchmark"]),
            method=str(self.decode["method"]) if method is None else method,
            objective="" if pd.isna(objective) else str(objective),
            setting=setting,
        )

    def context(self) -> list[Row]:
        anchor = setting_text(anchor=self.text(self.anchor))
        return [self.row("context_tokens", float(self.cycle["start_position"]), "tokens", anchor)]

    def drafts(self) -> list[Row]:
        """Drafted tokens; the accepted ones are the path that the committed tokens walk."""
        tokens, parents = list(self.cycle["draft_token_ids"]), list(self.cycle["draft_parents"])
        path = accepted_path(tokens, parents, self.new[: int(self.cycle["n_accepted"])])
        rows, slots = [], slots_of(parents)
        for node, (token, logprob) in enumerate(
            zip(tokens, self.cycle["draft_logprobs"], strict=True)
        ):
            where = setting_text(
                slot=slots[node], node=node, parent=parents[node], text=self.text(token)
            )
            rows.append(self.row("draft_probability", math.exp(logprob), "", where))
            rows.append(self.row("draft_accepted", float(node in path), "", where))
        return rows

    def committed(self) -> list[Row]:
        accepted = int(self.cycle["n_accepted"])
        return [
            self.row("committed_token", float(place <= accepted), "",
                     setting_text(token=place, text=self.text(token)))
            for place, token in enumerate(self.new, 1)
        ]  # fmt: skip

    def times(self) -> list[Row]:
        parts = {
            name: 1000 * float(self.cycle[f"{name}_s"]) for name in ("draft", "verify", "other")
        }
        projection_s = self.decode["context_projection_s"]
        if self.cycle["cycle"] == 0 and not pd.isna(projection_s):
            parts["context_projection"] = 1000 * float(projection_s)
            parts["draft"] -= parts["context_projection"]
        rows = [self.row(f"{name}_ms", value, "ms") for name, value in parts.items()]
        tree_s = self.cycle["tree_s"]
        if not pd.isna(tree_s):
            rows.append(self.row("tree_ms", 1000 * float(tree_s), "ms"))
        return [*rows, self.row("cycle_ms", sum(parts.values()), "ms")]


def slots_of(parents: Sequence[int]) -> list[int]:
    """The slot of each node, 1 for a child of the anchor (-1)."""
    slots: list[int] = []
    for parent in parents:
        slots.append(1 if parent < 0 else slots[parent] + 1)
    return slots


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], accepted: Sequence[int]
) -> list[int]:
    """The nodes along which the accepted tokens lie, the anchor's child first."""
    path: list[int] = []
    here = -1
    for wanted in accepted:
        children = [n for n, parent in enumerate(parents) if parent == here and tokens[n] == wanted]
        if not children:
            raise InputError(f"cycles: accepted token {wanted} is no draft of its cycle")
        here = children[0]
        path.append(here)
    return path


def _plain_rows(drawn: _Cycle, records: Records) -> list[Row]:
    """Plain decoding's cycles that committed the same tokens; none where it has none of these."""
    rows = decodes(records)
    same = (rows["clip_id"] == drawn.decode["clip_id"]) & (rows["run_id"] == drawn.decode["run_id"])
    rows = rows.loc[same & (rows["method"] == PLAIN) & (rows["setting"] == "")]
    if rows.empty:
        return []
    ids = [int(one) for one in rows["token_ids"].iloc[0]]
    own = ids[drawn.first + 1 : drawn.first + 1 + len(drawn.new)]
    if own != drawn.new:
        return []
    cycles = own_cycles(records, rows.iloc[0])
    start = int(drawn.cycle["start_position"])
    cycles = cycles.loc[cycles["start_position"].between(start, start + len(own) - 1)]
    taken = 1000 * (cycles["draft_s"] + cycles["verify_s"] + cycles["other_s"])
    return [
        drawn.row("ar_forward_ms", float(ms), "ms",
                  setting_text(token=place, text=drawn.text(token)), method=PLAIN)
        for place, (token, ms) in enumerate(zip(own, taken, strict=False), 1)
    ]  # fmt: skip
