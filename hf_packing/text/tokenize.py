"""Turn texts, prompts with completions, and chats into tokens and labels, as SFTTrainer does.

Each text is tokenized as a whole. Some parts of a text are masked, that is, not trained on. Which tokens these are is
decided as in TRL, so that labels are equal:

- in chats by the characters of each token: a token is trained on if one of its characters is;
- in a prompt with a completion by tokenizing the prompt alone: the tokens that both results share at the beginning are
  masked. This also works for tokenizers that report no characters, or wrong ones.
"""

import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, groupby, repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import datasets

from hf_packing.checks import check_real
from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, LOSS_WEIGHTS, rows_of
from hf_packing.errors import PackingError
from hf_packing.text.render import (
    MOST_WEIGHT,
    UNFORMATTED,
    BadRowError,
    Rendered,
    Renderer,
    num_shared,
    reason_of,
    without_added_nulls,
)
from hf_packing.versioned import versioned

TOKEN_COLUMNS = datasets.Features(dict.fromkeys((INPUT_IDS, LABELS), datasets.List(datasets.Value("int32"))))
WEIGHTED_COLUMNS = datasets.Features(TOKEN_COLUMNS | {LOSS_WEIGHTS: datasets.List(datasets.Value("float32"))})

Ids = list[int]
Tokens = dict[str, list[Any]]
"""The columns input_ids, labels and loss_weights of documents."""
Placed = tuple[str, Any]
"""A row, or what may be one, and its place, such as "a.json, line 3"."""


@dataclass(frozen=True)
class TextTokenizer(Renderer):
    """A tokenizer of transformers, and how it turns rows into text and text into tokens."""

    end_documents: bool = True
    """Whether texts end with the end-of-sequence token, if there is one. Chat templates write their own."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to texts."""

    def tokens(self, rendered: Sequence[Rendered], remarks: Counter[str]) -> Tokens:
        """Return documents, with labels of -100 at tokens that are not trained on, and add to the remarks on rows."""
        tokens: Tokens = {name: [] for name in (INPUT_IDS, LABELS, *[LOSS_WEIGHTS] * self.weighted)}
        eos = self.tokenizer.eos_token_id
        last = [] if eos is None else [eos]
        for complete, group in groupby(rendered, attrgetter("complete")):
            documents = list(group)
            encoded = self.encode([each.text for each in documents], complete, complete)
            places = encoded.get("offset_mapping", repeat([]))
            for document, ids, added, offsets in zip(
                documents, encoded[INPUT_IDS], encoded["special_tokens_mask"], places, strict=False
            ):
                wanted = self.end_documents and not complete
                end = last if wanted and document.ends and ids[-1:] != last else []
                weights = self._weights(document, ids, offsets)
                labels = [token if weight else IGNORED_LABEL for token, weight in zip(ids, weights, strict=True)] + end
                said = {
                    "have the tokenizer's special tokens twice at an end, since their text begins or ends with them "
                    "already; add_special_tokens=False adds none": len(ids) > 1
                    and ((ids[0] == ids[1] and added[0]) or (ids[-1] == ids[-2] and added[-1])),
                    "end without an end-of-sequence token, since the tokenizer has none": wanted and not last,
                    "have no token to train on": {*labels[1:]} <= {IGNORED_LABEL},
                }
                remarks.update([*document.remarks, *compress(said, said.values())])
                tokens[INPUT_IDS].append(ids + end)
                tokens[LABELS].append(labels)
                if self.weighted:
                    tokens[LOSS_WEIGHTS].append(weights + [1.0] * len(end))
        return tokens

    def _weights(self, document: Rendered, ids: Ids, offsets: Any) -> list[float]:
        """Return the weight of each token in the loss; 0 for tokens that are not trained on."""
        weights = [float(document.trained is None)] * len(ids)
        for (first, stop), weight in zip(document.trained or (), document.weights or repeat(1.0), strict=False):
            # characters that a tokenizer drops move those of all later tokens: the last one seems to end too early
            if offsets and offsets[-1][1] == len(document.text):
                begin = bisect_right(offsets, first, key=itemgetter(1))
                end = bisect_left(offsets, stop, key=itemgetter(0))
            else:
                begin, end = (self._num_shared(document, document.text[:edge], ids) for edge in (first, stop))
            weights[begin:end] = [weight] * max(0, end - begin)
        if document.prompt is not None:
            shared = self._num_shared(document, document.prompt, ids)
            weights[:shared] = [self.prompt_weight] * shared
        return weights

    def _num_shared(self, document: Rendered, beginning: str, ids: Ids) -> int:
        """Return the number of tokens that a document shares with its beginning, tokenized alone."""
        encoded = self.encode([beginning], document.complete)
        alone, added = encoded[INPUT_IDS][0], encoded["special_tokens_mask"][0]
        if 0 in added:  # the special tokens at the end are not in the document
            del alone[len(added) - added[::-1].index(0) :]
        return num_shared(ids, alone)

    def encode(self, texts: list[str], complete: bool = True, with_offsets: bool = False) -> Any:
        """Return what the tokenizer makes of texts. Chats get no special tokens, since templates have written them."""
        return self.tokenizer(
            texts,
            add_special_tokens=self.add_special_tokens and not complete,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_special_tokens_mask=True,
            return_offsets_mapping=with_offsets and self.tokenizer.is_fast,
            verbose=False,
        )


