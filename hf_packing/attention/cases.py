"""The cases of a proof: packed rows of random documents, padded rows, trees, and a training batch.

A case runs a model on a batch of documents and on each document alone. It knows the segments of the batch, which of
them may notice a replaced one, and the replacements to try. `prove` does the rest.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import (
    distinctive_lengths,
    embedding_of,
    has_local_weights,
    has_vocabulary,
    pad_token_of,
    without_ddp,
)
from hf_packing.attention.tolerance import ALWAYS_ALLOWED, BATCH, Noise, Profile, Tolerance, apart, comparable, has_experts, spread
from hf_packing.attention.tolerance import PROBE
from hf_packing.attention.packed_row import CACHES, PackedRow, has_trees, read_row
from hf_packing.attention.padded_rows import Side
from hf_packing.attention.route import READ_ARGUMENTS, is_patched
from hf_packing.attention.runs import NotCallableError, NoLanguageModelError, Runner, gradient_by_token, gradients, logits_of, what_is_missing, with_sampled_vocabulary
from hf_packing.attention.snapshot import random_state, seed_all
from hf_packing.attention.tree_row import read_tree_row
from hf_packing.columns import ENDS, KNOWN_COLUMNS, PARENTS, SEGMENT_LENGTHS, TRAINED, TREE_LABELS
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.trees.segments import TreeSegments

DocumentTokens = list[list[int]]
"""The token ids of every document, or of every segment of trees."""

STOCK_ATTENTIONS = ("eager", "sdpa", "flex_attention")

_WRITTEN_OUT = "eager"
"""The attention function with which documents also run alone if the model's own one gives other outputs. Eager attention
is plain PyTorch code in the model's file. Others have had bugs: in transformers 5.17, "sdpa" ignores Gemma 2's soft
cap."""


@dataclass
class Run:
    """What a model returns for a batch.

    Args:
        outputs: float [values, width]: the outputs of one segment after another.
        sizes: the number of values of each segment.
        gradients: for each document, the gradient of a weighted sum of its outputs with respect to its own tokens; None
            if gradients were not computed.
        reach: the largest gradient of a document's outputs at another document's tokens, as a share of the largest one
            at its own tokens.
    """

    outputs: Tensor
    sizes: Sequence[int]
    gradients: dict[int, Tensor] | None = None
    reach: float = float("nan")

    @cached_property
    def _borders(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    def of(self, segments: Sequence[int]) -> Tensor:
        """Return the outputs of some segments, joined."""
        return torch.cat([self.outputs[self._borders[each] : self._borders[each + 1]] for each in segments])

    @cached_property
    def _segments(self) -> Tensor:
        """The segment of each value, int64 [values]."""
        sizes = torch.tensor(self.sizes, device=self.outputs.device)
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)

    def are_in(self, segments: set[int]) -> Tensor:
        """Return which values belong to some segments, bool [values]."""
        inside = torch.tensor([each in segments for each in range(len(self.sizes))], device=self.outputs.device)
        return inside[self._segments]

    @property
    def are_finite(self) -> bool:
        """True if every segment has a finite output."""
        finite = comparable(self.outputs).any(1).long()
        return bool(finite.new_zeros(len(self.sizes)).index_add_(0, self._segments, finite).all())


@dataclass
class Alone:
    """What a model without its patch returns for documents alone, by document, and what rounding changes in it."""

    outputs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    noise: Noise = Noise()
    gradient_noise: Noise = Noise()


class Case(ABC):
    """A batch of documents on which `prove` proves that a model keeps documents apart.

    Args:
        runner: runs the model.
        training: whether the model runs in training mode.
        trees: the segments of the batch; in packed rows and in padded rows, every document is a segment of its own.
        ends: the segment in which each document ends.
    """

    profile: Profile = PROBE
    where = "the packed row"
    leaks = "changing one document changed the logits of another document"
    what = "logits"

    def __init__(self, runner: Runner, training: bool, trees: TreeSegments, ends: Sequence[int]) -> None:
        self.runner, self.training, self.trees = runner, training, trees
        self.paths = [trees.segments_of(end) for end in ends]
        self.wants_gradients = training
        self.unit: float | None = None
        """The standard deviation of the outputs; None to compute it."""
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
    def is_noisy(self) -> bool:
        """True if the outputs for a document depend on the number of other tokens that go to the same expert, or that
        have the same scale."""
        return has_experts(self.model) or getattr(self.model, "is_quantized", False)

    def tolerance(self, noise: Noise) -> Tolerance:
        return Tolerance(self.runner.dtype, has_experts(self.model), noise, self.profile)

    @abstractmethod
    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context manager in which the case runs the model."""

    @property
    @abstractmethod
    def replacements(self) -> list[list[int]]:
        """The segments that are replaced together, for each run with replaced segments."""

    def may_notice(self, replaced: Sequence[int]) -> set[int]:
        """Return replaced segments and those below them."""
        return {below for each in replaced for below in range(each, self.trees.ends_below[each])}

    def has_to_notice(self, replaced: Sequence[int], run: Run) -> Tensor | None:  # noqa: ARG002
        """Return which values show that a leak would be seen: those of tokens that stay the same behind replaced ones,
        bool [values]; None if there are none."""
        return None

    @abstractmethod
    def run(self, replaced: Sequence[int] = (), gradients: bool = False) -> Run:
        """Run the model on the batch, with some segments replaced."""

    @abstractmethod
    def alone(self, attention: str | None = None) -> Alone:
        """Run documents alone on the model without its patch, with its own attention function or another one."""

    @property
    def other_attention(self) -> str | None:
        """The attention function with which documents run alone if they differ with the model's own one."""
        own = self.runner.own_attention
        known = own in STOCK_ATTENTIONS or "flash" in str(own)
        return _WRITTEN_OUT if known and own != _WRITTEN_OUT and self.model._can_set_attn_implementation() else None

    def references(self) -> list[Alone]:
        """Return the outputs of documents alone, of which the outputs in the batch have to equal one."""
        self.known = [self.alone()]
        return self.known

    def memory(self, packed: Run) -> list[str] | None:  # noqa: ARG002
        """Return the names of buffers through which a run affects the next one; None if none does."""
        return None

    def on_any_rank(self, found: bool) -> bool:
        """Return whether `found` is True on any of the ranks that make the same calls."""
        return found


