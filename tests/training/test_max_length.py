"""What the trainers of TRL cut or drop because of max_length is refused by attach, or counted."""

import datasets
import numpy as np
import pytest
from trainers import trainer_of
from training_process import documents
from trl import SFTTrainer
from whole_rows_process import BUDGET
from whole_rows_process import trainer_of as pairs

import hf_packing as hfp

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

LIMIT = 20
BUDGET_OF_TOKENS = hfp.TokenBudget(64)
LENGTHS = [len(tokens) for tokens in documents(45)["input_ids"]]
CUT = sum(length >= LIMIT for length in LENGTHS)
REFUSED = r"max_length: expected SFTConfig\(max_length=None\), got 20\. .* and {} have exactly 20 tokens"


def short():
    return documents(45).select([row for row, length in enumerate(LENGTHS) if length < LIMIT])


def sft(folder, data, **changes):
    return trainer_of(folder, SFTTrainer, data=data, max_length=LIMIT, **changes)


def test_documents_that_sft_trainer_has_cut(tmp_path):
    assert 0 < CUT < len(LENGTHS)
    trainer = sft(tmp_path, documents(45))
    assert sum(map(len, trainer.train_dataset["input_ids"])) < sum(LENGTHS)
    with pytest.raises(hfp.PackingError, match=REFUSED.format(f"{CUT} of 45 documents in train_dataset")):
        hfp.attach(trainer, BUDGET_OF_TOKENS)


def test_documents_that_sft_trainer_has_dropped(tmp_path):
    """Their prompts are as long as max_length, so that no label is left of them."""
    long = {"input_ids": [[5] * 30] * 3 + [[6] * 9] * 5, "labels": [[-100] * 25 + [5] * 5] * 3 + [[6] * 9] * 5}
    trainer = sft(tmp_path, datasets.Dataset.from_dict(long))
    assert set(map(len, trainer.train_dataset["input_ids"])) == {9}
    with pytest.raises(hfp.PackingError, match=REFUSED.format("3 of 8 documents in train_dataset")):
        hfp.attach(trainer, BUDGET_OF_TOKENS)


def test_packed_rows_that_sft_trainer_has_cut(tmp_path):
    packed = hfp.pack(documents(45), hfp.BestFit(64))
    with pytest.raises(hfp.PackingError, match=REFUSED.format(f"{len(packed)} of {len(packed)} documents in .*")):
        hfp.attach(sft(tmp_path, packed), BUDGET_OF_TOKENS)


def test_documents_below_max_length_are_taken(tmp_path):
    summary = hfp.attach(sft(tmp_path, short()), BUDGET_OF_TOKENS)
    assert summary.tokens == sum(length for length in LENGTHS if length < LIMIT)
    assert summary.lost_tokens == 0


def test_max_length_that_sft_trainer_does_not_apply(tmp_path):
    trainer = sft(tmp_path, documents(45), dataset_kwargs={"skip_prepare_dataset": True})
    assert hfp.attach(trainer, BUDGET_OF_TOKENS).tokens == sum(LENGTHS)


def test_evaluation_data_that_sft_trainer_has_cut(tmp_path):
    trainer = sft(tmp_path, short(), per_device_eval_batch_size=2)
    trainer.eval_dataset = {"long": sft(tmp_path, documents(45)).train_dataset}
    with pytest.raises(hfp.PackingError, match=REFUSED.format(rf"{CUT} of 45 documents in eval_dataset\['long'\]")):
        hfp.attach(trainer, BUDGET_OF_TOKENS)
    trainer.eval_dataset = None
    hfp.attach(trainer, BUDGET_OF_TOKENS)
    assert trainer.evaluate(short())["eval_loss"] > 0
    with pytest.raises(hfp.PackingError, match=REFUSED.format(f"{CUT} of 45 documents in eval_dataset")):
        trainer.evaluate(documents(45))


def test_predict_cuts_nothing(tmp_path):
    trainer = sft(tmp_path, short(), per_device_eval_batch_size=2)
    hfp.attach(trainer, BUDGET_OF_TOKENS)
    exact = datasets.Dataset.from_dict({"input_ids": [list(range(3, 3 + LIMIT))] * 4})
    assert trainer.predict(exact).predictions.shape[0] == 2


def test_streams_that_sft_trainer_cuts(tmp_path):
    stream = short().to_iterable_dataset(num_shards=4)
    message = r"got 20\. .* and train_dataset is a stream\. To cut documents, pass overflow='truncate'"
    with pytest.raises(hfp.PackingError, match=message):
        hfp.attach(sft(tmp_path, stream), BUDGET_OF_TOKENS)
    trainer = trainer_of(tmp_path, SFTTrainer, data=stream)
    assert str(hfp.attach(trainer, BUDGET_OF_TOKENS)).startswith("stream: 4 logical streams")


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_pairs_that_are_cut_or_dropped_are_counted(kind, tmp_path):
    whole, trainer = pairs(kind, tmp_path).train_dataset, pairs(kind, tmp_path, max_length=14)
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


def test_pairs_whose_loss_cannot_be_counted_are_refused(tmp_path):
    trainer = pairs("dpo", tmp_path, max_length=14)
    trainer.args.precompute_ref_log_probs = True
    with pytest.raises(hfp.PackingError, match="max_length: expected None with precompute_ref_log_probs, got 14"):
        hfp.attach(trainer, hfp.TokenBudget(BUDGET["dpo"]))
