"""scipy, which only the optimising strategies need: loaded when they run."""

from typing import Any

from hf_packing.errors import MissingDependencyError


def load_scipy_optimize(strategy: str) -> Any:
    """`scipy.optimize`, or a MissingDependencyError with the line that installs it."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        raise MissingDependencyError(f'{strategy} needs scipy: pip install "hf-packing[optimal]"') from error
    return scipy.optimize
