"""Document lengths as every plan sees them: checked, one-dimensional, in the smallest integer type that holds them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError

IntArray = npt.NDArray[Any]

INT32_MAX = 2**31 - 1


def check_lengths(lengths: Any) -> IntArray:
    """The lengths as an integer array, or an error that points at the first bad one.

    Args:
        lengths: 1-d integers [documents], tokens; a list, an array, or anything `numpy.asarray` takes. Zero is allowed.

    Returns:
        int32 [documents], or int64 where a document has 2**31 tokens or more.

    Raises:
        PackingError: not one-dimensional, not integers, or negative.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise PackingError(f"lengths: expected one dimension, got shape {array.shape}")
    if not array.size:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise PackingError(f"lengths: expected integers, got {array.dtype}")
    if array.dtype.kind == "i" and array.min() < 0:
        first = int(np.argmax(array < 0))
        raise PackingError(f"lengths: expected no negative length, got {array[first]} at index {first}")
    longest = int(array.max())
    if longest > np.iinfo(np.int64).max:
        raise PackingError(f"lengths: expected at most 2**63 - 1 tokens in a document, got {longest}")
    return array.astype(np.int32 if longest <= INT32_MAX else np.int64, copy=False)


def smallest_index_type(count: int) -> type[np.signedinteger[Any]]:
    """The integer type that indexes `count` things."""
    return np.int32 if count <= INT32_MAX else np.int64


def check_whole_number(name: str, value: Any, *, minimum: int = 1, maximum: int = INT32_MAX) -> int:
    """`value` as an int within [minimum, maximum], or a PackingError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not minimum <= value <= maximum:
        raise PackingError(f"{name}: expected an integer from {minimum} to {maximum}, got {value!r}")
    return int(value)


def sort_by_length(lengths: IntArray) -> IntArray:
    """Indices that sort non-negative lengths, shortest first, ties in their order.

    NumPy sorts 16-bit keys by radix, ten times as fast as wider ones, so wider lengths are sorted 16 bits at a time.
    """
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(lengths.astype(np.uint16), kind="stable")
    for shift in range(16, int(lengths.max()).bit_length(), 16):
        order = order[np.argsort((lengths >> shift).astype(np.uint16)[order], kind="stable")]
    return order
