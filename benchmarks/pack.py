"""pack() compared with trl.pack_dataset: from the same dataset on disk to a packed dataset on disk, in turn.

python benchmarks/pack.py --tokens 20000000
"""

import argparse
import statistics
import tempfile

import datasets
import numpy as np
import pyarrow as pa
from measure import figure, in_turn, machine, ratio, recorded
from trl import pack_dataset

import hf_packing as hfp

MEAN_LENGTH = 490


def make_documents(tokens: int, max_length: int, folder: str) -> datasets.Dataset:
    """input_ids and labels, 30 % of them masked; lengths lognormal(5.8, 0.9), none above max_length."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.8, 0.9, 2 * tokens // MEAN_LENGTH), 1, max_length).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens))]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = rng.integers(0, 32_000, int(lengths.sum()), dtype=np.int32)
    labels = np.where(rng.random(len(ids)) < 0.3, np.int32(-100), ids)
    columns = {"input_ids": ids, "labels": labels}
    table = pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in columns.items()})
    datasets.Dataset(table).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--max-length", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    print(machine("hf-packing", "trl", "datasets", "pyarrow", "numpy"))
    for max_length in arguments.max_length:
        with tempfile.TemporaryDirectory() as folder:
            documents = make_documents(arguments.tokens, max_length, folder)
            compare(documents, max_length, arguments.rounds)


def compare(documents: datasets.Dataset, max_length: int, rounds: int) -> None:
    strategy = hfp.BestFit(max_length)
    results: dict[str, datasets.Dataset] = {}

    def trl() -> None:
        results["trl"] = pack_dataset(documents, max_length, map_kwargs={"load_from_cache_file": False})

    def ours() -> None:
        results["ours"] = hfp.pack(documents, strategy, position_ids=False, load_from_cache_file=False)

    def ours_with_position_ids() -> None:
        results["with"] = hfp.pack(documents, strategy, load_from_cache_file=False)

    seconds = in_turn({"trl": trl, "ours": ours, "with": ours_with_position_ids}, rounds)
    tokens = sum(int(np.sum(lengths)) for lengths in results["ours"].with_format("numpy")["seq_lengths"])
    print(f"\n{len(documents):,} documents, {tokens:,} tokens, max_length {max_length:,}, {rounds} rounds in turn")
    names = {"trl": "trl.pack_dataset, bfd", "ours": "hf_packing.pack, same columns", "with": "hf_packing.pack"}
    print(f"{'':32}{'median s':>10}{'Mtokens/s':>11}{'rows':>9}{'efficiency':>12}   columns")
    for side, name in names.items():
        packed, median = results[side], statistics.median(seconds[side])
        figure(side=name, max_length=max_length, tokens=tokens, seconds=seconds[side], rows=len(packed))
        row = f"{name:32}{median:>10.3f}{tokens / median / 1e6:>11.0f}{len(packed):>9,}"
        print(f"{row}{tokens / len(packed) / max_length:>12.3%}   {', '.join(packed.column_names)}")
    print(f"as fast as TRL: same columns {ratio(seconds['trl'], seconds['ours'])} times,", end=" ")
    print(f"with position_ids {ratio(seconds['trl'], seconds['with'])} times")


if __name__ == "__main__":
    with recorded(__file__):
        main()
