"""What the proofs of isolation and of the step on the first batch cost, compared with training steps on the same batch.

Both time and peak memory are measured.

Processes that do nothing else measure the peak memory: of a training step, and of both proofs.

python benchmarks/first_batch.py
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from internals import prove_on_batch
from lengths import log_normal
from measure import figure, in_turn, machine, ratio, recorded
from transformers import LlamaConfig, LlamaForCausalLM

import hf_packing as hfp

STEPS = 100
"""The cost of the proof is told as a share of this number of steps."""


def training(hidden: int, layers: int, vocabulary: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """Return functions that do a training step, and that prove isolation and the step on the same batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=tokens,
    )
    model = hfp.patch_model(LlamaForCausalLM(config)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = log_normal(1000, mean=5.5, deviation=1.0, longest=tokens)
    first = lengths[: int((lengths.cumsum() <= tokens).sum())]
    batch = hfp.PackingCollator()([{"input_ids": torch.randint(3, vocabulary, (int(n),)).tolist()} for n in first])

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def prove_isolation() -> None:
        proof = prove_on_batch(model, batch)
        assert not proof.problem, proof.problem

    def prove_step() -> None:
        report = hfp.check_step(model, batch)
        assert report.same, report.problem

    def prove() -> None:
        prove_isolation()
        prove_step()

    print(f"{model.num_parameters():,} parameters, a batch of {first.sum():,} tokens, {len(first)} documents")
    return {"step": step, "isolation": prove_isolation, "proof of the step": prove_step, "proof": prove}


def peak_memory(run: Callable[[], Any]) -> int:
    """Return by how many bytes a call raises the largest amount of memory that this process has used."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)


def peaks_of_processes() -> dict[str, int]:
    """Return the peak memory of a step and of the proof, in bytes, each measured by a new process.

    Call this before this process uses much memory, since a new process begins with the peak of its parent.
    """
    known = [sys.executable, __file__, *sys.argv[1:], "--peak"]
    return {
        name: int(subprocess.run([*known, name], capture_output=True, text=True, check=True).stdout.split()[-1])
        for name in ("step", "proof")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=["step", "proof"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    peaks = {} if options.peak else peaks_of_processes()
    run = training(options.hidden, options.layers, options.vocabulary, options.tokens)
    if options.peak:
        print(peak_memory(run[options.peak]))
        return
    print(machine("torch", "transformers"))
    run["step"]()
    run["proof"]()
    timed = {name: run[name] for name in ("step", "isolation", "proof of the step")}
    seconds = in_turn(timed, options.rounds)
    for name in ("isolation", "proof of the step"):
        print(f"time of the {name}: {ratio(seconds[name], seconds['step'])} training steps")
    both = [sum(each) for each in zip(seconds["isolation"], seconds["proof of the step"], strict=True)]
    print(f"time of both: {ratio(both, seconds['step'])} training steps")
    share = min(both) / min(seconds["step"]) / STEPS
    print(f"share of {STEPS} steps, by the fastest rounds: {share:.1%}")
    print(f"peak memory of both proofs: {peaks['proof'] / peaks['step']:.2f} of a training step's")
    figure(share_of_steps=share / STEPS, **{f"peak_{name}": peak for name, peak in peaks.items()})


if __name__ == "__main__":
    with recorded(__file__):
        main()
