"""Functions of the Python standard library as data for the recipes: questions about them, and what they are for."""

import ast
import textwrap

import datasets

Function = ast.FunctionDef | ast.AsyncFunctionDef


def questions(functions: datasets.Dataset) -> datasets.Dataset:
    """Return a question about every second function's arguments, and about what the others return, as rows of SQuAD.

    The answer is a part of the function's source. Functions without arguments, or with none or several returned values,
    are left out.

    Args:
        functions: sources in the column text.
    """
    rows = []
    for number, text in enumerate(functions["text"]):
        source, node = parse(text)
        asked = () if node is None else _arguments(node) if number % 2 else _returned(node)
        if asked:
            first, last = asked
            start, end = (
                _place(source, first.lineno, first.col_offset),
                _place(source, last.end_lineno, last.end_col_offset),
            )
            question = f"Which arguments does {node.name} take?" if number % 2 else f"What does {node.name} return?"
            answers = {"text": [source[start:end]], "answer_start": [start]}
            rows.append({"question": question, "context": source, "answers": answers})
    return datasets.Dataset.from_list(rows)


def described(functions: datasets.Dataset) -> datasets.Dataset:
    """Return the first line of every docstring as anchor, and the function without its docstring as positive.

    Args:
        functions: sources in the column text.
    """
    rows = []
    for text in functions["text"]:
        source, node = parse(text)
        summary = ((node and ast.get_docstring(node)) or "").split("\n")[0].strip()
        if summary and len(node.body) > 1 and node.body[0].lineno > node.lineno:
            lines = source.split("\n")
            docstring = node.body[0]
            del lines[docstring.lineno - 1 : docstring.end_lineno]
            rows.append({"anchor": summary, "positive": "\n".join(lines)})
    return datasets.Dataset.from_list(rows)


def parse(text: str) -> tuple[str, Function | None]:
    """Return a function's source without its indentation, and its syntax tree; None for one that cannot be moved."""
    source = textwrap.dedent(text)
    try:
        return source, ast.parse(source).body[0]
    except SyntaxError:  # a string inside it begins further left
        return source, None


def _arguments(node: Function) -> tuple[ast.AST, ...]:
    """Return the first and the last part of the arguments, or nothing if there are none or some with stars."""
    given = node.args
    parts = [*given.posonlyargs, *given.args, *given.kwonlyargs, *given.defaults, *filter(None, given.kw_defaults)]
    if given.vararg or given.kwarg or not parts:
        return ()
    return min(parts, key=_begin), max(parts, key=_begin)


def _begin(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _returned(node: Function) -> tuple[ast.AST, ...]:
    """Return the only value that the function returns, twice, or nothing if there is none or more than one."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    values, nodes = [], list(node.body)
    while nodes:
        each = nodes.pop()
        if isinstance(each, ast.Return) and each.value is not None:
            values.append(each.value)
        if not isinstance(each, inner):
            nodes.extend(ast.iter_child_nodes(each))
    return (values[0], values[0]) if len(values) == 1 else ()


def _place(source: str, line: int, byte: int) -> int:
    """Return the number of the character at a byte of a line, as ast counts them, lines from 1."""
    lines = source.split("\n")
    return sum(len(each) + 1 for each in lines[: line - 1]) + len(lines[line - 1].encode()[:byte].decode())
