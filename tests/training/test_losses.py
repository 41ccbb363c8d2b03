"""Losses and their weights, beside sums over documents one by one."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from whole_rows import bert

import hf_packing as hfp
from hf_packing.training.step_counts import StepCounts, micro_batch_counts
from hf_packing.training.sum_of_chunks import sum_of_chunks


def test_a_token_classifiers_own_loss():
    """Of a packed batch, it is the mean over the labels of the documents, the first ones too."""
    stock = bert("TokenClassification", num_labels=3).eval()
    model = hfp.patch_model(copy.deepcopy(stock))
    rows = [{"input_ids": [5, 6, 3], "labels": [2, -100, 1]}, {"input_ids": [9, 12, 7, 8], "labels": [0, 0, 2, -100]}]
    alone = [
        F.cross_entropy(stock(torch.tensor([row["input_ids"]])).logits[0], torch.tensor(row["labels"]), reduction="sum")
        for row in rows
    ]
    found = model(**hfp.PackingCollator(keep_first_labels=True)(rows)).loss
    assert float(found.detach()) == pytest.approx(float(sum(alone).detach()) / 5, rel=1e-12)
    without_first = model(**hfp.PackingCollator()(rows)).loss
    assert abs(float(without_first.detach()) - float(found.detach())) > 1e-3


@settings(max_examples=30)
@given(st.lists(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=2), min_size=1))
def test_facts_of_steps_on_two_ranks(steps):
    seen = StepCounts()
    for ranks in steps:
        batches = [hfp.PackingCollator()([{"input_ids": [5] * length} for length in lengths]) for lengths in ranks]
        seen.add(torch.stack([micro_batch_counts([batch], "token") for batch in batches]))
    found = seen.take(50)
    tokens = [[sum(lengths) for lengths in ranks] for ranks in steps]
    squares = [[sum(n * n for n in lengths) for lengths in ranks] for ranks in steps]
    assert found["packing_efficiency"] == pytest.approx(np.mean(tokens) / 50)
    assert found["documents_per_step"] == pytest.approx(sum(len(own) for ranks in steps for own in ranks) / len(steps))
    assert found["tokens_per_step"] == pytest.approx(np.sum(tokens) / len(steps))
    assert found["token_utilization"] == pytest.approx(np.mean([np.mean(step) / max(step) for step in tokens]))
    assert found["attention_utilization"] == pytest.approx(np.mean([np.mean(step) / max(step) for step in squares]))
    assert seen.take(50) == {}


def operands(tokens, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = [(tokens, 6), (11, 6), (11,)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def summed(hidden, weight, bias, size):
    def loss_of_chunk(part, chunk):
        factors = torch.arange(1, len(hidden) + 1, dtype=part.dtype)[chunk]
        return (torch.logsumexp(part @ weight.T + bias, -1) * factors).sum()

    return loss_of_chunk(hidden, slice(None)) if size is None else sum_of_chunks(loss_of_chunk, hidden, size)


@settings(max_examples=20)
@given(tokens=st.integers(1, 12), size=st.integers(1, 14), trained=st.sets(st.integers(0, 2)), scale=st.floats(0.1, 9))
def test_gradients_are_those_of_the_whole(tokens, size, trained, scale):
    found, expected = [], []
    for results, chunks in ((found, size), (expected, None)):
        tensors = operands(tokens)
        for number, tensor in enumerate(tensors):
            tensor.requires_grad_(number in trained)
        result = summed(*tensors, chunks)
        if trained:
            (scale * result).backward()
        assert all((tensor.grad is not None) == (number in trained) for number, tensor in enumerate(tensors))
        results += [result.detach(), *(tensors[number].grad for number in sorted(trained))]
    with torch.no_grad():
        found.append(summed(*operands(tokens), size))
    expected.append(expected[0])
    for ours, whole in zip(found, expected, strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)


def test_a_backward_pass_may_run_again():
    tensors = operands(5)
    result = summed(*tensors, 2)
    result.backward(retain_graph=True)
    once = [tensor.grad.clone() for tensor in tensors]
    result.backward()
    assert all(torch.equal(tensor.grad, 2 * gradient) for tensor, gradient in zip(tensors, once, strict=True))


def test_weights_that_are_used_elsewhere_too():
    """As a tied embedding is: the gradients of both uses are added."""
    found = []
    for size in (2, None):
        hidden, weight, bias = operands(5)
        (summed(hidden + weight[:5], weight, bias, size) + weight.square().sum()).backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_gradients_of_weights_are_summed_in_float32():
    """In bfloat16, the sum over chunks would be less precise than one product of matrices."""
    exact = operands(512)
    summed(*exact, None).backward()
    errors = []
    for size in (None, 8):
        hidden, weight, bias = operands(512, torch.bfloat16)
        summed(hidden, weight, bias, size).backward()
        assert weight.grad.dtype == torch.bfloat16
        errors.append(float((weight.grad.double() - exact[1].grad).norm() / exact[1].grad.norm()))
    assert errors[1] <= 1.5 * errors[0] + 1e-3


@pytest.mark.parametrize("size", [1, 4])
def test_only_one_chunk_is_computed_at_a_time(size):
    seen = []
    hidden, weight, _ = operands(10)

    def loss_of_chunk(part, chunk):
        seen.append((len(part), chunk.start))
        return (part @ weight.T).sum()

    sum_of_chunks(loss_of_chunk, hidden, size).backward()
    probe, *rest = seen
    assert probe == (1, 0)
    assert rest == [(min(size, 10 - begin), begin) for begin in range(0, 10, size)]
