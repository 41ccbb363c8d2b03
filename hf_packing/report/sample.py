"""What pictures need of a plan, small however large the plan is."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_packing.planning.plan import PackingPlan
from hf_packing.report.work import on_ranks

POINTS = 200
"""Of a curve."""
BINS = 24
"""Of document lengths, equally wide on a logarithmic scale before they are split where packs end."""
STEPS = 48
"""Whose ranks are shown."""


@dataclass(frozen=True, eq=False)
class PlanSample:
    """Of one plan."""

    fill: npt.NDArray[np.float64]
    """float64 [points]: the share of a pack that is filled, the emptiest first."""
    documents_per_pack: npt.NDArray[np.int64]
    """int64 [most + 1]: how many packs have so many."""
    length_edges: npt.NDArray[np.float64]
    """float64 [bins + 1], tokens; what just fits in a pack and what does not are in different bins."""
    cut: npt.NDArray[np.float64]
    """float64 [bins]: the share of documents of such a length that is cut; nan where there are none."""
    attention: npt.NDArray[np.float64]
    """float64 [steps, ranks]: what attention costs, in the order of the plan."""


def sample_of(plan: PackingPlan, ranks: int) -> PlanSample:
    lengths = plan.segment_length.astype(np.float64)
    filled, squares = np.zeros(1), np.zeros(1)
    if plan.num_packs:
        filled, squares = (np.add.reduceat(values, plan.pack_offsets[:-1]) for values in (lengths, lengths**2))
        filled = filled / plan.pack_capacity
    place = np.linspace(0, len(filled) - 1, min(POINTS, len(filled))).astype(np.int64)
    edges, cut = cut_by_length(plan)
    return PlanSample(
        fill=np.sort(filled)[place],
        documents_per_pack=np.bincount(np.diff(plan.pack_offsets)),
        length_edges=edges,
        cut=cut,
        attention=on_ranks(squares[: STEPS * ranks], ranks),
    )


def cut_by_length(plan: PackingPlan) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Edges of bins of lengths, and the share of documents in each that are not whole in one pack."""
    length = plan.document_length
    whole = np.zeros(len(length), dtype=bool)
    complete = plan.segment_length == length[plan.segment_document]
    whole[plan.segment_document[complete]] = True
    beyond = max(int(length.max(initial=1)) + 1, 2)
    edges = np.geomspace(1, beyond, BINS + 1)
    too_long = np.unique(plan.pack_capacity) + 1
    edges = np.union1d(edges, too_long[too_long < beyond])
    documents, _ = np.histogram(length, edges)
    cut, _ = np.histogram(length[~whole & (length > 0)], edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        return edges, cut / documents
