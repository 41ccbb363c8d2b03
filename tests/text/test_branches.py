"""Documents of conversations: one for each assistant turn, equal to what the model sees and generates at inference."""

import json
import re
import warnings
from pathlib import Path

import datasets
import pytest
from chat_templates import (
    CALL,
    CHAT,
    CHATML,
    FROM_TRL,
    OPENED,
    PLAIN,
    TOKENIZERS,
    TOOLS,
    WITH_TOOLS,
    assistant,
    tokenizer_with,
    user,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_packing as hfp


def asked(tokenizer, messages, **settings):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **settings)["input_ids"]


def answered(tokenizer, messages, **settings):
    asked = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True, **settings)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    assert whole.startswith(asked)
    return whole.removeprefix(asked)


def trained(tokenizer, documents):
    return [tokenizer.decode([label for label in labels if label != -100]) for labels in documents["labels"]]


def check(tokenizer, documents, messages, turns, end="\n", **settings):
    assert len(documents["input_ids"]) == len(documents["labels"]) == len(turns)
    generated = trained(tokenizer, documents)
    for ids, labels, text, turn in zip(*documents.values(), generated, turns, strict=True):
        prompt = asked(tokenizer, messages[:turn], **settings)
        assert ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + ids[len(prompt) :]
        assert text == answered(tokenizer, messages[: turn + 1], **settings).removesuffix(end)
        assert text


texts = st.text("abc \n<>é", max_size=6)


@given(st.sampled_from([*TOKENIZERS]), st.lists(st.tuples(texts, texts, texts), max_size=4), st.booleans())
@pytest.mark.filterwarnings("ignore:branches")
def test_documents_are_what_the_model_sees_and_generates(name, exchanges, ends_with_user):
    tokenizer = TOKENIZERS[name]
    messages = [each for ask, answer, thinking in exchanges for each in (user(ask), assistant(answer, thinking))]
    documents = hfp.branches(messages + [user("bye")] * ends_with_user, tokenizer)
    check(tokenizer, documents, messages, range(1, len(messages), 2), "" if name == "alternating" else "\n")


@given(texts, texts)
@pytest.mark.filterwarnings("ignore:branches")
def test_documents_are_the_tokens_of_their_text(ask, answer):
    """Where the prompt's tokens are the first ones of the whole text, no token differs from those of the template."""
    for tokenizer in TOKENIZERS["chatml"], TOKENIZERS["stripped"]:
        messages = [user(ask), assistant(f"<{answer}>", "one"), user(ask), assistant(f"<{answer}>", "two")]
        (_, last), _ = hfp.branches(messages, tokenizer).values()
        assert [*last, *tokenizer.encode("\n")] == tokenizer.apply_chat_template(messages)["input_ids"]


def test_tokens_at_the_end_of_the_prompt_and_of_the_turn():
    """The prompt ends with a line break, and the generated text begins with one: together, they would be one token."""
    tokenizer = TOKENIZERS["opened"]
    breaks = tokenizer.encode("\n\n")
    assert len(breaks) == 1
    messages = [user("one"), assistant("two", "")]
    (ids,), (labels,) = hfp.branches(messages, tokenizer).values()
    prompt = asked(tokenizer, messages[:1])
    merged = tokenizer.apply_chat_template(messages)["input_ids"]
    assert merged[: len(prompt)] == [*prompt[:-1], *breaks]
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids) == tokenizer.decode(merged).removesuffix("\n")
    assert tokenizer.decode(labels[len(prompt) :]) == "\n</think>\n\ntwo<|im_end|>"
    # As `<|end|>` of Phi-3 does.
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", rstrip=True, special=True)]})
    (ids,), _ = hfp.branches(PLAIN[:2], tokenizer).values()
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|end|>")


REFUSED = {"deepseek_r1_distill", "deepseekv3", "llava_next"}
"""The first two open the thinking in the generation prompt, but not in turns. The last one needs lists of parts."""


assert len(FROM_TRL) > 60
assert {f"{name}_training" for name in REFUSED} | REFUSED <= FROM_TRL.keys()


@pytest.mark.filterwarnings("ignore:branches")
@pytest.mark.parametrize("name", FROM_TRL)
def test_templates_of_published_models(name):
    special = re.findall(r"<[|\uff5c][^<>]*?[|\uff5c]>|<turn\|>|<(?:end_of_turn|end_of_utterance)>", FROM_TRL[name])
    tokenizer = tokenizer_with(FROM_TRL[name], ["<s>", *sorted({*special, "<|endoftext|>"})])
    messages = [
        {**each, "thinking": each["reasoning_content"]} if "reasoning_content" in each else each for each in CHAT
    ]
    if name.removesuffix("_training") in REFUSED:
        with pytest.raises(hfp.PackingError, match="^message 1: expected "):
            hfp.branches(messages, tokenizer)
        return
    if "nothink" in name:
        messages = PLAIN
    documents = hfp.branches(messages, tokenizer)
    check(tokenizer, documents, messages, (1, 3))


