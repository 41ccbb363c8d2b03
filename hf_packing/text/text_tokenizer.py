"""Turn the texts of rows into tokens and labels, with the tokenizer that the user names.

Each text is tokenized as a whole. Some parts of a text are masked, that is, not trained on. Which tokens these are is
decided as in TRL, so that labels are equal:

- in chats by the characters of each token: a token is trained on if one of its characters is;
- in a prompt with a completion by tokenizing the prompt alone: the tokens that both results share at the beginning are
  masked. This also works for tokenizers that report no characters, or wrong ones.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.text.documents import hub_answers, reason_of
from hf_packing.text.rendering import CHATML, BadRowError, ChatTemplate, Rendered, Settings, Span
from hf_packing.versions import installed


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with the settings that are needed to tokenize documents: the chat template and the end token."""

    name: str
    backend: Any
    """A `tokenizers.Tokenizer`, or an object with the same interface."""
    template: ChatTemplate = CHATML
    template_text: str = "ChatML"
    """A text that identifies the template: its source, and the special tokens that it may write."""
    end: int | None = None
    """The id of the end-of-sequence token; None if the tokenizer has none. A chat template writes end tokens itself."""

    def tokens(self, rendered: Sequence[Rendered], ended: bool) -> tuple[list[list[int]], list[list[int]]]:
        """Return the input_ids and the labels of documents. The labels of tokens that are not trained on are -100.

        Args:
            rendered: the documents.
            ended: whether to append the end token to documents that need one.
        """
        input_ids, labels = [], []
        for each, encoding in zip(rendered, self._encode(rendered, characters=True), strict=True):
            ids, end = encoding.ids, self._end_of(each, encoding.ids, ended)
            trained = np.array(ids, dtype=np.int64)
            for masked in self._masked(each, encoding):
                trained[masked] = IGNORED_LABEL
            input_ids.append([*ids, *end])
            labels.append([*trained.tolist(), *end])
        return input_ids, labels

    def _masked(self, document: Rendered, encoding: Encoding) -> Iterator[slice]:
        """Yield the tokens of each masked part of a document."""
        offsets = np.array(encoding.offsets if document.masked else (), dtype=np.int64).reshape(-1, 2)
        # characters that a tokenizer drops move those of all later tokens: the last token seems to end too early
        if document.complete and len(offsets) and offsets[-1, 1] == len(document.text):
            starts, stops = offsets.T
            for first, stop in document.masked:
                yield slice(int(np.searchsorted(starts, first)), int(np.searchsorted(stops, stop, "right")))
            return
        for first, stop in document.masked:
            yield slice(
                first and self._tokens_before(first, document, encoding), self._tokens_before(stop, document, encoding)
            )

    def _tokens_before(self, edge: int, document: Rendered, encoding: Encoding) -> int:
        """Return the number of tokens that a document shares with its text before an edge, tokenized alone."""
        (before,) = self._encode([document._replace(text=document.text[:edge])])
        return num_shared(encoding.ids, _without_end(before))

    def _encode(self, rendered: Sequence[Rendered], characters: bool = False) -> list[Encoding]:
        """Return the encodings of documents. Chats get no special tokens, since the chat template has written them.

        Args:
            rendered: the documents.
            characters: whether encodings of chats with masked parts say which characters belong to each token.
        """
        encodings: list[Encoding] = []
        for (complete, exact), group in groupby(
            rendered, lambda each: (each.complete, characters and bool(each.masked))
        ):
            texts = [each.text for each in group]
            encode = self.backend.encode_batch if complete and exact else self.backend.encode_batch_fast
            encodings += encode(texts, add_special_tokens=not complete)
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


