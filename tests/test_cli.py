"""The command line: one JSON line last, one clear line for bad input, exit codes that mean something."""

import dataclasses
import io
import json
import shlex
import sys
from contextlib import nullcontext
from shutil import rmtree
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.clips import hub
from tests.clips.make_clips import write_clip
from tests.results.synthetic import write_synthetic
from vflash_analysis import cli, demo, environment, paths, publish, records, runner, stages
from vflash_analysis.errors import InputError
from vflash_analysis.results.objectives import objectives_table
from vflash_analysis.results.playback import pick
from vflash_analysis.results.sources import final_drafters, load_records
from vflash_analysis.results.write import Section
from vflash_analysis.run_facts import tracked_facts
from vflash_analysis.schemas import BENCHMARKS
from vflash_analysis.stats import Bootstrap
from vflash_analysis.summary import Outcome


def call(*words):
    """(exit code, output); an InputError stays an exception."""
    result = CliRunner().invoke(cli.app, list(words), catch_exceptions=True)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def last_json(output):
    return json.loads(output.strip().splitlines()[-1])


def finish(shard):
    shard.folder.mkdir(parents=True, exist_ok=True)
    for name in shard.outputs:
        (shard.folder / name).parent.mkdir(exist_ok=True)
        (shard.folder / name).write_text("x\n")
    done = [name for name in shard.outputs if not name.endswith(".parquet")]
    if len(done) < len(shard.outputs):  # stand-ins are no Parquet files; declare them as they are
        described = {n: {"bytes": 2, "rows": None, "sha256": "x"} for n in shard.outputs}
        records.write_json_atomic(shard.folder / "DONE", {"payload": {}, "outputs": described})
    else:
        records.write_done(shard.folder, {}, done)


def fake_runs(monkeypatch, failing=()):
    def run_shard(shard, limits, show, keep_stale):
        if shard.stage in failing:
            return Outcome(shard.name, "error", 1.0, "boom", "notebook.ipynb")
        finish(shard)
        return Outcome(shard.name, "ok", 1.0)

    monkeypatch.setattr(runner, "run_shard", run_shard)


def test_run_then_nothing_to_do(runs, monkeypatch):
    fake_runs(monkeypatch)
    code, output = call("run", "--profile", "smoke", "--json")
    told = last_json(output)
    assert code == 0 and told["ok"] and set(told["shards"].values()) == {"ok"}
    code, output = call("run", "--profile", "smoke", "--json")
    assert code == 0 and "nothing to do" in output
    assert set(last_json(output)["shards"].values()) == {"skipped"}
    code, output = call("status", "--profile", "smoke", "--json")
    assert code == 0 and last_json(output)["waiting"] == []


def test_a_failed_shard_makes_the_exit_code(runs, monkeypatch):
    fake_runs(monkeypatch, failing=("continuations",))
    code, output = call("run", "--profile", "smoke", "--json")
    assert code == 1
    told = last_json(output)
    assert told["failed"]["continuations"] == "boom"
    assert told["shards"]["decode-VDC-0"] == "blocked" and told["shards"]["clips"] == "ok"
    assert "continuations: error: boom (notebook.ipynb)" in output
    code, output = call("status", "--profile", "smoke")
    assert code == 1 and "5 of 14 shards done" in output


def test_only_runs_one_stage(runs, monkeypatch):
    fake_runs(monkeypatch)
    code, output = call("run", "--profile", "smoke", "--only", "clips", "--json")
    assert code == 0 and last_json(output)["shards"] == {"clips": "ok"}


def test_only_runs_one_drafter_that_differs_in_a_setting(runs, monkeypatch):
    fake_runs(monkeypatch)
    name = "drafter-self_reveal-0-4-4-drafter.block_size=4"
    before = [w for s in ("clips", "target", "continuations") for w in ("--only", s)]
    code, output = call("run", "--profile", "smoke", "--all", *before, "--only", name, "--json")
    assert code == 0 and last_json(output)["shards"][name] == "ok"
    assert len(list(runs.glob("smoke/drafter/*/DONE"))) == 1
    code, output = call("status", "--profile", "smoke", "--all")
    assert code == 1 and "4 of 18 shards done" in output
    with pytest.raises(InputError, match="--only: found"):
        call("run", "--profile", "smoke", "--only", name)  # planned with the studies alone


