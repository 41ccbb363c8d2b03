"""Turn a row (a plain text, a prompt with its completion, or a chat) into the text to tokenize."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, takewhile
from operator import eq
from textwrap import shorten
from typing import Any, NamedTuple

from hf_packing.errors import MissingDependencyError, PackingError

_CHATS = ("messages", "conversations")
ROW_KINDS = ("prompt", *_CHATS, "text")
"""Fields that determine the kind of a row. If a row has several of these fields, the first in this order counts, as in
SFTTrainer. A prompt counts if there is a completion, and ShareGPT's conversations come before messages."""
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

Fields = Mapping[str, Any]
"""Values by name: a row, a message, or arguments for the chat template."""
Span = tuple[int, int]
"""A part of a text, as a slice (start, stop) of characters."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a template marks the assistant's parts; transformers looks for the same pattern."""
_THINKING = ("reasoning_content", "reasoning", "thinking")
"""Fields of messages with the model's thinking. Each chat template knows one of these names."""
_NOT_OF_ROWS = {"chat_template", "add_generation_prompt", "continue_final_message"}
"""Arguments of `apply_chat_template` that no row has a value of its own for."""
MOST_WEIGHT = 3e38
"""The largest weight, about that of float32."""
UNFORMATTED = "; dataset.with_format(None) has rows of plain values"
LACKS_TEXT = "lack content, thinking or tool calls, which the chat template leaves out"


class BadRowError(PackingError):
    """The error for a row that cannot be used. The message says what was expected and what the row has."""


class Rendered(NamedTuple):
    """The text of a row, and the parts of the text that are trained on."""

    text: str
    prompt: str | None = None
    """What is written before the text to train on. The tokens that both texts begin with are not trained on."""
    trained: Sequence[Span] | None = None
    """The parts of the text that are trained on, in order; None for all of the text after the prompt."""
    weights: Sequence[float] | None = None
    """The weight of each of these parts in the loss; None for 1."""
    complete: bool = False
    """True if a chat template has written the text, so that the tokenizer must not add special tokens."""
    ends: bool = True
    """Whether the text ends with the end-of-sequence token, if it is not complete."""
    remarks: Sequence[str] = ()
    """What users should know of the row, in words that follow "3 of 10 rows"."""


