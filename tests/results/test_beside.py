"""T9's rows of the studies, beside SPARROW's tables: which of ours, under which keys and marks."""

from dataclasses import replace

import pandas as pd
import pytest

from tests.results.studies import design_study, lengths_study
from tests.results.synthetic import DEVICE, generation_row, records_of
from vflash_analysis.results import published
from vflash_analysis.results.beside import beside_paper_table
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.results.tidy import PUBLISHED_ONLY, TARGET_FAILS
from vflash_analysis.schemas import BENCHMARKS
from vflash_analysis.stats import Bootstrap

BOOT = Bootstrap(n_samples=20)


def table_of(**studies):
    return beside_paper_table(replace(records_from_frames({}, "nothing"), studies=studies), BOOT)


def grid(table, title: str) -> pd.DataFrame:
    """A section as its reader sees it."""
    (section,) = [one for one in table.sections if one.title.startswith(title)]
    return pd.DataFrame(section.body, columns=section.header)


def ours_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Our rows that the studies give."""
    return frame.loc[(frame["source"] == "synthetic") & (frame["quantity"] != "difference")]


def lengths_beside(table) -> dict[str, list[str]]:
    """Ours beside Sparrow's accepted length in table 4, by its visual tokens."""
    shown = grid(table, "SPARROW table 4")
    shown = shown.loc[(shown["method"] == "SPARROW") & shown["quantity"].str.startswith("accepted")]
    found: dict[str, list[str]] = {}
    for _, row in shown.iterrows():
        if row.get("ours", "–") != "–":
            found.setdefault(row["setting"].split()[0], []).append(row["why"])
    return found


def test_of_sparrows_suite_ours_is_that_suites_and_keeps_its_own_keys():
    """On VDC 10 tokens in 4 calls; the mean over the suites would be 2.1."""
    table = table_of(lengths=lengths_study({9: 480}))
    ours = ours_of(table.frame).set_index("quantity")
    assert ours["value"].to_dict() == {"accepted_length": 2.5, "decode_speedup": 2.0}
    assert set(ours["benchmark"]) == {"VDC"} and set(ours["method"]) == {"tree60"}
    assert set(ours["setting"]) == {"frames=9;visual_tokens=480"} and set(ours["n"]) == {1}
    differences = table.frame.loc[table.frame["quantity"] == "difference"]
    assert differences["value"].tolist() == pytest.approx([2.5 - 4.51, 2.0 - 3.30])
    assert set(differences["method"]) == {"tree60"} and set(differences["benchmark"]) == {"VDC"}
    assert differences["setting"].iloc[0] == (
        "of=accepted_length;minus=sparrow table 4;method=sparrow;visual_tokens=500;variant=Sparrow"
    )
    why = "Ours is Tree-60, frames 9, 480 visual tokens, another target, machine or size of run."
    assert lengths_beside(table) == {"500": [why]}


def test_every_quantity_of_table_5_has_ours_beside_it():
    table = table_of(lengths=lengths_study({50: 4400}))
    ours = ours_of(table.frame).set_index("quantity")["value"].to_dict()
    expected = {"accepted_length": 2.5, "generated_tokens": 11, "target_calls": 4}
    expected |= {"wall_s": 1.05, "decode_s": 0.05, "prefill_s": 1.0}
    assert set(expected) == set(published.BREAKDOWN)
    assert ours == pytest.approx(expected)
    shown = grid(table, "SPARROW table 5")
    assert (shown["ours"] != "–").tolist() == [True] * 6 + [False] * 12


def test_of_suites_that_we_do_not_have_ours_is_the_mean_and_says_so():
    """VDC 5 tokens a call, the four others 2: the macro mean is 2.6."""
    table = table_of(design=design_study())
    ours = ours_of(table.frame)
    assert set(ours["value"]) == {2.6} and set(ours["benchmark"]) == {"macro"}
    assert set(ours["setting"]) == {"phase=inference;share=1", "phase=inference;share=0.5"}
    shown = grid(table, "SPARROW table 7").set_index(["suite", "setting"])
    beside = shown.loc[shown["ours"] != "–"]
    assert set(beside.index) == {
        (suite, f"in inference, {share} % of visual positions")
        for suite in ("ChartQA", "AI2D") for share in (100, 50)
    }  # fmt: skip
    assert set(beside["why"]) == {"Ours is chain, macro, another target, machine or size of run."}
    differences = table.frame.loc[table.frame["quantity"] == "difference"]
    assert set(differences["benchmark"]) == {"macro"} and set(differences["method"]) == {"chain"}
    chart = (
        "of=accepted_length;minus=sparrow table 7;method=sparrow;benchmark=ChartQA;phase=inference"
    )
    found = differences.set_index("setting")["value"]
    assert found[f"{chart};share=1"] == pytest.approx(2.6 - 4.25)


