"""Train a reward model with RewardTrainer, without padding: a token budget forms batches of whole pairs.

    python recipes/reward.py --data pairs.jsonl --eval_data test.jsonl --model_name_or_path Qwen/Qwen3-0.6B
    python recipes/reward.py --data pairs.jsonl --model_name_or_path Qwen/Qwen3-0.6B --use_peft --learning_rate 1e-3
    torchrun --nproc-per-node 2 recipes/reward.py --data pairs.jsonl --model_name_or_path Qwen/Qwen3-0.6B

Rows have a `chosen` and a `rejected` answer, and may have a `prompt`, as texts or messages. Without --data, the prompts
are the first lines of the functions of the Python standard library; the chosen answer is the rest of the function, and
the rejected one that of another. Without --model_name_or_path, a small Llama is trained from scratch. The flags are
those below, and TRL's: those of RewardConfig, and of ModelConfig for the model and LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import common
import numpy as np
from torch import Tensor
from trl import ModelConfig, RewardConfig, RewardTrainer, TrlParser, get_peft_config

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of pairs; see above")
    eval_data: str | None = common.flag(None, "pairs to evaluate on, or else a tenth of --data")
    max_tokens: int = common.flag(8192, "tokens of a micro-batch on each process")
    match_documents_per_step: int | None = common.flag(None, "mean number of pairs per step")


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    parser = TrlParser((Arguments, RewardConfig, ModelConfig), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/reward", lora_task_type="SEQ_CLS", **common.on_cpu())
    given, args, model = parser.parse_args_and_config(flags)
    checkpoint = common.checkpoint_of(args)
    with args.main_process_first():
        train, test = common.train_and_test(given.data, given.eval_data, ("chosen", "rejected"), common.pairs)
        name = model.model_name_or_path or common.save_small(f"{args.output_dir}/small", map(str, train["chosen"]))
    args.model_init_kwargs = common.loading_of(model) | (args.model_init_kwargs or {})
    trainer = RewardTrainer(
        name,
        args=args,
        train_dataset=train,
        eval_dataset=test,
        preprocess_logits_for_metrics=differences,
        peft_config=get_peft_config(model),
    )
    budget = hfp.TokenBudget(given.max_tokens, match_documents_per_step=given.match_documents_per_step)
    trainer.accelerator.print(hfp.attach(trainer, budget))
    trainer.train(resume_from_checkpoint=checkpoint)
    found = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")
    accuracy = float(np.mean(found.predictions > 0))
    trainer.accelerator.print(f"accuracy on {len(found.predictions):,} of {len(test):,} pairs: {accuracy:.3f}")
    trainer.save_model()
    return {**found.metrics, "eval_accuracy": accuracy}


def differences(logits: Tensor, _: Tensor | None) -> Tensor:
    """Return how much larger the reward of the chosen answer is, for each pair of a batch."""
    chosen, rejected = logits.squeeze(-1).chunk(2)
    return chosen - rejected


if __name__ == "__main__":
    common.run(main)
