"""The page of supported models, and comparisons of what it says with what was measured."""

import re
from pathlib import Path

import transformers

from tools.survey.measure import EXACT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "SUPPORTED_MODELS.md").read_text()
IS_CURRENT = f"transformers {transformers.__version__} " in PAGE


def masked(reason: str) -> str:
    """A reason without its numbers, which processors round differently, and without what follows from a set's order."""
    return re.sub(r"KeyError: '\w+'", "KeyError", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", reason))


def same_reason(one: str, other: str) -> bool:
    """Whether two reasons are the same but for numbers, which may shift where a long one is cut."""
    if one.endswith("...") and other.endswith("..."):
        one, other = masked(one[:-10]), masked(other[:-10])
        shorter = min(len(one), len(other))
        return one[:shorter] == other[:shorter]
    return masked(one) == masked(other)


def same_figure(one: str, other: str) -> bool:
    """Whether two figures are of about the same size, as far as processors round alike."""
    sizes = [max(float(each), 1e-6) for each in (one, other)]
    return max(sizes) <= 100 * min(sizes) and (sizes[0] > EXACT) == (sizes[1] > EXACT)
