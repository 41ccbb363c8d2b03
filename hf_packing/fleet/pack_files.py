"""`fleet.pack`: divide files into tasks, and do the tasks that are missing, on any engine.

A process holds the documents of its task, and needs about 20 bytes for each token.
"""

import hashlib
import heapq
import json
import multiprocessing
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

import hf_packing
from hf_packing.checks import check_whole_number
from hf_packing.columns import LOSS_MASKS
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.fleet.manifest import (
    Folder,
    Identity,
    PackedCorpus,
    PackedFile,
    check_unchanged,
    file_system,
    identity_of,
    is_local,
)
from hf_packing.rows.changes import labels_left
from hf_packing.rows.packed_rows import blocks_of_packs
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import (
    columns_left_out,
    find_token_columns,
    is_token_type,
    with_typed_empty_lists,
)
from hf_packing.strategies.base import Strategy

Inputs = dict[str, Identity]
"""Files to pack: what differs between two versions of them, the size first, by path or URL."""

_BYTES_OF_A_TASK = 1 << 26
_TABLES = (".parquet", ".arrow")
_TRIES = 3
"""How often processes of this machine are started, if one dies."""
_ROWS_AT_ONCE = 100_000
"""pyarrow reads lists in batches, without threads, in half the time of a whole file."""
_TOKENS_IN_A_ROW_GROUP = 1 << 20
_PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": False,
    "write_statistics": False,
    "data_page_size": 1 << 23,
}
"""Options for the writer: of a list of tokens, neither the least nor the greatest token is ever asked for."""


