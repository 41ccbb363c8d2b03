"""Documents, rendered and tokenised block by block, with what was read and what was left out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.report.documents import Documents, Row
from hf_packing.report.rendering import KINDS, BadRowError, Rendered, kind_of_row, render
from hf_packing.report.tokenise import IGNORED, TextTokenizer

CHARACTERS_AT_ONCE = 2_000_000
"""About so many are tokenised in one call, which uses all cores."""
ENDED = ("text", "prompt")
"""Kinds that get a token at their end; a chat template ends its messages itself."""


class Tokenised(NamedTuple):
    """A row that has its tokens."""

    input_ids: list[int]
    labels: list[int]


def tokenised(row: Row) -> Tokenised:
    """The tokens of a row that has them, and its labels; a mask of what to train on becomes labels."""
    if packed := {"seq_lengths", "position_ids"} & row.keys():
        raise PackingError(f"DATA: expected documents, rows with {min(packed)} are packed already")
    input_ids = whole_numbers("input_ids", row["input_ids"])
    if (mask := row.get("attention_mask")) is not None and not all(mask):
        raise BadRowError("expected documents without padding, attention_mask has a 0")
    labels = row.get("labels")
    if labels is None:
        masks = [row[name] for name in ("completion_mask", "assistant_masks") if row.get(name) is not None]
        labels = [token if all(kept) else IGNORED for token, *kept in zip(input_ids, *masks, strict=False)]
    labels = whole_numbers("labels", labels)
    if len(labels) != len(input_ids):
        raise BadRowError(f"expected as many labels as the {len(input_ids)} input_ids, got {len(labels)}")
    return Tokenised(input_ids, labels)


def whole_numbers(name: str, values: Any) -> list[int]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array.size and array.max() >= 2**31):
        raise BadRowError(f"expected a list of integers below 2**31 in {name}, got {str(values)[:40]}")
    return [int(value) for value in array]


Block = list[Any]
"""Rendered, or Tokenised where rows have input_ids."""
Seen = Callable[[int], None]
"""Is told how many documents were read since it was last called."""


@dataclass
class Corpus:
    """What is read, and how it becomes tokens.

    Args:
        documents: from one place.
        tokenizer: of texts; None where rows have input_ids.
        text_field: the field with the text, where it is none that is known.
        end_documents: whether texts get the tokenizer's end-of-sequence token, if it has one.
    """

    documents: Documents
    tokenizer: TextTokenizer | None = None
    text_field: str | None = None
    end_documents: bool = True
    kind: str = field(default="", init=False)
    """The field that rows are known by, once the first was read."""
    characters: int = field(default=0, init=False)
    """Of all texts."""

    @property
    def ended(self) -> bool:
        """Whether documents get a token at their end."""
        has_end = self.tokenizer is not None and self.tokenizer.end is not None
        return has_end and self.end_documents and (self.kind in ENDED or self.kind not in KINDS)

    def lengths(self, seen: Seen) -> IntArray:
        """int64 [documents], tokens."""
        found = [np.zeros(0, dtype=np.int64)]
        for block in self.blocks():
            if self.kind == "input_ids":
                found.append(np.array([len(row.input_ids) for row in block], dtype=np.int64))
            else:
                assert self.tokenizer is not None
                found.append(self.tokenizer.lengths(block, self.ended))
            seen(len(block))
        return np.concatenate(found)

    def tokens_of(self, block: Block) -> tuple[list[list[int]], list[list[int]]]:
        """input_ids and labels of a block of documents."""
        if self.kind == "input_ids":
            return [row.input_ids for row in block], [row.labels for row in block]
        assert self.tokenizer is not None
        return self.tokenizer.tokens(block, self.ended)

    def blocks(self) -> Iterator[Block]:
        """Documents, so many at once that tokenising them keeps all cores busy.

        Raises:
            PackingError: a row that has no text, or no tokenizer for one that has.
        """
        self.kind, self.characters = "", 0
        block: Block = []
        size = 0
        for place, row in self.documents.with_places():
            try:
                self.kind = self.kind or kind_of_row(row, self.text_field)
                self.check_tokenizer()
                document = self.document(row)
            except BadRowError as error:
                self.documents.leave_out(f"{place}: {error}")
                continue
            block.append(document)
            size += len(document.text if isinstance(document, Rendered) else document.input_ids)
            if size >= CHARACTERS_AT_ONCE:
                self.characters += size
                yield block
                block, size = [], 0
        self.characters += size
        if block:
            yield block

    def document(self, row: Row) -> Rendered | Tokenised:
        if row.get(self.kind) is None:
            raise BadRowError(f"expected {self.kind} as in the rows before, the fields are {', '.join(row) or 'none'}")
        if self.kind == "input_ids":
            return tokenised(row)
        assert self.tokenizer is not None
        return render(row, self.kind, self.tokenizer.template)

    def check_tokenizer(self) -> None:
        if self.kind != "input_ids" and self.tokenizer is None:
            raise PackingError(f"--tokenizer: expected one for documents with {self.kind}, got none")
