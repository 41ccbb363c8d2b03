"""Losses and gradients of rows of trees are those of the same documents, each run alone."""

from functools import cache

import pytest
import torch
from chunks import WHOLE, chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched
from tree_documents import DOCUMENTS, LABELS, OTHER
from tree_oracle import check_gradients, gradients, loss_alone, oracle, patched_with_stock
from tree_rows import documents_of, labeled_documents, tree_row

import hf_packing as hfp
from hf_packing.training.logits import observed_logits
from hf_packing.training.losses import (
    ITEMS,
    TARGETS,
    WEIGHTS,
    documents_in,
    items_in,
    trainable_per_document,
    weights_of,
    with_share,
)
from hf_packing.training.model_loss import weighting_of, with_labels
from hf_packing.training.next_tokens import NextTokens
from hf_packing.training.ranks import micro_batch_counts
from hf_packing.training.token_losses import TokenLosses

LOSSES = ["token", "sequence"]

KINDS = {"oracle": oracle, "patched": patched_with_stock}


@cache
def model_of(name, kind="oracle"):
    return KINDS[kind](name)


def batch_of(*sets):
    return hfp.PackingCollator()([tree_row(documents, labels)[0] for documents, labels in sets])


@given(st.lists(labeled_documents(), min_size=1, max_size=3))
def test_what_is_counted_and_weighed_document_by_document(sets):
    batch = batch_of(*sets)
    found, places = [], 0
    for documents, labels in sets:
        row, _ = tree_row(documents, labels)
        found += [(wanted, [places + place for place in path]) for _, wanted, path in documents_of(row)]
        places += len(row["tree_input_ids"])
    trained = [[place for place, label in zip(path, labels, strict=True) if label != -100] for labels, path in found]
    assert trainable_per_document(batch).tolist() == [*map(len, trained)]
    assert int(documents_in(batch)) == sum(len(documents) for documents, _ in sets)
    assert int(items_in(batch, "token")) == sum(map(len, trained))
    assert int(items_in(batch, "sequence")) == sum(map(bool, trained))
    for loss in LOSSES:
        expected = torch.zeros(1, places, dtype=torch.float64)
        for each in trained:
            expected[0, each] += 1 if loss == "token" else 1 / max(len(each), 1)
        weights = weights_of(batch, loss)
        assert weights.dtype == torch.float64
        assert torch.allclose(weights, expected, rtol=1e-15, atol=0)
        assert ((weights > 0) == (batch["tree_labels"] != -100)).all()


def test_the_labels_differ_between_relatives_and_documents_end_inside_others():
    row, order = tree_row(DOCUMENTS, LABELS)
    assert len(set(row["ends"])) < len(order) == len(DOCUMENTS)
    assert set(row["ends"]) & set(row["parents"])
    assert sorted(set(weights_of(batch_of((DOCUMENTS, LABELS)), "token")[0].tolist())) == [0, 1, 2, 3]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
@pytest.mark.parametrize("size", [None, 1, 4], ids=lambda size: f"chunks of {size}")
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_batch_of_two_rows(name, loss, size, kind):
    model = model_of(name, kind)
    expected, items = loss_alone(model, DOCUMENTS + OTHER[0], LABELS + OTHER[1], loss)
    expected.backward()
    wanted = gradients(model)
    batch = batch_of((DOCUMENTS, LABELS), OTHER)
    assert int(items_in(batch, loss)) == items
    if size is None:
        found = hfp.compute_loss(model, batch, loss=loss)
    else:
        with chunks_of(size, model) as chunks:
            found = hfp.compute_loss(model, batch, loss=loss)
        predicting, of_chunk = chunks[-1]
        assert of_chunk == size < predicting < int((batch["tree_labels"] != -100).sum())
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12, abs=0)
    check_gradients(gradients(model), wanted)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_over_rows(loss, kind):
    model = model_of("Llama", kind)
    expected, items = loss_alone(model, DOCUMENTS + OTHER[0], LABELS + OTHER[1], loss)
    expected.backward()
    wanted = gradients(model)
    parts = [batch_of((DOCUMENTS, LABELS)), batch_of(OTHER)]
    found = [hfp.compute_loss(model, batch, loss=loss, num_items_in_batch=items) for batch in parts]
    for each in found:
        each.backward()
    assert sum(found).item() == pytest.approx(expected.item(), rel=1e-12, abs=0)
    check_gradients(gradients(model), wanted)
    planned = [with_share(batch, loss, torch.tensor(float(items)), keep_labels=True) for batch in parts]
    assert all(batch.keys() >= {TARGETS, WEIGHTS} and not batch.keys() & {ITEMS, "tree_labels"} for batch in planned)
    for batch in planned:
        hfp.compute_loss(model, batch).backward()
    check_gradients(gradients(model), wanted)