def score_of(outputs: Tensor, places: Tensor | None = None) -> Tensor:
    """Return a weighted sum of outputs [values, width]. The weights depend only on the place in the document."""
    place = torch.arange(len(outputs), device=outputs.device) if places is None else places
    column = torch.arange(outputs.shape[-1], device=outputs.device)
    weights = torch.cos(place[:, None] * 0.7 + column * 1.3 + 0.1).to(outputs.dtype)
    return torch.where(comparable(outputs), outputs, 0).mul(weights).sum()


def random_documents(model: PreTrainedModel, lengths: Sequence[int], seed: int) -> tuple[DocumentTokens, DocumentTokens]:
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
    row = PackedRow.from_lengths([len(tokens) for tokens in documents])
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


class RowCase(Case):
    """Random documents in packed rows: a few, and so short that a proof takes little time.

    Args:
        runner: runs the model, or its backbone.
        training: whether the model runs in training mode.
        lengths: number of tokens in each document; by default, those that `distinctive_lengths` returns.
        make_batch: makes the model's inputs; by default, `pack_in_one_row`.
        seed: seed of the random tokens.
        like: a case of the same model, whose measured effect of rounding is that of this case, too.
    """

    def __init__(
        self,
        runner: Runner,
        training: bool = False,
        lengths: Sequence[int] | None = None,
        make_batch: MakeBatch = pack_in_one_row,
        seed: int = 0,
        like: "RowCase | None" = None,
    ) -> None:
        lengths = lengths or distinctive_lengths(runner.model)
        self._start(runner, training, TreeSegments(tuple(lengths), (-1,) * len(lengths)), range(len(lengths)), seed)
        self.make_batch = make_batch
        self._like = like

    def _start(self, runner: Runner, training: bool, trees: TreeSegments, ends: Sequence[int], seed: int) -> None:
        super().__init__(runner, training, trees, ends)
        self.tokens, self.others = random_documents(runner.model, trees.lengths, seed)
        self.only_equality = False
        """True if documents are only compared with documents alone, and none is replaced."""
        self.compares = True
        """False if documents are not compared with documents alone."""
        self.unproven = ""
        """The reason why isolation cannot be fully proven in training mode, or an empty string."""
        self.can_be_run = True
        """True if the model runs in this mode, and returns the same outputs for the same tokens."""
        self.options: dict[str, Any] = {}
        """Further arguments of each call of the model on the batch."""

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self.runner.undisturbed(self.training):
            yield

    @property
    def row(self) -> PackedRow:
        return PackedRow.from_lengths(self.trees.lengths, self.runner.device)

    @property
    def documents(self) -> DocumentTokens:
        """The tokens of each document."""
        return [[token for each in path for token in self.tokens[each]] for path in self.paths]

    @property
    def replacements(self) -> list[list[int]]:
        return [] if self.only_equality else [[each] for each in range(len(self.tokens))]

    def has_to_notice(self, replaced: Sequence[int], run: Run) -> Tensor | None:
        below, same = self.may_notice(replaced), torch.zeros(len(run.outputs), dtype=torch.bool)
        for segment, begin in enumerate(accumulate(run.sizes[:-1], initial=0)):
            if segment in below and run.sizes[segment] == len(self.tokens[segment]):
                others = self.others if segment in replaced else self.tokens
                for place, (one, other) in enumerate(zip(self.tokens[segment], others[segment], strict=True)):
                    same[begin + place] = one == other
        return same.to(run.outputs.device) if same.any() else None

    def outputs(self, tokens: DocumentTokens, embedded: bool = False, **options: Any) -> list[Tensor]:
        """Run the model on a batch, with tokens or their embeddings, and return the outputs of each segment."""
        batch = {name: value for name, value in self.make_batch(tokens).items() if name != "labels"}
        places = _find_documents(tokens, batch["input_ids"])
        if embedded:
            ids = batch.pop("input_ids").to(self.runner.device)
            batch["inputs_embeds"] = self.model.get_input_embeddings()(ids)
        logits = logits_of(self.runner.called, self.runner({**batch, **self.options, **options})).flatten(0, 1)
        return [logits[place] for place in places]

    def outputs_alone(self, rows: DocumentTokens) -> list[Tensor]:
        """Run the model on rows of equal length, without position_ids or borders, and return the outputs of each row."""
        return [*logits_of(self.runner.called, self.runner({"input_ids": torch.tensor(rows), "use_cache": False}))]

    def run(self, replaced: Sequence[int] = (), gradients: bool = False) -> Run:
        tokens = [(self.others if each in replaced else self.tokens)[each] for each in range(len(self.tokens))]
        if not gradients:
            outputs = self.outputs(tokens)
            return Run(torch.cat(outputs).detach().view(sum(map(len, outputs)), -1), [*map(len, outputs)])
        with torch.enable_grad(), self.runner.embeddings.leaves() as embedded:
            outputs = self.outputs(tokens)
            found: dict[int, Tensor] | None = {}
            reach = 0.0
            for number, path in enumerate(self.paths):
                by_token = self._gradient(torch.cat([outputs[each] for each in path]), embedded, keep=True)
                if by_token is None:
                    found, reach = None, float("nan")
                    break
                found[number], elsewhere = (by_token[each] for each in self._own_and_others(number))
                reach = max(reach, share(elsewhere, found[number]))
        joined = torch.cat(outputs).detach()
        return Run(joined.view(len(joined), -1), [*map(len, outputs)], found, reach)

    def _gradient(self, outputs: Tensor, embedded: Any, keep: bool = False) -> Tensor | None:
        values = outputs.view(len(outputs), -1)
        return gradient_by_token(score_of(values), embedded, max(map(max, self.tokens)), keep)

    def _own_and_others(self, document: int) -> tuple[list[int], list[int]]:
        """Return the token ids in a document, and those outside of it, without those that several segments have: some
        models add such tokens themselves."""
        owners = Counter(token for tokens in self.tokens for token in set(tokens))
        found: tuple[list[int], list[int]] = [], []
        for segment, tokens in enumerate(self.tokens):
            own = sorted(token for token in set(tokens) if owners[token] == 1)
            found[segment not in self.paths[document]].extend(own)
        return found

    def alone(self, attention: str | None = None) -> Alone:
        found = Alone()
        with self.runner.unpatched(attention):
            for number, tokens in enumerate(self.documents):
                outputs = self._alone_with_gradient(number, tokens, found) if self.wants_gradients else None
                if outputs is None or not self.training:  # without gradients, a model may run other code
                    (outputs,) = self.outputs_alone([tokens])
                found.outputs[number] = outputs.detach().view(len(outputs), -1)
            found.noise = self._noise(found.outputs)
        return found

    def _alone_with_gradient(self, number: int, tokens: list[int], found: Alone) -> Tensor | None:
        """Run a document alone, add its gradient to `found`, and return its outputs; None if the model cannot run so."""
        with suppress(RuntimeError, AssertionError), torch.enable_grad(), self.runner.embeddings.leaves() as embedded:
            (outputs,) = self.outputs_alone([tokens])
            if (by_token := self._gradient(outputs, embedded)) is not None:
                found.gradients[number] = by_token[self._own_and_others(number)[0]]
            return outputs
        return None

    def _noise(self, alone: dict[int, Tensor]) -> Noise:
        """Return the effect of rounding: the differences between documents alone and batches of two copies of them, in
        which every entry of the embeddings is changed by a rounding error. The changes show how rounding errors grow
        from layer to layer, and the batch shows how much kernels depend on the shapes of tensors."""
        if self._like is not None and self._like.known:
            return self._like.known[0].noise
        if self.runner.dtype not in ALWAYS_ALLOWED:  # as large as the effect of some faults
            return Noise()
        moved = []
        with suppress(Exception), self.runner.embeddings.leaves(noisy=slice(None)):  # the model may take single rows only
            for number, tokens in enumerate(self.documents):
                copies = (each.detach().view(len(each), -1) for each in self.outputs_alone([tokens] * 2))
                moved += [apart(copy, alone[number], self.unit) for copy in copies]
            return Noise.of(moved)
        return Noise()

    def references(self) -> list[Alone]:
        return self.known if self.compares else []

    def examine(self) -> None:
        """Run every document alone on the model without its patch, before the proof.

        Raises:
            NotCallableError: the model cannot be called with input_ids alone.
        """
        if self.training:
            self._examine_in_training()
            return
        failures = []
        for attention in (None, self.other_attention):
            if failures and attention is None:
                break
            try:
                with self.undisturbed():
                    self.known = [self.alone(attention)]
                return
            except Exception as error:  # custom model code may raise anything
                failures.append(error)
        if isinstance(failures[0], NoLanguageModelError):
            raise failures[0]
        raise NotCallableError(
            f"{type(self.model).__name__}: the model cannot be called with input_ids alone: {failures[0]}"
            f"{what_is_missing(self.model)}"
        ) from failures[0]

    def _examine_in_training(self) -> None:
        """Run every document alone in training mode. `unproven` has the reason if outputs cannot be compared."""
        found: list[Alone] = []

        def run() -> list[Tensor]:
            found.append(self.alone())
            return [*found[-1].outputs.values()]

        try:
            with self.undisturbed():
                is_random = self.is_random(run)
        except Exception as error:  # custom model code may raise anything
            self.unproven = f"the model cannot be called in training mode with input_ids alone: {error}"
            self.can_be_run = False
            return
        if is_random is None:
            self.unproven, self.can_be_run = VARYING, False
        elif is_random:
            self.unproven = RANDOM
        else:
            self.known = found[:1]
            if len(found[0].gradients) < len(self.paths):
                self.wants_gradients = False
                self.unproven = (
                    "the model's gradients cannot be computed in training mode, so only logits were compared"
                )

    def is_random(self, run: Callable[[], list[Tensor]]) -> bool | None:
        """Return whether the outputs of `run` depend on the seed; None if they vary even for the same seed."""
        seed_all(self.runner.seed)
        before = random_state(self.runner.device)
        outputs = run()
        if random_state(self.runner.device) == before:
            return False
        self.runner.seed += 1
        other = run()
        self.runner.seed -= 1
        if not self._vary(outputs, other):
            return False
        return None if self._vary(outputs, run()) else True

    def _vary(self, outputs: list[Tensor], again: list[Tensor]) -> bool:
        noise = self.known[0].noise if self.known else Noise()
        return not self.tolerance(noise).explains(apart(torch.cat(again), torch.cat(outputs)))

    def memory(self, packed: Run) -> list[str] | None:
        if not self.training or self.only_equality:
            return None
        with self.runner.in_series():
            self.run(range(len(self.tokens)))
            written = self.runner.buffers_written()
            later = self.run()
        return written if self._vary([packed.outputs], [later.outputs]) else None


