"""Positions of padding and of filling segments are never below the first position of the documents.

Where a model gets no borders, transformers finds them in position_ids: its masks begin a document wherever positions do
not rise by 1, and its flash attention wherever the smallest position of the batch is. One position of padding below
those of the documents would thus hide the borders of all of them.
"""

from collections import Counter
from functools import cache
from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from tree_rows import labeled_documents, tree_row

import hf_packing as hfp
from hf_packing.attention.kinds.padded import PaddedRows, RowsLayout
from hf_packing.attention.kinds.trees import sharing_prefixes
from hf_packing.attention.layout import Layout, calls_of
from hf_packing.attention.token_axes import TokenAxes, cut_inputs
from hf_packing.batch.segments import with_segments_cut
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of

FLASH_BEGINS_AT_SMALLEST = prepare_fa_kwargs_from_position_ids(torch.tensor([[-1, 0]]))[0][0].tolist() == [0, 2]
"""Older ones begin a document at position 0 alone, and find none in rows whose positions begin elsewhere."""


def check(positions, lengths, filling=0, period=1):
    """Check the positions of a row with documents of these lengths, or copies of them, and so many tokens of padding
    after them, whose positions restart after every `period` tokens."""
    positions, tokens = positions.long(), sum(lengths)
    assert len(positions) == tokens + filling
    begins = np.cumsum([0, *lengths[:-1]])
    assert (positions[tokens:] >= positions[begins].max()).all()
    expected = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    expected += [len(lengths) + place // period for place in range(filling)]
    found = find_packed_sequence_indices(positions[None])
    assert ([0] * len(positions) if found is None else found[0].tolist()) == expected
    if positions.min() and not FLASH_BEGINS_AT_SMALLEST:
        return
    (borders, _), _ = prepare_fa_kwargs_from_position_ids(positions[None])
    assert borders.tolist() == [0, *(np.flatnonzero(np.diff(expected)) + 1).tolist(), len(positions)]


@pytest.mark.parametrize(("below", "above"), [(-1, 0), (1, 2)])
def test_positions_of_padding_below_those_of_documents_are_noticed(below, above):
    check(torch.tensor([0, 1, 2, 0, 1, 0, 0]) + above, [3, 2], filling=2)
    wrong = torch.tensor([above, above + 1, above + 2, above, above + 1, below, below])
    if FLASH_BEGINS_AT_SMALLEST:
        (borders, _), _ = prepare_fa_kwargs_from_position_ids(wrong[None])
        assert borders.tolist() == [5, 6, 7]  # both documents are lost
    with pytest.raises(AssertionError):
        check(wrong, [3, 2], filling=2)


FLAT = ("documents", "fixed shapes", "copies", "copies, cut", "end of streams")


@st.composite
def flat_batches(draw, way):
    """Draw a batch, the lengths of the documents in it, and the number of tokens in its padding or copies."""
    if way == "end of streams":
        batch = filler_of_streams()
        return batch, [batch["input_ids"].shape[1]], int((batch["seq_idx"] < 0).sum())
    of_rows = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5))
    rows = [{"input_ids": np.arange(sum(lengths)) + 3, "seq_lengths": lengths} for lengths in of_rows]
    lengths = list(chain.from_iterable(of_rows))
    if way == "documents":
        return hfp.PackingCollator()(rows), lengths, 0
    if way == "fixed shapes":
        filling = draw(st.integers(0, 30))
        collator = hfp.PackingCollator(tokens=sum(lengths) + filling, max_segments=len(lengths) + 1)
        return collator(rows), lengths, filling
    copied = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    batch = hfp.PackingCollator()(sampled(rows, enumerate(copied)))
    if way == "copies, cut":
        longest = draw(st.integers(1, 9))
        batch = with_segments_cut(batch, longest)
        lengths = [min(longest, length - begin) for length in lengths for begin in range(0, length, longest)]
    return batch, lengths, sum(sum(row) for row, is_copy in zip(of_rows, copied, strict=True) if is_copy)


def sampled(rows, chosen):
    dataset = datasets.Dataset.from_list(rows)
    sampler = RankBatchSampler(hfp.TokenBudget(999), sizes_of(dataset))
    return SampledRows(dataset, sampler).__getitems__([*chosen])


