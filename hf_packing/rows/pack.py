"""`pack` packs a whole dataset with one plan, and caches the packed rows on disk."""

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import datasets
import numpy as np
from datasets.table import MemoryMappedTable
from datasets.utils import tqdm

from hf_packing.columns import LABELS, LOSS_MASKS
from hf_packing.errors import PackingError
from hf_packing.rows.cache import PLAN_KEY, CachedPacks, cache_for, fingerprint_of, info_of_packed
from hf_packing.rows.label_counts import LabelCounts, labels_left
from hf_packing.rows.lazy.stored_packs import StoredPacks
from hf_packing.rows.lazy.write_lazy_packs import DocumentPlaces, write_lazy_packs
from hf_packing.rows.packed_rows import Origin, blocks_of_packs
from hf_packing.rows.packing import Packing, Planned
from hf_packing.rows.token_columns import (
    TOKENS_AT_ONCE,
    TokenColumns,
    check_no_transform,
    columns_left_out,
    find_token_columns,
    row_numbers,
    visible_columns,
    with_typed_empty_lists,
)
from hf_packing.strategies.base import Strategy

DatasetOrDict = TypeVar(
    "DatasetOrDict",
    datasets.Dataset,
    datasets.DatasetDict,
    datasets.IterableDataset,
    datasets.IterableDatasetDict,
)


def pack(
    dataset: DatasetOrDict,
    strategy: Strategy,
    *,
    position_ids: bool = True,
    load_from_cache_file: bool = True,
    window_packs: int = 64,
    streams: int | None = None,
    lazy: bool = False,
    share_prefixes: bool | int = False,
) -> DatasetOrDict:
    """Pack a tokenized dataset, with one plan for all documents of the dataset or split; or a stream, as it is read.

    A stream, which is an IterableDataset, is planned in windows. The documents of the emptiest packs of a window wait
    for the next window, at most four times. The order of the rows in a window is random, as the strategy's seed says.
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
        window_packs: packs in a window of a stream, at least 1. A window has at least 16 documents per pack, unless
            they are very long, and at most a quarter of `window_packs` packs wait for the next window. A larger window
            leaves less padding, and needs more memory and a larger state.
        streams: number of logical streams into which a stream is divided: equal shares of its shards, with windows of
            their own, from which rows are taken in turn. The rows of each logical stream do not depend on the number of
            ranks and workers; 64 suits most runs. With None, each rank and each worker packs the shards that it reads.
        lazy: True to copy no tokens: rows are read from the documents' own Arrow files when they are needed, and equal
            those of lazy=False. The plan takes about 16 bytes for each document. The documents must be on disk, and
            their files must stay as they are.
        share_prefixes: True if documents that begin with the same tokens share these tokens in a row, so that a model
            computes them once; or the fewest tokens to share, 16 for True. The rows are trees, which only patched
            causal language models can train on. For strategies that cut no document that fits in a pack; not with
            lazy. Documents of a stream share prefixes with those of the same window.

    Returns:
        A dataset of the same kind, memory-mapped if it is not a stream, with one row for each pack. The columns are
        `input_ids`, `labels` (-100 at the first token of every segment; made from input_ids if the documents have no
        labels), `position_ids` (restarting at every segment) and `seq_lengths` (tokens of every segment). If the
        strategy has several capacities, the column `bucket` has the capacity of the pack in tokens. With
        share_prefixes, the columns are `tree_input_ids` and `tree_labels` (one number for each token of the row),
        `segment_lengths` and `parents` (of each run of tokens that the same documents share; the index of the run
        before it in the row, or -1), `ends` (for each document, the index of its last run) and `trained` (three numbers
        for each run of tokens that a document trains on: index of the document in the row, start in the document,
        length). Other token columns are in the rows, too; documents share a token only if all its values are equal.
        The description in `info` says that rows are packed, so that rows which lose `position_ids` and `seq_lengths`
        are refused instead of trained as one document each.

    Raises:
        PackingError: the dataset has no input_ids, has columns whose lengths disagree, is packed already, has a
            transform, or is a stream with a shuffle buffer; documents have labels, but those that the strategy drops or
            truncates have all of them; lazy is True for documents in memory, or for a stream; or
            share_prefixes cannot be combined with the strategy or another argument.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> hfp.pack(documents, hfp.BestFit(4, seed=None))["seq_lengths"][:]
        [[3, 1], [2]]
    """
    packing = Packing.of(strategy, position_ids, share_prefixes)
    if packing.fewest_shared is not None and lazy:
        raise PackingError(f"share_prefixes: expected False with lazy=True, got {share_prefixes}")
    if isinstance(dataset, (datasets.IterableDataset, datasets.IterableDatasetDict)):
        from hf_packing.streams.pack_stream import pack_stream

        if lazy:
            raise PackingError("lazy: expected False for a stream, whose packed rows are not stored anyway, got True")
        return pack_stream(dataset, packing, window_packs=window_packs, streams=streams)
    if streams is not None:
        raise PackingError(
            f"streams: expected None for a Dataset, whose rows attach divides among the ranks, got {streams}"
        )
    pack_each = partial(pack_split, load_from_cache_file=load_from_cache_file, lazy=lazy)
    if not isinstance(dataset, datasets.DatasetDict):
        _check_map_style("dataset", dataset)
        return pack_each(dataset, packing)
    for name, split in dataset.items():
        _check_map_style(f"dataset[{name!r}]", split)
    packed: dict[str, datasets.Dataset] = {}
    name = ""
    try:
        for name, split in dataset.items():
            packed[name] = pack_each(split, packing)
    except PackingError as error:
        raise PackingError(f"dataset[{name!r}]: {error}") from error
    return datasets.DatasetDict(packed)


