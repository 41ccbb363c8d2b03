"""Show how large this tree is, folder by folder, beside another revision of it.

    python -m tools.size                # this tree
    python -m tools.size v0.1.0         # and how much it was at v0.1.0
    python -m tools.size --check        # fails if a room of the package is above its budget in size_budgets.toml

Nodes are those of the syntax trees without docstrings, also those of fields, so that dense lines gain nothing. A
function has a single use if its name is read once in the package, imports aside; dunder methods, which Python calls,
are left out.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]

BUDGETS = Path(__file__).with_name("size_budgets.toml")

PACKAGE = "hf_packing"

FOLDERS = (PACKAGE, "recipes", "tests", "tools", "benchmarks")

Sources = dict[str, str]
"""The text of each Python file, by its path."""


@dataclass
class Size:
    """The size of some files."""

    files: int = 0
    lines: int = 0
    nodes: int = 0
    functions: int = 0
    single_use: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


def count_nodes(tree: ast.AST) -> int:
    """Return the number of nodes of a syntax tree, without those of docstrings, also of fields and constants."""
    nodes = [*ast.walk(tree)]
    statements = [node.value for node in nodes if isinstance(node, ast.Expr)]
    docstrings = sum(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in statements)
    return len(nodes) - 2 * docstrings  # an expression, and the constant in it


def names_read(tree: ast.AST) -> Counter[str]:
    """Count how often each name is read in a syntax tree, as a variable or as an attribute."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
    return found


def sizes_of(sources: Sources) -> dict[str, Size]:
    """Return the size of each room of the package, and of each other folder."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    reads = sum((names_read(tree) for path, tree in trees.items() if path.startswith(PACKAGE)), Counter())
    found: dict[str, Size] = {}
    for path, tree in trees.items():
        folder, *rooms = Path(path).parts[:-1]
        room = "/".join([folder, *rooms[:1]]) if folder == PACKAGE else folder
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        once = sum(reads[name] == 1 for name in names if not name.startswith("__"))
        own = Size(1, sources[path].count("\n"), count_nodes(tree), len(names), once if folder == PACKAGE else 0)
        found[room] = found.get(room, Size()) + own
    return found


def sources_here() -> Sources:
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def sources_at(revision: str) -> Sources:
    command = ["git", "-C", str(ROOT), "archive", revision, "--", *FOLDERS]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [member for member in files if member.name.endswith(".py")]
        return {member.name: files.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


def above_budgets(sizes: dict[str, Size], budgets: dict[str, int]) -> list[str]:
    """Return a line for each room of the package with more nodes than its budget, which is 0 if it has none."""
    nodes = {room: size.nodes for room, size in sizes.items() if room.startswith(PACKAGE)}
    return [
        f"{room}: expected at most {budgets.get(room, 0):,} nodes, got {number:,}"
        for room, number in nodes.items()
        if number > budgets.get(room, 0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="another revision, as git names it")
    parser.add_argument("--check", action="store_true", help="fail if a room is above its budget")
    arguments = parser.parse_args()
    revision = arguments.revision
    here = sizes_of(sources_here())
    if arguments.check:
        if above := above_budgets(here, tomllib.loads(BUDGETS.read_text("utf-8"))):
            sys.exit("\n".join([*above, "make the room smaller, or raise its budget in tools/size_budgets.toml"]))
        return
    there = sizes_of(sources_at(revision)) if revision else {}
    table = Table("folder", box=None, pad_edge=False)
    for heading in ("files", "lines", "nodes", "functions", "single use"):
        table.add_column(heading, justify="right")

    def add(name: str, own: Size, before: Size) -> None:
        pairs = zip(astuple(own), astuple(before), strict=True)
        table.add_row(name, *(f"{new:,} ({old:,})" if revision else f"{new:,}" for new, old in pairs))

    def total(sizes: dict[str, Size]) -> Size:
        return sum((size for room, size in sizes.items() if room.startswith(PACKAGE)), Size())

    rooms = sorted({*here, *there}, key=lambda room: (not room.startswith(PACKAGE), room))
    for room in rooms:
        if not room.startswith(PACKAGE):
            continue
        add(room if room != PACKAGE else f"{PACKAGE}, top level", here.get(room, Size()), there.get(room, Size()))
    add(f"{PACKAGE}, all", total(here), total(there))
    for room in rooms:
        if not room.startswith(PACKAGE):
            add(room, here.get(room, Size()), there.get(room, Size()))
    if revision:
        table.title = f"this tree (in brackets: {revision})"
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
