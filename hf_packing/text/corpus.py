"""Read, render and tokenize documents block by block, and note which documents and columns were left out.

Rendering turns a row (a text, a prompt with its completion, or a chat) into one text. A block is a list of documents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hf_packing.checks import INT32_MAX
from hf_packing.columns import IGNORED_LABEL, LOSS_MASKS, SEGMENT_COLUMNS, apply_loss_masks
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.text.documents import DocumentRow, Documents
from hf_packing.text.rendering import ROW_KINDS, BadRowError, Rendered, kind_of_row, render
from hf_packing.text.text_tokenizer import TextTokenizer

_CHARACTERS_AT_ONCE = 2_000_000
"""Approximate number of characters to tokenize in one call, enough to use all cores."""
_ENDED = ("text", "prompt")
"""Kinds of rows to which an end token is appended. A chat needs none, since the chat template writes end tokens."""
_PER_TOKEN = {"labels": (IGNORED_LABEL, INT32_MAX), "attention_mask": (0, INT32_MAX)} | dict.fromkeys(
    LOSS_MASKS, (0, 1)
)
"""The columns that are read in addition to input_ids, with the least and the greatest allowed value of each column."""

_Block = list[Any]
"""A list of documents: `_TokenizedRow` objects if the rows have input_ids, otherwise `Rendered` objects."""
Seen = Callable[[int], None]
"""A callback that receives the number of documents read since the previous call."""


@dataclass
class Corpus:
    """Documents from one source, with the settings that turn the documents into tokens.

    Args:
        documents: the documents to read.
        tokenizer: the tokenizer for texts; None if the rows have input_ids.
        text_field: name of the field with the text; None to use the first of ROW_KINDS that a row has.
        end_documents: whether to append the tokenizer's end-of-sequence token to texts, if the tokenizer has one.
        separator: the text between a prompt and a completion that are both text; None for no text.
        train_on: one of TRAIN_ON; None for the assistant's turns of messages, for completions, and for whole texts.
    """

    documents: Documents
    tokenizer: TextTokenizer | None = None
    text_field: str | None = None
    end_documents: bool = True
    separator: str | None = None
    train_on: str | None = None
    kind: str = field(default="", init=False)
    """The field that determines the kind of the rows, set when the first row is read."""
    loss_masks: list[str] = field(default_factory=list, init=False)
    """Names of the mask columns that the last iteration applied to the labels."""
    left_out: list[str] = field(default_factory=list, init=False)
    """Names of the columns that the last iteration did not use."""
    trained: int = field(default=0, init=False)
    """Number of tokens to train on in all blocks given to `tokens_of`, without the first of each document."""
    lacking: int = field(default=0, init=False)
    """Number of chats of the last iteration with text that the chat template has left out."""
    _trained_by: tuple[str, ...] | None = field(default=None, init=False)
    """Names of the label and mask columns of the first row with input_ids."""

    @property
    def should_end(self) -> bool:
        """True if `end_documents` is True and the rows are texts or prompts, even if the tokenizer has no end token."""
        return self.tokenizer is not None and self.end_documents and (self.kind in _ENDED or self.kind not in ROW_KINDS)

    @property
    def ends(self) -> bool:
        """True if an end token is appended to texts that lack it.

        This requires that `should_end` is True, and that the tokenizer has an end token.
        """
        return self.should_end and self.tokenizer is not None and self.tokenizer.end is not None

    def lengths(self, seen: Seen, first: list[list[int]] | None = None) -> IntArray:
        """Return the number of tokens in every document, int64 [documents].

        Args:
            seen: called after every block with the number of documents in the block.
            first: a list to which the tokens of the first block of documents are added; None to keep no tokens.

        Raises:
            PackingError: for the same reasons as `blocks`.
        """
        found = [np.zeros(0, dtype=np.int64)]
        for block in self.blocks():
            input_ids, _ = self.tokens_of(block)
            found.append(np.array(list(map(len, input_ids)), dtype=np.int64))
            if first is not None and not first:
                first += input_ids
            seen(len(block))
        return np.concatenate(found)

    def tokens_of(self, block: _Block) -> tuple[list[list[int]], list[list[int]]]:
        """Return the input_ids and the labels of a block of documents, each as one list of integers per document."""
        if self.kind == "input_ids":
            input_ids, labels = [row.input_ids for row in block], [row.labels for row in block]
        else:
            assert self.tokenizer is not None
            input_ids, labels = self.tokenizer.tokens(block, self.ends)
        self.trained += sum(len(each[1:]) - each[1:].count(IGNORED_LABEL) for each in labels)
        return input_ids, labels

    def blocks(self) -> Iterator[_Block]:
        """Yield lists of documents. Each list, except the last one, is large enough to keep all tokenizer threads busy.

        Raises:
            PackingError: an option does not fit the rows; or a row cannot be used, unless `documents.skip_bad` is True.
        """
        self.kind, self._trained_by, self.trained, self.lacking = "", None, 0, 0
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
            raise BadRowError(
                f"expected the field {self.kind}, as in earlier rows, got the fields {', '.join(row) or 'none'}"
            )
        if self.kind == "input_ids":
            tokenized = _tokenized_row(row)
            self._check_labels(tokenized)
            self.loss_masks += [name for name in tokenized.loss_masks if name not in self.loss_masks]
            self.left_out += [name for name in tokenized.left_out if name not in self.left_out]
            return tokenized
        assert self.tokenizer is not None
        rendered = render(row, self.kind, self.tokenizer.template, self.separator or "", self.train_on)
        self.lacking += rendered.lacks_text
        return rendered

    def _check_labels(self, row: "_TokenizedRow") -> None:
        """Raise BadRowError unless a row has the same label and mask columns as the first row.

        Without this check, a row that lacks labels would be trained on as a whole.

        Raises:
            BadRowError: the row has other label or mask columns than the first row.
        """
        self._trained_by = row.trained_by if self._trained_by is None else self._trained_by
        if row.trained_by != self._trained_by:
            expected, got = (" and ".join(names) or "no labels" for names in (self._trained_by, row.trained_by))
            raise BadRowError(f"expected {expected} in addition to input_ids, as in earlier rows, got {got}")

    def _check_options(self) -> None:
        """Raise PackingError if an option of the command is missing, or would have no effect on rows of this kind."""
        if self.kind != "input_ids" and self.tokenizer is None:
            raise PackingError(f"tokenizer: expected a tokenizer for documents with {self.kind}, got none")
        if self.kind == "input_ids" and self.tokenizer is not None:
            raise PackingError(
                "tokenizer: expected no tokenizer, since documents with input_ids are already tokenized; to tokenize "
                "a text field instead, pass the name of that field as text_field"
            )
        if self.kind == "input_ids" and self.train_on is not None:
            raise PackingError(
                f"train_on: expected None for documents with input_ids, whose labels say it, got {self.train_on!r}"
            )
        if self.kind != "prompt" and self.separator is not None:
            raise PackingError(
                f"separator: expected documents with prompt and completion, got documents with {self.kind}"
            )


class _TokenizedRow(NamedTuple):
    """A document from a row with input_ids, which needs no tokenizer."""

    input_ids: list[int]
    labels: list[int]
    loss_masks: list[str]
    """Names of the mask columns that were applied to the labels."""
    trained_by: tuple[str, ...]
    """Names of the columns that decide which tokens are trained on: labels and loss masks."""
    left_out: list[str]
    """Names of the columns that are not used."""


def _tokenized_row(row: DocumentRow) -> _TokenizedRow:
    """Return a row's input_ids, its labels with its loss masks applied, and the names of the columns used or left out.

    Raises:
        PackingError: the row is packed already.
        BadRowError: a column does not have one valid integer for each token, or attention_mask marks padding.
    """
    if packed := row.keys() & set(SEGMENT_COLUMNS):
        raise PackingError(f"DATA: expected documents, got packed rows: only packed rows have the column {min(packed)}")
    input_ids = _whole_numbers("input_ids", row["input_ids"])
    per_token = {
        name: _whole_numbers(name, row[name], *limits)
        for name, limits in _PER_TOKEN.items()
        if row.get(name) is not None
    }
    for name, values in per_token.items():
        if len(values) != len(input_ids):
            raise BadRowError(
                f"expected {name} with one value for each of the {len(input_ids)} input_ids, got {len(values)} values"
            )
    if other := set(per_token.get("attention_mask", [])) - {1}:
        raise BadRowError(f"expected documents without padding, got a {min(other)} in attention_mask")
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
