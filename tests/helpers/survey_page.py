"""The page of supported models, and comparisons of what it says with what was measured."""

import re
from pathlib import Path

import transformers

from tools.survey.heads import HEADS, MeasuredHead
from tools.survey.measure import EXACT, Measured
from tools.survey.page import page
from tools.survey.pictures import MeasuredPictures
from tools.survey.trees import MeasuredTrees

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "SUPPORTED_MODELS.md").read_text()
IS_CURRENT = f"transformers {transformers.__version__} " in PAGE

Rows = dict[tuple[str, str], list[str]]
"""The cells of all tables, by the title of the section and the name of the architecture."""
COLUMN = "trees"
"""The column of trees in the table of causal models counts as a section of its own."""


def rows_of(text: str) -> Rows:
    rows: Rows = {}
    title, column = "", None
    for line in text.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| "):
            name, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            if name == "architecture":
                column = cells.index(COLUMN) if COLUMN in cells else None
            elif name != "---":
                if column is not None:
                    rows[COLUMN, name] = [cells.pop(column)]
                rows.setdefault((title, name), cells)  # the section of heads has a second table
    return rows


def rows_of_measured(measured: Measured | MeasuredPictures | MeasuredTrees) -> Rows:
    """What the page says of one model, without the column of heads."""
    if isinstance(measured, MeasuredPictures):
        return rows_of(page([], "", [], [measured]))
    if isinstance(measured, MeasuredTrees):
        in_column = {(COLUMN, measured.name): [measured.status]} if measured.status in ("exact", "WRONG") else {}
        return rows_of(page([], "", trees=[measured])) | in_column
    return rows_of(page([measured], ""))


def disagreements(measured, text: str) -> list[str]:
    """What a page says otherwise than what was measured."""
    said = rows_of(text)
    if isinstance(measured, MeasuredHead):
        key, number = ("Heads", measured.name), HEADS.index(measured.head)
        found, on_page = (rows.get(key, [""] * 4)[number] for rows in (rows_of(page([], "", [measured])), said))
        return [] if found == on_page else [f"{key}: {found}, the page has {on_page}"]
    return [
        f"{key}: {cells}, the page has {said.get(key)}"
        for key, cells in rows_of_measured(measured).items()
        if not _same_cells(cells, said.get(key, []))
    ]


def _same_cells(some: list[str], others: list[str]) -> bool:
    """Whether rows say the same, but for the size of figures, and for numbers in the reason in the last cell."""
    if len(some) != len(others):
        return False
    return same_reason(some[-1], others[-1]) and all(map(_same_cell, some[:-1], others[:-1]))


def _same_cell(one: str, other: str) -> bool:
    figures = [re.fullmatch(r"\d+(\.\d+)?e[+-]\d+", each) for each in (one, other)]
    return same_figure(one, other) if all(figures) else one == other


def masked(reason: str) -> str:
    """A reason without its numbers, which processors round differently, and without what follows from a set's order."""
    return re.sub(r"KeyError: '\w+'", "KeyError", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", reason))


def same_reason(one: str, other: str) -> bool:
    """Whether two reasons are the same but for numbers, which may shift where a long one is cut."""
    if one.endswith("...") and other.endswith("..."):
        one, other = masked(one[:-10]), masked(other[:-10])
        shorter = min(len(one), len(other))
        return one[:shorter] == other[:shorter]
    return masked(one) == masked(other)


def same_figure(one: str, other: str) -> bool:
    """Whether two figures are of about the same size, as far as processors round alike."""
    sizes = [max(float(each), 1e-6) for each in (one, other)]
    return max(sizes) <= 100 * min(sizes) and (sizes[0] > EXACT) == (sizes[1] > EXACT)
