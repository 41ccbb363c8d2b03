"""Extra borders in a batch: only the columns of borders change."""

import pickle

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.batch.segments import with_segments_cut

BORDERS = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


LENGTHS = st.lists(st.integers(1, 12), max_size=5)


def row_of(lengths, is_copy):
    copied = {"seq_idx": np.repeat(-2 - np.arange(len(lengths)), lengths)} if is_copy else {}
    return {"input_ids": np.arange(3, 3 + sum(lengths)), "seq_lengths": lengths, **copied}


@given(LENGTHS, LENGTHS, st.booleans(), st.integers(1, 14))
def test_borders_are_those_of_cut_rows(lengths, of_copy, copy_first, longest):
    rows = [(each, is_copy) for each, is_copy in ((lengths, False), (of_copy, True)) if each]
    assume(rows)
    rows = rows[::-1] if copy_first else rows
    pieces = [
        ([min(longest, length - begin) for length in each for begin in range(0, length, longest)], is_copy)
        for each, is_copy in rows
    ]
    whole = hfp.PackingCollator()([row_of(*row) for row in rows])
    before = pickle.dumps(whole)
    cut = with_segments_cut(whole, longest)
    expected = hfp.PackingCollator()([row_of(*row) for row in pieces])
    assert pickle.dumps(whole) == before
    assert list(cut) == list(whole)
    for name, value in whole.items():
        wanted = expected[name] if name in BORDERS else value
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(cut[name], wanted)
            assert cut[name].dtype == wanted.dtype
        else:
            assert cut[name] == wanted
    assert (cut["labels"] == -100).sum() == len(lengths) + len(of_copy)  # the first of each document, not of each piece
    assert (cut["seq_idx"] < 0).sum() == sum(of_copy)


def test_no_limit():
    batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}])
    assert with_segments_cut(batch, None) == batch
