"""A model in training mode with chance taken out: dropout, layer dropping and noise are off, all else is as it is."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.inner import configurations

RANDOM_SETTINGS = ("drop", "jitter", "noise")
"""Parts of the names of probabilities and scales of noise: attention_dropout, layerdrop, router_jitter_noise,
neftune_noise_alpha."""

DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


@contextmanager
def modes_put_back(model: nn.Module) -> Iterator[None]:
    """Whether each module is in training mode, which may differ between them, is as it was afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def chance_put_back(device: torch.device) -> Iterator[None]:
    """The random states of torch, NumPy and Python are as they were afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def begin_chance(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def state_of_chance(device: torch.device) -> tuple[Any, ...]:
    """What changes when a random number is drawn."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return (*(bytes(state.numpy()) for state in states), random.getstate(), _of_numpy())


def _of_numpy() -> tuple[bytes, int]:
    _, keys, place, *_ = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes(), int(place)


@contextmanager
def without_chance(model: PreTrainedModel) -> Iterator[None]:
    """What a model drops and which noise it adds in training is nothing, for the length of the block."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(switched_off(module, ("p",) if isinstance(module, _DropoutNd) else ()))
        for config in configurations(model):
            stack.enter_context(switched_off(config))
        stack.enter_context(NoDropout())
        yield


@contextmanager
def switched_off(owner: Any, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Attributes that are probabilities or scales of noise are 0."""
    settings = {
        name: value
        for name, value in vars(owner).items()
        if type(value) is float and value and (name in also or any(part in name for part in RANDOM_SETTINGS))
    }
    vars(owner).update(dict.fromkeys(settings, 0.0))
    try:
        yield
    finally:
        vars(owner).update(settings)


class NoDropout(TorchFunctionMode):
    """Dropout returns what it is given, wherever its probability was written."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args, kwargs = without_dropout(args, kwargs)
        return function(*args, **kwargs)


def without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of scaled_dot_product_attention, whose fifth argument it is."""
    return (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs if len(args) > 4 else {
        **kwargs,
        "dropout_p": 0.0,
    }
