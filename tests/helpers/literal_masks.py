"""Rows of trees and packed rows, calls of attention on them, and literally what their tokens see."""

from itertools import accumulate
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from tree_rows import forests

from hf_packing.attention.flex import BLOCK
from hf_packing.attention.kinds.trees import TreeLayout
from hf_packing.attention.layout import Layout
from hf_packing.trees.segments import TreeSegments


class Row(NamedTuple):
    """The segments of a row of trees, or, without parents, of a packed row."""

    lengths: tuple
    parents: tuple = ()

    @property
    def trees(self):
        return TreeSegments(self.lengths, self.parents or (-1,) * len(self.lengths))

    @property
    def layout(self):
        return (TreeLayout if self.trees.has_branches else Layout).of(self.trees)


WIDE = Row((300, 40, 200, 1, 129, 256), (-1, 0, 0, 2, 0, -1))


def borders_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def literal_mask(row, is_causal, window, chunk):
    """What the tokens of each path see of it."""
    mask = torch.zeros(row.trees.tokens, row.trees.tokens, dtype=torch.bool)
    for segment in range(len(row.lengths)):
        path = torch.from_numpy(row.trees.path_of(segment))
        at = torch.arange(len(path))
        back = at[:, None] - at
        sees = (back >= 0) | torch.tensor(not is_causal)
        sees &= back.abs() < (window or len(path))
        sees &= at[:, None] // (chunk or len(path)) == at // (chunk or len(path))
        mask[path[:, None], path] = sees
    return mask


@st.composite
def rows(draw, *factors):
    """Rows whose segments may be longer by one of these factors, and what masks are made of besides."""
    window = draw(st.sampled_from([None, 1, 3, 4, 40, BLOCK, BLOCK + 1, 300]))
    lengths, parents = draw(forests(most=6))
    lengths = tuple(length * draw(st.sampled_from([1, *factors])) for length in lengths)
    chunk = draw(st.sampled_from([None, 3, 7, 100, 256]))
    if draw(st.booleans()):
        return Row(lengths), (draw(st.booleans()), window, chunk)
    return Row(lengths, parents), (True, window, chunk)


@st.composite
def calls(draw, *factors):
    """A row; queries, keys, values and sometimes sinks, in float64; and the other arguments of attention."""
    row, (is_causal, window, chunk) = draw(rows(*factors))
    heads, dims = draw(st.sampled_from([(4, 2), (3, 1), (2, 2)])), draw(st.sampled_from([(16, 16), (8, 6)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    inputs = [torch.randn(1, each, row.trees.tokens, dim, dtype=torch.float64) for each, dim in shapes]
    how = {"scale": draw(st.sampled_from([0.3, 1.0])), "is_causal": is_causal, "window": window, "chunk": chunk}
    how["softcap"] = draw(st.sampled_from([None, 2.3]))
    if draw(st.booleans()):
        inputs.append(torch.randn(heads[0], dtype=torch.float64))
        how["sinks"] = inputs[3]
    return row, [each.requires_grad_() for each in inputs], how
