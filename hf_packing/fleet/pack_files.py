"""`fleet.pack`: divide files into tasks, and do the tasks that are missing, on any engine."""

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
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

import hf_packing
from hf_packing.checks import check_whole_number
from hf_packing.columns import ATTENTION_MASK, INPUT_IDS, LABELS, LOSS_MASKS, check_has_tokens
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.fleet.manifest import Folder, InputFile, PackedCorpus, PackedFile, digest_of, file_system, is_local
from hf_packing.rows.label_counts import labels_left
from hf_packing.rows.token_columns import (
    columns_left_out,
    find_token_columns,
    is_list,
    is_token_type,
    with_typed_empty_lists,
)
from hf_packing.strategies.base import Strategy, check_strategy


class Packing(NamedTuple):  # TEMPORARY
    strategy: Any
    position_ids: bool
    fewest_shared: int | None

    @classmethod
    def of(cls, strategy: Any, position_ids: bool, share_prefixes: Any) -> "Packing":
        from hf_packing.trees.rows import check_share_prefixes

        shared = None if share_prefixes is False else check_share_prefixes(share_prefixes, strategy)
        return cls(check_strategy(strategy), position_ids, shared)

    def check_names(self, names: Any) -> None:
        from hf_packing.rows.packed_rows import check_bucket_is_free
        from hf_packing.trees.rows import check_tree_columns_are_free

        if self.strategy.has_buckets:
            check_bucket_is_free(names)
        if self.fewest_shared is not None:
            check_tree_columns_are_free(names)

    def plan(self, columns: Any) -> Any:
        from hf_packing.planning.lengths import check_lengths
        from hf_packing.trees.rows import plan_trees

        if self.fewest_shared is not None:
            return plan_trees(columns, self.strategy, self.fewest_shared)
        return self.strategy.plan_lengths(check_lengths(columns[INPUT_IDS].length)), {}

    def rows(self, columns: Any, plan: Any, packs: Any) -> Any:
        from hf_packing.rows.packed_rows import pack_rows
        from hf_packing.trees.rows import tree_rows

        first, end = (int(packs[0]), int(packs[-1]) + 1) if len(packs) else (0, 0)
        if self.fewest_shared is not None:
            return tree_rows(columns, plan, first, end, self.strategy.has_buckets)
        return pack_rows(columns, plan, first, end, self.position_ids, self.strategy.has_buckets)


def blocks_of_packs(plan: Any, tokens: int) -> Any:  # TEMPORARY
    from hf_packing.rows.packed_rows import blocks_of_packs

    return (np.arange(*block) for block in blocks_of_packs(plan, tokens))


_BYTES_OF_A_TASK = 1 << 26
_TABLES = (".parquet", ".arrow")
_TRIES = 3
"""How often tasks are begun whose process dies."""
_ROWS_AT_ONCE = 100_000
"""pyarrow reads lists in batches, without threads, in half the time of a whole file."""
_TOKENS_IN_A_ROW_GROUP = 1 << 20
_PARQUET = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": False,
    "write_statistics": False,
    "data_page_size": 1 << 23,
}
"""Options for the writer: of a list of tokens, neither the least nor the greatest token is ever asked for."""
_TOKENS = pa.schema({INPUT_IDS: pa.list_(pa.int32()), LABELS: pa.list_(pa.int32())})


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
        files: parquet or Arrow files with `input_ids` and other token columns; or files of texts, prompts or chats, as
            for `hf-packing pack`. A list, a folder, or a pattern such as "s3://bucket/*.parquet".
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
    if tokenizer is not None or not all(map(_is_table, inputs)):
        texts = Texts(
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            text_field=text_field,
            end_documents=end_documents,
            separator=separator,
            train_on=train_on,
            skip_bad=skip_bad,
        )
    how = How(folder, Packing.of(strategy, position_ids, share_prefixes), texts)
    groups = group_files(inputs, tasks)
    run = {**how.known(), "tasks": len(groups), "inputs": [asdict(each) for each in inputs]}
    folder.claim(run)
    if task is not None:
        packed = _do_one(how, groups, run, check_whole_number("task", task, maximum=tasks or len(groups)))
    else:
        packed = folder.finish(run, _do_all(how, groups, executor, workers))
    for change in packed.changes():
        warnings.warn(f"pack {change}", stacklevel=2)
    return packed


