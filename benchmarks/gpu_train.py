"""Training a model of about 0.6B parameters on a GPU: padding, masks, ours, and the ideal, in one run.

python benchmarks/gpu_train.py

Documents have lengths of a lognormal distribution, or of a file of integers (--lengths). Every step of every side has
at most the same number of tokens in memory. The sides are padded documents; packed rows through sdpa, with the mask
that transformers makes; packed rows in a patched model; and two ideals that waste nothing, with one document in each
row: of the full length of a row, or of the mean length of the documents, where attention has as little work as in
packed rows.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from measure import figure, in_turn, machine, ratio, recorded
from transformers import PreTrainedModel

import hf_packing as hfp


@dataclass
class Step:
    """A batch, and how many of its tokens are not padding."""

    batch: dict
    real: int


def new_model(arguments: argparse.Namespace, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": max(1, arguments.hidden // 128),
        "max_position_embeddings": arguments.row,
        "attn_implementation": "sdpa",
    }
    config = transformers.Qwen3Config(**sizes, head_dim=64, tie_word_embeddings=True, use_cache=False)
    return transformers.Qwen3ForCausalLM(config).to(device, torch.bfloat16)


def read_lengths(arguments: argparse.Namespace) -> np.ndarray:
    if arguments.lengths is not None:
        lengths = np.load(arguments.lengths) if arguments.lengths.suffix == ".npy" else np.loadtxt(arguments.lengths)
        return lengths.astype(np.int64).clip(2, arguments.row)
    random = np.random.default_rng(0)
    return random.lognormal(np.log(arguments.row / 8), 0.9, 20_000).astype(np.int64).clip(2, arguments.row)


def documents(lengths: np.ndarray, arguments: argparse.Namespace) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(1, arguments.vocabulary, int(length)).tolist() for length in lengths]


def padded_steps(lengths: np.ndarray, arguments: argparse.Namespace) -> Iterator[Step]:
    """Yield steps of as many documents as fit when each is padded to the longest of them."""
    begin = 0
    while True:
        count = 1
        while (count + 1) * lengths[begin : begin + count + 1].max() <= arguments.tokens:
            count += 1
        rows = documents(lengths[begin : begin + count], arguments)
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        yield Step(
            {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
            int(mask.sum()),
        )
        begin += count


def packed_steps(lengths: np.ndarray, arguments: argparse.Namespace) -> Iterator[Step]:
    plan = hfp.plan_packing(lengths, hfp.BestFit(arguments.tokens))
    for begin, end in zip(plan.pack_offsets[:-1], plan.pack_offsets[1:], strict=True):
        rows = documents(np.asarray(plan.segment_length[begin:end]), arguments)
        yield Step(hfp.PackingCollator()([{"input_ids": row} for row in rows]), sum(map(len, rows)))


def masked_steps(lengths: np.ndarray, arguments: argparse.Namespace) -> Iterator[Step]:
    for step in packed_steps(lengths, arguments):
        kept = {name: step.batch[name] for name in ("input_ids", "labels", "position_ids")}
        yield Step(kept, step.real)


def ideal_steps(_: np.ndarray, arguments: argparse.Namespace) -> Iterator[Step]:
    """Rows of one document each, of exactly the full length."""
    return equal_steps(arguments.row, arguments)


def ideal_steps_of_mean_length(lengths: np.ndarray, arguments: argparse.Namespace) -> Iterator[Step]:
    """Rows of one document each, as long as documents are on average."""
    return equal_steps(int(lengths.mean()), arguments)


def equal_steps(length: int, arguments: argparse.Namespace) -> Iterator[Step]:
    while True:
        ids = torch.tensor(documents(np.full(arguments.tokens // length, length), arguments))
        yield Step({"input_ids": ids, "labels": ids}, ids.numel())


class Training:
    def __init__(self, model: PreTrainedModel, steps: Iterator[Step], device: str) -> None:
        self.model, self.steps, self.device = model.train(), steps, device
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.real: list[int] = []
        self.memory = 0.0

    def step(self) -> None:
        step = next(self.steps)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        batch = {name: v.to(self.device) if isinstance(v, torch.Tensor) else v for name, v in step.batch.items()}
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.memory = max(self.memory, torch.cuda.max_memory_allocated() / 2**30)
        self.real.append(step.real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens per step")
    parser.add_argument("--row", type=int, default=4096, help="longest document")
    parser.add_argument("--lengths", type=Path, help="integers, as .npy or text")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = read_lengths(arguments)
    makers: dict[str, Callable[[np.ndarray, argparse.Namespace], Iterator[Step]]] = {
        "padding": padded_steps,
        "sdpa with mask": masked_steps,
        "ours": packed_steps,
        "ideal": ideal_steps,
        "ideal, mean length": ideal_steps_of_mean_length,
    }
    print(machine("hf-packing", "transformers", "torch"))
    print(torch.cuda.get_device_name() if device == "cuda" else "no GPU: on the CPU, to try the script")
    runs = {}
    for name, make_steps in makers.items():
        model = new_model(arguments, device)
        runs[name] = Training(
            hfp.patch_model(model) if name == "ours" else model, make_steps(lengths, arguments), device
        )
    size = sum(parameter.numel() for parameter in runs["ours"].model.parameters())
    print(
        f"{size / 1e9:.2f}B parameters, bfloat16, {arguments.tokens:,} tokens a step, documents of {lengths.mean():.0f}"
    )
    for run in runs.values():  # the first step compiles kernels and fills caches
        run.step()
        run.real.clear()
    seconds = in_turn({name: run.step for name, run in runs.items()}, arguments.steps)
    print(f"\n{'':20}{'real tokens/s':>15}{'of a step':>12}{'peak GiB':>10}   ideal is so many times as fast")
    for name, run in runs.items():
        speed, full = sum(run.real) / sum(seconds[name]), statistics.mean(run.real) / arguments.tokens
        figure(side=name, real_tokens=run.real, seconds=seconds[name], peak_gibibytes=run.memory)
        each = [
            [taken / real for taken, real in zip(seconds[side], runs[side].real, strict=True)]
            for side in (name, "ideal")
        ]
        print(f"{name:20}{speed:>15,.0f}{full:>12.0%}{run.memory:>10.1f}   {ratio(*each)}")


if __name__ == "__main__":
    with recorded(__file__):
        main()
