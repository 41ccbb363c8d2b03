"""Extra borders in a batch: only the columns of borders change."""

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import find_packed_sequence_indices

import hf_packing as hfp
from hf_packing.cut_batch import with_segments_cut

BORDERS = {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 14))
def test_borders_are_those_of_cut_rows(lengths, longest):
    ids = list(range(3, 3 + sum(lengths)))
    pieces = [min(longest, length - begin) for length in lengths for begin in range(0, length, longest)]
    whole = hfp.PackingCollator()([{"input_ids": ids, "seq_lengths": lengths}])
    before = pickle.dumps(whole)
    cut = with_segments_cut(whole, longest)
    expected = hfp.PackingCollator()([{"input_ids": ids, "seq_lengths": pieces}])
    assert pickle.dumps(whole) == before
    assert list(cut) == list(whole)
    for name, value in whole.items():
        wanted = expected[name] if name in BORDERS else value
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(cut[name], wanted)
            assert cut[name].dtype == wanted.dtype
        else:
            assert cut[name] == wanted
    found = find_packed_sequence_indices(cut["position_ids"])  # law 9
    assert found is None or torch.equal(found.long(), cut["seq_idx"].long())
    assert (cut["labels"] == -100).sum() == len(lengths)  # the first of each document, not of each piece


def test_no_limit():
    batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}])
    assert with_segments_cut(batch, None) == batch
