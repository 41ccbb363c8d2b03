"""Cut rows of SQuAD into windows of tokens, and find the tokens of the answers."""

from typing import Any

import datasets
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

NO_ANSWER = 0
"""Place of the answer in a window that does not have all of it."""
OUTSIDE = [-1, -1]
"""Characters of a token that is not in the context."""


def cut_into_windows(
    rows: datasets.Dataset, flag: str, tokenizer: PreTrainedTokenizerBase, max_length: int, doc_stride: int
) -> datasets.Dataset:
    """Return windows of question and context, and say how many there are, and how many have no answer.

    Beside the model's inputs, with `start_positions` and `end_positions`, windows have the columns `row`, the number of
    their row, and `offsets`, the first and the last character of each token in the context, or -1.

    Args:
        rows: question, context and answers.
        flag: where the rows come from, for errors.
        tokenizer: a fast one.
        max_length: tokens of a window.
        doc_stride: tokens that two windows of a context share.
    """

    def cut(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, Any]:
        asked = [question.lstrip() for question in batch["question"]]  # SQuAD has questions of a thousand spaces
        alone = tokenizer(asked, [""] * len(asked))["input_ids"]
        for question, tokens in zip(asked, alone, strict=True):
            if len(tokens) + doc_stride >= max_length:
                raise SystemExit(
                    f"{flag}: expected questions of less than --max_length - --doc_stride = {max_length - doc_stride} "
                    f"tokens, got {len(tokens)}: {question[:60]!r}"
                )
        encoded = tokenizer(
            *(asked, batch["context"]),
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        of_row = encoded.pop("overflow_to_sample_mapping")
        offsets = [
            [
                list(place) if part == 1 else OUTSIDE
                for place, part in zip(places, encoded.sequence_ids(window), strict=True)
            ]
            for window, places in enumerate(encoded.pop("offset_mapping"))
        ]
        places = [
            answer_in(window, _answer(batch, row, f"{flag}, row {numbers[row]}"))
            for window, row in zip(offsets, of_row, strict=True)
        ]
        starts, ends = (list(each) for each in zip(*places, strict=True))
        columns = {"start_positions": starts, "end_positions": ends, "offsets": offsets}
        return {**encoded, **columns, "row": [numbers[row] for row in of_row]}

    windows = rows.map(
        cut, batched=True, with_indices=True, remove_columns=rows.column_names, desc="Cutting into windows"
    )
    _say_what_is_lost(rows, windows, max_length)
    return windows


def answer_in(offsets: list[list[int]], answer: tuple[int, int] | None) -> tuple[int, int]:
    """Return the first and the last token of an answer, or NO_ANSWER twice if the window does not have all of it.

    Args:
        offsets: first and last character of each token; -1 outside of the context.
        answer: first and last character, the last one exclusive; None if there is none.
    """
    if answer is None:
        return NO_ANSWER, NO_ANSWER
    start, end = answer
    inside = [token for token, (first, last) in enumerate(offsets) if first < end and last > start and last > first]
    if not inside or offsets[inside[0]][0] > start or offsets[inside[-1]][1] < end:
        return NO_ANSWER, NO_ANSWER
    return inside[0], inside[-1]


def _answer(batch: dict[str, list[Any]], row: int, where: str) -> tuple[int, int] | None:
    """Return the first answer's first and last character, or None if the row has no answer."""
    answers = batch["answers"][row]
    if not answers["text"]:
        return None
    text, start = answers["text"][0], answers["answer_start"][0]
    found = batch["context"][row][start : start + len(text)]
    if found != text or not text:
        raise SystemExit(f"{where}: expected the answer {text!r} in the context at character {start}, got {found!r}")
    return start, start + len(text)


def _say_what_is_lost(rows: datasets.Dataset, windows: datasets.Dataset, max_length: int) -> None:
    has_answer = {number for number, answers in enumerate(rows["answers"]) if answers["text"]}
    pairs = list(zip(windows["row"], windows["start_positions"], strict=True))
    without = sum(start == NO_ANSWER for _, start in pairs)
    lost = len(has_answer - {row for row, start in pairs if start != NO_ANSWER})
    PartialState().print(
        f"{len(rows):,} questions, {len(has_answer):,} with an answer, in {len(windows):,} windows of at most "
        f"{max_length} tokens. {without:,} windows do not have the answer and point to the first token; the answers to "
        f"{lost:,} questions are in no window"
    )
