"""What tools use of the inside of hf_packing. When the package moves one of these, its line here follows.

The survey patches a tiny model of every architecture through public names. From the inside it takes the tiny models,
the route that was found, and what counts as equal up to rounding, so that the page says what `patch_model` would say.
The list of kernels' signatures is checked against the call that the package makes.
"""

from hf_packing.attention.cases import RowCase
from hf_packing.attention.kernels import Call, VarlenKernel
from hf_packing.attention.kinds.split import ON_RANKS, block_of
from hf_packing.attention.route import route_of
from hf_packing.attention.runs import Runner, logits_of
from hf_packing.attention.small_copy import SIZES, THRESHOLDS, VOCABULARY, randomize
from hf_packing.attention.token_axes import tensors_in
from hf_packing.attention.tolerance import comparable, spread
from hf_packing.checks import OLDEST
from hf_packing.planning.lengths import Pieces
from hf_packing.planning.rank_layout import RankLayout, RowPart
from hf_packing.training.kinds.split import part_of
from hf_packing.training.step import StepReport

__all__ = [
    "OLDEST",
    "ON_RANKS",
    "SIZES",
    "THRESHOLDS",
    "VOCABULARY",
    "Call",
    "Pieces",
    "RankLayout",
    "RowCase",
    "RowPart",
    "Runner",
    "StepReport",
    "VarlenKernel",
    "block_of",
    "comparable",
    "logits_of",
    "part_of",
    "randomize",
    "route_of",
    "spread",
    "tensors_in",
]
