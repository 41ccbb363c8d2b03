"""Log-likelihoods of documents: packed, and padded in batches sorted by length with a token budget and a chunked head.

python benchmarks/score.py

The padded side is the best that a loop without packing can do: documents sorted by length, batches of at most so many
slots, and the output layer run on 1,024 tokens at a time. Both sides run in turn, on one thread; times are those of the
process. The model is patched once, before. The results of both sides are compared first.
"""

import argparse
import copy
import time
import warnings
from typing import Any

import numpy as np
import torch
import transformers
from measure import figure, machine, ratio, recorded

import hf_packing as hfp

VOCABULARY, CHUNK, CLOSE = 8192, 1024, 1e-3


def lengths(name: str, number: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if name == "multiple choice, 85 +- 30":
        return np.clip(rng.normal(85, 30, number), 20, 200).astype(int)
    median = 60 if name == "median 60, sigma 1" else 350
    return np.clip(rng.lognormal(np.log(median), 1.0, number), 4, 2048).astype(int)


def padded_scores(model: Any, rows: list[list[int]], max_tokens: int) -> np.ndarray:
    """The log-likelihood of each document, in batches of rows of similar length."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    found = np.zeros(len(rows))
    while order:
        size = max(1, max_tokens // len(rows[order[0]]))
        numbers, order = order[:size], order[size:]
        longest = len(rows[numbers[0]])
        ids, mask = (
            torch.zeros(len(numbers), longest, dtype=torch.long),
            torch.zeros(len(numbers), longest, dtype=torch.long),
        )
        for place, number in enumerate(numbers):
            ids[place, : len(rows[number])], mask[place, : len(rows[number])] = torch.tensor(rows[number]), 1
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        targets = ids[:, 1:].reshape(-1)
        parts = []
        for states, labels in zip(hidden.reshape(-1, hidden.shape[-1]).split(CHUNK), targets.split(CHUNK), strict=True):
            logits = model.lm_head(states)
            parts.append(logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(1))
        log_probs = torch.cat(parts).view(len(numbers), -1) * mask[:, 1:]
        found[numbers] = log_probs.double().sum(1).numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=160)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"{machine('torch', 'transformers')}, 1 thread\n")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **sizes)
    stock = transformers.LlamaForCausalLM(config).eval()
    model = hfp.patch_model(copy.deepcopy(stock))
    rng = np.random.default_rng(1)
    for name in ("median 60, sigma 1", "multiple choice, 85 +- 30", "median 350, sigma 1"):
        number = arguments.documents if "350" not in name else arguments.documents // 4
        rows = [rng.integers(3, VOCABULARY, length).tolist() for length in lengths(name, number)]
        seconds: dict[str, list[float]] = {"padded": [], "packed": []}
        with torch.no_grad():
            for round_ in range(arguments.rounds + 1):
                began = time.process_time()
                expected = padded_scores(stock, rows, arguments.max_tokens)
                between = time.process_time()
                scores = hfp.score(model, rows, max_tokens=arguments.max_tokens, progress=False)
                ended = time.process_time()
                if round_:  # the first round warms up
                    seconds["padded"].append(between - began)
                    seconds["packed"].append(ended - between)
        if not np.allclose(scores.log_likelihood, expected, rtol=CLOSE):
            raise SystemExit(f"{name}: the scores differ")
        faster = ratio(seconds["padded"], seconds["packed"])
        print(f"{name:26} {sum(map(len, rows)):>7,} tokens: packed is {faster} times as fast")
        figure(name=name, **seconds)


if __name__ == "__main__":
    with recorded(__file__):
        main()
