"""TokenBudget, a batching whose micro-batches have at most max_tokens tokens, with about equal work on all ranks."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from hf_packing.checks import (
    INT32_MAX,
    check_choice,
    check_optional_number,
    check_real,
    check_whole_number,
    expect,
    set_fields,
)
from hf_packing.errors import PackingError
from hf_packing.planning.length_schedule import LengthSchedule
from hf_packing.planning.lengths import Array, FloatArray, IntArray, Overflow, total_of
from hf_packing.planning.rank_layout import LINEAR_COST, RankLayout, lay_out
from hf_packing.sampling.batching import (
    CUT_WHEN_PACKED,
    Batching,
    Epoch,
    EpochPlan,
    FittedRows,
    Shapes,
    cut_rows,
    keep_rows,
)
from hf_packing.sampling.fill import (
    Limits,
    fewest_micro_batches,
    fill,
    flatten,
    group_by_cost,
    jitter_attention,
    order_in_steps,
    redistribute_rows,
    sum_rows,
)
from hf_packing.sampling.sizes import RowSizes
from hf_packing.trees.forest import check_fewest_shared

Balance = Literal["attention", "tokens"]

_MOST_LINEAR = 1e12
"""The largest linear_cost that is accepted. With this value, attention no longer affects the balance."""

_ROWS_WITH_FEWER = {
    "tokens": "pack into rows of at most max_tokens tokens",
    "documents": "pack with a strategy that takes max_documents, such as BestFit(max_length, max_documents=...)",
    "patches": "raise max_patches, let the processor make smaller pictures",
}
"""What a user can do about packed rows, or rows with pictures, that are too large, by unit."""

_LONG_DOCUMENTS = (
    "of documents, use overflow='split' or 'truncate'; of pairs and other rows that stay whole, let the trainer or the "
    "collator truncate texts, as max_length of DPOConfig does"
)


@dataclass(frozen=True)
class TokenBudget(Batching):
    """A batching for packed rows or plain documents, whose micro-batches have at most max_tokens tokens.

    Plain documents are packed during training, and are grouped differently from epoch to epoch. Every optimizer step
    has ranks x accumulation micro-batches, and none of them is empty. To fill the last step, micro-batches are split,
    so an epoch may have a few more micro-batches than the documents need. If every micro-batch already has a single
    row, the last step has fewer micro-batches, and if the last of them are too few for all ranks, copies of rows with
    masked labels are added.

    The documents of an optimizer step depend on the product of ranks and accumulation, but not on these two numbers: 8
    ranks, or 4 ranks with an accumulation of 2, or 1 rank with an accumulation of 8 make the same steps. The
    micro-batches of a step have about equal cost. With balance="tokens", short and long documents are mixed instead.

    A packed row of max_tokens tokens is a micro-batch of its own. Such rows run at the same time as rows of about equal
    cost on the other ranks, in combinations that change from epoch to epoch.

    With max_ranks_per_document=k, blocks of k consecutive ranks run rows of up to k * max_tokens tokens together, and a
    document of so many tokens stays whole. Blocks take the place of ranks in what is said above. Long documents are
    split over the ranks of a block, so that every rank has at most max_tokens tokens and about equal work.

    Args:
        max_tokens: the most tokens that a micro-batch may have; on each rank, if documents are on several.
        max_length: the most tokens that a document may have, in evaluations too; None for as many as a micro-batch has
            in training, and for no limit in evaluations. Not for packed rows.
        max_documents: the most documents that a micro-batch may have; None for no limit. Every segment of a packed row,
            and every piece of a split document, counts as a document.
        max_patches: the most patches of pictures that a micro-batch may have, for models of texts and pictures; None
            for no limit.
        balance: the quantity to equalize among the micro-batches of an optimizer step: "tokens" for the number of
            tokens, or "attention" for all work, which is linear_cost * tokens + the sum of squared segment lengths.
        linear_cost: time that linear layers take for one token, in units of the time that attention takes for one pair
            of tokens; None to compute this ratio from the model's configuration, or to use 12288 if that is impossible.
        match_documents_per_step: average number of documents in an optimizer step, over all ranks; None to take as many
            documents as fit. To keep the number of optimizer steps that training has without packing, set this to the
            number of documents per step of that training.
        length_schedule: a LengthSchedule, which cuts documents by extra borders to a length that grows with the
            optimizer steps; None to keep documents whole. Micro-batches are planned as if documents were whole. Each
            piece counts as a document, also for loss="sequence". Evaluation does not cut.
        overflow: treatment of a document with more than max_length tokens, and of a row with more than max_tokens *
            max_ranks_per_document tokens, or max_documents documents: "error" or "drop"; for documents also "split" or
            "truncate".
        max_ranks_per_document: the most ranks that one document may be on, for documents of up to max_tokens *
            max_ranks_per_document tokens. It has to divide the number of ranks. 1 keeps every document on one rank. Not
            with max_documents, max_patches, share_prefixes or length_schedule, and not for streams, rows of trees or
            batches of fixed shapes.
        align_tokens: the number of tokens in every micro-batch is filled up to a multiple of this number, such as 16
            for FP8. max_tokens is rounded down to a multiple. Not with max_ranks_per_document, share_prefixes or
            length_schedule, or with trainers whose rows stay whole. See `PackingCollator`.
        share_prefixes: True for documents that begin with the same tokens, such as several answers to one prompt: a
            shared prefix is computed once, in trees of at most max_tokens tokens. An integer is the fewest tokens to
            share; True means 16. Documents of a tree are in one micro-batch. In a stream, documents of a window share
            prefixes. Packed rows of trees need no flag.
        seed: seed that decides, together with the epoch, the order of rows and which rows share a micro-batch.

    Raises:
        PackingError: a bad argument, which the message names.

    Source:
        Balancing by attention follows hierarchical balance packing, arXiv 2503.07680, but with the same budget for all
        micro-batches.

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.batching import Epoch
        >>> from hf_packing.sampling.sizes import sizes_of_documents
        >>> plan = TokenBudget(8).plan(sizes_of_documents(np.array([5, 3, 2, 6, 4, 4])), Epoch(0, world_size=2))
        >>> plan.num_micro_batches, plan.num_copies, sorted(plan.rows.tolist())
        (2, 0, [0, 1, 2, 3, 4, 5])
    """

    max_tokens: int
    _: KW_ONLY
    max_length: int | None = None
    max_patches: int | None = None
    balance: Balance = "attention"
    linear_cost: float | None = None
    match_documents_per_step: int | None = None
    length_schedule: LengthSchedule | None = None
    overflow: Overflow = "error"
    share_prefixes: bool | int = False
    max_ranks_per_document: int = 1

    @property
    def most_tokens(self) -> int:
        return self.aligned("max_tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("overflow", self.overflow, Overflow)
        check_choice("balance", self.balance, Balance)
        set_fields(
            self,
            max_tokens=check_whole_number("max_tokens", self.max_tokens),
            max_patches=check_optional_number("max_patches", self.max_patches),
            match_documents_per_step=check_optional_number("match_documents_per_step", self.match_documents_per_step),
        )
        if self.linear_cost is not None:
            what = f"a number from 0 to {_MOST_LINEAR:g}, or None"
            set_fields(self, linear_cost=check_real("linear_cost", self.linear_cost, 0, _MOST_LINEAR, what))
        schedule: object = self.length_schedule
        if not isinstance(schedule, LengthSchedule | None):
            raise PackingError(f"length_schedule: expected LengthSchedule(start, steps) or None, got {schedule!r}")
        for name in ("share_prefixes", "length_schedule"):
            if value := getattr(self, name):
                expect(1, f"with {name}={value!r}", align_tokens=self.align_tokens)
        if self.fewest_shared is not None:
            cut = "with share_prefixes, since extra borders would cut shared prefixes"
            expect(None, cut, length_schedule=schedule)
        most = INT32_MAX // self.max_tokens
        ranks = check_whole_number("max_ranks_per_document", self.max_ranks_per_document, maximum=most)
        longest = check_optional_number("max_length", self.max_length, maximum=ranks * self.most_tokens)
        set_fields(self, max_ranks_per_document=ranks, max_length=longest)
        if ranks > 1:
            several = f"with max_ranks_per_document={ranks}"
            expect(1, several, align_tokens=self.align_tokens)
            expect(
                None, several, max_documents=self.max_documents, max_patches=self.max_patches, length_schedule=schedule
            )
            expect(False, several, share_prefixes=self.share_prefixes)

    @property
    def longest_document(self) -> int:
        """The most tokens that a document may have in training."""
        return self.max_length or self.max_ranks_per_document * self.most_tokens

    @property
    def fewest_shared(self) -> int | None:
        return check_fewest_shared(self.share_prefixes)

    def within(self, shapes: Shapes) -> Self:
        fixed = "for batches of fixed shapes, since extra borders change the number of segments"
        expect(None, fixed, length_schedule=self.length_schedule)
        pieces = "for batches of fixed shapes, since ranks have pieces of documents"
        expect(1, pieces, max_ranks_per_document=self.max_ranks_per_document)
        return super().within(shapes)

    def fit(self, sizes: RowSizes) -> FittedRows:
        if sizes.patches is None:
            text = "for rows of text; rows have patches if the collator of the attached trainer returns pixel_values"
            expect(None, text, max_patches=self.max_patches)
        ranks = self.max_ranks_per_document
        if sizes.trees is not None:
            expect(1, "for rows of trees", max_ranks_per_document=ranks)
        if sizes.packed and self.fewest_shared is None:
            expect(None, CUT_WHEN_PACKED, max_length=self.max_length)
        cuts = self.overflow in ("split", "truncate") and not sizes.packed
        fits = sizes.tokens > 0
        for unit, (has, most) in self._limited(sizes).items():
            is_document = unit == "tokens" and not sizes.packed
            if is_document and cuts:
                continue
            name, holder = f"max_{unit}", "a micro-batch" if ranks == 1 else f"a row on {ranks} ranks"
            if is_document and self.max_length is not None:
                name, holder, most = "max_length", "a document", self.max_length
            large = np.flatnonzero(has > most)
            if len(large) and self.overflow != "drop":
                how = f" in multiples of {self.align_tokens}" if unit == "tokens" and self.align_tokens > 1 else ""
                raise PackingError(
                    f"{name}: row {large[0]} has {has[large[0]]} {unit}, but {holder} may have at most {most}{how} "
                    f"(rows with too many: {len(large)} in all); "
                    f"{_LONG_DOCUMENTS if is_document else _ROWS_WITH_FEWER[unit]}, or use overflow='drop'"
                )
            fits[large] = False
        fitted = cut_rows(sizes, self.longest_document, self.overflow) if cuts else keep_rows(sizes, fits)
        return replace(fitted, fewest_micro_batches=fewest_micro_batches(self._limits(fitted)))

    def lay_out(self, lengths: IntArray) -> RankLayout:
        """Return which tokens of a micro-batch each rank of its block holds.

        Args:
            lengths: integers [segments], tokens: the lengths of all segments of the micro-batch, row by row.

        Example:
            >>> budget = TokenBudget(12, max_ranks_per_document=2)
            >>> budget.lay_out(np.array([16, 4, 4])).tokens.tolist()
            [12, 12]
        """
        ranks = self.max_ranks_per_document
        most = max(self.max_tokens, -(-total_of(lengths) // ranks))  # evaluations have micro-batches of any size
        return lay_out(lengths, ranks, most, _MOST_LINEAR if self.balance == "tokens" else self.usual_linear_cost)

    def num_filled(self, rows: FittedRows, epoch: Epoch) -> int:
        """Return the number of micro-batches over all ranks, without those that only have copies of rows.

        Raises:
            PackingError: match_documents_per_step does not fit.
        """
        assert rows.fewest_micro_batches is not None
        optimizer_steps = -(-rows.fewest_micro_batches // epoch.slots)
        if self.match_documents_per_step is not None:
            optimizer_steps = self._matching_steps(rows, optimizer_steps, epoch)
        return min(optimizer_steps * epoch.slots, len(rows.kept))

    def _matching_steps(self, rows: FittedRows, least: int, epoch: Epoch) -> int:
        """Return the number of optimizer steps with match_documents_per_step documents on average.

        Args:
            rows: the rows.
            least: the fewest optimizer steps whose micro-batches hold all rows.
            epoch: the number of ranks, and of micro-batches per optimizer step.

        Raises:
            PackingError: a step has too many or too few documents for its micro-batches; the message says what fits.
        """
        assert self.match_documents_per_step is not None
        documents, most = total_of(rows.sizes.segments[rows.kept]), len(rows.kept) // epoch.slots
        steps = -(-documents // self.match_documents_per_step)
        if least <= steps <= most:
            return steps
        fewest = -(-documents // most) if most else documents + 1
        largest = (documents - 1) // (least - 1) if least > 1 else documents
        raise PackingError(
            f"match_documents_per_step: expected {f'from {fewest} to {largest}' if fewest <= largest else 'None'}, got "
            f"{self.match_documents_per_step} of {documents} documents. Other values fit with more or fewer than the "
            f"{epoch.slots} micro-batches of a step (gradient_accumulation_steps x ranks), or with a larger max_tokens"
        )

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        seed = self.epoch_seed(epoch)
        tokens, squared_lengths = rows.sizes.tokens[rows.kept], rows.sizes.squared_lengths[rows.kept]
        limits = self._limits(rows)
        filled = fill(limits, self.num_filled(rows, epoch), epoch.slots, seed)

        jittered = jitter_attention(sum_rows(filled, squared_lengths), seed)
        steps = group_by_cost(self.cost(sum_rows(filled, tokens), jittered), epoch.slots, seed)
        # copies of the shortest rows become the micro-batches that the last step lacks
        copies = np.resize(np.argsort(tokens, kind="stable"), (steps.size - len(filled), 1)).tolist()
        cost = self.cost(tokens, squared_lengths)
        micro_batches = redistribute_rows(filled + copies, steps, cost, limits)
        order = order_in_steps(steps, sum_rows(micro_batches, cost), len(filled), epoch.world_size, seed)

        planned, offsets = flatten([micro_batches[number] for number in order.tolist()])
        is_copy = np.repeat(order >= len(filled), np.diff(offsets))
        return EpochPlan(epoch.world_size, rows.kept[planned], is_copy, offsets, rows.left_out)

    def _limits(self, rows: FittedRows) -> Limits:
        return [(has[rows.kept], most) for has, most in self._limited(rows.sizes).values()]

    def _limited(self, sizes: RowSizes) -> dict[str, tuple[IntArray, int]]:
        """Return what is limited: what each row has of it, integers [rows], and the limit, by unit, tokens first."""
        limited = {
            "tokens": (sizes.tokens, self.max_ranks_per_document * self.most_tokens),
            "documents": (sizes.segments, self.max_documents),
            "patches": (sizes.patches, self.max_patches),
        }
        return {unit: (has, most) for unit, (has, most) in limited.items() if most is not None and has is not None}

    def cost(self, tokens: IntArray, squared_lengths: Array) -> FloatArray:
        """Return the cost of each row or micro-batch, float64 [n].

        Args:
            tokens: integers [n]: the number of tokens in each row or micro-batch.
            squared_lengths: numbers [n]: the sum of squared segment lengths in each row or micro-batch.
        """
        if self.balance == "tokens":
            return tokens.astype(np.float64)
        cost: FloatArray = self.usual_linear_cost * tokens + squared_lengths
        return cost

    @property
    def usual_linear_cost(self) -> float:
        """The linear_cost; a typical value if it is None."""
        return LINEAR_COST if self.linear_cost is None else self.linear_cost


def with_linear_cost(batching: Batching, config: Any) -> Batching:
    """Return the batching with linear_cost computed from the configuration of a model.

    The batching stays unchanged if it is not a TokenBudget, if linear_cost is already set, or if config is None.
    """
    if config is None or not isinstance(batching, TokenBudget) or batching.linear_cost is not None:
        return batching
    return replace(batching, linear_cost=linear_cost_of(config))


def longest_segment(batching: Batching, step: int) -> int | None:
    """Return the largest length of a segment in an optimizer step, in tokens; None for no limit.

    Args:
        batching: the batching, which may have a length_schedule.
        step: the number of optimizer steps before this one, from the beginning of the training.
    """
    if not isinstance(batching, TokenBudget) or batching.length_schedule is None:
        return None
    return batching.length_schedule.length_at(step, batching.max_tokens)


def with_documents_per_step(batching: Batching, documents: int) -> Batching:
    """Return a copy of the batching in which match_documents_per_step is `documents`."""
    if not isinstance(batching, TokenBudget) or batching.match_documents_per_step not in (None, documents):
        raise PackingError(
            f"match_documents_per_step: expected None with {batching!r}, which decides itself how many documents a "
            f"step has, got {documents!r}"
        )
    return replace(batching, match_documents_per_step=documents)


def linear_cost_of(config: Any) -> float:
    """Return the time that linear layers take for one token, relative to the time of attention for one pair of tokens.

    For one token, linear layers take two operations per weight. For one pair of tokens, attention takes four operations
    per dimension. In a causal model, half of the pairs are masked, but attention kernels reach about half the speed of
    large matrix products, so all pairs are counted.

    Args:
        config: the configuration of a transformers model.

    Returns:
        The ratio of the two times; LINEAR_COST if the configuration does not have the needed sizes. MLPs are assumed to
        be gated, and only layers that attend to whole documents are counted as attention. The ratio only affects the
        balance between ranks.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    of_layer = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config

    def size(name: str, default: int) -> int:
        value = getattr(of_layer, name, None)
        return value if isinstance(value, int) and value else default

    hidden, layers, heads = size("hidden_size", 0), size("num_hidden_layers", 0), size("num_attention_heads", 1)
    if not hidden or not layers:
        return float(LINEAR_COST)
    head_size = size("head_dim", hidden // heads)
    inner = size("moe_intermediate_size", size("intermediate_size", 4 * hidden)) * size("num_experts_per_tok", 1)
    weights = 2 * hidden * head_size * (heads + size("num_key_value_heads", heads)) + 3 * hidden * inner
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    attending = kinds.count("full_attention") or 1
    return weights * layers / (2 * heads * head_size * attending)
