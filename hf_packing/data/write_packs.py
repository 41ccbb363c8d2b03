"""Write packed rows to the cache, and describe them for datasets."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import MemoryMappedTable
from datasets.utils import tqdm

from hf_packing.columns import INPUT_IDS, LABELS, LOSS_MASKS
from hf_packing.data.cache import PLAN_KEY, CachedPacks
from hf_packing.data.lazy.packed_tokens import PackedTokens
from hf_packing.data.origin import Origin
from hf_packing.data.packed_rows import pack_rows
from hf_packing.data.token_columns import TOKENS_AT_ONCE, TokenColumns, blocks_of_rows
from hf_packing.planning.plan import PackingPlan


def write_packs(
    columns: TokenColumns, plan: PackingPlan, strategy: str, extras: dict[str, bool], cache: CachedPacks
) -> MemoryMappedTable:
    """Build packed rows block by block, write them to the cache, and return them.

    A thread writes a block while the next one is built.

    Args:
        columns: the token columns of the documents.
        plan: the plan, which assigns slices of documents to packs.
        strategy: the strategy's repr.
        extras: whether packed rows get the columns `position_ids` and `bucket`.
        cache: where to write.
    """
    schema = pack_rows(columns, plan, 0, 0, **extras).table.schema
    schema = schema.with_metadata({PLAN_KEY: plan.fingerprint.encode()})
    first_labels, trained_tokens = [], 0
    pack_tokens = (
        np.add.reduceat(plan.segment_length, plan.pack_offsets[:-1]) if plan.num_packs else plan.segment_length
    )
    with (
        cache.create(schema) as (stream, folder),
        tqdm(total=plan.num_packs, desc=f"Packing {plan.num_documents:,} documents", unit=" packs") as progress,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        written: Future[None] | None = None
        for first, end in blocks_of_rows(pack_tokens, TOKENS_AT_ONCE):
            rows = pack_rows(columns, plan, first, end, **extras)
            if rows.first_labels is not None:
                first_labels.append(rows.first_labels)
            trained_tokens += rows.trained_tokens
            if written:
                written.result()
            written = writer.submit(stream.write_table, rows.table.replace_schema_metadata(schema.metadata))
            progress.update(end - first)
        if written:
            written.result()
        masks = tuple(name for name in LOSS_MASKS if name in columns)
        origin = Origin(
            plan=plan,
            strategy=strategy,
            labels_made=LABELS not in columns and not masks,
            first_labels=np.concatenate(first_labels) if first_labels else None,
            loss_masks=masks,
            trained_tokens=trained_tokens,
        )
        cache.save_origin(origin, folder)
    return MemoryMappedTable.from_file(str(cache.rows))


def info_of_packed(dataset: datasets.Dataset, column_names: list[str], schema: pa.Schema) -> datasets.DatasetInfo:
    """Return the DatasetInfo of packed rows: the description of the documents, and the features of packed rows.

    Args:
        dataset: the documents.
        column_names: names of the documents' columns that the dataset's format shows.
        schema: schema of the packed rows.
    """
    known = dataset.info
    features = datasets.Features.from_arrow_schema(schema)
    others = {
        name
        for name, each in features.items()
        if name not in (INPUT_IDS, LABELS) and not isinstance(each, PackedTokens)
    }
    kept = {name: _of_any_length(dataset.features[name]) for name in column_names if name in others}
    return datasets.DatasetInfo(
        description=known.description,
        citation=known.citation,
        homepage=known.homepage,
        license=known.license,
        features=datasets.Features({**features, **kept}),
    )


def _of_any_length(feature: Any) -> Any:
    """Return a feature without its fixed list length, if any, since packed rows are longer than the documents."""
    return replace(feature, length=-1) if getattr(feature, "length", -1) != -1 else feature
