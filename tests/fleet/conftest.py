"""Files of documents, the digest of their packed rows, and a tokenizer, for tests of a fleet."""

import pytest
from fleet.faults import digest_of_pack, write_shards
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def tokenizer(tmp_path):
    """The file of a tokenizer that knows a few words."""
    words = ["[UNK]", *["one", "two", "three", "four", "five", "six", "seven"], "user", "assistant"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Uneven files of documents."""
    return write_shards(tmp_path_factory.mktemp("fleet") / "shards")


@pytest.fixture(scope="module")
def digest(shards):
    """The digest of the rows that `pack` makes of the files."""
    return digest_of_pack(shards)
