"""Turn conversations into one document for each assistant turn, as the model sees the turn at inference."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS
from hf_packing.errors import PackingError
from hf_packing.text.rendering import BadRowError, Settings, messages_of, settings_of, texts_of
from hf_packing.text.text_tokenizer import TextTokenizer, num_shared, text_tokenizer

_PROMPT, _COMPLETION, _ASSISTANT = "prompt", "completion", "assistant"
_SETTINGS = ("tools", "chat_template_kwargs")
"""Columns with arguments for the chat template."""
_SHOWN = 20
"""Number of characters that an error shows of two texts before they differ; it shows twice as many after that."""


def branches(
    conversations: Any,
    tokenizer: Any,
    *,
    column: str = "messages",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> dict[str, list[list[int]]]:
    """Make one document for each assistant turn of conversations, trained on that turn only.

    A document begins with the tokens that the model is given when it is asked for the turn: the earlier messages as the
    chat template writes them, and the generation prompt. Their labels are -100. Then come the tokens that the model
    generates, up to the end token of the turn.

    Pass the function to `map`, as in `dataset.map(hfp.branches, batched=True, fn_kwargs={"tokenizer": tokenizer},
    remove_columns=dataset.column_names)`.

    Args:
        conversations: one conversation, a list of messages; or a batch that `map` passes, a mapping from column names
            to lists. A batch has the column `column`, or the columns `prompt` and `completion` with lists of messages;
            then only assistant turns of the completion make documents. The columns `tools` and `chat_template_kwargs`
            are passed to the chat template, as in TRL.
        tokenizer: a tokenizer of transformers with a chat template.
        column: name of the column with the conversations.
        chat_template_kwargs: arguments for the chat template, such as `{"enable_thinking": False}`. The row's own
            arguments take precedence.
        skip_bad: True to leave out conversations that cannot be used, and to warn with their number and the first
            reason; False to raise an error.

    Returns:
        `input_ids` and `labels`: one list of integers [tokens] for each document, in the order of the turns.

    Raises:
        PackingError: the tokenizer has no chat template; the columns are missing; the chat template does not accept a
            conversation; or a turn, as the template writes it, does not begin with its generation prompt. Such a turn
            would be trained on in a way that the model never sees at inference.

    Warns:
        UserWarning: some conversations have no assistant turn; or some turns do not end with a special token, or lack
            text of their message, such as the thinking. The warnings give the numbers.

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
        >>> chat = [{"role": role, "content": text} for text in ("Hi", "Bye") for role in ("user", "assistant")]
        >>> documents = hfp.branches(chat, tokenizer)
        >>> documents["input_ids"]
        [[0, 3, 2, 1, 3, 2], [0, 3, 2, 1, 3, 2, 0, 4, 2, 1, 4, 2]]
        >>> documents["labels"][1]
        [-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, 4, 2]
    """
    if not getattr(tokenizer, "chat_template", None) or not hasattr(tokenizer, "all_special_tokens"):
        raise PackingError(
            f"tokenizer: expected a tokenizer with a chat template, got {type(tokenizer).__name__}; set "
            "tokenizer.chat_template, or pass the tokenizer of a processor"
        )
    make = _Branches(tokenizer, text_tokenizer(tokenizer))
    found = [make.read(row, column, chat_template_kwargs or {}) for row in _rows_of(conversations, column)]
    place = "row {} of the batch, " if isinstance(conversations, Mapping) else ""
    bad = [f"{place.format(number)}{each.reason}" for number, each in enumerate(found) if each.reason]
    if bad and not skip_bad:
        raise BadRowError(bad[0])
    documents = [document for each in found for document in each.documents]
    _warn(found, documents, bad)
    return {
        INPUT_IDS: [[*each.prompt, *each.generated] for each in documents],
        LABELS: [[IGNORED_LABEL] * len(each.prompt) + each.generated for each in documents],
    }


class _Turn(NamedTuple):
    """An assistant turn of a conversation, as text."""

    message: int
    """The index of the turn's message in the conversation."""
    prompt: str
    """The earlier messages, and the generation prompt."""
    generated: str
    """The text that the model generates."""
    has_end: bool
    """True if the generated text ends with a special token."""
    has_message: bool
    """True if the generated text has all texts of the message."""


class _Document(NamedTuple):
    """An assistant turn of a conversation, as tokens."""

    prompt: list[int]
    generated: list[int]
    turn: _Turn


class _Conversation(NamedTuple):
    """Documents made of a conversation."""

    documents: list[_Document]
    opens: bool = False
    """True if the first message is an assistant turn, which has no prompt."""
    reason: str = ""
    """Why the conversation cannot be used; empty if it can be used."""


