"""Open a stream of documents, read about as many tokens as wanted, and know the place in the stream.

A shard of a stream is a file or a row group of a parquet file. A share is a list of parts of shards. Shares that divide
a shard take its documents in turns, as often as their parts are large. So shards of any number and any sizes can be
divided into any number of shares, and nobody has to know how many documents a shard has.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from fsspec.core import url_to_fs

from hf_packing.columns import (
    ATTENTION_MASK,
    INPUT_IDS,
    LABEL_COLUMNS,
    LABELS,
    LOSS_WEIGHT,
    check_columns,
    refuse_columns,
)
from hf_packing.errors import PackingError
from hf_packing.files import size_and_version
from hf_packing.planning.lengths import BoolArray, IntArray
from hf_packing.rows.packing_trace import refuse_lost_borders
from hf_packing.rows.token_columns import (
    TokenColumn,
    as_array,
    columns_left_out,
    find_token_columns,
    is_token_type,
    token_names,
)
from hf_packing.upstream import datasets as upstream

_EXAMPLES_AT_ONCE = 64
"""Examples that come one by one are made into tables of so many, so that a resumed stream reads few of them twice."""
_FINENESS = 64
"""A shard is divided into this many pieces for each share, so that a piece is small."""


class Part(NamedTuple):
    """The documents of a shard that one of several shares takes in turns."""

    shard: int
    number: int
    """Which of the shares it is."""
    pieces: tuple[int, ...]
    """The pieces of the shard that each of these shares has."""


Share = tuple[Part, ...]


def equal_shares(sizes: Sequence[float], shares: int, pieces: Sequence[int] | None = None) -> list[Share]:
    """Divide shards into shares of equal size.

    The shards are laid end to end and cut into shares, so that neighbouring documents are in the same share, except
    within shards that are divided. Every document is in exactly one share.

    Args:
        sizes: the size of every shard, such as its bytes; any unit.
        shares: the number of shares.
        pieces: the number of pieces of every shard, which are not divided, such as its documents; None for small ones.

    Example:
        >>> [[tuple(part) for part in share] for share in equal_shares([2, 1], 2)]
        [[(0, 0, (3, 1))], [(0, 1, (3, 1)), (1, 0, (1,))]]
    """
    borders = np.concatenate([[0.0], np.cumsum(sizes)])
    ends = np.concatenate([[0], np.cumsum(pieces or [_FINENESS * shares] * len(sizes))])
    cuts = np.interp(borders[-1] * np.arange(shares + 1) / shares, borders, ends).round().astype(np.int64)
    divided: list[list[Part]] = [[] for _ in range(shares)]
    for shard in range(len(sizes)):
        in_share = np.diff(cuts.clip(ends[shard], ends[shard + 1]))
        having = in_share.nonzero()[0]
        weights = tuple((in_share[having] // np.gcd.reduce(in_share)).tolist())
        for number, share in enumerate(having.tolist()):
            divided[share].append(Part(shard, number, weights))
    return [tuple(share) for share in divided]


@lru_cache(maxsize=64)
def turns_of(weights: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """Return who takes each of sum(weights) documents, in turns that are spread evenly.

    The document that is number k of n documents of one share, from 0, comes at (k + 1/2) / n.

    Example:
        >>> turns_of((3, 1)).tolist()
        [0, 0, 1, 0]
    """
    at = np.concatenate([(np.arange(weight) + 0.5) / weight for weight in weights])
    return np.repeat(np.arange(len(weights)), weights)[np.argsort(at, kind="stable")]


_SMALL = 1 << 26
"""The bytes of a stream below which its documents are counted: those of small files are mostly not of documents."""

_COUNTED = 4096
"""A small stream is read to count its documents, up to so many: fewer than the first rows need."""


def shares_of(examples: upstream.Examples, shares: int) -> list[Share]:
    """Divide the shards of a stream into equal shares: of documents if they are few, or else of bytes."""
    documents = documents_of_shards(examples)
    return equal_shares(documents or sizes_of_shards(examples), shares, documents)


_known_documents: WeakKeyDictionary[upstream.Examples, list[int] | None] = WeakKeyDictionary()


def documents_of_shards(examples: upstream.Examples) -> list[int] | None:
    """Return the number of documents in each shard; None if they are not few."""
    if examples not in _known_documents:
        is_small = sum(sizes_of_shards(examples)) < _SMALL
        _known_documents[examples] = _count_documents(examples) if is_small else None
    return _known_documents[examples]


def _count_documents(examples: upstream.Examples) -> list[int] | None:
    """Read the documents of each shard to count them; return None if there are more than `_COUNTED`."""
    counts: list[int] = []
    for number in range(shards := upstream.num_shards(examples)):
        shard = upstream.sharded(examples, shards, number)
        shard._init_state_dict()
        counts.append(sum(1 for _ in islice(shard, _COUNTED + 1)))
        if sum(counts) > _COUNTED:
            return None
    return counts


def documents_of_shares(documents: Sequence[int], shares: Sequence[Share]) -> list[int]:
    """Return the number of documents in each share, given those of each shard, of which the shares are.

    Example:
        >>> documents_of_shares([6, 3], equal_shares([6, 3], 2, [6, 3]))
        [4, 5]
    """
    return [sum(documents[shard] * of[own] // sum(of) for shard, own, of in share) for share in shares]


def sizes_of_shards(examples: upstream.Examples) -> list[float]:
    """Return the bytes of every shard, the row groups of a file counting alike; 1 each without files."""
    files, shards = upstream.shard_files(examples), upstream.num_shards(examples)
    if files is None or len(files) != shards:
        return [1.0] * shards
    shards_of = Counter(file for file, _ in files)
    size = {file: max(_name_and_version(file)[1] or 0, 1) for file in shards_of}
    return [size[file] / shards_of[file] for file, _ in files]


def fingerprint_of_files(examples: upstream.Examples) -> str:
    """Return a text that changes with the names, sizes or tags of a stream's files, or the number of its shards.

    The tag is the one that an object store gives to each version of a file. Folders and times do not count, so that
    copies of the files will do.
    """
    if inner := upstream.inner(examples):
        return ",".join(map(fingerprint_of_files, inner))
    files = upstream.shard_files(examples)
    if files is None:
        return f"{examples.num_shards} shards"
    versions = {file: _name_and_version(file) for file, _ in files}
    facts = repr([(versions[file], groups) for file, groups in files])
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def _name_and_version(file: str) -> tuple[str, int | None, str]:
    """Return the name of a file without its folder, its size in bytes, and the tag of its version."""
    system, path = url_to_fs(file)
    return path.rsplit("/", 1)[-1], *size_and_version(system, path, times=False)


class Source(NamedTuple):
    """A stream of documents."""

    examples: upstream.Examples
    """The object that reads the documents."""
    schema: pa.Schema
    """Names and types of the token columns, without attention_mask."""
    names: list[str]
    """Names of all columns."""
    left_out: list[str]
    """Names and types of the columns that are not token columns."""


def open_source(name: str, stream: datasets.IterableDataset, unread: Sequence[str] = ()) -> Source:
    """Return the documents of a stream.

    Args:
        name: the name of the stream in error messages.
        stream: the stream.
        unread: names of columns that are not read.

    Raises:
        PackingError: the stream yields no document, has no input_ids, is packed already, or has a shuffle buffer.
    """
    features = upstream.with_known_features(name, stream).features
    if not features:
        raise PackingError(f"{name}: expected a stream of documents, got a stream that yields no document")
    if set(unread) & set(features):
        stream = stream.select_columns([each for each in features if each not in unread])
    examples = upstream.examples_of(stream)
    if upstream.has_shuffle_buffer(examples):
        raise PackingError(
            f"{name}: expected a stream without a shuffle buffer, since a saved state does not hold the documents in "
            "the buffer, so a resumed run would lose them. Leave shuffle(buffer_size=...) out: packing puts the rows "
            "of every window in random order, and every epoch after the first reads the files in another order"
        )
    schema = features.arrow_schema.remove_metadata()
    refuse_lost_borders(stream, schema.names)
    find_token_columns(schema.empty_table())  # refuses what cannot be packed
    names = [each for each in token_names(schema) if each not in unread]
    read = pa.schema((each, _type_to_read(each, schema.field(each).type)) for each in names)
    return Source(examples, read, schema.names, columns_left_out(schema))


def _type_to_read(name: str, kind: pa.DataType) -> pa.DataType:
    """Return the type of a column: numbers, or lists of any length, with 32 bits for tokens and labels."""
    if name == LOSS_WEIGHT:
        return kind
    return pa.list_(pa.int32() if name in (INPUT_IDS, LABELS) else kind.value_type)


Place = tuple[int, Any, int, int]
"""A place between two documents of a stream, as plain values: the number of the part of the stream's share; the state
of the part's shard at this place, or shortly before it (None for the start of the shard); and the numbers of documents
of the shard before that state, and before this place."""

START: Place = (0, None, 0, 0)
"""The start of a stream."""


class DocumentReader:
    """Reads the token columns of a stream's documents, and knows the place at which reading has to go on.

    Args:
        examples: the object that reads the stream.
        schema: names and types of the columns to read; lists of numbers.
        place: the place to start from.
        share: the parts of the stream's shards to read, in order; None to read the stream as it is.
    """

    def __init__(
        self, examples: upstream.Examples, schema: pa.Schema, place: Place = START, share: Share | None = None
    ) -> None:
        self._examples, self._schema, self._share = examples, schema, share
        self._parts = 1 if share is None else len(share)
        self._tables, self._rest, self._numbers = self._read(*place), schema.empty_table(), np.zeros(0, np.int64)
        self.place = place
        """The place after the documents that were taken."""

    @property
    def ended(self) -> bool:
        """True if all documents have been read."""
        return self.place[0] == self._parts

    def _read(
        self, first_part: int, state: Any, at_state: int, first: int
    ) -> Iterator[tuple[Place, IntArray, pa.Table]]:
        """Yield tables of documents, from a place on: each with its place, and the documents' numbers in the shard."""
        for part in range(first_part, self._parts):
            shard, own, turns = self._examples, 0, np.zeros(1, np.intp)
            if self._share is not None:
                number, own, pieces = self._share[part]
                shard = upstream.sharded(self._examples, upstream.num_shards(self._examples), number)
                turns = turns_of(pieces)
            shard._init_state_dict()
            if state is not None and upstream.has_exact_states():
                shard.load_state_dict(state)
            else:
                at_state = 0
            before = shard.state_dict()
            for table in _tables_of(shard, self._schema):
                numbers = np.arange(at_state, at_state + table.num_rows)
                wanted = (numbers >= first) & (turns[numbers % len(turns)] == own)
                place = part, before, at_state, max(first, at_state)
                yield place, numbers[wanted], _documents(table, wanted, self._schema)
                before, at_state = shard.state_dict(), at_state + table.num_rows
            state, at_state, first = None, 0, 0

    def read(self, tokens: int, documents: int, most_tokens: int) -> pa.Table:
        """Return the next documents: until they have so many tokens and are so many; all that are left if they are few.

        Args:
            tokens: the tokens to read at least.
            documents: the documents to read at least, unless they have `most_tokens` tokens.
            most_tokens: reading ends when the documents have so many tokens.

        Raises:
            PackingError: a column is missing, or an attention_mask has padding.
        """
        read = [self._schema.empty_table()]
        while (tokens > 0 or documents > 0) and most_tokens > 0 and (table := self.at_hand()).num_rows:
            total = np.cumsum(lengths_of(table), dtype=np.int64)
            enough = max(int(np.searchsorted(total, tokens)) + 1 if tokens > 0 else 0, documents)
            wanted = min(enough, int(np.searchsorted(total, most_tokens)) + 1, len(total))
            tokens, most_tokens = tokens - int(total[wanted - 1]), most_tokens - int(total[wanted - 1])
            documents -= wanted
            read.append(self.take(wanted))
        return pa.concat_tables(read)

    def at_hand(self) -> pa.Table:
        """Return the next documents, as many as were read together; none if the stream has ended."""
        while not self._rest.num_rows and not self.ended:
            end = (self._parts, None, 0, 0), self._numbers, self._rest
            self.place, self._numbers, self._rest = next(self._tables, end)
        return self._rest

    def take(self, documents: int) -> pa.Table:
        """Return so many of the documents at hand, and go on after them."""
        taken, self._rest = self._rest.slice(0, documents), self._rest.slice(documents)
        if documents:
            self.place = *self.place[:3], int(self._numbers[documents - 1]) + 1
        self._numbers = self._numbers[documents:]
        return taken


