"""Sets of documents that share prefixes, made of the texts in the folder that HF_PACKING_DATA names.

Thinking, sampled answers, preference pairs and prompts of a fixed length are random tokens; everything else is text. A
document trains on its last part: the answer of a turn, the chosen or rejected answer, a sample, or an option.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

DATA = Path(os.environ.get("HF_PACKING_DATA") or Path(__file__).parents[2] / "shared" / "data")
TURN_START, TURN_END, FIRST_TOKEN, VOCABULARY = 1, 2, 4, 8192
Tokens = list[int]
Document = tuple[Tokens, int]
"""The tokens of a document, and the number of tokens before those that it trains on."""


class Documents(NamedTuple):
    """A set of documents."""

    tokens: np.ndarray
    """int32 [tokens]: the tokens of all documents."""
    lengths: np.ndarray
    """int64 [documents]"""
    trained_from: np.ndarray
    """int64 [documents]: index of the first token that a document trains on."""

    def as_dataset(self, labels: bool = True) -> datasets.Dataset:
        """Return a Dataset in memory, with input_ids and, unless labels is False, labels."""
        ends = np.cumsum(self.lengths)
        columns = {"input_ids": self.tokens}
        if labels:
            trained = np.arange(len(self.tokens)) >= np.repeat(ends - self.lengths + self.trained_from, self.lengths)
            columns["labels"] = np.where(trained, self.tokens, np.int32(-100))
        offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        lists = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in columns.items()}
        return datasets.Dataset(pa.table(lists))

    def fitting(self, max_length: int) -> "Documents":
        """Return the documents of at most max_length tokens."""
        fits = self.lengths <= max_length
        return Documents(self.tokens[np.repeat(fits, self.lengths)], self.lengths[fits], self.trained_from[fits])


def collect(documents: Iterator[Document]) -> Documents:
    found = list(documents)
    lengths = np.array([len(tokens) for tokens, _ in found], dtype=np.int64)
    flat = np.fromiter((token for tokens, _ in found for token in tokens), dtype=np.int32, count=int(lengths.sum()))
    return Documents(flat, lengths, np.array([first for _, first in found], dtype=np.int64))


def read_rows(name: str, number: int) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line, _ in zip(file, range(number), strict=False)]


class Texts:
    """Tokenize texts with the tokenizer of the shared data."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))

    def __call__(self, texts: list[str]) -> list[Tokens]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]


def random_tokens(rng: np.random.Generator, number: int) -> Tokens:
    return rng.integers(FIRST_TOKEN, VOCABULARY, number).tolist()


def chat_turns(chats: int = 800, thinking: tuple[int, int] = (200, 600)) -> Iterator[Document]:
    """One document for each turn of an assistant: all turns before it without their thinking, and the turn with it."""
    rng, encode = np.random.default_rng(0), Texts()
    for row in read_rows("chat", chats):
        messages = row["messages"]
        heads = encode([f"{message['role']}\n" for message in messages])
        contents = encode([message["content"] or "" for message in messages])
        history: Tokens = []
        for message, head, content in zip(messages, heads, contents, strict=True):
            prompt = [*history, TURN_START, *head]
            if message["role"] == "assistant":
                thought = random_tokens(rng, rng.integers(*thinking))
                yield [*prompt, *thought, *content, TURN_END], len(prompt)
            history = [*prompt, *content, TURN_END]


def random_pairs(pairs: int = 300) -> Iterator[Document]:
    """Two answers for each prompt, with lengths like those of preference data; half of a document is the prompt."""
    rng = np.random.default_rng(0)
    for length in np.clip(rng.lognormal(6.44, 0.93, pairs), 20, 5500).astype(int).tolist():
        prompt = random_tokens(rng, max(1, int(length * np.clip(rng.normal(0.5, 0.15), 0.05, 0.95))))
        for _ in range(2):
            answer = random_tokens(rng, max(1, int((length - len(prompt)) * rng.uniform(0.6, 1.2))))
            yield prompt + answer, len(prompt)


