"""What is left after documents were cut or dropped, also by TRL: counted, or refused."""

import datasets
import numpy as np
import pytest
from plain_dataset import Plain
from tiers import fast_only
from trainers import documents as labeled_documents
from trainers import loader_of, trainer_of
from transformers import Trainer
from trl import SFTTrainer
from whole_rows import BUDGET
from whole_rows import trainer_of as pairs

import hf_packing as hfp

TRUNCATED = hfp.TokenBudget(128, overflow="truncate")


def prompts(masked=200, trained=20, number=12, short=0):
    """Documents whose first tokens are not trained on, and short ones that are trained on but for their first token."""
    tokens = [3 + (row * 7 + place) % 90 for row in range(number) for place in range(masked + trained)]
    rows = [tokens[row * (masked + trained) : (row + 1) * (masked + trained)] for row in range(number)]
    labels = [[-100] * masked + row[masked:] for row in rows]
    rows, labels = [*rows, *[[5, 6, 7]] * short], [*labels, *[[5, 6, 7]] * short]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})


def with_mask(data, name="completion_mask"):
    masks = [[int(label != -100) for label in row] for row in data["labels"]]
    return data.remove_columns("labels").add_column(name, masks)


def table(rows):
    return datasets.Dataset.from_list(rows)


def as_transform(data):
    rows = data[:]
    return data.with_transform(lambda batch: {name: batch[name] for name in rows})


