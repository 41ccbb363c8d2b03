"""Random documents for a model, run together and alone, with one of them changed at a time."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import Signature, device_of_inputs, words_of
from hf_packing.attention.packed_row import PackedRow
from hf_packing.attention.route import UNDERSTOOD, route_of
from hf_packing.attention.snapshot import (
    KeptWeights,
    as_it_was,
    begin_chance,
    chance_put_back,
    modes_put_back,
    state_of_chance,
    without_chance,
)
from hf_packing.attention.tolerance import (
    DtypeOfProducts,
    Tolerance,
    comparable,
    dtype_of_computation,
    has_experts,
    largest_difference,
    logits_of,
    measure_rounding,
    spread,
)
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError

Tokens = list[list[int]]

DOCUMENT_LENGTHS = ((13, 7, 21), (13, 9, 21), (17, 7, 23), (13, 11, 29))
"""Tokens of the three documents: all different, and longer than the kernels of convolutions. Their sum is a prime, so
that no axis of a model is likely to have as many entries; the first sum that none has is taken."""


def random_documents(model: PreTrainedModel, lengths: list[int], seed: int) -> tuple[Tokens, Tokens]:
    """Documents, and another one for each. No token but that of a mask occurs in two documents, and a document and its
    replacement differ in every token.

    Args:
        model: whose tokens they are.
        lengths: of the documents.
        seed: of the random tokens.

    Raises:
        PackingError: the vocabulary is too small for it.
    """
    words = words_of(model)
    known_size = getattr(model.config.get_text_config(), "vocab_size", len(words.weight))
    vocabulary = min(known_size, getattr(words, "num_embeddings", known_size))  # tables may go on, for prompts
    settings = vars(model.config) | vars(model.config.get_text_config())
    special = {value for name, value in settings.items() if name.endswith("_token_id") and isinstance(value, int)}
    known = np.array([token for token in range(1, vocabulary) if token not in special])
    if len(known) < 2 * len(lengths):
        raise PackingError(f"model: expected at least {2 * len(lengths)} tokens that are not special, got {len(known)}")
    generator = np.random.default_rng(seed)
    mask = settings.get("mask_token_id")
    documents, others = [], []
    for number, length in enumerate(lengths):
        own = known[number :: len(lengths)]
        tokens = generator.integers(0, len(own), length)
        documents.append(own[tokens].tolist())
        others.append(own[(tokens + generator.integers(1, len(own), length)) % len(own)].tolist())
        if isinstance(mask, int) and 0 <= mask < vocabulary:  # some models look at the share of what is hidden
            documents[-1][2::5] = [mask] * len(documents[-1][2::5])
            others[-1][1::3] = [mask] * len(others[-1][1::3])
    return documents, others


def in_one_row(documents: Tokens) -> dict[str, Any]:
    return PackingCollator()([{"input_ids": tokens} for tokens in documents])


def in_two_rows(documents: Tokens) -> dict[str, Any]:
    """As `in_one_row`, for documents whose first and second half have as many tokens."""
    half = len(documents) // 2
    rows = [in_one_row(each) for each in (documents[:half], documents[half:])]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def find_documents(documents: Tokens, input_ids: Tensor) -> list[slice]:
    """Where documents stand in the rows of a batch, laid end to end."""
    ids = input_ids.flatten()
    places = []
    for tokens in documents:
        starts = (ids.unfold(0, len(tokens), 1) == torch.tensor(tokens, device=ids.device)).all(1).nonzero()
        if len(starts) != 1:
            raise PackingError(
                f"collator: expected a batch with each document whole and once, one of {len(tokens)} tokens is there "
                f"{len(starts)} times"
            )
        places.append(slice(int(starts[0, 0]), int(starts[0, 0]) + len(tokens)))
    return places


def unmistakable_lengths(model: nn.Module) -> list[int]:
    """Lengths of documents that make a row of a length that no parameter, buffer or integer setting has."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {value for value in vars(model.config).values() if isinstance(value, int)}
    for lengths in DOCUMENT_LENGTHS:
        if sum(lengths) not in sizes:
            return list(lengths)
    raise PackingError(f"model: expected one without axes of {', '.join(str(sum(each)) for each in DOCUMENT_LENGTHS)}")


GRADIENT_LEAK_TOLERANCE = 1e-6
"""Largest gradient in another document, as a share of the largest in the document itself: where there is no path, there
is no gradient, in any precision."""

GRADIENT_LENIENCE = 10
"""How much further gradients may be apart, having come twice the way."""

one_at_a_time = threading.RLock()
"""Held while the random state, which all threads share, is another one."""


