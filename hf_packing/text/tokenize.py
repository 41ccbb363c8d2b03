"""Turn texts, prompts with completions, and chats into tokens and labels, as SFTTrainer does.

Each text is tokenized as a whole. Some parts of a text are masked, that is, not trained on. Which tokens these are is
decided as in TRL, so that labels are equal:

- in chats by the characters of each token: a token is trained on if one of its characters is;
- in a prompt with a completion by tokenizing the prompt alone: the tokens that both results share at the beginning are
  masked. This also works for tokenizers that report no characters, or wrong ones.
"""

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import attrgetter, eq, itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.text.render import CHATML, TRAIN_ON, BadRowError, Rendered, Renderer, Span, reason_of

TOKEN_COLUMNS = datasets.Features(
    {INPUT_IDS: datasets.List(datasets.Value("int32")), LABELS: datasets.List(datasets.Value("int32"))}
)
_STREAMS = (datasets.IterableDataset, datasets.IterableDatasetDict)
_DICTS = (datasets.DatasetDict, datasets.IterableDatasetDict)

Tokens = tuple[list[list[int]], list[list[int]]]
"""The input_ids and the labels of documents."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, and how it turns rows into tokens. `text_tokenizer` makes one of a tokenizer of transformers."""

    backend: Any
    """A `tokenizers.Tokenizer`, or an object with the same methods."""
    renderer: Renderer
    """Turns rows into text."""
    end: int | None
    """The id of the token to append to texts that do not end with it; None for none. Chat templates write their own."""

    def tokens(self, rendered: Sequence[Rendered]) -> Tokens:
        """Return the input_ids and the labels of documents. The labels of tokens that are not trained on are -100."""
        input_ids, labels = [], []
        for document, encoding in zip(rendered, self._encode(rendered), strict=True):
            ids = encoding.ids
            trained = ids if document.trained is None else self._labels(document, document.trained, encoding)
            end = [] if document.complete or self.end is None or ids[-1:] == [self.end] else [self.end]
            input_ids.append([*ids, *end])
            labels.append([*trained, *end])
        return input_ids, labels

    def _labels(self, document: Rendered, parts: Sequence[Span], encoding: Any) -> list[int]:
        """Return the labels of a document of which some parts are trained on."""
        ids: list[int] = encoding.ids
        offsets: list[tuple[int, int]] = encoding.offsets if document.complete else []
        labels = [IGNORED_LABEL] * len(ids)
        # characters that a tokenizer drops move those of all later tokens: the last token seems to end too early
        exact = len(offsets) > 0 and offsets[-1][1] == len(document.text)
        for first, stop in parts:
            end = len(ids)
            if exact:
                begin = bisect_right(offsets, first, key=itemgetter(1))
                if stop < len(document.text):
                    end = bisect_left(offsets, stop, key=itemgetter(0))
            else:
                begin = self._tokens_before(first, document, encoding)
                if stop < len(document.text):
                    end = self._tokens_before(stop, document, encoding)
            labels[begin:end] = ids[begin:end]
        return labels

    def _tokens_before(self, edge: int, document: Rendered, encoding: Any) -> int:
        """Return the number of tokens that a document shares with its text before an edge, tokenized alone."""
        (before,) = self._encode([Rendered(document.text[:edge], complete=document.complete)])
        ids: list[int] = before.ids
        within = np.flatnonzero(~np.array(before.special_tokens_mask, dtype=bool))
        # the special tokens at the end are not in the document
        return num_shared(encoding.ids, ids[: within[-1] + 1] if len(within) else ids)

    def _encode(self, rendered: Sequence[Rendered]) -> list[Any]:
        """Return the encodings of documents. Chats get no special tokens, since the chat template has written them."""
        encodings: list[Any] = []
        for complete, group in groupby(rendered, attrgetter("complete")):
            documents = list(group)
            # the characters of each token, which cost time, are asked for only where labels depend on them
            exact = complete and any(each.trained is not None for each in documents)
            encode = self.backend.encode_batch if exact else self.backend.encode_batch_fast
            encodings += encode([each.text for each in documents], add_special_tokens=not complete)
        return encodings


def text_tokenizer(
    tokenizer: Any, chat_template: str | None = None, end_documents: bool = True, **options: Any
) -> TextTokenizer:
    """Return a `TextTokenizer` that wraps a tokenizer of transformers.

    Args:
        tokenizer: a PreTrainedTokenizerBase. Its padding and truncation, which would change lengths, are switched off.
        chat_template: the chat template; None for that of the tokenizer, or ChatML if it has none.
        end_documents: whether to append the end-of-sequence token to texts.
        options: `text_field`, `separator` and `train_on` of Renderer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        backend = _SlowBackend(tokenizer)
    else:
        backend.no_padding()
        backend.no_truncation()
    renderer = Renderer(tokenizer, chat_template or tokenizer.chat_template or CHATML, **options)
    return TextTokenizer(backend, renderer, tokenizer.eos_token_id if end_documents else None)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer of transformers.

    Args:
        name: name of a repository on the hub, path of a folder, or path of a tokenizer.json file.
        trust_remote_code: whether to run code that comes with the tokenizer. If False, such a tokenizer is refused.

    Raises:
        PackingError: no such tokenizer exists, or the tokenizer cannot be loaded.
    """
    try:
        if Path(name).is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast(tokenizer_file=name)
        from transformers import AutoTokenizer  # loads torch

        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # errors of the hub, the network or files; tokenizers raises bare exceptions
        raise PackingError(
            f"tokenizer: expected a name on the hub, a folder or a tokenizer.json, but {name!r} cannot be loaded "
            f"here: {reason_of(error)}"
        ) from None


