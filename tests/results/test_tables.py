"""T1, T2, T4, T9 from records whose results are known by hand."""

import math

import pandas as pd
import pytest

from tests.results.synthetic import decode_rows, failed_row, generation_row, records_of
from vflash_analysis.errors import InputError
from vflash_analysis.metrics import ratio
from vflash_analysis.records import blank_row
from vflash_analysis.results.beside import beside_paper_table
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.results.tables import (
    accepted_length_table,
    is_comparable,
    lossless_table,
    over_words,
    overall,
    planned_suites,
    speedup_rows,
    speedup_table,
)
from vflash_analysis.results.tidy import COLUMNS
from vflash_analysis.results.write import markdown, places
from vflash_analysis.schemas import BENCHMARKS, COMPILED, CYCLES
from vflash_analysis.stats import Bootstrap

FEW = Bootstrap(n_samples=20)
DRAFTER = {"drafter_sha256": "d", "objective": "self_reveal", "train_seed": 1, "drafter": "given"}


def decode(method, clip, benchmark="VDC", tokens=11, calls=10, seconds=1.0, **changes):
    row = generation_row(method, clip, benchmark)
    row |= {"new_tokens": tokens, "verify_calls": calls, "decode_s": seconds}
    return row | changes


def two_clips_a_suite(chain_s=0.25, **changes) -> list[dict]:
    """AR 0.1 s a token; the chain decodes 10 tokens in 2 calls."""
    rows = []
    for benchmark in BENCHMARKS:
        for clip in (f"{benchmark}-1", f"{benchmark}-2"):
            rows.append(decode("ar", clip, benchmark))
            chain = decode("chain", clip, benchmark, calls=2, seconds=chain_s, **DRAFTER)
            rows.append(chain | {"identical_to_ar": True} | changes)
    return rows


def two_cycles(rows: list[dict]) -> pd.DataFrame:
    cycles = []
    for row in rows:
        for number, accepted in enumerate((3, 5)):
            cycles.append(
                blank_row(CYCLES)
                | {key: row[key] for key in ("run_id", "clip_id", "method", "drafter_sha256")}
                | {"setting": "", "repeat": 0, "cycle": number, "start_position": 0}
                | {"n_accepted": accepted, "n_committed": accepted + 1, "censored": False}
                | {"draft_s": 0.02, "verify_s": 0.08, "other_s": 0.025, "end_s": 0.125}
            )
    return pd.DataFrame(cycles)


def pick(frame: pd.DataFrame, **keys) -> pd.Series:
    rows = frame
    for key, value in keys.items():
        rows = rows.loc[rows[key] == value]
    assert len(rows) == 1, f"{len(rows)} rows for {keys}"
    return rows.iloc[0]


@pytest.fixture(scope="module")
def known():
    rows = two_clips_a_suite()
    return records_of(pd.DataFrame(rows), two_cycles([r for r in rows if r["method"] == "chain"]))


@pytest.fixture(scope="module")
def known_speed(known):
    return speedup_table(known, FEW).frame


@pytest.mark.parametrize(
    ("quantity", "benchmark", "value"),
    [
        ("decode_speedup", "VDC", 4.0),
        ("decode_speedup", "macro", 4.0),
        ("decode_speedup_per_clip", "MLVU", 4.0),
        ("end_to_end_speedup", "LVB", 1.25 / 0.5),
        ("ms_per_token", "VDC", 25.0),
        ("predicted_speedup", "macro", 5 * 100 / 100),
        ("draft_ms", "VDC", 20.0),
        ("verify_ms", "VDC", 80.0),
        ("other_share", "VDC", 0.2),
    ],
)
def test_t1_by_hand(known_speed, quantity, benchmark, value):
    row = pick(
        known_speed, quantity=quantity, benchmark=benchmark, method="chain", source="synthetic"
    )
    assert row["value"] == pytest.approx(value)
    assert row["n"] == (10 if benchmark == "macro" else 2)
    assert row["objective"] == "self_reveal"
    assert row["device"] == "2 CPU cores, float32"


def test_t1_shows_the_ar_time_and_the_published_rows(known_speed):
    row = pick(known_speed, quantity="ar_ms_per_token", benchmark="macro")
    assert row["value"] == pytest.approx(100)
    paper = known_speed.loc[known_speed["source"] == "vflash_fm_page"]
    assert len(paper) == 25
    assert set(paper["status"]) == {"not comparable"}
    assert set(known_speed.loc[known_speed["quantity"] == "planned_clips", "value"]) == {2}


