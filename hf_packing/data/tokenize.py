"""Turn the texts of rows into tokens and labels, with the tokenizer that the user names.

Each text is tokenized as a whole. Some parts of a text are masked, that is, not trained on. To find the token at which
a masked part begins or ends, the text before that point is also tokenized alone. The two results share their leading
tokens, and the number of shared tokens is the index of the wanted token. TRL finds the end of a prompt in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from hf_packing.columns import IGNORED_LABEL
from hf_packing.data.documents import hub_answers, reason_of
from hf_packing.data.rendering import BadRowError, Rendered, Settings, Template, chatml
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with the settings that are needed to tokenize documents: the chat template and the end token."""

    name: str
    backend: Any
    """A `tokenizers.Tokenizer`, or an object with the same interface."""
    template: Template = chatml
    template_text: str = "ChatML"
    """A text that identifies the template: its source, and the special tokens that it may write."""
    end: int | None = None
    """The id of the end-of-sequence token; None if the tokenizer has none. A chat template writes end tokens itself."""

    def lengths(self, rendered: Sequence[Rendered], ended: bool) -> IntArray:
        """Return the number of tokens in every document, int64 [documents].

        Args:
            rendered: the documents.
            ended: whether to append the end token to documents that need one.
        """
        pairs = zip(rendered, self._encode(rendered), strict=True)
        lengths = [len(encoding) + len(self._end_of(each, encoding.ids, ended)) for each, encoding in pairs]
        return np.array(lengths, dtype=np.int64)

    def tokens(self, rendered: Sequence[Rendered], ended: bool) -> tuple[list[list[int]], list[list[int]]]:
        """Return the input_ids and the labels of documents. The labels of tokens that are not trained on are -100.

        Args:
            rendered: the documents.
            ended: whether to append the end token to documents that need one.
        """
        edges = [sorted({edge for piece in each.masked for edge in piece if edge}) for each in rendered]
        before = [
            each._replace(text=each.text[:edge])
            for each, places in zip(rendered, edges, strict=True)
            for edge in places
        ]
        before_edges = iter(self._encode(before))
        input_ids, labels = [], []
        for each, places, encoding in zip(rendered, edges, self._encode(rendered), strict=True):
            ids, end = encoding.ids, self._end_of(each, encoding.ids, ended)
            token_of = {0: 0} | {edge: num_shared(ids, _without_end(next(before_edges))) for edge in places}
            trained = list(ids)
            for first, stop in each.masked:
                masked = slice(token_of[first], token_of[stop])
                trained[masked] = [IGNORED_LABEL] * len(trained[masked])
            input_ids.append([*ids, *end])
            labels.append([*trained, *end])
        return input_ids, labels

    def _encode(self, rendered: Sequence[Rendered]) -> list[Encoding]:
        """Return the encodings of documents. Chats get no special tokens, since the chat template has written them."""
        encodings: list[Encoding] = []
        for complete, group in groupby(rendered, key=lambda each: each.complete):
            texts = [each.text for each in group]
            encodings += self.backend.encode_batch_fast(texts, add_special_tokens=not complete)
        return encodings

    def _end_of(self, document: Rendered, ids: Sequence[int], ended: bool) -> list[int]:
        """Return the tokens to append to a document: the end token, or none if the document needs no end token.

        Args:
            document: the document.
            ids: the input_ids of the document.
            ended: whether to append the end token to documents that need one: texts that do not end with it yet.
        """
        if not ended or document.complete or self.end is None or (ids and ids[-1] == self.end):
            return []
        return [self.end]


def load_tokenizer(name: str, trust_remote_code: bool = False) -> TextTokenizer:
    """Load a tokenizer and return it as a `TextTokenizer`.

    Args:
        name: name of a repository on the hub, path of a folder, or path of a tokenizer.json file.
        trust_remote_code: whether to run code that comes with the tokenizer. If False, such a tokenizer is refused.

    Raises:
        PackingError: no such tokenizer exists, or the tokenizer cannot be loaded.
    """
    path = Path(name)
    if path.is_file():
        try:
            return TextTokenizer(name, _without_limits(Tokenizer.from_file(str(path))))
        except Exception as error:  # tokenizers raises bare exceptions
            raise PackingError(
                f"tokenizer: expected a tokenizer.json file, got {name!r}, which cannot be loaded: {reason_of(error)}"
            ) from None
    from transformers import AutoTokenizer

    options = {"trust_remote_code": trust_remote_code, "local_files_only": not path.exists() and not hub_answers(name)}
    try:
        loaded = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # errors of the hub, the network or files
        raise PackingError(
            f"tokenizer: expected a name on the hub, a folder or a tokenizer.json, but {name!r} cannot be loaded "
            f"here: {reason_of(error)}"
        ) from None
    if not hasattr(loaded, "backend_tokenizer"):
        raise PackingError(f"tokenizer: expected a fast tokenizer, but {name!r} is a {type(loaded).__name__}")
    return text_tokenizer(loaded)


def text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """Return a `TextTokenizer` that wraps a tokenizer of transformers and its chat template.

    Args:
        tokenizer: a PreTrainedTokenizerBase. For a slow tokenizer, the `backend` of the result has no `to_str()`.
    """
    has_backend = hasattr(tokenizer, "backend_tokenizer")
    backend = _without_limits(tokenizer.backend_tokenizer) if has_backend else _SlowBackend(tokenizer)
    template = _template_of(tokenizer) if tokenizer.chat_template else chatml
    written_with = f"{tokenizer.chat_template} {tokenizer.special_tokens_map}"
    return TextTokenizer(tokenizer.name_or_path, backend, template, written_with, tokenizer.eos_token_id)


class _SlowBackend:
    """A wrapper that gives a slow tokenizer, written in Python, the interface of `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list["_SlowEncoding"]:
        options = {"add_special_tokens": add_special_tokens, "return_special_tokens_mask": True}
        encoded = self.tokenizer(texts, **options) if texts else {"input_ids": [], "special_tokens_mask": []}
        return list(map(_SlowEncoding, encoded["input_ids"], encoded["special_tokens_mask"]))


@dataclass
class _SlowEncoding:
    ids: list[int]
    special_tokens_mask: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def _template_of(tokenizer: Any) -> Template:
    def render(messages: Sequence[Any], ask: bool, settings: Settings) -> str:
        usual = {"tokenize": False, "add_generation_prompt": ask}
        try:
            return str(tokenizer.apply_chat_template(list(messages), **{**settings, **usual}))
        except Exception as error:  # templates may raise anything
            raise BadRowError(
                f"expected messages that the chat template accepts, got the error: {reason_of(error)}"
            ) from None

    return render


def _without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Switch off the padding and truncation of a tokenizer, which would change lengths, and return the tokenizer."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _without_end(text: Encoding) -> list[int]:
    """Return the token ids of an encoded text without the special tokens at the end of the text."""
    special = np.array(text.special_tokens_mask, dtype=bool)
    within = np.flatnonzero(~special)
    return text.ids[: within[-1] + 1] if len(within) else text.ids


def num_shared(ids: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the number of leading items that two sequences share.

    For token ids, the tokenizer's character offsets cannot replace this count: they are wrong after a character that
    the tokenizer drops.
    """
    pairs = zip(ids, others, strict=False)
    return next((number for number, (item, other) in enumerate(pairs) if item != other), min(len(ids), len(others)))
