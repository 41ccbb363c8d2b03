"""The mask of FlexAttention for a packed row, on the CPU: made from the borders, and by torch's create_block_mask.

python benchmarks/block_mask.py

Both make the same mask, of causal attention within segments. create_block_mask evaluates the mask for all pairs of
tokens.
"""

import argparse
import statistics
from itertools import accumulate

import torch
from internals import Borders, row_mask
from measure import figure, in_turn, machine, ratio, recorded
from torch.nn.attention.flex_attention import create_block_mask

ROWS = {"4096 tokens in 8": [512] * 8, "16384 tokens in 32": [512] * 32, "16384 tokens in 1": [16384]}
"""Tokens in segments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try the script")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("hf-packing", "torch"))
    print(f"\n{'ms':20}{'from borders':>14}{'create_block_mask':>20}{'of ours':>30}")
    for title, full in ROWS.items():
        lengths = [length // arguments.shrink for length in full]
        tokens = sum(lengths)
        borders = Borders(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), tokens)
        ours = row_mask(borders, borders, True, None)

        def theirs(attends=ours.mask_mod, tokens=tokens):
            return create_block_mask(attends, None, None, tokens, tokens, device="cpu")

        assert torch.equal(theirs().kv_num_blocks, ours.kv_num_blocks)
        sides = {"ours": lambda: row_mask(borders, borders, True, None), "theirs": theirs}  # noqa: B023
        seconds = in_turn(sides, arguments.rounds)
        figure(row=title, seconds=seconds)
        ours_ms, theirs_ms = (statistics.median(seconds[name]) * 1e3 for name in sides)
        print(f"{title:20}{ours_ms:>14.2f}{theirs_ms:>20.0f}{ratio(seconds['theirs'], seconds['ours']):>30}")


if __name__ == "__main__":
    with recorded(__file__):
        main()
