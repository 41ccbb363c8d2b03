"""Pre-training on buckets: short documents in short rows, every process in the same bucket, constant tokens per step.

    python recipes/pretrain_bucket.py
    torchrun --nproc-per-node 2 recipes/pretrain_bucket.py
    torchrun --nproc-per-node 2 recipes/pretrain_bucket.py --steps 200 --resume-from-checkpoint
    accelerate launch --config_file recipes/configs/ddp.yaml recipes/pretrain_bucket.py --data text.jsonl \
        --tokenizer gpt2 --buckets 2048 4096 8192 16384 --tokens-per-batch 16384

Without --data the documents are the functions of the Python standard library, and the model is a small Llama from
scratch. Prints how many tokens all processes have in a micro-batch, and the speed of every bucket (arXiv 2407.07495,
Table 2).
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
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
    parser.add_argument(
        "--buckets", type=positive, nargs="+", default=[256, 512, 1024, 2048], help="tokens a row may hold"
    )
    parser.add_argument(
        "--tokens-per-batch", type=positive, default=2048, help="tokens of a micro-batch on each process"
    )
    parser.add_argument("--order", choices=["random", "short_to_long"], default="random", help="order of the buckets")
    parser.add_argument("--cycles", type=positive, help="passes from short to long in an epoch; default: 1")
    parser.add_argument("--accumulation", type=positive, default=1, help="micro-batches per optimizer step")
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="optimizer steps in all, counting those before a resume; 0 for one epoch",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    add_checkpoints(parser, "outputs/pretrain_bucket")
    arguments = parser.parse_args(flags)
    if arguments.steps < 0:
        parser.error(f"--steps: expected an integer from 0, got {arguments.steps}")
    if arguments.cycles is not None and arguments.order != "short_to_long":
        parser.error(f"--cycles: expected --order short_to_long beside it, got {arguments.cycles} alone")
    return arguments


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
        packed = hfp.pack(tokenize(texts, tokenizer), hfp.Bucket(arguments.buckets), position_ids=False)
    model = load_model(arguments.model, len(tokenizer)).to(accelerator.device)
    batching = hfp.BucketBatches(arguments.tokens_per_batch, order=arguments.order, cycles=arguments.cycles or 1)
    loader = hfp.prepare_dataloader(accelerator, packed, batching, model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)

    done = Progress(arguments, ["learning_rate"])
    accelerator.register_for_checkpointing(done)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        accelerator.print(f"resuming after {done.steps} steps")
    steps = arguments.steps or -(-len(loader) // arguments.accumulation)
    if done.steps >= steps:
        raise SystemExit(f"--steps: expected more than the {done.steps} of the checkpoint, got {arguments.steps}")

    bucket_of_row = packed["bucket"][:]
    seen = []
    model.train()
    progress = tqdm(initial=done.steps, total=steps, desc="Training", disable=not accelerator.is_main_process)
    for batch in batches_of_epochs(loader):
        began = time.perf_counter()
        with accelerator.accumulate(model):
            loss = hfp.compute_loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        place = loader.micro_batches_done - 1
        rows = [row for row, _ in loader.plan.micro_batch(place, accelerator.process_index)]
        seen.append(
            Step(
                step=len(seen),
                bucket=int(loader.plan.bucket[place]),
                rows=tuple(bucket_of_row[row] for row in rows),
                tokens=batch["input_ids"].shape[1],
                seconds=time.perf_counter() - began,
                loss=loss.item(),
            )
        )
        if not accelerator.sync_gradients:
            continue
        done.steps += 1
        progress.update()
        if done.steps == steps or done.steps % arguments.save_every == 0:
            save(accelerator, arguments.output)
        if done.steps == steps:
            break
    progress.close()
    accelerator.unwrap_model(model).save_pretrained(
        arguments.output / "model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    everywhere = gather_object(seen)
    if accelerator.is_main_process:
        report(everywhere, accelerator.num_processes)


def batches_of_epochs(loader: hfp.PackedLoader) -> Iterator[dict]:
    """Yield batches epoch after epoch, from where the loader is."""
    while True:
        yield from loader


class Step(NamedTuple):
    """What one process did with one micro-batch."""

    step: int
    bucket: int
    rows: tuple[int, ...]
    """The bucket that each of its rows was packed for; smaller than `bucket` if the row was left over there."""
    tokens: int
    seconds: float
    loss: float


def report(seen: list[Step], processes: int) -> None:
    steps = defaultdict(list)
    for each in seen:
        steps[each.step].append(each)
    tokens = [sum(each.tokens for each in together) for together in steps.values()]
    same = all(len({each.bucket for each in together}) == 1 for together in steps.values())
    moved = sum(bucket < each.bucket for each in seen for bucket in each.rows)
    print(f"\n{len(steps)} micro-batches on {processes} processes, the same bucket on all of them each time: {same}")
    print(f"{moved} of {sum(len(each.rows) for each in seen)} rows left over and trained in a larger bucket")
    apart = 1 - min(tokens) / max(tokens)
    print(f"tokens of all processes at a time: {min(tokens):,} to {max(tokens):,}, {apart:.2%} apart")
    print(f"loss of the first micro-batch {steps[0][0].loss:.3f}, of the last {steps[len(steps) - 1][0].loss:.3f}\n")
    print(f"{'bucket':>8}{'batches':>8}{'rows of a process':>20}{'tokens/s':>12}{'speed':>8}")
    speeds = {}
    for bucket in sorted({each.bucket for each in seen}):
        own = [together for number, together in steps.items() if together[0].bucket == bucket and number > 0]
        if own:
            speeds[bucket] = statistics.median(
                sum(each.tokens for each in together) / max(each.seconds for each in together) for together in own
            )
    for bucket, speed in speeds.items():
        own = [each for each in seen if each.bucket == bucket]
        rows = round(sum(each.tokens for each in own) / len(own) / bucket)
        relative = speed / speeds[max(speeds)]
        print(f"{bucket:>8,}{len(own) // processes:>8,}{rows:>20,}{speed:>12,.0f}{relative:>7.2f}x")
    print("speed: tokens per second, beside the longest bucket's; the first micro-batch is not counted")


if __name__ == "__main__":
    main()