@cache
def filler_of_streams():
    """The batch of a rank that has no row in a step, while other ranks have one."""
    few = datasets.Dataset.from_list([{"input_ids": [5, 6, 7]}] * 3).to_iterable_dataset(num_shards=3)
    stream = hfp.pack(few, hfp.BestFit(3), streams=3, window_packs=1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    batches = list(hfp.prepare_dataloader(accelerator, stream, hfp.TokenBudget(3)))
    return next(each for each in batches if (each["labels"] == -100).all())


def positions_at_attention(model, **inputs):
    """The positions that the first layer of a model gets, row by row, int64 [tokens]."""
    found = []
    layer = model.model.layers[0].self_attn
    hook = layer.register_forward_pre_hook(lambda _, __, given: found.append(given["position_ids"]), with_kwargs=True)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        hook.remove()
    return found[-1].flatten()  # the first padded batch is also run to prove that the model takes one


@pytest.mark.parametrize("way", FLAT)
def test_flat_batches(way):
    model, filled = patched("Llama", num_hidden_layers=1).eval(), Counter()

    @settings(max_examples=30)
    @given(flat_batches(way))
    def check_batch(drawn):
        batch, lengths, filling = drawn
        filled[way] += filling
        padding = filling if way == "fixed shapes" else 0
        inputs = {name: value for name, value in batch.items() if name != "position_ids"}
        for positions in (
            batch["position_ids"][0],
            positions_at_attention(model, **batch),
            positions_at_attention(model, **inputs),  # here the patch makes them
        ):
            check(positions, lengths, padding, period=max(lengths))

    check_batch()
    assert way == "documents" or filled[way]


POSITIONS = {"none": None, "0 in padding": (0, 0), "-1 in padding": (0, -1), "1 in padding, as RoBERTa has": (2, 1)}


@pytest.mark.parametrize("kind", POSITIONS)
def test_padded_batches(kind):
    """Their rows reach attention as one row, in which no position of padding is left."""
    model, filled = patched("Llama", padded=True, num_hidden_layers=1).eval(), Counter()

    @settings(max_examples=30)
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.data())
    def check_batch(lengths, data):
        longest = max(lengths) + data.draw(st.integers(0, 2))
        mask = torch.zeros(len(lengths), longest, dtype=torch.long)
        for row, length in zip(mask, lengths, strict=True):
            begin = data.draw(st.integers(0, longest - length))
            row[begin : begin + length] = 1
        ids = torch.arange(mask.numel()).view(mask.shape) % 90 + 3
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}  # is no loop that generates text
        if POSITIONS[kind]:
            first, elsewhere = POSITIONS[kind]
            inputs["position_ids"] = torch.where(mask == 1, mask.cumsum(1) - 1 + first, elsewhere)
        filled[kind] += int((mask == 0).sum())
        check(positions_at_attention(model, **inputs), [length for length in lengths if length])

    check_batch()
    assert filled[kind]


def test_documents_in_rows_of_their_own():
    """Modules that run segment by segment, and those that read a document as a whole, get rows that end in padding."""
    filled = Counter()

    @settings(max_examples=30)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    def check_rows(lengths):
        row = Layout.of(lengths)
        axes = TokenAxes("Module (name)", row.tokens)
        axes.found_in(row.position_ids)
        axes.row_length = None
        calls = [(call.lengths, cut_inputs(row.position_ids, axes, call.places)) for call in calls_of(row, "ragged")]
        for way, of_rows in (
            ("calls", calls),
            ("readers", [(lengths, RowsLayout.of(lengths).into_rows(row.position_ids))]),
        ):
            for documents, positions in of_rows:
                for length, of_row in zip(documents, positions, strict=True):
                    filled[way] += len(of_row) - length
                    check(of_row, [length], filling=len(of_row) - length)

    check_rows()
    assert all(filled[way] for way in ("calls", "readers"))


def test_trees():
    """In trees, positions are depths: only roots have the smallest one, also in copies and in rows that fill a step."""
    model, branches = patched("Llama", trees=True, num_hidden_layers=1).eval(), Counter()

    def check_trees(way, positions, lengths, parents):
        roots = [begin for begin, parent in zip(np.cumsum([0, *lengths[:-1]]), parents, strict=True) if parent < 0]
        assert positions.min() == 0
        assert (positions == 0).nonzero()[:, 0].tolist() == roots
        branches[way] += len(lengths) - len(roots)

    @settings(max_examples=50)
    @given(labeled_documents(), st.booleans())
    def check_batch(drawn, is_copy):
        documents, labels = drawn
        row, _ = tree_row(documents, labels)
        batch = hfp.PackingCollator()(sampled([row], [(0, is_copy)]))
        way = "copies" if is_copy else "rows"
        check_trees(way, batch["position_ids"][0], row["segment_lengths"], row["parents"])
        inputs = {name: batch[name] for name in ("input_ids", "segment_lengths", "parents")}
        check_trees(way, positions_at_attention(model, **inputs), row["segment_lengths"], row["parents"])
        ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, documents)), batch_first=True, padding_value=-1)
        layout = sharing_prefixes(PaddedRows((ids >= 0).numpy(), ids.device), {"input_ids": ids}, 1).layout
        check_trees("padded batches", layout.position_ids[0], layout.trees.lengths, layout.trees.parents)

    check_batch()
    assert all(branches[way] for way in ("rows", "copies", "padded batches"))
