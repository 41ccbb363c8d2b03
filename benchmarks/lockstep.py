"""What it takes to keep two ranks in lockstep on a stream: one reduction of 4 bytes for each optimizer step.

python benchmarks/lockstep.py

Two processes run steps without work, first in lockstep over gloo, then without; the difference is the price of a step.
In a training, the reduction begins one step ahead, and runs beside the work of the step.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing
from measure import figure, machine, recorded

from hf_packing.training.streams.lockstep import Answer, in_lockstep


def next_step(answers: Iterator[Answer]) -> tuple[str, Answer]:
    return "a step without work", next(answers)


def steps_of(rank: int, address: str, steps: int, rounds: int, times: list[list[float]]) -> None:
    """Time steps in one of two processes: with the other rank, and alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for _ in range(rounds):
        found = []
        for ranks in (2, 1):
            answers = iter([Answer.ROW] * steps + [Answer.ENDED] * 2)
            dist.barrier()
            began = time.perf_counter()
            for _ in in_lockstep(partial(next_step, answers), ranks, torch.device("cpu")):
                pass
            found.append((time.perf_counter() - began) / steps)
        if rank == 0:
            times.append(found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{machine('torch')}\n")
    manager = torch.multiprocessing.get_context("spawn").Manager()
    times = manager.list()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    free = store.port
    del store
    given = (f"tcp://127.0.0.1:{free}", arguments.steps, arguments.rounds, times)
    torch.multiprocessing.spawn(steps_of, given, nprocs=2)
    together, alone = ([1e6 * each[number] for each in times] for number in (0, 1))
    print(
        f"a step in lockstep: {statistics.median(together):.0f} microseconds on two ranks, "
        f"{statistics.median(alone):.1f} on one"
    )
    figure(microseconds=together, alone=alone)


if __name__ == "__main__":
    with recorded(__file__):
        main()
