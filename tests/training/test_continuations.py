"""Collected texts and states: one index, nothing shifted, nothing lost, resumable."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_drafter, tiny_frames, tiny_target
from tests.training.toys import settings
from vflash_analysis.clips.suites import Clip
from vflash_analysis.errors import InputError
from vflash_analysis.records import read_records
from vflash_analysis.schemas import CONTINUATIONS
from vflash_analysis.training.blocks import target_pieces
from vflash_analysis.training.continuations import (
    ContinuationSet,
    JoinedContinuations,
    OnlineContinuations,
    collect_continuations,
    frame_reader,
    greedy_continuation,
    read_states,
    states_path,
)
from vflash_analysis.training.loop import train
from vflash_analysis.training.read_ahead import ReadAhead

TARGET = tiny_target(0)
TAPS = (0, 2)
NUM_FRAMES = 2


class Reader:
    """Frames by file content; a file that says "bad" cannot be read."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def read_clip(self, clip: Clip, num_frames: int) -> Any:
        self.paths.append(Path(clip.path).name)
        text = Path(clip.path).read_text()
        if text == "bad":
            raise InputError(f"{clip.path}: no_video_stream: made so")
        if text == "kill":
            raise KeyboardInterrupt
        return SimpleNamespace(frames=tiny_frames(int(text), num_frames).numpy())


def clips(folder: Path, n: int = 4) -> list[Clip]:
    found = []
    for number in range(n):
        path = folder / f"v{number}.mp4"
        if not path.exists():
            path.write_text(str(number))
        prompt = "describe the clip" if number % 2 else "what happens then ?"
        found.append(Clip(f"suite/{number}", "VDC", "training", str(path), prompt))
    return found


def collect(folder: Path, some: list[Clip], reader: Any = None, **changes: Any) -> Path:
    keywords: dict[str, Any] = {
        "num_frames": NUM_FRAMES,
        "max_new_tokens": 12,
        "tap_layer_ids": TAPS,
        "out_folder": folder / "out",
        "log": lambda line: None,
        **changes,
    }
    target = keywords.pop("target", TARGET)
    return collect_continuations(target, some, reader or Reader(), **keywords)


def test_each_token_is_the_head_of_the_state_before_it(tmp_path: Path) -> None:
    """With the last layer tapped, stored states give the stored tokens at the same index."""
    last = TARGET.num_layers - 1
    ids, pixels = prompt_of(0)
    text = greedy_continuation(TARGET, ids, pixels, 12, (last,))
    whole = torch.cat([ids, text.token_ids])
    assert text.states is not None
    assert text.states.shape == (len(whole) - 1, TARGET.hidden_size)
    with torch.no_grad():
        told = TARGET.head(TARGET.text_model.norm(text.states)).argmax(-1)
    n = len(ids)
    assert torch.equal(told[n - 1 :], whole[n:])
    assert not torch.equal(told[n:], whole[n:-1])  # an index off by one would not pass


def prompt_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = TARGET.build_prompt("what happens then ?", NUM_FRAMES)
    return ids, TARGET.prepare_frames(tiny_frames(number, NUM_FRAMES))


def test_text_equals_full_forwards_without_a_cache() -> None:
    ids, pixels = prompt_of(3)
    text = greedy_continuation(TARGET, ids, pixels, 9, TAPS)
    told: list[int] = []
    for _ in range(len(text.token_ids)):
        rows = torch.tensor(told, dtype=torch.long)
        cache = TARGET.new_cache(len(ids), 9)
        logits = TARGET.prefill(ids, pixels, cache).logits
        if told:
            logits = TARGET.forward(rows, None, cache).logits[-1]
        told.append(int(logits.argmax()))
    assert told == text.token_ids.tolist()


def test_a_text_ends_with_its_stop_token_or_at_the_cap() -> None:
    ids, pixels = prompt_of(0)
    free = greedy_continuation(TARGET, ids, pixels, 12, TAPS)
    assert free.stop_reason == "length" and len(free.token_ids) == 12
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    target = tiny_target(0)
    target.stop_ids = frozenset({stop})
    cut = greedy_continuation(target, ids, pixels, 12, TAPS)
    assert cut.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert cut.stop_reason == "eos"
    assert cut.states is not None and len(cut.states) == len(ids) + first