@settings(max_examples=25)
@given(labeled_documents(tokens=5), st.sampled_from(LOSSES), st.sampled_from([None, 1, 3]), st.sampled_from([*KINDS]))
def test_random_documents(case, loss, size, kind):
    model = model_of("Llama", kind)
    expected, items = loss_alone(model, *case, loss)
    batch = batch_of(case)
    if size is None:
        found = hfp.compute_loss(model, batch, loss=loss)
    else:
        with chunks_of(size, model):
            found = hfp.compute_loss(model, batch, loss=loss)
    found.backward()
    actual = gradients(model)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12, abs=0)
    if not items:
        assert not any(each.any() for each in actual.values())
        return
    expected.backward()
    check_gradients(actual, gradients(model))


def test_losses_of_tokens_are_kept():
    model = model_of("Llama")
    batch = batch_of((DOCUMENTS, LABELS))
    weights = weights_of(batch, "token")
    kept = [TokenLosses(batch["input_ids"], predicts_next=True) for _ in range(2)]
    for tokens, losses in zip((WHOLE, 2), kept, strict=True):
        shape, weighting = batch["input_ids"].shape, weighting_of(model, batch, "token", 1)
        with chunks_of(tokens, model), observed_logits(model, shape, weighting=weighting, token_losses=losses):
            total = model(**with_labels(batch), num_items_in_batch=1).loss
    assert all(each.are_known for each in kept)
    assert torch.allclose(kept[0].of_labels, kept[1].of_labels, rtol=1e-12)
    assert ((kept[0].of_labels > 0) == (batch["tree_labels"] != -100)).all()
    assert float((kept[0].of_labels * weights).sum()) == pytest.approx(total.item(), rel=1e-12)


def test_sixteen_bit_logits_become_float32():
    batch = batch_of((DOCUMENTS, LABELS))
    following = NextTokens.of_batch(batch, batch["tree_labels"])
    torch.manual_seed(0)
    logits = torch.randn(*batch["input_ids"].shape, 100).to(torch.bfloat16)
    found = following.log_probs(logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, following.log_probs(logits.float()))


def test_counts_of_micro_batches():
    row, _ = tree_row(DOCUMENTS, LABELS)
    lengths, places = row["segment_lengths"], 0
    attended = [len(path) * 2 - 1 for end in range(len(lengths)) for path in [path_of(row, end)]]
    for segment, length in enumerate(lengths):
        attended_here = [2 * (attended[segment] + 1) // 2 - 1 - 2 * above for above in range(length)]
        places += sum(attended_here)
    batch = batch_of((DOCUMENTS, LABELS))
    expected = [sum(lengths), len(DOCUMENTS), places, int(items_in(batch, "token")), 0]
    assert micro_batch_counts([batch], "token").tolist() == [expected]


def path_of(row, end):
    ((_, _, path),) = documents_of({**row, "ends": [end], "trained": []})
    return path


def test_roots_only_cost_what_packed_documents_cost():
    documents = [[1, 2, 3], [4, 5], [6]]
    packed = hfp.PackingCollator()([{"input_ids": each} for each in documents])
    trees = batch_of((documents, documents))
    for loss in LOSSES:
        assert micro_batch_counts([trees], loss).tolist() == micro_batch_counts([packed], loss).tolist()
        assert torch.equal(weights_of(trees, loss), weights_of(packed, loss))


def test_a_masked_language_model_is_refused():
    model = patched("BertForMaskedLM")
    batch = batch_of(OTHER)
    expected = "model: expected a causal language model .* prefixes .*, but BertForMaskedLM sees the tokens"
    for call in (hfp.compute_loss, hfp.document_logps):
        with pytest.raises(hfp.PackingError, match=expected):
            call(model, batch)


@pytest.mark.parametrize("name", ["segment_lengths", "ends", "trained", "tree_labels"])
def test_a_batch_without_a_key(name):
    batch = batch_of(OTHER)
    del batch[name]
    with pytest.raises(hfp.PackingError, match=f"batch: expected a batch from .*, got one without '{name}', with the"):
        hfp.compute_loss(model_of("Llama"), batch)
