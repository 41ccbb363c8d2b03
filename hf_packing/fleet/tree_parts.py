"""Send the trees of one file to output files, as rows of one tree each, and join them into the rows of output files.

A part of the result of `deal`, one for each output file, holds one after the other:

    int64 [2]        the plan's checksum, and the number of trees
    int32 [trees]    index of the pack in the output file, ascending
    int32 [trees]    place in the pack
    Arrow stream     rows of one tree each, in this order; nothing if there are no trees
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from hf_packing.columns import BUCKET, TREE_INPUT_IDS
from hf_packing.fleet.parts import Buffers, DamagedFileError, read_part
from hf_packing.fleet.plan import Plan
from hf_packing.fleet.run import Run
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import DealtShard
from hf_packing.rows.token_columns import TokenColumn, TokenColumns, blocks_of_rows, find_token_columns
from hf_packing.trees.rows import join_rows, tree_rows


class TreePart(NamedTuple):
    """The trees of one file that go to one output file."""

    pack: IntArray
    """int32 [trees]: index of the tree's pack in the output file, ascending."""
    place: IntArray
    """int32 [trees]: position of the tree in the pack."""
    rows: pa.Table | None
    """Rows of one tree each; None if there are no trees."""


def tree_parts(plan: Plan, columns: TokenColumns, trees: PackingPlan, dealt: DealtShard) -> Iterator[Buffers]:
    """Yield the trees of a file, one part for each output file.

    Args:
        plan: the run's plan.
        columns: the token columns of the file.
        trees: the plan of the file, with one tree in each pack.
        dealt: the packs that the run's plan has for these trees, as if they were documents.
    """
    order, schema = np.argsort(dealt.pack, kind="stable"), _schema(plan)
    edges = np.array([plan.first_pack(shard) for shard in range(plan.shards + 1)])
    borders = np.searchsorted(dealt.pack[order], edges).tolist()
    for shard in range(plan.shards):
        part = order[borders[shard] : borders[shard + 1]]
        head = np.array([plan.checksum, len(part)], dtype="<i8")
        if not len(part):
            yield [head]
            continue
        places = (dealt.pack[part] - edges[shard], dealt.place[part])
        rows = tree_rows(columns, trees, dealt.document[part]).table.cast(schema)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            stream.write_table(rows)
        yield [head, *(each.astype("<i4") for each in places), sink.getvalue()]


def load_tree_part(run: Run, number: int, plan: Plan, shard: int) -> TreePart:
    """Return the trees of a file that go to an output file.

    Args:
        run: the run.
        number: the number of the file.
        plan: the run's plan.
        shard: the number of the output file.

    Raises:
        DamagedFileError: the result of `deal` is gone, damaged, or of another plan.
    """
    name = run.file("deal", number)
    data = read_part(run.store, name, shard)
    check, trees = np.frombuffer(data, dtype="<i8", count=2).tolist()
    if check != plan.checksum:
        raise DamagedFileError(name)
    pack, place = np.frombuffer(data, dtype="<i4", offset=16, count=2 * trees).reshape(2, -1)
    rows = pa.ipc.open_stream(pa.py_buffer(data)[16 + 8 * trees :]).read_all() if trees else None
    return TreePart(pack, place, rows)


def joined_trees(plan: Plan, parts: Sequence[TreePart], shard: int, bucket: bool, tokens: int) -> Iterator[pa.Table]:
    """Yield the rows of an output file, in tables of about so many tokens.

    Args:
        plan: the run's plan.
        parts: the trees of the output file, one part for each file to pack.
        shard: the number of the output file.
        bucket: whether rows get a column `bucket` with the capacity of their pack.
        tokens: the most tokens in a table of several rows.
    """
    assert plan.table is not None
    first, end = plan.first_pack(shard), plan.first_pack(shard + 1)
    pack, place = (np.concatenate([getattr(part, name) for part in parts]) for name in TreePart._fields[:2])
    rows = pa.concat_tables([part.rows for part in parts if part.rows is not None])
    columns = {name: TokenColumn(name, rows.column(name)) for name in rows.column_names}
    order = np.lexsort((place, pack))
    offsets = np.searchsorted(pack[order], np.arange(end - first + 1))
    capacity = plan.table.pack_capacity(first, end)
    row_tokens = np.add.reduceat(columns[TREE_INPUT_IDS].length[order], offsets[:-1])
    for begin, stop in blocks_of_rows(row_tokens, tokens):
        some = order[offsets[begin] : offsets[stop]]
        table = join_rows(columns, some, np.diff(offsets[begin : stop + 1]))
        yield table.append_column(BUCKET, pa.array(capacity[begin:stop], pa.int32())) if bucket else table


def _schema(plan: Plan) -> pa.Schema:
    """Return the names and types of the columns of rows of trees."""
    none = np.zeros(0, dtype=np.int64)
    nothing = PackingPlan(
        document_length=none,
        segment_document=none,
        segment_start=none,
        segment_length=none,
        pack_offsets=np.zeros(1, dtype=np.int64),
        pack_capacity=none,
        segment_shared=none,
    )
    return tree_rows(find_token_columns(plan.schema.empty_table()), nothing, none).table.schema
