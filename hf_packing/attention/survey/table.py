"""What was measured of all architectures, as a page of Markdown."""

import re
from collections.abc import Sequence
from statistics import median

from hf_packing.attention.survey.measure import EXACT, Measured

COMMAND = "python -m hf_packing.attention.survey"

KINDS = {"causal": "Causal language models", "masked": "Masked language models"}

HEAD = ("architecture", "stock", "route", "by segment", "packed", "logits", "gradients", "why no faster one")


def page(results: Sequence[Measured], versions: str) -> str:
    """The whole of docs/SUPPORTED_MODELS.md."""
    lines = ["# Supported models", "", *summary(results, versions)]
    for kind, title in KINDS.items():
        own = sorted((each for each in results if each.kind == kind), key=lambda each: each.name)
        lines += table(title, HEAD, [cells(each) for each in own if each.route])
        refused = [[each.name, each.stock, one_line(each.reason, 400)] for each in own if each.built and not each.route]
        lines += table(f"Refused: {title.lower()}", ("architecture", "stock", "reason"), refused)
        absent = [[each.name, one_line(each.reason, 160)] for each in own if not each.built]
        lines += table(f"Not measured: {title.lower()}", ("architecture", "why no tiny model could be built"), absent)
    return "\n".join(lines) + "\n"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Nothing at all where there is no row."""
    return ["", f"## {title}", "", *map(row, [head, ["---"] * len(head), *rows])] if rows else []


def summary(results: Sequence[Measured], versions: str) -> list[str]:
    taken = [each for each in results if each.route]
    counts = {kind: sum(each.kind == kind and each.exact for each in taken) for kind in KINDS}
    built = {kind: sum(each.kind == kind and each.built for each in results) for kind in KINDS}
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
        f"{exceptions(taken)}. {varlen} take the `varlen` route alone.",
    ]
    if shares:
        lines += [f"Of the other {len(shares)}, the median keeps {median(shares):.0%} of its parameters packed."]
    unproven = [f"{each.name} ({one_line(each.unproven, 160)})" for each in taken if each.unproven]
    which = f"all but {', '.join(unproven)}" if unproven else "all of them"
    lines += [f"Proven in training mode as well, dropout off: {which}."]
    return [*lines, f"Stock, as a training loop calls them, {isolated} of {sum(built.values())} keep documents apart."]


def exceptions(taken: Sequence[Measured]) -> str:
    """Which ones were exact only in that sense."""
    figures = {each.name: max(each.change, each.difference, each.gradient) for each in taken if each.exact}
    beyond = [f"{name} {figure:.0e}" for name, figure in figures.items() if figure > EXACT]
    return f"({', '.join(beyond) or 'nowhere'})"


def cells(each: Measured) -> list[str]:
    modules = ", ".join(f"{number} {kind}" for kind, number in each.modules.items())
    why = one_line(each.reason, 160) if each.route != "varlen" else ""
    figures = [f"{each.packed_share:.0%}", f"{max(each.difference, each.change):.0e}", f"{each.gradient:.0e}"]
    return [each.name, each.stock, each.route, modules, *figures, why]


def one_line(text: str, longest: int) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
    return text if len(text) <= longest else text[: longest - 3].rstrip() + "..."


def row(items: Sequence[str]) -> str:
    return f"| {' | '.join(items)} |"