class _SlowBackend:
    """A slow tokenizer, written in Python, with the methods of `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        options = {"add_special_tokens": add_special_tokens, "return_special_tokens_mask": True}
        encoded = [self.tokenizer(text, **options) for text in texts]
        return [SimpleNamespace(ids=each["input_ids"], offsets=(), **each) for each in encoded]

    encode_batch_fast = encode_batch


def num_shared(ids: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the number of leading items that two sequences share."""
    return sum(takewhile(bool, map(eq, ids, others)))


def tokenize(
    dataset: Any,
    tokenizer: Any,
    *,
    train_on: str | None = None,
    text_field: str | None = None,
    chat_template: str | None = None,
    num_proc: int | None = None,
) -> Any:
    """Turn texts, prompts with completions, or chats into `input_ids` and `labels`, as SFTTrainer does.

    Labels of tokens that are not trained on are -100. Texts and completions end with the end-of-sequence token of the
    tokenizer. Chats are written by the chat template, with the columns `tools` and `chat_template_kwargs` as its
    arguments, as in TRL.

    Args:
        dataset: Dataset, DatasetDict, IterableDataset or IterableDatasetDict; or a batch of `map`, as in
            `dataset.map(hfp.tokenize, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=...)`. Rows have
            `text`, or `prompt` and `completion` (both as text, or both as lists of messages), or `messages`.
        tokenizer: a tokenizer of transformers.
        train_on: "assistant" for the assistant's turns of chats, "completion" for what follows a prompt, "all" for all
            tokens. With None, "assistant" for messages, "completion" for prompts with completions, and "all" for texts.
            The template needs no `{% generation %}` marks for "assistant": if TRL has a training version of the
            template, that is taken, as SFTTrainer does; else a turn is what the template adds for it to the earlier
            messages and the generation prompt.
        text_field: name of the column with the text; None to take the first of `text`, `prompt` and `messages`.
        chat_template: a Jinja template to take instead of the tokenizer's.
        num_proc: number of processes for a Dataset.

    Returns:
        A dataset of the same kind, or a dict for a batch, with `input_ids` and `labels`: one list of integers [tokens]
        for each row, in the same order.

    Raises:
        PackingError: `train_on` is unknown or does not fit the rows; the columns are missing; a row has other types;
            the chat template does not accept a row, does not write its tools, or rewrites earlier turns so that the
            tokens to train on cannot be found.

    Warns:
        UserWarning: chats lack content, thinking or tool calls, which the template leaves out; or documents have no
            token to train on. The warnings give the numbers for each batch.

    Example:
        >>> import hf_packing as hfp
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> backend = Tokenizer(models.WordLevel({"user": 0, "assistant": 1, "<end>": 2, "Hi": 3, "Bye": 4}))
        >>> backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> template = (
        ...     "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
        ...     "{% if add_generation_prompt %}assistant {% endif %}"
        ... )
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=template)
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}]
        >>> documents = hfp.tokenize(datasets.Dataset.from_list([{"messages": chat}]), tokenizer)
        >>> documents["input_ids"][0]
        [0, 3, 2, 1, 4, 2]
        >>> documents["labels"][0]
        [-100, -100, -100, -100, 4, 2]
    """
    if train_on not in (None, *TRAIN_ON):
        raise PackingError(f"train_on: expected one of {', '.join(TRAIN_ON)}, or None, got {train_on!r}")
    if not callable(tokenizer) or not hasattr(tokenizer, "chat_template"):
        raise PackingError(f"tokenizer: expected a tokenizer of transformers, got {type(tokenizer).__name__}")
    options = {"tokenizer": tokenizer, "train_on": train_on, "text_field": text_field, "chat_template": chat_template}
    if isinstance(dataset, _DICTS):
        return type(dataset)({name: tokenize(each, num_proc=num_proc, **options) for name, each in dataset.items()})
    if not isinstance(dataset, (datasets.Dataset, *_STREAMS)):
        return _tokens_of(dataset, **options)
    names = dataset.column_names or list(next(iter(dataset), {}))
    settings = {"batched": True, "fn_kwargs": options, "remove_columns": names, "features": TOKEN_COLUMNS}
    if isinstance(dataset, datasets.IterableDataset):  # without the numbers of its rows, so that its shards stay apart
        return dataset.map(_tokens_of, **settings)
    return dataset.map(_tokens_of, with_indices=True, num_proc=num_proc, desc="Tokenizing", **settings)


def _tokens_of(
    batch: Mapping[str, Sequence[Any]], numbers: Sequence[int] | None = None, **options: Any
) -> dict[str, list[list[int]]]:
    """Return the tokens and labels of a batch of rows; `numbers` are those of the rows in the dataset."""
    if not isinstance(batch, Mapping) or any(isinstance(each, str) for each in batch.values()):
        raise PackingError(
            f"dataset: expected a dataset, or a batch of `map` with batched=True, got {type(batch).__name__}"
        )
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    texts = text_tokenizer(**options)
    rendered = []
    for number, row in enumerate(rows):
        try:
            rendered.append(texts.renderer.render(row))
        except BadRowError as error:
            place = f"row {number} of the batch" if numbers is None else f"row {numbers[number]}"
            raise PackingError(f"{place}: {error}") from None
    input_ids, labels = texts.tokens(rendered)
    of_rows = f"of {len(rows):,}"
    if lacking := sum(each.lacks_text for each in rendered):
        left_out = "content, thinking or tool calls, which the chat template leaves out"
        warnings.warn(f"tokenize: {lacking:,} {of_rows} chats lack {left_out}", stacklevel=2)
    if untrained := sum(not any(label >= 0 for label in each[1:]) for each in labels):
        warnings.warn(f"tokenize: {untrained:,} {of_rows} documents have no token to train on", stacklevel=2)
    return {INPUT_IDS: input_ids, LABELS: labels}
