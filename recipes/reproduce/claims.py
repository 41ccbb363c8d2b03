"""The claims of arXiv 2407.09105 about its methods, and whether they hold for what was trained here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common import yes_or_no
from epoch import Outcome
from methods import MINI_BATCH, MULTIPACK, PADDING, RANDOM, SORTED, WITH, WITHOUT

Outcomes = Mapping[str, Outcome]
"""By method."""
Judge = Callable[[Outcomes], str]

MORE_STEPS = f"{MULTIPACK}, 1 pack a step"
SORTED_IN_STEPS, RANDOM_IN_STEPS = (f"{name}, steps of multipack" for name in (SORTED, RANDOM))
AHEAD = (WITH, MULTIPACK, SORTED, RANDOM)
"""Methods that pack ahead, with position ids."""
AHEAD_IN_STEPS = (WITH, MULTIPACK, RANDOM_IN_STEPS)
"""The same with as many steps as multipack, sorted packing left out."""
EQUAL = 0.01
"""Losses that differ by less count as equal; another order of the documents changes them by about as much."""
MOST = 0.5
"""Closing more than this share of a gap is closing most of it."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper."""

    text: str
    paper: str
    """The paper's figures, for Mistral-7B on FLAN."""
    judge: Judge
    """Whether it holds, and the figures that say so."""


def faster(fast: Sequence[str], slow: str) -> Judge:
    def judge(found: Outcomes) -> str:
        ratio = sum(found[name].speed for name in fast) / len(fast) / found[slow].speed
        return f"{yes_or_no(ratio > 1)}: {ratio:.2f} times"

    return judge


def lower(low: Sequence[str], high: Sequence[str], *, training: bool = False) -> Judge:
    """Judge whether all losses of `low` are below all losses of `high`."""

    def judge(found: Outcomes) -> str:
        losses = {name: each.training_loss if training else each.validation_loss for name, each in found.items()}
        highest, lowest = max(losses[name] for name in low), min(losses[name] for name in high)
        verdict = "equal" if abs(highest - lowest) < EQUAL else yes_or_no(highest < lowest)
        return f"{verdict}: {highest:.3f}, {lowest:.3f}"

    return judge


def equal(one: str, other: str) -> Judge:
    def judge(found: Outcomes) -> str:
        losses = found[one].validation_loss, found[other].validation_loss
        return f"{yes_or_no(abs(losses[0] - losses[1]) < EQUAL)}: {losses[0]:.3f}, {losses[1]:.3f}"

    return judge


def closes_most_of_the_gap(found: Outcomes) -> str:
    best, few, many = (found[name].validation_loss for name in (MINI_BATCH, MULTIPACK, MORE_STEPS))
    closed = (few - many) / (few - best)
    return f"{yes_or_no(closed > MOST)}: {few:.3f} to {many:.3f}, {closed:.0%} of the gap"


def others_than(name: str) -> list[str]:
    return [each for each in AHEAD if each != name]


CLAIMS = (
    Claim("minibatch is faster than padding", "1.90 times", faster([MINI_BATCH], PADDING)),
    Claim("packing ahead is faster than minibatch", "2.14 times", faster(AHEAD, MINI_BATCH)),
    Claim("validation loss: minibatch = padding", "equal", equal(MINI_BATCH, PADDING)),
    Claim("validation loss: minibatch < packed ahead", "lower", lower([MINI_BATCH], AHEAD)),
    Claim("validation loss: packed ahead < without PosID", "lower", lower(AHEAD, [WITHOUT])),
    Claim("more steps close most of that gap", "1.215 to 1.153", closes_most_of_the_gap),
    Claim("sorted: lowest training loss", "lowest", lower([SORTED], others_than(SORTED), training=True)),
    Claim("the same, in as many steps", "", lower([SORTED_IN_STEPS], AHEAD_IN_STEPS, training=True)),
    Claim("sorted: highest validation loss", "highest", lower(others_than(SORTED), [SORTED])),
    Claim("the same, in as many steps", "", lower(AHEAD_IN_STEPS, [SORTED_IN_STEPS])),
    Claim("validation loss: random packing = multipack", "equal", equal(RANDOM, MULTIPACK)),
    Claim("the same, in as many steps", "", equal(RANDOM_IN_STEPS, MULTIPACK)),
)


def verdicts(outcomes: Mapping[str, Outcomes]) -> list[list[str]]:
    """Return a line for each claim: its text, the paper's figures, and whether it holds on each set."""
    return [[claim.text, claim.paper, *(claim.judge(found) for found in outcomes.values())] for claim in CLAIMS]
