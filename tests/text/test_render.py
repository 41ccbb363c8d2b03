"""A row as text: which field it is known by, what chats become, and what is not trained on."""

import json

import pytest
from chat_templates import tokenizer_with

from hf_packing.errors import PackingError
from hf_packing.text.render import CHATML, Renderer

TOKENIZER = tokenizer_with(None)


def render(row, source=CHATML, **options):
    return Renderer(TOKENIZER, source, **options).render(row)


def test_chatml_is_the_template_of_those_without_one_and_separators_belong_to_prompts():
    calls = [{"name": "find", "arguments": {}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    text = render({"messages": messages}, train_on="all").text
    assert text == (f"<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n{json.dumps(calls)}<|im_end|>\n")
    text = render({"messages": [USER], "tools": TOOLS}).text
    assert text == f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n{ASKED}"
    assert render({"messages": [USER], "tools": None}).text == ASKED
    assert render({"prompt": "one", "completion": "two"}, separator="\n")[:2] == ("one\ntwo", [(4, 7)])


@pytest.mark.parametrize(
    ("row", "field", "text"),
    [
        ({"id": 1, "text": "a"}, None, "a"),
        ({"text": "a", "prompt": "b", "completion": "c"}, None, "a"),
        ({"text": "a", "content": "b"}, "content", "b"),
        ({"text": "a", "input_ids": [1]}, "text", "a"),
        ({"text": None, "prompt": "a", "completion": "b"}, None, "ab"),
    ],
)
def test_the_first_field_that_a_row_has_is_its_text(row, field, text):
    assert render(row, text_field=field).text == text


USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
ASKED, BEGUN, ANSWERED = "<|im_start|>user\nQ<|im_end|>\n", "<|im_start|>assistant\n", "A<|im_end|>\n"
TURN = ASKED + BEGUN + ANSWERED
PAIR = {"prompt": [USER], "completion": [ASSISTANT]}


@pytest.mark.parametrize(
    ("row", "train_on", "text"),
    [
        ({"prompt": "one", "completion": "two"}, None, "one[two]"),
        ({"messages": [USER, ASSISTANT]}, "all", TURN),
        ({"messages": [USER, ASSISTANT] * 2}, None, f"{ASKED}{BEGUN}[{ANSWERED}]" * 2),
        ({"messages": [USER, ASSISTANT, USER]}, "assistant", f"{ASKED}{BEGUN}[{ANSWERED}]{ASKED}"),
        ({"messages": [ASSISTANT, USER]}, None, f"{BEGUN}[{ANSWERED}]{ASKED}"),
        ({"messages": [USER]}, "assistant", ASKED),
        (PAIR, None, f"{ASKED}{BEGUN}[{ANSWERED}]"),
        (PAIR, "all", TURN),
        ({"prompt": [USER], "completion": [ASSISTANT, USER]}, "completion", f"{ASKED}{BEGUN}[{ANSWERED}{ASKED}]"),
        (PAIR | {"prompt": [USER, ASSISTANT, USER]}, "assistant", f"{TURN}{ASKED}{BEGUN}[{ANSWERED}]"),
    ],
)
def test_what_is_trained_on(row, train_on, text):
    """It stands in brackets, but for rows of which all is trained on."""
    rendered = render(row, train_on=train_on)
    marked = rendered.text
    for begin, end in reversed(rendered.trained or []):
        marked = f"{marked[:begin]}[{marked[begin:end]}]{marked[end:]}"
    assert marked == text
    assert (rendered.trained is None) == (train_on == "all")


TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds what is lost"}}]


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"prompt": "a"}, {}, "prompt and completion"),
        ({"prompt": "a"}, {"text_field": "prompt"}, "prompt and completion"),
        ({"text": "a"}, {"text_field": "body"}, "body"),
        ({}, {}, "text, prompt"),
        ({"input_ids": [1]}, {}, "text, prompt"),
        ({"text": 5}, {}, "'text'"),
        ({"messages": "one"}, {}, "a list of messages"),
        ({"messages": ["one"]}, {}, "messages with a role"),
        ({"messages": [{"from": "human", "value": "one"}]}, {}, "messages with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "text, got a part .*image"),
        ({"prompt": "one", "completion": [ASSISTANT]}, {}, "a list of messages"),
        ({"prompt": [USER], "completion": []}, {}, "completion"),
        ({"text": "a"}, {"separator": ""}, "separator"),
        ({"messages": [USER]}, {"train_on": "completion"}, "train_on='assistant' or 'all'"),
        ({"prompt": "a", "completion": "b"}, {"train_on": "assistant"}, "train_on='completion' or 'all'"),
        ({"text": "a"}, {"train_on": "assistant"}, "train_on='all'"),
        ({"messages": [USER], "tools": "{"}, {}, "tools"),
        ({"messages": [USER], "tools": {"name": "find"}}, {}, "[Tt]ools"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, {}, "chat_template_kwargs"),
    ],
)
def test_refused(row, options, reason):
    with pytest.raises(PackingError, match=f"expected .*{reason}|^{reason}: expected "):
        render(row, **options)
