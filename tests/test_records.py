"""Record files: what is written comes back, what does not belong is refused with one line."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from vflash_analysis import paths, records, schemas, strict
from vflash_analysis.errors import InputError
from vflash_analysis.records import (
    blank_row,
    merge_parts,
    part_path,
    read_records,
    read_records_csv,
    sha256_of_file,
    to_table,
    typed_frame,
    why_not_done,
    write_done,
    write_json_atomic,
    write_part,
    write_records,
    write_records_csv,
)
from vflash_analysis.schemas import (
    ANCHORS,
    CONTINUATIONS,
    COSTS,
    CYCLES,
    GENERATIONS,
    ROW_KEY,
    SCHEMAS,
    TRAINING,
)
from vflash_analysis.strict import read_json


def continuation(clip_id: str, /, **changes: object) -> dict[str, object]:
    row = blank_row(CONTINUATIONS)
    row |= {"clip_id": clip_id, "benchmark": "VDC", "split": "train", "target_sha256": "a"}
    return row | {"status": "ok"} | changes


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_ids_stay_the_text_they_were(tmp_path):
    ids = ["007", "NA", "none", "1e3", "null", ""]
    path = tmp_path / "c.parquet"
    assert write_records(path, [continuation(i) for i in ids], CONTINUATIONS) == len(ids)
    assert read_records(path, CONTINUATIONS)["clip_id"].tolist() == ids


def test_missing_stays_missing_and_integers_stay_integers(tmp_path):
    path = tmp_path / "c.parquet"
    rows = [
        continuation("a", prompt_tokens=12, input_ids=[0, 5], text="x"),
        continuation("b", status="failed", reason="short clip"),
        continuation("c", input_ids=[]),
    ]
    write_records(path, rows, CONTINUATIONS)
    frame = read_records(path, CONTINUATIONS)
    assert frame["prompt_tokens"].tolist()[0] == 12
    assert frame["prompt_tokens"].isna().tolist() == [False, True, True]
    assert frame["input_ids"][0].tolist() == [0, 5]
    assert frame["input_ids"][1] is None
    assert frame["input_ids"][2].tolist() == []
    assert pd.isna(frame["text"][1])


def test_a_read_frame_can_be_written_again(tmp_path):
    rows = [continuation("a", input_ids=[1]), continuation("b")]
    write_records(tmp_path / "a.parquet", rows, CONTINUATIONS)
    frame = read_records(tmp_path / "a.parquet", CONTINUATIONS)
    write_records(tmp_path / "b.parquet", frame, CONTINUATIONS)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    pd.testing.assert_frame_equal(frame, typed_frame(rows, CONTINUATIONS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_id": None}, "'clip_id' is missing"),
        ({"prompt_tokens": 1.5}, "'prompt_tokens' is 1.5, must be an integer"),
        ({"prompt_tokens": True}, "'prompt_tokens' is True, must be int64"),
        ({"prompt_tokens": "12"}, "'prompt_tokens' must be int64"),
        ({"input_ids": [1.5]}, "'input_ids' holds fractions"),
        ({"clip_id": 7}, "'clip_id' must be string"),
        ({"input_ids": ["x"]}, "'input_ids' must be list"),
        ({"colour": "red"}, "unknown ['colour']"),
    ],
)
def test_a_bad_row_is_refused_by_column(tmp_path, changes, words):
    path = tmp_path / "c.parquet"
    with pytest.raises(InputError) as error:
        write_records(path, [continuation("a", **changes)], CONTINUATIONS)
    assert words in one_line(error)
    assert str(path) in str(error.value)
    assert list(tmp_path.iterdir()) == []


def a_cost(**changes):
    row = dict.fromkeys(COSTS.columns) | {
        "run_id": "007", "shape": "NA", "device": "cpu (x, 2 threads)", "dtype": "float32",
        "implementation": "vflash", "forward": "ar", "context_tokens": 512, "rows": 1,
        "repeats": 3, "read_bytes": 1.5e9, "flops": 2.0, "seconds": 0.0123456,
        "seconds_low": 0.01, "seconds_high": 0.02, "peak_bytes": 12345678901,
    }  # fmt: skip
    return row | changes


def test_a_csv_of_records_comes_back_as_it_was(tmp_path):
    path = tmp_path / "costs.csv"
    absent = {"seconds": None, "seconds_low": None, "seconds_high": None, "peak_bytes": None}
    rows = [a_cost(), a_cost(run_id="1e3", reason="none", **absent)]
    write_records_csv(path, rows, COSTS)
    found = read_records_csv(path, COSTS)
    pd.testing.assert_frame_equal(found, typed_frame(rows, COSTS))
    assert found["run_id"].tolist() == ["007", "1e3"] and found["reason"].isna().tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as CSV"),
        ("a,b\n1,2\n", "not the columns of 'costs'"),
        (",".join(COSTS.columns) + "\n" + ",".join(["x"] * 16) + "\n", "'context_tokens': Unable"),
    ],
)
def test_a_csv_that_is_none_is_named(tmp_path, text, message):
    path = tmp_path / "costs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=f"costs.csv: {message}"):
        read_records_csv(path, COSTS)
    with pytest.raises(InputError, match=r"none\.csv: no such file"):
        read_records_csv(tmp_path / "none.csv", COSTS)


def test_a_row_without_a_column_is_refused():
    row = continuation("a")
    del row["reason"]
    with pytest.raises(InputError, match=r"row 1.*missing \['reason'\]"):
        to_table([continuation("b"), row], CONTINUATIONS)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinity_is_refused_and_nan_becomes_missing(value):
    row = blank_row(TRAINING) | {
        **dict.fromkeys(("target_sha256", "drafter_sha256", "objective", "setting", "device"), "x"),
        "variant": "",
        **dict.fromkeys(("train_seed", "steps", "training_clips", "anchors_per_clip", "step"), 1),
        "forward_equivalents": 1.0,
        "revealed_weight": 1.0,
        "loss": 1.0,
        "learning_rate": value,
    }
    with pytest.raises(InputError, match=r"'learning_rate' is -?inf"):
        to_table([row], TRAINING)
    frame = typed_frame([row | {"learning_rate": float("nan")}], TRAINING)
    assert frame["learning_rate"].isna().all()


def test_a_stale_or_other_schema_is_refused(tmp_path):
    path = tmp_path / "c.parquet"
    write_records(path, [continuation("a")], CONTINUATIONS)
    with pytest.raises(InputError) as error:
        read_records(path, CYCLES)
    assert "schema 'continuations'" in one_line(error)
    table = pq.read_table(path)
    stale = {b"vflash_schema": b"continuations", b"vflash_schema_version": b"0"}
    pq.write_table(table.replace_schema_metadata(stale), path)
    with pytest.raises(InputError, match=r"version 0, allowed is 'continuations' version 1"):
        read_records(path, CONTINUATIONS)
    pq.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(InputError, match="schema 'none'"):
        read_records(path, CONTINUATIONS)
    pq.write_table(table.drop_columns(["text"]), path)
    with pytest.raises(InputError, match=r"missing \['text'\]"):
        read_records(path, CONTINUATIONS)


def test_an_unreadable_file_is_named_with_its_size(tmp_path):
    path = tmp_path / "c.parquet"
    write_records(path, [continuation("a")], CONTINUATIONS)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError) as error:
        read_records(path, CONTINUATIONS)
    assert f"{path}: not a readable Parquet file (100 bytes)" == one_line(error)
    with pytest.raises(InputError, match="no such record file"):
        read_records(tmp_path / "d.parquet", CONTINUATIONS)


def test_a_failed_write_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "c.parquet"
    write_records(path, [continuation("a")], CONTINUATIONS)
    before = path.read_bytes()

    def fail(table, where, **options):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(records.pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        write_records(path, [continuation("b")], CONTINUATIONS)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.parquet"]


def test_parts_merge_in_order_and_a_rewrite_replaces(tmp_path):
    for clip in ("b/1", "a", "007"):
        write_part(tmp_path, CONTINUATIONS, clip, [continuation(clip)])
    write_part(tmp_path, CONTINUATIONS, "a", [continuation("a"), continuation("a2")])
    assert part_path(tmp_path, CONTINUATIONS, "b/1").is_file()
    assert merge_parts(tmp_path, CONTINUATIONS, ["b/1", "a", "007"]) == 4
    merged = read_records(tmp_path / "continuations.parquet", CONTINUATIONS)
    assert merged["clip_id"].tolist() == ["b/1", "a", "a2", "007"]


def test_a_missing_or_doubled_part_is_refused(tmp_path):
    write_part(tmp_path, CONTINUATIONS, "a", [continuation("a")])
    with pytest.raises(InputError, match=r"b\.parquet: no such record file"):
        merge_parts(tmp_path, CONTINUATIONS, ["a", "b"])
    with pytest.raises(InputError, match="named twice"):
        merge_parts(tmp_path, CONTINUATIONS, ["a", "a"])
    with pytest.raises(InputError, match="non-empty id"):
        part_path(tmp_path, CONTINUATIONS, "")


def test_no_parts_merge_to_an_empty_table(tmp_path):
    assert merge_parts(tmp_path, ANCHORS, []) == 0
    assert read_records(tmp_path / "anchors.parquet", ANCHORS).empty


def test_done_holds_rows_and_digests_and_notices_a_change(tmp_path):
    write_records(tmp_path / "c.parquet", [continuation("a")], CONTINUATIONS)
    (tmp_path / "note.txt").write_text("x")
    assert "no DONE" in str(why_not_done(tmp_path))
    write_done(tmp_path, {"clips": 1}, ["c.parquet", "note.txt"])
    done = read_json(tmp_path / "DONE")
    assert done["outputs"]["c.parquet"]["rows"] == 1
    assert done["payload"] == {"clips": 1}
    assert why_not_done(tmp_path) is None
    (tmp_path / "note.txt").write_text("y")
    assert why_not_done(tmp_path, check_sha256=False) is None
    assert "changed since" in str(why_not_done(tmp_path))
    (tmp_path / "note.txt").write_text("longer")
    assert "6 bytes, 1 when" in str(why_not_done(tmp_path, check_sha256=False))
    (tmp_path / "note.txt").unlink()
    assert "missing" in str(why_not_done(tmp_path))


def test_done_is_not_written_for_a_missing_or_empty_output(tmp_path):
    with pytest.raises(InputError, match="nothing to declare"):
        write_done(tmp_path, {}, [])
    (tmp_path / "empty.txt").touch()
    for name in ("absent.txt", "empty.txt"):
        with pytest.raises(InputError, match=f"{name}: declared output is missing or empty"):
            write_done(tmp_path, {}, [name])
    assert not (tmp_path / "DONE").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"outputs": {}}', '{"outputs": {"a": {}}}'])
def test_a_damaged_done_does_not_count(tmp_path, text):
    (tmp_path / "DONE").write_text(text)
    assert why_not_done(tmp_path) is not None


def test_json_is_sorted_and_refuses_nan(tmp_path):
    path = tmp_path / "m.json"
    write_json_atomic(path, {"b": 1, "a": [1.5, None]})
    assert path.read_text() == '{\n  "a": [\n    1.5,\n    null\n  ],\n  "b": 1\n}\n'
    for payload in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(InputError, match="cannot be written as JSON"):
            write_json_atomic(path, payload)
    assert read_json(path) == {"b": 1, "a": [1.5, None]}


def test_git_state_outside_a_checkout_is_unknown(tmp_path):
    assert records.git_state(tmp_path) == {"git_commit": None, "git_dirty": None}


def test_versions_of_absent_packages_are_none():
    found = records.package_versions(["pandas", "no-such-package-here"])
    assert found == {"pandas": pd.__version__, "no-such-package-here": None}


def test_every_key_column_is_required_in_every_schema():
    for schema in (GENERATIONS, CYCLES):
        for column in ROW_KEY:
            assert not schema.arrow.field(column).nullable
    for schema in SCHEMAS.values():
        names = {"clip_id", "drafter_sha256", "benchmark", "method"} & set(schema.columns)
        assert all(str(schema.arrow.field(name).type) == "string" for name in names)


def test_the_light_floor_and_the_results_load_no_torch():
    code = (
        "import sys, vflash_analysis.results.report, vflash_analysis.stats\n"
        "heavy = {'torch', 'transformers', 'decord', 'av', 'papermill'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_file_is_hashed_by_its_bytes(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of_file(tmp_path / "abc").startswith("ba7816bf8f01cfea")  # FIPS 180-2, B.1


def test_hosts_that_share_a_folder_and_a_process_number_write_beside_each_other(
    tmp_path, monkeypatch
):
    drafts = []
    for host in ("a", "b"):
        monkeypatch.setattr(records.socket, "gethostname", lambda host=host: host)
        records.replace_atomically(
            tmp_path / "x", lambda draft: drafts.append(draft.name) or draft.write_text("1")
        )
    assert len(set(drafts)) == 2 and [p.name for p in tmp_path.iterdir()] == ["x"]


def own_names(module) -> set[str]:
    """Names that a module binds itself at its top level."""
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    made = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
    names = [node for one in assigned for node in ast.walk(one) if isinstance(node, ast.Name)]
    return made | {name.id for name in names if isinstance(name.ctx, ast.Store)}


def code_of(file: Path) -> str:
    if file.suffix == ".py":
        return file.read_text(encoding="utf-8")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def test_names_of_schemas_and_strict_are_taken_from_there():
    owners = {name: owner.__name__ for owner in (schemas, strict) for name in own_names(owner)}
    assert {"BENCHMARKS", "COSTS", "Schema", "read_json", "Bounds"} <= set(owners)
    places = (paths.PACKAGE, paths.ROOT / "tests", paths.NOTEBOOKS)
    files = [
        file for place in places for kind in ("py", "ipynb") for file in place.rglob(f"*.{kind}")
    ]
    taken = [
        (file.name, node.module, alias.name)
        for file in files
        for node in ast.walk(ast.parse(code_of(file)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vflash_analysis.")
        for alias in node.names
        if alias.name in owners
    ]
    assert len(taken) > 100
    elsewhere = [one for one in taken if one[1] != owners[one[2]]]
    assert elsewhere == []
