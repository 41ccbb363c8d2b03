"""Running training_process.py on one or more processes, reading what they wrote, and what they should have written."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from tiny_models import build
from training_process import NUMBER, documents

HANGS = 1800
"""Seconds after which processes wait for each other in vain, however busy the machine is."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
IN_THE_FAMILY = Path(__file__).parent


def run(folder, ranks=1, fails=False, **settings):
    """One run of training_process.py in processes of its own, which write into the folder."""
    return run_all(folder.parent, {folder.name: settings}, ranks, fails)


def run_all(folder, runs, ranks, fails=False):
    """Several runs in the same processes, each with a folder of its name for its results."""
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
    """By step of the optimizer; the latest where a step was trained twice."""
    return {line["step"]: line["loss"] for line in read(folder, "losses", rank)}


def evaluated(folder):
    return [line["loss"] for line in read(folder, "evaluated", 0)]


def logged(folder, rank):
    """Everything that a trainer logs with the loss, by step of the optimizer."""
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


def gradients_of_a_padded_batch(loss):
    """All documents in one padded batch, through the stock model and its logits alone."""
    model = build("Llama", torch.float64)
    rows = documents(NUMBER)
    width = max(map(len, rows["input_ids"]))
    ids, labels, mask = (torch.full((NUMBER, width), fill) for fill in (0, -100, 0))
    for row, (tokens, wanted) in enumerate(zip(rows["input_ids"], rows["labels"], strict=True)):
        ids[row, : len(tokens)], labels[row, : len(tokens)], mask[row, : len(tokens)] = (
            torch.tensor(tokens),
            torch.tensor(wanted),
            1,
        )
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels = labels[:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    trained = (labels != -100).sum(1)
    of_documents = (each.sum(1) / trained.clamp(min=1)).sum() / (trained > 0).sum()
    total = each.sum() / trained.sum() if loss == "token" else of_documents
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, total.item()


def largest_difference(file, expected):
    """Of the gradients in a file and the expected ones, as a share of the largest."""
    found = torch.load(file)
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest
