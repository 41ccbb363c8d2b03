"""Batches of fixed shapes, which one segment without labels fills, aligned ones, and batches with extra borders."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.attention.kinds.packed import layout_of_collator, read_layout
from hf_packing.batch.segments import with_segments_cut
from hf_packing.errors import PackingError
from hf_packing.training.kinds import labels_of
from hf_packing.training.step_counts import micro_batch_counts

ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6)


def rows_of(lengths):
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(3, 99, sum(row)), "seq_lengths": row} for row in lengths]


@given(ROWS, st.integers(0, 40), st.integers(0, 9), st.booleans())
def test_the_batch_is_filled_and_its_documents_stay_as_they_are(lengths, missing, more, has_types):
    rows = rows_of(lengths)
    rows = [{**row, "token_type_ids": row["input_ids"] % 2} for row in rows] if has_types else rows
    batch = hfp.PackingCollator()(rows)
    given, segments = batch["input_ids"].shape[1], len(batch["cu_seq_lens_q"]) - 1
    tokens, max_segments = given + missing, max(segments + (missing > 0) + more, 2)
    filled = hfp.PackingCollator(tokens=tokens, max_segments=max_segments)(rows)
    assert list(filled) == list(batch)
    for name in batch:
        if isinstance(batch[name], torch.Tensor) and batch[name].ndim == 2:
            assert filled[name].shape == (1, tokens)
            assert filled[name].dtype == batch[name].dtype
            assert torch.equal(filled[name][:, :given], batch[name])
    assert (filled["labels"][0, given:] == -100).all()
    assert (filled["input_ids"][0, given:] == batch["input_ids"][0, 0]).all()
    assert (filled["seq_idx"][0, given:] == -1).all()
    longest = int(batch["position_ids"].max()) + 1
    assert filled["position_ids"][0, given:].tolist() == [place % longest for place in range(missing)]
    borders = filled["cu_seq_lens_q"]
    assert borders.dtype == torch.int32
    assert borders.tolist() == batch["cu_seq_lens_q"].tolist() + [tokens] * (max_segments - segments)
    assert filled["cu_seq_lens_k"].tolist() == borders.tolist()
    assert filled["max_length_q"] == filled["max_length_k"] == tokens


MULTIPLES = st.sampled_from([1, 2, 3, 4, 8])


def literally_aligned(batch, align_tokens):
    """The values of every token and the lengths of the segments, token by token; see `PackingCollator`."""
    borders, names = batch["cu_seq_lens_q"].tolist(), [name for name in batch if name[:3] not in ("cu_", "max")]
    first = {"input_ids": int(batch["input_ids"][0, 0]), "labels": -100, "seq_idx": -1}
    made, lengths = {name: [] for name in names}, []

    def fill(period, number):
        for name in names:
            made[name] += [first.get(name, 0)] * number
        length = len(made["input_ids"]) - sum(lengths)
        made["position_ids"][-number:] = [place % period for place in range(length - number, length)]

    for begin, end in pairwise(borders):
        for name in names:
            made[name] += batch[name][0, begin:end].tolist()
        lengths.append(len(made["input_ids"]) - sum(lengths))
    missing = next(more for more in range(999) if not (sum(lengths) + more) % align_tokens)
    if missing:
        fill(max(end - begin for begin, end in pairwise(borders)), missing)
        lengths.append(missing)
    return made, lengths


@given(ROWS, MULTIPLES, st.booleans())
def test_aligned_batches_are_the_literal_ones_and_are_read_with_their_documents(lengths, align_tokens, is_copy):
    rows = [{**row, "weights": row["input_ids"] / 2} for row in rows_of(lengths)]
    if is_copy:
        rows[0]["seq_idx"] = np.repeat(-2 - np.arange(len(lengths[0])), lengths[0])
    given, batch = hfp.PackingCollator()(rows), hfp.PackingCollator(align_tokens=align_tokens)(rows)
    expected, of_segments = literally_aligned(given, align_tokens)
    assert {name: batch[name][0].tolist() for name in expected} == expected
    assert {name: batch[name].dtype for name in expected} == {name: given[name].dtype for name in expected}
    assert batch["cu_seq_lens_q"].diff().tolist() == of_segments
    assert torch.equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == max(of_segments)
    assert batch["input_ids"].shape[1] % align_tokens == 0
    row, known = read_layout(batch, training=True), layout_of_collator(batch)
    assert torch.equal(row.position_ids, batch["position_ids"])
    assert torch.equal(known.position_ids, batch["position_ids"])
    number = len(given["cu_seq_lens_q"]) - 1
    fillers = len(of_segments) - number
    assert (row.lengths, row.fillers) == (known.lengths, known.fillers) == (tuple(of_segments), fillers)
    copied = pickle.loads(pickle.dumps(batch["max_length_q"]))
    assert (copied.segments.fillers, copied.segments.multiple) == (fillers, align_tokens)
    assert labels_of(batch).num_documents() == labels_of(given).num_documents()
    assert micro_batch_counts([batch], "token").tolist() == micro_batch_counts([given], "token").tolist()
    if not fillers:
        assert batch["input_ids"].shape == given["input_ids"].shape
        return
    assert list(row.lengths[:number]) == given["cu_seq_lens_q"].diff().tolist()
    shape = {"tokens": batch["input_ids"].shape[1], "max_segments": len(of_segments) + 1}
    fixed = hfp.PackingCollator(align_tokens=align_tokens, **shape)(rows)
    assert all(torch.equal(fixed[name], batch[name]) for name in expected)


@given(ROWS, st.integers(0, 40), st.integers(0, 9))
def test_a_patched_model_reads_the_same_documents(lengths, missing, more):
    rows = rows_of(lengths)
    batch = hfp.PackingCollator()(rows)
    given, segments = batch["input_ids"].shape[1], len(batch["cu_seq_lens_q"]) - 1
    collator = hfp.PackingCollator(tokens=given + missing, max_segments=max(segments + (missing > 0) + more, 2))
    filled = collator(rows)
    row = read_layout(filled, training=True)
    padding = [missing] if missing else []
    assert row.lengths == (*batch["cu_seq_lens_q"].diff().tolist(), *padding)
    assert row.fillers == (missing > 0)
    assert row.tokens == given + missing
    assert torch.equal(row.position_ids, filled["position_ids"])
    assert torch.equal(row.seq_idx[:, :given], batch["seq_idx"])
    assert row.max_length == row.tokens
    del filled["cu_seq_lens_q"], filled["cu_seq_lens_k"]
    by_seq_idx = read_layout({name: value for name, value in filled.items() if name != "position_ids"}, training=True)
    assert by_seq_idx.lengths == row.lengths


def test_the_collator_is_a_value_and_the_first_label_may_stay():
    collator = hfp.PackingCollator(keep_first_labels=True, tokens=4, max_segments=3)
    assert collator([{"input_ids": [5, 6]}])["labels"].tolist() == [[5, 6, -100, -100]]
    assert pickle.loads(pickle.dumps(collator)) == collator != hfp.PackingCollator()


FIRST = {"cu_seq_lens_q": [0, 3, 3, 5, 9], "cu_seq_lens_k": [0, 3, 3, 5, 9], "position_ids": None, "seq_idx": None}


SAME_LENGTHS = "expected segments of the same lengths"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (FIRST, r"cu_seq_lens_q: expected cumulative lengths that rise .* \[0, 3, 3, 5, 9"),
        *(
            ({"cu_seq_lens_k": ends}, f"cu_seq_lens_k: {SAME_LENGTHS}")
            for ends in ([0, 3, 6, 9, 9, 9, 9], [0, 3, 9], [0, 3, 5, 8, 9])
        ),
        ({"seq_idx": [[0, 0, 1, 1, 1, -1, -1, -1, -1]]}, f"seq_idx: {SAME_LENGTHS}"),
    ],
    ids=str,
)
def test_a_patched_model_refuses_other_borders(changes, message):
    """Empty segments may be at the end only, and what is called padding must be there, too."""
    batch = hfp.PackingCollator(tokens=9, max_segments=6)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    assert read_layout(batch, training=True).lengths == (3, 2, 4)
    shorter = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    assert read_layout(batch | {"cu_seq_lens_k": shorter}, training=True).lengths == (3, 2, 4)
    too_small = read_layout(batch | {"max_length_q": 2}, training=True)
    assert too_small.max_length == 4  # it is not passed on
    for name, values in changes.items():
        batch[name] = None if values is None else torch.tensor(values, dtype=batch[name].dtype)
    with pytest.raises(PackingError, match=message):
        read_layout(batch, training=True)


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
