"""A tokenizer for tests of a fleet."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def tokenizer(tmp_path):
    """The file of a tokenizer that knows a few words."""
    words = ["[UNK]", *["one", "two", "three", "four", "five", "six", "seven"], "user", "assistant"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")
