"""Chats, prompts and completions as tokens and labels; what is not to be trained on has the label -100."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from transformers import PreTrainedTokenizerBase

from hf_packing.columns import IGNORED_LABEL

CHATML = (
    "{% for message in messages %}"
    "{% if message.content is not string %}{{ raise_exception('a message without text needs --chat_template_path') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Trained(NamedTuple):
    """Which tokens have a loss: those that are both, where both are asked for."""

    assistant_only: bool
    completion_only: bool

    def covers(self, by_assistant: bool, in_completion: bool) -> bool:
        return (by_assistant or not self.assistant_only) and (in_completion or not self.completion_only)


class Edge(NamedTuple):
    """The end of a piece of a chat."""

    messages: int
    """How many of them come before it."""
    asks: bool
    """Whether the template's beginning of an answer comes before it, too."""
    trained: bool


def read(data: str, flag: str = "--data") -> datasets.Dataset:
    """Rows with messages, or with prompt and completion."""
    if Path(data).suffix and not Path(data).exists():
        sys.exit(f"{flag}: expected a file or a dataset's name, got {data!r}, which does not exist")
    if Path(data).is_file():
        rows = datasets.load_dataset("json", data_files=data, split="train")
    else:
        rows = datasets.load_dataset(data, split="train")
    if not len(rows):
        sys.exit(f"{flag}: expected rows, {data!r} has none")
    names = set(rows.column_names)
    if "messages" not in names and not {"prompt", "completion"} <= names:
        sys.exit(f"{flag}: expected messages, or prompt and completion, got columns {', '.join(rows.column_names)}")
    return rows


def what_is_trained(rows: datasets.Dataset, assistant_only: bool | None, completion_only: bool | None) -> Trained:
    """Resolve the flags, None for one that was not given: answers alone, unless they say otherwise."""
    has_messages = "messages" in rows.column_names
    is_chat = has_messages or not isinstance(rows[0]["prompt"], str)
    if completion_only and has_messages:
        sys.exit("--completion_only_loss: expected prompt and completion in the data, got messages")
    if assistant_only and not is_chat:
        sys.exit("--assistant_only_loss: expected messages in the data, got text; --completion_only_loss is for text")
    if assistant_only is None:
        assistant_only = is_chat and completion_only is not False
    if completion_only is None:
        completion_only = not has_messages
    return Trained(assistant_only, completion_only)


def tokenise(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, trained: Trained) -> dict[str, list[int]]:
    input_ids, labels = [], []
    for text, has_loss in pieces(row, tokenizer, trained):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        input_ids += tokens
        labels += tokens if has_loss else [IGNORED_LABEL] * len(tokens)
    return {"input_ids": input_ids, "labels": labels}


def pieces(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, trained: Trained) -> Iterator[tuple[str, bool]]:
    """The row as pieces of text, each with whether it is trained on."""
    has_messages = "messages" in row
    if not has_messages and isinstance(row["prompt"], str):
        yield row["prompt"] + "\n", trained.covers(by_assistant=False, in_completion=False)
        yield row["completion"] + tokenizer.eos_token, trained.covers(by_assistant=True, in_completion=True)
        return
    prompt = [] if has_messages else row["prompt"]
    messages = row["messages"] if has_messages else prompt + row["completion"]
    more = {"tools": tools_of(row, tokenizer), **(row.get("chat_template_kwargs") or {})}
    rendered = ""
    for edge in edges(messages, len(prompt), trained):
        text = tokenizer.apply_chat_template(
            messages[: edge.messages], tokenize=False, add_generation_prompt=edge.asks, **more
        )
        if not text.startswith(rendered):
            sys.exit(
                f"--model: its chat template rewrites earlier turns, so turn {edge.messages} cannot be masked apart; "
                "--chat_template_path takes another template"
            )
        yield text[len(rendered) :], edge.trained
        rendered = text


def edges(messages: Sequence[Mapping[str, Any]], prompt: int, trained: Trained) -> list[Edge]:
    """Where pieces end: only where what is trained on changes, and not after the last of it."""
    found = []
    for turn, message in enumerate(messages):
        by_assistant = message["role"] == "assistant"
        if by_assistant and turn:
            found.append(Edge(turn, True, trained.covers(False, turn > prompt)))
        found.append(Edge(turn + 1, False, trained.covers(by_assistant, turn >= prompt)))
    changes = [edge for edge, following in pairwise(found) if edge.trained != following.trained]
    return changes + [edge for edge in found[-1:] if edge.trained]


def tools_of(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tools that the chat's template is to describe."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if tools and "tools" not in tokenizer.chat_template:
        sys.exit("--chat_template_path: expected a template that shows tools, as the data has some")
    return tools
