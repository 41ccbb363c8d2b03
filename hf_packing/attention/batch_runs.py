"""Run a model on a training batch: as it is, with some of its documents replaced, and on single documents alone.

`batch_proof` compares the results of these runs to prove that the documents of the batch do not affect each other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_packing.attention.inspect_model import (
    Signature,
    embedding_of,
    inner_model,
    input_device,
    is_compiled,
    without_ddp,
)
from hf_packing.attention.layout import Layout, read_layout
from hf_packing.attention.route import PATCH, READ_ARGUMENTS, is_patched
from hf_packing.attention.snapshot import (
    WeightSnapshot,
    in_mode,
    restored,
    restored_random_state,
    seed_all,
    without_randomness,
)
from hf_packing.attention.temporary_changes import EmbeddingCut, unpatched, with_sampled_vocabulary
from hf_packing.attention.token_axes import tensors_in
from hf_packing.attention.tolerance import computation_dtype
from hf_packing.columns import ENDS, KNOWN_COLUMNS, TRAINED, TREE_LABELS
from hf_packing.errors import ModelNotSupportedError, PackingError

_SEED = 0
"""The random seed of every run. Runs on inputs of equal shapes then draw the same random numbers."""

_FEW = 4
"""Of fewer documents than this number, every second one is replaced."""

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


Watch = Callable[[list[int], tuple[int, int]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Run:
    """The result of one call of the model.

    Args:
        outputs: float [tokens, width], logits for a sample of the vocabulary, or hidden states.
        gradients: float [tokens, embedding size], gradients of a weighted sum of `outputs` with respect to the
            embedded tokens; None if gradients were not computed.
    """

    outputs: Tensor
    gradients: Tensor | None = None


@dataclass(frozen=True)
class AloneRun:
    """The results of documents of equal length, each in a row of its own on the unpatched model.

    Args:
        documents: the indices of the documents in the batch; empty for a call whose results do not count.
        exact: the results, with the tokens of one document after the other.
        noisy: the same, after every entry of the embeddings was changed by a rounding error.
    """

    documents: list[int]
    exact: Run
    noisy: Run


class BatchRuns:
    """A model and a training batch, with methods that run the model on the batch.

    Args:
        model: a model, as a training loop calls it: wrapped by DDP, FSDP, PEFT, DeepSpeed, torch.compile, or not.
        batch: a packed batch with input_ids [rows, tokens] and borders.
        training: whether the model runs in training mode, with gradients but without dropout.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], training: bool) -> None:
        self.inner = inner_model(model)
        self.training = training
        self.is_compiled = is_compiled(model)
        self._model = without_ddp(model)
        signature, read_by_patch = Signature(self.inner), READ_ARGUMENTS if is_patched(self.inner) else ()
        if batch.get("input_ids") is None:
            raise PackingError(f"batch: expected input_ids, got {', '.join(batch) or 'nothing'}")
        device = input_device(self.inner)
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        # a compiled model would be compiled once more for calls without labels
        kept = _OF_OWN_LOSS if self.is_compiled else set()
        given = {name: value for name, value in given.items() if name in kept or name not in _OF_THE_LOSS}
        # columns such as weights may be for compute_loss alone, so **kwargs is no reason to pass them to the model
        given = {name: value for name, value in given.items() if name in (*KNOWN_COLUMNS, *kept, *signature.names)}
        self.row = self._read_row(given)
        self._inputs = {n: value for n, value in given.items() if n in read_by_patch or signature.takes(n)}
        shape = self._inputs["input_ids"].shape
        self._per_token = {
            name: value
            for name, value in self._inputs.items()
            if isinstance(value, Tensor) and value.shape[:2] == shape and name not in READ_ARGUMENTS
        }
        self._options = {"use_cache": False} if signature.takes("use_cache") else {}
        self._cut = EmbeddingCut(self.inner, requires_grad=training)

    def _read_row(self, given: dict[str, Any]) -> Layout:
        return read_layout(given, training=True)[1]

    @property
    def tokens(self) -> int:
        """The number of tokens in the batch."""
        return self.row.rows * self.row.tokens

    @property
    def lengths(self) -> Sequence[int]:
        """The number of tokens in each document. A piece of a document that was cut counts as a document."""
        return self.row.lengths

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's computations: the least precise dtype among weights, autocast and embedded tokens.

        FSDP may run a model in half precision whose weights are float32.
        """
        known = [computation_dtype(self.inner, self.row.cu_seq_lens.device), *self._cut.dtypes]
        return max(known, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def own_attention(self) -> str:
        """The name of the model's attention function before the model was patched."""
        patch = getattr(self.inner, PATCH, None)
        own = {} if patch is None else {id(config): name for config, name in patch.attention_before}
        attention: str = own.get(id(self.inner.config), self.inner.config._attn_implementation)
        return attention

    @property
    def replaced(self) -> list[int]:
        """The indices of the documents that `with_replaced` replaces: about half of the documents.

        Among many documents, they are those whose index has an even number of binary digits 1: 0, 3, 5, 6, 9, 10, ...
        For every distance, some of them are that far before a document that is kept, and some that far after one, so a
        leak to any later or earlier document is visible. Of two or three documents, every second one is replaced.
        """
        number = len(self.lengths)
        if number < _FEW:
            return list(range(0, number, 2)) if number > 1 else []
        return [index for index in range(number) if index.bit_count() % 2 == 0]

    @property
    def kept(self) -> Tensor:
        """The indices of the tokens in documents that are not replaced, int64 [kept tokens]."""
        replaced = set(self.replaced)
        spans = [span for number, span in enumerate(self.row.slices) if number not in replaced]
        device = self.row.cu_seq_lens.device
        return torch.cat([torch.arange(a, b, device=device) for a, b in spans])

    @property
    def graded(self) -> Tensor:
        """The indices of the tokens whose outputs have gradients, int64 [graded tokens]."""
        return self.kept

    @property
    def graded_documents(self) -> set[int]:
        """The indices of the documents whose outputs have gradients."""
        return set(range(len(self.lengths))).difference(self.replaced)

    @property
    def positions(self) -> Tensor:
        """The place of each token in its document, int64 [tokens]."""
        return torch.cat([torch.arange(end - start, device=self.kept.device) for start, end in self.row.slices])

    def tokens_of(self, document: int) -> Tensor:
        """Return the indices of a document's tokens in the batch, int64 [tokens of the document]."""
        return torch.arange(*self.row.slices[document], device=self.row.cu_seq_lens.device)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context manager: within the block, the model runs without dropout, and computes a sample of the logits.

        After the block, the model's modules, buffers and modes and the random state are restored.
        """
        modules = list(self.inner.modules())
        with ExitStack() as stack:
            stack.enter_context(restored_random_state(self.row.cu_seq_lens.device))
            if not (self.training and self.inner.training):  # a model that trains keeps the modes it trains in
                stack.enter_context(in_mode(self.inner, self.training))
            stack.enter_context(restored(*modules))
            weights = WeightSnapshot(self.inner)
            stack.callback(weights.restore)
            stack.enter_context(torch.set_grad_enabled(self.training))
            stack.enter_context(without_randomness(self.inner, functions=not self.is_compiled))
            if not self.is_compiled:  # code that torch.compile has compiled would be compiled again
                stack.enter_context(weights)
                stack.enter_context(with_sampled_vocabulary(self.inner))
            yield

    def packed(self, gradients: bool = False) -> Run:
        """Run the model on the batch as it is. With `gradients`, run it without compiled code, and also compute the
        gradients of the kept documents' outputs."""
        return self._run_batch(self._inputs, gradients)

    def with_replaced(self) -> Run:
        """Run the model on the batch after replacing all tokens of half of the documents. The shapes stay the same."""
        input_ids: Tensor = self._inputs["input_ids"]
        known, index = torch.unique(input_ids.flatten(), return_inverse=True)
        if len(known) < 2:
            known = torch.cat([known, (known + 1) % len(embedding_of(self.inner).weight)])
        other_tokens = known[(index + 1) % len(known)]  # tokens of the batch, which the model takes
        other_tokens[self.kept] = input_ids.flatten()[self.kept]
        return self._run_batch({**self._inputs, "input_ids": other_tokens.view_as(input_ids)}, gradients=False)

    def sampled_documents(self) -> list[list[int]]:
        """Return the groups of documents that `alone` runs, one group in each call. See `sampled_documents`."""
        return sampled_documents(self.lengths, self.replaced, self.tokens)

    def alone(self, attention: str | None = None, watch: Watch | None = None) -> list[AloneRun]:
        """Run sampled documents alone, on the unpatched model, together with copies whose embeddings are noisy.

        Documents of equal length run in one call. All ranks make the same number of calls.

        Args:
            attention: name of the attention function; by default, that of the model before it was patched.
            watch: function that returns a context manager for each call, from the indices of the documents and the
                numbers of rows and tokens in the call.
        """
        groups = self.sampled_documents()
        with unpatched(self.inner, attention), self.eagerly():
            return [self._run_alone(group, watch) for group in [*groups, *[[]] * (_CALLS_ALONE - len(groups))]]

    def _run_alone(self, documents: list[int], watch: Watch | None) -> AloneRun:
        device = self.row.cu_seq_lens.device
        dummy = torch.arange(min(_DUMMY_TOKENS, self.tokens), device=device)
        places = [self.tokens_of(number) for number in documents] or [dummy]
        inputs = {
            name: torch.stack([value.flatten(0, 1)[place] for place in places] * 2)
            for name, value in self._per_token.items()
        }
        rows = inputs["input_ids"]
        watched = nullcontext() if watch is None else watch(documents, (rows.shape[0], rows.shape[1]))
        with self._cut.active(rows.shape, noisy_rows=slice(len(places), None)) as leaf, watched:
            outputs = self._call({**inputs, **self._options}, rows.numel())
            positions = torch.arange(rows.shape[1], device=device).repeat(len(rows))
            gradients = self._gradients(outputs, leaf, torch.arange(rows.numel(), device=device), positions)
        half = rows.numel() // 2
        outputs = outputs.detach()
        exact, noisy = (
            Run(outputs[part], None if gradients is None else gradients[part])
            for part in (slice(half), slice(half, None))
        )
        return AloneRun(documents, exact, noisy)

    def _run_batch(self, inputs: Mapping[str, Any], gradients: bool) -> Run:
        shape = inputs["input_ids"].shape
        if self.is_compiled and not gradients:
            return Run(self._call(inputs, shape.numel()).detach())
        with self.eagerly(), self._cut.active(shape) as leaf:
            outputs = self._call(inputs, shape.numel())
            found = self._gradients(outputs, leaf, self.graded, self.positions) if gradients else None
        return Run(outputs.detach(), found)

    def _call(self, inputs: Mapping[str, Any], tokens: int) -> Tensor:
        """Call the model, and return its output for each token: float [tokens, width]."""
        seed_all(_SEED)
        output = self._model(**inputs)
        named = [getattr(output, name, None) for name in ("logits", "prediction_logits", "last_hidden_state")]
        for value in (*named, *tensors_in(output)):
            if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[:2].numel() != tokens:
                continue
            if value.is_floating_point():
                return value.flatten(0, 1)
        raise ModelNotSupportedError(
            f"model: expected an output of shape [rows, tokens, width], but {type(self.inner).__name__} returns none"
        )

    def eagerly(self) -> AbstractContextManager[Any]:
        """Return a context manager in which code that torch.compile has compiled runs uncompiled."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()

    def _gradients(self, outputs: Tensor, leaves: list[Tensor], tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Return the gradients of a weighted sum of `outputs` at some tokens with respect to the embedded tokens.

        The weights depend only on a token's position in its document. Return None if gradients cannot be computed.
        """
        if not leaves or not outputs.requires_grad:
            return None
        place = positions.to(outputs.device)[tokens]
        column = torch.arange(outputs.shape[-1], device=outputs.device)
        weights = torch.cos(place[:, None] * 0.7 + column * 1.3 + 0.1).to(outputs.dtype)
        try:
            found = torch.autograd.grad((outputs[tokens] * weights).sum(), leaves, allow_unused=True)[0]
        except RuntimeError:  # reentrant activation checkpointing supports only backward()
            return None
        return None if found is None else found.detach().flatten(0, 1)


def sampled_documents(lengths: Sequence[int], replaced: Sequence[int], tokens: int) -> list[list[int]]:
    """Return groups of documents to run alone. The documents of a group have the same length.

    The groups are those of the longest documents that fit, of the shortest documents, and of the most frequent length.
    Documents that are not replaced are preferred, since only these have gradients. After that, later documents are
    preferred, since most models pass information from earlier to later tokens.

    Args:
        lengths: number of tokens in each document of a batch.
        replaced: indices of the documents that `BatchRuns.with_replaced` replaces.
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
