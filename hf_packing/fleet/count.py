"""The first stage: count the documents of each length in one file. Files of texts are tokenized on the way.

If documents share prefixes, the file's trees are found, written, and counted instead of documents.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import ATTENTION_MASK, INPUT_IDS, LABELS, LOSS_MASKS, SEGMENT_COLUMNS, TREE_INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.fleet.inputs import (
    Identity,
    check_has_tokens,
    has_tokens,
    identity_of,
    local_copy,
    read_batches,
    read_table,
    schema_of,
)
from hf_packing.fleet.parts import Buffers, DamagedFileError, int64, read_parts, write_parts
from hf_packing.fleet.run import Run
from hf_packing.fleet.shared_between import sample_prefixes
from hf_packing.fleet.tokenizer import load_saved
from hf_packing.fleet.trees import find_trees_of_file, sizes_of, totals_of, write_trees
from hf_packing.planning.lengths import IntArray, LengthCounts, count_lengths
from hf_packing.rows.token_columns import (
    TokenColumn,
    TokenColumns,
    columns_left_out,
    find_token_columns,
    is_list,
    is_token_type,
    with_typed_empty_lists,
)
from hf_packing.strategies.base import CountingStrategy
from hf_packing.trees.rows import check_tree_columns_are_free

_TOKENS = pa.schema({INPUT_IDS: pa.list_(pa.int32()), LABELS: pa.list_(pa.int32())})


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Facts about a file whose documents were counted."""

    name: str
    """Path or URL of the file."""
    identity: Identity
    """What the file was when it was read."""
    documents: int
    columns: Mapping[str, str]
    """The types of the values of token columns by name, input_ids first, such as "int32", or "large int32" if the
    Arrow type is a large list; "" for a column without values."""
    left_out: Sequence[str]
    """Columns that are not packed."""
    loss_masks: Sequence[str] = ()
    """Masks that were applied to the labels of texts or rows without input_ids in a table."""
    kind: str = ""
    """The field that determined how rows became tokens; "" for a table of tokens."""
    tokens_size: int = 0
    """Bytes of the file of tokens of a file of texts; 0 for a table of tokens."""
    tokens_check: int = 0
    """Checksum of the file of tokens."""
    skipped: Sequence[str] = ()
    """Rows that were left out since they cannot be used, with the reasons."""
    alone: Mapping[str, Any] | None = None
    """Totals of a plan for this file alone; None if files are packed together."""
    segments: Mapping[str, Any] | None = None
    """Totals of the documents that do not depend on packs; None if documents share no prefixes, as below."""
    trees_check: int = 0
    """Checksum of the file of trees."""
    splits: Mapping[str, int] = field(default_factory=dict)
    """By the name of a column: how many shared prefixes ended early because values in this column differ."""
    prefixes: Sequence[int] = ()
    """Hashes of some prefixes of documents, as `sample_prefixes` returns them."""


def count(run: Run, number: int) -> None:
    """Count the documents of each length in a file, and write the counts.

    Args:
        run: the run.
        number: the number of the file.

    Raises:
        PackingError: the file cannot be packed, or changes while it is read.
    """
    name, options = run.input(number), run.store.options
    before = identity_of(name, options)
    read = partial(_count_tokens, run) if run.settings.texts is None else partial(_count_texts, run, number)
    lengths, facts = read(name, options)
    counted, counts = Counted(name=name, identity=before, documents=len(lengths), **facts), count_lengths(lengths)
    if run.settings.share_prefixes is not None:
        counted, counts = _count_trees(run, number, counted)
    elif not run.settings.exchange:
        counted = replace(counted, alone=_totals_alone(run, counts))
    if identity_of(name, options) != before:
        raise PackingError(f"{name}: expected a file that does not change while it is packed, but it has changed")
    facts_of_file = json.dumps(asdict(counted)).encode()
    parts: list[Buffers] = [[facts_of_file], [counts.length.astype("<i8")], [counts.documents.astype("<i8")]]
    write_parts(run.store, run.file("count", number), parts, len(parts))