def test_interrupting_says_how_to_go_on(runs, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_plan", stop)
    code, output = call("run", "--profile", "smoke")
    assert code == 130 and "run the same command to go on" in output


def test_plan_tells_folders_and_needs(runs):
    code, output = call("plan", "--profile", "smoke", "--set", "decode.tree_nodes=30", "--json")
    told = last_json(output)
    assert code == 0 and told["profile"] == "smoke"
    (decode,) = [row for row in told["shards"] if row["stage"] == "decode"]
    assert decode["parameters"]["overrides"] == {"decode.tree_nodes": 30}
    assert decode["dependencies"][:2] == ["clips", "target"]
    assert len(output.strip().splitlines()) == 1
    code, output = call("plan", "--profile", "smoke")
    assert "decode-VDC-0" in output and "to do" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--profile", "nano"], "profile: found 'nano', allowed: h100, pocket, smoke"),
        (["run", "--set", "training.stpes=3"], "training.stpes: unknown setting"),
        (["run", "--set", "training.steps"], "--set: found 'training.steps', allowed: name=value"),
        (["run", "--profile", "smoke", "--only", "x"], "--only: found 'x', allowed: environment"),
        (["clips", "check", "--profile", "smoke"], "clips: no lists yet"),
        (["clips", "freeze", "--profile", "smoke"], 'clips.source: found "pocket", allowed'),
        (["figures", "--profile", "smoke"], "records: no finished shard has any"),
        (["figures", "--publish"], "--publish: allowed with --profile pocket"),
        (["figures", "--profile", "pocket", "--publish"], "publish: target is not done"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs, monkeypatch, capsys, words, message):
    monkeypatch.setattr("sys.argv", ["vflash", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    told = capsys.readouterr().err
    assert stop.value.code == 2
    assert told.startswith(f"vflash: {message}") and told.count("\n") == 1


def test_doctor_says_what_is_missing(runs, monkeypatch, tmp_path):
    code, output = call("doctor", "--profile", "smoke", "--json")
    items = {row["item"]: row for row in last_json(output)["items"]}
    assert code == 0 and items["numpy"]["ok"] and items["device"]["ok"]
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path / "nothing"))
    code, output = call("doctor", "--profile", "h100", "--json")
    items = {row["item"]: row for row in last_json(output)["items"]}
    assert code == 1 and not items["target"]["ok"] and not items["videos"]["ok"]
    (tmp_path / "config.json").write_text("{")
    code, output = call("doctor", "--profile", "h100", "--json")
    (*machine, target) = last_json(output)["items"]
    assert code == 1 and [row["item"] for row in machine] == list(items)[: len(machine)]
    assert target["item"] == "target files" and not target["ok"]
    assert target["note"].startswith(f"{tmp_path / 'config.json'}, line 1: not readable as JSON")
    (disk,) = (row for row in machine if row["item"] == "free disk")
    assert disk["wanted"] == "unknown" and not disk["ok"]
    monkeypatch.delenv("VFLASH_TARGET")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    for name in ("requirements.lock", "data"):
        (tmp_path / name).symlink_to(paths.PACKAGE.parent / name)
    (tmp_path / "local.yaml").write_text("targt: x\n")
    code, output = call("doctor", "--profile", "h100", "--json")
    items = {row["item"]: row for row in last_json(output)["items"]}
    assert code == 1 and items["free disk"]["wanted"] == "unknown"
    assert items["target"]["note"].startswith("local.yaml: targt: unknown setting")


def test_doctor_asks_no_disk_for_what_is_done(runs, monkeypatch):
    monkeypatch.setattr("vflash_analysis.config.local_paths", dict)
    monkeypatch.setattr(runner, "ask_preflight", lambda *_: [])
    told = []
    for _ in range(2):
        _, output = call("doctor", "--profile", "h100", "--json")
        told += [row for row in last_json(output)["items"] if row["item"] == "free disk"]
        for shard in stages.plan("h100"):
            if shard.stage == "drafter":
                finish(shard)
    assert [row["wanted"] for row in told] == ["33.5 GB or more", "2.0 GB or more"]


@pytest.mark.parametrize(("free_gb", "refused"), [(31.4, True), (31.5, False), (0.1, True)])
def test_a_run_whose_results_do_not_fit_on_the_disk_is_refused(runs, monkeypatch, free_gb, refused):
    monkeypatch.setattr("vflash_analysis.config.local_paths", dict)
    monkeypatch.setattr(environment, "free_disk_bytes", lambda _: int(free_gb * 1e9))
    monkeypatch.setattr(runner, "missing_inputs", lambda _: [])
    monkeypatch.setattr(runner, "one_device", lambda *_: nullcontext({}))
    monkeypatch.setattr(runner, "ask_preflight", lambda *_: [])
    fake_runs(monkeypatch)
    finish(next(shard for shard in stages.plan("h100") if shard.stage == "clips"))
    ran = ["run", "--profile", "h100", "--only", "drafter", "--only", "target"]
    if refused:
        free = f"{free_gb:.1f} GB at {runs}"
        with pytest.raises(InputError, match=rf"^free disk: found {free}, allowed: 31\.5 GB or mo"):
            call(*ran)
        assert not list(runs.glob("h100/target/*/DONE"))
        call(*ran[:3], "--only", "target")  # which leaves next to nothing
    else:
        call(*ran)
    assert len(list(runs.glob("h100/target/*/DONE"))) == 1


@pytest.mark.parametrize("profile", ["smoke", "pocket"])
def test_a_small_run_is_left_to_find_a_full_disk_out(runs, monkeypatch, profile):
    monkeypatch.setattr(environment, "free_disk_bytes", lambda _: 10**6)
    fake_runs(monkeypatch)
    code, output = call("run", "--profile", profile, "--json")
    assert code == 0 and last_json(output)["ok"]


def test_a_plan_needs_no_checkpoint(runs, monkeypatch):
    monkeypatch.setattr("vflash_analysis.config.local_paths", dict)
    code, output = call("plan", "--profile", "h100", "--json")
    told = last_json(output)
    assert code == 0 and len(told["shards"]) > 20 and not any(s["done"] for s in told["shards"])
    assert told["estimate"]["stages"]
    assert call("status", "--profile", "h100")[0] == 1


def test_clips_check_names_a_bad_file_and_reads_the_others(runs, tmp_path):
    (tmp_path / "text.mp4").write_text("no video\n")
    good = write_clip(tmp_path / "good.mp4", n_frames=8)
    words = ["clips", "check", "--profile", "smoke", str(tmp_path / "text.mp4"), str(good)]
    for _ in range(2):  # the second time from what was kept
        code, output = call(*words, "--json")
        told = last_json(output)
        assert code == 1 and (told["read"], told["bad"]) == (2, 1)
        assert [row["reason"] for row in told["clips"]] == ["not_video"]
        assert "2 clips read: 1 bad (1 not_video), 0 flagged; all columns in" in output
    report = pd.read_csv(told["report"])
    assert report["status"].tolist() == ["bad", "ok"]
    assert {"clip_id", "frames_requested", "n_frames", "codec", "reader"} <= set(report.columns)
    assert call("clips", "check", "--profile", "smoke", str(good))[0] == 0


# --------------------------------------------------------------------------- data of the suites

ON_SUITES = [
    "--set", "clips.source=suites", "--set", "clips.benchmarks=[VDC, LVB]",
    "--set", "clips.training_list=LLaVA-Video-178K",
]  # fmt: skip


@pytest.fixture
def videos(runs, tmp_path, monkeypatch):
    """A folder for videos that VFLASH_DATA names; descriptions and lists are the test's own."""
    monkeypatch.setattr(paths, "DATA", hub.copy_descriptions(tmp_path / "data"))
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path / "videos"))
    return tmp_path / "videos"


