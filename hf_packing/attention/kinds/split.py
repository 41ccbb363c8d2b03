"""Run a row on several ranks: each rank holds some of its tokens, and gets those that its own tokens attend to.

Only attention and modules that run by segment look at other tokens. There, the ranks of a block exchange tokens, with
one call for uneven sizes, whose backward pass is the same call in the other direction. All ranks know from the layout
of the row what the others send. If no rank needs anything of another one, none makes the call.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_packing.attention.batch_proof import BatchCase, halves_to_replace
from hf_packing.attention.kinds.kind import Batch, proving, refuse_earlier_tokens, tokens_of
from hf_packing.attention.layout import Layout, on_device, once_for_all_layers, roots, within
from hf_packing.attention.model import Arguments, Inputs, inner_model
from hf_packing.attention.route import PATCH
from hf_packing.attention.token_axes import Path, TokenAxes, map_tensors
from hf_packing.batch.segments import part_in
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of
from hf_packing.planning.rank_layout import RowPart, plan_exchange
from hf_packing.upstream.torch import timeout_of

ON_RANKS = "rows on several ranks"
"""What rows on several ranks are called among the kinds of batches that are proven for a model."""


@dataclass(frozen=True, eq=False)
class SplitLayout(Layout):
    """This rank's tokens of a row on several ranks. The segments are the rank's pieces of documents."""

    part: RowPart = field(kw_only=True)

    sees_others = True

    @classmethod
    def of_part(cls, part: RowPart, device: torch.device) -> "SplitLayout":
        return cls.of(part.pieces.length.tolist(), device, part=part)

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each of the rank's tokens in its document, int64 [1, tokens]."""
        pieces = self.part.pieces
        return on_device(indices_in_ranges(pieces.start, pieces.length)[None], self.cu_seq_lens.device)

    @property
    def pieces_of_paths(self) -> IntArray:
        """Pieces of documents. The paths are all documents of the row, also those of other ranks."""
        pieces, sizes = self.part.pieces, self.part.layout.lengths
        before, size = offsets_of(sizes)[pieces.document], sizes[pieces.document]
        return np.stack([pieces.start, pieces.start + pieces.length, size, before], axis=1)

    def find_keys(self, places: IntArray, *how: Any) -> IntArray:
        """Return where some tokens of the row are among those that the rank sees."""
        return np.searchsorted(exchange_of(self, *how).seen, places)

    def gather_keys(
        self, key: Tensor, value: Tensor, _: str, is_causal: bool, window: int | None, chunk: int | None
    ) -> tuple[Tensor, Tensor, Arguments]:
        """Get the keys and values that this rank sees from the other ranks, in one exchange."""
        both = exchange_of(self, is_causal, window, chunk)(torch.cat([key, value], dim=3), axis=2)
        key, value = torch.split(both, [key.shape[3], value.shape[3]], dim=3)
        return key, value, {"window on both sides": not is_causal and window}

    def gather_documents(self, given: Any, axes: TokenAxes) -> tuple[Any, Layout, Tensor]:
        """Get the whole documents of which this rank has pieces, since some modules, such as rotary scales, depend on
        their lengths."""
        exchange = exchange_of(self, False, None, None)
        return gather_inputs(given, axes, exchange), exchange.documents, exchange.own


@dataclass(frozen=True, eq=False)
class PartOfRow(Batch):
    """The part of a row on several ranks that this rank holds."""

    layout: SplitLayout

    @classmethod
    def read(cls, forward: Any, inputs: Inputs) -> "PartOfRow | None":
        if (part := part_in(inputs)) is None:
            return None
        refuse_earlier_tokens(inputs)
        ranks = part.layout.num_ranks
        if not (proving.get() or forward.patch.facts.proven.get(ON_RANKS) == ranks):
            raise PackingError(
                f"max_ranks_per_document: expected 1, since it is not proven that {type(forward.model).__name__} runs "
                f"rows on {ranks} ranks; pass the model to prepare_dataloader, or use attach"
            )
        return cls(SplitLayout.of_part(part, tokens_of(inputs).device))

    @classmethod
    def case(cls, model: nn.Module, batch: Mapping[str, Any], training: bool) -> "PartCase | None":
        part = part_in(batch)
        return None if part is None else PartCase(model, batch, part, training)


class PartCase(BatchCase):
    """The part of a row on several ranks that this rank holds. Every piece of a document is a segment.

    All ranks of the row make the same calls: one on the row as it is, and two with about half of the documents
    replaced. No document runs alone: the proof of the step compares whole documents with those of one rank.
    """

    leaks = "replacing documents changed the outputs of other documents on several ranks"
    makes_same_calls = True

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], part: RowPart, training: bool) -> None:
        super().__init__(model, batch, training, lambda inputs: SplitLayout.of_part(part, tokens_of(inputs).device))
        row = roots(part.layout.lengths.tolist())
        self.lengths, self.num_tokens = row.lengths, row.tokens
        self.replacements = [
            np.flatnonzero(np.isin(part.pieces.document, half)).tolist() for half in halves_to_replace(row)
        ]
        self.wants_gradients, self.sample = False, []


