"""Measure, for models of each architecture, how rows on two ranks differ from the same rows on one rank.

Two processes go through all architectures together. The layouts are not those of the proof: equal slices of the row,
and two chunks of every document on each rank.
"""

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_packing import ModelNotSupportedError, PackingCollator, PackingError, patch_model
from tools.internals import (
    ON_RANKS,
    Pieces,
    RankLayout,
    RowPart,
    block_of,
    logits_of,
    part_of,
    route_of,
)
from tools.survey.heads import EXACT
from tools.survey.measure import EXACT as EXACT_IN_FLOAT32
from tools.survey.measure import VARIANTS, _silence, largest, make_documents
from tools.tiny_model import tiny_model

RANKS = 2

LENGTHS = (7, 1, 13, 9, 2, 6, 18)
"""Lengths of the documents in tokens."""

LONGER = (7, 11, 13, 9, 5, 6, 18)
"""Lengths for models that cannot be called with very short documents."""

_TIMEOUT = timedelta(minutes=2)
"""How long a process waits for the other one in a collective."""

Status = Literal["exact", "refused", "WRONG", "not built"]


@dataclass(frozen=True)
class MeasuredRanks:
    """The results for one architecture."""

    kind: str
    name: str
    status: Status
    reason: str = ""
    """Why no model was built, or why it is refused on several ranks."""
    difference: float = float("nan")
    """Largest difference of a logit over all layouts and ranks."""
    gradient: float = float("nan")
    """Largest difference of a gradient, relative to the largest gradient."""
    in_float32: bool = False
    """Whether the model was measured in float32, since it cannot be called, or has no gradients, in float64."""


