"""Train a classifier of texts without padding: Trainer with its own collator, loss and metrics, and a token budget.

    python recipes/classify.py --data train.jsonl --eval_data test.jsonl --model google-bert/bert-base-uncased
    torchrun --nproc-per-node 2 recipes/classify.py --data train.jsonl --epochs 3

Rows have a `text` and a `label`, and may have a second text in `text_pair`. Without --data, the texts are the functions
of the Python standard library, and the labels say whether a function is a method. Without --model, a small BERT is
trained from scratch.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from accelerate import PartialState
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer, read_documents, train_and_test
from models import load_with_head, small_bert
from process_group import end_process_group
from trainer_flags import add_training, on_cpu, training_arguments
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

import hf_packing as hfp


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json, .parquet or .csv file with text and label")
    parser.add_argument("--eval_data", help="rows to evaluate on; default: 10 percent of --data")
    parser.add_argument("--model", help="name or folder; default: a small BERT from scratch")
    parser.add_argument("--max_length", type=positive, default=512, help="longer texts are truncated, and counted")
    parser.add_argument("--max_tokens", type=positive, default=4096, help="tokens of a micro-batch on each process")
    parser.add_argument("--rows_per_step", type=positive, help="mean number of rows in an optimizer step")
    add_training(parser, "outputs/classify", 1e-4)
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    with PartialState(cpu=on_cpu()).main_process_first():
        train, test = read(given)
        tokenizer = load_tokenizer(given.tokenizer or given.model, train)
        names = sorted(set(train["label"]), key=str)
        train, test = (tokenize(rows, tokenizer, names, given.max_length) for rows in (train, test))
    small = small_bert(len(tokenizer), given.max_length, num_labels=len(names))
    trainer = Trainer(
        load_with_head(AutoModelForSequenceClassification, given.model, small, num_labels=len(names)),
        TrainingArguments(**training_arguments(given)),
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_tokens), match_documents_per_step=given.rows_per_step)
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = trainer.evaluate()
    trainer.accelerator.print(f"accuracy on {len(test):,} rows: {metrics['eval_accuracy']:.3f}")
    trainer.save_model()
    return metrics


def read(given: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the rows to train on, and those to evaluate on."""
    rows = read_documents(given.data)
    if given.data is None:
        rows = rows.map(lambda row: {"label": int("(self" in row["text"].split("\n", 1)[0])}, desc="Labeling")
    parts = train_and_test(rows, given.eval_data)
    for flag, part in zip(("--data", "--eval_data"), parts, strict=True):
        if not {"text", "label"} <= set(part.column_names):
            raise SystemExit(f"{flag}: expected columns text and label, got {', '.join(part.column_names)}")
    return parts


def tokenize(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, names: list[Any], max_length: int
) -> datasets.Dataset:
    """Return the tokens of the texts, or pairs of texts, with the numbers of their labels."""
    if unknown := set(rows["label"]) - set(names):
        raise SystemExit(f"--eval_data: expected labels of --data, got {min(map(repr, unknown))} too")

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        given = {"truncation": True, "max_length": max_length}
        encoded = tokenizer(batch["text"], batch.get("text_pair"), **given)
        return {**encoded, "labels": [names.index(label) for label in batch["label"]]}

    tokens = rows.map(encode, batched=True, remove_columns=rows.column_names, desc="Tokenizing")
    at_limit = sum(len(each) >= max_length for each in tokens["input_ids"])
    if at_limit:
        PartialState().print(f"{at_limit:,} of {len(tokens):,} texts have {max_length} tokens or were truncated to it")
    return tokens


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}


if __name__ == "__main__":
    main()
    end_process_group()