def test_doctor_data_prints_what_is_missing_and_the_commands_without_a_folder(runs, monkeypatch):
    monkeypatch.delenv("VFLASH_DATA", raising=False)
    monkeypatch.setattr("vflash_analysis.config.local_paths", dict)
    code, output = call("doctor", "--data", "--profile", "h100", "--json")
    told = last_json(output)
    assert code == 1 and not told["ok"] and len(told["items"]) == 6
    shown = output.strip().rpartition("\n")[0]
    assert "export VFLASH_DATA=" in shown and shown.count("VFLASH_DATA: not set") == 1
    for item in told["items"]:
        command = next(line for line in item["commands"] if line.startswith("hf download"))
        assert f'--local-dir "$VFLASH_DATA"/{item["hub_id"]}' in command and command in output
    assert call("doctor", "--data", "--profile", "pocket")[0] == 0


def test_doctor_data_is_content_with_whole_data_and_names_what_a_part_lacks(videos):
    hub.make_suites(videos)
    hub.make_corpus(videos, [f"ytb_Training{i:03d}" for i in range(9)])
    words = ["doctor", "--data", "--profile", "smoke", *ON_SUITES, "--json"]
    code, output = call(*words)
    items = {row["name"]: row for row in last_json(output)["items"]}
    assert list(items) == ["VDC", "LVB", "LLaVA-Video-178K"]
    assert code == 1  # VideoDetailCaption has 499 videos, this one 8
    assert items["VDC"]["gaps"] == [
        "VDC: 8 videos are listed, expected: 499; another revision draws other clips"
    ]
    assert items["LVB"]["gaps"] == items["LVB"]["faults"] == items["LVB"]["commands"] == []
    assert (items["LVB"]["listed"], items["LVB"]["found"]) == (8, 8)
    assert (items["LVB"]["drawn"], items["LVB"]["drawn_found"]) == (2, 2)
    assert items["LLaVA-Video-178K"]["drawn"] == 6


