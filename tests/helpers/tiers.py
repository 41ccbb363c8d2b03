"""Which parameters of a test run always, which in `make test-all` alone, and which in the survey alone."""

import pytest


def fast_only(values, *fast):
    """All values as parameters of a test; those that are not among the fast ones are marked slow.

    A tuple is a value for each of several parameters.
    """
    values = list(values)
    assert all(value in values for value in fast), fast
    return [value if value in fast else slow(*(value if isinstance(value, tuple) else [value])) for value in values]


def rarely(values):
    """Values as parameters of a test that only the survey runs."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.survey) for value in values
    ]


def slow(*value):
    return pytest.param(*value, marks=pytest.mark.slow)
