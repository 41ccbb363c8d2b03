"""The rows of a fleet: those that `pack` makes of the files of each task, on any engine, and what is counted."""

import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHAT, FROM_TRL, tokenizer_with
from fleet_files import STRATEGY, check_complete, contents, pack_here, rows_of_file, rows_of_pack, write_files
from hypothesis import given
from hypothesis import strategies as st
from tiers import fast_only

import hf_packing as hfp
from hf_packing.cli import main
from hf_packing.fleet.manifest import read_manifest
from hf_packing.fleet.pack_files import group_files

pytestmark = pytest.mark.filterwarnings("ignore:pack :UserWarning")


def check_law(packed, strategy=STRATEGY, **settings):
    tables = []
    for file, place in zip(packed.files, packed.data_files, strict=True):
        tables.append(rows_of_file(place))
        assert tables[-1].equals(rows_of_pack(file.inputs, strategy, **settings))
        assert tables[-1].num_rows == file.rows
    return pa.concat_tables(tables)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (STRATEGY, {}),
        (hfp.BestFit(128, overflow="drop"), {"position_ids": False}),
        (hfp.Bucket((64, 128, 512)), {}),
        (hfp.FirstCome(300, order="dataset"), {}),
        (hfp.Multipack(256, overflow="truncate"), {}),
        (hfp.FixedLength(128), {}),
        (STRATEGY, {"share_prefixes": 2}),
    ],
    ids=str,
)
def test_rows_of_a_task_are_those_of_pack(files, tmp_path, strategy, settings):
    packed = pack_here(files, tmp_path / "out", strategy, **settings)
    rows = check_law(packed, strategy, **settings)
    check_complete(tmp_path / "out")
    lists = "ends" if "share_prefixes" in settings else "seq_lengths"
    assert max(map(len, rows.column(lists).to_pylist())) > 1
    assert sorted(name for file in packed.files for name in file.inputs) == sorted(files)


ENGINES = {
    "processes": lambda: {"workers": 2},
    "threads": lambda: {"executor": ThreadPoolExecutor(2)},
    "a pool of the user": lambda: {"executor": ProcessPoolExecutor(1, get_context("spawn"))},
    "ray": lambda: {"executor": "ray"},
}


@pytest.mark.parametrize("engine", fast_only(ENGINES, "threads"))
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_any_engine_writes_the_same_files(files, tmp_path, engine, request):
    if engine == "ray":
        ray = pytest.importorskip("ray")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        request.addfinalizer(ray.shutdown)
    pack_here(files, tmp_path / "here")
    packed = hfp.fleet.pack(files, STRATEGY, tmp_path / "out", tasks=3, **ENGINES[engine]())
    assert contents(tmp_path / "out") == contents(tmp_path / "here")
    assert str(packed) == str(read_manifest(str(tmp_path / "here")))


def test_order_and_kind_of_the_files_do_not_matter(files, tmp_path):
    pack_here(files, tmp_path / "list")
    pack_here(files[::-1], tmp_path / "reversed")
    pack_here(str(Path(files[0]).parent), tmp_path / "folder")
    pack_here(f"{Path(files[0]).parent}/[0-9].parquet", tmp_path / "pattern")
    expected = contents(tmp_path / "list")
    for other in ("reversed", "folder", "pattern"):
        assert contents(tmp_path / other) == expected
    datasets.Dataset(pq.read_table(files[2])).save_to_disk(tmp_path / "saved")
    pack_here(f"{tmp_path}/saved/*.arrow", tmp_path / "out", tasks=1)
    assert rows_of_file(tmp_path / "out" / "packed-00001-of-00001.parquet").equals(rows_of_pack(files[2:3]))


@given(sizes=st.lists(st.integers(0, 1 << 28), min_size=1, max_size=40), tasks=st.none() | st.integers(1, 50))
def test_tasks_are_of_about_equal_size(sizes, tasks):
    inputs = {f"{number:02d}": [size, "now"] for number, size in enumerate(sizes)}
    groups = group_files(inputs, tasks)
    assert sorted(name for group in groups for name in group) == list(inputs)
    assert all(groups)
    assert len(groups) == min(len(sizes), tasks or max(1, sum(sizes) >> 26))
    totals = [sum(size for size, _ in group.values()) for group in groups]
    assert max(totals) - min(totals) <= max(sizes) + len(sizes)
    changed = group_files({name: [size, "later"] for name, (size, _) in reversed(inputs.items())}, tasks)
    assert list(map(list, changed)) == list(map(list, groups))


