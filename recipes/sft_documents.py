"""Chats, prompts and completions as tokens and labels; what is not trained on has the label -100."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import datasets
from documents import read_documents
from transformers import PreTrainedTokenizerBase

import hf_packing as hfp
from hf_packing.data.rendering import TrainOn, render
from hf_packing.data.tokenize import text_tokenizer

IGNORED = -100
CHATML = (
    "{% for message in messages %}"
    "{% if message.content is not string %}{{ raise_exception('a message without text needs --chat_template_path') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read(data: str, flag: str = "--data") -> datasets.Dataset:
    """Return rows with messages, or with prompt and completion."""
    rows = read_documents(data, flag)
    if not len(rows):
        sys.exit(f"{flag}: expected rows, {data!r} has none")
    names = set(rows.column_names)
    if "messages" not in names and not {"prompt", "completion"} <= names:
        sys.exit(f"{flag}: expected messages, or prompt and completion, got columns {', '.join(rows.column_names)}")
    return rows


def what_is_trained(rows: datasets.Dataset, assistant_only: bool | None, completion_only: bool | None) -> TrainOn:
    """Resolve the flags (None if not given): train on answers alone, unless they say otherwise."""
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
    return TrainOn(assistant_only, completion_only)


def check_turns(rows: datasets.Dataset, train_on: TrainOn) -> None:
    """Refuse --per_turn for data without turns, and with flags that train on more than the turns of documents."""
    has_messages = "messages" in rows.column_names
    if not has_messages and isinstance(rows[0]["prompt"], str):
        sys.exit("--per_turn: expected chats in the data, got text")
    if not (train_on.assistant_only and (has_messages or train_on.completion_only)):
        sys.exit(
            "--per_turn: expected to train on the assistant's turns alone, got --assistant_only_loss False or "
            "--completion_only_loss False"
        )


def tokenize(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> dict[str, list[int]]:
    """Return the tokens and labels of a row, as `hf-packing pack` makes them.

    Raises:
        PackingError: the tokenizer's chat template cannot write the row, or rewrites earlier turns.
    """
    check_tools(row, tokenizer)
    texts = text_tokenizer(tokenizer)
    document = render(row, "messages" if "messages" in row else "prompt", texts.template, train_on=train_on)
    (input_ids,), (labels,) = texts.tokens([document], ended=True)
    return {"input_ids": input_ids, "labels": labels}


def tokenize_turns(rows: Mapping[str, list[Any]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Return the tokens and labels of each assistant turn of a batch of chats, as the model sees it at inference.

    Raises:
        PackingError: the tokenizer's chat template cannot write a chat, or does not begin a turn as it asks for it.
    """
    for tools in rows.get("tools", ()):
        check_tools({"tools": tools}, tokenizer)
    return hfp.branches(rows, tokenizer)


def check_tools(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse tools that the chat template would silently leave out."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if tools and "tools" not in tokenizer.chat_template:
        sys.exit("--chat_template_path: expected a template that shows tools, as the data has some")
