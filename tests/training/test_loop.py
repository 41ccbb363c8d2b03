"""prepare_dataloader on one process: epochs, state, accumulation, losses."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from chunks import WHOLE, chunks_of
from patched_models import patched
from tiny_models import build, with_loss_times
from training_process import documents

import hf_packing as hfp
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.errors import PackingError
from hf_packing.training.router_padding import refuse_padding_in_router_loss


def loader_of(**settings):
    return hfp.prepare_dataloader(Accelerator(cpu=True), documents(45), hfp.TokenBudget(64), **settings)


def test_a_models_own_loss_is_right_in_a_loop():
    """model(**batch).loss and compute_loss agree, and their mean over batches is the mean over tokens."""
    model = patched()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1000)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    own, ours = [], []
    for batch in loader:
        own.append(model(**batch).loss.item() / 1000)
        ours.append(hfp.compute_loss(model, batch).item() / 1000)
    assert own == pytest.approx(ours, rel=1e-5)
    assert sum(ours) == pytest.approx(hfp.evaluation_loss(accelerator, model, documents(45)), rel=1e-5)


def test_modules_that_are_frozen_stay_frozen():
    model = patched("Mixtral", output_router_logits=True).train()
    before = hfp.evaluation_loss(Accelerator(cpu=True), model, documents(9))
    frozen = model.model.layers[0].eval()
    assert hfp.evaluation_loss(Accelerator(cpu=True), model, documents(9)) == before
    refuse_padding_in_router_loss(model)
    assert model.training
    assert not frozen.training
    assert not any(module.training for module in frozen.modules())


def test_a_loop_counts_its_epochs():
    loader = loader_of()
    first = [batch["input_ids"].tolist() for batch in loader]
    assert loader.epoch == 1
    second = [batch["input_ids"].tolist() for batch in loader]
    assert sorted(map(str, first)) != sorted(map(str, second))
    loader.set_epoch(0)
    assert [batch["input_ids"].tolist() for batch in loader] == first
    next(iter(loader))
    assert [batch["input_ids"].tolist() for batch in loader] == second


def test_a_loop_goes_on_from_its_state():
    loader = loader_of()
    expected = [[batch["input_ids"].tolist() for batch in loader] for _ in range(2)]
    for epoch in range(2):
        for steps in range(1, len(loader) + 1):
            before = loader_of()
            before.set_epoch(epoch)
            batches = iter(before)
            for _ in range(steps):
                next(batches)
            after = loader_of()
            after.load_state_dict(before.state_dict())
            if steps == len(loader):
                assert (after.epoch, after.micro_batches_done) == (epoch + 1, 0)
            else:
                assert [batch["input_ids"].tolist() for batch in after] == expected[epoch][steps:]
                assert after.epoch == epoch + 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_skipping_leaves_exactly_the_remaining_batches_of_the_epoch(epoch):
    loader = loader_of()
    loader.set_epoch(epoch)
    expected = [batch["input_ids"].tolist() for batch in loader]
    assert len(expected) > 3
    for skipped in range(len(expected) + 1):
        loader.set_epoch(epoch)
        loader.skip_first_batches(skipped)
        assert [batch["input_ids"].tolist() for batch in loader] == expected[skipped:]
        assert (loader.epoch, loader.micro_batches_done) == (epoch + 1, 0)


def test_skipping_after_a_state_was_loaded_skips_once():
    """As loops do that go on after accelerator.load_state in accelerate's way."""
    before, after = loader_of(), loader_of()
    expected = [batch["input_ids"].tolist() for batch in before]
    after.load_state_dict({**before.state_dict(), "epoch": 0, "step": 2})
    after.skip_first_batches(2)
    assert after.state_dict()["step"] == 2
    assert [batch["input_ids"].tolist() for batch in after] == expected[2:]


def test_skipping_a_part_of_a_step_or_more_than_an_epoch():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    with pytest.raises(
        PackingError, match="batches: expected a multiple of 2, the number of micro-batches in an optimizer step, got 1"
    ):
        loader.skip_first_batches(1)
    with pytest.raises(PackingError, match=f"batches: expected .*{len(loader)}, got {len(loader) + 1}"):
        loader.skip_first_batches(len(loader) + 1)


