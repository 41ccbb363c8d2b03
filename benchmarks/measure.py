"""What the benchmarks share: how they measure, how they describe the machine, and where they save results."""

import importlib.metadata
import io
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

figures: list[dict[str, Any]] = []
"""What this run has measured, for the file of its result."""


def figure(**facts: Any) -> None:
    """Keep a measured figure for the result file."""
    figures.append(facts)


@contextmanager
def recorded(script: str, named: str | None = None) -> Iterator[None]:
    """With --save on the command line, write what is printed and measured to results as JSON; remove the flag.

    Args:
        script: the benchmark's __file__.
        named: what the file of the result is called, if not as the script.
    """
    save = "--save" in sys.argv
    if not save:
        yield
        return
    sys.argv.remove("--save")
    printed = Copy(sys.stdout)
    with redirect_stdout(printed):
        yield
    name = named or Path(script).stem
    result = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]]),
        **facts_of_this_machine(),
        "printed": printed.getvalue().splitlines(),
        "figures": figures,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1, default=float) + "\n")


def facts_of_this_machine() -> dict[str, Any]:
    """Return the processor, and the versions of Python and of the packages that are installed."""
    versions = {}
    for name in VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    facts = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    return {**facts, "versions": versions}


VERSIONS = ("hf-packing", "torch", "transformers", "trl", "accelerate", "flash-attn", "datasets", "numpy", "pyarrow")


class Copy(io.StringIO):
    """Keep what is written, and pass it on.

    Args:
        other: where it also goes.
    """

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def write(self, text: str) -> int:
        self.other.write(text)
        return super().write(text)

    def flush(self) -> None:
        self.other.flush()


def processor() -> str:
    """Return the processor's name, as Linux reports it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def machine(*packages: str) -> str:
    """Hardware and versions, as one line for the top of a result."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def in_turn(
    sides: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time each side in seconds; every round calls all sides in turn, so that drift affects them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            began = clock()
            call()
            seconds[name].append(clock() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> str:
    """Return the median of the ratios round by round, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