class Texts(NamedTuple):
    """How texts become tokens."""

    tokenizer: Any
    trust_remote_code: bool
    text_field: str | None
    end_documents: bool
    separator: str | None
    train_on: str | None
    skip_bad: bool

    def load_tokenizer(self) -> Any:
        """Return the TextTokenizer; None if rows have input_ids."""
        from hf_packing.text.text_tokenizer import text_tokenizer

        if isinstance(self.tokenizer, (str, Path)):
            return _loaded(str(self.tokenizer), self.trust_remote_code)
        if self.tokenizer is not None and not hasattr(self.tokenizer, "backend_tokenizer"):
            raise PackingError(
                "tokenizer: expected a name on the hub, a folder, a tokenizer.json file or a fast tokenizer of "
                f"transformers, got {type(self.tokenizer).__name__}"
            )
        return None if self.tokenizer is None else text_tokenizer(self.tokenizer)

    def known(self) -> dict[str, Any]:
        """Return everything that tokens depend on, for JSON."""
        tokenizer = self.load_tokenizer()
        parts = None if tokenizer is None else (tokenizer.backend.to_str(), tokenizer.template_text, tokenizer.end)
        digest = parts and digest_of(BytesIO(json.dumps(parts).encode()))
        return {**self._asdict(), "tokenizer": digest}


@lru_cache(maxsize=1)
def _loaded(name: str, trust_remote_code: bool) -> Any:
    """Load a tokenizer once for all tasks of a process."""
    from hf_packing.text.text_tokenizer import load_tokenizer

    return load_tokenizer(name, trust_remote_code)


class How(NamedTuple):
    """What a task needs to know besides its files."""

    folder: Folder
    packing: Packing
    texts: Texts | None

    def known(self) -> dict[str, Any]:
        """Return everything that rows depend on besides the files, for JSON."""
        packing = {"position_ids": self.packing.position_ids, "share_prefixes": self.packing.fewest_shared}
        texts = None if self.texts is None else self.texts.known()
        return {
            "hf_packing": hf_packing.__version__,
            "strategy": repr(self.packing.strategy),
            **packing,
            "texts": texts,
        }


def find_inputs(files: str | Path | Sequence[str | Path], options: Mapping[str, Any]) -> list[InputFile]:
    """Return the files to pack, by name.

    Raises:
        PackingError: there are no files, a file does not exist, or a file is given twice.
    """
    if isinstance(files, (str, Path)):
        system, path = file_system(str(files), options)
        found = system.glob(path) if any(each in path for each in "*?[") else system.find(path)
        hidden = [name for name in found if Path(name).name.startswith((".", "_"))]
        names = [system.unstrip_protocol(name) for name in found if name not in hidden] or [str(files)]
    elif isinstance(files, Sequence) and all(isinstance(file, (str, Path)) for file in files):
        names = [str(file) for file in files]
    else:
        raise PackingError(f"files: expected a path, a URL, a pattern, or a list of paths and URLs, got {files!r}")
    inputs = sorted((InputFile.find(name, options) for name in names), key=lambda each: each.name)
    if not inputs:
        raise PackingError("files: expected files to pack, got an empty list")
    for one, other in pairwise(inputs):
        if one.name == other.name:
            raise PackingError(f"files: expected each file once, got {one.name!r} twice")
    return inputs


