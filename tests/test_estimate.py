"""Hours and bytes before a run, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tests.test_cli import finish
from vflash_analysis import config, estimate, paths, shapes, sizes, stages
from vflash_analysis.config import DrafterKey
from vflash_analysis.estimate import GPU
from vflash_analysis.results.published import device_facts

H100 = device_facts(GPU)
H100_PROFILE = config.load_profile("h100")
OWN = estimate.sizes_of(H100_PROFILE, shapes.LLAVA_ONEVISION_7B)


def test_memory_to_decode_the_papers_setting():
    """Weights 16.1 GB, keys and values 1.44 GB + 317 rows, states 0.72 GB, drafters of 0.98 B."""
    parts = estimate.decode_memory(H100_PROFILE, OWN)
    assert OWN.prompt_tokens == 25_119
    assert parts["weights"] == 2 * 8_030_807_584
    assert parts["KV cache"] == 57_344 * (25_119 + 256 + 61)
    assert parts["tapped states"] == 28_672 * 25_119
    assert parts["drafters (2)"] == 2 * 2 * 983_601_152
    # two drafters, each with a cache for the chain and one for the tree
    assert parts["drafters' KV caches"] == 4 * 2 * 4 * 4 * 128 * 2 * (25_119 + 256 + 16)
    assert parts["pixels"] == 128 * 3 * 384 * 384 * 2
    # `generate` encodes 128 frames at once: 27 layers' states kept, three of the decoder's width
    widths = 27 * 1152 + 3 * 3584
    assert parts["prefill, vision or generate"] == 2 * 128 * 729 * widths
    # without it, the MLPs of a decoder layer, 4,096 rows at a time, outweigh 16 frames in vision
    methods = ("ar", "chain", "tree60")
    own_loop = dataclasses.replace(H100_PROFILE.decode, methods=methods)
    less = estimate.decode_memory(dataclasses.replace(H100_PROFILE, decode=own_loop), OWN)
    inner = 4_096 * 3 * 18_944
    assert less["prefill, vision or generate"] == 2 * (25_119 * 5 * 3584 + inner)


def test_memory_to_train_the_papers_drafter():
    """16 bytes a parameter beside the target, and the larger of prefill and saved activations."""
    parts = estimate.training_memory(H100_PROFILE, OWN)
    assert parts["drafter in fp32"] + parts["gradients and AdamW"] == 16 * 983_601_152
    rows = 25_119 + 256
    kv = 57_344 * (rows + 61)
    prefill = 2 * (25_119 * 5 * 3584 + 4_096 * 3 * 18_944)
    pixels = 128 * 3 * 384 * 384 * 2
    recomputed = kv + prefill + pixels + 28_672 * rows
    saved = sizes.saved_bytes(OWN.drafter, rows, 64, 2, keep=False) + 5 * 2**28
    assert parts["prefill or a step's activations"] == int(max(recomputed, saved))
    whole = dataclasses.replace(H100_PROFILE.training, activation_checkpointing=False)
    profile = dataclasses.replace(H100_PROFILE, training=whole)
    kept = estimate.training_memory(profile, OWN)["prefill or a step's activations"]
    # five copies of the logits' bound, which 960 slots of 152,128 tokens exceed
    assert kept == int(sizes.saved_bytes(OWN.drafter, rows, 64, 2, keep=True) + 5 * 2**28)
    given = dataclasses.replace(H100_PROFILE.drafter, source="data/pocket/drafters")
    assert set(estimate.memory(dataclasses.replace(H100_PROFILE, drafter=given), OWN)) == {"decode"}


def test_an_autoregressive_step_takes_what_the_page_prints():
    """10.6 to 11.1 ms a token on one H100."""
    assert 10.6e-3 <= estimate._step_s(OWN, H100, 256) <= 11.1e-3


def test_hours_of_decoding_by_hand():
    """15 shards of 50 prefills and of 160 texts of 256 steps each."""
    profile = dataclasses.replace(
        H100_PROFILE,
        decode=dataclasses.replace(
            H100_PROFILE.decode, methods=("ar", "chain", "hf_generate"), comparison_clips=10
        ),
    )
    stages = {s.stage: s for s in estimate.estimate_stages(profile, OWN, [], H100)}
    # vision: 414,721,568 weights over 128 x 729 patches, and scores of 26 layers, 1152 wide
    prefill = 2 * 414_721_568 * 128 * 729 + 4 * 26 * 1152 * 128 * 729**2
    # the text stack: 28 layers of 233,057,792 weights, one row of the head, scores of 28 heads
    prefill += 2 * 28 * 233_057_792 * 25_119 + 2 * 152_128 * 3584
    prefill += 4 * 28 * 28 * 128 * (25_119 * 25_120 // 2)
    prefill_s = prefill / (0.4 * 989e12)
    assert prefill_s == pytest.approx(1.36508, abs=1e-5)
    # a step reads layers, last norm and head once, and the cache at the middle of a text
    read = 2 * (28 * 233_057_792 + 3584 + 152_128 * 3584) + 57_344 * (25_119 + 128)
    step_s = read / (0.43 * 3.35e12)
    assert step_s == pytest.approx(10.8223e-3, abs=1e-7)
    texts = 50 + 2 * 50 + 10  # autoregressive, the chain with two drafters, Hugging Face's on 10
    expected = 15 * (50 * prefill_s + texts * 256 * step_s) / 3600
    assert expected == pytest.approx(2.13139, abs=1e-5)
    assert stages["decode"].gpu_hours == pytest.approx(expected)
    assert stages["decode"].shards == 15
    assert stages["drafter"].gpu_hours == 0.0 == stages["drafter"].disk_bytes


def test_hours_of_training_grow_with_steps_and_reveal_rounds():
    def hours(*keys: DrafterKey) -> float:
        stages = estimate.estimate_stages(H100_PROFILE, OWN, keys, H100)
        return next(s.gpu_hours for s in stages if s.stage == "drafter")

    mask, flow = (DrafterKey(a, 0, 1000, 20_000) for a in ("mask_only", "self_reveal"))
    assert hours(mask, flow) == pytest.approx(hours(mask) + hours(flow))
    mask_flops, flow_flops = (
        estimate.drafter_step_work(H100_PROFILE, OWN, key.arm).flops for key in (mask, flow)
    )
    context = sizes.context_work(OWN.drafter, OWN.prompt_tokens, 2).flops
    # 4 forwards of a block, one to make activations again, against 4 + 4 + 1; the context's 3 in both
    block = (mask_flops - 3 * 8 * context) / 4
    assert flow_flops == pytest.approx(9 * block + 3 * 8 * context)
    assert hours(flow) - hours(mask) == pytest.approx(1000 * 5 * block / (0.4 * 989e12) / 3600)


def test_states_take_disk_only_where_they_are_stored():
    pocket = config.load_profile("pocket")
    shape = estimate.target_shape(pocket)
    assert shape is not None
    own = estimate.sizes_of(pocket, shape)
    first = estimate.estimate_stages(pocket, own, [], H100)[0]
    rows = own.prompt_tokens + pocket.continuations.max_new_tokens
    lists = 1600 + 40 + 60
    assert first.disk_bytes == lists * rows * 4 * shape.hidden_size * 2
    assert estimate.estimate_stages(H100_PROFILE, OWN, [], H100)[0].disk_bytes == 0


MASTERS = 4 * 983_601_152  # bytes of one drafter of the h100 profile


def hold(shard: stages.Shard, size: int) -> None:
    """Leave a sparse file as an interrupted shard leaves a checkpoint."""
    file = shard.folder / "checkpoints" / "step_1" / "weights"
    file.parent.mkdir(parents=True)
    with file.open("wb") as out:
        out.truncate(size)


def test_disk_is_needed_only_for_what_is_not_there_yet(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    monkeypatch.setattr(config, "local_paths", dict)
    shards = stages.plan("h100")
    first, second = (shard for shard in shards if shard.stage == "drafter")
    # two drafters' masters, and two checkpoints of masters and two averages of the one in training
    assert estimate.disk_bytes(H100_PROFILE, shards) == (2 + 2 * 3) * MASTERS
    hold(first, 3 * MASTERS)
    assert estimate.disk_bytes(H100_PROFILE, shards) == (2 + 3) * MASTERS
    finish(first)
    assert estimate.disk_bytes(H100_PROFILE, shards) == (1 + 2 * 3) * MASTERS
    hold(second, 9 * MASTERS)
    assert estimate.disk_bytes(H100_PROFILE, shards) == 0.0
    finish(second)
    assert estimate.disk_bytes(H100_PROFILE, shards) == 0.0


def test_stored_states_and_drafters_count_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    pocket, shards = config.load_profile("pocket"), stages.plan("pocket")
    shape = estimate.target_shape(pocket)
    assert shape is not None
    states, drafters, _ = estimate.estimate_stages(
        pocket, estimate.sizes_of(pocket, shape), config.main_drafters(pocket), H100
    )
    both = estimate.disk_bytes(pocket, shards)
    assert both == states.disk_bytes + drafters.disk_bytes > states.disk_bytes > 0
    (collected,) = (shard for shard in shards if shard.stage == "continuations")
    hold(collected, 10**12)  # more than was thought leaves no more room for drafters
    assert estimate.disk_bytes(pocket, shards) == drafters.disk_bytes
    assert estimate.disk_bytes(pocket, [s for s in shards if s.stage == "decode"]) == 0.0
    given = {"drafter.source": "data/pocket/drafters"}
    profile = config.load_profile("pocket", given)
    assert estimate.disk_bytes(profile, stages.plan("pocket", given)) == states.disk_bytes


@pytest.mark.parametrize("damage", ["", "[", "[]", "{}"])
def test_a_damaged_config_leaves_the_disk_unknown(monkeypatch, tmp_path, damage):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setenv("VFLASH_TARGET", str(tmp_path))
    (tmp_path / "config.json").write_text(damage)
    assert estimate.disk_bytes(H100_PROFILE, stages.plan("h100")) is None


def test_what_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "local_paths", dict)
    told = estimate.describe(H100_PROFILE)
    assert told is not None
    assert told["notes"][0].startswith(
        "memory, decode: 30.9 GB (weights 16.1 GB, prefill, vision or generate 7.8"
    )
    assert "hours on one H100 SXM, estimated" in told["notes"][-1]
    assert [row["stage"] for row in told["stages"]] == ["continuations", "drafter", "decode"]
    assert estimate.describe(config.load_profile("smoke")) is None
    pocket = estimate.describe(config.load_profile("pocket"))
    assert pocket is not None
    assert all(row["gpu_hours"] is None for row in pocket["stages"])
    more = estimate.describe(H100_PROFILE, ablation=True)
    assert more is not None
    assert more["stages"][1]["shards"] == 2 + len(config.ablation_drafters(H100_PROFILE))
    left_out = "the texts and the drafter of lengths, are not"
    for profile in (H100_PROFILE, config.load_profile("pocket")):
        studies = estimate.describe(profile, studies=True)
        assert studies is not None and studies["notes"][-1].endswith(left_out)
        drafters = config.main_drafters(profile)
        assert studies["stages"][1]["shards"] == len(drafters) + len(profile.design.variants)
    assert not any(note.endswith(left_out) for note in told["notes"])


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0"), (1234, "1.2 kB"), (99_000, "99.0 kB"), (2e8, "0.2 GB"), (5e6, "5.0 MB")],
)
def test_bytes_are_told_in_the_unit_that_fits(count, told):
    assert estimate.size(count) == told