def share(part: Tensor, whole: Tensor) -> float:
    """Return the largest magnitude in `part` as a share of the largest one in `whole`."""
    largest, own = float(part.abs().max()) if part.numel() else 0.0, float(whole.abs().max())
    return largest / own if own else float("inf") if largest else 0.0


TREES = TreeSegments((13, 7, 11, 5, 9, 6, 1, 8, 12, 9, 4, 10), (-1, 0, 1, 1, 0, 0, 5, 5, -1, 8, 8, -1))
_ENDS = (1, 2, 3, 4, 6, 7, 9, 10, 11)
"""The trees of the proof, with 95 tokens: three levels, a document that ends inside others, a segment of a single token,
branches that are not the first of their parent, and a document alone."""


class TreeCase(RowCase):
    """Random documents that share prefixes in a row of trees."""

    where = "a tree"
    leaks = "changing one segment of a tree changed the logits of tokens that are not below it"

    def __init__(self, runner: Runner, training: bool = False, like: "RowCase | None" = None) -> None:
        self._start(runner, training, TREES, _ENDS, 0)
        self._like = like

    def make_batch(self, documents: DocumentTokens) -> Mapping[str, Any]:
        tokens = torch.tensor([[token for each in documents for token in each]])
        lengths, parents = torch.tensor(self.trees.lengths), torch.tensor(self.trees.parents)
        return {"input_ids": tokens, SEGMENT_LENGTHS: lengths, PARENTS: parents}


