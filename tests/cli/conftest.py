"""A tokenizer and documents for the command."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = {word: number for number, word in enumerate(["[UNK]", "<end>", "one", "two", "three"])}


@pytest.fixture
def tokenizer(tmp_path):
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def data(tmp_path):
    """Document number n has n % 13 + 1 times the token 2."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"text": "{"one " * (number % 13 + 1)}"}}\n' for number in range(300)))
    return str(file)
