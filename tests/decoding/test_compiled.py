"""Compiled decoding: the same texts from the same cycles, and nothing compiled once a text runs.

The fast tests trace the steps as for compiling and run what was traced; the slow ones compile.
"""

from __future__ import annotations

import pytest
import torch

from tests.decoding.scripted import SETTINGS, Bench
from tests.tiny import save_target, tiny_drafter, tiny_target
from vflash_analysis.decoding.clip import ClipDecoder, ShardFacts
from vflash_analysis.decoding.huggingface import generate_outside
from vflash_analysis.decoding.plan import Planned
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.errors import InputError
from vflash_analysis.model import fixed
from vflash_analysis.model.compiled import CompiledTarget
from vflash_analysis.model.target import load_target

SPECS = ("ar", "chain", "tree60", "lookup")


def compiled_target(seed: int, dtype: torch.dtype, num_layers: int = 4):
    target = tiny_target(seed, num_layers, dtype)
    target.compiled = CompiledTarget(target)
    return target


def cycles(generation):
    """What a text's cycles did, without times and scores."""
    return [
        (c.start_position, list(c.draft_token_ids), list(c.draft_parents), c.n_accepted)
        for c in generation.cycles
    ]


@pytest.fixture(scope="module")
def traced():
    """Graphs traced so far; they are run as they are instead of being compiled."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed, "BACKEND", backend)
        yield graphs


@pytest.fixture(scope="module")
def bench(traced) -> Bench:
    """A compiled target after a first clip of all methods: 5 shapes, 3 of the target, 1 draft."""
    target = compiled_target(3, torch.float64, num_layers=3)
    bench = Bench.on(target, tiny_drafter(target, 103, 1), 3)
    for spec in SPECS:
        bench.run(spec, stop_ids=())
    return bench


def test_case73_texts_and_cycles_are_those_without_compiling(bench):
    plain = Bench.make(3, num_layers=3)
    plain.drafter = tiny_drafter(plain.target, 103, 1)
    plain = Bench.on(plain.target, plain.drafter, 3)
    fresh = Bench.on(bench.target, bench.drafter, 3)
    for spec in (*SPECS, "chain:rounds=3"):
        found, expected = fresh.run(spec, stop_ids=()), plain.run(spec, stop_ids=())
        assert found.token_ids == expected.token_ids, spec
        assert cycles(found) == cycles(expected), spec


def test_a_second_clip_compiles_nothing(bench):
    lengths = set()
    with torch.compiler.set_stance("fail_on_recompile"):
        for prompt_seed in (3, 4, 6):
            other = Bench.on(bench.target, bench.drafter, prompt_seed)
            lengths.add(len(other.input_ids))
            texts = {tuple(other.run(spec, stop_ids=()).token_ids) for spec in SPECS}
            assert len(texts) == 1
    assert len(lengths) > 1  # lengths between the same multiples of 64 share a size


@pytest.mark.slow
def test_another_size_compiles_each_shape_once_more(bench, traced):
    """1 row, 16 rows with states (chain) and without (look-up), 61 rows; not the draft, whose size
    follows from the cap given to decode. Then so many sizes that torch alone would have stopped.
    """
    before = len(traced)
    other = Bench.on(bench.target, bench.drafter, 4, 61)
    for spec in SPECS:
        other.run(spec, stop_ids=())
    assert len(traced) - before == 4
    for new_tokens in (62, 63):
        Bench.on(bench.target, bench.drafter, 4, new_tokens).run("ar", 5)
    assert len(traced) - before == 6


def test_compiling_is_not_timed(bench, monkeypatch):
    """A clock that only runs while something is being compiled."""
    now = 0.0
    make = fixed.Fixed.__init__

    def slow(self, *args):
        nonlocal now
        now += 100.0
        make(self, *args)

    monkeypatch.setattr(fixed.Fixed, "__init__", slow)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    other = Bench.on(bench.target, bench.drafter, 3, 65)
    for spec in ("ar", "chain:block=15"):
        found = other.run(spec, 5, stop_ids=(), timer=Timer(clock=lambda: now))
        assert found.decode_s == found.context_projection_s == 0.0
        assert {c.end_s for c in found.cycles} == {0.0}
    assert now == 300.0


def test_generate_still_works_on_the_same_model(bench):
    fresh = Bench.on(bench.target, bench.drafter, 3)
    outside = generate_outside(bench.target, fresh.input_ids, fresh.pixel_values, 12, bench.drafter)
    assert outside.token_ids == fresh.run("chain:unbanned", 12).token_ids


def test_an_older_cache_cannot_be_decoded_from(bench):
    first = Bench.on(bench.target, bench.drafter, 3)
    Bench.on(bench.target, bench.drafter, 4)
    first.cache.truncate(0)
    with pytest.raises(InputError, match="cannot truncate 0 rows"):
        first.run("ar")


def test_records_tell_that_decoding_was_compiled(bench):
    """By the device: tables never pool two of them."""
    facts = ShardFacts("run", "smoke", 0, 2)
    devices = [
        ClipDecoder(target, [Planned("hf_generate")], None, SETTINGS, facts)._shared["device"]
        for target in (bench.target, tiny_target(3))
    ]
    assert devices[0] == f"{devices[1]}, compiled"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_code_gives_the_same_texts(dtype):
    plain = Bench.make(5, dtype=dtype)
    target = compiled_target(5, dtype)
    bench = Bench.on(target, tiny_drafter(target, 105), 5)
    for spec in ("ar", "chain", "tree60"):
        found, expected = bench.run(spec, stop_ids=()), plain.run(spec, stop_ids=())
        assert found.token_ids == expected.token_ids, spec
        assert cycles(found) == cycles(expected), spec
    with torch.compiler.set_stance("fail_on_recompile"):
        again = Bench.on(target, bench.drafter, 5)
        for spec in ("ar", "chain", "tree60"):
            assert again.run(spec, stop_ids=()).token_ids == bench.run("ar", stop_ids=()).token_ids


@pytest.mark.gpu
def test_cuda_graphs_give_the_same_texts(tmp_path):
    """Two clips, so that the second one replays what the first one recorded."""
    folder = save_target(tiny_target(5, dtype=torch.float32), tmp_path)
    plain, wanted = (load_target(folder, "float32", "cuda", compile=c) for c in (False, True))
    for prompt_seed in (3, 4):
        texts = []
        for target in (plain, wanted):
            bench = Bench.on(target, tiny_drafter(target, 105), prompt_seed)
            texts += [bench.run(s, stop_ids=()).token_ids for s in ("ar", "chain", "tree60")]
        assert all(text == texts[0] for text in texts)
