"""Documents that are packed as always and lazily."""

import pytest
from lazy_documents import both, on_disk


@pytest.fixture
def pair(tmp_path):
    """Documents on disk, packed as always, and lazily."""
    packed, _, lazy, _ = both(on_disk(tmp_path / "documents"))
    assert max(map(len, packed["seq_lengths"])) > 1
    return packed, lazy
