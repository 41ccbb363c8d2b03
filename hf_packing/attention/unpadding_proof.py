"""Find the way in which a patched model runs padded batches, and prove it.

The proof runs the whole model, with its head, on batches with padding on the right, on the left and on both sides.
Every row has to have the same outputs and gradients as when it is run alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.by_segment import find_last_of_tokens
from hf_packing.attention.cases import RowCase, examine_in_training
from hf_packing.attention.forward import Patch, PatchedForward, install_unpadding
from hf_packing.attention.layout import CACHES
from hf_packing.attention.model import embedding_of, has_local_weights, pad_token_of
from hf_packing.attention.padded import SIDES, Side, Unpadding
from hf_packing.attention.proof import require
from hf_packing.attention.route import PATCH
from hf_packing.attention.runs import NotCallableError, Runner
from hf_packing.errors import ModelNotSupportedError

_NOT_COMPARED = ("loss", "hidden_states", "attentions", "aux_loss", "router_logits", *CACHES)
"""Names of outputs of padded rows that are not compared."""


class PaddedCase(RowCase):
    """Random documents as the rows of a padded batch of a model with any head. All outputs of a row are compared, as
    one vector: those of its tokens, and those of the row as a whole.

    Args:
        runner: runs the model.
        seed: seed of the random tokens.
        with_end: the documents that end in the model's end token, which some heads look for.
        has_choices: whether the model gets rows with a single choice each, as models for multiple choice need.
    """

    where = "the padded batch"

    def __init__(self, runner: Runner, seed: int, with_end: Sequence[int], has_choices: bool) -> None:
        super().__init__(runner, seed=seed)
        self.side: Side = "right"
        self.has_choices = has_choices
        last = torch.from_numpy(self.trees.begins[1:] - 1)[list(with_end)]
        for tokens in (self.tokens, self.others):
            tokens[last] = _end_token_of(runner.model) or 0

    def outputs(self, tokens: Tensor, embedded: bool = False, **options: Any) -> list[Tensor]:  # noqa: ARG002
        return self._outputs_of(self.by_segment(tokens), **options)

    def outputs_alone(self, places: Tensor) -> Tensor:
        takes_cache = "use_cache" in self.runner.signature.names  # some models pass their own
        return self._outputs_of([self.tokens[places]], **({"use_cache": False} if takes_cache else {}))[0]

    def _outputs_of(self, rows: list[Tensor], **options: Any) -> list[Tensor]:
        """Run the model on a padded batch, and return all outputs of each row."""
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), pad_token_of(self.model) or 0)
        mask, places = torch.zeros_like(ids), []
        for number, row in enumerate(rows):
            start = {"right": 0, "left": longest - len(row), "both": (longest - len(row)) // 2}[self.side]
            places.append(slice(start, start + len(row)))
            ids[number, places[-1]], mask[number, places[-1]] = row, 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.has_choices:
            inputs = {name: value[:, None] for name, value in inputs.items()}
        found: list[list[Tensor]] = [[] for _ in rows]
        for name, value in self.runner({**inputs, **options}).items():
            if name not in _NOT_COMPARED and isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(torch.promote_types(value.dtype, torch.float32))
                for own, values, place in zip(found, value, places, strict=True):
                    own.append((values[place] if value.shape[1:2] == (longest,) else values).flatten())
        return [torch.cat(each)[:, None] for each in found]


def _end_token_of(model: PreTrainedModel) -> int | None:
    """Return the token at the end of documents that some heads look for, if it is not the pad token."""
    end = getattr(model.config.get_text_config(), "eos_token_id", None)
    is_own = isinstance(end, int) and 0 <= end < len(embedding_of(model).weight) and end != pad_token_of(model)
    return end if is_own else None


def examined_padded_rows(runner: Runner, seed: int = 0) -> PaddedCase:
    """Return a case of documents that the model takes: two of them end in an end token, or all, as BART needs for
    classification, or none. Every document has run alone.

    Raises:
        ModelNotSupportedError: the model takes no rows of tokens.
    """
    failures: list[NotCallableError] = []
    with_ends = ((0, 2), (0, 1, 2), ()) if _end_token_of(runner.model) else ((),)
    for has_choices, with_end in product((False, True), with_ends):
        case = PaddedCase(runner, seed, with_end, has_choices)
        try:
            case.examine()
            return case
        except NotCallableError as error:
            failures.append(error)
    raise ModelNotSupportedError(str(failures[0])) from failures[0]


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
    evaluation = examined_padded_rows(Runner(model))
    training = evaluation.in_training()
    examine_in_training(training, evaluation)
    ways = [(name, False) for name in _backbones(model) if not by_length]
    ways += [(name, True) for name in _backbones(model)]
    reasons = []
    try:
        for unpadding in chain.from_iterable(_candidates(model, *way, evaluation) for way in ways):
            install_unpadding(model, unpadding)
            if not (reason := _problem([evaluation, training])):
                return
            reasons.append(reason)
    except BaseException:
        install_unpadding(model, None)
        raise
    install_unpadding(model, None)
    raise ModelNotSupportedError(f"{type(model).__name__}: padded batches are not supported: {reasons[0]}")


def _problem(cases: list[PaddedCase]) -> str:
    """Return the reason why the patched model does not support padding on some side, or an empty string."""
    try:
        for side, case in product(SIDES, cases):
            if case.known:
                case.side = side
                case.replacements = [[each] for each in range(len(case.paths))] if side == "right" else []
                require(case)
    except ModelNotSupportedError as error:
        return str(error)
    except Exception as error:  # custom model code may raise anything
        return f"the model cannot be called on a padded batch: {error}"
    return ""


def _backbones(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the modules that may run without padding, the innermost one first."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    names = {id(module): name for name, module in model.named_modules()}
    candidates = [*([decoder] if isinstance(decoder, PreTrainedModel) else []), model.base_model]
    yield from dict.fromkeys(names[id(each)] for each in candidates if id(each) in names)


def _candidates(model: PreTrainedModel, backbone: str, by_length: bool, case: PaddedCase) -> Iterator[Unpadding]:
    """Yield ways in which a model may run padded batches, the fastest first."""
    unpadding, module = Unpadding(backbone, by_length=by_length), model.get_submodule(backbone)
    patch: Patch = getattr(model, PATCH)

    def run_backbone() -> Any:
        forwards = (each for each in patch.replaced if isinstance(each, PatchedForward) and each.module is module)
        ids = case.tokens[None].to(case.runner.device)
        with case.undisturbed():
            return next(forwards).run_packed({"input_ids": ids}, replace(case.row, is_unpadded=True))

    if not by_length:
        install_unpadding(model, unpadding)
        with suppress(Exception):  # the backbone may take no packed rows by itself
            unpadding = replace(unpadding, rows_after=find_last_of_tokens(model, module, run_backbone, case.row))
    sides: tuple[Side | None, ...] = (None, "right", "left")
    yield from (replace(unpadding, to=side) for side in sides)