@given(
    wrong=st.dictionaries(st.integers(0, 13), st.integers(0, 60), max_size=5),
    length=st.integers(0, 14),
    max_new_tokens=st.integers(1, 12),
    stop_place=st.integers(0, 11),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_a_guess_changes_neither_text_nor_states(
    wrong: dict[int, int], length: int, max_new_tokens: int, stop_place: int
) -> None:
    """Whatever is right or wrong in it, wherever text and guess end."""
    ids, pixels = prompt_of(0)
    whole = greedy_continuation(TARGET, ids, pixels, 12, TAPS).token_ids.tolist()
    target = tiny_target(0)
    target.stop_ids = frozenset({whole[stop_place]})
    plain = greedy_continuation(target, ids, pixels, max_new_tokens, TAPS)
    guess = [wrong.get(place, token) for place, token in enumerate([*whole, 7, 7])][:length]
    guessed = greedy_continuation(target, ids, pixels, max_new_tokens, TAPS, guess)
    assert guessed.token_ids.tolist() == plain.token_ids.tolist()
    assert guessed.stop_reason == plain.stop_reason
    assert guessed.states is not None and plain.states is not None
    torch.testing.assert_close(guessed.states, plain.states)


def test_a_right_guess_saves_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, pixels = prompt_of(0)
    whole = greedy_continuation(TARGET, ids, pixels, 12).token_ids.tolist()
    rows: list[int] = []
    forward = TARGET.forward
    monkeypatch.setattr(
        TARGET, "forward", lambda *args, **kw: (rows.append(len(args[0])), forward(*args, **kw))[1]
    )
    greedy_continuation(TARGET, ids, pixels, 12, guess=whole)
    assert rows == [11]
    rows.clear()
    other = whole[0] + 1
    greedy_continuation(TARGET, ids, pixels, 12, guess=[*whole[:4], other, *whole[5:]])
    assert rows == [11, 7]  # four right, the fifth not, then all that is left
    rows.clear()
    greedy_continuation(TARGET, ids, pixels, 12, guess=[other] * 12)
    assert rows[0] == 11 and set(rows[1:]) == {1, 2}  # after a wrong one, one at a time


def test_records_and_states_share_one_index(tmp_path: Path) -> None:
    some = clips(tmp_path)
    file = collect(tmp_path, some)
    frame = read_records(file, CONTINUATIONS)
    assert frame["clip_id"].tolist() == [c.clip_id for c in some]
    assert set(frame["status"]) == {"ok"} and set(frame["target_sha256"]) == {TARGET.source_sha256}
    data = ContinuationSet(tmp_path / "out", TAPS)
    assert len(data) == 4 and data.clip_ids() == [c.clip_id for c in some]
    assert read_states(states_path(tmp_path / "out", some[0].clip_id))[1] == TAPS
    for index, clip in enumerate(some):
        row, item = frame.iloc[index], data[index]
        ids = TARGET.build_prompt(clip.prompt, NUM_FRAMES)
        assert item.prompt_tokens == row["prompt_tokens"] == len(ids)
        assert row["video_tokens"] == NUM_FRAMES * TARGET.tokens_per_frame + 1
        assert torch.equal(item.input_ids[: len(ids)], ids)
        assert item.new_tokens == row["new_tokens"] == data.anchor_counts()[index] + 1
        assert item.states.shape == (len(item.input_ids) - 1, 2 * TARGET.hidden_size)
        assert row["text"] == TARGET.tokenizer.decode(
            item.input_ids[len(ids) :], skip_special_tokens=True
        )
        assert (item.benchmark, item.split) == ("VDC", "training")


def test_online_states_equal_the_stored_ones(tmp_path: Path) -> None:
    some = clips(tmp_path)
    collect(tmp_path, some)
    stored = ContinuationSet(tmp_path / "out", TAPS)
    read = {c.clip_id: tiny_frames(i, 2) for i, c in enumerate(some)}
    frames = ReadAhead(read.__getitem__)
    online = OnlineContinuations(tmp_path / "out", TARGET, frames, TAPS)
    for index in range(4):
        a, b = stored[index], online[index]
        assert torch.equal(a.input_ids, b.input_ids)
        # bfloat16 keeps 8 bits of what is stored.
        torch.testing.assert_close(a.states.double(), b.states, rtol=2**-8, atol=1e-9)
    assert len(stored) == len(online) and stored.anchor_counts() == online.anchor_counts()
    with pytest.raises(InputError, match="tiny-0"):
        OnlineContinuations(tmp_path / "out", tiny_target(1), frames, TAPS)


def test_texts_without_states_feed_training_online(tmp_path: Path) -> None:
    some = clips(tmp_path)
    file = collect(tmp_path, some, store_states=False)
    assert not (tmp_path / "out" / "states").exists()
    stored = collect(tmp_path, some, out_folder=tmp_path / "stored")
    texts = [read_records(f, CONTINUATIONS)["text"].tolist() for f in (file, stored)]
    assert texts[0] == texts[1]
    reader = Reader()
    collect(tmp_path, some, reader, store_states=False)
    assert reader.paths == []
    frames = ReadAhead(frame_reader(some, reader, NUM_FRAMES))
    online = OnlineContinuations(tmp_path / "out", TARGET, frames, TAPS)
    assert torch.equal(online[2].input_ids, ContinuationSet(tmp_path / "stored", TAPS)[2].input_ids)
    assert reader.paths == ["v2.mp4"]
    drafter = tiny_drafter(TARGET, 1, target_layer_ids=TAPS)
    chosen = settings(steps=2, clips_per_step=2)
    pieces = target_pieces(TARGET)
    train(drafter, pieces, online, chosen, tmp_path / "train", log=lambda line: None)
    assert (tmp_path / "train" / "drafter" / "model.safetensors").is_file()
    assert len(reader.paths) == 1 + 2 * 2  # each visit's frames once, read ahead or not


def test_bad_clips_are_recorded_and_the_others_kept(tmp_path: Path) -> None:
    some = clips(tmp_path)
    Path(some[1].path).write_text("bad")
    lines: list[str] = []
    frame = read_records(collect(tmp_path, some, log=lines.append), CONTINUATIONS)
    assert frame["status"].tolist() == ["ok", "failed", "ok", "ok"]
    assert "no_video_stream" in frame["reason"][1] and frame["input_ids"].isna()[1]
    assert any("suite/1" in line for line in lines)
    data = ContinuationSet(tmp_path / "out", TAPS)
    assert len(data) == 3
    with pytest.raises(InputError, match="no_video_stream"):
        collect(tmp_path / "strict", some, on_bad_clip="fail", out_folder=tmp_path / "strict")
    Path(some[1].path).write_text("9")  # repaired: tried again, alone
    reader = Reader()
    frame = read_records(collect(tmp_path, some, reader), CONTINUATIONS)
    assert reader.paths == ["v1.mp4"] and set(frame["status"]) == {"ok"}


def test_a_video_that_is_not_its_frozen_lists_gives_no_text(tmp_path: Path) -> None:
    some = clips(tmp_path)
    some[2] = dataclasses.replace(some[2], sha256="0" * 64)
    frame = read_records(collect(tmp_path, some), CONTINUATIONS)
    assert frame["status"].tolist() == ["ok", "ok", "failed", "ok"]
    assert "changed: sha256 " in frame["reason"][2] and "0" * 64 in frame["reason"][2]
    with pytest.raises(InputError, match=r"v2\.mp4: changed"):
        collect(tmp_path, some, on_bad_clip="fail")


def test_a_prompt_that_is_no_prompt_costs_no_other_clip(tmp_path: Path) -> None:
    some = clips(tmp_path)
    some[1] = dataclasses.replace(some[1], prompt="two <video> in one")
    frame = read_records(collect(tmp_path, some), CONTINUATIONS)
    assert frame["status"].tolist() == ["ok", "failed", "ok", "ok"]
    assert "placeholder" in frame["reason"][1]
    with pytest.raises(InputError, match="placeholder"):
        collect(tmp_path, some, on_bad_clip="fail")


def test_a_killed_collection_goes_on_where_it_was(tmp_path: Path) -> None:
    some = clips(tmp_path)
    Path(some[2].path).write_text("kill")
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, some)
    Path(some[2].path).write_text("2")
    reader = Reader()
    file = collect(tmp_path, some, reader)
    assert reader.paths == ["v2.mp4", "v3.mp4"]
    alone = collect(tmp_path, some, out_folder=tmp_path / "alone")
    first, second = (read_records(f, CONTINUATIONS) for f in (file, alone))
    assert first["text"].tolist() == second["text"].tolist()
    reader = Reader()
    collect(tmp_path, some, reader)
    assert reader.paths == []


