"""Files and settings are read strictly: what does not fit is one line that says where."""

import pytest

from vflash_analysis import strict
from vflash_analysis.errors import InputError
from vflash_analysis.strict import read_json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.steps=300", ("training.steps", 300)),
        ("training.learning_rate=1e-3", ("training.learning_rate", 0.001)),
        ("clips.benchmarks=[VDC, MLVU]", ("clips.benchmarks", ["VDC", "MLVU"])),
        ('clips.benchmarks=["VDC"]', ("clips.benchmarks", ["VDC"])),
        ("target.device=cuda", ("target.device", "cuda")),
        ("target.source=a=b", ("target.source", "a=b")),
        ("drafter.source=null", ("drafter.source", None)),
        ("drafter.source=", ("drafter.source", "")),
        ("target.compile=true", ("target.compile", True)),
    ],
)
def test_parse_override(text, expected):
    assert strict.parse_override(text) == expected


@pytest.mark.parametrize(
    "text", ["training.steps", "=3", " =3", "a=[1", "a=[2026-13-45]", "a=" + 3000 * "["]
)
def test_parse_override_refuses(text):
    with pytest.raises(InputError):
        strict.parse_override(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "key 'a' is given twice"),
        ("- 1\n", "found list [1], allowed: a mapping"),
        ("a: [1\n", "not readable as YAML"),
        ("", "found null, allowed: a mapping"),
    ],
)
def test_read_yaml_refuses(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(InputError) as refusal:
        strict.read_yaml(tmp_path / "x.yaml")
    assert message in str(refusal.value) and "x.yaml" in str(refusal.value)
    with pytest.raises(InputError, match="no such file"):
        strict.read_yaml(tmp_path / "y.yaml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a":\n 1,\n}', r"bad\.json, line 3: not readable as JSON"),
        (b'["\\ud800"]', r"bad\.json: not readable as JSON .*surrogates"),
        (b"[" * 100_000, r"bad\.json: not readable as JSON .*recursion"),
        (b"9" * 5000, r"bad\.json: not readable as JSON .*digits"),
        (b'["ok",\n"\xe9"]', r"bad\.json, line 2: found byte 0xe9, allowed: UTF-8"),
        (None, r"bad\.json: cannot be read"),
    ],
)
def test_what_is_no_json_is_one_line_that_names_the_file(tmp_path, content, said):
    path = tmp_path / "bad.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"no\.json: no such file"):
        read_json(tmp_path / "no.json")
    with pytest.raises(InputError, match="without NUL"):
        read_json(tmp_path / "a\0")
