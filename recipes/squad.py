"""Train a model that finds answers in a text, without padding: Trainer with its own collator, and a token budget.

    python recipes/squad.py --data train.jsonl --eval_data dev.jsonl --model google-bert/bert-base-uncased
    torchrun --nproc-per-node 2 recipes/squad.py --data train.jsonl --epochs 2

Rows are those of SQuAD: `question`, `context`, and `answers` with lists of `text` and `answer_start`, which are empty
if the context has no answer. Without --data, the contexts are functions of the Python standard library, and the
questions ask which arguments they take, or what they return. Without --model, a small BERT is trained from scratch.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import datasets
from accelerate import PartialState
from answer_scores import exact_match_and_f1
from answer_windows import cut_into_windows
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer, read_documents, train_and_test
from function_data import questions
from models import load_with_head, small_bert
from process_group import end_process_group
from tokenizers.processors import TemplateProcessing
from trainer_flags import add_training, on_cpu, training_arguments
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

import hf_packing as hfp

COLUMNS = ("question", "context", "answers")
NOT_FOR_THE_MODEL = ["row", "offsets"]


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json or .parquet file with question, context and answers")
    parser.add_argument("--eval_data", help="rows to evaluate on; default: 10 percent of --data")
    parser.add_argument("--model", help="name or folder; default: a small BERT from scratch")
    parser.add_argument("--max_length", type=positive, default=384, help="longer contexts are cut into windows")
    parser.add_argument("--doc_stride", type=positive, default=128, help="tokens that two windows of a text share")
    parser.add_argument("--max_answer_tokens", type=positive, default=30, help="longest answer to predict")
    parser.add_argument("--max_tokens", type=positive, default=4096, help="tokens of a micro-batch on each process")
    parser.add_argument("--rows_per_step", type=positive, help="mean number of windows in an optimizer step")
    add_training(parser, "outputs/squad", learning_rate=2e-4)
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    with PartialState(cpu=on_cpu()).main_process_first():
        train, test = read(given)
        tokenizer = load_pair_tokenizer(given, train)
        cut = partial(cut_into_windows, tokenizer=tokenizer, max_length=given.max_length, doc_stride=given.doc_stride)
        windows, test_windows = cut(train, "--data"), cut(test, "--eval_data" if given.eval_data else "--data")
    small = small_bert(len(tokenizer), given.max_length, pad_token_id=tokenizer.pad_token_id)
    trainer = Trainer(
        load_with_head(AutoModelForQuestionAnswering, given.model, small),
        TrainingArguments(**training_arguments(given)),
        train_dataset=windows.remove_columns(NOT_FOR_THE_MODEL),
        eval_dataset=test_windows.remove_columns(NOT_FOR_THE_MODEL),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=partial(
            exact_match_and_f1, windows=test_windows, rows=test, max_answer_tokens=given.max_answer_tokens
        ),
    )
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_tokens), match_documents_per_step=given.rows_per_step)
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = trainer.evaluate()
    exact, f1 = metrics["eval_exact_match"], metrics["eval_f1"]
    trainer.accelerator.print(f"on {len(test):,} questions: exact match {exact:.1f}, F1 {f1:.1f} (of 100)")
    trainer.save_model()
    return metrics


def read(given: argparse.Namespace) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the rows to train on, and those to evaluate on."""

    def read_rows(path: str, flag: str) -> datasets.Dataset:
        rows = read_documents(path, flag)
        if missing := [name for name in COLUMNS if name not in rows.column_names]:
            raise SystemExit(f"{flag}: expected columns {', '.join(COLUMNS)}, got no {missing[0]}")
        return rows

    rows = questions(read_documents(None)) if given.data is None else read_rows(given.data, "--data")
    return train_and_test(rows, given.eval_data, read_rows)


def load_pair_tokenizer(given: argparse.Namespace, rows: datasets.Dataset) -> PreTrainedTokenizerBase:
    """Return the named tokenizer, or one trained on the contexts that begins and separates question and context."""
    name = given.tokenizer or given.model
    tokenizer = load_tokenizer(name, rows.select_columns("context").rename_column("context", "text"))
    if name is None:
        end = tokenizer.eos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{end} $A", pair=f"{end} $A {end} $B:1", special_tokens=[(end, tokenizer.eos_token_id)]
        )
    if not tokenizer.is_fast:
        raise SystemExit(f"--tokenizer: expected a fast tokenizer, which knows the places of tokens, got {name!r}")
    tokenizer.padding_side = "right"  # or the places of the answers would be those of other tokens
    return tokenizer


if __name__ == "__main__":
    main()
    end_process_group()
