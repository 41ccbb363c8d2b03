"""A training loop of one's own: token budget, the right loss, evaluation, checkpoints that go on where they stopped.

    torchrun --nproc-per-node 2 recipes/accelerate_loop.py --accumulation 2
    torchrun --nproc-per-node 2 recipes/accelerate_loop.py --accumulation 2 --resume

Without --data the documents are the functions of the Python standard library, and the model is a small Llama from
scratch. They are packed while training, anew in every epoch.
"""

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from documents import load_tokenizer, read_documents, tokenise
from models import load_model
from tqdm.auto import tqdm

import hf_packing as hfp


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json, .parquet, .csv or .txt file, or a dataset's name")
    parser.add_argument("--tokenizer", help="name or folder; default: a byte-level BPE trained on the documents")
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a micro-batch on each process")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--loss", choices=["token", "sequence"], default="token")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=0, help="stop and save after so many steps of the optimiser; 0: do not"
    )
    parser.add_argument("--save-every", type=int, default=50, help="steps of the optimiser between checkpoints")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("outputs/accelerate_loop"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    return parser.parse_args()


def resumed_updates(loader: hfp.PackedLoader, accumulation: int) -> int:
    """Steps of the optimiser that came before."""
    return loader.epoch * -(-len(loader) // accumulation) + loader.step // accumulation


def save(accelerator: Accelerator, output: Path) -> None:
    """Into a folder that gets its name when all is in it, so that a kill while saving costs one checkpoint only."""
    accelerator.save_state(output / "unfinished")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(output / "before", ignore_errors=True)
        if (output / "state").exists():
            (output / "state").rename(output / "before")
        (output / "unfinished").rename(output / "state")
    accelerator.wait_for_everyone()


def latest(output: Path) -> Path:
    """The newest finished checkpoint."""
    for folder in (output / "state", output / "before"):
        if folder.exists():
            return folder
    raise SystemExit(f"--resume: expected a checkpoint in {output}, there is none")


def main() -> None:
    arguments = parse()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=arguments.accumulation
    )
    train(accelerator, arguments)
    accelerator.free_memory()  # before the group of processes ends, which a DDP model must not outlive
    accelerator.end_training()


def train(accelerator: Accelerator, arguments: argparse.Namespace) -> None:
    with accelerator.main_process_first():
        texts = read_documents(arguments.data)
        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model, texts)
        documents = tokenise(texts, tokenizer).train_test_split(test_size=0.02, seed=0)

    model = load_model(arguments.model, len(tokenizer)).to(accelerator.device)
    budget = hfp.TokenBudget(arguments.max_tokens, overflow="split")
    loader = hfp.prepare_dataloader(accelerator, documents["train"], budget, loss=arguments.loss, model=model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model, optimiser = accelerator.prepare(model, optimiser)
    if arguments.resume:
        accelerator.load_state(latest(arguments.output))
        accelerator.print(f"going on in epoch {loader.epoch} after {loader.step} of {len(loader)} micro-batches")

    updates = resumed_updates(loader, arguments.accumulation)
    last = updates + arguments.steps if arguments.steps else 0
    for epoch in range(loader.epoch, arguments.epochs):
        model.train()
        progress = tqdm(loader, desc=f"Epoch {epoch}", initial=loader.step, disable=not accelerator.is_main_process)
        for batch in progress:
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                optimiser.step()
                optimiser.zero_grad()
            updates += accelerator.sync_gradients
            if accelerator.sync_gradients and (updates == last or updates % arguments.save_every == 0):
                save(accelerator, arguments.output)
            if updates == last:
                break
        loss = hfp.evaluation_loss(accelerator, model, documents["test"], rows_per_batch=8)
        accelerator.print(f"epoch {epoch}, {updates} updates in all: evaluation loss {loss:.4f}")
        if updates == last:
            break
    accelerator.unwrap_model(model).save_pretrained(
        arguments.output / "model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )


if __name__ == "__main__":
    main()
