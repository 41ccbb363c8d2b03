"""Train on documents that are longer than one process may hold, each on several processes: Trainer and a token budget.

    accelerate launch --config_file recipes/configs/cpu.yaml recipes/long_context.py --max_steps 8 --compare
    torchrun --nproc-per-node 8 recipes/long_context.py --data books.jsonl --model Qwen/Qwen3-0.6B --max_tokens 16384 \\
        --gradient_checkpointing True --bf16 True --learning_rate 1e-5

Rows have a `text`, a `prompt` and a `completion`, `messages`, or `input_ids`; 2 % of them are held out for
evaluation. A document of up to --max_tokens times --max_ranks_per_document tokens stays whole. Losses and weights are
those of one process with room for it: --compare trains once more, with every document on one process, and prints both
losses of each step. Without --data, the texts are functions of the Python standard library, some of them joined to
long ones; without --model, a small Llama is trained from scratch. The flags are those below, and those of
TrainingArguments.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import common
import datasets
import numpy as np
from common import flag
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerBase, Trainer, TrainingArguments

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = flag(None, "file, saved dataset, or name of one on the hub; see above")
    model: str | None = flag(None, "name or folder, or else a small Llama from scratch")
    tokenizer: str | None = flag(None, "name or folder, or else that of --model, or one trained on the texts")
    max_tokens: int = flag(2048, "tokens of a micro-batch on each process")
    max_ranks_per_document: int | None = flag(None, "processes that one document may be on, or else all")
    compare: bool = flag(False, "train once more, with every document on one process, and print both losses")


def main(flags: Sequence[str] | None = None) -> Trainer:
    """Train, save the model in --output_dir, and return the trainer."""
    parser = HfArgumentParser((Arguments, TrainingArguments), description=__doc__, formatter_class=common.Help)
    usual = {"learning_rate": 1e-3, "gradient_accumulation_steps": 2, "logging_steps": 1, **common.on_cpu()}
    parser.set_defaults(output_dir="outputs/long_context", **usual)
    given, args = parser.parse_args_into_dataclasses(flags)
    ranks = given.max_ranks_per_document or args.world_size
    if given.compare and args.gradient_accumulation_steps % ranks:
        accumulation = args.gradient_accumulation_steps
        raise ValueError(f"--gradient_accumulation_steps: expected n x {ranks} with --compare, got {accumulation}")
    checkpoint = common.checkpoint_of(args)
    with args.main_process_first():
        rows = common.read(given.data) if given.data else long_and_short()
        tokenizer = common.load_tokenizer(given.tokenizer or given.model, common.texts(rows))
        documents = rows if "input_ids" in rows.column_names else hfp.tokenize(rows, tokenizer)
        documents = documents.train_test_split(test_size=0.02, seed=0)

    budget = hfp.TokenBudget(given.max_tokens, max_ranks_per_document=ranks, overflow="split")
    trainer = attached(given, args, documents, tokenizer, budget)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    losses, say, held_out = losses_of(trainer), trainer.accelerator.print, trainer.evaluate()["eval_loss"]
    say(f"loss: {losses[min(losses)]:.4f} in the first step, {held_out:.4f} on held-out documents")
    if given.compare:  # with as many rows in a step
        alone = copy.copy(args)
        alone.gradient_accumulation_steps, alone.save_strategy = args.gradient_accumulation_steps // ranks, "no"
        budget = hfp.TokenBudget(given.max_tokens * ranks, overflow="split")
        other = attached(given, alone, documents, tokenizer, budget)
        other.train()
        held_out_alone = other.evaluate()["eval_loss"]
        say(f"step   loss with documents on up to {ranks} processes   on one")
        for step, loss in losses_of(other).items():
            say(f"{step:4}   {losses[step]:.6f} {loss:37.6f}")
        say(f"held out {held_out:.6f} {held_out_alone:36.6f}")
    return trainer


def attached(
    given: Arguments,
    args: TrainingArguments,
    documents: datasets.DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    budget: hfp.TokenBudget,
) -> Trainer:
    """Return a trainer of the model as it was before training, with the batches of a budget."""
    small = common.small_llama(len(tokenizer), **common.token_ids(tokenizer))
    model = common.load_model(AutoModelForCausalLM, given.model, small)
    train, test = documents["train"], documents["test"]
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    trainer.accelerator.print(hfp.attach(trainer, budget))
    return trainer


def losses_of(trainer: Trainer) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def long_and_short() -> datasets.Dataset:
    """Return functions of the standard library, a few of them joined to long texts with those that follow them."""
    texts = common.functions()["text"]
    ends = np.random.default_rng(0).choice([1, 2, 4, 20], len(texts), p=[0.7, 0.19, 0.09, 0.02]).cumsum().tolist()
    joined = ["\n".join(texts[begin:end]) for begin, end in pairwise([0, *ends]) if begin < len(texts)]
    return datasets.Dataset.from_dict({"text": joined})


if __name__ == "__main__":
    common.run(main)
