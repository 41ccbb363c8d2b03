"""Level rollouts: rows that a trainer has sampled change places, so that all ranks work until the end of each step.

GRPOTrainer and RLOOTrainer sample for several micro-batches at a time, and keep these in a buffer. Each rank would
train on what it has sampled, and wait for the rank with the longest answers. Here, the rows of an optimizer step are
gathered from all ranks, and divided again: as many rows as before in each micro-batch, of about equal work. So sums and
means over the rows of a step stay what they are. A loss that is a mean over the tokens of a micro-batch does not, such
as "bnpo": known ones are refused, and for others, the loss of a step of the first rollouts is computed with and without
the exchange.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from hf_packing.attention import inner_model
from hf_packing.checks import expect
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, IntArray
from hf_packing.sampling.fill import mean_over_max
from hf_packing.sampling.token_budget import linear_cost_of
from hf_packing.training.losses import Batch
from hf_packing.training.ranks import data_rank, on_all_ranks
from hf_packing.training.step_cases import runner_of
from hf_packing.upstream.trl import ROLLOUTS

_SIDES = "prompt", "completion"
"""What the names of masks begin with. The first of them is also the beginning of everything that is of prompts."""

_MOST = 1e-3
"""The most by which the loss of a step may change, as a share of the losses of its micro-batches; in 16 bits, rounding
changes it by more."""
_MOST_IN_16_BITS = 1e-2

_NOTHING, _UNEVEN = 1e-5, 1.1
"""A step shows nothing whose losses are smaller on average, or whose micro-batches have numbers of tokens that differ
by less than this factor."""

_WITHOUT_MEANS = {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
"""Arguments of TRL, with the value without which a loss has a mean or a quantile over the tokens of micro-batches."""


def check_can_level(trainer: Any) -> None:
    """Raise PackingError if a trainer samples no rows, or has a loss that is known to depend on their micro-batches.

    What is not known, the first rollouts show.
    """
    if not hasattr(trainer, ROLLOUTS):
        expect(False, f"for {type(trainer).__name__}, which samples no rows", level=True)
    if data_rank(trainer.accelerator).world_size < trainer.accelerator.num_processes:
        expect(False, "with tensor parallelism, whose ranks sample the same rows", level=True)
    for name, value in _WITHOUT_MEANS.items():
        of_tokens = "with level=True, since the loss would depend on which rows share a micro-batch"
        expect(value, of_tokens, **{name: getattr(trainer.args, name, value)})
    if getattr(trainer.args, "loss_type", None) == "bnpo":
        raise PackingError(
            "loss_type: expected a mean over rows, or over the tokens of a step, such as 'dapo', with level=True, got "
            "'bnpo', a mean over the tokens of each micro-batch"
        )


def divide(cost: Array, rounds: int, ranks: int) -> IntArray:
    """Divide rows among micro-batches of equally many rows, of about equal cost.

    The costliest rows come first, and each goes into the micro-batch with the least cost that has room. Micro-batches
    of about the same cost run at the same time.

    Args:
        cost: numbers [rows]: the cost of each row.
        rounds: the number of micro-batches of a rank.
        ranks: the number of ranks; rounds x ranks divides the number of rows.

    Returns:
        int64 [rounds, ranks, rows of a micro-batch]: the rows of each micro-batch.

    Example:
        >>> divide(np.array([9, 1, 4, 4, 5, 5, 8, 2]), rounds=2, ranks=2).tolist()
        [[[0, 1], [6, 7]], [[5, 3], [4, 2]]]
    """
    size = len(cost) // (rounds * ranks)
    rows: list[list[int]] = [[] for _ in range(rounds * ranks)]
    open_ones = [(0.0, number) for number in range(len(rows))]
    for row in np.argsort(-cost, kind="stable").tolist():
        total, number = heapq.heappop(open_ones)
        rows[number].append(row)
        if len(rows[number]) < size:
            heapq.heappush(open_ones, (total + float(cost[row]), number))
    divided = np.array(rows)
    by_cost = np.argsort(-cost[divided].sum(1), kind="stable")
    places: IntArray = divided[by_cost].reshape(rounds, ranks, size)
    places[1::2] = places[1::2, ::-1]  # no rank has the costliest one in every round
    return places


@dataclass
class Leveling:
    """The exchange of rows of a trainer that samples, and what it has gained."""

    trainer: Any
    is_proven: bool = False
    """Whether the loss of a step was computed with and without the exchange, and is the same."""
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """Of the steps since the trainer last logged: the share of the time in which ranks work, without the exchange and
    with it; and the tokens of the largest micro-batch."""

    def level(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches of a rollout, with rows of all ranks exchanged within each optimizer step.

        Raises:
            PackingError: a micro-batch has what is not of single rows, such as pictures; or the loss of the trainer
                depends on which rows share a micro-batch.
        """
        accelerator, steps = self.trainer.accelerator, self.trainer.args.gradient_accumulation_steps
        on_all_ranks(lambda _: _check(batches))
        size, leveled = gcd(len(batches), steps), list[Batch]()
        for first in range(0, len(batches), size):
            own = batches[first : first + size]
            rows = _rows_of_all_ranks(own, accelerator)
            tokens = sum(rows[f"{side}_mask"].sum(1) for side in _SIDES).cpu().numpy()
            cost = tokens * linear_cost_of(inner_model(self.trainer.model).config) + tokens.astype(np.float64) ** 2
            places = divide(cost, size, accelerator.num_processes)
            before = np.arange(len(cost)).reshape(accelerator.num_processes, size, -1).swapaxes(0, 1)
            busy, sampled = (mean_over_max(work, work) for work in (cost[places].sum(2), cost[before].sum(2)))
            self.steps.append((sampled, busy, tokens[places].sum(2).max()))
            mine = places[:, accelerator.process_index]
            made = [{**batch, **_chosen(rows, each)} for batch, each in zip(own, mine, strict=True)]
            if not self.is_proven:
                self._prove(own, made)
            leveled += made
        return leveled

    def _prove(self, before: Sequence[Batch], after: Sequence[Batch]) -> None:
        """Raise PackingError unless the loss of a step is the same, once it shows whether it is."""
        trainer = self.trainer
        model, kind = trainer.model_wrapped, trainer.attached.kind
        runner = runner_of(trainer, model)
        with runner.undisturbed(True), torch.no_grad(), trainer.compute_loss_context_manager():
            losses = [
                [kind.compute_loss(trainer, model, dict(each)) for each in batches] for batches in (before, after)
            ]
        of_ranks = trainer.accelerator.gather(torch.stack([torch.stack(each).float() for each in losses])[None])
        one, other = of_ranks.transpose(0, 1).flatten(1).double()
        scale = float(max(one.abs().sum(), other.abs().sum()))
        # losses that are rounding of 0, as of whole groups, show nothing, and neither do rows of equal length
        own = torch.tensor([[float(batch["completion_mask"].sum()) for batch in (*before, *after)]])
        tokens = trainer.accelerator.gather(own.to(one.device))
        if scale < _NOTHING * one.numel() or tokens.max() < _UNEVEN * tokens.min():
            return
        most = _MOST if runner.dtype in (torch.float32, torch.float64) else _MOST_IN_16_BITS
        if float((one.sum() - other.sum()).abs()) > most * scale:
            raise PackingError(
                f"level: expected a loss that does not depend on which rows share a micro-batch, but that of "
                f"{kind.__name__} is {one.mean():.6g} as rows were sampled, and {other.mean():.6g} after the exchange. "
                "Choose a mean over rows, or over the tokens of a whole step, such as loss_type='dapo', or leave level "
                "out"
            )
        self.is_proven = True

    def take(self) -> dict[str, float]:
        """Return what the exchange has gained in the steps since the last call, by the names in the logs."""
        if not self.steps:
            return {}
        before, after, largest = zip(*self.steps, strict=True)
        self.steps.clear()
        return {
            "utilization_as_sampled": float(np.mean(before)),
            "utilization": float(np.mean(after)),
            "largest_micro_batch": float(max(largest)),
        }


