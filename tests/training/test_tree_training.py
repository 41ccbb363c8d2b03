"""Training on what `pack(share_prefixes=...)` makes: batches of a DataLoader, checkpointing, LoRA and two ranks."""

import datasets
import peft
import pytest
import torch
from processes import launch
from tree_documents import DOCUMENTS, LABELS, OTHER
from tree_oracle import (
    check_gradients,
    exact,
    gradients,
    loss_alone,
    losses_alone,
    patched_with_stock,
    share_parameters,
)

import hf_packing as hfp
from hf_packing.training.losses import items_in

ALL = DOCUMENTS + OTHER[0]
ALL_LABELS = LABELS + OTHER[1]
LOSSES = ["token", "sequence"]

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def batches():
    """Two micro-batches of packed rows."""
    rows = datasets.Dataset.from_dict({"input_ids": ALL, "labels": ALL_LABELS})
    packed = hfp.pack(rows, hfp.BestFit(16, seed=1), share_prefixes=2)
    assert len(packed) > 1
    assert sum(map(len, packed["tree_input_ids"])) < sum(map(len, ALL))
    return list(torch.utils.data.DataLoader(packed, batch_size=-(-len(packed) // 2), collate_fn=hfp.PackingCollator()))


def train_step(model, loss):
    """Return the gradients of a step over both micro-batches."""
    parts = batches()
    items = sum(int(items_in(batch, loss)) for batch in parts)
    total = [hfp.compute_loss(model, batch, loss=loss, num_items_in_batch=items) for batch in parts]
    for each in total:
        each.backward()
    return sum(total).item(), gradients(model)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_checkpointing(name, loss):
    model = patched_with_stock(name)
    model.train()
    model.gradient_checkpointing_enable()
    total, found = train_step(model, loss)
    expected, _ = loss_alone(model, ALL, ALL_LABELS, loss)
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-12)
    check_gradients(found, gradients(model))


@pytest.mark.parametrize("loss", LOSSES)
def test_lora(loss):
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    stock = peft.get_peft_model(exact("Llama"), lora)
    model = hfp.patch_model(peft.get_peft_model(exact("Llama"), lora))
    share_parameters(stock, model)
    total, found = train_step(model, loss)
    model.stock = [stock]
    expected, _ = loss_alone(model, ALL, ALL_LABELS, loss)
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-12)
    assert all("lora" in name for name in found)
    check_gradients(found, gradients(model))


@pytest.mark.slow
def test_two_ranks(tmp_path):
    launch("tree_process.py", tmp_path, ranks=2)
    model = patched_with_stock("Llama")
    first, second = (torch.load(tmp_path / f"gradients-{rank}.pt") for rank in range(2))
    for loss in LOSSES:
        loss_alone(model, ALL, ALL_LABELS, loss)[0].backward()
        wanted = gradients(model)
        check_gradients(first[loss], wanted)
        check_gradients(second[loss], wanted)
    (-sum(each.sum() for each in losses_alone(model, ALL, ALL_LABELS)) / 2).backward()  # DDP averages over ranks
    check_gradients(first["logps"], gradients(model))
