"""Find and patch the models of a trainer: the model that is trained, and those that read the same batches, such as a
teacher or a reference model. `attach(trainer, None)` plans no batches beside, so that only padding is not computed.

Also what is checked of a model that is trained: that it takes the rows of a dataset.
"""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention import (
    ProveInTraining,
    has_local_weights,
    inner_model,
    input_device,
    is_patched,
    patch_for_training,
    patch_model,
    predicts_tokens,
    prove_unpadding,
    share_prefixes,
    unpadding_of,
    unpatched_on_error,
)
from hf_packing.checks import check_choice, check_type, expect
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, Shapes
from hf_packing.training.checks import check_labels_are_hidden
from hf_packing.training.head import maker_of
from hf_packing.training.model_loss import check_predicts_next
from hf_packing.upstream.accelerate import prepared_models
from hf_packing.upstream.torch import HOOKS


@dataclass(frozen=True)
class UnpaddedModels:
    """The models of a trainer that run without padding. `attach` returns this object if no batching is given.

    Example:
        >>> import hf_packing as hfp, tempfile, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=99, **sizes))
        >>> arguments = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none")
        >>> hfp.attach(transformers.Trainer(model, arguments), None).models["model"].partition("; ")[2]
        'isolation proven'
    """

    models: dict[str, str]
    """A description of each patched model, by the name of the trainer's attribute."""

    def __str__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in self.models.items())


def unpad_models(trainer: Any, prove: ProveInTraining, fewest_shared: int | None) -> UnpaddedModels:
    """Patch the models of a trainer, and prove that they take padded batches; "first batch" stands for "model" here.

    Raises:
        PackingError: the trainer has no model; two models share a configuration; or the
            weights of a model are not in memory.
        ModelNotSupportedError: it cannot be proven that a model takes padded batches or, for language models, that
            rows can share prefixes.
    """
    check_choice("prove", prove, ProveInTraining)
    patch_models(trainer, "small" if prove == "small" else "model")
    described = {}
    for name, model in models_of(trainer).items():
        inner = inner_model(model)
        if has_local_weights(model):
            with _named(name), trainer.accelerator.autocast():
                if not unpadding_of(inner) or torch.is_autocast_enabled(input_device(inner).type):
                    prove_unpadding(inner)  # patch_model may have proven it, but without autocast
                if name == "model" or predicts_tokens(inner):  # reward models share no prefixes
                    share_prefixes(inner, fewest_shared)
                    if fewest_shared is not None:
                        warn_of_shared_randomness(model)
        described[name] = _describe(inner)
    return UnpaddedModels(described)


def patch_models(trainer: Any, prove: ProveInTraining, ranks_per_row: int = 1) -> None:
    """Patch the models of a trainer. Only the model that is trained can wait for the proof on the first batch."""
    for name, model in models_of(trainer).items():
        with _named(name):
            waits = prove == "first batch" and name != "model"
            patch_for_training(model, trainer.accelerator, "model" if waits else prove, ranks_per_row)


@contextmanager
def models_unpatched_on_error(trainer: Any) -> Iterator[None]:
    """Context manager: if the block raises an error, the patches that it has made in a trainer's models are removed."""
    with ExitStack() as as_before:
        for name, model in models_of(trainer).items():
            with _named(name):
                as_before.enter_context(unpatched_on_error(model))
        yield


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Context manager: errors in the block begin with the name of a trainer's model."""
    try:
        yield
    except PackingError as error:
        hint = "" if name == "model" else ". Keep a model that reads no batches of the trainer outside of it"
        raise type(error)(f"trainer.{name}: {error}{hint}") from error


def models_of(trainer: Any) -> dict[str, nn.Module]:
    """Return the models that read tokens among the attributes of a trainer, by name, the trained model first.

    What wraps, or is part of, a model that was found before is not another model. Of models that are elsewhere, such as
    in a list or a callback, the proof of the step shows that they read packed rows.
    """
    check_type("trainer", getattr(trainer, "model", None), nn.Module, "a Trainer with a model")
    found, seen = {"model": trainer.model}, set(trainer.model.modules())
    for name, module in vars(trainer).items():
        if isinstance(module, nn.Module) and _reads_tokens(module):
            inside = {each for each in module.modules() if isinstance(each, (PreTrainedModel, nn.Embedding))}
            if not inside <= seen:
                found[name] = module
                seen.update(module.modules())
    return found


def _reads_tokens(module: nn.Module) -> bool:
    """Return whether a module, or a model of transformers in it, reads tokens, unlike losses and vision towers."""
    models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    if models:
        return any("input_ids" in inspect.signature(each.forward).parameters for each in models)
    return any(isinstance(each, nn.Embedding) for each in module.modules())


_LIBRARIES = ("torch.", "transformers.", "trl.", "peft.", "accelerate.", "deepspeed.", "bitsandbytes.", "liger_kernel.")
"""Where code is from that is not the user's own, beside this package."""


def has_own_code(model: nn.Module, *functions: Any) -> bool:
    """Return whether forwards, hooks or the loss function of a model, or other functions, are code of the user."""
    found = [*functions, getattr(inner_model(model), "loss_function", None)]
    for own, module in ((vars(each), each) for each in model.modules()):
        found += own.get("forward") or type(module).forward, *chain(*(own[name].values() for name in HOOKS))
    libraries = (__package__.partition(".")[0] + ".", *_LIBRARIES)
    return not all(maker_of(each).startswith(libraries) for each in found if each is not None)


def _describe(model: PreTrainedModel) -> str:
    unpadding = unpadding_of(model) if is_patched(model) else None
    proven = f"{unpadding}; isolation proven" if unpadding else "not proven on padded batches yet"
    return f"{type(model).__name__}, {proven}"


def check_takes_rows(model: nn.Module, source: Any, batching: Batching, shapes: Shapes) -> None:
    """Check that a patched model takes the rows of a source: trees, or labels that do more than repeat the input.

    The model is proven to run rows of trees; if its weights are not in memory, this must have been proven before. A
    warning names what is not exact in trees.

    Raises:
        PackingError: the labels are not hidden from the model. Of trees: the model sees the tokens that it predicts; or
            batches have fixed shapes, or segments that are cut by a schedule.
        ModelNotSupportedError: it cannot be proven that the model runs rows of trees.
    """
    if not source.shares_prefixes:
        check_labels_are_hidden(source, model)
        return
    check_predicts_next(model)
    expect(None, "for documents that share prefixes, whose batches have no fixed shapes", tokens=shapes[0])
    cut = "for documents that share prefixes, since extra borders would cut them"
    expect(None, cut, length_schedule=getattr(batching, "length_schedule", None))
    if has_local_weights(model):
        patch_model(model, trees=True)
    warn_of_shared_randomness(model)


def warn_of_shared_randomness(model: nn.Module) -> None:
    """Warn of dropout and of losses of routers, which are not those of the documents alone."""
    config = inner_model(model).config.get_text_config()
    dropout = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    if dropout or getattr(config, "attention_dropout", None):
        warnings.warn(
            "dropout: documents that share a prefix also share what is dropped in it; set the dropout of the model to "
            "0 for the gradients of separate documents",
            stacklevel=2,
        )
    if getattr(config, "output_router_logits", False):
        warnings.warn(
            "output_router_logits: the balancing loss of routers counts tokens of a shared prefix once, not once for "
            "each document",
            stacklevel=2,
        )


def prepared_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return a model as `accelerator.prepare` has returned it, or the model itself if it was not prepared."""
    return next((each for each in prepared_models(accelerator) if model in each.modules()), model)
