"""The plan: which shards there are, what each hangs on, and when one counts as done."""

import dataclasses
import json
import shutil

import pandas as pd
import pytest

from tests.planted import finish, shard_at
from vflash_analysis import config, identity, paths, stages
from vflash_analysis.schemas import STUDIES


def ids(shards):
    return {shard.name: shard.run_id for shard in shards}


def test_every_shard_comes_after_what_it_needs(runs):
    for profile, ablation, studies in (
        ("smoke", False, True), ("smoke", True, False), ("pocket", True, True),
    ):  # fmt: skip
        shards = stages.plan(profile, ablation=ablation, studies=studies)
        seen: set[str] = set()
        for shard in shards:
            assert set(shard.dependencies) <= seen and shard.name not in seen
            assert shard.folder == runs / profile / shard.stage / shard.run_id
            assert shard.notebook.is_file()
            seen.add(shard.name)
        absent = set() if studies else set(STUDIES)
        assert {shard.stage for shard in shards} == set(stages.STAGES) - absent


def test_shards_of_the_pocket_profile(runs):
    profile = config.load_profile("pocket")
    steps, seeds = profile.training.steps, profile.train_seeds
    clips = profile.training.training_clips
    shards = stages.plan("pocket")
    count = pd.Series([shard.stage for shard in shards]).value_counts()
    assert count["decode"] == 5 * len(profile.clips.sample_seeds)
    assert count["drafter"] == len(seeds) * len(profile.objectives)
    decode = next(shard for shard in shards if shard.name == "decode-MLVU-1")
    assert [name for name in decode.dependencies if name.startswith("drafter")] == [
        f"drafter-{arm}-{seed}-{steps}-{clips}" for seed in seeds for arm in profile.objectives
    ]
    more = stages.plan("pocket", ablation=True)
    main = {(arm, seed, steps, clips) for arm in profile.objectives for seed in seeds}
    swept = {
        (arm, seed, budget, size)
        for group in profile.ablation
        for arm in group.arms
        for seed in group.train_seeds
        for budget in group.budgets
        for size in group.training_clips
    }
    assert sum(shard.stage == "drafter" for shard in more) == len(main | swept)
    acceptance = next(shard for shard in more if shard.stage == "acceptance")
    assert sum(name.startswith("drafter") for name in acceptance.dependencies) == len(main)


def test_every_training_seed_decodes_every_clip(runs):
    """Resampling over training seeds needs each of them on the same videos."""
    shards = stages.plan("smoke", {"train_seeds": [0, 1], "clips.sample_seeds": [0, 1]})
    arms = config.load_profile("smoke").objectives
    for shard in (s for s in shards if s.stage == "decode"):
        drafters = {name for name in shard.dependencies if name.startswith("drafter")}
        assert drafters == {f"drafter-{arm}-{seed}-4-4" for arm in arms for seed in (0, 1)}


def test_an_arm_defined_anew_is_another_run(runs, monkeypatch):
    before = ids(stages.plan("smoke"))
    changed = {**config.ARMS, "mask_only": {"objective": "mask_only", "lambda_flow": 0.5}}
    monkeypatch.setattr(config, "ARMS", changed)
    after = ids(stages.plan("smoke"))
    drafters = {
        name for name in before if name.startswith("drafter") and before[name] != after[name]
    }
    assert drafters == {"drafter-mask_only-0-4-4"}
    assert before["decode-VDC-0"] != after["decode-VDC-0"]


def test_an_override_changes_what_depends_on_it_and_nothing_before(runs):
    before = ids(stages.plan("smoke"))
    after = ids(stages.plan("smoke", {"decode.tree_nodes": 30}))
    changed = {name.split("-")[0] for name in before if before[name] != after[name]}
    later = {"speedup", "acceptance", "ablations", "cycle", "beside_paper"}
    assert changed == {"decode", "cost", *later}
    after = ids(stages.plan("smoke", {"training.learning_rate": 0.5}))
    assert before["continuations"] == after["continuations"]
    assert before["drafter-self_reveal-0-4-4"] != after["drafter-self_reveal-0-4-4"]
    after = ids(stages.plan("smoke", {"bootstrap_samples": 7}))
    assert before["decode-VDC-0"] == after["decode-VDC-0"] and before["speedup"] != after["speedup"]
    after = ids(stages.plan("smoke", {"decode.max_new_tokens": 7}))
    assert before["target"] == after["target"] and before["decode-VDC-0"] != after["decode-VDC-0"]


