"""The cost measurement at tiny shapes: every row, exact peaks, both paths alike, refusals."""

import errno
import json
import os

import pytest
import torch

from vflash_analysis import environment, records, shapes, sizes
from vflash_analysis.config import CostSettings, DrafterSettings
from vflash_analysis.decoding import cost, measure
from vflash_analysis.decoding.forwards import Forwards, Job, likely_tree
from vflash_analysis.decoding.measure import Subject
from vflash_analysis.decoding.memory import PeakMemory
from vflash_analysis.decoding.timing import Timer
from vflash_analysis.decoding.tree import is_chain, tree_depths
from vflash_analysis.errors import InputError
from vflash_analysis.model.untrained import untrained_drafter, untrained_target
from vflash_analysis.records import read_records, read_records_csv, typed_frame
from vflash_analysis.schemas import COPY, COSTS, FORWARDS, HUGGING_FACE, NEW_CONTEXT, OURS
from vflash_analysis.shapes import DrafterShape, TargetShape
from vflash_analysis.sizes import Work

CPU = torch.device("cpu")
TINY = TargetShape(4, 32, 4, 2, 8, 48, 400)
GROUPED = TargetShape(4, 448, 14, 2, 32, 64, 400)  # 7 query heads share a key/value head
DRAFTER = DrafterSettings(num_hidden_layers=2, num_tapped_layers=1)
CALLS = {OURS: FORWARDS, HUGGING_FACE: ("ar", "verify_chain", "verify_tree60")}


def forwards_of(shape, longest, dtype=torch.float32) -> Forwards:
    target = untrained_target(shape, "tiny", dtype, CPU, "vflash", longest + 122)
    drafter = untrained_drafter(target, DRAFTER)
    return Forwards(target, drafter, DrafterShape(shape, 2, 1, 16), longest, 60)


def subject(shape=TINY, **changes) -> Subject:
    values = {
        "name": "tiny", "shape": shape, "drafter": DRAFTER, "tree_nodes": 60, "dtype": "float32",
        "device": "cpu", "attention": "vflash", "run_id": "r1",
    }  # fmt: skip
    return Subject(**(values | changes))


@pytest.fixture
def small_copy(monkeypatch):
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**16)


# --------------------------------------------------------------------------- forwards


def test_both_paths_choose_by_the_same_logits():
    """In fp64, at two lengths, the second longer than the first: the cache is filled up again."""
    forwards = forwards_of(TINY, 90, torch.float64)
    seen = []
    for model in (forwards._target.model, forwards._hf):
        model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].reshape(-1, 400)))
    for context in (40, 90):
        jobs = {(job.implementation, job.forward): job for job in forwards.jobs(context)}
        assert sorted(jobs) == sorted((who, name) for who, own in CALLS.items() for name in own)
        for name, rows in (("ar", 1), ("verify_chain", 16), ("verify_tree60", 61)):
            found = []
            for who in (OURS, HUGGING_FACE):
                assert jobs[who, name].rows == rows
                jobs[who, name].seconds(Timer(CPU))
                found.append(seen[-1])
            assert found[0].shape == (rows, 400)
            torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_a_draft_is_timed_on_exactly_its_context():
    forwards = forwards_of(TINY, 40)
    drafter = forwards._drafting[0]._drafter
    seen = []

    def note(module, args, kwargs):
        new = kwargs["context_hidden_states"].shape[1]
        positions = kwargs["position_ids"][0].tolist()
        seen.append((kwargs["cache"].get_seq_length(), new, positions))

    drafter.register_forward_pre_hook(note, with_kwargs=True)
    jobs = {job.forward: job for job in forwards.jobs(40) if job.implementation == OURS}
    for name in ("draft_chain", "draft_tree60"):
        for _ in range(2):
            jobs[name].seconds(Timer(CPU))
            held, new, positions = seen[-1]
            assert (held, new) == (40, NEW_CONTEXT)
            assert positions == list(range(40, 40 + NEW_CONTEXT + 16))


def test_seconds_are_of_the_call_alone():
    """A fake clock: preparing takes 100 s, the call 2 s of verify and 5 s of other things."""
    now = [0.0]

    def prepare():
        now[0] += 100

    def call(timer):
        now[0] += 2
        timer.lap("verify_s")
        now[0] += 5
        timer.lap("other_s")

    job = Job(OURS, "ar", 1, Work(1.0, 1.0), prepare, call)
    assert job.seconds(Timer(CPU, clock=lambda: now[0])) == 2


