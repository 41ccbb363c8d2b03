"""Pack an IterableDataset: check what is asked for, and put the packing between the source and its readers."""

import warnings
from typing import Any

import datasets

from hf_packing.checks import check_optional_number, check_whole_number
from hf_packing.columns import LOSS_MASKS
from hf_packing.errors import PackingError
from hf_packing.rows.changes import describe_changes
from hf_packing.rows.packing import Packing
from hf_packing.streams import upstream
from hf_packing.streams.logical import PackedExamples, warn_of_reading
from hf_packing.streams.packed import StreamPacking
from hf_packing.streams.reader import open_source


def pack_stream(stream: Any, packing: Packing, *, window_packs: int, streams: int | None) -> Any:
    """Return an IterableDataset, or a dict of them, with packed rows. `hf_packing.pack` describes the arguments."""
    window_packs = check_whole_number("window_packs", window_packs)
    streams = check_optional_number("streams", streams)
    if not isinstance(stream, datasets.IterableDatasetDict):
        return _pack_one(stream, packing, window_packs, streams)
    packed = datasets.IterableDatasetDict()
    for name, split in stream.items():
        try:
            packed[name] = _pack_one(split, packing, window_packs, streams)
        except PackingError as error:
            raise PackingError(f"dataset[{name!r}]: {error}") from error
    return packed


def _pack_one(stream: datasets.IterableDataset, packing: Packing, window_packs: int, streams: int | None) -> Any:
    """Put the packing between a stream and its readers."""
    source = open_source("dataset", stream)
    packing.check_names(source.names)
    masks = [name for name in LOSS_MASKS if name in source.schema.names]
    for change in describe_changes({"loss_masks": masks}, left_out=source.left_out):
        warnings.warn(f"pack {change}", stacklevel=4)
    of_windows = StreamPacking(packing, window_packs, source.schema)
    if streams is not None:
        warn_of_reading(source.examples, streams)
    packed = PackedExamples(source.examples, of_windows, streams or 0)
    return upstream.stream_of(packed, of_windows.features, like=stream)