def test_an_undecoded_method_keeps_its_rows(known_speed):
    rows = known_speed.loc[
        (known_speed["method"] == "tree60") & (known_speed["source"] == "synthetic")
    ]
    assert rows["benchmark"].tolist() == [*BENCHMARKS, "macro"]
    assert set(rows["status"]) == {"missing"}
    assert rows["value"].isna().all()


def test_the_markdown_carries_interval_and_n_of_planned(known):
    text = markdown(speedup_table(known, FEW))
    assert "4.00× [4.00, 4.00] (2/2)" in text
    assert "4.00× [4.00, 4.00] (10/10)" in text


def test_a_failed_clip_lowers_n_and_not_the_value():
    rows = two_clips_a_suite()
    failed = generation_row("chain", "VDC-2", "VDC", status="failed", reason="damaged", **DRAFTER)
    rows = [
        failed if (row["clip_id"], row["method"]) == ("VDC-2", "chain") else row for row in rows
    ]
    table = speedup_table(records_of(pd.DataFrame(rows)), FEW)
    row = pick(table.frame, quantity="decode_speedup", benchmark="VDC", method="chain",
               source="synthetic")  # fmt: skip
    assert (row["value"], row["n"]) == (4.0, 1)
    assert math.isnan(row["low"])
    assert "4.00× (1/2)" in markdown(table)


def test_a_missing_suite_leaves_the_macro_mean_missing():
    rows = [row for row in two_clips_a_suite() if row["benchmark"] != "MLVU"]
    frame = speedup_table(records_of(pd.DataFrame(rows)), FEW).frame
    ours = frame.loc[(frame["source"] == "synthetic") & (frame["method"] == "chain")]
    for benchmark in ("MLVU", "macro"):
        row = pick(ours, quantity="decode_speedup", benchmark=benchmark)
        assert row["status"] == "missing" and math.isnan(row["value"])
    assert pick(ours, quantity="decode_speedup", benchmark="VDC")["value"] == 4


def parts_of(**suites: tuple[float, float]) -> pd.DataFrame:
    """Parts of a ratio: the sums of each suite, in two equal clips."""
    rows = []
    for name, (p0, p1) in suites.items():
        for clip in (f"{name}-0", f"{name}-1"):
            place = {"benchmark": name, "video": clip, "clip_id": clip, "sample_seed": 0}
            rows.append(place | {"p0": p0 / 2, "p1": p1 / 2})
    return pd.DataFrame(rows)


FIVE = {"VDC": (6.0, 2.0), "Video-MME": (2.0, 2.0), "MVBench": (4.0, 2.0), "MLVU": (2.0, 4.0),
        "LVB": (1.0, 2.0)}  # fmt: skip
SOME = {name: FIVE[name] for name in ("VDC", "MLVU", "LVB")}
ONE = {"MLVU": FIVE["MLVU"]}


@pytest.mark.parametrize(
    ("chosen", "of", "value", "words"),
    [
        (FIVE, "macro", (3 + 1 + 2 + 0.5 + 0.5) / 5, "mean over suites"),
        (SOME, "pooled", 9 / 8, "the clips of VDC, MLVU, LVB pooled, no mean over suites"),
        (ONE, "MLVU", 0.5, "MLVU alone"),
    ],
)
def test_one_value_over_all_suites_and_none_where_a_chosen_one_has_none(chosen, of, value, words):
    suites = tuple(chosen)
    suite, found = overall(parts_of(**chosen), ratio, FEW, suites)
    assert (suite, found.value, found.n) == (of, pytest.approx(value), 2 * len(suites))
    assert over_words(suites) == words
    left = {name: sums for name, sums in chosen.items() if name != "MLVU"}
    absent = parts_of(**left) if left else parts_of(**chosen).iloc[:0]
    undefined = parts_of(**chosen | {"MLVU": (0.0, 0.0)})
    for parts in (absent, undefined):
        suite, found = overall(parts, ratio, FEW, suites)
        assert suite == of and math.isnan(found.value) and math.isnan(found.low)


def test_a_run_chose_the_suites_that_it_tried():
    rows = [row for row in two_clips_a_suite() if row["benchmark"] in ("LVB", "VDC", "MLVU")]
    rows = [failed_row(row) if row["benchmark"] == "MLVU" else row for row in rows]
    rows.append(decode("ar", "x", "MVBench", warmup=True, repeat=-1))
    assert planned_suites(records_of(pd.DataFrame(rows))) == ("VDC", "MLVU", "LVB")


