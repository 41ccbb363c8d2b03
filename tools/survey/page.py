"""Write the measurements of all architectures as a page of Markdown."""

import re
from collections.abc import Sequence
from statistics import median

from tools.survey.measure import EXACT, Measured

COMMAND = "python -m tools.survey"

TITLES = {"causal": "Causal language models", "masked": "Masked language models"}

_HEAD = ("architecture", "stock", "route", "by segment", "packed", "logits", "gradients", "why no faster one")


def page(results: Sequence[Measured], versions: str) -> str:
    """Return the whole of docs/SUPPORTED_MODELS.md."""
    lines = ["# Supported models", "", *_summary(results, versions)]
    for kind, title in TITLES.items():
        own = sorted((each for each in results if each.kind == kind), key=lambda each: each.name)
        lines += _table(title, _HEAD, [_cells(each) for each in own if each.route])
        refused = [
            [each.name, each.stock, _one_line(each.reason, 400)] for each in own if each.built and not each.route
        ]
        lines += _table(f"Refused: {title.lower()}", ("architecture", "stock", "reason"), refused)
        absent = [[each.name, _one_line(each.reason, 160)] for each in own if not each.built]
        lines += _table(f"Not measured: {title.lower()}", ("architecture", "why no tiny model could be built"), absent)
    return "\n".join(lines) + "\n"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a section, or no lines if there are no rows."""
    return ["", f"## {title}", "", *map(_row, [head, ["---"] * len(head), *rows])] if rows else []


def _summary(results: Sequence[Measured], versions: str) -> list[str]:
    taken = [each for each in results if each.route]
    counts = {kind: sum(each.kind == kind and each.exact for each in taken) for kind in TITLES}
    built = {kind: sum(each.kind == kind and each.built for each in results) for kind in TITLES}
    varlen = sum(each.route == "varlen" for each in taken)
    shares = [each.packed_share for each in taken if each.route != "varlen"]
    isolated = sum(each.stock == "isolated" for each in results)
    lines = [
        f"Made by `{COMMAND}` with {versions}, on CPU: a tiny",
        "random float32 model of every architecture, built from its configuration class alone, and of some variants.",
        "`patch_model` finds its route on the model in hand in the same way; this page decides nothing.",
        "",
        f"Exact when patched, however fed: {counts['causal']} of {built['causal']} causal and {counts['masked']} of "
        f"{built['masked']} masked. That is: logits within",
        f"{EXACT:g} of those of the documents alone, no logit changed by more when another document is, and gradients",
        f"of all parameters within {EXACT:g} of the largest; more only where rounding alone was measured to make more",
        f"{_exceptions(taken)}. {varlen} take the `varlen` route alone.",
    ]
    if shares:
        lines += [f"Of the other {len(shares)}, the median keeps {median(shares):.0%} of its parameters packed."]
    unproven = [f"{each.name} ({_one_line(each.unproven, 160)})" for each in taken if each.unproven]
    which = f"all but {', '.join(unproven)}" if unproven else "all of them"
    lines += [f"Proven in training mode as well, dropout off: {which}."]
    return [*lines, f"Stock, as a training loop calls them, {isolated} of {sum(built.values())} keep documents apart."]


def _exceptions(taken: Sequence[Measured]) -> str:
    """Name the models that are exact only because rounding explains more, with their figures."""
    figures = {each.name: max(each.change, each.difference, each.gradient) for each in taken if each.exact}
    beyond = [f"{name} {figure:.0e}" for name, figure in figures.items() if figure > EXACT]
    return f"({', '.join(beyond) or 'nowhere'})"


def _cells(each: Measured) -> list[str]:
    modules = ", ".join(f"{number} {kind}" for kind, number in each.modules.items())
    why = _one_line(each.reason, 160) if each.route != "varlen" else ""
    figures = [f"{each.packed_share:.0%}", f"{max(each.difference, each.change):.0e}", f"{each.gradient:.0e}"]
    return [each.name, each.stock, each.route, modules, *figures, why]


def _one_line(text: str, longest: int) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
    return text if len(text) <= longest else text[: longest - 3].rstrip() + "..."


def _row(items: Sequence[str]) -> str:
    return f"| {' | '.join(items)} |"
