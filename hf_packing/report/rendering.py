"""A row as the text that is tokenised: text as it is, a prompt and its completion, or messages of a chat."""

from collections.abc import Callable, Mapping, Sequence
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


Template = Callable[[Sequence[Mapping[str, Any]]], str]
"""Messages -> text."""


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
        raise BadRowError(
            f"expected {field or 'text, prompt and completion, messages or input_ids'}, the fields are "
            f"{', '.join(row) or 'none'}; --field names the one with the text"
        )
    return found


def render(row: Mapping[str, Any], kind: str, template: Template) -> Rendered:
    """The text of a row of a kind.

    Raises:
        BadRowError: values of another type.
    """
    if kind == "messages":
        return Rendered(template(messages_of(row[kind])))
    if kind == "prompt":
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Rendered(f"{prompt}\n{completion}", len(prompt) + 1)
        messages = [*messages_of(prompt), *messages_of(completion)]
        text, before = template(messages), template(messages_of(prompt))
        return Rendered(text, len(before) if text.startswith(before) else 0)
    if not isinstance(row[kind], str):
        raise BadRowError(f"expected text in {kind!r}, got {type(row[kind]).__name__}")
    return Rendered(row[kind])


def messages_of(value: Any) -> Sequence[Mapping[str, Any]]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(each, Mapping) for each in value):
        raise BadRowError(f"expected a list of messages, got {type(value).__name__}")
    return list(value)


def chatml(messages: Sequence[Mapping[str, Any]]) -> str:
    """For tokenizers without a chat template."""
    begin, end = CHATML
    return "".join(f"{begin}{message.get('role')}\n{message.get('content') or ''}{end}" for message in messages)
