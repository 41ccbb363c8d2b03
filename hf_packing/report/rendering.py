"""A row as the text that is tokenised: text as it is, a prompt and its completion, or messages of a chat."""

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_packing.errors import PackingError

KINDS = ("input_ids", "text", "prompt", "messages")
"""Fields by which a row is known, the first that it has."""
CHATML = ("<|im_start|>", "<|im_end|>\n")


class BadRowError(PackingError):
    """A row that has no text; the message says what it has."""


class Rendered(NamedTuple):
    """The text of a row."""

    text: str
    prompt: int = 0
    """Characters at its beginning that are not trained on."""
    complete: bool = False
    """Whether a chat template has ended it."""


Settings = Mapping[str, Any]
"""What a row says of its template: tools, and anything else in chat_template_kwargs."""
Template = Callable[[Sequence[Mapping[str, Any]], bool, Settings], str]
"""Messages, whether the assistant is to answer them, and settings -> text."""


def kind_of_row(row: Mapping[str, Any], field: str | None) -> str:
    """The field that a row is known by.

    Args:
        row: of the documents.
        field: the one the user names, or None.

    Raises:
        BadRowError: there is none, with the fields that are there.
    """
    wanted = (field,) if field else KINDS
    found = next((name for name in wanted if row.get(name) is not None), None)
    if found is None or (found == "prompt" and row.get("completion") is None):
        expected = "prompt and completion" if field == "prompt" else field
        raise BadRowError(
            f"expected {expected or 'text, prompt and completion, messages or input_ids'}, the fields are "
            f"{', '.join(row) or 'none'}; --field names the one with the text"
        )
    return found


def render(row: Mapping[str, Any], kind: str, template: Template, separator: str = "\n") -> Rendered:
    """The text of a row of a kind.

    Args:
        row: of the documents.
        kind: of KINDS, or the field with the text.
        template: of messages.
        separator: between a prompt and a completion that are text.

    Raises:
        BadRowError: values of another type.
    """
    if kind == "messages":
        return Rendered(unicode(template(messages_of(row[kind]), False, settings_of(row))), complete=True)
    if kind == "prompt":
        prompt, completion = row["prompt"], row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return Rendered(unicode(f"{prompt}{separator}{completion}"), len(prompt) + len(separator))
        messages = [*messages_of(prompt), *messages_of(completion)]
        settings = settings_of(row)
        text, before = template(messages, False, settings), template(messages_of(prompt), True, settings)
        if not text.startswith(before):
            raise BadRowError("expected a chat template that renders a prompt alike with and without its completion")
        return Rendered(unicode(text), len(before), complete=True)
    if not isinstance(row[kind], str):
        raise BadRowError(f"expected text in {kind!r}, got {type(row[kind]).__name__}")
    return Rendered(unicode(row[kind]))


def unicode(text: str) -> str:
    """The text, if it can be written down."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"expected Unicode, {error}") from None
    return text


def messages_of(value: Any) -> Sequence[Mapping[str, Any]]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(each, Mapping) for each in value):
        raise BadRowError(f"expected a list of messages, got {type(value).__name__}")
    for message in value:
        if "role" not in message or not ("content" in message or "tool_calls" in message):
            raise BadRowError(f"expected messages with role and content, one has {', '.join(message) or 'nothing'}")
    kept: list[Mapping[str, Any]] = without_nulls(list(value))
    return kept


def settings_of(row: Mapping[str, Any]) -> Settings:
    """The columns `tools` and `chat_template_kwargs`, as TRL gives them to a chat template."""
    tools, others = without_nulls(row.get("tools")), without_nulls(row.get("chat_template_kwargs"))
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRowError(f"expected tools as a list or as JSON, {error}") from None
    if not isinstance(tools, (list, type(None))):
        raise BadRowError(f"expected tools as a list or as JSON, got {type(tools).__name__}")
    if not isinstance(others, (Mapping, type(None))):
        raise BadRowError(f"expected chat_template_kwargs by name, got {type(others).__name__}")
    return ({"tools": tools} if tools else {}) | dict(others or {})


def without_nulls(value: Any) -> Any:
    """Without the fields that are null: Arrow has them wherever another row has such a field."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def chatml(messages: Sequence[Mapping[str, Any]], ask: bool = False, settings: Settings = MappingProxyType({})) -> str:
    """For tokenizers without a chat template; tools are a first message, as JSON."""
    if others := settings.keys() - {"tools"}:
        raise BadRowError(f"expected a tokenizer with a chat template, since chat_template_kwargs sets {min(others)}")
    if settings:
        messages = [{"role": "system", "content": json.dumps(settings["tools"])}, *messages]
    begin, end = CHATML
    text = "".join(f"{begin}{message['role']}\n{content_of(message)}{end}" for message in messages)
    return f"{text}{begin}assistant\n" if ask else text


def content_of(message: Mapping[str, Any]) -> str:
    """Text, the texts of parts, and calls of tools as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in content):
            raise BadRowError("expected parts of a message that are text, some are not")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, (str, type(None))):
        raise BadRowError(f"expected text as content of a message, got {type(content).__name__}")
    return (content or "") + (json.dumps(calls, default=str) if calls else "")
