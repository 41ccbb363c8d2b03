"""The cases of a proof: a batch of documents, and what is known of it.

A case runs a model on a batch of documents and on each document alone. It knows the segments of the batch, which of
them may notice a replaced one, and the replacements to try. `prove` does the rest. Random documents in packed rows are
here, and what they show of a model's own loss; training batches are in batch_proof, and the cases of other kinds of
batches in the files of these (kinds).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from math import isfinite
from typing import Any, Self

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.layout import Layout
from hf_packing.attention.model import (
    Arguments,
    Inputs,
    distinctive_lengths,
    distinctive_multiple,
    embedding_of,
    has_local_weights,
)
from hf_packing.attention.route import READ_ARGUMENTS
from hf_packing.attention.runs import (
    Embedded,
    NoLanguageModelError,
    NotCallableError,
    Runner,
    logits_of,
)
from hf_packing.attention.snapshot import temporarily
from hf_packing.attention.tolerance import (
    PROBE,
    Profile,
    Tolerance,
    apart,
    comparable,
    has_experts,
)
from hf_packing.batch.collate import PackingCollator
from hf_packing.batch.segments import LongestSegment, fill_up, segments_in
from hf_packing.columns import IGNORED_LABEL, MAX_LENGTHS
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.trees.segments import TreeSegments

DocumentTokens = list[list[int]]
"""The token ids of every document, or of every segment of trees."""


@dataclass
class Run:
    """The outputs of a model, for a batch or for a document alone."""

    outputs: list[Tensor]
    """The outputs of each segment, float [values, width]."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """For each document, the gradient of a weighted sum of its outputs with respect to its own tokens; empty if
    gradients were not computed."""
    reach: float = float("nan")
    """The largest gradient of a document's outputs at another document's tokens, as a share of the largest one at its
    own tokens."""
    failure: str = ""
    """The error of the backward pass; empty if there was none."""

    def of(self, segments: Sequence[int]) -> Tensor:
        """Return the outputs of some segments, such as those of a document."""
        return torch.cat([self.outputs[0][:0], *(self.outputs[each] for each in segments)])


@dataclass
class Alone:
    """The runs of documents alone on a model without its patch, and the effect of rounding on them."""

    runs: dict[int, Run]
    """The run of each document; empty if documents cannot be compared."""
    noise: float = 0.0
    """The largest change of an output by rounding, in standard deviations of the outputs; 0 if it was not measured."""


_Graded = Sequence[dict[int, list[int]]]
"""For each backward pass, the documents whose outputs have gradients, and the segments of each among the outputs."""

_DUMMY_TOKENS = 8
"""Number of tokens in a call that a rank makes only because the other ranks make it, too."""


class Case:
    """A batch of documents on which `prove` proves that a model keeps documents apart.

    Args:
        runner: runs the model.
        training: whether the model runs in training mode.
        trees: the segments of the batch; in packed rows and in padded rows, every document is a segment of its own.
        ends: the segment in which each document ends; by default, every segment without any below it ends one.
        tokens: the token ids of all segments, int64 [tokens].
        others: other token ids, which replace them.
    """

    profile: Profile = PROBE
    where = "packed row"
    leaks = "changing one document changed the logits of another document"
    only_of_batch: Collection[str] = READ_ARGUMENTS
    """Names of inputs that a document does not get when it runs alone."""
    is_embedded_at_once = False
    """True if gradients are compared at each place, which one call of the embedding embeds together with all others.
    Otherwise, they are compared at each token id, in any number of calls of any shape."""

    inputs: Inputs
    """The model's inputs for the batch, with input_ids [rows, tokens]."""
    places: Tensor
    """Where the tokens of the segments are in the flattened input_ids, int64 [tokens]."""
    makes_same_calls = False
    """True if several ranks run the batch together, and have to make the same calls."""

    def __init__(
        self, runner: Runner, training: bool, trees: TreeSegments, ends: Sequence[int], tokens: Tensor, others: Tensor
    ) -> None:
        self.runner, self.training, self.trees, self.tokens, self.others = runner, training, trees, tokens, others
        self.segment = torch.repeat_interleave(torch.tensor(trees.lengths, device=runner.device))
        """The segment of each token, int64 [tokens]."""
        self.paths = [trees.segments_of(end) for end in ends or trees.leaves]
        self.lengths: Sequence[int] = [sum(trees.lengths[each] for each in path) for path in self.paths]
        """The number of tokens of each document."""
        self.num_tokens = trees.tokens
        """The number of tokens of all documents together."""
        self.replacements = [[each] for each in range(len(trees.lengths))]
        """The segments that are replaced together, for each run with replaced segments."""
        self.sample: list[int | None] = [*range(len(self.paths))]
        """The documents that run alone; None for a call that only other ranks need."""
        self.graded = [[each] for each in range(len(self.paths))]
        """The documents whose outputs have gradients, for each backward pass."""
        self.wants_gradients = training
        self.known: list[Alone] = []
        """What is known of documents alone. Those in the batch have to equal one of these. They are the same on every
        route."""

    @property
    def model(self) -> PreTrainedModel:
        return self.runner.model

    def on_any_rank(self, found: bool) -> bool:
        """Return whether `found` is True on any of the ranks that make the same calls, as those that shard a model."""
        return any(gather_object([found])) if self.makes_same_calls or not has_local_weights(self.model) else found

    def tolerance(self, *known: Alone) -> Tolerance:
        """Return the tolerance for a comparison with these documents alone or, by default, with all that are known."""
        noise = max((each.noise for each in known or self.known), default=0.0)
        return Tolerance(self.runner.dtype, has_experts(self.model), noise, self.profile)

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context manager in which the case runs the model."""
        return self.runner.undisturbed(self.training)

    def has_tokens(self, segments: Sequence[int]) -> Tensor:
        """Return which tokens belong to some segments, bool [tokens]."""
        return _is_any(self.segment, segments)

    def may_notice(self, replaced: Sequence[int]) -> list[int]:
        """Return replaced segments and those below them."""
        return [below for each in replaced for below in range(each, self.trees.ends_below[each])]

    def with_replaced(self, replaced: Sequence[int]) -> Tensor:
        """Return the token ids of the batch, with some segments replaced."""
        return torch.where(self.has_tokens(replaced), self.others, self.tokens)

    def outputs(self, tokens: Tensor, embedded: bool = False, **options: Any) -> list[Tensor]:
        """Run the model on the batch with these tokens or their embeddings, and return the outputs of each segment,
        [values, width]."""
        ids = self.inputs["input_ids"]
        inputs = {**self.inputs, **options, "input_ids": ids.flatten().index_copy(0, self.places, tokens).view_as(ids)}
        if embedded:
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        return self.ask(inputs, self.places, self.trees.lengths)

    def outputs_alone(self, tokens: Tensor, length: int) -> list[Tensor]:
        """Run the model on a document that has these tokens of the batch, int64 [tokens], and return the outputs of so
        many of them, [values, width]. The others fill it up: the mask hides them from models that see later tokens."""
        shape = self.inputs["input_ids"].shape
        inputs = {
            name: value.flatten(0, 1)[self.places[tokens]][None]
            for name, value in self.inputs.items()
            if isinstance(value, Tensor) and value.shape[:2] == shape and name not in self.only_of_batch
        } | {"input_ids": self.tokens[tokens][None], "use_cache": False}
        numbers = torch.arange(len(tokens), device=tokens.device)
        if length < len(tokens):  # else, a mask would hide that a model takes pad tokens for padding
            inputs["attention_mask"] = (numbers < length).long()[None]
        return self.ask(inputs, numbers[:length], [length])

    def ask(self, inputs: Inputs, places: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Run the model, and return the outputs of each segment, [values, width], whose tokens are in these places."""
        logits = logits_of(self.runner.called, self.runner(inputs)).flatten(0, 1)
        return [*torch.split(logits[places], [*lengths])]

    @cached_property
    def owners(self) -> Tensor:
        """The segment that each place of the batch or, by default, each token id belongs to; -1 for an id that none or
        several segments have, and for what fills up the batch."""
        places, count = self.tokens, len(embedding_of(self.model).weight)
        if self.is_embedded_at_once:
            places, count = self.places, self.inputs["input_ids"].numel()
        none = self.segment.new_full((count,), -1)
        first, last = (
            none.scatter_reduce(0, places, self.segment, reduce, include_self=False) for reduce in ("amin", "amax")
        )
        return first.where(first == last, -1)

    def gradients_at(self, score: Tensor, embedded: Embedded, places: Tensor) -> Tensor:
        """Return the gradients of a score with respect to each place of the batch or each token id, float [places or
        token ids, width]. The model has run on the tokens in some places, int64."""
        found = torch.autograd.grad(score, [leaf for _, leaf in embedded], retain_graph=True, materialize_grads=True)
        at = torch.cat([places if self.is_embedded_at_once else ids.flatten() for ids, _ in embedded])
        flat = torch.cat([each.flatten(0, -2) for each in found]).float()
        return flat.new_zeros(len(self.owners), flat.shape[-1]).index_add_(0, at, flat)

    def owned_by(self, *documents: int) -> Tensor:
        """Return which places or token ids only the segments of some documents have, bool like `owners`."""
        return _is_any(self.owners, [*chain.from_iterable(self.paths[each] for each in documents)])

    def _run(self, call: Callable[[], list[Tensor]], places: Tensor, graded: _Graded, noisy: bool = False) -> Run:
        """Run the model, with gradients.

        Args:
            call: runs the model, and returns the outputs of each segment.
            places: the places of the batch whose tokens it runs on, int64.
            graded: what has gradients.
            noisy: whether embedded tokens have rounding errors.
        """
        with self.runner.leaves(len(places) if self.is_embedded_at_once else None, noisy) as embedded:
            made = Run(call())
            run = Run([each.detach() for each in made.outputs])
            for documents in graded if embedded else ():  # calls of a rank that has no document do not count
                score = torch.stack([score_of(made.of(segments)) for segments in documents.values()]).sum()
                try:
                    self._add_gradients(run, self.gradients_at(score, embedded, places), documents)
                except torch.OutOfMemoryError:  # says nothing about the model
                    raise
                except (RuntimeError, AssertionError, ValueError) as error:  # as of reentrant checkpointing
                    run.failure = f"{type(error).__name__}: {error}"
                    break
        return run

    def _add_gradients(self, run: Run, found: Tensor, documents: Iterable[int]) -> None:
        """Add the gradients of the outputs of some documents to a run; see `Run`."""
        sizes, inside = found.abs().amax(1), self.owned_by(*documents)
        elsewhere = (sizes * (self.owners >= 0) * ~inside).max()
        reach = elsewhere / sizes[inside].max().clamp_min(torch.finfo(sizes.dtype).tiny)
        run.gradients |= {each: found[self.owned_by(each)] for each in documents}
        run.reach = max(float(reach), run.reach)  # not nan, since it comes first

    def run(self, replaced: Sequence[int] = (), gradients: bool = False) -> Run:
        """Run the model on the batch, with some segments replaced. With `gradients`, code that torch.compile has
        compiled runs uncompiled."""
        call = partial(self.outputs, self.with_replaced(replaced))
        if not gradients:
            return Run([each.detach() for each in call()])
        graded = [{each: self.paths[each] for each in documents} for documents in self.graded]
        with self.runner.eagerly(), torch.enable_grad():
            return self._run(call, torch.arange(len(self.inputs["input_ids"].flatten())).to(self.places), graded)

    def alone(self, attention: str | None = None) -> Alone:
        """Run documents alone on the model without its patch, with its own attention function or another one. The
        longest one runs twice, the second time with rounding errors in its embeddings."""
        with self.runner.unpatched(attention), torch.set_grad_enabled(self.wants_gradients or self.training):
            found = {document: self.run_alone(document) for document in self.sample}
            if not found:
                return Alone({})
            runs = {document: run for document, run in found.items() if document is not None}
            longest = max(runs, key=self.lengths.__getitem__, default=None)
            noisy = self.run_alone(longest, noisy=True)
        noise = float(apart(noisy.outputs[0], found[longest].outputs[0]).max()) if runs else 0.0
        return Alone(runs, noise if isfinite(noise) else 0.0)

    def run_alone(self, document: int | None, noisy: bool = False) -> Run:
        """Run a document alone, with the gradients with respect to its tokens, if there are any."""
        number = document or 0
        tokens = self.has_tokens(self.paths[number]).nonzero()[:, 0]
        if document is None:
            tokens = tokens[:_DUMMY_TOKENS]
        length = len(tokens)
        tokens = torch.cat([tokens, tokens[:1].expand(-length % self.runner.multiple)])
        graded = [{number: [0]}] if self.wants_gradients and not noisy else []
        return self._run(partial(self.outputs_alone, tokens, length), self.places[tokens], graded, noisy)


