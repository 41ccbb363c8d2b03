"""Pack an IterableDataset: check what is asked for, and put the packing between the source and its readers."""

import warnings

import datasets

from hf_packing.columns import LOSS_MASKS
from hf_packing.rows.changes import describe_changes
from hf_packing.rows.packing import Packing
from hf_packing.streams import upstream
from hf_packing.streams.logical import PackedExamples, warn_of_reading
from hf_packing.streams.packed import StreamPacking
from hf_packing.streams.reader import open_source


def pack_stream(
    stream: datasets.IterableDataset, packing: Packing, window_packs: int, streams: int | None
) -> datasets.IterableDataset:
    """Return an IterableDataset of packed rows. `hf_packing.pack` describes the arguments."""
    source = open_source("dataset", stream)
    packing.check_names(source.names)
    masks = [name for name in LOSS_MASKS if name in source.schema.names]
    for change in describe_changes({"loss_masks": masks}, left_out=source.left_out):
        warnings.warn(f"pack {change}", stacklevel=3)
    of_windows = StreamPacking(packing, window_packs, source.schema)
    if streams is not None:
        warn_of_reading(source.examples, streams)
    packed = PackedExamples(source.examples, of_windows, streams or 0)
    return upstream.stream_of(packed, of_windows.features, like=stream)
