"""`tokenize` turns texts, prompts with completions, and chats into tokens and labels, as SFTTrainer does."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import datasets

from hf_packing.columns import INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.text.rendering import TRAIN_ON, BadRowError, kind_of_row, render
from hf_packing.text.text_tokenizer import text_tokenizer

_COLUMNS = datasets.Features(
    {INPUT_IDS: datasets.List(datasets.Value("int32")), LABELS: datasets.List(datasets.Value("int32"))}
)
_STREAMS = (datasets.IterableDataset, datasets.IterableDatasetDict)
_DICTS = (datasets.DatasetDict, datasets.IterableDatasetDict)


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
    settings = {"batched": True, "fn_kwargs": options, "remove_columns": names, "features": _COLUMNS}
    if isinstance(dataset, datasets.IterableDataset):  # without the numbers of its rows, so that its shards stay apart
        return dataset.map(_tokens_of, **settings)
    return dataset.map(_tokens_of, with_indices=True, num_proc=num_proc, desc="Tokenizing", **settings)


def _tokens_of(
    batch: Mapping[str, Sequence[Any]],
    numbers: Sequence[int] | None = None,
    *,
    tokenizer: Any,
    train_on: str | None,
    text_field: str | None,
    chat_template: str | None,
) -> dict[str, list[list[int]]]:
    """Return the tokens and labels of a batch of rows; `numbers` are those of the rows in the dataset."""
    if not isinstance(batch, Mapping) or any(isinstance(each, str) for each in batch.values()):
        raise PackingError(
            f"dataset: expected a dataset, or a batch of `map` with batched=True, got {type(batch).__name__}"
        )
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    texts = text_tokenizer(tokenizer, chat_template)
    rendered = []
    for number, row in enumerate(rows):
        try:
            kind = kind_of_row(row, text_field)
            if kind == INPUT_IDS:
                raise BadRowError("expected rows without input_ids, which are tokens already")
            rendered.append(render(row, kind, texts.template, train_on=train_on))
        except BadRowError as error:
            place = f"row {number} of the batch" if numbers is None else f"row {numbers[number]}"
            raise PackingError(f"{place}: {error}") from None
    input_ids, labels = texts.tokens(rendered, ended=True)
    lacking = sum(each.lacks_text for each in rendered)
    untrained = sum(not any(label >= 0 for label in each[1:]) for each in labels)
    for number, text in (
        (lacking, "chats lack content, thinking or tool calls, which the chat template leaves out"),
        (untrained, "documents have no token to train on"),
    ):
        if number:
            warnings.warn(f"tokenize: {number:,} of {len(rows):,} {text}", stacklevel=2)
    return {INPUT_IDS: input_ids, LABELS: labels}
