"""The cases of a proof: packed rows of random documents, padded rows, trees, and a training batch.

A case runs a model on a batch of documents and on each document alone. It knows the segments of the batch, which of
them may notice a replaced one, and the replacements to try. `prove` does the rest.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, product
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import (
    distinctive_lengths,
    embedding_of,
    has_local_weights,
    pad_token_of,
    without_ddp,
)
from hf_packing.attention.layout import CACHES, Layout, has_trees, read_layout
from hf_packing.attention.padded import Side
from hf_packing.attention.route import READ_ARGUMENTS
from hf_packing.attention.runs import (
    Embedded,
    NoLanguageModelError,
    NotCallableError,
    Runner,
    gradients_of,
    logits_of,
    what_is_missing,
    with_sampled_vocabulary,
)
from hf_packing.attention.snapshot import random_state, seed_all
from hf_packing.attention.tolerance import (
    BATCH,
    PROBE,
    Noise,
    Profile,
    Tolerance,
    apart,
    comparable,
    has_experts,
    spread,
)
from hf_packing.columns import ENDS, KNOWN_COLUMNS, PARENTS, SEGMENT_LENGTHS, TRAINED, TREE_LABELS
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.trees.segments import TreeSegments

DocumentTokens = list[list[int]]
"""The token ids of every document, or of every segment of trees."""

STOCK_ATTENTIONS = ("eager", "sdpa", "flex_attention")

_WRITTEN_OUT = "eager"
"""The attention function with which documents also run alone if the model's own one gives other outputs. Eager
attention is plain PyTorch code in the model's file. Others have had bugs: in transformers 5.17, "sdpa" ignores Gemma
2's soft cap."""


