"""Supervised fine-tuning on packed rows with SFTTrainer; prompts are masked.

    python recipes/sft.py --data chat.jsonl --model Qwen/Qwen3-0.6B --output_dir outputs/sft
    python recipes/sft.py --data chat.jsonl --model Qwen/Qwen3-0.6B --output_dir outputs/sft \
        --resume_from_checkpoint last
    accelerate launch --config_file recipes/configs/fsdp2.yaml recipes/sft.py --config recipes/configs/sft.yaml

The data is a .json or .jsonl file (also .gz) or a dataset's name, with `messages`, or with `prompt` and `completion`,
as text (joined by a line break) or as messages. Flags of TRL's SFTConfig are honored or refused, as the table in
recipes/README.md says. Flags may also be given in a YAML file, `--config`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from process_group import end_process_group
from sft_documents import CHATML, check_turns, read, tokenize, tokenize_turns, what_is_trained
from sft_parser import Parser
from sft_resume import SameFlags, checkpoint_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp
from hf_packing.columns import IGNORED_LABEL
from hf_packing.data.rendering import BadRowError

STRATEGIES = {
    "best_fit": hfp.BestFit,
    "optimal": hfp.Optimal,
    "multipack": hfp.Multipack,
    "first_come": hfp.FirstCome,
    "bucket": lambda longest, seed: hfp.Bucket([longest // 8, longest // 4, longest // 2, longest], seed=seed),
}
TEMPLATES = (".jinja", ".j2")
CHATS_AT_ONCE = 100
"""Chats that are tokenized turn by turn at once: a turn has all of the chat before it, so these are many tokens."""


@dataclass
class Arguments:
    """The recipe's own flags, which SFTConfig does not have."""

    data: str = field(metadata={"help": "a .json or .jsonl file (also .gz), or a dataset's name"})
    model: str = field(metadata={"help": "name or folder of a causal language model and its tokenizer"})
    eval_data: str | None = field(
        default=None,
        metadata={"help": "the same for evaluation, after training and as --eval_strategy says"},
    )
    strategy: str = field(
        default="none",
        metadata={
            "help": "how documents are packed before training; none packs them during training, anew in every epoch",
            "choices": ["none", *STRATEGIES],
        },
    )
    pack_length: int | None = field(
        default=None,
        metadata={"help": "tokens a packed row holds, 4096 if not given; longer documents are split"},
    )
    max_tokens: int | None = field(
        default=None, metadata={"help": "tokens of a micro-batch on each process; pack_length if not given"}
    )
    loss: str = field(
        default="token",
        metadata={"help": "mean over tokens, or over documents", "choices": ["token", "sequence"]},
    )
    per_turn: bool = field(
        default=False,
        metadata={
            "help": "one document for each assistant turn of a chat, as the model sees it at inference, instead of one "
            "for the whole chat"
        },
    )
    share_prefixes: bool | None = field(
        default=None,
        metadata={
            "help": "compute tokens with which several documents begin only once; on with --per_turn unless given, "
            "off without it"
        },
    )
    match_documents_per_step: int | None = field(
        default=None, metadata={"help": "documents per optimizer step, to keep the schedule of an unpacked run"}
    )

    def __post_init__(self) -> None:
        """Refuse what argparse lets pass from a YAML file, and what would have no effect."""
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata.get("choices")
            if choices and value not in choices:
                sys.exit(f"--{each.name}: expected one of {', '.join(choices)}, got {value!r}")
        for name in ("pack_length", "max_tokens", "match_documents_per_step"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                sys.exit(f"--{name}: expected an integer from 1, got {value!r}")
        if self.strategy == "none" and None not in (self.pack_length, self.max_tokens):
            sys.exit(
                f"--pack_length: expected none beside --max_tokens with --strategy none, which packs "
                f"documents straight into micro-batches, got {self.pack_length}"
            )
        self.pack_length = self.pack_length or (self.max_tokens if self.strategy == "none" else 4096) or 4096
        self.max_tokens = self.max_tokens or self.pack_length
        self.share_prefixes = self.per_turn if self.share_prefixes is None else self.share_prefixes
        if self.share_prefixes and self.strategy == "bucket":
            sys.exit(
                "--share_prefixes: expected False with --strategy bucket, which cuts documents that share a prefix"
            )


def packed(
    documents: datasets.Dataset, arguments: Arguments, seed: int
) -> tuple[datasets.Dataset, hfp.TokenBudget | hfp.BucketBatches]:
    """The rows to train on, and how they share micro-batches."""
    tokens, share = arguments.max_tokens, bool(arguments.share_prefixes)
    if arguments.strategy == "none":
        return documents, hfp.TokenBudget(tokens, overflow="split", share_prefixes=share, seed=seed)
    strategy = STRATEGIES[arguments.strategy](arguments.pack_length, seed=seed)
    rows = hfp.pack(documents, strategy, share_prefixes=share)
    return rows, (hfp.BucketBatches if arguments.strategy == "bucket" else hfp.TokenBudget)(tokens, seed=seed)


def load_tokenizer(model: str, config: SFTConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the end-of-sequence token and chat template that the flags name."""
    revision = (config.model_init_kwargs or {}).get("revision")
    more = {} if revision is None else {"revision": revision}
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=config.trust_remote_code, **more)
    if config.eos_token is not None:
        if config.eos_token not in tokenizer.get_vocab():
            sys.exit(f"--eos_token: expected a token of {model!r}, got {config.eos_token!r}")
        tokenizer.eos_token = config.eos_token
    if config.chat_template_path is not None:
        file = Path(config.chat_template_path)
        if not (file.is_file() and file.suffix in TEMPLATES):
            sys.exit(f"--chat_template_path: expected a file ending in {' or '.join(TEMPLATES)}, got {str(file)!r}")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def documents_of(
    rows: datasets.Dataset,
    config: SFTConfig,
    given: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    per_turn: bool = False,
) -> datasets.Dataset:
    """Tokenize rows into input_ids and labels: one document for each row, or for each assistant turn of a chat."""
    train_on = what_is_trained(rows, given.get("assistant_only_loss"), config.completion_only_loss)
    options = {"remove_columns": rows.column_names, "num_proc": config.dataset_num_proc, "desc": "Tokenizing"}
    of_tokenizer: dict[str, Any] = {"tokenizer": tokenizer}
    try:
        if per_turn:
            check_turns(rows, train_on)
            return rows.map(tokenize_turns, batched=True, batch_size=CHATS_AT_ONCE, fn_kwargs=of_tokenizer, **options)
        return rows.map(tokenize, fn_kwargs=of_tokenizer | {"train_on": train_on}, **options)
    except BadRowError as error:
        hint = "; --chat_template_path takes another template" if "chat template" in str(error) else ""
        sys.exit(f"--data: {error}{hint}")


def main(flags: Sequence[str] | None = None) -> SFTTrainer:
    """Train, save the model in --output_dir, and return the trainer."""
    parser = Parser(Arguments, {} if torch.accelerator.is_available() else {"use_cpu": True, "bf16": False})
    arguments, config = parser.parse_args_and_config(flags)
    checkpoint = checkpoint_of(config)

    with config.main_process_first(desc="reading"):
        chats = read(arguments.data)
        chats_held_out = None if arguments.eval_data is None else read(arguments.eval_data, "--eval_data")
        tokenizer = load_tokenizer(arguments.model, config)
    with config.main_process_first(desc="tokenizing and packing"):
        documents = documents_of(chats, config, parser.given, tokenizer, arguments.per_turn)
        seed = config.seed if config.data_seed is None else config.data_seed
        rows, batching = packed(documents, arguments, seed)
        held_out = None
        if chats_held_out is not None:
            held_out = documents_of(chats_held_out, config, parser.given, tokenizer, arguments.per_turn)
    evaluates_at_the_end = held_out is not None and parser.given.get("do_eval") is not False
    if held_out is not None and not config.do_eval and not evaluates_at_the_end:
        sys.exit("--eval_data: expected --eval_strategy, or no --do_eval False, since nothing would be evaluated")

    if config.process_index == 0:
        labels = documents.with_format("numpy")["labels"]
        trained_tokens = sum(int((np.asarray(of_document) != IGNORED_LABEL).sum()) for of_document in labels)
        print(f"{len(documents):,} documents in {len(rows):,} rows, {trained_tokens:,} tokens to train on")
    trainer = prepare(arguments, config, tokenizer, rows, held_out, batching)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    if evaluates_at_the_end:
        trainer.log_metrics("eval", trainer.evaluate())
    return trainer


def prepare(
    arguments: Arguments,
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    batching: hfp.TokenBudget | hfp.BucketBatches,
) -> SFTTrainer:
    """Build a trainer with planned batches."""
    options = {"dtype": "float32", "trust_remote_code": config.trust_remote_code, **(config.model_init_kwargs or {})}
    options["dtype"] = getattr(torch, options["dtype"], options["dtype"])  # a dtype by its name; "auto" is not a dtype
    model = AutoModelForCausalLM.from_pretrained(arguments.model, **options)
    same_flags = SameFlags(config)
    config.model_init_kwargs = None  # the model has them, and SFTTrainer would warn
    config.assistant_only_loss, config.completion_only_loss = False, None  # the labels are masked already
    config.dataset_kwargs = {"skip_prepare_dataset": True}  # rows are ready, also those without input_ids
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[same_flags],
    )
    try:
        summary = hfp.attach(
            trainer, batching, loss=arguments.loss, match_documents_per_step=arguments.match_documents_per_step
        )
    except hfp.ModelNotSupportedError as error:
        if not arguments.share_prefixes:
            raise
        sys.exit(f"--share_prefixes: expected False with this model: {error}")
    if trainer.is_world_process_zero():
        print(summary)
    return trainer


if __name__ == "__main__":
    main()
    end_process_group()
