"""What torch.compile does with packed batches: compilations of a model, and the padding that fixed shapes add.

python benchmarks/shapes.py

The compilations are those of 1,000 batches of 1 to 60 documents, one batch after the other. A model may be divided into
several graphs; "of one graph" is the largest number of times that one of them was compiled. The graphs run as they are,
without a compiler behind them, since only their number is of interest. The padding is that of log-normal lengths, on
all ranks, as a share of all tokens; batches of any shape have none.
"""

import argparse
import logging
import time
import warnings
from collections import Counter

import numpy as np
import torch
import torch._dynamo
import transformers
from internals import Epoch, RowSizes, sizes_of_documents, sizes_of_packs
from lengths import log_normal
from measure import figure, machine, recorded

import hf_packing as hfp

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
MOST_DOCUMENTS, LONGEST = 60, 8
FIXED = {"tokens": MOST_DOCUMENTS * LONGEST, "max_segments": MOST_DOCUMENTS + 1}
TOKENS, RANKS = 16384, 8


def new_model(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if name == "Mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **ATTENTION))


class Compilations:
    """A backend of torch.compile that counts how often each graph is compiled, and runs graphs as they are."""

    def __init__(self) -> None:
        self.of_graph: Counter[int | None] = Counter()

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        self.of_graph[torch._guards.CompileContext.current_compile_id().frame_id] += 1
        return graph


def compile_for(name: str, batches: int, shapes: dict[str, int]) -> None:
    """Run a compiled model on random batches, and print how often it was compiled."""
    torch._dynamo.reset()
    model, backend, rng = hfp.patch_model(new_model(name)), Compilations(), np.random.default_rng(0)
    compiled, collator = torch.compile(model, backend=backend), hfp.PackingCollator(**shapes)
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(batches):
            lengths = rng.integers(1, LONGEST + 1, rng.integers(1, MOST_DOCUMENTS + 1))
            compiled(**collator([{"input_ids": rng.integers(3, 99, length)} for length in lengths]))
    seconds = time.perf_counter() - began
    graphs, total, most = len(backend.of_graph), sum(backend.of_graph.values()), max(backend.of_graph.values())
    side = "fixed" if shapes else "any"
    figure(model=name, shapes=side, batches=batches, graphs=graphs, compilations=total, of_one_graph=most)
    print(f"{name:<8}{side:<8}{batches:>8,}{graphs:>8}{total:>14}{most:>14}{seconds:>10.0f}")


def pad(name: str, sizes: RowSizes, max_segments: int) -> None:
    """Print the padding that fixed shapes add to an epoch of rows."""
    batching = hfp.TokenBudget(TOKENS).within((TOKENS, max_segments))
    plan = batching.plan(sizes, Epoch(0, RANKS))
    real = int(sizes.tokens.sum())
    added = 1 - real / (TOKENS * RANKS * plan.num_micro_batches)
    most = int(plan.per_micro_batch(sizes.segments).max())
    figure(rows=name, max_segments=max_segments, batches=plan.num_micro_batches * RANKS, added=added, most=most)
    print(f"{name:<44}{max_segments:>6}{plan.num_micro_batches * RANKS:>9,}{most:>6}{added:>10.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=100_000, help="for the padding")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of transformers, about kernels that are not installed
    logging.disable(logging.WARNING)
    print(machine("hf-packing", "transformers", "torch"))
    columns = f"{'batches':>8}{'graphs':>8}{'compilations':>14}{'of one graph':>14}{'seconds':>10}"
    print(f"\n{'model':<8}{'shapes':<8}{columns}")
    for name in ("Llama", "Mamba"):
        for shapes in (FIXED, {}):
            compile_for(name, arguments.batches, shapes)

    lengths = log_normal(arguments.documents, mean=6, deviation=1.2, longest=TOKENS)
    mean = f"{lengths.mean():.0f} tokens on average"
    print(f"\n{arguments.documents:,} documents of {mean}, batches of {TOKENS:,} tokens, {RANKS} ranks")
    print(f"{'rows':<44}{'max':>6}{'batches':>9}{'most':>6}{'padding':>10}")
    print(f"{'':<44}{'segm.':>6}{'':>9}{'docs':>6}{'added':>10}")
    pad("documents", sizes_of_documents(lengths), 64)
    for row, documents in ((TOKENS, 63), (TOKENS, 255), (2048, 7)):
        strategy = hfp.BestFit(row, max_documents=documents)
        plan = hfp.plan_packing(lengths, strategy)
        sizes = sizes_of_packs(plan.segment_length, plan.pack_offsets)
        pad(f"BestFit({row}, max_documents={documents})", sizes, 64 if documents < 64 else 256)


if __name__ == "__main__":
    with recorded(__file__):
        main()