def test_case_123_two_devices_give_two_rows_and_never_a_mean():
    here = two_clips_a_suite()
    there = [
        row | {"device": "NVIDIA H200", "run_id": "r2"} for row in two_clips_a_suite(chain_s=0.1)
    ]
    frame = speedup_table(records_of(pd.DataFrame(here + there)), FEW).frame
    rows = frame.loc[
        (frame["quantity"] == "decode_speedup")
        & (frame["benchmark"] == "macro")
        & (frame["method"] == "chain")
        & (frame["source"] == "synthetic")
    ]
    assert dict(zip(rows["device"], rows["value"], strict=True)) == {
        "2 CPU cores, float32": 4.0,
        "NVIDIA H200, float32": 10.0,
    }


@pytest.mark.parametrize("column", ["template_sha256", "reader", "target"])
def test_cases_113_159_other_kinds_are_refused(column):
    rows = two_clips_a_suite()
    for row in rows[:2]:
        row[column] = "another"
    with pytest.raises(InputError, match=f"'{column}' has 2 values"):
        speedup_table(records_of(pd.DataFrame(rows)), FEW)


def test_an_unknown_benchmark_is_refused():
    rows = [*two_clips_a_suite(), decode("ar", "x", "MVLU")]
    with pytest.raises(InputError, match=r"benchmark \['MVLU'\], allowed are"):
        speedup_table(records_of(pd.DataFrame(rows)), FEW)


def test_a_method_is_compared_with_the_ar_of_its_own_run():
    slow_day = [row | {"run_id": "r2"} for row in two_clips_a_suite() if row["method"] == "ar"]
    slow_day = [row | {"decode_s": 9.0} for row in slow_day]
    frame = speedup_table(records_of(pd.DataFrame(two_clips_a_suite() + slow_day)), FEW).frame
    row = pick(frame, quantity="decode_speedup", benchmark="macro", method="chain",
               source="synthetic")  # fmt: skip
    assert row["value"] == 4


def test_huggingface_loops_are_ratios_over_ours():
    rows = []
    for row in two_clips_a_suite():
        twin = {"ar": "hf_generate", "chain": "hf_dflash"}[row["method"]]
        rows += [row, row | {"method": twin, "decode_s": 1.5 * row["decode_s"]}]
    frame = speedup_table(records_of(pd.DataFrame(rows)), FEW).frame
    for quantity, method in (("ar_vs_generate", "ar"), ("chain_vs_hf_dflash", "chain")):
        row = pick(frame, quantity=quantity, benchmark="macro")
        assert (row["value"], row["method"]) == (1.5, method)


def test_huggingface_loops_beside_compiled_decodes_are_told_to_be_uncompiled():
    """Their ratio is to compiled decoding; a row of theirs alone is not of a compiled device."""
    rows = []
    for row in two_clips_a_suite():
        device = row["device"] + COMPILED
        twin = {"ar": "hf_generate", "chain": "hf_dflash"}[row["method"]]
        own = row | {"device": device}
        rows += [own, own | {"method": twin, "identical_to_ar": True}]
    compiled = records_of(pd.DataFrame(rows))
    told = "HF's loops ran uncompiled, also beside compiled decodes."
    table = speedup_table(compiled, FEW)
    assert told in table.caption
    assert COMPILED in pick(table.frame, quantity="ar_vs_generate", benchmark="macro")["device"]
    frame = lossless_table(compiled, FEW).frame
    shares = frame.loc[(frame["quantity"] == "identical_share") & (frame["device"] != "")]
    found = shares.groupby("method")["device"].agg(lambda all_: {COMPILED in one for one in all_})
    assert found.to_dict() == {"chain": {True}, "hf_dflash": {False}, "hf_generate": {False}}
    plain = speedup_table(records_of(pd.DataFrame(two_clips_a_suite())), FEW)
    assert told not in plain.caption


def test_baselines_without_a_drafter_get_the_same_rows():
    rows = two_clips_a_suite()
    rows += [row | {"method": "lookup", "decode_s": 0.5} for row in rows if row["method"] == "ar"]
    found = pd.DataFrame(speedup_rows("T8", records_of(pd.DataFrame(rows)), FEW, ("lookup",)))
    row = pick(found, quantity="decode_speedup", benchmark="macro", method="lookup")
    assert (row["value"], row["objective"]) == (2, "")


def test_t2_by_hand(known):
    frame = accepted_length_table(known, FEW).frame
    for quantity, value in (
        ("accepted_length", 5.0),
        ("accepted_length_per_clip", 5.0),
        ("accepted_length_uncensored", 5.0),
        ("accepted_drafts", 4.0),
        ("cap_share", 0.0),
    ):
        assert pick(frame, quantity=quantity, benchmark="macro", method="chain")["value"] == value


