"""One of some ranks that run random steps in lockstep, and note what they ran: a folder, cases as JSON."""

import json
import sys
from itertools import chain, count, repeat
from pathlib import Path

import torch
import torch.distributed as dist

from hf_packing.training.streams.lockstep import Answer, in_lockstep


def run(held, fails_at, most_ahead):
    """Return the steps that this rank ran, the error, and the most steps that it read ahead."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    answers, number, steps, last_read, ahead = chain(held[rank], repeat(Answer.ENDED)), count(), [], [0], 0

    def read():
        last_read[0] = next(number)
        if last_read[0] == fails_at[rank]:
            raise ValueError(f"rank {rank} cannot read")
        return last_read[0], Answer(next(answers))

    try:
        for step, is_run in in_lockstep(read, ranks, torch.device("cpu"), most_ahead):
            steps.append([step, is_run])
            ahead = max(ahead, last_read[0] - step)
    except Exception as error:
        return {"steps": steps, "error": str(error), "ahead": ahead}
    return {"steps": steps, "error": None, "ahead": ahead}


if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    with open(folder / f"ran-{dist.get_rank()}.jsonl", "w") as file:
        for case in cases:
            file.write(json.dumps(run(**case)) + "\n")
    dist.barrier()
    dist.destroy_process_group()