@dataclass
class Run:
    """What a model returns for a batch.

    Args:
        outputs: float [values, width]: the outputs of one segment after another.
        sizes: the number of values of each segment.
        gradients: for each document, the gradient of a weighted sum of its outputs with respect to its own tokens;
            empty if gradients were not computed.
        reach: the largest gradient of a document's outputs at another document's tokens, as a share of the largest one
            at its own tokens.
    """

    outputs: Tensor
    sizes: Sequence[int]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    reach: float = float("nan")

    @cached_property
    def segments(self) -> Tensor:
        """The segment of each value, int64 [values]."""
        sizes = torch.tensor(self.sizes, device=self.outputs.device)
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)

    @cached_property
    def _borders(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    def of(self, path: Sequence[int]) -> Tensor:
        """Return the outputs of a document, which is a path of segments."""
        return torch.cat([self.outputs[self._borders[each] : self._borders[each + 1]] for each in path])

    def are_in(self, segments: Sequence[int]) -> Tensor:
        """Return which values belong to some segments, bool [values]."""
        return torch.isin(self.segments, torch.tensor(segments, dtype=torch.long, device=self.outputs.device))

    @property
    def are_finite(self) -> bool:
        """True if every segment has a finite output."""
        return len(torch.unique(self.segments[comparable(self.outputs).any(1)])) == len(self.sizes)


@dataclass
class Alone:
    """What a model without its patch returns for documents alone, and what rounding changes in it."""

    outputs: dict[int, Tensor]
    """float [values, width] for each document."""
    gradients: dict[int, Tensor]
    """The gradients with respect to the tokens of each document; empty if they were not computed."""
    noise: Noise
    gradient_noise: Noise
    unit: float | None
    """The standard deviation of all outputs, where single documents have too few; otherwise None."""


Watch = Callable[[list[int], torch.Size], AbstractContextManager[None]]
"""A function that returns a context manager for a call, from the documents and the shape of the call."""

_DUMMY_TOKENS = 8
"""Number of tokens in a call that a rank makes only because the other ranks make it, too."""


class Case(ABC):
    """A batch of documents on which `prove` proves that a model keeps documents apart.

    Args:
        runner: runs the model.
        training: whether the model runs in training mode.
        trees: the segments of the batch; in packed rows and in padded rows, every document is a segment of its own.
        ends: the segment in which each document ends.
        tokens: the token ids of all segments, int64 [tokens].
        others: other token ids, which replace them.
    """

    profile: Profile = PROBE
    where = "the packed row"
    leaks = "changing one document changed the logits of another document"
    what = "logits"
    is_in_series = False
    """True if the model is not restored between runs, so that what it remembers shows as a leak."""

    def __init__(
        self, runner: Runner, training: bool, trees: TreeSegments, ends: Sequence[int], tokens: Tensor, others: Tensor
    ) -> None:
        self.runner, self.training, self.trees, self.tokens, self.others = runner, training, trees, tokens, others
        self.paths = [trees.segments_of(end) for end in ends]
        self.per_token = {"input_ids": tokens}
        """The arguments with which documents run alone, [tokens, ...]."""
        self.replacements = [[each] for each in range(len(trees.lengths))]
        """The segments that are replaced together, for each run with replaced segments."""
        self.sample = [[each] for each in range(len(ends))]
        """The documents that run alone, for each call. Those of a call have the same length."""
        self.graded = self.sample
        """The documents whose outputs have gradients, for each backward pass."""
        self.noise: Noise | None = None
        """The effect of rounding, if it is known from another case of the same model."""
        self.wants_gradients = training
        self.known: list[Alone] = []
        """The outputs of documents alone, as they were found so far."""

    @property
    def model(self) -> PreTrainedModel:
        return self.runner.model

    @property
    def mode(self) -> str:
        return "in training mode, " if self.training else ""  # the start of a message

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each document."""
        return [sum(self.trees.lengths[each] for each in path) for path in self.paths]

    @property
    def unit(self) -> float | None:
        return self.known[0].unit if self.known else None

    def tolerance(self, *noise: Noise) -> Tolerance:
        known = noise or [each.noise for each in self.known[:1]] or [self.noise or Noise()]
        return Tolerance(self.runner.dtype, has_experts(self.model), max(known), self.profile)

    @property
    def is_noisy(self) -> bool:
        """True if the outputs for a document depend on how many other tokens go to the same expert, or have the same
        scale."""
        return has_experts(self.model) or getattr(self.model, "is_quantized", False)

    @property
    def other_attention(self) -> str | None:
        """The attention function with which documents run alone if they differ with the model's own one."""
        own = self.runner.own_attention
        known = own in STOCK_ATTENTIONS or "flash" in str(own)
        return _WRITTEN_OUT if known and own != _WRITTEN_OUT and self.model._can_set_attn_implementation() else None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context manager in which the case runs the model."""
        with self.runner.undisturbed(self.training):
            yield

    def tokens_of(self, document: int) -> Tensor:
        """Return the indices of a document's tokens in the batch, int64 [tokens of the document]."""
        return torch.from_numpy(self.trees.path_of(self.paths[document][-1])).to(self.tokens.device)

    def by_segment(self, values: Tensor) -> list[Tensor]:
        """Return values [tokens, ...] of the batch, segment by segment."""
        return [*torch.split(values, [*self.trees.lengths])]

    def may_notice(self, replaced: Sequence[int]) -> list[int]:
        """Return replaced segments and those below them."""
        return [below for each in replaced for below in range(each, self.trees.ends_below[each])]

    def with_replaced(self, replaced: Sequence[int]) -> Tensor:
        """Return the token ids of the batch, with some segments replaced."""
        is_replaced = Run(self.tokens, self.trees.lengths).are_in(replaced)
        return torch.where(is_replaced, self.others, self.tokens)

    @abstractmethod
    def outputs(self, tokens: Tensor) -> list[Tensor]:
        """Run the model on the batch with these tokens, and return the outputs of each segment, [values, width]."""

    def outputs_alone(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the model on rows of one document each, and return the outputs of each row, [values, width]."""
        return [*logits_of(self.runner.called, self.runner({**inputs, "use_cache": False}))]

    @abstractmethod
    def gradients(
        self, score: Tensor, embedded: Embedded, documents: Sequence[int]
    ) -> tuple[list[Tensor], float] | None:
        """Return the gradients of a score with respect to the tokens of each of some documents, and the largest one
        with respect to the tokens of others; None if there are no gradients."""

    @abstractmethod
    def gradients_alone(self, rows: list[Tensor], embedded: Embedded, documents: list[int]) -> list[Tensor]:
        """Return the gradients of the outputs of rows of one document each; an empty list if there are no gradients."""

    def cut(self, shape: torch.Size) -> torch.Size | None:  # noqa: ARG002
        """Return the shape of the only embedded tokens that become a leaf; None if those of all calls do."""
        return None

    def run(self, replaced: Sequence[int] = (), gradients: bool = False) -> Run:
        """Run the model on the batch, with some segments replaced. With `gradients`, code that torch.compile has
        compiled runs uncompiled."""
        tokens, leaves = self.with_replaced(replaced), self.runner.embeddings.leaves(self.cut(self.tokens.shape))
        if not gradients:
            outputs = self.outputs(tokens)
            return Run(torch.cat(outputs).detach(), [*map(len, outputs)])
        with self.runner.eagerly(), torch.enable_grad(), leaves as embedded:
            outputs = self.outputs(tokens)
            found = Run(torch.cat(outputs).detach(), [*map(len, outputs)])
            for documents in self.graded:
                parts = [torch.cat([outputs[each] for each in self.paths[number]]) for number in documents]
                graded = self.gradients(torch.stack([*map(score_of, parts)]).sum(), embedded, documents)
                if graded is None:
                    break
                own, elsewhere = graded
                found.gradients |= dict(zip(documents, own, strict=True))
                largest = max(float(each.abs().max()) for each in own)
                reach = elsewhere / largest if largest else float("inf") if elsewhere else 0.0
                found.reach = max(reach, found.reach)  # not nan, since it comes first
        return found

    def alone(self, attention: str | None = None, watch: Watch = lambda *_: nullcontext()) -> Alone:
        """Run documents alone on the model without its patch, with its own attention function or another one, together
        with copies of the documents whose embeddings have rounding errors."""
        outputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        copied_gradients: list[tuple[Tensor, Tensor]] = []
        with self.runner.unpatched(attention), self.runner.eagerly(), torch.set_grad_enabled(self.wants_gradients):
            for documents in self.sample:
                dummy = torch.arange(min(_DUMMY_TOKENS, len(self.tokens)), device=self.tokens.device)
                places = [self.tokens_of(number) for number in documents] or [dummy]
                rows: list[Tensor] = []
                graded: list[Tensor] = []
                for at, noisy in self.calls(places):
                    stacked = (torch.stack([value[place] for place in at]) for value in self.per_token.values())
                    inputs = dict(zip(self.per_token, stacked, strict=True))
                    shape = inputs["input_ids"].shape
                    with self.runner.embeddings.leaves(self.cut(shape), noisy) as embedded, watch(documents, shape):
                        found = self.outputs_alone(inputs)
                        graded += self.gradients_alone(found, embedded, documents) if self.wants_gradients else []
                    rows += [each.detach() for each in found]
                number = len(documents)
                outputs |= zip(documents, rows, strict=False)
                gradients |= zip(documents, graded, strict=False)
                copies += zip(rows[number:], rows[:number], strict=False)
                copied_gradients += zip(graded[number:], graded[:number], strict=False)
        unit = self.unit_of([*outputs.values()])
        noise = self.noise or Noise.of([apart(*pair, unit) for pair in copies])
        return Alone(outputs, gradients, noise, Noise.of([apart(*pair) for pair in copied_gradients]), unit)

    def calls(self, places: list[Tensor]) -> list[tuple[list[Tensor], slice | None]]:
        """Return the calls in which documents run alone, given where their tokens are in the batch: the documents of
        each call, and the rows that get rounding errors. A document has a call of its own, since models may mix rows.
        """
        return [(places, None), *([(places, slice(None))] if self.noise is None else [])]

    def unit_of(self, outputs: list[Tensor]) -> float | None:  # noqa: ARG002
        """Return the standard deviation of all outputs of documents alone, if single ones have too few."""
        return None

    def references(self) -> list[Alone]:
        """Return the outputs of documents alone, of which the outputs in the batch have to equal one."""
        self.known = [self.alone()]
        return self.known

    def on_any_rank(self, found: bool) -> bool:
        """Return whether `found` is True on any of the ranks that make the same calls."""
        return found


def score_of(outputs: Tensor) -> Tensor:
    """Return a weighted sum of the outputs of a document, [values, width]. The weights depend only on the place."""
    place, column = (torch.arange(size, device=outputs.device) for size in outputs.shape)
    weights = torch.cos(place[:, None] * 0.7 + column * 1.3 + 0.1).to(outputs.dtype)
    return torch.where(comparable(outputs), outputs, 0).mul(weights).sum()


def random_documents(
    model: PreTrainedModel, lengths: Sequence[int], seed: int
) -> tuple[DocumentTokens, DocumentTokens]:
    """Return random documents, and a replacement for every document. Different documents share no token, and a document
    and its replacement have different tokens at every position, except for the mask token.

    Args:
        model: the model whose vocabulary is used.
        lengths: number of tokens in each document.
        seed: seed of the random tokens.

    Raises:
        PackingError: the vocabulary is too small.
    """
    embedding, config = embedding_of(model), model.config.get_text_config()
    known_size = getattr(config, "vocab_size", len(embedding.weight))
    vocabulary = min(known_size, getattr(embedding, "num_embeddings", known_size))  # the weight may have prompt rows
    settings = vars(model.config) | vars(config)
    special = {value for name, value in settings.items() if name.endswith("_token_id") and isinstance(value, int)}
    known = np.array([token for token in range(1, vocabulary) if token not in special])
    if len(known) < 2 * len(lengths):
        raise PackingError(f"model: expected at least {2 * len(lengths)} non-special token ids, got {len(known)}")
    generator = np.random.default_rng(seed)
    mask = settings.get("mask_token_id")
    documents, others = [], []
    for number, length in enumerate(lengths):
        own = known[number :: len(lengths)]
        tokens = generator.integers(0, len(own), length)
        documents.append(own[tokens].tolist())
        others.append(own[(tokens + generator.integers(1, len(own), length)) % len(own)].tolist())
        if isinstance(mask, int) and 0 <= mask < vocabulary:  # ESM scales embeddings by the share of mask tokens
            documents[-1][2::5] = [mask] * len(documents[-1][2::5])
            others[-1][1::3] = [mask] * len(others[-1][1::3])
    return documents, others


def pack_in_one_row(documents: DocumentTokens) -> dict[str, Any]:
    """Return model inputs for documents packed in one row: the batch that PackingCollator makes, without labels."""
    row = Layout.of([len(tokens) for tokens in documents])
    return {
        "input_ids": torch.tensor([[token for tokens in documents for token in tokens]]),
        "position_ids": row.position_ids,
        "cu_seq_lens_q": row.cu_seq_lens,
        "cu_seq_lens_k": row.cu_seq_lens,
        "max_length_q": row.longest,
        "max_length_k": row.longest,
        "seq_idx": row.seq_idx,
    }


def _find_documents(documents: DocumentTokens, input_ids: Tensor) -> list[slice]:
    """Return a slice for each document: the indices of the document's tokens in the flattened `input_ids`."""
    ids = input_ids.flatten()
    places = []
    for tokens in documents:
        starts = (ids.unfold(0, len(tokens), 1) == torch.tensor(tokens, device=ids.device)).all(1).nonzero()
        if len(starts) != 1:
            raise PackingError(
                "collator: expected a batch that contains every document whole and exactly once, but a document of "
                f"{len(tokens)} tokens occurs {len(starts)} times"
            )
        places.append(slice(int(starts[0, 0]), int(starts[0, 0]) + len(tokens)))
    return places


MakeBatch = Callable[[DocumentTokens], Mapping[str, Any]]
"""A function that turns documents into a model's inputs."""

RANDOM = "the model draws random numbers in training mode even with dropout switched off"
VARYING = "the model's logits for the same tokens vary from run to run in training mode even with the same random seed"
_NO_GRADIENTS = "the model's gradients cannot be computed in training mode, so only logits were compared"


class RowCase(Case):
    """Random documents in packed rows: a few, and so short that a proof takes little time.

    Args:
        runner: runs the model, or its backbone.
        training: whether the model runs in training mode.
        lengths: number of tokens in each document; by default, those that `distinctive_lengths` returns.
        make_batch: makes the model's inputs; by default, `pack_in_one_row`.
        seed: seed of the random tokens.
    """

    def __init__(
        self,
        runner: Runner,
        training: bool = False,
        lengths: Sequence[int] | None = None,
        make_batch: MakeBatch = pack_in_one_row,
        seed: int = 0,
    ) -> None:
        lengths = lengths or distinctive_lengths(runner.model)
        trees = TreeSegments(tuple(lengths), (-1,) * len(lengths))
        self._start(runner, training, trees, range(len(lengths)), make_batch, seed)

    def _start(
        self,
        runner: Runner,
        training: bool,
        trees: TreeSegments,
        ends: Sequence[int],
        make_batch: MakeBatch,
        seed: int,
    ) -> None:
        documents = random_documents(runner.model, trees.lengths, seed)
        tokens, others = (torch.tensor([token for each in one for token in each]) for one in documents)
        super().__init__(runner, training, trees, ends, tokens, others)
        self.make_batch = make_batch
        self.options: dict[str, Any] = {}
        """Further arguments of each call of the model on the batch."""
        self.unproven = ""
        """The reason why isolation cannot be fully proven in training mode, or an empty string."""
        self.can_be_run = True
        """True if the model runs in this mode, and returns the same outputs for the same tokens."""
        self.compares = True
        """False if documents are not compared with documents alone."""

    def in_training(self) -> Self:
        """Return the case in training mode."""
        case = copy(self)
        case.noise = self.known[0].noise if self.known else Noise()
        case.training, case.wants_gradients, case.known = True, True, []
        return case

    @property
    def row(self) -> Layout:
        return Layout.of(self.trees.lengths, self.runner.device)

    @property
    def segments(self) -> DocumentTokens:
        """The tokens of each segment."""
        return [each.tolist() for each in self.by_segment(self.tokens)]

    def outputs(self, tokens: Tensor, embedded: bool = False, **options: Any) -> list[Tensor]:
        """Run the model on the batch with these tokens or their embeddings, and return the outputs of each segment."""
        segments = [each.tolist() for each in self.by_segment(tokens)]
        batch = {name: value for name, value in self.make_batch(segments).items() if name != "labels"}
        places = _find_documents(segments, batch["input_ids"])
        if embedded:
            ids = batch.pop("input_ids").to(self.runner.device)
            batch["inputs_embeds"] = self.model.get_input_embeddings()(ids)
        logits = logits_of(self.runner.called, self.runner({**batch, **self.options, **options})).flatten(0, 1)
        return [logits[place] for place in places]

    @cached_property
    def own_tokens(self) -> list[Tensor]:
        """The token ids that only one segment has, for each segment: some models add others themselves."""
        segments = self.by_segment(self.tokens)
        ids, owners = torch.unique(torch.cat([*map(torch.unique, segments)]), return_counts=True)
        return [own[torch.isin(own, ids[owners == 1])] for own in map(torch.unique, segments)]

    def gradients(
        self, score: Tensor, embedded: Embedded, documents: Sequence[int]
    ) -> tuple[list[Tensor], float] | None:
        if (found := gradients_of(score, [leaf for _, leaf in embedded])) is None:
            return None
        ids = torch.cat([ids.flatten() for ids, _ in embedded])
        flat = torch.cat([each.flatten(0, -2) for each in found]).float()
        size = max(int(ids.max()), int(self.tokens.max())) + 1
        by_token = flat.new_zeros(size, flat.shape[-1]).index_add_(0, ids, flat)
        own = [torch.cat([self.own_tokens[each] for each in self.paths[number]]) for number in documents]
        inside = {each for number in documents for each in self.paths[number]}
        others = [by_token[each] for number, each in enumerate(self.own_tokens) if number not in inside]
        return [by_token[each] for each in own], max((float(each.abs().max()) for each in others), default=0.0)

    def gradients_alone(self, rows: list[Tensor], embedded: Embedded, documents: list[int]) -> list[Tensor]:
        found = self.gradients(score_of(rows[0]), embedded, documents)
        return [] if found is None else found[0]

    def references(self) -> list[Alone]:
        return self.known if self.compares else []

    def examine(self) -> None:
        """Run every document alone on the model without its patch, before the proof. In training mode, `unproven` has
        the reason if documents cannot be compared.

        Raises:
            NotCallableError: the model cannot be called with input_ids alone, in evaluation mode.
        """
        failures: list[Exception] = []
        self.known = []
        for attention in dict.fromkeys((None, self.other_attention)):
            try:
                with self.undisturbed():
                    if self.training:
                        self.unproven = self.randomness(partial(self._add_alone, attention))
                    else:
                        self._add_alone(attention)
            except Exception as error:  # custom model code may raise anything
                failures.append(error)
                continue
            if self.unproven:
                self.known, self.can_be_run = [], self.unproven != VARYING
            elif self.training and not self.known[0].gradients:
                self.unproven, self.wants_gradients = _NO_GRADIENTS, False
            return
        if self.training:
            self.unproven = f"the model cannot be called in training mode with input_ids alone: {failures[0]}"
            self.known, self.can_be_run = [], False
        elif isinstance(failures[0], NoLanguageModelError):
            raise failures[0]
        else:
            raise NotCallableError(
                f"{type(self.model).__name__}: the model cannot be called with input_ids alone: {failures[0]}"
                f"{what_is_missing(self.model)}"
            ) from failures[0]

    def _add_alone(self, attention: str | None) -> Tensor:
        """Run every document alone, and return all outputs, which are known then if none were."""
        found = self.alone(attention)
        self.known = self.known or [found]
        return torch.cat([*found.outputs.values()])

    def randomness(self, run: Callable[[], Tensor]) -> str:
        """Return how the outputs of `run` depend on the random seed, or vary for the same seed; empty if neither."""
        seed_all(self.runner.seed)
        before = random_state(self.runner.device)
        one = run()
        if random_state(self.runner.device) == before:
            return ""
        self.runner.seed += 1
        other = run()
        self.runner.seed -= 1
        if not self._vary(one, other):
            return ""
        return VARYING if self._vary(one, run()) else RANDOM

    def _vary(self, one: Tensor, other: Tensor) -> bool:
        return not self.tolerance().explains(apart(other, one))

    def memory(self, packed: Run) -> list[str] | None:
        """Return the names of buffers through which a run affects the next one; None if none does."""
        with self.runner.in_series():
            self.run(range(len(self.trees.lengths)))
            written = self.runner.buffers_written()
            later = self.run()
        return written if self._vary(packed.outputs, later.outputs) else None


def examine_in_training(training: RowCase, evaluation: RowCase) -> None:
    """Run documents alone in training mode or, if that is not enough to compare gradients, once more in evaluation
    mode, with gradients."""
    training.examine()
    if training.unproven:
        evaluation.wants_gradients = True
        evaluation.examine()


TREES = TreeSegments((13, 7, 11, 5, 9, 6, 1, 8, 12, 9, 4, 10), (-1, 0, 1, 1, 0, 0, 5, 5, -1, 8, 8, -1))
_ENDS = (1, 2, 3, 4, 6, 7, 9, 10, 11)
"""The trees of the proof, with 95 tokens: three levels, a document that ends inside others, a segment of a single
token, branches that are not the first of their parent, and a document alone."""


class TreeCase(RowCase):
    """Random documents that share prefixes in a row of trees."""

    where = "a tree"
    leaks = "changing one segment of a tree changed the logits of tokens that are not below it"

    def __init__(self, runner: Runner) -> None:
        self._start(runner, False, TREES, _ENDS, _row_of_trees, 0)


def _row_of_trees(segments: DocumentTokens) -> dict[str, Any]:
    tokens = torch.tensor([[token for each in segments for token in each]])
    return {"input_ids": tokens, SEGMENT_LENGTHS: torch.tensor(TREES.lengths), PARENTS: torch.tensor(TREES.parents)}


_NOT_COMPARED = ("loss", "hidden_states", "attentions", "aux_loss", "router_logits", *CACHES)
"""Names of outputs of padded rows that are not compared."""


class PaddedCase(RowCase):
    """Random documents as the rows of a padded batch of a model with any head. All outputs of a row are compared, as
    one vector: those of its tokens, and those of the row as a whole."""

    where = "the padded batch"

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        super().__init__(runner, seed=seed)
        self.side: Side = "right"
        self._has_choices = False
        """True if the model takes an axis of choices between the axes of rows and of tokens."""

    def examine(self) -> None:
        """Run every document alone, and before that find documents that the model takes: two of them end in an end
        token, which some heads look for; or all, as BART needs for classification; or none. If the model does not take
        rows of tokens, it gets rows with a single choice each, as models for multiple choice need."""
        if self.training or self.unit:
            super().examine()
            return
        end, pad = getattr(self.model.config.get_text_config(), "eos_token_id", None), pad_token_of(self.model)
        has_end = isinstance(end, int) and 0 <= end < len(embedding_of(self.model).weight) and end != pad
        last = torch.from_numpy(self.trees.begins[1:] - 1)
        own, failures = (self.tokens, self.others), []
        for self._has_choices, ends in product((False, True), ((0, 2), (0, 1, 2), ()) if has_end else ((),)):
            self.tokens, self.others = (one.index_fill(0, last[list(ends)], end or 0) for one in own)
            self.per_token = {"input_ids": self.tokens}
            try:
                super().examine()
                return
            except NotCallableError as error:
                failures.append(error)
        raise ModelNotSupportedError(str(failures[0])) from failures[0]

    def unit_of(self, outputs: list[Tensor]) -> float | None:
        return spread(torch.cat(outputs))

    def outputs(self, tokens: Tensor, embedded: bool = False, **options: Any) -> list[Tensor]:
        rows = self.by_segment(tokens)
        longest = max(self.trees.lengths)
        ids = torch.full((len(rows), longest), pad_token_of(self.model) or 0)
        mask, slices = torch.zeros_like(ids), []
        for number, row in enumerate(rows):
            missing = longest - len(row)
            start = {"right": 0, "left": missing, "both": missing // 2}[self.side]
            slices.append(slice(start, start + len(row)))
            ids[number, slices[-1]], mask[number, slices[-1]] = row, 1
        return self._outputs_of_rows(ids, mask, slices, embedded, **self.options, **options)

    def outputs_alone(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        ids = inputs["input_ids"]
        return self._outputs_of_rows(ids, torch.ones_like(ids), [slice(ids.shape[1])] * len(ids), use_cache=False)

    def _outputs_of_rows(
        self, ids: Tensor, mask: Tensor, slices: list[slice], embedded: bool = False, **options: Any
    ) -> list[Tensor]:
        """Run the model on a batch with tokens in some slices of its rows, and return all outputs of each row."""
        runner, tokens = self.runner, max(each.stop for each in slices)
        if "use_cache" not in runner.signature.names:  # some models pass their own
            options.pop("use_cache", None)
        given = {"inputs_embeds": embedding_of(self.model)(ids.to(runner.device))} if embedded else {"input_ids": ids}
        inputs = {**given, "attention_mask": mask}
        if self._has_choices:
            inputs = {name: value[:, None] for name, value in inputs.items()}
        rows: list[list[Tensor]] = [[] for _ in slices]
        for name, value in runner({**options, **inputs}).items():
            if name in _NOT_COMPARED or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if len(value) != len(slices):
                raise ModelNotSupportedError(f"its output {name} has no axis for the rows of a batch")
            value = value.to(torch.promote_types(value.dtype, torch.float32))
            has_tokens = value.shape[1:2] == (tokens,)
            for row, values, place in zip(rows, value, slices, strict=True):
                row.append((values[place] if has_tokens else values).flatten())
        return [torch.cat(each)[:, None] for each in rows]


_FEW = 4
"""Of fewer segments than this number, every second one is replaced."""

_CALLS_ALONE = 3
"""Number of calls in which sampled documents run alone. All ranks make the same number of calls, since ranks that shard
a model wait for each other in every call."""

_SHARE_ALONE = 4
"""The sampled documents have at most one in this number of the batch's tokens, unless every document is longer."""

_OF_OWN_LOSS = {"labels", "num_items_in_batch"}
"""Names of the arguments with which a model computes its own loss."""

_OF_THE_LOSS = {*_OF_OWN_LOSS, "shift_labels", "targets", "target_weights", TREE_LABELS, ENDS, TRAINED}


class BatchCase(Case):
    """A training batch at its own lengths, in the dtype and on the weights that the model trains with.

    All ranks that shard a model make the same calls, each on at most one batch: one on the batch as it is, one with
    half of the documents replaced, and three on sampled documents alone. Of trees, segments are replaced, with
    everything below them, and one document of each tree has gradients, since gradients at shared tokens are sums.

    Args:
        model: a model as a training loop calls it: wrapped by DDP, FSDP, PEFT, DeepSpeed, torch.compile, or not.
        batch: a packed batch, or one of trees, with input_ids [rows, tokens] and borders.
        training: whether the model runs in training mode, with gradients but without dropout.
    """

    profile = BATCH
    where = "the packed batch"
    leaks = "replacing documents changed the outputs of other documents"
    what = "outputs"
    is_in_series = True

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], training: bool) -> None:
        if batch.get("input_ids") is None:
            raise PackingError(f"batch: expected input_ids, got {', '.join(batch) or 'nothing'}")
        runner = Runner(model, without_ddp(model))
        given = {name: each.to(runner.device) if isinstance(each, Tensor) else each for name, each in batch.items()}
        # a compiled model would be compiled once more for calls without labels
        kept = _OF_OWN_LOSS if runner.is_compiled else set()
        # columns such as weights may be for compute_loss alone, so **kwargs is no reason to pass them to the model
        taken = {*KNOWN_COLUMNS, *runner.signature.names} - _OF_THE_LOSS | kept
        self._inputs = {name: value for name, value in given.items() if name in taken}
        ids: Tensor = self._inputs["input_ids"]
        if has_trees(batch):
            read_layout(self._inputs)
            trees = TreeSegments.from_arrays(batch[SEGMENT_LENGTHS].cpu(), batch[PARENTS].cpu())
            ends = [*trees.leaves] if batch.get(ENDS) is None else [*dict.fromkeys(batch[ENDS].tolist())]
        else:
            lengths = read_layout(self._inputs, training=True).lengths
            trees, ends = TreeSegments(lengths, (-1,) * len(lengths)), [*range(len(lengths))]
        super().__init__(runner, training, trees, ends, ids.flatten(), _other_tokens(ids.flatten(), runner.model))
        self.per_token = {
            name: value.flatten(0, 1)
            for name, value in self._inputs.items()
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape and name not in READ_ARGUMENTS
        }
        self.replaced = _segments_to_replace(trees)
        self.replacements = [self.replaced] if self.replaced else []
        gone = [number for number, path in enumerate(self.paths) if path[-1] in set(self.replaced)]
        groups = sampled_documents(self.lengths, gone, trees.tokens)
        self.sample = [*groups, *[[]] * (_CALLS_ALONE - len(groups))]
        order = [*(number for group in groups for number in group), *set(range(len(self.paths))).difference(gone)]
        self.graded = [sorted({self.paths[number][0]: number for number in reversed(order or [0])}.values())]
        """One document of each tree, which is not replaced and, if possible, runs alone, too."""

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        # code that torch.compile has compiled would be compiled again
        sampled = nullcontext() if self.runner.is_compiled else with_sampled_vocabulary(self.model)
        with self.runner.undisturbed(self.training, keeps_modes=True), self.runner.in_series(), sampled:
            yield

    def outputs(self, tokens: Tensor) -> list[Tensor]:
        ids: Tensor = self._inputs["input_ids"]
        logits = logits_of(self.model, self.runner({**self._inputs, "input_ids": tokens.view_as(ids)}))
        if logits.shape[:2].numel() != len(tokens):
            raise ModelNotSupportedError(
                f"model: expected an output for each of {len(tokens)} tokens, but {type(self.model).__name__} returns "
                f"{list(logits.shape)}"
            )
        return self.by_segment(logits.flatten(0, 1))

    def cut(self, shape: torch.Size) -> torch.Size | None:
        return shape

    def calls(self, places: list[Tensor]) -> list[tuple[list[Tensor], slice | None]]:
        return [(places * 2, slice(len(places), None))]

    def gradients(
        self, score: Tensor, embedded: Embedded, documents: Sequence[int]
    ) -> tuple[list[Tensor], float] | None:
        found = gradients_of(score, [leaf for _, leaf in embedded])
        if not found:
            return None
        by_place = found[0].flatten(0, 1)
        places = [self.tokens_of(number) for number in documents]
        others = by_place.abs().amax(1).index_fill(0, torch.cat(places), 0)
        return [by_place[each] for each in places], float(others.max())

    def gradients_alone(self, rows: list[Tensor], embedded: Embedded, documents: list[int]) -> list[Tensor]:  # noqa: ARG002
        found = gradients_of(torch.stack([*map(score_of, rows)]).sum(), [leaf for _, leaf in embedded])
        return [*found[0]] if found else []

    def on_any_rank(self, found: bool) -> bool:
        if has_local_weights(self.model) or not torch.distributed.is_initialized():
            return found
        flag = torch.tensor(found, dtype=torch.int32, device=self.runner.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)


def _other_tokens(tokens: Tensor, model: PreTrainedModel) -> Tensor:
    """Return other tokens of a batch, which the model takes."""
    known, index = torch.unique(tokens, return_inverse=True)
    if len(known) < 2:
        known = torch.cat([known, (known + 1) % len(embedding_of(model).weight)])
    others: Tensor = known[(index + 1) % len(known)]
    return others


def _segments_to_replace(trees: TreeSegments) -> list[int]:
    """Return about half of the segments and, of trees, those with at most half of the tokens.

    Among many segments, they are those whose index has an even number of binary digits 1: 0, 3, 5, 6, 9, 10, ... For
    every distance, some of them are that far before one that is kept, and some that far after one, so a leak to any
    later or earlier document is visible.
    """
    number = len(trees.lengths)
    left = trees.tokens // 2 if trees.has_branches else trees.tokens
    replaced: set[int] = set()
    for segment, parent in enumerate(trees.parents if number > 1 else ()):
        is_chosen = segment % 2 == trees.has_branches if number < _FEW else segment.bit_count() % 2 == 0
        below = int(trees.begins[trees.ends_below[segment]] - trees.begins[segment])
        if parent in replaced:
            replaced.add(segment)
        elif is_chosen and below <= left:
            replaced.add(segment)
            left -= below
    return sorted(replaced)


def sampled_documents(lengths: Sequence[int], replaced: Sequence[int], tokens: int) -> list[list[int]]:
    """Return groups of documents to run alone. The documents of a group have the same length.

    The groups are those of the longest documents that fit, of the shortest documents, and of the most frequent length.
    Documents that are not replaced are preferred, since only these have gradients. After that, later documents are
    preferred, since most models pass information from earlier to later tokens.

    Args:
        lengths: number of tokens in each document of a batch.
        replaced: indices of the documents that are replaced.
        tokens: number of tokens in the batch.

    Returns:
        At most 3 groups with indices of documents, which have at most a quarter of all tokens; or one group with the
        shortest document, if every document is longer. The result is empty for a batch of one document.
    """
    if len(lengths) < 2:
        return []
    left = tokens // _SHARE_ALONE
    documents = [number for number in range(len(lengths)) if number not in set(replaced)]
    if not any(lengths[number] <= left for number in documents):
        documents = list(range(len(lengths)))
    fitting = Counter(lengths[number] for number in documents if lengths[number] <= left)
    if not fitting:
        return [[min(reversed(documents), key=lambda number: lengths[number])]]
    shortest = min(fitting)
    longest = max(length for length in fitting if length + shortest <= left or length == shortest)
    groups = []
    for length in dict.fromkeys((longest, shortest, fitting.most_common(1)[0][0])):
        of_length = [number for number in reversed(documents) if lengths[number] == length]
        if chosen := of_length[: left // length]:
            groups.append(chosen)
            left -= length * len(chosen)
    return groups
