"""A row as text: which field it is known by, what chats become, and what is not trained on."""

import json
from itertools import pairwise

import pytest

from hf_packing.errors import PackingError
from hf_packing.text.rendering import CHATML, ChatTemplate, chatml, kind_of_row, render


def test_what_messages_hold():
    calls = [{"name": "find", "arguments": {}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    text = chatml(messages)
    assert "user\none two<|im_end|>" in text
    assert json.dumps(calls) in text


def test_kinds_of_rows():
    assert kind_of_row({"id": 1, "text": "a"}, None) == "text"
    assert kind_of_row({"prompt": "a", "completion": "b"}, None) == "prompt"
    assert kind_of_row({"messages": []}, None) == "messages"
    assert kind_of_row({"text": "a", "input_ids": [1]}, None) == "input_ids"
    assert kind_of_row({"text": "a", "content": "b"}, "content") == "content"
    with pytest.raises(PackingError, match="expected prompt and completion, got the fields prompt"):
        kind_of_row({"prompt": "a"}, "prompt")
    for row in ({"prompt": "a"}, {"body": "a"}, {"text": None, "body": "a"}):
        with pytest.raises(
            PackingError, match="expected text, prompt and completion, .* got the fields .*text_field names"
        ):
            kind_of_row(row, None)
    with pytest.raises(PackingError, match="expected body, got the fields text"):
        kind_of_row({"text": "a"}, "body")


def test_what_is_rendered():
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None}]
    assert render({"text": "one"}, "text", CHATML)[:3] == ("one", (), False)
    assert render({"prompt": "one", "completion": "two"}, "prompt", CHATML)[:2] == ("onetwo", ((0, 3),))
    assert render({"prompt": "one", "completion": "two"}, "prompt", CHATML, "\n")[:2] == ("one\ntwo", ((0, 4),))
    assert render({"messages": messages}, "messages", CHATML).text == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )
    both = render({"prompt": messages[:1], "completion": messages[1:]}, "prompt", CHATML)
    ((begin, end),) = both.masked
    assert begin == 0
    assert both.text[:end] == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    for row, kind in (({"text": 5}, "text"), ({"messages": "one"}, "messages"), ({"messages": ["one"]}, "messages")):
        with pytest.raises(PackingError, match="expected "):
            render(row, kind, CHATML)


USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
ASKED, BEGUN, ANSWERED = "<|im_start|>user\nQ<|im_end|>\n", "<|im_start|>assistant\n", "A<|im_end|>\n"
TURN = ASKED + BEGUN + ANSWERED


@pytest.mark.parametrize(
    ("row", "train_on", "pieces"),
    [
        ({"messages": [USER, ASSISTANT]}, "all", [(TURN, True)]),
        ({"messages": [USER, ASSISTANT] * 2}, None, [(ASKED + BEGUN, False), (ANSWERED, True)] * 2),
        (
            {"messages": [USER, ASSISTANT, USER]},
            "assistant",
            [(ASKED + BEGUN, False), (ANSWERED, True), (ASKED, False)],
        ),
        ({"messages": [ASSISTANT, USER]}, None, [(BEGUN + ANSWERED, True), (ASKED, False)]),
        ({"messages": [USER]}, "assistant", [(ASKED, False)]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, None, [(ASKED + BEGUN, False), (ANSWERED, True)]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "all", [(TURN, True)]),
        (
            {"prompt": [USER], "completion": [ASSISTANT, USER]},
            "completion",
            [(ASKED + BEGUN, False), (ANSWERED + ASKED, True)],
        ),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
            "assistant",
            [(TURN + ASKED + BEGUN, False), (ANSWERED, True)],
        ),
    ],
)
def test_pieces_that_are_trained_on(row, train_on, pieces):
    rendered = render(row, next(iter(row)), CHATML, train_on=train_on)
    assert rendered.text == "".join(text for text, _ in pieces)
    ends = [0]
    for text, _ in pieces:
        ends.append(ends[-1] + len(text))
    assert rendered.masked == tuple(
        span for span, (_, trained) in zip(pairwise(ends), pieces, strict=True) if not trained
    )


@pytest.mark.parametrize(
    ("row", "train_on", "expected"),
    [
        ({"messages": [USER]}, "completion", "'assistant' or 'all' for documents with messages"),
        ({"prompt": "a", "completion": "b"}, "assistant", "'completion' or 'all' for documents with a prompt"),
        ({"text": "a"}, "assistant", "'all' for documents with text"),
    ],
)
def test_what_cannot_be_trained_on(row, train_on, expected):
    with pytest.raises(PackingError, match=f"expected train_on={expected}.*, got train_on='{train_on}'"):
        render(row, next(iter(row)), CHATML, train_on=train_on)


def test_a_template_that_rewrites_earlier_turns():
    def last_only(messages, ask, settings):  # noqa: ARG001
        return f"{messages[-1]['content']}{'?' * ask}"

    row, template = {"prompt": [USER], "completion": [ASSISTANT]}, ChatTemplate(last_only)
    with pytest.raises(
        PackingError, match="expected a chat template that leaves earlier turns as they are, .* first 1"
    ):
        render(row, "prompt", template)
    assert render(row, "prompt", template, train_on="all").text == "A"
    with pytest.raises(PackingError, match="expected at least one message in the completion, got an empty list"):
        render({"prompt": [USER], "completion": []}, "prompt", template)


def test_text_that_the_template_leaves_out_is_noticed():
    thinking = {**ASSISTANT, "reasoning_content": "Hm."}
    row = {"messages": [USER, thinking]}
    assert render(row, "messages", CHATML).lacks_text
    assert not render(
        {"messages": [USER, {**ASSISTANT, "content": "<think>Hm.</think>A"}]}, "messages", CHATML
    ).lacks_text
    written = ChatTemplate(lambda messages, ask, settings: chatml(messages, ask, settings) + "Hm." * (not ask))
    assert not render(row, "messages", written, train_on="all").lacks_text


TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds what is lost"}}]


def test_tools_without_a_template_are_the_first_message():
    text = render({"messages": [USER], "tools": TOOLS}, "messages", CHATML).text
    assert text.startswith(f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>user\n")
    assert render({"messages": [USER], "tools": None}, "messages", CHATML).text.startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tools": "{"}, "expected tools as a list or as JSON, "),
        ({"tools": {"name": "find"}}, "expected tools as a list or as JSON, got dict"),
        ({"chat_template_kwargs": [1]}, "expected chat_template_kwargs as a mapping, got list"),
        ({"chat_template_kwargs": {"style": 1}}, "expected a tokenizer with a chat template, since .* sets style"),
    ],
)
def test_settings_that_cannot_be_followed(setting, message):
    with pytest.raises(PackingError, match=message):
        render({"messages": [USER], **setting}, "messages", CHATML)
