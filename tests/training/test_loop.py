"""Training runs: exact resume, kills, frozen target, records, refusals."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.tiny import tiny_drafter, tiny_target
from tests.training.toys import ListSource, random_source, settings
from vflash_analysis.environment import device_label
from vflash_analysis.errors import InputError
from vflash_analysis.model.drafter import drafter_sha256, load_drafter
from vflash_analysis.model.network import DrafterLayer
from vflash_analysis.records import read_records
from vflash_analysis.schemas import TRAINING
from vflash_analysis.training import checkpoints, loop
from vflash_analysis.training.blocks import target_pieces
from vflash_analysis.training.checkpoints import latest_checkpoint
from vflash_analysis.training.loop import train
from vflash_analysis.training.objectives import compute_loss

TARGET = tiny_target(0, dtype=torch.float32)
PIECES = target_pieces(TARGET)


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def killed_after(steps: int) -> Any:
    """A loss that dies in the step after `steps` more ones."""
    done = 0

    def loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done == steps:
            raise Killed
        done += 1
        return compute_loss(*args, **kwargs)

    return loss


def new() -> Any:
    return tiny_drafter(TARGET, 1)


def run(out: Path, drafter: Any = None, source: Any = None, **keywords: Any) -> Path:
    chosen = keywords.pop("settings", settings())
    data = random_source(new(), 7) if source is None else source
    keywords.setdefault("log", lambda line: None)
    return train(drafter or new(), PIECES, data, chosen, out, **keywords)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_drafter(folder, TARGET).state_dict()


def records(folder: Path) -> pd.DataFrame:
    return read_records(folder.parent / "training.parquet", TRAINING)


def facts(folder: Path) -> dict[str, Any]:
    return load_drafter(folder, TARGET).config.training


def rows_without_time(folder: Path) -> list[dict[str, Any]]:
    frame = records(folder).drop(columns="seconds")
    return [{k: str(v) for k, v in row.items()} for row in frame.to_dict("records")]


@pytest.mark.parametrize(
    ("objective", "optimizer"),
    [("self_reveal", "adamw"), ("wrong_reveal", "adamw"), ("self_reveal", "muon")],
)
def test_20_steps_are_10_and_10_more_bit_for_bit(
    tmp_path: Path, objective: str, optimizer: str
) -> None:
    chosen = settings(objective=objective, optimizer=optimizer, ramp_fraction=0.5)
    validation = random_source(new(), 3, prompt=14)
    straight = run(tmp_path / "a", settings=chosen, validation=validation, log_every=4)
    with pytest.raises(Killed):
        run(
            tmp_path / "b",
            settings=chosen,
            validation=validation,
            log_every=4,
            loss=killed_after(10 + 1 + 3),
        )
    found = latest_checkpoint(tmp_path / "b" / "checkpoints")
    assert found is not None and found[1]["step"] == 10
    lines: list[str] = []
    resumed = run(
        tmp_path / "b", settings=chosen, validation=validation, log_every=4, log=lines.append
    )
    assert "resuming after step 10 of 20" in lines
    last = read_records(resumed.parent / "training.parquet", TRAINING).groupby("setting")["loss"]
    told = last.last()
    assert f"| loss {told['']:.4f}, validation {told['validation']:.4f} |" in lines[-1]
    assert drafter_sha256(straight) == drafter_sha256(resumed)
    assert facts(straight) == facts(resumed)
    first, second = weights(straight), weights(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert rows_without_time(straight) == rows_without_time(resumed)


def test_a_resume_sees_the_clips_that_the_kill_left_out(tmp_path: Path) -> None:
    """20 clips, one epoch of 10 steps, killed after 7: both parts together see each clip once."""
    chosen = settings(steps=10, clips_per_step=2, checkpoint_every=7)
    first, second = random_source(new(), 20), random_source(new(), 20)
    with pytest.raises(Killed):
        run(tmp_path, settings=chosen, source=first, loss=killed_after(7))
    run(tmp_path, settings=chosen, source=second)
    assert len(first.read) == 16  # the batch of step 8 was read, then came the kill
    assert len(second.read) == 6
    assert sorted(first.read[:14] + second.read) == sorted(first.clip_ids())


def test_a_source_is_told_what_comes_up_to_the_end_of_the_next_step(tmp_path: Path) -> None:
    chosen = settings(steps=3, clips_per_step=2, evaluate_every=3)
    source, held = random_source(new(), 7), random_source(new(), 3, prompt=14)
    told: list[tuple[list[str], int]] = []
    for data in (source, held):

        def expect(indices: Any, data: ListSource = data) -> None:
            told.append(([f"clip-{i}" for i in indices], len(data.read)))

        data.expect = expect  # type: ignore[method-assign]
    run(tmp_path, settings=chosen, source=source, validation=held, micro_clips=1)
    assert len(source.read) == 6
    assert told == [
        (source.read[:4], 0),
        (source.read[2:6], 2),
        (source.read[4:6], 4),
        (held.read, 0),
    ]


def test_a_kill_while_a_checkpoint_is_written_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(checkpoint_every=5)
    straight = run(tmp_path / "a", settings=chosen)

    real, calls = os.replace, 0

    def killed_at_second_checkpoint(source: Any, place: Any) -> None:
        nonlocal calls
        calls += Path(place).name.startswith("step_")
        if calls == 2:
            raise Killed
        real(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "replace", killed_at_second_checkpoint)
        with pytest.raises(Killed):
            run(tmp_path / "b", settings=chosen)
    root = tmp_path / "b" / "checkpoints"
    assert (root / ".step_00000010.tmp").is_dir()
    found = latest_checkpoint(root)
    assert found is not None and found[1]["step"] == 5
    resumed = run(tmp_path / "b", settings=chosen)
    assert drafter_sha256(resumed) == drafter_sha256(straight)


def test_only_the_newest_checkpoint_stays_and_none_after_the_end(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def loss(*args: Any, **kwargs: Any) -> Any:
        root = tmp_path / "checkpoints"
        seen.append(sorted(p.name for p in root.iterdir()) if root.is_dir() else [])
        return compute_loss(*args, **kwargs)

    run(tmp_path, settings=settings(steps=7, checkpoint_every=2), loss=loss)
    assert [names[-1:] for names in seen] == [
        [], [], *[[f"step_0000000{n}"] for n in (2, 2, 4, 4, 6)],
    ]  # fmt: skip
    assert all(len(names) <= 1 for names in seen)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "drafter", "training.json", "training.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["half", "empty", "longer", "gone"])
def test_a_damaged_checkpoint_is_named_with_sizes(tmp_path: Path, damage: str) -> None:
    with pytest.raises(Killed):
        run(tmp_path, loss=killed_after(12))
    (path,) = (tmp_path / "checkpoints").glob("step_*/*.safetensors")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        cut = {"half": content[: len(content) // 2], "empty": b"", "longer": content + b"xx"}
        path.write_bytes(cut[damage])
    with pytest.raises(InputError) as error:
        run(tmp_path)
    assert path.name in str(error.value) and f"saved with {len(content)} bytes" in str(error.value)


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, loss=killed_after(12))
    with pytest.raises(InputError, match=r"settings.gamma = 7.0, found 3.0"):
        run(tmp_path, settings=settings(gamma=3.0))
    with pytest.raises(InputError, match="clips"):
        run(tmp_path, source=random_source(new(), 6))
    run(tmp_path)
    with pytest.raises(InputError, match=r"settings.steps = 20, found 30"):
        run(tmp_path, settings=settings(steps=30))


def test_a_finished_run_is_returned_not_repeated(tmp_path: Path) -> None:
    drafter, again = new(), new()
    first = run(tmp_path, drafter)
    second = run(tmp_path, again, loss=killed_after(0))
    assert first == second
    for a, b in zip(drafter.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert again.config.training == drafter.config.training


@pytest.mark.parametrize("tie", [False, True])
def test_target_head_and_embedding_stay_the_targets(tmp_path: Path, tie: bool) -> None:
    target = tiny_target(0, dtype=torch.float32, tie=tie)
    assert (target.lm_head.weight is target.embedding.weight) == tie
    before = copy.deepcopy(target.model.state_dict())
    drafter = tiny_drafter(target, 1)
    start = copy.deepcopy(drafter.state_dict())
    data, chosen = random_source(drafter, 7), settings(steps=3)
    folder = train(drafter, target_pieces(target), data, chosen, tmp_path, log=lambda line: None)
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in target.model.parameters())
    saved = load_drafter(folder, target).state_dict()
    assert saved.keys() == start.keys()
    assert not any(v.shape[0] == target.vocab_size for v in saved.values())
    # Every weight of the drafter is trained, norms that start at 1 included.
    assert all(not torch.equal(saved[name], start[name]) for name in start)


def test_a_drafter_that_cannot_be_saved_is_found_out_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = new()

    def save(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("some tensors share memory")

    monkeypatch.setattr(drafter, "save_pretrained", save)
    with pytest.raises(RuntimeError, match="share memory"):
        run(tmp_path, drafter, loss=killed_after(0))


def test_muon_needs_whole_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Accelerator, "distributed_type", loop.DistributedType.FSDP)
    with pytest.raises(InputError, match=r"training\.optimizer: found muon, allowed under FSDP"):
        run(tmp_path, settings=settings(optimizer="muon"))


def test_half_precision_drafters_are_trained_in_fp32(tmp_path: Path) -> None:
    drafter = new().to(torch.bfloat16)
    folder = run(tmp_path, drafter, settings=settings(steps=2))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert {v.dtype for v in weights(folder).values()} == {torch.float32}


def test_no_supervised_tokens_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    items = [
        dataclasses.replace(
            item,
            input_ids=item.input_ids[: item.prompt_tokens + 1],
            states=item.states[: item.prompt_tokens],
        )
        for item in random_source(new(), 5).items
    ]
    with pytest.raises(InputError, match="found 0 supervised tokens in 5"):
        run(tmp_path, source=ListSource(items), loss=killed_after(0))
    mixed = ListSource([*items[:3], *random_source(new(), 2).items])
    lines: list[str] = []
    folder = run(tmp_path, source=mixed, settings=settings(steps=2), log=lines.append)
    assert any("kept 2 of 5" in line for line in lines)
    assert set(mixed.read) == {"clip-0", "clip-1"} and facts(folder)["training_clips"] == 2


def test_training_clips_is_a_prefix_of_the_data(tmp_path: Path) -> None:
    source = random_source(new(), 9)
    folder = run(tmp_path, source=source, settings=settings(steps=4, training_clips=3))
    assert (
        set(source.read) == {"clip-0", "clip-1", "clip-2"} and facts(folder)["training_clips"] == 3
    )


def test_records_and_config_tell_the_run(tmp_path: Path) -> None:
    chosen = settings(steps=12, evaluate_every=5, revealed_weight=0.5)
    validation = random_source(new(), 3, prompt=14)
    told = {"variant": "training.gamma=7"}
    folder = run(tmp_path, settings=chosen, validation=validation, log_every=5, **told)
    frame = records(folder)
    assert frame["step"].tolist() == [5, 5, 10, 10, 12, 12]
    assert frame["setting"].tolist() == ["", "validation"] * 3
    assert set(frame["drafter_sha256"]) == {drafter_sha256(folder)}
    assert set(frame["target_sha256"]) == {TARGET.source_sha256}
    constant = {"objective": "self_reveal", "train_seed": 1, "steps": 12, "training_clips": 7}
    constant |= {"revealed_weight": 0.5, "anchors_per_clip": 3}
    constant |= {"device": device_label("cpu"), **told}
    assert all(set(frame[name]) == {value} for name, value in constant.items())
    total = facts(folder)["forward_equivalents"]
    assert frame["forward_equivalents"].unique().tolist() == [total]
    assert frame["forward_equivalents_done"].iloc[-1] == total
    assert (frame["loss"] - frame["loss_mask"] - frame["loss_flow"]).abs().max() < 1e-9
    assert all(len(values) == 15 for values in frame["slot_accuracy"])
    assert facts(folder)["objective"] == "self_reveal"
    assert facts(folder)["settings"]["gamma"] == 7.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_a_text(tmp_path: Path, optimizer: str) -> None:
    """One clip, many steps: the drafter must learn it by heart, in both states."""
    chosen = settings(
        steps=160, clips_per_step=1, anchors_per_clip=8, learning_rate=5e-3, optimizer=optimizer
    )
    source = random_source(new(), 1, new=(20,))
    folder = run(tmp_path, source=source, settings=chosen, log_every=20)
    frame = records(folder)
    first, last = frame.iloc[0], frame.iloc[-1]
    small = 0.2 if optimizer == "adamw" else 0.5
    assert last["loss_mask"] < small < first["loss_mask"] and last["loss_flow"] < small
    assert last["slot_accuracy"][0] > 0.95


def test_a_loss_of_another_kind_trains_too(tmp_path: Path) -> None:
    """A baseline's loss needs numerators, denominators and weights, and its own compute."""

    def only_the_next_token(*args: Any, **kwargs: Any) -> Any:
        drafter, batch, *rest = args
        first = torch.zeros_like(batch.supervised)
        first[..., 0] = batch.supervised[..., 0]
        parts = compute_loss(drafter, dataclasses.replace(batch, supervised=first), *rest, **kwargs)
        return parts._replace(sums={})

    chosen = settings(steps=3, objective="mask_only")
    folder = run(tmp_path, settings=chosen, loss=only_the_next_token, compute=lambda sums: 2.0)
    assert facts(folder)["forward_equivalents"] == 6.0
    assert records(folder)["slot_accuracy"].isna().all()


