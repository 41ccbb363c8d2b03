"""Pack documents into rows for language-model training with Hugging Face datasets and transformers.

Public names are imported when they are first used, so that `import hf_packing` is quick and does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_HOME_OF = {
    "BestFit": "strategies.greedy",
    "Bucket": "strategies.bucket",
    "BucketBatches": "sampling.bucket_batches",
    "BucketByLength": "strategies.bucket",
    "ComparedStrategy": "strategies.compare",
    "Comparison": "strategies.compare",
    "EpochPlan": "sampling.batching",
    "EpochSummary": "sampling.sampler",
    "FirstCome": "strategies.sequential",
    "FixedLength": "strategies.sequential",
    "IsolationReport": "attention",
    "LengthSchedule": "planning.length_schedule",
    "MissingDependencyError": "errors",
    "ModelNotSupportedError": "errors",
    "Multipack": "strategies.sequential",
    "NonNegativeLeastSquares": "strategies.nnls",
    "Optimal": "strategies.optimal",
    "PackedLoader": "training.loader",
    "PackingCollator": "batch.collate",
    "PackingError": "errors",
    "PackingMetrics": "planning.metrics",
    "PackingPlan": "planning.plan",
    "PackingReport": "report.report",
    "PatternTable": "planning.table",
    "Scores": "training.score",
    "ShortestPackFirst": "strategies.greedy",
    "StepReport": "training.step",
    "TokenBudget": "sampling.token_budget",
    "UnpaddedModels": "training.models",
    "attach": "training.attach",
    "branches": "text.branches",
    "check_isolation": "attention",
    "check_step": "training.step_cases",
    "compare": "strategies.compare",
    "compute_loss": "training.loop",
    "document_logps": "training.score",
    "evaluation_loss": "training.loop",
    "mix": "streams.mix",
    "pack": "rows.pack",
    "packing_report": "report.report",
    "patch_model": "attention",
    "patched": "attention",
    "plan_counts": "strategies.base",
    "plan_packing": "strategies.base",
    "prepare_dataloader": "training.loop",
    "score": "training.score",
    "tokenize": "text.tokenize",
    "unpack": "rows.unpack",
    "unpatch_model": "attention",
    "versions": "upstream",
}

if TYPE_CHECKING:
    from hf_packing import fleet
    from hf_packing.attention import IsolationReport, check_isolation, patch_model, patched, unpatch_model
    from hf_packing.batch.collate import PackingCollator
    from hf_packing.errors import MissingDependencyError, ModelNotSupportedError, PackingError
    from hf_packing.planning.length_schedule import LengthSchedule
    from hf_packing.planning.metrics import PackingMetrics
    from hf_packing.planning.plan import PackingPlan
    from hf_packing.planning.table import PatternTable
    from hf_packing.report.report import PackingReport, packing_report
    from hf_packing.rows.pack import pack
    from hf_packing.rows.unpack import unpack
    from hf_packing.sampling.batching import EpochPlan
    from hf_packing.sampling.bucket_batches import BucketBatches
    from hf_packing.sampling.sampler import EpochSummary
    from hf_packing.sampling.token_budget import TokenBudget
    from hf_packing.strategies.base import plan_counts, plan_packing
    from hf_packing.strategies.bucket import Bucket, BucketByLength
    from hf_packing.strategies.compare import ComparedStrategy, Comparison, compare
    from hf_packing.strategies.greedy import BestFit, ShortestPackFirst
    from hf_packing.strategies.nnls import NonNegativeLeastSquares
    from hf_packing.strategies.optimal import Optimal
    from hf_packing.strategies.sequential import FirstCome, FixedLength, Multipack
    from hf_packing.streams.mix import mix
    from hf_packing.text.branches import branches
    from hf_packing.text.tokenize import tokenize
    from hf_packing.training.attach import attach
    from hf_packing.training.loader import PackedLoader
    from hf_packing.training.loop import compute_loss, evaluation_loss, prepare_dataloader
    from hf_packing.training.models import UnpaddedModels
    from hf_packing.training.score import Scores, document_logps, score
    from hf_packing.training.step import StepReport
    from hf_packing.training.step_cases import check_step
    from hf_packing.upstream import versions

__all__ = [
    "BestFit",
    "Bucket",
    "BucketBatches",
    "BucketByLength",
    "ComparedStrategy",
    "Comparison",
    "EpochPlan",
    "EpochSummary",
    "FirstCome",
    "FixedLength",
    "IsolationReport",
    "LengthSchedule",
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
    "Scores",
    "ShortestPackFirst",
    "StepReport",
    "TokenBudget",
    "UnpaddedModels",
    "attach",
    "branches",
    "check_isolation",
    "check_step",
    "compare",
    "compute_loss",
    "document_logps",
    "evaluation_loss",
    "fleet",
    "mix",
    "pack",
    "packing_report",
    "patch_model",
    "patched",
    "plan_counts",
    "plan_packing",
    "prepare_dataloader",
    "score",
    "tokenize",
    "unpack",
    "unpatch_model",
    "versions",
]


def __getattr__(name: str) -> Any:
    if name == "fleet":
        return importlib.import_module("hf_packing.fleet")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hf_packing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hf_packing.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