def test_the_tree_is_one_that_a_drafter_might_grow():
    tree = likely_tree(16, 60)
    depths = tree_depths(tree.token_ids, tree.parents, 15)
    assert len(tree.token_ids) == 60 and not is_chain(tree.parents)
    # 2/3, then 4/9, then 8/27 down the spine before 2/9, the anchor's second child
    assert tree.parents[:4] == [-1, 0, 1, -1]
    assert max(depths) > 5


# --------------------------------------------------------------------------- memory


def test_our_memory_grows_with_the_mask_alone_and_no_head_is_repeated():
    """Peaks at three lengths: a cached token costs no more at the longer ones, so nothing is squared.

    The mask of q rows is held as bool, as fp32, and once for each of the 7 heads folded into rows:
    q (1 + 4 + 28) bytes a cached token; 2 x 14 x 32 x 4 would repeat the key/value heads.
    """
    lengths, peaks = (1024, 2048, 4096), {}
    with PeakMemory(CPU) as memory:
        forwards = forwards_of(GROUPED, max(lengths))
        for context in lengths:
            for job in forwards.jobs(context):
                timer = Timer(CPU)
                job.prepare()
                timer.start()
                name = f"{job.implementation} {job.forward} {context}"
                memory.measure(name, lambda job=job, timer=timer: job.call(timer))
    for who, names in CALLS.items():
        for name in names:
            peaks[who, name] = [memory.peak_bytes[f"{who} {name} {length}"] for length in lengths]
    repeated = 2 * 14 * 32 * 4
    for name, rows in (("ar", 1), ("verify_chain", 16), ("verify_tree60", 61)):
        first, second, third = peaks[OURS, name]
        bound = 0 if name == "ar" else rows * 33
        assert (second - first) / 1024 <= bound < repeated
        assert (third - second) / 2048 <= bound
    for name in ("draft_chain", "draft_tree60"):
        assert len(set(peaks[OURS, name])) == 1
    # what the bound excludes is there where it is done: the measurement would see it
    first, second, _ = peaks[HUGGING_FACE, "verify_chain"]
    assert (second - first) / 1024 >= repeated


def test_what_measuring_takes_is_counted_before():
    """All that is held and the largest of the calls, against `sizes.measuring_bytes`."""
    with PeakMemory(CPU) as memory:
        made = []
        memory.measure("made", lambda: made.append(forwards_of(GROUPED, 2048)))
        for job in made[0].jobs(2048):
            timer = Timer(CPU)

            def whole(job=job, timer=timer):
                job.prepare()
                timer.start()
                job.call(timer)

            memory.measure(f"{job.implementation} {job.forward}", whole)
    made_bytes = memory.peak_bytes.pop("made")
    found = made_bytes + max(memory.peak_bytes.values())
    counted = sizes.measuring_bytes(DrafterShape(GROUPED, 2, 1, 16), 2048, 61, 4)
    layer = 2 * 448 * 448 + 2 * 448 * 64 + 3 * 448 * 64 + 2 * 448
    target = 4 * (layer + 448 + 2 * 64) + 448 + 2 * 400 * 448  # biases; last norm, head, embedding
    drafter = 448 * 448 + 2 * (layer + 2 * 32) + 2 * 448  # projector; norms of heads; two norms
    caches = 2 * (2 * 4 * 2 * 32 + 2 * 2 * 2 * 32) * (2048 + 61) + 448 * 2048  # and tapped states
    projection = 2048 * (3 * 448 + 2 * 2 * 2 * 32)  # more than Hugging Face's verify of 61 rows
    assert counted == 4 * (target + drafter + caches + projection) == 45_082_368
    assert 0.8 * counted < found <= counted


# --------------------------------------------------------------------------- rows


