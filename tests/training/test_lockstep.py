"""Ranks that agree on their steps: the same steps for all, in order, whatever each rank has, and where it fails."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain, count, repeat, zip_longest
from random import Random
from threading import local

import pytest
import torch
import torch.distributed as dist

from hf_packing.training import lockstep
from hf_packing.training.lockstep import Answer, in_lockstep

RANKS = 3


def drawn_case(random):
    most_ahead = random.choice([1, 2, 4, 5, 8])
    held = [
        random.choices([Answer.ROW, Answer.NO_ROW], [4, 1], k=random.choice([0, random.randrange(40)]))
        for _ in range(RANKS)
    ]
    fails_at = [random.randrange(40) if random.random() < 0.2 else None for _ in range(RANKS)]
    return {"held": held, "fails_at": fails_at, "most_ahead": most_ahead}


def expected(held, fails_at):
    """The steps of every rank, and which of them is the first that a rank cannot read, if any."""
    agreed = [max(answers) for answers in zip_longest(*held, fillvalue=Answer.ENDED)]
    first = min((step for step in fails_at if step is not None), default=len(agreed) + 1)
    steps = [[step, answer == Answer.ROW] for step, answer in enumerate(agreed[:first])]
    return steps, first if first <= len(agreed) else None


def run(rank, held, fails_at, most_ahead):
    answers, number, steps, last_read, ahead = chain(held[rank], repeat(Answer.ENDED)), count(), [], [0], 0

    def read():
        last_read[0] = next(number)
        if last_read[0] == fails_at[rank]:
            raise ValueError(f"rank {rank} cannot read")
        return last_read[0], Answer(next(answers))

    try:
        for step, is_run in in_lockstep(read, RANKS, torch.device("cpu"), most_ahead):
            steps.append([step, is_run])
            ahead = max(ahead, last_read[0] - step)
    except Exception as error:
        return {"steps": steps, "error": str(error), "ahead": ahead}
    return {"steps": steps, "error": None, "ahead": ahead}


def test_all_ranks_run_the_same_steps_and_stop_at_the_same_error(monkeypatch):
    """Ranks are threads, each with a process group of its own that meets those of the others in a store."""
    cases, store, of_thread = [drawn_case(Random(seed)) for seed in range(60)], dist.HashStore(), local()

    def all_reduce(tensor, op, async_op):
        assert async_op
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return of_thread.group.allreduce([tensor], options)

    def run_cases(rank):
        of_thread.group = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=60))
        return [run(rank, **case) for case in cases]

    monkeypatch.setattr(lockstep, "all_reduce", all_reduce)
    with ThreadPoolExecutor(RANKS) as ranks:
        found = [*ranks.map(run_cases, range(RANKS))]
    failed = 0
    for number, case in enumerate(cases):
        steps, fails = expected(case["held"], case["fails_at"])
        for rank in range(RANKS):
            ran = found[rank][number]
            assert ran["steps"] == steps
            assert ran["ahead"] <= case["most_ahead"]
            if fails is None:
                assert ran["error"] is None
            elif case["fails_at"][rank] == fails:
                assert ran["error"] == f"rank {rank} cannot read"
            else:
                assert "another rank could not read its next rows" in ran["error"]
        failed += fails is not None
    assert 6 < failed < 54
    assert max(each["ahead"] for each in found[0]) == 8, "steps have to be read ahead"


def test_a_rank_alone_raises_its_own_error_in_its_turn():
    answers = iter([Answer.ROW, Answer.NO_ROW, Answer.ROW])

    def step():
        try:
            return "step", next(answers)
        except StopIteration:
            raise ValueError("unreadable") from None

    found = []
    with pytest.raises(ValueError, match="unreadable"):
        found.extend(is_run for _, is_run in in_lockstep(step, 1, torch.device("cpu"), 4))
    assert found == [True, False, True]