def lengths_of(documents: pa.Table) -> IntArray:
    """Return the number of tokens in each document, int64 [documents]."""
    return TokenColumn(INPUT_IDS, documents.column(INPUT_IDS)).length


def _documents(table: pa.Table, wanted: BoolArray, schema: pa.Schema) -> pa.Table:
    """Return the wanted rows of a table, with the columns and types of a schema. An attention_mask is only checked."""
    names = table.column_names
    check_columns(schema.names, names, "in all documents of the stream")
    refuse_columns(
        [name for name in LABEL_COLUMNS if name not in schema.names],
        names,
        f"the columns of the first documents, {', '.join(schema.names)}, got a document that also has this one; give "
        "all documents the same columns, or pass features=, with all columns, to map or from_generator",
    )
    mask = [name for name in names if name == ATTENTION_MASK and is_token_type(table.schema.field(name).type)]
    table = table.select([*schema.names, *mask])
    if not wanted.all():
        table = table.filter(pa.array(wanted))
    if mask:
        find_token_columns(table.select([INPUT_IDS, ATTENTION_MASK]))  # refuses padding
    arrays = []
    for field in schema:
        try:
            arrays.append(table.column(field.name).cast(field.type))
        except pa.ArrowException as error:
            raise PackingError(f"column {field.name!r}: expected {field.type}, got the error: {error}") from error
    return pa.table(arrays, schema=schema)


def _tables_of(examples: upstream.Examples, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the documents of a stream as tables; of a few documents if they come one by one, as dicts."""
    if examples.iter_arrow is not None:
        yield from (table for _, table in examples.iter_arrow())
        return
    rows = (row for _, row in examples)
    names = dict.fromkeys((*schema.names, *LABEL_COLUMNS, ATTENTION_MASK))
    while block := list(islice(rows, _EXAMPLES_AT_ONCE)):
        found = set().union(*block)
        yield pa.table(
            {name: as_array(name, [row.get(name) for row in block], names) for name in names if name in found}
        )
