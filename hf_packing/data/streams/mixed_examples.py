"""Mix the documents of several sources, so that each has its share of the tokens, not of the documents.

The next document comes from the source whose tokens are furthest below its share of all tokens so far. So after every
document, the tokens of a source differ from its share by about one document. The state has the place in every source.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.columns import IGNORED_LABEL, LABELS, LOSS_MASKS, apply_loss_masks
from hf_packing.data.packed_rows import list_array
from hf_packing.data.streams import upstream
from hf_packing.data.streams.document_reader import DocumentReader, Place, lengths_of
from hf_packing.data.streams.saved_state import MadeFrom, load, new_state, save
from hf_packing.data.streams.shard_sizes import fingerprint_of_files, sizes_of_shards
from hf_packing.data.streams.shares import ShareOfShards, equal_shares
from hf_packing.errors import PackingError

SOURCE = "source"
"""The column with the number of the document's source, for every token."""

SOURCE_EPOCH = "source_epoch"
"""The column with the number of times that the source was read before this document, for every token. Only mixtures
whose sources are read again have it."""

Count = Literal["tokens", "trainable"]
StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]

_DOCUMENTS_AT_ONCE = 512


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

    def counted(self, documents: pa.Table) -> npt.NDArray[np.int64]:
        """Return what counts of each document, int64 [documents]: all tokens, or those that are trained on."""
        lengths = lengths_of(documents)
        if self.count == "tokens" or not len(lengths):
            return lengths
        masks = {name: _values(documents, name) for name in LOSS_MASKS if name in documents.column_names}
        labels = _values(documents, LABELS if LABELS in documents.column_names else "input_ids")
        trained = (apply_loss_masks(labels, masks) if masks else labels) != IGNORED_LABEL
        before = np.concatenate([[0], np.cumsum(trained)])
        end = np.cumsum(lengths)
        counted: npt.NDArray[np.int64] = before[end] - before[end - lengths]
        return counted

    def __str__(self) -> str:
        names = ", ".join(self.shares)
        return f"a mixture of {names} by {self.count}, {self.stopping_strategy}, seed {self.seed}"


@dataclass
class _Progress:
    """The progress of a mixture: its place in every source, and what it has taken of each."""

    shares: list[float]
    """The shares since which `total` is counted; if other shares are given later, counting begins again."""
    total: list[int]
    """What was counted of each source since the shares were given."""
    epoch: list[int]
    """The epoch of each source, from 0."""
    place: list[Place]
    """The place in each source."""
    documents: list[int]
    """The documents that each source has given in this epoch of the mixture."""

    def saved(self) -> tuple[Any, ...]:
        """Return plain values."""
        places = tuple(tuple(place) for place in self.place)
        return tuple(self.shares), tuple(self.total), tuple(self.epoch), places, tuple(self.documents)

    @classmethod
    def load(cls, saved: tuple[Any, ...] | None, shares: list[float]) -> "_Progress":
        """Return the progress that `saved` has returned; that of a new mixture with these shares for None."""
        none = [0] * len(shares)
        if saved is None:
            return cls(shares, none, list(none), [Place(None, 0)] * len(shares), list(none))
        old, total, epoch, place, documents = map(list, saved)
        return cls(old, total, epoch, [Place(*each) for each in place], documents)

    def note(self, readers: list[DocumentReader], chosen: list[int]) -> None:
        """Note that documents of these sources have been read."""
        for source, reader in enumerate(readers):
            self.place[source] = reader.place
            self.documents[source] += chosen.count(source)