def test_what_is_stale_is_collected_again(tmp_path: Path) -> None:
    some = clips(tmp_path)
    collect(tmp_path, some)

    def again(changed: list[Clip] = some, **changes: Any) -> list[str]:
        reader = Reader()
        collect(tmp_path, changed, reader, **changes)
        return reader.paths

    everything = [f"v{i}.mp4" for i in range(4)]
    Path(some[0].path).write_text("7")
    assert again() == ["v0.mp4"]
    path = states_path(tmp_path / "out", "suite/1")
    path.write_bytes(path.read_bytes()[:-9])
    assert again() == ["v1.mp4"]
    path.unlink()
    assert again() == ["v1.mp4"]
    other = [dataclasses.replace(some[0], prompt="how many"), *some[1:]]
    assert again(other) == ["v0.mp4"]
    # A text that ended by itself is the same under a higher cap; one that was cut is not.
    frame = read_records(tmp_path / "out" / "continuations.parquet", CONTINUATIONS)
    cut = [name for name, why in zip(everything, frame["stop_reason"], strict=True) if why != "eos"]
    assert 1 <= len(cut) < 4
    assert again(other, max_new_tokens=13) == cut
    assert again(other, max_new_tokens=13, tap_layer_ids=(1, 2)) == everything
    assert (
        again(other, max_new_tokens=13, tap_layer_ids=(1, 2), target=tiny_target(5)) == everything
    )
    assert again(other, max_new_tokens=13, tap_layer_ids=(1, 2), target=tiny_target(5)) == []


