"""The logits of this rank's part of a row on several ranks, and those that it has on one rank."""

import numpy as np
import torch
import torch.distributed as dist

import hf_packing as hfp
from hf_packing.attention import ON_RANKS, inner_model, route_of
from hf_packing.planning.rank_layout import RowPart, lay_out
from hf_packing.training.kinds.split import part_of


def logits_of_part(model, ranks, lengths=(11, 5, 8)):
    """Run a row of random documents on a block of ranks, and on this rank alone."""
    route_of(inner_model(model)).facts.proven[ON_RANKS] = ranks
    generator, device = np.random.default_rng(0), next(model.parameters()).device
    batch = hfp.PackingCollator()([{"input_ids": generator.integers(8, 100, length)} for length in lengths])
    del batch["labels"]
    part = RowPart(lay_out([*lengths], ranks, -(-sum(lengths) // ranks), linear_cost=0), dist.get_rank() % ranks)

    def run(inputs):
        with torch.no_grad():
            given = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
            return model(**given).logits[0]

    return run(part_of(batch, part)), run(batch)[torch.from_numpy(part.layout.places(part.rank)).to(device)]
