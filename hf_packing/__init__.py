"""Packing for language-model training with Hugging Face datasets and transformers: plans, packed rows, isolation.

Names are imported when they are first used, so that `import hf_packing` is quick and loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

HOME_OF = {
    "BestFit": "strategies.counting",
    "Bucket": "strategies.buckets",
    "BucketBatches": "sampling.bucket_batches",
    "BucketByLength": "strategies.buckets",
    "ComparedStrategy": "comparison",
    "Comparison": "comparison",
    "DealtShard": "planning.deal",
    "EpochPlan": "sampling.epoch_plan",
    "EpochSummary": "training.summary",
    "FirstCome": "strategies.in_order",
    "FixedLength": "strategies.in_order",
    "IsolationReport": "attention.isolation",
    "MissingDependencyError": "errors",
    "ModelNotSupportedError": "errors",
    "Multipack": "strategies.in_order",
    "NonNegativeLeastSquares": "strategies.counting",
    "Optimal": "strategies.counting",
    "PackedLoader": "training.loader",
    "PackingCollator": "collate",
    "PackingError": "errors",
    "PackingMetrics": "planning.metrics",
    "PackingPlan": "planning.plan",
    "PackingReport": "report.report",
    "PatternTable": "planning.table",
    "ShortestPackFirst": "strategies.counting",
    "TokenBudget": "sampling.token_budget",
    "attach": "training.attach",
    "check_isolation": "attention.isolation",
    "compare": "comparison",
    "compute_loss": "training.loop",
    "evaluation_loss": "training.loop",
    "pack": "dataset",
    "packing_report": "report.report",
    "patch_model": "attention.patch",
    "patched": "attention.patch",
    "plan_counts": "strategies.planning",
    "plan_packing": "strategies.planning",
    "prepare_dataloader": "training.loop",
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
    from hf_packing.report.report import PackingReport, packing_report
    from hf_packing.sampling.bucket_batches import BucketBatches
    from hf_packing.sampling.epoch_plan import EpochPlan
    from hf_packing.sampling.token_budget import TokenBudget
    from hf_packing.strategies.buckets import Bucket, BucketByLength
    from hf_packing.strategies.counting import BestFit, NonNegativeLeastSquares, Optimal, ShortestPackFirst
    from hf_packing.strategies.in_order import FirstCome, FixedLength, Multipack
    from hf_packing.strategies.planning import plan_counts, plan_packing
    from hf_packing.training.attach import attach
    from hf_packing.training.loader import PackedLoader
    from hf_packing.training.loop import compute_loss, evaluation_loss, prepare_dataloader
    from hf_packing.training.summary import EpochSummary

__all__ = [
    "BestFit",
    "Bucket",
    "BucketBatches",
    "BucketByLength",
    "ComparedStrategy",
    "Comparison",
    "DealtShard",
    "EpochPlan",
    "EpochSummary",
    "FirstCome",
    "FixedLength",
    "IsolationReport",
    "MissingDependencyError",
    "ModelNotSupportedError",
    "Multipack",
    "NonNegativeLeastSquares",
    "Optimal",
    "PackedLoader",
    "PackingCollator",
    "PackingError",
    "PackingMetrics",
    "PackingPlan",
    "PackingReport",
    "PatternTable",
    "ShortestPackFirst",
    "TokenBudget",
    "attach",
    "check_isolation",
    "compare",
    "compute_loss",
    "evaluation_loss",
    "pack",
    "packing_report",
    "patch_model",
    "patched",
    "plan_counts",
    "plan_packing",
    "prepare_dataloader",
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
