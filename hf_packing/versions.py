"""The oldest versions of other packages that are supported. The tests pass on all of them together."""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from hf_packing.errors import PackingError

OLDEST = {
    "numpy": "1.26",
    "pyarrow": "21.0",
    "datasets": "5.0.1",
    "torch": "2.9",
    "transformers": "5.17",
    "accelerate": "1.12",
    "trl": "1.16",
    "peft": "0.18",
}
"""The packages that change what is packed, computed or trained, as in pyproject.toml."""


def installed(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def refuse_older(*packages: str) -> None:
    """Raise PackingError if the installed version of a package is older than in `OLDEST`, where results may be wrong.

    pip does not install such versions together with hf-packing, but they can get in later.
    """
    for package in packages:
        found = installed(package)
        if found is not None and _numbers(found) < _numbers(OLDEST[package]):
            raise PackingError(
                f"{package}: expected version {OLDEST[package]} or newer, got {found}; "
                f'pip install "{package}>={OLDEST[package]}"'
            )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
