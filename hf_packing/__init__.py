"""Packing for language-model training with Hugging Face datasets and transformers: plans, packed rows, isolation.

Names are imported when they are first used, so that `import hf_packing` is quick and loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

HOME_OF = {
    "BestFit": "strategies.counting",
    "Bucket": "strategies.buckets",
    "BucketByLength": "strategies.buckets",
    "ComparedStrategy": "comparison",
    "Comparison": "comparison",
    "DealtShard": "planning.deal",
    "FirstCome": "strategies.in_order",
    "FixedLength": "strategies.in_order",
    "IsolationReport": "attention.isolation",
    "MissingDependencyError": "errors",
    "ModelNotSupportedError": "errors",
    "Multipack": "strategies.in_order",
    "NonNegativeLeastSquares": "strategies.counting",
    "Optimal": "strategies.counting",
    "PackingCollator": "collate",
    "PackingError": "errors",
    "PackingMetrics": "planning.metrics",
    "PackingPlan": "planning.plan",
    "PatternTable": "planning.table",
    "ShortestPackFirst": "strategies.counting",
    "check_isolation": "attention.isolation",
    "compare": "comparison",
    "pack": "dataset",
    "patch_model": "attention.patch",
    "patched": "attention.patch",
    "plan_counts": "strategies.planning",
    "plan_packing": "strategies.planning",
    "unpack": "dataset",
    "unpatch_model": "attention.patch",
}

if TYPE_CHECKING:
    from hf_packing.attention.isolation import IsolationReport, check_isolation
    from hf_packing.attention.patch import patch_model, patched, unpatch_model
    from hf_packing.collate import PackingCollator
    from hf_packing.comparison import ComparedStrategy, Comparison, compare
    from hf_packing.dataset import pack, unpack
    from hf_packing.errors import MissingDependencyError, ModelNotSupportedError, PackingError
    from hf_packing.planning.deal import DealtShard
    from hf_packing.planning.metrics import PackingMetrics
    from hf_packing.planning.plan import PackingPlan
    from hf_packing.planning.table import PatternTable
    from hf_packing.strategies.buckets import Bucket, BucketByLength
    from hf_packing.strategies.counting import BestFit, NonNegativeLeastSquares, Optimal, ShortestPackFirst
    from hf_packing.strategies.in_order import FirstCome, FixedLength, Multipack
    from hf_packing.strategies.planning import plan_counts, plan_packing

__all__ = [
    "BestFit",
    "Bucket",
    "BucketByLength",
    "ComparedStrategy",
    "Comparison",
    "DealtShard",
    "FirstCome",
    "FixedLength",
    "IsolationReport",
    "MissingDependencyError",
    "ModelNotSupportedError",
    "Multipack",
    "NonNegativeLeastSquares",
    "Optimal",
    "PackingCollator",
    "PackingError",
    "PackingMetrics",
    "PackingPlan",
    "PatternTable",
    "ShortestPackFirst",
    "check_isolation",
    "compare",
    "pack",
    "patch_model",
    "patched",
    "plan_counts",
    "plan_packing",
    "unpack",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    if name not in HOME_OF:
        raise AttributeError(f"module 'hf_packing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hf_packing.{HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
