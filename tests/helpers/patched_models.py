"""Patched tiny models, proven once in each process of the tests and copied: the proof takes most of the time."""

import copy
from collections.abc import Callable
from functools import cache

import torch
from tiny_models import build, exact
from transformers import PreTrainedModel

import hf_packing as hfp
from tools.tiny_model import tiny_model


@cache
def patched_once(
    make: Callable[..., PreTrainedModel], trees: bool, *arguments, padded: bool = False, **changes
) -> PreTrainedModel:
    """The patched model of a function that makes models; to be copied before it is changed."""
    if trees or padded:  # the proof for packed rows is shared, too
        model = copy.deepcopy(patched_once(make, False, *arguments, **changes))
        return hfp.patch_model(model, trees=trees, padded=padded)
    return hfp.patch_model(make(*arguments, **changes))


def patched(name: str = "Llama", dtype: torch.dtype = torch.float32, trees: bool = False, **changes) -> PreTrainedModel:
    """A patched model as `build` makes it, for one test alone; attach leaves it as it is.

    With trees=True or padded=True, the model is proven on rows of trees or on padded batches, too.
    """
    torch.manual_seed(0)  # as build does
    return copy.deepcopy(patched_once(build, trees, name, dtype, **changes))


def patched_tiny(
    architecture: str, kind: str = "causal", dtype: torch.dtype = torch.float32, trees: bool = False, **changes
) -> PreTrainedModel:
    """A patched model as `tiny_model` makes it, for one test alone; see `patched`."""
    torch.manual_seed(0)
    model = copy.deepcopy(patched_once(tiny_model, trees, architecture, kind, dtype, **changes))
    return exact(model) if dtype == torch.float64 else model
