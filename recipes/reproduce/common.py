"""What the reproductions share: their options, the data they read, and tables that are printed and written."""

import argparse
import importlib.metadata
import os
import platform
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from hardware import processor

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LINE = 120
TOY_RESULTS = Path("outputs/reproduce")


def options(documentation: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts share; each script adds its own."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs; its figures mean nothing")
    parser.add_argument(
        "--output", type=Path, help=f"folder of the result; default: results beside the script, or {TOY_RESULTS}"
    )
    return parser


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Read the options; with --quick, those that were not given take the values in `quick`."""
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # speeds are per CPU second, and threads that wait for each other would count
    arguments.output = arguments.output or (TOY_RESULTS if arguments.quick else RESULTS)
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments


def shared_file(name: str, source: str) -> Path:
    """Return the path of a file in the folder that HF_PACKING_DATA names, or exit if it is not there.

    Args:
        name: of the file.
        source: what the file is and where it comes from, for the message if it is missing.
    """
    folder = Path(os.environ.get("HF_PACKING_DATA") or HERE.parents[2] / "shared" / "data")
    if not (folder / name).is_file():
        sys.exit(
            f"expected {name} in {folder.resolve()}, it is not there. The file is {source}; set HF_PACKING_DATA to its "
            "folder"
        )
    return folder / name


def machine(*packages: str) -> str:
    """Hardware and versions, as one line for the top of a result."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    cores = f"{os.cpu_count()} cores, torch on {torch.get_num_threads()}"
    return f"{processor()}, {cores}, Python {platform.python_version()}, {versions}"


def yes_or_no(holds: bool) -> str:
    return "yes" if holds else "no"


class Report:
    """Print text and tables as they come, and save them as a Markdown file with hardware and versions on top.

    Args:
        title: of the paper, with its arXiv number.
        packages: whose versions matter.
    """

    def __init__(self, title: str, *packages: str) -> None:
        self.parts: list[str] = []
        self.add(machine("hf-packing", *packages))
        self.add(f"# {title}")

    def say(self, text: str) -> None:
        """Add a paragraph; line breaks in the text are ignored."""
        self.add(textwrap.fill(" ".join(text.split()), LINE, break_long_words=False, break_on_hyphens=False))

    def add(self, part: str) -> None:
        print(part, end="\n\n", flush=True)
        self.parts.append(part)

    def table(self, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a section with a table: words in the first column, figures in the others."""
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        drawn = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in (header, rule, *rows)]
        self.add(f"## {caption}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in drawn))

    def save(self, file: Path) -> None:
        file.write_text("\n\n".join(self.parts) + "\n", encoding="utf-8")
        print(f"written to {file}")
