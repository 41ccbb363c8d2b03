"""Find the files to pack, tell whether they have changed, and read tables of tokens from them."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.fleet.store import file_system

Identity = list[Any]
"""What differs between two versions of a file: the size, and the time of the last change or the etag."""

_PARQUET, _ARROW = ".parquet", ".arrow"
_ROWS_AT_ONCE, _ROWS_OF_A_CHUNK = 10_000, 100_000
"""Rows that are read together to be counted, and to stay in memory. pyarrow reads lists of rows in batches, without
threads, in half the time of a whole file."""
_CHANGES = ("ETag", "etag", "blob_id", "sha256", "md5Hash", "content_md5", "LastModified", "updated", "mtime")
"""Values of fsspec's `info` that change with a file's content; the first that a file system has counts."""


def find_inputs(files: str | Path | Sequence[str | Path], options: Mapping[str, Any]) -> list[str]:
    """Return absolute paths and URLs of the files to pack.

    Args:
        files: a file, a folder, or a pattern such as s3://bucket/*.parquet, whose files are sorted by name; or a list
            of files, in their order.
        options: arguments for file systems that are not local.

    Raises:
        PackingError: there are no files, or a file is given twice.
    """
    if isinstance(files, (str, Path)):
        found = _expand(str(files), options)
    elif isinstance(files, Sequence) and all(isinstance(file, (str, Path)) for file in files):
        found = [_absolute(str(file), options) for file in files]
    else:
        raise PackingError(f"files: expected a path, a URL, a pattern, or a list of paths and URLs, got {files!r}")
    if not found:
        raise PackingError(f"files: expected files to pack, but there are none in {files!r}")
    if len(set(found)) < len(found):
        twice = next(name for name, times in Counter(found).items() if times > 1)
        raise PackingError(f"files: expected each file once, got {twice!r} twice")
    return found


def identity_of(name: str, options: Mapping[str, Any]) -> Identity:
    """Return the size of a file, and the time of its last change or its etag.

    Raises:
        PackingError: there is no such file.
    """
    system, path = file_system(name, options)
    try:
        if isinstance(system, LocalFileSystem):
            stat = os.stat(path)
            return [stat.st_size, str(stat.st_mtime_ns)]
        system.invalidate_cache(path)  # of the time when files were listed
        info = system.info(path)
    except FileNotFoundError:
        raise PackingError(f"files: expected a file that exists, got {name!r}") from None
    return [info["size"], next((str(info[each]) for each in _CHANGES if info.get(each)), "")]


def has_tokens(name: str) -> bool:
    """Return whether a file may be a table of tokens, as its suffix says."""
    return Path(name).suffix.lower() in (_PARQUET, _ARROW)


def read_table(name: str, options: Mapping[str, Any], columns: Sequence[str] | None = None) -> pa.Table:
    """Return a parquet or Arrow file as a table.

    Args:
        name: path or URL of the file.
        options: arguments for file systems that are not local.
        columns: names of the columns to read; None for all columns. Columns that the file lacks are left out.

    Raises:
        PackingError: the file cannot be read.
    """
    with _opened(name, options) as source:
        if isinstance(source, pa.ipc.RecordBatchStreamReader):
            table = source.read_all()
            return table if columns is None else table.select([each for each in columns if each in table.column_names])
        schema = source.schema_arrow
        if columns is not None:
            schema = pa.schema([schema.field(each) for each in schema.names if each in columns])
        batches = source.iter_batches(_ROWS_OF_A_CHUNK, columns=schema.names, use_threads=False)
        return pa.Table.from_batches(batches, schema=schema.remove_metadata())


def read_batches(name: str, options: Mapping[str, Any], column: str) -> Iterator[pa.Table]:
    """Yield one column of a parquet or Arrow file, in tables of some rows.

    Raises:
        PackingError: the file cannot be read.
    """
    with _opened(name, options) as source:
        if isinstance(source, pa.ipc.RecordBatchStreamReader):
            for batch in source:
                yield pa.Table.from_batches([batch]).select([column])
        else:
            for batch in source.iter_batches(_ROWS_AT_ONCE, columns=[column], use_threads=False):
                yield pa.Table.from_batches([batch])


def schema_of(name: str, options: Mapping[str, Any]) -> pa.Schema:
    """Return the schema of a parquet or Arrow file.

    Raises:
        PackingError: the file cannot be read.
    """
    with _opened(name, options) as source:
        return source.schema if isinstance(source, pa.ipc.RecordBatchStreamReader) else source.schema_arrow


@contextmanager
def local_copy(name: str, options: Mapping[str, Any]) -> Iterator[Path]:
    """Context manager: yield the path of a file, or of a temporary copy if the file is not on this machine."""
    system, path = file_system(name, options)
    if isinstance(system, LocalFileSystem):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, Path(path).name)
        with system.open(path, "rb") as source, open(copy, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        yield copy


@contextmanager
def _opened(name: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Context manager: yield a RecordBatchStreamReader for an Arrow file, or a ParquetFile for a parquet file.

    Raises:
        PackingError: the file cannot be read, for a reason that another try does not change.
    """
    system, path = file_system(name, options)
    is_local = isinstance(system, LocalFileSystem)
    try:
        if Path(name).suffix.lower() == _ARROW:
            with pa.memory_map(path) if is_local else system.open(path, "rb") as source:
                yield pa.ipc.open_stream(source)
        elif is_local:
            with pq.ParquetFile(path) as parquet:
                yield parquet
        else:
            with system.open(path, "rb") as file, pq.ParquetFile(file, pre_buffer=True) as parquet:
                yield parquet
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and not is_local:  # an error of the network
            raise
        raise PackingError(f"{name}: expected a file with a table, got the error: {error}") from None


def _expand(files: str, options: Mapping[str, Any]) -> list[str]:
    system, path = file_system(files, options)
    if any(each in path for each in "*?["):
        return sorted(_named(system, each) for each in system.glob(path))
    if system.isdir(path):
        if not isinstance(system, LocalFileSystem):
            return sorted(_named(system, each) for each in system.find(path))
        from hf_packing.text.read import find_files  # imports datasets, which the driver needs for nothing else

        saved = sorted(Path(path).glob("data-*-of-*.arrow"))
        return [str(each) for each in saved or find_files(path)]
    return [_absolute(files, options)]


def _absolute(name: str, options: Mapping[str, Any]) -> str:
    system, path = file_system(name, options)
    return _named(system, path)


def _named(system: Any, path: str) -> str:
    return str(path) if isinstance(system, LocalFileSystem) else str(system.unstrip_protocol(path))


def check_has_tokens(name: str, schema: pa.Schema) -> None:
    """Raise PackingError if a table has no column input_ids."""
    if INPUT_IDS not in schema.names:
        raise PackingError(
            f"{name}: expected a column input_ids, or a tokenizer for documents without it, got the columns "
            f"{', '.join(schema.names) or 'none'}"
        )
