"""Rows of files, datasets and lists; what cannot be read is named by file, line and fix."""

import codecs
import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from rl.data.jsonl import read_rows, showing_progress
from rl.errors import ConfigError

ROW = {"text": "é 日本 🙂", "n": [1, {"a": None}]}


def values(source, **options):
    return [row.value for row in read_rows(source, **options)]


def test_rows_of_a_file_have_its_line_numbers(write):
    path = write(ROW, b"\n", b"  \n", {"b": 2})
    rows = list(read_rows(path))
    assert [(row.line, dict(row.value)) for row in rows] == [(1, ROW), (4, {"b": 2})]
    assert rows[1].where == f"data.path: {path} line 4"
    assert str(rows[1].error("no")) == f"data.path: {path} line 4: no"


def test_a_byte_order_mark_before_the_first_line_is_skipped(write):
    raw = json.dumps(ROW, ensure_ascii=False).encode()
    assert values(write(codecs.BOM_UTF8 + raw + b"\r\n", raw)) == [ROW, ROW]


BROKEN = {
    "torn": ([ROW, b'{"a": \n'], "line 2: not JSON: Expecting value"),
    "two objects in a line": ([b"{} {}\n"], "line 1: not JSON: Extra data"),
    "latin-1": (['{"a": "é"}\n'.encode("latin-1")], "line 1: not JSON: .*save the file as UTF-8"),
    "UTF-16": ([json.dumps(ROW).encode("utf-16")], "line 1: not JSON: the file is UTF-16; save it"),
    "torn zstd": ([b"(\xb5/\xfd\n"], "cannot be read: "),
    "torn gzip": ([gzip.compress(b"{}\n" * 99)[:-20]], "cannot be read: "),
    "Git LFS": (
        [b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"],
        "is a pointer of Git LFS, without the content of the file; run there: git lfs install",
    ),
    "mark within": ([ROW, codecs.BOM_UTF8 + b"{}\n"], "line 2: not JSON: Unexpected UTF-8 BOM"),
    "deep": ([b"[" * 100_000], "data.jsonl: not JSON: maximum recursion depth"),
    "array": ([b'[{"a": 1}, 5]'], r"data.jsonl row 1: not a JSON object: 5; write \{…\}"),
    "empty array": ([b" [ ]"], "is empty; each line should be a JSON object"),
    "a list": ([ROW, b"[1]\n"], r"line 2: not a JSON object: \[1\]; write \{…\}"),
    "a text": ([b'"a"\n'], "line 1: not a JSON object: 'a'; write"),
    "null": ([b"null\n"], "line 1: not a JSON object; write"),
    "empty": ([], "is empty; each line should be a JSON object"),
    "blank": ([b"\n \n"], "is empty; each line should be a JSON object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_lines_that_cannot_be_read_are_named(write, name):
    rows, message = BROKEN[name]
    path = write(*rows)
    with pytest.raises(ConfigError, match=message) as error:
        values(path, field="task.path")
    assert str(error.value).startswith(("task.path: " + str(path), f"task.path: '{path}'"))


def test_a_compressed_file_is_read_and_a_tilde_expanded(write, tmp_path, monkeypatch):
    path = write(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert values(path) == [{"a": 1}, {"a": 2}]
    monkeypatch.setenv("HOME", str(Path(path).parent))
    assert values(f"~/{Path(path).name}") == [{"a": 1}, {"a": 2}]


def test_paths_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    for path, message in (
        (tmp_path / "*.jsonl", "no file matches '.*jsonl'"),
        (f"{tmp_path / 'a.jsonl'},b.jsonl", "there is no file '.*a.jsonl'"),
        (tmp_path / "a.parquet", ".* is a pointer of Git LFS"),
        ("/nowhere/x", "there is no file '/nowhere/x'"),
        (
            tmp_path / "empty",
            ".* cannot be opened: The directory at .* doesn't contain any data files",
        ),
        ("", "not set; name a JSONL file"),
    ):
        with pytest.raises(ConfigError, match=f"data.path: {message}"):
            values(path)


def test_fields_that_are_no_text_are_named(write):
    (row,) = read_rows(write({"a": " ", "b": 5, "c": "\ud800", "d": "text", "e": ""}))
    assert row.text("d") == "text"
    assert row.text("e", empty=True) == ""
    for name, message in (
        ("a", "line 1: field 'a' is missing or not text: ' '"),
        ("b", "line 1: field 'b' is missing or not text: 5"),
        ("c", "line 1: field 'c' has half of a surrogate pair, as .*; remove it"),
        ("e", "line 1: field 'e' is missing or not text: ''"),
        ("f", "line 1: field 'f' is missing or not text; the row has 'a', 'b', .* data.columns$"),
    ):
        with pytest.raises(ConfigError, match=message):
            row.text(name)


def test_lists_and_iterators_are_sources():
    assert values([ROW, ROW]) == [ROW, ROW]
    assert values(iter([ROW])) == [ROW]
    for source, message in (
        ([ROW, 5], "row 1: not a JSON object: 5"),
        ([], "the list is empty"),
        ({"a": 1}, "a dict has no rows; give rows"),
    ):
        with pytest.raises(ConfigError, match=f"data.path: {message}"):
            values(source)


def test_a_dataset_is_a_source_without_the_nulls_that_arrow_adds():
    rows = [{"m": [{"a": 1, "b": {"x": 1}}]}, {"m": [{"a": 2, "c": "text"}]}]
    dataset = Dataset.from_list(rows)
    assert "c" in dataset[0]["m"][0], "Arrow adds no nulls any more"
    assert values(dataset) == rows
    with pytest.raises(ConfigError, match="a DatasetDict has no rows; take one of its splits, tr"):
        values(DatasetDict(train=dataset))


def test_reading_tells_its_progress(write):
    path = write(*[b"{}\n"] * 20_000)
    told = []
    with showing_progress(told.append):
        assert len(values(path)) == 20_000
    assert told == [f"read 10,000 lines of {path}", f"read 20,000 lines of {path}"]
