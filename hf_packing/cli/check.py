"""`hf-packing check`: check whether a model isolates packed documents, before and after patch_model.

A model isolates documents if changing one document of a packed row never changes the outputs of the other documents.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from hf_packing.attention import (
    IsolationReport,
    check_isolation,
    patch_model,
    patched_copy_of,
    route_of_copy,
    small_copy_of,
)
from hf_packing.cli.flags import print_json
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.text.render import reason_of
from hf_packing.upstream.transformers import from_config, takes_configuration


def run(given: argparse.Namespace) -> int:
    """Check whether a model isolates documents, before and after patch_model, and print each result when it is known.

    Args:
        given: the parsed command line flags.

    Returns:
        The exit code: 0 if the patched model isolates documents; 1 if it does not, or if the model cannot be patched.
    """
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    say: Callable[[str], None] = (lambda _: None) if given.json else partial(print, flush=True)
    try:
        model, checked = _model_named(given)
    except Exception as error:  # of transformers, of the hub or of files
        named = "its usual configuration makes no model; pass a folder with a config.json: "
        raise PackingError(
            f"MODEL: expected a name on the hub, a folder, or an architecture such as llama, got {given.model!r}: "
            f"{named if _is_architecture(given) else ''}{type(error).__name__}: {reason_of(error)}"
        ) from None
    say(f"{given.model}: {checked}")
    stock, refusal = None, ""
    try:
        stock = check_isolation(model if given.weights else small_copy_of(model, torch.float64))
        # the advice to call patch_model is left out, since that comes next
        said = (line.partition(". hf_packing.patch_model(")[0] for line in f"stock: {stock}".split("\n"))
        say("\n".join(said))
        patched = _check_patched(model, given.weights)
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


def _check_patched(model: PreTrainedModel, itself: bool) -> IsolationReport:
    """Check a patched model itself, or its patched small copy, with the route of the model."""
    if model.config.is_encoder_decoder and model.get_output_embeddings() is not None:
        raise ModelNotSupportedError(f"{type(model).__name__}: an encoder-decoder takes two texts, got one in a row")
    if itself:
        return check_isolation(patch_model(model))
    copy = patched_copy_of(model)
    return replace(check_isolation(copy), route=route_of_copy(copy, model))


def _model_named(given: argparse.Namespace) -> tuple[PreTrainedModel, str]:
    """Return the model to check, and a description of what is checked.

    With --weights, that is the model itself. Otherwise it is a model without weights, for a small copy, of the
    architecture with its usual sizes, or of the class and configuration of the model.
    """
    name, code = given.model, {"trust_remote_code": given.trust_remote_code}
    config = AutoConfig.for_model(name) if _is_architecture(given) else AutoConfig.from_pretrained(name, **code)
    head = _head_of(config, given.trust_remote_code)
    if given.weights:
        model, info = head.from_pretrained(name, output_loading_info=True, **code)
        missing = len(info["missing_keys"])
        drawn = f", with random values for {missing:,} weights that are missing in its files" if missing else ""
        return model.to("cuda") if torch.cuda.is_available() else model, f"the model itself{drawn}"
    with torch.device("meta"):
        model = head.from_config(config, **code) if hasattr(head, "from_config") else from_config(head, config)
    return model, f"a small {type(model).__name__} with as many layers and random weights"


def _is_architecture(given: argparse.Namespace) -> bool:
    return given.model in CONFIG_MAPPING and not given.weights and not Path(given.model).exists()


def _head_of(config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """Return the class of transformers that a configuration names or, if there is none, an Auto class.

    The Auto class is that of masked language models if these have the configuration, else of causal ones, else of
    encoder-decoders. It also loads the code that comes with a model, which is preferred if it may run.
    """
    brought = getattr(config, "auto_map", None) or {}
    named = config.architectures or [""]
    if hasattr(transformers, named[0]) and not (trust_remote_code and brought):
        return getattr(transformers, named[0])
    for head in (AutoModelForMaskedLM, AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        if takes_configuration(head, config) or head.__name__ in brought:
            return head
    return AutoModelForCausalLM
