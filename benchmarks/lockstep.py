"""What it takes to keep two ranks in lockstep on a stream: one small reduction for every 8 optimizer steps.

python benchmarks/lockstep.py

Two processes run steps: in lockstep over gloo, with a reduction that is waited for in each step, and without any. The
differences are the prices of a step. The steps have no work, or work of a few milliseconds, beside which the reduction
for the next steps runs in lockstep.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat

import torch
import torch.distributed as dist
import torch.multiprocessing
from internals import Answer, in_lockstep
from measure import figure, machine, recorded


def next_step(answers: Iterator[Answer]) -> tuple[str, Answer]:
    return "a step", next(answers)


def work(milliseconds: float) -> None:
    """Keep the processor busy."""
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def steps_of(rank: int, address: str, steps: int, milliseconds: float, rounds: int, times: list[list[float]]) -> None:
    """Time steps in one of two processes: with the other rank, and alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for _ in range(rounds):
        found = []
        for ranks in (2, 1):
            answers = chain([Answer.ROW] * steps, repeat(Answer.ENDED))
            dist.barrier()
            began = time.perf_counter()
            for _ in in_lockstep(partial(next_step, answers), ranks, torch.device("cpu"), 8):
                work(milliseconds)
            found.append((time.perf_counter() - began) / steps)
        number = torch.zeros(1, dtype=torch.int32)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            dist.all_reduce(number, dist.ReduceOp.MAX)
            work(milliseconds)
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
    for milliseconds, steps in ((0.0, arguments.steps), (5.0, arguments.steps // 5)):
        time_steps(milliseconds, steps, arguments.rounds)


def time_steps(milliseconds: float, steps: int, rounds: int) -> None:
    manager = torch.multiprocessing.get_context("spawn").Manager()
    times = manager.list()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    free = store.port
    del store
    given = (f"tcp://127.0.0.1:{free}", steps, milliseconds, rounds, times)
    torch.multiprocessing.spawn(steps_of, given, nprocs=2)
    together, alone, waited = ([1e6 * each[number] for each in times] for number in range(3))
    price, bare = (statistics.median(each) - statistics.median(alone) for each in (together, waited))
    print(
        f"a step of {milliseconds:g} milliseconds in lockstep: {price:.0f} microseconds more than on one rank; with a "
        f"reduction that is waited for: {bare:.0f} more"
    )
    figure(milliseconds=milliseconds, in_lockstep=together, waited_for=waited, alone=alone)


if __name__ == "__main__":
    with recorded(__file__):
        main()
