"""Training on documents that share prefixes: steps on packed rows, and on rows of trees, of the same documents.

python benchmarks/tree_training.py

Each set is read until its documents have about so many tokens. Both sides pack them by best fit into rows, and compute
the loss and the gradients of all rows, one row at a time, on one thread. The two losses have to be equal. "Fewer" is
the number of tokens of the documents for each token in rows of trees: no gain can be larger, but for attention. The
texts are in the folder that HF_PACKING_DATA names; "random" sets need none.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from internals import labels_of
from measure import figure, in_turn, machine, recorded
from tree_data import SETS, VOCABULARY, Documents, documents_of

import hf_packing as hfp

EQUAL_LOSS = 1e-5

SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **sizes, **ATTENTION))


def qwen3_next() -> Any:
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 4}
    linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    experts |= {"shared_expert_intermediate_size": 96}
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "head_dim": 32}
    config = transformers.Qwen3NextConfig(**SIZES, **sizes, **ATTENTION, **linear, **experts)
    return transformers.Qwen3NextForCausalLM(config)


def mamba() -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 8}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


MODELS = {"llama": llama, "qwen3-next": qwen3_next, "mamba": mamba}

SHARE_OF_TOKENS = {"llama": 1.0, "qwen3-next": 0.5, "mamba": 0.15}
"""How many of the tokens each model gets, since recurrent layers in plain torch are slow."""


def first_tokens(documents: Documents, tokens: int) -> Documents:
    """Return the first documents of a set, with about so many tokens."""
    number = max(2, int((documents.lengths.cumsum() <= tokens).sum()))
    end = int(documents.lengths[:number].sum())
    return Documents(documents.tokens[:end], documents.lengths[:number], documents.trained_from[:number])


def step(model: Any, batches: list[dict[str, Any]], items: int) -> float:
    """Compute the gradients of all batches, and return the loss."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = hfp.compute_loss(model, batch, num_items_in_batch=items)
        loss.backward()
        total += float(loss.detach())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--tokens", type=int, default=12_000, help="tokens of the documents of a set, for Llama")
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(f"{machine('hf-packing', 'torch', 'transformers')}, one thread\n")
    print(f"rows of {arguments.max_length:,} tokens, float32, processor time, median of {arguments.rounds} rounds")
    print(f"{'':39}{'tokens':>8}{'fewer':>8}{'gain':>14}{'gain / fewer':>14}")
    for name in arguments.models:
        for of in arguments.sets:
            tokens = int(SHARE_OF_TOKENS[name] * arguments.tokens)
            documents = first_tokens(documents_of(of).fitting(arguments.max_length), tokens)
            compare(name, of, documents, arguments.max_length, arguments.rounds)


def sides_of(documents: Documents, max_length: int) -> dict[str, tuple[list[dict[str, Any]], int]]:
    """Return the batches of documents in packed rows and in rows of trees, one for each row, and their items."""
    rows, strategy = documents.as_dataset(), hfp.BestFit(max_length)
    sides = {"packed": hfp.pack(rows, strategy), "trees": hfp.pack(rows, strategy, share_prefixes=True)}
    batches = {side: [hfp.PackingCollator()([row]) for row in data] for side, data in sides.items()}
    items = {side: sum(int(labels_of(batch).items("token")) for batch in each) for side, each in batches.items()}
    assert items["packed"] == items["trees"]
    return {side: (batches[side], items[side]) for side in sides}


def compare(name: str, of: str, documents: Documents, max_length: int, rounds: int) -> None:
    torch.manual_seed(0)
    model = hfp.patch_model(MODELS[name](), trees=True)
    sides = sides_of(documents, max_length)
    calls: dict[str, Callable[[], float]] = {side: partial(step, model, *given) for side, given in sides.items()}
    losses = {side: call() for side, call in calls.items()}  # also warms up
    assert abs(losses["packed"] - losses["trees"]) <= EQUAL_LOSS * losses["packed"], losses
    seconds = in_turn(calls, rounds, time.process_time)
    gains = [one / other for one, other in zip(seconds["packed"], seconds["trees"], strict=True)]
    raw = int(documents.lengths.sum())
    fewer = raw / sum(batch["input_ids"].shape[1] for batch in sides["trees"][0])
    gain = statistics.median(gains)
    print(f"{name:11} {of:27}{raw:8,}{fewer:8.2f}{gain:6.2f} ({min(gains):.2f}-{max(gains):.2f}){gain / fewer:10.2f}")
    sys.stdout.flush()
    figure(model=name, documents=of, raw_tokens=raw, shared_ratio=fewer, gains=gains, processor_seconds=seconds)


if __name__ == "__main__":
    with recorded(__file__):
        main()
