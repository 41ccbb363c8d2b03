"""How long a start takes: importing, and the first batch of a tokenized dataset.

python benchmarks/startup.py

Importing is timed in fresh interpreters. The first batch is of a tokenized dataset on disk: packed by TRL and collated
padding-free; packed by us, with labels and position_ids beside input_ids (three times the bytes of TRL's); or batched
by a token budget without packing first. Every round starts from a copy that is in no cache.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path

import datasets
import numpy as np
from accelerate import Accelerator
from lengths import log_normal
from measure import figure, in_turn, machine, ratio, recorded
from torch.utils.data import DataLoader
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import hf_packing as hfp

IMPORTED = ("hf_packing", "hf_packing; hf_packing.BestFit", "datasets", "torch", "transformers", "trl")
TIMED = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def import_seconds(what: str) -> float:
    done = subprocess.run([sys.executable, "-c", TIMED.format(what)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def first_batch_of_trl(documents: datasets.Dataset, tokens: int) -> int:
    packed = pack_dataset(documents, tokens, strategy="bfd")
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return next(iter(DataLoader(packed, batch_size=1, collate_fn=collate, shuffle=True)))["input_ids"].shape[1]


def first_batch_packed(documents: datasets.Dataset, tokens: int) -> int:
    packed = hfp.pack(documents, hfp.BestFit(tokens)).with_format("numpy")
    return next(iter(DataLoader(packed, batch_size=1, collate_fn=hfp.PackingCollator(), shuffle=True)))[
        "input_ids"
    ].shape[1]


def first_batch_of_budget(documents: datasets.Dataset, tokens: int) -> int:
    loader = hfp.prepare_dataloader(Accelerator(cpu=True), documents, hfp.TokenBudget(tokens))
    return next(iter(loader))["input_ids"].shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    datasets.disable_progress_bars()
    print(machine("hf-packing", "trl", "transformers", "torch", "datasets"))
    print("\nimporting, seconds, median of fresh interpreters")
    for what in IMPORTED:
        taken = [import_seconds(what) for _ in range(arguments.rounds)]
        figure(imported=what, seconds=taken)
        print(f"{what:32}{statistics.median(taken):>8.3f}")
    lengths = log_normal(arguments.documents, 6, 1.2, longest=arguments.tokens)
    random = np.random.default_rng(0)
    ids = [random.integers(0, 32_000, length, dtype=np.int32) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        original = datasets.Dataset.from_dict({"input_ids": ids})
        fresh = count()

        def on_disk() -> datasets.Dataset:
            path = Path(folder) / str(next(fresh))
            original.save_to_disk(path)
            return datasets.load_from_disk(path)

        sides: dict[str, Callable[[datasets.Dataset, int], int]] = {
            "TRL: pack_dataset, padding-free": first_batch_of_trl,
            "hf_packing: pack": first_batch_packed,
            "hf_packing: TokenBudget": first_batch_of_budget,
        }
        copies = {name: iter([on_disk() for _ in range(arguments.rounds)]) for name in sides}
        timed = {
            name: lambda first=first, name=name: first(next(copies[name]), arguments.tokens)
            for name, first in sides.items()
        }
        seconds = in_turn(timed, arguments.rounds)
    print(
        f"\nfirst batch of {len(lengths):,} documents, {lengths.sum():,} tokens on disk, rows of {arguments.tokens:,}"
    )
    trl, *ours = sides
    for name in sides:
        figure(side=name, seconds=seconds[name])
        print(f"{name:32}{statistics.median(seconds[name]):>8.2f} s")
    for name in ours:
        print(f"{name} is {ratio(seconds[trl], seconds[name])} times as fast as {trl}")


if __name__ == "__main__":
    with recorded(__file__):
        main()
