"""What `tokenize` makes of rows is what a real SFTTrainer makes of each of them, or is refused."""

import json
import logging
import sys

import datasets
import pytest
from chat_templates import CHAT, CHATML, FROM_TRL, MARKED, PLAIN, TOOLS, WITH_TOOLS, assistant, tokenizer_with, user
from tiny_models import build
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

TWO = [user("a"), assistant("b")]


def of_share_gpt(messages):
    return [{"from": message["role"], "value": message["content"]} for message in messages]


def calling(arguments, content=""):
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    asked = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [user("a"), asked, {"role": "tool", "name": "find", "content": "found"}, assistant("done")]


ROWS = [
    *({"messages": messages} for messages in (PLAIN, CHAT, TWO, [{"role": "system", "content": "Be brief."}, *PLAIN])),
    {"messages": [*PLAIN, user("bye")]},
    {"messages": [assistant("hi"), *PLAIN]},
    {"messages": [*TWO, assistant("c")]},
    {"messages": [user("a"), assistant("")]},
    {"messages": [user(" a "), assistant("  b \n")]},
    {"messages": [user("e\u0301 漢字 🎉"), assistant("ß\u200d👩‍👧")]},
    {"messages": [user("<|im_end|> <s>"), assistant("</s><|im_end|>x")]},
    {"messages": [user([{"type": "text", "text": "one"}]), assistant([{"type": "text", "text": "two"}])]},
    {"messages": PLAIN, "chat_template_kwargs": {"enable_thinking": False}},
    # several fields that could be meant
    {"text": None, "messages": TWO},
    {"text": "zzz", "messages": TWO},
    {"text": "zzz", "conversations": of_share_gpt(TWO)},
    {"text": "zzz", "prompt": "a", "completion": " b"},
    {"text": "zzz", "prompt": TWO[:1], "completion": TWO[1:]},
    {"messages": PLAIN, "prompt": TWO[:1], "completion": TWO[1:]},
    {"messages": PLAIN, "conversations": TWO},
    {"messages": PLAIN, "conversations": of_share_gpt(TWO)},
    {"conversations": PLAIN},
    {"messages": of_share_gpt(PLAIN)},
    # texts, and prompts with completions
    {"text": "one two"},
    {"text": "one<|im_end|>"},
    {"text": "<s>one"},
    {"prompt": "one two", "completion": " three"},
    {"prompt": "", "completion": "x"},
    {"prompt": "a", "completion": "b<|im_end|>"},
    {"prompt": TWO[:1], "completion": TWO[1:]},
    {"prompt": PLAIN[:3], "completion": PLAIN[3:]},
    {"prompt": PLAIN[:1], "completion": PLAIN[1:]},
    {"prompt": CHAT[:1], "completion": CHAT[1:2]},
    # tools
    {"messages": WITH_TOOLS, "tools": TOOLS},
    {"messages": WITH_TOOLS, "tools": json.dumps(TOOLS)},
    {"messages": calling({"q": "x", "n": 1}), "tools": TOOLS},
    {"messages": calling({"q": {"b": ["y", "x"]}, "n": 1.5, "t": True}), "tools": TOOLS},
    {"messages": calling({"q": "x"})},
    {"messages": calling({"q": "x"}, content=None), "tools": TOOLS},
]
OF_OTHERS = {
    "marked": MARKED,
    "chatml": CHATML,
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "vicuna": "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}"
    "ASSISTANT: {{ m.content }}</s>{% else %}{{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "opens with a token": "<s>{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [/{{ m.role }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}",
    "numbers": "{% for m in messages %}[{{ loop.index }}]{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[{{ messages | length + 1 }}]assistant: {% endif %}",
    "marks without white space": "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "tools": "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "joins arguments": "{% if tools %}tools{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "thinks at the end": "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
TEMPLATES = {**{name: FROM_TRL[name] for name in FROM_TRL if not name.endswith("_training")}, **OF_OTHERS}


def tokens_of(rows):
    return rows["input_ids"][0], rows["labels"][0]


def ours(row, template):
    try:
        return tokens_of(hfp.tokenize(datasets.Dataset.from_list([row]), tokenizer_with(template)))
    except (hfp.PackingError, hfp.MissingDependencyError) as error:
        return error


def of_trl(row, template):
    """The tokens and labels that SFTTrainer trains on: the collator makes the labels before TRL 1.8."""
    tokenizer, pair = tokenizer_with(template), row.get("prompt") is not None
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "shuffle_dataset": False, "max_length": None}
    is_chat = not pair and not row.keys().isdisjoint(("messages", "conversations"))
    args, rows = SFTConfig("unused", assistant_only_loss=is_chat, **quiet), datasets.Dataset.from_list([row])
    try:
        model = build("Llama", vocab_size=len(tokenizer))
        trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
        batch = trainer.data_collator([trainer.train_dataset[0]])
        return batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    except Exception as error:  # templates, TRL and transformers raise anything
        return error


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("marked", "qwen3", "llama3") else pytest.param(name, marks=pytest.mark.slow)
        for name in TEMPLATES
    ],
)
def test_rows_are_those_of_sft_trainer_or_refused(name, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    equal = 0
    for row in ROWS:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found, expected = ours(row, TEMPLATES[name]), of_trl(row, TEMPLATES[name])
        if isinstance(found, Exception) or isinstance(expected, Exception):
            continue
        if "Mismatch between tokenized prompt" in caplog.text:  # TRL before 1.14 says that its labels may be wrong
            assert list(found[0]) == list(expected[0]), row
            continue
        assert list(map(list, found)) == list(map(list, expected)), row
        equal += 1
    assert equal >= 8


@pytest.mark.parametrize(
    "name",
    [name if name in ("gptoss", "qwen3_5") else pytest.param(name, marks=pytest.mark.slow) for name in TEMPLATES],
)
def test_without_trl_rows_are_the_same_or_refused(name, monkeypatch):
    """TRL has training versions of many templates, with other labels."""
    with_trl = [ours(row, TEMPLATES[name]) for row in ROWS]
    monkeypatch.setitem(sys.modules, "trl", None)
    without = [ours(row, TEMPLATES[name]) for row in ROWS]
    refused = [found for found in without if isinstance(found, hfp.MissingDependencyError)]
    assert all(found == expected for found, expected in zip(without, with_trl, strict=True) if isinstance(found, tuple))
    assert any(isinstance(found, tuple) for found in without)
    assert not refused or r"hf-packing[trl]" in str(refused[0])
    assert refused or "{% generation %}" in TEMPLATES[name] or "{%- generation" in TEMPLATES[name]