@contextmanager
def proves_rows_on(model: nn.Module, ranks: int) -> Iterator[None]:
    """Context manager for the proofs of a patched model on rows on several ranks. After the block, unless it raises an
    error, the model runs such rows."""
    with within(proving, True):
        yield
    getattr(inner_model(model), PATCH).route.facts.proven[ON_RANKS] = ranks


def block_of(ranks: int) -> Any:
    """Return the process group of this rank's block: the consecutive ranks that run a row together. The first call
    makes the groups of all blocks, with the time-out of the default group, so all ranks make it together."""
    return _block_in(dist.group.WORLD, ranks)


@cache
def _block_in(world: Any, ranks: int) -> Any:
    return dist.new_subgroups(group_size=ranks, timeout=timeout_of(world))[0]  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class TokenExchange:
    """Tokens that this rank sends and gets: all that its pieces attend to, its own ones included."""

    sent: Tensor
    """int64: the index of each token to send among the rank's own tokens, by the rank that gets it."""
    sends: list[int]
    receives: list[int]
    order: Tensor
    """int64 [seen]: where each seen token is in what is received. Seen tokens are in the order of the row."""
    own: Tensor
    """int64 [own tokens]: where the rank's own tokens are among those seen."""
    documents: Layout
    """The seen tokens, of each document that the rank has a piece of."""
    seen: IntArray
    """int64 [seen]: the places of the seen tokens in the row, ascending."""
    is_local: bool
    """True if no rank of the block needs anything of another one. Then none makes a call."""

    def __call__(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the seen tokens of a tensor that has the rank's own tokens along an axis; all ranks call this."""
        if self.is_local:
            return tensor
        exact = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
        # gradients of a token that several ranks got are summed in float32
        given = tensor.movedim(axis, 0).to(exact).index_select(0, self.sent).to(tensor.dtype)
        got: Tensor = _AllToAll.apply(given, self.sends, self.receives)  # type: ignore[no-untyped-call]
        return got.index_select(0, self.order).movedim(0, axis)


class _AllToAll(torch.autograd.Function):
    """One all_to_all_single along the first axis. In the backward pass, gradients go back the way that tokens came."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        ctx.way_back = receives, sends
        received = tensor.new_empty(sum(receives), *tensor.shape[1:])
        dist.all_to_all_single(received, tensor.contiguous(), receives, sends, group=block_of(len(sends)))
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AllToAll.apply(gradient, *ctx.way_back), None, None  # type: ignore[no-untyped-call]


@once_for_all_layers
def exchange_of(row: SplitLayout, is_causal: bool, window: int | None, chunk: int | None) -> TokenExchange:
    """Return what this rank sends and gets. The arguments are those of `plan_exchange`."""
    layout, rank, device = row.part.layout, row.part.rank, row.cu_seq_lens.device
    plan, begins = plan_exchange(layout, is_causal=is_causal, window=window, chunk=chunk), offsets_of(layout.lengths)
    spans, own = plan.spans, layout.places(rank)

    def tokens_in(chosen: IntArray, other: IntArray) -> tuple[IntArray, IntArray]:
        """Return the places of the tokens in some spans, and the other rank of each."""
        some = spans.take(chosen)
        places = indices_in_ranges(begins[some.document] + some.start, some.length)
        return places, np.repeat(other[chosen], some.length)

    sent, receiver = tokens_in(np.flatnonzero(plan.sender == rank), plan.receiver)
    seen, sender = tokens_in(np.flatnonzero(plan.receiver == rank), plan.sender)
    documents = np.searchsorted(begins, seen, side="right")
    return TokenExchange(
        sent=on_device(np.searchsorted(own, sent), device),
        sends=np.bincount(receiver, minlength=layout.num_ranks).tolist(),
        receives=np.bincount(sender, minlength=layout.num_ranks).tolist(),
        order=on_device(np.argsort(np.argsort(sender, kind="stable")), device),  # what comes is sorted by sender
        own=on_device(np.searchsorted(seen, own), device),
        documents=Layout.of(np.unique(documents, return_counts=True)[1].tolist(), device),
        seen=seen,
        is_local=not plan.num_received,
    )


def gather_inputs(value: Any, axes: TokenAxes, exchange: TokenExchange) -> Any:
    """Return the nested arguments of a module for all seen tokens, given those for the rank's own tokens.

    Raises:
        PackingError: an argument has a value for each pair of tokens, or a float that counts the tokens of a row.
    """

    def gather(path: Path, leaf: Tensor) -> Tensor:
        along = axes.of(path, leaf)
        counts = path in axes.counting
        if len(along) > 1 or (counts and leaf.is_floating_point()):
            raise PackingError(
                f"max_ranks_per_document: expected 1, since {axes.where} gets a tensor with a value for each pair of "
                "tokens or each place in a row, so documents cannot be on several ranks"
            )
        if along and counts:  # places in the row, of which every segment gets the first ones
            shape = [-1 if axis == along[0] else 1 for axis in range(leaf.ndim)]
            counted = torch.arange(len(exchange.seen), device=leaf.device).view(shape)
            return counted.to(leaf) + leaf.narrow(along[0], 0, 1)
        return exchange(leaf, along[0]) if along else leaf

    return map_tensors(value, gather)
