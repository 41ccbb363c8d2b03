"""What a fleet refuses, and what it says."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet.fleet_rows import Here, write_files

import hf_packing as hfp
from hf_packing.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:pack (leaves out columns|skips|drops)")


def write(folder, name, **columns):
    pq.write_table(pa.table(columns), folder / name)
    return str(folder / name)


def pack(files, output, strategy=None, **options):
    return hfp.fleet.pack(files, strategy or hfp.BestFit(16), output, executor=Here(), **options)


@pytest.mark.parametrize("engine", [Here(), hfp.fleet.local(2)], ids=["here", "local"])
def test_errors_of_tasks_name_the_file(tmp_path, engine):
    good = write(tmp_path, "good.parquet", input_ids=[[1, 2], [3]])
    bad = write(tmp_path, "bad.parquet", input_ids=[[1, 2], [3]], labels=[[1, 2], [3, 4]])
    good = write(tmp_path, "good.parquet", input_ids=[[1, 2], [3]], labels=[[1, 2], [3]])
    with pytest.raises(hfp.PackingError, match=f"{bad}: column 'labels': expected as many values .* row 1 has 2 for 1"):
        hfp.fleet.pack([good, bad], hfp.BestFit(16), tmp_path / "out", executor=engine)


def test_arguments_are_those_of_python(tmp_path):
    """Flags are those of the command."""
    file = tmp_path / "a.jsonl"
    for rows, options, message in (
        ('{"text": "one"}', {}, "tokenizer: expected a tokenizer for "),
        ('{"text": "one"}', {"tokenizer": "nobody/nothing"}, "tokenizer: expected a name on the hub"),
    ):
        file.write_text(rows)
        with pytest.raises(hfp.PackingError, match=message) as raised:
            pack(str(file), tmp_path / f"out-{len(message)}", **options)
        assert " --" not in f" {raised.value}"


def test_files(tmp_path):
    one = write(tmp_path, "one.parquet", input_ids=[[1, 2], [3]])
    with pytest.raises(hfp.PackingError, match="files: expected files to pack, but there are none in '.*nothing-"):
        pack(str(tmp_path / "nothing-*.parquet"), tmp_path / "out")
    with pytest.raises(hfp.PackingError, match=f"files: expected each file once, got '{one}' twice"):
        pack([one, one], tmp_path / "out")
    with pytest.raises(hfp.PackingError, match="files: expected a file that exists, got '.*two.parquet'"):
        pack([str(tmp_path / "two.parquet")], tmp_path / "out")
    with pytest.raises(hfp.PackingError, match="files: expected a path, a URL, a pattern, or a list .* got 3"):
        pack(3, tmp_path / "out")
    with pytest.raises(
        hfp.PackingError, match="expected a local path or a URL that fsspec can open, got 'nothing://a/b"
    ):
        pack(["nothing://a/b.parquet"], tmp_path / "out")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(hfp.PackingError, match="torn.parquet: expected a file with a table, got the error"):
        pack([str(tmp_path / "torn.parquet")], tmp_path / "torn")


def test_tables(tmp_path):
    for name, columns, message in (
        ("text", {"text": ["a"]}, "text.parquet: expected a column input_ids, or a tokenizer .* got the columns text"),
        ("float", {"input_ids": ["a"]}, "column 'input_ids': expected lists of integers, got string"),
        ("null", {"input_ids": [[1], None]}, "null.parquet: column 'input_ids': expected a list .* row 1 has none"),
        (
            "done",
            {"input_ids": [[1]], "seq_lengths": [[1]]},
            "done.parquet: expected documents, but the column 'seq_",
        ),
        ("padded", {"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, "padded.parquet: column 'attention_mask': exp"),
        ("empty", {"input_ids": pa.array([[], []], pa.list_(pa.int32()))}, "expected documents with tokens, but all 2"),
        (
            "bucket",
            {"input_ids": [[1]], "bucket": [[1]]},
            "bucket.parquet: column 'bucket': expected no such column",
        ),
    ):
        file = write(tmp_path, f"{name}.parquet", **columns)
        with pytest.raises(hfp.PackingError, match=message):
            pack([file], tmp_path / name, hfp.Bucket((8, 16)))


def test_files_that_disagree(tmp_path):
    plain = write(tmp_path, "a.parquet", input_ids=[[1, 2]])
    more = write(tmp_path, "b.parquet", input_ids=[[1, 2]], weights=[[1.0, 2.0]])
    other = write(tmp_path, "c.parquet", input_ids=[[1, 2]], weights=[[1, 2]])
    with pytest.raises(hfp.PackingError, match="same columns .*b.parquet has 'weights' and .*a.parquet has"):
        pack([plain, more], tmp_path / "one")
    with pytest.raises(hfp.PackingError, match="same type of the column 'weights' .*c.parquet has lists of int64"):
        pack([more, other], tmp_path / "two")


def test_settings(tmp_path):
    file = write(tmp_path, "a.parquet", input_ids=[[1, 2]])
    with pytest.raises(hfp.PackingError, match="strategy that needs only counts of lengths .* needs the order"):
        pack([file], tmp_path / "out", hfp.Multipack(16))
    with pytest.raises(hfp.PackingError, match="strategy: expected a strategy such as BestFit"):
        pack([file], tmp_path / "out", 3)
    with pytest.raises(hfp.PackingError, match="shards: expected an integer from 1"):
        pack([file], tmp_path / "out", shards=0)
    with pytest.raises(hfp.PackingError, match="shards: expected None with exchange=False, .* got 3"):
        pack([file], tmp_path / "out", shards=3, exchange=False)
    with pytest.raises(hfp.PackingError, match="workers: expected an integer from 1"):
        hfp.fleet.local(0)
    with pytest.raises(hfp.PackingError, match="tokenizer: expected a name on the hub, .* got int"):
        pack([file], tmp_path / "out", tokenizer=3)


def test_another_run_in_the_folder(tmp_path):
    files = write_files(tmp_path / "files", (5, 5))
    pack(files, tmp_path / "out")
    for strategy, given, options, difference in (
        (hfp.BestFit(32), files, {}, "with strategy .*max_length=16.*"),
        (hfp.BestFit(16), files[:1], {}, "of 2 files, not 1"),
        (hfp.BestFit(16), files, {"shards": 2}, "with shards None, not 2"),
        (hfp.BestFit(16), files[::-1], {}, "with other files, or another version of hf_packing"),
    ):
        with pytest.raises(hfp.PackingError, match=f"another run has begun, {difference}; choose another folder"):
            pack(given, tmp_path / "out", strategy, **options)
    (tmp_path / "out" / ".fleet" / "run.json").write_text("{}")
    with pytest.raises(hfp.PackingError, match="expected a run of hf_packing .* cannot be read"):
        pack(files, tmp_path / "out")


def test_flags(tmp_path, capsys):
    file = write(tmp_path, "a.parquet", input_ids=[[1, 2]])
    out = ["--output", str(tmp_path / "out")]
    for given, message in (
        (["fleet", "pack", file, *out, "--address", "auto"], "--address: expected an address only with --engine ray"),
        (
            ["fleet", "pack", file, *out, "--engine", "ray", "--workers", "2"],
            "--workers: expected no number",
        ),
        (["fleet", "pack", file, *out, "--storage-option", "key"], "--storage-option: expected NAME=VALUE, got 'key'"),
        (["fleet", "status", str(tmp_path)], "output: expected a folder in which a run has begun"),
        (["fleet", "gather", str(tmp_path), "--task", "0"], "output: expected a folder in which a run has begun"),
        (["fleet", "count", str(tmp_path), "--task", "-1"], "expected an integer of at least 0, got '-1'"),
        (["pack", file, *out, "--workers", "2"], "--workers: expected --workers only with --engine"),
        (
            ["pack", file, *out, "--engine", "local", "--overwrite"],
            "--overwrite: expected no --overwrite with",
        ),
    ):
        assert main(given) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert main(["fleet", "begin", file, *out]) == 0
    assert main(["fleet", "gather", out[1], "--task", "0"]) == 2
    assert "expected a run with a plan; run hf-packing fleet plan first" in " ".join(capsys.readouterr().err.split())
