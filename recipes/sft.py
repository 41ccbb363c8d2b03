"""Supervised fine-tuning with SFTTrainer, without padding: on chats, prompts with completions, or texts.

    python recipes/sft.py --data chat.jsonl --model_name_or_path Qwen/Qwen3-0.6B --output_dir outputs/sft
    python recipes/sft.py --data chat.jsonl --model_name_or_path Qwen/Qwen3-0.6B --output_dir outputs/sft \
        --resume_from_checkpoint last
    accelerate launch --config_file recipes/configs/ddp.yaml recipes/sft.py --data chat.jsonl \
        --model_name_or_path Qwen/Qwen3-0.6B --use_peft --lora_r 32 --learning_rate 2e-4

Rows have `messages`, `prompt` and `completion`, `text`, or tokens, also those of `hf-packing pack`. Chats train on the
assistant's turns, prompts on completions; see --train_on. All flags of TRL's SFTConfig and ModelConfig work, on the
command line or in a YAML file (--config), but those without effect, which are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import datasets
from accelerate import PartialState
from common import flag
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

import hf_packing as hfp

STRATEGIES = {"best_fit": hfp.BestFit, "optimal": hfp.Optimal, "multipack": hfp.Multipack, "first_come": hfp.FirstCome}
TRAIN_ON = ("assistant", "completion", "all")
WITHOUT_EFFECT = (
    *("per_device_train_batch_size", "dataloader_drop_last", "length_column_name", "shuffle_dataset", "dataset_kwargs"),
    *("truncation_mode", "packing", "packing_strategy", "padding_free", "pad_to_multiple_of"),
)
"""Flags about what this recipe decides: which rows share a batch, and how long rows are."""


@dataclass
class Arguments:
    """The recipe's own flags."""

    data: str = field(metadata={"help": "file with the rows, folder of a saved dataset, or name of one on the hub"})
    eval_data: str | None = flag(None, "rows to evaluate on at the end, and as --eval_strategy says")
    train_on: str | None = flag(
        None, "default: the assistant's turns of chats, completions of prompts, all of texts", choices=[*TRAIN_ON]
    )
    max_tokens: int = flag(4096, "tokens of a micro-batch, on each process; longer documents are split")
    strategy: str = flag(
        "none", "how to pack once, before training; none: anew every epoch", choices=["none", *STRATEGIES]
    )
    loss: str = flag("token", "mean over tokens, or over documents", choices=["token", "sequence"])
    per_turn: bool = flag(False, "one document for each assistant turn, as seen at inference")
    share_prefixes: bool | None = flag(None, "compute shared beginnings once; None: if --per_turn is given")
    max_ranks_per_document: int = flag(1, "processes that one document may be on, if it is longer than max_tokens")
    match_documents_per_step: int | None = flag(None, "documents per step, to keep an unpacked run's schedule")


