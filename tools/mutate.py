"""Change random lines of the package, one line at a time, and see whether the tests fail.

    python -m tools.mutate                                 # 20 lines, the fast tests
    python -m tools.mutate --number 5 --seed 3 --paths planning sampling/fill.py
    python -m tools.mutate --paths planning --command "python -m pytest -x -q -n 0 tests/planning"

The repository is copied to a temporary folder; nothing is changed in place. If a change survives, either no test checks
that line or the change makes no difference: read the line and decide. Messages, annotations and assertions stay as they
are.
"""

import argparse
import ast
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_packing"

CORE = (
    *("planning", "strategies", "data", "arrow", "dataset.py", "cache.py", "collate.py", "sampling"),
    *("attention", "training"),
)
"""Parts of the package that are mutated by default, if they exist."""

LEFT_ALONE = ("tiny_model.py",)
"""Files that are not mutated, since they hold tables of sizes, where most other values would work as well."""

COMMAND = "python -m pytest -x -q -m 'not slow and not survey'"

_NOT_COPIED = (".git", ".venv", "__pycache__", "outputs", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis")

_OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("//",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
}
"""The text of every operator, and the operators that replace it."""

_REPORTS = ("warn", "warning", "info", "debug", "write", "print", "tqdm", "cast", "TypeVar", "NewType")
"""Names of functions whose arguments are messages or types, and are not changed."""


@dataclass(frozen=True)
class Mutation:
    """A change to a file: `replacement` replaces the bytes start:end."""

    path: Path
    line: int
    kind: str
    start: int
    end: int
    replacement: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement + source[self.end :]

    def lines(self, source: bytes) -> tuple[str, str]:
        """Return the changed line, before and after."""
        before = source.splitlines()[self.line - 1]
        after = self.apply(source).splitlines()[self.line - 1]
        return before.decode().strip(), after.decode().strip()


class _Finder(ast.NodeVisitor):
    """Collects the mutations of one file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path = path
        self.source = source
        self.found: list[Mutation] = []
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._returns: list[str] = []

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def _add(self, kind: str, start: int, end: int, replacement: bytes) -> None:
        line = self.source.count(b"\n", 0, start) + 1
        self.found.append(Mutation(self.path, line, kind, start, end, replacement))

    def _swap_operator(self, kind: str, left: ast.AST, operator: ast.AST, right: ast.AST) -> None:
        if type(operator) not in _OPERATORS:
            return
        was, others = _OPERATORS[type(operator)]
        start, end = self._span(left)[1], self._span(right)[0]
        between = self.source[start:end]
        pattern = rb"\s+".join(re.escape(part).encode() for part in was.split())
        match = re.search(pattern, between)
        if match and b"#" not in between:
            for other in others:
                self._add(kind, start + match.start(), start + match.end(), other.encode())

    def _wrap(self, kind: str, node: ast.AST, before: str, after: str) -> None:
        start, end = self._span(node)
        self._add(kind, start, end, before.encode() + self.source[start:end] + after.encode())

    # Nodes that are not changed.

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave errors unchanged, since mutations of the condition around an error already test the error."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions unchanged, since assertions are for type checkers and readers."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave formatted text unchanged."""

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        is_text = node.name in ("__repr__", "__str__", "_repr_html_", "__dir__")
        if is_text or any(ast.unparse(each).endswith("overload") for each in node.decorator_list):
            return
        self._returns.append(ast.unparse(node.returns) if node.returns else "")
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._returns.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # Nodes that are changed.

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._swap_operator("comparison", left, operator, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(_is_sequence(each) for each in (node.left, node.right)):
            self._swap_operator("arithmetic", node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if len(node.values) == 2:
            self._swap_operator("condition", node.values[0], node.op, node.values[1])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_sequence(node.value):
            self._swap_operator("arithmetic", node.target, node.op, node.value)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add("constant", start, end, str(not node.value).encode())
        elif isinstance(node.value, int):
            self._add("constant", start, end, str(node.value + 1).encode())

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "__name__ == '__main__'"):
            self._wrap("condition", node.test, "not (", ")")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._wrap("condition", node.test, "not (", ")")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        returns = self._returns[-1] if self._returns else ""
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value in (None, True, False)):
            pass
        elif returns == "bool":
            self._wrap("return", node.value, "not (", ")")
        elif returns in ("int", "float"):
            self._wrap("return", node.value, "(", ") + 1")
        else:
            self._add("return", *self._span(node.value), b"None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _name_of(node.value) not in _REPORTS:
            self._add("statement", *self._span(node), b"pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _name_of(node) in _REPORTS:
            return
        arguments = sorted([*node.args, *(each.value for each in node.keywords)], key=self._span)
        for keyword in node.keywords:
            if keyword.arg:
                self._drop(keyword, keyword.value, arguments)
        if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
            self._drop(node.args[-1], node.args[-1], arguments)
        self.generic_visit(node)

    def _drop(self, argument: ast.AST, value: ast.expr, arguments: list[ast.expr]) -> None:
        """Add a mutation that removes an argument with the comma before it. A first argument is left as it is."""
        number = arguments.index(value)
        start, end = self._span(argument)
        if number == 0:
            return
        comma = self.source.rfind(b",", self._span(arguments[number - 1])[1], start)
        if comma >= 0 and b"#" not in self.source[comma:start] and b"\n" not in self.source[comma:end]:
            self._add("argument", comma, end, b"")


def _is_sequence(node: ast.AST) -> bool:
    """Return whether a node is a text, list or tuple, for which + means concatenation."""
    kinds = (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr)
    return isinstance(node, kinds) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def find_mutations(path: Path, source: bytes) -> list[Mutation]:
    """Return all mutations of a file."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


def draw_mutations(root: Path, paths: list[str], seed: int) -> Iterator[Mutation]:
    """Yield mutations in a random order, at most one for each line."""
    by_line: dict[tuple[Path, int], list[Mutation]] = {}
    for name in paths:
        place = root / PACKAGE / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if file.name not in LEFT_ALONE:
                for mutation in find_mutations(file.relative_to(root), file.read_bytes()):
                    by_line.setdefault((mutation.path, mutation.line), []).append(mutation)
    generator = random.Random(seed)
    lines = list(by_line.values())
    generator.shuffle(lines)
    return (generator.choice(each) for each in lines)


class Copy:
    """A copy of the repository, in which commands are run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / root.name
        shutil.copytree(root, self.root, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        data = root.parent / "shared" / "data"
        self._environment = {"HF_PACKING_DATA": str(data)} if data.is_dir() else {}
        self._environment |= os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, command: list[str], timeout: float | None = None) -> tuple[bool, str]:
        """Run a command; return whether the command succeeded, and its output. A timeout kills child processes too."""
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return False, f"no end after {timeout:.0f} s"
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return process.returncode == 0, output

    def imports(self, mutation: Mutation) -> bool:
        module = ".".join(mutation.path.with_suffix("").parts)
        return self.run([sys.executable, "-c", f"import {module}"])[0]


def run_mutations(root: Path, number: int, seed: int, paths: list[str], command: str, console: Console) -> int:
    """Run a command once for each mutation; return the number of mutations that survive.

    Raises:
        RuntimeError: the command fails without a mutation.
    """
    words = shlex.split(command)
    words[0] = sys.executable if words[0] == "python" else words[0]
    caught = 0
    survivors: list[Mutation] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(root, Path(folder))
        begin = time.monotonic()
        passes, output = copy.run(words)
        timeout = 120 + 10 * (time.monotonic() - begin)
        if not passes:
            raise RuntimeError(f"the command fails without a mutation:\n{output[-4000:]}")
        console.print(f"without a mutation: the command passes in {time.monotonic() - begin:.0f} s")
        for mutation in draw_mutations(root, paths, seed):
            if caught + len(survivors) == number:
                break
            file, source = copy.root / mutation.path, (root / mutation.path).read_bytes()
            file.write_bytes(mutation.apply(source))
            if copy.imports(mutation):
                begin = time.monotonic()
                passes, output = copy.run(words, timeout)
                if passes:
                    survivors.append(mutation)
                caught += not passes
                count = f"{caught + len(survivors)}/{number}"
                result = "[red]survived[/red]" if passes else "[green]caught[/green]"
                console.print(f"{count} {result} in {time.monotonic() - begin:.0f} s", end=": ")
                _print_mutation(console, mutation, source)
                if not passes:
                    _print_first_failure(console, output)
            file.write_bytes(source)
    console.print(f"caught {caught} of {caught + len(survivors)}")
    if survivors:
        console.print("survived:")
        for mutation in survivors:
            _print_mutation(console, mutation, (root / mutation.path).read_bytes())
    return len(survivors)


def _print_mutation(console: Console, mutation: Mutation, source: bytes) -> None:
    before, after = mutation.lines(source)
    text = f"{mutation.path}:{mutation.line} ({mutation.kind})\n    - {before}\n    + {after}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_first_failure(console: Console, output: str) -> None:
    failed = re.search(r"(?m)^(FAILED|ERROR) .*|^no end after .*", output)
    if failed:
        console.print(f"    {failed[0]}", markup=False, highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--number", type=int, default=20, help="number of mutations to run; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed that selects the mutations; default: %(default)s")
    parser.add_argument("--command", default=COMMAND, help="command to run for each mutation; default: %(default)s")
    parser.add_argument("--paths", nargs="+", help=f"files and folders in {PACKAGE}/; default: {' '.join(CORE)}")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository; default: this repository")
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    paths = given.paths or [name for name in CORE if (root / PACKAGE / name).exists()]
    for name in paths:
        if not (root / PACKAGE / name).exists():
            parser.error(f"--paths: expected files and folders of {root / PACKAGE}, got {name}")
    run_mutations(root, given.number, given.seed, paths, given.command, Console())


if __name__ == "__main__":
    main()
