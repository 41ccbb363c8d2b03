"""Masks of a collator with mlm=True: of the document, the epoch and the seed alone, drawn by the collator itself."""

from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from documents_to_mask import CLS, MASK, SEP, TOKENIZER, bert, collator, documents, on_each_document
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import arguments
from transformers import DataCollatorForLanguageModeling, Trainer

import hf_packing as hfp
from hf_packing.sampling.sizes import sizes_of
from hf_packing.training.masking import EpochSampler, MaskedRows, Masking

ALL = ("input_ids", "special_tokens_mask", "offset_mapping")


def rows_of(data, batching=None, masking=None, **ranks):
    sampler = EpochSampler(batching or hfp.TokenBudget(100), sizes_of(data), **ranks)
    return MaskedRows(data, sampler, masking=masking or Masking(collator(), 3))


def read(rows, epoch=0):
    """By number: the tokens and labels of all documents that are not copies."""
    rows.sampler.set_epoch(epoch)
    found = {}
    for batch in rows.sampler:
        for (number, is_copy, _), row in zip(batch, rows.__getitems__(batch), strict=True):
            if is_copy:
                assert set(np.asarray(row["labels"]).tolist()) == {-100}
            else:
                found[number] = (row["input_ids"].tolist(), row["labels"].tolist())
    return found


@settings(max_examples=8, deadline=None)
@given(st.integers(60, 400), st.integers(1, 3), st.integers(0, 3), st.booleans(), st.integers(0, 9))
def test_masks_do_not_depend_on_batches_or_ranks(budget, ranks, epoch, whole_words, seed):
    data, masking = documents(columns=ALL), Masking(collator(whole_words), seed)
    expected = read(rows_of(data, hfp.TokenBudget(60), masking), epoch)
    found = {}
    for rank in range(ranks):
        found |= read(rows_of(data, hfp.TokenBudget(budget), masking, world_size=ranks, rank=rank), epoch)
    assert found == expected
    assert len(found) == len(data)


@pytest.mark.parametrize("columns", [("input_ids",), ALL])
@pytest.mark.parametrize("kind", ["arrow", "list", "numpy", "selected"])
def test_all_kinds_of_datasets_are_masked_alike(columns, kind):
    data = documents(columns=columns)
    whole_words = "offset_mapping" in columns
    expected = read(rows_of(data, masking=Masking(collator(whole_words), 3)))
    if kind == "list":
        data = data.to_list()
    elif kind == "numpy":
        data = data.with_transform(lambda rows: {name: list(map(np.array, rows[name])) for name in rows})
    elif kind == "selected":
        data = datasets.concatenate_datasets([data, data]).select([*range(40, 80)])
    assert read(rows_of(data, masking=Masking(collator(whole_words), 3))) == expected


@pytest.mark.parametrize("columns", [("input_ids",), ALL])
def test_rates(columns):
    """15 % of the tokens, of which 80 % are hidden and 10 % another token; within three standard deviations."""
    data = documents(700, columns, longest=60)
    found = read(rows_of(data, hfp.TokenBudget(1000), Masking(collator(), 11)))
    ids, labels = (np.concatenate([found[row][which] for row in range(len(data))]) for which in range(2))
    whole = np.concatenate(data["input_ids"])
    chosen, special = labels != -100, (whole == CLS) | (whole == SEP)
    assert not chosen[special].any()
    np.testing.assert_array_equal(ids[~chosen], whole[~chosen])
    np.testing.assert_array_equal(labels[chosen], whole[chosen])

    def check(happened, rate):
        assert abs(happened.mean() - rate) < 3 * np.sqrt(rate * (1 - rate) / len(happened))

    check(chosen[~special], 0.15)
    check(ids[chosen] == MASK, 0.8 + 0.1 / 99)
    check(ids[chosen] == whole[chosen], 0.1 + 0.1 / 99)


def test_segments_of_packed_rows_are_masked_by_themselves():
    packed = hfp.pack(documents(columns=("input_ids",)), hfp.BestFit(120)).remove_columns("labels")
    seen = []

    class Recorded(DataCollatorForLanguageModeling):
        def torch_mask_tokens(self, inputs, **given):
            seen.append(inputs[0].tolist())
            return super().torch_mask_tokens(inputs, **given)

    found = read(rows_of(packed, hfp.TokenBudget(240), Masking(Recorded(TOKENIZER), 3)))
    assert sorted(seen) == sorted(documents()["input_ids"])
    for number, (_, labels) in found.items():
        borders = np.cumsum([0, *packed[number]["seq_lengths"]])
        assert len(labels) == borders[-1]
        for begin, end in pairwise(borders):
            assert labels[begin] == labels[end - 1] == -100, "special tokens"


def test_pieces_of_a_document():
    data = datasets.Dataset.from_dict({"input_ids": [[*range(5, 99)] * 2, [7] * 9]})
    rows = rows_of(data, hfp.TokenBudget(94, overflow="split"))
    found = read(rows)
    assert sorted(len(ids) for ids, _ in found.values()) == [9, 94, 94]
    (first, _), (second, _) = (each for each in found.values() if len(each[0]) == 94)
    assert first != second


