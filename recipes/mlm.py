"""Train a masked language model without padding: Trainer with the stock collator that masks, and a token budget.

    python recipes/mlm.py --data text.jsonl --model answerdotai/ModernBERT-base --whole_words
    torchrun --nproc-per-node 2 recipes/mlm.py --data text.jsonl

Rows have a `text`. Without --data, the texts are the functions of the Python standard library. Without --model, a small
BERT is trained from scratch. Texts longer than --max_length are split.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import datasets
from accelerate import PartialState
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer, read_documents, train_and_test, train_masked_tokenizer
from models import load_with_head, small_bert
from process_group import end_process_group
from trainer_flags import add_training, on_cpu, training_arguments
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

import hf_packing as hfp


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json, .parquet, .csv or .txt file with text")
    parser.add_argument("--eval_data", help="texts to evaluate on; default: 10 percent of --data")
    parser.add_argument("--model", help="name or folder; default: a small BERT from scratch")
    parser.add_argument("--max_length", type=positive, default=512, help="longer texts are split, and counted")
    parser.add_argument("--max_tokens", type=positive, default=4096, help="tokens of a micro-batch on each process")
    parser.add_argument("--documents_per_step", type=positive, help="mean number of documents in an optimizer step")
    parser.add_argument("--mlm_probability", type=float, default=0.3, help="share of the tokens that are masked")
    parser.add_argument("--whole_words", action="store_true", help="mask whole words, as separated by spaces")
    add_training(parser, "outputs/mlm", 5e-4)
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    with PartialState(cpu=on_cpu()).main_process_first():
        train, test = train_and_test(read(given.data), given.eval_data, read)
        name = given.tokenizer or given.model
        tokenizer = load_tokenizer(name, train) if name else train_masked_tokenizer(train)
        collator = masking(tokenizer, given.mlm_probability, given.whole_words)
        train, test = (tokenize(texts, tokenizer, given.max_length, given.whole_words) for texts in (train, test))
    trainer = Trainer(
        load_with_head(AutoModelForMaskedLM, given.model, small_bert(len(tokenizer), given.max_length)),
        TrainingArguments(**training_arguments(given)),
        train_dataset=train,
        eval_dataset=test,
        data_collator=collator,
        processing_class=tokenizer,
    )
    documents = given.documents_per_step
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_tokens), match_documents_per_step=documents)
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = trainer.evaluate()
    trainer.accelerator.print(f"loss on {len(test):,} documents: {metrics['eval_loss']:.4f}")
    trainer.save_model()
    return metrics


def read(data: str | None, flag: str = "--data") -> datasets.Dataset:
    rows = read_documents(data, flag)
    if "text" not in rows.column_names:
        raise SystemExit(f"{flag}: expected a column text, got {', '.join(rows.column_names)}")
    return rows.select_columns("text")


def masking(
    tokenizer: PreTrainedTokenizerBase, probability: float, whole_words: bool
) -> DataCollatorForLanguageModeling:
    if tokenizer.mask_token is None:
        raise SystemExit("--tokenizer: expected one with a mask token, as of BERT, got one without")
    if not 0 < probability < 1:
        raise SystemExit(f"--mlm_probability: expected a number between 0 and 1, got {probability}")
    always = {"mask_replace_prob": 1, "random_replace_prob": 0} if whole_words else {}
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=probability, whole_word_mask=whole_words, **always
    )


def tokenize(
    texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, whole_words: bool
) -> datasets.Dataset:
    """Return documents of at most `max_length` tokens, with what the collator needs to know about them."""

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(
            batch["text"],
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=whole_words,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        text_of = encoded.pop("overflow_to_sample_mapping")
        if whole_words:
            encoded["offset_mapping"] = [
                without_spaces(batch["text"][number], places)
                for number, places in zip(text_of, encoded["offset_mapping"], strict=True)
            ]
        return dict(encoded)

    documents = texts.map(encode, batched=True, remove_columns="text", desc="Tokenizing")
    if len(documents) > len(texts):
        PartialState().print(
            f"texts longer than {max_length} tokens were split: {len(texts):,} texts are {len(documents):,} documents"
        )
    return documents


def without_spaces(text: str, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the places of tokens without the spaces before them, which some tokenizers count as part of a token.

    The collator takes tokens without a gap between them for one word.
    """
    return [(end - len(text[begin:end].lstrip()), end) for begin, end in places]


if __name__ == "__main__":
    main()
    end_process_group()
