"""Predict answers from the logits of windows, and compare them with the right ones as SQuAD does."""

import re
import string
from collections import Counter

import datasets
import numpy as np
from transformers import EvalPrediction


def exact_match_and_f1(
    predicted: EvalPrediction, windows: datasets.Dataset, rows: datasets.Dataset, max_answer_tokens: int
) -> dict[str, float]:
    """Return the mean exact match and F1 over the rows, of 100."""
    found = predict(*predicted.predictions, windows, rows, max_answer_tokens)
    scores = [best_of(text, answers["text"]) for text, answers in zip(found, rows["answers"], strict=True)]
    exact, f1 = np.mean(scores, axis=0) * 100
    return {"exact_match": float(exact), "f1": float(f1)}


def predict(
    starts: np.ndarray, ends: np.ndarray, windows: datasets.Dataset, rows: datasets.Dataset, max_answer_tokens: int
) -> list[str]:
    """Return the text of the best span of each row's windows.

    If a row has no answer, no answer is one of the predictions: that of the first tokens, in the window where they are
    least probable.

    Args:
        starts: logits of the first token, float [windows, tokens].
        ends: logits of the last token, float [windows, tokens].
        windows: with row and offsets.
        rows: with context and answers.
        max_answer_tokens: longest answer.
    """
    best: list[tuple[float, int, int]] = [(-np.inf, 0, 0)] * len(rows)
    none = np.full(len(rows), np.inf)
    for row, offsets, start, end in zip(windows["row"], windows["offsets"], starts, ends, strict=True):
        none[row] = min(none[row], start[0] + end[0])
        places = np.array(offsets)
        inside = np.flatnonzero(places[:, 0] >= 0)
        if not len(inside):
            continue
        spans = start[inside][:, None] + end[inside][None]
        length = np.subtract.outer(inside, inside).T
        spans[(length < 0) | (length >= max_answer_tokens)] = -np.inf
        first, last = np.unravel_index(spans.argmax(), spans.shape)
        if spans[first, last] > best[row][0]:
            best[row] = (spans[first, last], *places[inside[[first, last]], [0, 1]])
    may_be_none = not all(answers["text"] for answers in rows["answers"])
    return [
        "" if may_be_none and nothing >= logit else context[first:last]
        for context, (logit, first, last), nothing in zip(rows["context"], best, none, strict=True)
    ]


def best_of(text: str, answers: list[str]) -> tuple[float, float]:
    """Return whether a text is one of the right answers, and the highest F1 of its words with one of them."""
    words = _words(text)
    right = [_words(answer) for answer in answers] or [[]]
    return float(words in right), max(_f1(words, each) for each in right)


def _words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    return 2 * (Counter(words) & Counter(right)).total() / (len(words) + len(right))
