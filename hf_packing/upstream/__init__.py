"""The doors to other libraries: what is private in them, or differs between the versions that we support.

Nothing else in the package uses a private name of these libraries, or asks for a version of one. `make doors` tests
them in a minute, and says what a new version has changed, and what needs it.
"""

from importlib.metadata import PackageNotFoundError, version

import hf_packing
from hf_packing.checks import NEWEST, wanted_versions


def versions() -> str:
    """Return the versions of the libraries that hf_packing works with, for a bug report.

    Returns:
        A line for each library, with the installed version, the versions that are supported, and the newest one that
        was tested.

    Example:
        >>> import hf_packing as hfp
        >>> print(hfp.versions().splitlines()[0].split()[0])
        hf-packing
    """
    lines = [f"hf-packing {hf_packing.__version__}"]
    for library, newest in NEWEST.items():
        try:
            found = version(library)
        except PackageNotFoundError:
            found = "not installed"
        lines.append(f"{library} {found} (supported: {wanted_versions(library)}, tested up to {newest})")
    return "\n".join(lines)
