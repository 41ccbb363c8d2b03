"""What a forward changes in a model is restored: attributes, buffers, modules and weights."""

import torch

from hf_packing.attention.snapshot import WeightSnapshot, restored


def test_attributes_buffers_and_modules_are_restored():
    module = torch.nn.Module()
    module.scale, module.inner = 1, torch.nn.Identity()
    module.register_buffer("table", torch.zeros(2))
    inner, table = module.inner, module.table
    with restored(module):
        module.scale, module.grown, module.inner = 2, 3, torch.nn.ReLU()
        module.register_buffer("table", torch.ones(3))
        module.register_buffer("more", torch.ones(3))
    assert (module.scale, module.inner, module.table) == (1, inner, table)
    assert not hasattr(module, "grown")
    assert not hasattr(module, "more")


def test_every_way_to_write_to_a_weight_is_seen():
    ways = (
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.__setitem__(0, 0.0),
        lambda weight: weight[0].fill_(0.0),
        lambda weight: weight.detach().t().__imul__(2),
        lambda weight: setattr(weight, "data", weight.data * 2),
        lambda weight: torch.nn.init.zeros_(weight),
    )
    for write in ways:
        module = torch.nn.Linear(3, 3)
        before = module.weight.detach().clone()
        with torch.no_grad(), WeightSnapshot(module) as kept:
            write(module.weight)
        assert not torch.equal(module.weight, before)
        kept.restore()
        assert torch.equal(module.weight, before)