def pack_split(
    dataset: datasets.Dataset,
    packing: Packing,
    *,
    load_from_cache_file: bool,
    planned: Planned | None = None,
    lazy: bool = False,
) -> datasets.Dataset:
    """Pack one split of a dataset and return the packed split, as `pack` does.

    Args:
        dataset: Dataset with `input_ids`.
        packing: how documents become rows.
        load_from_cache_file: whether to reuse rows that were packed before.
        planned: the plan of the documents; None to compute the plan.
        lazy: whether to copy no tokens.
    """
    check_no_transform(dataset)
    table = with_typed_empty_lists(dataset.data.table.select(visible_columns(dataset)))
    packing.check_names(table.column_names)
    strategy = packing.strategy
    fingerprint = fingerprint_of(dataset, packing, table.column_names, lazy)
    cache = cache_for(dataset, fingerprint)
    stored = StoredPacks(cache.rows.with_suffix(".lazy").absolute()) if lazy else cache
    rows = stored.open() if load_from_cache_file else None
    if rows is None:
        columns = find_token_columns(table, row_numbers(dataset))
        documents = DocumentPlaces.find(dataset, table, columns) if lazy else None
        planned = packing.plan(columns) if planned is None else planned
        plan = planned.plan
        extras = {"position_ids": packing.position_ids, "bucket": strategy.has_buckets}
        labels = labels_left(columns, plan)
        if labels is not None:
            labels.check_some_left("strategy", strategy)
        if documents is not None and isinstance(stored, StoredPacks):
            rows = write_lazy_packs(documents, columns, plan, repr(strategy), extras, labels, stored)
        else:
            rows = _write_packs(packing, columns, planned, cache, labels)
    changes = stored.describe_changes()
    if left_out := columns_left_out(table.schema):
        changes.append(f"leaves out columns without one number for each token: {', '.join(left_out)}")
    for change in changes:
        warnings.warn(f"pack {change}", stacklevel=3)
    info = info_of_packed(dataset, table.column_names, rows)
    packed = datasets.Dataset(rows, info=info, split=dataset.split, fingerprint=fingerprint)
    return packed.with_format(dataset.format["type"], **dataset.format["format_kwargs"])


def _check_map_style(name: str, dataset: Any) -> None:
    if not isinstance(dataset, datasets.Dataset):
        raise PackingError(
            f"{name}: expected a Dataset, a DatasetDict, an IterableDataset or an IterableDatasetDict, got "
            f"{type(dataset).__name__}"
        )


def _write_packs(
    packing: Packing, columns: TokenColumns, planned: Planned, cache: CachedPacks, labels: LabelCounts | None
) -> MemoryMappedTable:
    """Build the rows of a plan block by block, write them to the cache, and return them.

    A thread writes a block while the next one is built.

    Args:
        packing: how documents become rows.
        columns: the token columns of the documents.
        planned: the plan of the documents.
        cache: where to write.
        labels: the labels that are left, if tokens are dropped.
    """
    plan = planned.plan
    schema = packing.rows(columns, plan, np.arange(0)).table.schema.with_metadata({PLAN_KEY: plan.fingerprint.encode()})
    first_labels, trained_tokens = [], 0
    with (
        cache.create(schema) as (stream, folder),
        tqdm(total=plan.num_packs, desc=f"Packing {plan.num_documents:,} documents", unit=" packs") as progress,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        written: Future[None] | None = None
        for packs in blocks_of_packs(plan, TOKENS_AT_ONCE):
            rows = packing.rows(columns, plan, packs)
            if rows.first_labels is not None:
                first_labels.append(rows.first_labels)
            trained_tokens += rows.trained_tokens
            if written:
                written.result()
            written = writer.submit(stream.write_table, rows.table.replace_schema_metadata(schema.metadata))
            progress.update(len(packs))
        if written:
            written.result()
        masks = tuple(name for name in LOSS_MASKS if name in columns)
        origin = Origin(
            plan=plan,
            strategy=repr(packing.strategy),
            labels_made=LABELS not in columns and not masks,
            first_labels=np.concatenate(first_labels) if first_labels else None,
            loss_masks=masks,
            trained_tokens=trained_tokens,
            splits=planned.splits,
            labels=labels,
        )
        cache.save_origin(origin, folder)
    return MemoryMappedTable.from_file(str(cache.rows))
