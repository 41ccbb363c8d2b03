"""Train a masked language model without padding: Trainer with the stock collator that masks, and a token budget.

    python recipes/mlm.py --data text.jsonl --model answerdotai/ModernBERT-base --whole_words
    torchrun --nproc-per-node 2 recipes/mlm.py --data text.jsonl

Rows have a `text`; texts longer than --max_length are split. Without --data, the texts are the functions of the Python
standard library. Without --model, a small BERT is trained from scratch. The flags are those below, and those of
TrainingArguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import datasets
from accelerate import PartialState
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of the texts; see above")
    eval_data: str | None = common.flag(None, "texts to evaluate on, or else a tenth of --data")
    model: str | None = common.flag(None, "name or folder, or else a small BERT from scratch")
    max_length: int = common.flag(512, "longer texts are split, and counted")
    max_tokens: int = common.flag(4096, "tokens of a micro-batch on each process")
    match_documents_per_step: int | None = common.flag(None, "mean number of documents per step")
    mlm_probability: float = common.flag(0.3, "share of the tokens that are masked")
    whole_words: bool = common.flag(False, "mask whole words, as separated by spaces")


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((Arguments, TrainingArguments), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/mlm", learning_rate=5e-4, logging_steps=10, **common.on_cpu())
    given, args = parser.parse_args_into_dataclasses(flags)
    checkpoint = common.checkpoint_of(args)
    with args.main_process_first():
        train, test = common.train_and_test(given.data, given.eval_data, ("text",), common.functions)
        tokenizer = common.load_tokenizer(given.model, train["text"], masked=True)
        if tokenizer.mask_token is None:
            raise ValueError(f"--model: expected one whose tokenizer has a mask token, as BERT's, got {given.model!r}")
        train, test = (tokenize(texts, tokenizer, given.max_length, given.whole_words) for texts in (train, test))
    how = {"whole_word_mask": True, "mask_replace_prob": 1, "random_replace_prob": 0} if given.whole_words else {}
    small = common.small_bert(len(tokenizer), given.max_length, **common.token_ids(tokenizer))
    trainer = Trainer(
        common.load_model(AutoModelForMaskedLM, given.model, small),
        args,
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=given.mlm_probability, **how),
        processing_class=tokenizer,
    )
    budget = hfp.TokenBudget(given.max_tokens, match_documents_per_step=given.match_documents_per_step)
    trainer.accelerator.print(hfp.attach(trainer, budget))
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = trainer.evaluate()
    trainer.accelerator.print(f"loss on {len(test):,} documents: {metrics['eval_loss']:.4f}")
    trainer.save_model()
    return metrics


def tokenize(texts: datasets.Dataset, tokenizer: Any, max_length: int, whole_words: bool) -> datasets.Dataset:
    """Return documents of at most `max_length` tokens, with what the collator needs to know about them."""
    common.refuse_lost_pieces()

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(
            batch["text"],
            truncation=True,
            max_length=max_length,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=whole_words,
        )
        text_of = encoded.pop("overflow_to_sample_mapping")
        if (
            whole_words
        ):  # the collator ends a word at a gap; some tokenizers count the space before a word as part of it
            encoded["offset_mapping"] = [
                [(end - len(batch["text"][number][begin:end].lstrip()), end) for begin, end in places]
                for number, places in zip(text_of, encoded["offset_mapping"], strict=True)
            ]
        return dict(encoded)

    documents = texts.map(encode, batched=True, remove_columns=texts.column_names, desc="Tokenizing")
    PartialState().print(f"{len(texts):,} texts are {len(documents):,} documents of at most {max_length} tokens")
    return documents


if __name__ == "__main__":
    common.run(main)
