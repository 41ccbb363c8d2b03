"""The cases of a proof: a batch of documents, and what is known of it.

A case runs a model on a batch of documents and on each document alone. It knows the segments of the batch, which of
them may notice a replaced one, and the replacements to try. `prove` does the rest. Random documents in packed rows are
here; padded rows, trees and training batches are in the files of their proofs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.layout import Layout, roots
from hf_packing.attention.model import distinctive_lengths, embedding_of
from hf_packing.attention.runs import (
    Embedded,
    NoLanguageModelError,
    NotCallableError,
    Runner,
    gradients_of,
    logits_of,
)
from hf_packing.attention.snapshot import random_state, seed_all
from hf_packing.attention.tolerance import (
    PROBE,
    Profile,
    Tolerance,
    apart,
    comparable,
    effect_of_rounding,
    has_experts,
    spread,
)
from hf_packing.batch.collate import PackingCollator
from hf_packing.columns import MAX_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.trees.segments import TreeSegments

DocumentTokens = list[list[int]]
"""The token ids of every document, or of every segment of trees."""


@dataclass
class Run:
    """The outputs of a model for a batch."""

    outputs: list[Tensor]
    """The outputs of each segment, float [values, width]."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """For each document, the gradient of a weighted sum of its outputs with respect to its own tokens; empty if
    gradients were not computed."""
    reach: float = float("nan")
    """The largest gradient of a document's outputs at another document's tokens, as a share of the largest one at its
    own tokens."""

    def of(self, segments: Sequence[int]) -> Tensor:
        """Return the outputs of some segments, such as those of a document."""
        return torch.cat([self.outputs[each] for each in segments])


@dataclass
class Alone:
    """The outputs of a model without its patch for documents alone, and the effect of rounding on them."""

    outputs: dict[int, Tensor]
    """float [values, width] for each document."""
    gradients: dict[int, Tensor]
    """The gradients with respect to the tokens of each document; empty if they were not computed."""
    noise: float
    """The largest change of an output by rounding, in standard deviations of all outputs."""

    def without_documents(self) -> "Alone":
        """Return what is known of rounding alone, where documents cannot be compared."""
        return replace(self, outputs={}, gradients={})


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
    is_one_forward = False
    """True if the tokens of each call are embedded in a single forward, so that gradients can be read at their places.
    """

    def __init__(
        self, runner: Runner, training: bool, trees: TreeSegments, ends: Sequence[int], tokens: Tensor, others: Tensor
    ) -> None:
        self.runner, self.training, self.trees, self.tokens, self.others = runner, training, trees, tokens, others
        self.paths = [trees.segments_of(end) for end in ends]
        self.replacements = [[each] for each in range(len(trees.lengths))]
        """The segments that are replaced together, for each run with replaced segments."""
        self.sample: list[int | None] = [*range(len(ends))]
        """The documents that run alone; None for a call that only other ranks need."""
        self.graded = [[each] for each in range(len(ends))]
        """The documents whose outputs have gradients, for each backward pass."""
        self.wants_gradients = training
        self.known: list[Alone] = []
        """The outputs of documents alone, of which those in the batch have to equal one. They are the same on every
        route."""

    @property
    def model(self) -> PreTrainedModel:
        return self.runner.model

    @property
    def per_token(self) -> dict[str, Tensor]:
        """The arguments with which documents run alone, [tokens, ...] for the tokens of the batch."""
        return {"input_ids": self.tokens}

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each document."""
        return [sum(self.trees.lengths[each] for each in path) for path in self.paths]

    def tolerance(self, known: Alone | None = None) -> Tolerance:
        """Return the tolerance for a comparison with documents alone, or with another run on the batch."""
        noise = max((each.noise for each in ([known] if known else self.known)), default=0.0)
        return Tolerance(self.runner.dtype, has_experts(self.model), noise, self.profile)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context manager in which the case runs the model."""
        return self.runner.undisturbed(self.training, in_series=self.training)

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
        segments, others = self.by_segment(self.tokens), self.by_segment(self.others)
        for each in replaced:
            segments[each] = others[each]
        return torch.cat(segments)

    @abstractmethod
    def outputs(self, tokens: Tensor) -> list[Tensor]:
        """Run the model on the batch with these tokens, and return the outputs of each segment, [values, width]."""

    def outputs_alone(self, places: Tensor) -> Tensor:
        """Run the model on a document whose tokens are in these places of the batch, and return its outputs, [values,
        width]."""
        inputs = {name: value[places][None] for name, value in self.per_token.items()}
        return logits_of(self.runner.called, self.runner({**inputs, "use_cache": False}))[0]

    @abstractmethod
    def gradients(
        self, score: Tensor, embedded: Embedded, documents: Sequence[int]
    ) -> tuple[list[Tensor], float] | None:
        """Return the gradients of a score with respect to the tokens of each of some documents, in the batch or alone,
        and the largest one with respect to other tokens; None if there are no gradients."""

    def _leaves(self, tokens: int, noisy: bool = False) -> AbstractContextManager[Embedded]:
        return self.runner.leaves(tokens if self.is_one_forward else None, noisy)

    def run(self, replaced: Sequence[int] = (), gradients: bool = False) -> Run:
        """Run the model on the batch, with some segments replaced. With `gradients`, code that torch.compile has
        compiled runs uncompiled."""
        tokens = self.with_replaced(replaced)
        if not gradients:
            return Run([each.detach() for each in self.outputs(tokens)])
        with self.runner.eagerly(), torch.enable_grad(), self._leaves(len(tokens)) as embedded:
            outputs = Run(self.outputs(tokens))
            found = Run([each.detach() for each in outputs.outputs])
            for documents in self.graded:
                score = torch.stack([score_of(outputs.of(self.paths[each])) for each in documents]).sum()
                graded = self.gradients(score, embedded, documents)
                if graded is None:
                    break
                own, elsewhere = graded
                found.gradients |= zip(documents, own, strict=True)
                largest = max(float(each.abs().max()) for each in own)
                reach = elsewhere / largest if largest else float("inf") if elsewhere else 0.0
                found.reach = max(reach, found.reach)  # not nan, since it comes first
        return found

    def alone(self, attention: str | None = None) -> Alone:
        """Run documents alone on the model without its patch, with its own attention function or another one, and run
        the longest one once more with rounding errors in its embeddings."""
        with self.runner.unpatched(attention), self.runner.eagerly(), torch.set_grad_enabled(self.wants_gradients):
            found = {document: self.run_alone(document) for document in self.sample}
            longest = max((each for each in found if each is not None), key=self.lengths.__getitem__, default=None)
            noisy, _ = self.run_alone(longest, noisy=True)
        unit = spread(torch.cat([outputs for outputs, _ in found.values()]))
        return Alone(
            {document: outputs for document, (outputs, _) in found.items() if document is not None},
            {document: own for document, (_, own) in found.items() if document is not None and own is not None},
            effect_of_rounding(noisy, found[longest][0], unit),
        )

    def run_alone(self, document: int | None, noisy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of a document alone, and the gradients with respect to its tokens, if there are any."""
        dummy = torch.arange(min(_DUMMY_TOKENS, len(self.tokens)), device=self.tokens.device)
        places = dummy if document is None else self.tokens_of(document)
        with self._leaves(len(places), noisy) as embedded:
            outputs = self.outputs_alone(places)
            wanted = self.wants_gradients and not noisy
            graded = self.gradients(score_of(outputs), embedded, [document or 0]) if wanted else None
        return outputs.detach(), None if graded is None else graded[0][0]


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
    size, config = len(embedding_of(model).weight), model.config.get_text_config()
    vocabulary = min(getattr(config, "vocab_size", size), size)  # the weight may have prompt rows
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
    """Return model inputs for documents packed in one row, whose borders a patched model reads, as of any collator."""
    batch = PackingCollator()([{"input_ids": tokens} for tokens in documents])
    return batch | dict.fromkeys(MAX_LENGTHS, int(batch[MAX_LENGTHS[0]]))


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
"""A function that turns documents, or segments of trees, into a model's inputs."""

