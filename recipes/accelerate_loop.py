"""A training loop of your own: token budget, exact loss, evaluation, and checkpoints to resume from.

    python recipes/accelerate_loop.py
    torchrun --nproc-per-node 2 recipes/accelerate_loop.py --data chats.jsonl --model Qwen/Qwen3-0.6B \\
        --num_train_epochs 3 --resume_from_checkpoint last

Rows have a `text`, a `prompt` and a `completion`, `messages`, or `input_ids`; 2 % of them are held out for evaluation.
Documents are packed during training, anew in every epoch. Without --data, the texts are the functions of the Python
standard library; without --model, a small Llama is trained from scratch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import common
import torch
from accelerate import Accelerator
from accelerate.utils import tqdm
from common import flag
from transformers import AutoModelForCausalLM, HfArgumentParser

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = flag(None, "file, saved dataset, or name of one on the hub; default: functions of Python")
    model: str | None = flag(None, "name or folder; default: a small Llama from scratch")
    tokenizer: str | None = flag(None, "name or folder; default: that of --model, or one trained on the texts")
    max_tokens: int = flag(4096, "tokens of a micro-batch on each process")
    gradient_accumulation_steps: int = flag(1, "micro-batches per optimizer step")
    loss: Literal["token", "sequence"] = flag("token", "mean over tokens, or documents")
    learning_rate: float = flag(1e-3, "learning rate of AdamW")
    num_train_epochs: int = flag(1, "epochs in all")
    max_steps: int = flag(-1, "optimizer steps in all, instead of --num_train_epochs")
    save_steps: int = flag(50, "optimizer steps between checkpoints")
    output_dir: str = flag("outputs/accelerate_loop", "folder of the checkpoints and the model")
    resume_from_checkpoint: str | None = flag(None, "last: the last one; or a checkpoint's folder")


def main(flags: Sequence[str] | None = None) -> float:
    """Train; return the loss of the last evaluation."""
    parser = HfArgumentParser(Arguments, description=__doc__, formatter_class=common.Help)
    (args,) = parser.parse_args_into_dataclasses(flags)
    common.check_positive(args, "gradient_accumulation_steps", "num_train_epochs", "save_steps")
    checkpoint = common.checkpoint_of(args)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    with accelerator.main_process_first():
        rows = common.read(args.data) if args.data else common.functions()
        tokenizer = common.load_tokenizer(args.tokenizer or args.model, common.texts(rows))
        documents = rows if "input_ids" in rows.column_names else hfp.tokenize(rows, tokenizer)
        train, test = documents.train_test_split(test_size=0.02, seed=0).values()

    model = common.load_model(AutoModelForCausalLM, args.model, common.small_llama(len(tokenizer)))
    budget = hfp.TokenBudget(args.max_tokens, overflow="split")
    loader = hfp.prepare_dataloader(accelerator, train, budget, loss=args.loss, model=model.to(accelerator.device))
    accelerator.print(loader.summary)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    if checkpoint:
        common.resume(accelerator, loader, optimizer, checkpoint, args.learning_rate)

    while not common.finished(loader, args):
        epoch = loader.epoch
        model.train()
        for batch in tqdm(loader, desc=f"Epoch {epoch}", initial=loader.micro_batches_done):
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            finished = common.finished(loader, args)
            if accelerator.sync_gradients and (finished or loader.optimizer_steps % args.save_steps == 0):
                common.save(accelerator, loader, args.output_dir)
            if finished:
                break
        loss = hfp.evaluation_loss(accelerator, model, test, rows_per_batch=8)
        accelerator.print(f"epoch {epoch}, {loader.optimizer_steps} optimizer steps in all: evaluation loss {loss:.4f}")
    common.save_model(accelerator, model, tokenizer, args.output_dir)
    return loss


if __name__ == "__main__":
    common.run(main)