def test_all_clips_decodes_more_and_trains_nothing_again(runs):
    few, all_ = stages.plan("pocket"), stages.plan("pocket", all_clips=True)
    same = {"environment", "clips", "target", "continuations", "drafter", "cost", "layers"}
    more = ids(all_)
    for one in few:
        assert (one.run_id == more[one.name]) == (one.stage in same), one.name
    varied = {
        stages.shard_name("drafter", dataclasses.asdict(key))
        for key in config.design_drafters(config.load_profile("pocket"))
    }
    assert set(more) - set(ids(few)) == {*STUDIES, *varied} and len(varied) == 12
    decode = next(shard for shard in all_ if shard.stage == "decode")
    most = config.load_profile("pocket").clips.clips_per_suite_all
    assert decode.parameters["overrides"] == {"clips.clips_per_suite": most}


VARIED = [f"drafter-self_reveal-0-4-4-drafter.{v}" for v in ("block_size=4", "context=text_only")]


def test_the_studies_come_with_their_drafters_and_change_no_earlier_shard(runs):
    plain, shards = stages.plan("smoke", ablation=True), stages.plan("smoke", ablation=True,
                                                                      studies=True)  # fmt: skip
    extra = [shard.name for shard in shards if shard.name not in ids(plain)]
    assert extra == [*VARIED, *STUDIES]
    changed = {name for name, run_id in ids(plain).items() if ids(shards)[name] != run_id}
    assert changed == {"beside_paper"}  # which shows them
    needs = {shard.name: shard.dependencies for shard in shards}
    main = ["drafter-self_reveal-0-4-4", "drafter-mask_only-0-4-4"]
    assert needs["lengths"] == ("clips", "target")
    assert needs["design"] == ("clips", "target", main[0], *VARIED)
    assert needs["decode-VDC-0"] == ("clips", "target", *main)
    for shard in shards:
        if shard.stage != "design":
            assert not set(shard.dependencies) & set(VARIED), shard.name
    assert set(main) <= set(needs["ablations"])
    given = stages.plan("smoke", {"drafter.source": "data/pocket/drafters"}, studies=True)
    names = {shard.name: shard.dependencies for shard in given}
    assert names["design"] == ("clips", "target", main[0]) and not set(VARIED) & set(names)


def test_a_drafter_does_not_hang_on_which_others_are_trained(runs):
    before = ids(stages.plan("smoke", studies=True))
    fewer = ids(stages.plan("smoke", {"design.variants": ["drafter.block_size=4"]}, studies=True))
    changed = {name for name in fewer if fewer[name] != before[name]}
    assert changed == {"design", "beside_paper"}
    # the states of a further layer are other texts' folders, and a drafter's input
    tapped = {"design.variants": ["drafter.num_tapped_layers=2"]}
    assert ids(stages.plan("smoke", tapped))["continuations"] != before["continuations"]
    drafters = [before["drafter-self_reveal-0-4-4"], *(before[name] for name in VARIED)]
    assert len(set(drafters)) == 3


def beside_paper(profile, **options):
    return next(s for s in stages.plan(profile, **options) if s.stage == "beside_paper")


def test_t9_hangs_on_the_studies_that_it_shows(runs, tmp_path, monkeypatch):
    assert not set(STUDIES) & set(beside_paper("smoke").dependencies)
    measured = beside_paper("smoke", studies=True)
    assert set(STUDIES) <= set(measured.dependencies) and measured.parameters["studies"] is True
    for name, value in (("design.clips_per_suite", 2), ("lengths.steps", 3)):
        changed = {"overrides": {name: value}}
        assert beside_paper("smoke", studies=True, **changed).run_id != measured.run_id
        assert beside_paper("smoke", **changed).run_id == beside_paper("smoke").run_id
    # a run of the tracked profile shows the tracked ones where it measures none
    monkeypatch.setattr(paths, "TRACKED_RECORDS", tmp_path)
    before = {studies: beside_paper("pocket", studies=studies) for studies in (False, True)}
    (tmp_path / "lengths").mkdir()
    (tmp_path / "lengths" / "generations.parquet").write_text("one\n")
    assert beside_paper("pocket").run_id != before[False].run_id
    assert beside_paper("pocket", studies=True).run_id == before[True].run_id


