"""A training loop of your own: token budget, exact loss, evaluation, and checkpoints to resume from.

    torchrun --nproc-per-node 2 recipes/accelerate_loop.py --accumulation 2
    torchrun --nproc-per-node 2 recipes/accelerate_loop.py --accumulation 2 --resume-from-checkpoint

Without --data the documents are the functions of the Python standard library, and the model is a small Llama from
scratch. Documents are packed during training, anew in every epoch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from checkpoints import Progress, add_checkpoints, checkpoint_of, positive, save
from documents import load_tokenizer, read_documents, tokenize
from models import load_model
from tqdm.auto import tqdm

import hf_packing as hfp


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json, .parquet, .csv or .txt file, or a dataset's name")
    parser.add_argument("--tokenizer", help="name or folder; default: a byte-level BPE trained on the documents")
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--max-tokens", type=positive, default=4096, help="tokens of a micro-batch on each process")
    parser.add_argument("--accumulation", type=positive, default=1, help="micro-batches per optimizer step")
    parser.add_argument(
        "--loss", choices=["token", "sequence"], default="token", help="mean over tokens, or over documents"
    )
    parser.add_argument("--epochs", type=positive, default=1, help="epochs in all, counting those before a resume")
    parser.add_argument(
        "--steps", type=positive, help="stop and save after this many more optimizer steps; default: do not stop"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    add_checkpoints(parser, "outputs/accelerate_loop")
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> None:
    arguments = parse(flags)
    checkpoint = checkpoint_of(arguments)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=arguments.accumulation
    )
    train(accelerator, arguments, checkpoint)
    accelerator.free_memory()  # before the process group ends, which a DDP model must not outlive
    accelerator.end_training()


def train(accelerator: Accelerator, arguments: argparse.Namespace, checkpoint: Path | None) -> None:
    with accelerator.main_process_first():
        texts = read_documents(arguments.data)
        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model, texts)
        documents = tokenize(texts, tokenizer).train_test_split(test_size=0.02, seed=0)

    model = load_model(arguments.model, len(tokenizer)).to(accelerator.device)
    budget = hfp.TokenBudget(arguments.max_tokens, overflow="split")
    loader = hfp.prepare_dataloader(accelerator, documents["train"], budget, loss=arguments.loss, model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    done = Progress(arguments, ["learning_rate"])
    accelerator.register_for_checkpointing(done)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        accelerator.print(
            f"resuming in epoch {loader.epoch} after {loader.micro_batches_done} of {len(loader)} micro-batches"
        )
    if loader.epoch >= arguments.epochs:
        raise SystemExit(f"--epochs: expected more than the {loader.epoch} of the checkpoint, got {arguments.epochs}")

    last = done.steps + arguments.steps if arguments.steps else None
    for epoch in range(loader.epoch, arguments.epochs):
        model.train()
        progress = tqdm(
            loader, desc=f"Epoch {epoch}", initial=loader.micro_batches_done, disable=not accelerator.is_main_process
        )
        for batch in progress:
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            done.steps += accelerator.sync_gradients
            if accelerator.sync_gradients and (done.steps == last or done.steps % arguments.save_every == 0):
                save(accelerator, arguments.output)
            if done.steps == last:
                break
        loss = hfp.evaluation_loss(accelerator, model, documents["test"], rows_per_batch=8)
        accelerator.print(f"epoch {epoch}, {done.steps} optimizer steps in all: evaluation loss {loss:.4f}")
        if done.steps == last:
            break
    accelerator.unwrap_model(model).save_pretrained(
        arguments.output / "model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )


if __name__ == "__main__":
    main()
