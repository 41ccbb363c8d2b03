"""Level rows: rows of an optimizer step change places between ranks, so that all ranks work until its end.

GRPOTrainer and RLOOTrainer sample for several micro-batches at a time, and keep these in a buffer. Each rank would
train on what it has sampled, and wait for the rank with the longest answers. Here, the rows of an optimizer step are
gathered from all ranks, and divided again: as many rows as before in each micro-batch, of about equal work. So sums and
means over the rows of a step stay what they are. KTOTrainer also has a mean over the rows that run at the same time, so
its rows only change ranks. A loss that is a mean over the tokens of a micro-batch does change, such as "bnpo": known
ones are refused, and for others, the loss of a step is computed with and without the exchange.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_packing.attention import inner_model
from hf_packing.checks import expect
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, IntArray
from hf_packing.sampling.fill import mean_over_max
from hf_packing.sampling.token_budget import linear_cost_of
from hf_packing.training.losses import Batch
from hf_packing.training.ranks import data_rank, on_all_ranks
from hf_packing.training.step import is_due_again
from hf_packing.training.step_cases import runner_of
from hf_packing.upstream.trl import ROLLOUTS, takes_unpaired_rows

_MOST = 1e-3
"""The most by which the loss of a step may change, as a share of the losses of its micro-batches; in 16 bits, rounding
changes it by more."""
_MOST_IN_16_BITS = 1e-2

_NOTHING, _UNEVEN = 1e-5, 1.1
"""A step shows nothing whose losses are smaller on average, or whose micro-batches have numbers of tokens that differ
by less than this factor."""

_WITHOUT_MEANS = {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
"""Arguments of TRL, with the value without which a loss has a mean or a quantile over the tokens of micro-batches."""


class _Side(NamedTuple):
    """Tokens of each row: what their names begin with, their mask, on which side they are padded, and their sequence.

    Tokens of the same sequence follow each other.
    """

    begins: str
    mask: str
    is_padded_left: bool = False
    sequence: int = 0


_SAMPLED = _Side("prompt", "prompt_mask", is_padded_left=True), _Side("", "completion_mask")
_UNPAIRED = _Side("KL_", "KL_attention_mask", sequence=1), _Side("", "attention_mask")
_WORK_OF_SEQUENCE = 1.0, 0.5
"""How much work the tokens of each sequence are: the second one runs forward only, and the first one backward, too."""


def check_can_level(trainer: Any) -> None:
    """Raise PackingError if rows of a trainer cannot change places, or its loss is known to depend on their places.

    What is not known, the first steps show.
    """
    if not (hasattr(trainer, ROLLOUTS) or takes_unpaired_rows(trainer)):
        expect(False, f"for {type(trainer).__name__}, which samples no rows, and is no KTOTrainer", level=True)
    if data_rank(trainer.accelerator).world_size < trainer.accelerator.num_processes:
        expect(False, "with tensor parallelism, whose ranks have the same rows", level=True)
    of_micro_batch = "with level=True, since the loss would depend on which rows share a micro-batch"
    for name, value in _WITHOUT_MEANS.items():
        expect(value, of_micro_batch, **{name: getattr(trainer.args, name, value)})
    if getattr(trainer, "aux_loss_enabled", False):
        expect(0.0, of_micro_batch, router_aux_loss_coef=trainer.router_aux_loss_coef)
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
    """The exchange of rows between the ranks of a trainer, and what it has gained."""

    trainer: Any
    proven_after: int | None = None
    """The number of optimizer steps after which the loss was last computed with and without the exchange, and was the
    same; None if it was not yet."""
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """Of the steps since the trainer last logged: the share of the time in which ranks work, without the exchange and
    with it; and the tokens of the largest micro-batch."""

    @property
    def samples(self) -> bool:
        """Return whether the trainer samples its rows."""
        return hasattr(self.trainer, ROLLOUTS)

    def level(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches of this rank, with rows of all ranks exchanged within each optimizer step.

        Raises:
            PackingError: a micro-batch has what is not of single rows, such as pictures; or the loss of the trainer
                depends on which rows share a micro-batch.
        """
        sides = _SAMPLED if self.samples else _UNPAIRED
        on_all_ranks(lambda _: _check(batches, sides))
        size = gcd(len(batches), self.trainer.args.gradient_accumulation_steps) if self.samples else 1
        leveled = [self._exchanged(batches[first : first + size], sides) for first in range(0, len(batches), size)]
        return [batch for each in leveled for batch in each]

    def _exchanged(self, own: Sequence[Batch], sides: Sequence[_Side]) -> list[Batch]:
        """Return micro-batches after their rows have changed places between them and those of other ranks."""
        accelerator = self.trainer.accelerator
        ranks = accelerator.num_processes
        rows = {}  # of all ranks, [rows, ...]
        for name in own[0]:
            if np.ndim(own[0][name]):
                values = torch.cat([batch[name] for batch in own])
                if values.ndim > 1:
                    left = _side_of(name, sides).is_padded_left
                    values = accelerator.pad_across_processes(values, dim=1, pad_first=left)
                rows[name] = accelerator.gather(values.contiguous())
        tokens = np.zeros((2, len(next(iter(rows.values())))), np.int64)
        for side in sides:
            if side.mask in rows:
                tokens[side.sequence] += rows[side.mask].sum(1).cpu().numpy()
        work = tokens * linear_cost_of(inner_model(self.trainer.model).config) + tokens.astype(np.float64) ** 2
        cost = np.array(_WORK_OF_SEQUENCE) @ work
        places = divide(cost, len(own), ranks)
        before = np.arange(len(cost)).reshape(ranks, len(own), -1).swapaxes(0, 1)
        busy, without = (mean_over_max(each, each) for each in (cost[places].sum(2), cost[before].sum(2)))
        self.steps.append((without, busy, tokens.sum(0)[places].sum(2).max()))
        mine = places[:, accelerator.process_index]
        made: list[Batch] = [{**batch, **_chosen(rows, each, sides)} for batch, each in zip(own, mine, strict=True)]
        if self.proven_after is None or is_due_again(self.trainer.state.global_step, self.proven_after):
            self._prove(own, made)
        return made

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
                f"{kind.__name__} is {one.mean():.6g} as rows were, and {other.mean():.6g} after the exchange. "
                "Choose a mean over rows, or over the tokens of a whole step, such as loss_type='dapo', or leave level "
                "out"
            )
        self.proven_after = trainer.state.global_step

    def take(self) -> dict[str, float]:
        """Return what the exchange has gained in the steps since the last call, by the names in the logs."""
        if not self.steps:
            return {}
        before, after, largest = zip(*self.steps, strict=True)
        self.steps.clear()
        return {
            "utilization_without_level": float(np.mean(before)),
            "utilization": float(np.mean(after)),
            "largest_micro_batch": float(max(largest)),
        }


