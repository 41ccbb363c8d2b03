"""Prove that every row of a padded batch has the same outputs and gradients in a patched model as when it is run alone.

The proof runs the whole model, with its head, on batches with padding on the right, on the left and on both sides.
"""

from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.forward import Patch, PatchedForward, install_unpadding
from hf_packing.attention.inspect_model import embedding_of, has_local_weights, pad_token_of
from hf_packing.attention.layout import CACHES, Sharing
from hf_packing.attention.padded import SIDES, Side, Unpadding
from hf_packing.attention.probe import DocumentTokens, Probe, pack_in_one_row
from hf_packing.attention.proof import Exam, prove_isolation, repeat_thoroughly, run_alone, run_alone_in_training
from hf_packing.attention.route import PATCH
from hf_packing.attention.row_readers import find_last_of_tokens, find_row_readers
from hf_packing.attention.tolerance import Tolerance, measure_rounding, spread, what_is_missing
from hf_packing.errors import ModelNotSupportedError

_NOT_COMPARED = ("loss", "hidden_states", "attentions", "aux_loss", "router_logits", *CACHES)
"""Names of outputs that the proof does not compare."""

_CLOSE = 1e-3
"""Largest difference between outputs for tokens and for their embeddings, in standard deviations of the output."""

_SHARING: tuple[Sharing, ...] = ("ragged", "equal", "none")


def prove_unpadding(model: PreTrainedModel, by_length: bool = False) -> None:
    """Find a way in which a patched model runs padded batches, prove it, and install it.

    Args:
        model: a patched model.
        by_length: whether the backbone takes no packed rows, and runs on the rows of equal length together.

    Raises:
        ModelNotSupportedError: no way is found in which every row of a padded batch has the outputs and gradients that
            it has alone; the message contains the reason. Or the weights are not in memory.
    """
    if not has_local_weights(model):
        raise ModelNotSupportedError(
            f"{type(model).__name__}: padded batches were not proven while the weights were in memory; call "
            "patch_model, and the model on a padded batch, before the model is sharded"
        )
    with torch.inference_mode(False):
        _find_and_prove(model, by_length)


def _find_and_prove(model: PreTrainedModel, by_length: bool) -> None:
    exams = _run_rows_alone(model)
    found: list[Unpadding] = []
    reasons: list[str] = []
    try:
        ways = [(name, False) for name in _backbones(model) if not by_length]
        ways += [(name, True) for name in _backbones(model)]
        for way in ways:
            for unpadding in _candidates(model, *way, exams.probe):
                install_unpadding(model, unpadding)
                refused = exams.refused_sides()
                if not refused:
                    _note_embeddings(model, unpadding, exams.probe)
                    return
                reasons += refused.values()
                found.append(replace(unpadding, refused=tuple(refused.items())))
    except BaseException:
        install_unpadding(model, None)
        raise
    best = min(found, key=lambda each: len(each.refused), default=None)
    if best is None or len(best.refused) == len(SIDES):
        install_unpadding(model, None)
        raise ModelNotSupportedError(f"{type(model).__name__}: padded batches are not supported: {reasons[0]}")
    _note_embeddings(model, best, exams.probe)


def _note_embeddings(model: PreTrainedModel, unpadding: Unpadding, probe: "RowProbe") -> None:
    """Install a proven way, and note whether embeddings in place of tokens give the same outputs. A head that looks for
    the pad token, as those of GPT-2 and Llama do, does not find it among embeddings."""
    install_unpadding(model, replace(unpadding, takes_embeddings=True))
    refused = dict(unpadding.refused)
    with suppress(Exception), probe.undisturbed():  # the model may not take embeddings
        at_sides = [probe.with_padding(side) for side in SIDES if side not in refused]
        both = [(torch.cat(each.packed(each.documents, embedded)) for embedded in (True, False)) for each in at_sides]
        if all(torch.allclose(one, other, rtol=0, atol=_CLOSE) for one, other in both):
            return
    install_unpadding(model, unpadding)