def test_the_generator_of_the_collator_stays():
    own = collator(seed=4)
    own.generator = torch.Generator()
    before, seeded = own.generator, own.generator.initial_seed()
    state = torch.get_rng_state()
    read(rows_of(documents(), masking=Masking(own, 3)))
    assert own.generator is before
    assert own.generator.initial_seed() == seeded
    assert torch.equal(torch.get_rng_state(), state)


def trainer_of(folder, masking=None, data=None, model=None, **changes):
    data = documents() if data is None else data
    args = arguments(folder, **({"max_steps": -1, "num_train_epochs": 2} | changes))
    return Trainer(model or bert(), args, train_dataset=data, data_collator=masking or collator())


def seen_in_training(trainer, budget=100, resume=None, **options):
    """By epoch, what the model got of each document: sorted pairs of tokens and labels."""
    hfp.attach(trainer, hfp.TokenBudget(budget), **options)
    seen = {}
    on_each_document(trainer, lambda epoch, ids, labels: seen.setdefault(epoch, []).append((ids, labels)))
    trainer.train(resume_from_checkpoint=resume)
    trainer.callback_handler.train_dataloader.base_dataloader._iterator = None  # ends workers at once
    return {epoch: sorted(found) for epoch, found in seen.items()}


def test_what_the_model_gets(tmp_path):
    """The same masks with another budget and with workers that outlive an epoch, and other masks in the next epoch."""
    few, first = {"data": documents(4)}, {"num_train_epochs": 1}
    expected = seen_in_training(trainer_of(tmp_path, **few))
    assert expected.keys() == {0, 1}
    assert expected[0] != expected[1]
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "gradient_accumulation_steps": 2}
    assert seen_in_training(trainer_of(tmp_path, **few, **workers), budget=64) == expected
    del expected[1]
    assert seen_in_training(trainer_of(tmp_path, data_seed=5, **few, **first)) != expected
    assert seen_in_training(trainer_of(tmp_path, collator(seed=42), seed=7, **few, **first)) == expected
    assert seen_in_training(trainer_of(tmp_path, **few, **first), tokens=100, max_segments=20) == expected


def test_a_resumed_run(tmp_path):
    options = {"data": documents(12), "save_strategy": "steps", "save_steps": 2}
    expected = seen_in_training(trainer_of(tmp_path / "whole", **options | {"save_strategy": "no"}))
    before = seen_in_training(trainer_of(tmp_path, **options, max_steps=4))
    assert before.keys() == {0, 1}
    after = seen_in_training(trainer_of(tmp_path, **options), resume=str(tmp_path / "checkpoint-4"))
    assert after.keys() == {1}
    both = {epoch: sorted(before.get(epoch, []) + after.get(epoch, [])) for epoch in expected}
    assert both == expected
    changed = trainer_of(tmp_path, collator(mlm_probability=0.3), **options)
    hfp.attach(changed, hfp.TokenBudget(100))
    message = r"data_collator: expected DataCollatorFor.*mlm_probability=0.15.* got .*mlm_probability=0.3"
    with pytest.raises(hfp.PackingError, match=message):
        changed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_evaluations_are_repeatable(tmp_path):
    trainer = trainer_of(tmp_path, collator(True), data=documents(columns=ALL))
    hfp.attach(trainer, hfp.TokenBudget(100))
    losses = set()
    for rows in (1, 4, 4):
        trainer.args.per_device_eval_batch_size = rows
        losses.add(round(trainer.evaluate(documents(12, ALL))["eval_loss"], 10))
    assert len(losses) == 1
    assert np.isfinite(losses.pop())
    predicted = trainer.predict(documents(12, ALL))
    assert (predicted.label_ids != -100).any()


class Masks:
    """Has nothing but what is asked for."""

    mlm = True

    def torch_mask_tokens(self, inputs, special_tokens_mask=None):  # noqa: ARG002
        labels = inputs.clone()
        labels[torch.rand(labels.shape, generator=self.generator) > 0.15] = -100
        return torch.where(labels == -100, inputs, MASK), labels


def test_a_collator_of_another_class(tmp_path):
    few = {"data": documents(6), "num_train_epochs": 1}
    seen = seen_in_training(trainer_of(tmp_path, Masks(), **few))
    assert seen == seen_in_training(trainer_of(tmp_path, Masks(), **few), budget=60)


def test_columns_that_are_too_short():
    data = documents(3, ("input_ids", "special_tokens_mask")).to_list()
    data[1]["special_tokens_mask"].pop()
    with pytest.raises(hfp.PackingError, match="column 'special_tokens_mask': expected .* values in row 1"):
        read(rows_of(data))
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "offset_mapping": [[[0, 1], [2]]]})
    with pytest.raises(hfp.PackingError, match="expected pairs of integers"):
        read(rows_of(data, masking=Masking(collator(True), 3)))
