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
TRAINED = ("completion_mask", "assistant_masks")
"""Columns that say which tokens are trained on."""


class Tokenised(NamedTuple):
    """A row that has its tokens."""

    input_ids: list[int]
    labels: list[int]


def tokenised(row: Row) -> Tokenised:
    """The tokens of a row that has them, and its labels; a mask of what to train on becomes labels."""
    if packed := {"seq_lengths", "position_ids"} & row.keys():
        raise PackingError(f"DATA: expected documents, rows with {min(packed)} are packed already")
    input_ids = whole_numbers("input_ids", row["input_ids"], least=0)
    per_token = {
        name: whole_numbers(name, row[name], least=IGNORED if name == "labels" else 0)
        for name in ("labels", "attention_mask", *TRAINED)
        if row.get(name) is not None
    }
    for name, values in per_token.items():
        if len(values) != len(input_ids):
            raise BadRowError(f"expected as many {name} as the {len(input_ids)} input_ids, got {len(values)}")
    if not all(per_token.get("attention_mask", [])):
        raise BadRowError("expected documents without padding, attention_mask has a 0")
    masks = [per_token[name] for name in TRAINED if name in per_token]
    masked = [token if all(kept) else IGNORED for token, *kept in zip(input_ids, *masks, strict=True)]
    return Tokenised(input_ids, per_token.get("labels", masked))


def whole_numbers(name: str, values: Any, least: int) -> list[int]:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    fits = array.ndim == 1 and (not array.size or array.dtype.kind in "iub")
    if not fits or (array.size and not least <= array.min() <= array.max() < 2**31):
        raise BadRowError(f"expected a list of integers from {least} to 2**31 - 1 in {name}, got {str(values)[:40]}")
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
        separator: between a prompt and a completion that are text.
    """

    documents: Documents
    tokenizer: TextTokenizer | None = None
    text_field: str | None = None
    end_documents: bool = True
    separator: str = "\n"
    kind: str = field(default="", init=False)
    """The field that rows are known by, once the first was read."""

    @property
    def to_be_ended(self) -> bool:
        """Whether documents ought to get a token at their end."""
        return self.tokenizer is not None and self.end_documents and (self.kind in ENDED or self.kind not in KINDS)

    @property
    def ended(self) -> bool:
        """Whether they get one, which not every tokenizer has."""
        return self.to_be_ended and self.tokenizer is not None and self.tokenizer.end is not None

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
        self.kind = ""
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
                yield block
                block, size = [], 0
        if block:
            yield block

    def document(self, row: Row) -> Rendered | Tokenised:
        if row.get(self.kind) is None:
            raise BadRowError(f"expected {self.kind} as in the rows before, the fields are {', '.join(row) or 'none'}")
        if self.kind == "input_ids":
            return tokenised(row)
        assert self.tokenizer is not None
        return render(row, self.kind, self.tokenizer.template, self.separator)

    def check_tokenizer(self) -> None:
        if self.kind != "input_ids" and self.tokenizer is None:
            raise PackingError(f"--tokenizer: expected one for documents with {self.kind}, got none")
