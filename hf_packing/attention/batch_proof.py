"""Prove isolation on a training batch, at its lengths, in the dtype and on the weights that the model trains with.

If the proof fails, other runs find the module in which the difference begins.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.cases import Case
from hf_packing.attention.layout import Layout
from hf_packing.attention.model import Inputs, embedding_of, without_ddp
from hf_packing.attention.proof import Proof, prove
from hf_packing.attention.runs import Runner
from hf_packing.attention.snapshot import temporarily
from hf_packing.attention.token_axes import tensors_in
from hf_packing.attention.tolerance import BATCH
from hf_packing.batch.segments import segments_in
from hf_packing.columns import KNOWN_COLUMNS, LOSS_WEIGHTS, TREE_BORDERS, TREE_COLUMNS
from hf_packing.errors import PackingError
from hf_packing.trees.segments import TreeSegments

_CALLS_ALONE = 3
"""Number of documents that run alone. All ranks make the same number of calls, since ranks that shard a model wait for
each other in every call."""

_SHARE_ALONE = 4
"""A document that runs alone has at most one in this number of the batch's tokens, unless every document is longer."""

_OF_OWN_LOSS = {"labels", "num_items_in_batch"}
"""Names of the arguments with which a model computes its own loss."""

_OF_THE_LOSS = {*_OF_OWN_LOSS, "shift_labels", "packed_targets", "packed_weights", LOSS_WEIGHTS, *TREE_COLUMNS} - {
    *TREE_BORDERS
}


class BatchCase(Case):
    """A training batch.

    All ranks that shard a model make the same calls, each on at most one batch: one on the batch as it is, one with
    about half of the documents replaced, and four on documents alone. Of trees, segments without any below them are
    replaced, and one document of each tree has gradients, since gradients at shared tokens are sums.

    Args:
        model: a model as a training loop calls it: wrapped by DDP, FSDP, PEFT, DeepSpeed, torch.compile, or not.
        batch: a packed batch, or one of trees, with input_ids [rows, tokens] and borders.
        training: whether the model runs in training mode, with gradients but without dropout.
        read_layout: reads the layout of the batch from the arguments of a model.
        ends: as in `Case`.
    """

    profile = BATCH
    where = "packed batch"
    leaks = "replacing documents changed the outputs of other documents"
    is_embedded_at_once = True

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        training: bool,
        read_layout: Callable[[Inputs], Layout],
        ends: Sequence[int] = (),
    ) -> None:
        if batch.get("input_ids") is None:
            raise PackingError(f"batch: expected input_ids, got {', '.join(batch) or 'nothing'}")
        runner = Runner(model, without_ddp(model))
        # a compiled model would be compiled once more for calls without labels
        kept = _OF_OWN_LOSS if runner.is_compiled else set()
        # columns such as weights may be for compute_loss alone, so **kwargs is no reason to pass them to the model
        taken = {*KNOWN_COLUMNS, *runner.signature.names} - _OF_THE_LOSS | kept
        self.inputs = send_to_device({name: batch[name] for name in batch if name in taken}, runner.device)
        trees = read_layout(self.inputs).documents
        self.places = torch.arange(trees.tokens, device=runner.device)
        known = segments_in(batch)
        runner.multiple = 1 if known is None else known.multiple
        tokens = self.inputs["input_ids"].flatten()[self.places]
        super().__init__(runner, training, trees, ends, tokens, _other_tokens(tokens, runner.model))
        replaced, others = halves_to_replace(trees)
        self.replacements = [replaced, others]
        kept_trees = {path[0]: number for number, path in enumerate(self.paths) if path[-1] not in replaced}
        self.graded = [[*kept_trees.values()] or [0]]
        """One document of each tree, which is not replaced."""
        chosen = sampled_documents(self.lengths, self.graded[0], trees.tokens) if len(self.paths) > 1 else []
        self.sample = [*chosen, *[None] * (_CALLS_ALONE - len(chosen))]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        # code that torch.compile has compiled would be compiled again
        sampled = nullcontext() if self.runner.is_compiled else with_sampled_vocabulary(self.model)
        with self.runner.undisturbed(self.training, as_trained=True), sampled:
            yield


