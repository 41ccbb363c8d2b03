"""The examples in docstrings, run; and every public name has one."""

import doctest
import importlib
import pkgutil

import pytest

import hf_packing as hfp

MODULES = [module.name for module in pkgutil.walk_packages(hfp.__path__, "hf_packing.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


WITHOUT_EXAMPLE = {
    "ComparedStrategy",
    "Comparison",
    "DealtShard",
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


@pytest.mark.parametrize("name", sorted(set(hfp.__all__) - WITHOUT_EXAMPLE))
def test_public_names_have_an_example(name):
    assert ">>>" in getattr(hfp, name).__doc__
