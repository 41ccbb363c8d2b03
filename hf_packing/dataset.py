"""`pack` and `unpack`: a whole dataset, planned at once, gathered in Arrow, cached on disk."""

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import MemoryMappedTable
from datasets.utils import tqdm

from hf_packing.arrow.columns import (
    INPUT_IDS,
    LABELS,
    TokenColumns,
    find_token_columns,
    left_out,
    with_typed_empty_lists,
)
from hf_packing.arrow.loss_masks import masks_among
from hf_packing.arrow.packed_rows import check_bucket_is_free, pack_rows, unpack_rows
from hf_packing.arrow.token_column import TOKENS_AT_ONCE, blocks_of_packs
from hf_packing.arrow.visible import visible_columns
from hf_packing.cache import PLAN_KEY, CachedPacks, Origin, cache_for, fingerprint_of
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_lengths
from hf_packing.planning.plan import PackingPlan
from hf_packing.strategies.base import Strategy, check_strategy

DatasetOrDict = TypeVar("DatasetOrDict", datasets.Dataset, datasets.DatasetDict)


def pack(
    dataset: DatasetOrDict, strategy: Strategy, *, position_ids: bool = True, load_from_cache_file: bool = True
) -> DatasetOrDict:
    """Pack a tokenised dataset, planned over all of its documents at once.

    Args:
        dataset: Dataset or DatasetDict with `input_ids`. TRL's loss masks, `completion_mask` and `assistant_masks`, are
            applied to the labels and dropped. Other columns with one number for each token (labels, weights) are packed
            along; an attention_mask is dropped; others are left out. A warning says what is applied, left out, dropped
            or skipped. Columns that `with_format(columns=[...])` hides are not there.
        strategy: such as BestFit(2048).
        position_ids: whether rows get that column. Without it the dataset is a third smaller, and fit only for
            trainers that hand seq_lengths on: SFTTrainer with padding_free, Trainer with remove_unused_columns=False.
        load_from_cache_file: whether rows packed before from the same data, strategy and version may be used again.

    Returns:
        A dataset of the same kind, memory-mapped, one row for each pack: `input_ids`, `labels` (made from input_ids
        where there are none; -100 at the first token of every segment), `position_ids` (restarting at every segment)
        and `seq_lengths` (tokens of every segment); with buckets also `bucket` (tokens its pack may hold).

    Raises:
        PackingError: no input_ids, columns whose lengths disagree, an already packed dataset, not a map-style dataset,
            a dataset with a transform.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> hfp.pack(documents, hfp.BestFit(4, seed=None))["seq_lengths"][:]
        [[3, 1], [2]]
    """
    check_strategy(strategy)
    if not isinstance(dataset, datasets.DatasetDict):
        check_map_style("dataset", dataset)
        return pack_one(dataset, strategy, position_ids, load_from_cache_file)
    for name, split in dataset.items():
        check_map_style(f"dataset[{name!r}]", split)
    packed: dict[str, datasets.Dataset] = {}
    name = ""
    try:
        for name, split in dataset.items():
            packed[name] = pack_one(split, strategy, position_ids, load_from_cache_file)
    except PackingError as error:
        raise PackingError(f"dataset[{name!r}]: {error}") from error
    return datasets.DatasetDict(packed)


def check_map_style(name: str, dataset: Any) -> None:
    if not isinstance(dataset, datasets.Dataset):
        raise PackingError(
            f"{name}: expected a Dataset or a DatasetDict, got {type(dataset).__name__}; an IterableDataset can be "
            "packed batch by batch with .map(strategy, batched=True, batch_size=10_000, remove_columns=[...])"
        )


def pack_one(
    dataset: datasets.Dataset,
    strategy: Strategy,
    position_ids: bool,
    load_from_cache_file: bool,
    plan: PackingPlan | None = None,
) -> datasets.Dataset:
    """One split; plan: the strategy's for its lengths, where it was made already."""
    check_no_transform(dataset)
    table = with_typed_empty_lists(dataset.data.table.select(visible_columns(dataset)))
    if strategy.has_buckets:
        check_bucket_is_free(table.column_names)
    fingerprint = fingerprint_of(dataset, strategy, position_ids, table.column_names)
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
    info = info_of_packed(dataset, table.column_names, rows.schema)
    packed = datasets.Dataset(rows, info=info, split=dataset.split, fingerprint=fingerprint)
    return packed.with_format(dataset.format["type"], **dataset.format["format_kwargs"])


def check_no_transform(dataset: datasets.Dataset) -> None:
    """Refuse to freeze what a transform returns, which may be random, or to leave the transform out."""
    if dataset.format["type"] == "custom":
        raise PackingError(
            "dataset: expected one without a transform, which may return something else at every reading; give it to "
            "attach or prepare_dataloader, which read through the transform, pack what it returns once with "
            "map(strategy, batched=True, remove_columns=dataset.column_names).with_format(None), or call "
            "with_format(None) to pack without it"
        )


def info_of_packed(dataset: datasets.Dataset, packed: list[str], schema: pa.Schema) -> datasets.DatasetInfo:
    """What is known of the documents, with the features of the rows.

    Args:
        dataset: the documents.
        packed: their columns that packing has read.
        schema: of the rows.
    """
    known = dataset.info
    features = datasets.Features.from_arrow_schema(schema)
    others = features.keys() - {INPUT_IDS, LABELS}
    kept = {name: of_any_length(dataset.features[name]) for name in packed if name in others}
    return datasets.DatasetInfo(
        description=known.description,
        citation=known.citation,
        homepage=known.homepage,
        license=known.license,
        features=datasets.Features({**features, **kept}),
    )


def of_any_length(feature: Any) -> Any:
    """The feature of lists that need not be as long as those of the documents, where these are all of one length."""
    return replace(feature, length=-1) if getattr(feature, "length", -1) != -1 else feature


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
    first_labels, trained_tokens = [], 0
    pack_tokens = (
        np.add.reduceat(plan.segment_length, plan.pack_offsets[:-1]) if plan.num_packs else plan.segment_length
    )
    with (
        cache.being_made(schema) as (stream, folder),
        tqdm(total=plan.num_packs, desc=f"Packing {plan.num_documents} documents", unit=" packs") as progress,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        written: Future[None] | None = None
        for first, end in blocks_of_packs(pack_tokens, TOKENS_AT_ONCE):
            rows = pack_rows(columns, plan, first, end, **extras)
            first_labels.append(rows.first_labels)
            trained_tokens += rows.trained_tokens
            if written:
                written.result()
            written = writer.submit(stream.write_table, rows.table.replace_schema_metadata(schema.metadata))
            progress.update(end - first)
        if written:
            written.result()
        known = [labels for labels in first_labels if labels is not None]
        labels = np.concatenate(known) if known else None
        masks = tuple(masks_among(columns))
        labels_made = LABELS not in columns and not masks
        cache.save_origin(Origin(plan, repr(strategy), labels_made, labels, masks, trained_tokens), folder)


def unpack(packed: datasets.Dataset, plan: PackingPlan | None = None) -> datasets.Dataset:
    """The documents again, in their order, with the token columns they had.

    Documents that were dropped come back empty, truncated ones as far as they were packed.

    Args:
        packed: what `pack` returned, neither shuffled nor selected from.
        plan: the plan the rows were packed with; None finds the one that `pack` saved beside its rows. Rows that were
            saved elsewhere no longer know it. With a plan given by hand, labels keep the -100 at the start of segments,
            and of rows with the same seq_lengths nobody can tell whether they were saved in another order.

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
    origin = files[0].load_origin() if len(files) == 1 and files[0].is_there() else None
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
