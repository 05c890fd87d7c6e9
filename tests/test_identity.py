"""What identifies a run: code that it reaches, and the files that it reads."""

import json
import os
import time

import pytest

from tests.planted import write_notebook
from vflash_analysis import identity, paths, stages
from vflash_analysis.errors import InputError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two modules, one reached by a late import, and a notebook that uses them."""
    home = tmp_path / "vflash_analysis"
    (home / "parts").mkdir(parents=True)
    (home / "__init__.py").write_text('"""Head."""\n')
    (home / "parts" / "__init__.py").write_text("")
    (home / "config.py").write_text("x = 1\n")
    (home / "parts" / "one.py").write_text(
        '"""Head."""\ndef f():\n    """Doc."""\n    from vflash_analysis.parts import two\n'
        "    return two.g()\n"
    )
    (home / "parts" / "two.py").write_text("def g():\n    return 1\n")
    (home / "parts" / "three.py").write_text("def h():\n    return 1\n")
    cells = ["from vflash_analysis.parts.one import f\nfrom vflash_analysis.config import x", "f()"]
    book = write_notebook(tmp_path / "n.ipynb", cells, "steps = 3")
    monkeypatch.setattr(paths, "PACKAGE", home)
    return home, book


def test_an_estimate_is_code_of_the_cost_model_alone():
    """Edited, it changes no clip, text, drafter or decode; shapes, of which targets are built, do."""
    parts = {
        name: set(identity.code_parts(paths.NOTEBOOKS / stage.notebook))
        for name, stage in stages.STAGES.items()
    }
    estimated = {name for name, found in parts.items() if "vflash_analysis.sizes" in found}
    assert estimated >= {"cost"}
    assert not estimated & {"environment", "clips", "target", "continuations", "drafter", "decode"}
    shaped = {name for name, found in parts.items() if "vflash_analysis.shapes" in found}
    assert shaped >= {"target", "continuations", "drafter", "decode", "cost"}


def test_code_digest_sees_code_and_nothing_else(package):
    home, book = package
    before = identity.code_digest(book)

    def rewrite(name, text):
        file = home / name
        file.write_text(text)
        os.utime(file, ns=(time.time_ns(), time.time_ns() + hash(text) % 10**9))
        return identity.code_digest(book)

    assert (
        rewrite("parts/one.py", (home / "parts/one.py").read_text() + "\n# a comment\n") == before
    )
    told = (home / "parts/one.py").read_text()
    assert (
        rewrite("parts/one.py", told.replace("Doc.", "Other words.").replace("Head", "H")) == before
    )
    assert rewrite("config.py", "x = 2\n") == before  # orchestration
    assert rewrite("parts/three.py", "def h():\n    return 2\n") == before  # not reached
    write_notebook(book, ["from vflash_analysis.parts.one import f", "f()"], "steps = 3")
    assert identity.code_digest(book) != before  # a cell changed
    cells = ["from vflash_analysis.parts.one import f\nfrom vflash_analysis.config import x", "f()"]
    write_notebook(book, cells, "steps = 400")
    assert identity.code_digest(book) == before  # the parameters cell counts by value only
    assert rewrite("parts/two.py", "def g():\n    return 2\n") != before  # reached by a late import


def test_code_that_does_not_parse_is_named(package):
    home, book = package
    (home / "parts" / "two.py").write_text("def g(:\n")
    with pytest.raises(InputError, match=r"two\.py: line 1:"):
        identity.code_digest(book)


def test_file_digests_read_a_file_once(tmp_path, monkeypatch):
    reads = []
    really = identity.sha256_of_file
    monkeypatch.setattr(identity, "sha256_of_file", lambda p: reads.append(p) or really(p))
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"1")
    store = tmp_path / "digests.json"
    first = identity.FileDigests(store)
    digest = first.of(folder)
    first.save()
    assert identity.FileDigests(store).of(folder) == digest and len(reads) == 1
    (folder / "a.bin").write_bytes(b"2")
    os.utime(folder / "a.bin", ns=(1, 1))
    assert identity.FileDigests(store).of(folder) != digest and len(reads) == 2
    for damaged in ("{ damaged", json.dumps({str((folder / "a.bin").resolve()): [1]})):
        store.write_text(damaged)
        assert identity.FileDigests(store).of_file(tmp_path / "nothing") == identity.ABSENT
        assert identity.FileDigests(store).of(folder) != digest
    (tmp_path / "file").touch()
    unwritable = identity.FileDigests(tmp_path / "file" / "store.json")
    unwritable.of(folder)
    unwritable.save()  # a cache that cannot be kept costs time, nothing else


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path, monkeypatch):
    file, really = tmp_path / "a.bin", identity.sha256_of_file
    file.write_bytes(b"1")
    digests = identity.FileDigests(tmp_path / "store.json")

    def slow(path):
        digest = really(path)
        path.write_bytes(b"22")
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(identity, "sha256_of_file", slow)
        with pytest.raises(InputError, match=r"a\.bin: found a file that changed while"):
            digests.of_file(file)
    assert digests.known(file) is None and digests.of_file(file) == really(file)


def test_a_folders_digest_knows_names_not_places(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "a.bin").write_bytes(b"1")
        (tmp_path / place / ".hidden").write_bytes(place.encode())
    digests = identity.FileDigests(tmp_path / "store.json")
    assert digests.of(tmp_path / "here") == digests.of(tmp_path / "there")
    (tmp_path / "there" / "sub" / "a.bin").rename(tmp_path / "there" / "sub" / "b.bin")
    assert digests.of(tmp_path / "here") != digests.of(tmp_path / "there")


def test_a_page_that_only_shows_does_not_make_records_anew():
    """A package that is left out changes nothing, whatever changes in it; others still do."""
    whole = set(identity.code_parts(paths.NOTEBOOKS / "63_compare_visual_length.ipynb"))
    stage = stages.STAGES["lengths"]
    kept = set(
        identity.code_parts(paths.NOTEBOOKS / stage.notebook, leaves_out="vflash_analysis.results")
    )
    assert "vflash_analysis.results.report" in whole and kept < whole
    assert not [name for name in kept if name.startswith("vflash_analysis.results")]
    assert {"vflash_analysis.decoding.lengths", "vflash_analysis.metrics"} <= kept
    assert stage.code_digest() != identity.code_digest(paths.NOTEBOOKS / stage.notebook)
    page = stages.STAGES["speedup"]  # its tables are results
    assert page.code_digest() == identity.code_digest(paths.NOTEBOOKS / page.notebook)
