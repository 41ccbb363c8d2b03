"""What the benchmarks share: how a figure is taken, and what it was taken on."""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable


def machine(*packages: str) -> str:
    """Hardware and versions, as one line for the top of a result."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def in_turn(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, the sides called one after the other in every round so that drift hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> str:
    """Median of the ratios round by round, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
