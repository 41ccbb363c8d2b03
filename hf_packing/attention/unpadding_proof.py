"""Find the way in which a patched model runs padded batches, and prove it.

The proof runs the whole model, with its head, on batches with padding on the right, on the left and on both sides.
Every row has to have the same outputs and gradients as when it is run alone.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_packing.attention.cases import PaddedCase, examine_in_training
from hf_packing.attention.forward import Patch, PatchedForward, install_unpadding
from hf_packing.attention.inspect_model import has_local_weights
from hf_packing.attention.layout import Sharing
from hf_packing.attention.padded import SIDES, Side, Unpadding
from hf_packing.attention.proof import require
from hf_packing.attention.route import PATCH
from hf_packing.attention.row_readers import find_last_of_tokens, find_row_readers
from hf_packing.attention.runs import Runner
from hf_packing.errors import ModelNotSupportedError

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
    cases = _examined(model)
    found: list[Unpadding] = []
    reasons: list[str] = []
    try:
        ways = [(name, False) for name in _backbones(model) if not by_length]
        ways += [(name, True) for name in _backbones(model)]
        for way in ways:
            for unpadding in _candidates(model, *way, cases[0]):
                install_unpadding(model, unpadding)
                refused = {side: reason for side in SIDES if (reason := _refused(cases, side))}
                reasons += refused.values()
                found.append(replace(unpadding, refused=tuple(refused.items())))
                if not refused:
                    _note_embeddings(model, found[-1], cases[0])
                    return
    except BaseException:
        install_unpadding(model, None)
        raise
    best = min(found, key=lambda each: len(each.refused), default=None)
    if best is None or len(best.refused) == len(SIDES):
        install_unpadding(model, None)
        raise ModelNotSupportedError(f"{type(model).__name__}: padded batches are not supported: {reasons[0]}")
    _note_embeddings(model, best, cases[0])


def _examined(model: PreTrainedModel) -> list[PaddedCase]:
    """Return the cases of padded batches, in evaluation and in training mode, with the outputs of each row alone."""
    evaluation = PaddedCase(Runner(model))
    evaluation.examine()
    training = evaluation.in_training()
    examine_in_training(training, evaluation)
    return [evaluation, training]


def _refused(cases: list[PaddedCase], side: Side) -> str:
    """Return the reason why the patched model does not support padding on a side, or an empty string."""
    try:
        for case in cases:
            if case.can_be_run:
                case.side = side
                case.replacements = [[each] for each in range(len(case.paths))] if side == "right" else []
                require(case)
    except ModelNotSupportedError as error:
        return str(error)
    except Exception as error:  # custom model code may raise anything
        return f"the model cannot be called on a padded batch: {error}"
    return ""


def _note_embeddings(model: PreTrainedModel, unpadding: Unpadding, case: PaddedCase) -> None:
    """Install a proven way, and note whether embeddings in place of tokens give the same outputs. A head that looks for
    the pad token, as those of GPT-2 and Llama do, does not find it among embeddings."""
    install_unpadding(model, replace(unpadding, takes_embeddings=True))
    refused = dict(unpadding.refused)
    with suppress(Exception), case.undisturbed():  # the model may not take embeddings
        for case.side in SIDES:
            if case.side not in refused:
                one, other = (torch.cat(case.outputs(case.tokens, embedded=each)) for each in (True, False))
                if not torch.allclose(one, other, rtol=0, atol=_CLOSE):
                    break
        else:
            return
    install_unpadding(model, unpadding)


def _backbones(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the modules that may run without padding, the innermost one first."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    names = {id(module): name for name, module in model.named_modules()}
    candidates = [*([decoder] if isinstance(decoder, PreTrainedModel) else []), model.base_model]
    yield from dict.fromkeys(names[id(each)] for each in candidates if id(each) in names)


def _candidates(model: PreTrainedModel, backbone: str, by_length: bool, case: PaddedCase) -> Iterator[Unpadding]:
    """Yield ways in which a model may run padded batches, the fastest first."""
    module = model.get_submodule(backbone)
    case.side = "right"

    def run_backbone() -> Any:
        patch: Patch = getattr(model, PATCH)
        forwards = (each for each in patch.replaced if isinstance(each, PatchedForward) and each.module is module)
        ids = case.tokens[None].to(case.runner.device)
        with case.undisturbed():
            return next(forwards).run_packed({"input_ids": ids}, replace(case.row, is_unpadded=True))

    def run_model() -> Any:
        with case.undisturbed():
            return case.outputs(case.tokens)

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
            rows_after = find_last_of_tokens(model, module, run_backbone, case.row)
        use(inside, rows_after)
    outside: list[str] = []
    with suppress(Exception):  # the proof will find out why
        outside = find_row_readers(model, run_model)
    readers = [*inside, *(name for name in outside if name not in inside)]
    for sharing in _SHARING if readers else _SHARING[:1]:
        yield use(readers, rows_after, sharing)
