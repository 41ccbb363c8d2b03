"""A name that exists is a name, whatever letters it has; only what does not exist is a pattern or a URL."""

import gzip
import io
import json
import os
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tiers import fast_only
from tokenizers import Tokenizer, models, pre_tokenizers

import hf_packing as hfp
from hf_packing.cli import main
from hf_packing.fleet.pack_files import find_inputs
from hf_packing.text.read import Documents
from hf_packing.text.tokenize import TextTokenizer, load_tokenizer

NAMES = {
    "run[1]": "run1",
    "what?": "whatx",
    "star*x": "starabx",
    "[!a]": "b",
    "**": "c",
    "x{1,2}": "x1",
    "file:x": "x",
    "a%20b": "a b",
    "a#b": "a",
    "~": "home",
    "-dash": "dash",
    "sp ace": "space",
    "'q'": "q",
    "é漢": "e",
}
"""Odd names, and what a pattern or a URL of that name would find."""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text}] * 3
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("text\n" + f"{text}\n" * 3)
    elif path.suffix == ".txt":
        path.write_text(f"{text}\n" * 3)
    else:
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


@pytest.fixture
def tokenizer(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "odd": 1, "plain": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "[t]").mkdir()
    backend.save(str(tmp_path / "[t]" / "tokenizer.json"))
    return str(tmp_path / "[t]" / "tokenizer.json")


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("csv", "txt", "jsonl.gz")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", *SLOW])
@pytest.mark.parametrize("name", [*NAMES, "a::b", "$HOME"])
def test_files_and_folders_with_odd_names(tmp_path, tokenizer, name, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = TextTokenizer(load_tokenizer(tokenizer))
    for place, other in ((f"{name}.{kind}", NAMES.get(name, "a")), (f"{name}/d.{kind}", f"{NAMES.get(name, 'a')}/d")):
        write(tmp_path / "in" / place, "odd odd")
        write(tmp_path / "in" / f"{other.removesuffix(f'.{kind}')}.{kind}", "plain")
        documents = Documents(f"in/{place}" if "/" not in place else f"in/{name}")
        assert documents.tokens(texts, tmp_path / "tokens.arrow")["input_ids"][:] == [[1, 1]] * 3


@pytest.mark.parametrize("name", fast_only(NAMES, "star*x", "sp ace", "-dash", "a%20b"))
def test_the_command_and_the_fleet_read_and_write_odd_names(tmp_path, tokenizer, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in" / name / "d.parquet", "odd odd")
    write(tmp_path / "in" / NAMES[name] / "d.parquet", "plain")
    (tmp_path / "out").mkdir()
    given = ["--tokenizer", tokenizer, "--max-length", "8"]
    assert main(["pack", f"in/{name}/d.parquet", "--output", f"out/{name}", *given]) == 0
    assert hfp.unpack(datasets.load_from_disk(f"out/{name}"))["input_ids"][:] == [[1, 1]] * 3
    tokens = {"tokenizer": load_tokenizer(tokenizer), "end_documents": False}
    packed = hfp.fleet.pack(f"in/{name}", hfp.BestFit(8), f"out/fleet{name}", **tokens)
    rows = datasets.load_dataset("parquet", data_files=packed.data_files, split="train")
    assert rows["input_ids"][:] == [[1] * 6], "the documented way to read them"
    again = hfp.fleet.pack(f"in/{name}", hfp.BestFit(8), f"out/fleet{name}", **tokens)
    assert again.data_files == packed.data_files, "found again"


def test_a_changed_file_is_read_again_where_datasets_cannot_read_its_name(tmp_path, tokenizer):
    file, texts = tmp_path / "a::b" / "d.csv", TextTokenizer(load_tokenizer(tokenizer))
    for text, tokens in (("odd", [1]), ("plain odd", [2, 1])):
        write(file, text)
        assert Documents(str(file)).tokens(texts, tmp_path / "tokens.arrow")["input_ids"][:] == [tokens] * 3


def test_patterns_find_files_where_no_file_has_their_name(tmp_path):
    for number in range(2):
        write(tmp_path / f"run{number}.parquet", "odd odd")
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    for number in range(3):
        rows.to_parquet(tmp_path / "tokens" / f"t{number}.parquet")
    packed = hfp.fleet.pack(f"{tmp_path}/tokens/t[01].parquet", hfp.BestFit(8), tmp_path / "out")
    assert packed.counts["num_documents"] == 2
    with pytest.raises(hfp.PackingError, match="files: expected files to pack, got none"):
        hfp.fleet.pack(f"{tmp_path}/tokens/t[78].parquet", hfp.BestFit(8), tmp_path / "out2")


def test_the_fleet_reads_the_files_that_the_command_reads(tmp_path):
    """Hidden ones, and marks of Spark, are no documents; a name with _ may be one, and so may what is below a hidden
    folder that was named."""
    above = tmp_path / ".home" / "in"
    for number, name in enumerate(["a.jsonl", "b/c.jsonl", "_d.jsonl", ".e/a.jsonl", "b/.f.jsonl"], start=1):
        (above / name).parent.mkdir(parents=True, exist_ok=True)
        (above / name).write_text(json.dumps({"input_ids": [number] * 3}))
    (above / "_SUCCESS").touch()
    rows = datasets.Dataset.from_dict({"input_ids": [[number] * 3 for number in (1, 2, 3)]})
    for data in (str(above), f"{above}/**/*.jsonl"):
        packed = hfp.fleet.pack(data, hfp.BestFit(3), tmp_path / f"out{len(data)}")
        made = datasets.load_dataset("parquet", data_files=packed.data_files, split="train")
        assert sorted(made["input_ids"][:]) == rows["input_ids"][:]
    (tmp_path / "tokens.arrow").touch()
    assert sorted(Documents(str(above)).tokens(None, tmp_path / "tokens.arrow")["input_ids"][:]) == rows["input_ids"][:]
    assert [*find_inputs(above / "_d.jsonl", {})] == [str(above / "_d.jsonl")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=9)
)
@example("[")
@example("a::b")
@example("$A")
def test_any_name_of_json_lines(tmp_path, tokenizer, name):
    assume(not name.startswith("."))  # what is hidden
    path = tmp_path / "any" / f"{name}.jsonl"
    write(path, "odd odd")
    texts = TextTokenizer(load_tokenizer(tokenizer))
    assert Documents(str(path)).tokens(texts, tmp_path / "tokens.arrow")["input_ids"][:] == [[1, 1]] * 3
    path.unlink()


@pytest.mark.parametrize("data", ["-", "/dev/stdin"])
def test_standard_input(tmp_path, tokenizer, data, monkeypatch):
    lines = b'{"text": "odd"}\n\n{"text": "plain odd"}\n'
    if data == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    else:
        reads, writes = os.pipe()
        os.write(writes, lines)
        os.close(writes)
        data = f"/dev/fd/{reads}"
    assert main(["pack", data, "--tokenizer", tokenizer, "--max-length", "8", "--output", str(tmp_path / "out")]) == 0
    assert sorted(hfp.unpack(datasets.load_from_disk(tmp_path / "out"))["input_ids"][:]) == [[1], [2, 1]]


def test_standard_input_of_tokens(tmp_path, monkeypatch):
    lines = b'{"input_ids": [5, 6, 7]}\n{"input_ids": [8, 9]}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(["pack", "-", "--max-length", "8", "--output", str(tmp_path / "out")]) == 0
    assert sorted(hfp.unpack(datasets.load_from_disk(tmp_path / "out"))["input_ids"][:]) == [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize("installed", [True, False])
def test_zstandard_is_read_with_or_without_its_package(tmp_path, tokenizer, installed, monkeypatch):
    if not installed:
        monkeypatch.setitem(sys.modules, "zstandard", None)
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as stream:
        stream.write(b'{"text": "odd"}\n{"text": "plain"}\n')
    texts = TextTokenizer(load_tokenizer(tokenizer))
    found = Documents(str(tmp_path / "a.jsonl.zst"), skip_bad=True)
    assert found.tokens(texts, tmp_path / "tokens.arrow")["input_ids"][:] == [[1], [2]]
    assert found.skipped == []
    (tmp_path / "b.jsonl.zst").write_bytes(b"no zstandard")
    with pytest.raises(hfp.PackingError, match=r"b\.jsonl\.zst: expected a file that can be read to its end"):
        Documents(str(tmp_path / "b.jsonl.zst"), skip_bad=True).tokens(texts, tmp_path / "tokens.arrow")
