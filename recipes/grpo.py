"""Train with GRPOTrainer, without computing the padding of its batches. How it samples completions does not change.

    python recipes/grpo.py --data prompts.jsonl --model_name_or_path Qwen/Qwen3-0.6B --reward length:200
    torchrun --nproc-per-node 2 recipes/grpo.py --data prompts.jsonl --model_name_or_path Qwen/Qwen3-0.6B --use_peft
    python recipes/grpo.py --max_completion_length 32 --learning_rate 1e-2 --max_steps 40    # on a CPU

Rows have a `prompt`: a text, or messages. Without --data, the prompts are first lines of functions of the Python
standard library. Without --model_name_or_path, a small Llama is trained from scratch.

--reward says what a completion is rewarded for, with a number from 0 to 1:

    length:N       its length: 1 for N characters, less for fewer or more, 0 for none or from 2 N on
    regex:PATTERN  the share of its characters that are in matches of a regular expression

The flags are those below, and TRL's: those of GRPOConfig, and of ModelConfig for the model and LoRA.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

import hf_packing as hfp


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of the prompts; see above")
    reward: str = common.flag("regex:[aeiou]+", "length:N or regex:PATTERN; see above")
    level: bool = common.flag(False, "let sampled rows change places, so that all ranks have equal work")


def main(flags: Sequence[str] | None = None) -> GRPOTrainer:
    parser = TrlParser((Arguments, GRPOConfig, ModelConfig), description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/grpo", logging_steps=1, **common.on_cpu())
    given, args, model = parser.parse_args_and_config(flags)
    reward, checkpoint = reward_of(given.reward), common.checkpoint_of(args)
    with args.main_process_first():
        prompts = common.read(given.data, ("prompt",)) if given.data else common.pairs().select(range(80))
        name = model.model_name_or_path or common.save_small(f"{args.output_dir}/small", map(str, prompts["prompt"]))
    args.model_init_kwargs = common.loading_of(model) | (args.model_init_kwargs or {})
    trainer = GRPOTrainer(
        name,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        peft_config=get_peft_config(model),
    )
    trainer.accelerator.print(hfp.attach(trainer, None, level=given.level))
    trainer.train(resume_from_checkpoint=checkpoint)
    rewards = [logged["reward"] for logged in trainer.state.log_history if "reward" in logged]
    some, first, last = common.first_and_last(rewards)
    trainer.accelerator.print(f"mean reward: {first:.3f} in the first {some} steps, {last:.3f} in the last {some}")
    trainer.save_model()
    return trainer


def reward_of(named: str) -> Callable[..., list[float]]:
    """Return the reward function that --reward names."""
    kind, _, value = named.partition(":")
    if kind == "length" and value.isdecimal() and int(value) > 0:

        def score(text: str) -> float:
            return max(0.0, 1 - abs(len(text) - int(value)) / int(value))

    elif kind == "regex" and value:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"--reward: expected a regular expression, got {value!r}: {error}") from None

        def score(text: str) -> float:
            return sum(len(found[0]) for found in re.finditer(value, text)) / max(1, len(text))

    else:
        raise ValueError(f"--reward: expected length:N, with N from 1, or regex:PATTERN, got {named!r}")

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [score(each if isinstance(each, str) else each[-1]["content"]) for each in completions]

    return reward


if __name__ == "__main__":
    common.run(main)
