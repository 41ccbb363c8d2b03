import datasets
import pytest


@pytest.fixture
def documents():
    return datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8], [], [9, 10, 11, 12, 13]], "name": list("abcd")})
