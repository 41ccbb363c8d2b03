"""PackingCollator compared with transformers' DataCollatorWithFlattening and TRL's padding-free collator.

python benchmarks/collate.py
"""

import argparse
import statistics

import numpy as np
import torch
from measure import figure, in_turn, machine, recorded
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import hf_packing as hfp

CALLS = 50


def make_rows(tokens: int, documents: int) -> tuple[list[dict], list[dict]]:
    """Make documents, one in each row, and the same documents in one packed row."""
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(tokens, rng.dirichlet(np.full(documents, 3.0))).clip(1)
    rows = [{"input_ids": rng.integers(0, 32_000, n, dtype=np.int32)} for n in lengths]
    rows = [row | {"labels": row["input_ids"].copy()} for row in rows]
    packed = {name: np.concatenate([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return rows, [packed | {"seq_lengths": lengths.astype(np.int32)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--documents", type=int, default=34)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    rows, packed = make_rows(arguments.tokens, arguments.documents)
    ours = hfp.PackingCollator()
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    trl = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    sides = {
        "PackingCollator, documents": lambda: ours(rows),
        "DataCollatorWithFlattening, documents": lambda: flattening(rows),
        "TRL padding_free, documents": lambda: trl(rows),
        "PackingCollator, one packed row": lambda: ours(packed),
        "TRL padding_free, one packed row": lambda: trl(packed),
    }
    assert torch.equal(ours(rows)["labels"], flattening(rows)["labels"])
    assert torch.equal(ours(packed)["position_ids"], trl(packed)["position_ids"])
    print(machine("hf-packing", "transformers", "trl", "torch", "numpy"))
    print(f"{arguments.tokens:,} tokens, {arguments.documents} documents, numpy int32, input_ids and labels\n")

    def several(call) -> None:
        for _ in range(CALLS):
            call()

    seconds = in_turn({name: lambda call=call: several(call) for name, call in sides.items()}, arguments.rounds)
    for name, taken in seconds.items():
        figure(side=name, milliseconds=[each / CALLS * 1e3 for each in taken])
        print(f"{name:40}{statistics.median(taken) / CALLS * 1e3:>8.3f} ms")


if __name__ == "__main__":
    with recorded(__file__):
        main()
