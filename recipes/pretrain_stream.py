"""Pre-train on files that are read as a stream: tokenized, mixed and packed while the model trains.

    python recipes/pretrain_stream.py --data "web=web/*.parquet" "code=code/*.jsonl" --shares web=0.7 code=0.3 \\
        --tokenizer gpt2 --max_steps 100000
    torchrun --nproc-per-node 2 recipes/pretrain_stream.py --resume_from_checkpoint

Rows have a `text`. Shares are shares of the tokens. Without --data, the texts are the short and the long functions of
the Python standard library. A run may be stopped at any time, and resumed on another number of processes that divides
--rows_per_step and --streams: it takes the same steps, and reads no document again but those of the last windows. With
--start_length and --growth_steps, documents are cut to a length that grows with the steps.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from checkpoints import checkpoint_of_trainer, positive
from documents import FORMATS, standard_library_functions, train_tokenizer
from models import load_model
from process_group import end_process_group
from trainer_flags import on_cpu, training_arguments
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments

import hf_packing as hfp

TOKENIZER_TEXTS = 5000
"""Without --tokenizer, one is trained on so many texts of each source."""

FILES = 8
"""The functions of the standard library are written to so many files for each source."""

LONG = 1000
"""A function of the standard library is long from this number of characters on."""


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", type=pair, help="sources as NAME=FILES, with * in the path of the files")
    parser.add_argument("--shares", nargs="+", type=pair, help="the sources' shares of the tokens as NAME=NUMBER")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--tokenizer", help="name or folder; default: that of --model, or one trained on the texts")
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--max_length", type=positive, default=512, help="tokens of a packed row")
    parser.add_argument("--rows_per_step", type=positive, default=8, help="packed rows of an optimizer step")
    parser.add_argument("--streams", type=positive, default=8, help="logical streams, shared out among processes")
    parser.add_argument("--window_packs", type=positive, default=64, help="packed rows that are planned together")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers of each process")
    parser.add_argument("--max_steps", type=positive, default=60, help="optimizer steps")
    parser.add_argument("--start_length", type=positive, help="tokens of a segment in the first step; grows to a row")
    parser.add_argument("--growth_steps", type=positive, help="optimizer steps during which it grows")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--save_steps", type=positive, default=500, help="optimizer steps between checkpoints")
    parser.add_argument("--output_dir", default="outputs/pretrain_stream")
    parser.add_argument("--resume_from_checkpoint", action="store_true", help="resume from the last one")
    given = parser.parse_args(flags)
    if (given.start_length is None) != (given.growth_steps is None):
        parser.error("--start_length and --growth_steps: expected both or none of the two")
    given.epochs = 1
    return given


def pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def main(flags: Sequence[str] | None = None) -> Trainer:
    given = parse(flags)
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    state = PartialState(cpu=on_cpu())
    if given.rows_per_step % state.num_processes:
        raise SystemExit(
            f"--rows_per_step: expected a multiple of the {state.num_processes} processes, got {given.rows_per_step}"
        )
    given.gradient_accumulation_steps = given.rows_per_step // state.num_processes
    with state.main_process_first():
        files = dict(given.data) if given.data else write_functions(Path(given.output_dir) / "data")
        sources = {name: open_files(path, given.text_column) for name, path in files.items()}
        tokenizer = load_tokenizer(given, sources)
    mixed = hfp.mix({name: tokenize(each, tokenizer) for name, each in sources.items()}, shares_of(given, sources))
    packed = hfp.pack(mixed, hfp.BestFit(given.max_length), streams=given.streams, window_packs=given.window_packs)
    trainer = Trainer(
        load_model(given.model, len(tokenizer)),
        TrainingArguments(dataloader_num_workers=given.workers, **training_arguments(given)),
        train_dataset=packed,
        processing_class=tokenizer,
    )
    schedule = hfp.LengthSchedule(given.start_length, given.growth_steps) if given.start_length else None
    summary = hfp.attach(trainer, hfp.TokenBudget(given.max_length, length_schedule=schedule))
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if losses:
        trainer.accelerator.print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    trainer.save_model()
    return trainer


def open_files(pattern: str, column: str) -> datasets.IterableDataset:
    """Return the texts of some files as a stream. A shard is a file; of parquet files, a row group."""
    files = sorted(glob(pattern))
    suffix = Path(pattern).suffix
    if not files or suffix not in FORMATS:
        what = "no such file exists" if not files else f"the names end in {suffix or 'nothing'}"
        raise SystemExit(f"--data: expected files ending in {', '.join(FORMATS)}, got {pattern!r}: {what}")
    stream = datasets.load_dataset(FORMATS[suffix], data_files=files, split="train", streaming=True)
    names = list(next(iter(stream), {}))
    if column not in names:
        raise SystemExit(
            f"--text_column: expected one of {', '.join(names) or 'no columns'} in {pattern}, got {column!r}"
        )
    stream = stream.reshard() if suffix == ".parquet" else stream
    return stream.select_columns([column]).rename_columns({column: "text"} if column != "text" else {})


def tokenize(stream: datasets.IterableDataset, tokenizer: PreTrainedTokenizerBase) -> datasets.IterableDataset:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    return stream.map(partial(with_tokens, tokenizer), batched=True, remove_columns=["text"], features=features)


def with_tokens(tokenizer: PreTrainedTokenizerBase, batch: dict[str, Any]) -> dict[str, Any]:
    texts = [text + tokenizer.eos_token for text in batch["text"]]
    return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}


def load_tokenizer(given: argparse.Namespace, sources: dict[str, datasets.IterableDataset]) -> PreTrainedTokenizerBase:
    if name := given.tokenizer or given.model:
        return AutoTokenizer.from_pretrained(name)
    rows = [row for stream in sources.values() for row in stream.take(TOKENIZER_TEXTS)]
    return train_tokenizer(datasets.Dataset.from_list(rows))


def shares_of(given: argparse.Namespace, sources: dict[str, Any]) -> dict[str, float]:
    """Return the share of the tokens of each source: the given ones, or equal ones."""
    if given.shares is None:
        return dict.fromkeys(sources, 1.0)
    shares = dict(given.shares)
    try:
        return {name: float(share) for name, share in shares.items()}
    except ValueError:
        raise SystemExit(f"--shares: expected numbers, got {', '.join(shares.values())}") from None


def write_functions(folder: Path) -> dict[str, str]:
    """Write the functions of the standard library to files, short and long ones apart; return the sources."""
    sources = {name: str(folder / f"{name}-*.parquet") for name in ("short", "long")}
    if not folder.exists():
        texts = standard_library_functions()["text"]
        unfinished = folder.with_name("unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        for name, is_long in (("short", False), ("long", True)):
            own = [text for text in texts if (len(text) >= LONG) == is_long]
            for number in range(FILES):
                rows = datasets.Dataset.from_dict({"text": own[number::FILES]})
                rows.to_parquet(unfinished / f"{name}-{number}.parquet")
        unfinished.rename(folder)
    return sources


if __name__ == "__main__":
    main()
    end_process_group()
