"""Running scripts on one or more processes, and reading what they wrote.

Processes are forked from a server that has imported torch and transformers, since importing them takes longer than most
of what the processes do.
"""

import gc
import inspect
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

HANGS = 600
"""Seconds after which processes are taken to hang, also on a busy machine."""

IN_THE_FAMILY = Path(__file__).parent
RECIPES = IN_THE_FAMILY.parents[1] / "recipes"

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch.distributed", "torch.nn.parallel", "transformers.trainer", "trl.trainer.sft_trainer", "peft"]
    + [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")]
)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_script(script, *arguments, ranks=1, cwd=None, **variables):
    """Run a Python script on so many processes, as torchrun does: if one fails, the others are stopped."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        known = {**os.environ, **variables}
        if ranks > 1:
            known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            known |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        free.close()
        prints = [[Path(folder) / f"{kind}-{rank}" for kind in ("stdout", "stderr")] for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            for file in prints[rank]:
                file.touch()  # a process may be stopped before it has begun
            own = known | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            given = (str(script), [str(each) for each in arguments], own, prints[rank], cwd or os.getcwd())
            processes.append(SERVER.Process(target=_run_here, args=given))
            processes[-1].start()
        returncode = _end_of(processes)
        printed = ["".join(file.read_text(errors="replace") for file in files) for files in zip(*prints, strict=True)]
    return Done(returncode, *printed)


def _end_of(processes):
    """Wait for the end of processes; if one fails, the others have a few seconds to say why they end."""
    deadline, returncode = time.monotonic() + HANGS, 0
    left = {process.sentinel: process for process in processes}
    while left:
        ended = wait(left, timeout=max(deadline - time.monotonic(), 0))
        for sentinel in ended:
            process = left.pop(sentinel)
            process.join()
            returncode = returncode or process.exitcode
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + (5 if process.exitcode > 0 else 0))
        if not ended:
            for process in left.values():
                process.kill()
            returncode = returncode or -1
    return returncode


def _run_here(script, arguments, environment, prints, folder):
    for descriptor, file in zip((1, 2), prints, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # the default of Python, as in a process of a user
    import datasets

    gc.freeze()  # as in pytest's own processes: what the server has imported is not looked through at every training
    if cache := environment.get("HF_DATASETS_CACHE"):
        datasets.config.HF_DATASETS_CACHE = Path(cache)
    sys.argv = [script, *arguments]
    paths = [str(Path(script).resolve().parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths and not is_of_tests(path))]
    runpy.run_path(script, run_name="__main__")


def is_of_tests(path):
    """Whether a script that is started alone would not find this path: it is one of pytest's."""
    return Path(path or ".").resolve() in {IN_THE_FAMILY, RECIPES, RECIPES.parent / "benchmarks"}


def run(folder, runs, ranks, fails=False):
    """Do runs of training_process.py, settings by name, one after the other on so many processes; see `on_ranks`."""
    import training_process  # which needs TRL, as tests of kernels on a GPU do not

    for settings in runs.values():
        assert settings.keys() <= training_process.SETTINGS.keys(), settings
    return on_ranks(training_process.train_all, folder, runs, ranks=ranks, fails=fails)


def on_ranks(function, folder, *arguments, ranks, fails=False):
    """Call a function of a test file, or of a file of this folder, in so many processes.

    It gets the folder for results, and the arguments as JSON gives them back. With `fails`, the processes are expected
    to fail, as when they are killed.
    """
    folder.mkdir(exist_ok=True)
    paths = [str(IN_THE_FAMILY), str(RECIPES), str(RECIPES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    known |= {"HF_DATASETS_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    given = inspect.getfile(function), function.__name__, json.dumps(arguments)
    done = run_script(IN_THE_FAMILY / "one_rank.py", folder, *given, ranks=ranks, **known)
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def read(folder, kind, rank):
    return [json.loads(line) for line in (folder / f"{kind}-{rank}.jsonl").read_text().splitlines()]


def losses(folder, rank=0):
    """By optimizer step; the latest where a step was trained twice."""
    return {line["step"]: line["loss"] for line in read(folder, "losses", rank)}


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


def documents_of_steps(folder):
    """The documents of each optimizer step over all ranks, as sets; a killed run may have begun a step twice."""
    steps = {}
    for rank in range(len(list(folder.glob("seen-*.jsonl")))):
        for line in read(folder, "seen", rank):
            steps.setdefault(line["step"], set()).update(tuple(ids) for ids, trained in line["documents"] if trained)
    return steps
