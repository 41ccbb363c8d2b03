"""A fleet of two workers packs parquet files, beside the other ways to pack the same files on one machine.

python benchmarks/fleet_pack.py

16 files of uneven size, zstd, with documents of log-normal lengths, 170 tokens on average, are packed into rows of
4,096 tokens with input_ids, labels, position_ids and seq_lengths. Each side is a process of its own, in turn: the fleet
with local processes and with Ray, with and without an exchange between files; `pack` between `load_dataset` and
`to_parquet`; `Dataset.map` with a strategy; and Ray Data, which packs each batch, or groups the segments of the same
plan by output file with `groupby().map_groups()`. Peak memory is that of the driver, with the pages of files that it
has mapped, and of the largest process that it has started, except those of Ray. Ray's start is not in the time.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import figure, machine, ratio, recorded

ROW = 4096
FILES = 16
WORKERS = 2
SIDES = {
    "local": "fleet, 2 local processes",
    "ray": "fleet, Ray with 2 CPUs",
    "alone": "fleet, local, exchange=False",
    "pack": "load_dataset, pack, to_parquet",
    "map": "load_dataset, map(num_proc=2), to_parquet",
    "ray_batches": "Ray Data, each batch by itself",
    "ray_groups": "Ray Data, groupby().map_groups()",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=320_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--folder", help="where to write, instead of a temporary folder")
    arguments = parser.parse_args()
    print(f"{machine('hf-packing', 'datasets', 'ray', 'pyarrow', 'numpy')}\n")
    with tempfile.TemporaryDirectory(dir=arguments.folder and Path(arguments.folder).resolve()) as folder:
        made = result_of("make_files", folder, arguments.tokens)
        print(f"{made['documents']:,} documents, {made['tokens']:,} tokens,", end=" ")
        print(f"{made['bytes'] / 1e6:,.0f} MB in {FILES} files")
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
        for _ in range(arguments.rounds):
            for side in arguments.sides:
                found[side].append(result_of(side, folder))
                shutil.rmtree(Path(folder, "out"))
    show(found, made["tokens"])


def result_of(side: str, folder: str, tokens: int = 0) -> dict[str, Any]:
    """Run a side in a process of its own, whose peak memory is not that of this one, and return what it found."""
    command = [sys.executable, "-c", "import fleet_sides; fleet_sides.main()", side, folder, str(tokens)]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(found: dict[str, list[dict[str, Any]]], tokens: int) -> None:
    print(f"\n{'':43}{'median s':>9}{'Mtokens/s':>11}{'driver MB':>11}{'worker MB':>11}{'rows':>10}{'padding':>10}")
    for side, rounds in found.items():
        seconds, last = statistics.median(each["seconds"] for each in rounds), rounds[-1]
        padding = 1 - last["tokens"] / (last["rows"] * ROW)
        driver, worker = (max(each[who] for each in rounds) for who in ("driver", "worker"))
        print(
            f"{SIDES[side]:43}{seconds:>9.1f}{last['tokens'] / seconds / 1e6:>11.1f}{driver / 1e6:>11,.0f}"
            f"{f'{worker / 1e6:,.0f}' if worker else '-':>11}{last['rows']:>10,}{padding:>10.4%}"
        )
        figure(side=side, rounds=rounds, padding=padding)
        if last["tokens"] != tokens:
            raise AssertionError(f"{side}: expected {tokens} tokens, got {last['tokens']}")
    print()
    for side, rounds in found.items():
        parts = [statistics.median(each["parts"][name] for each in rounds) for name in rounds[0]["parts"]]
        times = ", ".join(f"{name} {part:.1f}" for name, part in zip(rounds[0]["parts"], parts, strict=True))
        print(f"{SIDES[side]}: {times} s")
    print()
    times_of = {side: [each["seconds"] for each in rounds] for side, rounds in found.items()}
    for side, other in (("pack", "local"), ("local", "ray"), ("local", "alone"), ("map", "local")):
        if side in found and other in found:
            print(f"{SIDES[other]}: {ratio(times_of[side], times_of[other])} times as fast as {SIDES[side]}")
    same = {side: {each["digest"] for each in rounds} for side, rounds in found.items()}
    for side in ("local", "ray", "ray_groups"):
        if side in found and "pack" in found:
            print(f"{SIDES[side]}: {'the rows of pack' if same[side] == same['pack'] else 'NOT the rows of pack'}")


if __name__ == "__main__":
    with recorded(__file__):
        main()