def pack_files(
    files: str | Path | Sequence[str | Path],
    strategy: Strategy,
    output: str | Path,
    *,
    tokenizer: Any = None,
    executor: Any = None,
    workers: int | None = None,
    tasks: int | None = None,
    task: int | None = None,
    position_ids: bool = True,
    share_prefixes: bool | int = False,
    text_field: str | None = None,
    end_documents: bool = True,
    separator: str | None = None,
    train_on: str | None = None,
    skip_bad: bool = False,
    trust_remote_code: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PackedCorpus:
    """Pack many files by many processes, of one machine or of many.

    Files are divided into tasks of about equal size, and each task is packed by itself into one parquet file, with the
    rows that `hf_packing.pack` makes of its files. Processes, machines and the driver may die at any time: the same
    call goes on with what is missing, and checks the files that are there. A script needs `if __name__ ==
    "__main__":`, since processes of this machine import it.

    Args:
        files: files with `input_ids` and other token columns, of which parquet and Arrow are read fastest; or files of
            texts, prompts or chats, as for `hf-packing pack`. A file, a folder, a pattern such as
            "s3://bucket/*.parquet", or a list of them.
        strategy: a strategy such as BestFit(4096). Each task is planned once.
        output: folder for the packed rows, a path or a URL of fsspec, which all processes must reach.
        tokenizer: a name on the hub, a folder, a tokenizer.json file, or a fast tokenizer of transformers; None if the
            rows of the files have input_ids.
        executor: None for processes of this machine; "ray" for tasks of the Ray cluster that `ray.init()` finds; or an
            object whose `submit` returns a `concurrent.futures.Future`, such as a ThreadPoolExecutor.
        workers: number of processes of this machine; None for one per core.
        tasks: number of tasks; None to have one for about 64 MiB of files. There are at most as many as files.
        task: number of the only task to do, from 1 to `tasks`, as in array jobs; None to do all. The last one that is
            done writes the manifest.
        position_ids: whether packed rows get a column `position_ids`. Rows of trees never get one.
        share_prefixes: True if documents of the same task that begin with the same tokens share these tokens in a row,
            or the fewest tokens to share, as for `hf_packing.pack`.
        text_field: name of the field with the text; None to use the first of text, prompt and messages that a row has.
        end_documents: whether to append the end-of-sequence token to texts.
        separator: the text between a prompt and a completion; None for no text.
        train_on: "assistant", "completion" or "all", as for `tokenize`.
        skip_bad: whether to leave out, and count, rows of texts that cannot be read or used; False to raise an error.
        trust_remote_code: whether to run code that comes with the tokenizer.
        storage_options: arguments for file systems that are not local, such as {"endpoint_url": ...}.

    Returns:
        PackedCorpus: the packed files, and what was counted; of a single task, its file. Warnings say what was left
        out, dropped, skipped or applied.

    Raises:
        PackingError: an argument is wrong, a file cannot be packed or has changed since packing began, or a file in the
            output folder is damaged or of another run.
    """
    folder = Folder(str(output), dict(storage_options or {}))
    inputs = find_inputs(files, folder.options)
    texts = None
    if tokenizer is not None or not all(name.lower().endswith(_TABLES) for name in inputs):
        texts = {
            "tokenizer": tokenizer,
            "trust_remote_code": trust_remote_code,
            "text_field": text_field,
            "end_documents": end_documents,
            "separator": separator,
            "train_on": train_on,
            "skip_bad": skip_bad,
        }
    packing = Packing.of(strategy, position_ids, share_prefixes)
    groups = group_files(inputs, tasks)
    run = {
        "hf_packing": hf_packing.__version__,
        "strategy": repr(strategy),
        "position_ids": position_ids,
        "share_prefixes": packing.fewest_shared,
        "texts": None if texts is None else texts | {"tokenizer": _digest_of_tokenizer(texts)},
        "tasks": len(groups),
        "inputs": inputs,
    }
    folder.claim(run)
    todo = [Task(folder, packing, texts, number, len(groups), group) for number, group in enumerate(groups, start=1)]
    if task is None:
        done = all_done = _do_all(todo, executor, workers)
    else:
        number = check_whole_number("task", task, maximum=tasks or len(groups))
        done = [do_task(each) for each in todo[number - 1 : number]]  # none if there are more tasks than files
        all_done = [PackedFile(**known) for each in todo if (known := folder.read(each.record))]
    if len(all_done) == len(todo):
        _check_same_columns(all_done)
        folder.finish(run, all_done)
    packed = PackedCorpus(folder, repr(strategy), done)
    for change in packed.changes():
        warnings.warn(f"pack {change}", stacklevel=2)
    return packed


class Task(NamedTuple):
    """A group of files to pack, and all that a process needs to know for it."""

    folder: Folder
    packing: Packing
    texts: Mapping[str, Any] | None
    """How texts become tokens; None if the files are tables with input_ids."""
    number: int
    """From 1."""
    of: int
    inputs: Inputs

    @property
    def name(self) -> str:
        """The name of the file of rows."""
        return f"packed-{self.number:05d}-of-{self.of:05d}.parquet"

    @property
    def record(self) -> str:
        """The name of the file that says what is known of the rows."""
        return f"tasks/{self.number:05d}.json"


def find_inputs(files: str | Path | Sequence[str | Path], options: Mapping[str, Any]) -> Inputs:
    """Return the files to pack, sorted by name.

    Raises:
        PackingError: there is no such file, or a file is given twice.
    """
    names: list[str] = []
    for each in [files] if isinstance(files, (str, Path)) else files:
        system, path = file_system(str(each), options)
        found = system.glob(path) if any(mark in path for mark in "*?[") else system.find(path)
        shown = [name for name in found if not Path(name).name.startswith((".", "_"))]
        if not shown:
            raise PackingError(f"files: expected files to pack, got none in {str(each)!r}")
        names += shown if is_local(system) else map(system.unstrip_protocol, shown)
    if not names or len(set(names)) < len(names):
        raise PackingError(f"files: expected files to pack, each of them once, got {files!r}")
    return {name: identity_of(name, options) for name in sorted(names)}


def group_files(inputs: Inputs, tasks: int | None = None) -> list[Inputs]:
    """Divide files into tasks of about equal size: the largest file that is left goes to the smallest task.

    Args:
        inputs: the files, of which only names and sizes count.
        tasks: number of tasks, of which no more than files are made; None to have one for about 64 MiB.
    """
    by_size = max(1, sum(size for size, _ in inputs.values()) // _BYTES_OF_A_TASK)
    most = by_size if tasks is None else check_whole_number("tasks", tasks)
    groups: list[Inputs] = [{} for _ in range(min(most, len(inputs)))]
    smallest = [(0, number) for number in range(len(groups))]
    for name in sorted(inputs, key=lambda name: (-inputs[name][0], name)):
        size, number = smallest[0]
        groups[number][name] = inputs[name]
        heapq.heapreplace(smallest, (size + max(inputs[name][0], 1), number))
    return [dict(sorted(group.items())) for group in groups]


def _do_all(todo: Sequence[Task], executor: Any, workers: int | None) -> Sequence[PackedFile]:
    """Do all tasks that are missing, check those that are done, and return what is known of them."""
    if executor is None:
        results = _on_this_machine(todo, workers)
    elif executor == "ray":
        results = _results(_Ray(), todo)
    elif hasattr(executor, "submit"):
        results = _results(executor, todo)
    else:
        raise PackingError(f'executor: expected None, "ray" or an object with submit, got {executor!r}')
    done: dict[str, PackedFile] = {}
    with tqdm(total=len(todo), desc="Packing files", unit=" tasks", disable=None) as bar:
        for file in results:
            done[file.name] = file
            bar.update(len(done) - bar.n)
    return [done[task.name] for task in todo]


class _Ray:
    """Tasks of a Ray cluster. Ray does a task again whose process or machine dies."""

    def submit(self, function: Any, task: Task) -> Any:
        try:
            import ray
        except ImportError:
            raise MissingDependencyError(
                'executor="ray" needs Ray, which is not installed; run pip install "hf-packing[ray]"'
            ) from None
        if not ray.is_initialized():
            ray.init()
        return ray.remote(function).remote(task).future()


def _results(executor: Any, todo: Sequence[Task]) -> Iterator[PackedFile]:
    """Yield what is known of each task when it is done. After an error, tasks that have not begun are not done."""
    futures = [executor.submit(do_task, task) for task in todo]
    try:
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                raise getattr(error, "cause", None) or error  # Ray wraps the errors of tasks
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _on_this_machine(todo: Sequence[Task], workers: int | None) -> Iterator[PackedFile]:
    """Yield the results of tasks as `_results` does, by processes of this machine, again if one of them dies."""
    number = min(check_whole_number("workers", os.cpu_count() if workers is None else workers), len(todo))
    for _ in range(_TRIES):
        try:
            with ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), _prepare_worker) as pool:
                yield from _results(pool, todo)
            return
        except BrokenProcessPool:  # tasks that are done are only checked in the next try
            continue
    raise PackingError(
        f"executor: a process died {_TRIES} times, as when memory is short, or when a script calls fleet.pack outside "
        'of `if __name__ == "__main__":`. The same call goes on with the tasks that are not done'
    )


