"""Log-likelihoods of answers that share their prompts: packed rows beside rows of trees, in which a prompt stands once.

python benchmarks/score_trees.py

Only the answers are scored. "5-shot" is real text, four options after each question, all questions after the same five
examples; the texts are in the folder that HF_PACKING_DATA names. Other sets are random tokens, with the mean tokens of
a prompt + those of an answer. "fewer" is tokens of packed rows / tokens of rows of trees. Both sides run in turn, on
one thread; times are those of the process, and include finding the trees. The model is patched and proven once, before.
The results of both sides are compared first.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from measure import figure, in_turn, machine, ratio, recorded
from tree_data import VOCABULARY, documents_of

import hf_packing as hfp

CLOSE = 1e-4

FEW_SHOT = "5-shot, 4 options"
RANDOM = {
    "25 + 5 tokens, 4 options": (60, 25, 4, 5),
    "60 + 25 tokens, 4 options": (25, 60, 4, 25),
    "120 + 30 tokens, pairs": (30, 120, 2, 30),
    "16 + 500 tokens, pairs": (8, 16, 2, 500),
}
"""Number of prompts, mean tokens of a prompt, answers to each prompt, and mean tokens of an answer."""


def random_answers(prompts: int, prompt: int, answers: int, answer: int) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    found = []
    for length in rng.integers(prompt, 1 + int(prompt * 1.5), prompts):
        asked = rng.integers(3, VOCABULARY, length).tolist()
        for own in rng.integers(1 + answer // 2, 1 + int(answer * 1.5), answers):
            tokens = rng.integers(3, VOCABULARY, own).tolist()
            found.append({"input_ids": asked + tokens, "labels": [-100] * len(asked) + tokens})
    return found


def model_of(name: str, hidden: int) -> Any:
    torch.manual_seed(0)
    if name == "Llama":
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4}
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **sizes)
        return transformers.LlamaForCausalLM(config)
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=hidden // 2, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=60, help="of the 5-shot set; 0 to leave it out")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[4096, 16384], help="tokens of a row")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"{machine('hf-packing', 'torch', 'transformers')}, 1 thread")
    for name in ("Llama", "Mamba"):
        model = hfp.patch_model(model_of(name, arguments.hidden).eval(), trees=True)
        print(f"\n{name}, {model.num_parameters():,} parameters")
        if arguments.questions and name == "Llama":
            few_shot = list(documents_of(FEW_SHOT, arguments.questions).as_dataset())
            for max_tokens in arguments.max_tokens:
                measure(name, model, FEW_SHOT, few_shot, max_tokens, arguments.rounds)
        for set_, sizes in RANDOM.items():
            measure(name, model, set_, random_answers(*sizes), arguments.max_tokens[0], arguments.rounds)


def measure(name: str, model: Any, set_: str, rows: list[dict[str, list[int]]], max_tokens: int, rounds: int) -> None:
    def score(share_prefixes: bool) -> hfp.Scores:
        return hfp.score(model, rows, max_tokens=max_tokens, share_prefixes=share_prefixes, progress=False)

    packed, trees = score(False), score(True)
    if not np.allclose(trees.log_likelihood, packed.log_likelihood, rtol=CLOSE):
        raise SystemExit(f"{set_}: the log-likelihoods differ")
    if (trees.greedy != packed.greedy).any():
        raise SystemExit(f"{set_}: the greedy matches differ")
    seconds = in_turn({"packed": lambda: score(False), "trees": lambda: score(True)}, rounds, time.process_time)
    of_packed, of_trees = (tokens_run(model, partial(score, share)) for share in (False, True))
    faster = ratio(seconds["packed"], seconds["trees"])
    fewer = f"{of_packed:>8,} tokens, {of_packed / of_trees:>5.2f} times fewer"
    print(f"{set_:26}rows of {max_tokens:>6,} {fewer}: trees are {faster} times as fast")
    figure(
        model=name,
        set=set_,
        max_tokens=max_tokens,
        tokens_of_packed_rows=of_packed,
        tokens_of_trees=of_trees,
        processor_seconds=seconds,
    )


def tokens_run(model: Any, call: Callable[[], Any]) -> int:
    """Return how many tokens a model runs in a call."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    call()
    handle.remove()
    return sum(seen)


if __name__ == "__main__":
    with recorded(__file__):
        main()
