"""Rows of files, saved datasets and the hub, and what cannot be read of them."""

import bz2
import gzip
import lzma
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written_rows import ROWS, write_array, write_gzip, write_lines, write_parquet, write_saved, write_splits

from hf_packing.errors import PackingError
from hf_packing.text.documents import Documents


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("a.json", write_lines),
        ("a.json", write_array),
        ("a.jsonl.gz", write_gzip),
        ("a.parquet", write_parquet),
        ("saved", write_saved),
        ("splits", write_splits),
    ],
)
def test_rows_of_every_format(tmp_path, name, write):
    documents = Documents(str(write(tmp_path / name, ROWS)))
    assert list(documents) == ROWS
    assert list(documents) == ROWS
    assert documents.skipped == []


def test_a_text_file_has_a_document_in_each_line(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\n  \r\nthree\n")
    assert [row["text"] for row in Documents(str(tmp_path / "a.txt"))] == ["one two", "three"]  # blank lines are none


def test_a_line_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\nt\xffwo\nthree")
    with pytest.raises(PackingError, match=r"a.txt, line 2: expected text in UTF-8"):
        list(Documents(str(tmp_path / "a.txt")))
    documents = Documents(str(tmp_path / "a.txt"), skip_bad=True)
    assert [row["text"] for row in documents] == ["one", "three"]
    assert len(documents.skipped) == 1


def test_links_to_folders_are_followed_once(tmp_path):
    for folder in ("data/within/deep", "elsewhere/below", "data/.hidden"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text(folder)
    links = {"to_elsewhere": "elsewhere", "again": "elsewhere/below", "to_within": "data/within/deep", "loop": "data"}
    for link, target in links.items():
        (tmp_path / "data" / link).symlink_to(tmp_path / target)
    (tmp_path / "data" / ".hidden_link").symlink_to(tmp_path / "elsewhere")
    texts = sorted(row["text"] for row in Documents(str(tmp_path / "data"), glob="*.txt"))
    assert texts == ["data/within/deep", "elsewhere/below"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2"])
def test_damage_is_said_and_ends_a_file(tmp_path, name):
    pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[name.split(".")[-1]]
    lines = "".join(f'{{"text": "{random.Random(number).random()}"}}\n' for number in range(9000))
    damaged = bytearray(pack(lines.encode()))
    middle = len(damaged) // 2
    damaged[middle : middle + 999] = bytes(999)
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(PackingError, match=f"{name}.*: expected "):
        list(Documents(str(tmp_path / name)))


def test_a_cut_file_keeps_what_is_whole(tmp_path):
    lines = "".join(f'{{"text": "{random.Random(number).random()}"}}\n' for number in range(9000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    documents = Documents(str(tmp_path / "a.jsonl.gz"), skip_bad=True)
    assert 5000 < len(list(documents)) < 9000
    assert "expected a file that can be read to its end" in documents.skipped[-1]


def test_an_array_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf [{"text": "one"}]')
    assert list(Documents(str(tmp_path / "a.json"))) == [{"text": "one"}]
    (tmp_path / "b.json").write_text("[" * 100_000)
    with pytest.raises(PackingError, match="b.json: expected a JSON array, "):
        list(Documents(str(tmp_path / "b.json")))


def test_a_pattern_is_of_names_in_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    for data, pattern in ((tmp_path, "/abs*"), (tmp_path / "a.txt", "*.txt"), ("nobody/nothing", "*.txt")):
        with pytest.raises(PackingError, match="--glob: expected a "):
            Documents(str(data), glob=pattern)
    with pytest.raises(PackingError, match="DATA: expected a file, a folder or a dataset's name, .* does not exist"):
        Documents(str(tmp_path / "none"), glob="*.txt")


def test_a_folder_of_texts_has_a_document_in_each_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("three\n")
    (tmp_path / "a.md").write_text("one\ntwo\n")
    (tmp_path / "settings.json").write_text('{"of": "no document"}')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    for left_out in (".git", "__pycache__", "site-packages"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "c.txt").write_text("not a document")
    documents = Documents(str(tmp_path))
    assert [row["text"] for row in documents] == ["one\ntwo\n", '{"of": "no document"}', "three\n"]
    assert len(documents.skipped) == 1
    assert "picture.png: expected text in UTF-8" in documents.skipped[0]
    assert [row["text"] for row in Documents(str(tmp_path), glob="*.py")] == ["three\n"]


def test_a_folder_with_rows_has_nothing_but_rows(tmp_path):
    write_lines(tmp_path / "b.JSONL", ROWS[1:])
    write_parquet(tmp_path / "a.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("about the rows")
    documents = Documents(str(tmp_path))
    assert list(documents) == ROWS
    assert documents.skipped == [f"{tmp_path / 'README.md'}: not read beside files with rows"]


def test_a_line_that_is_no_json(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"\n[3]\n{"text": "three"}\n')
    with pytest.raises(PackingError, match=r"line 2: expected JSON, got '\{\"text\": \"two\"' \(.*\); skip_bad=True"):
        list(Documents(str(file)))
    documents = Documents(str(file), skip_bad=True)
    assert [row["text"] for row in documents] == ["one", "three"]
    assert len(documents.skipped) == 2
    assert "line 3: expected a JSON object with fields, got '[3]'" in documents.skipped[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1, 2", "a.json: expected a JSON array, "),
        ("a.parquet", b"no", "a.parquet: expected a parquet file, "),
        ("a.txt", b"\xff\xfe\xff", "a.txt, line 1: expected text in UTF-8"),
    ],
)
def test_files_that_are_damaged(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PackingError, match=message):
        list(Documents(str(tmp_path / name)))


def test_places_that_are_none(tmp_path):
    with pytest.raises(PackingError, match="DATA: expected a file, a folder or a dataset's name, .* does not exist"):
        Documents(str(tmp_path / "a.jsonl"))
    with pytest.raises(PackingError, match="DATA: expected files like \\*.py in the folder .* got none"):
        Documents(str(tmp_path), glob="*.py")
    write_splits(tmp_path / "splits", ROWS)
    with pytest.raises(PackingError, match="--split: expected one of train, got 'test'"):
        list(Documents(str(tmp_path / "splits"), split="test"))


def test_a_dataset_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda _: (_ for _ in ()).throw(ConnectionError("offline\nmore")))
    monkeypatch.setattr("hf_packing.text.documents.hub_answers", lambda *_: True)
    with pytest.raises(
        PackingError, match="expected a file, a folder or a dataset, got 'nobody/nothing': offline more$"
    ):
        list(Documents("nobody/nothing"))


def test_spreadsheets_and_archives_are_no_texts(tmp_path):
    for name in ("a.xlsx", "a.zip", "a.jsonl.zst"):
        (tmp_path / name).write_text("text\none\n")
        kind = name[name.rindex(".") :]
        message = f"{name}: expected JSONL, parquet, CSV or text, got a {kind} file"
        with pytest.raises(PackingError, match=message):
            list(Documents(str(tmp_path / name)))
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(PackingError, match="got a .xlsx file; skip_bad=True"):
        list(Documents(str(tmp_path)))


OPEN_TABLES = pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
"""datasets 5.0 leaves tables for pandas to close."""


@OPEN_TABLES
def test_tables(tmp_path):
    """Of text such as NA, which pandas takes for a missing value, and of text with line breaks."""
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "a.csv").write_text('text,number\none,1\n"two\nlines",2\n,3\nNA,4\n')
    (folder / "a.tsv").write_text("text\tnumber\none\t1\n")
    (folder / "a.csv.gz").write_bytes(gzip.compress(b"text,number\none,1\n"))
    assert [row["text"] for row in Documents(str(folder / "a.csv"))] == ["one", "two\nlines", "", "NA"]
    for name in ("a.tsv", "a.csv.gz"):
        assert list(Documents(str(folder / name))) == [{"text": "one", "number": 1}]
    (folder / "README.md").write_text("about the tables")
    documents = Documents(str(folder))
    assert len(list(documents)) == 6
    assert documents.skipped == [f"{folder / 'README.md'}: not read beside files with rows"]


@OPEN_TABLES
def test_a_damaged_table_is_said_once(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("text,number\none,1\none,1,4\n")
    message = "a.csv: expected a table whose first line names the columns, .* Expected 2 fields in line 3, saw 3"
    with pytest.raises(PackingError, match=message):
        list(Documents(str(tmp_path / "a.csv")))
    assert not caplog.records


def test_rows_are_not_changed(tmp_path):
    """Arrow has one type, and one order of fields, for all rows."""

    def call(**arguments):
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    rows = [{"messages": [call(a=1, b=2)]}, {"messages": [call(b=2, a=1.5)]}, {"messages": [call(a="1")]}]
    rows += [{"text": "2024-01-01", "number": 2**70}, {"text": 3}]
    read = list(Documents(str(write_lines(tmp_path / "a.jsonl", rows))))
    assert list(map(repr, read)) == list(map(repr, rows))


@OPEN_TABLES
def test_nothing_is_left_in_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, write in (("a.jsonl", write_lines), ("a.parquet", write_parquet)):
        assert list(Documents(str(write(tmp_path / name, ROWS)))) == ROWS
    (tmp_path / "a.csv").write_text("text\none\n")
    assert list(Documents(str(tmp_path / "a.csv"))) == [{"text": "one"}]
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.stat().st_size] == []


def damaged_parquet(folder):
    """A file with a footer, whose second row group is damaged."""
    pq.write_table(pa.table({"text": [str(n) * 50 for n in range(2000)]}), folder / "a.parquet", row_group_size=1024)
    content = (folder / "a.parquet").read_bytes()
    begin = pq.ParquetFile(folder / "a.parquet").metadata.row_group(1).column(0).data_page_offset
    (folder / "a.parquet").write_bytes(content[:begin] + b"\xff" * 64 + content[begin + 64 :])


def truncated_parquet(folder):
    pq.write_table(pa.table({"text": ["one"]}), folder / "a.parquet")
    (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-9])


@OPEN_TABLES
@pytest.mark.parametrize(
    ("make", "rows", "reason"),
    [
        (damaged_parquet, 1024, "expected a file that can be read to its end"),
        (truncated_parquet, 0, "expected a parquet file"),
        (lambda folder: (folder / "a.jsonl").write_text('[{"text": "one"}, {"te'), 0, "expected a JSON array"),
        (lambda folder: (folder / "a.csv").write_text('text,n\n"one,1\ntwo'), 0, "expected a table whose first line"),
        (lambda folder: (folder / "a.csv").write_text(""), 0, "expected a table whose first line"),
    ],
    ids=["damaged parquet", "truncated parquet", "JSON array", "CSV", "empty CSV"],
)
def test_files_that_are_broken_are_left_out(tmp_path, make, rows, reason):
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    (folder / "b.jsonl").write_text('{"text": "last"}\n')
    with pytest.raises(PackingError, match=f"a\\.[a-z]+: {reason}.*; skip_bad=True leaves out what cannot be read"):
        list(Documents(str(folder)))
    documents = Documents(str(folder), skip_bad=True)
    found = list(documents)
    assert len(found) == rows + 1
    assert found[-1] == {"text": "last"}
    assert len(documents.skipped) == 1
    assert reason in documents.skipped[0]


def test_an_empty_text_file_is_no_document(tmp_path):
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "b.md").write_text("\n \n")
    documents = Documents(str(tmp_path))
    assert [row["text"] for row in documents] == ["one"]
    assert documents.skipped == [f"{tmp_path / 'b.md'}: expected text, got an empty file"]
