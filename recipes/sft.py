"""Supervised fine-tuning on packed rows with SFTTrainer; prompts are masked.

    python recipes/sft.py --data chat.jsonl --model Qwen/Qwen3-0.6B --output_dir outputs/sft
    accelerate launch --config_file recipes/configs/fsdp2.yaml recipes/sft.py --config recipes/configs/sft.yaml

The data is a .json or .jsonl file (also .gz) or a dataset's name, with `messages`, or with `prompt` and `completion`,
as text (joined by a line break) or as messages. All fields of TRL's SFTConfig are flags as well, and all flags may
stand in a YAML file, `--config`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer, TrlParser

import hf_packing as hfp

IGNORED = -100
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


STRATEGIES = {
    "best_fit": hfp.BestFit,
    "optimal": hfp.Optimal,
    "multipack": hfp.Multipack,
    "first_come": hfp.FirstCome,
    "bucket": lambda longest: hfp.Bucket([longest // 8, longest // 4, longest // 2, longest]),
}


@dataclass
class Arguments:
    """What SFTConfig does not know."""

    data: str = field(metadata={"help": "a .json or .jsonl file (also .gz), or a dataset's name"})
    model: str = field(metadata={"help": "name or folder of a causal language model and its tokenizer"})
    strategy: str = field(
        default="none",
        metadata={
            "help": "how documents become rows, once and for all; none packs them while training, anew in every epoch",
            "choices": ["none", *STRATEGIES],
        },
    )
    pack_length: int = field(default=4096, metadata={"help": "tokens a packed row holds"})
    max_tokens: int | None = field(
        default=None, metadata={"help": "tokens of a micro-batch on each process; pack_length where it is not given"}
    )
    loss: str = field(
        default="token",
        metadata={"help": "mean over tokens, or over documents of their means", "choices": ["token", "sequence"]},
    )
    match_documents_per_step: int | None = field(
        default=None, metadata={"help": "documents in a step of the optimiser, to keep an unpacked schedule"}
    )


def turns(row: dict, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """The row as pieces of text, each with whether it is trained on."""
    if isinstance(row.get("prompt"), str):
        yield row["prompt"] + "\n", False
        yield row["completion"] + tokenizer.eos_token, True
        return
    given = row.get("prompt") or []
    messages = row["messages"] if "messages" in row else given + row["completion"]
    rendered = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < len(given):
            continue
        for upto, trained in ((messages[:turn], False), (messages[: turn + 1], True)):
            text = tokenizer.apply_chat_template(upto, tokenize=False, add_generation_prompt=not trained)
            if not text.startswith(rendered):
                raise SystemExit(
                    f"--model: its chat template rewrites earlier turns, so turn {turn} cannot be masked apart"
                )
            yield text[len(rendered) :], trained
            rendered = text


def tokenise(row: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    input_ids, labels = [], []
    for text, trained in turns(row, tokenizer):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        input_ids += tokens
        labels += tokens if trained else [IGNORED] * len(tokens)
    return {"input_ids": input_ids, "labels": labels}


def read(data: str) -> datasets.Dataset:
    if Path(data).suffix and not Path(data).exists():
        sys.exit(f"--data: expected a file or a dataset's name, got {data!r}, which does not exist")
    if Path(data).is_file():
        rows = datasets.load_dataset("json", data_files=data, split="train")
    else:
        rows = datasets.load_dataset(data, split="train")
    if not {"messages", "completion"} & set(rows.column_names):
        sys.exit(f"--data: expected messages, or prompt and completion, got columns {', '.join(rows.column_names)}")
    return rows


def packed(
    documents: datasets.Dataset, arguments: Arguments
) -> tuple[datasets.Dataset, hfp.TokenBudget | hfp.BucketBatches]:
    """The rows to train on, and how they share micro-batches."""
    tokens = arguments.max_tokens or arguments.pack_length
    if arguments.strategy == "none":
        return documents, hfp.TokenBudget(tokens, overflow="split")
    rows = hfp.pack(documents, STRATEGIES[arguments.strategy](arguments.pack_length))
    return rows, hfp.BucketBatches(tokens) if arguments.strategy == "bucket" else hfp.TokenBudget(tokens)


def main() -> None:
    here = [] if torch.accelerator.is_available() else ["--use_cpu", "True", "--bf16", "False"]
    arguments, config = TrlParser((Arguments, SFTConfig)).parse_args_and_config([*here, *sys.argv[1:]])
    if config.packing:
        sys.exit("--packing: expected False, since rows are packed here and TRL would pack them again")
    if config.max_length not in (None, SFTConfig.__dataclass_fields__["max_length"].default):
        sys.exit(f"--max_length: expected none, since --pack_length says how long rows are, got {config.max_length}")
    config.max_length = None

    with config.main_process_first(desc="reading"):
        documents = read(arguments.data)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with config.main_process_first(desc="tokenising and packing"):
        documents = documents.map(
            tokenise, fn_kwargs={"tokenizer": tokenizer}, remove_columns=documents.column_names, desc="Tokenising"
        )
        rows, batching = packed(documents, arguments)

    if config.process_index == 0:
        print(f"{len(documents):,} documents in {len(rows):,} rows")
    accelerator = train(arguments, config, tokenizer, rows, batching)
    accelerator.free_memory()  # before the group of processes ends, which a DDP model must not outlive
    accelerator.end_training()


def train(
    arguments: Arguments,
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    batching: hfp.TokenBudget | hfp.BucketBatches,
) -> Accelerator:
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    summary = hfp.attach(
        trainer, batching, loss=arguments.loss, match_documents_per_step=arguments.match_documents_per_step
    )
    if trainer.is_world_process_zero():
        print(summary)
    trainer.train()
    trainer.save_model()
    return trainer.accelerator


if __name__ == "__main__":
    main()