def load_count(run: Run, number: int) -> tuple[Counted, LengthCounts]:
    """Return what `count` has written for a file.

    Raises:
        DamagedFileError: the counts are gone or damaged.
    """
    facts, length, documents = read_parts(run.store, run.file("count", number), 3)
    return Counted(**json.loads(facts)), LengthCounts(int64(length), int64(documents))


def check_unchanged(run: Run, counted: Counted) -> None:
    """Raise PackingError if a file has changed since its documents were counted."""
    now = identity_of(counted.name, run.store.options)
    if now != list(counted.identity):
        raise PackingError(
            f"{counted.name}: expected the file that was counted, with size and last change {counted.identity}, got "
            f"{now}; pack changed files into a new folder"
        )


def token_table(run: Run, number: int, counted: Counted, schema: pa.Schema) -> pa.Table:
    """Return the token columns of a file.

    Args:
        run: the run.
        number: the number of the file.
        counted: what `count` found.
        schema: names and types of the token columns of all files.

    Raises:
        PackingError: the file has changed.
        DamagedFileError: the tokens that `count` has written are gone or damaged.
    """
    check_unchanged(run, counted)
    if not counted.documents:
        return schema.empty_table()
    if counted.tokens_size:
        name = run.file("tokens", number)
        try:
            content = run.store.read(name)
        except FileNotFoundError:
            raise DamagedFileError(name) from None
        if (len(content), zlib.crc32(content)) != (counted.tokens_size, counted.tokens_check):
            raise DamagedFileError(name)
        return pa.ipc.open_stream(pa.py_buffer(content)).read_all()
    table = read_table(counted.name, run.store.options, [*schema.names, ATTENTION_MASK])
    for name in [name for name, kind in counted.columns.items() if not kind]:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table.column(name).cast(schema.field(name).type))
    return with_typed_empty_lists(table)


def token_columns(run: Run, number: int, counted: Counted, schema: pa.Schema) -> TokenColumns:
    """Return the token columns of a file, as `token_table` does, after a check of their values."""
    table = token_table(run, number, counted, schema)
    with _naming(counted.name):
        columns = find_token_columns(table)
    return {name: columns[name] for name in schema.names}


def schema_of_columns(columns: Mapping[str, str]) -> pa.Schema:
    """Return names and types of token columns whose types are given as in `Counted`."""
    return pa.schema({name: arrow_type(kind or "int32") for name, kind in columns.items()})


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a token column whose values have a type such as "int32" or "large int32"."""
    value = pa.type_for_alias(kind.split()[-1])
    return pa.large_list(value) if kind.startswith("large ") else pa.list_(value)


def _count_trees(run: Run, number: int, counted: Counted) -> tuple[Counted, LengthCounts]:
    """Find and write the trees of a file, and return what is known of it, and the number of trees of each size."""
    fewest = run.settings.share_prefixes
    assert fewest is not None
    columns = token_columns(run, number, counted, schema_of_columns(counted.columns))
    with _naming(counted.name):
        plan, splits = find_trees_of_file(columns, run.settings)
    segments, packs = totals_of(plan)
    counted = replace(
        counted,
        alone=None if run.settings.exchange else segments | packs,
        segments=segments,
        trees_check=write_trees(run, number, plan),
        splits=splits,
        prefixes=sample_prefixes(columns, plan, fewest),
    )
    return counted, count_lengths(sizes_of(plan))


def _count_tokens(run: Run, name: str, options: Mapping[str, Any]) -> tuple[IntArray, dict[str, Any]]:
    """Return the lengths of a table's documents, and what is known of the table."""
    if not has_tokens(name):
        raise PackingError(
            f"files: expected parquet or Arrow files with input_ids, got {name!r}; pass a tokenizer for texts"
        )
    schema = schema_of(name, options)
    if packed := [each for each in (*SEGMENT_COLUMNS, TREE_INPUT_IDS) if each in schema.names]:
        raise PackingError(f"{name}: expected documents, but the column {packed[0]!r} says that rows are packed")
    check_has_tokens(name, schema)
    if run.settings.share_prefixes is not None:
        with _naming(name):
            check_tree_columns_are_free(schema.names)
    if not _may_have_tokens(kind := schema.field(INPUT_IDS).type, 0):
        raise PackingError(f"{name}: column 'input_ids': expected lists of integers, got {kind}")
    found = [_lengths_of(name, options, table) for table in read_batches(name, options, INPUT_IDS)]
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *found])
    columns = {each.name: _type_of(each.type) for each in schema if _may_have_tokens(each.type, len(lengths))}
    columns = {INPUT_IDS: columns[INPUT_IDS]} | columns
    columns.pop(ATTENTION_MASK, None)
    left_out = columns_left_out(schema, removed=list(columns))
    return lengths, {"columns": columns, "left_out": left_out}


