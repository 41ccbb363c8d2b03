"""`fleet.pack`: divide files into tasks, and do the tasks that are missing, on any engine.

A process holds the documents of its task, and needs about 20 bytes for each token.
"""

import hashlib
import heapq
import json
import multiprocessing
import os
import re
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import has_magic
from fsspec.implementations.local import LocalFileSystem
from tqdm.auto import tqdm

import hf_packing
from hf_packing.checks import check_whole_number, expect
from hf_packing.columns import loss_masks_in
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.files import file_system, is_hidden
from hf_packing.fleet.manifest import (
    Folder,
    Identity,
    PackedCorpus,
    PackedFile,
    identity_of,
    is_local,
    sha256_of,
    url_of,
)
from hf_packing.planning.lengths import total_of
from hf_packing.rows.changes import labels_left, warn_of_changes
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import (
    columns_left_out,
    find_token_columns,
    is_token_type,
    token_names,
    with_typed_empty_lists,
)
from hf_packing.strategies.base import Strategy
from hf_packing.versioned import versions_of_texts

Inputs = dict[str, Identity]
"""Files to pack: what differs between two versions of them, the size first, by path or URL."""

_BYTES_OF_A_TASK = 1 << 26
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
    keep_first_labels: bool = False,
    text_field: str | None = None,
    end_documents: bool = True,
    add_special_tokens: bool = True,
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
        keep_first_labels: True to keep the label of a segment's first token, as for `hf_packing.pack`.
        text_field: name of the field with the text or the messages; None to use the first that a row has of prompt and
            completion, messages, conversations, and text.
        end_documents: whether to append the end-of-sequence token to texts.
        add_special_tokens: whether the tokenizer adds its special tokens to texts, as for `tokenize`.
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
    folder = Folder(str(output), storage_options or {})
    inputs = find_inputs(files, folder.options)
    packing = Packing.of(strategy, position_ids, share_prefixes, keep_first_labels)
    settings = {
        "text_field": text_field,
        "end_documents": end_documents,
        "add_special_tokens": add_special_tokens,
        "separator": separator,
        "train_on": train_on,
    }
    texts = digest = None
    if tokenizer is None:
        expect(None, "without a tokenizer", text_field=text_field, separator=separator, train_on=train_on)
        expect(False, "without a tokenizer", skip_bad=skip_bad)
    else:
        texts, digest = _text_tokenizer(tokenizer, trust_remote_code, settings)
    groups = group_files(inputs, tasks)
    run = {
        "hf_packing": hf_packing.__version__,
        "strategy": repr(strategy),
        "position_ids": position_ids,
        "share_prefixes": packing.fewest_shared,
        "keep_first_labels": keep_first_labels,
        "tokenizer": digest,
        **settings,
        "skip_bad": skip_bad,
        "tasks": len(groups),
        "inputs": inputs,
    }
    folder.claim(run)
    todo = [
        Task(folder, packing, texts, skip_bad, f"packed-{number:05d}-of-{len(groups):05d}.parquet", number, group)
        for number, group in enumerate(groups, start=1)
    ]
    if task is None:
        done = known = _do_all(todo, executor, workers)
    else:
        number = check_whole_number("task", task, maximum=tasks or len(groups))
        done = [do_task(each) for each in todo[number - 1 : number]]  # none if there are more tasks than files
        known = [PackedFile(**record) for each in todo if (record := folder.read(each.record))]
    if len(known) == len(todo):
        folder.finish(run, known)
    packed = PackedCorpus(folder, repr(strategy), done)
    warn_of_changes(packed.changes(), "pack", stacklevel=2)
    return packed


class Task(NamedTuple):
    """A group of files to pack, and all that a process needs to know for it."""

    folder: Folder
    packing: Packing
    texts: Any
    """The TextTokenizer; None if the rows have input_ids."""
    skip_bad: bool
    name: str
    """The name of the file of rows."""
    number: int
    """From 1."""
    inputs: Inputs

    @property
    def record(self) -> str:
        """The name of the file that says what is known of the rows."""
        return f"tasks/{self.number:05d}.json"


