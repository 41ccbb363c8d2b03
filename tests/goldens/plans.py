"""Plans of every strategy: fingerprints for three seeds, and the metrics; and the numbers and texts of reports."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from goldens.inputs import LONGEST, dataset, digest, related, sets_of_lengths

import hf_packing as hfp

SCIPY = "scipy"
"""Name of the case that says which scipy made the plans, since its solvers choose between packs that are as good."""
THIS_SCIPY = f"{scipy.__version__} for {platform.machine()}"

_OVERFLOWS = ("split", "truncate", "drop", "error")
_SEEDS = (None, 0, 7)
_BUCKETS = (16, 32, LONGEST)

_Make = Callable[..., Any]
_CUTTING: dict[str, _Make] = {
    "BestFit": hfp.BestFit,
    "BestFit of 3": lambda *given, **more: hfp.BestFit(*given, max_documents=3, **more),
    "ShortestPackFirst": hfp.ShortestPackFirst,
    "ShortestPackFirst of 3": lambda *given, **more: hfp.ShortestPackFirst(*given, max_documents=3, **more),
    "Multipack": lambda *given, seed, **more: hfp.Multipack(*given, window=90, seed=seed or 0, **more),
    "FirstCome": hfp.FirstCome,
    "FirstCome of 2": lambda *given, **more: hfp.FirstCome(*given, max_documents=2, **more),
    "FirstCome, longest first": lambda *given, **more: hfp.FirstCome(*given, order="longest_first", **more),
    "FirstCome, as in the dataset": lambda *given, **more: hfp.FirstCome(*given, order="dataset", **more),
}
_WHOLE: dict[str, _Make] = {
    "FixedLength": lambda seed: hfp.FixedLength(LONGEST, seed=seed),
    "Bucket": lambda seed: hfp.Bucket(_BUCKETS, seed=seed),
    "Bucket, padding 0.3": lambda seed: hfp.Bucket(_BUCKETS, padding_threshold=0.3, seed=seed),
    "BucketByLength": lambda seed: hfp.BucketByLength(_BUCKETS, seed=seed),
}
_BY_SCIPY: dict[str, _Make] = {
    "Optimal": lambda *given, **more: hfp.Optimal(*given, time_limit=600, **more),
    "Optimal of 3": lambda *given, **more: hfp.Optimal(*given, max_documents=3, time_limit=600, **more),
}
_ON_ANY_PROCESSOR: dict[str, _Make] = {
    "NonNegativeLeastSquares": hfp.NonNegativeLeastSquares,
    "NonNegativeLeastSquares of 2": lambda *given, **more: hfp.NonNegativeLeastSquares(*given, max_documents=2, **more),
}
"""Strategies whose plans of many lengths depend on the processor, through the order of additions in BLAS."""
_FEW_LENGTHS = ("few lengths", "many equal", "empty and 1", "edges", "one", "none")


def of_lengths(_: Path) -> dict[str, str]:
    """Plans of the strategies that NumPy alone computes."""
    found = dict(_cut_plans(_CUTTING, sets_of_lengths()))
    for strategy, make in _WHOLE.items():
        for name, lengths in sets_of_lengths().items():
            found[f"{strategy}, {name}"] = _plans(lambda seed, make=make: make(seed), lengths)
    return found


def by_scipy(_: Path) -> dict[str, str]:
    """Plans of the strategies that use solvers; packs that are as good may be others with another scipy."""
    sets = {name: lengths[:120] for name, lengths in sets_of_lengths().items()}
    few = {name: sets[name] for name in _FEW_LENGTHS}
    return {SCIPY: THIS_SCIPY, **dict(_cut_plans(_BY_SCIPY, sets)), **dict(_cut_plans(_ON_ANY_PROCESSOR, few))}


def of_counts(_: Path) -> dict[str, str]:
    """Pattern tables from histograms, and the plans that they make."""
    found = {}
    for strategy in (hfp.BestFit(LONGEST), hfp.ShortestPackFirst(LONGEST, max_documents=4), hfp.Bucket(_BUCKETS)):
        for name, lengths in sets_of_lengths().items():
            table = hfp.plan_counts(np.bincount(lengths), strategy)
            metrics = digest(vars(table.metrics()))
            found[f"{type(strategy).__name__}, {name}"] = (
                f"{table.num_packs} packs {table.plan(lengths).fingerprint[:12]} metrics {metrics}"
            )
    return found


def _cut_plans(strategies: dict[str, _Make], sets: dict[str, np.ndarray]) -> Iterator[tuple[str, str]]:
    for strategy, make in strategies.items():
        for name, lengths in sets.items():
            for overflow in _OVERFLOWS if lengths.max(initial=0) > LONGEST else ("split",):
                yield (
                    f"{strategy}, {name}, {overflow}",
                    _plans(lambda seed, m=make, o=overflow: m(LONGEST, overflow=o, seed=seed), lengths),
                )


def _plans(make: _Make, lengths: np.ndarray) -> str:
    try:
        plans = [hfp.plan_packing(lengths, make(seed=seed)) for seed in _SEEDS]
    except hfp.PackingError:
        return "PackingError"
    packs = " or ".join(map(str, dict.fromkeys(plan.num_packs for plan in plans)))
    fingerprints = " ".join(plan.fingerprint[:12] for plan in plans)
    return f"{packs} packs {fingerprints} metrics {digest([vars(plan.metrics()) for plan in plans])}"


def reported(_: Path) -> dict[str, str]:
    """Parts of the reports on lengths, on a dataset and on documents that share prefixes."""
    found: dict[str, str] = {}
    for name, lengths in sets_of_lengths().items():
        if lengths.any():
            _add(found, name, hfp.packing_report(lengths, (32, LONGEST), ranks=2, padded_rows=4))
    strategies = [hfp.BestFit(LONGEST, overflow="truncate"), hfp.FirstCome(32), hfp.Bucket((16, 32, LONGEST))]
    _add(found, "dataset", hfp.packing_report(dataset(), strategies=strategies, linear_cost=64, source="here"))
    _add(found, "shared prefixes", hfp.packing_report(related(), 80))
    return found


def _add(found: dict[str, str], name: str, report: hfp.PackingReport) -> None:
    for part, value in report.to_dict().items():
        if part == "strategies":
            for row in value:
                found[f"{name}, {row['strategy']}"] = digest({key: row[key] for key in row if key != "seconds"})
        else:
            found[f"{name}, {part}"] = digest(value)
