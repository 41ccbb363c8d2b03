"""Fixtures of the tests of training."""

import pytest
from trl.trainer import utils
from whole_rows import ExactLogProbs


@pytest.fixture
def exact_log_probs(monkeypatch):
    """TRL computes log-probabilities in float32, whatever the model's precision."""
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
