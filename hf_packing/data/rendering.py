"""Turn a row (a plain text, a prompt with its completion, or a chat) into the text to tokenize."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_packing.errors import PackingError

ROW_KINDS = ("input_ids", "text", "prompt", "messages")
"""Fields that determine the kind of a row. If a row has several of these fields, the first in this order counts."""
_CHATML = ("<|im_start|>", "<|im_end|>\n")


class BadRowError(PackingError):
    """The error for a row that cannot be used. The message says what was expected and what the row has."""


class TrainOn(NamedTuple):
    """A choice of the tokens to train on, like assistant_only_loss and completion_only_loss in TRL."""

    assistant_only: bool = False
    """True if, in a chat, only tokens of the assistant's turns have a loss."""
    completion_only: bool = True
    """True if, in a prompt with a completion, only tokens of the completion have a loss."""

    def covers(self, by_assistant: bool, in_completion: bool) -> bool:
        """Return whether a part of a row's text is trained on.

        Args:
            by_assistant: whether the assistant wrote the part.
            in_completion: whether the part belongs to the completion.
        """
        return (by_assistant or not self.assistant_only) and (in_completion or not self.completion_only)


_COMPLETIONS = TrainOn()
"""The default of `hf-packing pack`: completions, whole texts and whole chats are trained on."""
EVERYTHING = TrainOn(completion_only=False)


class Rendered(NamedTuple):
    """The text of a row, and the parts of the text that are not trained on."""

    text: str
    masked: tuple[tuple[int, int], ...] = ()
    """The parts of the text that are not trained on, in order, as slices (start, stop) of characters."""
    complete: bool = False
    """True if a chat template has written the text, so that the tokenizer must not add special tokens."""


Settings = Mapping[str, Any]
"""Arguments that a row passes to the chat template: `tools`, and the content of `chat_template_kwargs`."""
Template = Callable[[Sequence[Mapping[str, Any]], bool, Settings], str]
"""A function (messages, whether to add the generation prompt, settings) -> the chat as text."""


def kind_of_row(row: Mapping[str, Any], field: str | None) -> str:
    """Return the name of the field that determines the kind of a row, such as "text" or "messages".

    Args:
        row: a row of the documents.
        field: name of the field that the user chose; None to use the first of ROW_KINDS that the row has.

    Raises:
        BadRowError: the row has no such field, or has a prompt without a completion.
    """
    wanted = (field,) if field else ROW_KINDS
    found = next((name for name in wanted if row.get(name) is not None), None)
    if found is None or (found == "prompt" and row.get("completion") is None):
        expected = "prompt and completion" if field == "prompt" else field
        raise BadRowError(
            f"expected {expected or 'text, prompt and completion, messages or input_ids'}, got the fields "
            f"{', '.join(row) or 'none'}; text_field names the field with the text"
        )
    return found


def render(
    row: Mapping[str, Any], kind: str, template: Template, separator: str = "\n", train_on: TrainOn = _COMPLETIONS
) -> Rendered:
    """Return the text of a row, and the parts of the text that are not trained on.

    Args:
        row: a row of the documents.
        kind: one of ROW_KINDS, or the name of the field with the text.
        template: function that writes a chat as text.
        separator: the text between a prompt and a completion that are both text.
        train_on: the choice of the tokens to train on. If some parts of a chat are not trained on, its text ends after
            the last trained part, since later text does not change the loss.

    Raises:
        BadRowError: a value has the wrong type, or the template cannot write the chat.
    """
    if kind == "messages":
        return _render_chat(messages_of(row[kind]), 0, template, settings_of(row), train_on)
    if kind == "prompt":
        prompt, completion = row["prompt"], row.get("completion")
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            before, after = messages_of(prompt), messages_of(completion)
            if not after:
                raise BadRowError("expected at least one message in the completion, got an empty list")
            return _render_chat([*before, *after], len(before), template, settings_of(row), train_on)
        begins = 0 if train_on.covers(False, False) else len(prompt) + len(separator)
        masked = ((0, begins),) if begins else ()
        return Rendered(_unicode(f"{prompt}{separator}{completion}"), masked)
    if not isinstance(row[kind], str):
        raise BadRowError(f"expected text in the field {kind!r}, got {type(row[kind]).__name__}")
    return Rendered(_unicode(row[kind]))