def test_a_run_on_suites_refuses_up_front_in_a_line_per_cause(videos, monkeypatch):
    monkeypatch.setattr(runner, "run_plan", lambda *words, **options: pytest.fail("it ran"))
    hub.make_suites(videos)
    (videos / hub.LVB / "lvb_val.json").unlink()
    code, output = call("run", "--profile", "smoke", *ON_SUITES)
    lines = output.strip().splitlines()
    assert code == 2 and len(lines) == 3 and all(line.startswith("vflash: ") for line in lines)
    assert "lvb_val.json of longvideobench/LongVideoBench was not found" in lines[0]
    assert "handed out after its form has been accepted" in lines[0]
    assert "LLaVA-Video-178K was not found" in lines[1]
    assert "vflash doctor --data --profile smoke" in lines[2]


def test_a_run_begins_where_only_some_videos_lack_or_the_clips_are_done(videos, monkeypatch):
    monkeypatch.setattr(runner, "run_plan", lambda *words, **options: [])
    hub.make_suites(videos)
    hub.make_corpus(videos, [f"ytb_Training{i:03d}" for i in range(9)])
    assert call("run", "--profile", "smoke", *ON_SUITES)[0] == 0
    rmtree(videos / hub.LVB)
    assert call("run", "--profile", "smoke", *ON_SUITES)[0] == 2
    assert call("run", "--profile", "smoke", *ON_SUITES, "--only", "environment")[0] == 0


def test_freeze_writes_the_lists_and_says_so(videos):
    hub.make_suites(videos)
    words = ["clips", "freeze", "--profile", "smoke", *ON_SUITES, "--json"]
    words += ["--set", f"clips.frozen_lists={paths.DATA / 'suites' / 'lists'}"]
    states = [[row["state"] for row in last_json(call(*words)[1])["lists"]] for _ in range(2)]
    assert states == [["written"] * 2, ["unchanged"] * 2]


def test_a_rehearsal_prints_the_run_that_reads_it(tmp_path, runs, monkeypatch):
    folder = tmp_path / "a folder"
    code, output = call("clips", "rehearse", str(folder), "--json")
    told = last_json(output)
    assert code == 0 and told["clips"] == dict.fromkeys(BENCHMARKS, 4)
    line = next(line for line in output.splitlines() if line.startswith("VFLASH_DATA="))
    data, *words = shlex.split(line)
    monkeypatch.setenv("VFLASH_DATA", data.partition("=")[2])
    assert words[:2] == [sys.argv[0], "run"]  # the command itself, wherever it is installed
    code, output = call("plan", *words[2:], "--json")
    decoded = {row["name"] for row in last_json(output)["shards"] if row["stage"] == "decode"}
    assert code == 0 and decoded == {f"decode-{name}-0" for name in BENCHMARKS}


