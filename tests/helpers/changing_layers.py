"""Linear layers that change when they run or change their mode: adapters that merge, stand-ins for quantised ones.

With `is_inert`, a layer computes the same and never changes.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class Merging(nn.Linear):
    """Like loralib's layer: in evaluation mode, the weight contains the adapter, which then gets no gradient."""

    changes = 0

    def __init__(self, layer, is_inert):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        self.down, self.up = (
            nn.Parameter(torch.randn(4, self.in_features)),
            nn.Parameter(torch.randn(len(self.weight), 4)),
        )
        self.is_inert, self.merged = is_inert, False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode and not self.is_inert:
            self.weight.data += (self.up @ self.down).detach() * (-0.1 if mode else 0.1)
            self.merged, Merging.changes = not mode, Merging.changes + 1
        return self

    def forward(self, inputs):
        outputs = F.linear(inputs, self.weight)
        return outputs if self.merged else outputs + inputs @ self.down.T @ self.up.T * 0.1


class Replacing(Merging):
    """Gives the weight other data, and itself another parameter for the adapter."""

    def train(self, mode=True):
        nn.Linear.train(self, mode)
        if self.merged == mode and not self.is_inert:
            self.weight.data = self.weight.data + (self.up @ self.down).detach() * (-0.1 if mode else 0.1)
            self.up = nn.Parameter(self.up.detach().clone())
            self.merged, Merging.changes = not mode, Merging.changes + 1
        return self


class Scales:
    def __init__(self, rows):
        self.each, self.parts = torch.ones(rows), SimpleNamespace(offset=torch.zeros(1), name="scales")


class Packing(Merging):
    """Like 4-bit layers of bitsandbytes on a CPU: a forward in evaluation mode packs the weight, for good, in a format
    that has no gradients."""

    def __init__(self, layer, is_inert):
        super().__init__(layer, is_inert)
        self.weight.scales = Scales(len(self.weight))
        self.state = SimpleNamespace(calls=0, seen=[])

    def train(self, mode=True):
        return nn.Linear.train(self, mode)

    def forward(self, inputs):
        scales = self.weight.scales
        if not (self.training or inputs.requires_grad or hasattr(scales, "packed") or self.is_inert):
            self.weight.data, scales.each = self.weight.data.t().contiguous(), scales.each[None]
            scales.packed, self.weight.is_packed = True, True
            del scales.parts
            self.state.calls += 1
            self.state.seen.append(1)
            Merging.changes += 1
        if hasattr(scales, "packed"):
            return (
                inputs.detach() @ (self.weight.data * scales.each) + (inputs @ self.down.T @ self.up.T * 0.1).detach()
            )
        weight = self.weight * scales.each[:, None] + scales.parts.offset
        return F.linear(inputs, weight) + inputs @ self.down.T @ self.up.T * 0.1


class Adapted(nn.Module):
    """A frozen layer of any kind, and a trained adapter beside it."""

    def __init__(self, layer):
        super().__init__()
        self.bias = None
        self.down = nn.Parameter(torch.randn(4, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(layer.out_features, 4) * 0.1)

    def forward(self, inputs):
        return self.frozen(inputs) + inputs @ self.down.T @ self.up.T


class EightBit(Adapted):
    """Like 8-bit layers of bitsandbytes: the weight moves into a state at the first forward."""

    def __init__(self, layer):
        super().__init__(layer)
        self.scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.state = SimpleNamespace(values=None, forwards=0)

    def frozen(self, inputs):
        self.state.forwards += 1
        if self.state.values is None:
            self.state.values, self.weight.data = self.weight.data, torch.empty(0, dtype=torch.int8)
        return F.linear(inputs, self.state.values * self.scale)


class FourBit(Adapted):
    """Like GPTQ and AWQ: buffers with two weights in a byte, and a backward pass of its own."""

    def __init__(self, layer):
        super().__init__(layer)
        self.register_buffer("scale", layer.weight.detach().abs().amax(1, keepdim=True) / 7)
        values = (layer.weight.detach() / self.scale).round().to(torch.int8) + 8
        self.register_buffer("packed", values[:, ::2] * 16 + values[:, 1::2])

    def frozen(self, inputs):
        return Unpacked.apply(inputs, self.packed, self.scale)


class Unpacked(torch.autograd.Function):
    @staticmethod
    def weight(packed, scale):
        both = torch.stack([(packed >> 4) & 15, packed & 15], dim=-1).flatten(1)
        return (both - 8) * scale

    @staticmethod
    def forward(ctx, inputs, packed, scale):
        ctx.save_for_backward(packed, scale)
        return F.linear(inputs, Unpacked.weight(packed, scale))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ Unpacked.weight(*ctx.saved_tensors), None, None


class Subclass(Adapted):
    """Like torchao: the weight is a tensor of a class of its own, which computes the layer."""

    def __init__(self, layer):
        super().__init__(layer)
        self.weight = nn.Parameter(ScaledWeight.of(layer.weight.detach()), requires_grad=False)

    def frozen(self, inputs):
        return F.linear(inputs, self.weight)


class ScaledWeight(torch.Tensor):
    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        found = (weight / scale).round().as_subclass(cls)
        found.scale = scale
        return found

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                inputs, weight, *others = args
                return F.linear(inputs, weight.as_subclass(torch.Tensor) * weight.scale, *others, **(kwargs or {}))
            found = function(*args, **(kwargs or {}))
        if function in (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.requires_grad_):
            found = found.as_subclass(cls)
            found.scale = args[0].scale
        return found


class DelayedScaling(Adapted):
    """Like FP8 with delayed scaling: the scale of the inputs is that of the largest ones in the last forwards."""

    def __init__(self, layer):
        super().__init__(layer)
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        self.register_buffer("largest", torch.full((4,), 4.0))

    def frozen(self, inputs):
        limit = self.largest.max()
        self.largest.copy_(torch.cat([inputs.detach().abs().max()[None], self.largest[:-1]]))
        return F.linear(inputs.clamp(-limit, limit), self.weight)


class ScaleOfBatch(Adapted):
    """Like 8-bit activations with one scale for all tokens of a call, which documents then share."""

    def __init__(self, layer):
        super().__init__(layer)
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)

    def frozen(self, inputs):
        scale = inputs.detach().abs().max() / 7
        rounded = inputs + ((inputs / scale).round() * scale - inputs).detach()
        return F.linear(rounded, self.weight)