@pytest.fixture(scope="module")
def qwen3():
    return tokenizer_with(FROM_TRL["qwen3"])


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_system_messages_and_several_turns_in_a_row(qwen3, tools):
    batch = {"messages": [WITH_TOOLS], "tools": [tools]}
    documents = hfp.branches(batch, qwen3)
    check(qwen3, documents, WITH_TOOLS, (2, 4, 5), tools=TOOLS)
    last = qwen3.decode(documents["input_ids"][-1])
    assert "Finds what is lost" in last
    assert "I look." in last, "the template keeps thinking since the last question"
    assert hfp.branches({"messages": [WITH_TOOLS]}, qwen3, chat_template_kwargs={"tools": TOOLS}) == documents


def test_arguments_for_the_template(qwen3):
    plain = PLAIN[:2]
    quiet = {"enable_thinking": False}
    documents = hfp.branches(plain, qwen3, chat_template_kwargs=quiet)
    check(qwen3, documents, plain, (1,), **quiet)
    assert trained(qwen3, documents) == ["two<|im_end|>"]
    batch = {"messages": [plain] * 2, "chat_template_kwargs": [{"enable_thinking": True}, None]}
    texts = trained(qwen3, hfp.branches(batch, qwen3, chat_template_kwargs=quiet))
    assert texts == ["<think>\n\n</think>\n\ntwo<|im_end|>", "two<|im_end|>"]
    with pytest.raises(hfp.PackingError, match=r"message 1: .*the prompt has .*'enable_thinking': False"):
        hfp.branches(CHAT, qwen3, chat_template_kwargs=quiet)


def test_turns_of_the_completion_alone_and_through_map():
    tokenizer = TOKENIZERS["stripped"]
    batch = {"prompt": [CHAT[:3], CHAT[:1]], "completion": [CHAT[3:], CHAT[1:]], "other": [1, 2]}
    both = hfp.branches(CHAT, tokenizer)
    assert hfp.branches(batch, tokenizer) == {name: [last, first, last] for name, (first, last) in both.items()}
    tokenizer = TOKENIZERS["stripped"]
    rows = datasets.Dataset.from_list(
        [{"id": n, "chat": [{"role": "user", "content": "one"}, *CHAT[1 : 2 * n]]} for n in (1, 2, 2, 1)]
    )
    options = {"batched": True, "batch_size": 3, "remove_columns": rows.column_names}
    options["fn_kwargs"] = {"tokenizer": tokenizer, "column": "chat"}
    documents = rows.map(hfp.branches, **options)
    assert documents.column_names == ["input_ids", "labels"]
    assert len(documents) == 6
    check(tokenizer, documents[1:3], CHAT, (1, 3))
    assert [*rows.to_iterable_dataset().map(hfp.branches, **options)] == documents.to_list()
    assert hfp.unpack(hfp.pack(documents, hfp.BestFit(128)))["labels"][:] == documents["labels"][:]


def test_conversations_and_turns_that_lack_something_are_counted():
    tokenizer = TOKENIZERS["chatml"]
    batch = {"messages": [[], [user("one")], [assistant("Hi")], [assistant("Hi"), *PLAIN]]}
    with pytest.warns(UserWarning, match="branches: ") as found:
        documents = hfp.branches(batch, tokenizer)
    assert [str(each.message) for each in found] == [
        "branches: 3 of 4 conversations have no assistant turn after another message, and make no documents",
        "branches: 2 of 4 conversations open with an assistant turn, which is not trained on",
    ]
    assert Path(found[0].filename) == Path(__file__)
    check(tokenizer, documents, batch["messages"][3], (2, 4))
    template = "{% for message in messages %}{{ message.role }}: {{ message.text }}\n{% endfor %}"
    tokenizer = tokenizer_with(template + "{% if add_generation_prompt %}assistant:{% endif %}")
    chat = [user("one"), assistant("two"), user("three"), assistant("")]
    with pytest.warns(UserWarning, match="branches: ") as found:
        documents = hfp.branches(chat, tokenizer)
    assert [str(each.message) for each in found] == [
        "branches: 2 of 2 assistant turns do not end with a special token, so the model does not learn where to stop",
        "branches: 1 of 2 assistant turns lack content, thinking or tool calls, which the chat template leaves out",
    ]
    check(tokenizer, documents, chat, (1, 3), end="")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "two"},
        {"content": "<think>\nlost</think>\n two "},
        {"content": [{"type": "text", "text": "two"}]},
        {"content": None},
        {"content": "two", "tool_calls": [{"name": "two"}]},
    ],
)
def test_what_a_turn_must_have(message):
    template = "{% for message in messages %}two<|im_end|>{% endfor %}{% if add_generation_prompt %}{% endif %}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hfp.branches([user("one"), {"role": "assistant", **message}], tokenizer_with(template))
    for lost in ({"thinking": "lost"}, {"tool_calls": [CALL]}, {"content": [{"type": "text", "text": "lost"}]}):
        with pytest.warns(UserWarning, match="1 of 1 assistant turns lack content, thinking or tool calls"):
            hfp.branches([user("one"), {"role": "assistant", **message, **lost}], tokenizer_with(template))