def _lengths_of(name: str, options: Mapping[str, Any], table: pa.Table) -> IntArray:
    try:
        return TokenColumn(INPUT_IDS, with_typed_empty_lists(table).column(INPUT_IDS)).length
    except PackingError:
        whole = with_typed_empty_lists(read_table(name, options, [INPUT_IDS]))
        try:  # the error names the row of the file
            TokenColumn(INPUT_IDS, whole.column(INPUT_IDS))
        except PackingError as error:
            raise PackingError(f"{name}: {error}") from None
        raise


def _may_have_tokens(kind: pa.DataType, rows: int) -> bool:
    untyped = pa.types.is_null(kind.value_type) if is_list(kind) else pa.types.is_null(kind) and not rows
    return is_token_type(kind) or untyped


def _type_of(kind: pa.DataType) -> str:
    """Return the type of a token column as text, such as "int32" or "large int32"; "" for a column without values."""
    if not is_token_type(kind):
        return ""
    return f"{'large ' if pa.types.is_large_list(kind) else ''}{kind.value_type}"


def _count_texts(run: Run, number: int, name: str, options: Mapping[str, Any]) -> tuple[IntArray, dict[str, Any]]:
    """Tokenize a file, write the tokens, and return the lengths of the documents and what is known of the file."""
    from hf_packing.text.read import Documents

    texts = run.settings.texts
    assert texts is not None
    if not texts.tokenizer:
        raise PackingError(f"tokenizer: expected a tokenizer for {name!r}; files of tokens are parquet or Arrow files")
    tokenizer = load_saved(run.store, texts.tokenizer)
    tokenizer = replace(
        tokenizer,
        text_field=texts.text_field,
        separator=texts.separator,
        train_on=texts.train_on,
        end=tokenizer.end if texts.end_documents else None,
    )
    with local_copy(name, options) as path, run.store.create(run.file("tokens", number)) as fresh:
        documents = Documents(str(path), skip_bad=texts.skip_bad)
        lengths = pc.list_value_length(documents.tokens(tokenizer, fresh).data.column(INPUT_IDS)).to_numpy()
        size, check = Path(fresh).stat().st_size, _checksum_of(fresh)
    facts = {
        "columns": {each.name: _type_of(each.type) for each in _TOKENS},
        "left_out": [],
        "tokens_size": size,
        "tokens_check": check,
        "skipped": list(documents.skipped),
    }
    return lengths.astype(np.int64), facts


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Context manager: errors begin with the name of a file."""
    try:
        yield
    except PackingError as error:
        raise PackingError(f"{file}: {error}") from None


def _checksum_of(file: Path) -> int:
    check = 0
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            check = zlib.crc32(block, check)
    return check


def _totals_alone(run: Run, counts: LengthCounts) -> dict[str, Any]:
    strategy = run.settings.build_strategy()
    assert isinstance(strategy, CountingStrategy)
    return strategy.plan_counts(counts).totals()


def masks_of(counted: Counted) -> list[str]:
    """Return the names of the loss masks of a file."""
    return [*counted.loss_masks, *(name for name in LOSS_MASKS if name in counted.columns)]