@dataclass(frozen=True)
class _Branches:
    """A tokenizer of transformers, with what is needed to make documents of conversations."""

    tokenizer: Any
    texts: TextTokenizer

    def read(self, row: Mapping[str, Any], column: str, chat_template_kwargs: Mapping[str, Any]) -> _Conversation:
        """Return the documents of a conversation, or the reason why it cannot be used.

        Args:
            row: the conversation in the column `column`, or in the columns `prompt` and `completion`; and arguments for
                the chat template.
            column: name of the column.
            chat_template_kwargs: more arguments for the chat template.
        """
        try:
            settings = {**chat_template_kwargs, **settings_of(row)}
            prompt = [] if column in row else messages_of(row[_PROMPT])
            messages = [*prompt, *messages_of(row[column] if column in row else row[_COMPLETION])]
            opens = not prompt and bool(messages) and messages[0]["role"] == _ASSISTANT
            numbers = range(max(1, len(prompt)), len(messages))
            turns = [number for number in numbers if messages[number]["role"] == _ASSISTANT]
            return _Conversation(list(self._documents(messages, turns, settings)), opens)
        except BadRowError as error:
            return _Conversation([], reason=str(error))

    def _documents(
        self, messages: Sequence[Mapping[str, Any]], numbers: Sequence[int], settings: Settings
    ) -> Iterator[_Document]:
        """Yield a document for each of the given messages of a conversation."""
        _check_parts(messages[: max(numbers, default=-1) + 1])
        turns = [self._turn(messages, number, settings) for number in numbers]
        prompts = self._encode([turn.prompt for turn in turns])
        wholes = self._encode([turn.prompt + turn.generated for turn in turns])
        for turn, prompt, whole in zip(turns, prompts, wholes, strict=True):
            if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
                yield _Document(prompt, whole[len(prompt) :], turn)
                continue
            # a token spans the end of the prompt, which cannot happen at inference
            (generated,) = self._encode([turn.generated])
            if not generated or self._decode(prompt + generated) != self._decode(whole):
                raise BadRowError(
                    f"message {turn.message}: expected a tokenizer that can tokenize a turn apart from its prompt, but "
                    f"{turn.prompt[-_SHOWN:]!r} and {turn.generated[:_SHOWN]!r} become other text"
                )
            yield _Document(prompt, generated, turn)

    def _turn(self, messages: Sequence[Mapping[str, Any]], number: int, settings: Settings) -> _Turn:
        """Return an assistant turn as text; raise BadRowError if the turn does not begin with its generation prompt."""
        try:
            prompt = self.texts.template.write(messages[:number], True, settings)
            whole = self.texts.template.write(messages[: number + 1], False, settings)
        except BadRowError as error:
            raise BadRowError(f"message {number}: {error}") from None
        if not whole.startswith(prompt):
            same = num_shared(prompt, whole)
            shown = slice(max(0, same - _SHOWN), same + 2 * _SHOWN)
            raise BadRowError(
                f"message {number}: expected a chat template whose turns begin with their generation prompt, but the "
                f"prompt has {prompt[shown]!r} where the turn has {whole[shown]!r}. The model would be trained on text "
                "that it never sees at inference; use another template, or chat_template_kwargs such as "
                "{'enable_thinking': False}"
            )
        generated = whole[len(prompt) :]
        if not generated:
            raise BadRowError(f"message {number}: expected a turn with text, but the chat template writes none for it")
        stripped = generated.rstrip()
        has_end = stripped.endswith(self.texts.template.special_tokens)
        has_message = all(text.strip() in generated for text in texts_of(messages[number]))
        # the model stops at the end token; a line break after it is the template's
        return _Turn(number, prompt, stripped if has_end else generated, has_end, has_message)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded = self.texts.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [each.ids for each in encoded]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _rows_of(conversations: Any, column: str) -> list[dict[str, Any]]:
    """Return the rows of a batch, or one row for a single conversation. The rows have no other columns than needed.

    Raises:
        PackingError: this is neither a conversation nor a batch of conversations.
    """
    if isinstance(conversations, Sequence) and not isinstance(conversations, str):
        return [{column: conversations}]
    if not isinstance(conversations, Mapping):
        raise PackingError(
            f"conversations: expected a list of messages, or a mapping from column names to lists, got "
            f"{type(conversations).__name__}"
        )
    names = [column] if column in conversations else [_PROMPT, _COMPLETION]
    if missing := [name for name in names if name not in conversations]:
        raise PackingError(
            f"conversations: expected the column {column!r}, or the columns 'prompt' and 'completion', but "
            f"{missing[0]!r} is missing among the columns {', '.join(conversations)}"
        )
    columns = {name: conversations[name] for name in (*names, *_SETTINGS) if name in conversations}
    first = next(iter(columns[names[0]]), None)
    if isinstance(columns[names[0]], str) or isinstance(first, Mapping):
        raise PackingError(
            f"conversations: expected a batch with a list of conversations in {names[0]!r}, got a single row; call "
            "map with batched=True"
        )
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadRowError if the content of a message has a picture, or another part that is not text."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise BadRowError(
                    f"message {number}: expected text, got a part that needs a processor: {str(part)[: 2 * _SHOWN]}"
                )


def _warn(found: Sequence[_Conversation], documents: Sequence[_Document], bad: Sequence[str]) -> None:
    """Warn about conversations and turns without a document, and about turns that lack text.

    Args:
        found: what is made of the conversations.
        documents: all documents of them.
        bad: the reasons why conversations are left out.
    """
    num_empty = sum(not (each.documents or each.reason) for each in found)
    num_endless = sum(not each.turn.has_end for each in documents)
    num_lacking = sum(not each.turn.has_message for each in documents)
    of_rows, of_turns = f"of {len(found):,} conversations", f"of {len(documents):,} assistant turns"
    for number, text in (
        (len(bad), f"{of_rows} cannot be used and are left out, the first because of {next(iter(bad), '')}"),
        (num_empty, f"{of_rows} have no assistant turn after another message, and make no documents"),
        (sum(each.opens for each in found), f"{of_rows} open with an assistant turn, which is not trained on"),
        (num_endless, f"{of_turns} do not end with a special token, so the model does not learn where to stop"),
        (num_lacking, f"{of_turns} lack content, thinking or tool calls, which the chat template leaves out"),
    ):
        if number:
            warnings.warn(f"branches: {number:,} {text}", stacklevel=3)
