"""Benchmarks that train, attend or need trainers run at toy size; the figures mean nothing there."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

TOY = {
    "attention.py": (["--rounds", "1", "--shrink", "16", "--no-memory"], "sdpa with mask"),
    "samplers.py": (["--documents", "3000", "--ranks", "2"], "TokenBudget(16384)"),
    "by_segment.py": (
        ["--steps", "2", "--documents", "4", "--max-length", "32", "--sample", "200"],
        "Jamba: route: varlen",
    ),
    "training.py": (
        ["--documents", "40", "--max-length", "512", "--longest", "256", "--hidden", "64", "--layers", "1"]
        + ["--rounds", "1", "--steps", "1"],
        "times as fast as TRL packing",
    ),
    "startup.py": (["--documents", "300", "--tokens", "512", "--rounds", "1"], "hf_packing: TokenBudget is"),
    "gpu_train.py": (
        ["--tokens", "256", "--row", "64", "--hidden", "128", "--layers", "2", "--vocabulary", "256", "--steps", "2"],
        "ideal",
    ),
}


@pytest.mark.parametrize("script", TOY)
def test_runs(script):
    options, expected = TOY[script]
    done = subprocess.run([sys.executable, BENCHMARKS / script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
