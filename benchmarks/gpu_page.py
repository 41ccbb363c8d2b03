"""The page of gpu.py, and the lines that it prints at the end: both are made from the JSON alone."""

import statistics
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape
from measure import ratio

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape())
DRY = "A dry run: the figures mean nothing. A tiny model and stand-ins for kernels ran on the CPU, to try the code."
TITLES = {
    "tests": "Tests of the kernels",
    "training": "Training",
    "trees": "Documents that share prefixes",
    "ranks": "One document on two cards",
    "kernels": "Attention kernels",
}
"""The parts in the order of the page."""


def page(result: dict[str, Any]) -> str:
    """Return the page of a result, one HTML file that loads nothing."""
    return TEMPLATES.get_template("gpu_page.html").render(
        dry=DRY if result["dry_run"] else "",
        title=title_of(result),
        facts=facts_of(result),
        headlines=headlines(result),
        groups=bars(result),
        tests=tests_line(result["parts"]["tests"]),
        tables={name: tables(result["parts"][name]) for name in ("training", "trees", "ranks")},
        kernels=kernel_table(result["parts"]["kernels"]),
        titles=TITLES,
        **result,
    )


def summary(result: dict[str, Any]) -> list[str]:
    """Return what is printed, line by line."""
    lines = [DRY] if result["dry_run"] else []
    lines += [title_of(result), facts_of(result)]
    for name, title in TITLES.items():
        part = result["parts"][name]
        lines += ["", title + (f": {why}" if (why := trouble(part)) else "")]
        if name == "tests" and "collected" in part:
            lines += [tests_line(part), *(f"  {test}: {why}" for test, why in part["failed"].items())]
        elif name == "kernels":
            table = kernel_table(part)
            lines += text_table(["ms", *table["titles"], "error"], table["rows"]) if table else []
            lines += left_out_lines(table)
        elif name != "tests":
            for table in tables(part):
                lines += text_table([table["title"], *table["columns"]], table["rows"]) + left_out_lines(table)
    return lines


def left_out_lines(table: dict[str, Any]) -> list[str]:
    return [f"  {name}: {why}" for name, why in table.get("left_out", {}).items()]


def title_of(result: dict[str, Any]) -> str:
    names = [card["name"] for card in result["cards"]]
    if result["dry_run"]:
        return "hf_packing, a dry run"
    return f"hf_packing on {f'{len(names)} x ' if len(names) > 1 else ''}{names[0]}"


def facts_of(result: dict[str, Any]) -> str:
    cards = [f"{card['gibibytes']:.0f} GiB, CUDA {card['cuda']}" for card in result["cards"][:1]]
    versions = [f"{name} {version}" for name, version in result["versions"].items()]
    return ", ".join([result["date"], *cards, result["processor"], f"Python {result['python']}", *versions])


def trouble(part: dict[str, Any]) -> str:
    return str(part.get("not_run") or part.get("stopped") or "")


def ran(entry: dict[str, Any]) -> bool:
    return bool(entry.get("seconds"))


def speed(entry: dict[str, Any]) -> float:
    return sum(entry["tokens"]) / sum(entry["seconds"])


def times_as_fast(entry: dict[str, Any], other: dict[str, Any]) -> str:
    """Return by how much a side is faster per token than another, as the median and range of the rounds."""
    each = [[s / t for s, t in zip(side["seconds"], side["tokens"], strict=True)] for side in (other, entry)]
    rounds = min(map(len, each))
    return ratio(*(times[:rounds] for times in each))


def reference_of(comparison: dict[str, Any]) -> str:
    """Return the side that others are compared with: the one that was meant, or else the first that ran."""
    sides = [name for name, entry in comparison["sides"].items() if ran(entry)]
    return comparison["reference"] if comparison["reference"] in sides else (sides or [""])[0]


