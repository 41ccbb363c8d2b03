"""A tokenizer for tests of documents, and documents that are packed as always and lazily."""

import pytest
from lazy_documents import both, on_disk
from tokenizers import Tokenizer, models, pre_tokenizers

from hf_packing.data.text_tokenizer import TextTokenizer

WORDS = ["[UNK]", "<end>", "one", "two", "three", "user", "assistant"]


@pytest.fixture
def tokenizer():
    """A token for every word."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer("words", backend)


@pytest.fixture
def pair(tmp_path):
    """Documents on disk, packed as always, and lazily."""
    packed, _, lazy, _ = both(on_disk(tmp_path / "documents"))
    assert max(map(len, packed["seq_lengths"])) > 1
    return packed, lazy