@pytest.mark.parametrize("kind", [table, Plain, lambda rows: as_transform(table(rows))])
@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_no_label_left_is_refused(tmp_path, kind, overflow):
    """A short document that stays has no labels."""
    data = kind([*prompts(), {"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    budget = hfp.TokenBudget(128, overflow=overflow)
    with pytest.raises(hfp.PackingError, match="batching: 0 of 240 labels are left.*got TokenBudget"):
        hfp.attach(trainer_of(tmp_path, data=data), budget)
    with pytest.raises(hfp.PackingError, match="batching: 0 of 240 labels are left"):
        loader_of(data, budget)


def test_masks_of_trl_are_labels(tmp_path):
    trainer = trainer_of(tmp_path, SFTTrainer, data=with_mask(prompts()), completion_only_loss=True)
    with pytest.raises(hfp.PackingError, match="0 of 240 labels are left"):
        hfp.attach(trainer, TRUNCATED)
    trainer = trainer_of(tmp_path, SFTTrainer, data=with_mask(prompts()), completion_only_loss=False)
    labels = hfp.attach(trainer, TRUNCATED).labels
    assert (labels.left, labels.documents) == (12 * 127, 12 * 219)


def test_shared_prefixes_are_counted_too(tmp_path):
    budget = hfp.TokenBudget(128, overflow="truncate", share_prefixes=True)
    with pytest.raises(hfp.PackingError, match="0 of 240 labels are left"):
        hfp.attach(trainer_of(tmp_path, data=prompts()), budget)


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_what_is_left_is_said(tmp_path, kind):
    data = prompts(masked=120, short=2)
    summary = hfp.attach(trainer_of(tmp_path, kind, data=data), TRUNCATED)
    left = 12 * 8 + 2 * 2
    assert (summary.labels.left, summary.labels.documents) == (left, 244)
    assert f"144 tokens lost; {left} of 244 labels are left" in str(summary)


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("max_tokens", fast_only([20, 131, 300], 20, 131))
def test_counts_are_those_of_the_batches(max_tokens, overflow):
    data = prompts(masked=120, short=2)
    without = data.remove_columns("labels")
    packed = hfp.pack(data, hfp.BestFit(141, seed=0))
    lazy = datasets.concatenate_datasets([packed, packed])
    budget = hfp.TokenBudget(max_tokens, overflow=overflow)
    for each, total in ((data, 244), (without, 12 * 139 + 4), (packed, 244), (lazy, 488), (as_transform(data), 244)):
        if "seq_lengths" in each.column_names and overflow != "drop":
            continue
        loader = loader_of(each, budget)
        left = sum(int((batch["labels"] != -100).sum()) for batch in loader)
        assert left
        if (labels := loader.summary.labels) is None:
            assert not loader.summary.lost_tokens
        else:
            assert (labels.left, labels.documents) == (left, total)


@pytest.mark.parametrize("how", [{}, {"share_prefixes": True}, {"lazy": True}])
def test_pack(tmp_path, how):
    for data, left in ((prompts(masked=120, short=2), 100), (prompts(), 0)):
        if "lazy" in how:
            data.save_to_disk(tmp_path / str(left))
            data = datasets.load_from_disk(tmp_path / str(left))
        strategy = hfp.BestFit(128, overflow="truncate")
        if left:
            for _ in range(2):  # the second one is read from the cache
                with pytest.warns(UserWarning, match=f"drops 144 of .* tokens, as configured .*; {left} of 244 labels"):
                    packed = hfp.pack(data, strategy, **how)
            if not how:
                assert sum(label != -100 for row in packed["labels"] for label in row) == left
        else:
            with pytest.raises(hfp.PackingError, match="strategy: 0 of 240 labels are left"):
                hfp.pack(data, strategy, **how)


def test_map_and_streams():
    strategy, some = hfp.BestFit(128, overflow="truncate"), prompts(masked=120, short=2)
    with pytest.warns(UserWarning, match="drops 144 of 1,686 tokens of a batch, .*; 100 of 244 labels are left"):
        some.map(strategy, batched=True, batch_size=None, remove_columns=some.column_names)
    for streams in (None, 1):
        with pytest.warns(UserWarning, match="pack drops 144 of 1,686 tokens of a stream, .*; 144 labels are lost"):
            list(hfp.pack(some.to_iterable_dataset(), strategy, streams=streams))
        with pytest.raises(hfp.PackingError, match="0 of 240 labels are left"):
            list(hfp.pack(prompts().to_iterable_dataset(), strategy, streams=streams))


LIMIT = 20
BUDGET_OF_TOKENS = hfp.TokenBudget(64)
LENGTHS = [len(tokens) for tokens in labeled_documents(45)["input_ids"]]
CUT = sum(length >= LIMIT for length in LENGTHS)
REFUSED = r"max_length: expected SFTConfig\(max_length=None\), got 20\. .* and {} have exactly 20 tokens"


def short():
    return labeled_documents(45).select([row for row, length in enumerate(LENGTHS) if length < LIMIT])


def sft(folder, data, **changes):
    return trainer_of(folder, SFTTrainer, data=data, max_length=LIMIT, **changes)


LONG = {"input_ids": [[5] * 30] * 3 + [[6] * 9] * 5, "labels": [[-100] * 25 + [5] * 5] * 3 + [[6] * 9] * 5}
"""The prompts of three documents are as long as max_length, so that no label is left of them."""


@pytest.mark.parametrize(
    ("data", "cut"),
    [
        (lambda: labeled_documents(45), CUT),
        (lambda: hfp.pack(labeled_documents(45), hfp.BestFit(64)), 8),
        (lambda: datasets.Dataset.from_dict(LONG), 3),
    ],
)
def test_documents_that_sft_trainer_has_cut_or_dropped(tmp_path, data, cut):
    assert 0 < CUT < len(LENGTHS)
    trainer = sft(tmp_path, data())
    assert max(map(len, trainer.train_dataset["input_ids"])) <= LIMIT
    with pytest.raises(hfp.PackingError, match=REFUSED.format(f"{cut} of .* documents in train_dataset")):
        hfp.attach(trainer, BUDGET_OF_TOKENS)


def test_shorter_documents_and_a_max_length_that_sft_trainer_does_not_apply_are_taken(tmp_path):
    summary = hfp.attach(sft(tmp_path, short()), BUDGET_OF_TOKENS)
    assert (summary.tokens, summary.lost_tokens) == (sum(length for length in LENGTHS if length < LIMIT), 0)
    trainer = sft(tmp_path, labeled_documents(45), dataset_kwargs={"skip_prepare_dataset": True})
    assert hfp.attach(trainer, BUDGET_OF_TOKENS).tokens == sum(LENGTHS)


def test_evaluation_data_that_sft_trainer_has_cut(tmp_path):
    trainer = sft(tmp_path, short(), per_device_eval_batch_size=2)
    trainer.eval_dataset = {"long": sft(tmp_path, labeled_documents(45)).train_dataset}
    with pytest.raises(hfp.PackingError, match=REFUSED.format(rf"{CUT} of 45 documents in eval_dataset\['long'\]")):
        hfp.attach(trainer, BUDGET_OF_TOKENS)
    trainer.eval_dataset = None
    hfp.attach(trainer, BUDGET_OF_TOKENS)
    assert trainer.evaluate(short())["eval_loss"] > 0
    with pytest.raises(hfp.PackingError, match=REFUSED.format(f"{CUT} of 45 documents in eval_dataset")):
        trainer.evaluate(labeled_documents(45))


def test_predict_cuts_nothing(tmp_path):
    trainer = sft(tmp_path, short(), per_device_eval_batch_size=2)
    hfp.attach(trainer, BUDGET_OF_TOKENS)
    exact = datasets.Dataset.from_dict({"input_ids": [list(range(3, 3 + LIMIT))] * 4})
    assert trainer.predict(exact).predictions.shape[0] == 2


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_pairs_that_are_cut_or_dropped_are_counted(kind, tmp_path):
    whole, trainer = pairs(kind, tmp_path).train_dataset, pairs(kind, tmp_path, patched=True, max_length=14)
    summary = hfp.attach(trainer, hfp.TokenBudget(BUDGET[kind]))
    prompt = np.array([len(row.get("prompt_ids", ())) for row in whole])
    sides = np.array([[len(row[name]) for name in ("chosen_ids", "rejected_ids")] for row in whole]) + prompt[:, None]
    dropped = prompt >= 14 if kind == "dpo" else (sides > 14).any(1)
    assert 0 < dropped.sum() < len(whole)
    assert summary.left_out == dropped.sum()
    assert summary.documents == (~dropped).sum()
    assert summary.tokens + summary.lost_tokens == sides.sum()
    assert summary.lost_tokens > 0
    assert f"{summary.left_out} rows left out, {summary.lost_tokens:,} tokens lost" in str(summary)