def chatml(messages: Sequence[Mapping[str, Any]], ask: bool = False, settings: Settings = MappingProxyType({})) -> str:
    """Return a chat as ChatML text, for a tokenizer without a chat template.

    Args:
        messages: the messages of the chat.
        ask: whether to add the generation prompt.
        settings: arguments for a chat template. Only `tools` is supported; the tools are written as JSON in a system
            message at the beginning.

    Raises:
        BadRowError: the chat has other settings than `tools`, or content that is not text.
    """
    if others := settings.keys() - {"tools"}:
        raise BadRowError(f"expected a tokenizer with a chat template, since chat_template_kwargs sets {min(others)}")
    if settings:
        messages = [{"role": "system", "content": json.dumps(settings["tools"])}, *messages]
    begin, end = _CHATML
    text = "".join(f"{begin}{message['role']}\n{_content(message)}{end}" for message in messages)
    return f"{text}{begin}assistant\n" if ask else text


class _Edge(NamedTuple):
    """The end of a part of a chat. Either all tokens of a part are trained on, or none."""

    messages: int
    """The number of messages before the end."""
    asks: bool
    """True if the part ends with the generation prompt."""
    trained: bool
    """True if the part is trained on."""


def _render_chat(
    messages: Sequence[Mapping[str, Any]], prompt: int, template: Template, settings: Settings, train_on: TrainOn
) -> Rendered:
    """Return the text of a chat, and its parts that are not trained on.

    `prompt` is the number of messages at the beginning that form the prompt.
    """
    if not train_on.assistant_only and not (prompt and train_on.completion_only):
        return Rendered(_unicode(template(messages, False, settings)), complete=True)
    text, masked = "", []
    for edge in _edges(messages, prompt, train_on):
        longer = template(messages[: edge.messages], edge.asks, settings)
        if not longer.startswith(text):
            raise BadRowError(
                "expected a chat template that leaves earlier turns as they are, but this template rewrites the text "
                f"before turn {edge.messages} when that turn is added, so the tokens to train on cannot be found"
            )
        if not edge.trained:
            masked.append((len(text), len(longer)))
        text = longer
    return Rendered(_unicode(text), tuple(masked), complete=True)


def _edges(messages: Sequence[Mapping[str, Any]], prompt: int, train_on: TrainOn) -> list[_Edge]:
    """Return the ends of the parts of a chat, up to the last trained part. Trained and untrained parts alternate."""
    found = []
    for turn, message in enumerate(messages):
        by_assistant = message["role"] == "assistant"
        if by_assistant and turn:
            found.append(_Edge(turn, True, train_on.covers(False, turn > prompt)))
        found.append(_Edge(turn + 1, False, train_on.covers(by_assistant, turn >= prompt)))
    changes = [edge for edge, following in pairwise(found) if edge.trained != following.trained]
    return changes + [edge for edge in found[-1:] if edge.trained]


def _unicode(text: str) -> str:
    """Return the text unchanged; raise BadRowError if the text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"expected Unicode, got text that cannot be encoded as UTF-8: {error}") from None
    return text


def messages_of(value: Any) -> Sequence[Mapping[str, Any]]:
    """Return the messages of a chat, without null fields.

    Args:
        value: list of mappings, each with a role, and with content or tool calls.

    Raises:
        BadRowError: the value is something else.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRowError(f"expected a list of messages, got {type(value).__name__}: {str(value)[:40]}")
    for message in value:
        if not isinstance(message, Mapping):
            raise BadRowError(
                f"expected a list of messages, each a mapping with role and content, got a list with an item of type "
                f"{type(message).__name__}"
            )
        if "role" not in message or not ("content" in message or "tool_calls" in message):
            raise BadRowError(
                "expected messages with a role, and with content or tool_calls, got a message with "
                f"{', '.join(message) or 'nothing'}"
            )
    kept: list[Mapping[str, Any]] = _without_nulls(list(value))
    return kept


def settings_of(row: Mapping[str, Any]) -> Settings:
    """Return a row's arguments for the chat template: its columns `tools` and `chat_template_kwargs`, as in TRL.

    Raises:
        BadRowError: the tools are neither a list nor JSON, or the other arguments are not a mapping.
    """
    tools, others = _without_nulls(row.get("tools")), _without_nulls(row.get("chat_template_kwargs"))
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRowError(f"expected tools as a list or as JSON, got the error: {error}") from None
    if not isinstance(tools, (list, type(None))):
        raise BadRowError(f"expected tools as a list or as JSON, got {type(tools).__name__}")
    if not isinstance(others, (Mapping, type(None))):
        raise BadRowError(f"expected chat_template_kwargs as a mapping, got {type(others).__name__}")
    return ({"tools": tools} if tools else {}) | dict(others or {})


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields, at any depth. Arrow adds a null field to a row if only other rows have it."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _content(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text: text parts are joined, and tool calls are appended as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in content):
            raise BadRowError("expected only text parts in a message, got a part of another type")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, (str, type(None))):
        raise BadRowError(f"expected text as the content of a message, got {type(content).__name__}")
    return (content or "") + (json.dumps(calls, default=str) if calls else "")
