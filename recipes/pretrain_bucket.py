"""Pre-training on buckets: short documents in short rows, every process in the same bucket, constant tokens per step.

    python recipes/pretrain_bucket.py
    torchrun --nproc-per-node 2 recipes/pretrain_bucket.py --max_steps 400 --resume_from_checkpoint last
    python recipes/pretrain_bucket.py --data text.jsonl --tokenizer gpt2 --buckets 2048 4096 8192 --max_tokens 8192

Rows have a `text`, a `prompt` and a `completion`, `messages`, or `input_ids`, and are trained on as a whole. Without
--data, the texts are the functions of the Python standard library; without --model, a small Llama is trained from
scratch. Prints how many tokens all processes have in a micro-batch, and the speed of every bucket (arXiv 2407.07495,
Table 2).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import common
import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, tqdm
from common import flag
from transformers import AutoModelForCausalLM, HfArgumentParser

import hf_packing as hfp

COLUMNS = ("number", "bucket", "rows", "left_over", "tokens", "seconds", "loss")
"""What is noted of every micro-batch of a process."""


@dataclass
class Arguments:
    data: str | None = flag(None, "file, saved dataset, or name of one on the hub; default: functions of Python")
    model: str | None = flag(None, "name or folder; default: a small Llama from scratch")
    tokenizer: str | None = flag(None, "name or folder; default: that of --model, or one trained on the texts")
    buckets: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048], metadata={"help": "tokens of a row"})
    max_tokens: int = flag(2048, "tokens of a micro-batch on each process")
    order: Literal["random", "short_to_long"] = flag("random", "order of the buckets")
    cycles: int = flag(1, "passes from short to long in an epoch")
    gradient_accumulation_steps: int = flag(1, "micro-batches per optimizer step")
    learning_rate: float = flag(1e-3, "learning rate of AdamW")
    num_train_epochs: int = flag(1, "epochs in all, with --max_steps -1")
    max_steps: int = flag(100, "optimizer steps in all; -1 for --num_train_epochs")
    save_steps: int = flag(50, "optimizer steps between checkpoints")
    output_dir: str = flag("outputs/pretrain_bucket", "folder of the checkpoints and the model")
    resume_from_checkpoint: str | None = flag(None, "last: the last one; or a checkpoint's folder")


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
        for batch in tqdm(loader, desc=f"Epoch {loader.epoch}", initial=loader.micro_batches_done):
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
            left_over = sum(each < bucket for each in own)
            seen.append((len(seen), bucket, len(own), left_over, batch["input_ids"].numel(), seconds, loss))
            finished = common.finished(loader, args)
            if accelerator.sync_gradients and (finished or loader.optimizer_steps % args.save_steps == 0):
                common.save(accelerator, loader, args.output_dir)
            if finished:
                break
    common.save_model(accelerator, model, tokenizer, args.output_dir)
    seen = gather_object(seen)
    if accelerator.is_main_process:
        report(pd.DataFrame(seen, columns=COLUMNS), accelerator.num_processes)


def report(seen: pd.DataFrame, processes: int) -> None:
    """Print the micro-batches of all processes in total, and by bucket."""
    together = seen.groupby("number")
    tokens, buckets, loss = together["tokens"].sum(), together["bucket"], together["loss"].first()
    same = bool((buckets.nunique() == 1).all())
    print(f"\n{len(tokens)} micro-batches on {processes} processes, the same bucket on all of them each time: {same}")
    print(f"{seen['left_over'].sum()} of {seen['rows'].sum()} rows left over and trained in a larger bucket")
    least, most = tokens.min(), tokens.max()
    print(f"tokens of all processes at a time: {least:,} to {most:,}, {1 - least / most:.2%} apart")
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