class MixedExamples(upstream.TypedExamples):
    """The documents of several sources, mixed, for an IterableDataset.

    Args:
        examples: the objects that read the sources.
        mixture: how they are mixed.
        owned: the shards of the mixture to read, each an equal share of all sources; None for all.
    """

    def __init__(
        self, examples: list[upstream.Examples], mixture: Mixture, owned: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.ex_iterables, self.mixture = examples, mixture
        self._all_shards = max(int(each.num_shards) for each in examples)
        self.owned = tuple(range(self._all_shards)) if owned is None else owned

    @property
    def features(self) -> datasets.Features:
        return self.mixture.features

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, table in enumerate(self.tables(one_row=True)):
            yield f"document {number}", table.to_pylist()[0]

    def _iter_arrow(self) -> Iterator[tuple[str, pa.Table]]:
        for number, table in enumerate(self.tables()):
            yield f"documents {number}", table

    def shuffle_data_sources(self, generator: np.random.Generator) -> "MixedExamples":
        shuffled = [each.shuffle_data_sources(generator) for each in self.ex_iterables]
        return MixedExamples(shuffled, self.mixture, self.owned)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "MixedExamples":
        chosen = self.split_shard_indices_by_worker(num_shards, index, contiguous)
        return MixedExamples(self.ex_iterables, self.mixture, tuple(self.owned[number] for number in chosen))

    def reshard_data_sources(self) -> "MixedExamples":
        return MixedExamples([each.reshard_data_sources() for each in self.ex_iterables], self.mixture)

    @property
    def num_shards(self) -> int:
        return len(self.owned)

    def _init_state_dict(self) -> dict[str, Any]:
        for each in self.ex_iterables:
            each._init_state_dict()
        self._state_dict: dict[str, Any] = new_state(type(self))
        return self._state_dict

    def tables(self, one_row: bool = False) -> Iterator[pa.Table]:
        """Yield tables of documents, and note in the state before each that its documents are out.

        Args:
            one_row: True for tables of one document each.
        """
        state = self._init_state_dict() if self._state_dict is None else self._state_dict
        made_from = MadeFrom(str(self.mixture), None, fingerprint_of_files(self))
        saved, out = load(state, made_from) or (None, 0)
        shares = list(self.mixture.shares.values())
        progress = _Progress.load(saved, shares)
        readers = [self._reader(source, progress) for source in range(len(shares))]
        active = self._active(progress)
        if progress.shares != shares:  # the documents that are out were chosen by the old shares
            chosen = self._choose(readers, progress, active)[0][:out]
            self._take(readers, progress, chosen)
            progress.note(readers, chosen)
            progress.shares, progress.total, out = shares, [0] * len(shares), 0
        while active:
            here = progress.saved()
            chosen, due = self._choose(readers, progress, active)
            table = self._take(readers, progress, chosen)
            for first in range(out, table.num_rows, 1 if one_row else max(table.num_rows - out, 1)):
                end = first + 1 if one_row else table.num_rows
                save(state, made_from, (here, end))
                yield table.slice(first, end - first)
            out = 0
            progress.note(readers, chosen)
            if due is not None and not self._go_on(due, readers, progress, active):
                break
        save(state, made_from, (progress.saved(), 0))

    def _reader(self, source: int, progress: _Progress) -> DocumentReader:
        """Return a reader of a source that goes on where the mixture stands, in an order of the source's epoch."""
        examples, epoch = self.ex_iterables[source], progress.epoch[source]
        if len(self.owned) < self._all_shards:
            shares = equal_shares(sizes_of_shards(examples), self._all_shards)
            examples = ShareOfShards(examples, tuple(part for number in self.owned for part in shares[number]))
        if epoch:
            examples = upstream.shuffled(examples, np.random.default_rng([self.mixture.seed, epoch]))
        examples._init_state_dict()
        return DocumentReader(examples, self.mixture.schema, progress.place[source])

    def _active(self, progress: _Progress) -> set[int]:
        """Return the sources that still have documents for the mixture; none if the mixture has ended."""
        sources = set(range(len(progress.epoch)))
        ended = {source for source in sources if progress.epoch[source]}
        how = self.mixture.stopping_strategy
        if how == "all_exhausted_without_replacement":
            return sources - ended
        return set() if ended and (how == "first_exhausted" or ended == sources) else sources

    def _choose(
        self, readers: list[DocumentReader], progress: _Progress, active: set[int]
    ) -> tuple[list[int], int | None]:
        """Choose the sources of the next documents, until the documents at hand of a chosen source end.

        Returns:
            The sources of the documents, in order; and a source that is due but has ended, or None.
        """
        shares, total = progress.shares, progress.total
        counts = {source: self.mixture.counted(readers[source].at_hand()).tolist() for source in active}
        chosen: list[int] = []
        used = dict.fromkeys(active, 0)
        together = sum(total[source] for source in active)
        whole = sum(shares[source] for source in active)
        while len(chosen) < _DOCUMENTS_AT_ONCE:
            source = max(sorted(active), key=lambda each: shares[each] / whole * together - total[each])
            if used[source] == len(counts[source]):
                return chosen, source if readers[source].ended else None
            counted = counts[source][used[source]]
            total[source], together, used[source] = total[source] + counted, together + counted, used[source] + 1
            chosen.append(source)
        return chosen, None

    def _take(self, readers: list[DocumentReader], progress: _Progress, chosen: list[int]) -> pa.Table:
        """Return the chosen documents, with the columns of their sources."""
        order = np.argsort(np.array(chosen, dtype=np.int64), kind="stable")
        parts = [reader.take(chosen.count(source)) for source, reader in enumerate(readers)]
        table = pa.concat_tables(parts).take(np.argsort(order))
        lengths, sources = lengths_of(table), np.array(chosen, dtype=np.int16)
        table = table.append_column(SOURCE, list_array(np.repeat(sources, lengths), lengths))
        if self.mixture.reads_again:
            epochs = np.array(progress.epoch, dtype=np.int32)[sources]
            table = table.append_column(SOURCE_EPOCH, list_array(np.repeat(epochs, lengths), lengths))
        return table

    def _go_on(self, due: int, readers: list[DocumentReader], progress: _Progress, active: set[int]) -> bool:
        """Return whether the mixture goes on after a source that is due has ended, and prepare it."""
        progress.epoch[due] += 1
        active &= self._active(progress)
        if due in active:
            if not progress.documents[due]:
                raise PackingError(f"streams[{list(self.mixture.shares)[due]!r}]: expected documents, got none")
            progress.place[due] = Place(None, 0)
            readers[due] = self._reader(due, progress)
        return bool(active)


def _values(documents: pa.Table, name: str) -> npt.NDArray[Any]:
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in documents.column(name).chunks]
    return np.concatenate(values)
