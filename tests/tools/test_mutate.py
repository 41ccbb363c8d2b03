"""Mutations change what a program does, one line of it, and leave text alone."""

import ast
from pathlib import Path

import pytest
from rich.console import Console

from tools import mutate

FILE = Path("hf_packing/planning/some.py")


def mutated(source: str) -> set[tuple[str, str]]:
    """The kind of every mutation, and the changed line after it."""
    code = source.encode()
    return {(each.kind, each.lines(code)[1]) for each in mutate.find_mutations(FILE, code)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {("comparison", "x = a <= b"), ("comparison", "x = a >= b")}),
        ("x = (a) is not (b)", {("comparison", "x = (a) is (b)")}),
        ("x = a not  in b", {("comparison", "x = a in b")}),
        ("x = (a + b) * c", {("arithmetic", "x = (a - b) * c"), ("arithmetic", "x = (a + b) // c")}),
        ("x = 'ä' + str(a - b)", {("arithmetic", "x = 'ä' + str(a + b)")}),
        ("x -= y", {("arithmetic", "x += y")}),
        ("x = y[7]", {("constant", "x = y[8]")}),
        ("x = True", {("constant", "x = False")}),
        ("if a: x = b", {("condition", "if not (a): x = b")}),
        ("x = a if b else c", {("condition", "x = a if not (b) else c")}),
        ("x = a and b", {("condition", "x = a or b")}),
        ("f(a)", {("statement", "pass")}),
        ("x = f(a, b, c=d)", {("argument", "x = f(a, c=d)"), ("argument", "x = f(a, b)")}),
        ("def f(): return x", {("return", "def f(): return None")}),
        ("def f() -> bool: return x", {("return", "def f() -> bool: return not (x)")}),
        ("def f() -> int: return x", {("return", "def f() -> int: return (x) + 1")}),
    ],
)
def test_kinds_of_mutations(source, expected):
    assert mutated(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Of 3 > 2."""',
        "import a",
        "x: Literal[1, 2]",
        "def f(a: Literal[1, 2]) -> Literal[3]: ...",
        "raise ValueError(f'{a + b}: {1}', 2)",
        "assert a > 1",
        "x = f'{a + 1}'",
        "warnings.warn(f(1, 2), stacklevel=2)",
        "x = [*a] + [*b]",
        "x = 'a' + b",
        "def __repr__(self): return str(a + 1)",
        "@dataclass(frozen=True)\nclass A: ...",
        "if TYPE_CHECKING:\n    x = 1",
        "def f(): return None",
    ],
)
def test_what_is_left_alone(source):
    assert mutated(source) == set()


@pytest.mark.slow
def test_each_changes_one_place_and_is_another_program():
    file = mutate.ROOT / "hf_packing" / "collate.py"
    source = file.read_bytes()
    found = mutate.find_mutations(FILE, source)
    assert len({each.kind for each in found}) >= 5
    for each in found:
        before, after = each.lines(source)
        assert before != after
        assert each.apply(source) != source
        assert ast.dump(ast.parse(each.apply(source))) != ast.dump(ast.parse(source))


def test_the_same_order_for_a_seed_and_at_most_one_for_a_line():
    orders = [list(mutate.draw_mutations(mutate.ROOT, ["collate.py", "sampling"], seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert len({(each.path, each.line) for each in orders[0]}) == len(orders[0]) > 100


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    folder = root / "hf_packing" / "planning"
    folder.mkdir(parents=True)
    (root / "hf_packing" / "__init__.py").touch()
    (folder / "some.py").write_text("def f(a):\n    return a + 1\n\n\ndef unused(a):\n    return a\n")
    (root / "check.py").write_text("from hf_packing.planning.some import f\nassert f(2) == 3\n")
    return root


def test_mutations_are_run_in_a_copy(tree):
    console = Console(record=True, width=200)
    before = (tree / "hf_packing" / "planning" / "some.py").read_text()
    survived = mutate.run_mutations(tree, 9, 0, ["planning"], "python check.py", console)
    text = console.export_text()
    assert survived == 1
    assert "caught 1 of 2" in text
    survivors = text.partition("survived:\n")[2]
    assert "some.py:6 (return)" in survivors
    assert "+ return None" in survivors
    assert (tree / "hf_packing" / "planning" / "some.py").read_text() == before


def test_a_mutant_that_does_not_import_is_not_run(tree):
    (tree / "hf_packing" / "planning" / "some.py").write_text("x = {1: 'a'}[1]\n")
    (tree / "check.py").write_text("")
    console = Console(record=True, width=200)
    assert mutate.run_mutations(tree, 9, 0, ["planning"], "python check.py", console) == 0
    assert "caught 0 of 0" in console.export_text()


def test_a_command_that_fails_by_itself(tree):
    (tree / "check.py").write_text("raise SystemExit('it is broken')")
    with pytest.raises(RuntimeError, match="it is broken"):
        mutate.run_mutations(tree, 1, 0, ["planning"], "python check.py", Console(record=True))


def test_a_command_that_does_not_end_counts_as_caught(tree, tmp_path):
    copy = mutate.Copy(tree, tmp_path / "copy")
    assert copy.run(["sleep", "600"], timeout=0.2) == (False, "no end after 0 s")


def test_arguments(capsys):
    with pytest.raises(SystemExit):
        mutate.main(["--paths", "nowhere"])
    assert "--paths: expected files and folders of" in capsys.readouterr().err