def test_what_tells_arms_apart_reads_the_drafters_records():
    """A control differs from its arm in what the records of its training tell, not in its decodes."""
    tables = {
        s.name for s in stages.STAGES.values() if "decode" in s.needs and s.outputs[0][0] == "T"
    }
    assert tables == {"speedup", "acceptance", "ablations", "beside_paper"}
    for name in tables:
        assert "drafter" in stages.STAGES[name].needs, name
    assert set(stages.STAGES["cost"].beside) == {"decode", "drafter"}


def test_the_lengths_study_hangs_on_all_that_its_drafter_is(runs):
    def lengths(**overrides):
        shards = stages.plan("smoke", overrides, studies=True)
        return next(shard.run_id for shard in shards if shard.stage == "lengths")

    before = lengths()
    assert lengths(**{"design.methods": ["ar"]}) == before
    for name, value in (
        ("train_seeds", [1]), ("lengths.steps", 3), ("training.gamma", 4), ("drafter.block_size", 4),
    ):  # fmt: skip
        assert lengths(**{name: value}) != before, name


def test_the_target_of_the_lengths_is_told_by_its_files_not_by_its_place(runs, tmp_path):
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        shards = stages.plan("smoke", {"lengths.target": str(tmp_path / name)}, studies=True)
        found.append(next(shard for shard in shards if shard.stage == "lengths"))
    assert found[0].run_id == found[1].run_id
    (tmp_path / "two" / "config.json").write_text('{"other": "weights"}')
    assert not stages.missing_inputs(found)
    shards = stages.plan("smoke", {"lengths.target": str(tmp_path / "three")}, studies=True)
    told = f"lengths: lengths.target: found nothing at {tmp_path / 'three'}"
    assert stages.missing_inputs(shards) == [told]
    shards = stages.plan("smoke", {"lengths.target": str(tmp_path / "two")}, studies=True)
    assert next(s for s in shards if s.stage == "lengths").run_id != found[0].run_id


def test_machine_paths_never_enter_a_run_id(runs, tmp_path, monkeypatch):
    told = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text("{}")
        (tmp_path / place / "training.jsonl").write_text("{}")
        monkeypatch.setenv("VFLASH_TARGET", str(tmp_path / place))
        monkeypatch.setenv("VFLASH_DATA", str(tmp_path / place))
        told.append(ids(stages.plan("h100")))
    assert told[0] == told[1]
    (tmp_path / "two" / "config.json").write_text('{"other": "weights"}')
    assert ids(stages.plan("h100"))["target"] != told[0]["target"]


@pytest.mark.parametrize("name", ["target", "drafter"])
@pytest.mark.parametrize("kind", ["parent", "file", "dangling link"])
def test_nothing_but_a_checkpoint_is_hashed(runs, tmp_path, monkeypatch, name, kind):
    """A wrong folder may be one of many checkpoints, or the whole disk."""
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("{}")
    else:
        (place / "checkpoint").mkdir(parents=True)
        (place / "checkpoint" / "config.json").write_text("{}")
    if kind == "dangling link":
        (place / "config.json").symlink_to("nowhere")
    monkeypatch.setenv("VFLASH_TARGET", str(place if name == "target" else tmp_path / "nowhere"))
    hashed = []
    monkeypatch.setattr(identity, "sha256_of_file", lambda path: hashed.append(path) or "0" * 64)
    shards = stages.plan("h100", {"drafter.source": str(place)} if name == "drafter" else {})
    assert not [path for path in hashed if path.is_relative_to(tmp_path)]
    lines = [line for line in stages.missing_inputs(shards) if line.startswith(name)]
    lacks = place / ("nowhere" if kind == "dangling link" else "config.json")  # where it points
    assert lines and all(line.endswith(f"found nothing at {lacks}") for line in lines)


