"""`hf-packing check`: check whether a model isolates packed documents, before and after patch_model.

A model isolates documents if changing one document of a packed row never changes the outputs of the other documents.
"""

import argparse
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from hf_packing.attention import (
    IsolationReport,
    NoLanguageModelError,
    architectures,
    check_isolation,
    patch_model,
    small_copy_of,
    tiny_model,
)
from hf_packing.cli.screen import WIDE, err, out, print_json, say
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.text.documents import hub_answers, reason_of

_NOT_ISOLATED = 1
_KINDS = ("causal", "masked")
_HEADS = {"causal": modeling_auto.AutoModelForCausalLM, "masked": modeling_auto.AutoModelForMaskedLM}
_ADVICE = ". hf_packing.patch_model("
"""The beginning of the advice to call patch_model. The command calls patch_model itself, so it omits this advice."""


def run_check(given: argparse.Namespace) -> int:
    """Check whether a model isolates documents, before and after patch_model, and print the results.

    Args:
        given: the parsed command line flags.

    Returns:
        The exit code: 0 if the patched model isolates documents; 1 if it does not, or if the model cannot be patched.
    """
    with err.status("Checking the model for leaks"):
        found = _check_model(given.model, given.weights, given.trust_remote_code)
    if given.json:
        print_json(found.to_dict())
    else:
        say(out, str(found))
    return 0 if found.isolated else _NOT_ISOLATED


@dataclass(frozen=True)
class _CheckedModel:
    """The results of checking one model before and after patch_model."""

    name: str
    checked: str
    """A text that says which model was checked: the model itself, or a small model with the same configuration."""
    stock: IsolationReport
    patched: IsolationReport | None
    refusal: str = ""
    """The reason why patch_model refuses the model; empty if patch_model accepts the model."""

    @property
    def isolated(self) -> bool:
        """True if the model isolates documents after patch_model."""
        return self.patched is not None and self.patched.isolated

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.checked}"]
        if self.stock.reason != self.refusal:
            stock = replace(self.stock, reason=self.stock.reason.partition(_ADVICE)[0])
            parts.append(_indented(f"stock: {stock}".replace("\nroute: none, the model is not patched", "")))
        after = (
            f"after patch_model: {self.patched}" if self.patched else f"patch_model refuses the model: {self.refusal}"
        )
        return "\n".join([*parts, _indented(after)])

    def to_dict(self) -> dict[str, Any]:
        """Return all results as a dict, for JSON."""
        return {
            "model": self.name,
            "checked": self.checked,
            "isolated": self.isolated,
            "stock_isolated": self.stock.isolated,
            "stock_reason": self.stock.reason,
            "stock_max_leak": self.stock.max_leak,
            "route": None if self.patched is None or self.patched.route is None else self.patched.route.name,
            "max_leak": None if self.patched is None else self.patched.max_leak,
            "max_gradient_leak": None if self.patched is None else self.patched.max_gradient_leak,
            "refusal": self.refusal,
        }


def _indented(text: str) -> str:
    """Return the text with lines wrapped to WIDE columns. All lines except the first are indented."""
    lines = [part for line in text.split("\n") for part in wrap(line, WIDE, break_long_words=False) or [""]]
    return "\n  ".join(lines)


