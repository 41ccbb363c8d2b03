"""Gather tensors of different lengths from all ranks.

Trainers of TRL gather metrics of the rows of a batch, which `Accelerator.gather` only can do if all ranks have equally
many rows. Under a token budget, they have not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def gathering_uneven_tensors(accelerator: Accelerator) -> Iterator[None]:
    """Context manager: within the block, `accelerator.gather` and `gather_for_metrics` take tensors of any length.

    All ranks must gather the same number of times. The tensors of the ranks may differ in their first dimension only.
    """
    if accelerator.num_processes == 1:
        yield
        return
    gather = accelerator.gather

    def gather_uneven(values: Any) -> Any:
        if not isinstance(values, Tensor) or not values.ndim:
            return gather(values)
        lengths = gather(torch.tensor([len(values)], device=values.device)).tolist()
        most = max(lengths)
        filled = F.pad(values, [0, 0] * (values.ndim - 1) + [0, most - len(values)])
        parts = gather(filled.contiguous()).split(most) if most else [values]
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=False)])

    accelerator.gather = gather_uneven
    try:
        yield
    finally:
        del accelerator.gather
