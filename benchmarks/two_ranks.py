"""One document on two ranks: how much faster a training step is than on one, and how much less memory it needs.

python benchmarks/two_ranks.py

Each process uses one thread. A Llama runs the forward and backward pass of a document of 8,192 tokens, on one process
or on two. Memory is the peak of a process, without that before its first step.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from measure import figure, machine, recorded

import hf_packing as hfp


def model_of(args: argparse.Namespace) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 128,
        max_position_embeddings=args.tokens,
    )
    return transformers.LlamaForCausalLM(config)


def steps_on(
    accelerator: Accelerator,
    model: transformers.PreTrainedModel,
    tokens: int,
    ranks: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Run steps on a random document on so many ranks, and return the seconds of each but the first."""
    vocabulary, seed = model.config.vocab_size, torch.Generator().manual_seed(0)
    documents = Dataset.from_dict({"input_ids": [torch.randint(vocabulary, (tokens,), generator=seed).tolist()]})
    budget = hfp.TokenBudget(-(-tokens // ranks), max_ranks_per_document=ranks)
    loader = hfp.prepare_dataloader(accelerator, documents, budget, model=model)
    model, seconds = accelerator.prepare(model), []
    for _ in range(steps + 1):  # the first one also proves, and warms up
        for batch in loader:
            begin = clock()
            accelerator.backward(hfp.compute_loss(model, batch))
            accelerator.wait_for_everyone()
            seconds.append(clock() - begin)
            model.zero_grad()
    return seconds[1:]


def measure(args: argparse.Namespace, ranks: int, accelerator: Accelerator) -> dict[str, object]:
    """Run the steps on this process, and return the seconds of each and the peak memory of a process in MB."""
    model = model_of(args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = steps_on(accelerator, model, args.tokens, ranks, args.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    most = accelerator.gather(torch.tensor([float(peak)])).max().item()
    return {"seconds": seconds, "peak": most / 1024}


def run(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Measure in processes of their own."""
    # freed memory is given back at once, so that the peak is what a step needs
    known = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    settings = [f"--{name}={getattr(args, name)}" for name in ("tokens", "hidden", "layers", "steps")]
    command = [sys.executable, *launch, __file__, "--ranks", str(ranks), *settings]
    done = subprocess.run(command, env=known, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="steps in each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        torch.set_num_threads(1)
        accelerator = Accelerator(cpu=True)
        measured = measure(args, args.ranks, accelerator)
        accelerator.print(json.dumps(measured))
        gc.collect()  # a DDP model that outlives its group of processes hangs
        accelerator.end_training()
        return
    print(machine("transformers", "torch"))
    ratios, memory = [], []
    for _ in range(args.rounds):
        one, two = run(args, 1), run(args, 2)
        ratios.append(min(one["seconds"]) / min(two["seconds"]))
        memory.append(two["peak"] / one["peak"])
        figure(one=one, two=two)
    faster = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast as on one"
    print(f"a document of {args.tokens:,} tokens on two ranks: {faster}")
    print(f"memory of a rank: {statistics.median(memory):.2f} of that on one")


if __name__ == "__main__":
    with recorded(__file__):
        main()
