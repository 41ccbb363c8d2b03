"""Memory and time of one training step, with the logits of a whole row and with the head in chunks of tokens.

python benchmarks/head.py

The model is a Llama of one layer, so that its head is nearly all of a step. Each side runs in its own process: with
whole logits, as the model itself computes its loss; in chunks, as `compute_loss` does; and with TRL's fused head, as
SFTTrainer uses it. Memory is what a step needs at its peak beyond what the process had before. Where the machine is too
small for the whole logits of a row, they are measured for shorter rows: their memory grows in proportion to the tokens.
The losses and gradients of all sides are compared.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import figure, machine, ratio, recorded

import hf_packing as hfp

SIDES = ("whole logits", "in chunks", "TRL's fused head")
GB = 10**9
DOCUMENT = 512
"""Tokens in each document of the row."""

COPIES_OF_LOGITS = 3.5
"""Copies of the logits, in float32, that a step with whole logits is given room for."""


def step(side: str, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Run one forward and backward pass, and return the loss."""
    model.zero_grad()
    if side == "TRL's fused head":
        outputs = model(**batch, fused_lm_head=True)
        loss = -outputs.log_probs.sum() / (batch["labels"] != -100).sum()
    elif side == "whole logits":
        loss = model(**batch).loss
    else:
        loss = hfp.compute_loss(model, batch)
    loss.backward()
    return loss.detach()


def measure_side(side: str, tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a side in this process; with --gradients, also save gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=DOCUMENT,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device)
    if side == "TRL's fused head":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
    hfp.patch_model(model).train()
    ids = torch.randint(3, arguments.vocabulary, (tokens,)).tolist()
    batch = hfp.PackingCollator()(
        [{"input_ids": ids[begin : begin + DOCUMENT]} for begin in range(0, tokens, DOCUMENT)]
    )
    batch = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
    before, seconds = peak_memory(), []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        loss = step(side, model, batch).item()
        seconds.append(time.perf_counter() - began)
    if arguments.gradients:
        named = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        torch.save(named, arguments.gradients)
    return {"loss": loss, "bytes": peak_memory() - before, "seconds": seconds}


def peak_memory() -> int:
    """Return the largest memory that this process has had, in bytes; on CUDA, the largest memory of tensors."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_process(side: str, tokens: int, gradients: Path | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a side in a new process."""
    names = ("vocabulary", "hidden", "steps", "threads")
    options = [text for name in names for text in (f"--{name}", str(getattr(arguments, name)))]
    options += ["--gradients", str(gradients)] if gradients else []
    command = [sys.executable, __file__, "--side", side, "--tokens", str(tokens), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side}, {tokens:,} tokens: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def free_memory() -> int:
    """Return the memory that is available on the device, in bytes."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def largest_that_fits(arguments: argparse.Namespace) -> int:
    """Return the largest half, quarter and so on of the tokens whose whole logits fit into three quarters of memory."""
    tokens: int = arguments.tokens
    while tokens > DOCUMENT and tokens * arguments.vocabulary * 4 * COPIES_OF_LOGITS > 0.75 * free_memory():
        tokens //= 2
    return tokens


def compare(files: dict[str, Path], losses: dict[str, float]) -> None:
    """Print how much the loss and the gradients of each side differ from those of whole logits."""
    expected = torch.load(files[SIDES[0]])
    for side in SIDES[1:]:
        found = torch.load(files[side])
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        difference = max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest
        of_loss = abs(losses[side] / losses[SIDES[0]] - 1)
        figure(side=side, gradient_difference=difference, loss_difference=of_loss)
        print(f"{side}: loss {losses[side]:.6f}, {of_loss:.0e} from that of whole logits; gradients {difference:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="steps in each process; the fastest one counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--side", choices=SIDES, help="measure only this side, in this process")
    parser.add_argument("--gradients", type=Path, help="with --side: a file for the gradients")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    if arguments.side:
        print(json.dumps(measure_side(arguments.side, arguments.tokens, arguments)))
        return
    print(machine("hf-packing", "trl", "transformers", "torch"))
    print(f"vocabulary {arguments.vocabulary:,}, hidden size {arguments.hidden}, {arguments.threads} threads")
    fitting = largest_that_fits(arguments)
    memory = {(fitting, side): 0 for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {side: Path(folder) / f"{number}.pt" for number, side in enumerate(SIDES)}
        for _ in range(arguments.rounds):
            for side in SIDES:
                found = in_process(side, fitting, files[side], arguments)
                memory[fitting, side], losses[side] = found["bytes"], found["loss"]
                seconds[side].append(min(found["seconds"]))
                figure(side=side, tokens=fitting, **found)
        compare(files, losses)
    if fitting < arguments.tokens:
        for side in SIDES[1:]:
            found = in_process(side, arguments.tokens, None, arguments)
            memory[arguments.tokens, side] = found["bytes"]
            figure(side=side, tokens=arguments.tokens, **found)
        memory[arguments.tokens, SIDES[0]] = memory[fitting, SIDES[0]] * arguments.tokens // fitting
    for (tokens, side), needed in memory.items():
        note = " (in proportion)" if (tokens, side) == (arguments.tokens, SIDES[0]) and tokens != fitting else ""
        share = needed / memory[tokens, SIDES[0]]
        print(f"{tokens:>7,} tokens, {side:<16} {needed / GB:6.1f} GB{note}, {share:.2f} of whole logits")
    for side in SIDES[1:]:
        print(f"{fitting:,} tokens: time of {side} / time of whole logits: {ratio(seconds[side], seconds[SIDES[0]])}")


if __name__ == "__main__":
    with recorded(__file__):
        main()
