"""Train a classifier of texts without padding: Trainer with its own collator, loss and metrics, and a token budget.

    python recipes/classify.py --data train.jsonl --eval_data test.jsonl --model google-bert/bert-base-uncased
    torchrun --nproc-per-node 2 recipes/classify.py --data train.jsonl --num_train_epochs 3

Rows have a `text` and a `label`, and may have a second text in `text_pair`. Without --data, the texts are the functions
of the Python standard library, and the labels say whether a function is a method. Without --model, a small BERT is
trained from scratch. The flags are those below, and those of TrainingArguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import datasets
import numpy as np
from transformers import AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of the rows; see above")
    eval_data: str | None = common.flag(None, "rows to evaluate on, or else a tenth of --data")
    model: str | None = common.flag(None, "name or folder, or else a small BERT from scratch")
    max_length: int = common.flag(512, "longer texts are truncated, and counted")
    max_tokens: int = common.flag(4096, "tokens of a micro-batch on each process")
    match_documents_per_step: int | None = common.flag(None, "mean number of rows per step")


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((Arguments, TrainingArguments), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/classify", learning_rate=1e-4, logging_steps=10, **common.on_cpu())
    given, args = parser.parse_args_into_dataclasses(flags)
    checkpoint = common.checkpoint_of(args)
    with args.main_process_first():
        train, test = common.train_and_test(given.data, given.eval_data, ("text", "label"), methods)
        names = sorted(set(train["label"]), key=str)
        if unknown := set(test["label"]) - set(names):
            raise ValueError(f"--eval_data: expected labels of --data, got {min(map(repr, unknown))} too")
        tokenizer = common.load_tokenizer(given.model, train["text"], masked=True)

        def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
            tokens = tokenizer(batch["text"], batch.get("text_pair"), truncation=True, max_length=given.max_length)
            return {**tokens, "labels": [names.index(label) for label in batch["label"]]}

        train, test = (
            rows.map(encode, batched=True, remove_columns=rows.column_names, desc="Tokenizing")
            for rows in (train, test)
        )
    labels = {"id2label": dict(enumerate(map(str, names))), "label2id": {str(name): n for n, name in enumerate(names)}}
    small = common.small_bert(len(tokenizer), given.max_length, **common.token_ids(tokenizer), **labels)
    trainer = Trainer(
        common.load_model(AutoModelForSequenceClassification, given.model, small, **labels),
        args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,  # also makes the collator, which pads
        compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
    )
    say = trainer.accelerator.print
    at_limit = sum(len(each) >= given.max_length for each in [*train["input_ids"], *test["input_ids"]])
    say(f"{at_limit:,} of {len(train) + len(test):,} texts have {given.max_length} tokens or were truncated to it")
    budget = hfp.TokenBudget(given.max_tokens, match_documents_per_step=given.match_documents_per_step)
    say(hfp.attach(trainer, budget))
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = trainer.evaluate()
    say(f"accuracy on {len(test):,} rows: {metrics['eval_accuracy']:.3f}")
    trainer.save_model()
    return metrics


def methods() -> datasets.Dataset:
    """Return the functions of the standard library, labeled by whether they are methods."""
    functions = common.functions()
    kinds = ["method" if "(self" in text.split("\n", 1)[0] else "function" for text in functions["text"]]
    return functions.add_column("label", kinds)


if __name__ == "__main__":
    common.run(main)
