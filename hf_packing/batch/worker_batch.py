"""`WorkerBatch` is a batch that a worker of a DataLoader sends to the main process as bytes, without shared memory."""

from typing import Any

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
        tensors = {name: value for name, value in self.items() if isinstance(value, torch.Tensor)}
        integers = {name: value.numpy() for name, value in tensors.items() if value.dtype in (torch.int32, torch.int64)}
        small = {name: values.astype(_smallest_dtype(values)) for name, values in integers.items()}
        return _restored, ({**self, **small}, {name: values.dtype for name, values in integers.items()})


def _smallest_dtype(values: npt.NDArray[Any]) -> Any:
    """Return the smallest dtype that holds all values."""
    least, largest = values.min(initial=0), values.max(initial=0)
    dtypes = (np.uint8, np.int16, np.uint16, np.int32, np.int64)
    return next(each for each in dtypes if np.iinfo(each).min <= least and largest <= np.iinfo(each).max)


def _restored(batch: dict[str, Any], dtypes: dict[str, np.dtype[Any]]) -> dict[str, Any]:
    """Return a batch in which arrays are tensors of these dtypes again."""
    return batch | {name: torch.from_numpy(batch[name].astype(dtype)) for name, dtype in dtypes.items()}