def _is_any(numbers: Tensor, wanted: Sequence[int]) -> Tensor:
    """Return which numbers are among those wanted, as a bool tensor."""
    return torch.isin(numbers, torch.tensor(wanted, dtype=numbers.dtype, device=numbers.device))


def score_of(outputs: Tensor) -> Tensor:
    """Return a weighted sum of the outputs of a document, [values, width]. The weights depend only on the place."""
    weights = torch.arange(outputs.numel(), device=outputs.device).cos().view_as(outputs)
    return torch.where(comparable(outputs), outputs, 0).mul(weights).sum()


def random_documents(
    model: PreTrainedModel, lengths: Sequence[int], seed: int
) -> tuple[DocumentTokens, DocumentTokens]:
    """Return random documents, and a replacement for every document. Different documents share no token, and a document
    and its replacement have different tokens at every position, except for the mask token. No token occurs twice in a
    document, unless the vocabulary is small.

    Args:
        model: the model whose vocabulary is used.
        lengths: number of tokens in each document.
        seed: seed of the random tokens.

    Raises:
        PackingError: the vocabulary is too small.
    """
    size, config = len(embedding_of(model).weight), model.config.get_text_config()
    vocabulary = range(1, min(getattr(config, "vocab_size", size), size))  # the weight may have prompt rows
    settings = vars(model.config) | vars(config)
    special = [value for name, value in settings.items() if name.endswith("_token_id") and isinstance(value, int)]
    known = np.setdiff1d(vocabulary, special)
    if len(known) < 2 * len(lengths):
        raise PackingError(f"model: expected at least {2 * len(lengths)} non-special token ids, got {len(known)}")
    generator, mask = np.random.default_rng(seed), settings.get("mask_token_id")
    documents, others = [], []
    for number, length in enumerate(lengths):
        own = known[number :: len(lengths)]
        tokens = np.resize(generator.permutation(len(own)), length)
        document, other = own[tokens], own[(tokens + generator.integers(1, len(own), length)) % len(own)]
        if mask in vocabulary:  # ESM scales embeddings by the share of mask tokens
            document[2::5] = other[1::3] = mask
        documents.append(document.tolist())
        others.append(other.tolist())
    return documents, others


