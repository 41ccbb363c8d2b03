"""Train a model that finds answers in a text, without padding: Trainer with its own batches.

    python recipes/squad.py --data train.jsonl --eval_data dev.jsonl --model google-bert/bert-base-uncased
    torchrun --nproc-per-node 2 recipes/squad.py --data train.jsonl --num_train_epochs 2

Rows are those of SQuAD: `question`, `context`, and `answers` with lists of `text` and `answer_start`, which are empty
if the context has no answer. Without --data, the contexts are functions of the Python standard library, and the
questions ask which arguments they take, or what they return. Without --model, a small BERT is trained from scratch.
The flags are those below, and those of TrainingArguments.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import datasets
import numpy as np
from accelerate import PartialState
from transformers import AutoModelForQuestionAnswering, HfArgumentParser, Trainer, TrainingArguments

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of the rows; see above")
    eval_data: str | None = common.flag(None, "rows to evaluate on, or else a tenth of --data")
    model: str | None = common.flag(None, "name or folder, or else a small BERT from scratch")
    max_length: int = common.flag(384, "longer contexts are cut into windows")
    doc_stride: int = common.flag(128, "tokens that two windows of a context share")
    max_answer_tokens: int = common.flag(30, "longest answer to predict")


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((Arguments, TrainingArguments), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/squad", learning_rate=2e-4, logging_steps=10, **common.on_cpu())
    given, args = parser.parse_args_into_dataclasses(flags)
    checkpoint = common.checkpoint_of(args)
    columns = ("question", "context", "answers")
    with args.main_process_first():
        train, test = common.train_and_test(given.data, given.eval_data, columns, common.questions)
        tokenizer = common.load_tokenizer(given.model, train["context"], masked=True)
        tokenizer.padding_side = "right"  # or the places of the answers would be those of other tokens
        windows, test_windows = (cut(part, tokenizer, given.max_length, given.doc_stride) for part in (train, test))
    small = common.small_bert(len(tokenizer), given.max_length, **common.token_ids(tokenizer))
    trainer = Trainer(
        common.load_model(AutoModelForQuestionAnswering, given.model, small),
        args,
        train_dataset=windows.remove_columns(["row", "offsets"]),
        eval_dataset=test_windows.remove_columns(["row", "offsets"]),
        processing_class=tokenizer,  # also makes the collator, which pads
        compute_metrics=partial(scores, windows=test_windows, rows=test, longest=given.max_answer_tokens),
    )
    trainer.accelerator.print(hfp.attach(trainer, None))
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = trainer.evaluate()
    exact, f1 = metrics["eval_exact_match"], metrics["eval_f1"]
    trainer.accelerator.print(f"on {len(test):,} questions: exact match {exact:.1f}, F1 {f1:.1f} (of 100)")
    trainer.save_model()
    return metrics


def cut(rows: datasets.Dataset, tokenizer: Any, length: int, stride: int) -> datasets.Dataset:
    """Return windows of question and context, with the number of their row and the characters of each token.

    A window that does not have the answer points to its first token. Tokens outside the context have the characters -1.
    """
    common.refuse_lost_pieces()

    def encode(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        questions = [question.lstrip() for question in batch["question"]]  # SQuAD has some after a thousand spaces
        for question, ids in zip(questions, tokenizer(questions, [""] * len(questions))["input_ids"], strict=True):
            if len(ids) + stride >= length:
                needed = f"more than the {len(ids)} of {question[:60]!r} and the {stride} of --doc_stride"
                raise ValueError(f"--max_length: expected {needed}, got {length}")
        how = {"truncation": "only_second", "max_length": length, "stride": stride}
        both = {"return_overflowing_tokens": True, "return_offsets_mapping": True}
        encoded = tokenizer(questions, batch["context"], **how, **both)
        row_of = encoded.pop("overflow_to_sample_mapping")
        answers = [characters_of(*row) for row in zip(questions, batch["context"], batch["answers"], strict=True)]
        tokens = [[encoded.char_to_token(window, at, 1) for at in answers[row]] for window, row in enumerate(row_of)]
        places = [pair if pair and None not in pair else [0, 0] for pair in tokens]
        encoded["start_positions"], encoded["end_positions"] = map(list, zip(*places, strict=True))
        encoded["row"] = [numbers[row] for row in row_of]
        encoded["offsets"] = [
            [place if part == 1 else (-1, -1) for place, part in zip(each, encoded.sequence_ids(window), strict=True)]
            for window, each in enumerate(encoded.pop("offset_mapping"))
        ]
        return dict(encoded)

    windows = rows.map(encode, batched=True, with_indices=True, remove_columns=rows.column_names, desc="Cutting")
    answered = sum(bool(each["text"]) for each in rows["answers"])
    found = [row for row, start in zip(windows["row"], windows["start_positions"], strict=True) if start]
    PartialState().print(
        f"{len(rows):,} questions, {answered:,} answered, in {len(windows):,} windows of at most {length} tokens; "
        f"{len(windows) - len(found):,} windows have no answer, {answered - len(set(found)):,} answers are in no window"
    )
    return windows


def characters_of(question: str, context: str, answers: dict[str, list[Any]]) -> tuple[int, ...]:
    """Return the first and the last character of a question's first answer, or nothing if it has none."""
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        found = context[start : start + len(text)]
        if found != text or not text:
            raise ValueError(f"--data: expected answer {text!r} to {question!r} at character {start}, got {found!r}")
        return start, start + len(text) - 1
    return ()


def scores(predicted: Any, windows: datasets.Dataset, rows: datasets.Dataset, longest: int) -> dict[str, float]:
    """Return the mean exact match and F1, of 100, of the best span in the windows of each row.

    If a row has no answer, no answer is one of the predictions: that of the first tokens, in the window where they are
    least probable.
    """
    best = [(-np.inf, "")] * len(rows)
    nothing = np.full(len(rows), np.inf)
    for window, starts, ends in zip(windows, *predicted.predictions, strict=True):
        row, places = window["row"], np.array(window["offsets"])
        nothing[row] = min(nothing[row], starts[0] + ends[0])
        inside = np.flatnonzero(places[:, 0] >= 0)
        possible = np.triu(np.tri(len(inside), k=longest - 1, dtype=bool))
        spans = np.where(possible, starts[inside, None] + ends[inside], -np.inf)
        if spans.max(initial=-np.inf) > best[row][0]:
            first, last = inside[list(np.unravel_index(spans.argmax(), spans.shape))]
            best[row] = (spans.max(), rows[row]["context"][places[first, 0] : places[last, 1]])
    right = rows["answers"][:]
    if not all(each["text"] for each in right):
        best = [(logit, "" if none >= logit else text) for (logit, text), none in zip(best, nothing, strict=True)]
    exact, f1 = np.mean([compare(text, each["text"]) for (_, text), each in zip(best, right, strict=True)], axis=0)
    return {"exact_match": float(exact) * 100, "f1": float(f1) * 100}


def compare(text: str, answers: list[str]) -> tuple[float, float]:
    """Return whether a text is one of the right answers, and the highest F1 of its words with one of them."""
    words, right = words_of(text), [words_of(answer) for answer in answers] or [[]]
    shared = [(Counter(words) & Counter(each)).total() for each in right]
    f1 = [2 * n / (len(words) + len(each)) if words or each else 1 for n, each in zip(shared, right, strict=True)]
    return float(words in right), max(f1)


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


if __name__ == "__main__":
    common.run(main)
