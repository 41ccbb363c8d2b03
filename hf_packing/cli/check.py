"""`hf-packing check`: check whether a model isolates packed documents, before and after patch_model.

A model isolates documents if changing one document of a packed row never changes the outputs of the other documents.
"""

import argparse
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill, indent
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from hf_packing.attention import IsolationReport, check_isolation, patch_model, small_copy_of
from hf_packing.cli.flags import WIDE, print_json
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.text.render import reason_of

_KINDS: dict[str, tuple[Any, Any]] = {
    "causal": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
}
"""The Auto class of each kind of language model, and the architectures that have this kind."""
_WITHOUT_PATCH = re.compile(r"\. hf_packing\.patch_model\(.*|\nroute: none.*")
"""What a stock model's report says of patch_model. It is left out, since the command calls patch_model next."""


def run(given: argparse.Namespace) -> int:
    """Check whether a model isolates documents, before and after patch_model, and print each result when it is known.

    Args:
        given: the parsed command line flags.

    Returns:
        The exit code: 0 if the patched model isolates documents; 1 if it does not, or if the model cannot be patched.
    """
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    say = (lambda _: None) if given.json else _say_wrapped
    model, checked = _model_named(given)
    if not given.json:
        print(f"{given.model}: {checked}", flush=True)
    stock, refusal = None, ""
    try:
        stock = check_isolation(model)
        say(f"stock: {_WITHOUT_PATCH.sub('', str(stock))}")
        patched = check_isolation(patch_model(model))
        say(f"after patch_model: {patched}")
    except ModelNotSupportedError as error:
        refusal = str(error)
        patched = IsolationReport(False, math.nan, refusal)
        say(f"patch_model refuses the model: {refusal}")
    if given.json:
        stock = stock or patched  # a model is refused before the check if it is no language model
        print_json(
            {
                "model": given.model,
                "checked": checked,
                "isolated": patched.isolated,
                "stock_isolated": stock.isolated,
                "stock_reason": stock.reason,
                "stock_max_leak": stock.max_leak,
                "route": patched.route and patched.route.name,
                "max_leak": patched.max_leak,
                "max_gradient_leak": patched.max_gradient_leak,
                "refusal": refusal,
            }
        )
    return 0 if patched.isolated else 1


def _say_wrapped(text: str) -> None:
    """Print a text in lines of at most WIDE columns, indented except for the first."""
    lines = "\n".join(fill(line, WIDE, break_long_words=False) for line in text.split("\n"))
    print(indent(lines, "  ").strip(), flush=True)


def _model_named(given: argparse.Namespace) -> tuple[PreTrainedModel, str]:
    """Return the model to check, and a description of the model.

    With --weights, that is the model itself. Otherwise it is a small model of the same architecture, or of the same
    class and configuration, with random weights.

    Raises:
        PackingError: no such model exists, or the model cannot be built or loaded.
    """
    name = given.model
    buildable = f"MODEL: expected a configuration from which a model can be built, but building {name!r} failed"
    if not given.weights and not Path(name).exists():
        for kind, (head, architectures) in _KINDS.items():
            if name in architectures:
                with _expecting(buildable):
                    config = AutoConfig.for_model(name)
                    if kind == "causal" and hasattr(config, "is_decoder"):
                        config.is_decoder = True
                    return _small(head, config), f"a small {kind} model of this architecture, with random weights"
    code = {"trust_remote_code": given.trust_remote_code}
    with _expecting(f"MODEL: expected a name on the hub, a folder, or an architecture such as llama, got {name!r}"):
        config = AutoConfig.from_pretrained(name, **code)
    head, note = _head_of(config, given)
    if given.weights:
        with _expecting(f"--weights: expected weights that can be loaded, but loading {name!r} failed"):
            model, info = head.from_pretrained(name, output_loading_info=True, **code)
        if missing := sorted(info["missing_keys"]):
            drawn = f"with random values for {len(missing):,} weights that are missing in its files"
            note = f", {drawn}, such as {missing[0]}{note}"
        return model.to("cuda") if torch.cuda.is_available() else model, f"the model itself{note}"
    with _expecting(buildable):
        small = _small(head, config, **code)
    return small, f"a small {type(small).__name__} of this configuration, with as many layers and random weights{note}"


def _small(head: Any, config: PreTrainedConfig, **code: Any) -> PreTrainedModel:
    """Return a small copy of the model that a class of transformers, or an Auto class, builds of a configuration."""
    with torch.device("meta"):
        large = head.from_config(config, **code) if hasattr(head, "from_config") else head._from_config(config)
    return small_copy_of(large)


@contextmanager
def _expecting(what: str) -> Iterator[None]:
    """Context manager: turn any error of transformers, of the hub or of files into a PackingError that begins so."""
    try:
        yield
    except Exception as error:
        raise PackingError(f"{what}: {type(error).__name__}: {reason_of(error)}") from None


def _head_of(config: PreTrainedConfig, given: argparse.Namespace) -> tuple[Any, str]:
    """Return the class that loads the model, and a note for the user.

    The class is the first of these three that is available:

    1. The Auto class in the configuration's auto_map, which loads code that comes with the model. This class is
       considered only with --trust-remote-code, or if transformers has none of the classes that the configuration
       names.
    2. The transformers class that the configuration names.
    3. The Auto class for language models of the configuration's type: masked ones, if transformers has both kinds. The
       note then says which classes the configuration names; in the first two cases, the note is empty.

    Raises:
        PackingError: the model is neither a causal nor a masked language model.
    """
    named = config.architectures or []
    known = [getattr(transformers, name) for name in named if hasattr(transformers, name)]
    brought = [
        getattr(transformers, auto)
        for auto, where in (getattr(config, "auto_map", None) or {}).items()
        if auto.startswith("AutoModel") and where.rpartition(".")[2] in named
    ]
    heads = [*brought, *known] if given.trust_remote_code else [*known, *brought]
    if heads:
        return heads[0], ""
    by_type = [head for head, architectures in _KINDS.values() if config.model_type in architectures]
    if not by_type:
        raise PackingError(
            "MODEL: expected a causal or a masked language model, but "
            f"{given.model!r} has model type {config.model_type!r}"
        )
    missing = f"{', '.join(named)}, which transformers {transformers.__version__} does not have"
    return by_type[-1], f"; the configuration names {missing if named else 'no class'}"