def _side_of(name: str) -> str:
    return _SIDES[not name.startswith(_SIDES[0])]


def _check(batches: Sequence[Batch]) -> None:
    """Raise PackingError unless everything in micro-batches is a number, or is of single rows and of their tokens."""
    for batch in batches:
        shapes = {side: np.shape(batch[f"{side}_mask"]) for side in _SIDES if f"{side}_mask" in batch}
        for name, value in batch.items():
            of_tokens = shapes.get(_side_of(name))
            if of_tokens is None or (
                np.ndim(value) and getattr(value, "shape", ())[:2] not in (of_tokens, of_tokens[:1])
            ):
                raise PackingError(
                    f"level: expected rollouts of texts, with prompt_mask and completion_mask, in which everything "
                    f"belongs to a row, got {name!r}, which does not; pictures cannot change places"
                )


def _rows_of_all_ranks(batches: Sequence[Batch], accelerator: Accelerator) -> dict[str, Any]:
    """Return what each row of some micro-batches of all ranks has, [rows, ...], rank by rank, padded to the longest."""
    rows = {}
    for name in batches[0]:
        if np.ndim(batches[0][name]):
            own, is_prompt = torch.cat([batch[name] for batch in batches]), _side_of(name) == _SIDES[0]
            if own.ndim > 1:  # prompts are padded on the left
                own = accelerator.pad_across_processes(own, dim=1, pad_first=is_prompt)
            rows[name] = accelerator.gather(own.contiguous())
    return rows


def _chosen(rows: Batch, places: Any) -> Batch:
    """Return the rows at some places, no wider than they need."""
    chosen = {name: values[torch.from_numpy(places).to(values.device)] for name, values in rows.items()}
    used = {side: chosen[f"{side}_mask"].any(0).nonzero()[:, 0].tolist() or [0] for side in _SIDES}
    kept = {_SIDES[0]: slice(used[_SIDES[0]][0], None), _SIDES[1]: slice(used[_SIDES[1]][-1] + 1)}
    return {name: each[:, kept[_side_of(name)]] if each.ndim > 1 else each for name, each in chosen.items()}