def test_accelerate_takes_the_loader_as_it_is():
    accelerator = Accelerator(cpu=True)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    assert accelerator.prepare(loader) is loader
    for call in (
        lambda: accelerator.skip_first_batches(loader, 2),
        lambda: skip_first_batches(loader, 2),
        lambda: accelerator.prepare_data_loader(loader),
        lambda: prepare_data_loader(loader),
    ):
        with pytest.raises(PackingError, match=r"sampler: expected a DataLoader .* use loader.skip_first_batches\(n\)"):
            call()
    assert not hasattr(loader, "sampler")
    assert getattr(loader, "batch_size", None) is None
    with pytest.raises(AttributeError, match="'PackedLoader' object has no attribute 'sampl'"):
        loader.sampl  # noqa: B018


def test_no_checkpoint_between_accumulated_batches():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    model = build("Llama")
    for _ in loader:
        with accelerator.accumulate(model):
            break
    with pytest.raises(
        PackingError, match="expected a checkpoint after an optimizer step of 2 micro-batches, got a checkpoint after 1"
    ):
        loader.state_dict()


def test_iterating_draws_nothing_from_the_generator_of_dropout():
    before = torch.get_rng_state()
    list(loader_of())
    assert torch.equal(before, torch.get_rng_state())


def update_sizes(accelerator, model, loader, see):
    """How many batches each optimizer step has."""
    sizes, batches = [], 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(hfp.compute_loss(model, batch))
        batches += 1
        if accelerator.sync_gradients:
            sizes.append(batches)
            batches = 0
        see(batch)
    return sizes


def test_another_loader_in_the_middle_of_an_update_changes_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = patched()
    loader, other = (hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64)) for _ in range(2))
    expected = update_sizes(accelerator, model, loader, lambda _: None)
    assert set(expected[:-1]) == {2}
    assert update_sizes(accelerator, model, loader, lambda _: list(other)) == expected
    assert update_sizes(accelerator, model, loader, lambda _: next(iter(other))) == expected


def test_a_checkpoint_where_another_loader_was_broken_off(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, other = (hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64)) for _ in range(2))
    expected = [batch["input_ids"].tolist() for batch in other]
    other.set_epoch(0)
    next(iter(other))
    list(loader)
    accelerator.save_state(tmp_path)
    other.set_epoch(3)
    accelerator.load_state(tmp_path)
    assert [batch["input_ids"].tolist() for batch in other] == expected[1:]


def test_an_epoch_ends_with_its_last_batch_even_if_nobody_asks_for_more():
    loader = loader_of()
    for _, batch in zip(range(len(loader)), loader, strict=False):
        assert batch
    assert (loader.epoch, loader.micro_batches_done) == (1, 0)


def test_models_that_do_not_divide_by_the_items_of_a_step_are_given_no_labels():
    model = tiny_model("bert", "masked")
    batch = next(iter(loader_of(model=model)))
    assert "labels" not in batch
    assert hfp.compute_loss(model, batch).isfinite()
    assert "labels" in next(iter(loader_of(model=patched())))


def test_mixed_precision_is_proven_as_well(monkeypatch):
    report = SimpleNamespace(isolated=False, reason="it does")
    monkeypatch.setattr("hf_packing.attention.patch.check_isolation", lambda _: report)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        budget, model = hfp.TokenBudget(64), build("Llama")
        with pytest.raises(hfp.ModelNotSupportedError, match="in bf16 mixed precision: it does"):
            hfp.prepare_dataloader(accelerator, documents(45), budget, model=model, prove="model")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_state_of_another_loss():
    state = loader_of().state_dict()
    with pytest.raises(PackingError, match="loss: expected 'token', as when the checkpoint was saved, got 'sequence'"):
        loader_of(loss="sequence").load_state_dict(state)


@pytest.mark.parametrize("architecture", ["bart", "xlm"])
def test_evaluation_asks_a_model_for_its_loss(architecture):
    model = hfp.patch_model(tiny_model(architecture, "causal" if architecture == "bart" else "masked"))
    total = tokens = 0
    data = documents(9).map(lambda row: {"labels": row["input_ids"][::-1]})  # others than the tokens it sees
    for row in data:
        batch = hfp.PackingCollator(keep_first_labels=True)([row])
        total += model(**batch).loss.item() * len(row["input_ids"])
        tokens += len(row["input_ids"])
    assert hfp.evaluation_loss(Accelerator(cpu=True), model, data) == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "collate_fn", "in_order", "generator"])
