"""A row as text: which field it is known by, what chats become, and what is not trained on."""

import json
from itertools import pairwise

import pytest

from hf_packing.data.rendering import EVERYTHING, TrainOn, chatml, kind_of_row, render
from hf_packing.errors import PackingError


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
    assert render({"text": "one"}, "text", chatml) == ("one", (), False)
    assert render({"prompt": "one", "completion": "two"}, "prompt", chatml) == ("one\ntwo", ((0, 4),), False)
    assert render({"prompt": "one", "completion": "two"}, "prompt", chatml, "") == ("onetwo", ((0, 3),), False)
    assert render({"prompt": "", "completion": "two"}, "prompt", chatml, "") == ("two", (), False)
    assert render({"messages": messages}, "messages", chatml).text == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )
    both = render({"prompt": messages[:1], "completion": messages[1:]}, "prompt", chatml)
    ((begin, end),) = both.masked
    assert begin == 0
    assert both.text[:end] == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    for row, kind in (({"text": 5}, "text"), ({"messages": "one"}, "messages"), ({"messages": ["one"]}, "messages")):
        with pytest.raises(PackingError, match="expected "):
            render(row, kind, chatml)


USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
ASKED, BEGUN, ANSWERED = "<|im_start|>user\nQ<|im_end|>\n", "<|im_start|>assistant\n", "A<|im_end|>\n"
TURN = ASKED + BEGUN + ANSWERED


@pytest.mark.parametrize(
    ("row", "train_on", "pieces"),
    [
        ({"messages": [USER, ASSISTANT]}, TrainOn(), [(TURN, True)]),
        ({"messages": [USER, ASSISTANT] * 2}, TrainOn(True), [(ASKED + BEGUN, False), (ANSWERED, True)] * 2),
        ({"messages": [USER, ASSISTANT, USER]}, TrainOn(True), [(ASKED + BEGUN, False), (ANSWERED, True)]),
        ({"messages": [USER]}, TrainOn(True), []),
        ({"prompt": [USER], "completion": [ASSISTANT]}, TrainOn(), [(ASKED + BEGUN, False), (ANSWERED, True)]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, EVERYTHING, [(TURN, True)]),
        ({"prompt": [USER], "completion": [USER, ASSISTANT]}, TrainOn(), [(ASKED, False), (TURN, True)]),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
            TrainOn(True, False),
            [(ASKED + BEGUN, False), (ANSWERED, True)] * 2,
        ),
    ],
)
def test_pieces_that_are_trained_on(row, train_on, pieces):
    rendered = render(row, next(iter(row)), chatml, train_on=train_on)
    assert rendered.text == "".join(text for text, _ in pieces)
    ends = [0]
    for text, _ in pieces:
        ends.append(ends[-1] + len(text))
    assert rendered.masked == tuple(
        span for span, (_, trained) in zip(pairwise(ends), pieces, strict=True) if not trained
    )


def test_a_template_that_rewrites_earlier_turns():
    def last_only(messages, ask, settings):  # noqa: ARG001
        return f"{messages[-1]['content']}{'?' * ask}"

    with pytest.raises(PackingError, match="expected a chat template that leaves earlier turns as they are, .* turn 2"):
        render({"prompt": [USER], "completion": [ASSISTANT]}, "prompt", last_only)
    with pytest.raises(PackingError, match="expected at least one message in the completion, got an empty list"):
        render({"prompt": [USER], "completion": []}, "prompt", last_only)


TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds what is lost"}}]


def test_tools_without_a_template_are_the_first_message():
    text = render({"messages": [USER], "tools": TOOLS}, "messages", chatml).text
    assert text.startswith(f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>user\n")
    assert render({"messages": [USER], "tools": None}, "messages", chatml).text.startswith("<|im_start|>user")


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
        render({"messages": [USER], **setting}, "messages", chatml)
