"""Chats as a tokenizer's own template writes them: with tools, settings, and without the nulls of Arrow."""

import json

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_packing.errors import PackingError
from hf_packing.report.corpus import Corpus
from hf_packing.report.documents import Documents
from hf_packing.report.rendering import chatml, render
from hf_packing.report.tokenise import TextTokenizer, load_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if style %}{{ style }}{% endif %}"
    "{% for message in messages %}{{ bos_token }}{{ message['role'] }} {{ message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant {% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds what is lost"}}]
USER = {"role": "user", "content": "one two"}


def call(**arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


CHAT = [USER, call(a=1), {"role": "tool", "content": "x"}, call(b="c")]


@pytest.fixture(scope="module")
def letters():
    """A token for every byte, so that whatever a template writes is seen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<", eos_token=">", chat_template=TEMPLATE)


@pytest.fixture
def tokenizer(tmp_path, letters):
    letters.save_pretrained(tmp_path / "tokenizer")
    return load_tokenizer(str(tmp_path / "tokenizer"))


def documents_of(tmp_path, rows, tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    corpus = Corpus(Documents(str(tmp_path / "a.jsonl")), tokenizer)
    lengths = corpus.lengths(lambda _: None).tolist()
    (block,) = corpus.blocks()
    input_ids, labels = corpus.tokens_of(block)
    assert lengths == list(map(len, input_ids))
    return input_ids, labels


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_and_settings_reach_the_template(tmp_path, letters, tokenizer, tools):
    settings = {"style": "brief"}
    row = {"messages": CHAT, "tools": tools, "chat_template_kwargs": settings}
    (ids,), _ = documents_of(tmp_path, [row], tokenizer)
    assert ids == letters.apply_chat_template(CHAT, tools=TOOLS, **settings)["input_ids"]
    assert "Finds what is lost" in letters.decode(ids)
    row = {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": tools}
    (ids,), (labels,) = documents_of(tmp_path, [row], tokenizer)
    assert ids == letters.apply_chat_template(CHAT, tools=TOOLS)["input_ids"]
    asked = letters.apply_chat_template(CHAT[:1], tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert labels == [-100] * len(asked) + ids[len(asked) :]


@pytest.mark.parametrize("write", ["to_parquet", "to_json", "save_to_disk"])
def test_nulls_that_arrow_puts_into_messages_are_not_written(tmp_path, letters, tokenizer, write):
    tools = [{"type": "function", "function": {"parameters": {name: {"type": "string"}}}} for name in "xy"]
    saved = datasets.Dataset.from_list([{"messages": CHAT, "tools": tools}])
    assert saved[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    path = tmp_path / {"to_parquet": "b.parquet", "to_json": "b.jsonl", "save_to_disk": "b"}[write]
    getattr(saved, write)(path)
    corpus = Corpus(Documents(str(path)), tokenizer)
    (block,) = corpus.blocks()
    assert corpus.tokens_of(block)[0] == [letters.apply_chat_template(CHAT, tools=tools)["input_ids"]]
    corpus = Corpus(Documents(str(path)), TextTokenizer("letters", tokenizer.backend))
    (block,) = corpus.blocks()
    assert "null" not in block[0].text


def test_tools_without_a_template_are_the_first_message():
    text = render({"messages": [USER], "tools": TOOLS}, "messages", chatml).text
    assert text.startswith(f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>user\n")
    assert render({"messages": [USER], "tools": None}, "messages", chatml).text.startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tools": "{"}, "expected tools as a list or as JSON, "),
        ({"tools": {"name": "find"}}, "expected tools as a list or as JSON, got dict"),
        ({"chat_template_kwargs": [1]}, "expected chat_template_kwargs by name, got list"),
        ({"chat_template_kwargs": {"style": 1}}, "expected a tokenizer with a chat template, since .* sets style"),
    ],
)
def test_settings_that_cannot_be_followed(setting, message):
    with pytest.raises(PackingError, match=message):
        render({"messages": [USER], **setting}, "messages", chatml)


def test_another_special_token_is_another_template(tmp_path, letters, tokenizer):
    """An interrupted run must not go on with it."""
    (tmp_path / "other").mkdir()
    other = PreTrainedTokenizerFast(tokenizer_object=letters.backend_tokenizer, bos_token="!", chat_template=TEMPLATE)
    other.save_pretrained(tmp_path / "other")
    assert load_tokenizer(str(tmp_path / "other")).template_text != tokenizer.template_text


def test_prompts_end_where_they_do_for_a_tokenizer_that_leaves_characters_out(tmp_path):
    """Its offsets drift: 'two' would lie within the prompt."""
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate("onetw")}, []))
    (ids,), (labels,) = documents_of(
        tmp_path, [{"prompt": "######one", "completion": "two"}], TextTokenizer("letters", backend)
    )
    assert ids == [0, 1, 2, 3, 4, 0]
    assert labels == [-100, -100, -100, 3, 4, 0]
