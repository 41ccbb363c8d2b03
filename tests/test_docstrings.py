"""The examples in docstrings, run; and every public name has one."""

import doctest
import importlib
from pathlib import Path

import pytest

import hf_packing as hfp

PACKAGE = Path(hfp.__file__).parent
FILES = [file.relative_to(PACKAGE.parent) for file in sorted(PACKAGE.rglob("*.py")) if ">>>" in file.read_text()]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_examples(file):
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    failed, run = doctest.testmod(importlib.import_module(name))
    assert run
    assert not failed


WITHOUT_EXAMPLE = {
    "ComparedStrategy",
    "Comparison",
    "EpochPlan",
    "EpochSummary",
    "IsolationReport",
    "PackedLoader",
    "PackingMetrics",
    "PackingError",
    "MissingDependencyError",
    "ModelNotSupportedError",
}
"""Returned or raised, never called by a user."""


def test_public_names_have_an_example():
    assert ">>>" in hfp.fleet.PackedCorpus.__doc__
    names = {name for name in hfp._HOME_OF if ">>>" not in (getattr(hfp, name).__doc__ or "")}
    assert names <= WITHOUT_EXAMPLE
