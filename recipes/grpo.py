"""Train with GRPOTrainer, without computing the padding of its batches. How it samples completions does not change.

    python recipes/grpo.py --data prompts.jsonl --model Qwen/Qwen3-0.6B --max_completion_length 256
    torchrun --nproc-per-node 2 recipes/grpo.py --data prompts.jsonl --model Qwen/Qwen3-0.6B --reward length:200

Rows have a `prompt`: a text, or messages. Without --data, the prompts are first lines of functions of the Python
standard library. Without --model, a small Llama from scratch is trained.

--reward says what a completion is rewarded for, with a number from 0 to 1:

    length:N       its length: 1 for N characters, less for fewer or more, 0 for none or from 2 N on
    regex:PATTERN  the share of its characters that are in matches of a regular expression
"""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
from accelerate import PartialState
from checkpoints import checkpoint_of_trainer, positive
from documents import load_tokenizer_for, read_documents
from models import load_model
from process_group import end_process_group
from trainer_flags import add_training, on_cpu, training_arguments
from trl import GRPOConfig, GRPOTrainer

import hf_packing as hfp

Reward = Callable[..., list[float]]
PROMPTS = 80
"""Number of prompts without --data."""


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a .jsonl, .json or .parquet file with prompt")
    parser.add_argument("--model", help="name or folder; default: a small Llama from scratch")
    parser.add_argument("--reward", type=reward_of, default="regex:[aeiou]+", help="default: %(default)s; see above")
    parser.add_argument("--num_generations", type=positive, default=8, help="completions of each prompt")
    parser.add_argument("--per_device_train_batch_size", type=positive, default=16, help="completions of a micro-batch")
    parser.add_argument(
        "--max_completion_length", type=positive, default=32, help="tokens of a completion; default: 32"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the distance to --model as it was")
    add_training(parser, "outputs/grpo", None, "1e-6 with --model, 1e-2 without")
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> GRPOTrainer:
    given = parse(flags)
    given.learning_rate = given.learning_rate or (1e-6 if given.model else 1e-2)
    if given.beta and not given.model:
        raise SystemExit(
            f"--beta: expected 0 without --model, of which the reference model is a copy, got {given.beta}"
        )
    checkpoint = checkpoint_of_trainer(given.output_dir, given.resume_from_checkpoint)
    with PartialState(cpu=on_cpu()).main_process_first():
        prompts = read(given.data)
        tokenizer = load_tokenizer_for(given.tokenizer or given.model, prompts, ["prompt"])
    trainer = GRPOTrainer(
        load_model(given.model, len(tokenizer)),
        reward_funcs=given.reward,
        args=GRPOConfig(
            num_generations=given.num_generations,
            per_device_train_batch_size=given.per_device_train_batch_size,
            max_completion_length=given.max_completion_length,
            temperature=given.temperature,
            beta=given.beta,
            bf16=not on_cpu(),
            **training_arguments(given) | {"logging_steps": 1},
        ),
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    trainer.accelerator.print(hfp.attach(trainer, None))
    trainer.train(resume_from_checkpoint=checkpoint)
    rewards = [logged["reward"] for logged in trainer.state.log_history if "reward" in logged]
    some = max(1, len(rewards) // 4)
    first, last = np.mean(rewards[:some]), np.mean(rewards[-some:])
    trainer.accelerator.print(f"mean reward: {first:.3f} in the first {some} steps, {last:.3f} in the last {some}")
    trainer.save_model()
    return trainer


def read(data: str | None) -> datasets.Dataset:
    rows = read_documents(data)
    if data is None:
        lines = sorted(
            {text.split("\n", 1)[0].strip() + "\n" for text in rows["text"] if text.strip().startswith("def ")}
        )
        return datasets.Dataset.from_dict({"prompt": lines}).shuffle(seed=0).select(range(PROMPTS))
    if "prompt" not in rows.column_names:
        raise SystemExit(f"--data: expected a column prompt, got {', '.join(rows.column_names)}")
    return rows.select_columns("prompt")


def reward_of(flag: str) -> Reward:
    """Return the reward function of a flag."""
    kind, _, value = flag.partition(":")
    if kind == "length" and value.isdecimal() and int(value) > 0:
        wanted = int(value)

        def length(completions: list[Any], **_: Any) -> list[float]:
            return [max(0.0, 1 - abs(len(text_of(each)) - wanted) / wanted) for each in completions]

        return length
    if kind == "regex" and value:
        try:
            pattern = re.compile(value)
        except re.error as error:
            raise argparse.ArgumentTypeError(f"expected a regular expression, got {value!r}: {error}") from None

        def regex(completions: list[Any], **_: Any) -> list[float]:
            return [share_of(pattern, text_of(each)) for each in completions]

        return regex
    raise argparse.ArgumentTypeError(f"expected length:N, with N from 1, or regex:PATTERN, got {flag!r}")


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def share_of(pattern: re.Pattern[str], text: str) -> float:
    return sum(len(match.group()) for match in pattern.finditer(text)) / max(1, len(text))


if __name__ == "__main__":
    main()
    end_process_group()