def test_what_is_lost_or_masked_is_counted(tmp_path):
    strategy = hfp.BestFit(64, overflow="truncate")
    files = write_files(tmp_path / "files")
    with pytest.warns(UserWarning, match="^pack ") as warned:
        packed = pack_here(files, tmp_path / "out", strategy)
    plan = hfp.plan_packing(
        [
            length
            for file in files
            for length in pq.read_table(file)["input_ids"].combine_chunks().value_lengths().to_pylist()
        ],
        strategy,
    ).metrics()
    counts = packed.counts
    names = [name for name in vars(plan) if name.startswith("num_") and name not in ("num_packs", "num_padding_slots")]
    assert {name: counts[name] for name in names} == {name: getattr(plan, name) for name in names}
    assert min(plan.num_documents, plan.num_dropped_tokens, plan.num_cut_documents, plan.num_empty_documents) > 0
    rows = datasets.load_dataset("parquet", data_files=f"{tmp_path}/out/*.parquet", split="train")
    assert len(rows) == packed.num_rows == counts["num_packs"]
    assert sum(map(len, rows["input_ids"])) == counts["num_tokens"] - counts["num_dropped_tokens"]
    assert sum(label != -100 for row in rows["labels"] for label in row) == counts["trained_tokens"]
    assert counts["slots"] == 64 * len(rows)
    assert counts["num_padding_slots"] == counts["slots"] - sum(map(len, rows["input_ids"]))
    said = [str(each.message) for each in warned]
    assert said == [f"pack {change}" for change in packed.changes()]
    for text in (
        f"drops {counts['num_dropped_tokens']:,} of",
        f"skips {counts['num_empty_documents']:,} documents",
        "'note'",
    ):
        assert any(text in each for each in said)
        assert text in str(packed)
    rows = {"input_ids": [[1, 2, 3], [4, 5]], "completion_mask": [[0, 0, 1], [0, 1]]}
    files = []
    for number in range(2):
        files.append(str(tmp_path / f"{number}.parquet"))
        datasets.Dataset.from_dict(rows).to_parquet(files[-1])
    packed = pack_here(files, tmp_path / "masked")
    check_law(packed)
    assert "applies completion_mask to labels: 4 of 10 tokens are trained on" in packed.changes()


