"""Chat templates, those of published models too, with a small tokenizer; and messages for them."""

from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""With marks around what the assistant says."""
ALTERNATING = (
    "<s>{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content | trim }}</s>{% endif %}{% endfor %}"
)
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENED{% endif %}"
)
STRIPPED, OPENED = THINKING.replace("OPENED", ""), THINKING.replace("OPENED", "<think>\n")
"""Templates that leave the thinking out of earlier turns. The second one's generation prompt opens the thinking."""
FROM_TRL = {
    file.stem: file.read_text() for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
}
"""The chat templates of published models."""


def tokenizer_with(template, special=SPECIAL):
    """A byte-level tokenizer that knows a few words, two line breaks, and where thinking begins and ends."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    settings = {"special_tokens": special, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    backend.train_from_iterator(["one two three\n\n four"] * 9, trainers.BpeTrainer(vocab_size=400, **settings))
    named = {"bos_token": "<s>", "eos_token": special[-1], "chat_template": template}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text, thought=None, **more):
    return {"role": "assistant", "content": text, **({} if thought is None else {"reasoning_content": thought}), **more}


CHAT = [user("one"), assistant("two", "thought one"), user("three"), assistant("four", "thought two")]
PLAIN = [{name: message[name] for name in ("role", "content")} for message in CHAT]
"""Without thinking."""

TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds what is lost"}}]
CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "keys"}}}
WITH_TOOLS = [
    {"role": "system", "content": "Be brief."},
    user("Where are my keys?"),
    assistant("", "I look.", tool_calls=[CALL]),
    {"role": "tool", "content": "on the table"},
    assistant("", "And now?", tool_calls=[CALL]),
    assistant("On the table.", "Found."),
    user("Thanks"),
]

TOKENIZERS = {
    "chatml": tokenizer_with(CHATML),
    "alternating": tokenizer_with(ALTERNATING),
    "stripped": tokenizer_with(STRIPPED),
    "opened": tokenizer_with(OPENED),
}
