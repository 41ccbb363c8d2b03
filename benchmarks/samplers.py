"""TokenBudget compared with other ways to deal documents to ranks: padding, idle ranks, largest batch, seconds to plan.

python benchmarks/samplers.py
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from internals import Epoch, sizes_of_documents
from lengths import log_normal
from measure import figure, machine, recorded
from torch.utils.data import RandomSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

import hf_packing as hfp

Steps = list[list[np.ndarray]]
"""For each step, the documents of every rank."""


def in_steps(order: list[int], size: int, ranks: int) -> Steps:
    """Cut documents, in order, into micro-batches of `size`, dealt to the ranks in turn, as accelerate does."""
    whole = np.array(order[: len(order) // (size * ranks) * size * ranks]).reshape(-1, ranks, size)
    return [list(step) for step in whole]


def rebalanced(lengths: np.ndarray, size: int, ranks: int) -> Steps:
    of_rank = [
        list(BatchRebalanceSampler(lengths.tolist(), size * ranks, ranks, grad_accum=1, rank=rank))
        for rank in range(ranks)
    ]
    return [[np.array(batch) for batch in step] for step in zip(*of_rank, strict=True)]


def dealt_at_random(lengths: np.ndarray, tokens: int, ranks: int) -> Steps:
    plan = hfp.plan_packing(lengths, hfp.BestFit(tokens))
    packs = np.split(plan.segment_document, plan.pack_offsets[1:-1])
    return [packs[first : first + ranks] for first in range(0, len(packs) // ranks * ranks, ranks)]


def ours(lengths: np.ndarray, tokens: int, ranks: int) -> Steps:
    plan = hfp.TokenBudget(tokens).plan(sizes_of_documents(lengths), Epoch(0, world_size=ranks))
    micro_batches = np.split(plan.rows, plan.offsets[1:-1])
    return [micro_batches[first : first + ranks] for first in range(0, len(micro_batches), ranks)]


def busy(work: np.ndarray) -> float:
    """Return mean / largest work across ranks, averaged over steps."""
    return float((work.mean(1) / work.max(1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16_384, help="budget of a micro-batch")
    arguments = parser.parse_args()
    lengths = log_normal(arguments.documents, 6, 1.2, longest=arguments.tokens).astype(np.int64)
    ranks, tokens = arguments.ranks, arguments.tokens
    torch.manual_seed(0)
    size = round(tokens / lengths.mean())
    sides: dict[str, tuple[bool, Callable[[], Steps]]] = {
        f"random, {size} documents": (True, lambda: in_steps(list(RandomSampler(lengths)), size, ranks)),
        "group_by_length": (
            True,
            lambda: in_steps(list(LengthGroupedSampler(size * ranks, lengths=lengths.tolist())), size, ranks),
        ),
        "batch_rebalance": (True, lambda: rebalanced(lengths, size, ranks)),
        f"BestFit({tokens}), dealt at random": (False, lambda: dealt_at_random(lengths, tokens, ranks)),
        f"TokenBudget({tokens})": (False, lambda: ours(lengths, tokens, ranks)),
    }
    print(machine("hf-packing", "transformers", "torch", "numpy"))
    print(
        f"{len(lengths):,} documents of {lengths.mean():.0f} tokens on average, lognormal(6, 1.2), {ranks} ranks\n\n"
        f"{'':32}{'padding':>9}{'tokens':>9}{'attention':>11}{'largest':>10}{'left out':>10}{'ms/1000':>9}"
    )
    for name, (padded, make) in sides.items():
        began = time.perf_counter()
        steps = make()
        seconds = time.perf_counter() - began
        real, squares = (
            np.array([[int(values[batch].sum()) for batch in step] for step in steps])
            for values in (lengths, lengths**2)
        )
        slots = np.array(
            [[len(b) * int(lengths[b].max()) if padded else int(lengths[b].sum()) for b in s] for s in steps]
        )
        facts = {"padding": 1 - real.sum() / slots.sum(), "token_utilization": busy(real)}
        facts |= {"attention_utilization": busy(squares), "largest": int(slots.max()), "seconds": seconds}
        figure(sampler=name, ranks=ranks, **facts)
        left_out = len(lengths) - sum(len(batch) for step in steps for batch in step)
        print(
            f"{name:32}{1 - real.sum() / slots.sum():>9.1%}{busy(real):>9.3f}{busy(squares):>11.3f}{slots.max():>10,}"
            f"{left_out:>10,}{seconds * 1e6 / len(lengths):>9.2f}"
        )
    print(
        "\ntokens, attention: real tokens, and squared lengths, mean over largest of the ranks, averaged over\n"
        "steps. largest: slots of a micro-batch. left out: documents of the last step that not all ranks have."
    )


if __name__ == "__main__":
    with recorded(__file__):
        main()