def _side_of(name: str, sides: Sequence[_Side]) -> _Side:
    return next(side for side in sides if name.startswith(side.begins))


def _check(batches: Sequence[Batch], sides: Sequence[_Side]) -> None:
    """Raise PackingError unless everything in micro-batches is a number, or is of single rows and of their tokens."""
    for batch in batches:
        for name, value in batch.items():
            of_tokens = np.shape(batch.get(_side_of(name, sides).mask, 0))
            if np.ndim(value) and (not of_tokens or getattr(value, "shape", ())[:2] not in (of_tokens, of_tokens[:1])):
                raise PackingError(
                    f"level: expected micro-batches of texts, with {' and '.join(each.mask for each in sides)}, where "
                    f"all else is tensors of rows or of their tokens, got {name!r}, which is not; pictures cannot "
                    "change places"
                )


def _chosen(rows: Batch, places: Any, sides: Sequence[_Side]) -> Batch:
    """Return the rows at some places, no wider than they need."""
    chosen = {name: values[torch.from_numpy(places).to(values.device)] for name, values in rows.items()}
    used = {side: chosen[side.mask].any(0).nonzero()[:, 0].tolist() or [0] for side in sides if side.mask in chosen}
    kept = {side: slice(columns[0], columns[-1] + 1) for side, columns in used.items()}
    return {name: each[:, kept[_side_of(name, sides)]] if each.ndim > 1 else each for name, each in chosen.items()}
