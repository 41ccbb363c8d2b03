"""A fleet packs documents that share prefixes: the trees of each file, with one plan or with the plan of `pack`."""

import json
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleet.fleet_rows import Here, documents_of, rows_of, write_files
from fleet.related_documents import GROUPS, literal_rows, trees_by_pack, write_related
from hypothesis import given, settings
from hypothesis import strategies as st
from rows.test_tree_rows import expand, tables
from tiers import fast_only

import hf_packing as hfp
from hf_packing.cli import main
from hf_packing.columns import TREE_COLUMNS

pytestmark = pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")

STRATEGIES = [
    hfp.BestFit(256),
    hfp.BestFit(100, seed=None),
    hfp.BestFit(64, overflow="truncate", seed=3),
    hfp.BestFit(64, overflow="drop"),
    hfp.ShortestPackFirst(128),
    hfp.NonNegativeLeastSquares(96),
    hfp.Optimal(96),
    hfp.Bucket((64, 128, 256), padding_threshold=1),
]
SMALL = [hfp.BestFit(9), hfp.BestFit(7, seed=None, overflow="truncate"), hfp.Bucket((4, 9), padding_threshold=1)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_related(tmp_path_factory.mktemp("related"))


def pack(files, output, strategy=None, **options):
    options = {"share_prefixes": True, "executor": Here(), **options}
    return hfp.fleet.pack(files, strategy or hfp.BestFit(256), output, **options)


def documents_in(rows):
    """Count the documents of rows, each with all its values."""
    return Counter(json.dumps(document) for row in rows.to_pylist() for document in expand(row))


@pytest.mark.parametrize("strategy", fast_only(STRATEGIES, *(STRATEGIES[number] for number in (0, 3, 6, 7))), ids=repr)
def test_rows_of_one_plan(files, strategy, tmp_path):
    packed = pack(files, tmp_path / "packed", strategy, shards=3)
    rows = rows_of(packed)
    assert rows.equals(literal_rows(files, strategy))
    assert packed.num_rows == rows.num_rows
    assert len(packed.files) == 3
    assert sum(file.tokens for file in packed.files) == sum(map(len, rows.column("tree_input_ids")))
    assert sum(file.trained_tokens for file in packed.files) == sum(
        sum(row[2::3]) for row in rows.column("trained").to_pylist()
    )
    check_metrics(packed, rows, [len(document) for document in documents_of(files)["input_ids"][:]])
    if not packed.metrics().num_cut_documents:  # no document is lost or twice, but those that are too long
        alone = [documents_in(rows_of(trees_by_pack(file, strategy))) for file in files if pq.read_table(file).num_rows]
        assert documents_in(rows) == sum(alone, Counter())


def check_metrics(packed, rows, lengths):
    metrics = packed.metrics()
    packed_lengths = [len(document["labels"]) for row in rows.to_pylist() for document in expand(row)]
    unique = sum(map(len, rows.column("tree_input_ids").to_pylist()))
    assert metrics.shared_ratio == sum(packed_lengths) / unique > 1
    assert metrics.num_documents == len(lengths)
    assert metrics.num_empty_documents == lengths.count(0) > 0
    assert metrics.num_tokens == sum(lengths)
    assert metrics.num_dropped_tokens == sum(lengths) - sum(packed_lengths)
    assert metrics.num_segments == len(packed_lengths)
    assert metrics.num_packs == len(rows) >= metrics.lower_bound
    slots = sum(rows.column("bucket").to_pylist()) if "bucket" in rows.column_names else None
    assert slots is None or metrics.num_padding_slots == slots - unique
    assert 0 < metrics.attention_cost < 1


@pytest.mark.parametrize("strategy", fast_only(STRATEGIES, *(STRATEGIES[number] for number in (1, 2, 7))), ids=repr)
def test_rows_of_each_file_by_itself(files, strategy, tmp_path):
    packed = pack(files, tmp_path / "packed", strategy, exchange=False)
    tables, plans = [], []
    for number, file in enumerate(files):
        found = pq.read_table(tmp_path / "packed" / packed.files[number].name)
        alone = trees_by_pack(file, strategy)
        assert found.num_rows == len(alone)
        assert found.replace_schema_metadata().combine_chunks().equals(rows_of(alone))
        tables += [rows_of(alone)] if len(alone) else []
        plans.append(alone)
    assert len(tables) == 4
    assert rows_of(packed).equals(pa.concat_tables(tables).combine_chunks())
    check_metrics(packed, rows_of(packed), [len(document) for document in documents_of(files)["input_ids"][:]])
    together = pack(files, tmp_path / "together", strategy)
    assert packed.num_rows >= together.num_rows


def test_how_much_more_each_file_takes_by_itself(files, tmp_path):
    with pytest.warns(UserWarning, match="exchange: with False, files make .* more than with one plan"):
        packed = pack(files, tmp_path / "packed", exchange=False)
    assert packed.packs_together < packed.num_rows
    more = packed.num_rows / packed.packs_together - 1
    assert f"each file packed by itself: {more:.2%} more packs than the {packed.packs_together} of one" in str(packed)


def test_the_rows_of_pack_if_files_share_nothing(tmp_path):
    """Small trees, which fill packs without cuts: then one plan is the plan of `pack`."""
    files = write_related(tmp_path / "files", (30, 20, 50), samples=3)
    packed = pack(files, tmp_path / "packed", hfp.BestFit(2048), shards=2)
    expected = hfp.pack(documents_of(files), hfp.BestFit(2048), share_prefixes=True, load_from_cache_file=False)
    assert rows_of(packed).equals(rows_of(expected))
    assert packed.shared_between == 0
    assert packed.num_rows > 2
    assert max(row.count(-1) for row in expected["parents"][:]) > 5


@given(
    st.lists(tables(), min_size=1, max_size=3),
    st.sampled_from(
        [hfp.BestFit(9), hfp.BestFit(7, seed=None, overflow="truncate"), hfp.Bucket((4, 9), padding_threshold=1)]
    ),
    st.integers(1, 4),
    st.integers(1, 3),
)
@settings(max_examples=15)
def test_any_documents(tmp_path_factory, datasets, strategy, least, shards):
    folder = tmp_path_factory.mktemp("any")
    files = []
    for number, dataset in enumerate(datasets):
        dataset = dataset.select_columns(["input_ids"]) if len(datasets) > 1 else dataset  # files have the same columns
        files.append(str(folder / f"{number}.parquet"))
        pq.write_table(dataset.data.table.replace_schema_metadata(), files[-1])
    if not any(map(len, documents_of(files)["input_ids"][:])):
        with pytest.raises(hfp.PackingError, match="files: expected documents with tokens, but all"):
            pack(files, folder / "packed", strategy, share_prefixes=least)
        return
    packed = pack(files, folder / "together", strategy, share_prefixes=least, shards=shards)
    assert rows_of(packed).equals(literal_rows(files, strategy, least))
    alone = pack(files, folder / "alone", strategy, share_prefixes=least, exchange=False)
    expected = [rows_of(trees_by_pack(file, strategy, least)) for file in files]
    assert rows_of(alone).equals(pa.concat_tables([each for each in expected if len(each)]).combine_chunks())


def test_masks_other_types_and_large_lists(tmp_path):
    ids = [[7, 7, 7, 1, 2], [7, 7, 7, 3], [], [7, 7, 7, 1, 4, 5]]
    kinds = {"input_ids": pa.int64(), "completion_mask": pa.int64(), "flags": pa.bool_(), "types": pa.int8()}
    files = []
    for number in range(3):
        rows = ids[number:] + ids[:number]
        lists = {"input_ids": rows, "completion_mask": [[0, 0, 1, 1, 1, 1][: len(each)] for each in rows]}
        lists["flags"] = [[token > 2 for token in each] for each in rows]
        lists["types"] = [[0] * len(each) for each in rows]
        arrays = {name: pa.array(lists[name], pa.large_list(kind)) for name, kind in kinds.items()}
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(pa.table(arrays | {"attention_mask": [[1] * len(each) for each in rows]}), files[-1])
    with pytest.warns(UserWarning, match="pack applies completion_mask to labels: 27 of 45 tokens are trained on"):
        packed = pack(files, tmp_path / "packed", hfp.BestFit(20), share_prefixes=2, shards=2)
    assert rows_of(packed).equals(literal_rows(files, hfp.BestFit(20), 2))
    assert rows_of(packed).schema.field("types").type == pa.large_list(pa.int8())
    assert packed.metrics().shared_ratio == 45 / 27


def test_values_that_split_prefixes_are_counted(tmp_path):
    files = []
    for number in range(2):
        rows = {"input_ids": [[*range(20), 5], [*range(20), 6]], "weights": [[1.0] * 21, [2.0] * 21]}
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(pa.table(rows), files[-1])
    with pytest.warns(UserWarning, match="shares fewer tokens at 2 places, where tokens agree but weights differ"):
        packed = pack(files, tmp_path / "packed")
    assert packed.splits == {"weights": 2}
    assert packed.metrics().shared_ratio == 1


def test_open_report_and_summary(files, tmp_path, capsys):
    packed = pack(files, tmp_path / "packed", shards=2)
    opened = hfp.fleet.open(str(tmp_path / "packed"))
    assert opened.column_names[:2] == ["tree_input_ids", "tree_labels"]
    assert set(TREE_COLUMNS) < set(opened.column_names)
    assert opened.features == trees_by_pack(files[0], hfp.BestFit(256)).features
    assert rows_of(opened).equals(rows_of(packed))
    streamed = list(hfp.fleet.open(str(tmp_path / "packed"), streaming=True))
    assert streamed == opened.to_list()
    batch = hfp.PackingCollator()([streamed[0]])
    assert batch["input_ids"].tolist() == [streamed[0]["tree_input_ids"]]
    ratio = packed.metrics().shared_ratio
    assert f"prefixes shared: {ratio:.2f} times fewer tokens in packs" in str(packed)
    assert main(["report", str(tmp_path / "packed")]) == 0
    assert f"prefixes shared: {ratio:.2f} times fewer tokens in packs" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "packed"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shared_ratio"], found["share_prefixes"], found["shared_between"]) == (ratio, 16, 0)


def test_the_command(files, tmp_path, tokenizer, capsys):
    output = str(tmp_path / "packed")
    given = ["fleet", "begin", *files, "--output", output, "--max-length", "256", "--share-prefixes", "20"]
    assert main([*given, "--shards", "2"]) == 0
    for stage, tasks in (("count", 5), ("plan", 0), ("deal", 5), ("gather", 2)):
        for task in reversed(range(tasks)):
            assert main(["fleet", stage, output, "--task", str(task)]) == 0
        if stage == "plan":
            assert main(["fleet", "plan", output]) == 0
    assert main(["fleet", "finish", output]) == 0
    packed = pack(files, output, share_prefixes=20, shards=2, executor=None)
    assert rows_of(packed).equals(literal_rows(files, hfp.BestFit(256), 20))
    prompt = "one two three four five six seven " * 3
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": word}]} for word in "ab"
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    usual = [str(tmp_path / "chats.jsonl"), "--tokenizer", tokenizer, "--max-length", "64", "--share-prefixes"]
    assert main(["pack", *usual, "--output", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    assert main(["pack", *usual, "--output", str(tmp_path / "fleet"), "--engine", "local", "--workers", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"prefixes shared: [2-9]\.\d\d times fewer tokens in packs", said)
    import datasets

    expected = datasets.load_from_disk(tmp_path / "one")
    assert rows_of(hfp.fleet.open(str(tmp_path / "fleet"))).equals(rows_of(expected))


def test_refused(files, tmp_path):
    out = tmp_path / "out"
    for strategy, share, message in (
        (hfp.BestFit(256, max_documents=3), True, "max_documents: expected None with share_prefixes"),
        (hfp.Bucket((64, 256)), True, "padding_threshold: expected 1 with share_prefixes"),
        (hfp.Multipack(256), True, "strategy: expected a strategy that needs only counts of lengths"),
        (hfp.FixedLength(256), True, "strategy: expected a strategy that needs only counts of lengths"),
        (hfp.BestFit(256), 0, "share_prefixes: expected False, True, or the fewest tokens to share as an integer of"),
        (hfp.BestFit(256), "yes", "share_prefixes: expected False, True, .* got 'yes'"),
        (
            hfp.BestFit(30, overflow="error"),
            True,
            "0.parquet: lengths: document 0 has 92 tokens, more than",
        ),
    ):
        with pytest.raises(hfp.PackingError, match=message):
            pack(files, out, strategy, share_prefixes=share)
    taken = tmp_path / "taken.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2]], "parents": ["x"]}), taken)
    with pytest.raises(hfp.PackingError, match="taken.parquet: column 'parents': expected no such column"):
        pack([taken], tmp_path / "taken")
    pack([files[3]], tmp_path / "packed")
    rows = next((tmp_path / "packed").glob("*.parquet"))
    for share in (False, True):
        with pytest.raises(hfp.PackingError, match="but the column '.*' says that rows are packed"):
            pack([rows], tmp_path / f"again-{share}", share_prefixes=share)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [(True, 20, "16, not 20"), (False, True, "None, not 16"), (16, False, "16, not None")],
)
def test_another_number_of_shared_tokens_is_another_run(before, after, message, files, tmp_path):
    pack(files[:1], tmp_path / "packed", share_prefixes=before)
    pack(files[:1], tmp_path / "packed", share_prefixes=before)
    with pytest.raises(hfp.PackingError, match=f"another run has begun, with share_prefixes {message}; choose another"):
        pack(files[:1], tmp_path / "packed", share_prefixes=after)


def test_documents_without_relatives_have_the_places_of_packed_rows(tmp_path):
    """Of documents that share nothing, trees are documents: the plans of both runs are the same."""
    files = write_files(tmp_path / "files", others=False)
    trees = pack(files, tmp_path / "trees", hfp.BestFit(512), shards=2)
    plain = pack(files, tmp_path / "plain", hfp.BestFit(512), shards=2, share_prefixes=False)
    assert trees.metrics().shared_ratio == 1
    assert rows_of(trees).column("tree_input_ids").to_pylist() == rows_of(plain).column("input_ids").to_pylist()
    assert rows_of(trees).column("segment_lengths").to_pylist() == rows_of(plain).column("seq_lengths").to_pylist()
    assert plain.share_prefixes is None
    assert np.all([file.tokens for file in trees.files])
    assert GROUPS[1] == 0  # as in the other tests, a file has no documents
