"""Everything that needs a GPU, in about ten minutes: tests, kernels, training, shared prefixes, two cards.

python benchmarks/gpu.py

Each part runs in processes of its own, and both sides of a comparison in turn. `gpu.json` and the page `gpu.html` are
written after every part. A part that fails, or that cannot run here, says why, and does not stop the others: without a
second card, flash-attn or trl, their sides are left out. Without a card, everything runs once on the CPU with a tiny
model and stand-ins for the kernels, to try the code; the figures mean nothing then.
"""

import argparse
import datetime
import gc
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpu_page import page, summary
from measure import RESULTS, facts_of_this_machine

HERE = Path(__file__).resolve()


class Part(NamedTuple):
    """A part, and where it is."""

    share: float
    """Of the time that it should take. Where there is time, a part may take twice as long."""
    module: str
    function: str = "run"
    """Takes the results, which it fills, and the scale."""


PARTS = {
    "kernels": Part(0.12, "gpu_kernels"),
    "training": Part(0.24, "gpu_training"),
    "trees": Part(0.14, "gpu_training", "run_trees"),
    "ranks": Part(0.2, "gpu_ranks"),
    "tests": Part(0.3, "gpu_tests"),
}
"""In the order in which they run. The tests take all the time that is left."""

MEASURED = 0.4
"""The share of its time in which a part measures; the rest is for imports, compiling and proofs."""

AGAIN = 75
"""As in gpu_part.py, which imports torch."""


def run_part(name: str, file: Path, options: argparse.Namespace) -> None:
    """Run one part in this process, and leave what it has found in a file."""
    from gpu_part import CannotRunError, Results, Scale, reason_of

    results = Results(file)
    trouble = ""
    try:
        module = importlib.import_module(PARTS[name].module)
        gc.freeze()  # what was imported is not looked through when a side's memory is freed
        getattr(module, PARTS[name].function)(results, Scale.of(options.dry_run, options.seconds, options.tokens))
    except CannotRunError as reason:
        trouble = str(reason)
    except ModuleNotFoundError as error:
        trouble = f"{error.name} is not installed"
    except Exception as error:
        trouble = f"{reason_of(error)}; see {name}.log"
        raise
    finally:
        if trouble:
            results.found["stopped" if "comparisons" in results.found else "not_run"] = trouble
        results.save()


def run_rank(file: Path, options: argparse.Namespace) -> None:
    """Run one of several processes of a part."""
    import gpu_ranks
    from gpu_part import Scale

    gpu_ranks.run_rank(file, Scale.of(options.dry_run, options.seconds, options.tokens), options.ranks)