# --------------------------------------------------------------------------- records of a run


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    write_synthetic(folder)
    return folder


@pytest.fixture
def tracked(synthetic, tmp_path, monkeypatch):
    """The synthetic records stand in for the tracked ones, figures go to a folder of the test."""
    monkeypatch.setattr("vflash_analysis.results.sources.TRACKED_RECORDS", synthetic)
    for name in ("FIGURES", "TRACKED_FIGURES"):
        monkeypatch.setattr(f"vflash_analysis.results.report.{name}", tmp_path / "figures")
    return tmp_path / "figures"


def test_figures_draws_the_tracked_records(tracked, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "vflash_analysis.results.report.build_results",
        lambda found, n_samples: drawn.append((found.status, n_samples)) or [tracked / "T1.csv"],
    )
    code, output = call("figures", "--json")
    assert code == 0 and drawn == [("stored", 2000)]
    assert last_json(output)["files"] == [str(tracked / "T1.csv")]


def test_report_prints_a_table(tracked):
    code, output = call("report", "--table", "T2_accepted_length", "--json")
    told = last_json(output)
    assert code == 0 and told["table"] == "T2_accepted_length"
    assert {"accepted_length"} <= {row["quantity"] for row in told["rows"]}


def test_report_prints_the_sections_that_are_asked_for(tracked):
    words = ("report", "--table", "T9_beside_paper", "--section", "SPARROW table 4")
    code, output = call(*words)
    assert code == 0 and "SPARROW table 4" in output and "SPARROW table 5" not in output
    with pytest.raises(InputError, match=r"section 'no such': allowed is the title, or its begin"):
        call(*words[:-1], "no such")
    for options in (("--section", "x"), ("--table", "T4_lossless", "--out", "page.html")):
        with pytest.raises(InputError, match=r"^--(section|out): allowed with"):
            call("report", *options)


def test_a_title_that_begins_another_is_one_section(tracked):
    words = ("report", "--table", "T1_speedup", "--section")
    code, output = call(*words, "decoding speed-up")
    assert code == 0 and "mean of clips" not in output.replace("mean of clips of", "")
    two = r"\['decoding speed-up', 'decoding speed-up, mean of clips'\]$"
    with pytest.raises(InputError, match=f"section 'decoding': allowed is .* {two}"):
        call(*words, "decoding")


