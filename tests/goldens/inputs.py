"""The data of the goldens, drawn as integers, and digests of nested values: the same on any machine."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LONGEST = 64
"""Capacity of the rows that these documents and lengths are packed into."""


def spread(rng: np.random.Generator, number: int, most: int) -> np.ndarray:
    """Return lengths from 1 to 2**most: their number of binary digits has a bell shape, like that of texts."""
    digits = rng.binomial(most, 0.5, number)
    return rng.integers(2**digits, 2 ** (digits + 1), endpoint=True)


def sets_of_lengths() -> dict[str, np.ndarray]:
    """Return lengths by name; a capacity of LONGEST is meant for them."""
    rng = np.random.default_rng(0)
    return {
        "like texts": np.minimum(spread(rng, 400, 8), LONGEST),
        "uniform": rng.integers(1, LONGEST + 1, 300),
        "over the capacity": spread(rng, 250, 12),
        "few lengths": rng.choice([3, 11, 20, 30, 45], 200),
        "many equal": rng.choice([7, 21, 33, LONGEST], 500),
        "empty and 1": rng.choice([0, 1, 2, 40], 200),
        "edges": np.array([LONGEST, LONGEST - 1, LONGEST + 1, 2 * LONGEST, 2 * LONGEST + 1, 1, 0, 1]),
        "one": np.array([5]),
        "none": np.array([], dtype=np.int64),
    }


def documents(number: int = 120, seed: int = 0, *, longest: int = 100) -> list[list[int]]:
    """Return documents with tokens from 3 to 999; a few are empty."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(spread(rng, number, 8), longest)
    lengths[::29] = 0
    return [rng.integers(3, 1000, length).tolist() for length in lengths]


def dataset(number: int = 120, seed: int = 0, *, longest: int = 100) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": documents(number, seed, longest=longest)}, features=_ids("int64"))


def labeled(number: int = 120, seed: int = 0) -> datasets.Dataset:
    """Return documents with labels, weights, token types and two columns that are not packed."""
    rng = np.random.default_rng(seed + 1)
    ids = documents(number, seed)
    columns = {
        "input_ids": ids,
        "labels": [[token if rng.integers(3) else -100 for token in document] for document in ids],
        "weights": [(rng.integers(0, 8, len(document)) / 4).tolist() for document in ids],
        "token_type_ids": [rng.integers(0, 2, len(document)).tolist() for document in ids],
        "attention_mask": [[1] * len(document) for document in ids],
        "name": [f"document {place}" for place in range(number)],
    }
    return datasets.Dataset.from_dict(columns)


def masked(name: str, number: int = 60) -> datasets.Dataset:
    ids = documents(number, 5)
    masks = [[int(place >= len(document) // 3) for place in range(len(document))] for document in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, name: masks})


def related(prompts: int = 12, seed: int = 0) -> datasets.Dataset:
    """Return documents that share prompts, a few of which end inside others or repeat, with labels on what follows."""
    rng = np.random.default_rng(seed)
    ids, labels = [], []
    for _ in range(prompts):
        prompt = rng.integers(3, 1000, rng.integers(3, 30)).tolist()
        stem = rng.integers(3, 1000, 6).tolist()
        answers = [stem[: rng.integers(0, 7)] + rng.integers(3, 9, rng.integers(0, 20)).tolist() for _ in range(5)]
        for answer in [*answers, answers[0]]:
            ids.append(prompt + answer)
            labels.append([-100] * len(prompt) + answer)
    order = rng.permutation(len(ids))
    columns = {"input_ids": [ids[place] for place in order], "labels": [labels[place] for place in order]}
    return datasets.Dataset.from_dict(columns)


_WORDS = ["[UNK]", "<end>", "<user>", "<assistant>", "one", "two", "three", "four", "five", "six", "seven", "eight"]
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }} <end> {% endgeneration %}{% else %}{{ message.content }} <end> "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def save_tokenizer(folder: Path) -> str:
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", eos_token="<end>", chat_template=_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def words(rng: np.random.Generator, most: int = 20) -> str:
    return " ".join([*rng.choice(_WORDS[4:], rng.integers(1, most)).tolist(), "nine"])


def write_lines(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def _ids(kind: str) -> datasets.Features:
    return datasets.Features({"input_ids": datasets.List(datasets.Value(kind))})


Cases = dict[str, str | list[float]]
"""Names of cases, and what was found: a digest, a few words, or numbers that may differ in rounding."""


def digest(value: Any) -> str:
    """Return a digest of lists, dicts, strings, booleans, integers, and floats to 9 digits; arrays count as lists."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


def digest_of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    found = list(rows)
    return f"{len(found)} rows {digest(found)}"


def digest_of_dataset(dataset: datasets.Dataset) -> str:
    types = [[field.name, str(field.type)] for field in dataset.features.arrow_schema]
    return f"{digest_of_rows(dataset.to_list())} columns {digest(types)}"


def digest_of_batch(batch: Mapping[str, Any]) -> str:
    return digest(
        {
            name: [str(value.dtype), list(value.shape), value.tolist()] if hasattr(value, "dtype") else value
            for name, value in batch.items()
        }
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return value if set(map(type, value)) <= {int, bool, str} else [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return f"{value:.9g}" if isinstance(value, float) else value