@pytest.mark.parametrize("damage", ["half", "empty", "longer", "gone"])
def test_damaged_states_are_named(tmp_path: Path, damage: str) -> None:
    collect(tmp_path, clips(tmp_path, 1))
    path = states_path(tmp_path / "out", "suite/0")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        cut = {"half": content[: len(content) // 2], "empty": b"", "longer": content + b"xx"}
        path.write_bytes(cut[damage])
    with pytest.raises(InputError) as error:
        ContinuationSet(tmp_path / "out", TAPS)[0]
    assert str(path) in str(error.value)


def test_states_of_another_text_are_refused(tmp_path: Path) -> None:
    collect(tmp_path, clips(tmp_path, 2))
    one, two = (states_path(tmp_path / "out", f"suite/{i}") for i in (0, 1))
    two.write_bytes(one.read_bytes())  # the prompts differ in length
    with pytest.raises(InputError, match="rows of states"):
        ContinuationSet(tmp_path / "out", TAPS)[1]


def test_states_are_stored_in_half_precision(tmp_path: Path) -> None:
    some = clips(tmp_path, 1)
    collect(tmp_path, some)
    half, taps = read_states(states_path(tmp_path / "out", "suite/0"))
    assert half.dtype == torch.bfloat16 and taps == TAPS


def test_a_clip_named_twice_is_refused(tmp_path: Path) -> None:
    some = clips(tmp_path, 2)
    with pytest.raises(InputError, match="'suite/1' twice"):
        collect(tmp_path, [*some, some[1]])


def test_a_set_reads_each_clip_once_in_memory(tmp_path: Path) -> None:
    collect(tmp_path, clips(tmp_path, 2))
    kept = ContinuationSet(tmp_path / "out", TAPS)
    assert kept[0] is kept[0]


def test_a_set_takes_some_layers_of_those_that_lie_there(tmp_path: Path) -> None:
    some = clips(tmp_path, 2)
    collect(tmp_path, some, tap_layer_ids=(0, 1, 2))
    collect(tmp_path, some, out_folder=tmp_path / "alone")
    more, alone = ContinuationSet(tmp_path / "out", TAPS), ContinuationSet(tmp_path / "alone", TAPS)
    assert more[1].states.shape[1] == 2 * TARGET.hidden_size
    assert all(torch.equal(more[i].states, alone[i].states) for i in range(2))
    lacking = ContinuationSet(tmp_path / "out", (0, 3))
    with pytest.raises(InputError) as error:
        lacking[0]
    path = states_path(tmp_path / "out", "suite/0")
    told = f"{path}: found states of layers [0, 1, 2], allowed: those of [0, 3] and more"
    assert str(error.value).startswith(told)


def test_sources_are_joined_one_after_the_other(tmp_path: Path) -> None:
    some = clips(tmp_path, 4)
    Path(some[1].path).write_text("bad")
    for name, own in (("a", some[:3]), ("b", some[3:])):
        collect(tmp_path, own, out_folder=tmp_path / name)
    parts = [ContinuationSet(tmp_path / name, TAPS) for name in ("a", "b")]
    expected: dict[int, list[list[int]]] = {0: [], 1: []}
    for number, part in enumerate(parts):
        part.expect = expected[number].append  # type: ignore[method-assign]
    joined = JoinedContinuations(parts)
    assert len(joined) == 3 and joined.clip_ids() == ["suite/0", "suite/2", "suite/3"]
    assert joined.lengths() == parts[0].lengths() + parts[1].lengths()
    assert joined.anchor_counts() == parts[0].anchor_counts() + parts[1].anchor_counts()
    assert [joined[i] for i in range(3)] == [parts[0][0], parts[0][1], parts[1][0]]
    assert joined.text(2).clip_id == "suite/3"
    joined.expect([2, 1, 0, 1])
    assert expected == {0: [[1, 0, 1]], 1: [[0]]}