def test_options_that_the_batching_decides(name):
    with pytest.raises(PackingError, match=f"{name}: expected no value, since the batching decides"):
        loader_of(**{name: 1})


def test_arguments_in_another_order():
    with pytest.raises(PackingError, match="accelerator: expected an Accelerator, got Dataset"):
        hfp.prepare_dataloader(documents(3), Accelerator(cpu=True), hfp.TokenBudget(64))


def accumulating(steps):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    return hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(40))


@pytest.mark.parametrize("name", ["epoch", "step", "accumulation"])
def test_a_state_that_lacks_something(name):
    state = accumulating(4).state_dict()
    del state[name]
    with pytest.raises(PackingError, match=f"state: expected .* without '{name}'"):
        accumulating(4).load_state_dict(state)


def test_a_state_of_steps_of_another_size_is_refused():
    state = accumulating(4).state_dict()
    with pytest.raises(PackingError, match="gradient_accumulation_steps: expected 4, .* got 2;"):
        accumulating(2).load_state_dict(state)


def test_a_state_of_a_part_of_a_step_needs_the_same_accumulation():
    """Steps of 4 micro-batches, on 2 ranks, 1 micro-batch into a step."""
    state = accumulating(4).state_dict() | {"accumulation": 2, "step": 3}
    with pytest.raises(PackingError, match="gradient_accumulation_steps: expected 2, .* 1 micro-batches into"):
        accumulating(4).load_state_dict(state)
    loader = accumulating(4)
    loader.load_state_dict(state | {"step": 4})
    assert loader.state_dict()["step"] == 8
    loader.load_state_dict(state | {"accumulation": 4, "step": 6})
    assert len(list(loader)) == len(loader) - 6


def test_accumulation_that_changes():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(PackingError, match="gradient_accumulation_steps: expected 2.*got 3, which DeepSpeed"):
        next(iter(loader))


def test_a_step_begins_with_the_first_batch_after_a_break():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    model = accelerator.prepare(patched())
    synchronized = []
    for stop in (1, 1000):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(hfp.compute_loss(model, batch))
                synchronized.append(accelerator.sync_gradients)
            if number + 1 == stop:
                break
    assert synchronized[:4] == [False, False, False, True]


def test_the_last_gradients_of_an_epoch_are_used():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    try:
        with pytest.raises(PackingError, match="sync_with_dataloader: expected True, got False"):
            hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    finally:
        accelerator.gradient_state._reset_state()


def test_processes_that_do_not_know_of_each_other(monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PackingError, match="accelerator: expected num_processes=2, the number of launched processes"):
        hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))


def test_gradients_are_synchronized_at_the_end_of_an_epoch():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 8})
    loader = hfp.prepare_dataloader(accelerator, rows, hfp.TokenBudget(3))
    assert len(loader) == 8
    model = accelerator.prepare(patched())
    synchronized = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(hfp.compute_loss(model, batch))
            synchronized.append(accelerator.sync_gradients)
    assert [step + 1 for step, done in enumerate(synchronized) if done] == [*range(3, len(loader), 3), len(loader)]


def test_a_batch_that_is_none():
    message = "batch: expected a batch from prepare_dataloader or PackingCollator, got"
    with pytest.raises(PackingError, match=f"{message} one without 'labels', with the keys: input_ids"):
        hfp.compute_loss(build("Llama"), {"input_ids": torch.tensor([[5, 6]])})
    with pytest.raises(PackingError, match=f"{message} one without 'cu_seq_lens_q', with the keys: labels"):
        hfp.compute_loss(build("Llama"), {"labels": torch.tensor([[5, 6]])})
    with pytest.raises(PackingError, match=f"{message} NoneType"):
        hfp.compute_loss(build("Llama"), None)


