"""Pack an IterableDataset: check what is asked for, and put the packing between the source and its readers."""

import warnings
from typing import Any

import datasets
import pyarrow as pa

from hf_packing.columns import INPUT_IDS, LABELS, LOSS_MASKS
from hf_packing.data.packed_rows import check_bucket_is_free
from hf_packing.data.streams import upstream
from hf_packing.data.streams.logical_streams import LogicalStreams
from hf_packing.data.streams.packed_examples import PackedExamples, StreamPacking
from hf_packing.data.token_columns import columns_left_out, find_token_columns
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_whole_number


def pack_stream(stream: Any, strategy: Any, *, window_packs: int, streams: int | None, position_ids: bool) -> Any:
    """Return an IterableDataset, or a dict of them, with packed rows. `hf_packing.pack` describes the arguments."""
    window_packs = check_whole_number("window_packs", window_packs)
    streams = None if streams is None else check_whole_number("streams", streams)
    if isinstance(stream, datasets.IterableDatasetDict):
        packed, name = {}, ""
        try:
            for name, split in stream.items():
                packed[name] = _pack_one(split, strategy, window_packs, streams, position_ids)
        except PackingError as error:
            raise PackingError(f"dataset[{name!r}]: {error}") from error
        return datasets.IterableDatasetDict(packed)
    return _pack_one(stream, strategy, window_packs, streams, position_ids)


def _pack_one(stream: Any, strategy: Any, window_packs: int, streams: int | None, position_ids: bool) -> Any:
    if not hasattr(strategy, "plan_window"):
        raise PackingError(
            f"strategy: expected a strategy that plans windows of a stream, such as BestFit(2048), got {strategy!r}; "
            "define plan_window(lengths, number), or subclass hf_packing.strategies.base.Strategy"
        )
    stream = upstream.with_known_features(stream)
    if not stream.features:
        raise PackingError("dataset: expected a stream of documents, got a stream that yields no document")
    examples = upstream.examples_of(stream)
    if upstream.has_shuffle_buffer(examples):
        raise PackingError(
            "dataset: expected a stream without a shuffle buffer, since a saved state does not hold the documents in "
            "the buffer, so a resumed run would lose them. Leave shuffle(buffer_size=...) out: packing puts the rows "
            "of every window in random order, and every epoch after the first reads the files in another order"
        )
    schema = stream.features.arrow_schema.remove_metadata()
    if strategy.has_buckets:
        check_bucket_is_free(schema.names)
    columns = find_token_columns(schema.empty_table())
    if left_out := columns_left_out(schema):
        warnings.warn(f"pack leaves out columns without one number for each token: {', '.join(left_out)}", stacklevel=4)
    if masks := [name for name in LOSS_MASKS if name in columns]:
        warnings.warn(f"pack applies {' and '.join(masks)} to labels: tokens with a 0 are not trained on", stacklevel=4)
    packing = StreamPacking(strategy, window_packs, position_ids, _types_to_read(schema, list(columns)))
    packed = PackedExamples(examples, packing) if streams is None else LogicalStreams(examples, packing, streams)
    return upstream.stream_of(packed, packing.features, like=stream)


def _types_to_read(schema: pa.Schema, names: list[str]) -> pa.Schema:
    """Return some columns of a schema, with lists of any length, and with tokens and labels of 32 bits."""

    def to_read(name: str) -> pa.DataType:
        kind = schema.field(name).type
        value = pa.int32() if name in (INPUT_IDS, LABELS) else kind.value_type
        return pa.large_list(value) if pa.types.is_large_list(kind) else pa.list_(value)

    return pa.schema((name, to_read(name)) for name in names)
