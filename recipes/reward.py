"""Train a reward model with RewardTrainer, without padding: a token budget forms batches of whole pairs.

    python recipes/reward.py --data pairs.jsonl --eval_data test.jsonl --model Qwen/Qwen3-0.6B --max_tokens 16384
    torchrun --nproc-per-node 2 recipes/reward.py --data pairs.jsonl --model Qwen/Qwen3-0.6B

Rows have a `chosen` and a `rejected` text, and may have a `prompt` before both, as RewardTrainer takes them; also as
messages, with a --tokenizer that has a chat template. Without --data, the prompts are the first lines of the functions
of the Python standard library; the chosen answer is the rest of the function, and the rejected one the rest of another.
Without --model, a small Llama from scratch is trained.
"""

import argparse
from collections.abc import Sequence

import datasets
import numpy as np
from accelerate import PartialState
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer_for, train_and_test
from models import load_with_head, small_llama
from pairs import read_pairs
from process_group import end_process_group
from torch import Tensor
from trainer_flags import add_training, on_cpu, training_arguments
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

import hf_packing as hfp


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json or .parquet file with chosen, rejected and maybe prompt")
    parser.add_argument("--eval_data", help="pairs to evaluate on; default: 10 percent of --data")
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--max_length", type=positive, default=1024, help="longer pairs are left out, and counted")
    parser.add_argument("--max_tokens", type=positive, default=8192, help="tokens of a micro-batch on each process")
    parser.add_argument("--pairs_per_step", type=positive, help="mean number of pairs in an optimizer step")
    parser.add_argument("--center_rewards_coefficient", type=float, help="weight of a loss that centers the rewards")
    add_training(parser, "outputs/reward", 1e-4)
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    with PartialState(cpu=on_cpu()).main_process_first():
        train, test = train_and_test(read(given.data), given.eval_data, read)
        texts = [name for name in ("prompt", "chosen") if name in train.column_names]
        tokenizer = load_tokenizer_for(given.tokenizer or given.model, train, texts)
    small = small_llama(len(tokenizer), num_labels=1)
    trainer = RewardTrainer(
        load_with_head(AutoModelForSequenceClassification, given.model, small, num_labels=1),
        args=RewardConfig(
            max_length=given.max_length,
            center_rewards_coefficient=given.center_rewards_coefficient,
            bf16=not on_cpu(),
            **training_arguments(given),
        ),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        preprocess_logits_for_metrics=differences,
    )
    kept = {"training": (len(trainer.train_dataset), len(train)), "evaluation": (len(trainer.eval_dataset), len(test))}
    for name, (short, pairs) in kept.items():
        if short < pairs:
            trainer.accelerator.print(
                f"{pairs - short:,} of {pairs:,} pairs for {name} have more than {given.max_length} tokens: left out"
            )
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_tokens), match_documents_per_step=given.pairs_per_step)
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    found = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")
    accuracy = float(np.mean(found.predictions > 0))
    trainer.accelerator.print(f"accuracy on {len(found.predictions):,} pairs: {accuracy:.3f}")
    trainer.save_model()
    return {**found.metrics, "eval_accuracy": accuracy}


def read(data: str | None, flag: str = "--data") -> datasets.Dataset:
    return read_pairs(data, ("chosen", "rejected"), ("prompt", "margin"), flag)


def differences(logits: Tensor, _: Tensor | None) -> Tensor:
    """Return how much larger the reward of the chosen answer is, for each pair of a batch."""
    chosen, rejected = logits.squeeze(-1).chunk(2)
    return chosen - rejected


if __name__ == "__main__":
    main()
    end_process_group()
