"""What `tools.size` counts."""

import ast

from tools.size import Size, count_nodes, sizes_of


def test_docstrings_and_line_breaks_are_not_counted():
    plain = "def f(a):\n    return g(a, 1)\n"
    documented = '"""A module."""\ndef f(a):\n    """Say."""\n    return g(\n        a,\n        1,\n    )\n'
    assert count_nodes(ast.parse(plain)) == count_nodes(ast.parse(documented))
    assert count_nodes(ast.parse(plain + 'x = "text"\n')) == count_nodes(ast.parse(plain)) + 4


def test_folders_and_functions_with_a_single_use():
    sources = {
        "hf_packing/__init__.py": "from hf_packing.rows.a import once\n",
        "hf_packing/rows/a.py": "def once(): ...\ndef twice(): ...\ndef __len__(): ...\n",
        "hf_packing/rows/deep/b.py": "once()\ntwice() + twice()\n",
        "tests/test_a.py": "def test_a():\n    once()\n",
    }
    found = sizes_of(sources)
    assert list(found) == ["hf_packing", "hf_packing/rows", "tests"]
    rows = found["hf_packing/rows"]
    assert (rows.files, rows.lines, rows.functions, rows.single_use) == (2, 5, 3, 1)
    assert found["tests"].functions == 1
    assert Size(1, 2, 3, 4, 5) + Size(1, 1, 1, 1, 1) == Size(2, 3, 4, 5, 6)
