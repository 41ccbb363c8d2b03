"""Pre-train on files that are read as a stream: tokenized, mixed and packed while the model trains.

    python recipes/pretrain_stream.py
    python recipes/pretrain_stream.py --data "web=web/*.parquet" "code=code/*.jsonl" --shares 0.7 0.3 \\
        --tokenizer gpt2 --max_length 4096 --max_steps 100000
    torchrun --nproc-per-node 2 recipes/pretrain_stream.py --resume_from_checkpoint last

Rows have a `text`, a `prompt` and a `completion`, or `messages`, and are trained on as a whole; each line of a .txt
file is a row. Shares are shares of the tokens. An epoch reads every document once: when a source ends, the others go
on, unless --stopping_strategy says otherwise. Without --data, the texts are the short and the long functions of the
Python standard library; without --model, a small Llama is trained from scratch.

A run may be stopped at any time, and resumed on another number of processes that divides --rows_per_step and --streams:
it takes the same steps, and reads no document again but those of the last windows. With --start_length and
--growth_steps, documents are cut to a length that grows with the steps. With --eval_data, the loss on a file is printed
at the end. All other flags are those of TrainingArguments: --report_to tensorboard draws the losses, and
--include_num_input_tokens_seen yes logs the number of tokens so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from glob import escape, glob
from itertools import chain
from pathlib import Path

import common
import datasets
from common import flag
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

import hf_packing as hfp

TOKENIZER_TEXTS = 5000
"""Without --tokenizer and --model, a tokenizer is trained on so many texts of each source."""


@dataclass
class Arguments:
    data: list[str] | None = field(default=None, metadata={"help": "sources as NAME=FILES, with * in the files' path"})
    shares: list[float] | None = field(default=None, metadata={"help": "one for each source; default: equal ones"})
    stopping_strategy: str = flag("all_exhausted_without_replacement", "when an epoch of several sources ends")
    eval_data: str | None = flag(None, "file to evaluate on at the end, and as --eval_strategy says")
    text_field: str | None = flag(None, "column of the texts, if it is not text")
    model: str | None = flag(None, "name or folder; default: a small Llama from scratch")
    tokenizer: str | None = flag(None, "name or folder; default: that of --model, or one trained on the texts")
    max_length: int = flag(512, "tokens of a packed row")
    rows_per_step: int = flag(8, "packed rows of an optimizer step, over all processes")
    streams: int = flag(8, "logical streams, shared out among processes")
    window_packs: int = flag(64, "packed rows that are planned together")
    start_length: int | None = flag(None, "tokens of a segment in the first step")
    growth_steps: int | None = flag(None, "optimizer steps until documents are whole")


def main(flags: Sequence[str] | None = None) -> Trainer:
    parser = HfArgumentParser((Arguments, TrainingArguments), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/pretrain_stream", max_steps=60, learning_rate=1e-3, **common.on_cpu())
    parser.set_defaults(logging_steps=10, logging_first_step=True)
    given, args = parser.parse_args_into_dataclasses(flags)
    if (given.start_length is None) != (given.growth_steps is None):
        raise ValueError("--start_length, --growth_steps: expected both or neither, got one of them")
    decided = dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), "--rows_per_step")
    for name, by in {**decided, "dataloader_drop_last": "--rows_per_step", "num_train_epochs": "--max_steps"}.items():
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--{name}: expected none, since {by} decides that, got {getattr(args, name)}")
    args.gradient_accumulation_steps, left = divmod(given.rows_per_step, args.world_size)
    if left or given.rows_per_step < 1:
        raise ValueError(f"--rows_per_step: expected n x {args.world_size} processes, got {given.rows_per_step}")
    checkpoint = common.checkpoint_of(args)
    with args.main_process_first():
        sources = open_sources(given.data) if given.data else functions()
        texts = chain.from_iterable(common.texts(source.take(TOKENIZER_TEXTS)) for source in sources.values())
        tokenizer = common.load_tokenizer(given.tokenizer or given.model, texts)
    shares = given.shares or [1.0] * len(sources)
    if len(shares) != len(sources):
        raise ValueError(f"--shares: expected {len(sources)} numbers, one for each source, got {len(shares)}")

    settings = {"train_on": "all", "text_field": given.text_field}
    tokenized = {name: hfp.tokenize(source, tokenizer, **settings) for name, source in sources.items()}
    for source in tokenized.values():
        next(iter(source), None)  # to refuse rows without text now, and not after the model was loaded
    held_out = None
    if given.eval_data:
        with args.main_process_first():
            held_out = hfp.tokenize(common.read(given.eval_data, (), "--eval_data"), tokenizer, **settings)
        if not held_out:
            raise ValueError(f"--eval_data: expected documents, got none in {given.eval_data}")
    mixed = hfp.mix(tokenized, dict(zip(sources, shares, strict=True)), stopping_strategy=given.stopping_strategy)
    packed = hfp.pack(mixed, hfp.BestFit(given.max_length), streams=given.streams, window_packs=given.window_packs)
    model = common.load_model(AutoModelForCausalLM, given.model, common.small_llama(len(tokenizer)))
    trainer = Trainer(model, args, train_dataset=packed, eval_dataset=held_out, processing_class=tokenizer)
    schedule = hfp.LengthSchedule(given.start_length, given.growth_steps) if given.start_length else None
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_length, length_schedule=schedule))
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    trainer.accelerator.print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    trainer.save_model()
    if held_out is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    return trainer


def open_sources(data: Sequence[str]) -> dict[str, datasets.IterableDataset]:
    """Return the rows of files as streams, by name. A shard is a file; of parquet files, a row group."""
    sources = {}
    for source in data:
        name, _, pattern = source.partition("=")
        files, suffix = [pattern] if Path(pattern).is_file() else sorted(glob(pattern)), Path(pattern).suffix
        if not files or suffix not in common.FORMATS:
            endings = ", ".join(common.FORMATS)
            raise ValueError(f"--data: expected NAME=FILES, with files ending in {endings}, got {source!r}")
        names = list(map(escape, files))
        rows = datasets.load_dataset(common.FORMATS[suffix], data_files=names, split="train", streaming=True)
        rows = rows.filter(lambda row: row["text"].strip()) if suffix == ".txt" else rows  # without blank lines
        sources[name] = rows.reshard() if suffix == ".parquet" else rows
    return sources


def functions() -> dict[str, datasets.IterableDataset]:
    """Return the functions of the standard library, those below 1,000 characters apart, as streams of 8 shards."""
    texts = common.functions()
    short, long = texts.filter(lambda row: len(row["text"]) < 1000), texts.filter(lambda row: len(row["text"]) >= 1000)
    return {"short": short.to_iterable_dataset(num_shards=8), "long": long.to_iterable_dataset(num_shards=8)}


if __name__ == "__main__":
    common.run(main)
