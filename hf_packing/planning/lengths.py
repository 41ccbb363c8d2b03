"""Document lengths as every plan sees them: checked, one-dimensional, in the smallest integer type that holds them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError

IntArray = npt.NDArray[Any]

INT32_MAX = 2**31 - 1
MAX_TOKENS = 2**63


def check_lengths(lengths: Any) -> IntArray:
    """The lengths as an integer array, or an error that points at the first bad one.

    Args:
        lengths: 1-d integers [documents], tokens; a list, an array, or anything `numpy.asarray` takes. Zero is allowed.

    Returns:
        int32 [documents], or int64 where a document has 2**31 tokens or more.

    Raises:
        PackingError: not one-dimensional, not integers, masked, negative, or more than 2**63 - 1 tokens in all.
    """
    array = check_whole_numbers("lengths", lengths)
    if not array.size:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind == "i" and array.min() < 0:
        first = int(np.argmax(array < 0))
        raise PackingError(f"lengths: expected no negative length, got {array[first]} at index {first}")
    longest, total = int(array.max()), float(array.sum(dtype=np.float64))
    if total >= MAX_TOKENS:
        raise PackingError(f"lengths: expected fewer than 2**63 tokens in all, got {total:.3g}, the longest {longest}")
    return array.astype(np.int32 if longest <= INT32_MAX else np.int64)


def check_whole_numbers(name: str, values: Any) -> IntArray:
    """`values` as a 1-d integer array, or a PackingError that names the argument. An empty one may be of any type."""
    if isinstance(values, np.ma.MaskedArray):
        raise PackingError(f"{name}: expected an array without a mask, got a masked array")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PackingError(f"{name}: expected 1-d integers, got {type(values).__name__}: {error}") from error
    if array.ndim != 1:
        raise PackingError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise PackingError(f"{name}: expected integers, got {array.dtype} such as {array[0]!r}")
    return array


def smallest_index_type(count: int) -> type[np.signedinteger[Any]]:
    """The integer type that indexes `count` things."""
    return np.int32 if count <= INT32_MAX else np.int64


def check_whole_number(name: str, value: Any, *, minimum: int = 1, maximum: int = INT32_MAX) -> int:
    """`value` as an int within [minimum, maximum], or a PackingError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not minimum <= value <= maximum:
        raise PackingError(f"{name}: expected an integer from {minimum} to {maximum}, got {value!r}")
    return int(value)


def is_real(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def check_share(name: str, value: Any) -> float:
    """`value` as a float within [0, 1], or a PackingError that names the argument."""
    if not is_real(value) or not 0 <= value <= 1:
        raise PackingError(f"{name}: expected a number from 0 to 1, got {value!r}")
    return float(value)


def check_seconds(name: str, value: Any) -> float:
    """`value` as a number of seconds of at least 0, or a PackingError that names the argument."""
    if not is_real(value) or not value >= 0:
        raise PackingError(f"{name}: expected seconds, 0 or more, got {value!r}")
    return float(value)


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
