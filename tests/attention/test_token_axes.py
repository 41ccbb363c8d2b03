"""Token axes: recorded on a row, known by their place afterwards, never guessed."""

import pytest
import torch

import hf_packing as hfp
from hf_packing.attention.token_axes import TokenAxes, counts_along


def test_what_counts_along_a_row():
    positions, slopes = torch.arange(41), torch.tensor([0.7, 0.1])[:, None, None]
    causal = torch.full((41, 41), -torch.inf).triu(1)
    assert counts_along(positions, (0,))
    assert counts_along(positions[None].expand(3, -1) + 2, (1,))
    assert counts_along((slopes * positions).to(torch.bfloat16), (2,))
    assert counts_along((causal + slopes * positions).to(torch.bfloat16), (1, 2))
    assert not counts_along(torch.zeros(41), (0,))
    assert not counts_along(torch.cat([positions[:20], positions[:21]]), (0,))
    assert not counts_along(torch.randn(2, 41), (1,))
    assert not counts_along(causal, (0, 1))
    assert not counts_along(torch.randn(41, 41), (0, 1))


def test_axes_of_tokens_are_not_guessed():
    axes = TokenAxes("Module (name)", 41)
    axes.record({"hidden": torch.zeros(1, 41, 8)})
    assert axes.of(("hidden",), torch.zeros(1, 41, 8)) == (1,)
    axes.freeze()
    assert axes.of(("hidden",), torch.zeros(1, 8, 8)) == (1,)
    counted = TokenAxes("Module (name)", 41)
    counted.record({"positions": torch.arange(41)})
    assert counted.of(("positions",), torch.arange(41)) == (0,)
    with pytest.raises(hfp.PackingError, match="is there a padding token in a document"):
        counted.check_row({"positions": torch.tensor([0, 1] * 20 + [0])}, 41)
    with pytest.raises(hfp.PackingError, match=r"Module \(name\): other of shape \[1, 41\] was not seen when"):
        axes.of(("other",), torch.zeros(1, 41))
