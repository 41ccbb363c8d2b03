"""`pack` and `unpack`: a whole dataset, planned at once, gathered in Arrow, cached on disk."""

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import MemoryMappedTable
from datasets.utils import tqdm

from hf_packing.arrow.columns import INPUT_IDS, LABELS, TokenColumns, find_token_columns, left_out
from hf_packing.arrow.packed_rows import check_bucket_is_free, pack_rows, unpack_rows
from hf_packing.arrow.token_column import blocks_of_packs
from hf_packing.cache import PLAN_KEY, CachedPacks, Origin, cache_for, fingerprint_of, new_stream
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_lengths
from hf_packing.planning.plan import PackingPlan
from hf_packing.strategies.base import Strategy, check_strategy

DatasetOrDict = TypeVar("DatasetOrDict", datasets.Dataset, datasets.DatasetDict)

TOKENS_AT_ONCE = 1 << 19
"""Rows are gathered and written in blocks of about this many tokens, so memory does not depend on the dataset."""


def pack(
    dataset: DatasetOrDict, strategy: Strategy, *, position_ids: bool = True, load_from_cache_file: bool = True
) -> DatasetOrDict:
    """Pack a tokenised dataset, planned over all of its documents at once.

    Args:
        dataset: Dataset or DatasetDict with `input_ids`. Columns with one number for each token (labels, masks,
            weights) are packed along; an attention_mask is dropped; others are left out. What is left out, dropped or
            skipped is said in a warning.
        strategy: such as BestFit(2048).
        position_ids: whether rows get that column. Without it the dataset is a third smaller, and fit only for
            trainers that hand seq_lengths on: SFTTrainer with padding_free, Trainer with remove_unused_columns=False.
        load_from_cache_file: whether rows packed before from the same data, strategy and version may be used again.

    Returns:
        A dataset of the same kind, memory-mapped, one row for each pack: `input_ids`, `labels` (made from input_ids
        where there are none; -100 at the first token of every segment), `position_ids` (restarting at every segment)
        and `seq_lengths` (tokens of every segment); with buckets also `bucket` (tokens its pack may hold).

    Raises:
        PackingError: no input_ids, columns whose lengths disagree, an already packed dataset, not a map-style dataset.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> hfp.pack(documents, hfp.BestFit(4, seed=None))["seq_lengths"][:]
        [[3, 1], [2]]
    """
    check_strategy(strategy)
    if isinstance(dataset, datasets.DatasetDict):
        return datasets.DatasetDict(
            {name: pack_one(split, strategy, position_ids, load_from_cache_file) for name, split in dataset.items()}
        )
    if not isinstance(dataset, datasets.Dataset):
        raise PackingError(
            f"dataset: expected a Dataset or a DatasetDict, got {type(dataset).__name__}; an IterableDataset can be "
            "packed batch by batch with .map(strategy, batched=True, batch_size=10_000, remove_columns=...)"
        )
    return pack_one(dataset, strategy, position_ids, load_from_cache_file)


def pack_one(
    dataset: datasets.Dataset,
    strategy: Strategy,
    position_ids: bool,
    load_from_cache_file: bool,
    plan: PackingPlan | None = None,
) -> datasets.Dataset:
    """One split; plan: the strategy's for its lengths, where it was made already."""
    table = dataset.data.table
    if strategy.has_buckets:
        check_bucket_is_free(table.column_names)
    fingerprint = fingerprint_of(dataset, strategy, position_ids)
    cache = cache_for(dataset, fingerprint)
    rows = cache.open() if load_from_cache_file else None
    if rows is None:
        columns = find_token_columns(table, row_numbers(dataset))
        if plan is None:
            plan = strategy.plan_lengths(check_lengths(columns[INPUT_IDS].length))
        write_packs(columns, plan, strategy, position_ids, cache)
        rows = MemoryMappedTable.from_file(str(cache.rows))
    lost = cache.what_was_lost()
    if without := left_out(table.schema):
        lost.append(f"leaves out columns without one number for each token: {', '.join(without)}")
    for words in lost:
        warnings.warn(f"pack {words}", stacklevel=3)
    info = info_of_packed(dataset, rows.schema)
    packed = datasets.Dataset(rows, info=info, split=dataset.split, fingerprint=fingerprint)
    form = dataset.format
    return packed if form["type"] == "custom" else packed.with_format(form["type"], **form["format_kwargs"])