@pytest.mark.parametrize(
    ("tokens", "beside"),
    [
        ({3: 455, 9: 520, 18: 545}, 520),  # the nearest, wherever it stands
        ({9: 520, 3: 455}, 520),
        ({18: 520, 9: 480}, 480),  # equally near: the shorter
        ({9: 450}, 450),  # a tenth
        ({9: 449, 18: 551}, None),  # and not more
    ],
)
def test_the_nearest_visual_length_stands_beside_a_printed_one(tokens, beside):
    table = table_of(lengths=lengths_study(tokens))
    wanted = {} if beside is None else {f"visual_tokens={beside}"}
    assert {text.split(";")[1] for text in ours_of(table.frame)["setting"]} == set(wanted)
    found = lengths_beside(table)
    assert [len(rows) for rows in found.values()] == [1] * len(wanted)
    assert all(f"{beside} visual tokens" in why for rows in found.values() for why in rows)


def test_each_of_two_machines_stands_beside_a_printed_length():
    table = table_of(lengths=lengths_study({9: 480}, devices=(DEVICE, "NVIDIA H200")))
    assert len(lengths_beside(table)["500"]) == 2
    ours = ours_of(table.frame)
    devices = ours.loc[ours["quantity"] == "accepted_length", "device"]
    assert set(devices) == {f"{DEVICE}, float32", "NVIDIA H200, float32"}


def test_a_length_at_which_the_target_fails_is_marked_as_in_t5():
    """One suite's texts do not end: the length fails in T5, and so VDC's row here."""
    sound = table_of(lengths=lengths_study({9: 480}))
    table = table_of(lengths=lengths_study({9: 480}, unended=("MLVU",)))
    for one, marked in ((sound, False), (table, True)):
        shown = grid(one, "SPARROW table 4")
        cells = shown.loc[shown["ours"] != "–", ["ours", "difference"]].to_numpy().ravel()
        assert len(cells) == 4 and all(cell.endswith(" †") == marked for cell in cells)
        mine = one.frame.loc[one.frame["source"] == "synthetic", "status"]
        assert len(mine) == 4 and set(mine == TARGET_FAILS) == {marked}
        assert ("† the target fails" in one.caption) == marked


def test_the_file_gives_the_status_that_is_shown():
    table = table_of(lengths=lengths_study({9: 480}), design=design_study())
    for number in (1, 4, 5, 7):
        own = table.frame.loc[table.frame["source"] == f"sparrow table {number}"]
        shown = grid(table, f"SPARROW table {number}")
        counted = own["status"].value_counts().to_dict()
        if "status" in shown:
            assert counted == shown["status"].value_counts().to_dict()
        else:  # its title tells the one status of all rows
            assert counted == {PUBLISHED_ONLY: len(own)}
    assert set(table.frame["status"]) >= {"not comparable", "published only"}


def test_a_suite_without_ours_is_published_only():
    rows = [generation_row("ar", "VDC-0", new_tokens=11, verify_calls=10, decode_s=0.1)]
    tree = {"new_tokens": 11, "verify_calls": 5, "decode_s": 0.05, "drafter_sha256": "d"}
    rows.append(generation_row("tree60", "VDC-0", objective="self_reveal", **tree))
    frame = beside_paper_table(records_of(pd.DataFrame(rows)), BOOT).frame
    page = frame.loc[(frame["source"] == published.PAGE) & (frame["method"] == "tree60")]
    page = page.loc[(page["quantity"] == "decode_speedup") & (page["setting"] == "")]
    expected = dict.fromkeys([*BENCHMARKS, "macro"], PUBLISHED_ONLY) | {"VDC": "not comparable"}
    assert page.set_index("benchmark")["status"].to_dict() == expected


def test_without_the_studies_each_row_says_what_is_lacking():
    shown = grid(table_of(), "SPARROW table 4")
    assert set(shown.loc[shown["method"] == "SPARROW", "why"]) == {
        "Nothing of ours was decoded for it."
    }
    assert set(shown.loc[shown["method"] == "MSD", "why"]) == {
        "Another system's number; nothing of ours is measured in that setting."
    }