def _other_tokens(tokens: Tensor, model: PreTrainedModel) -> Tensor:
    """Return other tokens of a batch, which the model takes."""
    known, index = torch.unique(tokens, return_inverse=True)
    if len(known) < 2:
        known = torch.cat([known, (known + 1) % len(embedding_of(model).weight)])
    others: Tensor = known[(index + 1) % len(known)]
    return others


_FEW = 4
"""Of fewer documents than this number, every second one is replaced."""


def halves_to_replace(trees: TreeSegments) -> tuple[list[int], list[int]]:
    """Return two halves of the segments that have nothing below them, to be replaced one after the other, so that each
    segment is kept once beside replaced ones.

    Among many, the first half are those whose index has an even number of binary digits 1: 0, 3, 5, 6, 9, 10, ... For
    every distance, some of them are that far before one that is kept, and some that far after one.
    """
    leaves = trees.leaves if len(trees.leaves) > 1 else ()
    count = int if len(leaves) < _FEW else int.bit_count
    halves: tuple[list[int], list[int]] = [], []
    for number, leaf in enumerate(leaves):
        halves[count(number) % 2].append(leaf)
    return halves


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
    with ExitStack() as stack:
        for module in linears:
            stack.enter_context(temporarily(module, forward=partial(_sampled_linear, module)))
        yield


def _sampled_linear(module: nn.Linear, hidden: Tensor) -> Tensor:
    step = max(1, len(module.weight) // _VOCABULARY_SAMPLE)
    return F.linear(hidden, module.weight[::step], None if module.bias is None else module.bias[::step])


def prove_batch(case: BatchCase) -> Proof:
    """Prove isolation on a training batch. If the proof fails, find the module in which the difference begins."""
    proof = prove(case)
    if case.on_any_rank(bool(proof.problem)):
        place = locate_leak(case)
        if proof.problem and place:
            return replace(proof, problem=f"{proof.problem}; the difference begins in {place}")
    return proof


_Record = dict[str, tuple[Tensor, Tensor]]
"""By the name of a module, the sums of magnitudes of some tokens in all tensors of its input and of its output, float64
[tensors * tokens]. Modules are in the order in which their first calls end."""


def locate_leak(case: BatchCase) -> str:
    """Return the class and name of the module in which a difference begins: the first one whose output for kept tokens
    changes when documents are replaced, but not its input; empty if there is none. All ranks make the same calls."""
    return next(filter(None, [_begins_in(case, replaced) for replaced in case.replacements]), "")


def _begins_in(case: BatchCase, replaced: list[int]) -> str:
    """Return the module in which the difference begins that some replaced segments make."""
    with case.undisturbed(), case.runner.eagerly():
        before, after = (_record(case, each, replaced) for each in ([], replaced))
    for name, found in before.items():
        has_same_input, has_same_output = map(torch.equal, found, after.get(name, found))
        if has_same_input and not has_same_output:
            return f"{type(case.model.get_submodule(name)).__name__} ({name or 'the model itself'})"
    return ""


def _record(case: BatchCase, replaced: list[int], compared: list[int]) -> _Record:
    """Run a case with replaced segments, and return what is known of the tokens that none of the compared segments may
    change in the calls of modules on so many tokens as the batch has. Several packed rows count as one long row."""
    tokens = case.inputs["input_ids"].numel()
    kept = torch.zeros(tokens, dtype=torch.bool, device=case.places.device)
    kept[case.places] = ~case.has_tokens(case.may_notice(compared))

    def sums(value: Any) -> Tensor:
        of_tokens = [
            each.detach().reshape(tokens, -1)[kept].abs().sum(1, dtype=torch.float64)
            for each in tensors_in(value)
            if each.dtype != torch.bool and each.ndim > 1 and tokens in (len(each), each.shape[:2].numel())
        ]
        return torch.cat([torch.zeros(0, device=kept.device), *of_tokens])

    found: _Record = {}

    def record(name: str, _: nn.Module, *given: Any) -> None:
        *inputs, output = given
        found.setdefault(name, (sums(inputs), sums(output)))

    with ExitStack() as stack:
        for name, module in case.model.named_modules():
            stack.enter_context(module.register_forward_hook(partial(record, name), with_kwargs=True))
        case.run(replaced)
    return found
