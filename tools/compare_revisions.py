"""Time this tree against another revision of it, in turn, on the same data: is a change slower?

    python -m tools.compare_revisions main~20              # 7 rounds
    python -m tools.compare_revisions v0.1.0 --rounds 3 --only plan pack

Each round starts one process per revision, which runs every workload a few times through the public API and keeps the
least CPU time. Reported is the ratio of the medians over the rounds, this tree over the other: below 1 it is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]

REPEATS = 5


def _lengths(number: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).lognormal(5.5, 1, number).astype(int).clip(1, 4096)


def _documents(number: int) -> Any:
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    rng = np.random.default_rng(0)
    return datasets.Dataset.from_dict({"input_ids": [rng.integers(1, 99, n) for n in _lengths(number).tolist()]})


def _llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, max_position_embeddings=4096, **sizes))


def _plan(hfp: Any) -> Callable[[], object]:
    lengths, strategy = _lengths(200_000), hfp.BestFit(4096)
    return lambda: hfp.plan_packing(lengths, strategy)


def _multipack(hfp: Any) -> Callable[[], object]:
    lengths, strategy = _lengths(50_000), hfp.Multipack(4096)
    return lambda: hfp.plan_packing(lengths, strategy)


def _pack(hfp: Any) -> Callable[[], object]:
    import datasets

    folder = tempfile.mkdtemp()
    _documents(20_000).save_to_disk(folder)
    documents, seeds = datasets.load_from_disk(folder), iter(range(10**6))
    return lambda: hfp.pack(documents, hfp.BestFit(4096, seed=next(seeds)))  # none of these is in the cache


def _map(hfp: Any) -> Callable[[], object]:
    batch = _documents(5_000).with_format("numpy")[:]
    strategy = hfp.BestFit(4096)
    return lambda: strategy(batch)


def _collate(hfp: Any) -> Callable[[], object]:
    rows = list(hfp.pack(_documents(2_000), hfp.BestFit(4096)))
    collator = hfp.PackingCollator()
    return lambda: [collator(rows[first : first + 2]) for first in range(0, len(rows), 2)]


def _batches(hfp: Any) -> Callable[[], object]:
    import accelerate

    accelerator, documents = accelerate.Accelerator(cpu=True), _documents(50_000)
    return lambda: hfp.prepare_dataloader(accelerator, documents, hfp.TokenBudget(16384))


def _read_batches(hfp: Any) -> Callable[[], object]:
    import accelerate

    loader = hfp.prepare_dataloader(accelerate.Accelerator(cpu=True), _documents(5_000), hfp.TokenBudget(16384))
    return lambda: [batch["input_ids"].shape for batch in loader]


def _attention(hfp: Any) -> Callable[[], object]:
    model = hfp.patch_model(_llama())
    batch = hfp.PackingCollator()([{"input_ids": list(range(1, 99)) * 5} for _ in range(8)])

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    return step


def _patch(hfp: Any) -> Callable[[], object]:
    return lambda: hfp.patch_model(_llama())


def _train(hfp: Any) -> Callable[[], object]:
    import transformers

    documents = _documents(200)

    def train() -> None:
        arguments = transformers.TrainingArguments(
            tempfile.mkdtemp(), max_steps=8, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
        )
        trainer = transformers.Trainer(_llama(), arguments, train_dataset=documents)
        hfp.attach(trainer, hfp.TokenBudget(4096))
        trainer.train()

    return train


WORKLOADS: dict[str, tuple[str, Callable[[Any], Callable[[], object]]]] = {
    "plan": ("plan_packing: 200,000 documents, BestFit", _plan),
    "multipack": ("plan_packing: 50,000 documents, Multipack", _multipack),
    "pack": ("pack: 20,000 documents, disk to disk", _pack),
    "map": ("a strategy on a batch of 5,000 documents", _map),
    "collate": ("PackingCollator: packed rows of 4,096 tokens", _collate),
    "batches": ("prepare_dataloader: plan batches of 50,000 documents", _batches),
    "read": ("prepare_dataloader: read the batches of 5,000 documents", _read_batches),
    "attention": ("a patched Llama: forward and backward of 8 x 490 tokens", _attention),
    "patch": ("patch_model: a Llama of 4 layers, proof included", _patch),
    "train": ("attach and 8 optimizer steps of 4,096 tokens", _train),
}
"""By name: what is timed, and a function that prepares it and returns the call."""


def _least_seconds(names: list[str]) -> dict[str, float]:
    """Run workloads in this process. Return the least CPU time of each, in seconds."""
    import warnings

    import torch
    import transformers

    import hf_packing as hfp

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    least: dict[str, float] = {}
    for name in names:
        call = WORKLOADS[name][1](hfp)
        for _ in range(REPEATS):
            began = time.process_time()
            call()
            least[name] = min(least.get(name, float("inf")), time.process_time() - began)
    return least


def _time_revision(root: Path, names: list[str]) -> dict[str, float]:
    """Run the workloads on the package below a folder, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--here", *names]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{root} failed:\n{done.stderr}")
    facts = json.loads(done.stdout.splitlines()[-1])
    if Path(facts["package"]).parent.resolve() != (root / "hf_packing").resolve():
        raise RuntimeError(f"expected the package of {root}, got {facts['package']}")
    seconds: dict[str, float] = facts["seconds"]
    return seconds


def compare(other: Path, names: list[str], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of the other tree and of this one, by workload."""
    times: dict[Path, list[dict[str, float]]] = {other: [], ROOT: []}
    for number in track(range(rounds), "rounds", console=Console(stderr=True)):
        for root in (other, ROOT) if number % 2 else (ROOT, other):
            times[root].append(_time_revision(root, names))
    before, after = times.values()
    return {name: (_median(before, name), _median(after, name)) for name in names}


def _median(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(seconds[name] for seconds in rounds)


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="a commit, a tag or a branch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="WORKLOAD")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(other), given.revision)
        try:
            compared = compare(other, given.only, given.rounds)
        finally:
            _git("worktree", "remove", "--force", str(other))
    table = Table(f"median CPU seconds of {given.rounds} rounds", given.revision, "this tree", "ratio", box=None)
    for name, (before, after) in compared.items():
        table.add_row(WORKLOADS[name][0], f"{before:.3f}", f"{after:.3f}", f"{after / before:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        import hf_packing

        print(json.dumps({"seconds": _least_seconds(sys.argv[2:]), "package": hf_packing.__file__}))
    else:
        main()
