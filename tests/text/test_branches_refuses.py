"""Conversations, templates and tokenizers that branches refuses, with the reason."""

import pytest
from chat_templates import CHAT, CHATML, OPENED, PLAIN, TOKENIZERS, WITH_TOOLS, assistant, tokenizer_with, user
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_packing as hfp
from hf_packing.errors import PackingError

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
    with pytest.raises(PackingError, match=f"^{named}"):
        hfp.branches(conversations, TOKENIZERS[template])


def test_turns_that_differ_from_their_prompt_are_refused():
    unopened = tokenizer_with(OPENED.replace("<think>\n{{", "{{"))
    with pytest.raises(PackingError) as refused:
        hfp.branches(CHAT, unopened)
    assert str(refused.value) == (
        "message 1: expected a chat template whose turns begin with their generation prompt, but the prompt has "
        "'im_start|>assistant\\n<think>\\n' where the turn has 'im_start|>assistant\\nthought one\\n</think>"
        "\\n\\ntwo<|im_end|>\\n'. The model would be trained on text that it never sees at inference; use another "
        "template, or chat_template_kwargs such as {'enable_thinking': False}"
    )
    rewriting = tokenizer_with("{{ messages | length }}" + CHATML)
    with pytest.raises(PackingError, match="the prompt has '1<.*' where the turn has '2<"):
        hfp.branches(CHAT, rewriting)
    silent = tokenizer_with(CHATML.replace("{{ message.content }}<|im_end|>\n", ""))
    with pytest.raises(PackingError, match="message 1: expected a turn with text, but the chat template writes none"):
        hfp.branches([user("one"), assistant("")], silent)


def test_bad_conversations_can_be_left_out():
    tokenizer = TOKENIZERS["alternating"]
    batch = {"messages": [PLAIN, [user("one"), *PLAIN], [assistant("one")] * 3, PLAIN[:2]]}
    with pytest.raises(PackingError, match="^row 1 of the batch, message 2: "):
        hfp.branches(batch, tokenizer)
    message = (
        "2 of 4 conversations cannot be used and are left out, the first because of row 1 of the batch, message 2: "
    )
    with pytest.warns(UserWarning, match=message):
        documents = hfp.branches(batch, tokenizer, skip_bad=True)
    assert documents == hfp.branches({"messages": [PLAIN, PLAIN[:2]]}, tokenizer)


def test_tokenizers_without_a_template_are_refused():
    for tokenizer in tokenizer_with(None), object():
        with pytest.raises(
            PackingError, match=f"expected a tokenizer with a chat template, got {type(tokenizer).__name__}"
        ):
            hfp.branches(CHAT, tokenizer)


def test_a_tokenizer_that_cannot_tokenize_turns_alone_is_refused():
    """It writes a space at the beginning of each text."""
    known = {each: number for number, each in enumerate(["▁", "A", "b", "▁A", "Ab", "▁Ab", "</s>"])}
    backend = Tokenizer(models.BPE(known, [("▁", "A"), ("▁A", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    template = (
        "{{ messages[1].content }}{% if add_generation_prompt %}A{% else %}A{{ messages[-1].content }}{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    message = (
        "message 2: expected a tokenizer that can tokenize a turn apart from its prompt, but 'A' and 'b</s>' become"
    )
    with pytest.raises(PackingError, match=message):
        hfp.branches([user(""), user(""), assistant("b</s>")], tokenizer)
