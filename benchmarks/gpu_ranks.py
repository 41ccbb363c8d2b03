"""The part of gpu.py that puts one long document on two cards, and on one, in processes that torchrun starts."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from gpu_part import DEVICE, GIB, CannotRunError, Results, Scale, now, peak, reason_of, reset_peak
from gpu_training import new_model, quiet, settings
from two_ranks import steps_on

RANKS = 2
LONGER = 4
"""The document has so many times the tokens of a step of the other parts."""
STEPS = 3
MOST_ROUNDS = 3


def run(results: Results, scale: Scale) -> None:
    """Start the processes of both sides in turn."""
    cards = torch.cuda.device_count()
    if DEVICE.type == "cuda" and cards < RANKS:
        raise CannotRunError(f"needs {RANKS} cards; this machine has {cards}")
    tokens = LONGER * scale.tokens
    results.found["settings"] = f"{settings(scale)}, with gradient checkpointing"
    names = {"one card": 1, "two cards": RANKS}
    title = f"one document of {tokens:,} tokens"
    found = results.comparison(title, reference="one card")
    deadline = time.monotonic() + scale.seconds
    for number in range(MOST_ROUNDS):
        if number and time.monotonic() > deadline:
            break
        for name, ranks in names.items():
            entry = found["sides"].setdefault(name, {"seconds": [], "tokens": [], "gibibytes": 0.0})
            try:
                step = processes(results.file, ranks)
            except subprocess.CalledProcessError as error:
                entry["not_run"] = f"{reason_of(error)}; see the log"
                continue
            entry["seconds"] += step["seconds"]
            entry["tokens"] += [tokens] * len(step["seconds"])
            entry["gibibytes"] = max(entry["gibibytes"], step["gibibytes"])
            print(f"{title}, {name}: {entry['seconds'][-1]:.2f} s a step", flush=True)
            results.save()


def processes(file: Path, ranks: int) -> dict[str, Any]:
    """Run one side on so many processes, called as this one is, and return what the first one has found."""
    of_ranks = file.with_name(f"{file.stem}-{ranks}.json")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    subprocess.run([sys.executable, *torchrun, *sys.argv, "--ranks", str(ranks)], check=True)
    found: dict[str, Any] = json.loads(of_ranks.read_text())
    return found


def run_rank(file: Path, scale: Scale, ranks: int) -> None:
    """Run one side on this process, which is one of those that torchrun has started."""
    quiet()
    accelerator = Accelerator(cpu=DEVICE.type == "cpu")
    model = new_model(scale)
    model.gradient_checkpointing_enable()
    before = reset_peak()
    seconds = steps_on(accelerator, model, LONGER * scale.tokens, ranks, STEPS, now)
    taken = torch.tensor([float(peak() - before)], device=accelerator.device)
    found = {"seconds": seconds, "gibibytes": accelerator.gather(taken).max().item() / GIB}
    if accelerator.is_main_process:
        file.with_name(f"{file.stem}-{ranks}.json").write_text(json.dumps(found))
    gc.collect()  # a DDP model that outlives its group of processes hangs
    accelerator.end_training()