def info_of_packed(dataset: datasets.Dataset, schema: pa.Schema) -> datasets.DatasetInfo:
    """What is known of the documents, with the features of the rows."""
    known = dataset.info
    features = datasets.Features.from_arrow_schema(schema)
    others = features.keys() - {INPUT_IDS, LABELS}
    kept = {name: feature for name, feature in dataset.features.items() if name in others}
    return datasets.DatasetInfo(
        description=known.description,
        citation=known.citation,
        homepage=known.homepage,
        license=known.license,
        features=datasets.Features({**features, **kept}),
    )


def row_numbers(dataset: datasets.Dataset) -> IntArray | None:
    """Which rows of the dataset's table are its rows, after a shuffle, select or filter; None for all in order."""
    indices = dataset._indices
    return None if indices is None else indices.column(0).to_numpy()


def write_packs(
    columns: TokenColumns, plan: PackingPlan, strategy: Strategy, position_ids: bool, cache: CachedPacks
) -> None:
    """Gather block after block of packs, each while the one before is being written."""
    extras = {"position_ids": position_ids, "bucket": strategy.has_buckets}
    schema = pack_rows(columns, plan, 0, 0, **extras).table.schema
    schema = schema.with_metadata({PLAN_KEY: plan.fingerprint.encode()})
    first_labels = []
    pack_tokens = (
        np.add.reduceat(plan.segment_length, plan.pack_offsets[:-1]) if plan.num_packs else plan.segment_length
    )
    with (
        new_stream(cache.rows, schema) as stream,
        tqdm(total=plan.num_packs, desc=f"Packing {plan.num_documents} documents", unit=" packs") as progress,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        written: Future[None] | None = None
        for first, end in blocks_of_packs(pack_tokens, TOKENS_AT_ONCE):
            rows = pack_rows(columns, plan, first, end, **extras)
            first_labels.append(rows.first_labels)
            if written:
                written.result()
            written = writer.submit(stream.write_table, rows.table.replace_schema_metadata(schema.metadata))
            progress.update(end - first)
        if written:
            written.result()
        known = [labels for labels in first_labels if labels is not None]
        labels = np.concatenate(known) if known else None
        cache.save_origin(Origin(plan, repr(strategy), LABELS not in columns, labels))


def unpack(packed: datasets.Dataset, plan: PackingPlan | None = None) -> datasets.Dataset:
    """The documents again, in their order, with the token columns they had.

    Documents that were dropped come back empty, truncated ones as far as they were packed.

    Args:
        packed: what `pack` returned, neither shuffled nor selected from.
        plan: the plan the rows were packed with; None finds the one that `pack` saved beside its rows. Rows that were
            saved elsewhere no longer know it. With a plan given by hand, labels keep the -100 at the start of segments.

    Returns:
        Dataset, one row for each document, in memory.

    Raises:
        PackingError: rows whose plan is unknown, or that are not those of the plan.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> hfp.unpack(hfp.pack(documents, hfp.BestFit(4)))["input_ids"][:]
        [[1, 2, 3], [4, 5], [6]]
    """
    if not isinstance(packed, datasets.Dataset):
        raise PackingError(f"packed: expected a Dataset that was packed, got {type(packed).__name__}")
    if row_numbers(packed) is not None:
        raise PackingError(
            "packed: expected the rows in the order they were packed, this dataset was shuffled or selected from"
        )
    table = packed.data.table
    files = [CachedPacks(Path(file["filename"])) for file in packed.cache_files]
    origin = files[0].load_origin() if len(files) == 1 and files[0].open() is not None else None
    if origin is None:
        if not isinstance(plan, PackingPlan):
            raise PackingError(
                "plan: expected the PackingPlan of these rows, since they are not as pack() returned them and do not "
                f"know it, got {plan!r}"
            )
        return datasets.Dataset(unpack_rows(table, plan, None), split=packed.split)
    if plan is not None and plan != origin.plan:
        raise PackingError(
            f"plan: expected the one these rows were packed with, {origin.plan.fingerprint}, got {plan!r}"
        )
    if len(packed) != origin.plan.num_packs:
        raise PackingError(f"packed: expected all {origin.plan.num_packs} rows that were packed, got {len(packed)}")
    rows = unpack_rows(table, origin.plan, origin.first_labels)
    if origin.labels_made and LABELS in rows.column_names:
        rows = rows.drop_columns([LABELS])
    return datasets.Dataset(rows, split=packed.split)
