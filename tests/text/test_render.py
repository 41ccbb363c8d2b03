"""A row as text: which field it is known by, what chats become, and what is not trained on."""

import json
from itertools import pairwise

import pytest
from chat_templates import tokenizer_with

from hf_packing.errors import PackingError
from hf_packing.text.render import CHATML, Renderer

TOKENIZER = tokenizer_with(None)


def render(row, source=CHATML, **options):
    return Renderer(TOKENIZER, source, **options).render(row)


def test_without_a_template_chats_are_written_as_chatml():
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


def test_a_prompt_is_masked_with_the_separator():
    row = {"prompt": "one", "completion": "two"}
    assert render(row)[:2] == ("onetwo", [(3, 6)])
    assert render(row, separator="\n")[:2] == ("one\ntwo", [(4, 7)])


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
        ({"messages": [ASSISTANT, USER]}, None, [(BEGUN, False), (ANSWERED, True), (ASKED, False)]),
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
    rendered = render(row, train_on=train_on)
    assert rendered.text == "".join(text for text, _ in pieces)
    ends = [0]
    for text, _ in pieces:
        ends.append(ends[-1] + len(text))
    spans = [span for span, (_, trained) in zip(pairwise(ends), pieces, strict=True) if trained]
    assert rendered.trained == (None if train_on == "all" else spans)


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
