"""Running training_process.py on one or more processes, and reading what they wrote."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import training_process

HANGS = 1800
"""Seconds after which processes are taken to hang, also on a busy machine."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
IN_THE_FAMILY = Path(__file__).parent


def run(folder, runs, ranks, fails=False):
    """Do runs of training_process.py, one after the other, on so many processes.

    Args:
        folder: for results, in a folder for each run.
        runs: settings by name.
        ranks: processes.
        fails: whether the processes are expected to fail, as when they are killed.
    """
    for settings in runs.values():
        assert settings.keys() <= training_process.SETTINGS.keys(), settings
    return launch("training_process.py", folder, json.dumps(runs), ranks=ranks, fails=fails)


def launch(script, folder, *arguments, ranks, fails=False):
    """Run a script of this folder on so many processes; its folder for results is made where it does not exist."""
    folder.mkdir(exist_ok=True)
    arguments = [str(IN_THE_FAMILY / script), str(folder), *arguments]
    paths = [str(IN_THE_FAMILY), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    known |= {"HF_DATASETS_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    start = [sys.executable, *(TORCHRUN + [str(ranks)] if ranks > 1 else []), *arguments]
    done = subprocess.run(start, env=os.environ | known, capture_output=True, text=True, timeout=HANGS, check=False)
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def read(folder, kind, rank):
    return [json.loads(line) for line in (folder / f"{kind}-{rank}.jsonl").read_text().splitlines()]


def losses(folder, rank=0):
    """By optimizer step; the latest where a step was trained twice."""
    return {line["step"]: line["loss"] for line in read(folder, "losses", rank)}


def logged(folder, rank):
    """Everything that a trainer logs with the loss, by optimizer step."""
    return {line["step"]: line for line in read(folder, "logged", rank)}


def epochs_seen(folder, ranks):
    """For each epoch, how often each document was trained on, over all ranks, and the order of the first rank."""
    counts, orders = {}, {}
    for rank in range(ranks):
        for line in read(folder, "seen", rank):
            documents = [tuple(tokens) for tokens, trained in line["documents"] if trained]
            counts.setdefault(line["epoch"], Counter()).update(documents)
            if rank == 0:
                orders.setdefault(line["epoch"], []).extend(documents)
    return counts, orders


def steps_of(folder, rank):
    return [line["step"] for line in read(folder, "seen", rank)]
