"""The way in which sources are mixed, and what counts of a document."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hf_packing.columns import (
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    SOURCE,
    SOURCE_EPOCH,
    apply_loss_masks,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import offsets_of
from hf_packing.streams.document_reader import lengths_of

Count = Literal["tokens", "trainable"]
StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]


@dataclass(frozen=True)
class Mixture:
    """The way in which sources are mixed."""

    shares: Mapping[str, float]
    """The share of the tokens of each source, by name; the sum is 1."""
    schema: pa.Schema
    """Names and types of the token columns of all sources."""
    count: Count
    stopping_strategy: StoppingStrategy
    seed: int

    @property
    def features(self) -> datasets.Features:
        """Names and types of the columns of mixed documents."""
        schema = self.schema.append(pa.field(SOURCE, pa.list_(pa.int16())))
        if self.reads_again:
            schema = schema.append(pa.field(SOURCE_EPOCH, pa.list_(pa.int32())))
        return datasets.Features.from_arrow_schema(schema)

    @property
    def reads_again(self) -> bool:
        """True if a source may be read several times in an epoch of the mixture."""
        return self.stopping_strategy == "all_exhausted"

    def counted(self, documents: pa.Table, source: int, first: int) -> npt.NDArray[np.int64]:
        """Return what counts of each document, int64 [documents]: all tokens, or those that are trained on.

        Args:
            documents: documents of one source.
            source: the number of the source.
            first: the number of the first document in the source.
        """
        lengths = lengths_of(documents)
        if self.count == "tokens" or not len(lengths):
            return lengths
        names = [name for name in (LABELS, *LOSS_MASKS) if name in documents.column_names]
        for name in names:
            values = _list_lengths(documents, name)
            if (other := values != lengths).any():
                row = int(other.argmax())
                raise PackingError(
                    f"streams[{list(self.shares)[source]!r}]: column {name!r}: expected as many values as input_ids in "
                    f"every row, but row {first + row} has {values[row]} for {lengths[row]} input_ids"
                )
        masks = {name: _values(documents, name) for name in names if name != LABELS}
        labels = _values(documents, LABELS if LABELS in names else INPUT_IDS)
        trained = (apply_loss_masks(labels, masks) if masks else labels) != IGNORED_LABEL
        before = offsets_of(trained)
        end = np.cumsum(lengths)
        counted: npt.NDArray[np.int64] = before[end] - before[end - lengths]
        return counted

    def __str__(self) -> str:
        names = ", ".join(self.shares)
        return f"a mixture of {names} by {self.count}, {self.stopping_strategy}, seed {self.seed}"


def _list_lengths(documents: pa.Table, name: str) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[Any] = pc.fill_null(pc.list_value_length(documents.column(name)), 0).to_numpy()
    return lengths.astype(np.int64)


def _values(documents: pa.Table, name: str) -> npt.NDArray[Any]:
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in documents.column(name).chunks]
    return np.concatenate(values)