def test_long_contexts_are_cut_into_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many clips per forward as the bound on context tokens holds; the result is the same."""
    sizes: list[int] = []

    def loss(drafter: Any, batch: Any, *args: Any, count_only: bool = False) -> Any:
        sizes.append(0 if count_only else len(batch.clip_ids))
        return compute_loss(drafter, batch, *args, count_only=count_only)

    chosen = settings(steps=2)
    whole = run(tmp_path / "a", settings=chosen, loss=loss)
    assert sizes == [4, 4]
    sizes.clear()
    monkeypatch.setattr(loop, "CONTEXT_TOKENS", 80)  # the longest clip has 11 + 27 tokens
    cut = run(tmp_path / "b", settings=chosen, loss=loss)
    assert sizes == [0, 0, 2, 2] * 2
    first, second = weights(whole), weights(cut)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_changes_neither_drafter_nor_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ran out of memory goes on with it, to the same bits."""
    straight = run(tmp_path / "a")
    calls = 0
    real = DrafterLayer.blocks

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(self, *arguments)

    monkeypatch.setattr(DrafterLayer, "blocks", counted)
    counts = []
    for saving in (False, True):
        stopped = killed_after(11) if not saving else compute_loss
        with pytest.raises(Killed) if not saving else contextlib.nullcontext():
            run(tmp_path / "b", settings=settings(activation_checkpointing=saving), loss=stopped)
        counts.append(calls)
    assert drafter_sha256(tmp_path / "b" / "drafter") == drafter_sha256(straight)
    # 11 steps without and 10 with: the two forwards with gradient are run once more
    assert counts[1] - counts[0] - 10 * 2 * 2 == pytest.approx(counts[0] * 10 / 11, rel=0.2)


def test_autocast_keeps_fp32_masters_and_learns(tmp_path: Path) -> None:
    chosen = settings(steps=30, clips_per_step=1, anchors_per_clip=8, learning_rate=5e-3)
    source = random_source(new(), 1, new=(20,))
    source.items = [
        dataclasses.replace(item, states=item.states.bfloat16()) for item in source.items
    ]
    drafter = new()
    folder = run(
        tmp_path, drafter, source=source, settings=chosen, mixed_precision="bf16", log_every=5
    )
    loss = records(folder)["loss_mask"]
    assert loss.iloc[-1] < 0.8 * loss.iloc[0]
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
