"""Turn a row (a plain text, a prompt with its completion, or a chat) into the text to tokenize."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_packing.errors import PackingError

ROW_KINDS = ("input_ids", "text", "prompt", "messages")
"""Fields that determine the kind of a row. If a row has several of these fields, the first in this order counts."""
_CHATML = ("<|im_start|>", "<|im_end|>\n")


class BadRowError(PackingError):
    """The error for a row that cannot be used. The message says what was expected and what the row has."""


TRAIN_ON = ("assistant", "completion", "all")
"""What the tokens of a document can be trained on: the assistant's turns, the completion after a prompt, or all."""


class Rendered(NamedTuple):
    """The text of a row, and the parts of the text that are not trained on."""

    text: str
    masked: tuple[tuple[int, int], ...] = ()
    """The parts of the text that are not trained on, in order, as slices (start, stop) of characters."""
    complete: bool = False
    """True if a chat template has written the text, so that the tokenizer must not add special tokens."""
    lacks_text: bool = False
    """True if the chat template has left out content, thinking or tool calls of an assistant turn."""


Settings = Mapping[str, Any]
"""Arguments that a row passes to the chat template: `tools`, and the content of `chat_template_kwargs`."""
Span = tuple[int, int]
"""A part of a text, as a slice (start, stop) of characters."""
_THINKING = ("reasoning_content", "reasoning", "thinking")
"""Fields of messages with the model's thinking. Each chat template knows one of these names."""
_END_OF_THINKING = "</think>"
"""Where thinking ends that is part of the content. Templates write it in their own way."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, as functions that write chats."""

    write: Callable[[Sequence[Mapping[str, Any]], bool, Settings], str]
    """A function (messages, whether to add the generation prompt, settings) -> the chat as text."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens of the tokenizer, some of which end turns."""
    mark: Callable[[Sequence[Mapping[str, Any]], Settings], tuple[str, list[Span]]] | None = None
    """A function (messages, settings) -> the chat as text, and the assistant's parts; None for a template that does not
    mark these parts with `{% generation %}`."""
    training: Callable[[], "ChatTemplate | None"] = lambda: None
    """A function that returns the template to take instead, as SFTTrainer does, to train on the assistant's turns."""


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
    row: Mapping[str, Any], kind: str, template: ChatTemplate, separator: str = "", train_on: str | None = None
) -> Rendered:
    """Return the text of a row, and the parts of the text that are not trained on.

    Args:
        row: a row of the documents.
        kind: one of ROW_KINDS, or the name of the field with the text.
        template: the chat template.
        separator: the text between a prompt and a completion that are both text.
        train_on: one of TRAIN_ON; None for the assistant's turns of messages, for completions, and for whole texts.

    Raises:
        BadRowError: a value has the wrong type, `train_on` does not fit the row, or the template cannot write the chat.
    """
    if kind == "messages":
        _check_train_on(train_on, "messages", "assistant", "all")
        return _render_chat([], messages_of(row[kind]), template, settings_of(row), train_on or "assistant")
    if kind == "prompt":
        prompt, completion = row["prompt"], row.get("completion")
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            before, after = messages_of(prompt), messages_of(completion)
            if not after:
                raise BadRowError("expected at least one message in the completion, got an empty list")
            return _render_chat(before, after, template, settings_of(row), train_on or "completion")
        _check_train_on(train_on, "a prompt and a completion that are text", "completion", "all")
        masked = () if train_on == "all" else ((0, len(prompt) + len(separator)),)
        return Rendered(_unicode(f"{prompt}{separator}{completion}"), masked)
    if not isinstance(row[kind], str):
        raise BadRowError(f"expected text in the field {kind!r}, got {type(row[kind]).__name__}")
    _check_train_on(train_on, "text", "all")
    return Rendered(_unicode(row[kind]))


def _check_train_on(train_on: str | None, of: str, *fitting: str) -> None:
    if train_on not in (None, *fitting):
        expected = " or ".join(map(repr, fitting))
        raise BadRowError(f"expected train_on={expected} for documents with {of}, got train_on={train_on!r}")


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


CHATML = ChatTemplate(chatml)
"""The template for a tokenizer that has none."""


def _render_chat(
    prompt: Sequence[Mapping[str, Any]],
    completion: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    settings: Settings,
    train_on: str,
) -> Rendered:
    """Return the text of a chat, and its parts that are not trained on."""
    messages = [*prompt, *completion]
    masked: list[Span] = []
    if train_on == "assistant":
        template = template.training() or template
        text, masked = (_marked_turns if template.mark else _turns_by_prefix)(messages, template, settings)
    else:
        text = template.write(messages, False, settings)
    if prompt and train_on != "all":
        masked = _joined([(0, len(_prefix(text, prompt, True, template, settings))), *masked])
    turns = [message for message in messages if message["role"] == "assistant"]
    lacks_text = any(part.strip() not in text for message in turns for part in texts_of(message))
    return Rendered(_unicode(text), tuple(masked), complete=True, lacks_text=lacks_text)


def _marked_turns(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate, settings: Settings
) -> tuple[str, list[Span]]:
    """Return a chat as text, and the parts that its template does not mark as the assistant's."""
    assert template.mark is not None
    text, spans = template.mark(messages, settings)
    if not spans and any(message["role"] == "assistant" for message in messages):
        raise BadRowError("expected a chat template that marks the assistant's turns, but it marks none of this chat")
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return text, [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _turns_by_prefix(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate, settings: Settings
) -> tuple[str, list[Span]]:
    """Return a chat as text, and the parts that the assistant did not write, for a template without marks.

    The text before each turn, written alone, shows where the turn begins, and so does the text up to its end.
    """
    text = template.write(messages, False, settings)
    trained = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_prefix(text, messages[:turn], True, template, settings)) if turn else 0
            trained.append((start, len(_prefix(text, messages[: turn + 1], False, template, settings))))
    edges = [0, *(edge for span in trained for edge in span), len(text)]
    return text, [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _prefix(
    text: str, messages: Sequence[Mapping[str, Any]], asks: bool, template: ChatTemplate, settings: Settings
) -> str:
    """Return the text of the first messages of a chat; raise BadRowError if the chat does not begin with that text."""
    prefix = template.write(messages, asks, settings)
    if not text.startswith(prefix):
        raise BadRowError(
            f"expected a chat template that leaves earlier turns as they are, but this template rewrites the first "
            f"{len(messages)} messages when others follow, so the tokens to train on cannot be found. Install trl, "
            "which has training versions of many templates; take a template with {% generation %} marks; or make a "
            "document of each turn with hf_packing.branches"
        )
    return prefix


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return the union of parts of a text."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message that a chat template should write: content, thinking, and names of called tools."""
    content = message.get("content")
    if isinstance(content, str):
        yield content.rpartition(_END_OF_THINKING)[2]
    yield from (part["text"] for part in (content if isinstance(content, list) else []) if "text" in part)
    yield from (str(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or [])
    yield from (message[name] for name in _THINKING if isinstance(message.get(name), str))


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
