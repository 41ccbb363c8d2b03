"""Run a model on a few random documents, packed in one batch or one at a time, and measure leaks between them."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import (
    Embedded,
    Signature,
    distinctive_lengths,
    embedding_of,
    gradient_by_token,
    has_local_weights,
    has_vocabulary,
    input_device,
    record_embeddings,
)
from hf_packing.attention.layout import Layout
from hf_packing.attention.route import READ_ARGUMENTS, is_patched
from hf_packing.attention.snapshot import (
    ModuleSnapshot,
    WeightSnapshot,
    in_mode,
    random_state,
    restored_random_state,
    seed_all,
    without_randomness,
)
from hf_packing.attention.tolerance import (
    MatmulDtype,
    Tolerance,
    comparable,
    computation_dtype,
    has_experts,
    largest_difference,
    logits_of,
    measure_rounding,
    spread,
)
from hf_packing.errors import PackingError

DocumentTokens = list[list[int]]
"""The token ids of every document."""

_random_state_lock = threading.RLock()
"""Lock that a thread holds while it changes the random state."""


def random_documents(model: PreTrainedModel, lengths: list[int], seed: int) -> tuple[DocumentTokens, DocumentTokens]:
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


class Probe:
    """A test setup that runs a model on the random documents of `random_documents`, packed in one batch or alone.

    Args:
        model: a model of transformers, on any device, in any dtype.
        seed: seed of the random tokens.
        lengths: number of tokens in each document; by default, the lengths that `distinctive_lengths` returns.
        make_batch: function that turns documents into the model's inputs; by default, `pack_in_one_row`.
        training: whether the model runs in training mode, with dropout, noise and layer dropping switched off.
        like: a probe that has already run the model in the same mode. The new probe uses its measurements.
        module: the module to run, either the model itself, which is the default, or its backbone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int = 0,
        lengths: Sequence[int] | None = None,
        make_batch: Callable[[DocumentTokens], Mapping[str, Any]] | None = None,
        training: bool = False,
        like: "Probe | None" = None,
        module: nn.Module | None = None,
    ) -> None:
        self.model, self.module = model, module or model
        self.make_batch = make_batch or pack_in_one_row
        self.device = input_device(model)
        self.lengths = list(lengths or distinctive_lengths(model))
        self.documents, self.others = random_documents(model, self.lengths, seed)
        self.signature = Signature(self.module)
        self.training = training
        self.rounding: float | None = like.rounding if like else None
        self.intercepts_dropout = True
        self._is_in_series = False
        self._has_experts = has_experts(model)
        self._modules: ModuleSnapshot | None = None
        self._weights: WeightSnapshot | None = like._weights if like else None
        self._matmuls: MatmulDtype = like._matmuls if like else MatmulDtype()
        self._seed = 0

    @property
    def row(self) -> Layout:
        return Layout.of(self.lengths, self.device)

    @property
    def mode(self) -> str:
        return "in training mode, " if self.training else ""  # the start of an error message

    @property
    def tolerance(self) -> Tolerance:
        dtype = self._matmuls.half or computation_dtype(self.model, self.device)
        return Tolerance(dtype, self._has_experts, self.rounding)

    def measure_rounding(self, alone: list[Tensor], only_longest: bool = False, **options: Any) -> None:
        """Set `rounding` to the measured effect of rounding. `alone` contains the logits of documents run alone. With
        `only_longest`, only the longest document is run again."""
        if not self.tolerance.is_measured:
            return
        longest = self.lengths.index(max(self.lengths))
        chosen = slice(longest, longest + 1) if only_longest else slice(None)
        self.rounding = measure_rounding(
            self.model, lambda ids: self.logits(input_ids=ids, **options), self.documents[chosen], alone[chosen]
        )

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context manager: within the block, the model runs in the probe's mode, without dropout and gradients. After
        the block, the modules' modes, the weights and the random state are restored."""
        try:
            model = in_mode(self.model, self.training)
            with _random_state_lock, restored_random_state(self.device), model, torch.no_grad():
                if not self.training:
                    yield
                    return
                with without_randomness(self.model, self.intercepts_dropout) as dropout:
                    yield
                self.intercepts_dropout = self.intercepts_dropout and dropout.was_needed
        finally:
            if self._weights is not None:
                self._weights.restore()

    def logits(self, **inputs: Any) -> Tensor:
        """Run a forward, restore the model, and return float32 or float64 logits [rows * tokens, vocabulary]."""
        read_by_patch = READ_ARGUMENTS if is_patched(self.model) else ()  # not all are in the signature
        given = {name: value for name, value in inputs.items() if name in read_by_patch or self.signature.takes(name)}
        given, wanted = self.on_device(given), torch.is_grad_enabled()
        with self._restored(), torch.set_grad_enabled(wanted or self.training):  # some models check this in training
            if self.training:
                seed_all(self._seed)
            logits = self.read(self.module(**given))
        return logits if wanted else logits.detach()

    def read(self, output: Any) -> Tensor:
        """Return the logits in a model's output, or the hidden states in a backbone's output, [rows * tokens, size]."""
        return logits_of(self.module, output).flatten(0, 1)

    def loss(self, **inputs: Any) -> Tensor:
        """Run a forward with labels, restore the model, and return the loss that the model itself computes."""
        with self._restored():
            seed_all(self._seed)
            loss: Tensor = self.module(**self.on_device(inputs)).loss
        return loss

    def on_device(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Context manager: undo all changes to modules after the block, and of weights before the next forward."""
        if self._is_in_series:
            yield
            return
        if self._modules is None or not self._modules.is_current:
            self._modules = ModuleSnapshot(*self.model.modules())
        is_first = self._weights is None
        self._weights = self._weights or WeightSnapshot(self.model)
        self._weights.restore()
        try:
            with self._weights if is_first else nullcontext(), self._matmuls if is_first else nullcontext():  # slow
                yield
        finally:
            self._modules.restore()

    @contextmanager
    def in_series(self) -> Iterator[None]:
        """Context manager: within the block, the model is not restored between forwards, but only at the end."""
        with self._restored():
            self._is_in_series = True
            try:
                yield
            finally:
                self._is_in_series = False

    def packed(self, documents: DocumentTokens, embedded: bool = False, **options: Any) -> list[Tensor]:
        """Run the documents packed in one batch, as tokens or as embeddings, and return the logits of each document."""
        batch = {name: value for name, value in self.make_batch(documents).items() if name != "labels"}
        places = _find_documents(documents, batch["input_ids"])
        if embedded:
            batch["inputs_embeds"] = self.model.get_input_embeddings()(batch.pop("input_ids").to(self.device))
        logits = self.logits(**batch, **options)
        return [logits[place] for place in places]

    def alone(self, **options: Any) -> list[Tensor]:
        """Run each document alone, without position_ids or borders, and return each document's logits."""
        return [self.logits(input_ids=torch.tensor([tokens]), **options) for tokens in self.documents]

    def largest_leak(self, packed: list[Tensor] | None = None, **options: Any) -> tuple[float, float, float]:
        """Replace one packed document at a time, and measure how the logits of the other documents change. `packed`
        contains the logits of the packed documents, if they are known.

        Returns:
            The largest change of a logit in a document that was not replaced; the same for tokens that the replaced
            document keeps, or nan if there are none; and the standard deviation of all logits.

        Raises:
            PackingError: a document has no finite logits; or logits vary, or do not depend on the tokens.
        """
        before, name = packed or self.packed(self.documents, **options), type(self.model).__name__
        if not all(comparable(each).any() for each in before):
            raise PackingError(f"model: expected finite logits, but {name} returns no finite logits for a document")
        leak, inside, scale = 0.0, float("nan"), spread(torch.cat(before))
        for changed, (tokens, other) in enumerate(zip(self.documents, self.others, strict=True)):
            after = self.packed([*self.documents[:changed], other, *self.documents[changed + 1 :]], **options)
            changes = list(map(largest_difference, before, after))
            if not changes.pop(changed) > 0:
                raise PackingError(
                    f"model: expected logits that depend on input_ids, but {name} returns the same for other tokens"
                )
            leak = max(leak, *changes)
            kept = [place for place, token in enumerate(tokens) if token == other[place]]
            if kept and len(before[changed]) == len(tokens):
                inside = max(largest_difference(before[changed][kept], after[changed][kept]), inside)
        if not leak <= self.tolerance.leak * scale and self._vary(before, self.packed(self.documents, **options)):
            raise PackingError(
                f"model: expected the same logits for the same tokens, but {name} is nondeterministic with dropout off"
            )
        return leak, inside, scale

    def memory(self, packed: list[Tensor] | None = None, **options: Any) -> list[str] | None:
        """Return None if a forward does not affect the logits of the next one; otherwise, the names of the buffers that
        it changes. `packed` contains the logits of the packed documents, if they are known."""
        fresh = packed or self.packed(self.documents, **options)
        with self.in_series():
            self.packed(self.others, **options)
            assert self._weights is not None
            written = {id(tensor) for tensor in self._weights.changed()}
            later = self.packed(self.documents, **options)
        if not self._vary(fresh, later):
            return None
        return [name for name, buffer in self.model.named_buffers() if id(buffer) in written]

    def is_random(self, run: Callable[[], list[Tensor]]) -> bool | None:
        """Return whether the logits of `run` depend on the seed; None if they vary even for the same seed."""
        seed_all(self._seed)
        before = random_state(self.device)
        logits = run()
        if random_state(self.device) == before:
            return False
        self._seed += 1
        other = run()
        self._seed -= 1
        if not self._vary(logits, other):
            return False
        return None if self._vary(logits, run()) else True

    def _vary(self, logits: list[Tensor], again: list[Tensor]) -> bool:
        return not max(map(largest_difference, logits, again)) <= self.tolerance.leak * spread(torch.cat(logits))

    def packed_with_gradients(self, **options: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Run the documents packed in one batch, and return their logits and gradients. Entry [i][j] of the gradients
        is for document i's logits with respect to document j's embeddings."""
        with record_embeddings(self.model) as embedded:
            logits = self.packed(self.documents, **options)
            found = [self._gradients(each, number, embedded, keep=True) for number, each in enumerate(logits)]
        return [each.detach() for each in logits], found

    def alone_with_gradients(self, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Run each document alone, and return the documents' logits and gradients with respect to their embeddings."""
        logits, own = [], []
        with record_embeddings(self.model) as embedded:
            for number, tokens in enumerate(self.documents):
                embedded.clear()
                logits.append(self.logits(input_ids=torch.tensor([tokens]), **options))
                own.append(self._gradients(logits[-1], number, embedded)[number])
        return [each.detach() for each in logits], own

    def _gradients(self, logits: Tensor, number: int, embedded: Embedded, keep: bool = False) -> list[Tensor]:
        """Return the gradients of a randomly weighted sum of `logits` with respect to the embeddings of each document:
        float [distinct tokens, embedding size]. Tokens that several documents have are left out."""
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(logits.shape, generator=generator).to(logits)
        score = torch.where(comparable(logits), logits, 0).mul(weights).sum()
        by_token = gradient_by_token(score, embedded, max(map(max, self.documents)), keep)
        owners = Counter(token for document in self.documents for token in set(document))
        return [by_token[[token for token in sorted(set(each)) if owners[token] == 1]] for each in self.documents]


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model is a language model: whether it has an output layer or, if it does not name one, returns
    as many numbers for each token of a document as its vocabulary has."""
    if has_vocabulary(model) or model.config.is_encoder_decoder or not has_local_weights(model):
        return has_vocabulary(model)
    with suppress(Exception):  # custom model code may raise anything
        probe = Probe(model)
        with probe.undisturbed():
            width = probe.logits(input_ids=torch.tensor(probe.documents[:1])).shape[-1]
        return width in (len(embedding_of(model).weight), model.config.get_text_config().vocab_size)
    return False
