"""Train on preferences with DPOTrainer, without padding: a token budget forms batches of whole pairs.

    python recipes/dpo.py --data pairs.jsonl --model Qwen/Qwen3-0.6B --max_tokens 16384
    torchrun --nproc-per-node 2 recipes/dpo.py --data pairs.jsonl --model Qwen/Qwen3-0.6B

Rows have a `prompt`, a `chosen` and a `rejected` answer, as DPOTrainer takes them. Without --data, the prompts are the
first lines of the functions of the Python standard library; the chosen answer is the rest of the function, and the
rejected one the rest of another. Without --model, a small Llama from scratch is trained.
"""

import argparse
from collections.abc import Sequence

import datasets
import torch
from accelerate import PartialState
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer, read_documents
from models import load_model
from trl import DPOConfig, DPOTrainer

import hf_packing as hfp

COLUMNS = ("prompt", "chosen", "rejected")


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json or .parquet file with prompt, chosen and rejected")
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--tokenizer", help="name or folder; default: that of --model, or one trained on the texts")
    parser.add_argument("--max_length", type=positive, default=1024, help="longer answers are truncated by DPOTrainer")
    parser.add_argument("--max_tokens", type=positive, default=8192, help="tokens of a micro-batch on each process")
    parser.add_argument("--pairs_per_step", type=positive, help="mean number of pairs in an optimizer step")
    parser.add_argument("--loss_type", default="sigmoid", help="a loss of DPOTrainer that is a mean over pairs")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--gradient_accumulation_steps", type=positive, default=1)
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--max_steps", type=positive, help="optimizer steps, instead of --epochs")
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--save_steps", type=positive, default=500, help="optimizer steps between checkpoints")
    parser.add_argument("--output_dir", default="outputs/dpo")
    parser.add_argument("--resume_from_checkpoint", action="store_true", help="resume from the last one")
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> DPOTrainer:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    on_cpu = not torch.accelerator.is_available()
    with PartialState(cpu=on_cpu).main_process_first():
        texts, pairs = read(given.data)
        tokenizer = load_tokenizer(given.tokenizer or given.model, texts)
    trainer = DPOTrainer(
        load_model(given.model, len(tokenizer)),
        ref_model=load_model(given.model, len(tokenizer)),
        args=DPOConfig(
            given.output_dir,
            max_length=given.max_length,
            loss_type=[given.loss_type],
            beta=given.beta,
            num_train_epochs=given.epochs,
            max_steps=given.max_steps or -1,
            learning_rate=given.learning_rate,
            gradient_accumulation_steps=given.gradient_accumulation_steps,
            use_cpu=on_cpu,
            bf16=not on_cpu,
            save_steps=given.save_steps,
            report_to="none",
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_tokens), match_documents_per_step=given.pairs_per_step)
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    return trainer


def read(data: str | None) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return texts to train a tokenizer on, if none is given, and the pairs."""
    rows = read_documents(data)
    if data is None:
        halves = [text.split("\n", 1) for text in rows["text"] if "\n" in text.strip()]
        answers = [answer for _, answer in halves]
        others = answers[1:] + answers[:1]
        return rows, datasets.Dataset.from_dict(
            {"prompt": [line + "\n" for line, _ in halves], "chosen": answers, "rejected": others}
        )
    if missing := [name for name in COLUMNS if name not in rows.column_names]:
        raise SystemExit(f"--data: expected columns {', '.join(COLUMNS)}, got no {missing[0]}")
    texts = [row["prompt"] + row["chosen"] for row in rows] if isinstance(rows[0]["prompt"], str) else []
    return datasets.Dataset.from_dict({"text": texts}), rows.select_columns(list(COLUMNS))


if __name__ == "__main__":
    main()
