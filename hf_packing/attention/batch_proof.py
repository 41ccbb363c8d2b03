"""Prove isolation on a training batch, at its lengths, in the dtype and on the weights that the model trains with.

If the proof fails, another run finds the module in which the difference begins (see `locate`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.cases import Case
from hf_packing.attention.kernels import kernel_of
from hf_packing.attention.layout import read_layout
from hf_packing.attention.locate import locate_leak
from hf_packing.attention.model import embedding_of, without_ddp
from hf_packing.attention.proof import on_any_rank, prove
from hf_packing.attention.route import READ_ARGUMENTS, route_of
from hf_packing.attention.runs import Embedded, Runner, gradients_of, logits_of
from hf_packing.attention.tolerance import BATCH
from hf_packing.columns import ENDS, KNOWN_COLUMNS, TRAINED, TREE_LABELS
from hf_packing.errors import PackingError
from hf_packing.trees.segments import TreeSegments

_CALLS_ALONE = 3
"""Number of documents that run alone. All ranks make the same number of calls, since ranks that shard a model wait for
each other in every call."""

_SHARE_ALONE = 4
"""A document that runs alone has at most one in this number of the batch's tokens, unless every document is longer."""

_OF_OWN_LOSS = {"labels", "num_items_in_batch"}
"""Names of the arguments with which a model computes its own loss."""

_OF_THE_LOSS = {*_OF_OWN_LOSS, "shift_labels", "targets", "target_weights", TREE_LABELS, ENDS, TRAINED}


class BatchCase(Case):
    """A training batch.

    All ranks that shard a model make the same calls, each on at most one batch: one on the batch as it is, one with
    about half of the documents replaced, and four on documents alone. Of trees, segments without any below them are
    replaced, and one document of each tree has gradients, since gradients at shared tokens are sums.

    Args:
        model: a model as a training loop calls it: wrapped by DDP, FSDP, PEFT, DeepSpeed, torch.compile, or not.
        batch: a packed batch, or one of trees, with input_ids [rows, tokens] and borders.
        training: whether the model runs in training mode, with gradients but without dropout.
    """

    profile = BATCH
    where = "the packed batch"
    leaks = "replacing documents changed the outputs of other documents"
    is_one_forward = True

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], training: bool) -> None:
        if batch.get("input_ids") is None:
            raise PackingError(f"batch: expected input_ids, got {', '.join(batch) or 'nothing'}")
        runner = Runner(model, without_ddp(model))
        # a compiled model would be compiled once more for calls without labels
        kept = _OF_OWN_LOSS if runner.is_compiled else set()
        # columns such as weights may be for compute_loss alone, so **kwargs is no reason to pass them to the model
        taken = {*KNOWN_COLUMNS, *runner.signature.names} - _OF_THE_LOSS | kept
        self._inputs = {
            name: each.to(runner.device) if isinstance(each, Tensor) else each
            for name, each in batch.items()
            if name in taken
        }
        ids: Tensor = self._inputs["input_ids"]
        trees = read_layout(self._inputs, training=True).trees
        ends = trees.leaves if batch.get(ENDS) is None else dict.fromkeys(batch[ENDS].tolist())
        tokens = ids.flatten()
        super().__init__(runner, training, trees, [*ends], tokens, _other_tokens(tokens, runner.model))
        replaced = _segments_to_replace(trees)
        self.replacements = [replaced]
        kept_trees = {path[0]: number for number, path in enumerate(self.paths) if path[-1] not in set(replaced)}
        self.graded = [[*kept_trees.values()] or [0]]
        """One document of each tree, which is not replaced."""
        chosen = sampled_documents(self.lengths, self.graded[0], trees.tokens) if len(self.paths) > 1 else []
        self.sample = [*chosen, *[None] * (_CALLS_ALONE - len(chosen))]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        # code that torch.compile has compiled would be compiled again
        sampled = nullcontext() if self.runner.is_compiled else with_sampled_vocabulary(self.model)
        with self.runner.undisturbed(self.training, in_series=True, keeps_modes=True), sampled:
            yield

    def outputs(self, tokens: Tensor) -> list[Tensor]:
        ids: Tensor = self._inputs["input_ids"]
        logits = logits_of(self.model, self.runner({**self._inputs, "input_ids": tokens.view_as(ids)}))
        return self.by_segment(logits.flatten(0, 1))

    @property
    def per_token(self) -> dict[str, Tensor]:
        rows = self._inputs["input_ids"].shape
        return {
            name: value.flatten(0, 1)
            for name, value in self._inputs.items()
            if isinstance(value, Tensor) and value.shape[:2] == rows and name not in READ_ARGUMENTS
        }

    def gradients(
        self, score: Tensor, embedded: Embedded, documents: Sequence[int]
    ) -> tuple[list[Tensor], float] | None:
        found = gradients_of(score, embedded) if embedded else None
        if found is None:
            return None
        by_place = found[0].flatten(0, -2)
        if len(by_place) != len(self.tokens):
            return [by_place], 0.0  # a document alone
        places = [self.tokens_of(number) for number in documents]
        others = by_place.abs().amax(1).index_fill(0, torch.cat(places), 0)
        return [by_place[each] for each in places], float(others.max())


def _other_tokens(tokens: Tensor, model: PreTrainedModel) -> Tensor:
    """Return other tokens of a batch, which the model takes."""
    known, index = torch.unique(tokens, return_inverse=True)
    if len(known) < 2:
        known = torch.cat([known, (known + 1) % len(embedding_of(model).weight)])
    others: Tensor = known[(index + 1) % len(known)]
    return others


_FEW = 4
"""Of fewer documents than this number, every second one is replaced."""