def pack_in_one_row(documents: DocumentTokens) -> Arguments:
    """Return model inputs for documents packed in one row."""
    return PackingCollator()([{"input_ids": tokens} for tokens in documents])


def _find_documents(documents: DocumentTokens, input_ids: Tensor) -> Tensor:
    """Return the indices of the documents' tokens in the flattened `input_ids`, int64 [tokens]."""
    places = []
    for tokens in documents:
        windows = input_ids.flatten().unfold(0, len(tokens), 1)
        starts = (windows == torch.tensor(tokens, device=input_ids.device)).all(1).nonzero()
        if len(starts) != 1:
            raise PackingError(
                "collator: expected a batch that contains every document whole and exactly once, but a document of "
                f"{len(tokens)} tokens occurs {len(starts)} times"
            )
        places.append(starts[0] + torch.arange(len(tokens), device=input_ids.device))
    return torch.cat(places)


MakeBatch = Callable[[DocumentTokens], Inputs]
"""A function that turns documents, or segments of trees, into a model's inputs."""

RANDOM = "the model draws random numbers in training mode even with dropout switched off"


class RowCase(Case):
    """Random documents in a row: a few, and so short that a proof takes little time. By default, rows are packed rows.

    Args:
        runner: runs the model, or its backbone.
        training: whether the model runs in training mode.
        lengths: number of tokens in each document; by default, those that `distinctive_lengths` returns. For documents
            that share prefixes, their segments.
        make_batch: makes the model's inputs; by default, `pack_in_one_row`.
        seed: seed of the random tokens.
        ends: as in `Case`.
    """

    may_be_filled = True
    """True if the row may have tokens of no document at its end."""

    def __init__(
        self,
        runner: Runner,
        training: bool = False,
        lengths: Sequence[int] | TreeSegments | None = None,
        make_batch: MakeBatch = pack_in_one_row,
        seed: int = 0,
        ends: Sequence[int] = (),
    ) -> None:
        trees = Layout.of(lengths or distinctive_lengths(runner.model)).trees
        self.documents, replacements = random_documents(runner.model, trees.lengths, seed)
        tokens, others = (
            torch.tensor([*chain(*each)], device=runner.device) for each in (self.documents, replacements)
        )
        super().__init__(runner, training, trees, ends, tokens, others)
        self.unproven = ""
        """The reason why isolation cannot be fully proven in training mode, or an empty string."""
        self.make_batch = make_batch
        self.lay_out()

    def lay_out(self) -> None:
        """Make the model's inputs, filled up to a multiple of the tokens that the model takes."""
        batch = self.make_batch(self.documents)
        if segments_in(batch) is not None:
            columns = {name: each for name, each in batch.items() if isinstance(each, Tensor | LongestSegment)}
            batch = {**batch, **fill_up(columns, align_tokens=self.runner.multiple)}
            # a patched model then reads the borders, as of any collator
            batch |= dict.fromkeys(MAX_LENGTHS, int(batch[MAX_LENGTHS[0]]))
        self.inputs = send_to_device(
            {name: each for name, each in batch.items() if name != "labels"}, self.runner.device
        )
        self.places = _find_documents(self.documents, self.inputs["input_ids"])

    def in_training(self) -> Self:
        """Return the case in training mode."""
        case = copy(self)
        case.training, case.wants_gradients, case.known = True, True, [*self.known]
        return case

    @property
    def width(self) -> int:
        """The number of outputs for each token, such as the size of the vocabulary, once documents have run alone."""
        return self.known[0].runs[0].outputs[0].shape[-1]

    @property
    def row(self) -> Layout:
        filler = -self.trees.tokens % self.runner.multiple
        return Layout.of([*self.trees.lengths, *[filler] * (filler > 0)], self.runner.device)

    def examine(self) -> None:
        """Run every document alone on the model without its patch, before the proof. In training mode, `unproven` has
        the reason if documents cannot be compared.

        If outputs or gradients cannot be computed, the row and the documents are filled up to a multiple, since layers
        in FP8 take no other numbers of tokens. If gradients cannot be computed then either, only outputs are compared.

        Raises:
            NotCallableError: the model cannot be called with input_ids alone.
        """
        failures: list[Exception] = []
        wanted = self.wants_gradients
        filled = [(distinctive_multiple(self.model), wanted)] if self.may_be_filled else []
        for multiple, gradients in ((self.runner.multiple, wanted), *filled, (1, False)):
            self.runner.multiple, self.wants_gradients = multiple, gradients
            self.lay_out()
            for attention in (None, self.runner.other_attention):
                try:
                    with self.undisturbed():
                        self.known = [self._examined(attention)]
                    return
                except NoLanguageModelError:
                    raise
                except Exception as error:  # custom model code may raise anything
                    failures.append(error)
        two_texts = "; an encoder-decoder takes two texts" if self.model.config.is_encoder_decoder else ""
        raise NotCallableError(
            f"{type(self.model).__name__}: the model cannot be called with input_ids alone: {failures[0]}{two_texts}"
        ) from failures[0]

    def _examined(self, attention: str | None) -> Alone:
        """Run every document alone and, in training mode, one of them once more with another random seed."""
        found = self.alone(attention)
        if self.wants_gradients and not found.runs[0].gradients:
            raise NotCallableError("the model's gradients cannot be computed")
        if self.training:
            with self.runner.unpatched(attention), temporarily(self.runner, seed=1):
                other = self.run_alone(0)
            if not self.tolerance(found).explains(apart(other.outputs[0], found.runs[0].outputs[0])):
                self.unproven = RANDOM
                return Alone({})
            if not self.wants_gradients:
                self.unproven = (
                    "the model's gradients cannot be computed in training mode, so only logits were compared"
                )
        return found


