"""Attention in a packed row on the CPU: by segment, compared with sdpa with the mask that packing needs, and a loop.

python benchmarks/attention.py

Forward and backward of one layer. The mask is made once for all layers, so its time is shown separately. Peak memory is
measured in a separate process for each side, as what its first call adds.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from internals import Layout, current_layout, packed_varlen, within
from measure import figure, in_turn, machine, ratio, recorded
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

ROWS = {"8 x 512": [512] * 8, "32 x 128": [128] * 32, "1 x 4096": [4096]}
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
SIDES = ("by segment", "plain loop", "sdpa with mask")


class Attention(torch.nn.Module):
    is_causal = True
    num_key_value_groups = HEADS // KV_HEADS


def tensors(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def mask_of(row: Layout) -> Tensor | None:
    """The mask that transformers makes of positions that restart, with a model on "sdpa"."""
    config = LlamaConfig(attn_implementation="sdpa")
    embeddings = torch.empty(1, row.tokens, 1)
    return create_causal_mask(config, embeddings, None, None, position_ids=row.position_ids)


def plain_loop(query: Tensor, key: Tensor, value: Tensor, row: Layout) -> Tensor:
    """Call torch's attention for each segment, one after the other."""
    outputs = []
    for start, end in row.slices:
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def side(name: str, lengths: list[int]) -> Callable[[], Tensor]:
    """Return a call that runs forward and backward of one layer, and returns the attention output."""
    row, module = Layout.of(lengths), Attention()
    q, k, v = tensors(row.tokens)
    mask = mask_of(row) if name == "sdpa with mask" else None

    def forward() -> Tensor:
        if name == "plain loop":
            return plain_loop(q, k, v, row)
        if name == "sdpa with mask":
            return sdpa_attention_forward(module, q, k, v, mask, is_causal=mask is None)[0]
        with within(current_layout, row):
            return packed_varlen(module, q, k, v, None)[0]

    def both() -> Tensor:
        attended = forward()
        attended.square().sum().backward()
        return attended

    return both


def peak() -> int:
    """Return the peak memory of this process in KiB, without its parent's (Linux)."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


def memory_of(name: str, lengths: list[int]) -> float:
    """Return the MiB that a side adds, mask included; to be called in a fresh process."""
    torch.set_num_threads(1)
    plain_loop(*tensors(8), Layout.of([8])).sum().backward()
    before = peak()
    side(name, lengths)()
    return (peak() - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try the script")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("hf-packing", "transformers", "torch"))
    print(f"float32, one thread, {HEADS} heads, {KV_HEADS} for keys and values, head dimension {HEAD_DIM}\n")
    print(f"{'':10}{'':16}{'ms':>9}{'of ours':>24}{'peak MiB':>10}")
    for title, full in ROWS.items():
        lengths = [length // arguments.shrink for length in full]
        sides = {name: side(name, lengths) for name in SIDES}
        expected = sides["by segment"]()
        assert all(torch.allclose(sides[name](), expected, atol=1e-4) for name in SIDES)
        seconds = in_turn(sides, arguments.rounds)
        for name in SIDES:
            memory = float("nan")
            if arguments.memory:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    memory = pool.apply(memory_of, (name, lengths))
            times = ratio(seconds[name], seconds["by segment"]) if name != "by segment" else ""
            figure(row=title, side=name, seconds=seconds[name], peak_mebibytes=memory)
            median = statistics.median(seconds[name]) * 1e3
            print(f"{title:10}{name:16}{median:>9.1f}{times:>24}{memory:>10.0f}")
        row = Layout.of(lengths)
        making = in_turn({"mask": lambda row=row: mask_of(row)}, arguments.rounds)["mask"]
        print(f"{title:10}{'making the mask':16}{statistics.median(making) * 1e3:>9.1f}\n")


if __name__ == "__main__":
    with recorded(__file__):
        main()
