"""Train on preferences with DPOTrainer, without padding: a token budget forms batches of whole pairs.

    python recipes/dpo.py --data pairs.jsonl --model_name_or_path Qwen/Qwen3-0.6B --max_tokens 16384
    python recipes/dpo.py --data pairs.jsonl --model_name_or_path Qwen/Qwen3-0.6B --use_peft --learning_rate 1e-5
    torchrun --nproc-per-node 2 recipes/dpo.py --data pairs.jsonl --model_name_or_path Qwen/Qwen3-0.6B

Rows have a `chosen` and a `rejected` answer, and may have a `prompt`, as texts or messages. Without --data, the prompts
are the first lines of the functions of the Python standard library; the chosen answer is the rest of the function, and
the rejected one that of another. Without --model_name_or_path, a small Llama is trained from scratch. The flags are
those below, and TRL's: those of DPOConfig, and of ModelConfig for the model and LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import common
from trl import DPOConfig, DPOTrainer, ModelConfig, TrlParser, get_peft_config

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of pairs; see above")
    eval_data: str | None = common.flag(None, "pairs to evaluate on, with --eval_strategy")
    max_tokens: int = common.flag(8192, "tokens of a micro-batch on each process")
    match_documents_per_step: int | None = common.flag(None, "mean number of pairs per step")


def main(flags: Sequence[str] | None = None) -> DPOTrainer:
    parser = TrlParser((Arguments, DPOConfig, ModelConfig), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/dpo", **common.on_cpu())
    given, args, model = parser.parse_args_and_config(flags)
    checkpoint = common.checkpoint_of(args)
    with args.main_process_first():
        pairs = common.read(given.data, ("chosen", "rejected")) if given.data else common.pairs()
        eval_pairs = common.read(given.eval_data, ("chosen", "rejected"), "--eval_data") if given.eval_data else None
        name = model.model_name_or_path or common.save_small(f"{args.output_dir}/small", map(str, pairs["chosen"]))
    args.model_init_kwargs = common.loading_of(model) | (args.model_init_kwargs or {})
    trainer = DPOTrainer(
        name,
        args=args,
        train_dataset=pairs,
        eval_dataset=eval_pairs,
        peft_config=get_peft_config(model),
    )
    if eval_pairs is not None:
        kept = trainer.eval_dataset
        sizes = [len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in kept]
        long, left_out = sum(size > (args.max_length or size) for size in sizes), len(eval_pairs) - len(kept)
        trainer.accelerator.print(f"evaluation: {long:,} of {len(kept):,} pairs are truncated, {left_out:,} left out")
    budget = hfp.TokenBudget(given.max_tokens, match_documents_per_step=given.match_documents_per_step)
    trainer.accelerator.print(hfp.attach(trainer, budget))
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    common.run(main)
