"""TokenBudget with a limit of patches beside that of tokens."""

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.sizes import sizes_of_documents


@settings(max_examples=100)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(1, 4)), min_size=1, max_size=60),
    world_size=st.integers(1, 8),
    accumulation=st.integers(1, 3),
    max_patches=st.one_of(st.none(), st.integers(30, 60)),
    max_documents=st.one_of(st.none(), st.integers(4, 12)),
)
def test_patches_are_limited_beside_tokens_and_documents(rows, world_size, accumulation, max_patches, max_documents):
    tokens, patches, documents = np.array(rows).T
    sizes = replace(sizes_of_documents(tokens), segments=documents, patches=patches)
    assume(len(tokens) >= world_size)
    for epoch in range(2):
        budget = hfp.TokenBudget(50, max_patches=max_patches, max_documents=max_documents)
        plan = budget.plan(sizes, Epoch(epoch, world_size, accumulation))
        assert sorted(plan.rows[~plan.is_copy].tolist()) == list(range(len(tokens)))
        assert max_patches is None or plan.per_micro_batch(patches).max() <= max_patches
        assert plan.per_micro_batch(tokens).max() <= 50
        assert max_documents is None or plan.per_micro_batch(sizes.segments).max() <= max_documents


def test_patches_fill_micro_batches_as_well_as_tokens_do():
    """Two pictures of 30 patches in each micro-batch, and texts of five times 8 tokens beside them."""
    pictures, texts = np.full(40, 10), np.full(100, 8)
    sizes = sizes_of_documents(np.concatenate([pictures, texts]))
    sizes = replace(sizes, patches=np.repeat([30, 0], [40, 100]))
    assert hfp.TokenBudget(60, max_patches=60).plan(sizes).num_micro_batches == 20


def test_rows_with_too_many_patches_are_dropped_and_patches_are_in_the_fingerprint():
    sizes = replace(sizes_of_documents(np.array([5, 6, 7])), patches=np.array([0, 90, 4]))
    assert hfp.TokenBudget(50, max_patches=60, overflow="drop").fit(sizes).left_out.tolist() == [1]
    assert sizes.fingerprint != replace(sizes, patches=np.array([0, 4, 90])).fingerprint
    assert sizes.fingerprint != replace(sizes, patches=None).fingerprint
