"""Training loops on one process, with prepare_dataloader or a PackingCollator: epochs, state, accumulation, losses."""

import datasets
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from chunks import WHOLE, chunks_of
from patched_models import patched
from tiny_models import build, with_loss_times
from training_by_hand import gradients_of_a_padded_batch, largest_difference
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


def accumulating(steps, **settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    return hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(40), **settings)


@pytest.mark.parametrize(
    ("argument", "steps", "settings", "change"),
    [
        ("loss", 4, {"loss": "sequence"}, lambda state: state),
        ("ranks x gradient_accumulation_steps", 2, {}, lambda state: state),
        ("gradient_accumulation_steps", 4, {}, lambda state: state | {"accumulation": 2, "step": 3}),  # within a step
        *(
            ("state", 4, {}, lambda state, name=name: {each: state[each] for each in state if each != name})
            for name in ("epoch", "step", "accumulation")
        ),
    ],
)
def test_other_states_are_refused(argument, steps, settings, change):
    state = accumulating(4).state_dict()
    with pytest.raises(PackingError, match=f"^{argument}: "):
        accumulating(steps, **settings).load_state_dict(change(state))


def test_a_state_between_steps_may_have_another_accumulation():
    """Steps of 4 micro-batches, on 2 ranks."""
    state, loader = accumulating(4).state_dict(), accumulating(4)
    loader.load_state_dict(state | {"accumulation": 2, "step": 4})
    assert loader.state_dict()["step"] == 8
    loader.load_state_dict(state | {"accumulation": 4, "step": 6})
    assert len(list(loader)) == len(loader) - 6


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


def test_a_model_with_another_loss():
    models = with_loss_times(2.0), build("Llama")
    found = [float(hfp.compute_loss(model, next(iter(loader_of(model=model)))).detach()) for model in models]
    assert found[0] == pytest.approx(2 * found[1], rel=1e-5)


@pytest.mark.parametrize("kind", [lambda rows: rows, datasets.Dataset.from_list])
def test_packed_rows_whose_columns_contradict_each_other(kind):
    rows = [{"input_ids": [5, 6, 7, 8], "seq_lengths": [2, 2], "position_ids": [0, 1, 0, 1]} for _ in range(4)]
    loader = hfp.prepare_dataloader(Accelerator(cpu=True), kind(rows), hfp.TokenBudget(4))
    assert len(list(loader)) == 4
    rows[3]["position_ids"] = [0, 1, 2, 3]
    loader = hfp.prepare_dataloader(Accelerator(cpu=True), kind(rows), hfp.TokenBudget(4))
    with pytest.raises(PackingError, match="'position_ids': expected segments of .* as in column 'seq_lengths'"):
        list(loader)


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
