"""The three sets of documents: problems, instructions, and functions of the standard library."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import numpy as np
from common import shared_file
from documents import as_text, standard_library_functions
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SOURCES = {
    "math": "GSM8K's training problems, one {prompt, completion} a line",
    "instruct": "GPTeacher's instructions, one {prompt, completion} a line",
}
NAMES = (*SOURCES, "python")
END = "<|endoftext|>"


@dataclass(frozen=True)
class Texts:
    """Documents of one set, no document in two parts."""

    training: list[str]
    validation: list[str]
    before: list[str]
    """For the model that all methods begin with."""


def read_texts(name: str, training: int, validation: int, before: int) -> Texts:
    """Draw this many documents for each part at random."""
    if name == "python":
        texts = standard_library_functions()["text"][:]
    else:
        with gzip.open(shared_file(f"{name}.jsonl.gz", SOURCES[name]), "rt", encoding="utf-8") as lines:
            texts = [as_text(json.loads(line)) for line in lines]
    drawn = [texts[place] for place in np.random.default_rng(0).permutation(len(texts))]
    ends = np.cumsum([training, validation, before])
    return Texts(drawn[: ends[0]], drawn[ends[0] : ends[1]], drawn[ends[1] : ends[2]])


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, longest: int) -> datasets.Dataset:
    """Tokenize the texts, add an end token to each, and truncate to `longest` tokens."""
    end = tokenizer.token_to_id(END)
    encodings = tokenizer.encode_batch(list(texts))
    return datasets.Dataset.from_dict({"input_ids": [[*encoding.ids, end][:longest] for encoding in encodings]})
