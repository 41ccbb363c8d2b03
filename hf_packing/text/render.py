"""Turn a row (a plain text, a prompt with its completion, or a chat) into the text to tokenize."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import shorten
from typing import Any, NamedTuple

from hf_packing.errors import PackingError

ROW_KINDS = ("text", "prompt", "messages")
"""Fields that determine the kind of a row. If a row has several of these fields, the first in this order counts."""
TRAIN_ON = ("assistant", "completion", "all")
"""What the tokens of a document can be trained on: the assistant's turns, the completion after a prompt, or all."""

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% macro body(message) %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}"
    "{{ part.text }}{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endmacro %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ body(message) }}{% endgeneration %}{% else %}{{ body(message) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template for a tokenizer that has none. Tools are written as JSON, in a system message at the beginning."""

Message = Mapping[str, Any]
Settings = Mapping[str, Any]
"""Arguments that a row passes to the chat template: `tools`, and the content of `chat_template_kwargs`."""
Span = tuple[int, int]
"""A part of a text, as a slice (start, stop) of characters."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a template marks the assistant's parts; transformers looks for the same pattern."""
_THINKING = ("reasoning_content", "reasoning", "thinking")
"""Fields of messages with the model's thinking. Each chat template knows one of these names."""
_END_OF_THINKING = "</think>"
"""Where thinking ends that is part of the content. Templates write it in their own way."""
_MOST_OF_A_REASON = 1000
"""The most characters of another library's error that a message shows."""


class BadRowError(PackingError):
    """The error for a row that cannot be used. The message says what was expected and what the row has."""


class Rendered(NamedTuple):
    """The text of a row, and the parts of the text that are trained on."""

    text: str
    trained: Sequence[Span] | None = None
    """The parts of the text that are trained on, in order; None for all of the text."""
    complete: bool = False
    """True if a chat template has written the text, so that the tokenizer must not add special tokens."""
    lacks_text: bool = False
    """True if the chat template has left out content, thinking or tool calls of an assistant turn."""


