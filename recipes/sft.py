"""Supervised fine-tuning on packed rows with the stock SFTTrainer; prompts are masked.

    python recipes/sft.py --data chat.jsonl --model Qwen/Qwen3-0.6B --output_dir outputs/sft

The data is a .json or .jsonl file (also .gz) or a dataset's name, with `messages`, or with `prompt` and `completion`,
as text (joined by a line break) or as messages. All fields of TRL's SFTConfig are flags as well.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp

IGNORED = -100
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Arguments:
    """What SFTConfig does not know."""

    data: str = field(metadata={"help": "a .json or .jsonl file (also .gz), or a dataset's name"})
    model: str = field(metadata={"help": "name or folder of a causal language model and its tokenizer"})
    pack_length: int = field(default=4096, metadata={"help": "tokens a packed row holds"})


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


def main() -> None:
    here = [] if torch.accelerator.is_available() else ["--use_cpu", "True", "--bf16", "False"]
    parser = HfArgumentParser((Arguments, SFTConfig))
    arguments, config = parser.parse_args_into_dataclasses([*here, *sys.argv[1:]])
    if config.packing:
        sys.exit("--packing: expected False, since rows are packed here and TRL would pack them again")
    config.padding_free, config.max_length = True, None
    if Path(arguments.data).suffix and not Path(arguments.data).exists():
        sys.exit(f"--data: expected a file or a dataset's name, got {arguments.data!r}, which does not exist")
    if Path(arguments.data).is_file():
        rows = datasets.load_dataset("json", data_files=arguments.data, split="train")
    else:
        rows = datasets.load_dataset(arguments.data, split="train")
    if not {"messages", "completion"} & set(rows.column_names):
        sys.exit(f"--data: expected messages, or prompt and completion, got columns {', '.join(rows.column_names)}")

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(config.device)
    documents = rows.map(
        tokenise, fn_kwargs={"tokenizer": tokenizer}, remove_columns=rows.column_names, desc="Tokenising"
    )

    packed = hfp.pack(documents, hfp.BestFit(arguments.pack_length))
    hfp.patch_model(model)

    print(f"{len(documents):,} documents in {len(packed):,} rows of at most {arguments.pack_length:,} tokens")
    trainer = SFTTrainer(model=model, args=config, train_dataset=packed, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