def warn_of(remarks: Counter[str], who: str, of: str) -> None:
    """Warn of what users should know of rows or turns, and of how many; of `branches`, where it is called."""
    for remark, number in remarks.items():
        if number:
            warnings.warn(f"{who}: {number:,} of {of} {remark}", stacklevel=4)


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


@versioned
def tokenize(
    dataset: Any,
    tokenizer: Any,
    *,
    train_on: str | None = None,
    text_field: str | None = None,
    chat_template: str | None = None,
    add_special_tokens: bool = True,
    prompt_weight: float = 0,
    num_proc: int | None = None,
) -> Any:
    """Turn texts, prompts with completions, or chats into `input_ids` and `labels`, as SFTTrainer does.

    Labels of tokens that are not trained on are -100. Texts and completions end with the end-of-sequence token of the
    tokenizer. Chats are written by the chat template, with the columns `tools` and `chat_template_kwargs` as its
    arguments, as in TRL.

    Args:
        dataset: Dataset, DatasetDict, IterableDataset or IterableDatasetDict; or a batch of `map`, as in
            `dataset.map(hfp.tokenize, batched=True, fn_kwargs={"tokenizer": tokenizer}, remove_columns=...)`. Rows have
            `prompt` and `completion` (both as text, or both as lists of messages), `messages`, `conversations`, or
            `text`; of several, the first is taken, as in TRL. Messages with `weight` 0, `train` or `trainable` False,
            or `masked` True are not trained on. A `weight` that is a float weights the loss.
        tokenizer: a tokenizer of transformers.
        train_on: "assistant" for the assistant's turns of chats, "completion" for what follows a prompt, "all" for all
            tokens. With None, "assistant" for messages, "completion" for prompts with completions, and "all" for texts.
            The template needs no `{% generation %}` marks for "assistant": if TRL has a training version of the
            template, that is taken, as SFTTrainer does; else a turn is what the template adds for it to the messages
            before it and the generation prompt.
        text_field: name of the column with the text or the messages; None to take the first of those above.
        chat_template: a Jinja template to take instead of the tokenizer's.
        add_special_tokens: whether the tokenizer adds its special tokens to texts; False for texts that a chat template
            has written already.
        prompt_weight: the weight of prompts in the loss, beside completions of weight 1. With 0, prompts have no
            labels; 0.1 is an example of arXiv 2507.07817.
        num_proc: number of processes for a Dataset.

    Returns:
        A dataset of the same kind, or a dict for a batch, with `input_ids` and `labels`: one list of integers [tokens]
        for each row, in the same order; and `loss_weights`, lists of float32, if messages have weights that are floats,
        or prompts have a weight. The functions of hf_packing that train read them.

    Raises:
        PackingError: `train_on` is unknown or does not fit the rows; the columns are missing; a row has other types, or
            weights of messages that are no numbers; the chat template does not accept a row, does not write its tools,
            or rewrites earlier turns so that the tokens to train on cannot be found.
        MissingDependencyError: TRL, which may have a training version of the template, is not installed.

    Warns:
        UserWarning: chats lack content, thinking or tool calls, which the template leaves out; documents have no token
            to train on, no end-of-sequence token, or special tokens twice; or rows have several fields that could be
            meant. The warnings give the numbers for each batch.

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
    if not hasattr(tokenizer, "all_special_tokens"):
        raise PackingError(f"tokenizer: expected a tokenizer of transformers, got {type(tokenizer).__name__}")
    options = {
        "tokenizer": tokenizer,
        "train_on": train_on,
        "text_field": text_field,
        "chat_template": chat_template,
        "add_special_tokens": add_special_tokens,
        "prompt_weight": check_real("prompt_weight", prompt_weight, -MOST_WEIGHT, MOST_WEIGHT, "a finite number"),
    }
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        return type(dataset)({name: tokenize(each, num_proc=num_proc, **options) for name, each in dataset.items()})
    if isinstance(dataset, datasets.Dataset):  # as its format shows it, but of plain values
        dataset = dataset.with_format(None).select_columns(dataset.format["columns"])
    features = getattr(dataset, "features", None) or getattr(getattr(dataset, "formatter", None), "features", None)
    columns = dict(features or dataset).values() if features or isinstance(dataset, Mapping) else ()
    options["weighted"] = bool(prompt_weight) or any(map(_has_weights, columns)) or _has_weights_in_json(dataset)
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        return _tokens_of(dataset, **options)
    made = WEIGHTED_COLUMNS if options["weighted"] else TOKEN_COLUMNS
    names, settings = dataset.column_names, {"batched": True, "fn_kwargs": options, "features": made}
    if isinstance(dataset, datasets.IterableDataset):  # without the numbers of its rows, so that its shards stay apart
        return dataset.map(_tokens_of, remove_columns=names or list(next(iter(dataset), {})), **settings)
    if not dataset:
        return datasets.Dataset.from_dict({name: [] for name in made}, made, split=dataset.split)
    settings |= {"with_indices": True, "num_proc": num_proc, "desc": "Tokenizing", "remove_columns": names}
    return dataset.map(_tokens_of, **settings)


def _has_weights(part: Any) -> bool:
    """Return whether a part of features, or of a batch, has messages with a `weight` that is a float."""
    match part:
        case {"weight": float() | datasets.Value(dtype="float32" | "float64")}:
            return True
        case {**fields}:
            return any(map(_has_weights, fields.values()))
        case [*items]:
            return any(map(_has_weights, items))
        case datasets.List(feature=feature) | datasets.LargeList(feature=feature):
            return _has_weights(feature)
    return False


def _has_weights_in_json(dataset: Any) -> bool:
    """Return whether rows have such messages in columns of JSON, whose features do not say so; of a Dataset alone."""
    if not isinstance(dataset, datasets.Dataset):
        return False
    columns = [name for name, feature in dataset.features.items() if "Json(" in str(feature)]
    return bool(columns) and any(_has_weights([*row.values()]) for row in dataset.select_columns(columns))


@versioned
def _tokens_of(batch: Any, numbers: Sequence[int] = (), **options: Any) -> Tokens:
    """Return the tokens and labels of a batch of rows; `numbers` are those of the rows in the dataset."""
    texts, remarks = TextTokenizer(**options), Counter[str]()
    rows = rows_of_batch(batch, numbers)
    tokens = texts.tokens([*usable(rows, texts.render)], remarks)
    warn_of(remarks, "tokenize", f"{len(rows):,} rows")
    return tokens


def rows_of_batch(batch: Any, numbers: Sequence[int] = ()) -> list[Placed]:
    """Return the rows of a batch with their places, of `Dataset.map` without the fields that Arrow has added."""
    if not isinstance(batch, Mapping) or any(isinstance(each, str) for each in batch.values()):
        raise PackingError(
            f"dataset: expected a dataset, or a batch of `map` with batched=True, got {type(batch).__name__}"
            f"{UNFORMATTED}"
        )
    features = getattr(getattr(batch, "formatter", None), "features", None)
    return [*numbered("dataset" if numbers else "batch", rows_of(batch), features, numbers)]


def numbered(place: str, rows: Iterable[Any], features: Any = None, numbers: Iterable[int] = ()) -> Iterator[Placed]:
    """Yield rows with their places, such as "a.json, row 3", without the fields that Arrow has added."""
    for number, row in zip(numbers or count(), rows, strict=False):
        yield f"{place}, row {number}", without_added_nulls(row, features)


def usable(
    rows: Iterable[Placed], use: Callable[[Any], Any], leave_out: Callable[[str], None] | None = None
) -> Iterator[Any]:
    """Yield what is made of rows, but for rows that cannot be used, which are given up with place and reason."""
    for place, row in rows:
        try:
            yield use(row)
        except (BadRowError, UnicodeEncodeError) as error:
            reason = f"{place}: {error}"
            if leave_out is None:
                raise BadRowError(reason) from None
            leave_out(reason)
