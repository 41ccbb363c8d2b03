"""What happens to a document longer than a pack."""

import pytest

import hf_packing as hfp


def plan(lengths, overflow):
    return hfp.plan_packing(lengths, hfp.BestFit(10, overflow=overflow))


def test_split_cuts_into_full_chunks_and_a_remainder():
    metrics = plan([25, 3], "split").metrics()
    assert sorted(plan([25, 3], "split").segment_length.tolist()) == [3, 5, 10, 10]
    assert (metrics.num_cut_documents, metrics.num_dropped_tokens, metrics.num_packs) == (1, 0, 3)


def test_truncate_keeps_the_beginning():
    truncated = plan([25, 3], "truncate")
    assert sorted(
        zip(
            truncated.segment_document.tolist(),
            truncated.segment_start.tolist(),
            truncated.segment_length.tolist(),
            strict=True,
        )
    ) == [
        (0, 0, 10),
        (1, 0, 3),
    ]
    assert (truncated.metrics().num_cut_documents, truncated.metrics().num_dropped_tokens) == (1, 15)


def test_drop_leaves_the_document_out_and_counts_it():
    metrics = plan([25, 3, 0], "drop").metrics()
    assert (metrics.num_dropped_documents, metrics.num_dropped_tokens, metrics.num_empty_documents) == (1, 25, 1)
    assert (metrics.num_cut_documents, metrics.num_packs) == (0, 1)
    assert metrics.dropped_token_ratio == 25 / 28


def test_error_names_the_document():
    with pytest.raises(hfp.PackingError, match="document 1 has 25 tokens, more than max_length=10"):
        plan([3, 25], "error")
    assert plan([3, 10], "error").num_packs == 2


def test_unknown_overflow():
    with pytest.raises(hfp.PackingError, match="overflow: expected one of split, truncate, drop, error, got 'cut'"):
        hfp.BestFit(10, overflow="cut")


def test_no_document_that_fits_is_cut(rng):
    lengths = rng.integers(1, 40, 2000)
    split = plan(lengths, "split")
    cut = set(split.segment_document[split.segment_length < lengths[split.segment_document]].tolist())
    assert cut == set((lengths > 10).nonzero()[0].tolist())
