"""A tokenizer for tests of texts."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hf_packing.text.text_tokenizer import TextTokenizer

WORDS = ["[UNK]", "<end>", "one", "two", "three", "user", "assistant"]


@pytest.fixture
def tokenizer():
    """A token for every word."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return TextTokenizer("words", backend)