def main(flags: Sequence[str] | None = None) -> SFTTrainer:
    """Train, save the model in --output_dir, and return the trainer."""
    usage = "sft.py --data DATA --model_name_or_path MODEL [--config FILE.yaml] [flags]"
    options: dict[str, Any] = {"usage": usage, "formatter_class": common.Help, "allow_abbrev": False}
    parser = TrlParser((Arguments, SFTConfig, ModelConfig), **options)
    parser.set_defaults(output_dir="outputs/sft", max_length=None, pad_to_multiple_of=None, **common.on_cpu())
    usual = {name: parser.get_default(name) for name in WITHOUT_EFFECT}
    given, args, model = parser.parse_args_and_config(flags, fail_with_unknown_args=True)
    for name, value in usual.items():
        if getattr(args, name) != value:
            decided = "--max_tokens and --strategy decide that"
            raise ValueError(f"--{name}: expected none, since {decided}, got {getattr(args, name)!r}")
    if args.eval_strategy != "no" and not given.eval_data:
        raise ValueError(f"--eval_data: expected rows, since --eval_strategy is {args.eval_strategy.value}, got none")
    share = given.per_turn if given.share_prefixes is None else given.share_prefixes
    checkpoint = common.checkpoint_of(args)
    tokenizer = load_tokenizer(model, args)
    with args.main_process_first(desc="tokenizing"):
        documents = tokenize(given.data, "--data", tokenizer, given, args)
        held_out = tokenize(given.eval_data, "--eval_data", tokenizer, given, args) if given.eval_data else None
        seed = args.seed if args.data_seed is None else args.data_seed
        rows = documents
        if given.strategy != "none":
            if args.max_length is not None:
                raise ValueError(f"--max_length: expected none with --strategy, got {args.max_length}")
            strategy = STRATEGIES[given.strategy](given.max_tokens, seed=seed)
            rows = hfp.pack(documents, strategy, share_prefixes=share)
    share = share and rows is documents
    how = {"share_prefixes": share, "max_ranks_per_document": given.max_ranks_per_document, "seed": seed}
    overflow = "split" if args.max_length is None else "truncate"  # as TRL does
    batching = hfp.TokenBudget(given.max_tokens, max_length=args.max_length, overflow=overflow, **how)
    args.max_length = None  # TRL counts nothing

    args.model_init_kwargs = common.loading_of(model) | (args.model_init_kwargs or {})
    args.assistant_only_loss, args.completion_only_loss = False, None  # the labels say it already
    args.dataset_kwargs = {"skip_prepare_dataset": True}  # rows are ready, also those without input_ids
    trainer = SFTTrainer(
        model.model_name_or_path,
        args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    # ZeRO-3 learns from the first calls in which order modules run, and TRL's loss does not run the output layer
    prove = "model" if is_deepspeed_zero3_enabled() else "first batch"
    how = {"loss": given.loss, "match_documents_per_step": given.match_documents_per_step, "prove": prove}
    summary = hfp.attach(trainer, batching, **how)
    trainer.accelerator.print(summary)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    if held_out is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    return trainer


def load_tokenizer(model: ModelConfig, args: SFTConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the end-of-sequence token and the chat template that the flags name."""
    if model.model_name_or_path is None:
        raise ValueError("--model_name_or_path: expected a name or folder of a causal language model, got none")
    options = {"revision": model.model_revision, "trust_remote_code": args.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, **options)
    tokenizer.eos_token = args.eos_token or tokenizer.eos_token
    tokenizer.pad_token = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
    if args.chat_template_path:
        with open(args.chat_template_path, encoding="utf-8") as file:
            tokenizer.chat_template = file.read()
    return tokenizer


def tokenize(data: str, named_by: str, tokenizer: Any, given: Arguments, args: SFTConfig) -> datasets.Dataset:
    """Return documents with input_ids and labels."""
    rows = common.read(data, flag=named_by)
    of_trl = {True: "completion", False: "all", None: None}[args.completion_only_loss]
    train_on = given.train_on or ("assistant" if args.assistant_only_loss else of_trl)
    has_tokens = not {"input_ids", "tree_input_ids"}.isdisjoint(rows.column_names)
    fitting = (None, "assistant") if given.per_turn else (None,) if has_tokens else (None, *TRAIN_ON)
    if train_on not in fitting or (has_tokens and given.per_turn):
        raise ValueError(f"--train_on: expected none beside tokens or --per_turn, not both, got {train_on!r}")
    if has_tokens:
        return rows
    if not tokenizer.chat_template and not isinstance(rows[0].get("prompt", rows[0].get("text")), str):
        PartialState().print("The tokenizer has no chat template: ChatML is used, and saved with the model")
        tokenizer.chat_template = common.CHATML
    if given.per_turn:
        of_map = {"batched": True, "fn_kwargs": {"tokenizer": tokenizer}, "remove_columns": rows.column_names}
        return rows.map(hfp.branches, batch_size=100, num_proc=args.dataset_num_proc, desc="Tokenizing", **of_map)
    text_field = None if args.dataset_text_field == "text" else args.dataset_text_field
    return hfp.tokenize(rows, tokenizer, train_on=train_on, text_field=text_field, num_proc=args.dataset_num_proc)


if __name__ == "__main__":
    common.run(main)
