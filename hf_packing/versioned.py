"""The versions that the tokens of texts depend on, and functions whose cached results depend on these versions."""

from collections.abc import Callable
from functools import update_wrapper
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any, TypeVar

_OF_TEXTS = ("hf-packing", "transformers", "tokenizers", "jinja2", "trl")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def versions_of_texts() -> dict[str, str]:
    """Return the versions of the packages that turn texts into tokens, without those that are not installed."""
    found = {}
    for package in _OF_TEXTS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class _Versioned:
    """A function whose pickle has the versions, and so the key under which `Dataset.map` caches its results."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]  # update_wrapper sets it

    def __reduce__(self) -> tuple[Any, ...]:
        name = f"{self.__module__}:{self.__name__}"  # type: ignore[attr-defined]  # as above
        return resolve_name, (name,), {"versions": versions_of_texts()}


def versioned(function: _Function) -> _Function:
    """Let the results of a function that `Dataset.map` caches depend on the versions."""
    made: Any = _Versioned(function)
    return made  # type: ignore[no-any-return]
