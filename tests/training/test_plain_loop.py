"""compute_loss for batches of a PackingCollator, in a loop without accelerate."""

import datasets
import pytest
import torch
from accelerate import Accelerator
from patched_models import patched
from tiny_models import build
from training_by_hand import gradients_of_a_padded_batch, largest_difference

import hf_packing as hfp
from hf_packing.errors import PackingError

PLAIN = [[11, 5, 9, 30, 31, 12, 13], [7, 8, 21], [40, 41], list(range(50, 70))]
HALVES = (PLAIN[:1], PLAIN[1:])
"""Batches of different numbers of labels and of documents: means of them are not the mean of all."""
NUMBERS = {"token": 28, "sequence": 4}


def plain_batch(documents):
    return hfp.PackingCollator()([{"input_ids": ids} for ids in documents])


def plain_gradients(batches, loss, **options):
    """Gradients of a plain loop over the batches of one optimizer step, and the sum of the losses."""
    model = patched("Llama", torch.float64)
    total = 0.0
    for batch in batches:
        result = hfp.compute_loss(model, batch, loss=loss, **options)
        result.backward()
        total += result.item()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, total


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_a_plain_loop(loss):
    """The loss of a batch of a PackingCollator is that of one padded batch, at once or in accumulated parts."""
    rows = datasets.Dataset.from_dict({"input_ids": PLAIN, "labels": PLAIN})
    expected, value = gradients_of_a_padded_batch(rows, loss)
    number = NUMBERS[loss]
    for found, total in (
        plain_gradients([plain_batch(PLAIN)], loss),
        plain_gradients([plain_batch(PLAIN)], loss, num_items_in_batch=number),
        plain_gradients(map(plain_batch, HALVES), loss, num_items_in_batch=torch.tensor(number)),
        plain_gradients(map(plain_batch, HALVES), loss, num_items_in_batch=torch.tensor([float(number)])),
    ):
        assert largest_difference(found, expected) <= 1e-12
        assert total == pytest.approx(value, rel=1e-12)


def test_the_loss_of_tokens_is_the_default():
    model, batch = patched(), plain_batch(PLAIN)
    assert torch.equal(hfp.compute_loss(model, batch), hfp.compute_loss(model, batch, loss="token"))
    assert not torch.isclose(hfp.compute_loss(model, batch), hfp.compute_loss(model, batch, loss="sequence"))


def test_accumulation_without_the_number_of_items_is_refused():
    """The error comes with the backward pass that would add to the gradients of another batch."""
    model = patched()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [plain_batch(half) for half in HALVES]
    for set_to_none in (True, False):
        for batch in batches:  # steps of one batch each
            loss = hfp.compute_loss(model, batch)
            optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
    loss = hfp.compute_loss(model, batches[0])
    message = "num_items_in_batch: expected the number of items of the whole optimizer step, got None, but the model"
    with pytest.raises(PackingError, match=message):
        loss.backward()
    with torch.no_grad():
        hfp.compute_loss(model, batches[0])
    model.zero_grad()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(PackingError, match=message):
        accumulate(accelerator, model, batches)


def accumulate(accelerator, model, batches):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(hfp.compute_loss(model, batch))


def test_a_plain_batch_without_trainable_tokens():
    model = patched("Llama", torch.float64)
    batch = hfp.PackingCollator()([{"input_ids": ids, "labels": [-100] * len(ids)} for ids in PLAIN])
    for number in (None, 0, 3):
        for kind in ("token", "sequence"):
            model.zero_grad()
            loss = hfp.compute_loss(model, batch, loss=kind, num_items_in_batch=number)
            loss.backward()
            assert loss.item() == 0
            assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.slow
def test_routers_count_by_the_share_of_a_batch():
    """So that accumulated batches add up to a mean, weighted as the tokens are."""
    model = hfp.patch_model(build("Mixtral", torch.float64, output_router_logits=True, router_aux_loss_coef=0.5))
    batches, total, expected = [plain_batch(half) for half in HALVES], 0.0, 0.0
    for batch, labels in zip(batches, (6, 22), strict=True):
        with torch.no_grad():
            total += float(hfp.compute_loss(model, batch, num_items_in_batch=28))
            outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
            alone = float(hfp.compute_loss(model, batch))
            expected += alone * labels / 28
            assert float(outputs.aux_loss) > 0
    assert total == pytest.approx(expected, rel=1e-12)
