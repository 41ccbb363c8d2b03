"""A fleet's rows are those of pack(), whatever the strategy, the columns, the engine and the order of the tasks."""

import gzip
import json
import random
import subprocess
import sys
import warnings

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet.fleet_rows import Here, check_rows, documents_of, packed_by_pack, rows_of, write_files
from tiers import fast_only

import hf_packing as hfp
from hf_packing.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:pack (leaves out columns|skips|drops)")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


STRATEGIES = [
    hfp.BestFit(128),
    hfp.BestFit(128, seed=None),
    hfp.BestFit(64, overflow="truncate", max_documents=4, seed=3),
    hfp.BestFit(64, overflow="drop"),
    hfp.Bucket((32, 64, 256)),
    hfp.Optimal(64),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_rows_are_those_of_pack(files, strategy, tmp_path):
    packed = hfp.fleet.pack(files, strategy, tmp_path / "packed", shards=4, executor=Here())
    expected = packed_by_pack(files, strategy)
    check_rows(packed, expected)
    assert len(packed.files) == 4
    assert packed.metrics() == hfp.plan_packing([len(row) for row in _ids(files)], strategy).metrics()


def _ids(files):
    return documents_of(files)["input_ids"][:]


@pytest.mark.parametrize(("workers", "shards"), fast_only([(1, 1), (2, 3), (4, 20)], (2, 3)))
def test_any_number_of_workers_and_files(files, workers, shards, tmp_path):
    packed = hfp.fleet.pack(files, hfp.BestFit(128), tmp_path, shards=shards, executor=hfp.fleet.local(workers))
    check_rows(packed, packed_by_pack(files, hfp.BestFit(128)))
    assert len(packed.files) == shards


def test_without_position_ids_and_labels(tmp_path):
    files = write_files(tmp_path / "files", others=False)
    packed = hfp.fleet.pack(files, hfp.BestFit(128), tmp_path / "packed", position_ids=False, executor=Here())
    documents = documents_of(files)
    check_rows(packed, hfp.pack(documents, hfp.BestFit(128), position_ids=False, load_from_cache_file=False))
    assert rows_of(packed).column_names == ["input_ids", "labels", "seq_lengths"]


def test_masks_other_types_and_large_lists(tmp_path):
    lengths = np.array([5, 3, 0, 7, 2])
    ids = np.arange(17)
    columns = {
        "input_ids": (ids, pa.int64()),
        "attention_mask": (np.ones(17), pa.int8()),
        "completion_mask": (ids % 2, pa.int64()),
        "assistant_masks": (ids % 3 > 0, pa.bool_()),
        "flags": (ids % 5 == 0, pa.bool_()),
        "scores": (ids / 7, pa.float64()),
        "types": (ids % 2, pa.int8()),
    }
    files = []
    for number in range(3):
        order = np.roll(lengths, number)
        offsets = pa.array(np.concatenate([[0], np.cumsum(order)]))
        arrays = {
            name: pa.LargeListArray.from_arrays(offsets, pa.array(values).cast(kind))
            for name, (values, kind) in columns.items()
        }
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(pa.table(arrays), files[-1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        packed = hfp.fleet.pack(files, hfp.BestFit(10), tmp_path / "packed", shards=2, executor=Here())
    with warnings.catch_warnings(record=True) as said_by_pack:
        warnings.simplefilter("always")
        expected = hfp.pack(documents_of(files), hfp.BestFit(10), load_from_cache_file=False)
    check_rows(packed, expected)
    assert {"flags", "scores", "types"} <= set(rows_of(packed).column_names)
    assert [str(each.message) for each in said] == [str(each.message) for each in said_by_pack]
    assert len(said) == 2
    assert "pack applies completion_mask and assistant_masks to labels" in str(said[0].message)
    assert "loss masks applied to labels: completion_mask, assistant_masks" in str(packed)


def test_a_file_without_values_in_a_column(tmp_path):
    files = write_files(tmp_path / "files", (20, 5))
    pq.write_table(
        pa.table({"input_ids": [[], []], "labels": [[], []], "weights": [[], []], "note": ["", ""]}),
        tmp_path / "files" / "empty.parquet",
    )
    files.append(str(tmp_path / "files" / "empty.parquet"))
    packed = hfp.fleet.pack(files, hfp.BestFit(128), tmp_path / "packed", executor=Here())
    assert packed.metrics().num_empty_documents >= 2
    assert packed.metrics().num_documents == 27


def test_arrow_files_of_a_saved_dataset(files, tmp_path):
    documents = documents_of(files)
    documents.save_to_disk(tmp_path / "saved", num_shards=3)
    packed = hfp.fleet.pack(tmp_path / "saved", hfp.BestFit(128), tmp_path / "packed", executor=Here())
    check_rows(packed, hfp.pack(documents, hfp.BestFit(128), load_from_cache_file=False))
    assert len(packed.inputs) == 3


def test_each_file_by_itself(files, tmp_path):
    with pytest.warns(UserWarning, match="exchange: with False, files make .* more than with one plan"):
        packed = hfp.fleet.pack(files, hfp.BestFit(128), tmp_path / "packed", exchange=False, executor=Here())
    together = hfp.fleet.pack(files, hfp.BestFit(128), tmp_path / "together", executor=Here())
    for number, file in enumerate(files):
        alone = packed_by_pack([file], hfp.BestFit(128)) if number != 1 else None
        found = pq.read_table(tmp_path / "packed" / packed.files[number].name)
        assert found.num_rows == (0 if alone is None else len(alone))
        assert alone is None or found.replace_schema_metadata().combine_chunks().equals(rows_of(alone))
    assert packed.packs_together == together.num_rows < packed.num_rows
    more = packed.num_rows / together.num_rows - 1
    assert f"each file packed by itself: {more:.2%} more packs than the {together.num_rows} of one plan" in str(packed)
    assert packed.metrics().num_tokens == together.metrics().num_tokens


def test_open(files, tmp_path):
    with pytest.raises(hfp.PackingError, match="expected a folder with a manifest.json, which is written when"):
        hfp.fleet.open(tmp_path)
    packed = hfp.fleet.pack(files, hfp.BestFit(128), tmp_path / "packed", shards=2, executor=Here())
    expected = packed_by_pack(files, hfp.BestFit(128))
    opened = hfp.fleet.open(str(tmp_path / "packed"))
    assert opened.features == expected.features
    check_rows(packed, opened)
    streamed = list(hfp.fleet.open(str(tmp_path / "packed"), streaming=True))
    assert streamed == expected.to_list()


def test_a_complete_run_is_not_done_again(files, tmp_path):
    packed = hfp.fleet.pack(files, hfp.BestFit(128), tmp_path / "packed", executor=Here())
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").iterdir()}
    assert hfp.fleet.pack(files, hfp.BestFit(128), tmp_path / "packed", executor=NoExecutor()) == packed
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "packed").iterdir()} == times
    assert sorted(path.name for path in (tmp_path / "packed" / ".fleet").iterdir()) == ["run.json"]


class NoExecutor:
    def run(self, tasks):
        for task in tasks:
            raise AssertionError(f"expected no task, got {task}")
        return iter(())


def test_array_jobs_in_random_order(files, tmp_path, capsys):
    output = str(tmp_path / "packed")
    begin = ["fleet", "begin", *files, "--output", output, "--max-length", "128", "--shards", "3"]
    assert main(begin) == 0
    assert "begun: 5 tasks to count" in capsys.readouterr().out
    assert main(["fleet", "plan", output]) == 2
    assert "expected all 5 files to be counted, got 0" in capsys.readouterr().err
    order = random.Random(0)
    for stage, tasks in (("count", 5), ("plan", 0), ("deal", 5), ("gather", 3)):
        numbers = order.sample(range(tasks), tasks)
        for task in numbers:
            assert main(["fleet", stage, output, "--task", str(task)]) == 0
        if stage == "plan":
            assert main(["fleet", "plan", output, "--json"]) == 0
            found = capsys.readouterr().out
            assert json.loads(found[found.index("{") :])["gather"] == 3
    assert main(["fleet", "status", output]) == 0
    assert "deal: 5 of 5 tasks done\ngather: 3 of 3 tasks done" in capsys.readouterr().out
    assert main(["fleet", "gather", output, "--task", "3"]) == 2
    assert "--task: expected a number from 0 to 2, got 3" in capsys.readouterr().err
    assert main(["fleet", "finish", output]) == 0
    packed = hfp.fleet.pack(files, hfp.BestFit(128), output, shards=3, executor=NoExecutor())
    check_rows(packed, packed_by_pack(files, hfp.BestFit(128)))


def test_chats_are_those_of_the_command(tmp_path, tokenizer, capsys):
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rng = random.Random(0)
    chats = [
        {
            "messages": [
                {"role": role, "content": " ".join(rng.choices(words, k=rng.randint(1, 30)))}
                for role in ("user", "assistant") * rng.randint(1, 3)
            ]
        }
        for _ in range(120)
    ]
    (tmp_path / "parts").mkdir()
    for part in range(8):
        with gzip.open(tmp_path / "parts" / f"{part}.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(chat) + "\n" for chat in chats[part * 15 : part * 15 + 15]))
    usual = ["--tokenizer", tokenizer, "--max-length", "64"]
    given = ["pack", str(tmp_path / "parts"), *usual]
    assert main([*given, "--output", str(tmp_path / "one")]) == 0
    assert main([*given, "--output", str(tmp_path / "fleet"), "--engine", "local", "--workers", "2"]) == 0
    expected = datasets.load_from_disk(tmp_path / "one")
    packed = hfp.fleet.open(str(tmp_path / "fleet"))
    assert rows_of(packed).equals(rows_of(expected))
    assert len(packed) > 8
    capsys.readouterr()
    assert main(["report", str(tmp_path / "fleet"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == 120


def test_the_driver_imports_little():
    loaded = "[name for name in ('torch', 'datasets', 'transformers', 'ray') if name in sys.modules]"
    code = f"import sys, hf_packing as hfp; hfp.fleet.pack; hfp.fleet.local(); print({loaded})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