def tables(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of a part that trains, one for each comparison, without empty columns."""
    found = []
    for title, comparison in part.get("comparisons", {}).items():
        reference = reference_of(comparison)
        cells = {name: cells_of(name, entry, comparison) for name, entry in comparison["sides"].items() if ran(entry)}
        columns = [column for column in COLUMNS if any(each[column] for each in cells.values())]
        found.append(
            {
                "title": title,
                "columns": [f"{column} as {reference}" if column == FASTER else column for column in columns],
                "rows": [[name, *(each[column] for column in columns)] for name, each in cells.items()],
                "left_out": reasons(comparison),
            }
        )
    return found


FASTER = "times as fast"
COLUMNS = ("tokens/s", FASTER, "filled", "GiB", "attention")


def cells_of(name: str, entry: dict[str, Any], comparison: dict[str, Any]) -> dict[str, str]:
    """Return what a table says of a side, by column."""
    reference, step_tokens = reference_of(comparison), comparison.get("step_tokens")
    return {
        "tokens/s": f"{speed(entry):,.0f}",
        FASTER: "1" if name == reference else times_as_fast(entry, comparison["sides"][reference]),
        "filled": f"{statistics.mean(entry['tokens']) / step_tokens:.0%}" if step_tokens else "",
        "GiB": f"{entry['gibibytes']:.1f}",
        "attention": entry.get("kernel", ""),
    }


def reasons(comparison: dict[str, Any]) -> dict[str, str]:
    return {name: entry["not_run"] for name, entry in comparison["sides"].items() if "not_run" in entry}


def kernel_table(part: dict[str, Any]) -> dict[str, Any]:
    """Return one table of all rows: milliseconds, and the largest error of each kernel."""
    comparisons = part.get("comparisons", {})
    if not comparisons:
        return {}
    names = list(dict.fromkeys(name for each in comparisons.values() for name in each["sides"]))
    rows, left_out = [], {}
    for name in names:
        entries = [each["sides"].get(name, {}) for each in comparisons.values()]
        why = {entry["not_run"] for entry in entries if "not_run" in entry}
        if why:
            left_out[name] = "; ".join(sorted(why))
        if any(map(ran, entries)):
            error = max(entry["error"] for entry in entries if "error" in entry)
            times = [f"{statistics.median(entry['seconds']) * 1e3:.2f}" if ran(entry) else "" for entry in entries]
            rows.append([name, *times, f"{error:.1%}"])
    return {"titles": list(comparisons), "rows": rows, "left_out": left_out}


def tests_line(part: dict[str, Any]) -> str:
    """Return how many tests passed, failed and were skipped."""
    if "collected" not in part:
        return ""
    skipped = sum(part["skipped"].values())
    done = part["passed"] + len(part["failed"]) + skipped
    left = f", {part['collected'] - done} not reached" if done < part["collected"] else ""
    line = f"{part['passed']} of {part['collected']} passed, {len(part['failed'])} failed, {skipped} skipped{left}"
    return "; ".join([line, *(f"{number} skipped: {reason}" for reason, number in part["skipped"].items())])


def headlines(result: dict[str, Any]) -> list[str]:
    """Return what a reader should know first, one sentence for each part that ran."""
    parts, found = result["parts"], []
    if line := tests_line(parts["tests"]):
        found.append(f"Tests: {line.partition(';')[0]}.")
    for comparison in parts["training"].get("comparisons", {}).values():
        sides = comparison["sides"]
        others = [name for name in sides if ran(sides[name]) and name.startswith(("padding", "TRL"))]
        if ran(sides.get("hf_packing", {})) and others:
            times = [f"{times_as_fast(sides['hf_packing'], sides[name])} times as fast as {name}" for name in others]
            found.append(f"Training with hf_packing is {', '.join(times)}.")
    for title, comparison in parts["trees"].get("comparisons", {}).items():
        packed, trees = (comparison["sides"].get(name, {}) for name in ("packed", "trees"))
        if ran(packed) and ran(trees):
            fewer = f"with {comparison['fewer']:.1f} times fewer tokens"
            found.append(f"{title.capitalize()}: trees are {times_as_fast(trees, packed)} times as fast, {fewer}.")
    for title, comparison in parts["ranks"].get("comparisons", {}).items():
        one, two = (comparison["sides"].get(name, {}) for name in ("one card", "two cards"))
        if ran(one) and ran(two):
            memory = f"{two['gibibytes'] / one['gibibytes']:.2f} of the memory"
            found.append(
                f"{title.capitalize()} on two cards: {times_as_fast(two, one)} times as fast, {memory} a card."
            )
    return found


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bars of the picture, in groups: tokens of documents a second, and their share of the longest bar."""
    groups = [
        {"title": title, "bars": [(name, speed(each)) for name, each in comparison["sides"].items() if ran(each)]}
        for part in ("training", "trees", "ranks")
        for title, comparison in result["parts"][part].get("comparisons", {}).items()
    ]
    most = max((value for group in groups for _, value in group["bars"]), default=1)
    return [
        {
            "title": group["title"],
            "bars": [(name, f"{value:,.0f}", 100 * value / most) for name, value in group["bars"]],
        }
        for group in groups
        if group["bars"]
    ]


def text_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table as lines; the first column is on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]