def _prepare_worker() -> None:
    """Let this process use one core, and end with the driver, also if that is killed."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # of tokenizers
    driver: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (driver.join(), os._exit(1)), daemon=True).start()


def do_task(task: Task) -> PackedFile:
    """Pack the files of a task into one file, or check the file if this is done. Return what is known of it."""
    folder = task.folder
    known = folder.read(task.record)
    if known is not None and (digest := folder.digest(task.name)) is not None:
        if digest != known["sha256"]:
            raise PackingError(
                f"output: expected {folder.path(task.name)!r} as it was written, but the file is damaged; remove it, "
                "and start this run again"
            )
        return PackedFile(**known)
    with folder.unfinished() as fresh:
        file = _write_rows(task, fresh)
        file = replace(file, sha256=folder.put(fresh, task.name))
    folder.put_json(task.record, asdict(file))
    return file


def _write_rows(task: Task, fresh: Path) -> PackedFile:
    """Pack the files of a task, write the rows to a local file, and return what is known of it, but for its digest."""
    packing = task.packing
    read = [_read(task, name) for name in task.inputs]
    for name, before in task.inputs.items():
        check_unchanged(name, before, identity_of(name, task.folder.options))
    filled = [each.table for each in read if each.table.num_rows] or [read[0].table]
    try:
        columns = find_token_columns(pa.concat_tables(filled))
        plan, splits = packing.plan(columns)
        if (labels := labels_left(columns, plan)) is not None:
            labels.check_some_left("strategy", packing.strategy)
    except (PackingError, pa.ArrowException) as error:
        raise PackingError(f"files: {', '.join(task.inputs)} cannot be packed together: {error}") from None
    schema = packing.schema(filled[0].schema)
    wide = [each.name for each in schema if is_token_type(each.type) and each.type.value_type.bit_width >= 32]
    options = _PARQUET | {"use_byte_stream_split": [f"{name}.list.element" for name in wide]}
    trained = 0
    with pq.ParquetWriter(fresh, schema, **options) as writer:
        for packs in blocks_of_packs(plan, _TOKENS_IN_A_ROW_GROUP):
            rows = packing.rows(columns, plan, packs)
            writer.write_table(rows.table, row_group_size=rows.table.num_rows)
            trained += rows.trained_tokens
    skipped = [row for each in read for row in each.skipped]
    return PackedFile(
        name=task.name,
        inputs=list(task.inputs),
        rows=plan.num_packs,
        sha256="",
        columns={each.name: str(each.type.value_type) for each in filled[0].schema},
        counts={
            **{name: value for name, value in vars(plan.metrics()).items() if name.startswith("num_")},
            "slots": int(plan.pack_capacity.sum(dtype=np.int64)),
            "trained_tokens": trained,
            "skipped_rows": len(skipped),
            "shortened_chats": sum(each.shortened_chats for each in read),
        },
        splits=splits,
        loss_masks=[name for name in LOSS_MASKS if name in columns],
        left_out=list(dict.fromkeys(column for each in read for column in each.left_out)),
        skipped=skipped[:1],
    )


class _Documents(NamedTuple):
    """The documents of a file."""

    table: pa.Table
    """The token columns, without attention_mask."""
    left_out: Sequence[str]
    skipped: Sequence[str]
    shortened_chats: int


def _read(task: Task, name: str) -> _Documents:
    """Read a file, and tokenize its rows if they are texts. Errors name the file."""
    system, path = file_system(name, task.folder.options)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            if task.texts is None:
                table, skipped, shortened = _read_table(system, path), [], 0
            else:
                from hf_packing.text.read import Documents

                if not is_local(system):
                    copy = f"{folder}/{Path(path).name}"
                    system.get_file(path, copy)
                    path = copy
                documents = Documents(path, skip_bad=task.texts["skip_bad"])
                tokens = documents.tokens(_text_tokenizer(task.texts), Path(folder, "tokens"))
                table, skipped, shortened = tokens.data.table, documents.skipped, documents.lacking
            task.packing.check_names(table.column_names)
            filled = with_typed_empty_lists(table)
            columns = list(find_token_columns(filled))
            left_out = columns_left_out(filled.schema)
            return _Documents(
                filled.select(columns), left_out, [each.replace(path, name) for each in skipped], shortened
            )
        except (PackingError, OSError, pa.ArrowException) as error:
            text = str(error).replace(path, name)
            raise PackingError(text if name in text else f"{name}: {text}") from None


def _read_table(system: Any, path: str) -> pa.Table:
    """Return a parquet or Arrow file as a table."""
    with system.open(path, "rb") as stream:
        if path.lower().endswith(".arrow"):
            return pa.ipc.open_stream(stream).read_all()
        parquet = pq.ParquetFile(path if is_local(system) else stream, pre_buffer=True)
        batches = parquet.iter_batches(_ROWS_AT_ONCE, use_threads=False)
        return pa.Table.from_batches(batches, parquet.schema_arrow.remove_metadata())


def _text_tokenizer(texts: Mapping[str, Any]) -> Any:
    """Return the TextTokenizer; None if rows have input_ids."""
    from hf_packing.text.tokenize import text_tokenizer

    tokenizer = texts["tokenizer"]
    if isinstance(tokenizer, (str, Path)):
        tokenizer = _loaded(str(tokenizer), texts["trust_remote_code"])
    if tokenizer is None:
        return None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise PackingError(f"tokenizer: expected a fast tokenizer of transformers, got {type(tokenizer).__name__}")
    options = ("text_field", "end_documents", "separator", "train_on")
    return text_tokenizer(tokenizer, **{name: texts[name] for name in options})


@lru_cache(maxsize=1)
def _loaded(name: str, trust_remote_code: bool) -> Any:
    """Load a tokenizer once for all tasks of a process."""
    from hf_packing.text.tokenize import load_tokenizer

    return load_tokenizer(name, trust_remote_code)


def _digest_of_tokenizer(texts: Mapping[str, Any]) -> str | None:
    """Return a digest of everything about a tokenizer that tokens depend on; None if rows have input_ids."""
    if (tokenizer := _text_tokenizer(texts)) is None:
        return None
    parts = (tokenizer.backend.to_str(), str(tokenizer.template.source), tokenizer.end)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _check_same_columns(files: Sequence[PackedFile]) -> None:
    """Raise PackingError unless the documents of all files of rows have the same columns."""
    filled = [file for file in files if file.rows]
    for file in filled:
        if file.columns != filled[0].columns:
            raise PackingError(
                f"files: expected the same columns in all files, but {file.inputs[0]} has {file.columns} and "
                f"{filled[0].inputs[0]} has {filled[0].columns}"
            )
