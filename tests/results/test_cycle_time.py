"""F10: the parts of decoded cycles and clips, beside the cost model's and beside T1's speed-ups."""

import dataclasses

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from tests.results.synthetic import cost_rows, decoded_records
from vflash_analysis.records import typed_frame
from vflash_analysis.results.cycle_figure import cycle_figure
from vflash_analysis.results.cycle_time import PREDICTED, cycle_frame
from vflash_analysis.results.sources import records_from_frames
from vflash_analysis.results.tables import speedup_table
from vflash_analysis.schemas import BENCHMARKS, COSTS
from vflash_analysis.stats import Bootstrap


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def chain_cycles(records):
    return records.cycles.loc[records.cycles["method"] == "chain"]


def test_f10_sets_decoded_cycles_beside_the_predicted_ones():
    records = decoded_records(cost_rows())
    frame = cycle_frame(records)
    chain = records.cycles.loc[records.cycles["method"] == "chain"]

    def of(quantity: str, setting: str, method: str = "chain") -> float:
        rows = frame.loc[
            (frame["quantity"] == quantity)
            & (frame["setting"] == setting)
            & (frame["method"] == method)
        ]
        return float(rows["value"].iloc[0])

    # Projecting a prompt takes 2 ms, once a text, within the draft of its first cycle.
    first = (chain["cycle"] == 0).mean()
    assert of("context_projection_ms", "") == pytest.approx(2 * first, rel=1e-5)
    assert of("draft_ms", "") == pytest.approx(1000 * chain["draft_s"].mean() - 2 * first, rel=1e-5)
    assert of("verify_ms", "") == pytest.approx(1000 * chain["verify_s"].mean(), rel=1e-5)
    assert of("bookkeeping_ms", "") == pytest.approx(1000 * chain["other_s"].mean(), rel=1e-5)
    whole = 1000 * (chain["draft_s"] + chain["verify_s"] + chain["other_s"]).mean()
    assert of("cycle_ms", "") == pytest.approx(whole, rel=1e-5)
    assert not ((frame["method"] == "ar") & (frame["quantity"] == "context_projection_ms")).any()
    context = chain["start_position"].mean() / 1000  # of a thousand tokens
    assert of("verify_ms", PREDICTED) == pytest.approx(8 + 2 * context, rel=1e-5)
    assert of("draft_ms", PREDICTED) == pytest.approx(2 + context, rel=1e-5)
    prompt = records.generations["prompt_tokens"].mean() / 1000
    projected = 10 * prompt * first
    assert of("context_projection_ms", PREDICTED) == pytest.approx(projected, rel=1e-5)
    figure, drawn = cycle_figure(frame)
    pd.testing.assert_frame_equal(drawn, frame)
    bars = [p for p in figure.axes[0].patches if isinstance(p, Rectangle)]
    hatched = [bar for bar in bars if bar.get_hatch()]
    assert len(hatched) == 4  # AR's verify; verify, draft and projection of the chain
    whole = 10 + 3 * context + projected
    assert sum(bar.get_height() for bar in hatched[1:]) == pytest.approx(whole, rel=1e-5)


def test_f10_predicts_nothing_from_another_machine_s_costs():
    frame = cycle_frame(decoded_records(cost_rows(device="another machine")))
    assert PREDICTED not in set(frame["setting"])
    figure, _ = cycle_figure(frame)
    assert "not predicted" in [text.get_text() for text in figure.axes[0].texts]


def test_f10_without_cycles_says_so():
    figure, _ = cycle_figure(
        cycle_frame(records_from_frames({"costs": typed_frame(cost_rows(), COSTS)}, "synthetic"))
    )
    assert [text.get_text() for text in figure.axes[0].texts] == ["no data"]


def test_f10_splits_the_other_time_where_trees_were_built():
    records = decoded_records(cost_rows())

    def with_tree(tree_s) -> list[str]:
        cycles = records.cycles.assign(tree_s=tree_s)
        frame = cycle_frame(dataclasses.replace(records, cycles=cycles))
        chain = frame.loc[(frame["method"] == "chain") & (frame["setting"] == "")]
        parts = chain.set_index("quantity")["value"]
        whole = parts[[n for n in ("tree_ms", "bookkeeping_ms") if n in parts]]
        assert whole.sum() == pytest.approx(
            1000 * chain_cycles(records)["other_s"].mean(), rel=1e-4
        )
        figure, _ = cycle_figure(frame)
        return [text.get_text() for text in figure.legends[0].get_texts()]

    half = records.cycles["other_s"] / 2
    assert with_tree(half)[3:] == ["tree building", "bookkeeping", "cost model"]
    assert with_tree(None)[3:] == ["bookkeeping", "cost model"]


def test_f10_shows_what_the_speed_up_is_end_to_end():
    """Reading 50, vision 80 and prefill 120 ms are the same for each method of a clip."""
    records = decoded_records(cost_rows(), BENCHMARKS)
    frame = cycle_frame(records)
    figure, _ = cycle_figure(frame)
    clip, speedups = figure.axes[1:]
    bars = [bar for bar in clip.patches if isinstance(bar, Rectangle)]
    own = frame.loc[frame["setting"] == ""]
    methods = list(dict.fromkeys(own.loc[own["quantity"] == "end_to_end_ms", "method"]))
    assert methods == ["ar", "chain"] and len(bars) == 4 * len(methods)
    assert [round(bar.get_width(), 6) for bar in bars[:3]] == [50, 80, 120]
    for method, four in (("ar", bars[:4]), ("chain", bars[4:])):
        rows = own.loc[(own["method"] == method) & (own["quantity"] == "end_to_end_ms")]
        assert sum(bar.get_width() for bar in four) == pytest.approx(
            rows["value"].iloc[0], rel=1e-5
        )
    table = speedup_table(records, Bootstrap(n_samples=20)).frame
    for quantity in ("decode_speedup", "end_to_end_speedup"):
        there = [
            f.loc[
                (f["quantity"] == quantity)
                & (f["method"] == "chain")
                & (f["benchmark"] == "macro")
                & (f["source"] == records.source)
            ]
            for f in (frame, table)
        ]
        assert there[0]["value"].tolist() == there[1]["value"].tolist()
    told = [text.get_text() for text in speedups.texts]
    shown = frame.loc[frame["quantity"].isin(("decode_speedup", "end_to_end_speedup")), "value"]
    assert told == [f"{one:.2f}×" for one in shown]


def test_f10_says_what_its_times_are_means_of():
    figure, _ = cycle_figure(cycle_frame(decoded_records(cost_rows())))
    told = " ".join(figure.texts[-1].get_text().split())
    assert "can take more or less" in told  # than decoded, as they were measured alone
    assert "mean over all cycles, where T1's AR time per token is the mean of the suites" in told


def test_f10_without_all_suites_has_no_mean_speed_up():
    figure, _ = cycle_figure(cycle_frame(decoded_records(cost_rows())))
    assert [text.get_text() for text in figure.axes[2].texts] == ["no mean: not all suites decoded"]