RANDOM = "the model draws random numbers in training mode even with dropout switched off"
_NO_GRADIENTS = "the model's gradients cannot be computed in training mode, so only logits were compared"
_NOT_CALLABLE = "the model cannot be called in training mode with input_ids alone"


class RowCase(Case):
    """Random documents in packed rows: a few, and so short that a proof takes little time.

    Args:
        runner: runs the model, or its backbone.
        training: whether the model runs in training mode.
        lengths: number of tokens in each document; by default, those that `distinctive_lengths` returns. For documents
            that share prefixes, their segments.
        make_batch: makes the model's inputs; by default, `pack_in_one_row`.
        seed: seed of the random tokens.
        ends: the segment in which each document ends; by default, every segment is a document.
    """

    def __init__(
        self,
        runner: Runner,
        training: bool = False,
        lengths: Sequence[int] | TreeSegments | None = None,
        make_batch: MakeBatch = pack_in_one_row,
        seed: int = 0,
        ends: Sequence[int] | None = None,
    ) -> None:
        lengths = lengths or distinctive_lengths(runner.model)
        trees = lengths if isinstance(lengths, TreeSegments) else roots(lengths)
        documents = random_documents(runner.model, trees.lengths, seed)
        tokens, others = (torch.tensor([token for each in one for token in each]) for one in documents)
        super().__init__(runner, training, trees, ends or range(len(trees.lengths)), tokens, others)
        self.make_batch = make_batch
        self.unproven = ""
        """The reason why isolation cannot be fully proven in training mode, or an empty string."""

    def in_training(self) -> Self:
        """Return the case in training mode."""
        case = copy(self)
        case.training, case.wants_gradients, case.known = True, True, [*self.known]
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
        logits = logits_of(self.runner.called, self.runner({**batch, **options})).flatten(0, 1)
        return [logits[place] for place in places]

    @cached_property
    def owners(self) -> Tensor:
        """The segment that has a token, for each token id; -1 if none or several have it."""
        owners = torch.full((len(embedding_of(self.model).weight),), -1)
        counts = torch.zeros_like(owners)
        for number, tokens in enumerate(self.by_segment(self.tokens)):
            owners[tokens] = number
            counts[torch.unique(tokens)] += 1
        return owners.where(counts < 2, -1).to(self.runner.device)

    def owned_by(self, document: int) -> Tensor:
        """Return which token ids only the segments of a document have, bool [token ids]."""
        return torch.isin(self.owners, torch.tensor(self.paths[document], device=self.owners.device))

    def gradients(
        self, score: Tensor, embedded: Embedded, documents: Sequence[int]
    ) -> tuple[list[Tensor], float] | None:
        """Return gradients by token id, since a model may embed tokens in any number of calls of any shape."""
        if (found := gradients_of(score, embedded)) is None:
            return None
        ids = torch.cat([ids.flatten() for ids, _ in embedded])
        flat = torch.cat([each.flatten(0, -2) for each in found]).float()
        by_token = flat.new_zeros(len(self.owners), flat.shape[-1]).index_add_(0, ids, flat)
        own = [self.owned_by(each) for each in documents]
        others = (self.owners >= 0) & ~torch.stack(own).any(0)
        return [by_token[each] for each in own], float((by_token.abs().amax(1) * others).max())

    def examine(self) -> None:
        """Run every document alone on the model without its patch, before the proof. In training mode, `unproven` has
        the reason if documents cannot be compared.

        Raises:
            NotCallableError: the model cannot be called with input_ids alone.
        """
        failures: list[Exception] = []
        for attention in dict.fromkeys((None, self.runner.other_attention)):
            try:
                with self.undisturbed():
                    self.known = [self._examined(attention)]
                return
            except Exception as error:  # custom model code may raise anything
                failures.append(error)
        if isinstance(failures[0], NoLanguageModelError):
            raise failures[0]
        two_texts = "; an encoder-decoder takes two texts" if self.model.config.is_encoder_decoder else ""
        raise NotCallableError(
            f"{type(self.model).__name__}: the model cannot be called with input_ids alone: {failures[0]}{two_texts}"
        ) from failures[0]

    def _examined(self, attention: str | None) -> Alone:
        """Run every document alone, and once more with another random seed if the model draws random numbers."""
        seed_all(self.runner.seed)
        before = random_state(self.runner.device)
        found = self.alone(attention)
        if self.training and random_state(self.runner.device) != before:
            self.runner.seed += 1
            other = self.alone(attention)
            self.runner.seed -= 1
            one, two = (torch.cat([*each.outputs.values()]) for each in (found, other))
            if not self.tolerance(found).explains(apart(two, one)):
                self.unproven = RANDOM
                return found.without_documents()
        if self.training and not found.gradients:
            self.unproven, self.wants_gradients = _NO_GRADIENTS, False
        return found


def examine_in_training(training: RowCase, evaluation: RowCase) -> None:
    """Run documents alone in training mode or, if that is not enough to compare gradients, once more in evaluation
    mode, with gradients. If the model cannot be called in training mode, no documents are known there."""
    try:
        training.examine()
    except NotCallableError as error:
        training.known, training.unproven = [], f"{_NOT_CALLABLE}: {error.__cause__ or error}"
    if training.unproven:
        evaluation.wants_gradients = True
        evaluation.examine()
