"""Write benchmarks/README.md from the results: what was measured, by which command, on which machine.

python benchmarks/write_readme.py
"""

import ast
import json
import shlex
from pathlib import Path

from measure import RESULTS

HERE = Path(__file__).parent
HEAD = """# Benchmarks

`make bench` runs them and writes `results/*.json` and this page, except for `gpu.py`, which runs [all that needs a
GPU](../docs/guides/gpus.md). To run one, call `python benchmarks/NAME.py`, with `--save` to keep its result. Both sides
of a comparison run in turn in one process on the same data; ratios are medians over the rounds, with the smallest and
the largest. Machines are noisy: trust ratios, not seconds.
"""


def section(result: dict) -> str:
    """Return one benchmark's heading, purpose, command, machine and figures."""
    printed = "\n".join(line.rstrip() for line in result["printed"]).strip("\n")
    about = result.get("about") or about_script(HERE.parent / shlex.split(result["command"])[1])
    return "\n\n".join([f"## {result['benchmark']}", *about, f"`{result['command']}`", f"```\n{printed}\n```"])


def about_script(script: Path) -> list[str]:
    """Return the paragraphs of a script's docstring, without that of its command."""
    paragraphs = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")
    return [paragraph for paragraph in paragraphs if not paragraph.startswith("python ")]


def page() -> str:
    """Return the whole page, with benchmarks in alphabetical order."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    return "\n\n".join([HEAD.rstrip(), *map(section, results)]) + "\n"


if __name__ == "__main__":
    (HERE / "README.md").write_text(page())