def test_every_forward_has_its_row(small_copy):
    lines = []
    rows = measure.measure(
        subject(), CostSettings(context_tokens=(64, 32), repeats=2), lines.append
    )
    frame = typed_frame(rows, COSTS)
    keys = ["implementation", "forward", "context_tokens"]
    expected = [("torch", COPY, 0)]
    for context in (32, 64):
        expected += [(who, name, context) for who, names in CALLS.items() for name in names]
    assert sorted(frame[keys].itertuples(index=False, name=None)) == sorted(expected)
    assert (frame["seconds"] > 0).all() and frame["reason"].isna().all()
    assert (frame["seconds_low"] <= frame["seconds"]).all()
    assert (frame["seconds"] <= frame["seconds_high"]).all()
    assert set(frame["repeats"]) == {2} and set(frame["run_id"]) == {"r1"}
    at = frame.set_index(keys)
    for who, names in CALLS.items():
        for name in names:
            near, far = at.loc[(who, name, 32)], at.loc[(who, name, 64)]
            assert near["read_bytes"] < far["read_bytes"] and near["flops"] < far["flops"]
            assert 0 < near["peak_bytes"] <= far["peak_bytes"]
    step = sizes.decoder_work(TINY, 1, 64, 4)
    assert at.loc[(OURS, "ar", 64), "read_bytes"] == step.bytes
    assert at.loc[("torch", COPY, 0), "read_bytes"] == 2 * 2**16
    assert lines[-1].startswith("turn 4/4 |") and lines[-1].endswith("0:00 left")


def test_a_forward_that_does_not_fit_costs_its_own_rows_only():
    def refuse(timer):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    class Stub:
        def jobs(self, context):
            work = Work(1.0, 1.0)
            fits = Job(OURS, "ar", 1, work, lambda: None, lambda timer: timer.lap("verify_s"))
            return [fits, Job(HUGGING_FACE, "ar", 1, work, lambda: None, refuse)]

    settings = CostSettings(context_tokens=(32,), repeats=3)
    with PeakMemory(CPU) as memory:
        reasons = measure._take_peaks(Stub(), settings, memory, Timer(CPU))
    rows = measure._times(Stub(), settings, reasons, Timer(CPU), lambda line: None)
    ours, theirs = rows
    assert ours["repeats"] == 3 and ours["seconds"] >= 0
    assert theirs["repeats"] == 0 and "seconds" not in theirs
    assert theirs["reason"] == "out_of_memory: CUDA out of memory. Tried to allocate 9 GiB"


def test_contexts_take_turns_as_their_forwards_do():
    """So a slow minute falls on no length, and on no forward, alone."""
    ran = []

    class Stub:
        def jobs(self, context):
            def job(name):
                def call(timer):
                    ran.append((context, name))
                    timer.lap("verify_s")

                return Job(OURS, name, 1, Work(1.0, 1.0), lambda: None, call)

            return [job("ar"), job("verify_chain")]

    settings = CostSettings(context_tokens=(64, 32), repeats=3)
    rows = measure._times(Stub(), settings, {}, Timer(CPU), lambda line: None)
    there = [(64, "ar"), (64, "verify_chain"), (32, "ar"), (32, "verify_chain")]
    swapped = [(32, "verify_chain"), (32, "ar"), (64, "verify_chain"), (64, "ar")]
    assert ran == there + there[::-1] + swapped
    assert [(row["context_tokens"], row["forward"]) for row in rows] == there
    assert {row["repeats"] for row in rows} == {3}


def test_a_context_at_which_nothing_fits_has_only_reasons():
    def refuse(timer):
        raise torch.OutOfMemoryError("too large")

    class Stub:
        def jobs(self, context):
            return [Job(OURS, "ar", 1, Work(1.0, 1.0), lambda: None, refuse)]

    settings = CostSettings(context_tokens=(64,), repeats=3)
    with PeakMemory(CPU) as memory:
        reasons = measure._take_peaks(Stub(), settings, memory, Timer(CPU))
    (row,) = measure._times(Stub(), settings, reasons, Timer(CPU), lambda line: None)
    assert row["repeats"] == 0 and row["reason"] == "out_of_memory: too large"


def test_a_device_that_is_too_small_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(environment, "free_bytes", lambda device: 10**9)
    monkeypatch.setattr(measure, "copy_row", lambda *_: pytest.fail("measured"))
    big = subject(shapes.LLAVA_ONEVISION_7B, name="7b", drafter=DrafterSettings(), dtype="bfloat16")
    with pytest.raises(InputError) as refusal:
        measure.measure(big, CostSettings(context_tokens=(25_119,)))
    told = str(refusal.value)
    # 15.23 GB of decoder and embedding, 1.97 of the drafter, 2 x 1.44 of caches, 0.72 of taps, ...
    assert told.startswith("7b in bfloat16 after 25,119 tokens: needs 22.")
    assert "found 1.0 GB free on cpu" in told and "\n" not in told


# --------------------------------------------------------------------------- the command


@pytest.fixture
def config_file(tmp_path):
    numbers = {
        "num_hidden_layers": 9, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 400,
    }  # fmt: skip
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": numbers}))
    return folder / "config.json"