def test_a_model_that_is_not_patched():
    model, accelerator = build("Llama"), Accelerator(cpu=True)
    for call in (
        lambda: hfp.compute_loss(model, next(iter(loader_of()))),
        lambda: hfp.evaluation_loss(accelerator, model, documents(3)),
    ):
        with pytest.raises(PackingError, match="model: expected a model patched by patch_model, but Llama"):
            call()
    hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64), model=model)
    assert hfp.check_isolation(model).isolated
    assert hfp.evaluation_loss(accelerator, model, documents(3)) > 0


def test_several_gpus_in_one_process():
    model = torch.nn.DataParallel(build("Llama"))
    with pytest.raises(PackingError, match="expected one process for each GPU, got nn.DataParallel, which would split"):
        loader_of(model=model)
    with pytest.raises(PackingError, match="expected one process for each GPU, got nn.DataParallel"):
        hfp.patch_model(model)


def test_a_model_with_another_loss():
    models = with_loss_times(2.0), build("Llama")
    found = [float(hfp.compute_loss(model, next(iter(loader_of(model=model)))).detach()) for model in models]
    assert found[0] == pytest.approx(2 * found[1], rel=1e-5)
    with pytest.raises(PackingError, match="model: expected a model that returns a loss of a packed batch, but Other"):
        loader_of(model=with_loss_times(None))


def test_sequence_weights_leave_models_no_labels():
    batch = next(iter(loader_of(loss="sequence")))
    assert "labels" not in batch
    assert float(batch["target_weights"].sum()) == pytest.approx(1.0)
    assert np.isfinite(hfp.compute_loss(patched(), batch).item())


def test_more_ranks_than_rows():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PackingError, match="each of 1 ranks, got 0 rows, not counting 1 empty or dropped rows"):
        hfp.prepare_dataloader(accelerator, datasets.Dataset.from_dict({"input_ids": [[]]}), hfp.TokenBudget(8))


@pytest.mark.parametrize("kind", [lambda rows: rows, datasets.Dataset.from_list])
def test_packed_rows_whose_columns_contradict_each_other(kind):
    rows = [{"input_ids": [5, 6, 7, 8], "seq_lengths": [2, 2], "position_ids": [0, 1, 0, 1]} for _ in range(4)]
    loader = hfp.prepare_dataloader(Accelerator(cpu=True), kind(rows), hfp.TokenBudget(4))
    assert len(list(loader)) == 4
    rows[3]["position_ids"] = [0, 1, 2, 3]
    loader = hfp.prepare_dataloader(Accelerator(cpu=True), kind(rows), hfp.TokenBudget(4))
    with pytest.raises(PackingError, match="'position_ids': expected segments of .* as in column 'seq_lengths'"):
        list(loader)


def test_arguments_of_plain_batches_and_of_planned_ones():
    model, plain = patched(), hfp.PackingCollator()([{"input_ids": [5, 6, 7]}])
    for wrong in (-1, True, "28", torch.ones(2), torch.tensor(True)):
        with pytest.raises(
            PackingError, match=r"num_items_in_batch: expected a number of tokens or documents, not neg"
        ):
            hfp.compute_loss(model, plain, num_items_in_batch=wrong)
    with pytest.raises(PackingError, match="loss: expected one of token, sequence, got 'mean'"):
        hfp.compute_loss(model, plain, loss="mean")
    for planned in (next(iter(loader_of())), next(iter(loader_of(loss="sequence")))):
        with pytest.raises(PackingError, match="loss: expected None, since the batch has a loss and a divisor already"):
            hfp.compute_loss(model, planned, loss="token")
        with pytest.raises(PackingError, match=r"num_items_in_batch: expected None, since the batch .* got 7"):
            hfp.compute_loss(model, planned, num_items_in_batch=7)


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_the_head_of_a_loop_in_chunks(loss):
    model = patched("Llama", torch.float64)
    batch, found = next(iter(loader_of(loss=loss, model=model))), []
    for tokens in (5, WHOLE):
        with chunks_of(tokens, model) as chunks:
            found.append(hfp.compute_loss(model, batch).item())
            found.append(hfp.evaluation_loss(Accelerator(cpu=True), model, documents(9), rows_per_batch=3))
        assert bool(chunks) == (tokens == 5)
    assert found[:2] == pytest.approx(found[2:], rel=1e-12)