def test_case_117_no_length_is_derived_from_a_rate(records, boot):
    for make in (speedup_table, accepted_length_table):
        frame = make(records, boot).frame
        assert not frame["quantity"].str.contains("derived|geometric").any()
    # tau is the counted one, whatever the rates by slot would give under independence
    frame = accepted_length_table(records, boot).frame
    row = pick(frame, quantity="accepted_length", benchmark="macro", method="tree60")
    counted = records.generations.loc[records.generations["method"] == "tree60"]
    by_suite = counted.groupby("benchmark")[["new_tokens", "verify_calls"]].agg(["sum", "size"])
    tokens = by_suite[("new_tokens", "sum")] - by_suite[("new_tokens", "size")]
    assert row["value"] == pytest.approx(
        float((tokens / by_suite[("verify_calls", "sum")]).mean()), rel=1e-5
    )


def divergent() -> list[dict]:
    rows = two_clips_a_suite()
    chains = [row for row in rows if row["method"] == "chain"]
    chains[0] |= {"identical_to_ar": False, "first_divergence": 7, "divergence_gap": 0.01}
    chains[0] |= {"divergence_kind": "near_tie"}
    chains[1] |= {"identical_to_ar": False, "first_divergence": 3, "divergence_gap": 2.5}
    chains[1] |= {"divergence_kind": "logic_error"}
    chains[2] |= {"identical_to_ar": False, "first_divergence": 5}
    return rows


def test_t4_counts_what_differs_and_why():
    frame = lossless_table(records_of(pd.DataFrame(divergent())), FEW).frame
    assert pick(frame, quantity="identical_share", benchmark="VDC", method="chain")["value"] == 0
    row = pick(frame, quantity="identical_share", benchmark="macro", method="chain")
    assert row["value"] == pytest.approx((0 + 0.5 + 1 + 1 + 1) / 5)
    for quantity, value in (
        ("texts_compared", 10),
        ("near_tie", 1),
        ("logic_error", 1),
        ("unexplained", 1),
        ("divergence_gap", 2.5),
        ("first_divergence", 5),
    ):
        assert pick(frame, quantity=quantity, method="chain")["value"] == value


def test_t4_keeps_the_verify_shaped_control_apart():
    rows = divergent()
    control = [row | {"setting": "verify16", "identical_to_ar": True} for row in rows[:1]]
    table = lossless_table(records_of(pd.DataFrame(rows + control)), FEW)
    row = pick(table.frame, quantity="texts_compared", method="ar")
    assert (row["setting"], row["value"]) == ("verify16", 1)
    counts = "1 | 0 | 0 | 0 | – | – |"
    assert f"| Autoregressive |  | verify16 | A | {counts}" in markdown(table)
    assert "Where: A: 2 CPU cores, float32, synthetic." in table.caption


def test_a_letter_stands_for_a_device_and_its_source():
    rows = [("cpu", "ours"), ("", "ours"), ("h100", "page"), ("cpu", "ours"), ("cpu", "page")]
    lettered, told = places(pd.DataFrame(rows, columns=["device", "source"]))
    assert lettered["where"].tolist() == ["A", "", "B", "A", "C"]
    assert told == "Where: A: cpu, ours; B: h100, page; C: cpu, page."


def test_t9_has_every_status_where_it_belongs(known):
    frame = beside_paper_table(known, FEW).frame
    assert list(frame.columns) == list(COLUMNS)
    speed = frame.loc[frame["quantity"] == "decode_speedup"]
    ours = speed.loc[speed["source"] == "synthetic"]
    assert set(ours.loc[ours["method"] == "chain", "status"]) == {"measured"}
    assert set(ours.loc[ours["method"] == "tree60", "status"]) == {"missing"}
    page = speed.loc[speed["source"] == "vflash_fm_page"]
    by_method = page.groupby("method")["status"].unique().map(list).to_dict()
    assert by_method == {
        "chain": ["not comparable"],
        "tree60": ["published only"],
        "specvlm_ji": ["published only"],
        "parallelvlm": ["published only"],
        "sparrow": ["published only"],
    }
    assert len(frame.loc[frame["source"].str.startswith("sparrow table")]) == 102


