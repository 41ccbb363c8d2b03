"""A few random documents, run through a model together and alone, with one of them changed at a time."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.as_it_was import KeptWeights, as_it_was
from hf_packing.attention.documents import Tokens, find_documents, in_one_row, random_documents, unmistakable_lengths
from hf_packing.attention.feed import Signature
from hf_packing.attention.logits import comparable, largest_difference, logits_of, spread
from hf_packing.attention.row import PackedRow
from hf_packing.errors import PackingError

LEAK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest change of a logit, in standard deviations of the logits, that rounding alone may make. Parts of most models
compute in float32 whatever the model's dtype, so float64 is not held to its own precision."""
HALF_LEAK_TOLERANCE = 1e-3
"""In half precision. Shapes do not change when tokens do, so kernels give no difference at all, but for experts."""
ROUTED_HALF_LEAK_TOLERANCE = 2e-2

GRADIENT_LEAK_TOLERANCE = 1e-6
"""Largest gradient in another document, as a share of the largest in the document itself: where there is no path, there
is no gradient, in any precision."""

EQUALITY_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Largest difference between a document packed and alone, where kernels see other shapes; in standard deviations."""

GRADIENT_LENIENCE = 10
"""How much further gradients may be apart, having come twice the way."""

HALF_MAX, HALF_RMS, ROUTED_HALF_MEDIAN = 0.2, 0.05, 0.05
"""Half precision: the largest or the root mean square difference has to be below its limit; in a model with experts,
where rounding sends single tokens to another expert, the median may be instead. Measured on tiny bfloat16 models of 2
to 12 layers: rounding 0 to 0.25, 0 to 0.04, 0 to 0.05; a lost window, scale or sink from 0.4, 0.07, 0.07 up."""


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
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int = 0,
        lengths: Sequence[int] | None = None,
        make_batch: Callable[[Tokens], Mapping[str, Any]] | None = None,
    ) -> None:
        self.model = model
        self.make_batch = make_batch or in_one_row
        self.device = device_of_inputs(model)
        self.lengths = list(lengths or unmistakable_lengths(model))
        self.documents, self.others = random_documents(model, self.lengths, seed)
        self.signature = Signature(model)
        self.kept: KeptWeights | None = None

    @property
    def row(self) -> PackedRow:
        return PackedRow.of(self.lengths, self.device)

    @property
    def in_half_precision(self) -> bool:
        autocast = torch.is_autocast_enabled(self.device.type)
        return autocast or self.model.dtype not in (torch.float32, torch.float64)

    @property
    def leak_tolerance(self) -> float:
        if self.in_half_precision:
            return ROUTED_HALF_LEAK_TOLERANCE if has_experts(self.model) else HALF_LEAK_TOLERANCE
        return LEAK_TOLERANCE[self.model.dtype]

    def difference(self, packed: list[Tensor], alone: list[Tensor], lenience: float = 1) -> float:
        """Largest difference of documents packed and alone; 0 where it is no more than the precision explains."""
        worst = 0.0
        for left, right in zip(packed, alone, strict=True):
            largest, unit = largest_difference(left, right), spread(right)
            if not math.isfinite(largest):
                equal = False
            elif self.in_half_precision:
                apart = (left - right)[comparable(left)].abs() / unit
                equal = largest <= HALF_MAX * unit or float(apart.pow(2).mean().sqrt()) <= HALF_RMS * lenience
                equal |= has_experts(self.model) and float(apart.median()) <= ROUTED_HALF_MEDIAN * lenience
            else:
                equal = largest <= EQUALITY_TOLERANCE[self.model.dtype] * unit * lenience
            worst = worst if equal else max(worst, largest)
        return worst

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Dropout off, no gradients; the modules' modes and the random state are put back."""
        training = [module for module in self.model.modules() if module.training]
        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        self.model.eval()
        try:
            with one_at_a_time, torch.random.fork_rng(devices=devices), torch.no_grad():
                yield
        finally:
            if self.kept is not None:
                self.kept.put_back()
            for module in training:
                module.training = True

    def logits(self, **inputs: Any) -> Tensor:
        """[tokens, vocabulary], at least float32, of one row."""
        given = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        given = {name: value for name, value in given.items() if self.signature.takes(name)}
        with as_it_was(*self.model.modules()), self.weights_kept():
            output = self.model(**given)
        return logits_of(self.model, output).flatten(0, 1)

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

    def refuse_what_proves_nothing(self, logits: list[Tensor], again: list[Tensor]) -> None:
        name = type(self.model).__name__
        if not all(comparable(each).any() for each in logits):
            raise PackingError(f"model: expected finite logits, {name} has none")
        scale = spread(torch.cat(logits))
        if not max(map(largest_difference, logits, again)) <= self.leak_tolerance * scale:
            raise PackingError(
                f"model: expected the same logits for the same tokens, {name} has others each time, with dropout off"
            )

    def with_other(self, changed: int) -> Tokens:
        return [self.others[i] if i == changed else tokens for i, tokens in enumerate(self.documents)]

    def sees_leaks(self, **options: Any) -> bool:
        """Whether, with the borders taken away, changing one document changes its neighbour."""
        before = self.as_one_document(self.documents, **options)[1]
        after = self.as_one_document(self.with_other(0), **options)[1]
        return largest_difference(before, after) > self.leak_tolerance * spread(before)

    def leaks_only_through_cache(self) -> bool:
        try:
            leak, scale = self.largest_leak(use_cache=False)
        except Exception:  # a model without that argument has no such explanation
            return False
        return leak <= self.leak_tolerance * scale

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


def device_of_inputs(model: PreTrainedModel) -> torch.device:
    """Where tokens belong: where their embeddings are, or come to when accelerate has offloaded them."""
    embeddings = model.get_input_embeddings()
    own: torch.device = embeddings.weight.device
    hook = getattr(embeddings, "_hf_hook", None)
    return own if own.type != "meta" or hook is None else torch.device(hook.execution_device)


@contextmanager
def embedded(model: PreTrainedModel) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Tokens and their embeddings, call by call, with gradients that begin there; parameters get none."""
    seen: list[tuple[Tensor, Tensor]] = []

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        leaf = first.detach().requires_grad_()
        seen.append((args[0] if args else next(iter(kwargs.values())), leaf))
        return (leaf.clone(), *output[1:]) if isinstance(output, tuple) else leaf.clone()

    table = model.get_input_embeddings().weight
    tables = [module for module in model.modules() if getattr(module, "weight", None) is table]
    hooks = [module.register_forward_hook(begin, with_kwargs=True) for module in tables if is_embedding(module)]
    try:
        with torch.enable_grad():
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def is_embedding(module: nn.Module) -> bool:
    """Output layers may share the weight."""
    return isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__


def has_experts(model: nn.Module) -> bool:
    return any("Expert" in type(module).__name__ or "Router" in type(module).__name__ for module in model.modules())