PICTURE = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "What is it?"}]


@pytest.mark.parametrize(
    ("template", "conversations", "named"),
    [
        ("alternating", [user("one"), user("two"), assistant("")], "message 2: .*roles must alternate"),
        ("alternating", [WITH_TOOLS[0], *CHAT], "message 2: .*roles must alternate"),
        ("chatml", {"messages": [PLAIN, [user(PICTURE), *PLAIN]]}, "row 1 of the batch, message 0: .*'image'"),
        ("chatml", {"messages": [["one"]]}, "row 0 of the batch, .*role"),
        ("chatml", {"messages": [CHAT], "tools": ["{"]}, "row 0 of the batch, .*tools"),
        ("chatml", {"prompt": ["one"], "completion": ["two"]}, "row 0 of the batch, .*list of messages"),
        ("chatml", {"prompt": "one", "completion": "two"}, "conversations: .*batched=True"),
        ("chatml", {"messages": CHAT}, "conversations: .*batched=True"),
        ("chatml", {"text": ["one"]}, "conversations: .*'messages'.*text"),
        ("chatml", {"prompt": [CHAT]}, "conversations: .*'completion'.*prompt"),
        ("chatml", "one", "conversations: .*str"),
    ],
)
def test_refused(template, conversations, named):
    with pytest.raises(hfp.PackingError, match=f"^{named}"):
        hfp.branches(conversations, TOKENIZERS[template])


def test_turns_that_cannot_stand_apart_from_their_prompt_are_refused():
    unopened = tokenizer_with(OPENED.replace("<think>\n{{", "{{"))
    with pytest.raises(hfp.PackingError, match=r"message 1: .* has 'im_.*<think>\\n' .* has 'im_start.*thought one"):
        hfp.branches(CHAT, unopened)
    rewriting = tokenizer_with("{{ messages | length }}" + CHATML)
    with pytest.raises(hfp.PackingError, match="the prompt has '1<.*' where the turn has '2<"):
        hfp.branches(CHAT, rewriting)
    silent = tokenizer_with(CHATML.replace("{{ message.content }}<|im_end|>\n", ""))
    with pytest.raises(hfp.PackingError, match="message 1: expected a turn with text, but the chat template writes"):
        hfp.branches([user("one"), assistant("")], silent)
    # It writes a space at the beginning of each text.
    known = {each: number for number, each in enumerate(["▁", "A", "b", "▁A", "Ab", "▁Ab", "</s>"])}
    backend = Tokenizer(models.BPE(known, [("▁", "A"), ("▁A", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    template = "{{ messages[1].content }}A{% if not add_generation_prompt %}{{ messages[-1].content }}{% endif %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    with pytest.raises(hfp.PackingError, match=r"message 2: .* tokenize a turn apart from .*, but 'A' and 'b</s>'"):
        hfp.branches([user(""), user(""), assistant("b</s>")], tokenizer)


def test_bad_conversations_are_left_out_and_tokenizers_without_a_template_refused():
    tokenizer = TOKENIZERS["alternating"]
    batch = {"messages": [PLAIN, [user("one"), *PLAIN], [assistant("one")] * 3, PLAIN[:2]]}
    with pytest.raises(hfp.PackingError, match="^row 1 of the batch, message 2: "):
        hfp.branches(batch, tokenizer)
    with pytest.warns(UserWarning, match="2 of 4 conversations cannot be used .* row 1 of the batch, message 2: "):
        documents = hfp.branches(batch, tokenizer, skip_bad=True)
    assert documents == hfp.branches({"messages": [PLAIN, PLAIN[:2]]}, tokenizer)
    for tokenizer in tokenizer_with(None), object():
        with pytest.raises(hfp.PackingError, match=f"tokenizer with a chat template, got {type(tokenizer).__name__}"):
            hfp.branches(CHAT, tokenizer)
