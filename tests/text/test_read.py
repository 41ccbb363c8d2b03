"""Documents of files, saved datasets and the hub: their tokens and labels, and what cannot be read of them."""

import bz2
import gzip
import io
import json
import lzma
import random
import zipfile
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hf_packing as hfp
from hf_packing.text.read import Documents, find_files
from hf_packing.text.tokenize import load_tokenizer, text_tokenizer

OPEN_TABLES = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
"""datasets 5.0 leaves tables for pandas to close."""


ROWS = [{"text": "one two"}, {"text": "three"}, {"text": ""}]


def write(path, rows):
    """Write rows in the format that the name says; return the path."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    if path.name in ("saved", "splits"):
        data = datasets.Dataset.from_list(rows)
        (data if path.name == "saved" else datasets.DatasetDict({"train": data})).save_to_disk(path)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    elif path.suffix == ".tsv":
        path.write_text("text\tn\n" + "".join(f"{row['text']}\t1\n" for row in rows))
    elif path.name == "array.json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text(lines)
    return path


def zipped(*texts):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.txt", text)
    return written.getvalue()


@pytest.fixture
def read(tmp_path, words):
    def read_texts(data, **options):
        documents = Documents(str(data), **options)
        tokens = documents.tokens(replace(text_tokenizer(words), end=None), tmp_path / "tokens.arrow")
        return [words.decode(ids) for ids in tokens["input_ids"]], documents

    return read_texts


@OPEN_TABLES
@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "A.NDJSON", "a.json", "array.json", "a.jsonl.gz", "a.parquet", "saved", "splits"),
        *("data.v2/a.jsonl", "a.csv", "a.tsv"),
    ],
)
def test_rows_of_every_format(tmp_path, read, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, ROWS)
    found, documents = read(tmp_path / name)
    assert found == [row["text"] for row in ROWS]
    assert documents.skipped == []
    assert (documents.texts, documents.lacking) == (len(ROWS), 0)


def test_values_are_not_changed(tmp_path):
    """Arrow has one type, and one order of fields, for all rows."""

    def call(**arguments):
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    rows = [{"messages": [call(a=1, b=2)]}, {"messages": [call(b=2, a=1.5)]}, {"messages": [call(a="1")]}]
    rows += [{"text": "2024-01-01", "number": 2**70}, {"text": 3}]
    for name in ("a.json", "array.json"):
        documents = Documents(str(write(tmp_path / name, rows)))
        assert [repr(row) for _, row in documents._lines()] == list(map(repr, rows))


def test_text_files_and_folders_of_one_kind(tmp_path, read):
    """What is blank is no document."""
    (tmp_path / "data" / ".hidden").mkdir(parents=True)
    (tmp_path / "data" / "sub").mkdir()
    (tmp_path / "data" / "a.md").write_bytes(b"\xef\xbb\xbfone\ntwo\n\n  \r\nthree\n")
    (tmp_path / "data" / "sub" / "b.md").write_text("three\n")
    (tmp_path / "data" / "sub" / "c.md").write_text("\n \n")
    (tmp_path / "data" / ".hidden" / "d.md").write_text("not a document")
    assert read(tmp_path / "data" / "a.md")[0] == ["one", "two", "three"]
    assert read(tmp_path / "data")[0] == ["one two three", "three"]
    (tmp_path / "data" / "notes.txt").write_text("two")
    for pattern in ("*.md", "**/*.md"):
        assert read(tmp_path / "data", glob=pattern)[0] == ["one two three", "three"]
    assert read(tmp_path / "data", glob="sub/*")[0] == ["three"]
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "b.jsonl", ROWS)
    (tmp_path / "rows" / "README.md").write_text("about the rows")
    with pytest.raises(hfp.PackingError, match="data: expected files of one kind, got JSON and text"):
        Documents(str(tmp_path / "rows"))
    assert len(read(tmp_path / "rows", glob="*.jsonl")[0]) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "content", "kept", "reason"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"\n{"text": "three"}', ["one", "three"], "line 2: expected JSON"),
        ("a.jsonl", b'{"text": "one"}\n[3]\n', ["one"], "line 2, row 0: expected a JSON object"),
        ("a.json", b'[{"text": "one"}, 3]', ["one"], "row 1: expected a JSON object"),
        ("a.json", b"\xef\xbb\xbf" + b"[" * 100_000, [], "a.json: expected JSON"),
        ("a.jsonl", b'{"text": "one"}\n{"body": "two"}\n', ["one"], "line 2: expected text, .* got the fields body"),
        ("a.txt", b"one\r\nt\xffwo\nthree", ["one", "three"], "line 2: expected text in UTF-8"),
        ("a.txt", "one\ntwo\n".encode("utf-16-le"), [], "line 1: expected text in UTF-8.*NUL bytes"),
        ("a.tar", b"one\0\0\0", [], "line 1: expected text in UTF-8"),
        ("a.zip", zipped("one\n", "two\n"), [], "line 1: expected text in UTF-8"),
    ],
)
def test_lines_and_rows_that_cannot_be_used_are_named_or_left_out(tmp_path, read, name, content, kept, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(hfp.PackingError, match=f"{reason}.*skip_bad=True leaves out"):
        read(tmp_path / name)
    found, documents = read(tmp_path / name, skip_bad=True)
    assert found == kept
    assert documents.skipped


@OPEN_TABLES
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "b.parquet", "b.csv"])
def test_a_damaged_file_is_named(tmp_path, read, name):
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}.get(name.split(".")[-1], bytes)
    lines = "".join(f'{{"text": "{random.Random(number).random()}"}}\n' for number in range(9000))
    damaged = bytearray(pack(lines.encode()) if name[0] == "a" else b'text,n\n"one,1\ntwo')
    middle = len(damaged) // 2
    damaged[middle : middle + 999] = bytes(999)
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(hfp.PackingError, match=f"{name}.*: "):
        read(tmp_path / name)


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_the_format_of_a_saved_dataset_does_not_change_rows(tmp_path, read, form):
    saved = datasets.Dataset.from_dict({"text": ["one"], "input_ids": [[1]]})
    saved.with_format(form, columns=["text"]).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved")[0] == ["one"], "hidden columns stay hidden"


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"data": "{folder}/none.jsonl"}, "data"),
        ({"data": "{folder}/none", "glob": "*.txt"}, "glob"),
        ({"data": "{folder}", "glob": "*.none"}, "data"),
        ({"data": "{folder}", "glob": "/abs*"}, "data"),
        ({"data": "{folder}/a.txt", "glob": "*.txt"}, "glob"),
        ({"data": "{folder}/a.txt", "split": "test"}, "split"),
        ({"data": "{folder}/splits", "split": "test"}, "data"),
        ({"data": "{folder}/saved", "split": "test"}, "data"),
        ({"data": "nobody/nothing"}, "data"),
        ({"data": "{folder}/a.txt", "tokenizer": None}, "tokenizer"),
        ({"data": "{folder}/tokens.jsonl"}, "tokenizer"),
        ({"data": "{folder}/tokens.jsonl", "tokenizer": None, "skip_bad": True}, "skip_bad"),
    ],
)
def test_refused(tmp_path, words, options, argument):
    (tmp_path / "a.txt").write_text("one")
    write(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2]}])
    write(tmp_path / "splits", ROWS)
    write(tmp_path / "saved", ROWS)
    options = {name: value.format(folder=tmp_path) if name == "data" else value for name, value in options.items()}
    tokenizer = options.pop("tokenizer", words)
    with pytest.raises(hfp.PackingError, match=f"^{argument}: expected "):
        Documents(options.pop("data"), **options).tokens(tokenizer and text_tokenizer(tokenizer), tmp_path / "t.arrow")


@pytest.mark.parametrize("name", ["org/Name-2.5", "org/data.v2", "Name-1.5-sft", "org/v1.0-en"])
def test_names_on_the_hub_may_have_dots(name):
    assert find_files(name) == []


def test_tokens_are_those_of_tokenize(tmp_path, words, monkeypatch):
    """However many blocks they are tokenized in; and so are labels."""
    monkeypatch.setattr("hf_packing.text.read._CHARACTERS_AT_ONCE", 10)
    rows = [{"prompt": "one " * number, "completion": " two"} for number in range(9)]
    seen = []
    documents = Documents(str(write(tmp_path / "a.jsonl", rows)))
    found = documents.tokens(text_tokenizer(words), tmp_path / "tokens.arrow", seen.append)
    assert found.to_dict() == hfp.tokenize(datasets.Dataset.from_list(rows), words).to_dict()
    assert sum(seen) == 9
    assert len(seen) > 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
def test_rows_with_tokens_are_given_as_they_are(tmp_path, words, name):
    rows = [{"input_ids": [5, 6], "labels": [-100, 6], "text": "one"}, {"input_ids": [7], "labels": [7], "text": "two"}]
    data = str(write(tmp_path / name, rows))
    assert Documents(data).tokens(None, tmp_path / "tokens.arrow").to_list() == rows
    tokenizer = text_tokenizer(words, text_field="text")
    tokenized = Documents(data).tokens(tokenizer, tmp_path / "tokens.arrow")
    assert tokenized["input_ids"][:] == [[2, 1], [3, 1]]


@pytest.mark.parametrize(
    "name", ["toolcall", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chat", "instruct", "math", "wiki"))]
)
def test_lengths_of_real_documents(shared_data, tmp_path, name):
    separator = "\n" if name in ("instruct", "math") else None
    tokenizer = text_tokenizer(load_tokenizer(str(shared_data / "tokenizer.json")), separator=separator)
    tokens = Documents(str(shared_data / f"{name}.jsonl.gz")).tokens(tokenizer, tmp_path / "tokens.arrow")
    lengths = np.array(list(map(len, tokens["input_ids"])))
    assert np.array_equal(lengths, np.load(shared_data / "lengths" / f"{name}.npy"))
