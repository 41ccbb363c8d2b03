"""Call a function for many values at the same time, since object stores take long to answer."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_THREADS = 16
_AHEAD = 64
"""The number of values whose results are waited for at the same time."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_order(function: Callable[[_T], _R], values: Iterable[_T]) -> Iterator[_R]:
    """Call a function for each value in threads, a few values ahead, and yield the results in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting: deque[Future[_R]] = deque()
        for value in values:
            waiting.append(pool.submit(function, value))
            if len(waiting) >= _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