@dataclass(frozen=True)
class Renderer:
    """A writer of rows as text: a tokenizer of transformers, the chat template for its chats, and options."""

    tokenizer: Any
    template: Any
    """The chat template's text; or several, by name."""
    text_field: str | None = None
    """Name of the field with the text; None to take the first of ROW_KINDS that a row has."""
    separator: str | None = None
    """The text between a prompt and a completion that are both text; None for no text."""
    train_on: str | None = None
    """One of TRAIN_ON; None for the assistant's turns of messages, for completions, and for whole texts."""

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """All special tokens of the tokenizer, also those without a name such as `eos_token`."""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple({*self.tokenizer.all_special_tokens, *added})

    @cached_property
    def _template_for_training(self) -> Any:
        """TRL's training version of the tokenizer's template, which SFTTrainer takes; or the given template."""
        if self.template != self.tokenizer.chat_template:
            return self.template
        try:
            from trl import get_training_chat_template

            return get_training_chat_template(self.tokenizer) or self.template
        except (ImportError, ValueError):  # no TRL, or a template that it does not know
            return self.template

    def write(
        self, messages: Sequence[Message], settings: Settings, ask: bool = False, for_training: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return a chat as text, if `ask` with the generation prompt, and the parts that the template marks.

        With `for_training`, TRL's training version of the template writes the chat.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # apply_chat_template calls it

        template = self._template_for_training if for_training else self.template
        source = self.tokenizer.get_chat_template(
            template if isinstance(template, str) else None, settings.get("tools")
        )
        if settings.get("tools") and "tools" not in source:
            raise BadRowError("expected a chat template that writes tools, since the row has tools")
        marked = _MARKS.search(source) is not None
        options = {**self.tokenizer.special_tokens_map, **settings, "chat_template": source}
        options |= {"add_generation_prompt": ask, "return_assistant_tokens_mask": marked}
        try:
            (text,), spans = render_jinja_template([messages], **options)
        except Exception as error:  # templates may raise anything
            raise BadRowError(
                f"expected messages that the chat template accepts, got the error: {reason_of(error)}"
            ) from None
        return text, spans[0] if marked else None

    def render(self, row: Mapping[str, Any]) -> Rendered:
        """Return the text of a row, and the parts of the text that are trained on.

        Raises:
            BadRowError: the row has no such field, a value has the wrong type, an option does not fit the row, the
                template cannot write the chat, or the text is not Unicode.
        """
        wanted = (self.text_field,) if self.text_field else ROW_KINDS
        kind = next((name for name in wanted if row.get(name) is not None), None)
        if kind is None or (kind == "prompt" and row.get("completion") is None):
            expected = self.text_field
            if expected in (None, "prompt"):
                expected = "text, prompt and completion, or messages"
            fields = ", ".join(row) or "none"
            raise BadRowError(f"expected {expected}, got the fields {fields}; text_field names the field with the text")
        if self.separator is not None and kind != "prompt":
            raise BadRowError(f"separator: expected a row with prompt and completion, got one with {kind}")
        before: Any = [] if kind == "messages" else ""
        after = row[kind]
        if kind == "prompt":
            before, after = row["prompt"], row["completion"]
        is_chat = kind == "messages" or (kind == "prompt" and not (isinstance(before, str) and isinstance(after, str)))
        fitting = ["completion"] * (kind == "prompt") + ["assistant"] * is_chat + ["all"]
        if self.train_on not in (None, *fitting):
            raise BadRowError(
                f"expected train_on={' or '.join(map(repr, fitting))} for documents with {kind} of this type, got "
                f"train_on={self.train_on!r}"
            )
        train_on = self.train_on or fitting[0]
        if is_chat:
            prompt, completion = messages_of(before), messages_of(after)
            if kind == "prompt" and not completion:
                raise BadRowError("expected at least one message in the completion, got an empty list")
            rendered = self._render_chat([*prompt, *completion], len(prompt), settings_of(row), train_on)
        elif isinstance(after, str):
            before += self.separator or ""
            text = before + after
            rendered = Rendered(text, None if train_on == "all" else [(len(before), len(text))])
        else:
            raise BadRowError(f"expected text in the field {kind!r}, got {type(after).__name__}")
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            raise BadRowError(f"expected Unicode, got text that cannot be encoded as UTF-8: {error}") from None
        return rendered

    def _render_chat(self, messages: Sequence[Message], prompt: int, settings: Settings, train_on: str) -> Rendered:
        """Return the text of a chat, and its parts that are trained on; the first `prompt` messages are the prompt."""
        for_training = train_on == "assistant"
        text, marked = self.write(messages, settings, for_training=for_training)

        def prefix(number: int, ask: bool) -> int:
            """Return the length of the text of the first messages, if `ask` with the generation prompt."""
            before, _ = self.write(messages[:number], settings, ask, for_training)
            if text.startswith(before):
                return len(before)
            raise BadRowError(
                f"expected a chat template that leaves earlier turns as they are, but this template rewrites the first "
                f"{number} messages when others follow, so the tokens to train on cannot be found. Install trl, "
                "which has training versions of many templates; take a template with {% generation %} marks; or make a "
                "document of each turn with hf_packing.branches"
            )

        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        begin = prefix(prompt, True) if prompt and train_on != "all" else 0
        trained: list[Span] | None = None
        if train_on == "completion":
            trained = [(begin, len(text))]
        elif train_on == "assistant":
            if marked is None:
                marked = [(prefix(turn, True) if turn else 0, prefix(turn + 1, False)) for turn in turns]
            elif turns and not marked:
                raise BadRowError("expected a chat template that marks the assistant's turns, but it marks none")
            trained = [(max(start, begin), stop) for start, stop in marked if stop > begin]
        lacking = any(lacks_text(messages[turn], text) for turn in turns)
        return Rendered(text, trained, complete=True, lacks_text=lacking)


def lacks_text(message: Message, text: str) -> bool:
    """Return whether a text, as a chat template writes it, lacks content, thinking, or names of called tools."""
    content = message.get("content")
    expected = [str(content or "").rpartition(_END_OF_THINKING)[2]]
    if isinstance(content, list):
        expected = [part["text"] for part in content]
    expected += [str(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or []]
    expected += [message[name] for name in _THINKING if isinstance(message.get(name), str)]
    return any(part.strip() not in text for part in expected)


def messages_of(value: Any) -> Sequence[Message]:
    """Return the messages of a chat, without null fields; raise BadRowError if the value is something else."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRowError(f"expected a list of messages, got {type(value).__name__}: {str(value)[:40]}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
            raise BadRowError(f"expected messages with a role, and with content or tool_calls, got {str(message)[:40]}")
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise BadRowError(f"message {number}: expected text, got a part for a processor: {str(part)[:40]}")
    kept: list[Message] = _without_nulls(list(value))
    return kept


def settings_of(row: Mapping[str, Any]) -> Settings:
    """Return a row's arguments for the chat template: its columns `tools` and `chat_template_kwargs`, as in TRL."""
    tools, others = _without_nulls(row.get("tools")), _without_nulls(row.get("chat_template_kwargs"))
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return ({"tools": tools} if tools else {}) | dict(others or {})
    except (ValueError, TypeError) as error:
        raise BadRowError(
            f"expected tools as a list or as JSON, and chat_template_kwargs as a mapping, got the error: {error}"
        ) from None


def reason_of(error: Exception) -> str:
    """Return the message of an error as one line of limited length, or the error's type if the message is empty."""
    return shorten(str(error), _MOST_OF_A_REASON) or type(error).__name__


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields, at any depth. Arrow adds a null field to a row if only other rows have it."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