def text_tokenizer(tokenizer: Any, chat_template: str | None = None) -> TextTokenizer:
    """Return a `TextTokenizer` that wraps a tokenizer of transformers and its chat template.

    Args:
        tokenizer: a PreTrainedTokenizerBase. For a slow tokenizer, the `backend` of the result has no `to_str()`.
        chat_template: the chat template; None for that of the tokenizer.
    """
    has_backend = hasattr(tokenizer, "backend_tokenizer")
    backend = _without_limits(tokenizer.backend_tokenizer) if has_backend else _SlowBackend(tokenizer)
    source = chat_template or tokenizer.chat_template
    template = _template_of(tokenizer, source) if source else CHATML
    if source and source == tokenizer.chat_template:
        template = replace(template, training=cache(partial(_training_version, tokenizer)))
    written_with = f"{source} {tokenizer.special_tokens_map} trl {installed('trl')}"
    return TextTokenizer(tokenizer.name_or_path, backend, template, written_with, tokenizer.eos_token_id)


class _SlowBackend:
    """A wrapper that gives a slow tokenizer, written in Python, the interface of `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list["_SlowEncoding"]:
        options = {"add_special_tokens": add_special_tokens, "return_special_tokens_mask": True}
        encoded = self.tokenizer(texts, **options) if texts else {"input_ids": [], "special_tokens_mask": []}
        return list(map(_SlowEncoding, encoded["input_ids"], encoded["special_tokens_mask"]))

    encode_batch_fast = encode_batch


@dataclass
class _SlowEncoding:
    ids: list[int]
    special_tokens_mask: list[int]
    offsets: tuple[()] = ()

    def __len__(self) -> int:
        return len(self.ids)


_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a template marks the assistant's parts; transformers looks for the same pattern."""


def _training_version(tokenizer: Any) -> ChatTemplate | None:
    """Return TRL's training version of a tokenizer's chat template; None if TRL is missing or has none."""
    try:
        from trl import get_training_chat_template
    except ImportError:
        return None
    try:
        version = get_training_chat_template(tokenizer)
    except ValueError:  # a template that TRL does not know
        return None
    return version and _template_of(tokenizer, version)


def _template_of(tokenizer: Any, source: Any) -> ChatTemplate:
    """Return a tokenizer's chat template as functions.

    Args:
        tokenizer: the tokenizer.
        source: the template's text, or several by name.
    """

    def checked(settings: Settings) -> str:
        text: str = tokenizer.get_chat_template(source if isinstance(source, str) else None, settings.get("tools"))
        if settings.get("tools") and "tools" not in text:
            raise BadRowError("expected a chat template that writes tools, since the row has tools")
        return text

    def write(messages: Sequence[Mapping[str, Any]], ask: bool, settings: Settings) -> str:
        options = {**settings, "chat_template": checked(settings), "tokenize": False, "add_generation_prompt": ask}
        try:
            return str(tokenizer.apply_chat_template(list(messages), **options))
        except Exception as error:  # templates may raise anything
            raise _refused(error) from None

    def mark(messages: Sequence[Mapping[str, Any]], settings: Settings) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template  # apply_chat_template calls it

        options = {**tokenizer.special_tokens_map, **settings, "chat_template": checked(settings)}
        try:
            (text,), (spans,) = render_jinja_template([list(messages)], return_assistant_tokens_mask=True, **options)
        except Exception as error:  # templates may raise anything
            raise _refused(error) from None
        return text, spans

    has_marks = isinstance(source, str) and _MARKS.search(source)
    return ChatTemplate(write, _special_tokens(tokenizer), mark if has_marks else None)


def _refused(error: Exception) -> BadRowError:
    return BadRowError(f"expected messages that the chat template accepts, got the error: {reason_of(error)}")


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return all special tokens of a tokenizer as texts, also those without a name such as `eos_token`."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple({*tokenizer.all_special_tokens, *added})


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
    """Return the number of leading items that two sequences share."""
    pairs = zip(ids, others, strict=False)
    return next((number for number, (item, other) in enumerate(pairs) if item != other), min(len(ids), len(others)))
