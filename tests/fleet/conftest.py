"""Files to pack, for tests that change none of them."""

import pytest
from fleet_files import write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("fleet") / "files")