class Probe:
    """Runs a model on a few random documents. No token but that of a mask occurs in two documents, and a document and
    its replacement differ in every token.

    Args:
        model: of transformers, on any device, in any dtype.
        seed: of the random tokens.
        lengths: of the documents; three that make a row of an unmistakable length without.
        make_batch: from documents to the model's inputs; one row, by PackingCollator, without.
        training: whether the model is run in training mode, what it draws at random switched off.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int = 0,
        lengths: Sequence[int] | None = None,
        make_batch: Callable[[Tokens], Mapping[str, Any]] | None = None,
        training: bool = False,
    ) -> None:
        self.model = model
        self.make_batch = make_batch or in_one_row
        self.device = device_of_inputs(model)
        self.lengths = list(lengths or unmistakable_lengths(model))
        self.documents, self.others = random_documents(model, self.lengths, seed)
        self.signature = Signature(model)
        self.kept: KeptWeights | None = None
        self.rounding: float | None = None
        self.products = DtypeOfProducts()
        self.products_are_known = False
        self.training = training
        self.chance = 0
        """The seed that every run begins with: what is still drawn at random is the same for the same shapes."""

    @property
    def row(self) -> PackedRow:
        return PackedRow.of(self.lengths, self.device)

    @property
    def mode(self) -> str:
        """For a message."""
        return "in training mode, " if self.training else ""

    @property
    def tolerance(self) -> Tolerance:
        dtype = self.products.coarsest or dtype_of_computation(self.model, self.device)
        return Tolerance(dtype, has_experts(self.model), self.rounding)

    def measure_rounding(self, alone: list[Tensor], **options: Any) -> None:
        """What is apart from now on is judged by how far rounding moves the documents, whose logits alone are given."""
        if not self.tolerance.is_measured:
            return
        self.rounding = measure_rounding(
            self.model, lambda ids: self.logits(input_ids=ids, **options), self.documents, alone
        )

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No gradients and nothing dropped; the modules' modes, what they hold and the random state are put back."""
        try:
            with one_at_a_time, chance_put_back(self.device), modes_put_back(self.model), torch.no_grad():
                self.model.train(self.training)
                with without_chance(self.model) if self.training else nullcontext():
                    yield
        finally:
            if self.kept is not None:
                self.kept.put_back()

    def logits(self, **inputs: Any) -> Tensor:
        """[tokens, vocabulary], at least float32, of one row."""
        watched = nullcontext() if self.products_are_known else self.products  # it sees each call of torch
        with as_it_was(*self.model.modules()), self.weights_kept(), watched:
            logits = self.run(inputs)
        self.products_are_known = True
        return logits

    def run(self, inputs: Mapping[str, Any]) -> Tensor:
        """As `logits`; what the forward leaves behind stays."""
        given = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        understood = UNDERSTOOD if route_of(self.model) else ()  # by a patch, whatever the model itself takes
        given = {name: value for name, value in given.items() if name in understood or self.signature.takes(name)}
        if not self.training:
            return logits_of(self.model, self.model(**given)).flatten(0, 1)
        begin_chance(self.chance)
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():  # as it trains; some look at that
            logits = logits_of(self.model, self.model(**given)).flatten(0, 1)
        return logits if wanted else logits.detach()

    def weights_kept(self) -> AbstractContextManager[Any]:
        """A forward that writes to weights finds them as they were; a backward pass, as the forward has left them."""
        if self.kept is None:
            self.kept = KeptWeights(self.model)
            return self.kept
        self.kept.put_back()
        return nullcontext()

    def packed(self, documents: Tokens, embedded: bool = False, **options: Any) -> list[Tensor]:
        """Logits of each document, all in one batch; of tokens, or of their embeddings."""
        batch = {name: value for name, value in self.make_batch(documents).items() if name != "labels"}
        places = find_documents(documents, batch["input_ids"])
        if embedded:
            batch["inputs_embeds"] = self.model.get_input_embeddings()(batch.pop("input_ids").to(self.device))
        logits = self.logits(**batch, **options)
        return [logits[place] for place in places]

    def alone(self, **options: Any) -> list[Tensor]:
        """Logits of each document, one row each, with nothing but input_ids."""
        return [self.logits(input_ids=torch.tensor([tokens]), **options) for tokens in self.documents]

    def as_one_document(self, documents: Tokens, **options: Any) -> list[Tensor]:
        """Logits of the same tokens as a single document, without borders."""
        row = [token for tokens in documents for token in tokens]
        batch = in_one_row([row])
        del batch["labels"]
        return list(torch.split(self.logits(**batch, **options), self.lengths))

    def largest_leak(self, **options: Any) -> tuple[float, float]:
        """Largest change in a document that was not changed, and the standard deviation of the logits."""
        before = self.packed(self.documents, **options)
        self.refuse_what_proves_nothing(before, self.packed(self.documents, **options))
        leak = 0.0
        for changed in range(len(self.documents)):
            after = self.packed(self.with_other(changed), **options)
            if not largest_difference(before[changed], after[changed]) > 0:
                raise PackingError(
                    f"model: expected logits that depend on input_ids, those of {type(self.model).__name__} do not"
                )
            leak = max(leak, *(largest_difference(before[i], after[i]) for i in range(len(before)) if i != changed))
        return leak, spread(torch.cat(before))

    def remembers(self, **options: Any) -> list[str] | None:
        """Buffers through which documents of an earlier forward change those of this one; None where none do."""
        first, batch = (
            {name: value for name, value in self.make_batch(each).items() if name != "labels"}
            for each in (self.others, self.documents)
        )
        fresh = self.logits(**batch, **options)
        with as_it_was(*self.model.modules()), self.weights_kept():
            self.run({**first, **options})
            assert self.kept is not None
            written = {id(tensor) for tensor in self.kept.written()}
            later = self.run({**batch, **options})
        if largest_difference(fresh, later) <= self.tolerance.leak * spread(fresh):
            return None
        return [name for name, buffer in self.model.named_buffers() if id(buffer) in written]

    def draws_at_random(self, run: Callable[[], list[Tensor]]) -> bool | None:
        """Whether what is run depends on chance; None where it is other each time whatever chance begins with."""
        begin_chance(self.chance)
        before = state_of_chance(self.device)
        logits = run()
        if state_of_chance(self.device) == before:
            return False
        self.chance += 1
        other = run()
        self.chance -= 1
        if not self.others_each_time(logits, other):
            return False
        return None if self.others_each_time(logits, run()) else True

    def others_each_time(self, logits: list[Tensor], again: list[Tensor]) -> bool:
        limit = self.tolerance.leak * spread(torch.cat(logits))
        return not max(map(largest_difference, logits, again)) <= limit

    def refuse_what_proves_nothing(self, logits: list[Tensor], again: list[Tensor]) -> None:
        name = type(self.model).__name__
        if not all(comparable(each).any() for each in logits):
            raise PackingError(f"model: expected finite logits, {name} has none")
        if self.others_each_time(logits, again):
            raise PackingError(
                f"model: expected the same logits for the same tokens, {name} has others each time, with dropout off"
            )

    def with_other(self, changed: int) -> Tokens:
        return [self.others[i] if i == changed else tokens for i, tokens in enumerate(self.documents)]

    def sees_leaks(self, **options: Any) -> bool:
        """Whether, with the borders taken away, changing one document changes its neighbour."""
        before = self.as_one_document(self.documents, **options)[1]
        after = self.as_one_document(self.with_other(0), **options)[1]
        return largest_difference(before, after) > self.tolerance.leak * spread(before)

    def leaks_only_through_cache(self) -> bool:
        try:
            leak, scale = self.largest_leak(use_cache=False)
        except Exception:  # a model without that argument has no such explanation
            return False
        return leak <= self.tolerance.leak * scale

    def packed_gradients(self, **options: Any) -> list[list[Tensor]]:
        """For each document, the gradients of its logits in the embeddings of each document, packed."""
        with embedded(self.model) as embeddings:
            logits = self.packed(self.documents, **options)
            last = len(logits) - 1
            return [self.gradients(each, number, embeddings, number < last) for number, each in enumerate(logits)]

    def gradients_alone(self, **options: Any) -> list[Tensor]:
        """For each document, the gradients of its logits in its embeddings, alone."""
        own = []
        for number, tokens in enumerate(self.documents):
            with embedded(self.model) as embeddings:
                logits = self.logits(input_ids=torch.tensor([tokens]), **options)
                own.append(self.gradients(logits, number, embeddings)[number])
        return own

    def gradients(
        self, logits: Tensor, number: int, embeddings: list[tuple[Tensor, Tensor]], keep: bool = False
    ) -> list[Tensor]:
        """float [vocabulary of a document, embedding] for each document: its tokens' gradients of a random sum of
        logits, summed by token."""
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(logits.shape, generator=generator).to(logits)
        score = torch.where(comparable(logits), logits, 0).mul(weights).sum()
        outputs = [output for _, output in embeddings]
        found = torch.autograd.grad(score, outputs, retain_graph=keep, allow_unused=True)
        tokens = torch.cat([ids.flatten() for ids, _ in embeddings])
        flat = [torch.zeros_like(o) if g is None else g for g, o in zip(found, outputs, strict=True)]
        gradient = torch.cat([each.flatten(0, -2) for each in flat]).float()
        most = max(int(tokens.max()), *(max(document) for document in self.documents))
        by_token = gradient.new_zeros(most + 1, gradient.shape[-1]).index_add_(0, tokens, gradient)
        owners = Counter(token for document in self.documents for token in set(document))
        return [by_token[[token for token in sorted(set(each)) if owners[token] == 1]] for each in self.documents]


@contextmanager
def embedded(model: PreTrainedModel) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Tokens and their embeddings, call by call, with gradients that begin there; parameters get none."""
    seen: list[tuple[Tensor, Tensor]] = []

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        leaf = first.detach().requires_grad_()
        seen.append((args[0] if args else next(iter(kwargs.values())), leaf))
        return (leaf.clone(), *output[1:]) if isinstance(output, tuple) else leaf.clone()

    words = model.get_input_embeddings()
    tables = [module for module in model.modules() if getattr(module, "weight", None) is words.weight]
    tables = [words, *(module for module in tables if is_embedding(module) and module is not words)]
    hooks = [module.register_forward_hook(begin, with_kwargs=True) for module in tables]
    try:
        with torch.enable_grad():
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def is_embedding(module: nn.Module) -> bool:
    """Output layers may share the weight."""
    return isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__