def test_t9_compares_on_the_papers_target_and_hardware():
    setup = {"target": "llava-onevision-qwen2-7b-ov-hf", "device": "NVIDIA H100 80GB HBM3"}
    rows = [row | setup for row in two_clips_a_suite()]
    frame = beside_paper_table(records_of(pd.DataFrame(rows)), FEW).frame
    page = frame.loc[frame["source"] == "vflash_fm_page"]
    assert set(page.loc[page["method"] == "chain", "status"]) == {"comparable"}
    assert pick(page, quantity="ar_ms_per_token")["status"] == "comparable"
    elsewhere = [row | {"device": "2 CPU cores", "run_id": "r2"} for row in rows]
    both = records_of(pd.DataFrame([*rows, *elsewhere]))
    assert is_comparable(records_of(pd.DataFrame(rows))) and not is_comparable(both)
    assert not is_comparable(records_of(pd.DataFrame(columns=list(rows[0]))))


def test_t9_sets_ours_minus_the_published_number_with_our_interval(known):
    """The chain is 4 times as fast, the page's macro 3.773; AR takes 100 ms, there 10.6 to 11.1."""
    table = beside_paper_table(known, FEW)
    differences = table.frame.loc[table.frame["quantity"] == "difference"]
    chain = pick(differences, method="chain", unit="x")
    assert (chain["value"], chain["low"]) == pytest.approx((4 - 3.773, 4 - 3.773))
    assert chain["status"] == "not comparable"
    ar = pick(differences, method="ar")
    assert math.isnan(ar["value"]) and (ar["low"], ar["high"]) == pytest.approx((88.9, 89.4))
    page = {(row[0], row[1], row[2], row[3]): row for row in table.sections[0].body}
    assert page["chain", "decoding speed-up", "macro", ""][4:] == (
        "3.773×", "4.00× [4.00, 4.00] (n 10)", "0.23× [0.23, 0.23]", "A, C", "not comparable",
        "Ours is another target, machine or size of run.",
    )  # fmt: skip
    assert page["Tree-60", "decoding speed-up", "VDC", ""][-2:] == (
        "published only", "Nothing of ours was decoded for it.",
    )  # fmt: skip
    assert page["SPARROW", "decoding speed-up", "MLVU", ""][4:6] == ("–", "–")
    again = page["SPARROW", "decoding speed-up", "macro", "mean of the 4 printed suites"]
    assert again[4] == "2.815×"
    seeds = page["", "sample seeds", "", ""]
    assert seeds[4:7] == ("3", "1", "-2.00")


def test_t9_holds_every_published_cell_without_any_records():
    table = beside_paper_table(records_from_frames({}, "nothing"), FEW)
    frame = table.frame.loc[table.frame["source"] != "nothing"]
    recomputed = frame["setting"].str.startswith("mean of")
    counts = frame.loc[~recomputed, "source"].value_counts()
    assert (
        counts["vflash_fm_page"] == 25 + 14
    )  # the AR time's two ends are one row, equality is one
    assert counts.sum() == 25 + 14 + 12 + 2 + 6 + 40 + 18 + 30 + 8
    assert recomputed.sum() == 4
    assert not (frame["quantity"] == "difference").any()
    shown = sum(len(section.body) for section in table.sections)
    assert shown == len(frame)
    raw = [cell for section in table.sections for row in section.body for cell in row]
    assert not any("_" in cell or "=" in cell or "nan" in cell for cell in raw)


def test_t4_names_what_differs_and_counts_texts():
    table = lossless_table(records_of(pd.DataFrame(two_clips_a_suite())), FEW)
    what = table.sections[-1]
    assert what.header[-6:] == (
        "texts compared", "near ties", "logic errors", "unexplained",
        "logit gap where they differ", "first token that differs",
    )  # fmt: skip
    assert what.body[0][-6:] == ("10", "0", "0", "0", "–", "–")


def test_tables_of_no_records_say_missing(boot):
    empty = records_of(pd.DataFrame(columns=list(generation_row("ar", "a"))))
    for make in (speedup_table, accepted_length_table, lossless_table, beside_paper_table):
        frame = make(empty, boot).frame
        ours = frame.loc[frame["source"] == "synthetic"]
        assert set(ours["method"]) == {"chain", "tree60"}
        assert set(ours["status"]) == {"missing"}


def test_row_order_of_the_records_does_not_matter(boot):
    generations, cycles = decode_rows(
        arms=("self_reveal",), seeds=(1,), budgets=(100,), sizes=(100,), n_clips=2
    )
    one = speedup_table(records_of(generations, cycles), boot)
    mixed = [frame.sample(frac=1, random_state=3) for frame in (generations, cycles)]
    pd.testing.assert_frame_equal(one.frame, speedup_table(records_of(*mixed), boot).frame)
