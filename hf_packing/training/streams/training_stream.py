"""Make the logical streams that a training reads: those of a packed stream, or of a stream that TokenBudget packs."""

from collections.abc import Sequence
from typing import Any

import datasets

from hf_packing.columns import SEQ_LENGTHS, TREE_INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.rows.packing import Packing
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.fill import LINEAR_COST
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.strategies.greedy import BestFit
from hf_packing.streams import upstream
from hf_packing.streams.logical import PackedExamples, warn_of_reading
from hf_packing.streams.packed import StreamPacking
from hf_packing.streams.reader import open_source

WINDOW_PACKS = 64
"""The packs of a window, if TokenBudget packs the stream."""

_MOST_STREAMS = 64
"""If TokenBudget packs the stream, the number of logical streams is a power of two: at most this number, and at most
the number of shards, so that every shard is read once."""


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, datasets.IterableDataset)


def training_stream(
    name: str,
    stream: datasets.IterableDataset,
    batching: Batching | None,
    ranks: int,
    unread: Sequence[str] = (),
    in_order: InOrder | None = None,
) -> tuple[PackedExamples, int, int]:
    """Return what a training or an evaluation reads from a stream: its logical streams, the number of rows in a
    micro-batch, and the largest number of tokens in it.

    Args:
        name: the name of the stream in error messages.
        stream: a stream that `pack` has divided into logical streams, or a stream of documents.
        batching: a TokenBudget. Documents are packed into rows of at most max_tokens tokens. Packed rows are joined to
            micro-batches of at most max_tokens tokens. None for an evaluation on a packed stream.
        ranks: number of ranks.
        unread: names of columns of documents that are not read.
        in_order: how many rows an evaluation has in a micro-batch; None for training.

    Raises:
        PackingError: the stream, or the batching, is not supported.
    """
    if batching is not None and not isinstance(batching, TokenBudget):
        raise PackingError(
            f"batching: expected a TokenBudget for a stream, got {type(batching).__name__}; pack the stream with "
            "pack(stream, strategy, streams=64), and pass TokenBudget(max_length)"
        )
    if batching is not None and batching.match_documents_per_step is not None:
        raise PackingError(
            "match_documents_per_step: expected None for a stream, whose number of documents is unknown, got "
            f"{batching.match_documents_per_step}"
        )
    if getattr(stream, "_distributed", None) is not None:
        raise PackingError(
            f"{name}: expected a stream that every rank reads whole, got a stream that split_dataset_by_node has "
            "divided; leave split_dataset_by_node out, since hf_packing divides the logical streams among the ranks"
        )
    if place := upstream.position(stream):
        raise PackingError(
            f"{name}: expected a stream at its beginning, got a stream that goes on {place}; resume from a checkpoint "
            "of the trainer or the loop instead, which saves how far the stream is, or open the stream again"
        )
    examples = upstream.examples_of(stream)
    if isinstance(examples, PackedExamples) and examples.streams:
        streams, rows, max_tokens = _of_packed_rows(name, examples, batching if in_order is None else None)
    else:
        streams, rows, max_tokens = _of_documents(name, stream, examples, batching, unread)
    if streams.streams % ranks:
        raise PackingError(
            f"{name}: expected a number of logical streams that is a multiple of the {ranks} ranks, got "
            f"{streams.streams}; pack the stream with a multiple of {ranks}: pack(stream, strategy, streams=...)"
        )
    if in_order is not None and in_order.rows_per_batch is not None:
        rows = in_order.rows_per_batch
    return streams, rows, max_tokens


def _of_packed_rows(
    name: str, streams: PackedExamples, batching: TokenBudget | None
) -> tuple[PackedExamples, int, int]:
    """Return what a training reads from rows that were packed before; with a batching, several are joined."""
    strategy, fewest_shared = streams.packing.strategy, streams.packing.packing.fewest_shared
    capacity = strategy.largest_capacity
    if streams.owned != tuple(range(streams.streams)):
        raise PackingError(
            f"{name}: expected all logical streams of pack, got {len(streams.owned)} of {streams.streams}; use shard "
            "before pack, not after it"
        )
    if batching is None:
        return streams, 1, capacity
    rows = batching.max_tokens // capacity
    if not rows:
        raise PackingError(
            f"max_tokens: expected at least {capacity}, the capacity of the packed rows, got {batching.max_tokens}"
        )
    most, in_a_row = batching.max_documents, getattr(strategy, "max_documents", None)
    if most is not None and (in_a_row is None or in_a_row * rows > most):
        raise PackingError(
            f"max_documents: expected None, or rows that were packed with at most {most // rows} documents each, got "
            f"{most} for {rows} rows of {strategy!r} in a micro-batch; pass max_documents to the strategy"
        )
    if batching.fewest_shared not in (None, fewest_shared):
        raise PackingError(
            f"share_prefixes: expected False for rows that are packed already, got {batching.share_prefixes}; call "
            f"pack(stream, strategy, share_prefixes={batching.share_prefixes}, streams=64), or pass a stream of "
            "documents"
        )
    return streams, rows, batching.max_tokens


def _of_documents(
    name: str,
    stream: datasets.IterableDataset,
    examples: upstream.Examples,
    batching: TokenBudget | None,
    unread: Sequence[str],
) -> tuple[PackedExamples, int, int]:
    """Return what a training reads from documents, which are packed in windows."""
    changed = {SEQ_LENGTHS, TREE_INPUT_IDS} & set(upstream.with_known_features(name, stream).features or {})
    if changed or isinstance(examples, PackedExamples):
        raise PackingError(
            f"{name}: expected a stream of documents, or the stream that pack(stream, strategy, streams=64) returned, "
            "got a packed stream without logical streams, which was packed by map, or was changed after pack; use map, "
            "filter and shuffle before pack, and pass skip_prepare_dataset=True to SFTTrainer"
        )
    if batching is None:
        raise PackingError(
            f"{name}: expected a packed stream, got a stream of documents; pass pack(stream, BestFit(max_length), "
            "streams=64)"
        )
    if batching.max_patches is not None:
        raise PackingError(f"max_patches: expected None for a stream of text, got {batching.max_patches}")
    source = open_source(name, stream, unread)
    strategy = BestFit(
        batching.max_tokens, overflow=batching.overflow, max_documents=batching.max_documents, seed=batching.seed
    )
    packing = Packing.of(strategy, position_ids=False, share_prefixes=batching.share_prefixes)
    packing.check_names(source.names)
    linear_cost = LINEAR_COST if batching.linear_cost is None else batching.linear_cost
    of_windows = StreamPacking(
        packing,
        WINDOW_PACKS,
        source.schema,
        linear_cost=linear_cost if batching.balance == "attention" else None,
    )
    streams = 1 << min(int(source.examples.num_shards), _MOST_STREAMS).bit_length() - 1
    warn_of_reading(source.examples, streams)
    return PackedExamples(source.examples, of_windows, streams), 1, batching.max_tokens