def _segments_to_replace(trees: TreeSegments) -> list[int]:
    """Return about half of the segments that have nothing below them.

    Among many, they are those whose index has an even number of binary digits 1: 0, 3, 5, 6, 9, 10, ... For every
    distance, some of them are that far before one that is kept, and some that far after one, so a leak to any later or
    earlier document is visible.
    """
    leaves = trees.leaves if len(trees.leaves) > 1 else ()
    is_few = len(leaves) < _FEW
    return [leaf for number, leaf in enumerate(leaves) if (number if is_few else number.bit_count()) % 2 == 0]


def sampled_documents(lengths: Sequence[int], documents: Sequence[int], tokens: int) -> list[int]:
    """Return up to three documents to run alone: the longest one that fits, the shortest one, and one of the most
    frequent length. Of several, it is the last one, since most models pass information from earlier to later tokens.

    Args:
        lengths: number of tokens in each document of a batch.
        documents: indices of the documents to choose from, at least one.
        tokens: number of tokens in the batch.
    """
    of_length = {lengths[number]: number for number in documents}
    fitting = [length for length in of_length if length <= tokens // _SHARE_ALONE] or [min(of_length)]
    frequent, _ = Counter(lengths[number] for number in documents if lengths[number] in fitting).most_common(1)[0]
    return [of_length[length] for length in dict.fromkeys((max(fitting), min(fitting), frequent))]


_VOCABULARY_SAMPLE = 64
"""Number of vocabulary entries for which an output layer computes logits. The logits of all entries would need more
memory than the rest of the forward."""


@contextmanager
def with_sampled_vocabulary(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within the block, the linear layers of the output layer compute only some logits.

    The output layer may consist of several linear layers, such as those of LoRA. All other modules run as usual. If the
    model adds a bias for each vocabulary entry itself, all logits are computed.
    """
    head, size = model.get_output_embeddings(), len(embedding_of(model).weight)
    linears = [
        module
        for module in (() if head is None else head.modules())
        if type(module).forward is nn.Linear.forward and "forward" not in vars(module) and module.out_features == size
    ]
    own = {id(module.bias) for module in linears}
    if any(tensor.numel() == size and id(tensor) not in own for tensor in (*model.parameters(), *model.buffers())):
        linears = []
    for module in linears:
        module.forward = partial(_sampled_linear, module)
    try:
        yield
    finally:
        for module in linears:
            del module.forward


def _sampled_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    step = max(1, len(module.weight) // _VOCABULARY_SAMPLE)
    return F.linear(hidden, module.weight[::step], None if module.bias is None else module.bias[::step])


@dataclass(frozen=True)
class BatchProof:
    """The result of a proof on a training batch."""

    tokens: int
    documents: int
    """Number of documents; a piece of a document that was cut counts as a document."""
    longest: int
    """Number of tokens in the longest document."""
    training: bool
    dtype: torch.dtype
    alone: int
    """Number of documents that were compared with the same documents run alone."""
    gradients: bool
    """True if gradients were compared, too."""
    kernel: str
    """The kernel on which the attention of a patched model ran; empty if the model computes attention itself."""
    problem: str = ""
    """The reason why isolation is not proven; empty if it is proven."""
    max_leak: float = 0.0
    """The largest change of an output in documents that were not replaced."""
    max_gradient_leak: float = float("nan")
    """The largest gradient of a document's outputs at another document, divided by the largest gradient at the document
    itself; nan if gradients were not computed."""

    @property
    def where(self) -> str:
        return (
            f"{self.documents:,} documents of up to {self.longest:,} tokens, {self.tokens:,} in all, in "
            f"{'training' if self.training else 'evaluation'} mode and {str(self.dtype).removeprefix('torch.')}"
        )

    def __str__(self) -> str:
        if self.problem:
            return f"not isolated on {self.where}: {self.problem}"
        compared = "logits or gradients" if self.gradients else "logits"
        kernel = f"; kernel: {self.kernel}" if self.kernel else ""
        return (
            f"{self.where}; no document changes the {compared} of another (largest change {self.max_leak:.2g}); alone "
            f"they are the same ({self.alone} compared){kernel}"
        )


@torch.inference_mode(False)  # gradients are compared
def prove_on_batch(model: nn.Module, batch: Mapping[str, Any], training: bool = True) -> BatchProof:
    """Prove isolation on a training batch, and return what was proven. See `BatchCase` for the calls of the model.

    All ranks that shard a model have to call this function at the same time; all of them make the same calls.

    Args:
        model: a model as a training loop calls it, patched or not, with or without wrappers.
        batch: a packed batch, or one of trees, as PackingCollator makes it. Labels are ignored.
        training: whether to run the model in training mode.
    """
    case = BatchCase(model, batch, training)
    proof = prove(case)
    problem = proof.problem
    if on_any_rank(case.model, bool(problem)):
        place = locate_leak(case)
        problem += f"; the difference begins in {place}" if problem and place else ""
    return BatchProof(
        tokens=case.trees.tokens,
        documents=len(case.paths),
        longest=max(case.lengths),
        training=training,
        dtype=case.runner.dtype,
        alone=len(case.known[0].outputs),
        gradients=bool(proof.packed.gradients),
        kernel=kernel_if_any(case.model),
        problem=problem,
        max_leak=proof.max_leak,
        max_gradient_leak=proof.max_gradient_leak,
    )


def kernel_if_any(model: PreTrainedModel) -> str:
    """Return `kernel_of(model)`, or an empty string if attention is left to the model itself."""
    route = route_of(model)
    return kernel_of(model) if route is not None and route.method.attention else ""
