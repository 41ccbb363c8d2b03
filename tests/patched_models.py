"""Patched tiny models, proven once in each process of the tests and copied: the proof takes most of the time."""

import copy
from functools import cache

import torch
from tiny_models import build

import hf_packing as hfp
from hf_packing.attention.tiny_model import tiny_model


@cache
def _patched(name, dtype):
    return hfp.patch_model(build(name, dtype))


@cache
def _patched_tiny(architecture, kind, dtype):
    return hfp.patch_model(tiny_model(architecture, kind, dtype))


def patched(name="Llama", dtype=torch.float32):
    """A patched model as `build` makes it, for one test alone."""
    return copy.deepcopy(_patched(name, dtype))


def patched_tiny(architecture, kind, dtype=torch.float32):
    """A patched model as `tiny_model` makes it, for one test alone."""
    return copy.deepcopy(_patched_tiny(architecture, kind, dtype))