def examine_in_training(training: RowCase, evaluation: RowCase) -> None:
    """Run documents alone in training mode or, if that is not enough to compare gradients, once more in evaluation
    mode, with gradients. If the model cannot be called in training mode, no documents are known there."""
    try:
        training.examine()
    except NotCallableError as error:
        training.known, reason = [], error.__cause__ or error
        training.unproven = f"the model cannot be called in training mode with input_ids alone: {reason}"
    if training.unproven:
        evaluation.wants_gradients = True
        evaluation.examine()


_REACHES = 1e-4
"""A loss depends on a token if its gradient with respect to the token exceeds this share of the largest gradient with
respect to the document with the label. Otherwise, the gradient is usually 0."""


def sees_labels(case: RowCase, in_training: RowCase) -> bool:
    """Return whether the input token at a label's position affects the logits that the label is compared with.

    This is so in masked language models, and in bidirectional models with a causal loss. In other models, the last
    token of a document affects no loss. The result is computed from the gradients of the model's own loss. If the model
    computes no loss or no gradients, the result is False.

    Only the second of three documents has labels, from its second token. The loss with other labels is subtracted, so
    that auxiliary losses, such as those of routers, cancel out.

    Args:
        case: three documents in a row of a patched model.
        in_training: a case of the same model in training mode, which the loss is computed in if it was run.

    Raises:
        ModelNotSupportedError: the loss has a gradient with respect to another document, whose outputs it compares with
            the labels. A head that predicts the token after the next token has such a loss, since the collator masks
            only the first label of a document, and not the second label.
    """
    ids, runner, own = case.inputs["input_ids"], case.runner, case.owned_by(1)
    begin, end = case.trees.begins[1:3]
    labels = ids.new_full((2, *ids.shape), IGNORED_LABEL)
    labels[:, 0, begin + 1 : end] = torch.stack([case.tokens, case.others])[:, begin + 1 : end] % case.width
    found = torch.zeros(len(case.owners), device=ids.device)
    training = bool(in_training.known)
    with suppress(Exception), runner.undisturbed(training), torch.enable_grad(), runner.leaves() as embedded:
        one, other = (runner({**case.inputs, "labels": each}).loss for each in labels)
        found = case.gradients_at(one - other, embedded, case.places).abs().amax(1)
    least = _REACHES * found[own].max()
    if found[(case.owners >= 0) & ~own].max() > least:
        raise ModelNotSupportedError(
            f"{type(case.model).__name__}: the model's own loss compares labels of a packed document with outputs of "
            "another document: the loss on one document's labels has a gradient at another document's tokens. A head "
            "that predicts the token after the next token, for example, has such a loss. Pass no labels, and compute "
            "the loss of each document yourself"
        )
    last = case.tokens[end - 1]
    return bool(found[last] > least) and int((case.tokens == last).sum()) == 1