def test_rows_too_wide_for_the_terminal_have_one_form(monkeypatch, capsys):
    """Whatever digits a name holds, and where nothing is known."""
    header = ("method", "objective", "where", "VDC", "macro")
    wide = "3.00× [2.45, 3.73] (36/36)"
    body = (("Tree-60", "mask-only", "A", wide, wide), ("chain", "", "C", "–", "3.77×"))
    monkeypatch.setattr(cli, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setenv("COLUMNS", "40")
    cli._print_grid(Section("speed-up", header, body, 3))
    assert capsys.readouterr().out.splitlines() == [
        "Tree-60, mask-only, A", f"  VDC: {wide}", f"  macro: {wide}",
        "chain, C", "  VDC: –", "  macro: 3.77×",
    ]  # fmt: skip


def test_a_grid_too_wide_for_the_terminal_has_a_line_for_each_value(monkeypatch, capsys):
    header, body = ("method", "where", "VDC", "macro"), (("chain", "A", "3.00× [2.45, 3.73]", "–"),)
    monkeypatch.setattr(cli, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    for columns, told in (("30", "chain, A\n  VDC: 3.00× [2.45, 3.73]\n  macro: –"), ("80", "A ")):
        monkeypatch.setenv("COLUMNS", columns)
        cli._print_grid(Section("speed-up", header, body, 2))
        assert told in capsys.readouterr().out


def test_report_writes_a_page_and_prints_its_path(tracked, tmp_path, monkeypatch):
    monkeypatch.setattr("vflash_analysis.results.page.report_page", lambda *given: "<html>")
    code, output = call("report", "--out", str(tmp_path / "page.html"), "--json")
    assert code == 0 and last_json(output) == {"page": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").read_text() == "<html>"
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    assert call("report")[0] == 0
    assert (tmp_path / "figures" / "latest" / "report.html").is_file()


def test_demo_shows_both_texts(tracked):
    code, output = call("demo", "--json")
    told = last_json(output)
    assert code == 0 and set(told) == {"ar", "tree60"}
    assert "decode time ratio" in output


def test_the_demo_prints_both_texts_where_there_is_no_terminal(synthetic):
    shown = pick(load_records([synthetic]), None, ("ar", "tree60"))
    paper = io.StringIO()
    demo.play(shown, 4.0, Console(file=paper, force_terminal=False, width=120))
    assert "Autoregressive" in paper.getvalue() and "Tree-60" in paper.getvalue()


def test_publish_merges_a_finished_run_and_draws_from_it(synthetic, tmp_path, runs, monkeypatch):
    place = tmp_path / "tracked"
    monkeypatch.setattr(paths, "TRACKED_RECORDS", place)
    monkeypatch.setattr(publish, "records_of", lambda shards: load_records([synthetic]))
    samples = []
    monkeypatch.setattr(
        publish,
        "build_results",
        lambda n_samples: samples.append(n_samples) or [tmp_path / "F1.png"],
    )
    monkeypatch.setattr(publish, "read_tidy_csv", lambda path: path)
    monkeypatch.setattr(publish, "write_claims", lambda readme, frame, gates: readme)
    monkeypatch.setattr(publish, "tracked_gates", lambda n_samples: None)
    written = publish.publish([], [], 77)
    assert samples == [77] and not list(place.glob(".*"))
    assert written[-2:] == [tmp_path / "F1.png", paths.ROOT / "README.md"]
    before, after = load_records([synthetic]), load_records([place])
    assert len(after.cycles) == len(before.cycles)
    assert after.generations.equals(before.generations)
    bare = after.anchors["slot_match"].isna()
    final = after.anchors["drafter_sha256"].isin(final_drafters(before)["drafter_sha256"])
    assert bare.any() and (bare == ~final).all()
    assert set(after.anchors.loc[bare, "setting"]) <= set(publish.LENGTH_SETTINGS)
    whole, slim = (objectives_table(r, Bootstrap(n_samples=20)).frame for r in (before, after))
    lengths = [
        frame.loc[frame["quantity"].isin(("anchor_accepted_length", "paired_difference"))]
        for frame in (whole, slim)
    ]
    assert len(lengths[0]) and lengths[0]["value"].tolist() == lengths[1]["value"].tolist()
    assert after.cycles["n_accepted"].equals(before.cycles["n_accepted"])
    kept = [frame.loc[frame["quantity"] == "right_kept", "value"] for frame in (whole, slim)]
    assert len(kept[0]) and kept[0].tolist() == kept[1].tolist()
    monkeypatch.setattr(publish, "SIZE_LIMIT", 10)
    with pytest.raises(InputError, match="allowed: 10"):
        publish.publish([], [], 77)
    with pytest.raises(InputError, match="publish: target is not done"):
        publish.publish(stages.plan("smoke"), [], 77)


def test_the_training_log_stays_whole_for_drafters_that_decode_only():
    log = pd.DataFrame(
        [("a", "", 1), ("a", "", 2), ("b", "", 1), ("b", "", 2), ("b", "validation", 1)],
        columns=["drafter_sha256", "setting", "step"],
    )
    decoded = pd.DataFrame({"drafter_sha256": ["", "a"]})
    kept = publish.slim_training(SimpleNamespace(training=log, generations=decoded))
    assert kept.index.tolist() == [0, 1, 3, 4]


def test_figures_and_tables_name_what_they_lack_and_what_they_reused(
    synthetic, tmp_path, monkeypatch
):
    def shard(name, output="generations.parquet", done=True, stale=False):
        told = {"outputs": (output,), "done": done, "stale": stale, "folder": synthetic}
        return SimpleNamespace(name=name, stage=name.partition("-")[0], **told)

    shards = [shard("clips", "clips.csv", done=False), shard("decode-VDC-0", stale=True)]
    shards += [shard(f"decode-VDC-{seed}", done=False) for seed in range(1, 5)]
    monkeypatch.setattr(stages, "plan", lambda *options: shards)
    monkeypatch.setattr("vflash_analysis.results.report.FIGURES", tmp_path)
    monkeypatch.setattr("vflash_analysis.results.report.FIGURE_OF_TABLE", {})
    monkeypatch.setattr("vflash_analysis.results.report.FIGURE_OF_FRAME", {})
    monkeypatch.setattr("vflash_analysis.results.report.write_replay", lambda *given: [])
    code, output = call("figures", "--profile", "smoke")
    lacking = "as not done: decode-VDC-1, decode-VDC-2, decode-VDC-3 and 1 more"
    assert code == 1 and f"not in it, {lacking}; vflash status says why" in output
    told = (tmp_path / "latest" / "T1_speedup.md").read_text()
    assert f"Not in it, {lacking}." in told
    assert "Reused though their code or inputs have changed: decode-VDC-0." in told
    code, output = call("report", "--profile", "smoke", "--table", "T4_lossless")
    assert code == 1 and "T4 Losslessness" in output and lacking in output
    del shards[2:]
    code, output = call("figures", "--profile", "smoke")
    assert code == 0 and "not in it" not in output


@pytest.mark.parametrize("option", ["--ablation", "--all", "--keep-stale"])
def test_options_of_a_run_need_a_profile(tracked, option):
    with pytest.raises(InputError, match=r"--ablation.*: allowed with --profile only"):
        call("figures", option)
    assert not tracked.exists()


def test_publish_tracks_the_strips_that_are_shown_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "TRACKED_RECORDS", tmp_path / "tracked")
    for names in (["a.jpg", "b.jpg"], ["b.jpg"], []):
        strips = [tmp_path / name for name in names]
        for path in strips:
            path.write_text(f"{names}")
        found = publish.track_strips(strips)
        assert [path.read_text() for path in found] == [f"{names}"] * len(names)
        assert sorted((tmp_path / "tracked" / "strips").glob("*")) == found


def test_publish_tracks_the_drafters_of_the_first_training_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "TRACKED_DRAFTERS", tmp_path / "drafters")
    for text in ("first", "second"):
        folder = tmp_path / text
        (folder / "drafter").mkdir(parents=True)
        (folder / "drafter" / "config.json").write_text(text)
        shard = SimpleNamespace(folder=folder, parameters={"arm": "mask_only"})
        place = publish.track_drafter(shard)
        assert (place / "config.json").read_text() == text
    assert [path.name for path in (tmp_path / "drafters").iterdir()] == ["mask_only"]


def test_publish_keeps_tracked_drafters_that_a_run_did_not_train(synthetic, monkeypatch):
    whole = load_records([synthetic])
    monkeypatch.setattr(paths, "TRACKED_RECORDS", synthetic)
    first = whole.anchors["drafter_sha256"] == "mask_only-1-100-100"
    trained = whole.anchors.loc[first].assign(n_accepted=0)
    log = whole.training.loc[whole.training["drafter_sha256"] == "mask_only-1-100-100"]
    found = dataclasses.replace(whole, anchors=trained, training=log)
    names = ("drafter-self_reveal_rev0-2-100-100", "drafter-mask_only-9-100-100")
    waiting = [SimpleNamespace(name=name) for name in names]
    merged = publish.with_tracked(found, waiting)
    kept = whole.anchors.loc[whole.anchors["drafter_sha256"] == "self_reveal_rev0-2-100-100"]
    assert len(kept) and merged.anchors.equals(pd.concat([trained, kept], ignore_index=True))
    assert set(merged.training["drafter_sha256"]) == set(merged.anchors["drafter_sha256"])
    assert publish.with_tracked(found, waiting[1:]) is found
    other = dataclasses.replace(found, anchors=trained.assign(target_sha256="other"))
    with pytest.raises(InputError, match=r"another target than that of the 1 .* --ablation"):
        publish.with_tracked(other, waiting)


def test_publish_refuses_a_file_that_changed_since_it_was_done(tmp_path, monkeypatch):
    records.write_text_atomic(tmp_path / "gates.csv", "gate\n")
    records.write_done(tmp_path, {}, ["gates.csv"])
    (tmp_path / "gates.csv").write_text("xxxx\n")  # as long as before
    shard = SimpleNamespace(
        name="target", stage="target", folder=tmp_path, done=True, why_not_done=lambda: None
    )
    with pytest.raises(InputError, match=r"gates\.csv: changed since .* remove that folder"):
        publish.publish([shard], [], 20)


@pytest.mark.parametrize("content", ["", "garbage\n", "\x00"])
def test_a_damaged_list_of_runs_says_what_to_do(tmp_path, monkeypatch, content):
    monkeypatch.setattr(paths, "TRACKED_RECORDS", tmp_path)
    (tmp_path / publish.RUNS_NAME).write_text(content)
    with pytest.raises(InputError, match=r"publish: .*runs\.csv: .*git restores"):
        publish.provenance([], [SimpleNamespace(name="one")])
    with pytest.raises(InputError, match=r"runs\.csv: "):
        tracked_facts()


def test_a_folder_that_cannot_be_used_is_one_line(monkeypatch, capsys):
    def refuse(*options):
        raise PermissionError(30, "Read-only file system", "/runs/pocket")

    monkeypatch.setattr(stages, "plan", refuse)
    monkeypatch.setattr("sys.argv", ["vflash", "plan"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "vflash: /runs/pocket: Read-only file system\n"


def test_every_tracked_shard_names_its_run_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "TRACKED_RECORDS", tmp_path)
    shards = [SimpleNamespace(name=name, folder=tmp_path / name) for name in ("one", "two")]
    for number, shard in enumerate(shards):
        shard.folder.mkdir()
        told = {"run_id": f"r{number}", "git_commit": "c", "git_dirty": False, "device": "cpu"}
        (shard.folder / "manifest.json").write_text(json.dumps(told | {"more": 1}))
    before = publish.provenance(shards, [])
    assert before.astype(str).to_numpy().tolist() == [
        ["one", "r0", "c", "False", "cpu"], ["two", "r1", "c", "False", "cpu"]
    ]  # fmt: skip
    before.to_csv(tmp_path / publish.RUNS_NAME, index=False)
    kept = publish.provenance(shards[1:], [SimpleNamespace(name="one")])
    assert kept["shard"].tolist() == ["two", "one"] and kept["run_id"].tolist() == ["r1", "r0"]
    assert publish.provenance(shards[:1], [])["shard"].tolist() == ["one"]


@pytest.mark.parametrize("command", ["figures", "report", "demo"])
def test_records_are_those_of_the_plan_that_the_run_options_give(runs, monkeypatch, command):
    asked = []

    def plan(*args, **kwargs):
        asked.append((args, kwargs))
        raise InputError("stop here")

    monkeypatch.setattr(stages, "plan", plan)
    words = ["--profile", "smoke", "--all", "--keep-stale", "--set", "decode.tree_nodes=30"]
    words += [] if command == "demo" else ["--ablation"]  # a demo needs no ablation
    with pytest.raises(InputError, match="stop here"):
        call(command, *words)
    assert asked == [(("smoke", {"decode.tree_nodes": 30}, command != "demo", True, True), {})]


def test_make_gives_the_same_options_to_run_and_figures():
    lines = (paths.ROOT / "Makefile").read_text().split("reproduce: ")[1].splitlines()[1:3]
    assert [line.split("vflash ")[1] for line in lines] == [
        f"{command} --profile $(PROFILE) $(RUN)" for command in ("run", "figures")
    ]


def test_bulky_detail_stays_for_the_first_clips_of_each_benchmarks_first_seed(monkeypatch):
    monkeypatch.setattr(publish, "SHOWN_CLIPS", 2)
    clips = ["VDC-0-2", "VDC-0-1", "VDC-0-0", "VDC-1-0", "LVB-1-0"]
    generations = pd.DataFrame({
        "benchmark": ["VDC"] * 4 + ["LVB"], "clip_id": clips, "sample_seed": [0, 0, 0, 1, 1],
    })  # fmt: skip
    generations = pd.concat([generations, generations])  # of another method
    detail = {column: [[1, 2]] * 6 for column in publish.CYCLE_DETAIL}
    cycles = pd.DataFrame({"clip_id": [*clips, "VDC-0-0"], "n_accepted": range(6), **detail})
    kept = publish.slim(generations, cycles)
    assert kept["n_accepted"].tolist() == [0, 1, 2, 3, 4, 5]
    for column in publish.CYCLE_DETAIL:
        assert [value is None for value in kept[column]] == [True, False, False, True, False, False]
