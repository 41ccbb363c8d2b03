"""A fleet writes the rows that `pack` makes of each task's files, on any engine, whatever dies, or refuses by name."""

import errno
import json
import os
import random
import shutil
import signal
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHAT, FROM_TRL, MARKED, tokenizer_with
from fleet_files import (
    HANGS,
    STRATEGY,
    Killed,
    Together,
    check_complete,
    contents,
    pack_here,
    rows_of_file,
    rows_of_pack,
    run_driver,
    start_driver,
    write_files,
)
from hypothesis import given
from hypothesis import strategies as st
from tiers import fast_only, rarely

import hf_packing as hfp
from hf_packing.cli import main
from hf_packing.fleet import manifest, pack_files
from hf_packing.fleet.manifest import read_manifest
from hf_packing.fleet.pack_files import group_files

pytestmark = pytest.mark.filterwarnings("ignore:pack :UserWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("fleet") / "files")


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


def test_workers_without_a_task_are_said(files, tmp_path):
    with pytest.warns(UserWarning, match="workers: 1 of 2 have nothing to do, .* here 1; pass tasks=2 for more"):
        hfp.fleet.pack(files, STRATEGY, tmp_path / "out", workers=2)


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


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
def test_rows_of_other_special_tokens_are_not_taken(name, chats, tmp_path):
    """Chat templates may write any of them, so the tokens of another one are another run."""
    tokenizer = tokenizer_with(f"{{{{ {name} }}}}{MARKED}")
    pack_here(chats, tmp_path / "out", tokenizer=tokenizer)
    setattr(tokenizer, name, "<|im_start|>")
    with pytest.raises(hfp.PackingError, match="output: .*tokenizer"):
        pack_here(chats, tmp_path / "out", tokenizer=tokenizer)


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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def complete(files, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    with pytest.warns(UserWarning, match="pack "):
        pack_here(files, output)
    check_complete(output)
    return output


@pytest.fixture(scope="module")
def undisturbed(complete):
    return contents(complete)


OPERATIONS = {"link": os, "write_table": pack_files.pq.ParquetWriter}
OPERATIONS |= dict.fromkeys(("write_text", "mkdir", "unlink"), Path)
"""What changes files, and where it is."""


def dying_at(monkeypatch, number, error, names=tuple(OPERATIONS)):
    """Let the operation with this number raise an error, and return a list of the names of operations."""
    done = []

    def dying(name, function, *arguments, **options):
        done.append(name)
        if len(done) == number:
            raise error
        return function(*arguments, **options)

    for name in names:
        function = getattr(OPERATIONS[name], name)
        monkeypatch.setattr(OPERATIONS[name], name, lambda *a, _n=name, _f=function, **k: dying(_n, _f, *a, **k))
    return done


def written_as(output):
    stats = {name: (output / name).stat() for name in contents(output)}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def test_a_run_that_dies_at_any_operation_goes_on(files, tmp_path, undisturbed, monkeypatch):
    number, operations = 0, []
    while number <= len(operations):
        number += 1
        output = tmp_path / str(number)
        with monkeypatch.context() as patch:
            operations = dying_at(patch, number, Killed())
            try:
                pack_here(files, output)
            except Killed:
                assert contents(output).items() <= undisturbed.items()
        before = written_as(output)
        pack_here(files, output)
        assert contents(output) == undisturbed
        assert before.items() <= written_as(output).items()  # what was there is neither made again nor replaced
    assert set(operations) == set(OPERATIONS)
    assert number > 30


def test_a_full_disk(files, tmp_path, undisturbed, monkeypatch):
    for number in range(1, 9):
        output = tmp_path / str(number)
        with monkeypatch.context() as patch:
            error = OSError(errno.ENOSPC, "No space left on device")
            operations = dying_at(patch, number, error, ("write_table", "write_text"))
            with pytest.raises(hfp.PackingError, match=f"output: expected to write to '{output}', .*No space left"):
                pack_here(files, output)
            assert len(operations) >= number
        assert contents(output).items() <= undisturbed.items()
        pack_here(files, output)
        assert contents(output) == undisturbed


DAMAGES = {
    "a flipped byte": lambda file: file.write_bytes(file.read_bytes()[:-20] + b"\xff" + file.read_bytes()[-19:]),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "empty": lambda file: file.write_bytes(b""),
}


IN_ORDER = ["run.json", "packed-00002-of-00003.parquet", "tasks/00002.json", "manifest.json"]


@pytest.mark.parametrize(("written", "name"), [(n, name) for n in (4, 3, 2) for name in IN_ORDER[:n]])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_files_are_refused_by_name(files, tmp_path, complete, undisturbed, name, how, written):
    output = shutil.copytree(complete, tmp_path / "out")
    for missing in IN_ORDER[written:]:
        (output / missing).unlink()
    file = output / name
    DAMAGES[how](file)
    damaged = file.read_bytes()
    with pytest.raises(hfp.PackingError, match=f"output: .*{name}"):
        pack_here(files, output)
    assert file.read_bytes() == damaged  # nothing is replaced
    file.unlink()
    if name == "run.json":  # nothing says any more what the rows are
        with pytest.raises(hfp.PackingError, match="output: expected a new folder"):
            pack_here(files, output)
    else:
        pack_here(files, output)
        assert contents(output) == undisturbed


def test_files_that_change_are_refused(files, tmp_path, monkeypatch):
    files = [shutil.copy(file, tmp_path) for file in files]
    output = tmp_path / "out"
    pack_here(files, output)
    before = contents(output)
    os.utime(files[2], ns=(0, 0))
    with pytest.raises(hfp.PackingError, match=f"output: .*{files[2]}.*; choose another folder"):
        pack_here(files, output)
    os.remove(files[2])
    with pytest.raises(hfp.PackingError, match=f"files: expected files to pack, got none in '{files[2]}'"):
        pack_here(files, output)
    assert contents(output) == before
    del files[2]
    read = pack_files._read_table
    monkeypatch.setattr(pack_files, "_read_table", lambda name: (read(name), os.utime(name, ns=(0, 0)))[0])
    with pytest.raises(hfp.PackingError, match=rf"{tmp_path}/\d.parquet: expected the file as it was"):
        pack_here(files, tmp_path / "again")
    assert not (tmp_path / "again" / "manifest.json").exists()


def test_two_drivers_at_once(files, tmp_path, undisturbed):
    """They do each task at the same time, and begin and end together."""
    executor = Together()
    with ThreadPoolExecutor(2) as threads:
        drivers = [threads.submit(pack_here, files, tmp_path / "out", executor=executor) for _ in range(2)]
        assert str(drivers[0].result()) == str(drivers[1].result())
    assert contents(tmp_path / "out") == undisturbed


def test_abandoned_files_are_removed(files, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    for name, age in (("0" * 32, 2 * manifest._ABANDONED), ("1" * 32, 0)):
        (output / f".packing-{name}").touch()
        os.utime(output / f".packing-{name}", (time.time() - age,) * 2)
    pack_here(files, output)
    assert [path.name for path in output.glob(".*")] == [f".packing-{'1' * 32}"]


def has_ended(leader):
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == leader and state != "Z":
                return False
    return True


def wait_until(condition):
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, "processes hang"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, *rarely([{"executor": "ray"}])], ids=str)
def test_a_worker_is_killed(files, tmp_path, undisturbed, settings):
    code, errors = run_driver(files, tmp_path / "out", kill=[2, str(tmp_path / "killed")], **settings)
    assert code == 0, errors
    assert (tmp_path / "killed").exists()
    assert contents(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_a_task_that_always_kills_its_process(files, tmp_path):
    code, errors = run_driver(files, tmp_path / "out", kill=[2, str(tmp_path / "no folder" / "killed")])
    assert code == 1
    assert "PackingError: executor: a process died 3 times" in errors
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow
def test_the_driver_is_killed_five_times(tmp_path):
    files = write_files(tmp_path / "files", (60,) * 24)
    settings = {"tasks": 24}
    pack_here(files, tmp_path / "undisturbed", **settings)
    began = time.monotonic()
    assert run_driver(files, tmp_path / "timed", **settings)[0] == 0
    took = time.monotonic() - began
    chance = random.Random(0)
    for _ in range(5):
        process = start_driver(files, tmp_path / "out", **settings)
        time.sleep(chance.uniform(0.1, 0.9 * took))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        wait_until(partial(has_ended, process.pid))  # its workers, too
        assert contents(tmp_path / "out").items() <= contents(tmp_path / "undisturbed").items()
    assert run_driver(files, tmp_path / "out", **settings)[0] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.slow
def test_two_processes_are_drivers_at_once(files, tmp_path, undisturbed):
    drivers = [start_driver(files, tmp_path / "out") for _ in range(2)]
    assert [driver.communicate(timeout=HANGS)[1] for driver in drivers] == ["", ""]
    assert contents(tmp_path / "out") == undisturbed
