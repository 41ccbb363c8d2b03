"""Read documents, render them and tokenize them block by block; report what was read and what was left out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hf_packing.columns import IGNORED_LABEL, LOSS_MASKS, SEGMENT_COLUMNS, apply_loss_masks
from hf_packing.data.documents import DocumentRow, Documents
from hf_packing.data.rendering import ROW_KINDS, BadRowError, Rendered, kind_of_row, render
from hf_packing.data.tokenize import TextTokenizer
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import INT32_MAX, IntArray

_CHARACTERS_AT_ONCE = 2_000_000
"""About this many characters are tokenized in one call, which uses all cores."""
_ENDED = ("text", "prompt")
"""Kinds of rows that get an end token. A chat template writes its own."""
_PER_TOKEN = {"labels": (IGNORED_LABEL, INT32_MAX), "attention_mask": (0, INT32_MAX)} | dict.fromkeys(
    LOSS_MASKS, (0, 1)
)
"""The columns that are read beside input_ids, with the least and the greatest value of each."""

_Block = list[Any]
"""Documents: Rendered, or _TokenizedRow where rows have input_ids."""
Seen = Callable[[int], None]
"""Called with the number of documents read since the last call."""


@dataclass
class Corpus:
    """Documents of one place, and how they become tokens.

    Args:
        documents: to read.
        tokenizer: for texts; None where rows have input_ids.
        text_field: the field with the text, if it is not one of ROW_KINDS.
        end_documents: whether texts get the tokenizer's end-of-sequence token, if it has one.
        separator: between a prompt and a completion that are text; None for a line break.
    """

    documents: Documents
    tokenizer: TextTokenizer | None = None
    text_field: str | None = None
    end_documents: bool = True
    separator: str | None = None
    kind: str = field(default="", init=False)
    """The field that tells the kind of rows, set when the first row is read."""
    loss_masks: list[str] = field(default_factory=list, init=False)
    """Columns that the last iteration applied to the labels."""
    left_out: list[str] = field(default_factory=list, init=False)
    """Columns beside the tokens that the last iteration did not use."""
    _trained_by: tuple[str, ...] | None = field(default=None, init=False)
    """Columns that say what is trained on, set when the first row with tokens is read."""

    @property
    def should_end(self) -> bool:
        """Whether documents should get an end token."""
        return self.tokenizer is not None and self.end_documents and (self.kind in _ENDED or self.kind not in ROW_KINDS)

    @property
    def ends(self) -> bool:
        """Whether documents get an end token: not every tokenizer has one."""
        return self.should_end and self.tokenizer is not None and self.tokenizer.end is not None

    def lengths(self, seen: Seen) -> IntArray:
        """Return int64 [documents], tokens.

        Raises:
            PackingError: as `blocks`.
        """
        found = [np.zeros(0, dtype=np.int64)]
        for block in self.blocks():
            if self.kind == "input_ids":
                found.append(np.array([len(row.input_ids) for row in block], dtype=np.int64))
            else:
                assert self.tokenizer is not None
                found.append(self.tokenizer.lengths(block, self.ends))
            seen(len(block))
        return np.concatenate(found)

    def tokens_of(self, block: _Block) -> tuple[list[list[int]], list[list[int]]]:
        """Return the input_ids and the labels of a block of documents."""
        if self.kind == "input_ids":
            return [row.input_ids for row in block], [row.labels for row in block]
        assert self.tokenizer is not None
        return self.tokenizer.tokens(block, self.ends)

    def blocks(self) -> Iterator[_Block]:
        """Yield documents in blocks large enough that tokenizing one keeps all cores busy.

        Raises:
            PackingError: a row that cannot be used; an option that does not fit the rows.
        """
        self.kind, self._trained_by = "", None
        self.loss_masks.clear()
        self.left_out.clear()
        block: _Block = []
        size = 0
        for place, row in self.documents.with_places():
            try:
                self.kind = self.kind or kind_of_row(row, self.text_field)
                self._check_options()
                document = self._document(row)
            except BadRowError as error:
                self.documents.leave_out(f"{place}: {error}")
                continue
            block.append(document)
            size += len(document.text if isinstance(document, Rendered) else document.input_ids)
            if size >= _CHARACTERS_AT_ONCE:
                yield block
                block, size = [], 0
        if block:
            yield block

    def _document(self, row: DocumentRow) -> "Rendered | _TokenizedRow":
        if row.get(self.kind) is None:
            raise BadRowError(f"expected {self.kind} as in the rows before, got the fields {', '.join(row) or 'none'}")
        if self.kind == "input_ids":
            tokenized = _tokenized_row(row)
            self._check_labels(tokenized)
            self.loss_masks += [name for name in tokenized.loss_masks if name not in self.loss_masks]
            self.left_out += [name for name in tokenized.left_out if name not in self.left_out]
            return tokenized
        assert self.tokenizer is not None
        return render(row, self.kind, self.tokenizer.template, "\n" if self.separator is None else self.separator)

    def _check_labels(self, row: "_TokenizedRow") -> None:
        """Refuse a row without the labels or masks of the first row: all of its tokens would be trained on.

        Raises:
            BadRowError: other columns than in the first row.
        """
        self._trained_by = row.trained_by if self._trained_by is None else self._trained_by
        if row.trained_by != self._trained_by:
            expected, got = (" and ".join(names) or "no labels" for names in (self._trained_by, row.trained_by))
            raise BadRowError(f"expected {expected} beside input_ids as in the rows before, got {got}")

    def _check_options(self) -> None:
        """Raise if an option is missing, or would have no effect."""
        if self.kind != "input_ids" and self.tokenizer is None:
            raise PackingError(f"--tokenizer: expected one for documents with {self.kind}, got none")
        if self.kind == "input_ids" and self.tokenizer is not None:
            raise PackingError(
                "--tokenizer: expected none for documents with input_ids, which are tokenized already; --field names a "
                "field with text to tokenize instead"
            )
        if self.kind != "prompt" and self.separator is not None:
            raise PackingError(f"--separator: expected documents with prompt and completion, these have {self.kind}")


class _TokenizedRow(NamedTuple):
    """A row that is already tokenized."""

    input_ids: list[int]
    labels: list[int]
    loss_masks: list[str]
    """Columns that were applied to the labels."""
    trained_by: tuple[str, ...]
    """Columns that say what is trained on: labels and loss masks."""
    left_out: list[str]
    """Columns that are not used."""


def _tokenized_row(row: DocumentRow) -> _TokenizedRow:
    """Return the tokens of a row, and its labels with the row's loss masks applied.

    Raises:
        PackingError: the row is packed already.
        BadRowError: values that are not one number for each token.
    """
    if packed := row.keys() & set(SEGMENT_COLUMNS):
        raise PackingError(f"DATA: expected documents, got rows with {min(packed)}, which are packed already")
    input_ids = _whole_numbers("input_ids", row["input_ids"])
    per_token = {
        name: _whole_numbers(name, row[name], *limits)
        for name, limits in _PER_TOKEN.items()
        if row.get(name) is not None
    }
    for name, values in per_token.items():
        if len(values) != len(input_ids):
            raise BadRowError(f"expected as many {name} as the {len(input_ids)} input_ids, got {len(values)}")
    if other := set(per_token.get("attention_mask", [])) - {1}:
        raise BadRowError(f"expected documents without padding, attention_mask has a {min(other)}")
    masks = [name for name in LOSS_MASKS if name in per_token]
    labels = per_token.get("labels", input_ids)
    if masks:
        given = {name: np.array(per_token[name]) for name in masks}
        labels = apply_loss_masks(np.array(labels, np.int64), given).tolist()
    trained_by = tuple(name for name in per_token if name != "attention_mask")
    left_out = [name for name in row if name not in ("input_ids", *_PER_TOKEN)]
    return _TokenizedRow(input_ids, labels, masks, trained_by, left_out)


def _whole_numbers(name: str, values: Any, least: int = 0, most: int = INT32_MAX) -> list[int]:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    fits = array.ndim == 1 and (not array.size or array.dtype.kind in "iub")
    if not fits or (array.size and not least <= array.min() <= array.max() <= most):
        greatest = "2**31 - 1" if most == INT32_MAX else most
        raise BadRowError(f"expected a list of integers from {least} to {greatest} in {name}, got {str(values)[:40]}")
    return [int(value) for value in array]
