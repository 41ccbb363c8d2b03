"""`pack` packs a whole dataset with one plan, and caches the packed rows on disk."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import MemoryMappedTable
from datasets.utils import tqdm

from hf_packing.checks import check_optional_number, check_type, check_whole_number, expect
from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.files import new_folder
from hf_packing.planning.lengths import Int32Array
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.cache import PLAN, ROWS, SAVED_ROWS, Origin, fingerprint_of, folder_for, writing_cache
from hf_packing.rows.changes import changes_of, count_labels, describe_changes, warn_of_changes
from hf_packing.rows.lazy import DocumentRows
from hf_packing.rows.packing import Packing
from hf_packing.rows.packing_trace import info_of_packed
from hf_packing.rows.token_columns import (
    TOKENS_AT_ONCE,
    TokenColumns,
    check_no_transform,
    columns_left_out,
    documents_in,
    find_token_columns,
    row_numbers,
)
from hf_packing.strategies.base import Strategy

DatasetOrDict = TypeVar(
    "DatasetOrDict",
    datasets.Dataset,
    datasets.DatasetDict,
    datasets.IterableDataset,
    datasets.IterableDatasetDict,
)

_WINDOW_PACKS = 64


def pack(
    dataset: DatasetOrDict,
    strategy: Strategy,
    *,
    position_ids: bool = True,
    load_from_cache_file: bool = True,
    window_packs: int | None = None,
    streams: int | None = None,
    lazy: bool = False,
    share_prefixes: bool | int = False,
    keep_first_labels: bool = False,
) -> DatasetOrDict:
    """Pack a tokenized dataset, with one plan for all documents of the dataset or split; or a stream, as it is read.

    A stream, which is an IterableDataset, is planned in windows. The documents of the emptiest packs of a window wait
    for the next window, at most 32 times. The order of the rows in a window is random, as the strategy's seed says.
    `state_dict` of the packed stream is exact.

    Args:
        dataset: Dataset, DatasetDict, IterableDataset or IterableDatasetDict with `input_ids`. TRL's loss masks,
            `completion_mask` and `assistant_masks`, are applied to the labels and dropped. Other columns with one
            number for each token, such as labels or weights, are packed like input_ids. An attention_mask is dropped,
            and all other columns are left out. Warnings say what is applied, left out, dropped or skipped. Columns
            hidden by `with_format(columns=[...])` are ignored.
        strategy: a strategy such as BestFit(2048).
        position_ids: whether packed rows get a column `position_ids`. Without this column the dataset is a third
            smaller, but works only with trainers that pass seq_lengths to the collator: SFTTrainer with
            padding_free, or Trainer with a patched model or remove_unused_columns=False.
        load_from_cache_file: whether to reuse rows that were packed before from the same data, with the same strategy
            and the same version of hf_packing. Rows of a stream are not stored.
        window_packs: packs in a window of a stream, at least 1; None for 64. A window has at least 16 documents per
            pack, unless they are very long, and at most a quarter of `window_packs` packs wait for the next window. A
            larger window leaves less padding, and needs more memory and a larger state.
        streams: number of logical streams into which a stream is divided: equal shares of its shards, with windows of
            their own, from which rows are taken in turn. The rows of each logical stream do not depend on the number of
            ranks and workers; 64 suits most runs. With None, each rank and each worker packs the shards that it reads.
        lazy: True to copy no tokens: a transform of the dataset builds rows from the documents when they are read, in
            the format of the documents. They equal those of lazy=False. The plan takes about 20 bytes for each
            document. The rows cannot be saved or concatenated, and `with_format` would replace the transform.
        share_prefixes: True if documents that begin with the same tokens share these tokens in a row, so that a model
            computes them once; or the fewest tokens to share, 16 for True. The rows are trees, which only patched
            causal language models can train on. For strategies that cut no document that fits in a pack. Documents of a
            stream share prefixes with those of the same window.
        keep_first_labels: True to keep the label of a segment's first token, for models that predict the token itself
            instead of the next token, such as masked language models and classifiers of tokens. Such models refuse rows
            without these labels.

    Returns:
        A dataset of the same kind, memory-mapped if it is not a stream, with one row for each pack. The columns are
        `input_ids`, `labels` (-100 at the first token of every segment, unless keep_first_labels is True; made from
        input_ids if the documents have no labels), `position_ids` (restarting at every segment) and `seq_lengths`
        (tokens of every segment). If the strategy has several capacities, the column `bucket` has the capacity of the
        pack in tokens. With share_prefixes, the columns are `tree_input_ids` and `tree_labels` (one number for each
        token of the row), `segment_lengths` and `parents` (of each run of tokens that the same documents share; the
        index of the run before it in the row, or -1), `ends` (for each document, the index of its last run) and
        `trained` (three numbers for each run of tokens that a document trains on: index of the document in the row,
        start in the document, length). Other token columns are in the rows, too; documents share a token only if all
        its values are equal. The description in `info` says that rows are packed, so that rows which lose
        `position_ids` and `seq_lengths` are refused instead of trained as one document each.

    Raises:
        PackingError: the dataset has no input_ids, has columns whose lengths disagree, is packed already, has a
            transform, or is a stream with a shuffle buffer; documents have labels, but those that the strategy drops or
            truncates have all of them; lazy is True for a stream; window_packs or streams is given for a Dataset; or
            share_prefixes cannot be combined with the strategy.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> hfp.pack(documents, hfp.BestFit(4, seed=None))["seq_lengths"][:]
        [[3, 1], [2]]
    """
    packing = Packing.of(strategy, position_ids, share_prefixes, keep_first_labels)
    is_stream = isinstance(dataset, (datasets.IterableDataset, datasets.IterableDatasetDict))
    pack_one: Callable[[Any], Any]
    if is_stream:
        from hf_packing.streams.logical import pack_stream

        expect(False, "for a stream, whose packed rows are not stored anyway", lazy=lazy)
        window_packs = check_whole_number("window_packs", _WINDOW_PACKS if window_packs is None else window_packs)
        streams = check_optional_number("streams", streams)
        pack_one = partial(pack_stream, packing=packing, window_packs=window_packs, streams=streams)
    else:
        why = "for a Dataset, which has one plan, and whose rows attach divides among the ranks"
        expect(None, why, window_packs=window_packs, streams=streams)
        pack_one = partial(_pack_split, packing=packing, load_from_cache_file=load_from_cache_file, lazy=lazy)
    if not isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        return pack_one(dataset)
    packed = type(dataset)()
    for name, split in dataset.items():
        try:
            packed[name] = pack_one(split)
        except PackingError as error:
            raise PackingError(f"dataset[{name!r}]: {error}") from error
    return packed


def _pack_split(
    dataset: datasets.Dataset, packing: Packing, load_from_cache_file: bool, lazy: bool
) -> datasets.Dataset:
    """Pack one split of a dataset and return the packed split, as `pack` does."""
    accepted = "a Dataset, a DatasetDict, an IterableDataset or an IterableDatasetDict"
    check_type("dataset", dataset, datasets.Dataset, accepted)
    check_no_transform(dataset)
    table = documents_in(dataset)
    packing.check_names(table.column_names)
    fingerprint = fingerprint_of(dataset, packing, table.column_names, lazy)
    folder = folder_for(dataset, fingerprint)
    stored = _open(folder, lazy) if load_from_cache_file else None
    if stored is None:
        try:
            stored = _store(packing, find_token_columns(table, row_numbers(dataset)), folder, lazy)
        except PackingError:
            # another process may have packed the same meanwhile, and Windows replaces no folder with an open file
            stored = _open(folder, lazy) if load_from_cache_file else None
            if stored is None:
                raise
    origin, rows = stored
    _warn(origin, table, stacklevel=4)
    info = _info_of_packed(dataset, origin.plan, packing)
    if rows is None:
        return DocumentRows(dataset, packing, folder / PLAN).as_dataset(info, fingerprint)
    packed = _packed_dataset(rows, dataset, table.column_names, info, fingerprint)
    return packed.with_format(dataset.format["type"], **dataset.format["format_kwargs"])


def pack_to_disk(dataset: datasets.Dataset, packing: Packing, folder: Path) -> Origin:
    """Pack a Dataset into an existing folder, for `datasets.load_from_disk`, and return what packing did."""
    table = documents_in(dataset)
    packing.check_names(table.column_names)
    origin, schema = _write(packing, find_token_columns(table, row_numbers(dataset)), folder)
    _warn(origin, table, stacklevel=3)
    names, info = table.column_names, _info_of_packed(dataset, origin.plan, packing)
    fingerprint = fingerprint_of(dataset, packing, names, False)
    # what `save_to_disk` writes beside the rows is that of any number of rows
    packed = _packed_dataset(schema.empty_table(), dataset, names, info, fingerprint)
    packed.save_to_disk(folder, num_shards=1)
    (folder / ROWS).replace(folder / SAVED_ROWS)
    return origin


def _open(folder: Path, lazy: bool) -> tuple[Origin, MemoryMappedTable | None] | None:
    """Return what a folder of the cache holds, with the rows if they are not lazy; None if it is missing or damaged."""
    with suppress(PackingError, OSError, pa.ArrowException):
        origin = Origin.load(folder)
        rows = None if lazy else MemoryMappedTable.from_file(str(folder / ROWS))
        if rows is None or rows.num_rows == origin.plan.num_packs:
            return origin, rows
    return None


def _store(
    packing: Packing, columns: TokenColumns, folder: Path, lazy: bool
) -> tuple[Origin, MemoryMappedTable | None]:
    """Plan documents, write the plan to the cache, with the rows if they are not lazy, and return what was written."""
    with writing_cache(folder):
        with new_folder(folder) as unfinished:
            origin, _ = _write(packing, columns, unfinished, lazy)
        # opened only here, since Windows renames no folder with an open file
        try:
            return origin, None if lazy else MemoryMappedTable.from_file(str(folder / ROWS))
        except FileNotFoundError:  # another process that packs the same is replacing the folder
            return _open(folder, lazy) or _store(packing, columns, folder, lazy)


def _write(packing: Packing, columns: TokenColumns, folder: Path, lazy: bool = False) -> tuple[Origin, pa.Schema]:
    """Plan documents, and write the rows to a folder unless they are lazy, and then the plan.

    Returns:
        What was planned, and the schema of the rows.

    Raises:
        PackingError: no label would be left.
    """
    plan = packing.plan(columns)
    facts = changes_of(columns, plan, repr(packing.strategy), packing.keep_first_labels)
    facts["tokens_not_shared"] = packing.tokens_not_shared(columns, plan)
    if facts["labels_left"]:
        facts["labels_left"].check_some_left("strategy", packing.strategy)
    first_labels = None
    schema = packing.rows(columns, plan, np.arange(0)).table.schema
    if not lazy:
        facts["trained_tokens"], first_labels = _write_rows(packing, columns, plan, schema, folder / ROWS)
    elif facts["loss_masks"]:
        facts["trained_tokens"] = count_labels(columns, plan.segments, packing.keep_first_labels)
    origin = Origin(plan, facts, first_labels)
    origin.save(folder)
    return origin, schema


def _write_rows(
    packing: Packing, columns: TokenColumns, plan: PackingPlan, schema: pa.Schema, path: Path
) -> tuple[int, Int32Array | None]:
    """Build the rows of a plan block by block, and write them. A thread writes a block while the next one is built.

    Returns:
        The number of tokens that are trained on, and the labels that are not in the rows; see `Rows`.
    """
    first_labels, trained_tokens = [], 0
    cut = plan.metrics().num_cut_documents
    what = f"{plan.num_documents:,} documents" + (f", {cut:,} of them cut" if cut else "")
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, schema) as stream,
        tqdm(total=plan.num_packs, desc=f"Packing {what}", unit=" packs") as progress,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        written: Future[None] | None = None
        for rows in packing.blocks(columns, plan, TOKENS_AT_ONCE):
            if rows.first_labels is not None:
                first_labels.append(rows.first_labels)
            trained_tokens += rows.trained_tokens
            if written:
                written.result()
            written = writer.submit(stream.write_table, rows.table)
            progress.update(rows.table.num_rows)
        if written:
            written.result()
    return trained_tokens, np.concatenate(first_labels) if first_labels else None


def _warn(origin: Origin, documents: pa.Table, stacklevel: int) -> None:
    """Warn of what packing did to documents."""
    warn_of_changes(describe_changes(origin.facts, left_out=columns_left_out(documents.schema)), "pack", stacklevel)


def _info_of_packed(dataset: datasets.Dataset, plan: PackingPlan, packing: Packing) -> datasets.DatasetInfo:
    """Return the description of the rows, with a trace of packing if a packed row has several segments."""
    is_traced = packing.fewest_shared is None and plan.num_segments > plan.num_packs
    return info_of_packed(dataset.info, is_traced, packing.keep_first_labels)


def _packed_dataset(
    rows: Any, documents: datasets.Dataset, names: list[str], info: datasets.DatasetInfo, fingerprint: str
) -> datasets.Dataset:
    """Return a table of packed rows as a Dataset. Columns of the documents keep their types, as lists of any length."""
    info.features = features = datasets.Features.from_arrow_schema(rows.schema)
    for name in set(names).intersection(features) - {INPUT_IDS, LABELS}:
        features[name] = type(features[name])(documents.features[name].feature)
    return datasets.Dataset(rows, info=info, split=documents.split, fingerprint=fingerprint)