def test_clips_hang_on_the_description_of_their_corpus_and_on_a_list_of_ones_own(
    runs, tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    monkeypatch.delenv("VFLASH_DATA", raising=False)  # a plan needs no videos
    inputs = next(s for s in stages.plan("h100") if s.stage == "clips").inputs
    assert identity.ABSENT not in inputs.values()
    before = next(s for s in stages.plan("h100") if s.stage == "clips").run_id
    described = tmp_path / "data"
    for folder in ("suites", "training"):
        shutil.copytree(paths.DATA / folder, described / folder)
    monkeypatch.setattr(paths, "DATA", described)
    for name, changed, same in (
        ("suites/VDC.yaml", ("title: VideoDetailCaption", "title: other words"), True),
        ("suites/MLVU.yaml", ("download_bytes: 285_064_098_709", "download_bytes: 1"), True),
        ("suites/VDC.yaml", ("prompt: question", "prompt: description"), False),
    ):
        file = described / name
        assert changed[0] in file.read_text()
        file.write_text(file.read_text().replace(*changed))
        clips = next(s for s in stages.plan("h100") if s.stage == "clips")
        assert (clips.run_id == before) == same, changed
    corpus = described / "training" / "LLaVA-Video-178K.yaml"
    other = next(s for s in stages.plan("h100") if s.stage == "clips").run_id
    corpus.write_text(corpus.read_text().replace("split: caption", "split: other"))
    assert next(s for s in stages.plan("h100") if s.stage == "clips").run_id != other
    monkeypatch.setenv("VFLASH_DATA", str(tmp_path))
    shards = stages.plan("h100", {"clips.training_list": "mine.jsonl"})
    told = f"clips: clips.training_list: found nothing at {tmp_path / 'mine.jsonl'}"
    assert told in stages.missing_inputs(shards)


def test_the_plan_is_json(runs):
    rows = [shard.as_json() for shard in stages.plan("smoke")]
    assert json.loads(json.dumps(rows)) == rows
    assert all(output.startswith(row["folder"]) for row in rows for output in row["outputs"])


def test_stale_results_are_reused_only_when_asked_and_marked(runs, monkeypatch):
    old = next(s for s in stages.plan("smoke") if s.stage == "clips")
    finish(old.folder, old.outputs, parameters_id=old.parameters_id)
    really = identity.code_digest
    monkeypatch.setattr(identity, "code_digest", lambda *asked: "changed" + really(*asked))
    fresh = next(s for s in stages.plan("smoke") if s.stage == "clips")
    assert fresh.run_id != old.run_id and not fresh.done and not fresh.stale
    kept = stages.plan("smoke", keep_stale=True)
    clips, target = kept[1], kept[2]
    assert (clips.run_id, clips.stale, clips.done) == (old.run_id, True, True)
    assert target.inputs["clips"] == old.run_id
    other = stages.plan("smoke", {"clips.num_frames": 5}, keep_stale=True)[1]
    assert not other.stale  # other parameters are never reused


def test_stale_results_of_other_parameters_upstream_are_not_reused(runs, monkeypatch):
    first = next(s for s in stages.plan("smoke") if s.stage == "speedup")
    finish(first.folder, first.outputs, parameters_id=first.parameters_id)

    def speedup(**overrides):
        shards = stages.plan("smoke", overrides, keep_stale=True)
        return next(s for s in shards if s.stage == "speedup")

    really = identity.code_digest
    monkeypatch.setattr(identity, "code_digest", lambda *asked: "changed" + really(*asked))
    assert speedup().stale  # only code has changed
    assert not speedup(**{"decode.tree_nodes": 30}).stale  # decoded otherwise
    assert not speedup(**{"training.learning_rate": 0.5}).stale  # two stages up


def test_done_must_declare_every_output(tmp_path):
    finish(tmp_path, ["other.csv"])
    shard = shard_at(tmp_path)
    assert "does not declare table.csv" in shard.why_not_done()
    finish(tmp_path, ["table.csv"])
    assert shard.done
    (tmp_path / "table.csv").write_text(
        "value\n1\n2\n"
    )  # rows that were not there when it was done
    assert "9 bytes" not in shard.why_not_done() and "bytes" in shard.why_not_done()
    (tmp_path / "table.csv").unlink()
    assert "missing" in shard.why_not_done()
