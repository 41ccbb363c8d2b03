import pytest

from hf_packing.attention.find_route import known_routes


@pytest.fixture(autouse=True)
def no_known_routes():
    """A test finds its routes itself."""
    known_routes.clear()