def group_files(inputs: Sequence[InputFile], tasks: int | None = None) -> list[list[InputFile]]:
    """Divide files into tasks of about equal size: the largest file that is left goes to the smallest task.

    Args:
        inputs: the files, by name. Only their names and sizes count.
        tasks: number of tasks, of which no more than files are made; None to have one for about 64 MiB.
    """
    by_size = max(1, sum(each.size for each in inputs) // _BYTES_OF_A_TASK)
    most = by_size if tasks is None else check_whole_number("tasks", tasks)
    groups: list[list[InputFile]] = [[] for _ in range(min(most, len(inputs)))]
    smallest = [(0, number) for number in range(len(groups))]
    for each in sorted(inputs, key=lambda each: -each.size):
        size, number = smallest[0]
        groups[number].append(each)
        heapq.heapreplace(smallest, (size + max(each.size, 1), number))
    return [sorted(group, key=lambda each: each.name) for group in groups]


def _do_all(how: How, groups: Sequence[Sequence[InputFile]], executor: Any, workers: int | None) -> list[PackedFile]:
    """Do all tasks that are missing, check those that are done, and return what is known of all of them."""
    done: dict[int, PackedFile] = {}
    first: PackedFile | None = None
    todo = [(how, number, len(groups), group) for number, group in enumerate(groups, start=1)]
    results = _on_this_machine(todo, workers) if executor is None else _results(_engine(executor), todo)
    with tqdm(total=len(groups), desc="Packing files", unit=" tasks", disable=None) as bar:
        for number, file in results:
            done[number] = file
            if file.rows:
                first = first or file
                _check_same_columns([(each.inputs[0], each.columns) for each in (first, file)])
            bar.update(len(done) - bar.n)
    return [done[number] for number in sorted(done)]


def _do_one(how: How, groups: Sequence[Sequence[InputFile]], run: Mapping[str, Any], task: int) -> PackedCorpus:
    """Do one task, if it has files; write the manifest if it is the last one."""
    if task > len(groups):
        return PackedCorpus(how.folder, run["strategy"], [])
    file = do_task(how, task, len(groups), groups[task - 1])
    known = [how.folder.read(_record(number)) for number in range(1, len(groups) + 1)]
    if all(known):
        files = [PackedFile(**each) for each in known]
        _check_same_columns([(each.inputs[0], each.columns) for each in files if each.rows])
        how.folder.finish(run, files)
    return PackedCorpus(how.folder, run["strategy"], [file])


def _engine(executor: Any) -> Any:
    """Return the object that an `executor` stands for, which has `submit`."""
    if executor == "ray":
        return _Ray()
    if not hasattr(executor, "submit"):
        raise PackingError(f'executor: expected None, "ray" or an object with submit, got {executor!r}')
    return executor


class _Ray:
    """Tasks of a Ray cluster. Ray does a task again whose process or machine dies."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            raise MissingDependencyError(
                'executor="ray" needs Ray, which is not installed; run pip install "hf-packing[ray]"'
            ) from None
        if not ray.is_initialized():
            ray.init()
        self._ray, self._how = ray, None

    def submit(self, function: Any, how: How, *task: Any) -> Any:
        self._how = self._how or self._ray.put(how)  # once for all tasks
        return self._ray.remote(function).remote(self._how, *task).future()


def _results(executor: Any, todo: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, PackedFile]]:
    """Yield the number and the result of each task when it is done."""
    futures = {executor.submit(do_task, *task): task[1] for task in todo}
    try:
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                raise getattr(error, "cause", None) or error  # Ray wraps the errors of tasks
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def _on_this_machine(todo: Sequence[tuple[Any, ...]], workers: int | None) -> Iterator[tuple[int, PackedFile]]:
    """Yield the results of tasks as `_results` does, by processes of this machine; begin again if one dies."""
    workers = min(check_whole_number("workers", workers or os.cpu_count()), len(todo))
    done: set[int] = set()
    for _ in range(_TRIES):
        left = [task for task in todo if task[1] not in done]
        try:
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _prepare_worker) as pool:
                for number, file in _results(pool, left):
                    done.add(number)
                    yield number, file
            return
        except BrokenProcessPool:
            continue
    raise PackingError(
        f"executor: a process died {_TRIES} times, as when memory is short, or when a script calls fleet.pack outside "
        f'of `if __name__ == "__main__":`. {len(done)} of {len(todo)} tasks are done; the next one has the file '
        f"{left[0][3][0].name}"
    )


def _prepare_worker() -> None:
    """Let this process have one core, and end with the driver, also if that is killed."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # of tokenizers
    driver = multiprocessing.parent_process()
    assert driver is not None

    def wait() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def do_task(how: How, number: int, of: int, inputs: Sequence[InputFile]) -> PackedFile:
    """Pack the files of a task into one file, unless this is done; then check the file. Return what is known of it."""
    folder, name = how.folder, f"packed-{number:05d}-of-{of:05d}.parquet"
    expected = f"the rows of task {number} of {of}"
    known = folder.read(_record(number))
    if known is not None and (digest := folder.digest(name)) is not None:
        if digest != known["sha256"]:
            raise PackingError(
                f"output: expected {expected} in {folder.path(name)!r}, but the file is damaged; remove it, and start "
                "this run again"
            )
        return PackedFile(**known)
    with folder.unfinished() as fresh:
        file = _write_rows(how, inputs, fresh, name)
        file = replace(file, size=fresh.stat().st_size, sha256=folder.put(fresh, name, expected))
    folder.put_json(_record(number), asdict(file), f"what is known of {expected}")
    return file


def _record(number: int) -> str:
    return f"tasks/{number:05d}.json"


def _write_rows(how: How, inputs: Sequence[InputFile], fresh: Path, name: str) -> PackedFile:
    """Pack files, write the rows to a local file, and return what is known of it but for its size and digest."""
    packing, options = how.packing, how.folder.options
    read = [_documents(how, each) for each in inputs]
    for each in inputs:
        each.check_unchanged(InputFile.find(each.name, options))
    filled = [each for each in read if each.table.num_rows] or read[:1]
    _check_same_columns([(each.name, each.kind) for each in filled])
    columns = find_token_columns(pa.concat_tables([each.table for each in filled]))
    plan, splits = packing.plan(columns)
    try:
        if (labels := labels_left(columns, plan)) is not None:
            labels.check_some_left("strategy", packing.strategy)
    except PackingError as error:
        raise PackingError(f"{inputs[0].name}, and what is packed with it: {error}") from None
    trained = 0
    schema = packing.rows(columns, plan, np.arange(0)).table.schema
    wide = [each.name for each in schema if is_token_type(each.type) and each.type.value_type.bit_width >= 32]
    split = [f"{name}.list.element" for name in wide]
    with pq.ParquetWriter(fresh, schema, use_byte_stream_split=split, **_PARQUET) as writer:
        for packs in blocks_of_packs(plan, _TOKENS_IN_A_ROW_GROUP):
            rows = packing.rows(columns, plan, packs)
            writer.write_table(rows.table, row_group_size=rows.table.num_rows)
            trained += rows.trained_tokens
    metrics = plan.metrics()
    return PackedFile(
        name=name,
        inputs=[each.name for each in inputs],
        rows=plan.num_packs,
        size=0,
        sha256="",
        columns=filled[0].kind,
        counts={
            "documents": metrics.num_documents,
            "cut_documents": metrics.num_cut_documents,
            "dropped_documents": metrics.num_dropped_documents,
            "empty_documents": metrics.num_empty_documents,
            "tokens": metrics.num_tokens,
            "packed_tokens": metrics.num_tokens - metrics.num_dropped_tokens,
            "dropped_tokens": metrics.num_dropped_tokens,
            "trained_tokens": trained,
            "slots": int(plan.pack_capacity.sum(dtype=np.int64)),
            "padding": metrics.num_padding_slots,
            "skipped_rows": sum(len(each.skipped) for each in read),
            "shortened_chats": sum(each.shortened_chats for each in read),
        },
        splits=splits,
        loss_masks=list(dict.fromkeys(mask for each in read for mask in each.loss_masks)),
        left_out=list(dict.fromkeys(column for each in read for column in each.left_out)),
        skipped=[row for each in read for row in each.skipped][:1],
    )


class _Documents(NamedTuple):
    """The documents of a file."""

    name: str
    table: pa.Table
    """The token columns, without attention_mask."""
    kind: Mapping[str, str]
    """Names and types of the columns; of texts, what they were made of."""
    loss_masks: Sequence[str]
    left_out: Sequence[str]
    skipped: Sequence[str] = ()
    shortened_chats: int = 0


def _documents(how: How, file: InputFile) -> _Documents:
    """Read a file, and tokenize its rows if they are texts. Errors name the file."""
    system, path = file_system(file.name, how.folder.options)
    with tempfile.TemporaryDirectory() as copies:
        try:
            if how.texts is None:
                return _read_tokens(how.packing, file, system, path)
            if not is_local(system):
                copy = f"{copies}/{Path(path).name}"
                system.get_file(path, copy)
                path = copy
            return _read_texts(how.texts, file, path)
        except (PackingError, OSError, pa.ArrowException) as error:
            text = str(error).replace(path, file.name)
            raise PackingError(text if file.name in text else f"{file.name}: {text}") from None


def _is_table(file: InputFile) -> bool:
    """Return whether a file may be a table of tokens, as its suffix says."""
    return Path(file.name).suffix.lower() in _TABLES


def _read_tokens(packing: Packing, file: InputFile, system: Any, path: str) -> _Documents:
    """Read the token columns of a parquet or Arrow file."""
    with system.open(path, "rb") as stream:
        if path.lower().endswith(".arrow"):
            table = pa.ipc.open_stream(stream).read_all()
            schema = table.schema
        else:
            parquet = pq.ParquetFile(path if is_local(system) else stream, pre_buffer=True)
            schema = parquet.schema_arrow.remove_metadata()
            kept = pa.schema([each for each in schema if is_list(each.type) or pa.types.is_null(each.type)])
            batches = parquet.iter_batches(_ROWS_AT_ONCE, columns=kept.names, use_threads=False)
            table = pa.Table.from_batches(batches, kept)
    check_has_tokens(schema.names)
    packing.check_names(schema.names)
    table = with_typed_empty_lists(table)
    types = {name: _list_type(table.schema.field(name).type) for name in find_token_columns(table)}
    return _Documents(
        name=file.name,
        table=table.select(list(types)).cast(pa.schema(types)),
        kind={name: str(kind) for name, kind in types.items()},
        loss_masks=[name for name in LOSS_MASKS if name in types],
        left_out=columns_left_out(schema, removed=[*types, ATTENTION_MASK]),
    )


def _list_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of lists with usual names and any length, so that files agree."""
    return (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(kind.value_type)


def _read_texts(texts: Texts, file: InputFile, path: str) -> _Documents:
    """Read texts, prompts, chats or rows of tokens, and tokenize them."""
    from hf_packing.text.corpus import Corpus
    from hf_packing.text.documents import Documents

    documents = Documents(path, skip_bad=texts.skip_bad)
    corpus = Corpus(
        documents,
        texts.load_tokenizer(),
        text_field=texts.text_field,
        end_documents=texts.end_documents,
        separator=texts.separator,
        train_on=texts.train_on,
    )
    blocks = map(corpus.tokens_of, corpus.blocks())
    tables = [pa.table({INPUT_IDS: ids, LABELS: labels}, schema=_TOKENS) for ids, labels in blocks]
    return _Documents(
        name=file.name,
        table=pa.concat_tables([_TOKENS.empty_table(), *tables]),
        kind={"rows": " and ".join([corpus.kind, *corpus.loss_masks])},
        loss_masks=list(corpus.loss_masks),
        left_out=list(corpus.left_out),
        skipped=[row.replace(path, file.name) for row in documents.skipped],
        shortened_chats=corpus.lacking,
    )


def _check_same_columns(files: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raise PackingError unless files have the same columns. Args: names of files with their columns."""
    for name, columns in files[1:]:
        if columns != files[0][1]:
            raise PackingError(
                f"files: expected the same columns in all files, but {name} has {_shown(columns)} and "
                f"{files[0][0]} has {_shown(files[0][1])}"
            )


def _shown(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items())
