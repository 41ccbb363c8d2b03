"""`WorkerBatch` is a batch that a worker of a DataLoader sends to the main process as bytes, without shared memory."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class WorkerBatch(dict[str, Any]):
    """A dict of tensors whose integers are pickled as bytes; the unpickled copy is a plain dict with equal tensors.

    Otherwise, torch moves every tensor to its own shared memory, and the main process asks the worker for each file
    descriptor. For the tensors of a batch, this takes longer than to read and collate its rows
    (`python benchmarks/loader.py`).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, ({name: _as_integers(value) for name, value in self.items()},)


class _Integers(NamedTuple):
    """The content of an integer tensor, without the tensor."""

    values: npt.NDArray[np.integer[Any]]
    """The values in the smallest dtype that holds all of them, in the shape of the tensor."""
    dtype: np.dtype[Any]
    """The dtype of the tensor."""


def _as_integers(value: Any) -> Any:
    """Return the content of a dense int32 or int64 tensor on the CPU as _Integers; return any other value as it is."""
    if type(value) is not torch.Tensor or value.dtype not in (torch.int32, torch.int64) or not value.numel():
        return value
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_nested:
        return value
    values = value.numpy()
    least, largest = values.min(), values.max()
    smallest = next(dtype for dtype, (low, high) in _RANGES.items() if low <= least and largest <= high)
    return _Integers(values.astype(smallest), values.dtype)


def _restored(values: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in which _Integers are tensors again."""
    return {
        name: torch.from_numpy(value.values.astype(value.dtype)) if isinstance(value, _Integers) else value
        for name, value in values.items()
    }


_RANGES = {
    dtype: (np.iinfo(dtype).min, np.iinfo(dtype).max) for dtype in (np.uint8, np.int16, np.uint16, np.int32, np.int64)
}
"""The least and the largest value of the dtypes in which integers are sent, smallest dtype first."""
