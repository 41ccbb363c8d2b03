"""The last stage: join the segments of one output file from all files, and write its packed rows.

The rows are those that `pack` makes of all files: a pack has its segments in the order of the plan, and packs follow
each other in the order of the plan. If each file is packed by itself, the rows are those that `pack` makes of the file.
If documents share prefixes, trees are joined instead of segments.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hf_packing.columns import INPUT_IDS, TRAINED
from hf_packing.fleet.deal import DealtPart, columns_of_file, deal, load_deal, trees_of_file
from hf_packing.fleet.in_order import in_order
from hf_packing.fleet.parts import DamagedFileError
from hf_packing.fleet.plan import Plan, load_plan
from hf_packing.fleet.run import Run
from hf_packing.fleet.tree_parts import joined_trees, load_tree_part
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import blocks_of_packs, list_array, pack_rows
from hf_packing.rows.token_columns import TokenColumn, TokenColumns, is_token_type
from hf_packing.strategies.base import plan_packing
from hf_packing.trees.rows import tree_rows

_TOKENS_IN_A_ROW_GROUP = 1 << 20
_PARQUET = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": False,
    "write_statistics": False,
    "data_page_size": 1 << 23,
}
"""Options for the writer: of a list of tokens, neither the least nor the greatest token is ever asked for."""


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """An output file."""

    name: str
    rows: int
    tokens: int
    """Number of tokens in the rows."""
    trained_tokens: int
    """Number of labels that are not -100; in rows of trees, of tokens that documents train on."""
    size: int
    """Bytes of the file."""
    sha256: str
    plan: int
    """The checksum of the plan whose packs the file has."""


class _RowGroup(NamedTuple):
    """Rows that are written together."""

    table: pa.Table
    """The first column has the tokens."""
    trained_tokens: int


_Part = TypeVar("_Part")


def gather(run: Run, number: int) -> None:
    """Write the packed rows of an output file, and what is known of it.

    If the result of `deal` for a file is gone or damaged, it is made again.

    Args:
        run: the run.
        number: the number of the output file.

    Raises:
        PackingError: a file has changed.
        DamagedFileError: the plan is gone or damaged.
    """
    plan = load_plan(run)
    _write(run, plan, number, (_rows if run.settings.share_prefixes is None else _tree_rows)(run, plan, number))


def load_packed_file(run: Run, number: int, plan: Plan) -> PackedFile:
    """Return what is known of an output file.

    Args:
        run: the run.
        number: the number of the output file.
        plan: the run's plan.

    Raises:
        DamagedFileError: the output file, or what is known of it, is gone, damaged or of another plan.
    """
    name = run.file("packed", number)
    try:
        found = PackedFile(**json.loads(run.store.read(name)))
    except (FileNotFoundError, ValueError, TypeError):
        raise DamagedFileError(name) from None
    if found.plan != plan.checksum or run.store.size(found.name) != found.size:
        raise DamagedFileError(found.name)
    return found


def _rows(run: Run, plan: Plan, number: int) -> Iterator[_RowGroup]:
    """Yield the packed rows of an output file, in tables; an empty table if there are no rows."""
    if run.settings.exchange:
        parts = _parts(run, plan, number, load_deal)
        columns, packs = _joined(plan, parts, plan.first_pack(number), plan.first_pack(number + 1))
    else:
        columns, _ = columns_of_file(run, number, plan)
        packs = plan_packing(columns[INPUT_IDS].length, run.settings.build_strategy())
    options = {"position_ids": run.settings.position_ids, "bucket": run.settings.has_buckets}
    for block in _blocks(packs):
        rows = pack_rows(columns, packs, block, **options)
        yield _RowGroup(rows.table, rows.trained_tokens)


def _tree_rows(run: Run, plan: Plan, number: int) -> Iterator[_RowGroup]:
    """Yield the rows of trees of an output file, in tables; an empty table if there are no rows."""
    bucket = run.settings.has_buckets
    if run.settings.exchange:
        parts = _parts(run, plan, number, load_tree_part)
        for table in joined_trees(plan, parts, number, bucket, _TOKENS_IN_A_ROW_GROUP):
            trained = sum(int(chunk.flatten().to_numpy()[2::3].sum()) for chunk in table.column(TRAINED).chunks)
            yield _RowGroup(table, trained)
        return
    columns, packs, _ = trees_of_file(run, number, plan)
    for block in _blocks(packs):
        rows = tree_rows(columns, packs, block, bucket)
        yield _RowGroup(rows.table, rows.trained_tokens)


def _blocks(packs: PackingPlan) -> Iterable[IntArray]:
    """Return the numbers of packs of about _TOKENS_IN_A_ROW_GROUP tokens; an empty block if there are no packs."""
    return blocks_of_packs(packs, _TOKENS_IN_A_ROW_GROUP) if packs.num_packs else [np.arange(0)]


def _parts(run: Run, plan: Plan, shard: int, load: Callable[[Run, int, Plan, int], _Part]) -> list[_Part]:
    """Return what goes to an output file, one part for each file to pack; `load` reads a part."""

    def part(number: int) -> _Part | None:
        try:
            return load(run, number, plan, shard)
        except DamagedFileError:
            return None

    parts, numbers = [], range(run.num_inputs)
    for number, found in enumerate(map(part, numbers) if run.store.is_local else in_order(part, numbers)):
        if found is None:
            deal(run, number)
            found = load(run, number, plan, shard)
        parts.append(found)
    return parts


def _joined(plan: Plan, parts: list[DealtPart], first: int, end: int) -> tuple[TokenColumns, PackingPlan]:
    """Return all segments as documents, and the plan that packs them.

    Args:
        plan: the run's plan.
        parts: the segments of the output file, one part for each file to pack.
        first: index of the output file's first pack.
        end: index of the output file's last pack, plus 1.
    """
    assert plan.table is not None
    pack, place, length = (np.concatenate([getattr(part, name) for part in parts]) for name in DealtPart._fields[:3])
    order = np.lexsort((place, pack))
    columns = {}
    for field in plan.schema:
        large = pa.types.is_large_list(field.type)
        chunks = [list_array(part.values[field.name], part.length, large) for part in parts]
        columns[field.name] = TokenColumn(field.name, pa.chunked_array(chunks))
    packs = PackingPlan(
        document_length=length,
        segment_document=order,
        segment_start=np.zeros(len(order), dtype=np.int32),
        segment_length=length[order],
        pack_offsets=np.searchsorted(pack[order], np.arange(end - first + 1)),
        pack_capacity=plan.table.pack_capacity(first, end),
    )
    return columns, packs


def _write(run: Run, plan: Plan, number: int, groups: Iterable[_RowGroup]) -> None:
    """Write the rows of an output file, of which there is at least an empty table, and what is known of the file."""
    name = run.output(number, plan.shards)
    rows = tokens = trained = 0
    with run.store.create(name) as fresh:
        writer: Any = None
        for table, trained_tokens in groups:
            if writer is None:
                writer = pq.ParquetWriter(fresh, table.schema, use_byte_stream_split=_split(table.schema), **_PARQUET)
            if table.num_rows:  # datasets cannot read a row group without rows
                writer.write_table(table, row_group_size=table.num_rows)
            rows += table.num_rows
            tokens += int(pc.sum(pc.list_value_length(table.column(0))).as_py() or 0)
            trained += trained_tokens
        writer.close()
        known = PackedFile(
            name=name,
            rows=rows,
            tokens=tokens,
            trained_tokens=trained,
            size=fresh.stat().st_size,
            sha256=_digest(fresh),
            plan=plan.checksum,
        )
    run.store.put(run.file("packed", number), json.dumps(asdict(known)).encode())


def _split(schema: pa.Schema) -> list[str]:
    """Return the columns whose values are split into bytes before they are compressed: those of more than one byte.

    Token ids are small numbers, half of whose bytes are 0. Split, they take a third less room and half the time.
    """
    wide = {field.name: field.type.value_type for field in schema if is_token_type(field.type)}
    return [f"{name}.list.element" for name, value in wide.items() if value.bit_width >= 32]


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
