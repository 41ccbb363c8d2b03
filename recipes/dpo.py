"""Train on preferences with DPOTrainer, without padding: a token budget forms batches of whole pairs.

    python recipes/dpo.py --data pairs.jsonl --model Qwen/Qwen3-0.6B --max_tokens 16384
    torchrun --nproc-per-node 2 recipes/dpo.py --data pairs.jsonl --model Qwen/Qwen3-0.6B

Rows have a `prompt`, a `chosen` and a `rejected` answer, as DPOTrainer takes them. Without --data, the prompts are the
first lines of the functions of the Python standard library; the chosen answer is the rest of the function, and the
rejected one the rest of another. Without --model, a small Llama from scratch is trained.
"""

import argparse
from collections.abc import Sequence

from accelerate import PartialState
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer_for
from models import load_model
from pairs import read_pairs
from process_group import end_process_group
from trainer_flags import add_training, on_cpu, training_arguments
from trl import DPOConfig, DPOTrainer

import hf_packing as hfp

COLUMNS = ("prompt", "chosen", "rejected")


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json or .parquet file with prompt, chosen and rejected")
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--max_length", type=positive, default=1024, help="longer answers are truncated by DPOTrainer")
    parser.add_argument("--max_tokens", type=positive, default=8192, help="tokens of a micro-batch on each process")
    parser.add_argument("--pairs_per_step", type=positive, help="mean number of pairs in an optimizer step")
    parser.add_argument("--loss_type", default="sigmoid", help="a loss of DPOTrainer that is a mean over pairs")
    parser.add_argument("--beta", type=float, default=0.1)
    add_training(parser, "outputs/dpo", 1e-6)
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> DPOTrainer:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    with PartialState(cpu=on_cpu()).main_process_first():
        pairs = read_pairs(given.data, COLUMNS)
        tokenizer = load_tokenizer_for(given.tokenizer or given.model, pairs, COLUMNS[:2])
    trainer = DPOTrainer(
        load_model(given.model, len(tokenizer)),
        ref_model=load_model(given.model, len(tokenizer)),
        args=DPOConfig(
            max_length=given.max_length,
            loss_type=[given.loss_type],
            beta=given.beta,
            bf16=not on_cpu(),
            **training_arguments(given),
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_tokens), match_documents_per_step=given.pairs_per_step)
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
    end_process_group()
