"""Print docstrings and error messages of the package, drawn at random, for a reader who does not know the code.

    python -m tools.sample_texts --seed 7                         # 100 docstrings, 60 errors
    python -m tools.sample_texts --docstrings 20 --errors 0

The reader notes every text that has to be read twice. If the code is unchanged, the same seed draws the same texts.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "hf_packing"

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Text(NamedTuple):
    """A docstring or a message, and its place in the package."""

    place: str
    text: str


def docstrings(file: Path) -> Iterator[Text]:
    """Yield the docstrings of a module and of the classes and functions in the module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            name = "" if isinstance(node, ast.Module) else f": {node.name}"
            yield Text(f"{_shown(file)}{name}", text)


def errors(file: Path) -> Iterator[Text]:
    """Yield the messages of the errors that a file raises, with {expressions} in place of values."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = _literal(node.exc.args[0])
            if " " in text.strip():
                yield Text(f"{_shown(file)}:{node.lineno}", text)


def _shown(file: Path) -> str:
    return file.relative_to(PACKAGE.parent).as_posix()


def _literal(node: ast.expr) -> str:
    """Return the text of a message, with the source code of inserted values in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return ""


def draw(texts: list[Text], number: int, seed: int) -> list[Text]:
    """Return `number` texts in random order, or all texts if fewer exist."""
    return random.Random(seed).sample(texts, min(number, len(texts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docstrings", type=int, default=100, metavar="NUMBER")
    parser.add_argument("--errors", type=int, default=60, metavar="NUMBER")
    given = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    for kind, number in ((docstrings, given.docstrings), (errors, given.errors)):
        found = [text for file in files for text in kind(file)]
        print(f"# {number} of {len(found)} {kind.__name__}\n")
        for place, text in draw(found, number, given.seed):
            print(f"## {place}\n\n{text}\n")


if __name__ == "__main__":
    main()