def start(name: str, options: argparse.Namespace, seconds: float, limit: float) -> dict[str, Any]:
    """Run a part in a process of its own, and return what it has found.

    Args:
        name: of the part.
        options: of the command line.
        seconds: for what it times.
        limit: seconds after which it is stopped.
    """
    from_part = options.out / "parts" / f"{name}.json"
    log = options.out / "parts" / f"{name}.log"
    from_part.unlink(missing_ok=True)
    known = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    known["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    known["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    if options.dry_run:
        known["CUDA_VISIBLE_DEVICES"] = ""
    elif name != "ranks":  # on several, a Trainer would use nn.DataParallel
        known["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    began, status = time.monotonic(), AGAIN
    command = [sys.executable, str(HERE), "--part", name, "--out", str(options.out), "--seconds", f"{seconds:.0f}"]
    command += ["--dry-run"] if options.dry_run else []
    command += ["--tokens", str(options.tokens)] if options.tokens else []
    with log.open("w") as file, log.open() as printed:
        while status == AGAIN:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=known, start_new_session=True
            )
            try:
                status = wait(process, printed, began + limit)
            finally:
                end(process)
    found = json.loads(from_part.read_text()) if from_part.is_file() else {}
    found["minutes"] = (time.monotonic() - began) / 60
    if status is None:
        found["stopped"] = f"stopped after {limit / 60:.1f} minutes"
    elif status and not {"stopped", "not_run"} & set(found):
        found["stopped"] = f"failed: its process ended with status {status}; see {name}.log"
    return found


def wait(process: subprocess.Popen[bytes], printed: Any, deadline: float) -> int | None:
    """Print what a process prints until it ends; return its status, or None if that takes too long."""
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
        finally:
            print(printed.read(), end="", flush=True)
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, if it still runs."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, how)
            try:
                process.wait(timeout=15)  # torchrun ends its processes
            except subprocess.TimeoutExpired:
                continue


def cards() -> list[dict[str, Any]]:
    """Return the cards of this machine, from another process: this one would keep some of their memory."""
    asked = subprocess.run(
        [sys.executable, str(HERE), "--part", "cards"], stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(asked.stdout.splitlines()[-1])
    return found


def cards_here() -> list[dict[str, Any]]:
    import torch

    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [{"name": each.name, "gibibytes": each.total_memory / 2**30, "cuda": torch.version.cuda} for each in found]


def known_of_this_machine() -> dict[str, Any]:
    """Return what all benchmarks say of the machine, and the version of hf_packing also where it is not installed."""
    sys.path.append(str(HERE.parents[1]))
    import hf_packing

    facts = facts_of_this_machine()
    return {**facts, "versions": {"hf-packing": hf_packing.__version__, **facts["versions"]}}


def write(result: dict[str, Any], out: Path) -> None:
    result["printed"] = summary(result)
    for file, text in (("gpu.json", json.dumps(result, indent=1, default=float) + "\n"), ("gpu.html", page(result))):
        new = out / f"{file}.new"
        new.write_text(text)
        os.replace(new, out / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for gpu.json, gpu.html and the logs (outputs/gpu)")
    parser.add_argument("--minutes", type=float, default=10, help="for all parts together (10)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="parts to run")
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[], help="parts to leave out")
    parser.add_argument("--tokens", type=int, help="tokens of a step (by the memory of the card: 8,192 with 80 GB)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, also if there is a card")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results, too")
    for hidden, kind in (("part", str), ("seconds", float), ("ranks", int)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "cards":
        print(json.dumps(cards_here()))
        return
    if options.part:
        file = options.out / "parts" / f"{options.part}.json"
        run_rank(file, options) if options.ranks else run_part(options.part, file, options)
        return
    found = cards()
    options.dry_run |= not found
    if options.save and options.dry_run:
        parser.error("--save: expected a card, got a dry run, whose figures mean nothing")
    options.out = (options.out or Path("outputs") / ("gpu-dry-run" if options.dry_run else "gpu")).resolve()
    (options.out / "parts").mkdir(parents=True, exist_ok=True)
    result = {
        "benchmark": "gpu",
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "dry_run": options.dry_run,
        "date": datetime.date.today().isoformat(),
        "cards": found,
        **known_of_this_machine(),
        "parts": {name: {"not_run": "not yet"} for name in PARTS},
    }
    began = time.monotonic()
    try:
        for name, part in PARTS.items():
            if name not in options.only or name in options.skip:
                result["parts"][name] = {"not_run": "left out by --only or --skip"}
                continue
            used, total = time.monotonic() - began, 60 * options.minutes
            last = total - used - (total * PARTS["tests"].share / 2 if name != "tests" else 0)
            limit = max(total * part.share / 2, min(2 * total * part.share, last) if name != "tests" else last)
            print(f"\n== {name}, after {used / 60:.1f} minutes, at most {limit / 60:.1f}", flush=True)
            result["parts"][name] = {"not_run": "interrupted"}
            result["parts"][name] = start(name, options, MEASURED * total * part.share, limit)
            result["minutes"] = (time.monotonic() - began) / 60
            write(result, options.out)
    finally:
        write(result, options.out)
        print("\n" + "\n".join(result["printed"]))
        print(f"\n{options.out / 'gpu.html'}\n{options.out / 'gpu.json'}")
    if options.save:
        (RESULTS / "gpu.json").write_text((options.out / "gpu.json").read_text())


if __name__ == "__main__":
    main()
