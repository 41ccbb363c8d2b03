"""The third stage: sort the segments of one file by the output file that they go to; or its trees, see tree_parts.py.

A part of the result, one for each output file, holds arrays one after the other:

    int64 [3]            the plan's checksum, the number of segments, and the number of tokens
    int32 [segments]     index of the pack in the output file
    int32 [segments]     place in the pack
    int32 [segments]     length in tokens
    [tokens]             the values of each token column, in the order of the plan's columns
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.fleet.count import Counted, count, load_count, token_columns
from hf_packing.fleet.parts import Buffers, DamagedFileError, read_part, write_parts
from hf_packing.fleet.plan import Plan, dealt_before, load_plan
from hf_packing.fleet.run import Run
from hf_packing.fleet.tree_parts import tree_parts
from hf_packing.fleet.trees import load_trees, sizes_of
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.table import DealtShard
from hf_packing.rows.packed_rows import as_int32
from hf_packing.rows.token_columns import TokenColumns

_T = TypeVar("_T")


class DealtPart(NamedTuple):
    """The segments of one file that go to one output file."""

    pack: IntArray
    """int32 [segments]: index of the segment's pack in the output file, ascending."""
    place: IntArray
    """int32 [segments]: position of the segment in the pack."""
    length: IntArray
    """int32 [segments]: length of the segment in tokens."""
    values: dict[str, npt.NDArray[Any]]
    """Token columns by name, [tokens] each: the values of the segments, one after the other."""


def deal(run: Run, number: int) -> None:
    """Write the segments of a file, sorted by output file.

    Args:
        run: the run.
        number: the number of the file.

    Raises:
        PackingError: the file has changed, or has columns that cannot be packed.
        DamagedFileError: the plan is gone or damaged.
    """
    plan = load_plan(run)
    assert plan.table is not None
    if run.settings.share_prefixes is None:
        columns, counted = columns_of_file(run, number, plan)
        dealt = plan.table.deal(columns[INPUT_IDS].length, dealt_before(run, number, counted))
        parts = _parts(plan, columns, dealt)
    else:
        columns, trees, counted = trees_of_file(run, number, plan)
        dealt = plan.table.deal(sizes_of(trees), dealt_before(run, number, counted))
        parts = tree_parts(plan, columns, trees, dealt)
    write_parts(run.store, run.file("deal", number), parts, plan.shards)


def load_deal(run: Run, number: int, plan: Plan, shard: int) -> DealtPart:
    """Return the segments of a file that go to an output file.

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
    check, segments, tokens = np.frombuffer(data, dtype="<i8", count=3).tolist()
    if check != plan.checksum:
        raise DamagedFileError(name)
    pack, place, length = np.frombuffer(data, dtype="<i4", offset=24, count=3 * segments).reshape(3, -1)
    at, values = 24 + 12 * segments, {}
    for column, dtype in _dtypes(plan).items():
        values[column] = np.frombuffer(data, dtype=dtype, offset=at, count=tokens)
        at += values[column].nbytes
    return DealtPart(pack, place, length, values)


def columns_of_file(run: Run, number: int, plan: Plan) -> tuple[TokenColumns, Counted]:
    """Return the token columns of a file, and what was counted.

    If the tokens that `count` has written are gone or damaged, they are made again.

    Raises:
        PackingError: the file has changed, or has columns that cannot be packed.
    """
    return _counted_again(run, number, lambda counted: (token_columns(run, number, counted, plan.schema), counted))


def trees_of_file(run: Run, number: int, plan: Plan) -> tuple[TokenColumns, PackingPlan, Counted]:
    """Return the token columns of a file whose documents share prefixes, the file's plan, and what was counted.

    If the tokens or the trees that `count` has written are gone or damaged, they are made again.

    Raises:
        PackingError: the file has changed, or has columns that cannot be packed.
    """
    return _counted_again(
        run,
        number,
        lambda counted: (
            token_columns(run, number, counted, plan.schema),
            load_trees(run, number, counted.trees_check),
            counted,
        ),
    )


def _counted_again(run: Run, number: int, load: Callable[[Counted], _T]) -> _T:
    """Return what `load` makes of what was counted; if a file that it needs is gone or damaged, count again first."""
    with suppress(DamagedFileError):
        return load(load_count(run, number)[0])
    count(run, number)
    return load(load_count(run, number)[0])


def _parts(plan: Plan, columns: TokenColumns, dealt: DealtShard) -> Iterator[Buffers]:
    order = np.argsort(dealt.pack, kind="stable")
    pack, place, length = dealt.pack[order], dealt.place[order], dealt.length[order]
    document, start = dealt.document[order], dealt.start[order]
    edges = np.array([plan.first_pack(shard) for shard in range(plan.shards + 1)])
    borders = np.searchsorted(pack, edges).tolist()
    dtypes = _dtypes(plan)
    for shard in range(plan.shards):
        part = slice(borders[shard], borders[shard + 1])
        of_part = (document[part], start[part], length[part])
        head = np.array([plan.checksum, part.stop - part.start, length[part].sum(dtype=np.int64)], dtype="<i8")
        places = (pack[part] - edges[shard], place[part], length[part])
        values = (
            as_int32(name, column.gather(*of_part)) if dtypes[name] == np.int32 else column.gather(*of_part)
            for name, column in columns.items()
        )
        yield [head, *(each.astype("<i4") for each in places), *values]


def _dtypes(plan: Plan) -> dict[str, npt.DTypeLike]:
    """Return the NumPy types of the token columns by name, as packed rows have them."""
    types = {field.name: np.dtype(field.type.value_type.to_pandas_dtype()) for field in plan.schema}
    return types | {name: np.dtype(np.int32) for name in (INPUT_IDS, LABELS) if name in types}
