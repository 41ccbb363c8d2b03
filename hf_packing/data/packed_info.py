"""Describe packed rows for datasets: their features, and what is known of the documents."""

from dataclasses import replace
from typing import Any

import datasets
import pyarrow as pa

from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.data.lazy.packed_tokens import PackedTokens


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
