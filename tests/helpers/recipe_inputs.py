"""A model, and rows, for tests of the recipes."""

import json

import numpy as np
from safetensors.torch import load_file
from tiny_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SMALLER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
"""In place of `SIZES` of recipes/common.py."""


def save_tiny_model(folder, name="Llama", **changes):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1]).save_pretrained(
        folder
    )
    build(name, vocab_size=300, pad_token_id=1, bos_token_id=None, eos_token_id=0, **changes).save_pretrained(folder)
    return folder


def prompts(number=24):
    return [{"prompt": "What?" * (n % 5 + 1), "completion": "That." * (n % 7 + 1)} for n in range(number)]


def chats(number=24):
    def turns(n):
        return [{"role": "user", "content": "Hi" * n}, {"role": "assistant", "content": "Ho" * n}]

    return [{"messages": turns(n % 6 + 1) * (1 + n % 2)} for n in range(number)]


def questions(number=40, none_every=5):
    rng = np.random.default_rng(0)
    rows = []
    for n in range(number):
        words = [str(word) for word in rng.choice(["aa", "bb", "cc"], rng.integers(5, 60))]
        place = int(rng.integers(len(words)))
        words[place] = "gold"
        found = {"text": ["gold"], "answer_start": [len(" ".join([*words[:place], ""]))]}
        answers = {"text": [], "answer_start": []} if n % none_every == 1 else found
        rows.append({"question": f"where {n}", "context": " ".join(words), "answers": answers})
    return rows


def texts(number=300, seed=0):
    rng = np.random.default_rng(seed)
    return [{"text": " ".join(rng.choice(["aaa", "bbb", "ccc"], length))} for length in rng.integers(2, 90, number)]


def write(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def weights(folder):
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}
