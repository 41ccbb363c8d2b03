"""What the reproductions share: options, data, a small model, CPU time, and tables that are printed and written."""

import argparse
import importlib.metadata
import os
import platform
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

HERE = Path(__file__).parent
TOY_RESULTS = Path("outputs/reproduce")
LINE = 120

WIDE_SHARE, LONGEST, BLOCK = 0.3831637, 1 << 18, 1 << 22
NARROW, WIDE = (6.2047192, 0.8323742), (5.2399588, 1.6609820)
"""Mean and deviation of the logarithms."""


def options(documentation: str, **sizes: Any) -> argparse.ArgumentParser:
    """Return a parser with an option for each size, beside those that all scripts share."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that it runs; its figures mean nothing")
    results = f"folder of the result; default: results beside the script, or {TOY_RESULTS}"
    parser.add_argument("--output", type=Path, help=results)
    for name, size in sizes.items():
        kind, number = (type(size[0]), "+") if isinstance(size, list) else (type(size), None)
        option, default = f"--{name.replace('_', '-')}", f"default: {size}"
        parser.add_argument(option, type=kind, nargs=number, default=size, metavar="N", help=default)
    return parser


def parse(parser: argparse.ArgumentParser, **toy: Any) -> argparse.Namespace:
    """Read the options; with --quick, those that were not given take the values in `toy`."""
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**toy)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # speeds are per CPU second, and threads that wait for each other would count
    arguments.output = arguments.output or (TOY_RESULTS if arguments.quick else HERE / "results")
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments


def shared_file(name: str, source: str) -> Path:
    """Return the path of a file in the folder that HF_PACKING_DATA names, or exit with its source if it is missing."""
    folder = Path(os.environ.get("HF_PACKING_DATA") or HERE.parents[2] / "shared" / "data").resolve()
    if not (folder / name).is_file():
        found = f"expected {name} in {folder}, it is not there. The file is {source}"
        sys.exit(f"{found}; set HF_PACKING_DATA to its folder")
    return folder / name


def refinedweb_like(documents: int) -> np.ndarray:
    """Draw lengths of documents from two log-normals: int32 [documents], tokens.

    They were fitted to Table 1 of arXiv 2407.07495: cut every 2048, 4096, 8192 or 16384 tokens, they have the same
    shares of cut documents as 100 GB of RefinedWeb. Drawn in blocks, to use little more memory than the result.
    """
    rng = np.random.default_rng(0)
    lengths = np.empty(documents, dtype=np.int32)
    for begin in range(0, documents, BLOCK):
        block = lengths[begin : begin + BLOCK]
        wide = rng.random(len(block)) < WIDE_SHARE
        mean, deviation = np.where(wide, WIDE[0], NARROW[0]), np.where(wide, WIDE[1], NARROW[1])
        block[:] = np.clip(np.rint(np.exp(rng.normal(mean, deviation))), 1, LONGEST)
    return lengths


def small_model(architecture: type[PreTrainedModel], hidden: int, layers: int, **settings: Any) -> PreTrainedModel:
    """Return a model to train, with the same random weights at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    return architecture(architecture.config_class(**sizes, **settings)).train()


def chunks(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


class Stopwatch:
    """The CPU seconds of a `with` block; other processes do not add to them."""

    def __enter__(self) -> "Stopwatch":
        self.began = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.began


def processor() -> str:
    """Return the processor's name, as Linux reports it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


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
        versions = [f"{package} {importlib.metadata.version(package)}" for package in ("hf-packing", *packages)]
        cores = f"{os.cpu_count()} cores, torch on {torch.get_num_threads()}"
        self.add(f"{processor()}, {cores}, Python {platform.python_version()}, {', '.join(versions)}")
        self.add(f"# {title}")

    def add(self, part: str) -> None:
        print(part, end="\n\n", flush=True)
        self.parts.append(part)

    def say(self, text: str) -> None:
        """Add paragraphs; line breaks within them are ignored."""
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            self.add(textwrap.fill(words, LINE, break_long_words=False, break_on_hyphens=False))

    def table(self, caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add a section with a table: words in the first column, figures in the others.

        Args:
            columns: the heading of each, and after a colon the format of its values: "padding:.2%".
            rows: the values; None leaves a cell empty.
        """
        header, _, forms = zip(*(column.partition(":") for column in columns), strict=True)
        cells = [
            ["" if value is None else format(value, form) for value, form in zip(row, forms, strict=True)]
            for row in rows
        ]
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        drawn = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in (header, rule, *cells)]
        self.add(f"## {caption}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in drawn))

    def save(self, file: Path) -> None:
        file.write_text("\n\n".join(self.parts) + "\n", encoding="utf-8")
        print(f"written to {file}")
