"""Pairs of answers for the recipes: the user's, or made of the functions of the standard library."""

from collections.abc import Sequence

import datasets
from documents import read_documents


def read_pairs(
    data: str | None, needed: Sequence[str], optional: Sequence[str] = (), flag: str = "--data"
) -> datasets.Dataset:
    """Return the pairs of a dataset; without data, functions whose first lines are the prompts.

    Args:
        data: a file, or the name of a dataset; None for the standard library's functions.
        needed: columns that the dataset must have.
        optional: columns that are read too, if there.
        flag: the flag that has named the data.
    """
    rows = read_documents(data, flag)
    if data is None:
        return standard_library_pairs(rows)
    if missing := [name for name in needed if name not in rows.column_names]:
        raise SystemExit(f"{flag}: expected columns {', '.join(needed)}, got no {missing[0]}")
    return rows.select_columns([name for name in (*needed, *optional) if name in rows.column_names])


def standard_library_pairs(functions: datasets.Dataset) -> datasets.Dataset:
    """Return the rest of each function as the answer to its first line, and the rest of the next one as the worse."""
    halves = [text.split("\n", 1) for text in functions["text"] if "\n" in text.strip()]
    answers = [answer for _, answer in halves]
    others = answers[1:] + answers[:1]
    prompts = [line + "\n" for line, _ in halves]
    return datasets.Dataset.from_dict({"prompt": prompts, "chosen": answers, "rejected": others})