def test_the_command_writes_rows_and_the_machine(config_file, tmp_path, capsys, small_copy):
    out = tmp_path / "out" / "mine.csv"
    words = ["--shape", str(config_file), "--device", "cpu", "--dtype", "float32"]
    words += ["--contexts", "32", "--repeats", "1", "--out", str(out)]
    assert cost.main(words) == 0
    frame = read_records_csv(out, COSTS)
    assert len(frame) == 10 and set(frame["shape"]) == {"my-model"}
    machine = json.loads(out.with_suffix(".json").read_text())
    assert machine["device"] == frame["device"].iloc[0] and "torch" in machine["versions"]
    assert "10 rows in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--shape", "70b"],
            "--shape: found '70b', allowed: llava-onevision-7b, llava-onevision-0",
        ),
        (["--shape", "none/config.json"], "none/config.json: no such file"),
        (["--contexts", "512,x"], 'cost.context_tokens[1]: found text "x", allowed: a whole'),
        (["--contexts", "512,512"], "--contexts: found '512,512', allowed: distinct"),
        (
            ["--contexts", "8"],
            "cost.context_tokens[0]: found whole number 8, allowed: 16 to 1000000",
        ),
        (["--contexts", "16,99999999"], "cost.context_tokens[1]: found whole number 99999999"),
        (["--repeats", "0"], "cost.repeats: found whole number 0, allowed: 1 to 1000"),
        (["--device", "cuda"], "device: found 'cuda', but torch sees no CUDA device"),
        (["--dtype", "float32"], "llava-onevision-7b in float32 after 25,119 tokens: needs 4"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr(environment, "free_bytes", lambda device: 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ["--shape", "llava-onevision-7b", "--device", "cpu", *words]
    assert cost.main(given) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {message}") and told.count("\n") == 1


@pytest.mark.parametrize("fault", ["suffix", "folder", "machine", "another", "parent", "read_only"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    fault, config_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(cost, "measure", lambda *_: pytest.fail("measured"))
    file, folder = tmp_path / "file", tmp_path / "folder.csv"
    file.touch()
    (folder / "machine.json").mkdir(parents=True)
    out, message = {
        "suffix": (tmp_path / "rows.txt", "rows.txt', allowed: the path of a file that ends in"),
        "folder": (folder, f"--out: found a folder at {folder}, allowed: a file"),
        "machine": (folder / "machine.csv", "machine.json, allowed: a file, or nothing"),
        "another": (config_file.with_suffix(".csv"), "config.json, which would be written over"),
        "parent": (file / "under" / "rows.csv", f"--out: found {file / 'under'}: Not a directory"),
        "read_only": (file.parent / "rows.csv", "Read-only file system, allowed: a folder to"),
    }[fault]
    if fault == "read_only":  # what a mount refuses, it refuses root too

        def refuse(**_):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(cost.tempfile, "TemporaryFile", refuse)
    words = ["--shape", str(config_file), "--device", "cpu", "--contexts", "32"]
    assert cost.main([*words, "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --out: ") and message in told and told.count("\n") == 1


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_rows_that_cannot_be_written_are_printed(
    suffix, config_file, tmp_path, capsys, monkeypatch, small_copy
):
    """A disk that is full by then, at the first file or at the second."""
    out = tmp_path / "mine.csv"

    def replace(source, target):
        if target.suffix == suffix:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(records.os, "replace", replace)
    words = ["--shape", str(config_file), "--device", "cpu", "--dtype", "float32"]
    words += ["--contexts", "32", "--repeats", "1", "--out", str(out)]
    assert cost.main(words) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        f"error: {out}: No space left on device, allowed: a place to write to; what was measured "
        "is printed\n"
    )
    table = printed.out[printed.out.index("run_id,") :]
    kept = tmp_path / "printed.csv"
    kept.write_text(table)
    assert len(read_records_csv(kept, COSTS)) == 10
    assert [path.name for path in tmp_path.glob("*mine*")] == ["mine.csv"] * (suffix == ".json")


def test_a_profile_s_target_is_measured(tmp_path, small_copy):
    from vflash_analysis.config import load_profile

    settings = load_profile("pocket", {"cost.context_tokens": [32], "cost.repeats": 1})
    cost.measure_profile(settings, tmp_path / "unused", "run-1", tmp_path)
    frame = read_records(tmp_path / "costs.parquet", COSTS)
    assert set(frame["shape"]) == {"pocket"} and set(frame["run_id"]) == {"run-1"}
    assert len(frame) == 10
