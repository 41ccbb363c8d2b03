"""Models whose own kernels know of borders (causal-conv1d, flash-linear-attention) keep their mixers packed.

The kernels are for CUDA. Functions of the same signatures, which go through the reference segment by segment, stand in
their place.
"""

import json
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from parts_of_rows import logits_of_part
from processes import on_ranks
from training_by_hand import check_packed, losses_alone
from transformers.models.qwen3_next import modeling_qwen3_next

import hf_packing as hfp
from hf_packing.attention import block_of, patch_for_training
from hf_packing.attention.route import BORDER_ARGUMENTS, route_of
from tools.tiny_model import tiny_model

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


class Kernel:
    """A function of transformers, made to honour borders."""

    def __init__(self, monkeypatch, name):
        self.name, self.reference, self.saw_borders = name, getattr(modeling_qwen3_next, name), 0
        monkeypatch.setattr(modeling_qwen3_next, name, self)

    def __call__(self, *args, **kwargs):
        borders, axis = (
            (borders_of(kwargs.get("seq_idx")), 2) if self.name == CONVOLUTION else (kwargs["cu_seqlens"], 1)
        )
        # given borders, the reference refuses
        kwargs = {name: value for name, value in kwargs.items() if name not in (*BORDER_ARGUMENTS, "cu_seqlens")}
        if borders is None or len(borders) <= 2:
            return self.reference(*args, **kwargs)
        self.saw_borders += 1
        parts = []
        for start, end in pairwise(borders.tolist()):
            own = [each.narrow(axis, start, end - start) if is_row(each, axis) else each for each in args]
            named = {n: v.narrow(1, start, end - start) if n in ("g", "beta") else v for n, v in kwargs.items()}
            parts.append(self.reference(*own, **named))
        if self.name == CONVOLUTION:
            return torch.cat(parts, dim=2)
        return torch.cat([output for output, _ in parts], dim=1), parts[-1][1]


def borders_of(seq_idx):
    if seq_idx is None:
        return None
    changes = seq_idx[0].diff().nonzero().flatten() + 1
    return torch.cat([torch.zeros(1, dtype=torch.long), changes, torch.tensor([seq_idx.shape[1]])])


def is_row(value, axis):
    return isinstance(value, torch.Tensor) and value.ndim == (3 if axis == 2 else 4)


HONORING = [
    ((CONVOLUTION, RULE), {}),
    ((CONVOLUTION,), {"Qwen3NextGatedDeltaNet": 2}),
    ((), {"Qwen3NextGatedDeltaNet": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("honoring", "by_segment"), HONORING)
def test_mixers_stay_packed_where_all_their_kernels_know_of_borders(monkeypatch, honoring, by_segment):
    model = tiny_model("qwen3_next", "causal")
    alone = losses_alone(model)
    kernels = [Kernel(monkeypatch, name) for name in honoring]
    route = route_of(hfp.patch_model(model))
    assert (route.method.attention, route.modules) == ("hf_packing_varlen", by_segment)
    for kernel in kernels:
        kernel.saw_borders = 0
    check_packed(model, alone)
    if by_segment:
        return
    assert [kernel.saw_borders for kernel in kernels] == [2, 2]
    # flash-linear-attention takes cu_seqlens with a batch of one row only
    rows = torch.tensor([[5, 6, 7, 8, 9], [9, 10, 11, 12, 13]])
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    with torch.no_grad():
        together = model(rows, position_ids=positions).logits
        apart = [model(row[None], position_ids=at[None]).logits for row, at in zip(rows, positions, strict=True)]
    assert torch.allclose(together, torch.cat(apart), atol=1e-4)


def run_on_ranks(folder):
    """What differs in the logits of a model that is patched for whole rows, and then for rows on several ranks."""
    accelerator, model, found = Accelerator(cpu=True), tiny_model("qwen3_next", "causal"), []
    block_of(2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in (CONVOLUTION, RULE):
            Kernel(monkeypatch, name)
        for ranks in (1, 2):
            patch_for_training(model, accelerator, "model", ranks)
            route = route_of(model)
            one, other = logits_of_part(model.eval(), 2)
            found.append([route.method.borders, route.modules, float((one - other).abs().max())])
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_kernels_get_no_borders_in_rows_on_several_ranks(tmp_path):
    """They would begin anew where the part of a rank begins."""
    on_ranks(run_on_ranks, tmp_path, ranks=2)
    for rank in range(2):
        whole, split = json.loads((tmp_path / f"{rank}.json").read_text())
        assert whole[:2] == [True, {}]
        assert split[:2] == [False, {"Qwen3NextGatedDeltaNet": 2}]
        assert split[2] < 1e-5
        assert whole[2] > 1e-3, "also right with borders"
