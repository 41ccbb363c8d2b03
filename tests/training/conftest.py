"""Fixtures of the tests of training."""

from pathlib import Path

import pytest
from trl.trainer import utils
from whole_rows import ExactLogProbs


def pytest_collection_modifyitems(items):
    """TRL and PEFT use names that transformers has renamed."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default::FutureWarning"))


@pytest.fixture
def exact_log_probs(monkeypatch):
    """TRL computes log-probabilities in float32, whatever the model's precision."""
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