@dataclass(frozen=True)
class Renderer:
    """A writer of rows as text: a tokenizer of transformers, the chat template for its chats, and options."""

    tokenizer: Any
    chat_template: Any = None
    """The chat template's text, or several, by name; None for that of the tokenizer, or ChatML if it has none."""
    text_field: str | None = None
    """Name of the field with the text or the messages; None to take the first of ROW_KINDS that a row has."""
    separator: str | None = None
    """The text between a prompt and a completion that are both text; None for no text."""
    train_on: str | None = None
    """One of TRAIN_ON; None for the assistant's turns of messages, for completions, and for whole texts."""
    weighted: bool = False
    """Whether messages may have weights other than 0 and 1."""
    prompt_weight: float = 0
    """The weight of prompts in the loss."""

    @property
    def template(self) -> Any:
        """The chat template's text; or several, by name."""
        return self.chat_template or self.tokenizer.chat_template or CHATML

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """All special tokens of the tokenizer, also those without a name such as `eos_token`."""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return (*self.tokenizer.all_special_tokens, *added)

    @cached_property
    def _template_for_training(self) -> Any:
        """TRL's training version of the tokenizer's template, which SFTTrainer takes; or the given template.

        Raises:
            MissingDependencyError: TRL is not installed, and may have another version of a template without marks.
        """
        if self.template == self.tokenizer.chat_template:
            try:
                from trl import get_training_chat_template

                return get_training_chat_template(self.tokenizer) or self.template
            except ValueError:  # TRL does not know the template
                pass
            except ImportError:
                if not _MARKS.search(str(self.template)):
                    raise MissingDependencyError(
                        "the chat template does not mark the assistant's turns, and TRL has such versions of many "
                        'templates: pip install "hf-packing[trl]", or pass a chat_template with {% generation %} marks'
                    ) from None
        return self.template

    def write(
        self, messages: Sequence[Fields], settings: Fields, ask: bool = False, for_training: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return a chat as text, if `ask` with the generation prompt, and the parts that the template marks.

        With `for_training`, TRL's training version of the template writes the chat.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # apply_chat_template calls it

        if refused := sorted(_NOT_OF_ROWS & settings.keys()):
            raise BadRowError(f"expected chat_template_kwargs that the chat template reads, got {refused[0]!r}")
        template = self._template_for_training if for_training else self.template
        source = self.tokenizer.get_chat_template(
            template if isinstance(template, str) else None, settings.get("tools")
        )
        if settings.get("tools") and "tools" not in source:
            raise BadRowError("expected a chat template that writes tools, since the row has tools")
        options = {
            **self.tokenizer.special_tokens_map,
            **settings,
            "chat_template": source,
            "add_generation_prompt": ask,
            "return_assistant_tokens_mask": _MARKS.search(source),
        }
        reason = ""
        for chat in with_parsed_arguments(messages), messages:  # some templates, as DeepSeek's, join arguments to text
            try:
                (text,), spans = render_jinja_template([chat], **options)
                return text, spans[0] if spans else None
            except Exception as error:  # templates may raise anything
                reason = reason_of(error)
        raise BadRowError(f"expected messages that the chat template accepts, got the error: {reason}")

    def parts_of(self, row: Fields) -> tuple[list[str], Any, Any]:
        """Return the fields that a row has, its prompt, empty if it has none, and what follows, of the first field."""
        given = {name: value for name, value in row.items() if value is not None}
        if "completion" not in given:
            given.pop("prompt", None)
        kinds = [self.text_field] if self.text_field else list(ROW_KINDS)
        match given:
            case {"conversations": [{"from": _}, *_]}:  # ShareGPT's, of which TRL makes messages
                kinds.sort(key=("prompt", "conversations").__contains__, reverse=True)
        found = [name for name in kinds if name in given]
        if not found:
            raise BadRowError(
                f"expected {' or '.join(kinds)}, got the fields "
                f"{', '.join(name + ' (null)' * (row[name] is None) for name in row) or 'none'}; text_field names the "
                "field with text or messages, a prompt needs a completion, and what is null does not count"
            )
        return (found, given["prompt"], given["completion"]) if found[0] == "prompt" else (found, "", given[found[0]])

    def render(self, row: Fields) -> Rendered:
        """Return the text of a row, and the parts of the text that are trained on.

        Raises:
            BadRowError: the row has no such field, a value has the wrong type, an option does not fit the row, or the
                template cannot write the chat.
            UnicodeEncodeError: the text has surrogates, which are not Unicode.
        """
        (kind, *others), before, after = self.parts_of(row)
        if self.separator is not None and kind != "prompt":
            raise BadRowError(f"separator: expected a row with prompt and completion, got one with {kind}")
        is_chat = kind in _CHATS or not (isinstance(before, str) and isinstance(after, str))
        fitting = ["completion"] * (kind == "prompt") + ["assistant"] * is_chat + ["all"]
        if self.train_on not in (None, *fitting):
            raise BadRowError(
                f"expected train_on={' or '.join(map(repr, fitting))} for documents with {kind} of this type, got "
                f"train_on={self.train_on!r}"
            )
        train_on = self.train_on or fitting[0]
        if self.prompt_weight and (kind != "prompt" or train_on == "all"):
            raise BadRowError(
                f"prompt_weight: expected rows with prompt and completion, and a train_on that leaves prompts out, got "
                f"a row with {kind}, and train_on={train_on!r}"
            )
        if is_chat:
            rendered = self._render_chat(*chat_of(before, after), settings_of(row), train_on)
        else:
            before += self.separator or ""
            masked = before if train_on == "completion" else None
            rendered = Rendered(before + after, masked, ends="text" not in others)
        if others:
            without = " without an end-of-sequence token, as by SFTTrainer" * (not rendered.ends)
            taken = f"have {' and '.join([kind, *others])}, of which {kind} is taken{without}; text_field names another"
            rendered = rendered._replace(remarks=(*rendered.remarks, taken))
        rendered.text.encode()
        return rendered

    def _render_chat(
        self, messages: Sequence[Fields], prompt: int, turns: Sequence[int], settings: Fields, train_on: str
    ) -> Rendered:
        """Return the text of a chat, and its parts that are trained on."""
        if prompt == len(messages):
            raise BadRowError("expected at least one message, got an empty list")
        for_training = train_on == "assistant"
        text, marked = self.write(messages, settings, for_training=for_training)
        weights = [weight_of(messages[turn]) for turn in turns]
        if self.prompt_weight and {*map(weight_of, messages[:prompt])} - {1}:
            raise BadRowError(
                "prompt_weight: expected prompts of messages without weights and marks of their own, got a message "
                "with one"
            )
        if not self.weighted and (other := {*weights} - {0, 1}):
            raise BadRowError(
                f"weight: expected 0, 1 or floats in messages, got {min(other)!r}; hf_packing.tokenize takes other "
                "weights if the features of the dataset say that they are floats, as after "
                "dataset.select_columns('messages').map(dict, features=datasets.Features(messages=datasets.List({"
                "'role': datasets.Value('string'), 'content': datasets.Value('string'), "
                "'weight': datasets.Value('float32')})))"
            )
        before, trained, of_spans = None, None, None
        if prompt and train_on != "all":
            before, _ = self.write(messages[:prompt], settings, True, for_training)
        after = text.removeprefix(before or "")
        if for_training:
            trained = self._spans_of(text, messages, turns, settings) if marked is None else marked
        if {*weights} - {1}:
            if trained is None:
                raise BadRowError(f"expected train_on='assistant' for messages with weights, got {train_on!r}")
            spans = [span for span in trained if span[1] > len(text) - len(after)]
            if len(spans) != len(turns):
                raise BadRowError(f"expected a chat template that marks {len(turns)} turns, but it marks {len(spans)}")
            trained, of_spans = list(compress(spans, weights)), [*filter(None, weights)]
        lacks = any(lacks_text(messages[turn], after) for turn in turns)
        return Rendered(text, before, trained, of_spans, complete=True, remarks=(LACKS_TEXT,) * lacks)

    def _spans_of(self, text: str, messages: Sequence[Fields], turns: Sequence[int], settings: Fields) -> list[Span]:
        """Return the parts of a text that the training template adds for turns to the earlier messages.

        So that long chats take linear time, each part is first looked for as what the template adds to the messages
        through the first turn.
        """
        spans: list[Span] = []
        first: Any = ()
        opened, done, end = "", 0, 0

        def edge(stop: int, ask: bool) -> int:
            """Return the length of the text of the messages up to one, if `ask` with the generation prompt."""
            with suppress(BadRowError):
                written, _ = self.write([*first, *messages[done:stop]], settings, ask, True)
                if written.startswith(opened) and text.startswith(written[len(opened) :], end):
                    return end + len(written) - len(opened)
            before, _ = self.write(messages[:stop], settings, ask, True)
            check_begins_with(text, before, stop)
            return len(before)

        for turn in turns:
            start, end = edge(turn, True) if turn else 0, edge(turn + 1, False)
            done = turn + 1
            spans.append((start, end))
            if not first:
                first, opened = messages[:done], text[:end]
        return spans


def check_begins_with(text: str, before: str, number: int) -> None:
    """Raise BadRowError if a chat does not begin with the text of its first messages, as the template writes them."""
    if not text.startswith(before):
        same = num_shared(before, text)
        shown = slice(max(0, same - 20), same + 40)
        raise BadRowError(
            "expected a chat template that begins turns with their generation prompt, and leaves earlier turns as they "
            f"are, but it writes {before[shown]!r} for the first {number} messages, and {text[shown]!r} once others "
            "follow. Take another template, such as one with {% generation %} marks; chat_template_kwargs, such as "
            "{'enable_thinking': False}; or hf_packing.branches, for a document of each turn"
        )


def weight_of(message: Fields) -> float:
    """Return the weight of a message in the loss, 0 if it is not trained on, by the fields of OpenAI, axolotl,
    torchtune and LLaMA-Factory."""
    weight = 1 if message.get("weight") is None else message["weight"]
    if not isinstance(weight, (int, float)) or not abs(weight) <= MOST_WEIGHT:
        raise BadRowError(
            f"weight: expected a finite number in a message, of at most {MOST_WEIGHT:g}, got {weight!r:.60}"
        )
    for name in ("train", "trainable", "masked"):
        if message.get(name) not in (None, True, False):
            raise BadRowError(f"{name}: expected true or false in a message, got {message[name]!r}")
    is_trained = False not in (message.get("train"), message.get("trainable"), not message.get("masked"))
    return weight * is_trained


def lacks_text(message: Fields, text: str) -> bool:
    """Return whether a text, as a chat template writes it, lacks content, thinking, or names of called tools."""
    content = message.get("content")
    expected = [str(content or "").rpartition("</think>")[2]]  # templates write thinking in their own way
    if isinstance(content, list):
        expected = [part["text"] for part in content]
    expected += [str(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or []]
    expected += [message[name] for name in _THINKING if isinstance(message.get(name), str)]
    return any(part.strip() not in text for part in expected)


def chat_of(before: Any, after: Any) -> tuple[list[Fields], int, list[int]]:
    """Return the messages of a chat, how many are the prompt, and the numbers of the assistant's in what follows."""
    prompt, completion = messages_of(before or []), messages_of(after)
    turns = [turn for turn, message in enumerate(completion, start=len(prompt)) if message["role"] == "assistant"]
    return prompt + completion, len(prompt), turns


def messages_of(value: Any) -> list[Fields]:
    """Return the messages of a chat, also of ShareGPT's form; raise BadRowError if the value is something else."""
    if not isinstance(value, list):
        has_format = type(value).__module__ != "builtins"  # such as that of NumPy
        hint = "; map needs batched=True" if isinstance(value, Mapping) else UNFORMATTED * has_format
        raise BadRowError(f"expected text or a list of messages, got {type(value).__name__}: {str(value)[:40]}{hint}")
    messages: list[Any] = []
    for number, message in enumerate(value):
        match message:
            case {"role": "human" | "gpt" as role} | {"from": "human" | "gpt" as role}:
                raise BadRowError(
                    f"message {number}: expected a role of the chat template, such as user or assistant, got {role!r}; "
                    "rename human to user, and gpt to assistant"
                )
            case {"role": _, "content": _} | {"role": _, "tool_calls": _}:
                messages.append(message)
            case {"from": role, "value": content, **others}:
                messages.append({"role": role, "content": content, **others})
            case _:
                raise BadRowError(
                    f"message {number}: expected messages with a role, and with content or tool_calls, got "
                    f"{str(message)[:40]}"
                )
        calls = messages[-1].get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise BadRowError(f"message {number}: expected a list of calls in tool_calls, got {str(calls)[:40]}")
        for part in texts if isinstance(texts := messages[-1].get("content"), list) else []:
            match part:
                case {"text": str()}:
                    pass
                case _:
                    raise BadRowError(f"message {number}: expected text, got a part for a processor: {str(part)[:40]}")
    return messages


def _is_call(value: Any) -> bool:
    """Return whether a value is a call of a function, also one without a type around it."""
    return isinstance(value, Mapping) and isinstance(value.get("function", value), Mapping)


def settings_of(row: Fields) -> Fields:
    """Return a row's arguments for the chat template: its columns `tools` and `chat_template_kwargs`, as in TRL."""
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return ({"tools": tools} if tools else {}) | dict(row.get("chat_template_kwargs") or {})
    except (ValueError, TypeError) as error:
        raise BadRowError(
            f"expected tools as a list or as JSON, and chat_template_kwargs as a mapping, got the error: {error}"
        ) from None


def reason_of(error: Exception) -> str:
    """Return the message of an error as one line of limited length, or the error's type if the message is empty."""
    return shorten(str(error), 1000) or type(error).__name__


def without_added_nulls(value: Any, feature: Any) -> Any:
    """Return a value of a dataset without the fields that Arrow has added, since other rows have them.

    Args:
        value: a row, or a part of one.
        feature: its type in `datasets`; what this type leaves open, such as that of JSON, has only nulls of the data.
    """
    if isinstance(feature, Mapping) and value:
        return {name: without_added_nulls(each, feature.get(name)) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_added_nulls(each, getattr(feature, "feature", None)) for each in value]
    return value


def with_parsed_arguments(messages: Sequence[Fields]) -> list[Fields]:
    """Return messages whose tool calls have arguments as mappings, which templates expect, also if they were JSON."""
    parsed = deepcopy([*messages])
    for message in parsed:
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            with suppress(KeyError, TypeError, ValueError):
                if isinstance(arguments := json.loads(function["arguments"]), dict):
                    function["arguments"] = arguments
    return parsed


def num_shared(items: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the number of leading items that two sequences share."""
    return sum(takewhile(bool, map(eq, items, others)))
