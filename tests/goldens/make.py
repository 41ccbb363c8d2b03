"""Make the goldens: digests of what the package computes, for code that must not change any result.

    python tests/goldens/make.py            print the cases that differ from the stored ones
    python tests/goldens/make.py --write    store them

A subject is a function that takes an empty folder and returns a digest, a few words, or numbers for each named case. It
uses public names only, so that modules can move; `inside.py` has the few exceptions. Numbers may differ in rounding.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as in the tests: datasets asks the hub about local files, too
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "helpers")]

import datasets
import torch
from goldens import command, forwards, plans, rows, trainings
from goldens.inputs import Cases

Subject = Callable[[Path], Cases]

SUBJECTS: dict[str, Subject | Callable[[Path], dict[str, str]]] = {
    "plans": plans.of_lengths,
    "plans_by_scipy": plans.by_scipy,
    "pattern_tables": plans.of_counts,
    "rows": rows.packed,
    "mapped_rows": rows.mapped,
    "trees": rows.with_shared_prefixes,
    "streams": rows.packed_streams,
    "mixtures": rows.mixed,
    "command": command.packed,
    "epochs": rows.planned_epochs,
    "batches": rows.collated_batches,
    "reports": plans.reported,
    "forwards": forwards.computed,
    "trainings": trainings.computed,
}
ROUNDING = 1e-5
"""Numbers may differ by so much, absolute or relative: some modules compute in float32 in models of float64."""
STORED = Path(__file__).parent / "stored"


def make(name: str, folder: Path) -> Cases:
    datasets.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about columns left out and documents dropped, on purpose
        return SUBJECTS[name](folder)


def stored(name: str) -> Cases:
    file = STORED / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def differences(old: Cases, new: Cases) -> list[str]:
    names = dict.fromkeys([*old, *new])
    found = [(name, old.get(name, "not stored"), new.get(name, "not made")) for name in names]
    return [f"{name}: {before} -> {after}" for name, before, after in found if not _equal(before, after)]


def _equal(old: str | list[float], new: str | list[float]) -> bool:
    if isinstance(old, str) or isinstance(new, str):
        return old == new
    return len(old) == len(new) and all(map(partial(math.isclose, rel_tol=ROUNDING, abs_tol=ROUNDING), old, new))


def main() -> int:
    """Print the cases that differ, and store them if asked to; return 1 if cases differ and are not stored."""
    parser = argparse.ArgumentParser(description="Compare the goldens with the stored ones.")
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"{', '.join(SUBJECTS)} (default: all)")
    parser.add_argument("--write", action="store_true", help="store what the code computes now")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if unknown := set(given.subjects) - SUBJECTS.keys():
        parser.error(f"SUBJECT: expected some of {', '.join(SUBJECTS)}, got {', '.join(sorted(unknown))}")
    differ = False
    for name in given.subjects or SUBJECTS:
        with tempfile.TemporaryDirectory() as folder:
            datasets.config.HF_DATASETS_CACHE = Path(folder) / "datasets-cache"
            began = time.perf_counter()
            new = make(name, Path(folder))
            seconds = time.perf_counter() - began
        changed = differences(stored(name), new)
        print(f"{name}: {len(new)} cases, {len(changed)} differ, {seconds:.1f} s")
        print("".join(f"  {line}\n" for line in changed), end="")
        differ = differ or bool(changed)
        if given.write and changed:
            STORED.mkdir(exist_ok=True)
            (STORED / f"{name}.json").write_text(json.dumps(new, indent=0) + "\n")
    return int(differ and not given.write)


if __name__ == "__main__":
    sys.exit(main())