def _backbones(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the modules that may run without padding, the innermost one first."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    names = {id(module): name for name, module in model.named_modules()}
    candidates = [*([decoder] if isinstance(decoder, PreTrainedModel) else []), model.base_model]
    yield from dict.fromkeys(names[id(each)] for each in candidates if id(each) in names)


def _candidates(model: PreTrainedModel, backbone: str, by_length: bool, probe: "RowProbe") -> Iterator[Unpadding]:
    """Yield ways in which a model may run padded batches, the fastest first."""
    module, row = model.get_submodule(backbone), probe.row

    def run_backbone() -> Any:
        with probe.undisturbed():
            return probe.run_packed(module)

    def run_model() -> Any:
        with probe.undisturbed():
            return probe.packed(probe.documents)

    def use(readers: list[str], rows_after: str | None = None, sharing: Sharing = "ragged") -> Unpadding:
        unpadding = Unpadding(backbone, tuple((name, sharing) for name in readers), rows_after, by_length)
        install_unpadding(model, unpadding)
        return unpadding

    use([])
    inside: list[str] = []
    rows_after = None
    if not by_length:
        with suppress(Exception):  # the backbone may take no packed rows by itself
            inside = find_row_readers(model, run_backbone)
            use(inside)
            rows_after = find_last_of_tokens(model, module, run_backbone, row)
        use(inside, rows_after)
    outside: list[str] = []
    with suppress(Exception):  # the proof will find out why
        outside = find_row_readers(model, run_model)
    readers = [*inside, *(name for name in outside if name not in inside)]
    for sharing in _SHARING if readers else _SHARING[:1]:
        yield use(readers, rows_after, sharing)


@dataclass
class _Exams:
    """The tests of padded batches, with the outputs that the unpatched model has for each row alone."""

    patch: Patch
    probe: "RowProbe"
    evaluation: Exam
    training: Exam

    def refused_sides(self) -> dict[Side, str]:
        """Return the sides on which the patched model does not support padding, with the reasons."""
        reasons = {side: self._reason(side) for side in SIDES}
        return {side: reason for side, reason in reasons.items() if reason}

    def _reason(self, side: Side) -> str:
        """Return the reason why padding on a side is not supported, or an empty string."""
        try:
            self.evaluation = self._pass(self.evaluation, side)
            self.training = self._pass(self.training, side)
        except ModelNotSupportedError as error:
            return str(error)
        except Exception as error:  # custom model code may raise anything
            return f"the model cannot be called on a padded batch: {error}"
        return ""

    def _pass(self, exam: Exam, side: Side) -> Exam:
        """Prove with one exam that padding on a side is supported; if that fails, prove again thoroughly."""
        assert isinstance(exam.probe, RowProbe)
        at_side = replace(exam, probe=exam.probe.with_padding(side), only_equality=side != "right")
        try:
            with at_side.probe.undisturbed():
                prove_isolation(at_side)
            return exam
        except Exception:
            if exam.is_thorough:
                raise
        with self.patch.suspended():
            exam = repeat_thoroughly(exam)
        return self._pass(exam, side)


def _run_rows_alone(model: PreTrainedModel) -> _Exams:
    patch: Patch = getattr(model, PATCH)
    with patch.suspended():
        probe = RowProbe(model)
        probe.measure_scales()
        evaluation = run_alone(probe, gradients=False)
        in_training = RowProbe(model, training=True, like=probe)
        training = run_alone_in_training(in_training)
        if training.unproven:
            evaluation = run_alone(probe, gradients=True)
    return _Exams(patch, probe, evaluation, training)


class RowProbe(Probe):
    """A probe that runs a model on random documents, either as the rows of a padded batch or each document alone. All
    outputs of a row are compared, as one vector: those of its tokens, and those of the row as a whole.

    Args:
        model: a model with any head.
        training: as in `Probe`.
        like: a probe of the same model. The new probe uses its measurements.
        seed: seed of the random tokens.
    """

    def __init__(
        self, model: PreTrainedModel, training: bool = False, like: "RowProbe | None" = None, seed: int = 0
    ) -> None:
        super().__init__(model, seed, training=training, like=like)
        if like:
            self.documents, self.others = like.documents, like.others
        self.side: Side = "right"
        self._scales: dict[str, float] = like._scales if like else {}
        """The standard deviation of each output, by which its values are divided."""
        self._has_choices: bool = like._has_choices if like else False
        """True if the model takes an axis of choices between the axes of rows and of tokens."""
        self._slices: list[tuple[int, int]] = []
        self._sizes: list[int] = []

    def with_padding(self, side: Side) -> "RowProbe":
        """Return a probe with the same documents and measurements, and with padding on the given side."""
        other = copy(self)
        other.side = side
        return other

    @property
    def tolerance(self) -> Tolerance:
        return replace(super().tolerance, unit=1.0)

    def measure_rounding(self, alone: list[Tensor], only_longest: bool = False, **options: Any) -> None:  # noqa: ARG002
        if self.tolerance.is_measured:
            self.rounding = measure_rounding(
                self.model, lambda ids: self.logits(input_ids=ids, **options), self.documents, alone, lambda _: 1.0
            )

    def measure_scales(self) -> None:
        """Run every document alone, and store the standard deviation of each output.

        Two of the documents end in an end token, which some heads look for. If the model cannot be called on such
        documents, all of them end in one, as BART needs for classification, or none. If it cannot be called on rows of
        tokens, it is called on rows with a single choice each, as models for multiple choice need.
        """
        with self.undisturbed():
            self._measure_scales()

    def _measure_scales(self) -> None:
        end, pad = getattr(self.model.config.get_text_config(), "eos_token_id", None), pad_token_of(self.model)
        has_end = isinstance(end, int) and 0 <= end < len(embedding_of(self.model).weight) and end != pad
        ends = ((0, 2), (0, 1, 2), ()) if has_end else ((),)
        failures: list[Exception] = []
        for with_end, self._has_choices in (*((each, False) for each in ends), *((each, True) for each in ends)):
            without_end = self.documents, self.others
            last = {number: [end] for number in with_end if isinstance(end, int)}
            self.documents, self.others = (
                [each[: len(each) - len(last.get(n, []))] + last.get(n, []) for n, each in enumerate(one)]
                for one in without_end
            )
            try:
                self.alone(use_cache=False)
                break
            except Exception as error:  # custom model code may raise anything
                failures.append(error)
                self.documents, self.others = without_end
        else:
            name, missing = type(self.model).__name__, what_is_missing(self.model)
            raise ModelNotSupportedError(
                f"{name}: the model cannot be called with input_ids alone: {failures[0]}{missing}"
            ) from failures[0]
        found: dict[str, list[Tensor]] = {}
        for tokens in self.documents:
            self.logits(input_ids=torch.tensor([tokens]), use_cache=False)
            for name, value in self._of_rows[0].items():
                found.setdefault(name, []).append(value.detach().flatten())
        scales = {name: spread(torch.cat(values)) for name, values in found.items()}
        self._scales = {name: scale if scale > 0 else 1.0 for name, scale in scales.items()}

    def logits(self, **inputs: Any) -> Tensor:
        """Run a forward without padding, restore the model, and return the outputs of one row after another."""
        ids = inputs["input_ids"]
        return self._run(ids, torch.ones_like(ids), [(0, ids.shape[1])] * len(ids), **inputs)

    def packed(self, documents: DocumentTokens, embedded: bool = False, **options: Any) -> list[Tensor]:
        """Run the documents as the rows of a padded batch, and return the outputs of each document."""
        longest = max(map(len, documents))
        ids = torch.full((len(documents), longest), pad_token_of(self.model) or 0)
        mask, slices = torch.zeros_like(ids), []
        for number, tokens in enumerate(documents):
            missing = longest - len(tokens)
            start = {"right": 0, "left": missing, "both": missing // 2}[self.side]
            slices.append((start, start + len(tokens)))
            ids[number, start : start + len(tokens)] = torch.tensor(tokens)
            mask[number, start : start + len(tokens)] = 1
        return list(torch.split(self._run(ids, mask, slices, embedded, **options), self._sizes))

    def _run(
        self, ids: Tensor, mask: Tensor, slices: list[tuple[int, int]], embedded: bool = False, **options: Any
    ) -> Tensor:
        self._slices = slices
        embeddings = {"inputs_embeds": embedding_of(self.model)(ids.to(self.device))} if embedded else {}
        inputs = {**(embeddings or {"input_ids": ids}), "attention_mask": mask}
        if self._has_choices:
            inputs = {name: value[:, None] for name, value in inputs.items()}
        if "use_cache" not in self.signature.names:  # some models pass their own
            options.pop("use_cache", None)
        given = {name: value for name, value in (options | inputs).items() if self.signature.takes(name)}
        if not mask.all():
            given |= inputs  # a patched model reads the mask even if the model itself does not take it
        return super().logits(**given)

    def read(self, output: Any) -> Tensor:
        tokens = max(end for _, end in self._slices)
        self._of_rows: list[dict[str, Tensor]] = [{} for _ in self._slices]
        for name, value in output.items():
            if name in _NOT_COMPARED or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if len(value) != len(self._slices):
                raise ModelNotSupportedError(f"its output {name} has no axis for the rows of a batch")
            has_tokens = value.shape[1:2] == (tokens,)
            for of_row, values, (start, end) in zip(self._of_rows, value, self._slices, strict=True):
                of_row[name] = values[start:end] if has_tokens else values
        flat = [
            [
                values.flatten().to(torch.promote_types(values.dtype, torch.float32)) / self._scales.get(name, 1.0)
                for name, values in each.items()
            ]
            for each in self._of_rows
        ]
        rows = [torch.cat(each) for each in flat]
        self._sizes = list(map(len, rows))
        return torch.cat(rows)

    def run_packed(self, module: nn.Module) -> Any:
        """Run a module of a patched model on the documents packed in one row, and return its output."""
        patch: Patch = getattr(self.model, PATCH)
        forwards = (each for each in patch.replaced if isinstance(each, PatchedForward) and each.module is module)
        ids = {"input_ids": pack_in_one_row(self.documents)["input_ids"]}
        return next(forwards).run_packed(self.on_device(ids), replace(self.row, is_unpadded=True))
