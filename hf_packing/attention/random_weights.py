"""Random weights that are large enough for everything in a model to matter, which fresh ones seldom are."""

import torch
from torch import nn

KEPT = ("a_log", "dt_bias", "time_decay", "slope", "norm")
"""Parameters whose values their modules rely on."""


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.lower()
            if not parameter.is_floating_point() or any(part in name for part in KEPT) or name.endswith(".d"):
                continue
            if "sink" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() >= 2:
                if any(part in name for part in ("embed", "wte", "wpe")):
                    scale = 0.7
                elif "conv1d" in name and parameter.dim() == 3:
                    scale = 0.5
                else:
                    inputs = parameter.shape[-1] if parameter.dim() == 2 else parameter[0].numel()
                    inputs = parameter.shape[-2] if parameter.dim() > 2 and "experts" in name else inputs
                    scale = 1.2 / max(inputs, 1) ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