def find_inputs(files: str | Path | Sequence[str | Path], options: Mapping[str, Any]) -> Inputs:
    """Return the files to pack, sorted by name.

    Raises:
        PackingError: there is no such file, or a file is given twice.
    """
    found: list[tuple[str, Identity]] = []
    for each in [files] if isinstance(files, (str, Path)) else files:
        system, path = file_system(str(each), **options)
        is_pattern = has_magic(path) and not system.exists(path)
        names = system.glob(path) if is_pattern else system.find(path)
        above = re.split(r"[*?\[]", path)[0].rpartition("/")[0] if is_pattern else path
        shown = [name for name in names if not is_hidden(name.removeprefix(above).lstrip("/"))]
        if not shown:
            raise PackingError(f"files: expected files to pack, got none in {str(each)!r}")
        found += [(url_of(system, name), identity_of(system, name)) for name in shown]
    inputs = dict(sorted(found))
    if not inputs or len(inputs) < len(found):
        raise PackingError(f"files: expected files to pack, each of them once, got {files!r}")
    return inputs


def group_files(inputs: Inputs, tasks: int | None = None) -> list[Inputs]:
    """Divide files into tasks of about equal size: the largest file that is left goes to the smallest task.

    Args:
        inputs: the files, of which only names and sizes count.
        tasks: number of tasks, of which no more than files are made; None to have one for about 64 MiB.
    """
    if tasks is None:
        tasks = max(1, sum(size for size, _ in inputs.values()) // _BYTES_OF_A_TASK)
    groups: list[Inputs] = [{} for _ in range(min(check_whole_number("tasks", tasks), len(inputs)))]
    smallest = [(0, number) for number in range(len(groups))]
    for name in sorted(inputs, key=lambda name: (-inputs[name][0], name)):
        size, number = smallest[0]
        groups[number][name] = inputs[name]
        heapq.heapreplace(smallest, (size + max(inputs[name][0], 1), number))
    return [dict(sorted(group.items())) for group in groups]


def _text_tokenizer(tokenizer: Any, trust_remote_code: bool, settings: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the TextTokenizer, and a digest of everything about the tokenizer that tokens depend on."""
    from hf_packing.text.tokenize import TextTokenizer, load_tokenizer

    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer(str(tokenizer), trust_remote_code)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise PackingError(f"tokenizer: expected a fast tokenizer of transformers, got {type(tokenizer).__name__}")
    texts = TextTokenizer(tokenizer, **settings)
    parts = (
        tokenizer.backend_tokenizer.to_str(),
        str(texts.template),
        tokenizer.special_tokens_map,
        versions_of_texts(),
    )
    return texts, hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _do_all(todo: Sequence[Task], executor: Any, workers: int | None) -> list[PackedFile]:
    """Do all tasks that are missing, check those that are done, and return what is known of them."""
    if executor == "ray":
        return _results(_ray_submit(), todo)
    if hasattr(executor, "submit"):
        return _results(executor.submit, todo)
    if executor is not None:
        raise PackingError(f'executor: expected None, "ray" or an object with submit, got {executor!r}')
    if workers is not None and check_whole_number("workers", workers) > len(todo):
        warnings.warn(
            f"workers: {workers - len(todo)} of {workers} have nothing to do, since there is one task for about "
            f"{_BYTES_OF_A_TASK >> 20} MiB of files, here {len(todo)}; pass tasks={workers} for more, of at least "
            "a file each",
            stacklevel=3,
        )
    for _ in range(_TRIES):  # tasks that are done are only checked in the next try
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _prepare_worker)
        with suppress(BrokenProcessPool), pool:
            return _results(pool.submit, todo)
    raise PackingError(
        f"executor: a process died {_TRIES} times, as when memory is short, or when a script calls fleet.pack outside "
        'of `if __name__ == "__main__":`. The same call goes on with the tasks that are not done'
    )


def _ray_submit() -> Callable[..., Any]:
    """Return what gives a task to the Ray cluster. Ray does a task again whose process or machine dies."""
    try:
        import ray
    except ImportError:
        raise MissingDependencyError(
            'executor="ray" needs Ray, which is not installed; run pip install "hf-packing[ray]"'
        ) from None
    if not ray.is_initialized():
        ray.init()
    return lambda function, task: ray.remote(function).remote(task).future()


def _results(submit: Callable[..., "Future[PackedFile]"], todo: Sequence[Task]) -> list[PackedFile]:
    """Return what is known of each task. After an error, tasks that have not begun are not done."""
    futures = [submit(do_task, task) for task in todo]
    try:
        for future in tqdm(as_completed(futures), "Packing files", len(futures), unit=" tasks", disable=None):
            if error := future.exception():
                raise getattr(error, "cause", error)  # Ray wraps the errors of tasks
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _prepare_worker() -> None:
    """Let this process use one core, and end with the driver, also if that is killed."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # of tokenizers
    driver: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (driver.join(), os._exit(1)), daemon=True).start()


def do_task(task: Task) -> PackedFile:
    """Pack the files of a task into one file, unless it is there, undamaged. Return what is known of it."""
    folder = task.folder
    known = folder.read(task.record)
    if known is not None and known["sha256"] == folder.digest(task.name):
        return PackedFile(**known)
    with folder.new_file(task.name) as fresh:
        file = _write_rows(task, fresh)
    folder.write(task.record, asdict(file))
    return file


def _write_rows(task: Task, fresh: Path) -> PackedFile:
    """Pack the files of a task, write the rows to a local file, and return what is known of it."""
    read = [_read(task, name) for name in task.inputs]
    tables, left_out, skipped, remarks = zip(*read, strict=True)
    filled = [table for table in tables if table.num_rows] or [tables[0]]
    packing = task.packing
    try:
        columns = find_token_columns(pa.concat_tables(filled))
        plan = packing.plan(columns)
        if (labels := labels_left(columns, plan, packing.keep_first_labels)) is not None:
            labels.check_some_left("strategy", packing.strategy)
    except (PackingError, pa.ArrowException) as error:
        raise PackingError(f"files: {', '.join(task.inputs)} cannot be packed together: {error}") from None
    schema = packing.schema(filled[0].schema)
    wide = [each.name for each in schema if is_token_type(each.type) and each.type.value_type.bit_width >= 32]
    options = _PARQUET | {"use_byte_stream_split": [f"{name}.list.element" for name in wide]}
    trained = 0
    with pq.ParquetWriter(fresh, schema, **options) as writer:
        for rows in packing.blocks(columns, plan, _TOKENS_IN_A_ROW_GROUP):
            writer.write_table(rows.table, rows.table.num_rows)
            trained += rows.trained_tokens
    metrics = vars(plan.metrics())
    return PackedFile(
        name=task.name,
        inputs=list(task.inputs),
        rows=plan.num_packs,
        sha256=sha256_of(LocalFileSystem(), str(fresh)),
        columns=", ".join(
            sorted(f"{each.name} ({getattr(each.type, 'value_type', each.type)})" for each in filled[0].schema)
        ),
        counts={
            **{name: metrics[name] for name in metrics if name.startswith("num_")},
            "slots": total_of(plan.pack_capacity),
            "trained_tokens": trained,
            "tokens_not_shared": packing.tokens_not_shared(columns, plan),
            "skipped_rows": sum(map(len, skipped)),
        },
        remarks=dict(sum(remarks, Counter())),  # as a dataclass copies a Counter wrongly
        loss_masks=loss_masks_in(columns),
        left_out=list(dict.fromkeys(chain(*left_out))),
        skipped=list(chain(*skipped))[:1],
    )


def _read(task: Task, name: str) -> tuple[pa.Table, list[str], list[str], Counter[str]]:
    """Read a file, and tokenize its rows if they are texts. Errors name the file.

    Returns:
        The token columns; the columns that are left out; the rows that are left out, with the reasons; and the remarks
        on rows, with their numbers.
    """
    system, path = file_system(name, **task.folder.options)
    local, skipped, remarks = path, list[str](), Counter[str]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            if not is_local(system):
                local = f"{folder}/{Path(path).name}"
                system.get_file(path, local)
            if task.texts is None and name.lower().endswith((".parquet", ".arrow")):
                table = _read_table(local)
            else:
                from hf_packing.text.read import Documents

                documents = Documents(local, skip_bad=task.skip_bad)
                table = documents.tokens(task.texts, Path(folder, ".tokens")).data.table
                skipped, remarks = [each.replace(local, name) for each in documents.skipped], documents.remarks
            task.packing.check_names(table.column_names)
            table = with_typed_empty_lists(table)
            find_token_columns(table)  # refuses what cannot be packed
        except (PackingError, OSError, pa.ArrowException) as error:
            text = str(error).replace(local, name)
            raise PackingError(text if name in text else f"{name}: {text}") from None
    if (now := identity_of(system, path)) != task.inputs[name]:
        raise PackingError(
            f"{name}: expected the file as it was when packing began, with size and last change {task.inputs[name]}, "
            f"got {now}; pack changed files into a new folder"
        )
    return table.select(token_names(table.schema)), columns_left_out(table.schema), skipped, remarks


def _read_table(path: str) -> pa.Table:
    """Return a parquet or Arrow file as a table."""
    if path.lower().endswith(".arrow"):
        return pa.ipc.open_stream(pa.memory_map(path)).read_all()
    with pq.ParquetFile(path, pre_buffer=True) as parquet:
        batches = parquet.iter_batches(_ROWS_AT_ONCE, use_threads=False)
        return pa.Table.from_batches(batches, parquet.schema_arrow.remove_metadata())