@pytest.fixture
def chats(tmp_path):
    tokenizer_with(FROM_TRL["qwen3"]).save_pretrained(tmp_path / "tokenizer")
    for number in range(3):
        chats = [{"messages": CHAT}] * (number + 1)
        (tmp_path / f"{number}.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    return [str(tmp_path / f"{number}.jsonl") for number in range(3)]


def test_chats_are_tokenized_as_by_tokenize_and_bad_ones_counted(chats, tmp_path):
    tokenizer = tokenizer_with(FROM_TRL["qwen3"])
    named = pack_here(chats, tmp_path / "named", tokenizer=str(tmp_path / "tokenizer"))
    given = pack_here(chats, tmp_path / "given", tokenizer=tokenizer)
    assert contents(tmp_path / "named") == contents(tmp_path / "given")
    for file, place in zip(named.files, given.data_files, strict=True):
        rows = [json.loads(line) for name in file.inputs for line in Path(name).read_text().splitlines()]
        documents = hfp.tokenize(datasets.Dataset.from_list(rows), tokenizer)
        expected = hfp.pack(documents, STRATEGY, load_from_cache_file=False).data.table
        assert rows_of_file(place).equals(expected.replace_schema_metadata().combine_chunks())
    with open(chats[1], "a") as file:
        file.write('{"messages": \n')
    settings = {"tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(hfp.PackingError, match=f"{chats[1]}, line 3: expected JSON"):
        pack_here(chats, tmp_path / "strict", **settings)
    packed = pack_here(chats, tmp_path / "out", skip_bad=True, **settings)
    assert packed.counts["skipped_rows"] == 1
    assert packed.counts["num_documents"] == 6
    assert f"1 rows that cannot be used; the first one: {chats[1]}, line 3" in str(packed)


def write(folder, name, **columns):
    pq.write_table(pa.table(columns), folder / name)
    return str(folder / name)


REFUSED = {
    "no file": ("files", [], {}),
    "no such file": ("files", ["nothing.parquet"], {}),
    "no file of a pattern": ("files", "nothing-*.parquet", {}),
    "unknown protocol": ("nothing://a", ["nothing://a/b.parquet"], {}),
    "no strategy": ("strategy", None, {"strategy": 3}),
    "executor": ("executor", None, {"executor": 3}),
    "workers": ("workers", None, {"executor": None, "workers": -1}),
    "tasks": ("tasks", None, {"tasks": 0}),
    "task": ("task", None, {"task": 4}),
    "tokenizer": ("tokenizer", None, {"tokenizer": 3}),
    "share_prefixes": ("share_prefixes", None, {"share_prefixes": -1}),
    "text": ("text.parquet", {"text": ["a"]}, {}),
    "strings": ("bad.parquet: column 'input_ids'", {"input_ids": ["a"]}, {}),
    "a null": ("bad.parquet: column 'input_ids'", {"input_ids": [[1], None]}, {}),
    "packed": ("bad.parquet: column 'seq_lengths'", {"input_ids": [[1]], "seq_lengths": [[1]]}, {}),
    "padded": ("bad.parquet: column 'attention_mask'", {"input_ids": [[1, 2]], "attention_mask": [[1, 0]]}, {}),
    "bucket": ("bad.parquet: column 'bucket'", {"input_ids": [[1]], "bucket": [1]}, {"strategy": hfp.Bucket((8, 16))}),
    "lengths": ("bad.parquet: column 'labels'", {"input_ids": [[1], [2]], "labels": [[1], [2, 3]]}, {}),
    "no labels left": (
        "bad.parquet.*strategy",
        {"input_ids": [[1] * 20], "labels": [[-100] * 19 + [1]]},
        {"strategy": hfp.BestFit(16, overflow="truncate")},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, files, tmp_path):
    named, given_files, settings = REFUSED[case]
    if isinstance(given_files, dict):
        given_files = [write(tmp_path, "text.parquet" if case == "text" else "bad.parquet", **given_files)]
    with pytest.raises(hfp.PackingError, match=named):
        pack_here(files if given_files is None else given_files, tmp_path / "out", **settings)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("tasks", [1, 2])
def test_files_that_disagree_are_refused(tmp_path, tasks):
    plain = write(tmp_path, "a.parquet", input_ids=[[1, 2]])
    more = write(tmp_path, "b.parquet", input_ids=[[1, 2]], weights=[[1.0, 2.0]])
    other = write(tmp_path, "c.parquet", input_ids=[[1, 2]], weights=[[1, 2]])
    for number, (one, two) in enumerate([(plain, more), (more, other)]):
        with pytest.raises(hfp.PackingError, match=f"(?s)files: .*({one}.*{two}|{two}.*{one})"):
            pack_here([one, two], tmp_path / f"out-{number}", tasks=tasks)
    for name, row in (
        ("d.jsonl", {"input_ids": [1, 2]}),
        ("e.jsonl", {"input_ids": [1, 2], "completion_mask": [0, 1]}),
    ):
        (tmp_path / name).write_text(json.dumps(row))
    with pytest.raises(hfp.PackingError, match="(?s)files: .*completion_mask"):
        pack_here(f"{tmp_path}/*.jsonl", tmp_path / "texts", tasks=tasks)


def test_other_settings_and_a_file_twice_are_refused(files, tmp_path):
    pack_here(files, tmp_path / "out")
    before = contents(tmp_path / "out")
    for named, changed in (
        ("strategy", {"strategy": hfp.BestFit(64)}),
        ("position_ids", {"position_ids": False}),
        ("share_prefixes", {"share_prefixes": True}),
        ("tasks", {"tasks": 2}),
        (files[0], {"files": files[1:]}),
    ):
        with pytest.raises(hfp.PackingError, match=f"output: .*{named}.*; choose another folder"):
            pack_here(**{"files": files, "output": tmp_path / "out", **changed})
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", "a.parquet", input_ids=[[1]])
    with pytest.raises(hfp.PackingError, match="output: expected a new folder, .*'a.parquet'"):
        pack_here(files, tmp_path / "other")
    assert contents(tmp_path / "out") == before
    with pytest.raises(hfp.PackingError, match=f"files: .* each of them once, got .*'{files[0]}'"):
        pack_here([files[0], *files], tmp_path / "out")


def test_the_command(files, tmp_path, capsys):
    given = ["pack", *files, "--max-length", "128", "--output"]
    assert main([*given, str(tmp_path / "out"), "--workers", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    check_law(read_manifest(str(tmp_path / "out")))
    assert main(["report", str(tmp_path / "out")]) == 0
    assert f"{facts['num_documents']} documents of 6 files" in capsys.readouterr().out
    for number in (3, 1, 7, 2, 6, 5, 4):  # there are more tasks than files
        assert not (tmp_path / "array" / "manifest.json").exists()
        assert main([*given, str(tmp_path / "array"), "--task", f"{number}/7"]) == 0
    check_law(read_manifest(str(tmp_path / "array")))
    check_complete(tmp_path / "array")
    assert read_manifest(str(tmp_path / "array")).counts["num_documents"] == facts["num_documents"]