_NOT_COMPARED = ("loss", "hidden_states", "attentions", "aux_loss", "router_logits", *CACHES)
"""Names of outputs of padded rows that are not compared."""


class PaddedCase(RowCase):
    """Random documents as the rows of a padded batch. All outputs of a row are compared, as one vector: those of its
    tokens, and those of the row as a whole.

    Args:
        runner: runs a model with any head.
        training: whether the model runs in training mode.
        seed: seed of the random tokens.
        like: a case of the same model. The new case has the same documents and measurements.
    """

    where = "the padded batch"

    def __init__(self, runner: Runner, training: bool = False, seed: int = 0, like: "PaddedCase | None" = None) -> None:
        super().__init__(runner, training, seed=seed, like=like)
        self.unit = 1.0
        self.side: Side = "right"
        self._scales: dict[str, float] = {}
        """The standard deviation of each output, by which its values are divided."""
        self._has_choices = False
        """True if the model takes an axis of choices between the axes of rows and of tokens."""
        if like is None:
            with self.undisturbed(), runner.unpatched():
                self._find_documents_that_run()
                self._measure_scales()
        else:
            self.tokens, self.others = like.tokens, like.others
            self._scales, self._has_choices = like._scales, like._has_choices

    def _find_documents_that_run(self) -> None:
        """Let two of the documents end in an end token, which some heads look for; or all, as BART needs for
        classification; or none. If the model does not take rows of tokens, it gets rows with a single choice each, as
        models for multiple choice need."""
        end, pad = getattr(self.model.config.get_text_config(), "eos_token_id", None), pad_token_of(self.model)
        has_end = isinstance(end, int) and 0 <= end < len(embedding_of(self.model).weight) and end != pad
        without_end, failures = (self.tokens, self.others), []
        for self._has_choices in (False, True):
            for with_end in ((0, 2), (0, 1, 2), ()) if has_end else ((),):
                self.tokens, self.others = (
                    [[*each[:-1], end] if number in with_end else each for number, each in enumerate(one)]
                    for one in without_end
                )
                try:
                    for tokens in self.tokens:
                        self.outputs_alone([tokens])
                    return
                except Exception as error:  # custom model code may raise anything
                    failures.append(error)
        raise ModelNotSupportedError(
            f"{type(self.model).__name__}: the model cannot be called with input_ids alone: {failures[0]}"
            f"{what_is_missing(self.model)}"
        ) from failures[0]

    def _measure_scales(self) -> None:
        found: dict[str, list[Tensor]] = {}
        for tokens in self.tokens:
            ids = torch.tensor([tokens])
            for name, value in self._by_name(ids, torch.ones_like(ids), [(0, len(tokens))], use_cache=False)[0].items():
                found.setdefault(name, []).append(value.detach().flatten())
        scales = {name: spread(torch.cat(values)) for name, values in found.items()}
        self._scales = {name: scale if scale > 0 else 1.0 for name, scale in scales.items()}

    def outputs(self, tokens: DocumentTokens, embedded: bool = False, **options: Any) -> list[Tensor]:
        longest = max(map(len, tokens))
        ids = torch.full((len(tokens), longest), pad_token_of(self.model) or 0)
        mask, slices = torch.zeros_like(ids), []
        for number, each in enumerate(tokens):
            missing = longest - len(each)
            start = {"right": 0, "left": missing, "both": missing // 2}[self.side]
            slices.append((start, start + len(each)))
            ids[number, start : start + len(each)] = torch.tensor(each)
            mask[number, start : start + len(each)] = 1
        return self._flat(self._by_name(ids, mask, slices, embedded, **options))

    def outputs_alone(self, rows: DocumentTokens) -> list[Tensor]:
        ids = torch.tensor(rows)
        slices = [(0, ids.shape[1])] * len(ids)
        return self._flat(self._by_name(ids, torch.ones_like(ids), slices, use_cache=False))

    def _by_name(
        self, ids: Tensor, mask: Tensor, slices: list[tuple[int, int]], embedded: bool = False, **options: Any
    ) -> list[dict[str, Tensor]]:
        """Run the model on a batch, and return the outputs of each row by name. `slices` has the places of the tokens
        of each row."""
        runner = self.runner
        given = {"inputs_embeds": embedding_of(self.model)(ids.to(runner.device))} if embedded else {"input_ids": ids}
        if "use_cache" not in runner.signature.names:  # some models pass their own
            options.pop("use_cache", None)
        inputs = {**given, "attention_mask": mask}
        if self._has_choices:
            inputs = {name: value[:, None] for name, value in inputs.items()}
        output, tokens = runner({**options, **inputs}), max(end for _, end in slices)
        rows: list[dict[str, Tensor]] = [{} for _ in slices]
        for name, value in output.items():
            if name in _NOT_COMPARED or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if len(value) != len(slices):
                raise ModelNotSupportedError(f"its output {name} has no axis for the rows of a batch")
            has_tokens = value.shape[1:2] == (tokens,)
            for row, values, (start, end) in zip(rows, value, slices, strict=True):
                row[name] = values[start:end] if has_tokens else values
        return rows

    def _flat(self, rows: list[dict[str, Tensor]]) -> list[Tensor]:
        """Return the outputs of each row as one vector, in standard deviations."""
        return [
            torch.cat(
                [
                    values.flatten().to(torch.promote_types(values.dtype, torch.float32)) / self._scales.get(name, 1.0)
                    for name, values in row.items()
                ]
            )
            for row in rows
        ]


_FEW = 4
"""Of fewer segments than this number, every second one is replaced."""

_CALLS_ALONE = 3
"""Number of calls in which sampled documents run alone. All ranks make the same number of calls, since ranks that shard
a model wait for each other in every call."""

_SHARE_ALONE = 4
"""The sampled documents have at most one in this number of the batch's tokens, unless every document is longer."""

_DUMMY_TOKENS = 8
"""Number of tokens in a call that a rank makes only because the other ranks make it, too."""

_OF_OWN_LOSS = {"labels", "num_items_in_batch"}
"""Names of the arguments with which a model computes its own loss."""

_OF_THE_LOSS = {*_OF_OWN_LOSS, "shift_labels", "targets", "target_weights", TREE_LABELS, ENDS, TRAINED}

Watch = Callable[[list[int], torch.Size], AbstractContextManager[None]]
"""A function that returns a context manager for a call, from the documents and the shape of the call."""


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

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], training: bool) -> None:
        if batch.get("input_ids") is None:
            raise PackingError(f"batch: expected input_ids, got {', '.join(batch) or 'nothing'}")
        runner = Runner(model, without_ddp(model))
        names = runner.signature.names
        given = {name: each.to(runner.device) if isinstance(each, Tensor) else each for name, each in batch.items()}
        # a compiled model would be compiled once more for calls without labels
        kept = _OF_OWN_LOSS if runner.is_compiled else set()
        given = {name: value for name, value in given.items() if name in kept or name not in _OF_THE_LOSS}
        # columns such as weights may be for compute_loss alone, so **kwargs is no reason to pass them to the model
        self._inputs = {name: value for name, value in given.items() if name in (*KNOWN_COLUMNS, *kept, *names)}
        ids: Tensor = self._inputs["input_ids"]
        self._per_token = {
            name: value
            for name, value in self._inputs.items()
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape and name not in READ_ARGUMENTS
        }
        if has_trees(batch):
            read_tree_row(self._inputs)
            trees = TreeSegments.from_arrays(batch[SEGMENT_LENGTHS].cpu(), batch[PARENTS].cpu())
            ends = trees.leaves if batch.get(ENDS) is None else [*dict.fromkeys(batch[ENDS].tolist())]
        else:
            lengths = read_row(self._inputs, training=True)[1].lengths
            trees, ends = TreeSegments(lengths, (-1,) * len(lengths)), range(len(lengths))
        super().__init__(runner, training, trees, ends)
        self.replaced = self._choose_replaced()
        without = [number for number, path in enumerate(self.paths) if path[-1] in set(self.replaced)]
        self.sample = sampled_documents(self.lengths, without, trees.tokens)
        kept = [number for number in range(len(self.paths)) if number not in set(without)]
        order = [*(number for group in self.sample for number in group), *kept] or [0]
        self.graded = sorted({self.paths[number][0]: number for number in reversed(order)}.values())
        """The documents whose outputs have gradients: one of each tree, not replaced."""

    def _choose_replaced(self) -> list[int]:
        """Return the segments to replace: about half of them and, of trees, those with at most half of the tokens.

        Among many segments, they are those whose index has an even number of binary digits 1: 0, 3, 5, 6, 9, 10, ...
        For every distance, some of them are that far before one that is kept, and some that far after one, so a leak to
        any later or earlier document is visible.
        """
        trees, number = self.trees, len(self.trees.lengths)
        if number == 1:
            return []
        left = trees.tokens // 2 if trees.has_branches else trees.tokens
        replaced: set[int] = set()
        for segment, parent in enumerate(trees.parents):
            few = segment % 2 == trees.has_branches
            is_chosen = few if number < _FEW else segment.bit_count() % 2 == 0
            below = int(trees.begins[trees.ends_below[segment]] - trees.begins[segment])
            if parent in replaced:
                replaced.add(segment)
            elif is_chosen and below <= left:
                replaced.add(segment)
                left -= below
        return sorted(replaced)

    @property
    def replacements(self) -> list[list[int]]:
        return [self.replaced] if self.replaced else []

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        # code that torch.compile has compiled would be compiled again
        sampled = nullcontext() if self.runner.is_compiled else with_sampled_vocabulary(self.model)
        with self.runner.undisturbed(self.training, keeps_modes=True), self.runner.in_series(), sampled:
            yield

    def tokens_of(self, document: int) -> Tensor:
        """Return the indices of a document's tokens in the batch, int64 [tokens of the document]."""
        return torch.from_numpy(self.trees.path_of(self.paths[document][-1])).to(self.runner.device)

    @cached_property
    def positions(self) -> Tensor:
        """The place of each token in its documents, int64 [tokens]."""
        return torch.from_numpy(self.trees.position_ids).long().to(self.runner.device)

    def run(self, replaced: Sequence[int] = (), gradients: bool = False) -> Run:
        """Run the model on the batch. With `gradients`, code that torch.compile has compiled runs uncompiled."""
        inputs = {**self._inputs, "input_ids": self._with_other_tokens(replaced)} if replaced else self._inputs
        shape: torch.Size = inputs["input_ids"].shape
        if self.runner.is_compiled and not gradients:
            return Run(self._call(inputs, shape).detach(), self.trees.lengths)
        with self.runner.eagerly(), self.runner.embeddings.leaves(shape) as embedded:
            outputs = self._call(inputs, shape)
            found = Run(outputs.detach(), self.trees.lengths)
            if gradients:
                tokens = torch.cat([self.tokens_of(number) for number in self.graded])
                by_token = _gradient(score_of(outputs[tokens], self.positions[tokens]), outputs, embedded)
                if by_token is not None:
                    found.gradients = {number: by_token[self.tokens_of(number)] for number in self.graded}
                    others = torch.ones(len(by_token), dtype=torch.bool, device=by_token.device)
                    others[tokens] = False
                    found.reach = share(by_token[others], by_token[tokens]) if others.any() else float("nan")
        return found

    def _with_other_tokens(self, replaced: Sequence[int]) -> Tensor:
        """Return input_ids with other tokens of the batch, which the model takes, in some segments."""
        input_ids: Tensor = self._inputs["input_ids"]
        known, index = torch.unique(input_ids.flatten(), return_inverse=True)
        if len(known) < 2:
            known = torch.cat([known, (known + 1) % len(embedding_of(self.model).weight)])
        is_replaced = Run(input_ids.flatten(), self.trees.lengths).are_in(set(replaced))
        other = torch.where(is_replaced, known[(index + 1) % len(known)], input_ids.flatten())
        return other.view_as(input_ids)

    def _call(self, inputs: Mapping[str, Any], shape: torch.Size) -> Tensor:
        """Call the model, and return its output for each token: float [tokens, width]."""
        logits = logits_of(self.model, self.runner(inputs))
        if logits.shape[:2].numel() != shape.numel():
            raise ModelNotSupportedError(
                f"model: expected an output for each of {list(shape)} tokens, but {type(self.model).__name__} returns "
                f"{list(logits.shape)}"
            )
        return logits.flatten(0, 1)

    def alone(self, attention: str | None = None, watch: Watch = lambda *_: nullcontext()) -> Alone:
        """Run sampled documents alone, together with copies whose embeddings have rounding errors. Documents of equal
        length run in one call. All ranks make the same number of calls."""
        found, moved, moved_gradients = Alone(), [], []
        with self.runner.unpatched(attention), self.runner.eagerly():
            for group in [*self.sample, *[[]] * (_CALLS_ALONE - len(self.sample))]:
                dummy = torch.arange(min(_DUMMY_TOKENS, self.trees.tokens), device=self.runner.device)
                places = [self.tokens_of(number) for number in group] or [dummy]
                inputs = {
                    name: torch.stack([value.flatten(0, 1)[place] for place in places] * 2)
                    for name, value in self._per_token.items()
                }
                shape, noisy = inputs["input_ids"].shape, slice(len(places), None)
                with self.runner.embeddings.leaves(shape, noisy) as embedded, watch(group, shape):
                    outputs = self._call({**inputs, "use_cache": False}, shape)
                    score = score_of(outputs, torch.arange(shape[1], device=outputs.device).repeat(shape[0]))
                    by_token = _gradient(score, outputs, embedded) if self.training else None
                rows = outputs.detach().chunk(shape[0])
                of_rows = by_token.chunk(shape[0]) if by_token is not None else ()
                for number, exact, copy in zip(group, rows, rows[len(group) :], strict=False):
                    found.outputs[number] = exact
                    moved.append(apart(copy, exact))
                for number, exact, copy in zip(group, of_rows, of_rows[len(group) :], strict=False):
                    found.gradients[number] = exact
                    moved_gradients.append(apart(copy, exact))
        found.noise, found.gradient_noise = Noise.of(moved), Noise.of(moved_gradients)
        return found

    def on_any_rank(self, found: bool) -> bool:
        if has_local_weights(self.model) or not torch.distributed.is_initialized():
            return found
        flag = torch.tensor(found, dtype=torch.int32, device=self.runner.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)


def _gradient(score: Tensor, outputs: Tensor, embedded: Any) -> Tensor | None:
    """Return the gradient of a score at each token, float [tokens, embedding size]; None if there are no gradients."""
    if not embedded or not outputs.requires_grad:
        return None
    found = gradients(score, [embedded[0][1]])
    return None if found is None else found[0].flatten(0, 1)


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
