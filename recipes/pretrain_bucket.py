"""Pre-training on buckets: short documents in short rows, every process in the same bucket, constant tokens per step.

    python recipes/pretrain_bucket.py
    torchrun --nproc-per-node 2 recipes/pretrain_bucket.py --max_steps 200
    torchrun --nproc-per-node 2 recipes/pretrain_bucket.py --max_steps 400 --resume_from_checkpoint last
    accelerate launch --config_file recipes/configs/ddp.yaml recipes/pretrain_bucket.py --data text.jsonl \\
        --tokenizer gpt2 --buckets 2048 4096 8192 16384 --max_tokens 16384 --max_steps -1

Rows have a `text`, a `prompt` and a `completion`, or `messages`, and are trained on as a whole. Without --data, the
texts are the functions of the Python standard library; without --model, a small Llama is trained from scratch. Prints
how many tokens all processes have in a micro-batch, and the speed of every bucket (arXiv 2407.07495, Table 2).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import common
import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, HfArgumentParser

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = field(default=None, metadata={"help": "file, folder or name of a dataset; see above"})
    model: str | None = field(default=None, metadata={"help": "name or folder; default: a small Llama from scratch"})
    tokenizer: str | None = field(default=None, metadata={"help": "name or folder; default: that of --model"})
    buckets: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048], metadata={"help": "sizes of rows"})
    max_tokens: int = field(default=2048, metadata={"help": "tokens of a micro-batch on each process"})
    order: Literal["random", "short_to_long"] = field(default="random", metadata={"help": "order of the buckets"})
    cycles: int = field(default=1, metadata={"help": "passes from short to long in an epoch"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "micro-batches per optimizer step"})
    learning_rate: float = 1e-3
    num_train_epochs: int = field(default=1, metadata={"help": "with --max_steps -1"})
    max_steps: int = field(default=100, metadata={"help": "optimizer steps in all; -1 for --num_train_epochs"})
    save_steps: int = field(default=50, metadata={"help": "optimizer steps between checkpoints"})
    output_dir: str = "outputs/pretrain_bucket"
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "last, or a checkpoint's folder"})


def main(flags: Sequence[str] | None = None) -> None:
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
        documents = rows if "input_ids" in rows.column_names else hfp.tokenize(rows, tokenizer, train_on="all")
        packed = hfp.pack(documents, hfp.Bucket(args.buckets), position_ids=False)

    model = common.load_model(AutoModelForCausalLM, args.model, common.small_llama(len(tokenizer)))
    batching = hfp.BucketBatches(args.max_tokens, order=args.order, cycles=args.cycles)
    loader = hfp.prepare_dataloader(accelerator, packed, batching, model=model.to(accelerator.device))
    accelerator.print(loader.summary)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    if checkpoint:
        common.resume(accelerator, loader, optimizer, checkpoint, args.learning_rate)

    bucket_of, seen = packed["bucket"][:], []
    model.train()
    while not common.finished(loader, args):
        epoch, done, other = loader.epoch, loader.micro_batches_done, not accelerator.is_main_process
        for batch in tqdm(loader, desc=f"Epoch {epoch}", initial=done, disable=other):
            began = time.perf_counter()
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            loss = loss.item()  # waits for the device, so before the time is taken
            seconds, place = time.perf_counter() - began, loader.micro_batches_done - 1
            bucket = int(loader.plan.bucket[place])
            own = [bucket_of[row] for row, _ in loader.plan.micro_batch(place, accelerator.process_index)]
            sizes = {
                "rows": len(own),
                "left_over": sum(each < bucket for each in own),
                "tokens": batch["input_ids"].numel(),
            }
            seen.append({"number": len(seen), "bucket": bucket, "seconds": seconds, "loss": loss, **sizes})
            if accelerator.sync_gradients and loader.optimizer_steps % args.save_steps == 0:
                common.save(accelerator, loader, args.output_dir)
            if common.finished(loader, args):
                break
    if loader.optimizer_steps % args.save_steps:  # otherwise it was just saved
        common.save(accelerator, loader, args.output_dir)
    common.save_model(accelerator, model, tokenizer, args.output_dir)
    seen = gather_object(seen)
    if accelerator.is_main_process:
        report(pd.DataFrame(seen), accelerator.num_processes)


def report(seen: pd.DataFrame, processes: int) -> None:
    """Print what the processes did: one row of `seen` for each micro-batch of each process."""
    together = seen.groupby("number")
    tokens, buckets, loss = together["tokens"].sum(), together["bucket"], together["loss"].first()
    same = bool((buckets.nunique() == 1).all())
    print(f"\n{len(tokens)} micro-batches on {processes} processes, the same bucket on all of them each time: {same}")
    left_over = f"{seen['left_over'].sum()} of {seen['rows'].sum()} rows"
    print(f"{left_over} left over and trained in a larger bucket")
    apart = 1 - tokens.min() / tokens.max()
    print(f"tokens of all processes at a time: {tokens.min():,} to {tokens.max():,}, {apart:.2%} apart")
    print(f"loss of the first micro-batch {loss.iloc[0]:.3f}, of the last {loss.iloc[-1]:.3f}\n")
    print(f"{'bucket':>8}{'batches':>8}{'rows of a process':>20}{'tokens/s':>12}{'speed':>8}")
    speed = (tokens / together["seconds"].max())[1:]
    speeds = speed.groupby(buckets.first()).median()
    for bucket, median in speeds.items():
        own = seen[seen["bucket"] == bucket]
        batches, rows = len(own) // processes, own["tokens"].mean() / bucket
        print(f"{bucket:>8,}{batches:>8,}{rows:>20.0f}{median:>12,.0f}{median / speeds.iloc[-1]:>7.2f}x")
    print("speed: tokens per second, beside the longest bucket's; the first micro-batch is not counted")


if __name__ == "__main__":
    common.run(main)
