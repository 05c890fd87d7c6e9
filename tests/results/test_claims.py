"""README's claims are the tracked table's numbers, and nothing else of the page is touched."""

import pandas as pd
import pytest

from tests.results.synthetic import records_of
from tests.results.test_tables import FEW, two_clips_a_suite, two_cycles
from vflash_analysis import config, paths, publish
from vflash_analysis.errors import InputError
from vflash_analysis.results.claims import block, checks, claims, readme_blocks, write_claims
from vflash_analysis.results.tables import speedup_table
from vflash_analysis.results.tidy import read_tidy_csv

GATES = pd.DataFrame(
    {
        "gate": ["reads", "hard"],
        "value": [0.91234, 0.5],
        "allowed": [">= 0.90", "at most 0.40"],
        "n": [30, 40],
        "passed": [True, False],
    }
)


@pytest.fixture(scope="module")
def speedups():
    rows = two_clips_a_suite()
    cycles = two_cycles([row for row in rows if row["method"] == "chain"])
    return speedup_table(records_of(pd.DataFrame(rows), cycles), FEW).frame


def test_claims_by_hand(speedups):
    lines = claims(speedups).splitlines()
    assert lines[0] == "| | VDC | Video-MME | MVBench | MLVU | LVB | macro |"
    assert lines[2].startswith("| pocket, chain, self reveal (flow) | 4.00× [4.00, 4.00] |")
    assert lines[3].startswith("| LLaVA-OneVision-7B, Tree-60, as published on one H100 | 3.64× |")
    assert lines[4].endswith("| – | – | – | – | – | 3.77× |")
    assert "2 CPU cores, float32, n = 2 clips a suite, 10 in all" in lines[6]
    assert len(lines) == 7


def test_checks_by_hand(speedups):
    lines = checks(speedups, GATES).splitlines()
    assert lines[0].startswith("Autoregressive decoding takes 100.00 ms a token (macro)")
    assert lines[0].endswith("so the parts add up: 80 % (chain).")  # 4 of 5
    assert lines[-2:] == [
        "| reads | 0.912 | >= 0.90 | 30 | holds |",
        "| hard | 0.500 | at most 0.40 | 40 | **does not hold** |",
    ]


def test_only_the_blocks_of_the_page_change(speedups, tmp_path):
    readme = tmp_path / "README.md"
    (start, end), (first, last) = block("claims"), block("checks")
    readme.write_text(f"before\n{start}\nold\n{end}\nbetween\n{first}\n{last}\nafter\n")
    for _ in range(2):
        write_claims(readme, speedups, GATES)
        assert readme.read_text() == (
            f"before\n{start}\n{claims(speedups)}\n{end}\n"
            f"between\n{first}\n{checks(speedups, GATES)}\n{last}\nafter\n"
        )
    for damaged in (
        "nothing\n",
        f"{end}\n{start}\n{first}\n{last}\n",
        f"{start}\n{first}\n{end}\n{last}\n",
        f"{start}\n{first}\n{last}\n{end}\n",
        2 * readme.read_text(),
    ):
        readme.write_text(damaged)
        with pytest.raises(InputError, match="found not these lines"):
            write_claims(readme, speedups, GATES)
        assert readme.read_text() == damaged


def test_two_devices_are_no_claim(speedups):
    other = speedups.loc[speedups["quantity"] == "decode_speedup"].assign(device="another")
    with pytest.raises(InputError, match="2 devices"):
        claims(pd.concat([speedups, other[other["status"] == "measured"]]))


def test_the_readme_tells_the_tracked_table():
    text = (paths.ROOT / "README.md").read_text()
    tracked = paths.FIGURES / "pocket" / "T1_speedup.csv"
    samples = config.load_profile("pocket").bootstrap_samples
    told = readme_blocks(read_tidy_csv(tracked), publish.tracked_gates(samples))
    for name, expected in told.items():
        start, end = block(name)
        assert text.split(start)[1].split(end)[0].strip() == expected