def _check_model(name: str, weights: bool, trust_remote_code: bool) -> _CheckedModel:
    with _quiet():
        model, checked = _model_named(name, weights, trust_remote_code)
        try:
            stock = check_isolation(model)
        except NoLanguageModelError as error:
            return _CheckedModel(name, checked, IsolationReport(False, math.nan, str(error)), None, str(error))
        try:
            return _CheckedModel(name, checked, stock, check_isolation(patch_model(model)))
        except ModelNotSupportedError as error:
            return _CheckedModel(name, checked, stock, None, str(error))


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: within the block, hide Python warnings, and all log messages of transformers except errors."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _model_named(name: str, weights: bool, trust_remote_code: bool) -> tuple[PreTrainedModel, str]:
    """Return the model to check, and a description of the model.

    Args:
        name: name of a model on the hub, a folder, or an architecture of transformers such as "llama".
        weights: whether to load the model itself; if False, a small model of the same architecture is made, with
            random weights.
        trust_remote_code: whether to run code that comes with the model; if False, a model that needs such code is
            refused.

    Raises:
        PackingError: no such model exists, or the model cannot be built or loaded.
    """
    if not weights and not Path(name).exists():
        for kind in _KINDS:
            if name in architectures(kind):
                with _building(name):
                    return tiny_model(name, kind), f"a small {kind} model of this architecture, with random weights"
    options = {"local_files_only": not Path(name).exists() and not hub_answers(name)}
    config = _load_config(name, trust_remote_code, options)
    head, note = _head_of(config, name, trust_remote_code)
    code = {} if _is_model(head) else {"trust_remote_code": trust_remote_code}
    if weights:
        model, missing = _load(head, name, code | options)
        drawn = (
            f", with random values for {len(missing):,} weights that are missing in its files, such as {missing[0]}"
            if missing
            else ""
        )
        return model, f"the model itself{drawn}{note}"
    with _building(name):
        with torch.device("meta"):
            large = head._from_config(config) if _is_model(head) else head.from_config(config, **code)
        small = small_copy_of(large)
    return small, f"a small {type(small).__name__} of this configuration, with as many layers and random weights{note}"


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Context manager: an error in the block says that no model can be built from a configuration."""
    try:
        yield
    except PackingError:
        raise
    except Exception as error:  # building a model from any configuration may raise any error
        raise PackingError(
            f"MODEL: expected a configuration from which a model can be built, but building a model from {name!r} "
            f"failed: {type(error).__name__}: {reason_of(error)}"
        ) from None


def _load_config(name: str, trust_remote_code: bool, options: dict[str, bool]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # errors of the hub, the network or files
        raise PackingError(
            f"MODEL: expected a name on the hub, a folder, or an architecture such as llama, but {name!r} cannot be "
            f"loaded here: {reason_of(error)}"
        ) from None


def _head_of(config: PreTrainedConfig, name: str, trust_remote_code: bool) -> tuple[Any, str]:
    """Return the class that loads the model, and a note for the user.

    The class is the first of these three that is available:

    1. The Auto class in the configuration's auto_map, which loads code that comes with the model. This class is
       considered only if trust_remote_code is True, or if transformers has none of the classes that the configuration
       names.
    2. The transformers class that the configuration names.
    3. The Auto class for language models of the configuration's type. The note then says which classes the
       configuration names; in the first two cases, the note is empty.
    """
    named = list(getattr(config, "architectures", None) or [])
    known = [cls for cls in (getattr(transformers, each, None) for each in named) if _is_model(cls)]
    brought = getattr(config, "auto_map", None) or {}
    if trust_remote_code or not known:
        for auto, where in brought.items():
            if auto.startswith("AutoModel") and str(where).rpartition(".")[2] in named:
                return getattr(transformers, auto), ""
    if known:
        return known[0], ""
    missing = f"{', '.join(named)}, which transformers {transformers.__version__} does not have"
    which = missing if named else "no class"
    return _HEADS[_kind_of_type(config, name)], f"; the configuration names {which}"


def _is_model(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, PreTrainedModel)


def _kind_of_type(config: PreTrainedConfig, name: str) -> str:
    """Return "causal" or "masked", the kind of language model that a configuration describes.

    The kind comes from the Auto class in the configuration's auto_map, or else from the model type. If transformers has
    both causal and masked models of this type, the kind is "masked".

    Raises:
        PackingError: the model is neither a causal nor a masked language model.
    """
    mappings = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    for kind in _KINDS:
        if _HEADS[kind].__name__ in (getattr(config, "auto_map", None) or {}):
            return kind
    for kind in reversed(_KINDS):
        if config.model_type in mappings[kind]:
            return kind
    raise PackingError(
        f"MODEL: expected a causal or a masked language model, but {name!r} has model type {config.model_type!r}"
    )


def _load(head: Any, name: str, options: dict[str, bool]) -> tuple[PreTrainedModel, list[str]]:
    """Return the model with its weights, and the names of weights that are random because its files lack them."""
    try:
        model, info = head.from_pretrained(name, output_loading_info=True, **options)
    except Exception as error:  # errors of the hub, the network or files
        raise PackingError(
            f"--weights: expected weights that can be loaded, but loading {name!r} failed: {reason_of(error)}"
        ) from None
    return model.to("cuda") if torch.cuda.is_available() else model, sorted(info["missing_keys"])
