"""Checks of arguments and of the versions of other packages, and the one way to set fields of frozen dataclasses.

Each check of an argument returns the checked value, or raises PackingError with the argument, the value and what is
accepted.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from packaging.specifiers import SpecifierSet

from hf_packing.errors import PackingError

OLDEST = {
    "numpy": "1.26",
    "pyarrow": "21.0",
    "datasets": "4.8.0",
    "torch": "2.9",
    "transformers": "5.10.1",
    "accelerate": "1.12",
    "trl": "1.4.0",
    "peft": "0.18",
}
"""The oldest supported versions of the packages that change what is packed, computed or trained, as in pyproject.toml.
The tests pass on all of them together."""
NEWEST = {
    "numpy": "2.4.6",
    "pyarrow": "26.0.1",
    "datasets": "5.2.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
}
"""The newest versions that were tested, as in constraints.txt. Newer ones work if their doors do (`make doors`)."""
_BUT = {"datasets": ",!=5.0.0"}
"""Newer versions that are not supported: with datasets 5.0.0, a resumed stream has other rows."""
INT32_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1


def check_whole_number(name: str, value: Any, *, minimum: int = 1, maximum: int = INT32_MAX) -> int:
    """Return `value` as an int, if it is an integer from `minimum` to `maximum`; `name` is the argument's name."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not minimum <= value <= maximum:
        raise PackingError(f"{name}: expected an integer from {minimum} to {maximum}, got {value!r}")
    return int(value)


def check_type(name: str, value: Any, kind: Any, accepted: str) -> None:
    """Raise PackingError if `value` is no instance of a class, or of one of several."""
    if not isinstance(value, kind):
        raise PackingError(f"{name}: expected {accepted}, got {type(value).__name__}")


def expect(expected: Any, why: str, **given: Any) -> None:
    """Raise PackingError if an argument, given by its name, has another value than the expected one."""
    for name, value in given.items():
        if value != expected:
            raise PackingError(f"{name}: expected {expected!r} {why}, got {value!r}")


def check_seed(seed: Any) -> int:
    """Return `seed` as an int, if it is an integer from 0 to 2**63 - 1."""
    return check_whole_number("seed", seed, minimum=0, maximum=SEED_MAX)


def check_optional_number(name: str, value: Any, **limits: int) -> int | None:
    """Return None if `value` is None; else what `check_whole_number` returns."""
    return None if value is None else check_whole_number(name, value, **limits)


def check_real(name: str, value: Any, minimum: float, maximum: float, what: str = "a number") -> float:
    """Return `value` as a float, if it is a number from `minimum` to `maximum`; `what` says so in the message."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum:
        raise PackingError(f"{name}: expected {what}, got {value!r}")
    return float(value)


def check_choice(name: str, value: Any, choices: Any) -> Any:
    """Return `value`, if it is one of the strings of a Literal type."""
    if value not in get_args(choices):
        raise PackingError(f"{name}: expected one of {', '.join(get_args(choices))}, got {value!r}")
    return value


def check_whole_numbers(name: str, values: Any) -> npt.NDArray[Any]:
    """Return `values` as a 1-d NumPy array of integers. An empty array may have any dtype, as that of [] is float."""
    if isinstance(values, np.ma.MaskedArray):
        raise PackingError(f"{name}: expected an array without a mask, got a masked array")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PackingError(
            f"{name}: expected 1-d integers, got {type(values).__name__}; conversion to a NumPy array failed: {error}"
        ) from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PackingError(
            f"{name}: expected a 1-d array of integers, got {array.dtype} values of shape {array.shape}: {values!r:.60}"
        )
    return array


def set_fields(instance: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass, as its `__post_init__` does to store checked values."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def wanted_versions(package: str) -> str:
    """Return the supported versions of a package, as pip reads them."""
    return f">={OLDEST[package]}{_BUT.get(package, '')}"


@cache
def refuse_older(*packages: str) -> None:
    """Raise PackingError if the installed version of a package is none that is supported, since results may be wrong.

    pip does not install such versions together with hf-packing, but they can get in later.
    """
    for package in packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        wanted = wanted_versions(package)
        if not SpecifierSet(wanted).contains(found, prereleases=True):
            raise PackingError(f'{package}: expected version {wanted}, got {found}; pip install "{package}{wanted}"')
