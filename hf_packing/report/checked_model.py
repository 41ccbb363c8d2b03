"""Whether a model keeps packed documents apart, by its name: as it is, and patched."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from hf_packing.attention import IsolationReport, NoLanguageModelError, check_isolation, patch_model, small_copy_of
from hf_packing.attention.tiny_model import architectures, tiny_model
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.report.documents import one_line

KINDS = ("causal", "masked")
HEADS = {"causal": modeling_auto.AutoModelForCausalLM, "masked": modeling_auto.AutoModelForMaskedLM}


@dataclass(frozen=True)
class CheckedModel:
    """What was found."""

    name: str
    what: str
    """Which model was looked at in its place."""
    stock: IsolationReport
    patched: IsolationReport | None
    refusal: str = ""
    """Why patch_model refuses it, where it does."""

    @property
    def isolated(self) -> bool:
        """Whether documents stay apart once the model is patched."""
        return self.patched is not None and self.patched.isolated

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.what}"]
        if self.stock.reason != self.refusal:
            lines.append(f"stock: {self.stock}".replace("\nroute: none, the model is not patched", ""))
        lines.append(
            f"after patch_model: {self.patched}" if self.patched else f"patch_model refuses it: {self.refusal}"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.name,
            "checked": self.what,
            "isolated": self.isolated,
            "stock_isolated": self.stock.isolated,
            "stock_reason": self.stock.reason,
            "stock_max_leak": self.stock.max_leak,
            "route": None if self.patched is None or self.patched.route is None else self.patched.route.name,
            "max_leak": None if self.patched is None else self.patched.max_leak,
            "max_gradient_leak": None if self.patched is None else self.patched.max_gradient_leak,
            "refusal": self.refusal,
        }


def check_model(name: str, weights: bool = False, trust_remote_code: bool = False) -> CheckedModel:
    """Look for leaks in a model, patch it, and look again.

    Args:
        name: of a model on the hub, a folder, or an architecture of transformers such as "llama".
        weights: whether the model itself is loaded; without, a small one of the same configuration is looked at.
        trust_remote_code: whether code that comes with the model is run; without, such a model is refused.

    Raises:
        PackingError: there is no such model.
    """
    with quiet():
        model, what = model_named(name, weights, trust_remote_code)
        try:
            stock = check_isolation(model)
        except NoLanguageModelError as error:
            return CheckedModel(name, what, IsolationReport(False, math.nan, str(error)), None, str(error))
        try:
            return CheckedModel(name, what, stock, check_isolation(patch_model(model)))
        except ModelNotSupportedError as error:
            return CheckedModel(name, what, stock, None, str(error))


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers advises: it is not about this check."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def model_named(name: str, weights: bool, trust_remote_code: bool) -> tuple[PreTrainedModel, str]:
    """The model to look at, and what it is."""
    if not weights and not Path(name).exists():
        for kind in KINDS:
            if name in architectures(kind):
                return tiny_model(name, kind), f"a small {kind} model of this architecture, with random weights"
    config = config_named(name, trust_remote_code)
    head, note = head_of(config, name, trust_remote_code)
    code = {"trust_remote_code": trust_remote_code}
    if weights:
        model, missing = load(head, name, code)
        drawn = (
            f", but for what its files do not have and is random: {len(missing):,} weights, the first {missing[0]}"
            if missing
            else ""
        )
        return model, f"the model itself{drawn}{note}"
    try:
        with torch.device("meta"):
            large = head._from_config(config) if is_model(head) else head.from_config(config, **code)
        small = small_copy_of(large)
    except PackingError:
        raise
    except Exception as error:  # whatever a configuration may lead to
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise PackingError(f"MODEL: expected a configuration that makes a model, {name!r} does not: {reason}") from None
    return small, f"a small {type(small).__name__} of this configuration, with as many layers and random weights{note}"


def config_named(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # of the hub, of the network, of files
        raise PackingError(
            f"MODEL: expected a name on the hub, a folder, or an architecture such as llama, {name!r} cannot be loaded "
            f"here: {one_line(error)}"
        ) from None


def head_of(config: PreTrainedConfig, name: str, trust_remote_code: bool) -> tuple[Any, str]:
    """The class that a configuration names, or brings; else the language model of its type, and a word on that.

    A class of transformers, or an Auto class that finds the one that the configuration brings.
    """
    named = list(getattr(config, "architectures", None) or [])
    known = [cls for cls in (getattr(transformers, each, None) for each in named) if is_model(cls)]
    brought = getattr(config, "auto_map", None) or {}
    if trust_remote_code or not known:
        for auto, where in brought.items():
            if auto.startswith("AutoModel") and str(where).rpartition(".")[2] in named:
                return getattr(transformers, auto), ""
    if known:
        return known[0], ""
    missing = f"{', '.join(named)}, which transformers {transformers.__version__} does not have"
    which = missing if named else "no class"
    return HEADS[kind_of_type(config, name)], f"; the configuration names {which}"


def is_model(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, PreTrainedModel)


def kind_of_type(config: PreTrainedConfig, name: str) -> str:
    """By the Auto class that the configuration brings, else by what transformers has for its type; what could be either
    is an encoder."""
    mappings = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    for kind in KINDS:
        if HEADS[kind].__name__ in (getattr(config, "auto_map", None) or {}):
            return kind
    for kind in reversed(KINDS):
        if config.model_type in mappings[kind]:
            return kind
    raise PackingError(f"MODEL: expected a causal or a masked language model, {name!r} is a {config.model_type}")


def load(head: Any, name: str, code: dict[str, bool]) -> tuple[PreTrainedModel, list[str]]:
    """The model with its weights, and those that were missing, which are random."""
    try:
        model, info = head.from_pretrained(name, output_loading_info=True, **({} if is_model(head) else code))
    except Exception as error:  # of the hub, of the network, of files
        raise PackingError(f"--weights: expected those of {name!r}, they cannot be loaded: {one_line(error)}") from None
    return model.to("cuda") if torch.cuda.is_available() else model, sorted(info["missing_keys"])
