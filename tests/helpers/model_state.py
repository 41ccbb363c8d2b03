"""What a proof, an interruption or a patch that is taken off leaves as it was."""

import random

import numpy as np
import torch

from hf_packing.attention.snapshot import attention_of


def state_of(model):
    """Attention functions, attributes, hooks, modes, weights, buffers and random states, to be compared by ==."""
    modules, parameters = [*model.modules()], [*model.parameters()]
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {
        "attention": attention_of(model),
        "attributes": [set(vars(module)) for module in modules],
        "hooks": [(dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in modules],
        "modes": [module.training for module in modules],
        "gradients": [(parameter.requires_grad, parameter.grad is None) for parameter in parameters],
        "values": {
            name: hash(tuple(tensor.double().nan_to_num(0.5).flatten().tolist())) for name, tensor in tensors.items()
        },
        "chance": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    }
