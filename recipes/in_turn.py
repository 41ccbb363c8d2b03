"""Train two models in alternating steps, to compare their speed on a machine that may be busy with other things."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEED = "tokens/s" if DEVICE == "cuda" else "tokens per CPU second"


@dataclass
class Side:
    """One of two trainings on the same documents, with the losses and times of its steps."""

    name: str
    model: PreTrainedModel
    batches: Sequence[Sequence[dict]]
    """Rows of each step."""
    collate: Callable[[Sequence[dict]], dict]
    learning_rate: float
    tokens: list[int] = field(default_factory=list)
    """Of each step, without padding."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, weight_decay=0.0)
        self.model.train()

    @property
    def tokens_per_second(self) -> float:
        return float(np.median(np.divide(self.tokens, self.seconds)))

    def step(self, number: int) -> None:
        """Take one optimizer step, collating included."""
        rows = self.batches[number]
        began = now()
        inputs = self.collate(rows)
        inputs = {name: value.to(DEVICE) if hasattr(value, "to") else value for name, value in inputs.items()}
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = self.model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * (1 - number / len(self.batches))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(now() - began)
        self.losses.append(loss.item())
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))


def now() -> float:
    """Return the seconds once the device is done; on a CPU, this process's CPU seconds, which others do not affect."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def in_turn(sides: Sequence[Side]) -> None:
    """Take the steps of all sides in turn, so that whatever else the machine does slows them alike.

    On a CPU, use one thread: on a busy machine, several threads wait for each other in every operation, which slows the
    short operations of packed rows most.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in tqdm(range(len(sides[0].batches)), desc="Training in turn", unit=" steps of each"):
            for side in sides:
                side.step(number)
    finally:
        torch.set_num_threads(threads)


def summary(padded: Side, packed: Side) -> str:
    """Say how much faster packed is, by the median over pairs of steps, which a busy machine hardly changes."""
    ratios = np.divide(padded.seconds, packed.seconds)
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return (
        f"\n{len(padded.batches[0]):,} documents per step, {len(ratios):,} steps of each in turn: "
        f"padded {padded.tokens_per_second:,.0f}, packed {packed.tokens_per_second:,.0f} {SPEED} (medians)\n"
        f"packed {median:.1f} times as fast (median of pairs of steps; half of the pairs: {low:.1f} to {high:.1f})\n"
        f"loss of the last step: padded {padded.losses[-1]:.4f}, packed {packed.losses[-1]:.4f}"
    )
