"""How far a text stood after each token, tokens in words, and film strips."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit
from transformers import PreTrainedTokenizerFast

from vflash_analysis.clips.lists import Clip
from vflash_analysis.decoding.shown import StripWriter, text_ends, token_texts, write_strip
from vflash_analysis.records import find_strips, strip_path


def byte_tokenizer():
    """One token per byte and a special one: every character above U+007F is several tokens."""
    symbols = sorted(ByteLevelSplit.alphabet())
    tokenizer = Tokenizer(WordLevel({symbol: i for i, symbol in enumerate(symbols)}, "a"))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    table = bytes_to_symbols()
    return [TOKENIZER.convert_tokens_to_ids(table[byte]) for byte in text.encode()]


def bytes_to_symbols() -> dict[int, str]:
    """GPT-2's printable symbol of each byte, from the decoder itself."""
    found = {}
    for symbol in ByteLevelSplit.alphabet():
        point = ord(symbol)
        if point < 256:
            found[point] = symbol
    missing = [byte for byte in range(256) if byte not in found]
    others = sorted(s for s in ByteLevelSplit.alphabet() if ord(s) >= 256)
    return found | dict(zip(missing, others, strict=True))


def test_a_character_is_shown_when_it_is_whole():
    ids = ids_of("aé€b")  # 1, 2, 3 and 1 bytes
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert text == "aé€b"
    assert text_ends(TOKENIZER, ids, text) == [1, 1, 2, 2, 2, 3, 4]


def test_skipped_special_tokens_show_nothing():
    end = TOKENIZER.eos_token_id
    ids = [*ids_of("a"), end, *ids_of("é"), end]
    assert text_ends(TOKENIZER, ids, "aé") == [1, 1, 1, 2, 2]
    assert text_ends(TOKENIZER, [end], "") == [0]
    assert text_ends(TOKENIZER, [], "") == []


def test_a_text_that_ends_inside_a_character_shows_what_it_became():
    ids = ids_of("a€")[:-1]
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert text == "a\ufffd"
    ends = text_ends(TOKENIZER, ids, text)
    assert ends[0] == 1 and ends[-1] == len(text) and ends == sorted(ends)


@given(st.text(max_size=12), st.data())
def test_it_is_what_decoding_every_prefix_shows(text, data):
    ids = ids_of(text)
    cut = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:cut], *data.draw(st.lists(st.integers(0, 255), max_size=4)), *ids[cut:]]
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    ends = text_ends(TOKENIZER, ids, text)
    assert len(ends) == len(ids) and ends == sorted(ends)
    assert not ends or ends[-1] == len(text)
    for n, end in enumerate(ends[:-1], 1):
        alone = TOKENIZER.decode(ids[:n], skip_special_tokens=True)
        if not alone.endswith("\ufffd"):
            assert text[:end] == alone


class Stripping:
    """A tokenizer whose pieces do not add up: it strips the first space of whatever it decodes."""

    asked = 0

    def decode(self, ids, skip_special_tokens=False):
        self.asked += len(ids)
        return "".join([" up", " and", " away"][one] for one in ids).removeprefix(" ")


def test_a_tokenizer_whose_pieces_do_not_add_up_is_asked_for_prefixes():
    assert text_ends(Stripping(), [0, 1, 2], "up and away") == [2, 6, 11]


def test_the_work_grows_with_the_length_not_its_square():
    class Counting:
        asked = 0

        def decode(self, ids, skip_special_tokens=False):
            self.asked += len(ids)
            return "x" * len(ids)

    counting = Counting()
    assert text_ends(counting, [0] * 500, "x" * 500) == list(range(1, 501))
    assert counting.asked == 500


def test_token_texts_are_sorted_and_unique():
    a, b = ids_of("a")[0], ids_of("b")[0]
    end = TOKENIZER.eos_token_id
    found = token_texts(TOKENIZER, [b, a, end, b])
    assert found == {a: "a", b: "b", end: "<|end|>"} and list(found) == sorted(found)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((9, 64, 48, 3), (9 * 48, 64)), ((40, 320, 640, 3), (32 * 320, 160)), ((1, 8, 8, 3), (8, 8))],
)
def test_a_strip_is_small_and_holds_frames_in_order(shape, size, tmp_path):
    levels = np.linspace(0, 255, shape[0]).astype(np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], shape)
    write_strip(tmp_path / "s.jpg", np.ascontiguousarray(frames))
    with Image.open(tmp_path / "s.jpg") as found:
        assert found.info["comment"] == str(min(shape[0], 32)).encode()
        strip = np.asarray(found)
    assert strip.shape == (size[1], size[0], 3)
    means = strip.reshape(size[1], min(shape[0], 32), -1, 3).mean((0, 2, 3))
    expected = levels[np.linspace(0, shape[0] - 1, min(shape[0], 32)).round().astype(int)]
    assert np.abs(means - expected).max() < 3


def test_strips_are_kept_of_the_clips_that_are_asked_for(tmp_path):
    class Reader:
        def read_clip(self, clip, num_frames):
            frames = np.zeros((num_frames, 8, 8, 3), np.uint8)
            return type("Read", (), {"frames": frames})

    clips = [Clip(name, "VDC", "suites", "x", "?") for name in ("a/b", "c")]
    clips.append(Clip("a/b", "LVB", "suites", "x", "?"))  # another suite's clip of the same id
    writer = StripWriter(Reader(), tmp_path, clips[:1])
    for number, clip in enumerate(clips):
        assert len(writer.read_clip(clip, 3 + number).frames) == 3 + number
    assert find_strips(tmp_path) == {"a/b": strip_path(tmp_path, "a/b")}
    with Image.open(strip_path(tmp_path, "a/b")) as found:
        assert found.info["comment"] == b"3"