def random_samples(prompts: int, each: int, prompt: int, answer: int) -> Iterator[Document]:
    """Several answers to each prompt, of half to one and a half times these lengths."""
    rng = np.random.default_rng(0)
    for _ in range(prompts):
        begin = random_tokens(rng, int(prompt * rng.uniform(0.5, 1.5)))
        for _ in range(each):
            yield begin + random_tokens(rng, int(answer * rng.uniform(0.5, 1.5))), len(begin)


def chat_pairs(chats: int = 1000) -> Iterator[Document]:
    """Pairs with a conversation of up to four turns as the prompt; an answer of another conversation is rejected."""
    encode, rows = Texts(), read_rows("chat", chats)
    for number, row in enumerate(rows):
        messages, others = row["messages"], rows[(number + 1) % len(rows)]["messages"]
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        last = answers[min(3, len(answers) - 1)]
        rejected = next(message["content"] for message in others if message["role"] == "assistant")
        turns = encode([f"{message['role']}\n{message['content']}" for message in messages[:last]])
        prompt = [token for turn in turns for token in (TURN_START, *turn, TURN_END)] + [TURN_START]
        for answer in encode([f"assistant\n{text}" for text in (messages[last]["content"], rejected)]):
            yield [*prompt, *answer, TURN_END], len(prompt)


def samples(questions: int = 500, each: int = 8, prompt: int | None = None, longer: float = 1.0) -> Iterator[Document]:
    """Several random answers for each question of GSM8K, about as long as the real answer.

    Args:
        questions: number of questions.
        each: number of answers for each question.
        prompt: mean number of random tokens to use instead of a question.
        longer: factor by which answers are longer than the real ones.
    """
    rng, encode, rows = np.random.default_rng(0), Texts(), read_rows("math", questions)
    asked, answers = (encode([row[name] for row in rows]) for name in ("prompt", "completion"))
    for question, answer in zip(asked, answers, strict=True):
        begin = question if prompt is None else random_tokens(rng, int(prompt * rng.uniform(0.5, 1.5)))
        for _ in range(each):
            yield begin + random_tokens(rng, max(1, int(len(answer) * longer * rng.uniform(0.5, 1.5)))), len(begin)


def few_shot(questions: int = 500, shots: int = 5, options: int = 4) -> Iterator[Document]:
    """Questions of GSM8K after the same solved examples, each with several options, from other questions' answers."""
    encode, rows = Texts(), read_rows("math", questions + shots)
    examples = encode([f"{row['prompt']}\n{row['completion']}\n\n" for row in rows[:shots]])
    header = [token for example in examples for token in example]
    for number, question in enumerate(encode([row["prompt"] for row in rows[shots:]])):
        prompt = header + question
        texts = [rows[(number * 7 + option * 13) % questions]["completion"] for option in range(options)]
        for answer in encode([text.split("\n")[0] for text in texts]):
            yield prompt + answer, len(prompt)


def short_documents(documents: int = 400_000, each: int = 4) -> Documents:
    """Random documents of 67 tokens on average, in groups that share 30 tokens, in random order."""
    rng = np.random.default_rng(0)
    lengths = 30 + rng.integers(15, 60, documents)
    tokens = rng.integers(FIRST_TOKEN, VOCABULARY, int(lengths.sum()), dtype=np.int32)
    prompts = rng.integers(FIRST_TOKEN, VOCABULARY, (documents // each, 30), dtype=np.int32)
    begin = np.cumsum(lengths) - lengths
    tokens[begin[rng.permutation(documents)][:, None] + np.arange(30)] = np.repeat(prompts, each, axis=0)
    return Documents(tokens, lengths, np.full(documents, 30))


SETS: dict[str, Callable[..., Iterator[Document]]] = {
    "chats, thinking stripped": chat_turns,
    "random pairs, prompt half": random_pairs,
    "pairs of conversations": chat_pairs,
    "8 samples of GSM8K": samples,
    "8 samples, 4 times as long": partial(samples, longer=4.0),
    "8 samples, prompt of 1,000": partial(samples, prompt=1000),
    "5-shot, 4 options": few_shot,
}
"""Functions that make the documents of a set, by the name of the set."""


def documents_of(name: str, number: int | None = None) -> Documents:
    """Return a set of documents by its name in SETS; `number` is the number of chats, pairs or questions to read."""
    return collect(SETS[name]() if number is None else SETS[name](number))
