"""Pack an IterableDataset: check what is asked for, and put the packing between the source and its readers."""

import warnings
from functools import partial
from typing import Any

import datasets

from hf_packing.checks import check_whole_number
from hf_packing.columns import LOSS_MASKS
from hf_packing.errors import PackingError
from hf_packing.rows.changes import describe_changes
from hf_packing.rows.packing import Packing
from hf_packing.streams import upstream
from hf_packing.streams.logical import LogicalStreams, warn_of_reading
from hf_packing.streams.packed import PackedExamples, StreamPacking
from hf_packing.streams.reader import open_source


def pack_stream(stream: Any, packing: Packing, *, window_packs: int, streams: int | None, **how: Any) -> Any:
    """Return an IterableDataset, or a dict of them, with packed rows. `hf_packing.pack` describes the arguments.

    Args:
        stream: the stream, or a dict of streams.
        packing: how documents become rows.
        window_packs: packs in a window.
        streams: number of logical streams; None for none.
        how: further fields of StreamPacking.
    """
    window_packs = check_whole_number("window_packs", window_packs)
    streams = None if streams is None else check_whole_number("streams", streams)
    pack_each: Any = partial(_pack_one, packing=packing, streams=streams, window_packs=window_packs, **how)
    if isinstance(stream, datasets.IterableDatasetDict):
        packed, name = {}, ""
        try:
            for name, split in stream.items():
                packed[name] = pack_each(split)
        except PackingError as error:
            raise PackingError(f"dataset[{name!r}]: {error}") from error
        return datasets.IterableDatasetDict(packed)
    return pack_each(stream)


def _pack_one(stream: Any, packing: Packing, streams: int | None, **how: Any) -> Any:
    source = open_source("dataset", stream)
    packing.check_names(source.names)
    masks = [name for name in LOSS_MASKS if name in source.schema.names]
    for change in describe_changes({"loss_masks": masks}, left_out=source.left_out):
        warnings.warn(f"pack {change}", stacklevel=4)
    of_windows = StreamPacking(packing, schema=source.schema, **how)
    packed: Any = PackedExamples(source.examples, of_windows)
    if streams is not None:
        warn_of_reading(source.examples, streams)
        packed = LogicalStreams(source.examples, of_windows, streams)
    return upstream.stream_of(packed, of_windows.features, like=stream)