def layouts(lengths: Sequence[int]) -> list[RankLayout]:
    """Return the layouts of the row: equal slices, and two chunks of every document on each rank."""
    begins = np.cumsum([0, *lengths])
    middle = int(begins[-1]) // RANKS
    borders = np.unique([*begins, middle])
    document = np.searchsorted(begins, borders[:-1], side="right") - 1
    sliced = Pieces(document, borders[:-1] - begins[document], np.diff(borders))
    found = [RankLayout(np.array(lengths), sliced, (borders[:-1] >= middle).astype(np.int64), RANKS)]
    held: list[tuple[int, int, int, int]] = []
    for number, length in enumerate(lengths):
        cuts = [length * chunk // (2 * RANKS) for chunk in range(2 * RANKS + 1)]
        middle_ones = [(1, number, cuts[1], cuts[3] - cuts[1])] if length > 1 else []
        outer = [(0, number, cuts[0], cuts[1]), (0, number, cuts[3], cuts[4] - cuts[3])]
        held += [each for each in (*middle_ones, *outer) if each[3]]
    rank, document, start, length = np.array(sorted(held), dtype=np.int64).T
    return [*found, RankLayout(np.array(lengths), Pieces(document, start, length), rank, RANKS)]


def measure_all_ranks(jobs: list[tuple[str, str]]) -> list[MeasuredRanks]:
    """Measure architectures on two processes; return the results in the order of the jobs.

    After an architecture that ends a process, or raises an unexpected error, new processes measure the rest.
    """
    found: list[MeasuredRanks] = []
    while left := jobs[len(found) :]:
        with tempfile.TemporaryDirectory() as folder:
            reason = ""
            try:
                start_processes(_measure_jobs, (left, folder), RANKS, start_method="spawn")  # type: ignore[no-untyped-call]
            except ProcessException as error:
                reason = f"{type(error).__name__}: {error}"
            found += [_read(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        if reason and len(found) < len(jobs):
            found.append(MeasuredRanks(*jobs[len(found)], "WRONG", reason))
    return found


def _measure_jobs(rank: int, jobs: list[tuple[str, str]], folder: str) -> None:
    _silence()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", RANKS)  # type: ignore[attr-defined]
    store.set_timeout(2 * _TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=_TIMEOUT)
    block_of(RANKS)
    for number, job in enumerate(tqdm(jobs, unit=" architectures on two ranks", disable=rank > 0)):
        own = measure_on_ranks(*job)
        store.set(f"{number} on {rank}", json.dumps(asdict(own)))  # no collective, since ranks may be in different ones
        found = [_read(store.get(f"{number} on {each}")) for each in range(RANKS)]
        if len({each.status for each in found}) > 1:
            reasons = (f"rank {each}: {result.status} {result.reason}" for each, result in enumerate(found))
            found = [replace(found[0], status="WRONG", reason="; ".join(reasons))]
        if rank == 0:
            Path(folder, f"{number:04}.json").write_text(json.dumps(asdict(found[0])))
        if found[0].status == "WRONG" and found[0].reason:  # ranks may wait in different calls
            break
    dist.destroy_process_group()


def _read(text: str | bytes) -> MeasuredRanks:
    return MeasuredRanks(**json.loads(text))


def measure_on_ranks(kind: str, name: str) -> MeasuredRanks:
    """Build a tiny model and measure it; both ranks call this together."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    try:
        model = tiny_model(model_type, kind, **changes)
        model.set_experts_implementation("eager")  # the grouped one has no float64
    except Exception as error:  # configurations and models may raise anything
        return MeasuredRanks(kind, name, "not built", f"{type(error).__name__}: {error}")
    try:
        model, lengths = _patched(model)
        route = route_of(model)
        assert route is not None
        route.facts.proven[ON_RANKS] = RANKS
        apart = [_apart(model, layout) for layout in layouts(lengths)]
    except (ModelNotSupportedError, PackingError) as error:
        return MeasuredRanks(kind, name, "refused", str(error))
    except Exception as error:  # a model may raise anything
        return MeasuredRanks(kind, name, "WRONG", f"{type(error).__name__}: {error}")
    difference, gradient = (max(each) for each in zip(*apart, strict=True))
    in_float32 = model.dtype == torch.float32
    status: Status = "exact" if max(difference, gradient) <= (EXACT_IN_FLOAT32 if in_float32 else EXACT) else "WRONG"
    return MeasuredRanks(kind, name, status, "", difference, gradient, in_float32)


def _patched(model: PreTrainedModel) -> tuple[PreTrainedModel, tuple[int, ...]]:
    """Return a patched copy of a model, in float64 if the model runs in float64, and the lengths of documents for it.

    Raises:
        ModelNotSupportedError: the model is not supported.
    """
    for dtype in (torch.float64, torch.float32):
        with suppress(ModelNotSupportedError):
            patched = patch_model(copy.deepcopy(model).to(dtype))
            for lengths in (LENGTHS, LONGER):
                with suppress(RuntimeError, PackingError):
                    _, gradients = _run(patched, _row(lengths), _weights(lengths))
                    if all(bool(each.isfinite().all()) for each in gradients.values()):
                        return patched, lengths
    return patch_model(model), LENGTHS


def _row(lengths: Sequence[int]) -> dict[str, Any]:
    batch: dict[str, Any] = PackingCollator()([{"input_ids": tokens} for tokens in make_documents(0, lengths)])
    del batch["labels"]
    return batch


def _weights(lengths: Sequence[int]) -> Tensor:
    return torch.arange(sum(lengths)).cos()


def _apart(model: PreTrainedModel, layout: RankLayout) -> tuple[float, float]:
    """Return the values of `MeasuredRanks.difference` and `MeasuredRanks.gradient` for one layout."""
    lengths = layout.lengths.tolist()
    batch, weights = _row(lengths), _weights(lengths)
    part = RowPart(layout, dist.get_rank())
    places = torch.from_numpy(layout.places(part.rank))
    whole, expected = _run(model, batch, weights)
    own, found = _run(model, part_of(batch, part), weights[places])
    for each in found.values():
        dist.all_reduce(each)
    scale = max(float(each.abs().max()) for each in expected.values())
    gradients = max(largest(found[each], gradient) for each, gradient in expected.items())
    apart = torch.tensor([largest(own, whole[places]), gradients / scale])
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    difference, gradient = apart.tolist()
    return difference, gradient


def _run(model: PreTrainedModel, batch: dict[str, Any], weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the gradients of a weighted sum of them by parameter."""
    model.zero_grad()
    logits = logits_of(model, model(**batch))[0]
    weighted = logits * weights[:, None] * torch.arange(logits.shape[-1]).cos()
    torch.autograd.backward(weighted.nan_to_num(0, 0, 0).sum())
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return logits.detach(), {name: each.clone() for name, each in gradients.items() if each.numel()}
